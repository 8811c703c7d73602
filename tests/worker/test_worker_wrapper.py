"""One worker behind names: which entry of a list is its own, which names it answers to, what a failure says."""

import logging
import os
from pathlib import Path

import pytest
from plain_worker import FakeWorker

from spmd_worker.base.errors import ConfigError
from spmd_worker.executor.executor import Executor
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.worker.worker_base import WorkerBase
from spmd_worker.worker.worker_wrapper import WorkerWrapper, resolve_class

FAKE = "plain_worker.FakeWorker"


def wrapper_of(rpc_rank: int = 0, global_rank: int | None = None, **kwargs: str) -> tuple[WorkerWrapper, FakeWorker]:
    wrapper = WorkerWrapper(rpc_rank, global_rank)
    wrapper.init_worker([{"worker_cls": FAKE, **kwargs}] * (rpc_rank + 1))
    assert isinstance(wrapper.worker, FakeWorker)
    return wrapper, wrapper.worker


def test_rpc_rank_and_global_rank_are_separate():
    wrapper = WorkerWrapper(rpc_rank=0, global_rank=5)
    assert (wrapper.rpc_rank, wrapper.global_rank) == (0, 5)
    assert WorkerWrapper(rpc_rank=3).global_rank == 3


def test_adjust_rank_keeps_a_different_global_rank():
    wrapper = WorkerWrapper(rpc_rank=3)
    wrapper.adjust_rank({3: 2})
    assert (wrapper.rpc_rank, wrapper.global_rank) == (2, 2)
    wrapper = WorkerWrapper(rpc_rank=2, global_rank=6)
    wrapper.adjust_rank({0: 1, 2: 0})
    assert (wrapper.rpc_rank, wrapper.global_rank) == (0, 6)
    wrapper.adjust_rank({4: 1})
    assert (wrapper.rpc_rank, wrapper.global_rank) == (0, 6)


def test_init_worker_uses_entry_of_rpc_rank():
    wrapper = WorkerWrapper(rpc_rank=1, global_rank=0)
    entries = [{"worker_cls": FAKE, "name": name} for name in ("first", "second", "third")]
    wrapper.init_worker(entries)
    assert isinstance(wrapper.worker, FakeWorker)
    assert wrapper.worker.name == "second"
    assert entries[1] == {"worker_cls": FAKE, "name": "second"}


def test_initialize_from_config_uses_entry_of_global_rank():
    wrapper, worker = wrapper_of(rpc_rank=0, global_rank=2)
    wrapper.initialize_from_config([(10, 0), (20, 1), (30, 2)])
    assert worker.calls == [("initialize_cache", 30, 2)]


def test_update_environment_variables_applies_one_entry(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {"KEPT": "as it was"})
    WorkerWrapper(rpc_rank=1).update_environment_variables([{"MINE": "no"}, {"MINE": "yes"}])
    assert os.environ == {"KEPT": "as it was", "MINE": "yes"}


def test_methods_are_called_by_name_with_their_arguments():
    wrapper, worker = wrapper_of()
    assert wrapper.execute_method("add", 1, other=2) == 3
    wrapper.execute_method("load_model")
    assert worker.calls == [("load_model",)]


@pytest.mark.parametrize("name", ["no_such_method", "_note", "__init__"])
def test_unknown_method_error_names_rank_and_method(name: str):
    wrapper, worker = wrapper_of(global_rank=4)
    with pytest.raises(AttributeError, match=rf"^rank 4: .*no method '{name}'$"):
        wrapper.execute_method(name)
    assert worker.calls == []


def test_calling_before_init_worker_is_the_programmers_mistake():
    with pytest.raises(AssertionError, match="init_worker comes first"):
        WorkerWrapper().execute_method("load_model")


@pytest.mark.parametrize(
    ("method", "is_heard"), [("sample_tokens", True), ("execute_model", True), ("load_model", False)]
)
def test_step_failure_is_logged_before_raise(method: str, is_heard: bool, caplog: pytest.LogCaptureFixture):
    wrapper, _ = wrapper_of(global_rank=3, fails=method)
    arguments = (None,) if method == "execute_model" else ()
    with caplog.at_level(logging.WARNING, "spmd_worker"), pytest.raises(ValueError, match=f"{method} went wrong"):
        wrapper.execute_method(method, *arguments)
    assert (f"rank 3 raised ValueError in {method}" in caplog.text) == is_heard


def test_a_class_is_found_by_its_qualified_name():
    assert resolve_class("spmd_worker.worker.worker_base.WorkerBase", WorkerBase) is WorkerBase


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FakeWorker", "'FakeWorker' is not a qualified name: write it as package.module.Class"),
        (
            "no_such_package.Worker",
            "'no_such_package.Worker' cannot be imported: No module named 'no_such_package': install it, or add its "
            "folder to PYTHONPATH",
        ),
        (
            "plain_worker.Missing",
            "'plain_worker.Missing' is not a subclass of spmd_worker.worker.worker_base.WorkerBase",
        ),
        ("os.path", "'os.path' is not a subclass of spmd_worker.worker.worker_base.WorkerBase"),
        ("builtins.dict", "'builtins.dict' is not a subclass of spmd_worker.worker.worker_base.WorkerBase"),
    ],
)
def test_invalid_worker_class_error_has_reason(name: str, message: str):
    with pytest.raises(ValueError) as refused:
        resolve_class(name, WorkerBase)
    assert str(refused.value) == message


def test_worker_class_in_broken_module_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Only a missing module was: an error in the user's own came without the key."""
    (tmp_path / "broken_workers.py").write_text("import os\nos.no_such_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = "'broken_workers.Worker' cannot be imported: AttributeError: .*no_such_name.*: python -c 'import broken_wo"
    with pytest.raises(ValueError, match=words):
        resolve_class("broken_workers.Worker", WorkerBase)
    with pytest.raises(ConfigError, match=rf"executor\.backend: {words}"):
        Executor.get_class("broken_workers.Worker", RankEnvironment())
