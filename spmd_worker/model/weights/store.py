"""The weights of one rank's model by checkpoint name, and every way in which they are written.

A start is an update from files into fresh parameters; a reload, a trainer's tensors, what `apply_model` changed and
what has to come again after a sleep are updates of parameters that are packed. For all of them there is one rule each:

* Names. The model has the checkpoint tensors of its family's table, those of other ranks and stages too (`tensors`).
  What a file or a trainer calls otherwise, without a prefix, or stacked, is found by `CheckpointNames.parts`. Derived
  tensors are passed over; any other name is an error.
* Coverage. Files have every tensor of the model, of every stage, in its shape. An update that brings less is open until
  the rest has come or the caller says that it stays (`WeightUpdate`, `MissingWeightsError`).
* A tied head that comes as well is its embedding, to the bit. Files have both at hand, so they are compared block by
  block before anything is written; tensors that come one after the other by digest, at the commit.
* Finiteness. Every element is a finite number in the dtype in which the model holds the tensor, float32 for what is
  float32 in every dtype, unless `allows_nonfinite`. A start looks at what it reads, this rank's slices; whatever comes
  as a whole tensor is looked at whole, so that ranks with other slices come to the same answer.
* Errors. Weights that do not fit are a CheckpointError, which is a ValueError; what is no name and tensor a TypeError;
  a wrong time (requests in flight, asleep) a RuntimeError. A tensor is written and noted, or neither.
* Memory. A fresh parameter is plain: it is written in blocks of at most 16 MB in the order of the files, and packed
  when all are filled. Afterwards a tensor is written in place, and no more of it is copied than this rank's slices.

Knows nothing of architectures, which layers and names say, and exchanges nothing with other ranks.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.base.liveness.deferred_signals import deferred_signals
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer, PackedLayer
from spmd_worker.model.layers.weight_slice import (
    ModelTensor,
    PaddingSlice,
    Rectangle,
    WeightSlice,
    full_rectangle,
)
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.checkpoint_names import CheckpointNames
from spmd_worker.model.weights.checkpoint_view import CheckpointView
from spmd_worker.model.weights.coverage import checkpoint_problems, parameter_problems, raise_problems
from spmd_worker.model.weights.dequantised_checkpoint import DequantisedCheckpoint
from spmd_worker.model.weights.dummy import DummyWeights
from spmd_worker.model.weights.held_weights import HeldPiece, HeldWeight, held_weights
from spmd_worker.model.weights.tensor_checks import check_data, check_finite, check_pair, tied_head_fault
from spmd_worker.model.weights.weight_source import WeightSource
from spmd_worker.model.weights.weight_update import WeightUpdate
from spmd_worker.model_config.weight_format import Quantization
from spmd_worker.native.threads import keep_alone

# Well under the promised 64 MB: glibc keeps blocks below 32 MB for reuse instead of faulting in fresh pages each time.
_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A start on this rank: checkpoint tensors it took something of, bytes fetched from files, seconds."""

    num_tensors: int
    num_bytes_read: int
    seconds: float


class WeightStore:
    """The weights of layers by name, which it fills, packs and writes. `dtype` is the model's; `slices_like(index)`
    are the slices of the model's decoder layer of that index, which this stage need not have.
    """

    def __init__(
        self,
        names: CheckpointNames,
        layers: Mapping[str, CheckpointLayer],
        dtype: torch.dtype,
        slices_like: Callable[[int], list[WeightSlice]],
        *,
        allows_nonfinite: bool = False,
    ) -> None:
        self._names, self._layers, self._dtype, self._slices_like = names, layers, dtype, slices_like
        self._allows_nonfinite = allows_nonfinite
        self.update = WeightUpdate(names.tied)

    @cached_property
    def slices(self) -> list[WeightSlice]:
        """Slices of checkpoint tensors that this rank holds, and where."""
        return self._names.slices(self._layers)

    @property
    def paddings(self) -> list[PaddingSlice]:
        """Parts of parameters that no checkpoint fills."""
        return [piece for name, layer in self._layers.items() for piece in layer.padding_slices(name)]

    @cached_property
    def tensors(self) -> dict[str, ModelTensor]:
        """Every checkpoint tensor of the model by name, those of other stages too."""
        return self._names.tensors(self.slices, self._slices_like)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of `tensors`."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @cached_property
    def held(self) -> dict[str, HeldWeight]:
        """Slices that this rank has of them, by name."""
        return held_weights(self.slices, self._layers)

    @cached_property
    def buffer_names(self) -> frozenset[str]:
        """Those that are buffers: in an update they may be left out, and `sleep(level=2)` keeps them."""
        return frozenset(name for name, tensor in self.tensors.items() if tensor.is_buffer)

    @property
    def buffer_parameters(self) -> frozenset[str]:
        """Names of the parameters that hold those of this stage."""
        held = [self.held[name] for name in self.buffer_names if name in self.held]
        return frozenset(each.piece.parameter_name for weight in held for each in weight.pieces)

    def is_derived(self, name: str) -> bool:
        """See `CheckpointNames.is_derived`."""
        return self._names.is_derived(name)

    @contextmanager
    def open(self, folder: Path, quantization: Quantization | None = None) -> Iterator[WeightSource]:
        """The files of a folder, with the names of the table. Quantised weights are looked at as plain ones."""
        with Checkpoint.open(folder) as files:
            files.rename(self._names.parts)
            yield files if quantization is None else DequantisedCheckpoint.open(files, quantization)

    def dummy(self, seed: int = 0) -> WeightSource:
        """Random weights instead of files."""
        return DummyWeights(self.tensors, self.slices, seed)

    @torch.no_grad()
    def fill(self, source: WeightSource, num_threads: int = 1) -> LoadReport:
        """Start: every parameter, not packed yet, from the source. Idempotent. With several threads, which compute
        alone (`keep_alone`), they share out the blocks of each tensor; files are read by one.

        Raises CheckpointError before anything is touched when names, shapes, dtypes or coverage are wrong; and,
        halfway, when a file cannot be read, for a tied head that differs and for an element that is not finite.
        """
        start_s, num_bytes_before = time.perf_counter(), source.num_bytes_read
        parameters = _parameters(self._layers)
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._check_covered(source, parameter_problems(self.slices, self.paddings, shapes))
        pieces = [(name, each) for name, weight in self.held.items() for each in (*weight.pieces, *weight.copies)]
        pieces = [(name, each) for name, each in pieces if not each.piece.is_empty]
        with ThreadPoolExecutor(num_threads, "fill-weights", keep_alone) as threads:
            for name, held in sorted(pieces, key=lambda pair: (source.position(pair[0]), pair[1].piece.source)):
                _check_tied(source, self._names.tied, name, held.piece.source)
                blocks = list(source.blocks(name, held.piece.source, _BLOCK_BYTES))
                # Neighbours are one thread's: they may share what a source makes in larger blocks.
                each = max(-(-len(blocks) // num_threads), 1)
                runs = [blocks[start : start + each] for start in range(0, len(blocks), each)]
                write = partial(self._write_blocks, source, held)
                # A thread alone would only be waited for.
                list(threads.map(write, runs) if len(runs) > 1 else map(write, runs))
        for padding in self.paddings:
            region = tuple(slice(*bounds) for bounds in padding.destination)
            parameters[padding.parameter_name].data[region].zero_()
        num_tensors = len({name for name, _ in pieces})
        return LoadReport(num_tensors, source.num_bytes_read - num_bytes_before, time.perf_counter() - start_s)

    def pack(self) -> None:
        """Let the kernels of every layer that multiplies pack its weight, once all are filled."""
        for layer in self._layers.values():
            if isinstance(layer, PackedLayer):
                layer.pack_weights()

    @torch.no_grad()
    def reload(self, source: WeightSource) -> None:
        """An update of all weights from files. Raises CheckpointError as `fill` does, and RuntimeError as `load`."""
        self._check_covered(source)
        for name, shape in self.shapes.items():
            _check_tied(source, self._names.tied, name, full_rectangle(shape))
        # One that was loaded before is of a try that broke off.
        self.update.forget_tied_head()
        for name in sorted(self.tensors, key=source.position):
            self._take(name, source.read(name, full_rectangle(self.shapes[name])), _in_file(source, name))

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Make whole checkpoint tensors this rank's weights: any of them, in any order, any number of times.

        One after the other, in place, of any floating-point dtype, from any device; while one is written, there is one
        copy of this rank's slice of it (where oneDNN packs, two of what it is packed with). No collective inside; every
        rank is given the same tensors. The first opens `update`, which has to be committed before a step runs. Returns
        the names of which this rank holds something; those of other stages, and a tied head's, are passed over.

        Raises RuntimeError while requests are being answered, and CheckpointError, the same on every rank, for a name
        that the model does not have and a tensor that is misshapen, sharded, without data or, unless such weights are
        allowed, not finite: that tensor is not written, and of a collection, such as a list, no tensor is when a name
        or a shape is wrong. Raises TypeError for what is not a name and a tensor.
        """
        if isinstance(weights, Collection):
            for name, tensor in self._apart(weights):
                self._check_form(name, tensor)
        return {name for name, tensor in self._apart(weights) if self._take(name, tensor, f"{name}:")}

    @contextmanager
    def as_checkpoint(self, **attributes: Any) -> Iterator[CheckpointView]:
        """This rank's weights under their checkpoint names, to look at and to change. What was changed counts at the
        end, also where that is an exception: some weights are changed at once, and a head must follow its embedding.
        Raises CheckpointError for changes that are refused, which `update` notes: other ranks may have made theirs.
        """
        self.update.check_awake()
        self.update.num_calls += 1
        # It may be changed in here.
        self.update.embedding_digest = ""
        names = {name: name for name in self.held}
        embedding, head = self._names.tied or ("", "")
        if embedding in self.held and self._names.is_last_stage:
            names[head] = embedding
        view = CheckpointView(self.held, names, self.load, self._check_change, **attributes)
        try:
            yield view
        finally:
            try:
                view.write_back()
            except CheckpointError:
                self.update.refused_calls.append(self.update.num_calls)
                raise

    def _take(self, name: str, tensor: Tensor, subject: str) -> bool:
        """Write and note one whole tensor: whether this rank holds something of it. `subject` is of the message where
        it is not finite.
        """
        self._check_form(name, tensor)
        is_head = self._is_tied_head(name)
        # A tied head is compared with the embedding, elements and all.
        if not is_head and not self._allows_nonfinite:
            check_finite(subject, tensor.detach(), self._dtype_of(name))
        # A tensor is written and noted, or neither.
        with deferred_signals():
            self.update.begin()
            if is_head:
                self.update.add_tied_head(tensor)
                return False
            if name in self.held:
                self.held[name].load(tensor)
            self.update.add(name, tensor)
        return name in self.held

    def _apart(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """With the checkpoint's names, without what is derived but for a tied head, and experts apart where the
        checkpoint has them so.
        """
        for given_name, tensor in tensors:
            check_pair(given_name, tensor)
            for name, place in self._names.parts(given_name, tensor.shape).items():
                is_head = self._is_tied_head(name)
                if self.is_derived(name) and not is_head:
                    continue
                if name not in self.tensors and not is_head:
                    raise CheckpointError(
                        f"{given_name}: the model has no such weight: give the names that its checkpoint has"
                    )
                if place is None:
                    yield name, tensor
                    continue
                check_data(given_name, tensor)
                yield name, place.of(tensor)

    def _check_form(self, name: str, tensor: Tensor) -> None:
        """A tensor could be the weight of this name, whatever its elements. Of a tied head any shape will do, until the
        commit compares it.
        """
        if not self._is_tied_head(name) and tuple(tensor.shape) != self.shapes[name]:
            raise CheckpointError(
                f"{name}: has the shape {list(tensor.shape)}, the model's has {list(self.shapes[name])}"
            )
        check_data(name, tensor)

    def _check_change(self, name: str, values: Tensor) -> None:
        """This rank's slices of a weight, as `apply_model` leaves them."""
        held = self.held[name]
        shape, given = list(held.shape), list(values.shape)
        if given != shape:
            raise CheckpointError(f"{name}: has the shape {shape} here, not {given}: only its values can be changed")
        if not self._allows_nonfinite:
            check_finite(f"{name}: this rank's slice", values, self._dtype_of(name))
        held.check_changes(values)

    def _check_covered(self, source: WeightSource, other_problems: Iterable[str] = ()) -> None:
        """The source has the model's tensors and, but for what says nothing, no others."""
        found = source.shapes()
        problems = checkpoint_problems(
            self.shapes, found, ignorable=lambda name: self.is_derived(name) or source.is_unused(name)
        )
        raise_problems([*problems, *other_problems])
        for name in self.tensors:
            source.dtype(name)

    @torch.no_grad()
    def _write_blocks(self, source: WeightSource, held: HeldPiece, blocks: list[Rectangle]) -> None:
        name = held.piece.checkpoint_name
        for block in blocks:
            values = source.read(name, block)
            if not self._allows_nonfinite:
                check_finite(_in_file(source, name), values, self._dtype_of(name), [start for start, _ in block])
            held.write_block(block, values)

    def _is_tied_head(self, name: str) -> bool:
        return self._names.tied is not None and name == self._names.tied[1]

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if self.tensors[name].is_float32 else self._dtype


def _parameters(layers: Mapping[str, CheckpointLayer]) -> dict[str, Tensor]:
    """Parameters to fill, each once, by name. They have storage: a copy into a meta tensor would do nothing."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, layer in layers.items():
        for own, parameter in layer.named_parameters(recurse=False):
            found.setdefault(id(parameter), (f"{name}.{own}".removeprefix("."), parameter))
    on_meta = [name for name, parameter in found.values() if parameter.is_meta]
    assert not on_meta, ("parameters without storage", on_meta[:3])
    return dict(found.values())


def _check_tied(source: WeightSource, tied: tuple[str, str] | None, name: str, region: Rectangle) -> None:
    """Some files have a tied head as well, which says nothing as long as it is the embedding. For a region of the
    embedding; nothing for other tensors.
    """
    embedding, head = tied or ("", "")
    if name != embedding or head not in source.names():
        return
    is_same_kind = (source.dtype(name), source.shape(name)) == (source.dtype(head), source.shape(head))
    blocks = source.blocks(name, region, _BLOCK_BYTES) if is_same_kind else iter(())
    differing = next((block for block in blocks if not _is_same(source, name, head, block)), None)
    if is_same_kind and differing is None:
        return
    first, stop = (0, 0) if differing is None else differing[0]
    where = "in dtype or shape" if differing is None else f"between rows {first} and {stop - 1}"
    way_out = f"set it to false to use both, or remove {head!r} from the files if it is a leftover"
    fault = f"differs from {name!r} {where}"
    raise CheckpointError(tied_head_fault(f"{source.folder}: tensor {head!r}", fault, way_out))


def _in_file(source: WeightSource, name: str) -> str:
    return f"{source.folder / source.position(name)[0]}: tensor {name!r}"


def _is_same(source: WeightSource, name: str, other: str, block: Rectangle) -> bool:
    """To the bit: what is no number is equal to itself here."""
    first, second = source.read(name, block), source.read(other, block)
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
