"""A GGUF model as a checkpoint of the hub's names: values are dequantised to float32 as they are read.

Rows are read as in safetensors, widened to whole blocks of a quantised type, and to whole heads where converters have
permuted their rows. The numbers of a block are those of the `gguf` package. Dequantised values are not cached. Weights
that stay as they are stored are read as blocks (`gguf_weight.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from spmd_worker.base.config.extras import raise_missing_package
from spmd_worker.base.errors import CheckpointError, ModelConfigError
from spmd_worker.model.layers.weight_slice import Rectangle
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.quantised_weight import full_words
from spmd_worker.model.weights.safetensors_header import SafetensorsHeader
from spmd_worker.model.weights.staging import HOST, HostStaging
from spmd_worker.model.weights.tensor_checks import WEIGHT_DTYPES
from spmd_worker.model.weights.weight_headers import header_of
from spmd_worker.model_config.gguf.files import linked_files, target
from spmd_worker.model_config.gguf.model import read_gguf_model
from spmd_worker.model_config.gguf.tensor_types import TensorType
from spmd_worker.model_config.gguf.tensors import HubTensor


@dataclass(slots=True)
class GgufCheckpoint(Checkpoint):
    """`Checkpoint` of the GGUF that a folder links to. `tensors` are those of the files, by the hub's names."""

    tensors: dict[str, HubTensor] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, staging: HostStaging = HOST) -> "GgufCheckpoint":
        """Read and validate the headers. Raises CheckpointError, and ConfigError for quantised files without the `gguf`
        package.
        """
        try:
            # Messages name the user's files.
            model = read_gguf_model([target(each) for each in linked_files(folder)])
            tensors = model.hub_tensors()
        except ModelConfigError as error:
            raise CheckpointError(str(error)) from None
        headers: dict[str, SafetensorsHeader] = {}
        file_of: dict[str, str] = {}
        for header in model.headers:
            own = {name: each.tensor for name, each in tensors.items() if each.header is header}
            headers[str(header.path)] = header_of(header, own)
            file_of |= dict.fromkeys(own, str(header.path))
        for each in tensors.values():
            if not each.tensor.type.is_plain:
                _quantisations()
                break
        return cls(folder, headers, 0, staging, file_of, tensors=tensors)

    def dtype(self, name: str) -> torch.dtype:
        """The file's own of numbers that are stored as such, else float32."""
        tensor = self._tensor(name)
        return WEIGHT_DTYPES[tensor.tensor.type.name] if _is_as_stored(tensor) else torch.float32

    def stored_dtype(self, name: str) -> torch.dtype:
        return self.dtype(name)

    def kind(self, name: str) -> str:
        """Dtype of what is read."""
        tensor = self._tensor(name)
        return tensor.tensor.type.name if _is_as_stored(tensor) else "F32"

    def num_bytes(self, name: str) -> int:
        raise CheckpointError(f"{self._path(name)}: tensor {name!r} is of GGUF, whose bytes are not those of a weight")

    def _tensor(self, name: str) -> HubTensor:
        self._entry(name)
        return self.tensors[self.stored_name(name)]

    def quantised_types(self) -> dict[str, TensorType]:
        """Types of the tensors that are stored in blocks, all of each, by name."""
        types = {name: self._tensor(name).tensor.type for name in self.names() if name not in self._views}
        return {name: type_ for name, type_ in types.items() if not type_.is_plain}

    def read_blocks(self, name: str, region: Rectangle) -> tuple[torch.Tensor, slice]:
        """Bytes uint8 [rows, blocks, bytes of a block] of the whole blocks around a region of a matrix that
        `quantised_types` has, and the slice of the region's inputs in them.
        """
        tensor, (rows, columns) = self._tensor(name), region
        kind, shape = tensor.tensor.type, self._entry(name).shape
        blocks, inside = full_words(columns, kind.block)
        raw = self._in_order(tensor, shape, (rows, blocks), lambda wide: self._raw(name, kind, shape, wide))
        return raw.view(len(raw), -1, kind.block_bytes), inside

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, region: Rectangle) -> torch.Tensor:
        tensor = self._tensor(name)
        return self._in_order(tensor, shape, region, lambda wide: self._values(name, tensor, shape, wide))

    def _in_order(
        self,
        tensor: HubTensor,
        shape: tuple[int, ...],
        region: Rectangle,
        read: Callable[[Rectangle], torch.Tensor],
    ) -> torch.Tensor:
        """Rows of a region in the hub's order, read by `read` in the file's."""
        if not tensor.num_heads:
            return read(region)
        size = shape[0] // tensor.num_heads
        heads, rows = full_words(region[0], size)
        found = read(((heads[0] * size, heads[1] * size), *region[1:]))
        pairs = found.reshape(heads[1] - heads[0], size // 2, 2, *found.shape[1:])
        return pairs.transpose(1, 2).reshape(found.shape)[rows]

    def _raw(self, name: str, kind: TensorType, shape: tuple[int, ...], region: Rectangle) -> torch.Tensor:
        """Bytes of a region, of whose inputs the blocks are given, in the order of the file."""
        stored = (*shape[:-1], shape[-1] // kind.block * kind.block_bytes)
        columns = (region[-1][0] * kind.block_bytes, region[-1][1] * kind.block_bytes)
        return Checkpoint._read(self, name, stored, torch.uint8, (*region[:-1], columns))

    def _values(self, name: str, tensor: HubTensor, shape: tuple[int, ...], region: Rectangle) -> torch.Tensor:
        """The numbers of a region in the order of the file."""
        kind = tensor.tensor.type
        if kind.is_plain:
            values = Checkpoint._read(self, name, shape, WEIGHT_DTYPES[kind.name], region)
        else:
            blocks, inside = full_words(region[-1], kind.block)
            values = _dequantised(self._raw(name, kind, shape, (*region[:-1], blocks)), kind)[..., inside]
        # Computed as float32, as converters have added it.
        return values.float() - tensor.offset if tensor.offset else values


def _is_as_stored(tensor: HubTensor) -> bool:
    return tensor.tensor.type.is_plain and not tensor.offset


def _dequantised(raw: torch.Tensor, kind: TensorType) -> torch.Tensor:
    """float32 of the bytes of whole blocks, on their device."""
    package = _quantisations()
    with_numbers = package.quants.dequantize(raw.cpu().contiguous().numpy(), package.GGMLQuantizationType(kind.number))
    return torch.from_numpy(with_numbers).to(raw.device)


@cache
def _quantisations() -> Any:
    """The package. Raises ConfigError if it is not there."""
    try:
        import gguf
    except ImportError as error:
        raise_missing_package("gguf", "gguf", "a GGUF with quantised weights", error)
    return gguf
