"""Rows of `vision_rows.py`: models that read pages, with towers near those of other models."""

from dataclasses import replace
from typing import Final

from spmd_worker.model_config.families.square_rows import SIGLIP, vit, vit_names
from spmd_worker.model_config.families.vision_files import VisionFiles, heads_of, rope_theta_of
from spmd_worker.model_config.vision_config import VisionConfig

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
