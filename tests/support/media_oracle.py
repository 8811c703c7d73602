"""transformers' image processors for Pillow, and its texts of images: the oracles of what prompts with images become.

Its processors of text need torchvision even for images alone, so the functions that replace a placeholder are called
without the object.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from media_models import MODELS
from PIL import Image

from spmd_worker.media.prepared import Pixels


@contextmanager
def one_axis_a_call() -> Iterator[None]:
    """Block in which Pillow resizes as releases before 13: horizontally first."""
    whole = Image.Image.resize

    def resize(image: Image.Image, size: tuple[int, int], resample: int, *_: object, **__: object) -> Image.Image:
        return whole(whole(image, (size[0], image.height), resample), size, resample)

    with patch.object(Image.Image, "resize", resize):
        yield


def oracle_of(kind: str) -> Any:
    name, class_name = MODELS[kind].oracle
    module = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    return getattr(module, class_name)


def oracle_inputs(kind: str, pictures: list[Pixels]) -> dict[str, Any]:
    """Outputs of transformers for the images of one prompt."""
    images = [Image.fromarray(each) for each in pictures]
    settings = dict(MODELS[kind].settings)
    options: dict[str, Any] = {}
    if kind == "internvl":
        # Its processor of text asks for tiles, whatever the file says.
        options["crop_to_patches"] = True
    if kind in ("mistral3", "pixtral"):
        options["patch_size"] = 28 if kind == "mistral3" else 16
    if kind == "smolvlm":
        options["return_row_col_info"] = True
    given = [images] if kind in ("llava_onevision", "smolvlm") else images
    return dict(oracle_of(kind)(**settings)(images=given, return_tensors="np", **options))


def processing_module(name: str) -> Any:
    needed = f"transformers.models.{name}.image_processing_{name}"
    is_there = name != "pixtral" or needed in sys.modules
    if not is_there:
        # It imports a size rule from the module of torchvision's processor; the one of Pillow's has it too.
        sys.modules[needed] = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    try:
        return importlib.import_module(f"transformers.models.{name}.processing_{name}")
    finally:
        if not is_there:
            del sys.modules[needed]


def oracle_texts(kind: str, inputs: dict[str, Any], num_images: int, **changes: Any) -> list[str]:
    """Texts in place of the placeholders, by a processor with some attributes changed."""
    if kind == "gemma3":
        token = SimpleNamespace(boi_token="<start_of_image>", eoi_token="<end_of_image>")
        return [f"\n\n{token.boi_token}{'<image_soft_token>' * 16}{token.eoi_token}\n\n"] * num_images
    name, class_name, own = {
        "qwen3_vl": ("qwen3_vl", "Qwen3VLProcessor", {"image_token": "<|image_pad|>"}),
        "qwen2_vl": ("qwen2_vl", "Qwen2VLProcessor", {"image_token": "<|image_pad|>"}),
        "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLProcessor", {"image_token": "<|image_pad|>"}),
        "glm4v": ("glm4v", "Glm4vProcessor", {"image_token": "<|image|>"}),
        "llava": (
            *("llava", "LlavaProcessor"),
            {
                "image_token": "<image>",
                "patch_size": 14,
                "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default",
            },
        ),
        "llava_next": (
            *("llava_next", "LlavaNextProcessor"),
            {
                "image_token": "<image>",
                "patch_size": 14,
                "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default",
            },
        ),
        "llava_onevision": (
            *("llava_onevision", "LlavaOnevisionProcessor"),
            {
                "image_token": "<image>",
                "num_image_tokens": 36,
                "vision_feature_select_strategy": "full",
                "vision_aspect_ratio": "anyres_max_4",
            },
        ),
        "internvl": (
            *("internvl", "InternVLProcessor"),
            {
                "image_token": "<IMG_CONTEXT>",
                "start_image_token": "<img>",
                "end_image_token": "</img>",
                "image_seq_length": 4,
            },
        ),
        "mistral3": ("pixtral", "PixtralProcessor", {"patch_size": 14, "spatial_merge_size": 2}),
        "pixtral": ("pixtral", "PixtralProcessor", {"patch_size": 16, "spatial_merge_size": 1}),
        "smolvlm": (
            *("idefics3", "Idefics3Processor"),
            {
                "image_token": "<image>",
                "fake_image_token": "<fake_token_around_image>",
                "global_image_tag": "<global-img>",
                "image_seq_len": 16,
            },
        ),
    }[kind]
    if name == "pixtral":
        own |= {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    class_ = getattr(processing_module(name), class_name)
    settings = {key: value for key, value in MODELS[kind].settings.items() if key == "image_grid_pinpoints"}
    stub = SimpleNamespace(image_processor=SimpleNamespace(merge_size=2, **settings), **{**own, **changes})
    for method in ("_get_number_of_features", "_get_unpadded_features"):
        if hasattr(class_, method):
            setattr(stub, method, getattr(class_, method).__get__(stub))
    return [class_.replace_image_token(stub, inputs, index) for index in range(num_images)]


def replaced(text: str, marker: str, texts: list[str]) -> str:
    for each in texts:
        text = text.replace(marker, each.replace(marker, "\0"), 1)
    return text.replace("\0", marker)
