"""Recurrent kernels in plain torch, row by row: the reference for other kernels, and the fallback of devices that have
none.

Uses only operations of torch whose results for a row do not depend on the other rows: element-wise ones and sums over a
whole axis. Matrix multiplication, sigmoid, silu and softplus are not such: the number of elements chooses their kernel
or the tail's exp.

T: tokens; S: sequences; K: taps, C: channels of a convolution.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from spmd_worker.base.numerical_policy import Region, source_version
from spmd_worker.model_config.layer_config import DeltaConfig, MambaConfig
from spmd_worker.ops.kernels.recurrent import DeltaRates, MambaRates, NormRule, StateSegments
from spmd_worker.ops.kernels.torch_version import torch_version

LENGTH_EPSILON: Final = 1e-6
"""Added to the squared length of queries and keys."""


def sigmoid(x: Tensor) -> Tensor:
    """`torch.sigmoid` by operations that are row-wise."""
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """`F.silu` by operations that are row-wise."""
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """`F.softplus` by operations that are row-wise."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))


class SegmentRows(NamedTuple):
    """Rows of one sequence in a step, from `start` to `stop`. Its slot gets what it has after the row before `kept`."""

    slot: int
    start: int
    kept: int
    stop: int
    begins: bool


def segment_rows(segments: StateSegments) -> Iterator[SegmentRows]:
    """Those of every sequence that is no padding."""
    bounds = list(pairwise(segments.starts.tolist()))
    counts = [stop - start for start, stop in bounds] if segments.kept is None else segments.kept.tolist()
    assert len(counts) == len(bounds), segments
    for slot, first, (start, stop), count in zip(
        segments.slots.tolist(), segments.firsts.tolist(), bounds, counts, strict=True
    ):
        if slot >= 0 and start < stop:
            assert 1 <= count <= stop - start, (count, stop - start, slot)
            yield SegmentRows(slot, start, start + count, stop, first == 0)


def unit(x: Tensor, scale: float = 1.0) -> Tensor:
    """Float32 vectors of length `scale` along the last dimension."""
    return x * (scale / torch.sqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPSILON))


def by_head(x: Tensor, count: int) -> Tensor:
    """[T, count * n] -> [T, count, n], also of no tokens."""
    return x.reshape(len(x), count, x.shape[1] // count)


def delta_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor, config: DeltaConfig) -> Tensor:
    """Factors of a state, float32 [T, Hv, dk or 1, 1]."""
    rate = torch.exp(a_log).unsqueeze(-1)
    if config.decay_bound:
        bounded = config.decay_bound * sigmoid(rate * by_head(a.float() + dt_bias, config.num_value_heads))
        return torch.exp(bounded).unsqueeze(-1)
    steps = by_head(softplus(a.float() + dt_bias), config.num_value_heads)
    return torch.exp(-rate * steps).unsqueeze(-1)


class ReferenceRecurrentKernels:
    """Implements `RecurrentKernels` on any device; a host loop over sequences and tokens."""

    def numerics(self) -> Region:
        return Region("plain torch", f"{torch_version()}, {source_version(__file__)}")

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
        taps, out = weight.float(), torch.zeros_like(x)
        num_taps = weight.shape[1]
        for slot, start, kept, stop, begins in segment_rows(segments):
            tail = torch.zeros_like(tails[slot]) if begins else tails[slot]
            rows = torch.cat((tail, x[start:stop]))
            count, wide = stop - start, rows.float()
            y = wide[:count] * taps[:, 0]
            for tap in range(1, num_taps):
                y = y + wide[tap : tap + count] * taps[:, tap]
            y = y if bias is None else y + bias.float()
            out[start:stop] = (silu(y) if has_silu else y).to(x.dtype)
            tails[slot] = rows[kept - start : kept - start + num_taps - 1]
        return out

    def scan_delta(
        self, mixed: Tensor, rates: DeltaRates, states: Tensor, segments: StateSegments, config: DeltaConfig
    ) -> Tensor:
        a, b, a_log, dt_bias = rates
        num_tokens, widths = len(mixed), (config.key_size, config.value_size)
        heads = (config.num_key_heads, config.num_key_heads, config.num_value_heads)
        sizes = [count * size for count, size in zip(heads, (widths[0], *widths), strict=True)]
        query, key, value = (
            by_head(part, count)
            for part, count in zip(mixed.float().split_with_sizes(sizes, dim=-1), heads, strict=True)
        )
        num_shared = config.num_value_heads // config.num_key_heads
        query = (unit(query, config.key_size**-0.5)).repeat_interleave(num_shared, dim=1)
        key = unit(key).repeat_interleave(num_shared, dim=1)
        beta = sigmoid(b.float()).to(b.dtype).float() * config.beta_scale
        decay = delta_decay(a, a_log, dt_bias, config)
        out = mixed.new_zeros(num_tokens, *heads[2:], config.value_size)
        for slot, start, kept, stop, begins in segment_rows(segments):
            state = torch.zeros_like(states[slot]) if begins else states[slot]
            for t in range(start, stop):
                state = state * decay[t]
                change = (value[t] - (state * key[t, :, :, None]).sum(-2)) * beta[t, :, None]
                state = state + key[t, :, :, None] * change[:, None]
                out[t] = (state * query[t, :, :, None]).sum(-2).to(out.dtype)
                if t + 1 == kept:
                    states[slot] = state
        return out

    def scan_mamba(
        self, mixed: Tensor, rates: MambaRates, states: Tensor, segments: StateSegments, config: MambaConfig
    ) -> Tensor:
        dt, a_log, dt_bias, skip = rates
        num_heads, size, num_groups = config.num_heads, config.head_size, config.num_groups
        inner, shared = num_heads * size, num_groups * config.state_size
        x, b, c = mixed.float().split_with_sizes((inner, shared, shared), dim=-1)
        x = x.reshape(len(mixed), num_heads, size)
        b, c = (by_head(each, num_groups).repeat_interleave(num_heads // num_groups, dim=1) for each in (b, c))
        steps = softplus(dt.float() + dt_bias).clamp(*config.dt_limits)
        decays, added = torch.exp(steps * -torch.exp(a_log)), steps.unsqueeze(-1) * x
        out, direct = torch.zeros_like(x), x * skip.unsqueeze(-1)
        for slot, start, kept, stop, begins in segment_rows(segments):
            state = torch.zeros_like(states[slot]) if begins else states[slot]
            for row in range(start, stop):
                state = state * decays[row, :, None, None] + added[row].unsqueeze(-1) * b[row].unsqueeze(1)
                out[row] = (state * c[row].unsqueeze(1)).sum(-1) + direct[row]
                if row + 1 == kept:
                    states[slot] = state
        return out.view(len(mixed), inner).to(mixed.dtype)

    def scan_mamba1(
        self, x: Tensor, shared: Tensor, rates: MambaRates, states: Tensor, segments: StateSegments
    ) -> Tensor:
        dt, a_log, dt_bias, skip = rates
        wide, (b, c), factors = x.float(), shared.float().chunk(2, dim=-1), -torch.exp(a_log)
        steps = softplus(dt.float() + dt_bias)
        out, direct = torch.zeros_like(wide), wide * skip
        for slot, start, kept, stop, begins in segment_rows(segments):
            state = torch.zeros_like(states[slot]) if begins else states[slot]
            for row in range(start, stop):
                added = (steps[row] * wide[row])[:, None] * b[row]
                state = state * torch.exp(steps[row][:, None] * factors) + added
                out[row] = (state * c[row]).sum(-1) + direct[row]
                if row + 1 == kept:
                    states[slot] = state
        return out.to(x.dtype)

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, rule: NormRule) -> Tensor:
        gates = (silu if rule.activation == "silu" else sigmoid)(gate.float())
        rows = x.float() * gates if rule.gates_first else x.float()
        groups = by_head(rows, rule.num_groups)
        groups = groups * torch.rsqrt((groups * groups).mean(-1, keepdim=True) + rule.eps)
        kept = torch.float32 if rule.rounds_once else x.dtype
        weighted = (groups.to(kept) * weight.view(-1, groups.shape[-1])).view(x.shape)
        return (weighted if rule.gates_first else weighted.float() * gates).to(x.dtype)
