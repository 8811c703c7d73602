"""Rows of `vision_rows.py`: models with SigLIP's tower and a projector of their own: PaddleOCR-VL, DeepSeek-VL."""

from dataclasses import replace
from typing import Final

from spmd_worker.model_config.families.square_rows import SIGLIP, VIT_SIZES, vit, vit_names
from spmd_worker.model_config.families.vision_files import VisionFiles, heads_of, image_token_of, rope_theta_of
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
