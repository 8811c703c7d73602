"""Modules for other tools, without the tool."""

import re
import runpy
import sys
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest
from absent_package import remove_package


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("lm_eval_model", "lm_eval", "lm-eval"),
        ("inspect_ai_model", "inspect_ai", "inspect-ai"),
        ("mteb_model", "mteb", "mteb"),
        ("ray_data", "ray", "ray"),
        ("daft_provider", "daft", "daft"),
        ("datatrove_server", "datatrove", "datatrove"),
        ("datatrove_step", "datatrove", "datatrove"),
    ],
)
def test_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, package: str, extra: str
):
    name = f"spmd_worker.integrations.{module}"
    for each in [each for each in sys.modules if each == name or each.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, each)
    with monkeypatch.context() as patch:
        remove_package(patch, package)
        with pytest.raises(
            ModuleNotFoundError, match=rf"^{package} is not installed: pip install 'spmd-worker\[{extra}\]'$"
        ):
            import_module(name)
    # A package that is there without what it needs.
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("import absent_dependency\n")
    words = r"is installed but cannot be imported \(ModuleNotFoundError: No module named 'absent_dependency'\)"
    way_out = rf"pip install 'spmd-worker\[{extra}\]' installs what it lacks, pip install --force-reinstall --no-deps "
    with pytest.raises(ModuleNotFoundError, match=rf"^{package} {words}: {way_out}{package} repairs it$"):
        import_module(name)
    # One with a broken library, or of a version without the names.
    for each in [each for each in sys.modules if each.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, each)
    (tmp_path / package / "__init__.py").write_text("raise ImportError('libm9.so: cannot open shared object file')\n")
    invalidate_caches()
    words = r"is installed but cannot be imported \(ImportError: libm9\.so: cannot open shared object file\)"
    with pytest.raises(ImportError, match=rf"^{package} {words}: {way_out}{package} repairs it$") as broken:
        import_module(name)
    assert not isinstance(broken.value, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("trl", "TRL is not installed: pip install 'trl==1.16.*'"),
        ("verl", "verl is not installed: pip install --no-deps 'verl==0.9.*'"),
    ],
)
def test_command_without_its_package_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, package: str, words: str):
    remove_package(monkeypatch, package)
    # An earlier test may have imported it, which runpy would warn of.
    monkeypatch.delitem(sys.modules, f"spmd_worker.integrations.{package}", raising=False)
    with pytest.raises(SystemExit, match=rf"^error: {re.escape(words)}$"):
        runpy.run_module(f"spmd_worker.integrations.{package}", run_name="__main__")
