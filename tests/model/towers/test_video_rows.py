"""Rows of the frames of videos: those of transformers' towers, in order."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from image_models import image_folder, image_reference, media_kind
from media_models import MODELS, noise
from torch import Tensor
from video_models import layout_of
from video_oracle import oracle_video

from spmd_worker.media.image_processor import normalised_by, read_image_processor
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.video_preparing import prepare_video, resized
from spmd_worker.media.video_processor import read_video_processor
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.native.library import native_library
from spmd_worker.ops.attention.cpu import CpuBackend
from spmd_worker.ops.kernels.cpu.native import cpu_kernels
from spmd_worker.ranks.communicator import single_group

TOLERANCE = 2e-5
FRAMES = [noise(90, 131, index) for index in range(3)]


def _context() -> LayerContext:
    library = native_library()
    assert not isinstance(library, str), library
    attention = CpuBackend(library, torch.float32, (16,), 16)
    return LayerContext(single_group(), cpu_kernels(torch.float32)[0], attention, torch.float32, torch.device("cpu"))


@torch.inference_mode()
def our_rows(kind: str) -> Tensor:
    """Of all frames, each step by itself."""
    folder = image_folder(kind)
    config = read_model_files(folder, with_images=True).model_config
    assert config.vision is not None
    images = read_image_processor(folder, config.vision)
    video = read_video_processor(folder, images)
    assert video is not None
    model = build_model(_context(), replace(config, vision=normalised_by(config.vision, images)))
    with model.weights.open(folder) as source:
        model.weights.fill(source)
    model.pack_weights()
    assert model.tower is not None
    frames = [resized(each, len(FRAMES), video, MediaLimits()) for each in FRAMES]
    steps = prepare_video(frames, (90, 131), range(len(frames)), 2.0, len(frames), video)
    rows = [model.tower(each.pixels).rows for each in steps]
    assert [len(each) for each in rows] == [each.num_rows for each in steps]
    return torch.cat(rows)


@torch.inference_mode()
def their_rows(kind: str, *, is_reversed: bool = False) -> Tensor:
    frames = FRAMES[::-1] if is_reversed else FRAMES
    made = oracle_video(layout_of(kind), frames, MODELS[media_kind(kind)].settings)
    body: Any = image_reference(kind).model
    if "video_grid_thw" in made:
        return torch.cat([*body.get_video_features(made["pixel_values_videos"], made["video_grid_thw"]).pooler_output])
    if kind == "llava_onevision":
        rows: Tensor = body.get_video_features(made["pixel_values_videos"]).pooler_output[0]
        return rows
    pixels = made["frames"].unsqueeze(0) if kind == "smolvlm" else made["frames"]
    return torch.cat([*body.get_image_features(pixels).pooler_output])


@pytest.mark.gate("glm4v", "llava_onevision")
@pytest.mark.guarantee("Rows of frames are those of transformers", is_control_inside=True)
@pytest.mark.parametrize(
    "kind", ["qwen2_5_vl", "qwen3_vl", "glm4v", "glm46v", "internvl", "smolvlm", "llava_onevision"]
)
def test_rows_of_frames_are_those_of_transformers(kind: str):
    ours, theirs = our_rows(kind), their_rows(kind)
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < TOLERANCE
    # Negative control: frames in another order.
    others = their_rows(kind, is_reversed=True)
    assert float((ours - others).abs().max() / theirs.abs().max()) > 100 * TOLERANCE
