"""Rows of `vision_rows.py` whose towers read squares of one size: SigLIP and CLIP with their projectors, InternVL."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.model_config.config_reader import checked_integer
from spmd_worker.model_config.families.vision_files import (
    MAX_SIDE,
    OUTSIDE,
    SEPARATE,
    WAY_OUT,
    UnknownTowerError,
    VisionFiles,
    activation_of,
    heads_of,
    image_token_of,
    rope_theta_of,
    side_of,
    two_linears,
)
from spmd_worker.model_config.vision_config import TowerConfig, TowerNames, VisionConfig

SIGLIP: Final[dict[str, Any]] = {"hidden_act": "gelu_pytorch_tanh", "eps": 1e-6, "image_size": 224, "patch_size": 16}
_CLIP: Final[dict[str, Any]] = {"hidden_act": "quick_gelu", "eps": 1e-5, "image_size": 224, "patch_size": 32}
VIT_SIZES: Final = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_IDEFICS: Final[dict[str, Any]] = {**SIGLIP, "patch_size": 32, "hidden_size": 1152, "num_attention_heads": 16}
_OF_LLAVA: Final[dict[str, Any]] = {
    "model_type": "clip_vision_model",
    "image_size": 336,
    "patch_size": 14,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
_OF_ONEVISION: Final[dict[str, Any]] = {
    "model_type": "siglip_vision_model",
    "image_size": 384,
    "patch_size": 14,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
}
"""Towers of files without `vision_config`. Of files that have one, only the kind counts."""
_NEXT_PINPOINTS: Final = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_VIT: Final = "vision_tower.vision_model."
_NEWER_VIT: Final = ((_VIT, _VIT), ("vision_tower.", _VIT))
"""Files of transformers from 5 on leave out a module's name."""


def vit_names(beginning: str, *, is_clip: bool, has_last_norm: bool) -> TowerNames:
    """Names of a tower like CLIP's or SigLIP's, behind a `beginning`."""
    return TowerNames(
        beginnings=OUTSIDE if beginning == _VIT else ("model.vision_model.", "model.connector."),
        layers=f"{beginning}encoder.layers",
        qkv=tuple([f"self_attn.{each}" for each in SEPARATE]),
        output="self_attn.out_proj",
        norms=("layer_norm1", "layer_norm2"),
        mlp=("mlp.fc1", "mlp.fc2"),
        patches=f"{beginning}embeddings.patch_embedding",
        positions=f"{beginning}embeddings.position_embedding.weight",
        class_token=f"{beginning}embeddings.class_embedding" if is_clip else "",
        first_norm=f"{beginning}pre_layrnorm" if is_clip else "",
        last_norm=f"{beginning}post_layernorm" if has_last_norm else "",
        aliases=_NEWER_VIT if beginning == _VIT else (),
    )


def vit(files: VisionFiles, defaults: Mapping[str, Any], names: TowerNames, num_left_out: int = 0) -> TowerConfig:
    """Numbers of a tower like CLIP's or SigLIP's; `defaults` are those of its class. `num_left_out`: layers of the file
    that do not run, the last.
    """
    vision, defaults = files.vision, {**VIT_SIZES, **defaults}
    hidden_size = vision.count("hidden_size", defaults["hidden_size"])
    num_layers = vision.count("num_hidden_layers", defaults["num_hidden_layers"])
    patch_size = side_of(vision, "patch_size", defaults["patch_size"])
    crop_size = side_of(vision, "image_size", defaults["image_size"])
    if crop_size < patch_size:
        raise vision.error("image_size", f"must hold a patch of {patch_size} pixels{WAY_OUT}")
    vision.choice("num_channels", (3,), 3)
    return TowerConfig(
        names=replace(names, unused=_unused(names, num_layers - num_left_out, num_layers)),
        hidden_size=hidden_size,
        intermediate_size=vision.count("intermediate_size", defaults["intermediate_size"]),
        num_layers=num_layers - num_left_out,
        num_heads=heads_of(vision, "num_attention_heads", defaults["num_attention_heads"], hidden_size, 2),
        patch_size=patch_size,
        activation=activation_of(vision, "hidden_act", defaults["hidden_act"]),
        eps=vision.number("layer_norm_eps", defaults["eps"]),
        has_patch_bias=not names.class_token,
        num_positions=(crop_size // patch_size) ** 2 + bool(names.class_token),
        crop_size=crop_size,
    )


def _unused(names: TowerNames, num_run: int, num_layers: int) -> tuple[str, ...]:
    """Regular expressions of the tensors of a file that no square goes through."""
    top = names.layers.partition("encoder.")[0]
    norm = () if names.last_norm else (rf"{re.escape(top)}post_layernorm\..*",)
    later = tuple([rf"{re.escape(names.layers)}\.{index}\..*" for index in range(num_run, num_layers)])
    return (*norm, *later, rf"{re.escape(top)}head\..*", rf"{re.escape(top)}embeddings\.position_ids")


def gemma3(files: VisionFiles) -> VisionConfig:
    """Gemma 3: SigLIP, means of patches."""
    tower = vit(files, SIGLIP, vit_names(_VIT, is_clip=False, has_last_norm=True))
    num_tokens, side = files.whole.count("mm_tokens_per_image", 256), tower.crop_size // tower.patch_size
    token_side = round(num_tokens**0.5)
    if token_side**2 != num_tokens or side % token_side:
        raise files.whole.error("mm_tokens_per_image", f"must divide a square of {side} x {side} patches{WAY_OUT}")
    return VisionConfig(
        "gemma3",
        image_token_id=image_token_of(files, 262144),
        merge_size=side // token_side,
        sees_whole_image=True,
        tower=replace(tower, num_crop_tokens=num_tokens),
    )


def num_left_out(files: VisionFiles, default: int, num_layers: int) -> int:
    """Layers behind the one whose outputs are projected."""
    layer = files.whole.get("vision_feature_layer", default)
    if isinstance(layer, list):
        raise UnknownTowerError(f"{files.whole.where('vision_feature_layer')}={shown(layer)} is a list of layers")
    layer = checked_integer(layer, files.whole.where("vision_feature_layer"), -num_layers - 1, num_layers)
    return -1 - layer if layer < 0 else num_layers - layer


def _drops_first(files: VisionFiles, default: str) -> bool:
    return bool(files.whole.choice("vision_feature_select_strategy", ("default", "full"), default) == "default")


def llava_of_squares(files: VisionFiles) -> VisionConfig:
    """LLaVA with CLIP or SigLIP."""
    tower = _llava_tower(files, -2, "default", _OF_LLAVA)
    return VisionConfig("llava", image_token_id=image_token_of(files, 32000), tower=tower)


def _llava_tower(files: VisionFiles, default_layer: int, strategy: str, absent: Mapping[str, Any]) -> TowerConfig:
    """`absent`: the tower of a file without `vision_config`."""
    kind = files.vision.get("model_type", absent["model_type"])
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise UnknownTowerError(f"{files.vision.where('model_type')}={shown(kind)} is a tower that does not run")
    is_clip = kind == "clip_vision_model"
    defaults = {**VIT_SIZES, **(_CLIP if is_clip else SIGLIP)}
    defaults |= absent if files.whole.get("vision_config") is None else {}
    num_layers = files.vision.count("num_hidden_layers", defaults["num_hidden_layers"])
    names = vit_names(_VIT, is_clip=is_clip, has_last_norm=False)
    tower = vit(files, defaults, names, num_left_out(files, default_layer, num_layers))
    has_bias = files.whole.flag("multimodal_projector_bias", True)
    drops = _drops_first(files, strategy)
    return replace(tower, drops_first_row=drops, projector_has_bias=has_bias, **two_linears(files))


def llava_onevision(files: VisionFiles) -> VisionConfig:
    """LLaVA-OneVision: SigLIP, pictures made of squares."""
    tower = _llava_tower(files, -1, "full", _OF_ONEVISION)
    aspect = files.whole.get("vision_aspect_ratio", "anyres_max_9")
    beginning, _, number = str(aspect).rpartition("_")
    if beginning != "anyres_max" or not number.isdecimal() or not 0 < int(number) < 1000:
        raise files.whole.error("vision_aspect_ratio", f"must be anyres_max_ and a number{WAY_OUT}")
    tower = replace(_of_pictures(files, tower, _every_pinpoint(tower.crop_size)), max_crops=int(number))
    return VisionConfig("llava_onevision", image_token_id=image_token_of(files, 151646), tower=tower)


def llava_next(files: VisionFiles) -> VisionConfig:
    """LLaVA 1.6: CLIP, pictures made of squares, of which no token is left out but those of padding."""
    tower = _of_pictures(files, _llava_tower(files, -2, "default", _OF_LLAVA), _NEXT_PINPOINTS)
    return VisionConfig("llava_next", image_token_id=image_token_of(files, 32000), tower=tower)


def _of_pictures(files: VisionFiles, tower: TowerConfig, default_pinpoints: list[list[int]]) -> TowerConfig:
    """The tower of pictures that are made of squares: each has lines and columns of tokens, without a class token."""
    if tower.drops_first_row != bool(tower.names.class_token):
        rule = f'must be "default" if the tower has a class token, as CLIP, and "full" if it has none{WAY_OUT}'
        raise files.whole.error("vision_feature_select_strategy", rule)
    pinpoints = files.whole.get("image_grid_pinpoints") or default_pinpoints
    if not isinstance(pinpoints, list) or not all(_is_pinpoint(each, tower.crop_size) for each in pinpoints):
        rule = f"must list sizes, [height, width], of squares of {tower.crop_size} pixels{WAY_OUT}"
        raise files.whole.error("image_grid_pinpoints", rule)
    return replace(tower, pinpoints=tuple([(each[0], each[1]) for each in pinpoints]))


def _is_pinpoint(given: Any, side: int) -> bool:
    if not isinstance(given, list) or len(given) != 2:  # height and width
        return False
    return all(isinstance(each, int) and 0 < each <= MAX_SIDE and not each % side for each in given)


def _every_pinpoint(side: int) -> list[list[int]]:
    return [[row * side, column * side] for row in range(1, 7) for column in range(1, 7)]


def smolvlm(files: VisionFiles) -> VisionConfig:
    """SmolVLM and Idefics3: SigLIP, squares of patches."""
    names = vit_names("model.vision_model.", is_clip=False, has_last_norm=True)
    tower, scale = vit(files, _IDEFICS, names), files.whole.count("scale_factor", 2)
    side = tower.crop_size // tower.patch_size
    if side % scale:
        raise files.whole.error("scale_factor", f"must divide a square of {side} x {side} patches{WAY_OUT}")
    token = files.whole.count("image_token_id", 128257)
    return VisionConfig("smolvlm", image_token_id=token, merge_size=scale, tower=tower)


# ---- InternVL ------------------------------------------------------------------------------------------------------


def _internvl_names(*, has_query_norm: bool, has_last_norm: bool) -> TowerNames:
    return TowerNames(
        beginnings=OUTSIDE,
        layers="vision_tower.encoder.layer",
        qkv=tuple([f"attention.{each}" for each in SEPARATE]),
        output="attention.projection_layer",
        norms=("layernorm_before", "layernorm_after"),
        mlp=("mlp.fc1", "mlp.fc2"),
        patches="vision_tower.embeddings.patch_embeddings.projection",
        positions="vision_tower.embeddings.position_embeddings",
        class_token="vision_tower.embeddings.cls_token",
        last_norm="vision_tower.layernorm" if has_last_norm else "",
        query_norm="attention.q_norm" if has_query_norm else "",
        key_norm="attention.k_norm" if has_query_norm else "",
        scales=("lambda_1", "lambda_2"),
        unused=(r"vision_tower\.embeddings\.mask_token",),
    )


def internvl(files: VisionFiles) -> VisionConfig:
    """InternVL 3 in transformers' form."""
    vision, whole = files.vision, files.whole
    defaults: dict[str, Any] = {"hidden_act": "gelu", "eps": 1e-6, "image_size": 448, "patch_size": 14}
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    has_last_norm = not vision.flag("use_mean_pooling", True)
    names = _internvl_names(has_query_norm=vision.flag("use_qk_norm", False), has_last_norm=has_last_norm)
    tower = vit(files, {**defaults, **sizes}, names)
    whole.choice("vision_feature_layer", (-1,), -1)
    whole.choice("vision_feature_select_strategy", ("default",), "default")
    vision.choice("use_absolute_position_embeddings", (True,), True)
    ratio, side = whole.number("downsample_ratio", 0.5), tower.crop_size // tower.patch_size
    merge_size = max(int(1 / ratio), 1)
    if side % merge_size:
        raise whole.error("downsample_ratio", f"must divide a square of {side} x {side} patches{WAY_OUT}")
    tower = replace(
        tower,
        names=names,
        norm={"layer_norm": "layer", "rms_norm": "rms"}[
            vision.choice("norm_type", ("layer_norm", "rms_norm"), "layer_norm")
        ],
        has_qkv_bias=vision.flag("attention_bias", False),
        has_patch_bias=True,
        drops_first_row=True,
        projector_eps=1e-5,
        **two_linears(files),
    )
    token = whole.count("image_token_id", 151667)
    return VisionConfig("internvl", image_token_id=token, merge_size=merge_size, tower=tower)


# ---- Llama 4 -------------------------------------------------------------------------------------------------------

_LLAMA4_NAMES: Final = TowerNames(
    beginnings=("vision_model.", "multi_modal_projector."),
    layers="vision_model.model.layers",
    qkv=tuple([f"self_attn.{each}" for each in SEPARATE]),
    output="self_attn.o_proj",
    norms=("input_layernorm", "post_attention_layernorm"),
    mlp=("mlp.fc1", "mlp.fc2"),
    patches="vision_model.patch_embedding.linear",
    positions="vision_model.positional_embedding_vlm",
    class_token="vision_model.class_embedding",
    first_norm="vision_model.layernorm_pre",
    last_norm="vision_model.layernorm_post",
)


def llama4(files: VisionFiles) -> VisionConfig:
    """Llama 4: squares with a class token behind, axial angles, squares of patches as tokens."""
    vision = files.vision
    size, inner = vision.count("hidden_size", 768), vision.count("intermediate_size", 5632)
    patch, crop = side_of(vision, "patch_size", 14), side_of(vision, "image_size", 448)
    ratio, side = vision.number("pixel_shuffle_ratio", 0.5), crop // patch
    merge_size = max(int(1 / ratio), 1)
    if merge_size * ratio != 1 or not side or side % merge_size or crop % patch:
        rule = f"must be 1 over a number that divides a square of {side} x {side} patches of {patch} pixels{WAY_OUT}"
        raise vision.error("pixel_shuffle_ratio", rule)
    if inner != size * merge_size**2:
        raise vision.error("intermediate_size", f"must be {merge_size**2} times hidden_size={size}{WAY_OUT}")
    projector_size = vision.count("projector_input_dim", 4096)
    for key, default in (("projector_output_dim", 4096), ("vision_output_dim", 7680)):
        if vision.count(key, default) != projector_size:
            raise vision.error(key, f"must be projector_input_dim={projector_size}{WAY_OUT}")
    vision.choice("num_channels", (3,), 3)
    tower = TowerConfig(
        names=_LLAMA4_NAMES,
        hidden_size=size,
        intermediate_size=inner,
        num_layers=vision.count("num_hidden_layers", 34),
        num_heads=heads_of(vision, "num_attention_heads", 16, size, 4),
        patch_size=patch,
        # Its class has these, whatever a file says.
        activation="gelu",
        eps=1e-5,
        has_patch_bias=False,
        num_positions=side**2 + 1,
        rope_theta=rope_theta_of(vision, 10000.0),
        crop_size=crop,
        projector_size=projector_size,
    )
    token = image_token_of(files, 200092)
    return VisionConfig("llama4", token, merge_size=merge_size, tower=tower, has_bfloat16_pixels=True)
