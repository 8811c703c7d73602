"""Rules of `image_processor.py`: Kimi K2.5, Granite-Docling, LFM2-VL, Aya Vision, Command A Vision, MiniCPM-V 4.6."""

from dataclasses import replace
from typing import Final

from spmd_worker.media.processor_settings import MAX_SIDE, ProcessorSettings, TowerSizes, Values, check_is_towers
from spmd_worker.model_config.config_reader import ConfigReader, checked_integer
from spmd_worker.model_config.families.minicpm_vision import MERGE_SIZES
from spmd_worker.model_config.families.vision_files import side_of

_HUB_SECTION: Final = "media_proc_cfg"
_HUB_KEYS: Final = {"merge_size": "merge_kernel_size", "max_patches": "in_patch_limit"}
_MAX_PATCHES: Final = 1 << 20
MAX_CROPS: Final = 64
_MAX_RATIO: Final = 1e6
_MAX_TOKENS: Final = 1 << 16


def opened(file: ConfigReader) -> ConfigReader:
    """The settings, which Kimi's authors have in an object, by names of their own."""
    if file.get(_HUB_SECTION) is None:
        return file
    return replace(file.object(_HUB_SECTION), file_keys=_HUB_KEYS)


def kimi(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    """Kimi K2.5: any size up to a number of patches, and of patches a side."""
    patch, merge = settings.integer("patch_size", 14, 1, 512), side_of(settings.of("merge_size"), "merge_size", 2)
    check_is_towers(settings, "patch_size", patch, tower.patch)
    check_is_towers(settings, "merge_size", merge, side_of(model.object("vision_config"), "merge_kernel_size", 2))
    if settings.file.get("fixed_output_tokens") is not None:
        raise settings.file.error("fixed_output_tokens", "is not supported, only null")
    if settings.file.section and settings.given.get("size") is None:
        side = settings.integer("patch_limit_on_one_side", 512, 1, MAX_SIDE)
    else:
        side, other = (settings.side("size", key, 512) for key in ("max_height", "max_width"))
        if side != other:
            raise settings.of("size").error("size", "must be a square, in patches")
    most = settings.integer("max_patches", 16384, 1, _MAX_PATCHES)
    sizes = {"patch_size": patch, "merge_size": merge}
    return {**sizes, "max_pixels": most * patch**2, "longest_edge": side * patch}


def granite_docling(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    """Granite-Docling: tiles, of dense pages more; the fine route has four times the tokens."""
    side = settings.square("size", 512)
    check_is_towers(settings, "size", side, tower.side)
    most = settings.integer("max_patches", 32, 1, MAX_CROPS)
    if not settings.of("crop_to_patches").flag("crop_to_patches", True):
        most = 1
    least = 1 if most == 1 else settings.integer("min_patches", 1, 1, most)
    vision, is_fine = model.object("vision_config"), settings.of("fine_route").flag("fine_route", False)
    if is_fine and not vision.flag("use_fine_route", True):
        raise settings.of("fine_route").error("fine_route", "needs a model with use_fine_route")
    merge = vision.count("scale_factor", 4) // (1 + is_fine)
    if not merge or side // tower.patch % merge:
        raise vision.error("scale_factor", f"must divide the {side // tower.patch} patches of a side")
    dense = settings.of("dense_max_patches").get("dense_max_patches", 0)
    dense = checked_integer(dense, settings.of("dense_max_patches").where("dense_max_patches"), 0, MAX_CROPS)
    return {
        "patch_size": tower.patch,
        "merge_size": merge,
        "side": side,
        "tokens_per_crop": (side // tower.patch // merge) ** 2,
        "min_crops": least,
        "max_crops": most,
        "dense_crops": 0 if most == 1 else dense,
        "dense_rule": tuple([_ratio(settings, f"dense_{key}") for key in ("max_scale", "min_aspect", "max_aspect")]),
    }


def _ratio(settings: ProcessorSettings, key: str) -> float:
    """A number from 0, for no rule."""
    value = settings.of(key).get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_RATIO:
        raise settings.of(key).error(key, f"must be a number from 0 to {_MAX_RATIO:g}")
    return float(value)


def lfm2_vl(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    """LFM2-VL: any size of a number of tokens; tiles of larger images."""
    patch, merge = settings.integer("encoder_patch_size", 16, 1, 512), settings.integer("downsample_factor", 2, 1, 16)
    check_is_towers(settings, "encoder_patch_size", patch, tower.patch)
    check_is_towers(settings, "downsample_factor", merge, model.count("downsample_factor", 2))
    for key in ("use_thumbnail", "do_pad"):
        settings.file.choice(key, (True,), True)
    model.choice("use_image_special_tokens", (True,), True)
    unit, side = patch * merge, settings.integer("tile_size", 512, 1, MAX_SIDE)
    if side % unit:
        raise settings.of("tile_size").error("tile_size", f"must be a multiple of {unit}, the pixels of a token's side")
    most = settings.integer("max_image_tokens", 256, 1, _MAX_TOKENS)
    least = settings.integer("min_image_tokens", 64, 1, most)
    max_crops = settings.integer("max_tiles", 10, 1, MAX_CROPS)
    min_crops = settings.integer("min_tiles", 2, 1, max_crops)
    splits = settings.of("do_image_splitting").flag("do_image_splitting", True)
    return {
        "patch_size": patch,
        "merge_size": merge,
        "min_pixels": least * unit**2,
        "max_pixels": most * unit**2,
        "side": side,
        "tokens_per_crop": (side // unit) ** 2,
        "min_crops": min_crops,
        "max_crops": max_crops,
        "splits": splits and max_crops > 1,
        "tolerance": settings.of("max_pixels_tolerance").number("max_pixels_tolerance", 2.0),
    }


def aya_vision(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    """Aya Vision: tiles, which its processor cuts even if the image processor's own setting says no."""
    least = settings.integer("min_patches", 1, 1, settings.integer("max_patches", 12, 1, MAX_CROPS))
    return {**_of_cohere(settings, model, tower, settings.square("size", 384)), "min_crops": least}


def cohere2_vision(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    """Command A Vision: tiles that the image fits."""
    numbers = _of_cohere(settings, model, tower, settings.square("size", 512))
    if not settings.of("crop_to_patches").flag("crop_to_patches", True):
        numbers["max_crops"] = 1
    # Its processor writes as many tokens for a tile as this number's square.
    side_tokens, num_tokens = settings.integer("patch_size", 16, 1, MAX_SIDE), numbers["tokens_per_crop"]
    if side_tokens**2 != num_tokens:
        rule = f"must be the root of the {num_tokens} tokens that the model has of a tile"
        raise settings.of("patch_size").error("patch_size", rule)
    return numbers


def _of_cohere(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes, side: int) -> Values:
    check_is_towers(settings, "size", side, tower.side)
    scale = model.count("downsample_factor", 2)
    if side // tower.patch % scale:
        raise model.error("downsample_factor", f"must divide the {side // tower.patch} patches of a side")
    return {
        "patch_size": tower.patch,
        "side": side,
        "tokens_per_crop": (side // tower.patch // scale) ** 2,
        "max_crops": settings.integer("max_patches", 12, 1, MAX_CROPS),
    }


def minicpmv4_6(settings: ProcessorSettings, model: ConfigReader, tower: TowerSizes) -> Values:
    """MiniCPM-V 4.6: any size of about the pixels of a square, and slices of larger images."""
    patch = settings.integer("patch_size", 14, 1, 512)
    check_is_towers(settings, "patch_size", patch, tower.patch)
    merge = MERGE_SIZES[settings.of("downsample_mode").choice("downsample_mode", tuple(MERGE_SIZES), "16x")]
    return {
        "patch_size": patch,
        "merge_size": merge,
        "side": settings.integer("scale_resolution", 448, 1, MAX_SIDE),
        "max_crops": settings.integer("max_slice_nums", 9, 1, MAX_CROPS),
        "splits": settings.of("slice_mode").flag("slice_mode", True),
        "is_numbered": settings.of("use_image_id").flag("use_image_id", True),
    }
