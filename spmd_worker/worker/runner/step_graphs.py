"""Whole steps as CUDA graphs: what a step's layers launch is recorded once for each number of tokens, and launched at
once from then on. The host's part of a step is a few copies then, however many layers there are.

Steps are filled up to one of a few sizes with tokens that are nobody's. They change no bit of the others: a row's
arithmetic does not know what is beside it, and attention has no work for them. So one graph serves decoding rows,
chunks of prompts and both together. What a step is about stands in tensors that stay where they are; weights and cache
are read where they were when a graph was recorded, and where they have moved all graphs are recorded anew.

A size's first step runs launch by launch, in the same tensors: kernels that are not compiled yet are, and the step has
its result. Then its graph is recorded, which computes nothing. All graphs share one pool of memory, because one runs
after the other.

T: tokens of the step; R: rows that sample; H: width of the hidden states.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.ops.attention.backend import FixedAttention
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.worker.runner.batch import Batch

logger = logging.getLogger(__name__)

_SMALL_SIZES = (8, 16, 32, 64)
"""The kernels' tiles have 64 rows: with fewer tokens what is filled up costs next to nothing."""
_FINEST = 64
_STEPS_AN_OCTAVE = 4
"""From one power of two to the next, where that is more than _FINEST: from there at most a fifth is filled up."""


class StepGraph(Protocol):
    """Launches that were recorded, to be launched again."""

    def record(self, launch: Callable[[], None]) -> None:
        """Note what `launch` launches, without running it. Raises RuntimeError for what cannot be recorded."""

    def replay(self) -> None:
        """Launch it all, in the order of the stream."""


class CudaGraphs:
    """Makes graphs that share a pool of memory. The current device is theirs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self) -> StepGraph:
        """A new one, of nothing yet."""
        return _CudaGraph(self._pool)


class _CudaGraph:
    """Implements `StepGraph`."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def record(self, launch: Callable[[], None]) -> None:
        """See `StepGraph.record`. What other threads of a trainer's ask of CUDA meanwhile does not spoil it."""
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            launch()

    def replay(self) -> None:
        self._graph.replay()


def graph_sizes(most: int) -> tuple[int, ...]:
    """The numbers of tokens that graphs are recorded for, in order; the last is `most`."""
    sizes = [*_SMALL_SIZES]
    while sizes[-1] < most:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(_FINEST, octave // _STEPS_AN_OCTAVE))
    return (*[size for size in sizes if size < most], most)


class StepGraphs:
    """Of one model and cache. `max_tokens` and `max_seqs` of a step; `new_graph` makes an empty graph; `start_anew`
    brings exchanges between ranks, where there are some, into a state that every launch of a graph finds again
    (`PeerSums.start_anew`).
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        attention: FixedAttention,
        new_graph: Callable[[], StepGraph],
        max_tokens: int,
        max_seqs: int,
        start_anew: Callable[[], None] | None = None,
    ) -> None:
        self.sizes, self._max_seqs = graph_sizes(max_tokens), max_seqs
        self._model, self._attention, self._new_graph = model, attention, new_graph
        self._start_anew = start_anew or _nothing
        self._device = next(model.parameters()).device
        self._token_ids, self._positions, self._regimes = (
            torch.zeros(max_tokens, dtype=torch.int64, device=self._device) for _ in range(3)
        )
        self._regimes_of: Tensor | None = None
        # Made with the first step, which shows their shapes.
        self._incoming = self._hidden = self._sampled = self._largest = self._columns = torch.empty(0)
        self._graphs: dict[tuple[str, int], StepGraph] = {}
        self._addresses: tuple[int, ...] = ()
        self._must_look, self._records = True, True

    @property
    def num_recorded(self) -> int:
        """Graphs that are there now."""
        return len(self._graphs)

    def takes(self, batch: Batch) -> bool:
        """Whether a step is one of those that are recorded."""
        return len(batch.token_ids) <= self.sizes[-1] and len(batch.attention.context_lengths) <= self._max_seqs

    def forward(self, batch: Batch, cache: Tensor, incoming: Tensor | None) -> Tensor:
        """See `DecoderStack.forward` -> [T, H], which the next step overwrites."""
        count = len(batch.token_ids)
        size = self._size_for(count)
        self._check_addresses(cache)
        self._token_ids[:count] = batch.token_ids
        self._positions[:count] = batch.positions
        if batch.rope_regimes is not self._regimes_of:
            # Those of rows that go on are the last step's.
            self._regimes[:count] = batch.rope_regimes
            self._regimes_of = batch.rope_regimes
        if incoming is not None:
            self._incoming = self._room(self._incoming, incoming, self.sizes[-1])
            self._incoming[:count] = incoming
        metadata = self._attention.fill(batch.attention, size)
        self._run(("layers", size), partial(self._compute, size, cache, metadata, incoming is not None))
        return self._hidden[:count]

    def argmax(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`hidden` [T, H] and which of its rows sample, int64 [R] -> `DecoderForCausalLM.argmax_logits` of these, which
        the next step overwrites.
        """
        count = len(rows)
        if not 0 < count <= self._max_seqs:
            return self._model.argmax_logits(hidden[rows])
        size = min(self._size_for(count), self._max_seqs)
        self._sampled = self._room(self._sampled, hidden, self._max_seqs)
        self._sampled[:count] = hidden[rows]
        self._run(("head", size), partial(self._compute_largest, size))
        return self._largest[:count], self._columns[:count]

    def look_at_addresses(self) -> None:
        """Somebody may have put weights elsewhere: the next step looks."""
        self._must_look = True

    def forget(self) -> None:
        """Give back what graphs hold. Those that are met again are recorded again."""
        self._graphs.clear()

    def _size_for(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def _compute(self, size: int, cache: Tensor, metadata: AttentionMetadata, has_incoming: bool) -> None:
        self._start_anew()
        tokens = (self._token_ids[:size], self._positions[:size], self._regimes[:size])
        incoming = self._incoming[:size] if has_incoming else None
        hidden = self._model(*tokens, cache, metadata, incoming)
        self._hidden = self._room(self._hidden, hidden, self.sizes[-1])
        self._hidden[:size] = hidden
        self._start_anew()

    def _compute_largest(self, size: int) -> None:
        self._start_anew()
        largest, columns = self._model.argmax_logits(self._sampled[:size])
        self._largest = self._room(self._largest, largest, self._max_seqs)
        self._columns = self._room(self._columns, columns, self._max_seqs)
        self._largest[:size], self._columns[:size] = largest, columns
        self._start_anew()

    def _run(self, key: tuple[str, int], launch: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        launch()
        if self._records:
            self._record(key, launch)

    def _record(self, key: tuple[str, int], launch: Callable[[], None]) -> None:
        graph = self._new_graph()
        try:
            graph.record(launch)
        except RuntimeError as error:
            # The step has its result, and so have all others.
            self._records = False
            self._graphs.clear()
            logger.warning(
                "steps are launched kernel by kernel, because they could not be recorded as CUDA graphs: %s; "
                "executor.enforce_eager=true leaves it out",
                error,
            )
        else:
            self._graphs[key] = graph

    def _room(self, room: Tensor, like: Tensor, num_rows: int) -> Tensor:
        """Itself, once there is some: [num_rows, ...] of the width and dtype of `like`."""
        return room if room.numel() else like.new_zeros((num_rows, *like.shape[1:]))

    def _check_addresses(self, cache: Tensor) -> None:
        """Drop all graphs where weights or cache are not where they were."""
        if not self._must_look and cache.data_ptr() == self._addresses[0]:
            return
        tensors = (cache, *self._model.parameters(), *self._model.buffers())
        addresses = tuple([tensor.data_ptr() for tensor in tensors])
        if addresses != self._addresses:
            self.forget()
        self._addresses, self._must_look = addresses, False


def _nothing() -> None:
    return
