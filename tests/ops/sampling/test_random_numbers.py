"""Philox against its authors' vectors; what rows draw by as a function of stream, sample and position alone."""

import random

import numpy as np
import pytest
import torch

from spmd_worker.ops.kernels import random as counter_random
from spmd_worker.ops.kernels.random import philox, random_bits

# "kat_vectors" of Random123 1.14 for philox4x32-10: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def run_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    words = philox(
        tuple(np.array([word], dtype=np.uint64) for word in counter),
        tuple(np.array([word], dtype=np.uint64) for word in key),
    )
    return tuple(int(word[0]) for word in words)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_vectors(counter, key, expected):
    assert run_philox(counter, key) == expected


def test_the_vectors_see_one_round_too_few(monkeypatch):
    monkeypatch.setattr(counter_random, "_ROUNDS", 9)
    assert all(run_philox(counter, key) != expected for counter, key, expected in KNOWN)


def test_random_bits_are_the_first_53_of_philox():
    stream, sample, position = 0x299F31D0A4093822, 7, 1234
    first, second, _, _ = run_philox((position, sample, 0, 0), (0xA4093822, 0x299F31D0))
    assert int(random_bits([stream], [sample], [position])[0]) == (first << 32 | second) >> 11


def test_random_bits_depend_on_every_key_alone():
    base = ([5], [0], [0])
    others = [([6], [0], [0]), ([5 + 2**32], [0], [0]), ([5], [1], [0]), ([5], [0], [1])]
    values = [int(random_bits(*each)[0]) for each in [base, *others]]
    assert len(dict.fromkeys(values)) == len(values)
    together = random_bits([5, 6, 5 + 2**32, 5, 5], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1])
    assert together.tolist() == values


def test_random_bits_are_uniform():
    values = random_bits([2**64 - 1] * 20_000, [0] * 20_000, list(range(20_000))) / 2**53
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts, _ = np.histogram(values, bins=100, range=(0, 1))
    chi_square = float(((counts - 200) ** 2 / 200).sum())
    # 99 degrees of freedom: above 161 comes once in ten thousand times, below 49 too.
    assert 49 < chi_square < 161
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_the_hosts_generators_are_neither_read_nor_written():
    def states() -> tuple[object, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    before, first = states(), random_bits([1], [2], [3]).tolist()
    assert states() == before
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert random_bits([1], [2], [3]).tolist() == first
