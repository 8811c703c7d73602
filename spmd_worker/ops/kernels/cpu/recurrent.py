"""Compiled kernels of layers with recurrent states on the CPU, float32 and bfloat16. What the library lacks is computed
by the reference.

T: tokens; S: sequences; K: taps, C: channels of a convolution; Hk, Hv: key and value heads; H, P, G, n: heads of
Mamba2, their size, groups, and size of a state.
"""

from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from spmd_worker.base.numerical_policy import Region
from spmd_worker.model_config.layer_config import DeltaConfig, MambaConfig
from spmd_worker.native.library import NativeLibrary
from spmd_worker.native.threads import num_threads
from spmd_worker.native.version import native_version
from spmd_worker.ops.kernels.cpu.panels import NATIVE_DTYPES, check_dtype, check_tensor, contiguous_rows, dtype_name
from spmd_worker.ops.kernels.recurrent import DeltaRates, MambaRates, NormRule, StateSegments
from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels

MAX_TAPS: Final = 16
"""Taps of a convolution, at most, as in native/short_conv.cpp."""
_FUNCTIONS: Final = ("short_conv", "scan_delta", "scan_mamba", "scan_mamba1", "gated_norm")


class NativeRecurrentKernels(ReferenceRecurrentKernels):
    """Implements `RecurrentKernels` for tensors in host memory."""

    def __init__(self, library: NativeLibrary) -> None:
        self._instruction_set = library.instruction_set
        self._functions = {
            (name, dtype): library.functions[f"{name}_{dtype_name(dtype)}"]
            for name in _FUNCTIONS
            for dtype in NATIVE_DTYPES
        }

    def numerics(self) -> Region:
        return Region(f"native {self._instruction_set}", native_version())

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tails: Tensor,
        segments: StateSegments,
        *,
        has_silu: bool,
    ) -> Tensor:
        (num_tokens, num_channels), num_taps = x.shape, weight.shape[1]
        if not 1 < num_taps <= MAX_TAPS:
            return super().short_conv(x, weight, bias, tails, segments, has_silu=has_silu)
        check_dtype(x)
        check_tensor(weight, x.dtype, (num_channels, num_taps))
        check_tensor(tails, x.dtype, (len(tails), num_taps - 1, num_channels))
        if bias is not None:
            check_tensor(bias, x.dtype, (num_channels,))
        addresses = segment_addresses(segments, num_tokens, len(tails))
        x = contiguous_rows(x)
        # Rows of padding sequences are left out.
        output = torch.zeros((num_tokens, num_channels), dtype=x.dtype)
        self._functions["short_conv", x.dtype](
            *(x.data_ptr(), x.stride(0), num_channels, weight.data_ptr(), num_taps),
            *(None if bias is None else bias.data_ptr(), tails.data_ptr(), *addresses),
            *(has_silu, output.data_ptr(), num_threads()),
        )
        return output

    def scan_delta(
        self, mixed: Tensor, rates: DeltaRates, states: Tensor, segments: StateSegments, config: DeltaConfig
    ) -> Tensor:
        a, b, a_log, dt_bias = rates
        num_tokens, num_heads, key_size = len(mixed), config.num_value_heads, config.key_size
        num_steps = num_heads * (key_size if config.is_per_channel else 1)
        check_dtype(mixed, a, b)
        assert mixed.shape[1] == config.num_channels, (mixed.shape, config)
        assert a.shape == (num_tokens, num_steps), (a.shape, config)
        assert b.shape == (num_tokens, num_heads), (b.shape, config)
        check_tensor(a_log, torch.float32, (num_heads,))
        check_tensor(dt_bias, torch.float32, (num_steps,))
        check_tensor(states, torch.float32, (len(states), num_heads, key_size, config.value_size))
        addresses = segment_addresses(segments, num_tokens, len(states))
        mixed, a, b = contiguous_rows(mixed), contiguous_rows(a), contiguous_rows(b)
        output = torch.zeros((num_tokens, num_heads, config.value_size), dtype=mixed.dtype)
        self._functions["scan_delta", mixed.dtype](
            *(mixed.data_ptr(), mixed.stride(0), a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0)),
            *(a_log.data_ptr(), dt_bias.data_ptr(), states.data_ptr(), *addresses),
            *(config.num_key_heads, num_heads, key_size, config.value_size),
            *(config.beta_scale, config.decay_bound, config.is_per_channel, output.data_ptr(), num_threads()),
        )
        return output

    def scan_mamba(
        self, mixed: Tensor, rates: MambaRates, states: Tensor, segments: StateSegments, config: MambaConfig
    ) -> Tensor:
        dt, a_log, dt_bias, skip = rates
        check_dtype(mixed, dt)
        sizes = config.num_heads, config.head_size, config.num_groups, config.state_size
        num_tokens, num_heads = len(mixed), config.num_heads
        assert mixed.shape[1] == config.num_channels, (mixed.shape, config)
        assert dt.shape == (num_tokens, num_heads), (dt.shape, config)
        for each in (a_log, dt_bias, skip):
            check_tensor(each, torch.float32, (num_heads,))
        check_tensor(states, torch.float32, (len(states), num_heads, config.head_size, config.state_size))
        addresses = segment_addresses(segments, num_tokens, len(states))
        mixed, dt = contiguous_rows(mixed), contiguous_rows(dt)
        # Rows of padding sequences are left out.
        output = torch.zeros((num_tokens, num_heads * config.head_size), dtype=mixed.dtype)
        self._functions["scan_mamba", mixed.dtype](
            *(*addresses, *sizes, mixed.data_ptr(), mixed.stride(0), dt.data_ptr(), dt.stride(0)),
            *(a_log.data_ptr(), dt_bias.data_ptr(), skip.data_ptr(), *config.dt_limits),
            *(states.data_ptr(), output.data_ptr(), num_threads()),
        )
        return output

    def scan_mamba1(
        self, x: Tensor, shared: Tensor, rates: MambaRates, states: Tensor, segments: StateSegments
    ) -> Tensor:
        dt, a_log, dt_bias, skip = rates
        check_dtype(x, dt, shared)
        (num_tokens, num_channels), size = x.shape, shared.shape[1] // 2
        assert dt.shape == x.shape, (dt.shape, x.shape)
        assert shared.shape == (num_tokens, 2 * size), (shared.shape, x.shape)
        check_tensor(a_log, torch.float32, (num_channels, size))
        for each in (dt_bias, skip):
            check_tensor(each, torch.float32, (num_channels,))
        check_tensor(states, torch.float32, (len(states), num_channels, size))
        addresses = segment_addresses(segments, num_tokens, len(states))
        x, dt, shared = contiguous_rows(x), contiguous_rows(dt), contiguous_rows(shared)
        # Rows of padding sequences are left out.
        output = torch.zeros((num_tokens, num_channels), dtype=x.dtype)
        self._functions["scan_mamba1", x.dtype](
            *(*addresses, num_channels, size, x.data_ptr(), x.stride(0), dt.data_ptr(), dt.stride(0)),
            *(shared.data_ptr(), shared.stride(0), a_log.data_ptr(), dt_bias.data_ptr(), skip.data_ptr()),
            *(states.data_ptr(), output.data_ptr(), num_threads()),
        )
        return output

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, rule: NormRule) -> Tensor:
        num_groups = rule.num_groups
        size = x.shape[1] // num_groups
        check_dtype(x, gate)
        assert x.shape == gate.shape == (len(x), num_groups * size), (x.shape, gate.shape, num_groups)
        check_tensor(weight, x.dtype, (x.shape[1] if len(weight) == x.shape[1] else size,))
        x, gate = contiguous_rows(x), contiguous_rows(gate)
        output = torch.empty(x.shape, dtype=x.dtype)
        self._functions["gated_norm", x.dtype](
            *(x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), len(x), num_groups, size),
            *(weight.data_ptr(), size if len(weight) == x.shape[1] else 0, rule.eps),
            *(rule.activation == "sigmoid", rule.gates_first, rule.rounds_once, output.data_ptr(), num_threads()),
        )
        return output


def segment_addresses(segments: StateSegments, num_tokens: int, num_slots: int) -> tuple[int | None, ...]:
    """Addresses of slots, starts, first positions and kept tokens, None where all are kept, and the number of
    sequences, as the library takes them. Raises AssertionError if tokens or slots are out of range.
    """
    num_segments, counts = len(segments.slots), segments.kept
    check_tensor(segments.slots, torch.int32, (num_segments,))
    check_tensor(segments.starts, torch.int32, (num_segments + 1,))
    check_tensor(segments.firsts, torch.int32, (num_segments,))
    assert int(segments.starts[-1]) <= num_tokens, (segments, num_tokens)
    assert num_segments == 0 or int(segments.slots.max()) < num_slots, (segments, num_slots)
    if counts is not None:
        check_tensor(counts, torch.int32, (num_segments,))
        rows = zip(segments.slots.tolist(), pairwise(segments.starts.tolist()), counts.tolist(), strict=True)
        # Few rows have drafts: cheaper one by one than with arrays.
        assert all(0 < kept <= stop - start for slot, (start, stop), kept in rows if slot >= 0 and start < stop), (
            segments
        )
    addresses = (each.data_ptr() for each in (segments.slots, segments.starts, segments.firsts))
    return (*addresses, None if counts is None else counts.data_ptr(), num_segments)
