"""Whose methods a worker has: another class by name, an extension beside its own, and plug-ins before either."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from plain_worker import FakeWorker
from ranks import REPOSITORY

from spmd_worker.base.errors import ConfigError, PluginError
from spmd_worker.worker.worker import Worker
from spmd_worker.worker.worker_wrapper import WorkerWrapper, extend_class, load_plugins

FAKE = "plain_worker.FakeWorker"
HERE = "test_worker_extension"


class Extension:
    """What a trainer adds."""

    def greet(self, whom: str) -> str:
        return f"{self.name} greets {whom}"  # type: ignore[attr-defined]  # the worker's


class CallsTheWorker:
    def load_twice(self) -> None:
        self.load_model()  # type: ignore[attr-defined]  # the worker's
        self.load_model()  # type: ignore[attr-defined]  # the worker's


class TakesAMethod:
    def load_model(self) -> None:
        raise AssertionError("this must never run")


class TakesAnAttribute:
    calls = "a list in the worker"


class TakesTwo(TakesAMethod):
    def add(self) -> None: ...


class TakesAnEvent:
    def commit_sleep(self, staged: object) -> None:
        raise AssertionError("this must never run")


class HasAConstructor:
    def __init__(self) -> None:
        self.table = {}


def worker_of(extension: str | None, worker_cls: str = FAKE) -> WorkerWrapper:
    wrapper = WorkerWrapper()
    wrapper.init_worker([{"worker_cls": worker_cls, "worker_extension_cls": extension, "name": "fake"}])
    return wrapper


def test_extension_methods_get_the_worker_as_self():
    wrapper = worker_of(f"{HERE}.Extension")
    assert wrapper.execute_method("greet", "you") == "fake greets you"
    assert wrapper.execute_method("add", 1) == 1
    wrapper = worker_of(f"{HERE}.CallsTheWorker")
    wrapper.execute_method("load_twice")
    assert isinstance(wrapper.worker, FakeWorker)
    assert wrapper.worker.calls == [("load_model",), ("load_model",)]


def test_the_workers_own_class_stays_as_it_is():
    worker_of(f"{HERE}.Extension")
    assert not hasattr(FakeWorker, "greet")
    assert not hasattr(worker_of(None).worker, "greet")


@pytest.mark.parametrize(
    ("extension", "names"),
    [("TakesAMethod", "load_model"), ("TakesAnAttribute", "calls"), ("TakesTwo", "add, load_model")],
)
def test_extension_with_colliding_names_is_rejected(extension: str, names: str):
    with pytest.raises(ConfigError) as refused:
        worker_of(f"{HERE}.{extension}")
    assert str(refused.value) == (
        f"executor.worker_extension_cls: {HERE}.{extension} and plain_worker.FakeWorker both have {names}: "
        f"rename the extension's"
    )


def test_extension_with_handlers_event_is_rejected():
    with pytest.raises(ConfigError, match=r"TakesAnEvent .*\.Worker both .*commit_sleep"):
        extend_class(Worker, TakesAnEvent)


def test_extension_with_constructor_is_rejected():
    with pytest.raises(ConfigError, match=rf"{HERE}\.HasAConstructor .*__init__, .*never"):
        extend_class(FakeWorker, HasAConstructor)


@pytest.mark.parametrize(
    ("key", "name", "reason"),
    [
        ("worker_cls", "Worker", "'Worker' is not a qualified name: write it as package.module.Class"),
        ("worker_cls", "builtins.dict", "'builtins.dict' is not a subclass of spmd_worker.worker.worker_base"),
        ("worker_extension_cls", "no_such.Thing", "'no_such.Thing' cannot be imported: No module named 'no_such'"),
        ("worker_extension_cls", f"{HERE}.Missing", f"'{HERE}.Missing' is not a subclass of builtins.object"),
    ],
)
def test_invalid_class_error_names_its_key(key: str, name: str, reason: str):
    with pytest.raises(ConfigError) as refused:
        WorkerWrapper().init_worker([{"worker_cls": FAKE, key: name}])
    assert str(refused.value).startswith(f"executor.{key}: {reason}")


def test_no_class_is_the_default_class():
    with pytest.raises(TypeError, match=r"Worker\.__init__\(\) missing 2 "):
        WorkerWrapper().init_worker([{"worker_cls": None}])


def test_the_wrapper_imports_no_torch():
    command = "import spmd_worker.worker.worker_wrapper, sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=240, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def _plugins_anew() -> Iterator[None]:
    load_plugins.cache_clear()
    yield
    load_plugins.cache_clear()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entries: dict[str, str], source: str) -> None:
    """A distribution as pip would leave it, in a folder that is on the path."""
    information = folder / "our_plugins-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: our-plugins\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (information / "entry_points.txt").write_text("\n".join(["[spmd_worker.plugins]", *lines, ""]))
    (folder / "our_plugins.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "our_plugins", raising=False)


PLUGINS = """
calls = []

def first():
    calls.append("first")

def second():
    calls.append("second")

def broken():
    raise OSError("no licence")
"""


@pytest.mark.usefixtures("_plugins_anew")
def test_plug_ins_run_once_in_name_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, monkeypatch, {"b": "our_plugins:second", "a": "our_plugins:first"}, PLUGINS)
    worker_of(None)
    worker_of(None)
    assert sys.modules["our_plugins"].calls == ["first", "second"]


@pytest.mark.usefixtures("_plugins_anew")
def test_plug_in_can_provide_the_worker_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Plug-ins come first, so a worker class may be one that a plug-in makes importable."""
    source = "import sys, plain_worker\n\ndef register():\n    sys.modules['made_by_plug_in'] = plain_worker\n"
    install(tmp_path, monkeypatch, {"maker": "our_plugins:register"}, source)
    monkeypatch.delitem(sys.modules, "made_by_plug_in", raising=False)
    assert isinstance(worker_of(None, "made_by_plug_in.FakeWorker").worker, FakeWorker)


@pytest.mark.usefixtures("_plugins_anew")
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("our_plugins:broken", "OSError: no licence"),
        ("our_plugins:missing", "AttributeError: module 'our_plugins' has no attribute 'missing'"),
        ("no_such_module:function", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("our_plugins:calls", "TypeError: 'list' object is not callable"),
    ],
)
def test_failed_plug_in_is_named_each_time(value: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, monkeypatch, {"broken one": value}, PLUGINS)
    for _ in range(2):
        with pytest.raises(PluginError) as raised:
            worker_of(None)
        assert str(raised.value) == f"plug-in 'broken one' ({value}) failed: {reason}"
