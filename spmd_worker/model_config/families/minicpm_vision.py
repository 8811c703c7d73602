"""Row of `vision_rows.py` of MiniCPM-V 4.6: SigLIP for any size, with a merger between its layers."""

from dataclasses import replace
from typing import Final

from spmd_worker.model_config.config_reader import checked_integer
from spmd_worker.model_config.families.square_rows import SIGLIP, vit, vit_names
from spmd_worker.model_config.families.vision_files import WAY_OUT, VisionFiles, side_of
from spmd_worker.model_config.vision_config import VisionConfig

_TOP: Final = "model.vision_tower."
MERGE_SIZES: Final = {"16x": 4, "4x": 2}
"""`downsample_mode` -> patches a side of a token."""


def minicpmv4_6(files: VisionFiles) -> VisionConfig:
    """MiniCPM-V 4.6. Files of other versions may have several mergers behind the tower."""
    vision, whole = files.vision, files.whole
    names = replace(
        vit_names(_TOP, is_clip=False, has_last_norm=True),
        beginnings=(_TOP, "model.merger."),
        projector=("pre_norm", "linear_1", "linear_2"),
    )
    tower = vit(files, SIGLIP, names)
    for reader, key in ((vision, "window_kernel_size"), (whole, "merge_kernel_size")):
        if side_of(reader, key, 2) != 2:
            raise reader.error(key, f"is not supported, only [2, 2]{WAY_OUT}")
    whole.choice("merger_times", (1,), 1)
    # Its class takes that of the complete file, whatever the tower's part says.
    layer = checked_integer(whole.get("insert_layer_id", 6), whole.where("insert_layer_id"), 0, tower.num_layers - 1)
    return VisionConfig(
        "minicpmv4_6",
        image_token_id=whole.count("image_token_id"),
        merge_size=MERGE_SIZES[whole.choice("downsample_mode", tuple(MERGE_SIZES), "16x")],
        tower=replace(tower, crop_size=0, merge_sizes=tuple(MERGE_SIZES.values()), num_unmerged=layer + 1),
    )
