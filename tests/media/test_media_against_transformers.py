"""Prepared images against transformers' processors for Pillow: pixels bit for bit, ids after expansion.

Pillow 13 takes the vertical pass of a resize first where it is cheaper, which gives other bits than releases before:
the processors' calls are split into one for each axis.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from media_models import MODELS, media_processor, noise, tokenizer_of_all_media
from media_oracle import llama4_module, one_axis_a_call, oracle_inputs, oracle_texts, replaced, torchvision_module
from tokenizers import Tokenizer
from transformers.image_utils import SizeDict
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize as paddleocr_resize

from spmd_worker.media import resize
from spmd_worker.media.errors import MediaError
from spmd_worker.media.image_processor import ImageProcessor
from spmd_worker.media.patches import normalise, patches, qwen_patches
from spmd_worker.media.placeholders import IMAGE_NUMBER, PLACEHOLDERS
from spmd_worker.media.prepared import Pixels, PreparedImage
from spmd_worker.media.preparing import prepare
from spmd_worker.media.sizes import (
    cohere_grid,
    glm_size,
    kimi_size,
    lfm2_grid,
    llama4_grid,
    llama4_size,
    paddleocr_size,
)
from spmd_worker.model.towers.pixels import PixelTable
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.tokenizer.chat_template import ChatTemplate

PROMPTS = {
    "one": [noise(123, 217)],
    "tall": [noise(301, 45, 1)],
    "small": [noise(20, 33, 2)],
    "two": [noise(97, 61, 3), noise(130, 257, 4)],
}
KINDS = tuple(MODELS)
FEW = ("one", "two")


@pytest.fixture
def _one_axis_a_call() -> Iterator[None]:
    with one_axis_a_call():
        yield


def oracle_rows(kind: str, inputs: dict[str, Any], patch: int) -> np.ndarray:
    """All patches of the prompt's images, in the tower's order, without padding."""
    values = np.asarray(inputs["pixel_values"])
    if kind.startswith(("qwen", "glm", "paddleocr", "kimi", "exaone")):
        return values.reshape(len(values), -1)
    if kind == "lfm2_vl":
        rows = values[np.asarray(inputs["pixel_attention_mask"]) > 0]
        return rows.reshape(len(rows), -1, 3).transpose(0, 2, 1).reshape(rows.shape)
    if kind == "minicpmv4_6":
        return values[0].reshape(3, patch, -1, patch).transpose(2, 0, 1, 3).reshape(-1, 3 * patch**2)
    if kind.startswith("gemma4"):
        # Channels of a pixel are side by side there.
        rows = values[(np.asarray(inputs["image_position_ids"]) >= 0).all(-1)]
        return rows.reshape(len(rows), -1, 3).transpose(0, 2, 1).reshape(rows.shape)
    if kind in ("mistral3", "pixtral", "lighton_ocr"):
        planes = [plane[:, :height, :width] for plane, (height, width) in zip(values, inputs["image_sizes"])]
    elif kind in ("smolvlm", "granite_docling"):
        planes = [plane for plane, mask in zip(values[0], inputs["pixel_attention_mask"][0]) if mask.any()]
    elif kind in ("llava_next", "llava_onevision"):
        # Images of fewer crops are padded with zeros, which no normalised pixels are.
        planes = [plane for image in values for plane in image if plane.any()]
    else:
        planes = list(values)
    return np.concatenate([patches(plane, patch) for plane in planes])


OWN_TABLES: dict[str, dict[str, Any]] = {
    "llama4": {"has_bfloat16_pixels": True},
    "kimi_k25": {"scales_levels": True},
    "lfm2_vl": {"scales_levels": True},
    "cohere2_vision": {"scales_levels": True},
}
"""Kinds whose pixels are normalised in other ways."""


def own_planes(images: list[PreparedImage], processor: ImageProcessor) -> list[np.ndarray]:
    """Planes of such a tower."""
    numbers = {"image_mean": processor.mean, "image_std": processor.std, "rescale_factor": processor.scale}
    table = PixelTable(VisionConfig(processor.kind, 1, **OWN_TABLES[processor.kind], **numbers), torch.device("cpu"))
    return [plane.numpy() for image in images for plane in table.planes(image.pixels)]


def our_rows(images: list[PreparedImage], processor: ImageProcessor) -> np.ndarray:
    planes = [
        normalise(crop, processor.mean, processor.std, processor.scale)
        for image in images
        for crop in image.pixels.crops
    ]
    if processor.kind in OWN_TABLES:
        return np.concatenate([patches(plane, processor.patch_size) for plane in own_planes(images, processor)])
    if processor.kind.startswith(("qwen", "glm", "exaone")):
        return np.concatenate([qwen_patches(plane, processor.patch_size, processor.merge_size) for plane in planes])
    return np.concatenate([patches(plane, processor.patch_size) for plane in planes])


def prepared(pictures: list[Pixels], processor: ImageProcessor) -> list[PreparedImage]:
    return [prepare(each, processor, is_alone=len(pictures) == 1) for each in pictures]


@pytest.mark.guarantee("Prepared pixels are those of transformers")
@pytest.mark.usefixtures("_one_axis_a_call")
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_have_bits_of_transformers(kind: str, prompt: str, tmp_path: Path):
    processor = media_processor(tmp_path, kind)
    images = prepared(PROMPTS[prompt], processor)
    theirs = oracle_rows(kind, oracle_inputs(kind, PROMPTS[prompt]), processor.patch_size)
    ours = our_rows(images, processor)
    assert ours.dtype == theirs.dtype == np.float32
    assert np.array_equal(ours, theirs)
    assert sum(image.num_patches for image in images) == len(ours)
    assert [image.pixels.size for image in images] == [each.shape[:2] for each in PROMPTS[prompt]]


@pytest.mark.control("Prepared pixels are those of transformers")
@pytest.mark.usefixtures("_one_axis_a_call")
def test_pixel_comparison_detects_vertical_pass_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = resize.resize

    def vertical_first(pixels: Pixels, height: int, width: int, resampling: str) -> Pixels:
        return right(right(pixels, height, pixels.shape[1], resampling), height, width, resampling)

    monkeypatch.setattr("spmd_worker.media.preparing.resize", vertical_first)
    processor = media_processor(tmp_path, "gemma3")
    theirs = oracle_rows("gemma3", oracle_inputs("gemma3", PROMPTS["one"]), 14)
    assert not np.array_equal(our_rows(prepared(PROMPTS["one"], processor), processor), theirs)


@pytest.mark.control("Prepared pixels are those of transformers")
def test_pixel_comparison_detects_levels_scaled_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    processor = media_processor(tmp_path, "kimi_k25")
    theirs = oracle_rows("kimi_k25", oracle_inputs("kimi_k25", PROMPTS["one"]), 14)
    monkeypatch.delitem(OWN_TABLES, "kimi_k25")
    ours = our_rows(prepared(PROMPTS["one"], processor), processor)
    assert np.allclose(ours, theirs, atol=1e-6)
    assert not np.array_equal(ours, theirs)


def test_sizes_of_glm_are_those_of_transformers():
    """Sides from 1 on, of any ratio."""
    generator, num_refused = random.Random(1), 0
    for _ in range(2000):
        height, width = (int(2 ** generator.uniform(0, 13)) for _ in range(2))
        bounds = generator.choice([(12544, 9633792), (6272, 100352), (1, 3136), (100001, 100353)])
        try:
            theirs = smart_resize(2, height, width, 2, 28, *bounds)
        except ValueError:
            num_refused += 1
            with pytest.raises(MediaError, match="at most 200 times the other"):
                glm_size(height, width, 28, *bounds)
        else:
            assert glm_size(height, width, 28, *bounds) == theirs
    assert 100 < num_refused < 1000


def test_tiles_of_llama4_are_those_of_transformers():
    module, generator = llama4_module(), random.Random(1)
    for _ in range(400):
        height, width = (int(2 ** generator.uniform(0, 13)) for _ in range(2))
        side, most = generator.choice([(336, 16), (56, 6), (112, 1)])
        grids = torch.tensor(module.find_supported_resolutions(most, SizeDict(height=side, width=side)))
        canvas = module.get_best_fit((height, width), grids)
        lines, columns = llama4_grid(height, width, side, most)
        assert [lines * side, columns * side] == canvas.tolist()
        limits = [min(max(length, side), target) for length, target in zip((height, width), canvas, strict=True)]
        theirs = [max(int(each), 1) for each in module.get_max_res_without_distortion((height, width), limits)]
        assert [*llama4_size(height, width, side, (lines * side, columns * side))] == theirs


def test_sizes_of_paddleocr_are_those_of_transformers():
    """Sides from 1 on, of any ratio."""
    generator, num_refused = random.Random(2), 0
    for _ in range(2000):
        height, width = (int(2 ** generator.uniform(0, 13)) for _ in range(2))
        bounds = generator.choice([(147456, 2359296), (3136, 100352), (1, 3136), (100001, 100353)])
        try:
            theirs = paddleocr_resize(height, width, 28, *bounds)
        except ValueError:
            num_refused += 1
            with pytest.raises(MediaError, match="at most 200 times the other"):
                paddleocr_size(height, width, 28, *bounds)
        else:
            assert paddleocr_size(height, width, 28, *bounds) == theirs
    assert 100 < num_refused < 1000


def test_sizes_of_kimi_are_those_of_transformers():
    """Sides from 1 on, of any ratio."""
    theirs, generator = torchvision_module("kimi_k25").navit_resize, random.Random(3)
    for _ in range(2000):
        height, width = (int(2 ** generator.uniform(0, 13)) for _ in range(2))
        most, side = generator.choice([(16384, 512), (64, 12), (4096, 40), (7, 300)])
        assert kimi_size(height, width, 14, most, side) == theirs(height, width, 14, 2, most, side)[0]


def test_tiles_of_command_a_are_those_of_transformers():
    """Also of images that several grids fit alike."""
    theirs, generator = torchvision_module("cohere2_vision").get_optimal_tiled_canvas, random.Random(5)
    for _ in range(2000):
        height = generator.choice([int(2 ** generator.uniform(0, 12)), 56, 112, 512, 1024])
        width = generator.choice([int(2 ** generator.uniform(0, 12)), height, 3 * height // 2, 3 * height])
        side, most = generator.choice([(512, 12), (56, 6), (56, 1), (84, 25)])
        columns, lines = theirs((height, width), (side, side), 1, most)
        assert cohere_grid(height, width, side, most) == (lines, columns)


def test_grids_of_lfm2_are_those_of_transformers():
    """Also of images of ratios in the middle of two."""
    module, generator = torchvision_module("lfm2_vl"), random.Random(4)
    ratios = module.Lfm2VlImageProcessor._target_ratios.__wrapped__
    for _ in range(2000):
        height = int(2 ** generator.uniform(0, 12))
        width = generator.choice([int(2 ** generator.uniform(0, 12)), 5 * height // 2, 3 * height // 2, 3 * height])
        least, most, side = generator.choice([(2, 10, 512), (1, 4, 56), (2, 12, 64), (3, 3, 84)])
        targets = ratios(None, least, most)
        columns, lines = module.find_closest_aspect_ratio(width / height, targets, width, height, side)
        assert lfm2_grid(height, width, side, least, most) == (lines, columns)


SIGLIP = {"model_type": "siglip_vision_model", "image_size": 84, "patch_size": 14}
SQUARE: dict[str, Any] = {"size": {"height": 84, "width": 84}, "crop_size": None}
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, str] | None]] = {
    "padded": (
        *("llava", {"do_pad": True, "image_processor_type": "LlavaImageProcessorFast"}, {}),
        ("llava", "LlavaImageProcessorPil"),
    ),
    "padding of batches": ("llava", {"do_pad": True, "image_processor_type": "CLIPImageProcessor"}, {}, None),
    "longer short side": ("llava", {"size": {"shortest_edge": 100}}, {}, None),
    "siglip": (
        *("llava", {"image_processor_type": "SiglipImageProcessor", **SQUARE}, {"vision_config": SIGLIP}),
        ("siglip", "SiglipImageProcessorPil"),
    ),
    "size of both sides": ("llava_next", {"size": {"height": 84, "width": 84}, "do_center_crop": False}, {}, None),
    "pixels that its class has no keys for": ("glm4v", {"min_pixels": 99, "max_pixels": 3136}, {}, None),
    "sides of whole tokens": ("lighton_ocr", {"patch_size": {"height": 28, "width": 28}}, {}, None),
    "sides of no whole patches": ("lighton_ocr", {"patch_size": 35}, {}, None),
    "one tile": ("internvl", {"max_patches": 1}, {}, None),
    "many tiles": ("internvl", {"min_patches": 4, "max_patches": 12}, {}, None),
    "one page": ("granite_docling", {"crop_to_patches": False, "min_patches": 3}, {}, None),
    "fine route": ("granite_docling", {"fine_route": True}, {}, None),
    "dense pages": (
        "granite_docling",
        {"dense_max_patches": 9, "dense_min_aspect": 0.1, "dense_max_aspect": 2.0, "dense_max_scale": 4.0},
        {},
        None,
    ),
    "two tiles": ("lfm2_vl", {"max_tiles": 2}, {}, None),
    "no tiles": ("lfm2_vl", {"do_image_splitting": False}, {}, None),
    "few pixels too many": ("lfm2_vl", {"max_pixels_tolerance": 3.1}, {}, None),
    "no tiles of Command A": ("cohere2_vision", {"crop_to_patches": False}, {}, None),
    "many tiles of Command A": ("cohere2_vision", {"max_patches": 12, "image_mean": [0.5] * 3}, {}, None),
    "many slices": ("minicpmv4_6", {"max_slice_nums": 9, "scale_resolution": 84}, {}, None),
    "no slices": ("minicpmv4_6", {"slice_mode": False}, {}, None),
    "small tokens": ("minicpmv4_6", {"downsample_mode": "4x"}, {}, None),
    "some tiles of Aya": ("aya_vision", {"min_patches": 3, "crop_to_patches": False}, {}, None),
    "not split": ("smolvlm", {"do_image_splitting": False}, {}, None),
    "one square": ("smolvlm", {"size": {"longest_edge": 64}}, {}, None),
    "other filter and scale": ("gemma3", {"resample": 1, "rescale_factor": 0.0039, "image_mean": 0.4}, {}, None),
}


@pytest.mark.usefixtures("_one_axis_a_call")
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_settings_have_bits_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kind, settings, config, oracle = VARIANTS[name]
    processor = media_processor(tmp_path, kind, settings, **config)
    kept = {key: value for key, value in {**MODELS[kind].settings, **settings}.items() if value is not None}
    kept.pop("image_processor_type", None)
    monkeypatch.setitem(MODELS, kind, replace(MODELS[kind], settings=kept, oracle=oracle or MODELS[kind].oracle))
    for prompt in ("one", "tall"):
        theirs = oracle_rows(kind, oracle_inputs(kind, PROMPTS[prompt]), processor.patch_size)
        assert np.array_equal(our_rows(prepared(PROMPTS[prompt], processor), processor), theirs)


NEXT = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
OWN_SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ({}, {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}),
    "qwen2_vl": ({}, {"min_pixels": 3136, "max_pixels": 12845056}),
    "qwen2_5_vl": ({}, {"min_pixels": 3136, "max_pixels": 12845056}),
    "glm4v": ({}, {"size": {"shortest_edge": 12544, "longest_edge": 9633792}}),
    "paddleocr_vl": ({}, {"min_pixels": 147384, "max_pixels": 2822400}),
    "kimi_k25": ({}, {"size": {"max_height": 512, "max_width": 512}, "max_patches": 16384}),
    "gemma3": (
        {"vision_config": {"image_size": 896, "patch_size": 14}, "mm_tokens_per_image": 256},
        {"size": {"height": 896, "width": 896}},
    ),
    "gemma4": (
        {"vision_config": {"patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240}},
        {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280},
    ),
    "llava": (
        {"vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}},
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    ),
    "llava_next": (
        {"vision_config": None, "image_grid_pinpoints": None},
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}, "image_grid_pinpoints": NEXT},
    ),
    "internvl": ({"vision_config": {}}, {"size": {"height": 448, "width": 448}, "max_patches": 12}),
    "deepseek_vl": (
        {"vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 16}},
        {"size": {"height": 384, "width": 384}, "min_size": 14},
    ),
    "lighton_ocr": (
        {"vision_config": {"image_size": 1540, "patch_size": 14}},
        {"patch_size": 14, "size": {"longest_edge": 1540}},
    ),
    "aya_vision": (
        {"vision_config": {**SIGLIP, "image_size": 364}},
        {"size": {"height": 364, "width": 364}, "max_patches": 12},
    ),
    "cohere2_vision": (
        {"vision_config": {**SIGLIP, "image_size": 512, "patch_size": 16}},
        {"size": {"height": 512, "width": 512}, "max_patches": 12, "patch_size": 16},
    ),
    "minicpmv4_6": ({}, {"scale_resolution": 448, "max_slice_nums": 9}),
    "mistral3": ({"vision_config": {"image_size": 1540, "patch_size": 14}}, {"size": {"longest_edge": 1540}}),
    "granite_docling": ({"vision_config": {}}, {"size": {"height": 512, "width": 512}, "max_patches": 32}),
    "lfm2_vl": (
        {"vision_config": {"patch_size": 16}},
        {"encoder_patch_size": 16, "tile_size": 512, "min_image_tokens": 64, "max_image_tokens": 256, "max_tiles": 10},
    ),
    "smolvlm": (
        {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
    ),
}
"""Numbers of the models on the hub, as they differ from the tiny ones."""


@pytest.mark.stress
@pytest.mark.usefixtures("_one_axis_a_call")
@pytest.mark.parametrize("size", [(480, 640), (1080, 1920), (2200, 1700), (900, 37), (20, 20)])
@pytest.mark.parametrize("kind", OWN_SIZES)
def test_pixels_at_own_sizes_are_those_of_transformers(
    kind: str, size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, settings = OWN_SIZES[kind]
    processor = media_processor(tmp_path, kind, settings, **config)
    model = replace(MODELS[kind], settings={**MODELS[kind].settings, **settings})
    monkeypatch.setitem(MODELS, kind, model)
    pictures = [noise(*size)]
    theirs = oracle_rows(kind, oracle_inputs(kind, pictures), processor.patch_size)
    assert np.array_equal(our_rows(prepared(pictures, processor), processor), theirs)


# Text and ids.


def prompt_of(kind: str, num_images: int, between: str) -> str:
    written = PLACEHOLDERS[kind].written
    return f"Look:{between}{between.join([written] * num_images)}{between}What is it?"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of_all_media()


@pytest.mark.guarantee("Ids of prompts with images are those of transformers")
@pytest.mark.usefixtures("_one_axis_a_call")
@pytest.mark.parametrize("prompt", FEW)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_after_expansion_are_those_of_transformers(kind: str, prompt: str, tokenizer: Tokenizer, tmp_path: Path):
    processor, placeholders = media_processor(tmp_path, kind), PLACEHOLDERS[kind]
    pictures = PROMPTS[prompt]
    images = prepared(pictures, processor)
    texts = oracle_texts(kind, oracle_inputs(kind, pictures), len(pictures))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    for between in ("\n", "\n\n", "", " and\n\n\n"):
        text = prompt_of(kind, len(pictures), between)
        theirs = encode(replaced(text, placeholders.marker, texts))
        assert encode(placeholders.expand_text(text, images)) == theirs
        # Prompts of ids, with a placeholder for each image and expanded already.
        assert placeholders.expand_ids(encode(text), images, encode) == theirs
        assert placeholders.expand_ids(theirs, images, encode) == theirs
        items = placeholders.media_items(theirs, images, tokenizer.token_to_id(placeholders.image_token))
        assert [item.num_rows for item in items] == [image.num_rows for image in images]


@pytest.mark.control("Ids of prompts with images are those of transformers")
def test_id_comparison_detects_line_ends_not_joined(tokenizer: Tokenizer, tmp_path: Path):
    images = prepared(PROMPTS["one"], media_processor(tmp_path, "gemma3"))
    before, after = prompt_of("gemma3", 1, "\n").split("<start_of_image>")
    separate = [tokenizer.encode(each).ids for each in (before, images[0].text, after)]
    whole = tokenizer.encode(PLACEHOLDERS["gemma3"].expand_text(f"{before}<start_of_image>{after}", images)).ids
    assert [token for ids in separate for token in ids] != whole


@pytest.mark.parametrize("kind", KINDS)
def test_chat_placeholders_expand_as_text(kind: str, tmp_path: Path):
    placeholders = PLACEHOLDERS[kind]
    source = (
        "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}"
        + placeholders.written
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    content = [{"type": "image"}, {"type": "text", "text": " or\n"}, {"type": "image"}]
    text = ChatTemplate(source, {}).render([{"role": "user", "content": content}], content_format="openai")
    images = prepared(PROMPTS["two"], media_processor(tmp_path, kind))
    expanded = placeholders.expand_text(text, images)
    first, second = (
        placeholders.written.replace(placeholders.marker, image.text.replace(IMAGE_NUMBER, str(number)))
        for number, image in enumerate(images)
    )
    assert expanded == f"{first} or\n{second}"
