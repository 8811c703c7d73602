"""transformers' image processors for Pillow, and its texts of images: the oracles of what prompts with images become.

Its processors of text need torchvision even for images alone, so the functions that replace a placeholder are called
without the object.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from media_models import MODELS
from PIL import Image
from transformers.image_utils import SizeDict

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
    if kind == "llama4":
        return _llama4_inputs(pictures)
    if kind == "kimi_k25":
        return _kimi_inputs(pictures)
    if kind == "lfm2_vl":
        return _lfm2_inputs(pictures)
    if kind == "cohere2_vision":
        return _command_a_inputs(pictures)
    # Its processors may write into what they are given.
    settings = deepcopy(MODELS[kind].settings)
    options: dict[str, Any] = {}
    if kind in ("internvl", "aya_vision"):
        # Its processor of text asks for tiles, whatever the file says.
        options["crop_to_patches"] = True
    if kind in ("mistral3", "pixtral"):
        options["patch_size"] = 28 if kind == "mistral3" else 16
    if kind == "smolvlm":
        options["return_row_col_info"] = True
    given = [images] if kind in ("llava_onevision", "smolvlm", "granite_docling") else images
    return dict(oracle_of(kind)(**settings)(images=given, return_tensors="np", **options))


def llama4_module() -> Any:
    """transformers' module of Llama 4's processor."""
    return torchvision_module("llama4")


def torchvision_module(name: str) -> Any:
    """transformers' module of a processor that is for torchvision alone, with the one function of it that such call
    themselves.
    """

    def pad(images: torch.Tensor, padding: list[int], fill: list[int]) -> torch.Tensor:
        left, top, right, bottom = padding
        assert set(fill) == {0}, fill
        return torch.nn.functional.pad(images, (left, right, top, bottom))

    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    modules: dict[str, Any] = {each: ModuleType(each) for each in names}
    modules[names[-1]].functional = SimpleNamespace(pad=pad)
    with patch.dict(sys.modules, modules):
        return importlib.import_module(f"transformers.models.{name}.image_processing_{name}")


def _torchvision_outputs(processor: Any, pictures: list[Pixels], mean: float, **settings: Any) -> Any:
    """What a processor for torchvision makes with Pillow's resizing in place of torchvision's, whose levels differ by
    one.
    """

    def resize(self: Any, image: torch.Tensor, size: Any, resample: int, **_: object) -> torch.Tensor:
        whole = [
            Image.fromarray(each.permute(1, 2, 0).numpy()).resize((size.width, size.height), resample) for each in image
        ]
        return torch.stack([torch.from_numpy(np.array(each)).permute(2, 0, 1) for each in whole])

    def pad(self: Any, images: torch.Tensor, pad_size: Any) -> torch.Tensor:
        height, width = images.shape[-2:]
        return torch.nn.functional.pad(images, (0, pad_size.width - width, 0, pad_size.height - height))

    def normalise(self: Any, images: torch.Tensor, mean: Any, std: Any, **_: object) -> torch.Tensor:
        pair = (torch.as_tensor(each, dtype=images.dtype).view(3, 1, 1) for each in (mean, std))
        return (images - next(pair)) / next(pair)

    methods: dict[str, Any] = {"resize": resize, "pad": pad, "normalize": normalise}
    made = object.__new__(type("Own", (processor,), methods))
    # Some call those of the class that they inherit from.
    with patch.multiple(processor.__mro__[1], **methods):
        return made._preprocess(
            [torch.from_numpy(each.copy()).permute(2, 0, 1) for each in pictures],
            do_resize=True,
            do_rescale=True,
            do_normalize=True,
            rescale_factor=1 / 255,
            disable_grouping=True,
            return_tensors=None,
            **{"image_mean": (mean,) * 3, "image_std": (mean,) * 3, **settings, "size": SizeDict(**settings["size"])},
        )


def _llama4_inputs(pictures: list[Pixels]) -> dict[str, Any]:
    """All tiles, and those of each image."""
    made = _torchvision_outputs(
        *(llama4_module().Llama4ImageProcessor, pictures, 0.5),
        resample=2,
        resize_to_max_canvas=False,
        **MODELS["llama4"].settings,
    )
    tiles = [each.flatten(0, -4) for each in made["pixel_values"]]
    return {
        "pixel_values": torch.cat(tiles).float().numpy(),
        "aspect_ratios": torch.stack(made["aspect_ratios"]).tolist(),
    }


def _kimi_inputs(pictures: list[Pixels]) -> dict[str, Any]:
    """Patches by lines."""
    processor, sizes = torchvision_module("kimi_k25").Kimi_K25ImageProcessor, {"patch_size": 14, "merge_size": 2}
    return dict(_torchvision_outputs(processor, pictures, 0.5, resample=3, **{**sizes, **MODELS["kimi_k25"].settings}))


def _lfm2_inputs(pictures: list[Pixels]) -> dict[str, Any]:
    """Patches of each tile, behind them zeros, and which are patches."""
    processor = torchvision_module("lfm2_vl").Lfm2VlImageProcessor
    names = ("do_image_splitting", "min_tiles", "max_tiles", "use_thumbnail", "max_pixels_tolerance", "size")
    settings = {**{name: getattr(processor, name) for name in names}, **MODELS["lfm2_vl"].settings}
    settings |= {"do_pad": True, "return_row_col_info": True}
    return dict(_torchvision_outputs(processor, pictures, 0.5, resample=2, **settings))


def _command_a_inputs(pictures: list[Pixels]) -> dict[str, Any]:
    """Tiles, and how many each image has."""
    processor = torchvision_module("cohere2_vision").Cohere2VisionImageProcessor
    names = ("resample", "image_mean", "image_std", "crop_to_patches", "min_patches")
    settings = {**{name: getattr(processor, name) for name in names}, **MODELS["cohere2_vision"].settings}
    settings |= {name: tuple(settings[name]) for name in ("image_mean", "image_std")}
    made = dict(_torchvision_outputs(processor, pictures, 0.0, **settings))
    return {**made, "pixel_values": torch.stack(made["pixel_values"]).numpy()}


_OF_TILES = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_tag": "<global-img>",
}


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
        "gemma4": (
            *("gemma4", "Gemma4Processor"),
            {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
        ),
        "glm4v": ("glm4v", "Glm4vProcessor", {"image_token": "<|image|>"}),
        "paddleocr_vl": ("paddleocr_vl", "PaddleOCRVLProcessor", {"image_token": "<|IMAGE_PLACEHOLDER|>"}),
        "exaone4_5": ("exaone4_5", "Exaone4_5_Processor", {"image_token": "<|image_pad|>"}),
        "kimi_k25": ("kimi_k25", "Kimi_K25Processor", {"image_token": "<|media_pad|>"}),
        "llama4": ("llama4", "Llama4Processor", {"patch_size": 14, "downsample_ratio": 4}),
        "llava": (
            *("llava", "LlavaProcessor"),
            {
                "image_token": "<image>",
                "patch_size": 14,
                "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default",
            },
        ),
        "deepseek_vl": (
            *("deepseek_vl", "DeepseekVLProcessor"),
            {"image_token": "<image_placeholder>", "num_image_tokens": 36},
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
        "aya_vision": (
            *("aya_vision", "AyaVisionProcessor"),
            {"img_size": 56, "patch_size": 28, "img_patch_token": "<|IMG_PATCH|>", "tile_token": "TILE"}
            | {"start_of_img_token": "<|START_OF_IMG|>", "end_of_img_token": "<|END_OF_IMG|>"}
            | {"tile_global_token": "TILE_GLOBAL"},
        ),
        "cohere2_vision": (
            *("cohere2_vision", "Cohere2VisionProcessor"),
            {"patch_size": 2, "image_token": "<|IMG_PATCH|>", "img_line_break_token": "<|IMG_LINE_BREAK|>"}
            | {"boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>"},
        ),
        "minicpmv4_6": (
            *("minicpmv4_6", "MiniCPMV4_6Processor"),
            {"image_token": "<|image_pad|>", "image_start_token": "<image>", "image_end_token": "</image>"}
            | {"slice_start_token": "<slice>", "slice_end_token": "</slice>", "slice_mode": True}
            | {"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
        ),
        "mistral3": ("pixtral", "PixtralProcessor", {"patch_size": 14, "spatial_merge_size": 2}),
        "pixtral": ("pixtral", "PixtralProcessor", {"patch_size": 16, "spatial_merge_size": 1}),
        "lighton_ocr": (
            *("lighton_ocr", "LightOnOcrProcessor"),
            {"image_token": "<|image_pad|>", "effective_patch_size": 28},
        ),
        "smolvlm": ("idefics3", "Idefics3Processor", {**_OF_TILES, "image_seq_len": 16}),
        "lfm2_vl": (
            *("lfm2_vl", "Lfm2VlProcessor"),
            {
                "image_token": "<image>",
                "image_start_token": "<|image_start|>",
                "image_end_token": "<|image_end|>",
                "image_thumbnail_token": "<|img_thumbnail|>",
            },
        ),
        "granite_docling": ("granite_docling", "GraniteDoclingProcessor", {**_OF_TILES, "image_seq_len": 1}),
    }["gemma4" if kind == "gemma4_unified" else kind]
    if name == "pixtral":
        own |= {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    class_ = getattr(processing_module(name), class_name)
    settings = {key: value for key, value in MODELS[kind].settings.items() if key == "image_grid_pinpoints"}
    more: dict[str, Any] = {}
    if kind == "lfm2_vl":
        settings, more = {**MODELS[kind].settings, "use_thumbnail": True}, {"use_image_special_tokens": True}
    stub = SimpleNamespace(image_processor=SimpleNamespace(merge_size=2, **settings), **{**own, **changes})
    for method in _METHODS:
        if hasattr(class_, method):
            setattr(stub, method, getattr(class_, method).__get__(stub))
    if kind == "minicpmv4_6":
        more = {"image_token_divisor": 16}
    texts = [class_.replace_image_token(stub, inputs, index, **more) for index in range(num_images)]
    if kind == "minicpmv4_6":
        texts = class_._prepend_local_ids(stub, ["<|image_pad|>" * num_images], texts, "<|image_pad|>")
    return texts


_METHODS = (
    *("_prompt_split_image", "_get_number_of_features", "_get_unpadded_features", "_get_image_num_tokens"),
    *("_build_image_tokens", "_compute_tokens_per_tile", "_compute_tokens_for_image"),
)


def replaced(text: str, marker: str, texts: list[str]) -> str:
    for each in texts:
        text = text.replace(marker, each.replace(marker, "\0"), 1)
    return text.replace("\0", marker)
