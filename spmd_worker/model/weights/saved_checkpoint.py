"""Checkpoints in the hub's names: tensors of a model's files, and the files that this program has written before."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch import Tensor

from spmd_worker.base.errors import CheckpointError, SaveError
from spmd_worker.base.staged_folder import write_durably
from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model.weights.checkpoint import STORED_DTYPES, Checkpoint
from spmd_worker.model.weights.checkpoint_files import open_checkpoint
from spmd_worker.model.weights.safetensors_header import read_header
from spmd_worker.model.weights.safetensors_writer import TensorToWrite, divided
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model_config.saved_files import check_own_files
from spmd_worker.model_config.tensor_names import INDEX_FILE, SINGLE_FILE, STATE_FILE

logger = logging.getLogger(__name__)

_WRITER: Final = "written_by"
_PROGRAM: Final = "spmd-worker"
_LAYOUT: Final = "layout"
_STREAMED: Final = "streamed"


class SourceTensors:
    """Tensors of the folder that a model was loaded from: their names there, which may lack a prefix that the family's
    table has, and those that the model does not use, which are copied: frequencies, masks, layers for images, a head
    that a pooling run leaves out. Without a plain checkpoint there, both are empty.
    """

    def __init__(self, folder: Path, store: WeightStore, *, is_read: bool) -> None:
        """`is_read`: the model's weights came from the folder, and were not quantised there."""
        self._files: Checkpoint | None = None
        self._names: dict[str, str] = {}
        self.unused: list[TensorToWrite] = []
        if not is_read:
            return
        try:
            self._files = files = open_checkpoint(folder)
        except CheckpointError as error:
            logger.info("tensors that the model does not use are not saved: %s", error)
            return
        for stored in sorted(files.names(), key=files.position):
            shape = files.shape(stored)
            parts = store.names.parts(stored, shape)
            self._names |= {name: stored for name, view in parts.items() if view is None and name in store.tensors}
            if all(_is_unused(store, name) for name in parts) and files.kind(stored) in STORED_DTYPES:
                self.unused.append(TensorToWrite(stored, files.stored_dtype(stored), shape))

    def renamed(self, tensor: TensorToWrite) -> TensorToWrite:
        """The tensor under its name in the folder."""
        return replace(tensor, name=self._names.get(tensor.name, tensor.name))

    def read(self, name: str) -> Tensor:
        """A full tensor of `unused`."""
        assert self._files is not None, name
        return self._files.read_stored(name, full_rectangle(self._files.shape(name)))

    def close(self) -> None:
        if self._files is not None:
            self._files.close()


def _is_unused(store: WeightStore, name: str) -> bool:
    """Whether the tensor is none of the model's, and follows from none of them."""
    is_own = name in (*(store.names.tied or ()), *store.tensors) or store.names.is_copy(name)
    return store.names.is_derived(name) and not is_own


def model_tensors(store: WeightStore) -> list[TensorToWrite]:
    """All tensors of the model, of every rank; a tied head is its embedding, once."""
    return [TensorToWrite(name, store.dtype_of(name), tensor.shape) for name, tensor in store.tensors.items()]


def metadata_of(*, is_streamed: bool = False) -> dict[str, str]:
    """Metadata of a file. transformers asks for the format."""
    return {"format": "pt", _WRITER: _PROGRAM} | ({_LAYOUT: _STREAMED} if is_streamed else {})


def is_streamed(checkpoint: Checkpoint) -> bool:
    """Whether `save_streamed` has written all files of a checkpoint."""
    return all(header.metadata.get(_LAYOUT) == _STREAMED for header in checkpoint.headers.values())


def files_of(tensors: Sequence[TensorToWrite], max_bytes: int | None) -> dict[str, list[TensorToWrite]]:
    """Tensors of each file by its name, as the hub has names: one file, or several with an index."""
    parts = divided(tensors, max_bytes)
    if len(parts) == 1:
        return {SINGLE_FILE: parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, 1)}


def write_index(folder: Path, files: dict[str, list[TensorToWrite]]) -> None:
    """The index of several files. Raises OSError."""
    if len(files) > 1:
        total = sum(each.num_bytes for part in files.values() for each in part)
        weight_map = {each.name: file for file, part in files.items() for each in part}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_durably(folder / INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())


def check_replaceable(folder: Path) -> None:
    """Raise SaveError unless the folder holds a model that this program saved, and nothing else."""
    own = [path.name for path in sorted(folder.glob("*.safetensors")) if _is_own(path)]
    if not own and not (folder / STATE_FILE).is_file():
        raise SaveError(
            f"{folder} holds files that this program has not saved, and a save replaces the folder: give a new or an "
            f"empty one"
        )
    check_own_files(folder, own)


def _is_own(path: Path) -> bool:
    """Whether this program has written a file of tensors."""
    try:
        return read_header(path).metadata.get(_WRITER) == _PROGRAM
    except CheckpointError:
        return False
