"""A program of one rank in somebody's process leaves the handlers of signals as they were, however it ends."""

import signal
from collections.abc import Iterator

import pytest
import torch
from our_logger import logger_as_it_was

from spmd_worker.base.config.schema import ModelOptions, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends import rank_program
from spmd_worker.ranks.environment import RankEnvironment

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture(autouse=True)
def _process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rank_program, "_share_the_node", lambda *arguments: None)
    monkeypatch.setattr(rank_program, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(rank_program, "outlive_parent", lambda: None)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    with logger_as_it_was():
        yield
    signal.set_wakeup_fd(descriptor)
    for number, handler in before.items():
        signal.signal(number, handler)


OUT_OF_MEMORY = (
    MemoryError("Unable to allocate 192. MiB"),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("can't start new thread"),
)


@pytest.mark.parametrize(
    "error", [None, ConfigError("seed=x"), OSError("no disk"), ZeroDivisionError("boom"), *OUT_OF_MEMORY]
)
def test_single_rank_leaves_signal_handlers_as_they_were(error: Exception | None, capsys: pytest.CaptureFixture[str]):
    """After an error they stayed: a signal, later, ended the program of whoever had called, for a job that was over."""
    seen = []

    def work(watchdog: object) -> None:
        seen.append([signal.getsignal(number) for number in SIGNALS])
        if error is not None:
            raise error

    def run() -> int:
        config = RunConfig(model=ModelOptions(path="none"), device="cpu")
        return rank_program.run_rank(config, RankEnvironment(), None, work)

    before = [signal.getsignal(number) for number in SIGNALS]
    if isinstance(error, ZeroDivisionError):
        with pytest.raises(ZeroDivisionError, match="boom"):
            run()
    else:
        assert run() == (0 if error is None else 1)
        # Regression: 70 lines of a traceback.
        words = f"error: out of memory ({error}): lower cache.num_blocks, " if error in OUT_OF_MEMORY else ""
        assert words in capsys.readouterr().err
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert all(ours is not former for ours, former in zip(seen[0], before, strict=True))
    assert signal.set_wakeup_fd(-1) == -1
