"""Runs our model of a hybrid checkpoint without engine or scheduler, in whatever steps a test likes, and shows the states
of its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kv_cache.block import BlockId, num_blocks_for
from kv_cache.layer_states import LayerStates
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.delta_net import DeltaNet
from spmd_worker.ops.kernels.recurrent import StateSegments
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.runner.batch import build_batch

BLOCK_SIZE = 16


def new_states(model: DecoderForCausalLM, num_slots: int) -> list[LayerStates | None]:
    """NaN in every slot: a state that a row does not own shows."""
    states: list[LayerStates | None] = []
    for layer in model.model.layers:
        net = getattr(layer, "linear_attn", None)
        if not isinstance(net, DeltaNet):
            states.append(None)
            continue
        config = net.config
        shape = (config.num_value_heads, config.key_size, config.value_size)
        tail = (config.kernel_size - 1, config.num_channels)
        states.append(
            LayerStates(
                torch.full((num_slots, *shape), torch.nan),
                torch.full((num_slots, *tail), torch.nan, dtype=model.model.dtype),
            )
        )
    return states


@dataclass(slots=True)
class HybridRun:
    """Rows with blocks and slots of their own; `states` may be another run's, with what is in its slots."""

    models: Sequence[DecoderForCausalLM]
    """Stages of a pipeline."""
    rows: list[list[int]]
    states: list[list[LayerStates | None]] = field(default_factory=list)
    sequences: list[MirroredSequence] = field(init=False)
    caches: list[list[Tensor | None]] = field(init=False)

    def __post_init__(self) -> None:
        num_blocks = [num_blocks_for(len(row), BLOCK_SIZE) for row in self.rows]
        starts = [sum(num_blocks[:index]) for index in range(len(self.rows) + 1)]
        self.sequences = [
            MirroredSequence(
                Request(RequestId(index), tuple(row), SamplingParams(temperature=0), index, 0),
                *(0, [], [BlockId(block) for block in range(start, stop)][::-1], 0, 0),
            )
            for index, (row, start, stop) in enumerate(zip(self.rows, starts, starts[1:]))
        ]
        self.states = self.states or [new_states(model, len(self.rows)) for model in self.models]
        self.caches = [[_cache(model, layer, starts[-1]) for layer in model.model.layers] for model in self.models]

    def has_more(self) -> bool:
        return any(each.num_computed_tokens < each.num_tokens for each in self.sequences)

    @torch.inference_mode()
    def step(self, chunk: int | None) -> list[tuple[int, Tensor]]:
        """Up to `chunk` tokens of each row -> the number of each row and its logits."""
        scheduled = []
        for sequence in self.sequences:
            left = sequence.num_tokens - sequence.num_computed_tokens
            if left:
                scheduled.append(ScheduledSequence(sequence, min(chunk or left, left), num_samples=0))
        batch = build_batch(scheduled, BLOCK_SIZE, torch.device("cpu"))
        indices = [int(each.sequence.request.request_id) for each in scheduled]
        numbers = (indices, batch.attention.query_starts, [each.sequence.num_computed_tokens for each in scheduled])
        segments = StateSegments(*(torch.tensor(each, dtype=torch.int32) for each in numbers))
        metadata = replace(batch.attention, segments=segments)
        tokens, hidden = (batch.token_ids, batch.positions, batch.rope_regimes), None
        for model, cache, states in zip(self.models, self.caches, self.states, strict=True):
            incoming = () if hidden is None else (hidden,)
            hidden = model(*tokens, cache, metadata, *incoming, states=states)
        assert hidden is not None
        logits = self.models[-1].compute_logits(hidden)[:, : self.models[-1].model_config.vocab_size]
        for each in scheduled:
            each.sequence.num_computed_tokens += each.num_scheduled_tokens
        starts = batch.attention.query_starts
        return [(index, logits[start:stop].clone()) for index, start, stop in zip(indices, starts, starts[1:])]

    def finish(self, chunk: int | None = None) -> list[Tensor]:
        """Logits [tokens, vocabulary] of each row."""
        parts: list[list[Tensor]] = [[] for _ in self.rows]
        while self.has_more():
            for index, logits in self.step(chunk):
                parts[index].append(logits)
        return [torch.cat(each) for each in parts]

    def row_states(self, row: int) -> list[Tensor]:
        """States and tails of the row's slot, of all layers."""
        each = [states for stage in self.states for states in stage if states is not None]
        return [tensor[row] for states in each for tensor in states if tensor is not None]


def _cache(model: DecoderForCausalLM, layer: Any, num_blocks: int) -> Tensor | None:
    """NaN where nothing was written; None for a layer without keys and values."""
    if not hasattr(layer, "self_attn"):
        return None
    attention = layer.self_attn
    shape = attention._backend.block_shape(attention.num_kv_heads, BLOCK_SIZE, attention.head_size)
    return torch.full((num_blocks, *shape), torch.nan, dtype=model.model.dtype)
