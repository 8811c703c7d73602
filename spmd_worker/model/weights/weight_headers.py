"""Headers of weight files, by their kind: safetensors or GGUF, whose tensors have the file's names. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path

from spmd_worker.base.errors import CheckpointError, ModelConfigError
from spmd_worker.model.weights.safetensors_header import SafetensorsHeader, TensorEntry, read_header
from spmd_worker.model_config.gguf.header import GgufHeader, GgufTensor, is_gguf, read_gguf_header


def read_weight_header(path: Path) -> SafetensorsHeader:
    """The header of a file. Raises CheckpointError."""
    if not is_gguf(path):
        return read_header(path)
    try:
        header = read_gguf_header(path)
    except ModelConfigError as error:
        raise CheckpointError(str(error)) from None
    return header_of(header, header.tensors)


def header_of(header: GgufHeader, tensors: Mapping[str, GgufTensor]) -> SafetensorsHeader:
    """The header of a GGUF file with these tensors, whose dtypes are the names of their types."""
    entries = {
        name: TensorEntry(each.type.name, each.shape, each.begin - header.data_start, each.end - header.data_start)
        for name, each in tensors.items()
    }
    return SafetensorsHeader(entries, {}, header.data_start, header.file_bytes, header.digest)
