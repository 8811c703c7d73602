"""ImageProcessor: the numbers by which a checkpoint's images are prepared, and how they are read.

A missing key has the value that its class of transformers has. Numbers that the tower fixes are compared with it: a
square of another size than the tower's would be computed with wrong positions.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.media.page_rules import (
    MAX_CROPS,
    aya_vision,
    cohere2_vision,
    granite_docling,
    kimi,
    lfm2_vl,
    minicpmv4_6,
    opened,
)
from spmd_worker.media.processor_settings import (
    MAX_SIDE,
    ProcessorSettings,
    TowerSizes,
    Values,
    check_is_towers,
    image_values,
    json_object,
    tower_sizes,
)
from spmd_worker.media.sizes import NUM_FRAMES
from spmd_worker.model_config.config_reader import ConfigReader, checked_integer
from spmd_worker.model_config.families.omni_rows import opened_omni
from spmd_worker.model_config.vision_config import VisionConfig

OVERRIDES: Final = "mm_processor_kwargs"
_MAX_PIXELS: Final = 1 << 28
BICUBIC: Final = 3
CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
HALVES: Final = (0.5, 0.5, 0.5)
PLAIN: Final = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
_NORMALISE: Final = "do_normalize"
_SOFT_TOKENS: Final = (70, 140, 280, 560, 1120)
"""Most tokens of an image for which Gemma 4 was trained; transformers takes no others."""


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """`kind` is that of `VisionConfig`; numbers that a kind does not use are 0.

    A pixel becomes (pixel * scale - mean) / std. Towers read patches of `patch_size`, `merge_size` x `merge_size` of
    which make a token in kinds that take pictures of any size: Qwen with `min_pixels` to `max_pixels`, GLM with as many
    of two frames, Gemma 4 with at most `max_pixels`, Kimi with about `max_pixels`, at most `longest_edge`, and black up
    to complete tokens, Pixtral with at most `longest_edge`, LightOnOCR with sides of multiples of `resize_unit` too.
    The others take squares of `side`, each of `tokens_per_crop` tokens. LLaVA resizes the short side to `short_edge`
    and takes the middle (0: the picture is squeezed into the square), `is_padded` to a square first if set; DeepSeek-VL
    pads behind resizing, to a short side of `short_edge` at least. LLaVA-NeXT and LLaVA-OneVision cut sizes of
    `pinpoints` into crops, and this keeps the tokens of `max_crops`; InternVL and Aya make `min_crops` to `max_crops`
    tiles, Llama 4 and Command A up to `max_crops`, Granite-Docling `dense_crops` of pages that fit `dense_rule`;
    LFM2-VL makes `min_crops` to `max_crops` tiles of images of more than `tolerance` times `max_pixels`, if it
    `splits`; SmolVLM resizes the long side to `longest_edge` and, if `splits`, cuts. MiniCPM-V resizes to about the
    pixels of `side` x `side`, and makes up to `max_crops` slices of larger images, if it `splits`; its images have
    numbers if `is_numbered`.
    """

    kind: str
    patch_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: float = 1 / 255
    resampling: str = "bicubic"
    merge_size: int = 1
    min_pixels: int = 0
    max_pixels: int = 0
    longest_edge: int = 0
    resize_unit: int = 0
    side: int = 0
    tokens_per_crop: int = 0
    short_edge: int = 0
    is_padded: bool = False
    pinpoints: tuple[tuple[int, int], ...] = ()
    min_crops: int = 0
    max_crops: int = 0
    splits: bool = False
    tolerance: float = 0.0
    dense_crops: int = 0
    dense_rule: tuple[float, ...] = ()
    is_numbered: bool = False


def normalised_by(vision: VisionConfig, processor: ImageProcessor) -> VisionConfig:
    """The config of a tower whose pixels are those of `processor`."""
    vision = replace(vision, image_mean=processor.mean, image_std=processor.std, rescale_factor=processor.scale)
    # Of two sizes of tokens the processor has one.
    merge_size = processor.merge_size if vision.tower is not None and vision.tower.merge_sizes else vision.merge_size
    return replace(vision, merge_size=merge_size)


def processor_of(values: Mapping[str, Any]) -> ImageProcessor:
    """The processor whose `asdict` travelled as JSON."""
    pinpoints = tuple([(int(height), int(width)) for height, width in values["pinpoints"]])
    listed = {key: tuple(values[key]) for key in ("mean", "std", "dense_rule")}
    return ImageProcessor(**{**values, **listed, "pinpoints": pinpoints})


def read_image_processor(
    folder: Path, vision: VisionConfig, overrides: Mapping[str, Any] | None = None
) -> ImageProcessor:
    """`overrides` are vLLM's `mm_processor_kwargs`, in place of the files' values. Raises ModelConfigError."""
    config = json_object(folder / "config.json")
    if config is None:
        raise ModelConfigError(f"{folder / 'config.json'} does not exist: a model folder needs it")
    values, path = image_values(folder)
    rule = _RULES[vision.kind]
    _check_overrides(vision.kind, rule, overrides or {})
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    if "size" in given:
        values = {key: value for key, value in values.items() if key not in ("min_pixels", "max_pixels")}
    settings = ProcessorSettings(opened(ConfigReader(values, path)), ConfigReader(given, Path(OVERRIDES)))
    settings.check_steps(is_optional="" if rule.normalises else _NORMALISE)
    model = ConfigReader(opened_omni(config, folder / "config.json"), folder / "config.json")
    numbers = rule.read(settings, model, tower_sizes(model, vision.kind))
    levels = (HALVES, HALVES) if settings.is_siglip else rule.levels
    mean, std = settings.levels("image_mean", levels[0]), settings.levels("image_std", levels[1])
    if numbers.get("is_padded") and not all(0 <= each <= 1 for each in mean):
        raise settings.file.error("image_mean", "must be a colour, numbers from 0 to 1: it fills a picture's square")
    if not settings.file.flag(_NORMALISE, rule.normalises):
        mean, std = PLAIN
    scale = settings.of("rescale_factor").number("rescale_factor", 1 / 255)
    return ImageProcessor(
        vision.kind, mean=mean, std=std, scale=scale, resampling=settings.resampling(rule.resample), **numbers
    )


def _check_overrides(kind: str, rule: "_Rule", overrides: Mapping[str, Any]) -> None:
    unknown = [key for key in overrides if key not in rule.overrides]
    if unknown:
        known = f"only {', '.join(rule.overrides)}" if rule.overrides else "its sizes are those of the tower"
        raise ModelConfigError(f"{OVERRIDES}: {unknown[0]} is not supported for {kind}: {known}")


# Kinds.


def _qwen(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    least = _num_pixels(settings, "min_pixels", "shortest_edge", 56 * 56)
    most = _num_pixels(settings, "max_pixels", "longest_edge", 28 * 28 * 1280)
    return _of_any_size(settings, model, tower, least, most)


def _glm4v(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    least = _frame_pixels(settings, "min_pixels", "shortest_edge", 112 * 112)
    most = _frame_pixels(settings, "max_pixels", "longest_edge", 28 * 28 * 15000)
    return _of_any_size(settings, model, tower, least, most)


def _frame_pixels(settings: ProcessorSettings, key: str, edge: str, default: int) -> int:
    """Edges of GLM's `size` are numbers of pixels of two frames. `key`, of an image's, is a caller's alone."""
    if settings.given.get(key) is not None:
        return NUM_FRAMES * settings.integer(key, default, 1, _MAX_PIXELS)
    return settings.side("size", edge, default, _MAX_PIXELS)


def _paddleocr(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    least = _num_pixels(settings, "min_pixels", "shortest_edge", 384 * 384)
    most = _num_pixels(settings, "max_pixels", "longest_edge", 1536 * 1536)
    return _of_any_size(settings, model, tower, least, most, num_frames=1)


def _of_any_size(
    settings: ProcessorSettings,
    model: ConfigReader,
    tower: TowerSizes,
    least: int,
    most: int,
    num_frames: int = NUM_FRAMES,
) -> Values:
    """Numbers of pictures of `least` to `most` pixels."""
    patch, merge = settings.integer("patch_size", 14, 1, 512), settings.integer("merge_size", 2, 1, 16)
    vision = model.object("vision_config")
    check_is_towers(settings, "patch_size", patch, tower.patch)
    settings.file.choice("temporal_patch_size", (num_frames,), num_frames)
    check_is_towers(settings, "merge_size", merge, vision.count("spatial_merge_size", 2))
    if least > most:
        key = next((key for key in ("min_pixels", "size") if settings.of(key).get(key) is not None), "size")
        raise settings.of(key).error(key, f"asks for at least {least} pixels of an image and at most {most}")
    return {"patch_size": patch, "merge_size": merge, "min_pixels": least, "max_pixels": most}


def _num_pixels(settings: ProcessorSettings, key: str, edge: str, default: int) -> int:
    """Edges of Qwen's `size` are numbers of pixels too; older files have `key` instead."""
    if settings.of(key).get(key) is not None:
        return settings.integer(key, default, 1, _MAX_PIXELS)
    return settings.side("size", edge, default, _MAX_PIXELS)


def _gemma3(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    side = settings.square("size", 224)
    check_is_towers(settings, "size", side, tower.side)
    tokens = model.count("mm_tokens_per_image", 256)
    side_tokens = int(tokens**0.5)
    if side_tokens**2 != tokens or (side // tower.patch) % side_tokens:
        rule = f"must be a square that divides the {side // tower.patch} x {side // tower.patch} patches of an image"
        raise model.error("mm_tokens_per_image", rule)
    return {"patch_size": tower.patch, "side": side, "tokens_per_crop": tokens}


def _gemma4(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    patch, merge = settings.integer("patch_size", 16, 1, 512), settings.integer("pooling_kernel_size", 3, 1, 16)
    vision = model.object("vision_config")
    check_is_towers(settings, "patch_size", patch, tower.patch)
    check_is_towers(settings, "pooling_kernel_size", merge, vision.count("pooling_kernel_size", 3))
    tokens = settings.of("max_soft_tokens").choice("max_soft_tokens", _SOFT_TOKENS, 280)
    is_unified = tower.model_type == "gemma4_unified_vision"
    most = (
        vision.count("mm_posemb_size", 1120) if is_unified else vision.count("position_embedding_size", 10240) // merge
    )
    if tokens > most:
        rule = f"asks for images of {tokens} tokens a side: the model has positions for {most}"
        raise settings.of("max_soft_tokens").error("max_soft_tokens", rule)
    return {"patch_size": patch, "merge_size": merge, "max_pixels": tokens * (merge * patch) ** 2}


def _llava(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    has_class = tower.model_type == "clip_vision_model"
    crops = settings.file.flag("do_center_crop", not settings.is_siglip)
    short_edge = settings.side("size", "shortest_edge", 224) if crops else 0
    name = "crop_size" if crops else "size"
    side = settings.square(name, 224)
    check_is_towers(settings, name, side, tower.side)
    if crops and short_edge < side:
        raise settings.of("size").error("size", f"must be at least the {side} of crop_size")
    strategy = model.choice("vision_feature_select_strategy", ("default", "full"), "default")
    num_rows = (side // tower.patch) ** 2 + has_class - (strategy == "default")
    # CLIP's own processor has the key too: it pads batches.
    is_own = settings.class_name.startswith("LlavaImageProcessor")
    return {
        "patch_size": tower.patch,
        "side": side,
        "tokens_per_crop": num_rows,
        "short_edge": short_edge,
        "is_padded": settings.file.flag("do_pad", False) and is_own,
    }


def _deepseek(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    side = settings.square("size", 384)
    check_is_towers(settings, "size", side, tower.side)
    settings.file.choice("do_pad", (True,), True)
    shortest = settings.integer("min_size", 14, 1, side)
    return {
        "patch_size": tower.patch,
        "side": side,
        "tokens_per_crop": (side // tower.patch) ** 2,
        "short_edge": shortest,
        "is_padded": True,
    }


def _onevision(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    side = settings.square("size", 384)
    check_is_towers(settings, "size", side, tower.side)
    model.choice("vision_feature_select_strategy", ("full",), "full")
    ratio = model.get("vision_aspect_ratio", "anyres_max_9")
    found = re.fullmatch(r"anyres_max_([1-9][0-9]?)", ratio) if isinstance(ratio, str) else None
    if found is None:
        raise model.error("vision_aspect_ratio", "must be anyres_max_ and a number from 1 to 99")
    numbers = range(1, 7)
    every = [[384 * lines, 384 * columns] for lines in numbers for columns in numbers]
    return {**_pictures(settings, model, tower, every), "max_crops": int(found[1])}


def _llava_next(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    check_is_towers(settings, "crop_size", settings.square("crop_size", 224), tower.side)
    # A square of this size is what its middle is cut out of.
    has_height = settings.of("size").object("size").get("height") is not None
    side = settings.square("size", 224) if has_height else settings.side("size", "shortest_edge", 224)
    check_is_towers(settings, "size", side, tower.side)
    return _pictures(settings, model, tower, [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]])


def _pictures(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes, default: list[list[int]]) -> Values:
    """Numbers of pictures that are made of the tower's squares."""
    pinpoints = _pinpoints(settings.file, tower.side, default)
    if _pinpoints(model, tower.side, default) != pinpoints:
        raise settings.file.error("image_grid_pinpoints", "must be those of config.json")
    tokens = (tower.side // tower.patch) ** 2
    return {"patch_size": tower.patch, "side": tower.side, "tokens_per_crop": tokens, "pinpoints": pinpoints}


def _pinpoints(reader: ConfigReader, side: int, default: list[list[int]]) -> tuple[tuple[int, int], ...]:
    key = "image_grid_pinpoints"
    values = reader.get(key, default)
    is_pair = [isinstance(each, list) and len(each) == 2 for each in values] if isinstance(values, list) else []
    if not is_pair or not all(is_pair):
        raise reader.error(key, "must list pairs of numbers")
    pairs = [[checked_integer(number, reader.where(key), 1, MAX_SIDE) for number in each] for each in values]
    if any(number % side for pair in pairs for number in pair):
        raise reader.error(key, f"must have multiples of {side}, the side of a crop")
    return tuple([(height, width) for height, width in pairs])


def _internvl(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    side = settings.square("size", 384)
    check_is_towers(settings, "size", side, tower.side)
    # InternVLProcessor cuts into tiles even if the image processor's own setting says no.
    most = settings.integer("max_patches", 12, 1, MAX_CROPS)
    least = settings.integer("min_patches", 1, 1, most)
    ratio = model.number("downsample_ratio", 0.5)
    side_tokens = int(side // tower.patch * ratio)
    if (side // tower.patch) * ratio != side_tokens or side_tokens < 1:
        raise model.error("downsample_ratio", f"must divide the {side // tower.patch} patches of a side")
    numbers = {"patch_size": tower.patch, "side": side, "tokens_per_crop": side_tokens**2}
    return {**numbers, "min_crops": least, "max_crops": most}


def _llama4(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    side = settings.square("size", 336)
    check_is_towers(settings, "size", side, tower.side)
    settings.file.choice("resize_to_max_canvas", (False,), False)
    merge = int(1 / model.object("vision_config").number("pixel_shuffle_ratio", 0.5))
    numbers = {"patch_size": tower.patch, "side": side, "tokens_per_crop": (side // tower.patch // max(merge, 1)) ** 2}
    return {**numbers, "max_crops": settings.integer("max_patches", 16, 1, MAX_CROPS)}


def _pixtral(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    is_merged = model.get("model_type") in ("mistral3", "mistral_large4") or "spatial_merge_size" in model.config
    merge = model.count("spatial_merge_size", 2) if is_merged else 1
    longest = settings.side("size", "longest_edge", 1024)
    unit = tower.patch * merge
    if -(-longest // unit) * unit > tower.side:
        rule = f"asks for more than the {tower.side} pixels a side for which the tower has positions"
        raise settings.of("size").error("size", rule)
    return {"patch_size": tower.patch, "merge_size": merge, "longest_edge": longest}


def _lighton(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    """Images are resized to multiples of the file's patch, which need not fill tokens."""
    unit, longest = settings.square("patch_size", 16), settings.side("size", "longest_edge", 1024)
    if -(-longest // unit) * unit > tower.side:
        rule = f"asks for more than the {tower.side} pixels a side for which the tower has positions"
        raise settings.of("size").error("size", rule)
    merge = model.count("spatial_merge_size", 2)
    return {"patch_size": tower.patch, "merge_size": merge, "longest_edge": longest, "resize_unit": unit}


def _smolvlm(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    side = settings.side("max_image_size", "longest_edge", 364)
    check_is_towers(settings, "max_image_size", side, tower.side)
    longest = settings.side("size", "longest_edge", 4 * 364)
    if longest > MAX_CROPS * side:
        raise settings.of("size").error("size", f"makes more than {MAX_CROPS} squares of {side} a side")
    scale = model.count("scale_factor", 2)
    if (side // tower.patch) % scale:
        raise model.error("scale_factor", f"must divide the {side // tower.patch} patches of a side")
    numbers = {"patch_size": tower.patch, "side": side, "tokens_per_crop": (side // tower.patch // scale) ** 2}
    splits = settings.of("do_image_splitting").flag("do_image_splitting", True)
    return {**numbers, "longest_edge": longest, "splits": splits}


@dataclass(frozen=True, slots=True)
class _Rule:
    """`read` gives the numbers of a kind; `levels` (mean and std) and `resample` are its class's defaults. Files of a
    kind that `normalises` not, unless they ask for it, have pixels from 0 to 1.
    """

    read: Callable[[ProcessorSettings, ConfigReader, TowerSizes], Values]
    levels: tuple[tuple[float, float, float], tuple[float, float, float]] = (CLIP_MEAN, CLIP_STD)
    resample: int = BICUBIC
    overrides: tuple[str, ...] = ()
    normalises: bool = True


_QWEN: Final = _Rule(_qwen, overrides=("min_pixels", "max_pixels", "size"))
_GEMMA4: Final = _Rule(_gemma4, PLAIN, overrides=("max_soft_tokens",), normalises=False)
_LFM2: Final = ("min_image_tokens", "max_image_tokens", "min_tiles", "max_tiles", "do_image_splitting")
_SLICED: Final = ("max_slice_nums", "slice_mode", "downsample_mode", "use_image_id")
_TILED: Final = ("max_patches", "min_patches", "fine_route")
_PIXTRAL: Final = _Rule(_pixtral, overrides=("size",))
_RULES: Final = {
    "qwen3_vl": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "exaone4_5": _QWEN,
    "qwen2_5_omni": _QWEN,
    "qwen3_omni": _QWEN,
    "glm4v": _Rule(_glm4v, overrides=("min_pixels", "max_pixels", "size")),
    "paddleocr_vl": _Rule(_paddleocr, overrides=("min_pixels", "max_pixels", "size")),
    "kimi_k25": _Rule(kimi, (HALVES, HALVES), overrides=("max_patches", "size")),
    "gemma3": _Rule(_gemma3, (HALVES, HALVES), 2),
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "llava": _Rule(_llava),
    "deepseek_vl": _Rule(_deepseek),
    "llava_next": _Rule(_llava_next),
    "llava_onevision": _Rule(_onevision),
    "internvl": _Rule(_internvl, overrides=("max_patches", "min_patches")),
    "aya_vision": _Rule(aya_vision, overrides=("max_patches", "min_patches")),
    "cohere2_vision": _Rule(cohere2_vision, overrides=("max_patches", "crop_to_patches")),
    "llama4": _Rule(_llama4, (HALVES, HALVES), 2, ("max_patches",)),
    "mistral3": _PIXTRAL,
    "pixtral": _PIXTRAL,
    "lighton_ocr": _Rule(_lighton, overrides=("size",)),
    "lfm2_vl": _Rule(lfm2_vl, (HALVES, HALVES), 2, _LFM2),
    "minicpmv4_6": _Rule(minicpmv4_6, (HALVES, HALVES), overrides=_SLICED),
    "granite_docling": _Rule(granite_docling, overrides=_TILED),
    "smolvlm": _Rule(_smolvlm, (HALVES, HALVES), 1, ("size", "do_image_splitting")),
}
KINDS: Final = frozenset(_RULES)
"""Kinds of `VisionConfig` whose images are prepared here."""
