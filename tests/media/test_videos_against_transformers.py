"""Videos as transformers' processors make them: sizes, patches, texts and times."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from media_models import MODELS, media_processor, noise
from video_oracle import CLASSES, MEDIA_KINDS, oracle_video, oracle_video_text, video_module, video_processor_oracle

from spmd_worker.media import video_preparing
from spmd_worker.media.errors import MediaError
from spmd_worker.media.largest_image import most_frame_tokens
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.prepared import Pixels, PreparedImage
from spmd_worker.media.video_processor import VideoProcessor, read_video_processor
from spmd_worker.media.video_rules import RULES
from spmd_worker.media.video_texts import TextOfVideo, in_words
from spmd_worker.model.towers.pixels import PixelTable, patches_of
from spmd_worker.model_config.vision_config import VisionConfig

KINDS = tuple(CLASSES)
OF_GRIDS = tuple(each for each in KINDS if not RULES[each].is_square)
CASES = [(4, 130, 257), (3, 97, 61), (2, 20, 30), (7, 33, 400)]
"""Frames, height and width."""


@pytest.fixture
def processors(tmp_path: Path) -> Callable[..., VideoProcessor]:
    def processor(layout: str, **settings: Any) -> VideoProcessor:
        kind = MEDIA_KINDS.get(layout, layout)
        images = media_processor(tmp_path, kind, settings, model_type=layout)
        found = read_video_processor(tmp_path / kind, images)
        assert found is not None
        assert found.layout == layout
        return found

    return processor


def prepared(processor: VideoProcessor, frames: list[Pixels], fps: float = 2.0, step: int = 1) -> list[PreparedImage]:
    """Each `step`-th frame of a video with one frame more."""
    size = frames[0].shape[0], frames[0].shape[1]
    resized = [video_preparing.resized(each, len(frames), processor, MediaLimits()) for each in frames]
    indices = range(0, step * len(frames), step)
    return video_preparing.prepare_video(resized, size, indices, fps, step * len(frames) + 1, processor, b"source")


def patches(processor: VideoProcessor, pairs: list[PreparedImage]) -> torch.Tensor:
    vision = VisionConfig(processor.kind, 1, image_mean=processor.mean, image_std=processor.std)
    table = PixelTable(vision, torch.device("cpu"))
    planes = [torch.stack(table.planes(each.pixels)) for each in pairs]
    if processor.side:
        return torch.cat(planes)
    return torch.cat([patches_of(each, processor.patch_size, 2, processor.merge_size) for each in planes])


def is_transformers(processor: VideoProcessor, number: int) -> bool:
    num_frames, height, width = CASES[number]
    frames = [noise(height, width, each) for each in range(num_frames)]
    pairs = prepared(processor, frames, fps=5.0, step=3)
    made = oracle_video(processor.layout, frames, MODELS[processor.kind].settings)
    grid = [[len(pairs), *pairs[0].pixels.grid]]
    given = (range(0, 3 * num_frames, 3), 5.0, 3 * num_frames + 1)
    text, _ = oracle_video_text(processor.layout, made, *given)
    ours = patches(processor, pairs)
    theirs = torch.as_tensor(made["pixel_values_videos"] if "video_grid_thw" in made else made["frames"])
    is_same_text = "".join([each.text for each in pairs]) == text
    is_same_grid = "video_grid_thw" not in made or made["video_grid_thw"].tolist() == grid
    return is_same_text and is_same_grid and ours.shape == theirs.shape and float((ours - theirs).abs().max()) < 1e-6


@pytest.mark.guarantee("Videos are prepared as in transformers")
@pytest.mark.parametrize("kind", KINDS)
def test_patches_and_texts_are_those_of_transformers(kind: str, processors: Callable[..., VideoProcessor]):
    processor = processors(kind)
    assert [is_transformers(processor, number) for number in range(len(CASES))] == [True] * len(CASES)


@pytest.mark.control("Videos are prepared as in transformers")
@pytest.mark.parametrize("mistake", ["frames swapped", "padding of the first frame", "seconds of the first frame"])
def test_comparison_detects_mistakes(
    mistake: str, processors: Callable[..., VideoProcessor], monkeypatch: pytest.MonkeyPatch
):
    if mistake == "frames swapped":
        monkeypatch.setattr(torch, "stack", lambda each, stack=torch.stack: stack(each).flip(0))
    elif mistake == "padding of the first frame":
        whole = video_preparing.prepare_video
        swapped = lambda frames, *given: whole([*frames, frames[0]], *given[:1], [0, 3, 6, 6], *given[2:])  # noqa: E731
        monkeypatch.setattr(video_preparing, "prepare_video", swapped)
    else:
        monkeypatch.setattr(TextOfVideo, "middles", TextOfVideo.firsts)
    assert not is_transformers(processors("qwen3_vl"), 1)


@pytest.mark.parametrize("is_capped", [False, True])
@pytest.mark.parametrize("kind", OF_GRIDS)
def test_sizes_are_those_of_transformers(kind: str, is_capped: bool, processors: Callable[..., VideoProcessor]):
    chance = random.Random(5)
    processor = processors(kind, cap_pixels_per_frame=is_capped, max_video_tokens=150)
    module = video_module(kind)
    settings = {**MODELS[processor.kind].settings, "cap_pixels_per_frame": is_capped, "max_video_tokens": 150}
    theirs, most_tokens = video_processor_oracle(kind, settings), 0
    with pytest.MonkeyPatch.context() as patches:
        base = module.BaseVideoProcessor
        patches.setattr(base, "resize", lambda self, image, size, resample: (size.height, size.width))
        for _ in range(300):
            num_frames, height, width = chance.randrange(2, 40), chance.randrange(8, 900), chance.randrange(8, 900)
            video = torch.empty(1, num_frames, 3, height, width, device="meta")
            given = {"factor": processor.unit, "temporal_factor": 2, "cap_pixels_per_frame": is_capped}
            expected = theirs.resize(video, module.SizeDict(**theirs.size), 3, **given)
            assert processor.frame_size(num_frames, height, width) == expected, (num_frames, height, width)
            most_tokens = max(most_tokens, expected[0] * expected[1] // processor.unit**2)
    assert most_tokens <= most_frame_tokens(processor)


def test_numbers_are_in_words():
    """Literal words of the package num2words."""
    found = [in_words(each) for each in (0, 21, 64, 100, 101, 110, 768, 1000, 1001, 1100, 123456)]
    assert found[:4] == ["zero", "twenty-one", "sixty-four", "one hundred"]
    assert found[4:7] == ["one hundred and one", "one hundred and ten", "seven hundred and sixty-eight"]
    assert found[7:10] == ["one thousand", "one thousand and one", "one thousand, one hundred"]
    assert found[10] == "one hundred and twenty-three thousand, four hundred and fifty-six"


@pytest.mark.parametrize("fps", [0.3, 1.0, 2.0, 3.7, 24.0])
def test_times_follow_the_rate_of_frames(fps: float, processors: Callable[..., VideoProcessor]):
    """They are those of transformers' `get_rope_index`, in float32."""
    processor = processors("qwen2_5_vl")
    frames = [noise(30, 30, each) for each in range(11)]
    found = [each.frame.time for each in prepared(processor, frames, fps) if each.frame is not None]
    sampled = len(frames) / (len(frames) + 1) * fps
    step = 4 * torch.tensor([2 / sampled])[0]
    assert found == (torch.arange(6) * step).long().tolist()
    assert [each.frame.time for each in prepared(processors("qwen2_vl"), frames, fps) if each.frame] == [*range(6)]


def test_pairs_of_frames_have_names_of_their_place(processors: Callable[..., VideoProcessor]):
    """The rows are the same; keys are not, if positions are not."""
    still = [noise(30, 60)] * 6
    names = {kind: [each.media_id for each in prepared(processors(kind), still)] for kind in ("qwen2_5_vl", "qwen3_vl")}
    assert len(set(names["qwen2_5_vl"])) == 3
    assert len(set(names["qwen3_vl"])) == 1
    slower = [each.media_id for each in prepared(processors("qwen2_5_vl"), still, fps=1.0)]
    assert [first == second for first, second in zip(names["qwen2_5_vl"], slower, strict=True)] == [True, False, False]
    moving = prepared(processors("qwen3_vl"), [noise(30, 60, each) for each in range(2)])
    assert moving[0].media_id not in names["qwen3_vl"]


def test_first_pair_has_text_and_digest_of_all(processors: Callable[..., VideoProcessor]):
    pairs = prepared(processors("qwen2_vl"), [noise(30, 60, each) for each in range(5)])
    assert [bool(each.text) for each in pairs] == [True, False, False]
    assert [each.source_digest for each in pairs] == [b"source", b"", b""]
    assert [each.frame is not None and each.frame.goes_on for each in pairs] == [True, True, False]


def test_frames_too_far_apart_are_an_error(processors: Callable[..., VideoProcessor]):
    processor = replace(processors("qwen2_5_vl"), time_per_second=1000.0)
    frames = [noise(30, 30)] * 4
    with pytest.raises(MediaError, match="frames a second") as found:
        prepared(processor, frames, fps=0.001)
    assert found.value.code == "video_too_long"
