"""The compiled gated delta rule and gated norm: near the reference and float64, and the same bits in whatever steps."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from native_builds import library_for
from native_libraries import each_vector_library
from state_segments import CHUNKS, segments_of, steps_of
from torch import Tensor

from spmd_worker.model_config.layer_config import DeltaConfig
from spmd_worker.ops.kernels.cpu.recurrent import NativeRecurrentKernels
from spmd_worker.ops.kernels.recurrent import DeltaRates, NormRule, RecurrentKernels
from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels

NAN = float("nan")
REFERENCE = ReferenceRecurrentKernels()
SHARED = DeltaConfig(2, 4, 8, 12, 1e-6)
WIDE = DeltaConfig(1, 2, 24, 80, 1e-6, beta_scale=2.0)
CHANNELS = DeltaConfig(2, 2, 20, 16, 1e-6, is_per_channel=True)
BOUNDED = replace(CHANNELS, decay_bound=-2.5)
each_config = pytest.mark.parametrize(
    "config", [SHARED, WIDE, CHANNELS, BOUNDED], ids=["shared", "wide", "channels", "bounded"]
)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def kernels_for(instruction_set: str) -> NativeRecurrentKernels:
    return NativeRecurrentKernels(library_for(instruction_set))


def inputs_of(config: DeltaConfig, num_tokens: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Mixed channels and both gates, as slices of rows."""
    heads, size = config.num_value_heads, config.key_size if config.is_per_channel else 1
    widths = [config.num_channels, heads * size, heads]
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(num_tokens, sum(widths), generator=generator).to(dtype).split_with_sizes(widths, dim=1))


def gates_of(config: DeltaConfig) -> tuple[Tensor, Tensor]:
    generator, heads = torch.Generator().manual_seed(9), config.num_value_heads
    size = config.key_size if config.is_per_channel else 1
    return torch.randn(heads, generator=generator) - 1, torch.randn(heads * size, generator=generator) - 1


def empty_states(config: DeltaConfig, num_slots: int) -> Tensor:
    return torch.full((num_slots, config.num_value_heads, config.key_size, config.value_size), NAN)


def scan_in_steps(
    kernels: RecurrentKernels, config: DeltaConfig, rows: Sequence[list[Tensor]], chunk: int
) -> tuple[list[Tensor], Tensor]:
    """Outputs of each sequence, and the states of all; slots are full of NaN before."""
    states, found = empty_states(config, len(rows) + 1), [[] for _ in rows]  # type: ignore[var-annotated]  # of tensors
    for step in steps_of([len(row[0]) for row in rows], chunk):
        parts = [[each[first : first + count] for each in rows[row]] for row, first, count in step]
        segments = segments_of(*((row + 1, count, first) for row, first, count in step))
        joined = [torch.cat(each) for each in zip(*parts, strict=True)]
        outputs = kernels.scan_delta(joined[0], DeltaRates(*joined[1:], *gates_of(config)), states, segments, config)
        for (row, _, _), part in zip(step, outputs.split([count for _, _, count in step]), strict=True):
            found[row].append(part)
    return [torch.cat(each) for each in found], states[1:]


@each_vector_library
@each_dtype
@each_config
def test_scan_agrees_with_plain_torch(instruction_set: str, dtype: torch.dtype, config: DeltaConfig):
    """A sequence that goes on, one that begins in a slot full of NaN, padding, and a decoding one."""
    segments = segments_of((3, 20, 7), (1, 9, 0), (-1, 2, 5), (0, 1, 64))
    inputs, states = inputs_of(config, 32, dtype), empty_states(config, 5)
    states[[0, 2, 3]] = torch.randn(3, *states.shape[1:], generator=torch.Generator().manual_seed(3))
    expected_states = states.clone()
    expected = REFERENCE.scan_delta(
        inputs[0], DeltaRates(*inputs[1:], *gates_of(config)), expected_states, segments, config
    )
    found = kernels_for(instruction_set).scan_delta(
        inputs[0], DeltaRates(*inputs[1:], *gates_of(config)), states, segments, config
    )
    near = 2e-6 if dtype == torch.float32 else 8e-3
    assert (found - expected).abs().max() <= near * expected.abs().max()
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert torch.equal(states[2], expected_states[2]), "a slot of no sequence changed"
    assert states[4].isnan().all()


@pytest.mark.guarantee("States are the same however a prompt is cut")
@each_dtype
@each_config
def test_scan_steps_do_not_change_bits(dtype: torch.dtype, config: DeltaConfig):
    kernels = kernels_for("native")
    rows = [inputs_of(config, count, dtype, seed=count) for count in (130, 1, 66)]
    expected, states = scan_in_steps(kernels, config, rows, 130)
    assert not states.isnan().any()
    for chunk in CHUNKS:
        found, found_states = scan_in_steps(kernels, config, rows, chunk)
        assert all(map(torch.equal, found, expected)), chunk
        assert torch.equal(found_states, states), chunk
    for row, each in enumerate(rows):
        alone, state = scan_in_steps(kernels, config, [each], 7)
        assert torch.equal(alone[0], expected[row])
        assert torch.equal(state[0], states[row])


@pytest.mark.control("States are the same however a prompt is cut")
def test_comparison_detects_a_forgotten_state():
    kernels, row = kernels_for("native"), inputs_of(SHARED, 20, torch.float32)
    (whole,), _ = scan_in_steps(kernels, SHARED, [row], 20)
    parts = [[each[first : first + 10] for each in row] for first in (0, 10)]
    cut = torch.cat([scan_in_steps(kernels, SHARED, [part], 20)[0][0] for part in parts])
    assert torch.equal(cut[:10], whole[:10])
    assert not torch.equal(cut[10:], whole[10:])


def test_reference_steps_do_not_change_bits():
    rows = [inputs_of(SHARED, count, torch.float32, seed=count) for count in (70, 5)]
    expected, states = scan_in_steps(REFERENCE, SHARED, rows, 70)
    for chunk in (1, 7, 65):
        found, found_states = scan_in_steps(REFERENCE, SHARED, rows, chunk)
        assert all(map(torch.equal, found, expected)), chunk
        assert torch.equal(found_states, states), chunk


def in_float64(config: DeltaConfig, mixed: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and last state of one sequence, by the definition."""
    keys, values = config.num_key_heads, config.num_value_heads
    widths = [keys * config.key_size] * 2 + [values * config.value_size]
    query, key, value = (
        each.double().view(len(mixed), -1, size)
        for each, size in zip(
            mixed.split_with_sizes(widths, dim=1), (config.key_size, config.key_size, config.value_size), strict=True
        )
    )
    query, key = (
        (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(values // keys, dim=1)
        for each in (query, key)
    )
    a_log, dt_bias = (each.double() for each in gates_of(config))
    decay = torch.exp(-a_log.exp() * torch.nn.functional.softplus(a.double() + dt_bias))
    beta = b.double().sigmoid() * config.beta_scale
    state = torch.zeros(values, config.key_size, config.value_size, dtype=torch.float64)
    outputs = []
    for t in range(len(mixed)):
        state = state * decay[t, :, None, None]
        change = (value[t] - torch.einsum("hkv,hk->hv", state, key[t])) * beta[t, :, None]
        state = state + torch.einsum("hk,hv->hkv", key[t], change)
        outputs.append(torch.einsum("hkv,hk->hv", state, query[t]) * config.key_size**-0.5)
    return torch.stack(outputs), state


@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
def test_scan_is_near_float64(beta_scale: float):
    config = DeltaConfig(1, 2, 64, 64, 1e-6, beta_scale=beta_scale)
    inputs = inputs_of(config, 500, torch.float32)
    expected, expected_state = in_float64(config, *inputs)

    def error(of: DeltaConfig) -> float:
        (outputs,), states = scan_in_steps(kernels_for("native"), of, [inputs], 500)
        pairs = ((outputs, expected), (states[0], expected_state))
        return max(float((each - right).abs().max() / right.abs().max()) for each, right in pairs)

    assert error(config) < 1e-6
    # Negative control: a difference of a millionth in one factor.
    assert error(replace(config, beta_scale=beta_scale * (1 + 3e-5))) > 1e-6


def test_scan_of_extreme_gates_is_finite():
    """A state that decays at once or never, keys of zeros, and a NaN that stays NaN."""
    config = DeltaConfig(1, 1, 16, 16, 1e-6)
    for number in (-200.0, -30.0, 30.0, 200.0):
        mixed, a, b = (torch.full((4, width), number) for width in (config.num_channels, 1, 1))
        for given in (mixed, torch.zeros_like(mixed)):
            states, other = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 16, 16)
            found = kernels_for("native").scan_delta(
                given, DeltaRates(a, b, *gates_of(config)), states, segments_of((0, 4, 0)), config
            )
            expected = REFERENCE.scan_delta(
                given, DeltaRates(a, b, *gates_of(config)), other, segments_of((0, 4, 0)), config
            )
            torch.testing.assert_close(found, expected)
            assert found.isfinite().all()
    a[2] = NAN
    found = kernels_for("native").scan_delta(
        mixed, DeltaRates(a, b, *gates_of(config)), states, segments_of((0, 4, 0)), config
    )
    assert found.isnan().any(dim=(1, 2)).tolist() == [False, False, True, True]


def test_threads_do_not_change_scans():
    config, found = DeltaConfig(2, 4, 32, 80, 1e-6), []
    rows, before = [inputs_of(config, count, torch.float32, seed=count) for count in (60, 3)], torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(scan_in_steps(kernels_for("native"), config, rows, 60))
    torch.set_num_threads(before)
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert torch.equal(found[0][1], found[1][1])


def test_scan_rejects_wrong_sizes_and_slots():
    inputs, states = inputs_of(SHARED, 2, torch.float32), empty_states(SHARED, 2)
    for config, segments in (
        (SHARED, segments_of((2, 2, 0))),
        (SHARED, segments_of((0, 3, 0))),
        (replace(SHARED, value_size=10), segments_of((0, 2, 0))),
        (replace(SHARED, is_per_channel=True), segments_of((0, 2, 0))),
    ):
        with pytest.raises(AssertionError):
            kernels_for("native").scan_delta(
                inputs[0], DeltaRates(*inputs[1:], *gates_of(SHARED)), states, segments, config
            )


@each_vector_library
@each_dtype
@pytest.mark.parametrize(("gates_first", "rounds_once"), [(False, False), (True, False), (False, True), (True, True)])
def test_gated_norm_agrees_with_plain_torch(
    instruction_set: str, dtype: torch.dtype, gates_first: bool, rounds_once: bool
):
    kernels, generator = kernels_for(instruction_set), torch.Generator().manual_seed(4)
    x, gate = torch.randn(9, 2 * 60, generator=generator).to(dtype).split(60, dim=1)
    for activation, size in (("silu", 20), ("sigmoid", 60)):
        weight = torch.randn(size, generator=generator).to(dtype)
        rule = NormRule(1e-3, 3, activation, gates_first, rounds_once)
        found, expected = (each.gated_norm(x, gate, weight, rule) for each in (kernels, REFERENCE))
        torch.testing.assert_close(found, expected)
        for row in range(len(x)):
            alone = kernels.gated_norm(x[row : row + 1], gate[row : row + 1], weight, rule)
            assert torch.equal(alone[0], found[row])


@each_config
def test_scan_of_no_tokens_is_empty(config: DeltaConfig):
    states = torch.full((2, config.num_value_heads, config.key_size, config.value_size), NAN)
    for kernels in (REFERENCE, kernels_for("native")):
        inputs = inputs_of(config, 0, torch.float32)
        found = kernels.scan_delta(
            inputs[0], DeltaRates(*inputs[1:], *gates_of(config)), states, segments_of((1, 0, 5)), config
        )
        assert found.shape == (0, config.num_value_heads, config.value_size)
        rows = found.flatten(1)
        weight = torch.ones(config.value_size)
        rule = NormRule(1e-6, config.num_value_heads, "silu", gates_first=False)
        assert kernels.gated_norm(rows, rows, weight, rule).shape == rows.shape
    assert states.isnan().all()
