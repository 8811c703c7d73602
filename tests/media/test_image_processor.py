"""Numbers of image processors as they are read from a model folder."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from media_models import MODELS, PINPOINTS, media_folder, media_processor

from spmd_worker.base.config.schema import IMAGE_PROCESSOR_KEYS
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.media import image_processor
from spmd_worker.media.image_processor import (
    CLIP_MEAN,
    CLIP_STD,
    HALVES,
    PLAIN,
    ImageProcessor,
    processor_of,
    read_image_processor,
)
from spmd_worker.model_config.vision_config import VisionConfig

EXPECTED = {
    "qwen3_vl": ImageProcessor("qwen3_vl", 16, HALVES, HALVES, merge_size=2, min_pixels=4096, max_pixels=65536),
    "qwen2_vl": ImageProcessor("qwen2_vl", 14, CLIP_MEAN, CLIP_STD, merge_size=2, min_pixels=784, max_pixels=50176),
    "qwen2_5_vl": ImageProcessor(
        "qwen2_5_vl", 14, CLIP_MEAN, CLIP_STD, merge_size=2, min_pixels=3136, max_pixels=100352
    ),
    "exaone4_5": ImageProcessor("exaone4_5", 14, CLIP_MEAN, CLIP_STD, merge_size=2, min_pixels=3136, max_pixels=50176),
    "glm4v": ImageProcessor("glm4v", 14, CLIP_MEAN, CLIP_STD, merge_size=2, min_pixels=6272, max_pixels=100352),
    "paddleocr_vl": ImageProcessor(
        "paddleocr_vl", 14, CLIP_MEAN, CLIP_STD, merge_size=2, min_pixels=3136, max_pixels=100352
    ),
    "kimi_k25": ImageProcessor("kimi_k25", 14, HALVES, HALVES, merge_size=2, max_pixels=64 * 196, longest_edge=168),
    "gemma3": ImageProcessor("gemma3", 14, HALVES, HALVES, resampling="bilinear", side=112, tokens_per_crop=16),
    "gemma4": ImageProcessor("gemma4", 4, *PLAIN, merge_size=2, max_pixels=70 * 64),
    "gemma4_unified": ImageProcessor("gemma4_unified", 4, *PLAIN, merge_size=2, max_pixels=70 * 64),
    "llava": ImageProcessor("llava", 14, CLIP_MEAN, CLIP_STD, side=84, tokens_per_crop=36, short_edge=84),
    "deepseek_vl": ImageProcessor(
        *("deepseek_vl", 14, CLIP_MEAN, CLIP_STD), side=84, tokens_per_crop=36, short_edge=20, is_padded=True
    ),
    "llava_next": ImageProcessor(
        *("llava_next", 14, CLIP_MEAN, CLIP_STD),
        side=84,
        tokens_per_crop=36,
        pinpoints=tuple((height, width) for height, width in PINPOINTS),
    ),
    "llava_onevision": ImageProcessor(
        *("llava_onevision", 14, CLIP_MEAN, CLIP_STD),
        side=84,
        tokens_per_crop=36,
        pinpoints=tuple((height, width) for height, width in PINPOINTS),
        max_crops=4,
    ),
    "internvl": ImageProcessor(
        "internvl", 14, CLIP_MEAN, CLIP_STD, side=56, tokens_per_crop=4, min_crops=1, max_crops=6
    ),
    "llama4": ImageProcessor(
        "llama4", 14, HALVES, HALVES, resampling="bilinear", side=56, tokens_per_crop=4, max_crops=6
    ),
    "lighton_ocr": ImageProcessor(
        "lighton_ocr", 14, CLIP_MEAN, CLIP_STD, merge_size=2, longest_edge=140, resize_unit=14
    ),
    "mistral3": ImageProcessor("mistral3", 14, CLIP_MEAN, CLIP_STD, merge_size=2, longest_edge=140),
    "pixtral": ImageProcessor("pixtral", 16, CLIP_MEAN, CLIP_STD, longest_edge=128),
    "granite_docling": ImageProcessor(
        *("granite_docling", 14, CLIP_MEAN, CLIP_STD),
        merge_size=4,
        side=56,
        tokens_per_crop=1,
        min_crops=1,
        max_crops=4,
        dense_rule=(0.0, 0.0, 0.0),
    ),
    "aya_vision": ImageProcessor(
        *("aya_vision", 14, CLIP_MEAN, CLIP_STD), side=56, tokens_per_crop=4, min_crops=1, max_crops=6
    ),
    "minicpmv4_6": ImageProcessor(
        *("minicpmv4_6", 14, HALVES, HALVES), merge_size=4, side=168, max_crops=5, splits=True, is_numbered=True
    ),
    "cohere2_vision": ImageProcessor(
        *("cohere2_vision", 14, CLIP_MEAN, CLIP_STD), side=56, tokens_per_crop=4, max_crops=6
    ),
    "lfm2_vl": ImageProcessor(
        *("lfm2_vl", 14, HALVES, HALVES),
        resampling="bilinear",
        merge_size=2,
        min_pixels=4 * 784,
        max_pixels=12 * 784,
        side=56,
        tokens_per_crop=4,
        min_crops=2,
        max_crops=5,
        splits=True,
        tolerance=2.0,
    ),
    "smolvlm": ImageProcessor(
        *("smolvlm", 8, HALVES, HALVES),
        resampling="lanczos",
        longest_edge=128,
        side=64,
        tokens_per_crop=16,
        splits=True,
    ),
}


def read(folder: Path, kind: str, overrides: dict[str, Any] | None = None) -> ImageProcessor:
    return read_image_processor(folder, VisionConfig(kind, 1), overrides)


@pytest.mark.parametrize("kind", MODELS)
def test_image_processor_has_numbers_of_its_files(kind: str, tmp_path: Path):
    processor = media_processor(tmp_path, kind)
    assert processor == EXPECTED[kind]
    assert processor_of(json.loads(json.dumps(asdict(processor)))) == processor


def test_nested_settings_come_before_the_older_file(tmp_path: Path):
    folder = media_folder(tmp_path, "qwen3_vl", {"size": {"shortest_edge": 1, "longest_edge": 2}})
    nested = {"image_processor": MODELS["qwen3_vl"].settings, "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    assert read(folder, "qwen3_vl") == EXPECTED["qwen3_vl"]
    # A file of the processor of text alone.
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))
    assert read(folder, "qwen3_vl").max_pixels == 2


def test_kimis_authors_file_says_the_same(tmp_path: Path):
    """Its numbers are in an object, by other names."""
    settings = {"in_patch_limit": 64, "patch_limit_on_one_side": 12, "patch_size": 14, "merge_kernel_size": [2, 2]}
    more = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "fixed_output_tokens": None, "sample_fps": 2.0}
    folder = media_folder(tmp_path, "kimi_k25", {"size": None, "max_patches": None, "media_proc_cfg": settings | more})
    assert read(folder, "kimi_k25") == EXPECTED["kimi_k25"]
    given = {"max_patches": 32, "size": {"max_height": 9, "max_width": 9}}
    found = read(folder, "kimi_k25", given)
    assert (found.max_pixels, found.longest_edge) == (32 * 196, 126)


# Files that leave everything out: their class's defaults, where the tower's agree.
THINNED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ({}, {}, {"min_pixels": 3136, "max_pixels": 1_003_520, "patch_size": 14, "merge_size": 2}),
    "qwen2_5_vl": ({}, {}, {"min_pixels": 3136, "max_pixels": 1_003_520, "patch_size": 14, "merge_size": 2}),
    "exaone4_5": ({}, {}, {"min_pixels": 3136, "max_pixels": 1_003_520, "patch_size": 14, "merge_size": 2}),
    "glm4v": ({}, {}, {"min_pixels": 12544, "max_pixels": 11_760_000, "patch_size": 14, "merge_size": 2}),
    "paddleocr_vl": ({}, {}, {"min_pixels": 147456, "max_pixels": 2359296, "patch_size": 14, "merge_size": 2}),
    "kimi_k25": ({}, {}, {"max_pixels": 16384 * 196, "longest_edge": 7168, "patch_size": 14, "merge_size": 2}),
    "gemma3": ({"vision_config": {"patch_size": 14}}, {}, {"side": 224, "tokens_per_crop": 256}),
    "gemma4": ({}, {}, {"patch_size": 16, "merge_size": 3, "max_pixels": 280 * 48**2, "mean": PLAIN[0]}),
    "llava": (
        {"vision_config": {"patch_size": 14}},
        {},
        {"side": 224, "short_edge": 224, "patch_size": 14, "tokens_per_crop": 256},
    ),
    "llava_next": (
        {},
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        {"side": 336, "tokens_per_crop": 576, "max_crops": 0, "patch_size": 14},
    ),
    "llava_onevision": ({}, {}, {"side": 384, "tokens_per_crop": 729, "max_crops": 9, "patch_size": 14}),
    "internvl": (
        {},
        {"size": {"height": 448, "width": 448}},
        {"side": 448, "tokens_per_crop": 256, "min_crops": 1, "max_crops": 12},
    ),
    "llama4": (
        {"vision_config": {"image_size": 336}},
        {},
        {"side": 336, "tokens_per_crop": 144, "max_crops": 16, "mean": HALVES, "resampling": "bilinear"},
    ),
    "deepseek_vl": (
        {"vision_config": {"image_size": 384}},
        {},
        {"side": 384, "tokens_per_crop": 576, "short_edge": 14, "resampling": "bicubic", "is_padded": True},
    ),
    "lighton_ocr": ({}, {}, {"longest_edge": 1024, "patch_size": 14, "merge_size": 2, "resize_unit": 16}),
    "mistral3": ({"model_type": "mistral3"}, {}, {"longest_edge": 1024, "patch_size": 14, "merge_size": 2}),
    "pixtral": ({"model_type": "llava"}, {}, {"longest_edge": 1024, "patch_size": 16, "merge_size": 1}),
    "granite_docling": (
        {},
        {},
        {"side": 512, "patch_size": 16, "merge_size": 4, "tokens_per_crop": 64, "max_crops": 32, "dense_crops": 0},
    ),
    "aya_vision": (
        {"vision_config": {"image_size": 384, "patch_size": 16}},
        {},
        {"side": 384, "tokens_per_crop": 144, "min_crops": 1, "max_crops": 12},
    ),
    "minicpmv4_6": ({"vision_config": {"patch_size": 14}}, {}, {"side": 448, "merge_size": 4, "max_crops": 9}),
    "cohere2_vision": ({}, {}, {"side": 512, "patch_size": 16, "tokens_per_crop": 256, "max_crops": 12}),
    "lfm2_vl": (
        {},
        {},
        {"side": 512, "patch_size": 16, "merge_size": 2, "tokens_per_crop": 256, "min_pixels": 65536, "max_crops": 10},
    ),
    "smolvlm": (
        {"vision_config": {"image_size": 364, "patch_size": 14}},
        {},
        {"side": 364, "longest_edge": 1456, "tokens_per_crop": 169, "splits": True},
    ),
}


@pytest.mark.parametrize("kind", THINNED)
def test_missing_keys_have_defaults_of_their_class(kind: str, tmp_path: Path):
    config, settings, expected = THINNED[kind]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    found = asdict(read(tmp_path, kind))
    assert {key: found[key] for key in expected} == expected
    if kind == "llava_onevision":
        assert (len(found["pinpoints"]), found["pinpoints"][6]) == (36, (768, 384))
    if kind == "llava_next":
        assert found["pinpoints"] == ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


def test_siglip_tower_of_llava_takes_squeezed_squares(tmp_path: Path):
    """Its processor cuts nothing out, and its tower has no class token."""
    vision = {"model_type": "siglip_vision_model", "image_size": 84, "patch_size": 14}
    square = {"size": {"height": 84, "width": 84}, "crop_size": None}
    settings = {"image_processor_type": "SiglipImageProcessor", **square}
    processor = media_processor(
        tmp_path, "llava", settings, vision_config=vision, vision_feature_select_strategy="full"
    )
    assert processor == replace(EXPECTED["llava"], short_edge=0, mean=HALVES, std=HALVES)


@pytest.mark.parametrize(
    ("kind", "overrides", "changes"),
    [
        ("qwen3_vl", {"max_pixels": 8192}, {"max_pixels": 8192}),
        ("qwen3_vl", {"min_pixels": 1024, "max_pixels": 2048}, {"min_pixels": 1024, "max_pixels": 2048}),
        ("qwen2_5_vl", {"size": {"shortest_edge": 1, "longest_edge": 9}}, {"min_pixels": 1, "max_pixels": 9}),
        ("gemma4", {"max_soft_tokens": 140}, {"max_pixels": 140 * 64}),
        ("glm4v", {"max_pixels": 8192}, {"max_pixels": 16384}),
        ("glm4v", {"size": {"shortest_edge": 1, "longest_edge": 9}}, {"min_pixels": 1, "max_pixels": 9}),
        ("internvl", {"max_patches": 2}, {"max_crops": 2}),
        ("llama4", {"max_patches": 2}, {"max_crops": 2}),
        ("pixtral", {"size": {"longest_edge": 64}}, {"longest_edge": 64}),
        ("smolvlm", {"do_image_splitting": False, "size": {"longest_edge": 64}}, {"splits": False, "longest_edge": 64}),
        ("gemma3", {"max_pixels": None}, None),
    ],
)
def test_overrides_replace_numbers_of_the_files(
    kind: str, overrides: dict[str, Any], changes: dict[str, Any] | None, tmp_path: Path
):
    folder = media_folder(tmp_path, kind)
    if changes is None:
        with pytest.raises(ModelConfigError, match="max_pixels is not supported for gemma3: its sizes are those"):
            read(folder, kind, overrides)
    else:
        assert read(folder, kind, overrides) == replace(EXPECTED[kind], **changes)


BAD: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("qwen3_vl", {"patch_size": 14}, {}, r"patch_size=14 must be the size that the tower has, vision_config's 16"),
    ("qwen2_vl", {"patch_size": 16}, {}, r"patch_size=16 must be the size that the tower has, vision_config's 14"),
    ("qwen3_vl", {"merge_size": 4}, {}, r"merge_size=4 must be the size"),
    ("qwen3_vl", {"temporal_patch_size": 1}, {}, r"temporal_patch_size=1 is not supported, only 2"),
    ("qwen3_vl", {"min_pixels": "many"}, {}, r"min_pixels=.many. must be a whole number"),
    ("qwen3_vl", {"min_pixels": 99_999}, {}, r"min_pixels=99999 asks for at least 99999 pixels .* at most 65536"),
    ("qwen3_vl", {"size": {"longest_edge": 99}}, {}, r"size.shortest_edge=None must be a whole number"),
    ("qwen3_vl", {"size": [1]}, {}, r"size=.*must be an object"),
    ("qwen3_vl", {"size": {"shortest_edge": 1, "longest_edge": 1 << 40}}, {}, r"size.longest_edge=1099511627776"),
    ("qwen3_vl", {"image_mean": [0.5, 0.5]}, {}, r"image_mean=.* must list 3 numbers"),
    ("qwen3_vl", {"image_std": [0.5, 0, 0.5]}, {}, r"image_std=.* must list 3 numbers of at least"),
    ("qwen3_vl", {"image_std": "half"}, {}, r"image_std"),
    ("qwen3_vl", {"rescale_factor": 0}, {}, r"rescale_factor=0 must be a number"),
    ("qwen3_vl", {"resample": 0}, {}, r"resample=0 is not supported, only 1 or 2 or 3"),
    ("qwen3_vl", {"do_resize": False}, {}, r"do_resize=False is not supported, only true"),
    ("qwen3_vl", {"do_normalize": False}, {}, r"do_normalize=False"),
    ("glm4v", {"patch_size": 16}, {}, r"patch_size=16 must be the size that the tower has, vision_config's 14"),
    ("glm4v", {"size": {"shortest_edge": 9, "longest_edge": 8}}, {}, r"size=.* at least 9 pixels .* at most 8"),
    ("glm4v", {"size": {"longest_edge": 99}}, {}, r"size.shortest_edge=None must be a whole number"),
    ("paddleocr_vl", {"temporal_patch_size": 2}, {}, r"temporal_patch_size=2 is not supported, only 1"),
    ("kimi_k25", {"size": {"max_height": 12, "max_width": 13}}, {}, r"size=.* must be a square, in patches"),
    ("kimi_k25", {"size": {"max_height": 12}}, {}, r"size.max_width=None must be a whole number"),
    ("kimi_k25", {"max_patches": 1 << 21}, {}, r"max_patches=2097152 must be a whole number from 1 to 1048576"),
    ("kimi_k25", {"merge_size": 3}, {}, r"merge_size=3 must be the size that the tower has, vision_config's 2, not 3"),
    ("kimi_k25", {"merge_size": 2}, {"vision_config": {"merge_kernel_size": [3, 3]}}, r"must be the size .* 3, not 2"),
    ("kimi_k25", {"media_proc_cfg": {"merge_kernel_size": [2, 1]}}, {}, r"merge_kernel_size=.* must be one length for"),
    ("kimi_k25", {"patch_size": 16}, {}, r"patch_size=16 must be the size that the tower has, vision_config's 14"),
    ("kimi_k25", {"media_proc_cfg": {"fixed_output_tokens": 64}}, {}, r"media_proc_cfg.fixed_output_tokens=64 is not"),
    (
        "kimi_k25",
        {"media_proc_cfg": {"in_patch_limit": "no"}},
        {},
        r"in_patch_limit='no' must be a whole number",
    ),
    ("kimi_k25", {"media_proc_cfg": [1]}, {}, r"media_proc_cfg=\[1\] must be an object"),
    ("gemma3", {"do_pan_and_scan": True}, {}, r"do_pan_and_scan=True is not supported"),
    ("gemma3", {"size": {"height": 112, "width": 84}}, {}, r"size=.* must be a square"),
    ("gemma3", {"size": {"height": 84, "width": 84}}, {}, r"size=.*must be the size that the tower has.* 112, not 84"),
    ("gemma3", {}, {"mm_tokens_per_image": 15}, r"mm_tokens_per_image=15 must be a square that divides the 8 x 8"),
    ("gemma4", {"patch_size": 16}, {}, r"patch_size=16 must be the size that the tower has, vision_config's 4"),
    ("gemma4", {"pooling_kernel_size": 3}, {}, r"pooling_kernel_size=3 must be the size that the tower has.* 2"),
    ("gemma4", {"max_soft_tokens": 256}, {}, r"max_soft_tokens=256 is not supported, only 70 or 140 or 280 or 560"),
    ("gemma4", {"max_soft_tokens": 280}, {}, r"max_soft_tokens=280 asks for images of 280 tokens a side: .* 144$"),
    (
        "gemma4_unified",
        {"max_soft_tokens": 140},
        {},
        r"max_soft_tokens=140 asks for images of 140 tokens a side: .* 80$",
    ),
    ("gemma4", {"do_normalize": "no"}, {}, r"do_normalize=.no. must be true or false"),
    ("gemma4", {"do_rescale": False}, {}, r"do_rescale=False is not supported, only true"),
    ("llava", {"crop_size": {"height": 70, "width": 70}}, {}, r"crop_size=.*must be the size"),
    ("llava", {"size": {"shortest_edge": 70}}, {}, r"size=.*must be at least the 84 of crop_size"),
    ("llava", {}, {"vision_feature_select_strategy": "some"}, r"vision_feature_select_strategy"),
    ("llava_next", {"crop_size": {"height": 70, "width": 70}}, {}, r"crop_size=.*must be the size that the tower has"),
    ("llava_next", {"size": {"shortest_edge": 98}}, {}, r"size=.*must be the size that the tower has.* 84, not 98"),
    ("llava_next", {"size": {"height": 84, "width": 98}}, {}, r"size=.*must be a square"),
    ("llava_next", {"image_grid_pinpoints": [[84, 84]]}, {}, r"must be those of config.json"),
    ("llava_next", {"image_grid_pinpoints": None}, {}, r"must be those of config.json"),
    ("llava_next", {"image_grid_pinpoints": "84"}, {}, r"must list pairs of numbers"),
    ("llava_onevision", {"image_grid_pinpoints": [[84, 90]]}, {}, r"must have multiples of 84"),
    ("llava_onevision", {"image_grid_pinpoints": [84]}, {}, r"must list pairs"),
    ("llava_onevision", {"image_grid_pinpoints": [[84, 84]]}, {}, r"must be those of config.json"),
    ("llava_onevision", {}, {"vision_aspect_ratio": "square"}, r"vision_aspect_ratio=.*must be anyres_max_"),
    ("llava_onevision", {}, {"vision_feature_select_strategy": "default"}, r"only full"),
    ("internvl", {"max_patches": 0}, {}, r"max_patches=0 must be a whole number from 1"),
    ("internvl", {"max_patches": 10**9}, {}, r"max_patches"),
    ("internvl", {}, {"downsample_ratio": 0.3}, r"downsample_ratio=0.3 must divide the 4 patches"),
    ("internvl", {}, {"vision_config": {"image_size": [56, 28]}}, r"vision_config.image_size=.*must be a whole number"),
    ("llama4", {"size": {"height": 56, "width": 84}}, {}, r"size=.* must be a square"),
    ("llama4", {"size": {"height": 84, "width": 84}}, {}, r"size=.*must be the size that the tower has.* 56, not 84"),
    ("llama4", {"resize_to_max_canvas": True}, {}, r"resize_to_max_canvas=True is not supported, only false"),
    ("llama4", {"max_patches": 65}, {}, r"max_patches=65 must be a whole number from 1 to 64"),
    ("lighton_ocr", {"size": {"longest_edge": 141}}, {}, r"size=.*asks for more than the 140 pixels a side"),
    ("lighton_ocr", {"patch_size": {"height": 14, "width": 28}}, {}, r"patch_size=.* must be a square"),
    ("lighton_ocr", {"patch_size": 0}, {}, r"patch_size=0 must be a whole number"),
    ("deepseek_vl", {"do_pad": False}, {}, r"do_pad=False is not supported, only true"),
    ("deepseek_vl", {"min_size": 85}, {}, r"min_size=85 must be a whole number from 1 to 84"),
    (
        "deepseek_vl",
        {"image_mean": [0.5, -0.1, 0.5]},
        {},
        r"image_mean=.* must be a colour, numbers from 0 to 1: it fills",
    ),
    (
        "llava",
        {"image_mean": 1.1, "do_pad": True, "image_processor_type": "LlavaImageProcessor"},
        {},
        r"image_mean=1.1 must be a colour, numbers from 0 to 1: it fills",
    ),
    (
        "deepseek_vl",
        {"size": {"height": 98, "width": 98}},
        {},
        r"size=.*must be the size that the tower has.* 84, not 98",
    ),
    ("mistral3", {"size": {"longest_edge": 141}}, {}, r"size=.*asks for more than the 140 pixels a side"),
    ("granite_docling", {"size": {"height": 84, "width": 84}}, {}, r"must be the size that the tower has.* 56, not 84"),
    ("granite_docling", {"max_patches": 65}, {}, r"max_patches=65 must be a whole number from 1 to 64"),
    ("granite_docling", {"dense_max_patches": -1}, {}, r"dense_max_patches=-1 must be a whole number from 0 to 64"),
    ("granite_docling", {"dense_max_aspect": "no"}, {}, r"dense_max_aspect='no' must be a number from 0 to"),
    ("granite_docling", {"crop_to_patches": 1}, {}, r"crop_to_patches=1 must be true or false"),
    (
        "granite_docling",
        {"fine_route": True},
        {"vision_config": {"image_size": 56, "patch_size": 14, "use_fine_route": False}},
        r"fine_route=True needs a model with use_fine_route",
    ),
    ("aya_vision", {"min_patches": 7}, {}, r"min_patches=7 must be a whole number from 1 to 6"),
    ("aya_vision", {"size": {"height": 84, "width": 84}}, {}, r"must be the size that the tower has.* 56, not 84"),
    ("minicpmv4_6", {"patch_size": 16}, {}, r"patch_size=16 must be the size that the tower has.* 14, not 16"),
    ("minicpmv4_6", {"max_slice_nums": 0}, {}, r"max_slice_nums=0 must be a whole number from 1 to 64"),
    ("minicpmv4_6", {"downsample_mode": 4}, {}, r"downsample_mode=4 is not supported"),
    ("minicpmv4_6", {"use_image_id": "no"}, {}, r"use_image_id='no' must be true or false"),
    ("cohere2_vision", {"patch_size": 16}, {}, r"patch_size=16 must be the root of the 4 tokens"),
    ("cohere2_vision", {"crop_to_patches": 1}, {}, r"crop_to_patches=1 must be true or false"),
    ("cohere2_vision", {}, {"downsample_factor": 3}, r"downsample_factor=3 must divide the 4 patches of a side"),
    ("lfm2_vl", {"tile_size": 57}, {}, r"tile_size=57 must be a multiple of 28, the pixels of a token's side"),
    ("lfm2_vl", {"min_tiles": 6}, {}, r"min_tiles=6 must be a whole number from 1 to 5"),
    ("lfm2_vl", {"downsample_factor": 4}, {}, r"downsample_factor=4 must be the size that the tower has"),
    ("lfm2_vl", {"use_thumbnail": False}, {}, r"use_thumbnail=False is not supported, only true"),
    ("lfm2_vl", {}, {"use_image_special_tokens": False}, r"use_image_special_tokens=False is not supported, only true"),
    ("lfm2_vl", {"max_pixels_tolerance": 0}, {}, r"max_pixels_tolerance=0 must be a number"),
    ("lfm2_vl", {"min_image_tokens": 13}, {}, r"min_image_tokens=13 must be a whole number from 1 to 12"),
    ("smolvlm", {"max_image_size": {"longest_edge": 32}}, {}, r"max_image_size=.*must be the size"),
    ("smolvlm", {}, {"scale_factor": 3}, r"scale_factor=3 must divide the 8 patches"),
    ("smolvlm", {"do_image_splitting": "no"}, {}, r"do_image_splitting=.no. must be true or false"),
]


@pytest.mark.parametrize(("kind", "settings", "config", "message"), BAD)
def test_bad_number_is_named_with_its_rule(
    kind: str, settings: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path
):
    with pytest.raises(ModelConfigError, match=message):
        media_processor(tmp_path, kind, settings, **config)


def test_bad_override_is_named_as_one(tmp_path: Path):
    folder = media_folder(tmp_path, "qwen3_vl")
    for overrides, message in (
        ({"max_pixels": 0}, r"mm_processor_kwargs: max_pixels=0 must be a whole number"),
        (
            {"do_pan_and_scan": True},
            r"do_pan_and_scan is not supported for qwen3_vl: only min_pixels, max_pixels, size",
        ),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read(folder, "qwen3_vl", overrides)


def test_missing_and_broken_files_are_named(tmp_path: Path):
    folder = media_folder(tmp_path, "gemma3")
    path = folder / "preprocessor_config.json"
    path.write_text("{")
    with pytest.raises(ModelConfigError, match=r"preprocessor_config.json is not JSON"):
        read(folder, "gemma3")
    path.unlink()
    with pytest.raises(ModelConfigError, match=r"neither processor_config.json .* limits.max_images=0"):
        read(folder, "gemma3")
    path.mkdir()
    with pytest.raises(ModelConfigError, match="not a regular file"):
        read(folder, "gemma3")
    (folder / "config.json").unlink()
    with pytest.raises(ModelConfigError, match=r"config.json does not exist"):
        read(folder, "gemma3")


def test_keys_of_a_run_are_those_of_kinds():
    """A key that a kind takes and a run does not could never be given."""
    taken = {key for rule in image_processor._RULES.values() for key in rule.overrides}
    assert taken - {"min_pixels", "max_pixels"} == {*IMAGE_PROCESSOR_KEYS}
