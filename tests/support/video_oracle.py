"""transformers' video processors, and its texts of videos: the oracles of what prompts with videos become.

They need torchvision, in whose place Pillow resizes, one axis a call: its levels differ by one or two.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers.video_processing_utils
from PIL import Image
from torch import Tensor
from transformers.image_utils import SizeDict
from transformers.video_utils import VideoMetadata

from spmd_worker.media.prepared import Pixels

CLASSES = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VLVideoProcessor", "Qwen2VLProcessor"),
    "qwen2_5_vl": ("qwen2_vl", "Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLVideoProcessor", "Qwen3VLProcessor"),
    "glm4v": ("glm4v", "Glm4vVideoProcessor", "Glm4vProcessor"),
    "glm46v": ("glm46v", "Glm46VVideoProcessor", "Glm46VProcessor"),
    "internvl": ("internvl", "InternVLVideoProcessor", "InternVLProcessor"),
    "llava_onevision": ("llava_onevision", "LlavaOnevisionVideoProcessor", "LlavaOnevisionProcessor"),
    "smolvlm": ("smolvlm", "SmolVLMVideoProcessor", "SmolVLMProcessor"),
}
"""Layout -> module and class of videos, and class of texts."""
MEDIA_KINDS = {"glm46v": "glm4v"}
"""Layout -> kind of images, where they differ."""
_OF_QWEN = {"video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>"} | {
    "vision_end_token": "<|vision_end|>"
}
_OF_TEXTS: dict[str, dict[str, Any]] = {
    "glm4v": {"image_token": "<|image|>"},
    "glm46v": {"image_token": "<|image|>"},
    "internvl": {"image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"}
    | {"image_seq_length": 4},
    "llava_onevision": {"video_token": "<video>", "num_image_tokens": 36},
    "smolvlm": {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
    | {"global_image_token": "<global-img>", "image_seq_len": 16},
}
"""Attributes of processors of texts; Qwen's by default."""
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven")
_METHODS = ("_calculate_timestamps", "replace_frame_token_id")
_BASE = transformers.video_processing_utils.BaseVideoProcessor


def video_module(kind: str) -> Any:
    """transformers' module of a kind's video processor."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    modules: dict[str, Any] = {name: ModuleType(name) for name in (*names, f"{names[-1]}.functional")}
    modules[names[-1]].functional = modules[f"{names[-1]}.functional"]
    with patch.dict(sys.modules, modules):
        return importlib.import_module(f"transformers.models.{CLASSES[kind][0]}.video_processing_{CLASSES[kind][0]}")


def video_processor_oracle(kind: str, settings: dict[str, Any]) -> Any:
    """A processor with the settings of a file, as its class reads them."""
    with patch.object(_BASE, "__init__", lambda self, **given: self.__dict__.update(given)):
        return getattr(video_module(kind), CLASSES[kind][1])(**settings)


@contextmanager
def _pillow() -> Iterator[None]:
    def resize(_: Any, image: Tensor, size: Any, resample: int, **__: Any) -> Tensor:
        frames = []
        for each in image.flatten(0, -4):
            picture = Image.fromarray(each.permute(1, 2, 0).numpy())
            whole = picture.resize((size.width, picture.height), resample).resize((size.width, size.height), resample)
            frames.append(torch.from_numpy(np.array(whole)).permute(2, 0, 1))
        return torch.stack(frames).view(*image.shape[:-2], size.height, size.width)

    def normalise(_: Any, image: Tensor, mean: Tensor, std: Tensor, **__: Any) -> Tensor:
        return (image - mean.view(3, 1, 1)) / std.view(3, 1, 1)

    with patch.object(_BASE, "resize", resize), patch.object(_BASE, "normalize", normalise):
        yield


def oracle_video(kind: str, frames: Sequence[Pixels], settings: dict[str, Any]) -> dict[str, Tensor]:
    """Patches of a video, normalised, and its grid; or complete frames."""
    processor = video_processor_oracle(kind, settings)
    video = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    size = processor.size
    names = ("resample", "patch_size", "temporal_patch_size", "merge_size")
    with _pillow():
        made = processor._preprocess(
            [video],
            do_resize=True,
            size=SizeDict(**size),
            do_rescale=True,
            rescale_factor=1 / 255,
            do_normalize=True,
            image_mean=tuple(processor.image_mean),
            image_std=tuple(processor.image_std),
            do_pad=True,
            do_center_crop=False,
            crop_size=None,
            cap_pixels_per_frame=bool(getattr(processor, "cap_pixels_per_frame", False)),
            **{name: getattr(processor, name) for name in names if hasattr(processor, name)},
        )
    found = dict(made)
    name = "pixel_values_videos" if "pixel_values_videos" in found else "pixel_values"
    if isinstance(found[name], list):
        found[name] = torch.stack(found[name])
        found["frames"] = found[name][0]
    return found


def oracle_video_text(
    kind: str, made: dict[str, Tensor], indices: Sequence[int], fps: float, total: float
) -> tuple[str, float]:
    """Text in place of the placeholder of what `oracle_video` made, and seconds of two frames."""
    module = importlib.import_module(f"transformers.models.{kind}.processing_{kind}")
    class_ = getattr(module, CLASSES[kind][2])
    if kind == "smolvlm":
        # The package num2words.
        vars(module)["num2words"] = NUMBERS.__getitem__
    metadata = VideoMetadata(total_num_frames=total, fps=fps, frames_indices=list(indices), duration=total / fps)
    sizes = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    stub = SimpleNamespace(**_OF_TEXTS.get(kind, _OF_QWEN), video_processor=sizes)
    for method in _METHODS:
        if hasattr(class_, method):
            setattr(stub, method, getattr(class_, method).__get__(stub))
    return class_.replace_video_token(stub, {**made, "video_metadata": [metadata]}, 0), 2 / metadata.sampled_fps
