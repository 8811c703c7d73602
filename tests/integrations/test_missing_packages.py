"""Modules for other tools, without the tool."""

import sys
from importlib import import_module

import pytest


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
def test_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, module: str, package: str, extra: str):
    name = f"spmd_worker.integrations.{module}"
    for each in [each for each in sys.modules if each == name or each.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"^{package} is not installed: pip install 'spmd-worker\[{extra}\]'$"
    ):
        import_module(name)
