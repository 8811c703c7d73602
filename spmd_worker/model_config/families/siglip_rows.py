"""Rows of `vision_rows.py`: models with SigLIP's tower and a projector of their own: PaddleOCR-VL, DeepSeek-VL,
Granite-Docling, LFM2-VL, Aya Vision, Command A Vision.
"""

from dataclasses import replace
from typing import Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.model_config.families.square_rows import SIGLIP, VIT_SIZES, num_left_out, vit, vit_names
from spmd_worker.model_config.families.vision_files import (
    WAY_OUT,
    UnknownTowerError,
    VisionFiles,
    activation_of,
    heads_of,
    image_token_of,
    layers_of,
    rope_theta_of,
)
from spmd_worker.model_config.vision_config import TowerConfig, VisionConfig

_TOWER: Final = "visual.vision_model."
_PAIRS_OF_TWO_AXES: Final = 4


def paddleocr_vl(files: VisionFiles) -> VisionConfig:
    """PaddleOCR-VL: SigLIP for images of any size, with angles and resampled positions; squares are tokens."""
    vision = files.vision
    defaults = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    names = replace(vit_names(_TOWER, is_clip=False, has_last_norm=True), beginnings=("visual.", "mlp_AR."))
    tower = vit(files, {**SIGLIP, "image_size": 384, "patch_size": 14, **defaults}, names)
    heads_of(vision, "num_attention_heads", defaults["num_attention_heads"], tower.hidden_size, _PAIRS_OF_TWO_AXES)
    # Another table, of images in a row, is in the hub's files.
    unused = (*tower.names.unused, r"visual\.vision_model\.embeddings\.packing_position_embedding\..*")
    return VisionConfig(
        "paddleocr_vl",
        image_token_id=files.whole.count("image_token_id", 100295),
        merge_size=vision.count("spatial_merge_size", 2),
        has_three_positions=True,
        tower=replace(
            tower,
            names=replace(tower.names, unused=unused),
            crop_size=0,
            rope_theta=rope_theta_of(vision, 10000.0),
            projector_eps=1e-5,
        ),
    )


_DEEPSEEK_TOWER: Final = "model.vision_model."


def deepseek_vl(files: VisionFiles) -> VisionConfig:
    """DeepSeek-VL: one square, a row for each patch."""
    inside = f"{_DEEPSEEK_TOWER}vision_model."
    names = replace(
        vit_names(inside, is_clip=False, has_last_norm=True),
        beginnings=(_DEEPSEEK_TOWER, "model.aligner."),
        # Files of transformers from 5 on leave out a module's name.
        aliases=((inside, inside), (_DEEPSEEK_TOWER, inside)),
    )
    tower = vit(files, {**VIT_SIZES, **SIGLIP}, names)
    token = image_token_of(files, 100015)
    return VisionConfig("deepseek_vl", image_token_id=token, tower=replace(tower, projector_size=files.hidden_size))


_DOCLING_TOWER: Final = "model.vision_model."
_NUM_SINES: Final = 4


def granite_docling(files: VisionFiles) -> VisionConfig:
    """Granite-Docling: squares, tokens of two sizes, outputs of layers for the text's first layers."""
    vision, hidden_size = files.vision, files.hidden_size
    names = replace(vit_names(_DOCLING_TOWER, is_clip=False, has_last_norm=True), beginnings=(_DOCLING_TOWER,))
    tower = vit(files, {**SIGLIP, "image_size": 512}, names)
    if vision.count("out_hidden_size", 1024) != hidden_size:
        raise vision.error("out_hidden_size", f"is not the hidden size of the text, {hidden_size}{WAY_OUT}")
    if hidden_size % _NUM_SINES:
        raise vision.error("out_hidden_size", f"must be a multiple of {_NUM_SINES}{WAY_OUT}")
    added = sorted(layers_of(vision, "deepstack_visual_indexes", [3, 7, 10], tower.num_layers))
    if len({*added}) < len(added):
        raise vision.error("deepstack_visual_indexes", f"must list each layer once{WAY_OUT}")
    has_fine, scale = vision.flag("use_fine_route", True), vision.count("scale_factor", 4)
    side, sizes = tower.crop_size // tower.patch_size, (scale, scale // 2) if has_fine else (scale,)
    if any(not size or side % size for size in sizes):
        rule = f"must divide a square of {side} x {side} patches{', as must half of it' * has_fine}{WAY_OUT}"
        raise vision.error("scale_factor", rule)
    return VisionConfig(
        "granite_docling",
        image_token_id=files.whole.count("image_token_id", 100337),
        num_added=len(added),
        merge_size=scale,
        tower=replace(
            tower,
            added_layers=tuple(added),
            merge_sizes=sizes,
            projector_size=hidden_size,
            projector_eps=1e-5,
        ),
    )


_NAFLEX_TOWER: Final = "model.vision_tower."


def lfm2_vl(files: VisionFiles) -> VisionConfig:
    """LFM2-VL: SigLIP 2 for images of any size, with resampled positions; squares are tokens."""
    vision, whole, inside = files.vision, files.whole, f"{_NAFLEX_TOWER}vision_model."
    names = replace(
        vit_names(inside, is_clip=False, has_last_norm=True),
        beginnings=(_NAFLEX_TOWER, "model.multi_modal_projector."),
        # Files of transformers from 5 on leave out a module's name.
        aliases=((inside, inside), (_NAFLEX_TOWER, inside)),
    )
    vision.choice("model_type", ("siglip2_vision_model",), "siglip2_vision_model")
    whole.choice("vision_feature_layer", (-1,), -1)
    num_positions = vision.count("num_patches", 256)
    if round(num_positions**0.5) ** 2 != num_positions:
        raise vision.error("num_patches", f"must be a square number{WAY_OUT}")
    tower = replace(
        vit(files, SIGLIP, names),
        crop_size=0,
        num_positions=num_positions,
        norms_tokens=whole.flag("projector_use_layernorm", True),
        projector_eps=1e-5,
        projector_size=whole.count("projector_hidden_size", 2560),
        projector_activation=activation_of(whole, "projector_hidden_act", "gelu"),
        projector_has_bias=whole.flag("projector_bias", True),
    )
    token, merge_size = image_token_of(files, 396), whole.count("downsample_factor", 2)
    return VisionConfig("lfm2_vl", image_token_id=token, merge_size=merge_size, tower=tower, scales_levels=True)


_OF_COMMAND_A: Final = {"hidden_size": 1152, "image_size": 512, "num_hidden_layers": 27}
"""Its tower in a file without `vision_config`."""


def cohere2_vision(files: VisionFiles) -> VisionConfig:
    """Command A Vision: squares of patches behind the last norm, gates."""
    inside, top = f"{_NAFLEX_TOWER}vision_model.", "model.multi_modal_projector."
    names = replace(
        vit_names(inside, is_clip=False, has_last_norm=True),
        beginnings=(_NAFLEX_TOWER, top),
        aliases=((inside, inside), (_NAFLEX_TOWER, inside)),
        projector=("", f"{top}linear_1", f"{top}linear_2"),
    )
    absent = _OF_COMMAND_A if files.whole.get("vision_config") is None else {}
    tower = _gated(files, vit(files, {**SIGLIP, **absent}, names), 36864)
    return _of_cohere(files, "cohere2_vision", tower, files.whole.count("image_token_id", 255036))


def aya_vision(files: VisionFiles) -> VisionConfig:
    """Aya Vision: squares of patches of one layer's outputs, normed, and gates."""
    top, whole = "multi_modal_projector.", files.whole
    names = replace(
        vit_names("vision_tower.vision_model.", is_clip=False, has_last_norm=False),
        projector=tuple([f"{top}{each}" for each in ("layernorm", "linear_1", "linear_2")]),
    )
    # SigLIP has no class token that could be left out.
    whole.choice("vision_feature_select_strategy", ("full",), "full")
    num_layers = files.vision.count("num_hidden_layers", VIT_SIZES["num_hidden_layers"])
    tower = vit(files, SIGLIP, names, num_left_out(files, -1, num_layers))
    eps = whole.number("adapter_layer_norm_eps", 1e-6)
    tower = replace(_gated(files, tower, files.hidden_size), norms_tokens=True, projector_eps=eps)
    return _of_cohere(files, "aya_vision", tower, image_token_of(files, 255036))


def _gated(files: VisionFiles, tower: TowerConfig, default_size: int) -> TowerConfig:
    kind = files.vision.get("model_type", "siglip_vision_model")
    if kind != "siglip_vision_model":
        raise UnknownTowerError(f"{files.vision.where('model_type')}={shown(kind)} is a tower that does not run")
    key = "alignment_intermediate_size"
    size = files.whole.count(key, default_size)
    if size % 2:
        raise files.whole.error(key, f"must be even: half of it are gates{WAY_OUT}")
    return replace(tower, projector_size=size // 2, projector_activation="silu")


def _of_cohere(files: VisionFiles, kind: str, tower: TowerConfig, token: int) -> VisionConfig:
    scale, side = files.whole.count("downsample_factor", 2), tower.crop_size // tower.patch_size
    if side % scale:
        raise files.whole.error("downsample_factor", f"must divide a square of {side} x {side} patches{WAY_OUT}")
    return VisionConfig(
        kind, image_token_id=token, merge_size=scale, tower=tower, scales_levels=kind == "cohere2_vision"
    )
