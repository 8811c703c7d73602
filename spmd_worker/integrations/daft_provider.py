"""Daft on this runtime: a provider for `daft.functions.prompt` and `embed_text`, with an engine in Daft's own process.

    import daft
    from daft.functions import prompt
    from spmd_worker.integrations.daft_provider import SpmdProvider

    provider = SpmdProvider(dtype="bfloat16")   # arguments are LLM's
    data = data.with_column("answer", prompt(daft.col("question"), provider=provider, model="MODEL", max_tokens=64))

Prompts are chats, answered as a server's: Daft gives a prompt no key, so its random stream has the name of its content.
Equal prompts have equal answers, in any order and partition; a `seed` gives others.
"""

from dataclasses import dataclass
from typing import Any, Final

from spmd_worker.base.config.extras import package_error

try:
    import daft
    from daft.ai.protocols import Prompter, PrompterDescriptor, TextEmbedder, TextEmbedderDescriptor
    from daft.ai.provider import Provider
    from daft.ai.typing import EmbeddingDimensions, UDFOptions
except ImportError as error:
    raise package_error("daft", "daft", error) from error

from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.engine_args import run_config
from spmd_worker.integrations.column_models import ColumnModel, Embedder, Prompts
from spmd_worker.resolved import read_pooling

_UDF_KEYS: Final = ("concurrency", "num_gpus", "max_retries", "on_error", "batch_size")


class SpmdProvider(Provider):  # type: ignore[misc]  # daft is no dependency
    """`options` are `LLM`'s. Those of `prompt` are keys of a chat's body; `concurrency` (engines), `num_gpus` of each,
    `max_retries`, `on_error` ("raise", "log", "ignore": null) and `batch_size` are Daft's.
    """

    def __init__(self, name: str = "spmd_worker", **options: Any) -> None:
        self._name, self._options = name, options

    @property
    def name(self) -> str:
        return self._name

    def get_prompter(
        self,
        model: str | None = None,
        return_format: Any | None = None,
        system_message: str | None = None,
        **options: Any,
    ) -> "SpmdPrompterDescriptor":
        """Chats with the model. `return_format`, a class of pydantic, is the schema of answers, which are parsed."""
        udf, body = _split(options)
        if return_format is not None:
            schema = {"name": return_format.__name__, "schema": return_format.model_json_schema(), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return SpmdPrompterDescriptor(self._name, self._model(model, {}, udf, body), udf, system_message, return_format)

    def get_text_embedder(
        self, model: str | None = None, dimensions: int | None = None, **options: Any
    ) -> "SpmdEmbedderDescriptor":
        """Vectors of texts; `dimensions` cuts them, for models that can."""
        udf, row = _split(options if dimensions is None else {**options, "dimensions": dimensions})
        return SpmdEmbedderDescriptor(self._name, self._model(model, {"runner": "pooling"}, udf, row), udf)

    def _model(self, model: str | None, more: dict[str, Any], udf: dict[str, Any], row: dict[str, Any]) -> ColumnModel:
        if model is None:
            raise ConfigError("model is missing: give a folder, or a name on the hub")
        return ColumnModel(model, {**self._options, **more}, row, raises=udf.get("on_error", "raise") == "raise")


@dataclass
class _Described:
    """Methods of both descriptors, which Daft pickles."""

    provider: str
    model: ColumnModel
    udf: dict[str, Any]

    def get_provider(self) -> str:
        return self.provider

    def get_model(self) -> str:
        return self.model.model

    def get_options(self) -> dict[str, Any]:
        return self.model.row

    def get_udf_options(self) -> UDFOptions:
        # An answer never changes: no retries.
        return UDFOptions(**{"max_retries": 0, **self.udf})


@dataclass
class SpmdPrompterDescriptor(_Described, PrompterDescriptor):  # type: ignore[misc]  # daft is no dependency
    """Prompts to be answered where Daft instantiates them."""

    system_message: str | None = None
    return_format: Any | None = None

    def instantiate(self) -> Prompter:
        return Prompts(self.model, self.system_message, self.return_format)


@dataclass
class SpmdEmbedderDescriptor(_Described, TextEmbedderDescriptor):  # type: ignore[misc]  # daft is no dependency
    """Texts to be embedded where Daft instantiates them."""

    def get_dimensions(self) -> EmbeddingDimensions:
        """Size of the vectors, of the model's configuration."""
        # Daft's driver may have neither the device nor the packages of its workers.
        pooling = read_pooling(run_config({"model": self.model.model, **self.model.options}))
        assert pooling is not None, "its runner is pooling"
        return EmbeddingDimensions(self.model.row.get("dimensions") or pooling.size, daft.DataType.float32())

    def instantiate(self) -> TextEmbedder:
        return Embedder(self.model)


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Daft's options, and those of a row."""
    of_udf = {key: value for key, value in options.items() if key in _UDF_KEYS}
    return of_udf, {key: value for key, value in options.items() if key not in _UDF_KEYS}
