"""Recurrent kernels that keep the leading tokens of their segments, beside segments cut there."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from state_segments import segments_of
from torch import Tensor

from spmd_worker.model_config.layer_config import DeltaConfig, MambaConfig
from spmd_worker.ops.kernels.recurrent import DeltaRates, MambaRates, RecurrentKernels, StateSegments

SLOTS, COUNTS, FIRSTS = (3, 0, -1, 4, 1), (5, 4, 2, 1, 0), (0, 9, 3, 64, 5)
"""One begins in a slot of NaN, one is padding, one has a token, and one none."""
NUM_SLOTS, NUM_TAPS, NUM_CHANNELS = 6, 4, 70
DELTAS = (DeltaConfig(1, 1, 8, 72, 1e-6), DeltaConfig(1, 2, 6, 8, 1e-6, is_per_channel=True))
MAMBA = MambaConfig(2, 18, 1, 12, 1e-6)


class Case(NamedTuple):
    """A kernel with its weights: `call(given, states, segments)`, inputs of all tokens, and states of all slots."""

    name: str
    call: Callable[[list[Tensor], Tensor, StateSegments], Tensor]
    given: list[Tensor]
    states: Tensor


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def inputs(*widths: int, dtype: torch.dtype) -> list[Tensor]:
    return [numbers(sum(COUNTS), width, dtype=dtype, seed=seed) for seed, width in enumerate(widths)]


def convolution(kernels: RecurrentKernels, dtype: torch.dtype) -> Case:
    weight, bias = numbers(NUM_CHANNELS, NUM_TAPS, dtype=dtype), numbers(NUM_CHANNELS, dtype=dtype)

    def call(given: list[Tensor], tails: Tensor, segments: StateSegments) -> Tensor:
        return kernels.short_conv(*given, weight, bias, tails, segments, has_silu=True)

    tails = numbers(NUM_SLOTS, NUM_TAPS - 1, NUM_CHANNELS, dtype=dtype, seed=5)
    return Case("short_conv", call, inputs(NUM_CHANNELS, dtype=dtype), tails)


def delta(kernels: RecurrentKernels, dtype: torch.dtype, config: DeltaConfig) -> Case:
    heads = config.num_value_heads
    num_steps = heads * (config.key_size if config.is_per_channel else 1)

    def call(given: list[Tensor], states: Tensor, segments: StateSegments) -> Tensor:
        return kernels.scan_delta(
            given[0], DeltaRates(*given[1:], numbers(heads), numbers(num_steps)), states, segments, config
        )

    states = numbers(NUM_SLOTS, heads, config.key_size, config.value_size, seed=5)
    return Case(
        f"scan_delta {config.value_size}", call, inputs(config.num_channels, num_steps, heads, dtype=dtype), states
    )


def mamba(kernels: RecurrentKernels, dtype: torch.dtype) -> Case:
    heads = MAMBA.num_heads

    def call(given: list[Tensor], states: Tensor, segments: StateSegments) -> Tensor:
        weights = (numbers(heads, seed=seed) for seed in range(3))
        return kernels.scan_mamba(given[0], MambaRates(given[1], *weights), states, segments, MAMBA)

    states = numbers(NUM_SLOTS, heads, MAMBA.head_size, MAMBA.state_size, seed=5)
    return Case("scan_mamba", call, inputs(MAMBA.num_channels, heads, dtype=dtype), states)


def mamba1(kernels: RecurrentKernels, dtype: torch.dtype) -> Case:
    channels, size = MAMBA.num_columns, MAMBA.state_size

    def call(given: list[Tensor], states: Tensor, segments: StateSegments) -> Tensor:
        weights = (numbers(channels, size), numbers(channels, seed=1), numbers(channels, seed=2))
        x, dt, shared = given
        return kernels.scan_mamba1(x, shared, MambaRates(dt, *weights), states, segments)

    states = numbers(NUM_SLOTS, channels, size, seed=5)
    return Case("scan_mamba1", call, inputs(channels, channels, 2 * size, dtype=dtype), states)


def cases_of(kernels: RecurrentKernels, dtype: torch.dtype) -> Iterator[Case]:
    yield convolution(kernels, dtype)
    yield from (delta(kernels, dtype, config) for config in DELTAS)
    yield mamba(kernels, dtype)
    yield mamba1(kernels, dtype)


def kept_counts(shifts: Iterable[int] = range(max(COUNTS))) -> Iterator[list[int]]:
    """Kept counts of the sequences: each of them 1 token to all, or `shifts` of these; 0 of padding, never read."""
    for shift in shifts:
        yield [shift % count + 1 if slot >= 0 and count else 0 for slot, count in zip(SLOTS, COUNTS, strict=True)]


def check_kept(kernels: RecurrentKernels, dtype: torch.dtype, shifts: Iterable[int] = range(max(COUNTS))) -> list[str]:
    """What differs in a bit, by kernel and kept tokens: outputs from those of whole segments, states and tails from
    those of segments cut at the kept tokens.
    """
    wrong, whole = [], segments_of(*zip(SLOTS, COUNTS, FIRSTS, strict=True))
    is_real = (torch.tensor(SLOTS) >= 0).repeat_interleave(torch.tensor(COUNTS))
    for name, call, given, states in cases_of(kernels, dtype):
        states[SLOTS[0]] = float("nan")
        expected = call(given, states.clone(), whole)
        for kept in kept_counts(shifts):
            found, cut = states.clone(), states.clone()
            outputs = call(given, found, replace(whole, kept=torch.tensor(kept, dtype=torch.int32)))
            leading = [
                torch.cat([row[:count] for row, count in zip(each.split(COUNTS), kept, strict=True)]) for each in given
            ]
            call(leading, cut, segments_of(*zip(SLOTS, kept, FIRSTS, strict=True)))
            assert not cut[list(set(SLOTS) - {-1})].isnan().any()
            if not torch.equal(outputs[is_real], expected[is_real]):
                wrong.append(f"{name}: outputs, {kept} kept")
            if not torch.equal(found, cut):
                wrong.append(f"{name}: states, {kept} kept")
    return wrong


class ForgetsKept:
    """The kernels, with states and tails after all tokens of a segment whatever is to be kept."""

    def __init__(self, kernels: RecurrentKernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        def call(*arguments: object, **options: object) -> Tensor:
            given = [replace(each, kept=None) if isinstance(each, StateSegments) else each for each in arguments]
            result: Tensor = getattr(self._kernels, name)(*given, **options)
            return result

        return call


def check_control(kernels: RecurrentKernels, dtype: torch.dtype) -> None:
    """Kernels that forget what is to be kept differ in every state, and in no output."""
    names = [case.name for case in cases_of(kernels, dtype)]
    wrong = check_kept(ForgetsKept(kernels), dtype)  # type: ignore[arg-type]  # has them by __getattr__
    assert wrong == [f"{name}: states, {kept} kept" for name in names for kept in kept_counts()], wrong
