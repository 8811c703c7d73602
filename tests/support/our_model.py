"""Our model of a checkpoint without engine or scheduler: logits of every position, in whatever steps a test likes.

Knows how a worker loads and how a batch is built. Knows nothing of transformers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from kv_cache.block import BlockId, num_blocks_for
from kv_cache.cache_engine import LayerCaches
from spmd_worker.base.config.schema import ModelOptions, RowLimits, RunConfig
from spmd_worker.base.errors import SpmdError
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ops.attention.backend import block_shape_of
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.memory.estimate import block_layer
from spmd_worker.worker.runner.batch import Batch, build_batch
from spmd_worker.worker.worker import Worker

BLOCK_SIZE = 16


def load_model(
    folder: Path,
    model_config: ModelConfig | None = None,
    dtype: str = "float32",
    quantization: str | None = None,
    lora_merge: Path | None = None,
    max_images: int = 32,
) -> DecoderForCausalLM:
    """The model of a folder on one rank; another `shape` than the folder's own reads its weights wrongly."""
    merged = None if lora_merge is None else str(lora_merge)
    options = ModelOptions(path=str(folder), dtype=dtype, quantization=quantization, lora_merge=merged)
    config = RunConfig(model=options, device="cpu", limits=RowLimits(max_images=max_images))
    resolved = resolve_run(config, "cpu")
    worker = Worker(replace(resolved, model_config=model_config or resolved.model_config), RankEnvironment())
    worker.init_device()
    worker.load_model()
    model = worker.get_model()
    assert isinstance(model, DecoderForCausalLM)
    return model


def prompt_logits(
    model: DecoderForCausalLM,
    prompts: list[list[int]],
    chunk: int | None = None,
    is_fused: Sequence[bool] = (True,),
    loaded: LoadedAdapters | None = None,
    digests: Sequence[int] = (),
) -> list[Tensor]:
    """Float32 [tokens, vocabulary] of each prompt. All prompts share each step, `chunk` tokens of each (None: all);
    the steps take turns in `is_fused`. `digests` name the adapters of prompts, 0 for none.
    """
    run = Run(model, prompts, loaded, digests)
    parts: list[list[Tensor]] = [[] for _ in prompts]
    turns = cycle(is_fused)
    while run.has_more():
        for index, logits in run.step(chunk, next(turns)):
            parts[index].append(logits)
    return [torch.cat(each) for each in parts]


@torch.inference_mode()
def encoder_states(
    model: DecoderForCausalLM,
    prompts: list[list[int]],
    loaded: LoadedAdapters | None = None,
    digests: Sequence[int] = (),
) -> list[Tensor]:
    """Float32 [tokens, hidden] of each prompt of an encoder, all in one step."""
    run = Run(model, prompts, loaded, digests)
    scheduled = [ScheduledSequence(each, each.num_tokens, num_samples=0) for each in run.sequences]
    slot_of = None if loaded is None else loaded.slot_of
    batch = build_batch(scheduled, BLOCK_SIZE, torch.device("cpu"), is_encoder=True, slot_of=slot_of)
    adapters = None if loaded is None or batch.adapter_slots is None else loaded.step(batch.adapter_slots)
    hidden = model(
        *(batch.token_ids, batch.positions, batch.rope_regimes, run.cache, batch.attention),
        token_types=batch.token_types,
        adapters=adapters,
    )
    return list(hidden.float().split([len(prompt) for prompt in prompts]))


def is_noticed(
    folders: Iterable[Path], logits_of: Callable[[Path], list[Tensor]], is_right: Callable[[list[Tensor]], bool]
) -> bool:
    """Whether a change of reading files is detected: a folder is rejected, raises, or has other logits."""
    for folder in folders:
        try:
            logits = logits_of(folder)
        except (SpmdError, AssertionError, KeyError, RuntimeError, IndexError):
            return True
        if not is_right(logits):
            return True
    return False


def next_batch(
    sequences: Iterable[MirroredSequence], chunk: int | None, loaded: LoadedAdapters | None
) -> tuple[list[ScheduledSequence], Batch]:
    """Batch of up to `chunk` tokens of each sequence that has any left, and what it schedules."""
    scheduled = []
    for sequence in sequences:
        left = sequence.num_tokens - sequence.num_computed_tokens
        if left:
            scheduled.append(ScheduledSequence(sequence, min(chunk or left, left), num_samples=0))
    slot_of = None if loaded is None else loaded.slot_of
    return scheduled, build_batch(scheduled, BLOCK_SIZE, torch.device("cpu"), slot_of=slot_of)


@dataclass(slots=True)
class Run:
    """Prompts in a cache of their own, with interleaved blocks, so that a wrong table shows."""

    model: DecoderForCausalLM
    prompts: list[list[int]]
    loaded: LoadedAdapters | None = None
    digests: Sequence[int] = ()
    sequences: list[MirroredSequence] = field(init=False)
    cache: LayerCaches = field(init=False)

    def __post_init__(self) -> None:
        num_blocks = [num_blocks_for(len(prompt), BLOCK_SIZE) for prompt in self.prompts]
        order = [index for turn in range(max(num_blocks)) for index, count in enumerate(num_blocks) if turn < count]
        tables: list[list[BlockId]] = [[] for _ in self.prompts]
        for block, index in enumerate(reversed(order)):
            tables[index].append(BlockId(block))
        self.sequences = [
            MirroredSequence(request, 0, [], table, 0, 0)
            for request, table in zip(map(self._request, range(len(self.prompts))), tables, strict=True)
        ]
        self.cache = self._new_cache(len(order))

    def _request(self, index: int) -> Request:
        prompt = tuple(self.prompts[index])
        regime = self.model.model_config.rope_regime(len(prompt), len(prompt))
        adapter = self.digests[index] if self.digests else 0
        return Request(RequestId(index), prompt, SamplingParams(temperature=0), index, regime, adapter=adapter)

    def has_more(self) -> bool:
        return any(sequence.num_computed_tokens < sequence.num_tokens for sequence in self.sequences)

    @torch.inference_mode()
    def step(self, chunk: int | None, is_fused: bool) -> list[tuple[int, Tensor]]:
        scheduled, batch = next_batch(self.sequences, chunk, self.loaded)
        tokens = (batch.token_ids, batch.positions, batch.rope_regimes)
        adapters = None
        if self.loaded is not None and batch.adapter_slots is not None:
            adapters = self.loaded.step(batch.adapter_slots)
        hidden = self.model(*tokens, self.cache, batch.attention, is_fused=is_fused, adapters=adapters)
        logits = self.model.compute_logits(hidden)[:, : self.model.model_config.vocab_size]
        for each in scheduled:
            each.sequence.num_computed_tokens += each.num_scheduled_tokens
        starts = batch.attention.query_starts
        indices = [int(each.sequence.request.request_id) for each in scheduled]
        return [(index, logits[start:end]) for index, start, end in zip(indices, starts, starts[1:])]

    def _new_cache(self, num_blocks: int) -> LayerCaches:
        attention = self.model.model.layers[0].self_attn
        backend, num_ranks = attention._backend, attention.o_proj._group.size
        shapes = []
        for layer in self.model.model_config.layers:
            share = replace(layer.full_share, num_kv_heads=max(layer.num_kv_heads // num_ranks, 1))
            kept = block_layer(replace(layer, kv_layer=None), share, BLOCK_SIZE)
            assert kept is not None, layer
            shapes.append(block_shape_of(backend, kept, BLOCK_SIZE))
        dtype = self.model.model.dtype
        # NaN where nothing was written: a key that should not be looked at shows.
        if len(dict.fromkeys(shapes)) == 1:
            return torch.full((len(shapes), num_blocks, *shapes[0]), torch.nan, dtype=dtype)
        return tuple(torch.full((num_blocks, *shape), torch.nan, dtype=dtype) for shape in shapes)
