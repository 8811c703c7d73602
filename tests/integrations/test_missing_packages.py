"""Modules for other tools, without the tool."""

import sys
from importlib import import_module
from pathlib import Path

import pytest


class Absent:
    """A finder for which a package is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        del path, target
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


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
        patch.setattr(sys, "meta_path", [Absent(package), *sys.meta_path])
        with pytest.raises(
            ModuleNotFoundError, match=rf"^{package} is not installed: pip install 'spmd-worker\[{extra}\]'$"
        ):
            import_module(name)
    # A package that is there without what it needs.
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("import absent_dependency\n")
    words = r"cannot be imported \(No module named 'absent_dependency'\)"
    with pytest.raises(ModuleNotFoundError, match=rf"^{package} {words}: pip install 'spmd-worker\[{extra}\]'$"):
        import_module(name)
