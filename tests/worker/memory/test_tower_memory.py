"""Memory of towers: as much is planned as towers take, also for pictures that have fewer tokens than patches."""

from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from media_models import MODELS, media_processor, noise
from tower_memory import peak_of
from vision_checkpoints import CASES, OF_PICTURES, REAL_HEADS, image_of, vision_folder

from spmd_worker.base.config.schema import ModelOptions, PlanConfig, RunConfig
from spmd_worker.media.errors import MediaError
from spmd_worker.media.largest_image import most_image_tokens
from spmd_worker.media.limits import MAX_ASPECT_RATIO
from spmd_worker.media.preparing import prepare
from spmd_worker.media.sizes import Size, best_pinpoint, unpadded_grid
from spmd_worker.model_config.model_config import ModelConfig, read_model_files
from spmd_worker.model_config.vision_config import TowerConfig, TowerNames, VisionConfig
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.memory.estimate import tower_bytes
from spmd_worker.worker.memory.media_memory import longest_media
from spmd_worker.worker.memory.tower_memory import max_tower_patches

ALIKE: Final = (
    *(
        "llava_next_mistral",
        "glm46v",
        "glm4v_moe",
        "glm_ocr",
        "internvl_of_6b",
        "gemma4_clipped",
        "qwen3_5",
        "idefics3",
    ),
)
# As in real towers rows are as wide as a patch has numbers.
_WIDTHS: Final = {"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "own_head_size": 0}
CASES_AND_SIZES: Final = [
    *[
        pytest.param(name, 1024, marks=[pytest.mark.stress] if name in ALIKE else [])
        for name in sorted({*CASES} - {*REAL_HEADS})
    ],
    # The picture that is put together again takes more than layers.
    *[(name, 4096) for name in OF_PICTURES],
]


def wide_config(name: str, text_size: int) -> ModelConfig:
    """The config of a case with wider rows, for a text of `text_size`."""
    config = read_model_files(vision_folder(name), with_images=True).model_config
    vision = config.vision
    assert vision is not None
    assert vision.tower is not None
    widths: dict[str, Any] = dict(_WIDTHS)
    if name == "llama4":
        widths["intermediate_size"] = 512 * vision.merge_size**2
    if vision.tower.projector_size:
        widths["projector_size"] = text_size
    tower = replace(vision.tower, **widths)
    return replace(config, hidden_size=text_size, vision=replace(vision, tower=tower))


@pytest.mark.gate(
    "llava-1024-*",
    "llava_next-1024-*",
    "smolvlm-*",
    "llama4-*",
    "qwen2_5_vl-*",
    "qwen3_vl-*",
    "gemma4-*",
    "gemma3-*",
    "pixtral-*",
    "llava_onevision-4096-*",
)
@pytest.mark.guarantee("The plan's bytes are those of the run")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.stress)])
@pytest.mark.parametrize(("name", "text_size"), CASES_AND_SIZES)
def test_towers_stay_below_the_plan(name: str, text_size: int, dtype: str):
    config, image = wide_config(name, text_size), image_of(name, 2)
    most, num_rows, _ = peak_of(config, image, getattr(torch, dtype))
    assert 0.3 < most / tower_bytes(config, dtype, num_rows) < 1


SIZES: Final = (64, 64, 1, 4, 14, "gelu", 1e-6)
"""Of a tower: width, feed-forward, layers, heads, patch, activation, epsilon."""


def pictures_tower(grids: list[tuple[int, int]], side: int, max_crops: int, *, has_class: bool) -> VisionConfig:
    """A tower of pictures made of squares of `side` pixels, patches of 14."""
    names = TowerNames((), "layers", (), "output", ("norm1", "norm2"), (), "patches")
    names = replace(names, class_token="class" if has_class else "")
    tower = TowerConfig(names, *SIZES, crop_size=side, max_crops=max_crops)
    pinpoints = tuple([(lines * side, columns * side) for lines, columns in grids])
    return VisionConfig("llava_next", 7, tower=replace(tower, pinpoints=pinpoints))


NEXT: Final = pictures_tower([(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)], 336, 0, has_class=True)
ONEVISION: Final = pictures_tower(list(product(range(1, 7), repeat=2)), 384, 9, has_class=False)
ODD: Final = pictures_tower(list(product(range(1, 4), repeat=2)), 70, 2, has_class=False)


def tokens_and_patches(vision: VisionConfig, height: int, width: int) -> Size:
    """Those of a picture."""
    tower = vision.tower
    assert tower is not None
    side = tower.crop_size // tower.patch_size
    lines, columns = (each // tower.crop_size for each in best_pinpoint(height, width, tower.pinpoints))
    grid = unpadded_grid(height, width, lines * side, columns * side, tower.max_crops, side)
    rows_of_square = side**2 + bool(tower.names.class_token)
    return side**2 + grid[0] * (grid[1] + 1), (1 + lines * columns) * rows_of_square


@pytest.mark.parametrize(
    ("vision", "expected"),
    [
        (NEXT, {800: 2308, 1000: 2308, 2048: 2885, 4096: 2885}),
        (ONEVISION, {784: 2187, 1000: 5103, 4096: 6561, 9477: 26973}),
        (ODD, {40: 75, 60: 100, 70: 175, 4096: 250}),
    ],
)
def test_patches_of_pictures_are_found(vision: VisionConfig, expected: dict[int, int]):
    """Regression: as many patches as tokens were counted, of which pictures have fewer."""
    lengths = [*range(2, 2400, 58), 3, 38, 371, 408, 593, 704, 1444, 1925]
    found = [tokens_and_patches(vision, *size) for size in product(lengths, repeat=2)]
    for limit, patches in expected.items():
        assert max(patches for tokens, patches in found if tokens <= limit) == patches, limit
        assert max_tower_patches(vision, limit) == patches, limit


def test_class_tokens_are_rows_of_squares():
    """Regression: they were not counted."""
    vision = NEXT
    assert vision.tower is not None
    squares = replace(vision, merge_size=2, tower=replace(vision.tower, pinpoints=()))
    assert [max_tower_patches(squares, each) for each in (10, 144, 287, 432)] == [577, 577, 577, 3 * 577]


def test_patches_in_no_token_are_counted():
    """Those at the ends of images of at most 11 patches a side."""
    vision = replace(
        NEXT, merge_size=2, tower=TowerConfig(TowerNames((), "", (), "", ("", ""), ()), *SIZES, max_side=11)
    )
    for num_tokens in range(1, 30):
        grids = [each for each in product(range(1, 12), repeat=2) if (each[0] // 2) * (each[1] // 2) <= num_tokens]
        most = max(lines * columns for lines, columns in grids if lines > 1 and columns > 1)
        assert most <= max_tower_patches(vision, num_tokens) <= 1.5 * most, num_tokens


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_no_picture_has_more_tokens(kind: str, tmp_path: Path):
    processor = media_processor(tmp_path, kind)
    most, found = most_image_tokens(processor), []
    lengths = (1, 5, 29, 83, 84, 127, 128, 129, 255, 600)
    for height, width in [*product(lengths, repeat=2), (20, 4000)]:
        # Some kinds take none that is narrower.
        if max(height, width) <= MAX_ASPECT_RATIO * min(height, width):
            with suppress(*[MediaError] * (kind == "lighton_ocr")):
                found.append(prepare(noise(height, width), processor, is_alone=True).num_rows)
    assert max(found) <= most <= 2.5 * max(found), (max(found), most)
    if kind.startswith("gemma4"):
        assert most == 70


def test_gemma4_is_planned_for_its_largest_image():
    """Regression: memory of 4,096 tokens was planned, which no image of these files has."""
    path = str(vision_folder("gemma4_unified"))
    resolved = resolve_run(RunConfig(model=ModelOptions(path=path), plan=PlanConfig(enabled=True)), "cpu")
    assert resolved.max_tower_rows == 70
    # What a job's records compare does not change.
    assert longest_media(resolved) == {"tokens of the longest image": 4096}
    assert replace(resolved, largest_image=0).max_tower_rows == 4096
