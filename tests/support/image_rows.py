"""Rows with images for our model without engine or tower: rows of images are given, logits of every position come out.

Knows how a worker loads, and how a batch is built. Knows nothing of transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from hybrid_runs import layer_blocks, new_states
from our_model import BLOCK_SIZE, load_model
from plain_models import new_model
from torch import Tensor

from kv_cache.block import BlockId, num_blocks_for
from kv_cache.cache_engine import LayerCaches
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.embedding import StepMedia
from spmd_worker.model_config.model_config import ModelConfig, read_model_files
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.topology import Stage
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.media_items import MediaItem
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.runner.batch import build_batch, wanted_tokens

IMAGE_ID = 10**6
"""Beyond every vocabulary."""


@dataclass(frozen=True, slots=True)
class ImageRow:
    """A prompt, its images, and the rows of their tokens [E, hidden], for each of the first layers too. The first
    `num_virtual` tokens are those of an encoder, if the model has one.
    """

    token_ids: tuple[int, ...]
    media: tuple[MediaItem, ...] = ()
    rows: Tensor | None = None
    added: tuple[Tensor, ...] = ()
    num_virtual: int = 0

    @property
    def places(self) -> list[int]:
        """Tokens that take rows."""
        return [token for item in self.media for start, count in item.runs for token in range(start, start + count)]


def image_row(
    token_ids: Sequence[int],
    images: Sequence[tuple[int, int, int]],
    hidden_size: int,
    num_added: int = 0,
    seed: int = 0,
) -> ImageRow:
    """A prompt whose `images` are (start, lines, columns)."""
    media = tuple(
        MediaItem(bytes([seed, number] * 8), ((start, lines * columns),), 1, (lines, columns))
        for number, (start, lines, columns) in enumerate(images)
    )
    ids, generator = list(token_ids), torch.Generator().manual_seed(seed)
    for start, lines, columns in images:
        ids[start : start + lines * columns] = [IMAGE_ID] * (lines * columns)
    shape = (1 + num_added, sum(item.num_rows for item in media), hidden_size)
    rows, *added = torch.randn(shape, generator=generator).unbind()
    return ImageRow(tuple(ids), media, rows, tuple(added))


def image_model(folder: Path, dtype: str = "float32", change: Any = None, **numbers: Any) -> DecoderForCausalLM:
    """The model of a folder with these numbers of `VisionConfig`. `change` of its config, for controls."""
    config = with_vision(read_model_files(folder).model_config, **numbers)
    return load_model(folder, config if change is None else change(config), dtype)


def image_stages(
    folder: Path, *stages: Stage, group: GroupHandle | None = None, **numbers: Any
) -> list[DecoderForCausalLM]:
    """Stages of the model, in plain torch, not packed."""
    config = with_vision(read_model_files(folder).model_config, **numbers)
    return [new_model(folder, group, stage, config) for stage in stages]


def with_vision(config: ModelConfig, **numbers: Any) -> ModelConfig:
    vision = config.vision or VisionConfig("", IMAGE_ID)
    return replace(config, vision=replace(vision, **numbers))


@dataclass(slots=True)
class ImageRun:
    """Rows in a cache of their own, computed together. `models` are the stages of a pipeline. Whatever was not written
    is NaN. `leaves_out`: only the last tokens of a step have logits.
    """

    models: Sequence[DecoderForCausalLM]
    rows: Sequence[ImageRow]
    leaves_out: bool = False
    sequences: list[MirroredSequence] = field(init=False)
    caches: list[LayerCaches] = field(init=False)
    states: list[list[Any]] = field(init=False)

    def __post_init__(self) -> None:
        ends = [0]
        for row in self.rows:
            ends.append(ends[-1] + num_blocks_for(len(row.token_ids), BLOCK_SIZE))
        tables = [[BlockId(each) for each in reversed(range(*blocks))] for blocks in pairwise(ends)]
        self.sequences = [
            MirroredSequence(self._request(index), 0, [], table, 0, 0, state_slot=index)
            for index, table in enumerate(tables)
        ]
        self.caches = [_caches(model, ends[-1]) for model in self.models]
        config = self.models[0].model_config
        self.states = [new_states(model, len(self.rows)) if config.has_states else [] for model in self.models]

    def _request(self, index: int) -> Request:
        row = self.rows[index]
        kinds: dict[str, Any] = {"media": row.media, "num_virtual_tokens": row.num_virtual}
        return Request(RequestId(index), row.token_ids, SamplingParams(temperature=0), index, **kinds)

    def forget(self, num_tokens: int) -> None:
        """As a prefix hit leaves rows: the first tokens' keys and values are there."""
        for each in self.sequences:
            each.num_computed_tokens = num_tokens

    def finish(self, chunk: int | None = None, *, is_fused: bool = True) -> list[Tensor]:
        """Logits [tokens, vocabulary] of each row, from its first uncomputed token on."""
        parts: list[list[Tensor]] = [[] for _ in self.rows]
        while any(each.num_computed_tokens < each.num_tokens for each in self.sequences):
            for row, logits in self.step(chunk, is_fused=is_fused):
                parts[row].append(logits)
        return [torch.cat(each) for each in parts]

    @torch.inference_mode()
    def step(self, chunk: int | None, *, is_fused: bool = True) -> list[tuple[int, Tensor]]:
        scheduled = [each for each in (self._scheduled(row, chunk) for row in self.sequences) if each is not None]
        config = self.models[0].model_config
        kinds: dict[str, Any] = {"has_states": config.has_states, "vision": config.vision}
        kinds["has_encoder"] = config.encoder_part is not None
        batch = build_batch(scheduled, BLOCK_SIZE, torch.get_default_device(), **kinds)
        tokens, hidden = (batch.token_ids, batch.positions, batch.rope_regimes), None
        media = self._media(scheduled)
        for model, cache, states in zip(self.models, self.caches, self.states, strict=True):
            options = {"is_fused": is_fused, "rope_positions": batch.rope_positions, "states": states}
            options["media"] = media if model.stage.is_first else None
            if self.leaves_out:
                found = wanted_tokens([each._replace(num_samples=1) for each in scheduled], batch)
                options["wanted"] = None if found is None else found[0]
            hidden = model(*tokens, cache, batch.attention, hidden, **options)
        assert hidden is not None
        logits = self.models[-1].compute_logits(hidden)[:, : config.vocab_size].float()
        starts = range(len(scheduled) + 1) if self.leaves_out else batch.attention.query_starts
        for each in scheduled:
            each.sequence.num_computed_tokens += each.num_scheduled_tokens
        rows = [int(each.sequence.request.request_id) for each in scheduled]
        return [(row, logits[start:end]) for row, start, end in zip(rows, starts, starts[1:])]

    def _scheduled(self, sequence: MirroredSequence, chunk: int | None) -> ScheduledSequence | None:
        """The next chunk; where an image is seen at once, no chunk ends inside one."""
        left, vision = sequence.num_tokens - sequence.num_computed_tokens, self.models[0].model_config.vision
        if not left:
            return None
        end = sequence.num_computed_tokens + min(chunk or left, left)
        for item in sequence.request.media if vision is not None and vision.sees_whole_image else ():
            end = item.end if item.start < end < item.end else end
        return ScheduledSequence(sequence, end - sequence.num_computed_tokens, num_samples=0)

    def _media(self, scheduled: Sequence[ScheduledSequence]) -> StepMedia | None:
        """The rows of the step's tokens, and what is added behind layers."""
        places, parts, start, dtype = [], [], 0, self.models[0].model.dtype
        for sequence, count, _ in scheduled:
            row, first = self.rows[int(sequence.request.request_id)], sequence.num_computed_tokens
            for number, place in enumerate(row.places):
                if first <= place < first + count and row.rows is not None:
                    places.append(start + place - first)
                    parts.append(torch.stack([each[number] for each in (row.rows, *row.added)]))
            start += count
        if not places:
            return None
        rows, *added = torch.stack(parts, 1).to(torch.get_default_device(), dtype).unbind()
        return StepMedia(torch.tensor(places), rows, tuple(added))


def _caches(model: DecoderForCausalLM, num_blocks: int) -> LayerCaches:
    """Of each layer [blocks, ...], None for layers with states."""
    found = [layer_blocks(model, layer, num_blocks) for layer in model.model.layers]
    is_tuple = model.model_config.has_states or len({each.shape for each in found if each is not None}) > 1
    return tuple(found) if is_tuple else torch.stack([each for each in found if each is not None])
