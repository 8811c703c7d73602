"""Rows of `vision_rows.py`: Gemma 4, which takes images of any size, with a tower and without layers."""

from typing import Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.config_reader import ConfigReader, checked_integer
from spmd_worker.model_config.families.vision_files import (
    SEPARATE,
    WAY_OUT,
    UnknownTowerError,
    VisionFiles,
    activation_of,
    image_token_of,
    side_of,
)
from spmd_worker.model_config.vision_config import TowerConfig, TowerNames, VisionConfig

_TOWER: Final = "model.vision_tower."
_NAMES: Final = TowerNames(
    beginnings=(_TOWER, "model.embed_vision."),
    layers=f"{_TOWER}encoder.layers",
    qkv=tuple([f"self_attn.{each}" for each in SEPARATE]),
    output="self_attn.o_proj",
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    patches=f"{_TOWER}patch_embedder.input_proj",
    positions=f"{_TOWER}patch_embedder.position_embedding_table",
)
_PAIRS_OF_TWO_AXES: Final = 4
_UNIFIED: Final = "model.vision_embedder."
_UNIFIED_NAMES: Final = TowerNames(
    beginnings=(_UNIFIED, "model.embed_vision."),
    layers="",
    qkv=(),
    output="",
    norms=("", ""),
    mlp=(),
    patches=f"{_UNIFIED}patch_dense",
    positions=f"{_UNIFIED}pos_embedding",
    # Names in memory.
    aliases=(
        ("model.embed_vision.patch_", f"{_UNIFIED}patch_"),
        ("model.embed_vision.pos_", f"{_UNIFIED}pos_"),
        ("model.embed_vision.multimodal_embedder.", "model.embed_vision."),
    ),
)


def _check_kind(files: VisionFiles, kind: str) -> None:
    """Raise UnknownTowerError for another tower."""
    given = files.vision.get("model_type", kind)
    if given != kind:
        raise UnknownTowerError(f"{files.vision.where('model_type')}={shown(given)} is a tower that does not run")


def gemma4_unified(files: VisionFiles) -> VisionConfig:
    """Gemma 4 without a tower: squares of pixels through norms and linear layers."""
    _check_kind(files, "gemma4_unified_vision")
    vision, text = files.vision, files.whole.object("text_config")
    size = vision.count("mm_embed_dim", 3840)
    vision.choice("output_proj_dims", (size,), 3840)
    # Null is another value than that of its class.
    sight = text.config.get("use_bidirectional_attention", "vision") == "vision"
    return VisionConfig(
        "gemma4_unified",
        image_token_id=image_token_of(files, 258880),
        merge_size=vision.count("pooling_kernel_size", 3),
        sees_whole_image=sight,
        sees_in_windows=sight,
        tower=TowerConfig(
            names=_UNIFIED_NAMES,
            hidden_size=size,
            intermediate_size=0,
            num_layers=0,
            num_heads=1,
            own_head_size=16,
            patch_size=side_of(vision, "patch_size", 16),
            activation="",
            eps=1e-5,
            num_positions=vision.count("mm_posemb_size", 1120),
            projector_eps=vision.number("rms_norm_eps", 1e-6),
        ),
    )


def _input_token_of(text: ConfigReader) -> int:
    """The token whose inputs of layers those of images take, where layers have inputs of their own."""
    if not text.get("hidden_size_per_layer_input", 256):
        return 0
    last, padding = text.count("vocab_size", 262144) - 1, text.get("pad_token_id", 0)
    try:
        return checked_integer(padding, text.where("pad_token_id"), 0, last)
    except ModelConfigError:
        raise text.error("pad_token_id", f"must be a whole number from 0 to {last}{WAY_OUT}") from None


def gemma4(files: VisionFiles) -> VisionConfig:
    """Gemma 4: means of patches; in the larger models tokens of an image see all of it, in layers with a window."""
    vision, text = files.vision, files.whole.object("text_config")
    _check_kind(files, "gemma4_vision")
    head_size, num_heads = vision.count("head_dim", 64), vision.count("num_attention_heads", 12)
    if head_size % _PAIRS_OF_TWO_AXES:
        raise vision.error("head_dim", f"must be a multiple of {_PAIRS_OF_TWO_AXES}: pairs of two axes{WAY_OUT}")
    vision.choice("num_key_value_heads", (num_heads,), 12)
    rope = vision.object("rope_parameters")
    rope.choice("rope_type", ("axial", "default"), "axial")
    sight = text.get("use_bidirectional_attention") == "vision"
    return VisionConfig(
        "gemma4",
        image_token_id=image_token_of(files, 258880),
        merge_size=vision.count("pooling_kernel_size", 3),
        sees_whole_image=sight,
        sees_in_windows=sight,
        input_token_id=_input_token_of(text),
        tower=TowerConfig(
            names=_NAMES,
            hidden_size=vision.count("hidden_size", 768),
            intermediate_size=vision.count("intermediate_size", 3072),
            num_layers=vision.count("num_hidden_layers", 16),
            num_heads=num_heads,
            own_head_size=head_size,
            score_scale=1.0,
            patch_size=side_of(vision, "patch_size", 16),
            activation=activation_of(vision, "hidden_activation", "gelu_pytorch_tanh"),
            eps=vision.number("rms_norm_eps", 1e-6),
            norm="rms",
            is_gated=True,
            has_qkv_bias=False,
            has_bias=False,
            has_patch_bias=False,
            num_positions=vision.count("position_embedding_size", 10240),
            rope_theta=rope.number("rope_theta", 100.0),
            clips=vision.flag("use_clipped_linears", False),
            standardises=vision.flag("standardize", False),
        ),
    )
