"""Errors of optional packages: missing, broken, without a package that they need."""

from importlib import import_module
from pathlib import Path

import pytest

from spmd_worker.base.config.extras import package_fault, raise_missing_package
from spmd_worker.base.errors import ConfigError

INSTEAD = "pip install 'spmd-worker[zstd]' installs what it lacks, pip install --force-reinstall --no-deps some-codec"


def error_of(module: str) -> ImportError:
    with pytest.raises(ImportError) as raised:
        import_module(module)
    return raised.value


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('libm9.so: no such file')", "ImportError: libm9.so: no such file"),
        ("from json import absent", "ImportError: cannot import name 'absent' from 'json'"),
        ("import absent_dependency", "ModuleNotFoundError: No module named 'absent_dependency'"),
        ("from some_codec import inner", "ImportError: cannot import name 'inner'"),
        ("import some_codec.inner", "ModuleNotFoundError: No module named 'some_codec.inner'"),
    ],
)
def test_broken_package_is_installed_with_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
):
    (tmp_path / "some_codec.py").write_text(f"{source}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as raised:
        raise_missing_package("some-codec", "zstd", "job.input=a.zst", error_of("some_codec"))
    text = str(raised.value)
    assert text.startswith(f"job.input=a.zst needs some-codec, which is installed but cannot be imported ({reason}")
    assert text.endswith(f"): {INSTEAD} repairs it")


def test_missing_package_names_its_extra():
    fault = package_fault("some-codec", "zstd", error_of("some_codec"))
    assert str(fault) == "is not installed: pip install 'spmd-worker[zstd]'"
    assert (
        str(package_fault("Codec", None, error_of("some_codec"), "some_codec")) == "is not installed: pip install Codec"
    )


def test_cause_of_an_error_counts():
    """fsspec raises a sentence of its own from the error of an import."""
    error = ImportError("Install some-codec to read this")
    error.__cause__ = error_of("some_codec")
    assert package_fault("some-codec", "zstd", error).reason == "is not installed"
