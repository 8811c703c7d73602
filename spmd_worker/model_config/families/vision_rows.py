"""Rows of the table of towers: how config.json describes each kind, and the names of its tensors.

Keys that a file leaves out have the defaults of its class in transformers. Needs no torch.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.model_config.config_reader import ConfigReader
from spmd_worker.model_config.families.audio_rows import AUDIO_PART, AUDIO_ROWS, AUDIO_WAY_OUT
from spmd_worker.model_config.families.gemma4_vision import gemma4, gemma4_unified
from spmd_worker.model_config.families.kimi_vision import kimi_k25
from spmd_worker.model_config.families.minicpm_vision import minicpmv4_6
from spmd_worker.model_config.families.siglip_rows import (
    aya_vision,
    cohere2_vision,
    deepseek_vl,
    granite_docling,
    lfm2_vl,
    paddleocr_vl,
)
from spmd_worker.model_config.families.square_rows import (
    gemma3,
    internvl,
    llama4,
    llava_next,
    llava_of_squares,
    llava_onevision,
    smolvlm,
)
from spmd_worker.model_config.families.vision_files import (
    OUTSIDE,
    SEPARATE,
    WAY_OUT,
    UnknownTowerError,
    VisionFiles,
    activation_of,
    heads_of,
    image_token_of,
    layers_of,
    rope_theta_of,
    side_of,
    two_linears,
)
from spmd_worker.model_config.vision_config import TowerConfig, TowerNames, VisionConfig

logger = logging.getLogger(__name__)

_MOST_LAYERS: Final = 1 << 16
_MOST_RATIO: Final = 1 << 8
"""Largest ratio of the widths of a feed-forward and its layer."""

_OMNI_BEGINNING: Final = "thinker.visual."

# ---- Qwen ----------------------------------------------------------------------------------------------------------


def _qwen_names(beginning: str, qkv: tuple[str, ...] = ("attn.qkv",), **names: Any) -> TowerNames:
    return TowerNames(
        beginnings=(beginning,),
        layers=f"{beginning}blocks",
        qkv=qkv,
        output="attn.proj",
        norms=("norm1", "norm2"),
        patches=f"{beginning}patch_embed.proj",
        **names,
    )


def _qwen_sizes(
    files: VisionFiles, defaults: Mapping[str, int], activation: str, default_width: int = 3584
) -> dict[str, Any]:
    """`default_width` is that of the tower's outputs."""
    vision = files.vision
    out_size = vision.count("out_hidden_size", default_width)
    hidden_size = vision.count("hidden_size", defaults["hidden_size"])
    if out_size != files.hidden_size:
        raise vision.error("out_hidden_size", f"is not the hidden size of the text, {files.hidden_size}{WAY_OUT}")
    vision.choice("in_channels", (3,), 3)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": vision.count("intermediate_size", defaults["intermediate_size"]),
        "num_layers": vision.count("num_hidden_layers", defaults["depth"]),
        "num_heads": heads_of(vision, "num_heads", defaults.get("num_heads", 16), hidden_size, 4),
        "patch_size": side_of(vision, "patch_size", defaults["patch_size"]),
        "activation": activation_of(vision, "hidden_act", activation),
        "eps": 1e-6,
        "num_frames": side_of(vision, "temporal_patch_size", 2),
        "rope_theta": rope_theta_of(vision, 10000.0),
    }


def _qwen_vision(files: VisionFiles, kind: str, tower: TowerConfig, default_token: int) -> VisionConfig:
    return VisionConfig(
        kind,
        image_token_id=files.whole.count("image_token_id", default_token),
        num_added=len(tower.added_layers),
        merge_size=files.vision.count("spatial_merge_size", 2),
        has_three_positions=True,
        tower=tower,
    )


def _qwen3_vl(
    files: VisionFiles, *, adds: bool = True, default_token: int = 151655, names: Mapping[str, Any] | None = None
) -> VisionConfig:
    defaults = {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "patch_size": 16}
    sizes = _qwen_sizes(files, defaults, "gelu_pytorch_tanh")
    num_positions = files.vision.count("num_position_embeddings", 2304)
    if round(num_positions**0.5) ** 2 != num_positions:
        raise files.vision.error("num_position_embeddings", f"must be a square number{WAY_OUT}")
    deepstack = layers_of(files.vision, "deepstack_visual_indexes", [8, 16, 24], sizes["num_layers"]) if adds else ()
    given = {
        "beginning": "model.visual.",
        "projector": ("norm", "linear_fc1", "linear_fc2"),
        "added": "deepstack_merger_list",
        **(names or {}),
    }
    of_tower = _qwen_names(
        mlp=("mlp.linear_fc1", "mlp.linear_fc2"), positions=f"{given['beginning']}pos_embed.weight", **given
    )
    tower = TowerConfig(names=of_tower, num_positions=num_positions, added_layers=deepstack, **sizes)
    return _qwen_vision(files, "qwen3_vl", tower, default_token)


def _qwen3_omni(files: VisionFiles) -> VisionConfig:
    names = {"beginning": _OMNI_BEGINNING, "projector": ("ln_q", "mlp.0", "mlp.2"), "added": "merger_list"}
    return replace(_qwen3_vl(files, names=names), kind="qwen3_omni")


def _qwen3_5(files: VisionFiles) -> VisionConfig:
    return _qwen3_vl(files, adds=False, default_token=248056)


def _qwen2_vl(files: VisionFiles) -> VisionConfig:
    vision = files.vision
    width, ratio = vision.count("hidden_size", 1280), vision.count("mlp_ratio", 4)
    if ratio > _MOST_RATIO:
        raise vision.error("mlp_ratio", f"must be at most {_MOST_RATIO}{WAY_OUT}")
    defaults = {"hidden_size": 1280, "intermediate_size": width * ratio, "depth": 32, "patch_size": 14}
    tower = TowerConfig(
        names=_qwen_names("visual.", mlp=("mlp.fc1", "mlp.fc2")),
        has_patch_bias=False,
        **_qwen_sizes(files, defaults, "quick_gelu"),
    )
    return _qwen_vision(files, "qwen2_vl", tower, 151655)


def _qwen2_5_vl(files: VisionFiles) -> VisionConfig:
    return _qwen_vision(files, "qwen2_5_vl", _qwen2_5_tower(files, "visual."), 151655)


def _exaone4_5(files: VisionFiles) -> VisionConfig:
    """Tokens have one position each, and heads of the tower share keys and values."""
    tower, vision = _qwen2_5_tower(files, "model.visual."), files.vision
    num_kv_heads = vision.count("num_key_value_heads", 8)
    if tower.num_heads % num_kv_heads:
        raise vision.error("num_key_value_heads", f"must divide the {tower.num_heads} heads{WAY_OUT}")
    tower = replace(tower, num_kv_heads=num_kv_heads)
    return replace(_qwen_vision(files, "exaone4_5", tower, 67), has_three_positions=False)


def _qwen2_5_tower(files: VisionFiles, beginning: str, **names: Any) -> TowerConfig:
    defaults = {"hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "patch_size": 14}
    sizes = _qwen_sizes(files, defaults, "silu")
    merge_size, window = files.vision.count("spatial_merge_size", 2), side_of(files.vision, "window_size", 112)
    if window < merge_size * sizes["patch_size"]:
        raise files.vision.error("window_size", f"must hold a token of {merge_size} patches a side{WAY_OUT}")
    # Its class's default names layers that a shallow tower lacks.
    full_layers = layers_of(files.vision, "fullatt_block_indexes", [7, 15, 23, 31], _MOST_LAYERS)
    return TowerConfig(
        names=_qwen_names(beginning, mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), **names),
        norm="rms",
        is_gated=True,
        has_patch_bias=False,
        window_size=window,
        full_layers=tuple([each for each in full_layers if each < sizes["num_layers"]]),
        **sizes,
    )


def _qwen2_5_omni(files: VisionFiles) -> VisionConfig:
    tower = _qwen2_5_tower(files, _OMNI_BEGINNING, qkv=("attn.q", "attn.k", "attn.v"))
    found = _qwen_vision(files, "qwen2_5_vl", tower, 151655)
    return replace(found, kind="qwen2_5_omni", image_token_id=image_token_of(files, 151655))


# ---- GLM -----------------------------------------------------------------------------------------------------------


def _glm4v(files: VisionFiles, *, default_token: int = 151343) -> VisionConfig:
    defaults = {"hidden_size": 1536, "intermediate_size": 13696, "depth": 24, "patch_size": 14, "num_heads": 12}
    vision, sizes = files.vision, _qwen_sizes(files, defaults, "silu", default_width=4096)
    side = side_of(vision, "image_size", 336) // sizes["patch_size"]
    if not side:
        raise vision.error("image_size", f"must hold a patch of {sizes['patch_size']} pixels{WAY_OUT}")
    beginning = "model.visual."
    names = _qwen_names(
        beginning,
        mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        positions=f"{beginning}embeddings.position_embedding.weight",
        first_norm=f"{beginning}post_conv_layernorm",
        last_norm=f"{beginning}post_layernorm",
    )
    # The feed-forwards of layers are as wide as the text.
    inner = {"intermediate_size": files.hidden_size, "projector_size": sizes["intermediate_size"]}
    tower = TowerConfig(
        names=names,
        norm="rms",
        is_gated=True,
        has_qkv_bias=vision.flag("attention_bias", False),
        has_bias=False,
        num_positions=side**2,
        projector_activation=sizes["activation"],
        projector_eps=1e-5,
        **{**sizes, **inner, "eps": vision.number("rms_norm_eps", 1e-5)},
    )
    return _qwen_vision(files, "glm4v", tower, default_token)


def _glm4v_moe(files: VisionFiles) -> VisionConfig:
    return _glm4v(files, default_token=151363)


def _glm_ocr(files: VisionFiles) -> VisionConfig:
    """Patches have angles alone, and layers as wide as a file says; the projector is three times the text."""
    defaults = {"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "patch_size": 14, "num_heads": 16}
    vision, sizes = files.vision, _qwen_sizes(files, defaults, "silu", default_width=1536)
    beginning, has_bias = "model.visual.", vision.flag("attention_bias", True)
    names = _qwen_names(
        beginning,
        mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        query_norm="attn.q_norm",
        key_norm="attn.k_norm",
        last_norm=f"{beginning}post_layernorm",
    )
    tower = TowerConfig(
        names=names,
        norm="rms",
        norms_heads=True,
        is_gated=True,
        has_qkv_bias=has_bias,
        has_bias=has_bias,
        projector_size=3 * files.hidden_size,
        projector_activation=sizes["activation"],
        projector_eps=1e-5,
        **{**sizes, "eps": vision.number("rms_norm_eps", 1e-5)},
    )
    return _qwen_vision(files, "glm4v", tower, 59280)


# ---- Pixtral, Mistral 3 --------------------------------------------------------------------------------------------


def _pixtral_names(tower: str, *beginnings: str) -> TowerNames:
    return TowerNames(
        beginnings=beginnings,
        layers=f"{tower}transformer.layers",
        qkv=tuple([f"attention.{each}" for each in SEPARATE]),
        output="attention.o_proj",
        norms=("attention_norm", "ffn_norm"),
        mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
        patches=f"{tower}patch_conv",
        first_norm=f"{tower}ln_pre",
    )


def _pixtral_tower(
    files: VisionFiles, default_patch: int, *, has_bias: bool, default_activation: str = "gelu"
) -> TowerConfig:
    vision = files.vision
    hidden_size = vision.count("hidden_size", 1024)
    num_heads = heads_of(vision, "num_attention_heads", 16, hidden_size, 4)
    vision.choice("head_dim", (hidden_size // num_heads,), hidden_size // num_heads)
    vision.choice("num_channels", (3,), 3)
    files.whole.choice("vision_feature_layer", (-1,), -1)
    return TowerConfig(
        names=_pixtral_names("vision_tower.", *OUTSIDE),
        hidden_size=hidden_size,
        intermediate_size=vision.count("intermediate_size", 4096),
        num_layers=vision.count("num_hidden_layers", 24),
        num_heads=num_heads,
        patch_size=side_of(vision, "patch_size", default_patch),
        activation=activation_of(vision, "hidden_act", default_activation),
        eps=1e-5,
        norm="rms",
        is_gated=True,
        has_qkv_bias=False,
        has_bias=False,
        has_patch_bias=False,
        rope_theta=rope_theta_of(vision, 10000.0),
        projector_has_bias=has_bias,
        projector_eps=files.text_eps,
        **two_linears(files),
    )


def _pixtral(files: VisionFiles) -> VisionConfig:
    has_bias = files.whole.flag("multimodal_projector_bias", True)
    files.whole.choice("vision_feature_select_strategy", ("full",), "default")
    tower = _pixtral_tower(files, 16, has_bias=has_bias)
    return VisionConfig("pixtral", image_token_id=image_token_of(files, 32000), tower=tower)


def _llava(files: VisionFiles) -> VisionConfig:
    kind = files.vision.get("model_type", "clip_vision_model")
    if kind == "pixtral":
        return _pixtral(files)
    return llava_of_squares(files)


def _check_is_pixtral(files: VisionFiles) -> None:
    kind = files.vision.get("model_type", "pixtral")
    if kind != "pixtral":
        raise UnknownTowerError(f"{files.vision.where('model_type')}={shown(kind)} is a tower that does not run")


def _lighton_ocr(files: VisionFiles) -> VisionConfig:
    """Defaults are those of Pixtral's class; a file without `vision_config` has the tower of its own."""
    _check_is_pixtral(files)
    is_given = files.whole.get("vision_config") is not None
    patch, side, activation = (16, 1024, "gelu") if is_given else (14, 1540, "silu")
    tower = _pixtral_tower(files, patch, has_bias=False, default_activation=activation)
    top = "model.vision_encoder."
    max_side = side_of(files.vision, "image_size", side) // tower.patch_size
    if not max_side:
        raise files.vision.error("image_size", f"must hold a patch of {tower.patch_size} pixels{WAY_OUT}")
    return VisionConfig(
        "lighton_ocr",
        image_token_id=files.whole.count("image_token_id", 151655),
        merge_size=files.whole.count("spatial_merge_size", 2),
        tower=replace(
            tower,
            names=_pixtral_names(top, top, "model.vision_projection."),
            max_side=max_side,
            projector_activation="gelu",
        ),
    )


def _mistral3(files: VisionFiles) -> VisionConfig:
    _check_is_pixtral(files)
    has_bias = files.whole.flag("multimodal_projector_bias", False)
    tower, merge_size = _pixtral_tower(files, 16, has_bias=has_bias), files.whole.count("spatial_merge_size", 2)
    return VisionConfig("mistral3", image_token_id=image_token_of(files, 10), merge_size=merge_size, tower=tower)


def _mistral_large4(files: VisionFiles) -> VisionConfig:
    """Mistral 3's tower in its authors' names and order of a head's numbers. A file without `vision_config` has sizes
    of its own.
    """
    if files.whole.get("vision_config") is None:
        files = replace(files, vision=replace(files.vision, config=_LARGE_TOWER))
    found = _mistral3(files)
    assert found.tower is not None, found
    return replace(found, tower=replace(found.tower, names=_LARGE_NAMES, pairs_neighbours=True))


_LARGE_TOWER: Final = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 1540,
    "hidden_act": "silu",
}
_LARGE_NAMES: Final = TowerNames(
    beginnings=("vision_encoder.", "pre_mm_projector_norm.", "patch_merger.", "vision_language_adapter."),
    layers="vision_encoder.transformer.layers",
    qkv=("attention.wq", "attention.wk", "attention.wv"),
    output="attention.wo",
    norms=("attention_norm", "ffn_norm"),
    mlp=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    patches="vision_encoder.patch_conv",
    first_norm="vision_encoder.ln_pre",
    projector=(
        *("pre_mm_projector_norm", "patch_merger.merging_layer"),
        *("vision_language_adapter.w_in", "vision_language_adapter.w_out"),
    ),
)
"""Names that transformers has in memory, of queries and keys in another order."""


VISION_ROWS: Final[dict[str, Callable[[VisionFiles], VisionConfig]]] = {
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "exaone4_5": _exaone4_5,
    "qwen2_5_omni": _qwen2_5_omni,
    "qwen3_omni": _qwen3_omni,
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v_moe,
    "glm_ocr": _glm_ocr,
    "paddleocr_vl": paddleocr_vl,
    "kimi_k25": kimi_k25,
    "deepseek_vl": deepseek_vl,
    "llama4": llama4,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma4_unified": gemma4_unified,
    "llava": _llava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "internvl": internvl,
    "aya_vision": aya_vision,
    "cohere2_vision": cohere2_vision,
    "mistral3": _mistral3,
    "mistral_large4": _mistral_large4,
    "lighton_ocr": _lighton_ocr,
    "smolvlm": smolvlm,
    "idefics3": smolvlm,
    "granite_docling": granite_docling,
    "lfm2_vl": lfm2_vl,
    "minicpmv4_6": minicpmv4_6,
    **AUDIO_ROWS,
}
"""How config.json is read, by `Family.vision`."""
VIDEO_ROWS: Final[dict[str, int | None]] = {
    **dict.fromkeys(("qwen3_vl", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_omni"), 151656),
    "qwen3_5": 248057,
    "llava_onevision": 151647,
    **dict.fromkeys(("glm4v", "glm4v_moe", "internvl", "smolvlm")),
}
"""Rows whose models take videos: the id that their class has for tokens of frames, None for those of images."""

_DEPTH: Final = {"num_hidden_layers": "depth"}
_QWEN2_VL_KEYS: Final = {"hidden_size": "embed_dim", "out_hidden_size": "hidden_size", "intermediate_size": ""}
_FILE_KEYS: Final = {
    "qwen2_vl": {**_DEPTH, **_QWEN2_VL_KEYS},
    "qwen2_5_vl": _DEPTH,
    "exaone4_5": _DEPTH,
    "qwen2_5_omni": _DEPTH,
    "qwen3_omni": _DEPTH,
    "qwen3_vl": _DEPTH,
    "qwen3_5": _DEPTH,
    "glm4v": _DEPTH,
    "glm4v_moe": _DEPTH,
    "glm_ocr": _DEPTH,
}
"""Row -> the file's names of our keys of `vision_config`."""

_WITHOUT_DEFAULT: Final = (
    "gemma4",
    "gemma4_unified",
    "qwen2_vl",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "paddleocr_vl",
    "llama4",
    "aya_vision",
)
"""Rows of classes that have no tower by default, or one that fits no text."""


def read_vision(
    row: str, config: Mapping[str, Any], path: Path, hidden_size: int, text_eps: float
) -> VisionConfig | None:
    """The images or audio of the model of `config`, the contents of `path`. None, which is logged, for a tower of a
    kind that does not run.
    """
    way_out, part = (AUDIO_WAY_OUT, AUDIO_PART) if row in AUDIO_ROWS else (WAY_OUT, "vision_config")
    whole = ConfigReader(config, path, way_out=way_out)
    vision = replace(whole.object(part), file_keys=_FILE_KEYS.get(row, {}))
    files = VisionFiles(whole, vision, hidden_size, text_eps)
    try:
        # An empty object has the class's defaults.
        if row in _WITHOUT_DEFAULT and whole.get("vision_config") is None:
            raise UnknownTowerError(f"{whole.where('vision_config')} describes no tower")
        found = VISION_ROWS[row](files)
        if row not in VIDEO_ROWS:
            return found
        default = VIDEO_ROWS[row]
        # Older files call it an index.
        key = "video_token_id" if whole.get("video_token_index") is None else "video_token_index"
        token_id = found.image_token_id if default is None else whole.count(key, default)
        return replace(found, video_token_id=token_id)
    except UnknownTowerError as error:
        logger.warning("%s: the model runs with text alone", error, extra=SAME_ON_EVERY_RANK)
        return None
