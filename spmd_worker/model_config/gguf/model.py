"""A GGUF model: the headers of its files, and the row of its architecture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spmd_worker.model_config.config_reader import ConfigReader, checked_integer
from spmd_worker.model_config.gguf.architectures import ARCHITECTURES, MIXTRAL, Architecture
from spmd_worker.model_config.gguf.header import GgufHeader, GgufTensor, read_gguf_header
from spmd_worker.model_config.gguf.tensors import HubTensor, hub_tensors

_ARCHITECTURE: Final = "general.architecture"


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The files of one model. `metadata` are those of the first file, which has all; `key` is the name in them."""

    headers: tuple[GgufHeader, ...]
    key: str
    architecture: Architecture

    @property
    def metadata(self) -> ConfigReader:
        return ConfigReader(self.headers[0].metadata, self.headers[0].path)

    def hub_tensors(self) -> dict[str, HubTensor]:
        """`tensors.hub_tensors` of the model."""
        return hub_tensors(self.headers, self.architecture, self.key)

    def find(self, tensor: str) -> tuple[GgufHeader, GgufTensor] | None:
        """A tensor by its name in the files, and the file that has it; None if none has."""
        return next(((each, each.tensors[tensor]) for each in self.headers if tensor in each.tensors), None)

    def has(self, tensor: str) -> bool:
        """Whether a file has a tensor of this name."""
        return self.find(tensor) is not None

    def whole_number(self, key: str, most: int = 2**31 - 1) -> int:
        """A number of the architecture, or the one that a list by layer repeats. Raises ModelConfigError."""
        name = f"{self.key}.{key}"
        value = self.metadata.get(name)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise self.metadata.error(name, "differs from layer to layer, which is not supported")
            value = value[0]
        return checked_integer(value, self.metadata.where(name), 1, most)

    def optional_number(self, key: str) -> int | None:
        """`whole_number`; None if it is missing or 0."""
        return None if self.metadata.get(f"{self.key}.{key}") in (None, 0) else self.whole_number(key)


def read_gguf_model(paths: Sequence[Path]) -> GgufModel:
    """The model of these files, the first part first. Raises ModelConfigError, also for an architecture that is not
    supported.
    """
    headers = tuple(read_gguf_header(path) for path in paths)
    metadata = ConfigReader(headers[0].metadata, headers[0].path)
    key = metadata.get(_ARCHITECTURE)
    if not isinstance(key, str) or key not in ARCHITECTURES:
        raise metadata.error(
            _ARCHITECTURE,
            f"is not supported for GGUF, only {', '.join(sorted(ARCHITECTURES))}: give the safetensors that it was "
            f"converted from, if docs/reference/models.md lists the model",
        )
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise metadata.error("general.type", "is not a model of its own: give the file of the model")
    architecture = ARCHITECTURES[key]
    if key == "llama" and metadata.get("llama.expert_count"):
        architecture = MIXTRAL
    return GgufModel(headers, key, architecture)
