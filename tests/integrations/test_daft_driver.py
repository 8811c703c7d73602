"""Daft's driver, which asks for the sizes of vectors: it may lack the device and the packages of the workers.

Modules with the names that the provider uses stand in for Daft; test_daft.py is about Daft itself.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pooling_models import pooling_folder

from spmd_worker.base.errors import ConfigError

MODULE = "spmd_worker.integrations.daft_provider"


@pytest.fixture
def provider_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    names = ("Prompter", "PrompterDescriptor", "TextEmbedder", "TextEmbedderDescriptor", "Provider", "UDFOptions")
    parts = {name: type(name, (), {}) for name in names} | {"EmbeddingDimensions": lambda size, dtype: size}
    for name in ("daft", "daft.ai", "daft.ai.protocols", "daft.ai.provider", "daft.ai.typing"):
        module = ModuleType(name)
        vars(module).update(parts, DataType=SimpleNamespace(float32=lambda: "float32"))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE).SpmdProvider
    del sys.modules[MODULE]


@pytest.mark.parametrize("options", [{}, {"connector": "only_on_workers:connect"}, {"device": "cuda"}], ids=str)
def test_dimensions_need_nothing_of_the_workers(provider_class: Any, options: dict[str, Any]):
    folder = str(pooling_folder("last"))
    plain = provider_class(dtype="float32").get_text_embedder(folder)
    embedder = provider_class(dtype="float32", **options).get_text_embedder(folder)
    assert embedder.get_dimensions() == plain.get_dimensions() > 0
    assert provider_class(**options).get_text_embedder(folder, dimensions=3).get_dimensions() == 3
    if "connector" in options:
        with pytest.raises(ConfigError, match="only_on_workers"):
            embedder.instantiate()


def test_missing_model_is_an_error(provider_class: Any, tmp_path: Any):
    with pytest.raises(ValueError, match="is not a folder"):
        provider_class().get_text_embedder(str(tmp_path / "none")).get_dimensions()
