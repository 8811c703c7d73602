"""Row of `vision_rows.py`: the tower of Gemma 4, which takes images of any size."""

from typing import Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.model_config.config_reader import checked_integer
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


def gemma4(files: VisionFiles) -> VisionConfig:
    """Gemma 4: means of patches; in the larger models tokens of an image see all of it, in layers with a window."""
    vision, text = files.vision, files.whole.object("text_config")
    # An empty object has the class's defaults.
    if files.whole.get("vision_config") is None:
        raise UnknownTowerError(f"{files.whole.where('vision_config')} describes no tower")
    kind = vision.get("model_type", "gemma4_vision")
    if kind != "gemma4_vision":
        raise UnknownTowerError(f"{vision.where('model_type')}={shown(kind)} is a tower that does not run")
    head_size, num_heads = vision.count("head_dim", 64), vision.count("num_attention_heads", 12)
    if head_size % _PAIRS_OF_TWO_AXES:
        raise vision.error("head_dim", f"must be a multiple of {_PAIRS_OF_TWO_AXES}: pairs of two axes{WAY_OUT}")
    vision.choice("num_key_value_heads", (num_heads,), 12)
    rope = vision.object("rope_parameters")
    rope.choice("rope_type", ("axial", "default"), "axial")
    padding = text.get("pad_token_id", 0)
    sight = text.get("use_bidirectional_attention") == "vision"
    return VisionConfig(
        "gemma4",
        image_token_id=image_token_of(files, 258880),
        merge_size=vision.count("pooling_kernel_size", 3),
        sees_whole_image=sight,
        sees_in_windows=sight,
        input_token_id=checked_integer(padding, text.where("pad_token_id"), 0, text.count("vocab_size", 262144) - 1),
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
