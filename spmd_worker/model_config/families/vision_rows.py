"""Rows of the table of towers: how config.json describes each kind, and the names of its tensors.

Keys that a file leaves out have the defaults of its class in transformers. Needs no torch.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.model_config.config_reader import ConfigReader, checked_integer
from spmd_worker.model_config.vision_config import TowerConfig, TowerNames, VisionConfig

logger = logging.getLogger(__name__)

_WAY_OUT: Final = "; limits.max_images=0 runs the text alone"
_ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
_MOST_LAYERS: Final = 1 << 16
_SEPARATE: Final = ("q_proj", "k_proj", "v_proj")


class UnknownTowerError(ModelConfigError):
    """A tower of a kind that does not run: the text still does."""


@dataclass(frozen=True, slots=True)
class _Files:
    """Contents that a row reads: config.json, its `vision_config` and the text's sizes."""

    whole: ConfigReader
    vision: ConfigReader
    hidden_size: int
    text_eps: float


def _side(reader: ConfigReader, key: str, default: int) -> int:
    """A length in pixels: a number, or the same one twice."""
    value = reader.get(key, default)
    if isinstance(value, list):
        if not value or any(each != value[0] for each in value):
            raise reader.error(key, f"must be one length for both sides{_WAY_OUT}")
        value = value[0]
    return checked_integer(value, reader.where(key), 1, 1 << 16)


def _activation(reader: ConfigReader, key: str, default: str, known: Mapping[str, str] = _ACTIVATIONS) -> str:
    return known[reader.choice(key, tuple(known), default)]


def _layers(reader: ConfigReader, key: str, default: list[int], num_layers: int) -> tuple[int, ...]:
    """Numbers of layers, from 0 on."""
    value = reader.get(key, default)
    if not isinstance(value, list):
        raise reader.error(key, "must be a list of layers, from 0 on")
    return tuple([checked_integer(each, reader.where(key), 0, num_layers - 1) for each in value])


def _heads(reader: ConfigReader, key: str, default: int, hidden_size: int, step: int) -> int:
    num_heads = reader.count(key, default)
    if hidden_size % num_heads or hidden_size // num_heads % step:
        raise reader.error(key, f"must divide hidden_size={hidden_size} into heads of multiples of {step}{_WAY_OUT}")
    return num_heads


def _rope_theta(reader: ConfigReader, default: float) -> float:
    return reader.object("rope_parameters").number("rope_theta", reader.number("rope_theta", default))


# ---- Qwen ----------------------------------------------------------------------------------------------------------


def _qwen_names(beginning: str, **names: Any) -> TowerNames:
    return TowerNames(
        beginnings=(beginning,),
        layers=f"{beginning}blocks",
        qkv=("attn.qkv",),
        output="attn.proj",
        norms=("norm1", "norm2"),
        patches=f"{beginning}patch_embed.proj",
        **names,
    )


def _qwen_sizes(files: _Files, defaults: Mapping[str, int], activation: str) -> dict[str, Any]:
    vision = files.vision
    out_size, hidden_size = vision.count("out_hidden_size", 3584), vision.count("hidden_size", defaults["hidden_size"])
    if out_size != files.hidden_size:
        raise vision.error("out_hidden_size", f"is not the hidden size of the text, {files.hidden_size}{_WAY_OUT}")
    vision.choice("in_channels", (3,), 3)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": vision.count("intermediate_size", defaults["intermediate_size"]),
        "num_layers": vision.count("num_hidden_layers", defaults["depth"]),
        "num_heads": _heads(vision, "num_heads", 16, hidden_size, 4),
        "patch_size": _side(vision, "patch_size", defaults["patch_size"]),
        "activation": _activation(vision, "hidden_act", activation),
        "eps": 1e-6,
        "num_frames": _side(vision, "temporal_patch_size", 2),
        "rope_theta": _rope_theta(vision, 10000.0),
    }


def _qwen_vision(files: _Files, kind: str, tower: TowerConfig, default_token: int) -> VisionConfig:
    return VisionConfig(
        kind,
        image_token_id=files.whole.count("image_token_id", default_token),
        num_added=len(tower.added_layers),
        merge_size=files.vision.count("spatial_merge_size", 2),
        has_three_positions=True,
        tower=tower,
    )


def _qwen3_vl(files: _Files, *, adds: bool = True, default_token: int = 151655) -> VisionConfig:
    defaults = {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "patch_size": 16}
    sizes = _qwen_sizes(files, defaults, "gelu_pytorch_tanh")
    num_positions = files.vision.count("num_position_embeddings", 2304)
    if round(num_positions**0.5) ** 2 != num_positions:
        raise files.vision.error("num_position_embeddings", f"must be a square number{_WAY_OUT}")
    deepstack = _layers(files.vision, "deepstack_visual_indexes", [8, 16, 24], sizes["num_layers"]) if adds else ()
    names = _qwen_names(
        "model.visual.", mlp=("mlp.linear_fc1", "mlp.linear_fc2"), positions="model.visual.pos_embed.weight"
    )
    tower = TowerConfig(names=names, num_positions=num_positions, added_layers=deepstack, **sizes)
    return _qwen_vision(files, "qwen3_vl", tower, default_token)


def _qwen3_5(files: _Files) -> VisionConfig:
    return _qwen3_vl(files, adds=False, default_token=248056)


def _qwen2_5_vl(files: _Files) -> VisionConfig:
    defaults = {"hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "patch_size": 14}
    sizes = _qwen_sizes(files, defaults, "silu")
    merge_size, window = files.vision.count("spatial_merge_size", 2), _side(files.vision, "window_size", 112)
    if window < merge_size * sizes["patch_size"]:
        raise files.vision.error("window_size", f"must hold a token of {merge_size} patches a side{_WAY_OUT}")
    # Its class's default names layers that a shallow tower lacks.
    full_layers = _layers(files.vision, "fullatt_block_indexes", [7, 15, 23, 31], _MOST_LAYERS)
    tower = TowerConfig(
        names=_qwen_names("visual.", mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
        norm="rms",
        is_gated=True,
        has_patch_bias=False,
        window_size=window,
        full_layers=tuple([each for each in full_layers if each < sizes["num_layers"]]),
        **sizes,
    )
    return _qwen_vision(files, "qwen2_5_vl", tower, 151655)


# ---- SigLIP and CLIP, and what has them --------------------------------------------------------------------------

_SIGLIP: Final[dict[str, Any]] = {"hidden_act": "gelu_pytorch_tanh", "eps": 1e-6, "image_size": 224, "patch_size": 16}
_CLIP: Final[dict[str, Any]] = {"hidden_act": "quick_gelu", "eps": 1e-5, "image_size": 224, "patch_size": 32}
_VIT_SIZES: Final = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_IDEFICS: Final[dict[str, Any]] = {**_SIGLIP, "patch_size": 32, "hidden_size": 1152, "num_attention_heads": 16}
_OUTSIDE: Final = ("vision_tower.", "multi_modal_projector.", "image_newline")
_VIT: Final = "vision_tower.vision_model."
_NEWER_VIT: Final = ((_VIT, _VIT), ("vision_tower.", _VIT))
"""Files of transformers from 5 on leave out a module's name."""


def _vit_names(beginning: str, *, is_clip: bool, has_last_norm: bool) -> TowerNames:
    return TowerNames(
        beginnings=_OUTSIDE if beginning == _VIT else ("model.vision_model.", "model.connector."),
        layers=f"{beginning}encoder.layers",
        qkv=tuple([f"self_attn.{each}" for each in _SEPARATE]),
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


def _vit(files: _Files, defaults: Mapping[str, Any], names: TowerNames, num_left_out: int = 0) -> TowerConfig:
    """`num_left_out`: layers of the file that do not run, the last."""
    vision, defaults = files.vision, {**_VIT_SIZES, **defaults}
    hidden_size = vision.count("hidden_size", defaults["hidden_size"])
    num_layers = vision.count("num_hidden_layers", defaults["num_hidden_layers"])
    patch_size = _side(vision, "patch_size", defaults["patch_size"])
    crop_size = _side(vision, "image_size", defaults["image_size"])
    if crop_size < patch_size:
        raise vision.error("image_size", f"must hold a patch of {patch_size} pixels{_WAY_OUT}")
    vision.choice("num_channels", (3,), 3)
    return TowerConfig(
        names=replace(names, unused=_unused(names, num_layers - num_left_out, num_layers)),
        hidden_size=hidden_size,
        intermediate_size=vision.count("intermediate_size", defaults["intermediate_size"]),
        num_layers=num_layers - num_left_out,
        num_heads=_heads(vision, "num_attention_heads", defaults["num_attention_heads"], hidden_size, 2),
        patch_size=patch_size,
        activation=_activation(vision, "hidden_act", defaults["hidden_act"]),
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


def _gemma3(files: _Files) -> VisionConfig:
    tower = _vit(files, _SIGLIP, _vit_names(_VIT, is_clip=False, has_last_norm=True))
    num_tokens, side = files.whole.count("mm_tokens_per_image", 256), tower.crop_size // tower.patch_size
    token_side = round(num_tokens**0.5)
    if token_side**2 != num_tokens or side % token_side:
        raise files.whole.error("mm_tokens_per_image", f"must divide a square of {side} x {side} patches{_WAY_OUT}")
    return VisionConfig(
        "gemma3",
        image_token_id=_image_token(files, 262144),
        merge_size=side // token_side,
        sees_whole_image=True,
        tower=replace(tower, num_crop_tokens=num_tokens),
    )


def _image_token(files: _Files, default: int) -> int:
    """Id of the tokens that take rows, which newer files call otherwise."""
    whole = files.whole
    return whole.count("image_token_index" if whole.get("image_token_id") is None else "image_token_id", default)


def _two_linears(files: _Files) -> dict[str, Any]:
    return {
        "projector_size": files.hidden_size,
        "projector_activation": _activation(files.whole, "projector_hidden_act", "gelu"),
    }


def _num_left_out(files: _Files, default: int, num_layers: int) -> int:
    """Layers behind the one whose outputs are projected."""
    layer = files.whole.get("vision_feature_layer", default)
    if isinstance(layer, list):
        raise UnknownTowerError(f"{files.whole.where('vision_feature_layer')}={shown(layer)} is a list of layers")
    layer = checked_integer(layer, files.whole.where("vision_feature_layer"), -num_layers - 1, num_layers)
    return -1 - layer if layer < 0 else num_layers - layer


def _drops_first(files: _Files, default: str) -> bool:
    return bool(files.whole.choice("vision_feature_select_strategy", ("default", "full"), default) == "default")


def _llava(files: _Files) -> VisionConfig:
    kind = files.vision.get("model_type", "clip_vision_model")
    if kind == "pixtral":
        return _pixtral(files)
    return VisionConfig("llava", image_token_id=_image_token(files, 32000), tower=_llava_tower(files, -2, "default"))


def _llava_tower(files: _Files, default_layer: int, strategy: str) -> TowerConfig:
    kind = files.vision.get("model_type", "clip_vision_model")
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise UnknownTowerError(f"{files.vision.where('model_type')}={shown(kind)} is a tower that does not run")
    is_clip = kind == "clip_vision_model"
    num_layers = files.vision.count("num_hidden_layers", _VIT_SIZES["num_hidden_layers"])
    names = _vit_names(_VIT, is_clip=is_clip, has_last_norm=False)
    tower = _vit(files, _CLIP if is_clip else _SIGLIP, names, _num_left_out(files, default_layer, num_layers))
    has_bias = files.whole.flag("multimodal_projector_bias", True)
    drops = _drops_first(files, strategy)
    return replace(tower, drops_first_row=drops, projector_has_bias=has_bias, **_two_linears(files))


def _llava_onevision(files: _Files) -> VisionConfig:
    tower = _llava_tower(files, -1, "full")
    aspect = files.whole.get("vision_aspect_ratio", "anyres_max_9")
    beginning, _, number = str(aspect).rpartition("_")
    if beginning != "anyres_max" or not number.isdecimal() or not 0 < int(number) < 1000:
        raise files.whole.error("vision_aspect_ratio", f"must be anyres_max_ and a number{_WAY_OUT}")
    pinpoints = files.whole.get("image_grid_pinpoints") or _every_pinpoint(tower.crop_size)
    is_list = isinstance(pinpoints, list) and all(isinstance(each, list) and len(each) == 2 for each in pinpoints)
    if not is_list or any(not isinstance(side, int) or side % tower.crop_size for each in pinpoints for side in each):
        rule = f"must list sizes, [height, width], of squares of {tower.crop_size} pixels{_WAY_OUT}"
        raise files.whole.error("image_grid_pinpoints", rule)
    tower = replace(tower, pinpoints=tuple([(each[0], each[1]) for each in pinpoints]), max_crops=int(number))
    return VisionConfig("llava_onevision", image_token_id=_image_token(files, 151646), tower=tower)


def _every_pinpoint(side: int) -> list[list[int]]:
    return [[row * side, column * side] for row in range(1, 7) for column in range(1, 7)]


def _smolvlm(files: _Files) -> VisionConfig:
    names = _vit_names("model.vision_model.", is_clip=False, has_last_norm=True)
    tower, scale = _vit(files, _IDEFICS, names), files.whole.count("scale_factor", 2)
    side = tower.crop_size // tower.patch_size
    if side % scale:
        raise files.whole.error("scale_factor", f"must divide a square of {side} x {side} patches{_WAY_OUT}")
    token = files.whole.count("image_token_id", 128257)
    return VisionConfig("smolvlm", image_token_id=token, merge_size=scale, tower=tower)


# ---- InternVL ------------------------------------------------------------------------------------------------------


def _internvl_names(*, has_query_norm: bool, has_last_norm: bool) -> TowerNames:
    return TowerNames(
        beginnings=_OUTSIDE,
        layers="vision_tower.encoder.layer",
        qkv=tuple([f"attention.{each}" for each in _SEPARATE]),
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


def _internvl(files: _Files) -> VisionConfig:
    vision, whole = files.vision, files.whole
    defaults: dict[str, Any] = {"hidden_act": "gelu", "eps": 1e-6, "image_size": 448, "patch_size": 14}
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    has_last_norm = not vision.flag("use_mean_pooling", True)
    names = _internvl_names(has_query_norm=vision.flag("use_qk_norm", False), has_last_norm=has_last_norm)
    tower = _vit(files, {**defaults, **sizes}, names)
    whole.choice("vision_feature_layer", (-1,), -1)
    whole.choice("vision_feature_select_strategy", ("default",), "default")
    vision.choice("use_absolute_position_embeddings", (True,), True)
    ratio, side = whole.number("downsample_ratio", 0.5), tower.crop_size // tower.patch_size
    merge_size = max(int(1 / ratio), 1)
    if side % merge_size:
        raise whole.error("downsample_ratio", f"must divide a square of {side} x {side} patches{_WAY_OUT}")
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
        **_two_linears(files),
    )
    token = whole.count("image_token_id", 151667)
    return VisionConfig("internvl", image_token_id=token, merge_size=merge_size, tower=tower)


# ---- Pixtral, Mistral 3 --------------------------------------------------------------------------------------------

_PIXTRAL_NAMES: Final = TowerNames(
    beginnings=_OUTSIDE,
    layers="vision_tower.transformer.layers",
    qkv=tuple([f"attention.{each}" for each in _SEPARATE]),
    output="attention.o_proj",
    norms=("attention_norm", "ffn_norm"),
    mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
    patches="vision_tower.patch_conv",
    first_norm="vision_tower.ln_pre",
)


def _pixtral_tower(files: _Files, default_patch: int, *, has_bias: bool) -> TowerConfig:
    vision = files.vision
    hidden_size = vision.count("hidden_size", 1024)
    num_heads = _heads(vision, "num_attention_heads", 16, hidden_size, 4)
    vision.choice("head_dim", (hidden_size // num_heads,), hidden_size // num_heads)
    vision.choice("num_channels", (3,), 3)
    files.whole.choice("vision_feature_layer", (-1,), -1)
    return TowerConfig(
        names=_PIXTRAL_NAMES,
        hidden_size=hidden_size,
        intermediate_size=vision.count("intermediate_size", 4096),
        num_layers=vision.count("num_hidden_layers", 24),
        num_heads=num_heads,
        patch_size=_side(vision, "patch_size", default_patch),
        activation=_activation(vision, "hidden_act", "gelu"),
        eps=1e-5,
        norm="rms",
        is_gated=True,
        has_qkv_bias=False,
        has_bias=False,
        has_patch_bias=False,
        rope_theta=_rope_theta(vision, 10000.0),
        projector_has_bias=has_bias,
        projector_eps=files.text_eps,
        **_two_linears(files),
    )


def _pixtral(files: _Files) -> VisionConfig:
    has_bias = files.whole.flag("multimodal_projector_bias", True)
    files.whole.choice("vision_feature_select_strategy", ("full",), "default")
    tower = _pixtral_tower(files, 16, has_bias=has_bias)
    return VisionConfig("pixtral", image_token_id=_image_token(files, 32000), tower=tower)


def _mistral3(files: _Files) -> VisionConfig:
    kind = files.vision.get("model_type", "pixtral")
    if kind != "pixtral":
        raise UnknownTowerError(f"{files.vision.where('model_type')}={shown(kind)} is a tower that does not run")
    has_bias = files.whole.flag("multimodal_projector_bias", False)
    tower, merge_size = _pixtral_tower(files, 16, has_bias=has_bias), files.whole.count("spatial_merge_size", 2)
    return VisionConfig("mistral3", image_token_id=_image_token(files, 10), merge_size=merge_size, tower=tower)


@dataclass(frozen=True, slots=True)
class VisionRow:
    """`read` gives the config of a kind; `mean` and `std` are its image processor's defaults."""

    read: Callable[[_Files], VisionConfig]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


_HALF: Final = (0.5, 0.5, 0.5)
_CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)

VISION_ROWS: Final[dict[str, VisionRow]] = {
    "qwen3_vl": VisionRow(_qwen3_vl, _HALF, _HALF),
    "qwen3_5": VisionRow(_qwen3_5, _HALF, _HALF),
    "qwen2_5_vl": VisionRow(_qwen2_5_vl, _CLIP_MEAN, _CLIP_STD),
    "gemma3": VisionRow(_gemma3, _HALF, _HALF),
    "llava": VisionRow(_llava, _CLIP_MEAN, _CLIP_STD),
    "llava_onevision": VisionRow(_llava_onevision, _CLIP_MEAN, _CLIP_STD),
    "internvl": VisionRow(_internvl, _CLIP_MEAN, _CLIP_STD),
    "mistral3": VisionRow(_mistral3, _CLIP_MEAN, _CLIP_STD),
    "smolvlm": VisionRow(_smolvlm, _HALF, _HALF),
}
"""Rows by `Family.vision`."""

_FILE_KEYS: Final = {"num_hidden_layers": "depth"}


def read_vision(
    row: str, config: Mapping[str, Any], path: Path, hidden_size: int, text_eps: float
) -> VisionConfig | None:
    """The images of the model of `config`, the contents of `path`. None, which is logged, for a tower of a kind that
    does not run.
    """
    whole = ConfigReader(config, path, way_out=_WAY_OUT)
    file_keys = _FILE_KEYS if row.startswith("qwen") else {}
    files = _Files(whole, replace(whole.object("vision_config"), file_keys=file_keys), hidden_size, text_eps)
    try:
        return VISION_ROWS[row].read(files)
    except UnknownTowerError as error:
        logger.warning("%s: the model runs with text alone", error, extra=SAME_ON_EVERY_RANK)
        return None


def with_processor(vision: VisionConfig, row: str, processor: Mapping[str, Any], path: Path) -> VisionConfig:
    """The config with mean and deviation of the image processor's file, whose path is for errors."""
    reader = ConfigReader(processor, path)
    mean, std = (
        _channels(reader, key, default)
        for key, default in (("image_mean", VISION_ROWS[row].mean), ("image_std", VISION_ROWS[row].std))
    )
    if any(each <= 0 for each in std):
        raise reader.error("image_std", "must be above 0")
    factor = reader.number("rescale_factor", 1 / 255)
    return replace(vision, image_mean=mean, image_std=std, rescale_factor=factor)


def _channels(reader: ConfigReader, key: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    value = reader.get(key, list(default))
    is_list = isinstance(value, list) and len(value) == len(default)
    if not is_list or any(isinstance(each, bool) or not isinstance(each, int | float) for each in value):
        raise ModelConfigError(f"{reader.where(key)}={shown(value)} must list 3 numbers, one for each channel")
    first, second, third = map(float, value)
    return first, second, third
