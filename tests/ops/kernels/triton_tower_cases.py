"""Towers by kernels for GPUs, interpreted on CPU tensors: see triton_cases.py, whose process and words these share.

TRITON_INTERPRET=1 python tests/ops/kernels/triton_tower_cases.py          prints {case: what went wrong, or ""}
python tests/ops/kernels/triton_tower_cases.py cuda                        the same on a GPU
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton_cases import assert_near, in_gate, run

from spmd_worker.media.prepared import ImagePixels
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model.towers.tower import TowerRows
from spmd_worker.model_config.model_config import model_config_of
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.attention.triton import TritonBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.ops.kernels.triton.launching import is_interpreted
from spmd_worker.ranks.communicator import single_group

_TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
_TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
_QWEN = {"depth": 2, "hidden_size": 48, "intermediate_size": 52, "num_heads": 2, "out_hidden_size": 32}
_OTHER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def rows_of(architecture: str, vision: dict[str, Any], image: ImagePixels, *, is_triton: bool) -> TowerRows:
    """Rows of a tower with dummy weights."""
    config = {"architectures": [architecture], "text_config": _TEXT, "vision_config": vision}
    kernels = (TritonKernels(), TritonBackend()) if is_triton else (ReferenceKernels(), SdpaBackend())
    device = torch.get_default_device()
    context = LayerContext(single_group(), *kernels, torch.float32, device)
    model = build_model(context, model_config_of(config, Path("config.json"), with_images=True))
    model.weights.fill(model.weights.dummy())
    model.pack_weights()
    assert model.tower is not None
    with torch.inference_mode():
        found: TowerRows = model.tower(image)
    return found


def image_of(*sides: tuple[int, int], patch_size: int) -> ImagePixels:
    generator = np.random.default_rng(3)
    crops = tuple([generator.integers(0, 256, (*side, 3), dtype=np.uint8) for side in sides])
    grid = (sides[0][0] // patch_size, sides[0][1] // patch_size)
    return ImagePixels(crops, grid, sides[0])


def check(architecture: str, vision: dict[str, Any], image: ImagePixels) -> None:
    ours, plain = (rows_of(architecture, vision, image, is_triton=is_triton) for is_triton in (True, False))
    for mine, expected in zip((ours.rows, *ours.added), (plain.rows, *plain.added), strict=True):
        assert_near(mine, expected, torch.float32)


def towers_of_any_size_have_the_rows_of_plain_torch() -> None:
    """Heads of 24, which are padded; rows for the first layers."""
    vision = {**_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    check("Qwen3VLForConditionalGeneration", vision, image_of((64, 96), patch_size=16))


def towers_with_windows_have_the_rows_of_plain_torch() -> None:
    vision = {**_QWEN, "hidden_size": 32, "window_size": 56, "fullatt_block_indexes": [1]}
    check("Qwen2_5_VLForConditionalGeneration", vision, image_of((84, 84), patch_size=14))


def towers_of_squares_have_the_rows_of_plain_torch() -> None:
    vision = {**_OTHER, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": 32}
    check("LlavaForConditionalGeneration", vision, image_of((28, 28), (28, 28), patch_size=14))


CASES: tuple[Callable[[], None], ...] = (
    towers_of_any_size_have_the_rows_of_plain_torch,
    towers_with_windows_have_the_rows_of_plain_torch,
    towers_of_squares_have_the_rows_of_plain_torch,
)


def main() -> None:
    torch.set_default_device("cuda" if "cuda" in sys.argv else "cpu")
    assert is_interpreted() == ("cuda" not in sys.argv), "set TRITON_INTERPRET=1, or say cuda"
    torch.set_num_threads(1)
    print(json.dumps({case.__name__: run(case) for case in (CASES[:1] if in_gate() else CASES)}))


if __name__ == "__main__":
    main()
