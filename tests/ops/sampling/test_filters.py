"""Top-k, top-p and min-p keep exactly the sets that their definitions say; ties stay together."""

import math

import pytest
import torch
from native_builds import native

from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.sampling.filters import filter_logits
from spmd_worker.replica.sequence.sampling_params import SamplingParams

INF = math.inf


def kept(logits: list[float] | torch.Tensor, **sampling: float) -> list[int]:
    """Ids that survive: by the compiled kernels and by plain torch, alone and beside another row."""
    before = torch.as_tensor(logits, dtype=torch.float32).unsqueeze(0)
    found = []
    for kernels in (CpuKernels(native()), ReferenceKernels()):
        values, beside = before.clone(), torch.cat((before.flip(1), before))
        filter_logits(kernels, values, [SamplingParams(**sampling)])
        filter_logits(kernels, beside, [SamplingParams(top_k=1), SamplingParams(**sampling)])
        assert torch.equal(values[0], beside[1]), "a row is cut as if it were alone"
        survivors = torch.nonzero(values[0] > -INF).squeeze(1)
        assert torch.equal(values[0][survivors], before[0][survivors]), "what is kept is not changed"
        found.append(survivors.tolist())
    assert found[0] == found[1]
    return found[0]


def naive_kept(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """By the definitions, one token at a time, in Python's floats; a tie with a token that is kept is kept."""
    values = {index: float(value) for index, value in enumerate(logits) if value > -INF}
    largest = max(values.values())
    values = {index: value for index, value in values.items() if math.exp(value - largest) >= min_p * (1 - 1e-7)}
    if top_k > 0:
        ranked = sorted(values.values(), reverse=True)
        values = {index: value for index, value in values.items() if value >= ranked[:top_k][-1]}
    weights = {index: math.exp(value - largest) for index, value in values.items()}
    total, mass, nucleus, last = sum(weights.values()), 0.0, [], None
    for index in sorted(weights, key=lambda index: -weights[index]):
        if top_p < 1.0 and mass >= top_p * total and values[index] != last:
            break
        mass, last = mass + weights[index], values[index]
        nucleus.append(index)
    return sorted(nucleus)


LOGITS = [2.0, 1.0, 3.0, 1.0, -1.0, 0.0]
"""Probabilities: 0.216, 0.079, 0.586, 0.079, 0.011, 0.029."""


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": -1}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 1}, [2]),
        ({"top_k": 2}, [0, 2]),
        ({"top_k": 3}, [0, 1, 2, 3]),  # 1 and 3 tie for the third place
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 6}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 100}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 1e-9}, [2]),
        ({"top_p": 0.55}, [2]),
        ({"top_p": 0.65}, [0, 2]),
        ({"top_p": 0.83}, [0, 1, 2, 3]),
        ({"top_p": 0.95}, [0, 1, 2, 3]),
        ({"top_p": 0.98}, [0, 1, 2, 3, 5]),
        ({"top_p": 0.995}, [0, 1, 2, 3, 4, 5]),
        ({"min_p": 1.0}, [2]),
        ({"min_p": 0.3}, [0, 2]),
        ({"min_p": 0.13}, [0, 1, 2, 3]),
        ({"min_p": 0.14}, [0, 2]),
        ({"top_k": 2, "top_p": 0.7}, [2]),  # top-p counts what top-k left: 0.73 and 0.27
        ({"top_k": 2, "top_p": 0.74}, [0, 2]),
        ({"min_p": 0.3, "top_k": 5}, [0, 2]),
    ],
)
def test_what_is_kept_of_six_tokens(sampling: dict[str, float], expected: list[int]):
    assert kept(LOGITS, **sampling) == expected


def test_minus_infinity_stays_and_is_not_counted():
    assert kept([-INF, 0.0, -INF, 0.0], top_p=0.6) == [1, 3]
    assert kept([-INF, 0.0, -INF, 0.0], top_k=3) == [1, 3]
    assert kept([-INF, 0.0], min_p=0.5) == [1]


CASES = [
    {"top_k": 5},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.02},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 50, "top_p": 0.99, "min_p": 0.001},
]


@pytest.mark.parametrize("sampling", CASES)
def test_random_logits_are_cut_as_the_definitions_say(sampling: dict[str, float]):
    generator = torch.Generator().manual_seed(0)
    for scale in (0.3, 2.0, 8.0):
        logits = scale * torch.randn(300, generator=generator)
        assert kept(logits, **sampling) == naive_kept(logits, **sampling)


@pytest.mark.parametrize("sampling", CASES)
def test_filters_of_ties_match_definitions(sampling: dict[str, float]):
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        logits = torch.randint(-6, 6, (300,), generator=generator).float()
        assert kept(logits, **sampling) == naive_kept(logits, **sampling)


@pytest.mark.gate("1e-05", "0.1")
@pytest.mark.parametrize("scale", [0.1, 1e-5, 30.0])
def test_filters_of_large_vocabularies_match_definitions(scale: float):
    logits = scale * torch.randn(5000, generator=torch.Generator().manual_seed(2))
    for sampling in ({"top_p": 0.9}, {"top_k": 700}, {"top_k": 4000, "top_p": 0.3}):
        assert kept(logits, **sampling) == naive_kept(logits, **sampling)


def test_temperature_comes_before_the_filters():
    """As of logits that are divided already."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(5))
    for temperature in (0.3, 2.5):
        for sampling in ({"top_p": 0.7}, {"min_p": 0.2}):
            tempered = kept(logits, temperature=temperature, **sampling)
            assert tempered == naive_kept(logits / temperature, **sampling) != naive_kept(logits, **sampling)


def test_the_order_of_equal_tokens_does_not_matter():
    """Permuting the vocabulary permutes what is kept and nothing else."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(-3, 3, (200,), generator=generator).float()
    order = torch.randperm(200, generator=generator)
    for sampling in CASES:
        permuted = kept(logits[order], **sampling)
        assert sorted(order[permuted].tolist()) == kept(logits, **sampling)


def test_top_p_before_top_k_is_detected():
    """Negative control."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(4))
    first = naive_kept(logits, top_p=0.8)
    left = torch.full((300,), -INF)
    left[first] = logits[first]
    assert kept(logits, top_k=50, top_p=0.8) != naive_kept(left, top_k=50)
