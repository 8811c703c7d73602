"""Torch's threads beside the kernels': one in a step, asleep in ranks of ours, and the caller's own elsewhere."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pytest
import torch

import launch
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.frontends import rank_program
from spmd_worker.native import threads
from spmd_worker.native.threads import (
    multi_threaded_torch,
    num_threads,
    single_threaded_torch,
    torch_threads_are_passive,
    use_single_threaded_torch,
)
from spmd_worker.ranks import cores
from spmd_worker.ranks.environment import RankEnvironment


@pytest.fixture
def two() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_a_thread(action: Callable[[], int]) -> int:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(action()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.skipif(not threads._openmp_libraries(), reason="torch has another OpenMP than GNU's")
def test_torch_is_single_threaded_while_kernels_are_not(two):
    in_a_thread(torch.get_num_threads)  # the first question of a thread is answered with what was set for all
    with contextlib.suppress(KeyError), single_threaded_torch():
        assert (torch.get_num_threads(), num_threads()) == (1, 2)
        with single_threaded_torch():
            assert (torch.get_num_threads(), num_threads()) == (1, 2)
        assert (torch.get_num_threads(), num_threads()) == (1, 2)
        with multi_threaded_torch():
            assert (torch.get_num_threads(), num_threads()) == (2, 2)
        assert (torch.get_num_threads(), num_threads()) == (1, 2)
        # Threads of the program's own that begin meanwhile have theirs.
        assert in_a_thread(torch.get_num_threads) == 2
        assert in_a_thread(num_threads) == 2
        raise KeyError("w")
    assert (torch.get_num_threads(), num_threads()) == (2, 2)
    with multi_threaded_torch():
        assert (torch.get_num_threads(), num_threads()) == (2, 2)


@pytest.mark.skipif(not threads._openmp_libraries(), reason="torch has another OpenMP than GNU's")
def test_only_pool_threads_are_single_threaded(two):
    with ThreadPoolExecutor(1, initializer=use_single_threaded_torch) as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
        pool.submit(torch.ones(1 << 17).sum).result()
        assert pool.submit(torch.get_num_threads).result() == 1
    assert torch.get_num_threads() == 2
    assert in_a_thread(torch.get_num_threads) == 2


def test_torch_threads_are_passive_by_environment(monkeypatch: pytest.MonkeyPatch):
    for name in cores._WAITING_VARIABLES:
        # What is not there when it is deleted would not be set back, to nothing, at the end.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    rank_program.prepare_torch()
    assert not torch_threads_are_passive()  # too late
    monkeypatch.delitem(sys.modules, "torch")
    rank_program.prepare_torch()
    assert torch_threads_are_passive()
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    rank_program.prepare_torch()
    assert not torch_threads_are_passive()


def test_job_configures_torch_before_reading_the_model(monkeypatch: pytest.MonkeyPatch):
    """A tokenizer that has to be converted imports torch, which then was not told any more."""
    order: list[str] = []

    def read(*_: object) -> NoReturn:
        order.append("read")
        raise KeyError

    monkeypatch.setattr(launch, "configure_logging", lambda *_: None)
    monkeypatch.setattr(launch, "find_model", lambda _: None)
    monkeypatch.setattr(launch, "prepare_torch", lambda: order.append("told"))
    monkeypatch.setattr(launch, "prefault_cache", read)
    with pytest.raises(KeyError):
        launch._run(RunConfig(), RankEnvironment())
    assert order == ["told", "read"]
