"""Kernels of recurrent states, interpreted on CPU tensors: see triton_cases.py, whose process and words these share.

TRITON_INTERPRET=1 python tests/ops/kernels/triton_recurrent_cases.py       prints {case: what went wrong, or ""}
python tests/ops/kernels/triton_recurrent_cases.py cuda                     the same on a GPU
"""

from collections.abc import Callable
from unittest import mock

import torch
from kept_tokens import COUNTS, check_kept
from state_segments import segments_of
from triton_cases import in_gate, report, set_device

from spmd_worker.model_config.layer_config import DeltaConfig, MambaConfig
from spmd_worker.ops.kernels.recurrent import DeltaRates, MambaRates, NormRule
from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels
from spmd_worker.ops.kernels.triton import scan_delta_kernels, scan_mamba_kernels
from spmd_worker.ops.kernels.triton.launching import is_interpreted
from spmd_worker.ops.kernels.triton.recurrent import TritonRecurrentKernels

KERNELS, REFERENCE = TritonRecurrentKernels(), ReferenceRecurrentKernels()
NAN = float("nan")


def convolutions_are_the_references() -> None:
    """Long and short sequences, one that begins in a slot full of NaN, and padding that changes nothing."""
    sizes = ((3, 70, torch.float32), (7, 64, torch.float16), (4, 5, torch.float32))
    for num_taps, num_channels, dtype in sizes[1:] if in_gate() else sizes:
        segments = segments_of((4, 1, 9), (3, 40, 0), (-1, 2, 5), (0, 2, 3), (2, 37, 64))
        x = torch.randn(82, num_channels + 3).to(dtype)[:, 1 : num_channels + 1]
        weight, bias = torch.randn(num_channels, num_taps).to(dtype), torch.randn(num_channels).to(dtype)
        tails = torch.randn(6, num_taps - 1, num_channels).to(dtype)
        tails[3], kept = NAN, torch.ones(82, dtype=torch.bool)
        kept[41:43] = False
        ways = ((None, False), (bias, True))
        # In the gate each size has one of both.
        for added, has_silu in ways[num_taps == 4 :][:1] if in_gate() else ways:
            found, expected = tails.clone(), tails.clone()
            y = KERNELS.short_conv(x, weight, added, found, segments, has_silu=has_silu)
            z = REFERENCE.short_conv(x, weight, added, expected, segments, has_silu=has_silu)
            assert torch.equal(found, expected)
            if has_silu:
                torch.testing.assert_close(y[kept], z[kept])
            else:
                assert torch.equal(y[kept], z[kept])


def a_convolution_cut_anywhere_has_the_same_bits() -> None:
    x, weight, bias = torch.randn(70, 6), torch.randn(6, 4), torch.randn(6)
    whole, tail = (torch.zeros(1, 3, 6) for _ in range(2))
    expected = KERNELS.short_conv(x, weight, bias, whole, segments_of((0, 70, 0)), has_silu=True)
    for chunk in (2, 33, 64):
        parts = [
            KERNELS.short_conv(part, weight, bias, tail, segments_of((0, len(part), first * chunk)), has_silu=True)
            for first, part in enumerate(x.split(chunk))
        ]
        assert torch.equal(torch.cat(parts), expected), chunk
        assert torch.equal(tail, whole), chunk


def scan_inputs(config: DeltaConfig, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    heads, size = config.num_value_heads, config.key_size if config.is_per_channel else 1
    given = torch.randn(num_tokens, config.num_channels + heads * size + heads).to(dtype)
    mixed, a, b = given.split_with_sizes([config.num_channels, heads * size, heads], dim=1)
    return mixed, a, b, torch.randn(heads) - 1, torch.randn(heads * size) - 1


def scans_are_the_references() -> None:
    """Sizes that are no powers of two, padding, a slot full of NaN, and a decoding sequence."""
    segments = segments_of((3, 9, 7), (1, 6, 0), (-1, 2, 5), (0, 1, 64))
    kept = torch.ones(18, dtype=torch.bool)
    kept[15:17] = False
    # Two tiles in the gate.
    size, even = (12, 16) if in_gate() else (40, 32)
    kinds = (
        (DeltaConfig(2, 4, 12, size, 1e-6, beta_scale=2.0), torch.float32),
        (DeltaConfig(1, 2, 16, even, 1e-6, is_per_channel=True, decay_bound=-2.5), torch.float32),
        (DeltaConfig(1, 2, 16, 32, 1e-6, is_per_channel=True), torch.float32),
        (DeltaConfig(2, 2, 16, 16, 1e-6), torch.float16),
    )
    for config, dtype in kinds[:2] if in_gate() else kinds:
        inputs = scan_inputs(config, 18, dtype)
        found = torch.randn(5, config.num_value_heads, config.key_size, config.value_size)
        found[1] = found[4] = NAN
        expected = found.clone()
        y = KERNELS.scan_delta(inputs[0], DeltaRates(*inputs[1:]), found, segments, config)
        z = REFERENCE.scan_delta(inputs[0], DeltaRates(*inputs[1:]), expected, segments, config)
        torch.testing.assert_close(y[kept], z[kept], atol=2e-6 if dtype == torch.float32 else 1e-3, rtol=1e-3)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, equal_nan=True)


def a_scan_cut_anywhere_has_the_same_bits() -> None:
    config = DeltaConfig(1, 2, 8, 8, 1e-6)
    mixed, a, b, *gates = scan_inputs(config, 20, torch.float32)
    whole, state = (torch.full((1, 2, 8, 8), NAN) for _ in range(2))
    expected = KERNELS.scan_delta(mixed, DeltaRates(a, b, *gates), whole, segments_of((0, 20, 0)), config)
    for chunk in (1, 7):
        parts = [
            KERNELS.scan_delta(
                part[0], DeltaRates(*part[1:], *gates), state, segments_of((0, len(part[0]), first * chunk)), config
            )
            for first, part in enumerate(zip(mixed.split(chunk), a.split(chunk), b.split(chunk), strict=True))
        ]
        assert torch.equal(torch.cat(parts), expected), chunk
        assert torch.equal(state, whole), chunk


def gated_norms_are_the_references() -> None:
    for dtype in (torch.float32, torch.float16):
        x, gate = torch.randn(5, 2 * 60).to(dtype).split(60, dim=1)
        for activation, gates_first, once, size in (
            ("silu", False, False, 20),
            ("sigmoid", False, True, 60),
            ("silu", True, False, 60),
            ("silu", True, True, 60),
        ):
            weight = torch.randn(size).to(dtype)
            rule = NormRule(1e-3, 3, activation, gates_first, once)
            found, expected = (each.gated_norm(x, gate, weight, rule) for each in (KERNELS, REFERENCE))
            torch.testing.assert_close(found, expected)


def mamba_inputs(config: MambaConfig, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    given = torch.randn(num_tokens, config.num_channels + config.num_heads).to(dtype)
    mixed, dt = given.split_with_sizes([config.num_channels, config.num_heads], dim=1)
    return mixed, dt, *(torch.randn(config.num_heads) for _ in range(3))


def scans_of_mamba_are_the_references() -> None:
    """Sizes that are no powers of two, padding, a slot full of NaN, a decoding sequence, and bounds of dt."""
    segments = segments_of((3, 9, 7), (1, 6, 0), (-1, 2, 5), (0, 1, 64))
    kept = torch.ones(18, dtype=torch.bool)
    kept[15:17] = False
    kinds = (
        (MambaConfig(4, 12 if in_gate() else 40, 2, 12, 1e-6, dt_limits=(0.3, 0.9)), torch.float32),
        (MambaConfig(2, 16, 1, 16, 1e-6), torch.float16),
    )
    for config, dtype in kinds[:1] if in_gate() else kinds:
        inputs = mamba_inputs(config, 18, dtype)
        found = torch.randn(5, config.num_heads, config.head_size, config.state_size)
        found[1] = found[4] = NAN
        expected = found.clone()
        y = KERNELS.scan_mamba(inputs[0], MambaRates(*inputs[1:]), found, segments, config)
        z = REFERENCE.scan_mamba(inputs[0], MambaRates(*inputs[1:]), expected, segments, config)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-3
        torch.testing.assert_close(y[kept], z[kept], atol=tolerance, rtol=1e-3)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, equal_nan=True)


def a_scan_of_mamba_cut_anywhere_has_the_same_bits() -> None:
    config = MambaConfig(2, 8, 1, 8, 1e-6)
    mixed, dt, *numbers = mamba_inputs(config, 20, torch.float32)
    whole, state = (torch.full((1, 2, 8, 8), NAN) for _ in range(2))
    expected = KERNELS.scan_mamba(mixed, MambaRates(dt, *numbers), whole, segments_of((0, 20, 0)), config)
    for chunk in (1, 7):
        parts = [
            KERNELS.scan_mamba(
                part[0], MambaRates(part[1], *numbers), state, segments_of((0, len(part[0]), first * chunk)), config
            )
            for first, part in enumerate(zip(mixed.split(chunk), dt.split(chunk), strict=True))
        ]
        assert torch.equal(torch.cat(parts), expected), chunk
        assert torch.equal(state, whole), chunk


def scans_of_mamba1_are_the_references() -> None:
    """Sizes that are no powers of two, padding, a slot full of NaN, and a decoding sequence."""
    segments = segments_of((3, 9, 7), (1, 6, 0), (-1, 2, 5), (0, 1, 64))
    kept = torch.ones(18, dtype=torch.bool)
    kept[15:17] = False
    for channels, size, dtype in ((40, 12, torch.float32), (32, 16, torch.float16))[: 1 if in_gate() else 2]:
        given = torch.randn(18, 2 * channels + 2 * size).to(dtype)
        x, dt, shared = given.split_with_sizes([channels, channels, 2 * size], dim=1)
        rates = MambaRates(dt, torch.randn(channels, size), torch.randn(channels), torch.randn(channels))
        found = torch.randn(5, channels, size)
        found[1] = found[4] = NAN
        expected = found.clone()
        y = KERNELS.scan_mamba1(x, shared, rates, found, segments)
        z = REFERENCE.scan_mamba1(x, shared, rates, expected, segments)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-3
        torch.testing.assert_close(y[kept], z[kept], atol=tolerance, rtol=1e-3)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, equal_nan=True)


def a_scan_of_mamba1_cut_anywhere_has_the_same_bits() -> None:
    (x, dt, shared), numbers = (torch.randn(20, 8), torch.randn(20, 8), torch.randn(20, 16)), torch.randn(3, 8)
    gates = (torch.randn(8, 8), *numbers[1:])
    whole, state = (torch.full((1, 8, 8), NAN) for _ in range(2))
    expected = KERNELS.scan_mamba1(x, shared, MambaRates(dt, *gates), whole, segments_of((0, 20, 0)))
    for chunk in (1, 7):
        parts = [
            KERNELS.scan_mamba1(*part, MambaRates(steps, *gates), state, segments_of((0, len(steps), first * chunk)))
            for first, (steps, *part) in enumerate(zip(*(each.split(chunk) for each in (dt, x, shared)), strict=True))
        ]
        assert torch.equal(torch.cat(parts), expected), chunk
        assert torch.equal(state, whole), chunk


def leading_tokens_are_kept() -> None:
    # Interpreted programs take their time one after another.
    tiles = (64, 32) if is_interpreted() else (scan_delta_kernels.BV, scan_mamba_kernels.BP)
    with mock.patch.object(scan_delta_kernels, "BV", tiles[0]), mock.patch.object(scan_mamba_kernels, "BP", tiles[1]):
        for dtype in (torch.float32, torch.float16)[in_gate() :]:
            assert check_kept(KERNELS, dtype, (0, 3) if in_gate() else range(max(COUNTS))) == []


CASES: tuple[Callable[[], None], ...] = (
    *(convolutions_are_the_references, a_convolution_cut_anywhere_has_the_same_bits),
    *(scans_are_the_references, a_scan_cut_anywhere_has_the_same_bits, gated_norms_are_the_references),
    *(scans_of_mamba_are_the_references, a_scan_of_mamba_cut_anywhere_has_the_same_bits),
    *(scans_of_mamba1_are_the_references, a_scan_of_mamba1_cut_anywhere_has_the_same_bits),
    leading_tokens_are_kept,
)


def main() -> None:
    set_device()
    report(CASES)


if __name__ == "__main__":
    main()
