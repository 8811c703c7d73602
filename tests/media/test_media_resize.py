"""Resizing against whole numbers: Pillow's rule up to release 12, written out, horizontal pass first."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from media_models import noise

from spmd_worker.media.patches import normalise, patches, qwen_patches
from spmd_worker.media.prepared import Pixels
from spmd_worker.media.resize import RESAMPLINGS, resize

SUPPORTS = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}
BITS = 22


def weight(name: str, x: float) -> float:
    x = abs(x)
    if name == "bilinear":
        return max(1.0 - x, 0.0)
    if name == "bicubic":
        if x < 1:
            return (1.5 * x - 2.5) * x * x + 1
        return ((-0.5 * x + 2.5) * x - 4) * x + 2 if x < 2 else 0.0
    if x >= 3:
        return 0.0
    one, third = (math.sin(math.pi * y) / (math.pi * y) if y else 1.0 for y in (x, x / 3))
    return one * third


def one_pass(pixels: Pixels, new_size: int, name: str) -> Pixels:
    """Along the second axis: coefficients of 22 bits, sums in 32 bits, rounded to 8 bits."""
    size = pixels.shape[1]
    scale = size / new_size
    stretch = max(scale, 1.0)
    support = SUPPORTS[name] * stretch
    result = np.empty((len(pixels), new_size, 3), np.uint8)
    for new in range(new_size):
        center = (new + 0.5) * scale
        first, last = max(int(center - support + 0.5), 0), min(int(center + support + 0.5), size)
        values = [weight(name, (old - center + 0.5) * (1 / stretch)) for old in range(first, last)]
        total = 0.0
        for value in values:
            total += value
        shares = [value / total for value in values]
        whole = np.array([int((0.5 if share >= 0 else -0.5) + share * (1 << BITS)) for share in shares], np.int64)
        sums = np.einsum("rtc,t->rc", pixels[:, first:last].astype(np.int64), whole) + (1 << (BITS - 1))
        result[:, new] = (sums >> BITS).clip(0, 255)
    return result


def in_whole_numbers(pixels: Pixels, height: int, width: int, name: str) -> Pixels:
    if width != pixels.shape[1]:
        pixels = one_pass(pixels, width, name)
    if height != pixels.shape[0]:
        pixels = one_pass(pixels.transpose(1, 0, 2), height, name).transpose(1, 0, 2)
    return pixels


SIDES = st.integers(1, 48)


@pytest.mark.guarantee("Resizing does not depend on Pillow's release")
@given(st.sampled_from(sorted(SUPPORTS)), SIDES, SIDES, SIDES, SIDES, st.integers(0, 99))
def test_resizing_equals_whole_numbers(name: str, height: int, width: int, new_height: int, new_width: int, seed: int):
    pixels = noise(height, width, seed)
    assert np.array_equal(
        resize(pixels, new_height, new_width, name), in_whole_numbers(pixels, new_height, new_width, name)
    )


@pytest.mark.control("Resizing does not depend on Pillow's release")
@pytest.mark.parametrize("name", SUPPORTS)
def test_whole_numbers_detect_other_pass_first(name: str):
    pixels = noise(60, 40)
    upright = in_whole_numbers(pixels, 25, 57, name)
    turned = in_whole_numbers(pixels.transpose(1, 0, 2), 57, 25, name).transpose(1, 0, 2)
    assert not np.array_equal(upright, turned)
    assert np.array_equal(resize(pixels, 25, 57, name), upright)


def test_resampling_numbers_are_those_of_files():
    assert RESAMPLINGS == {1: "lanczos", 2: "bilinear", 3: "bicubic"}


def test_equal_size_keeps_the_pixels():
    pixels = noise(17, 23)
    assert np.array_equal(resize(pixels, 17, 23, "lanczos"), pixels)


def test_normalised_levels_round_three_times():
    pixels = np.arange(256, dtype=np.uint8).reshape(16, 16)[:, :, None].repeat(3, axis=2)
    planes = normalise(pixels, (0.5, 0.25, 0.1), (0.5, 0.3, 0.7))
    assert planes.shape == (3, 16, 16)
    assert planes.dtype == np.float32
    for channel, (mean, std) in enumerate(((0.5, 0.5), (0.25, 0.3), (0.1, 0.7))):
        levels = (np.arange(256) * (1 / 255)).astype(np.float32)
        assert np.array_equal(planes[channel].ravel(), (levels - np.float32(mean)) / np.float32(std))


def test_patches_lie_in_order_of_lines_and_of_tokens():
    plane = np.arange(3 * 8 * 8, dtype=np.float32).reshape(3, 8, 8)
    by_line = patches(plane, 2)
    assert by_line.shape == (16, 12)
    assert by_line[5].tolist() == plane[:, 2:4, 2:4].ravel().tolist()
    by_token = qwen_patches(plane, 2, 2)
    assert by_token.shape == (16, 24)
    # The second patch of the first token's second line, then the first of the token right of it.
    assert by_token[3].reshape(3, 2, 2, 2)[:, 1].ravel().tolist() == plane[:, 2:4, 2:4].ravel().tolist()
    assert by_token[4].reshape(3, 2, 2, 2)[:, 0].ravel().tolist() == plane[:, 0:2, 4:6].ravel().tolist()
    # A line and a column that fill no patch are left out.
    assert np.array_equal(patches(np.pad(plane, ((0, 0), (0, 1), (0, 1))), 2), by_line)
