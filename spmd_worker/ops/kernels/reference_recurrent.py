"""Recurrent kernels in plain torch, row by row: the reference for other kernels, and the fallback of devices that have
none.

Uses only operations of torch whose results for a row do not depend on the other rows: element-wise ones and sums over a
whole axis. Matrix multiplication, sigmoid, silu and softplus are not such: the number of elements chooses their kernel
or the tail's exp.

T: tokens; S: sequences; K: taps, C: channels of a convolution.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from spmd_worker.model_config.layer_config import DeltaConfig, MambaConfig
from spmd_worker.ops.kernels.recurrent import StateSegments


def sigmoid(x: Tensor) -> Tensor:
    """`torch.sigmoid` by operations that are row-wise."""
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """`F.silu` by operations that are row-wise."""
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """`F.softplus` by operations that are row-wise."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))


def segment_rows(segments: StateSegments) -> Iterator[tuple[int, int, int, bool]]:
    """(slot, first row, stop, whether it begins from zeros) of every sequence that is no padding."""
    starts = segments.starts.tolist()
    for slot, first, start, stop in zip(segments.slots.tolist(), segments.firsts.tolist(), starts, starts[1:]):
        if slot >= 0 and start < stop:
            yield slot, start, stop, first == 0


class ReferenceRecurrentKernels:
    """Implements `RecurrentKernels` on any device; a host loop over sequences and tokens."""

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
        for slot, start, stop, begins in segment_rows(segments):
            tail = torch.zeros_like(tails[slot]) if begins else tails[slot]
            rows = torch.cat((tail, x[start:stop]))
            count, wide = stop - start, rows.float()
            y = wide[:count] * taps[:, 0]
            for tap in range(1, num_taps):
                y = y + wide[tap : tap + count] * taps[:, tap]
            y = y if bias is None else y + bias.float()
            out[start:stop] = (silu(y) if has_silu else y).to(x.dtype)
            tails[slot] = rows[len(rows) - num_taps + 1 :]
        return out

    def scan_delta(
        self,
        mixed: Tensor,
        a: Tensor,
        b: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        states: Tensor,
        segments: StateSegments,
        config: DeltaConfig,
    ) -> Tensor:
        raise NotImplementedError

    def scan_mamba(
        self,
        mixed: Tensor,
        dt: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        skip: Tensor,
        states: Tensor,
        segments: StateSegments,
        config: MambaConfig,
    ) -> Tensor:
        raise NotImplementedError

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        *,
        num_groups: int,
        activation: str,
        gates_first: bool,
    ) -> Tensor:
        raise NotImplementedError
