"""Row of `vision_rows.py`: Kimi K2.5 and K2.6, MoonViT for images of any size."""

from dataclasses import replace
from typing import Final

from spmd_worker.model_config.config_reader import ConfigReader
from spmd_worker.model_config.families.vision_files import (
    WAY_OUT,
    VisionFiles,
    activation_of,
    heads_of,
    rope_theta_of,
    side_of,
)
from spmd_worker.model_config.vision_config import TowerConfig, TowerNames, VisionConfig

_BLOCKS: Final = "vision_tower.encoder.blocks"
_NAMES: Final = TowerNames(
    beginnings=("vision_tower.", "mm_projector."),
    layers=_BLOCKS,
    qkv=("wqkv",),
    output="wo",
    norms=("norm0", "norm1"),
    mlp=("mlp.fc0", "mlp.fc1"),
    patches="vision_tower.patch_embed.proj",
    positions="vision_tower.patch_embed.pos_emb.weight",
    last_norm="vision_tower.encoder.final_layernorm",
    aliases=(("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),),
)
"""Those of the hub's files; transformers writes one otherwise. In memory it has queries and keys in another order."""
_HUB_KEYS: Final = {
    "hidden_size": "vt_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "num_attention_heads": "vt_num_attention_heads",
    "num_hidden_layers": "vt_num_hidden_layers",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
    "projection_hidden_size": "mm_hidden_size",
    "projection_layer_norm_eps": "projector_ln_eps",
}
"""Keys of transformers -> those of its authors' `vision_config`."""
_MOST_POSITIONS: Final = 1 << 12
_PAIRS_OF_TWO_AXES: Final = 4


def kimi_k25(files: VisionFiles) -> VisionConfig:
    """Kimi K2.5: resampled positions, angles of columns and lines in turns, squares of patches as tokens."""
    given = files.vision.config
    vision = replace(files.vision, file_keys={ours: hub for ours, hub in _HUB_KEYS.items() if hub in given})
    hidden_size, side = vision.count("hidden_size", 1152), vision.count("pos_emb_height", 64)
    if side > _MOST_POSITIONS or vision.count("pos_emb_width", 64) != side:
        rule = f"must be that of pos_emb_width, at most {_MOST_POSITIONS}{WAY_OUT}"
        raise vision.error("pos_emb_height", rule)
    # The authors' files have the projector's numbers beside the tower's.
    projector = _reader_of(vision, files.whole, "projection_hidden_size")
    projector.choice("projection_hidden_size", (hidden_size,), 1152)
    tower = TowerConfig(
        names=_NAMES,
        hidden_size=hidden_size,
        intermediate_size=vision.count("intermediate_size", 4304),
        num_layers=vision.count("num_hidden_layers", 27),
        num_heads=heads_of(vision, "num_attention_heads", 16, hidden_size, _PAIRS_OF_TWO_AXES),
        patch_size=side_of(vision, "patch_size", 14),
        activation=activation_of(vision, "hidden_act", "gelu_pytorch_tanh"),
        eps=1e-5,
        num_positions=side**2,
        rope_theta=rope_theta_of(vision, 10000.0),
        projector_eps=_reader_of(vision, files.whole, "projection_layer_norm_eps").number(
            "projection_layer_norm_eps", 1e-5
        ),
    )
    token = "image_token_id" if files.whole.get("image_token_id") is not None else "media_placeholder_token_id"
    return VisionConfig(
        "kimi_k25",
        image_token_id=files.whole.count(token, 163605),
        merge_size=side_of(vision, "merge_kernel_size", 2),
        tower=tower,
        scales_levels=True,
    )


def _reader_of(vision: ConfigReader, whole: ConfigReader, key: str) -> ConfigReader:
    """The reader that has a number of the projector."""
    return vision if key in vision.file_keys else whole
