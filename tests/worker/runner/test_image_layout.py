"""Positions and sight of rows with images: as transformers places them, in any chunks, and as the device keeps them."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from family_checkpoints import family_reference
from image_rows import IMAGE_ID

from kv_cache.block import BlockId
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.media_items import MediaItem
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.runner import batch_state, image_layout
from spmd_worker.worker.runner.batch import build_batch
from spmd_worker.worker.runner.batch_state import BatchState
from spmd_worker.worker.runner.image_layout import last_visible, media_of_step, position_delta, rope_positions

CPU, NAME = torch.device("cpu"), bytes(16)
BLOCK_SIZE = 8
THREE = VisionConfig("", IMAGE_ID, has_three_positions=True)
SIGHT = VisionConfig("", IMAGE_ID, sees_whole_image=True)
RUNS = replace(THREE, run_length=12)
"""Runs begin inside the image of `MEDIA`."""


def random_media(chance: random.Random) -> tuple[tuple[MediaItem, ...], int]:
    """Up to four images with text between them, perhaps none before or behind; and the number of tokens."""
    items, end = [], chance.choice([0, 1, 5])
    for _ in range(chance.randrange(5)):
        grid = chance.randrange(1, 5), chance.randrange(1, 7)
        items.append(MediaItem(NAME, ((end, grid[0] * grid[1]),), 1, grid))
        end += grid[0] * grid[1] + chance.randrange(1, 6)
    return tuple(items), end + chance.choice([0, 7])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_transformers(family: str):
    model, chance = family_reference(family).model, random.Random(3)
    side = model.config.vision_config.spatial_merge_size
    for _ in range(20):
        media, num_tokens = random_media(chance)
        if not media:
            continue
        types = torch.zeros(1, num_tokens, dtype=torch.int32)
        for item in media:
            types[0, item.start : item.end] = 1
        grids = torch.tensor([[1, side * item.grid[0], side * item.grid[1]] for item in media])
        expected, deltas = model.get_rope_index(torch.zeros_like(types).long(), types, image_grid_thw=grids)
        found = rope_positions(media, 0, num_tokens)
        assert np.array_equal(found, expected[:, 0].numpy())
        assert position_delta(media) == deltas.item()
        # In any chunks, and behind the prompt.
        ends = sorted(chance.sample(range(1, num_tokens + 9), 3))
        parts = [rope_positions(media, first, end - first) for first, end in zip([0, *ends], ends)]
        whole = rope_positions(media, 0, ends[-1])
        assert np.array_equal(np.concatenate(parts, axis=1), whole)
        assert np.array_equal(whole[:, num_tokens:], np.tile(np.arange(num_tokens, ends[-1]) + deltas.item(), (3, 1)))


def test_tokens_of_an_image_see_its_end():
    media = (MediaItem(NAME, ((1, 2), (5, 3)), 1), MediaItem(NAME, ((8, 1),), 1))
    assert last_visible(media, 0, 10).tolist() == [0, 2, 2, 3, 4, 7, 7, 7, 8, 9]
    assert last_visible(media, 6, 3).tolist() == [7, 7, 8]
    with pytest.raises(AssertionError, match="a chunk ends inside an image"):
        last_visible(media, 4, 2)


def sequences_of(nums_of_tokens: list[int], medias: list[tuple[MediaItem, ...]]) -> list[MirroredSequence]:
    found = []
    for index, (num_tokens, media) in enumerate(zip(nums_of_tokens, medias, strict=True)):
        request = Request(RequestId(index), (3,) * num_tokens, SamplingParams(), index, media=media)
        blocks = [BlockId(8 * index + block) for block in range(8)]
        found.append(MirroredSequence(request, 0, [], blocks, 0, num_tokens))
    return found


MEDIA = (MediaItem(NAME, ((2, 12),), 1, (3, 4)),)


@pytest.mark.parametrize("vision", [THREE, SIGHT, RUNS], ids=["positions", "sight", "runs"])
def test_kept_batches_equal_rebuilt_with_images(vision: VisionConfig):
    """Prompts, chunks, rows that decode behind an image, in new and in continued layouts; text alone has neither."""
    state, rows = BatchState(BLOCK_SIZE, CPU, vision=vision), sequences_of([20, 9], [MEDIA, ()])

    def compare(scheduled: tuple[ScheduledSequence, ...]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        kept, anew = state.build(scheduled), build_batch(scheduled, BLOCK_SIZE, CPU, vision=vision)
        assert torch.equal(kept.positions, anew.positions)
        assert torch.equal(kept.attention.token_offsets, anew.attention.token_offsets)
        found = []
        for ours, theirs in (
            (kept.rope_positions, anew.rope_positions),
            (kept.attention.last_visible, anew.attention.last_visible),
        ):
            assert (ours is None) == (theirs is None)
            assert ours is None or (torch.equal(ours, theirs) and ours.dtype == theirs.dtype)
            found.append(ours)
        return found[0], found[1]

    first = compare(tuple(ScheduledSequence(each, each.num_tokens, 1) for each in rows))
    assert [each is None for each in first] == [vision is SIGHT, vision is not SIGHT]
    for number in range(3):
        for each in rows:
            each.num_computed_tokens = each.num_tokens
            each.output_token_ids.append(5)
        three, sight = compare(tuple(each.decode_row for each in rows))
        assert sight is None, "what decodes sees nothing later"
        assert vision is SIGHT or three[:3].tolist() == [[20 + number - 8, 9 + number]] * 3
        assert vision is not RUNS or three[3:].tolist() == [[2, 0], [4, 0], [4, 0]]
    assert compare((rows[1].decode_row,)) == (None, None)
    rows[0].num_computed_tokens = 6
    compare((ScheduledSequence(rows[0], 8, 0),))


def test_comparison_detects_a_stale_delta(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_state, "position_delta", lambda media: 0)
    with pytest.raises(AssertionError):
        test_kept_batches_equal_rebuilt_with_images(THREE)


def test_text_alone_computes_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(image_layout, "rope_positions", None)
    monkeypatch.setattr(image_layout, "last_visible", None)
    rows = sequences_of([5, 6], [(), ()])
    scheduled = tuple(ScheduledSequence(each, each.num_tokens, 1) for each in rows)
    for vision in (None, THREE, SIGHT, replace(THREE, sees_whole_image=True)):
        assert media_of_step(vision, rows) is None
        for batch in (
            build_batch(scheduled, BLOCK_SIZE, CPU, vision=vision),
            BatchState(BLOCK_SIZE, CPU, vision=vision).build(scheduled),
        ):
            assert batch.rope_positions is batch.attention.last_visible is None


def test_frames_of_a_video_begin_at_one_position():
    """Two pairs of 2 x 2 tokens, three positions of time apart, and text behind the last time; then an image."""
    first = MediaItem(NAME, ((1, 4),), 1, (2, 2), frame=1, goes_on=True)
    media = (first, MediaItem(NAME, ((5, 4),), 1, (2, 2), frame=2, time=3), MediaItem(NAME, ((10, 2),), 1, (1, 2)))
    found = rope_positions(media, 0, 13)
    assert found.tolist() == [
        [0, 1, 1, 1, 1, 4, 4, 4, 4, 5, 6, 6, 8],
        [0, 1, 1, 2, 2, 1, 1, 2, 2, 5, 6, 6, 8],
        [0, 1, 2, 1, 2, 1, 2, 1, 2, 5, 6, 7, 8],
    ]
    assert position_delta(media) == 8 - 12
    for cut in range(1, 13):
        parts = (rope_positions(media, 0, cut), rope_positions(media, cut, 13 - cut))
        assert np.array_equal(np.concatenate(parts, axis=1), found)
