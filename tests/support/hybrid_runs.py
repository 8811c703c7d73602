"""Runs our model of a hybrid without engine or scheduler, in whatever steps a test likes, and shows the states of its
rows.

Blocks and slots are full of NaN where nothing was written, so that a key or a state that is not the row's own shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from our_model import next_batch
from torch import Tensor, nn

from kv_cache.block import BlockId, num_blocks_for
from kv_cache.layer_states import LayerStates
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.delta_net import DeltaNet
from spmd_worker.model.layers.mamba import Mamba
from spmd_worker.model.layers.mamba1 import Mamba1
from spmd_worker.model.layers.short_conv import ShortConv
from spmd_worker.ops.attention.backend import block_shape_of
from spmd_worker.ops.kernels.recurrent import StateSegments
from spmd_worker.replica.mirror.mirror import MirroredSequence
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.memory.estimate import block_layer

BLOCK_SIZE = 16


def state_shapes(layer: nn.Module) -> tuple[tuple[int, ...] | None, tuple[int, int]] | None:
    """Shapes of the state and of the tail of one sequence in a layer, on its rank; None for a layer without states."""
    mixer = getattr(layer, "conv", None)
    if isinstance(mixer, ShortConv):
        num_channels, _, num_taps = mixer.conv.weight.shape
        return None, (num_taps - 1, num_channels)
    mixer = getattr(layer, "linear_attn", None)
    if isinstance(mixer, DeltaNet):
        delta = mixer.config
        shape = (delta.num_value_heads, delta.key_size, delta.value_size)
        return shape, (delta.kernel_size - 1, delta.num_channels)
    mixer = getattr(layer, "mamba", None)
    if isinstance(mixer, Mamba1):
        channels = mixer.config
        return (channels.num_channels, channels.state_size), (channels.kernel_size - 1, channels.num_channels)
    if isinstance(mixer, Mamba):
        config = mixer.config
        tail = (config.kernel_size - 1, config.num_channels)
        return (config.num_heads, config.head_size, config.state_size), tail
    return None


def second_tail_shape(layer: nn.Module) -> tuple[int, int] | None:
    """Shape of the tail of the convolution of a layer's n-grams; None without them."""
    ngrams = layer.config.ngrams
    if ngrams is None:
        return None
    return ngrams.num_inputs_kept, ngrams.num_channels(layer.config.streams.num_streams * layer.hidden_size)


def new_states(model: DecoderForCausalLM, num_slots: int) -> list[LayerStates | None]:
    """States of each layer of the model."""
    found: list[LayerStates | None] = []
    for layer in model.model.layers:
        shapes = state_shapes(layer)
        if shapes is None:
            found.append(None)
            continue
        state, tail = shapes
        dtype, second = model.model.dtype, second_tail_shape(layer)
        found.append(
            LayerStates(
                None if state is None else torch.full((num_slots, *state), torch.nan),
                torch.full((num_slots, *tail), torch.nan, dtype=dtype),
                second_tail=None if second is None else torch.full((num_slots, *second), torch.nan, dtype=dtype),
            )
        )
    return found


@dataclass(slots=True)
class HybridRun:
    """Rows of tokens in a cache of their own. `models` are the stages of a pipeline. The slots of rows are in reverse;
    one more is nobody's. `digests` name the adapters of rows, those of `loaded`.
    """

    models: Sequence[DecoderForCausalLM]
    rows: Sequence[Sequence[int]]
    loaded: LoadedAdapters | None = None
    digests: Sequence[int] = ()
    states: list[list[LayerStates | None]] = field(init=False)
    caches: list[list[Tensor | None]] = field(init=False)
    sequences: list[MirroredSequence] = field(init=False)

    def __post_init__(self) -> None:
        num_blocks = [num_blocks_for(len(row), BLOCK_SIZE) for row in self.rows]
        starts = [sum(num_blocks[:index]) for index in range(len(self.rows) + 1)]
        self.sequences = [
            MirroredSequence(
                self._request(index, row),
                *(0, [], [BlockId(block) for block in range(start, stop)][::-1], 0, 0),
            )
            for index, (row, start, stop) in enumerate(zip(self.rows, starts, starts[1:]))
        ]
        self.states = [new_states(model, len(self.rows) + 1) for model in self.models]
        self.caches = [
            [layer_blocks(model, layer, starts[-1]) for layer in model.model.layers] for model in self.models
        ]

    def _request(self, index: int, row: Sequence[int]) -> Request:
        adapter = self.digests[index] if self.digests else 0
        return Request(RequestId(index), tuple(row), SamplingParams(temperature=0), index, 0, adapter=adapter)

    @torch.inference_mode()
    def step(self, chunk: int | None, *, is_fused: bool = True) -> list[tuple[int, Tensor]]:
        """Up to `chunk` tokens of each row -> the number of each row and its logits."""
        scheduled, batch = next_batch(self.sequences, chunk, self.loaded)
        options: dict[str, Any] = {"is_fused": is_fused}
        if self.loaded is not None and batch.adapter_slots is not None:
            options["adapters"] = self.loaded.step(batch.adapter_slots)
        rows = [int(each.sequence.request.request_id) for each in scheduled]
        starts, firsts = batch.attention.query_starts, [each.sequence.num_computed_tokens for each in scheduled]
        numbers = ([self.slot_of(row) for row in rows], starts, firsts)
        segments = StateSegments(*(torch.tensor(each, dtype=torch.int32) for each in numbers))
        metadata, hidden = replace(batch.attention, segments=segments), None
        tokens = (batch.token_ids, batch.positions, batch.rope_regimes)
        for model, cache, states in zip(self.models, self.caches, self.states, strict=True):
            incoming = () if hidden is None else (hidden,)
            hidden = model(*tokens, cache, metadata, *incoming, states=states, **options)
        assert hidden is not None
        last = self.models[-1]
        logits = last.compute_logits(hidden)[:, : last.model_config.vocab_size]
        for each in scheduled:
            each.sequence.num_computed_tokens += each.num_scheduled_tokens
        return [(row, logits[start:stop].clone()) for row, start, stop in zip(rows, starts, starts[1:])]

    def finish(self, chunk: int | None = None, *, is_fused: bool = True) -> list[Tensor]:
        """Float32 logits [tokens, vocabulary] of each row, computed `chunk` tokens at a time; None: all at once."""
        parts: list[list[Tensor]] = [[] for _ in self.rows]
        while any(each.num_computed_tokens < each.num_tokens for each in self.sequences):
            for row, logits in self.step(chunk, is_fused=is_fused):
                parts[row].append(logits.float())
        return [torch.cat(each) for each in parts]

    def slot_of(self, row: int) -> int:
        return len(self.rows) - 1 - row

    def row_states(self, row: int) -> list[Tensor]:
        """States and tails of the row, of all layers."""
        return self._slot_states(self.slot_of(row))

    def has_touched_others(self) -> bool:
        """Whether the slot that is no row's has been written."""
        return not all(bool(each.isnan().all()) for each in self._slot_states(len(self.rows)))

    def _slot_states(self, slot: int) -> list[Tensor]:
        layers = [states for stage in self.states for states in stage if states is not None]
        return [tensor[slot] for states in layers for tensor in states if tensor is not None]


def run_rows(
    models: Sequence[DecoderForCausalLM],
    rows: Sequence[Sequence[int]],
    chunk: int | None = None,
    *,
    is_fused: bool = True,
    loaded: LoadedAdapters | None = None,
    digests: Sequence[int] = (),
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Logits of each row, and its states after its last token."""
    run = HybridRun(models, rows, loaded, digests)
    logits = run.finish(chunk, is_fused=is_fused)
    assert not run.has_touched_others()
    return logits, [run.row_states(row) for row in range(len(rows))]


def greedy_ids(models: Sequence[DecoderForCausalLM], prompt: Sequence[int], count: int) -> list[int]:
    """Ids that follow one prompt, each the argmax after all before it."""
    row = list(prompt)
    for _ in range(count):
        row.append(int(run_rows(models, [row])[0][0][-1].argmax()))
    return row[len(prompt) :]


def layer_blocks(model: DecoderForCausalLM, layer: nn.Module, num_blocks: int) -> Tensor | None:
    """Blocks of a layer; None if it keeps no keys and values."""
    attention = getattr(layer, "self_attn", None)
    if attention is None or layer.config.kv_layer is not None:
        return None
    share = replace(layer.config.full_share, num_kv_heads=attention.num_kv_heads)
    kept = block_layer(layer.config, share, BLOCK_SIZE)
    assert kept is not None, layer.config
    shape = block_shape_of(attention._backend, kept, BLOCK_SIZE)
    return torch.full((num_blocks, *shape), torch.nan, dtype=model.model.dtype)
