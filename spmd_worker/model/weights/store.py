"""The weights of one rank's model by checkpoint name, and all ways to write them.

At start-up fresh parameters are filled from files; a reload, a trainer's tensors, changes through `apply_model` and
loading after a sleep update packed parameters. The same rules hold for all of them:

* Names. The model has the checkpoint tensors of its family's table, including those of other ranks and stages
  (`tensors`). `CheckpointNames.parts` maps other names of a tensor, without a prefix or of stacked experts, to these.
  Derived tensors are skipped; any other name is an error.
* Coverage. Files have every tensor of the model, of every stage, in its shape. An update with fewer stays open until
  the others are loaded or the caller says that they stay (`WeightUpdate`, `MissingWeightsError`).
* A tied head that is given too equals its embedding, bit for bit. In files the two are compared block by block before
  anything is written; tensors that are loaded one after the other are compared by digest, at the commit.
* Finiteness. Unless `allows_nonfinite`, every element is finite in the dtype in which the model holds the tensor:
  float32 for tensors that always are float32. Bounds may be infinite, but are numbers. At start-up the elements that
  are read are checked, this rank's slices, on a GPU after all are written; a full tensor is checked completely, so that
  all ranks come to the same result.
* Errors. Wrong weights raise CheckpointError, which is a ValueError; anything but a name and a tensor TypeError; calls
  at the wrong time (requests in flight, asleep) RuntimeError. A tensor is written and recorded, or neither.
* Weights that are held as files store them (`LayerContext.stored`) are replaced by such files alone: `fill` and
  `reload` copy numbers and scales, and check that they are finite; tensors of a trainer are refused, and changes too.
  On CPUs `fill` holds those plain that its files have otherwise than config.json says; `reload` refuses such files.
* Memory. Fresh parameters are plain: they are written in blocks of at most 16 MB in the order of the files, and packed
  when all are filled; on the CPU they are quantised meanwhile where a rank has complete rows, of which a block then has
  all inputs. Later a tensor is written in place, and only this rank's slices of it are copied.

Architectures are known to layers and names alone. Nothing is exchanged with other ranks.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.base.liveness.deferred_signals import deferred_signals
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.base.names import hint
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer, PackedLayer, stored_weight_error
from spmd_worker.model.layers.weight_slice import (
    ModelTensor,
    PaddingSlice,
    Rectangle,
    TensorView,
    WeightSlice,
    full_rectangle,
    volume,
)
from spmd_worker.model.weights.checkpoint_files import open_checkpoint
from spmd_worker.model.weights.checkpoint_names import CheckpointNames
from spmd_worker.model.weights.checkpoint_view import CheckpointView
from spmd_worker.model.weights.coverage import checkpoint_problems, parameter_problems, raise_problems
from spmd_worker.model.weights.dequantised_checkpoint import DequantisedCheckpoint
from spmd_worker.model.weights.dummy import DummyWeights
from spmd_worker.model.weights.held_weights import HeldPiece, HeldWeight, held_weights
from spmd_worker.model.weights.merged_weights import MergedWeights, source_of
from spmd_worker.model.weights.recut_checkpoint import recut
from spmd_worker.model.weights.staging import HOST, HostStaging
from spmd_worker.model.weights.tensor_checks import (
    bounded,
    check_data,
    check_finite,
    finite_flag,
    pairs_of,
    tied_head_fault,
)
from spmd_worker.model.weights.weight_source import WeightSource
from spmd_worker.model.weights.weight_update import WeightUpdate, WeightUpdateReport
from spmd_worker.model_config.stored_format import StoredFormat
from spmd_worker.model_config.weight_format import Quantization
from spmd_worker.native.threads import use_single_threaded_torch
from spmd_worker.ops.default_device import host_by_default
from spmd_worker.ops.kernels.stored_weights import are_surely_finite
from spmd_worker.ranks.topology import Stage

logger = logging.getLogger(__name__)

# Well under the documented 64 MB: glibc reuses blocks below 32 MB instead of faulting in fresh pages each time.
_BLOCK_BYTES = 16 * 2**20
_LARGE_BLOCKS = threading.Lock()
"""Held for a block of many rows that files have in pieces: threads would have one each."""
_STORED_BLOCK_BYTES = 2 * 2**20
"""Bytes as stored: checking that 4 million numbers of MXFP4 are finite takes about 100 MB for a moment."""
_INTEGER_BLOCK_BYTES = 8 * 2**20
"""The same of integers: their scales alone are checked, and files in the order of inputs are read through for each
block of outputs.
"""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Checkpoint tensors of which this rank has a part, bytes read from files, seconds."""

    num_tensors: int
    num_bytes_read: int
    seconds: float

    def __str__(self) -> str:
        if not self.num_bytes_read:
            return f"{self.num_tensors} dummy tensors"
        gigabytes = self.num_bytes_read / 1e9
        return f"{self.num_tensors} tensors, {gigabytes:.2f} GB at {gigabytes / max(self.seconds, 1e-9):.2f} GB/s"


class WeightStore:
    """Fills, packs and writes the weights of `layers`. `stage_slices` are the slices of any pipeline stage."""

    def __init__(
        self,
        names: CheckpointNames,
        layers: Mapping[str, CheckpointLayer],
        dtype: torch.dtype,
        stage_slices: Callable[[Stage], list[WeightSlice]],
        *,
        allows_nonfinite: bool = False,
        stored_tensors: Mapping[tuple[str, ...], StoredFormat] | None = None,
        stored_experts: Mapping[int, StoredFormat] | None = None,
        can_dequantise: bool = False,
    ) -> None:
        """`stored_tensors`, by the names of those of a linear layer, are held as files store them on the ranks that
        have them, and so are all experts of the layers `stored_experts`; those that files have otherwise are
        dequantised instead, if it `can_dequantise`, and refused else.
        """
        self._stored_together, self._stored_experts = [*(stored_tensors or {})], dict(stored_experts or {})
        self._stored_tensors = {name: each for names, each in (stored_tensors or {}).items() for name in names}
        self._can_dequantise = can_dequantise
        self.names, self._layers, self._dtype, self._stage_slices = names, layers, dtype, stage_slices
        self.allows_nonfinite = allows_nonfinite
        self.update = WeightUpdate(names.tied)
        self._merged: dict[str, int] = {}

    @cached_property
    def slices(self) -> list[WeightSlice]:
        return self.names.slices(self._layers)

    @property
    def paddings(self) -> list[PaddingSlice]:
        """Regions of parameters that no checkpoint tensor fills."""
        return [piece for name, layer in self._layers.items() for piece in layer.padding_slices(name)]

    @cached_property
    def tensors(self) -> dict[str, ModelTensor]:
        """All checkpoint tensors of the model by name, those of other stages too."""
        tensors = self.names.tensors(self._stage_slices)
        assert all(tensors[each.checkpoint_name].shape == each.checkpoint_shape for each in self.slices), "shapes"
        return tensors

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @cached_property
    def separate(self) -> dict[str, tuple[str, tuple[int, int]]]:
        """`CheckpointNames.separate_rows` of the model's tensors, which trainers may give in place of those."""
        return self.names.separate_rows(self.tensors)

    @property
    def separate_slices(self) -> Iterator[WeightSlice]:
        """`slices`, of tensors that are separate in memory in place of those that the checkpoint has joined."""
        inside: dict[str, list[tuple[str, tuple[int, int]]]] = {}
        for name, (joined, rows) in self.separate.items():
            inside.setdefault(joined, []).append((name, rows))
        for piece in self.slices:
            for name, (start, stop) in inside.get(piece.checkpoint_name, ()):
                (first, last), *others = piece.source
                if start <= first < last <= stop:
                    shape, source = self.given_shape(name), ((first - start, last - start), *others)
                    yield replace(piece, checkpoint_name=name, checkpoint_shape=shape, source=source)
            if piece.checkpoint_name not in inside:
                yield piece

    def joined(self, name: str) -> str:
        """Name of the checkpoint tensor that has a tensor which may be separate in memory."""
        return self.separate[name][0] if name in self.separate else name

    def given_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor as a trainer has it."""
        if name not in self.separate:
            return self.shapes[name]
        joined, (start, stop) = self.separate[name]
        return (stop - start, *self.shapes[joined][1:])

    @cached_property
    def held(self) -> dict[str, HeldWeight]:
        """Weights of which this rank has slices, by name."""
        return held_weights(self.slices, self._layers)

    def held_of(self, name: str) -> HeldWeight | None:
        """This rank's slices of a tensor, which may be separate in memory; None without one."""
        whole = self.held.get(self.joined(name))
        return whole if whole is None or name not in self.separate else whole.of_rows(*self.separate[name][1])

    def record(self, name: str, content: Tensor | str, source: WeightSource | None = None) -> None:
        """A tensor was loaded (`WeightUpdate.add`), from `source` or by a trainer. One of the checkpoint is loaded with
        the last of those that are separate in memory.
        """
        self.update.add(name, content)
        joined, digests = self.joined(name), self.update.digests
        if joined != name:
            parts = [digests.get(each, "") for each, (of, _) in self.separate.items() if of == joined]
            if all(parts):
                self.update.add(joined, " ".join(("parts", *parts)))
        self._note_merged(joined, source)

    def writing(self, names: Collection[str]) -> AbstractContextManager[None]:
        """`WeightUpdate.writing` of tensors that may be separate in memory."""
        return self.update.writing([*names, *map(self.joined, names)])

    def report(self) -> WeightUpdateReport | None:
        """`WeightUpdate.report`. Of a tensor whose separate ones were given in part those are missing that were not."""
        found = self.update.report(self.tensors, self.buffer_names)
        if found is None or not self.separate:
            return found
        digests, missing, must_be_complete, rejected_calls, has_all, head_fault = found
        absent = {joined: [name for name, (of, _) in self.separate.items() if of == joined] for joined in missing}
        given = {joined for joined, names in absent.items() if any(name in digests for name in names)}
        named = [
            [each for each in absent[name] if each not in digests] if name in given else [name] for name in missing
        ]
        missing = [each for names in named for each in names]
        return digests, missing, must_be_complete, rejected_calls, has_all, head_fault

    @cached_property
    def buffer_names(self) -> frozenset[str]:
        """Names of buffers, which an update may omit and `sleep(level=2)` keeps."""
        return frozenset(name for name, tensor in self.tensors.items() if tensor.is_buffer)

    @property
    def merged_adapters(self) -> frozenset[int]:
        """Digests of the adapters that are in weights, those of other ranks too; a trainer's tensors have none."""
        return frozenset(self._merged.values())

    def _note_merged(self, name: str, source: WeightSource | None) -> None:
        if isinstance(source, MergedWeights) and name in source.updates:
            self._merged[name] = source.digest
        else:
            self._merged.pop(name, None)

    @property
    def buffer_parameters(self) -> frozenset[str]:
        """Names of this stage's parameters for buffers."""
        held = [self.held[name] for name in self.buffer_names if name in self.held]
        return frozenset(each.piece.parameter_name for weight in held for each in weight.pieces)

    @contextmanager
    def open(
        self, folder: Path, quantization: Quantization | None = None, staging: HostStaging = HOST
    ) -> Iterator[WeightSource]:
        """The files of a folder with the names of the family's table, dequantised on the device of `staging`."""
        with open_checkpoint(folder, staging) as files:
            files.rename(self.names.parts)
            if (copied := self.names.embedding_in(files.shapes())) is not None:
                files.add_copy(*copied)
            cuts = self.names.recut_rows(files.shapes())
            if quantization is not None:
                yield DequantisedCheckpoint.open(files, quantization, self.names.is_transposed, cuts)
            else:
                yield recut(files, cuts)

    def dummy(self, seed: int = 0, staging: HostStaging = HOST) -> WeightSource:
        return DummyWeights(self.tensors, self.slices, seed, staging)

    @torch.no_grad()
    def fill(self, source: WeightSource, num_threads: int = 1, block_bytes: int | None = None) -> LoadReport:
        """Fill all parameters, not packed yet or by `pack_empty`, from the source. Idempotent. On the CPU weights are
        quantised meanwhile, where a rank has complete rows. Threads, which must not start others
        (`use_single_threaded_torch`), share the blocks; on the CPU files are read by one, the fastest way there unless
        weights are packed meanwhile.

        Raises CheckpointError: before anything is written, for wrong names, shapes, dtypes or coverage; later, for a
        file that cannot be read, a tied head that differs and an element that is not finite.
        """
        start_s, num_bytes_before = time.perf_counter(), source.num_bytes_read
        self._check_names(source, parameter_problems(self.slices, self.paddings, _shapes(self._layers)))
        if self._can_dequantise:
            self._dequantise_others(source)
        else:
            self._check_stored(source)
        pieces = [(name, each) for name, weight in self.held.items() for each in (*weight.pieces, *weight.copies)]
        pieces = [(name, each) for name, each in pieces if not each.piece.is_empty]
        pieces.sort(key=lambda pair: (source.position(pair[0]), pair[1].piece.source))
        jobs: list[tuple[HeldPiece, Rectangle]] = []
        is_on_host = source.staging.device.type == "cpu"
        for name, held in pieces:
            _check_tied(source, self.names.tied, name, held.piece.source)
            if held.stored is not None:
                jobs += [(held, block) for block in _stored_blocks(held)]
                continue
            blocks = [*source.blocks(name, held.piece.source, block_bytes or _BLOCK_BYTES)]
            if is_on_host and held.is_quantised_when_filled and not all(map(held.is_complete, blocks)):
                blocks = [held.piece.source]
            jobs += [(held, block) for block in blocks]
        if is_on_host:
            for layer in self._layers.values():
                if isinstance(layer, PackedLayer):
                    layer.quantise_empty()
        parameters = _parameters(self._layers)
        # Threads do not take over a caller's inference mode, in which the parameters may have been made.
        write = partial(self._write_block, source, torch.is_inference_mode_enabled())
        try:
            if num_threads == 1:
                flags = list(map(write, jobs))
            else:
                with ThreadPoolExecutor(num_threads, "fill-weights", use_single_threaded_torch) as threads:
                    # In order of the files; after an error no further block is begun.
                    flags = list(threads.map(write, jobs))
        finally:
            # After an error too: a caller may free the parameters, which copies still write.
            source.staging.finish()
        self._raise_not_finite(source, jobs, flags)
        for _, held in pieces:
            if (found := stored_scales(source, held)) is not None:
                layer, scales = found
                layer.keep_scales(held.rows, scales)
        for padding in self.paddings:
            module, _, own = padding.parameter_name.rpartition(".")
            padded = self._layers[module]
            # Packed before, it began with zeros.
            if not (own == "weight" and isinstance(padded, PackedLayer) and padded.is_packed):
                region = tuple(slice(*bounds) for bounds in padding.destination)
                parameters[padding.parameter_name].data[region].zero_()
        for name in self.tensors:
            self._note_merged(name, source)
        num_tensors = len({name for name, _ in pieces})
        return LoadReport(num_tensors, source.num_bytes_read - num_bytes_before, time.perf_counter() - start_s)

    def pack_empty(self) -> None:
        """Have weights packed while they are filled, where blocks of them are full rows."""
        transposed = {
            id(each.layer) for weight in self.held.values() for each in weight.pieces if each.piece.is_transposed
        }
        for layer in self._layers.values():
            if isinstance(layer, PackedLayer) and id(layer) not in transposed:
                layer.pack_empty()

    def pack(self) -> None:
        """Pack the weights of all `PackedLayer`, after they are filled."""
        for layer in self._layers.values():
            if isinstance(layer, PackedLayer):
                layer.pack_weights()

    @torch.no_grad()
    def reload(self, source: WeightSource) -> None:
        """Update all weights from files. Raises CheckpointError as `fill` does, and RuntimeError as `load` does."""
        self.check_covered(source)
        for name, shape in self.shapes.items():
            _check_tied(source, self.names.tied, name, full_rectangle(shape))
        self.update.forget_tied_head()
        for name in sorted(self.tensors, key=source.position):
            tensor = source.read(name, full_rectangle(self.shapes[name]))
            self._write(name, tensor, _in_file(source, name), source)
            for held in self.held[name].pieces if name in self.held else ():
                if (found := stored_scales(source, held)) is not None:
                    layer, scales = found
                    values = tensor[tuple(slice(*bounds) for bounds in held.piece.source)]
                    layer.write_scaled(held.rows, values, scales)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace weights by full checkpoint tensors: any of them, in any order, any number of times.

        They are of any floating-point dtype and device, and are written one after the other, in place, with one copy of
        this rank's slice of a tensor at a time (two of the packed weight with oneDNN). Not a collective, but every rank
        must be given the same tensors. The first opens `update`, which has to be committed before a step runs. Returns
        the names of which this rank has a part; tensors of other stages and a tied head are skipped.

        Raises RuntimeError while requests are in flight. Raises CheckpointError, the same on every rank, for an unknown
        name and for a tensor that is misshapen, sharded, without data or, unless allowed, not finite: that tensor is
        not written, and of a collection, such as a list, none is if a name or shape is wrong. Raises TypeError for
        anything but a name and a tensor.
        """
        if isinstance(weights, Collection):
            self.check_whole(weights)
        # Trainers call this directly, too.
        found = set()
        for name, tensor in self._normalised(weights):
            with host_by_default():
                if self._write(name, tensor, f"{name}:"):
                    found.add(self.joined(name))
        return found

    def check_whole(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise CheckpointError for a wrong name, shape or dtype of full tensors, TypeError for anything else."""
        for name, tensor in self._normalised(weights):
            self._check_tensor(name, tensor)

    @contextmanager
    def as_checkpoint(self, **attributes: Any) -> Iterator[CheckpointView]:
        """This rank's weights by checkpoint name, to read and to change. Changes are written at the end, also after an
        exception, because some are made at once and a tied head must follow its embedding. Raises CheckpointError for
        rejected changes, which `update` records: other ranks may have made theirs.
        """
        self.update.check_awake()
        self.update.num_calls += 1
        # The embedding may be changed.
        self.update.embedding_digest = ""
        names = {name: name for name in self.held}
        embedding, head = self.names.tied or ("", "")
        if embedding in self.held and self.names.is_last_stage:
            names[head] = embedding
        view = CheckpointView(self.held, names, self.load, self._check_change, **attributes)
        try:
            yield view
        finally:
            try:
                view.write_back()
            except CheckpointError:
                self.update.rejected_calls.append(self.update.num_calls)
                raise

    def _write(self, name: str, tensor: Tensor, subject: str, source: WeightSource | None = None) -> bool:
        """Write and record one full tensor; whether this rank has a part of it. Errors begin with `subject`. `source`
        has the tensor; None: it is a trainer's.
        """
        self._check_tensor(name, tensor, is_from_trainer=source is None)
        is_head = self.is_tied_head(name)
        # A tied head is compared with the embedding, which is checked.
        if not is_head and not self.allows_nonfinite:
            check_finite(subject, self.to_check(name, tensor.detach()), self.dtype_of(name))
        own = self.held_of(name)
        stored_pieces = [] if source is None or own is None or self._stored_format(name) is None else own.pieces
        jobs = [(held, block) for held in stored_pieces for block in _stored_blocks(held)]
        for held, block in jobs:
            # Factors of kernels may be infinite where the values are not.
            assert source is not None, name
            self._check_block(source, name, block, held.stored_values(block, *read_stored(source, held, block)))
        # A signal must not come between writing and recording.
        with deferred_signals():
            self.update.begin()
            if is_head:
                self.update.add_tied_head(tensor)
                return False
            for held, block in jobs:
                assert source is not None, name
                held.write_stored(block, *read_stored(source, held, block))
            if own is not None and not stored_pieces:
                own.load(tensor)
            self.record(name, tensor, source)
        return own is not None

    def _normalised(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Tensors by checkpoint name, stacked experts separated, without derived ones except a tied head."""
        for given_name, tensor in pairs_of(tensors):
            for name, view in self.parts_of(given_name, tensor.shape):
                if view is not None:
                    check_data(given_name, tensor)
                yield name, tensor if view is None else view.of(tensor)

    def parts_of(self, given_name: str, shape: Sequence[int]) -> Iterator[tuple[str, TensorView | None]]:
        """The tensors of the model in one of this name and shape, and their views in it, None for the tensor itself;
        without derived ones except a tied head. Raises CheckpointError for an unknown name.
        """
        for name, view in self.names.parts(given_name, shape).items():
            is_head = self.is_tied_head(name)
            if self.names.is_derived(name) and not is_head:
                continue
            if name not in self.tensors and name not in self.separate and not is_head:
                has_stored = self._stored_tensors or self._stored_experts
                words = "; parts of weights as stored are replaced by reload_weights" if has_stored else ""
                # Names of the checkpoint behind a wrapper's prefix (`module.`) are near too.
                near = hint(given_name.removeprefix("_"), self.tensors)
                raise CheckpointError(
                    f"{given_name}: the model has no such weight: use the names of its checkpoint{words}{near}"
                )
            yield name, view

    def _stored_format(self, name: str) -> StoredFormat | None:
        """Format in which a weight of any rank is held as files store it; None if it is not."""
        layer = self.names.layer_of_expert(name) if self._stored_experts else None
        return self._stored_tensors.get(self.joined(name)) if layer is None else self._stored_experts.get(layer)

    def _check_tensor(self, name: str, tensor: Tensor, *, is_from_trainer: bool = True) -> None:
        """Raise CheckpointError for a shape or dtype the weight cannot have; a tied head is checked at the commit."""
        self.check_shape(name, tensor.shape, is_from_trainer=is_from_trainer)
        check_data(name, tensor)

    def check_shape(self, name: str, shape: Sequence[int], *, is_from_trainer: bool = True) -> None:
        """Raise CheckpointError for a shape that the weight cannot have, and for one that no trainer can replace."""
        stored = self._stored_format(name) if is_from_trainer else None
        if stored is not None:
            raise CheckpointError(f"{name}: {stored_weight_error(stored)}")
        if not self.is_tied_head(name) and tuple(shape) != (expected := self.given_shape(name)):
            raise CheckpointError(f"{name}: has the shape {list(shape)}, but the model's has {list(expected)}")

    def _check_change(self, name: str, values: Tensor) -> None:
        """Raise CheckpointError if `apply_model` may not replace this rank's slices by `values`."""
        held = self.held[name]
        shape, given = list(held.shape), list(values.shape)
        if given != shape:
            raise CheckpointError(
                f"{name}: has the shape {shape} on this rank, not {given}: only its values can be changed"
            )
        if not self.allows_nonfinite:
            check_finite(f"{name}: this rank's slice", self.to_check(name, values), self.dtype_of(name))
        held.check_changes(values)

    def check_covered(self, source: WeightSource) -> None:
        """Raise CheckpointError unless the source has the model's tensors and, except ignorable ones, no others, and
        stores those that are held as stored in their format.
        """
        self._check_names(source)
        self._check_stored(source)

    def _check_names(self, source: WeightSource, other_problems: Iterable[str] = ()) -> None:
        found = {name: source.shape(name) for name in source.names()}
        problems = checkpoint_problems(
            self.shapes, found, ignorable=lambda name: self.names.is_derived(name) or source.is_unused(name)
        )
        raise_problems(source.folder, [*problems, *other_problems])
        for name in self.tensors:
            source.dtype(name)

    def _check_stored(self, source: WeightSource) -> None:
        for name in self.tensors:
            if (stored := self._stored_format(name)) is not None:
                _dequantised(source, name).check_stored(name, stored)

    def _dequantise_others(self, source: WeightSource) -> None:
        """Hold weights plain that the source does not store in their format, with all of their linear layer, or all
        experts of their decoder layer: those of every rank and stage, so that all refuse the same updates.
        """
        formats = {name: each for name in self.tensors if (each := self._stored_format(name)) is not None}
        others = [name for name, each in formats.items() if not _is_stored_as(source, name, each)]
        if not others:
            return
        logger.info(
            "%s: %d weights, such as %s, are not stored in %s, as config.json says: they are held in the run's dtype, "
            "and a plan does not know of them",
            *(source.folder, len(others), others[0], formats[others[0]].words),
            extra=SAME_ON_EVERY_RANK,
        )
        lost = {name for names in self._stored_together if not set(others).isdisjoint(names) for name in names}
        layers = {self.names.layer_of_expert(name) for name in others} - {None}
        for name, held in self.held.items():
            if name in lost or self.names.layer_of_expert(name) in layers:
                for piece in held.pieces:
                    if isinstance(piece.layer, PackedLayer) and piece.layer.stored is not None:
                        piece.layer.hold_plain()
        self._stored_tensors = {name: each for name, each in self._stored_tensors.items() if name not in lost}
        self._stored_experts = {index: each for index, each in self._stored_experts.items() if index not in layers}

    @torch.no_grad()
    def _write_block(self, source: WeightSource, is_inference: bool, job: tuple[HeldPiece, Rectangle]) -> Tensor | None:
        """Read and write one block. Raises CheckpointError if it is not finite; on a GPU, whose answer would have to be
        waited for, the flag is returned.
        """
        held, block = job
        name, flag = held.piece.checkpoint_name, None
        alone = _LARGE_BLOCKS if volume(block) > _BLOCK_BYTES else nullcontext()
        with torch.inference_mode(is_inference), source.staging.thread(), alone:
            if held.stored is None:
                values = source.read(name, block)
                flag = self._finite_flag(source, name, block, values)
                held.fill_block(block, values)
            else:
                parts = read_stored(source, held, block)
                if not are_surely_finite(held.stored, *parts, self.dtype_of(name)):
                    flag = self._finite_flag(source, name, block, held.stored_values(block, *parts))
                held.write_stored(block, *parts)
        return flag

    def _finite_flag(self, source: WeightSource, name: str, block: Rectangle, values: Tensor) -> Tensor | None:
        """The flag of `_write_block`; None if nothing is left to check."""
        if self.allows_nonfinite:
            return None
        if source.staging.device.type == "cpu":
            self._check_block(source, name, block, values)
            return None
        return finite_flag(self.to_check(name, values), self.dtype_of(name))

    def _check_block(self, source: WeightSource, name: str, block: Rectangle, values: Tensor) -> None:
        starts = [start for start, _ in block]
        check_finite(_in_file(source, name), self.to_check(name, values), self.dtype_of(name), starts)

    def _raise_not_finite(
        self, source: WeightSource, jobs: Sequence[tuple[HeldPiece, Rectangle]], flags: Sequence[Tensor | None]
    ) -> None:
        """Raise CheckpointError for the first block whose flag says that it is not finite."""
        found = [(job, flag) for job, flag in zip(jobs, flags, strict=True) if flag is not None]
        if not found:
            return
        are_finite = torch.stack([flag for _, flag in found]).tolist()
        for ((held, block), _), is_finite in zip(found, are_finite, strict=True):
            if not is_finite:
                name = held.piece.checkpoint_name
                if held.stored is None:
                    values = source.read(name, block)
                else:
                    values = held.stored_values(block, *read_stored(source, held, block))
                self._check_block(source, name, block, values)

    def is_tied_head(self, name: str) -> bool:
        """Whether it is a head that the model does not have beside its embedding."""
        return self.names.tied is not None and name == self.names.tied[1]

    def to_check(self, name: str, values: Tensor) -> Tensor:
        """Numbers that are finite if these may be the weight's: bounds may be infinite."""
        return bounded(values) if self.tensors[self.joined(name)].is_bound else values

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype in which the model holds a weight that is not quantised."""
        return torch.float32 if self.tensors[self.joined(name)].is_float32 else self._dtype


def _parameters(layers: Mapping[str, CheckpointLayer]) -> dict[str, Tensor]:
    """Parameters to fill by name, each once. Asserts that they have storage: copies to the meta device do nothing."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, layer in layers.items():
        for own, parameter in layer.named_parameters(recurse=False):
            found.setdefault(id(parameter), (f"{name}.{own}".removeprefix("."), parameter))
    on_meta = [name for name, parameter in found.values() if parameter.is_meta]
    assert not on_meta, ("parameters without storage", on_meta[:3])
    return dict(found.values())


def _shapes(layers: Mapping[str, CheckpointLayer]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of `_parameters` as regions index them."""
    found: dict[int, tuple[str, tuple[int, ...]]] = {}
    for name, layer in layers.items():
        for own, parameter in layer.named_parameters(recurse=False):
            found.setdefault(id(parameter), (f"{name}.{own}".removeprefix("."), layer.shape_of(own)))
    return dict(found.values())


def _stored_blocks(held: HeldPiece) -> Iterator[Rectangle]:
    """Blocks in which a slice of a weight that is held as stored is read."""
    is_of_panels = held.stored is not None and held.stored.is_of_panels
    return held.stored_blocks(_INTEGER_BLOCK_BYTES if is_of_panels else _STORED_BLOCK_BYTES)


def _is_stored_as(source: WeightSource, name: str, stored: StoredFormat) -> bool:
    source = source_of(source, name)
    return isinstance(source, DequantisedCheckpoint) and source.is_stored_as(name, stored)


def _dequantised(source: WeightSource, name: str) -> DequantisedCheckpoint:
    """A source of a weight as it is stored. Raises CheckpointError."""
    source = source_of(source, name)
    if not isinstance(source, DequantisedCheckpoint):
        raise CheckpointError(
            f"{source.folder}: has no quantised weights, and weights are held as files store them: set "
            f"model.dequantize_weights=true"
        )
    return source


def read_stored(source: WeightSource, held: HeldPiece, block: Rectangle) -> tuple[Tensor, Tensor]:
    """Numbers and scales of a block of `HeldPiece.stored_blocks`."""
    assert held.stored is not None, held.piece
    return _dequantised(source, held.piece.checkpoint_name).read_stored(held.piece.checkpoint_name, block, held.stored)


def _check_tied(source: WeightSource, tied: tuple[str, str] | None, name: str, region: Rectangle) -> None:
    """Raise CheckpointError if files have a tied head that differs in this region, should `name` be the embedding."""
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


def stored_scales(source: WeightSource, held: HeldPiece) -> tuple[PackedLayer, Tensor] | None:
    """The slice's layer, and scales with which its numbers are computed as they are stored; None if they are not."""
    layer, source = held.layer, source_of(source, held.piece.checkpoint_name)
    if not isinstance(source, DequantisedCheckpoint) or not isinstance(layer, PackedLayer) or held.piece.is_transposed:
        return None
    if layer.scale_kernels(held.parameter) is None or len(held.piece.source) != 2:
        return None
    scales = source.row_scales(held.piece.checkpoint_name, held.piece.source)
    return None if scales is None else (layer, scales)


def _in_file(source: WeightSource, name: str) -> str:
    return f"{source.folder / source.position(name)[0]}: tensor {name!r}"


def _is_same(source: WeightSource, name: str, other: str, block: Rectangle) -> bool:
    """Bitwise, so that NaN equals itself."""
    # Both at once: staging may have one buffer.
    first, second = source.read(name, block).clone(), source.read(other, block)
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
