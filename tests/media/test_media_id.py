"""Names of images: all that rows depend on, and nothing else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from media_models import MODELS, media_processor, noise, saved
from PIL import Image

from spmd_worker.media.decode import decode
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.preparing import prepare

PIXELS = noise(96, 128)


@pytest.mark.guarantee("A media id names pixels and their preparing")
def test_name_follows_pixels_and_not_their_file(tmp_path: Path):
    processor = media_processor(tmp_path, "qwen3_vl")

    def name(pixels: object) -> bytes:
        return prepare(pixels, processor, is_alone=True).media_id  # type: ignore[arg-type]  # arrays of all orders

    first = name(PIXELS)
    assert len(first) == 16
    for kind in ("PNG", "BMP", "TIFF"):
        assert name(decode(saved(Image.fromarray(PIXELS), kind), MediaLimits())) == first
    assert name(PIXELS[::-1][::-1]) == first
    changed = PIXELS.copy()
    changed[50, 50, 1] ^= 1
    others = [changed, PIXELS[::-1], PIXELS.transpose(1, 0, 2), PIXELS.reshape(128, 96, 3), PIXELS[:, :, ::-1]]
    assert len({first, *(name(each) for each in others)}) == 6


@pytest.mark.control("A media id names pixels and their preparing")
def test_bytes_alone_would_join_images_of_other_shapes(tmp_path: Path):
    processor = replace(media_processor(tmp_path, "qwen3_vl"), min_pixels=1)
    wide, tall = (
        prepare(noise(64, 64)[:32].reshape(*shape, 3), processor, is_alone=True) for shape in ((32, 64), (64, 32))
    )
    assert wide.pixels.data == tall.pixels.data
    assert wide.media_id != tall.media_id


def test_name_follows_numbers_of_the_processor(tmp_path: Path):
    processor = media_processor(tmp_path, "qwen3_vl")
    other = [
        *(replace(processor, mean=(0.5, 0.5, 0.4)), replace(processor, scale=1 / 256)),
        *(replace(processor, kind="qwen2_5_vl"), replace(processor, max_pixels=65537)),
    ]
    names = [prepare(PIXELS, each, is_alone=True).media_id for each in [processor, *other]]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", MODELS)
def test_only_one_kind_names_alone_and_size(kind: str, tmp_path: Path):
    """Elsewhere an image beside others has the rows that it has alone."""
    processor = media_processor(tmp_path, kind)
    pixels = noise(84, 84)
    alone, beside = (prepare(pixels, processor, is_alone=is_alone) for is_alone in (True, False))
    assert (alone.media_id == beside.media_id) == (kind != "llava_onevision")


@pytest.mark.parametrize("kind", ["llava_next", "llava_onevision"])
def test_size_counts_where_padding_is_cut_off(kind: str, tmp_path: Path):
    """Black pictures in black padding: the same squares, of which other numbers of lines are kept."""
    processor = media_processor(tmp_path, kind)
    high, low = (prepare(np.zeros((lines, 168, 3), np.uint8), processor, is_alone=True) for lines in (84, 60))
    assert high.pixels.data == low.pixels.data
    assert high.num_rows > low.num_rows
    assert high.media_id != low.media_id
