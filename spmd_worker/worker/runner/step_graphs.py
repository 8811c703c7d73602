"""Complete steps as CUDA graphs: the launches of a step's layers are recorded once per number of tokens, then replayed.

Steps are padded to one of a few sizes. Padding tokens change no bit of the others: a row's arithmetic does not depend
on its batch, and attention skips them. One graph serves decode rows, prompt chunks and both together; attention may
ask for another where it needs fewer launches (`AttentionMetadata.kind`), as for short rows that all decode. Steps with
adapters have graphs of their own, for any adapters of their rows; they are recorded again when other layers are
adapted. So have steps whose tokens have three positions, as those of rows with images; steps whose tokens see later
ones, or that replay drafts, have none. A step's inputs are copied to fixed tensors; weights, cache and recurrent states
are read at the recorded addresses, and if these change, all graphs are recorded again.

The first step of a size runs launch by launch in the same tensors, which compiles missing kernels and gives the step
its result. Then its graph is recorded, which computes nothing. All graphs share one memory pool: they never overlap.

T: tokens of the step; R: rows that sample; H: width of the hidden states.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kv_cache.cache_engine import LayerCaches
from kv_cache.layer_states import LayerStates
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.ops.attention.backend import FixedAttention
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.worker.runner.batch import Batch

logger = logging.getLogger(__name__)

_SMALL_SIZES = (8, 16, 32, 64)
"""The kernels' tiles have 64 rows, so padding below that costs next to nothing."""
_FINEST = 64
_LAYERS, _ADAPTED = "layers", "adapted layers"
_OF_THREE_POSITIONS = " of three positions"
_SIZES_AN_OCTAVE = 4
"""Sizes from one power of two to the next, at least _FINEST apart: at most a fifth of a larger step is padding."""


class StepGraph(Protocol):
    """Recorded launches."""

    def record(self, launch: Callable[[], None]) -> None:
        """Record the launches of `launch` without running them. Raises RuntimeError if that is not possible."""

    def replay(self) -> None:
        """Launch them again, in stream order."""


class CudaGraph:
    """Implements `StepGraph` on the current device; `pool` is the graphs' memory pool."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def record(self, launch: Callable[[], None]) -> None:
        # thread_local: CUDA calls of a trainer's other threads do not break the capture.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            launch()

    def replay(self) -> None:
        self._graph.replay()


def graph_sizes(max_tokens: int) -> tuple[int, ...]:
    """The numbers of tokens that graphs are recorded for, ascending to `max_tokens`."""
    sizes = [*_SMALL_SIZES]
    while sizes[-1] < max_tokens:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(_FINEST, octave // _SIZES_AN_OCTAVE))
    return (*[size for size in sizes if size < max_tokens], max_tokens)


class StepGraphs:
    """The graphs of one model and cache, for steps of at most `max_tokens` and `max_seqs`. `new_graph` makes an empty
    graph. `reset_sums`, called at the start and the end of a graph, resets exchanges between ranks to the state that
    every replay expects (`PeerSums.reset_sums`). `adapters`: those that rows may have, None: they have none.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        attention: FixedAttention,
        new_graph: Callable[[], StepGraph],
        max_tokens: int,
        max_seqs: int,
        reset_sums: Callable[[], None] | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        self.sizes, self._max_seqs = graph_sizes(max_tokens), max_seqs
        self._model, self._attention, self._new_graph, self._adapters = model, attention, new_graph, adapters
        self._reset_sums = reset_sums or (lambda: None)
        self._device = next(model.parameters()).device
        self._token_ids, self._positions, self._regimes = (
            torch.zeros(max_tokens, dtype=torch.int64, device=self._device) for _ in range(3)
        )
        # Allocated by the first step that has some.
        self._rope_positions = self._token_ids.new_empty((3, 0))
        self._adapter_slots = torch.full((max_tokens,), -1, dtype=torch.int32, device=self._device)
        self._rows = torch.zeros(max_seqs, dtype=torch.int64, device=self._device)
        self._regimes_of: Tensor | None = None
        self._adapter_slots_of: Tensor | None = None
        self._adapted_layers: frozenset[str] = frozenset()
        self._rows_of: Tensor | None = None
        # Allocated by the first step, which has their shapes.
        self._incoming = self._hidden = self._values = self._columns = torch.empty(0)
        self._graphs: dict[tuple[str, int, int], StepGraph] = {}
        """Key: layers, those of steps with adapters, or head; number of tokens; kind of attention."""
        self._addresses: tuple[int, ...] = ()
        self.recording_s = 0.0
        self._must_check_addresses, self._records = True, True

    @property
    def num_recorded(self) -> int:
        return len(self._graphs)

    def takes(self, batch: Batch) -> bool:
        fits = len(batch.token_ids) <= self.sizes[-1] and len(batch.attention.context_lengths) <= self._max_seqs
        return fits and batch.attention.is_causal and batch.attention.replay is None

    def forward(
        self, batch: Batch, cache: LayerCaches, incoming: Tensor | None, states: Sequence[LayerStates | None] = ()
    ) -> Tensor:
        """`DecoderStack.forward` -> [T, H], which the next step overwrites."""
        count = len(batch.token_ids)
        size = self._size_for(count)
        self._check_addresses(cache, states)
        self._token_ids[:count] = batch.token_ids
        self._positions[:count] = batch.positions
        if batch.rope_regimes is not self._regimes_of:
            # Rows that continue keep those of the last step.
            self._regimes[:count] = batch.rope_regimes
            self._regimes_of = batch.rope_regimes
        if batch.rope_positions is not None:
            if not self._rope_positions.numel():
                self._rope_positions = self._token_ids.new_zeros((3, self.sizes[-1]))
            self._rope_positions[:, :count] = batch.rope_positions
        if incoming is not None:
            self._incoming = _allocated(self._incoming, incoming, self.sizes[-1])
            self._incoming[:count] = incoming
        is_adapted = batch.adapter_slots is not None
        if batch.adapter_slots is not None:
            self._fill_adapters(batch.adapter_slots, size)
        metadata = self._attention.fill(batch.attention, size)
        has_three = batch.rope_positions is not None
        launch = partial(self._compute, size, cache, states, metadata, incoming is not None, is_adapted, has_three)
        layers = (_ADAPTED if is_adapted else _LAYERS) + _OF_THREE_POSITIONS * has_three
        self._run((layers, size, metadata.kind), launch)
        return self._hidden[:count]

    def argmax(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`DecoderForCausalLM.argmax_logits` of the sampled `rows`, int64 [R], of `hidden` [T, H], the result of
        `forward`; the next step overwrites the result.
        """
        count = len(rows)
        if not 0 < count <= self._max_seqs:
            return self._model.argmax_logits(hidden[rows])
        size = min(self._size_for(count), self._max_seqs)
        if rows is not self._rows_of:
            # Rows that continue keep those of the last step.
            self._rows[:count] = rows
            self._rows_of = rows
        self._run(("head", size, 0), partial(self._compute_argmax, size))
        return self._values[:count], self._columns[:count]

    def request_address_check(self) -> None:
        """Have the next step check whether weights were moved."""
        self._must_check_addresses = True

    def forget(self) -> None:
        """Drop all graphs and free their memory; later steps record them again."""
        self._graphs.clear()

    def _size_for(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def _fill_adapters(self, slots: Tensor, size: int) -> None:
        """Slots of a step's tokens, int32 [T]; padding tokens have none. Graphs lack the layers that were not adapted
        when they were recorded.
        """
        assert self._adapters is not None, "a row has an adapter, and the model takes none"
        if slots is not self._adapter_slots_of:
            # Rows that continue keep those of the last step.
            self._adapter_slots[: len(slots)] = slots
            self._adapter_slots[len(slots) : size] = -1
            self._adapter_slots_of = slots
        if self._adapters.adapted_layers != self._adapted_layers:
            self._adapted_layers = self._adapters.adapted_layers
            self._graphs = {key: graph for key, graph in self._graphs.items() if not key[0].startswith(_ADAPTED)}

    def _compute(
        self,
        size: int,
        cache: LayerCaches,
        states: Sequence[LayerStates | None],
        metadata: AttentionMetadata,
        has_incoming: bool,
        is_adapted: bool,
        has_three: bool,
    ) -> None:
        self._reset_sums()
        adapters = None
        if is_adapted and self._adapters is not None:
            adapters = self._adapters.step(self._adapter_slots[:size])
        tokens = (self._token_ids[:size], self._positions[:size], self._regimes[:size])
        incoming = self._incoming[:size] if has_incoming else None
        three = self._rope_positions[:, :size] if has_three else None
        inputs = (*tokens, cache, metadata, incoming)
        hidden = self._model(*inputs, adapters=adapters, states=states, rope_positions=three)
        self._hidden = _allocated(self._hidden, hidden, self.sizes[-1])
        self._hidden[:size] = hidden
        self._reset_sums()

    def _compute_argmax(self, size: int) -> None:
        self._reset_sums()
        # Rows from earlier steps pad them.
        values, columns = self._model.argmax_logits(self._hidden[self._rows[:size]])
        self._values = _allocated(self._values, values, self._max_seqs)
        self._columns = _allocated(self._columns, columns, self._max_seqs)
        self._values[:size], self._columns[:size] = values, columns
        self._reset_sums()

    def _run(self, key: tuple[str, int, int], launch: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        launch()
        if not self._records:
            return
        began_s = time.perf_counter()
        graph = self._new_graph()
        try:
            graph.record(launch)
        except RuntimeError as error:
            # The step has its result already.
            self._records = False
            self._graphs.clear()
            logger.warning(
                "steps are launched kernel by kernel, because they could not be recorded as CUDA graphs: %s; "
                "executor.enforce_eager=true skips the recording",
                error,
            )
        else:
            self._graphs[key] = graph
            self.recording_s += time.perf_counter() - began_s

    def _check_addresses(self, cache: LayerCaches, states: Sequence[LayerStates | None]) -> None:
        """Drop all graphs if weights, cache or states were moved."""
        caches = [cache] if isinstance(cache, Tensor) else [each for each in cache if each is not None]
        caches += [tensor for each in states if each is not None for tensor in each if tensor is not None]
        of_caches = tuple([each.data_ptr() for each in caches])
        if not self._must_check_addresses and of_caches == self._addresses[: len(of_caches)]:
            return
        tensors = (*self._model.parameters(), *self._model.buffers())
        addresses = (*of_caches, *[tensor.data_ptr() for tensor in tensors])
        if addresses != self._addresses:
            self.forget()
        self._addresses, self._must_check_addresses = addresses, False


def _allocated(buffer: Tensor, like: Tensor, num_rows: int) -> Tensor:
    """The buffer, allocated on first use: [num_rows, ...] with the width and dtype of `like`."""
    return buffer if buffer.numel() else like.new_zeros((num_rows, *like.shape[1:]))
