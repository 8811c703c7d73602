"""Sharded states: each rank's parameters, not packed, under our own names, and `sharded_state.json` about all files.

A state is read by the layout that wrote it alone. That is checked before anything is read; a file's digest while it is.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor, nn

from spmd_worker.base.errors import CheckpointError
from spmd_worker.base.files import JsonError, is_plain_name, parse_json_object, read_regular_file
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer, PackedLayer
from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model.weights.coverage import checkpoint_problems, raise_problems
from spmd_worker.model.weights.safetensors_header import SafetensorsHeader, read_header
from spmd_worker.model.weights.safetensors_writer import CHUNK_BYTES, TensorToWrite, file_digest
from spmd_worker.model.weights.store import LoadReport, WeightStore
from spmd_worker.model.weights.tensor_checks import WEIGHT_DTYPES, bounded, check_finite
from spmd_worker.model.weights.weight_update import content_digest
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.model_config.tensor_names import STATE_FILE
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.leaves import feed_forward_columns
from spmd_worker.ranks.topology import RankLayout

FORMAT_VERSION: Final = 1
_FORMAT: Final = "spmd-worker sharded state"
_MAX_STATE_BYTES: Final = 100_000_000
_WAY_OUT: Final = "load the original checkpoint, or save the state again with this run's settings"


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file's name, size in bytes and `SafetensorsWriter.digest`."""

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The division of a model among ranks. `stages` has the layers (start, stop) of each; `experts` a digest of the
    placement of experts, "" if ranks share the columns of each. `columns` are those of feed-forwards that ranks have,
    "" if they are nearly equal parts, as in states without this key.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    stages: tuple[tuple[int, int], ...]
    experts: str = ""
    columns: str = ""

    def difference(self, other: "StateLayout") -> str:
        """Difference between a state of this layout and a run of the other one, in words; "" if there is none."""
        saved, run = (f"TP {each.tensor_parallel_size}, PP {each.pipeline_parallel_size}" for each in (self, other))
        if saved != run:
            return f"was saved for {saved}, and this run has {run}"
        if self.stages != other.stages:
            return f"was saved for stages of the layers {list(self.stages)}, and this run has {list(other.stages)}"
        if self.experts != other.experts:
            return "was saved with other ranks for its experts (parallel.enable_expert_parallel, expert_placement)"
        if self.columns != other.columns:
            keys = "parallel.max_leaves, invariant_tensor_parallel"
            return f"was saved with other columns of feed-forwards for its ranks ({keys}, or a version without these)"
        return ""


@dataclass(frozen=True, slots=True)
class ShardedState:
    """Contents of `sharded_state.json`. `files` are those of each rank, tensor ranks of the first stage first."""

    family: str
    config_digest: str
    dtype: str
    layout: StateLayout
    weight_version: int | None
    files: tuple[tuple[StateFile, ...], ...]

    def encoded(self) -> bytes:
        value = {"format": _FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return (json.dumps(value, indent=2) + "\n").encode()

    def check(self, folder: Path, family: str, dtype: str, layout: StateLayout) -> None:
        """Raise CheckpointError unless a run of this family, dtype and layout can load the state of the folder."""
        if self.family != family or self.config_digest != config_digest(folder):
            raise CheckpointError(
                f"{folder}: config.json is not the one with which the sharded state was saved, of {self.family}: "
                f"restore it, or {_WAY_OUT}"
            )
        if self.dtype != dtype:
            raise CheckpointError(
                f"{folder}: the sharded state is {self.dtype}, and this run computes in {dtype}: set "
                f"model.dtype={self.dtype}, or {_WAY_OUT}"
            )
        difference = self.layout.difference(layout)
        if difference:
            raise CheckpointError(f"{folder}: the sharded state {difference}: use that layout, or {_WAY_OUT}")


def placement_digest(experts: ExpertLayout | None) -> str:
    """`StateLayout.experts`."""
    return "" if experts is None else blake2b(json.dumps(asdict(experts)).encode(), digest_size=8).hexdigest()


def column_ranges(layout: RankLayout, model_config: ModelConfig) -> str:
    """`StateLayout.columns`."""

    def listed(each: RankLayout) -> str:
        ranges = [[each.columns(size, rank) for rank in range(each.tensor_parallel_size)] for size in sizes]
        return json.dumps(dict(zip(sizes, ranges, strict=True)))

    sizes = sorted({size for layer in model_config.layers for size in feed_forward_columns(layer)})
    columns = listed(layout)
    return "" if columns == listed(replace(layout, num_leaves=1)) else columns


def config_digest(folder: Path) -> str:
    """Digest of the bytes of config.json."""
    return blake2b(read_regular_file(folder / "config.json"), digest_size=16).hexdigest()


def read_state(folder: Path) -> ShardedState:
    """Raises CheckpointError for a folder without a valid state."""
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: has no {STATE_FILE}, which save_sharded_state writes: leave model.load_format=auto for "
            f"checkpoints of the hub's names"
        )
    try:
        value = parse_json_object(read_regular_file(path, _MAX_STATE_BYTES))
        return _state_of(value)
    except (OSError, JsonError) as error:
        raise CheckpointError(f"{path}: {error}: {_WAY_OUT}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: is not a sharded state of format {FORMAT_VERSION} ({type(error).__name__}: {error}): {_WAY_OUT}"
        ) from None


def _state_of(value: dict[str, Any]) -> ShardedState:
    """Raises KeyError, TypeError or ValueError for an invalid value."""
    if value["format"] != _FORMAT or value["format_version"] != FORMAT_VERSION:
        raise ValueError(f"it says {value['format']!r} {value['format_version']!r}")
    layout, version = value["layout"], value["weight_version"]
    sizes = (layout["tensor_parallel_size"], layout["pipeline_parallel_size"])
    stages = tuple((int(start), int(stop)) for start, stop in layout["stages"])
    files = tuple(
        tuple(StateFile(str(each["name"]), int(each["num_bytes"]), str(each["digest"])) for each in of_rank)
        for of_rank in value["files"]
    )
    unsafe = [each.name for of_rank in files for each in of_rank if not is_plain_name(each.name)]
    if unsafe or len(files) != sizes[0] * sizes[1]:
        raise ValueError(f"files of {len(files)} ranks, unsafe names {unsafe[:1]}")
    family, digest, dtype = (str(value[key]) for key in ("family", "config_digest", "dtype"))
    others = (str(layout["experts"]), str(layout.get("columns", "")))
    return ShardedState(family, digest, dtype, StateLayout(*sizes, stages, *others), version, files)


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """A parameter by our name, `own` in its layer. `shape` is that before it was packed."""

    name: str
    layer: CheckpointLayer
    own: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layer.shape_of(self.own)

    def to_check(self, values: Tensor) -> Tensor:
        """Numbers as `WeightStore.to_check` gives them."""
        return bounded(values) if self.own in self.layer.bounds else values

    @property
    def to_write(self) -> TensorToWrite:
        return TensorToWrite(self.name, self.layer.dtype_of(self.own), self.shape)

    def read(self) -> Tensor:
        """A view, or an unpacked copy."""
        return self.layer.read_region(self.own, full_rectangle(self.shape))


def held_parameters(model: nn.Module) -> list[HeldParameter]:
    """Parameters of all layers, each once, in the order of the modules."""
    found: dict[int, HeldParameter] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, CheckpointLayer):
            for own, parameter in layer.named_parameters(recurse=False):
                found.setdefault(id(parameter), HeldParameter(f"{name}.{own}".removeprefix("."), layer, own))
    return list(found.values())


def file_names(pattern: str | None, layout: StateLayout, tensor_rank: int, pipeline_rank: int, count: int) -> list[str]:
    """Names of a rank's `count` files. Raises ValueError for a pattern by which two files would have one name."""
    has_stages = layout.pipeline_parallel_size > 1
    default = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}" if has_stages else "model-rank-{rank}-part-{part}"
    pattern = f"{default}.safetensors" if pattern is None else pattern
    ranks = {"rank": tensor_rank, "tp_rank": tensor_rank, "pp_rank": pipeline_rank}
    try:
        names = [pattern.format(**ranks, part=part) for part in range(count)]
    except (KeyError, IndexError, ValueError, AttributeError):
        names = [""]
    needed = ["{part}", "{rank} or {tp_rank}"] + ["{pp_rank}"] * has_stages
    has_all = all(any(word in pattern for word in words.split(" or ")) for words in needed)
    if not has_all or not all(is_plain_name(name) and name.endswith(".safetensors") for name in names):
        raise ValueError(
            f"pattern={pattern!r} must be the name of a .safetensors file with {', '.join(needed)}, so that each file "
            f"has its own: leave it out for {default}.safetensors"
        )
    return names


@torch.no_grad()
def fill_from_state(
    model: nn.Module, folder: Path, files: Sequence[StateFile], *, allows_nonfinite: bool = False
) -> LoadReport:
    """Fill all parameters, not packed yet, from this rank's files of a state. Raises CheckpointError for a file that is
    missing, damaged or of other parameters, and for one that is not finite unless allowed.
    """
    started = perf_counter()
    parameters = {each.name: each for each in held_parameters(model)}
    headers = _checked_headers(folder, files, parameters)

    def memory(name: str) -> Tensor:
        return parameters[name].layer.get_parameter(parameters[name].own).data

    for each in files:
        deque(_contents(folder, headers[each.name], each, memory), maxlen=0)
    for name in parameters if not allows_nonfinite else ():
        check_finite(f"{folder}: {name}", parameters[name].to_check(memory(name)), memory(name).dtype)
    num_bytes = sum(entry.end - entry.begin for header in headers.values() for entry in header.tensors.values())
    return LoadReport(len(parameters), num_bytes, perf_counter() - started)


@torch.no_grad()
def reload_from_state(
    model: nn.Module, store: WeightStore, folder: Path, state: ShardedState, rank: int, *, allows_nonfinite: bool
) -> None:
    """Update all parameters of a running model, packed ones too, from a state. This rank's files are read twice, the
    first time to check all of them. Raises CheckpointError, with the weights unchanged, as `fill_from_state` does, and
    RuntimeError as `WeightStore.load` does.
    """
    files = state.files[rank % len(state.files)]
    parameters = {each.name: each for each in held_parameters(model)}
    for name, parameter in parameters.items():
        stored = parameter.layer.stored if isinstance(parameter.layer, PackedLayer) else None
        if stored is not None and parameter.own == "weight":
            raise CheckpointError(
                f"{folder}: {name} is held in {stored.words}, as in its file, and a sharded state has dequantised "
                f"weights: set model.dequantize_weights=true"
            )
    headers = _checked_headers(folder, files, parameters)

    def memory(name: str) -> Tensor:
        return torch.empty(parameters[name].shape, dtype=parameters[name].to_write.dtype)

    store.update.check_awake("before new ones are loaded")
    faults: list[CheckpointError] = []
    for each in files:
        for name, values in _contents(folder, headers[each.name], each, memory):
            try:
                check_finite(f"{folder}: {name}", parameters[name].to_check(values), values.dtype)
            except CheckpointError as error:
                faults.append(error)
    # After the digests, because a damaged file may have such numbers.
    if faults and not allows_nonfinite:
        raise faults[0]
    store.update.begin_all()
    for each in files:
        for name, values in _contents(folder, headers[each.name], each, memory):
            held = parameters[name]
            held.layer.write_region(held.own, full_rectangle(held.shape), values)
    # All ranks' files are in it, each with its digest.
    store.update.add_all(store.tensors, blake2b(state.encoded(), digest_size=8).hexdigest())


def _checked_headers(
    folder: Path, files: Sequence[StateFile], parameters: dict[str, HeldParameter]
) -> dict[str, SafetensorsHeader]:
    """Headers of a rank's files, which have its parameters and nothing else. Raises CheckpointError."""
    headers = {each.name: _header(folder, each) for each in files}
    found = {name: entry for header in headers.values() for name, entry in header.tensors.items()}
    expected = {name: each.shape for name, each in parameters.items()}
    shapes = {name: each.shape for name, each in found.items()}
    raise_problems(folder, checkpoint_problems(expected, shapes, ignorable=_none))
    for name, entry in found.items():
        dtype = parameters[name].to_write.dtype
        if WEIGHT_DTYPES.get(entry.dtype) != dtype:
            raise CheckpointError(f"{folder}: {name} is {entry.dtype}, and this run's is {dtype}: {_WAY_OUT}")
    return headers


def _none(_: str) -> bool:
    return False


def _header(folder: Path, file: StateFile) -> SafetensorsHeader:
    path = folder / file.name
    header = read_header(path)
    if header.file_bytes != file.num_bytes:
        raise CheckpointError(
            f"{path}: has {header.file_bytes} bytes, and {STATE_FILE} says {file.num_bytes}: copy the folder again"
        )
    return header


def _contents(
    folder: Path, header: SafetensorsHeader, file: StateFile, memory: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a file from its beginning to its end, each read into its `memory`. Raises CheckpointError,
    after the last one, if the digest is another.
    """
    path = folder / file.name
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        computed = file_digest(os.pread(descriptor, header.data_start, 0))
        for name in sorted(header.tensors, key=lambda each: header.tensors[each].begin):
            values, start = memory(name), header.data_start + header.tensors[name].begin
            for chunk, offset in _chunks(values.view(-1).view(torch.uint8)):
                # A GPU's memory is not the file's to read into.
                on_host = chunk if chunk.is_cpu else torch.empty(len(chunk), dtype=torch.uint8)
                _read(descriptor, path, on_host.numpy().data, start + offset)
                computed.update(content_digest(on_host).encode())
                if on_host is not chunk:
                    chunk.copy_(on_host)
            yield name, values
    finally:
        os.close(descriptor)
    if computed.hexdigest() != file.digest:
        raise CheckpointError(f"{path}: its digest is not the one in {STATE_FILE}: it is damaged, copy it again")


def _chunks(content: Tensor) -> Iterator[tuple[Tensor, int]]:
    for offset in range(0, len(content), CHUNK_BYTES):
        yield content[offset : offset + CHUNK_BYTES], offset


def _read(descriptor: int, path: Path, target: memoryview, offset: int) -> None:
    while target:
        num_bytes = os.preadv(descriptor, [target], offset)
        if num_bytes == 0:
            raise CheckpointError(f"{path}: ends at {offset}: it has been cut since its header was read")
        target, offset = target[num_bytes:], offset + num_bytes
