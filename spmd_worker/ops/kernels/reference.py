"""Kernels in plain torch: the reference for other kernels, and the fallback on devices that have none.

Rounds in the order of Hugging Face's models, so that low-precision results can be compared too.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmd_worker.base.numerical_policy import (
    ACTIVATION,
    ADAPTERS,
    COLUMN_PARALLEL,
    EXPERTS,
    HEAD,
    NORM,
    ROW_PARALLEL,
    SAMPLING,
    STATES,
    Region,
    source_version,
)
from spmd_worker.ops.kernels.adapters import AdapterKernels, ReferenceAdapterKernels
from spmd_worker.ops.kernels.api import (
    PROB_WEIGHT_BITS,
    Draws,
    ExpertKernels,
    ExpertSizes,
    ExpertWeights,
    JoinedExperts,
    Kernels,
    LogitFilters,
    RowHistories,
    StoredPanels,
)
from spmd_worker.ops.kernels.random import random_bits, random_shares
from spmd_worker.ops.kernels.recurrent import RecurrentKernels
from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels
from spmd_worker.ops.kernels.top_k import top_k_of_rows
from spmd_worker.ops.kernels.torch_version import torch_version
from spmd_worker.ranks.leaves import tree_sum

_MAX_BLOCK_ELEMENTS: Final = 1 << 18
_MAX_BLOCK_ELEMENTS_OFF_CPU: Final = 1 << 24
"""Sorted and summed, each takes tens of bytes: some hundred MB in total."""


class ReferenceKernels:
    """Implements `kernels.api.Kernels` on any device."""

    samples_on_device = False

    @property
    def plain(self) -> Kernels:
        return self

    def new_histories(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> RowHistories:
        raise NotImplementedError("rows are processed one by one: sampling/processors.py")

    def numerics(self, dtype: torch.dtype) -> dict[str, Region]:
        del dtype
        plain = Region("plain torch", f"{torch_version()}, {source_version(__file__)}")
        products = (COLUMN_PARALLEL, ROW_PARALLEL, HEAD, EXPERTS)
        return {
            **dict.fromkeys((*products, NORM, ACTIVATION), plain),
            SAMPLING: plain.with_constants(prob_weight_bits=PROB_WEIGHT_BITS),
            STATES: self.recurrent_kernels().numerics(),
            ADAPTERS: self.adapter_kernels().numerics(),
        }

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def empty_packed(self, weight: Tensor, *, is_gated: bool) -> Tensor | None:
        del weight, is_gated
        return None

    def unpack(self, packed: Tensor, start: int, stop: int) -> Tensor:
        return packed.detach()[start:stop]

    def repack_(self, packed: Tensor, start: int, rows: Tensor) -> None:
        packed.detach()[start : start + len(rows)].copy_(rows)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        del out
        return F.linear(x, weight, bias)

    def pack_leaves(self, weight: Tensor) -> Tensor:
        return weight

    def linear_of_leaves(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ends: Sequence[int],
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        del out
        bounds = list(zip((0, *ends), ends))
        assert ends[-1] == x.shape[1], (ends, x.shape)
        sums = [self._leaf_sums(x[:, start:stop], weight[:, start:stop]) for start, stop in bounds]
        if bias is not None:
            sums[0] = sums[0] + bias.float()
        return tree_sum(sums).to(dtype)

    def _leaf_sums(self, x: Tensor, weight: Tensor) -> Tensor:
        """[T, in] x [out, in] -> float32 [T, out]."""
        return F.linear(x.float(), weight.float())

    def pack_heads(self, weight: Tensor) -> Tensor:
        return weight.detach()

    def unpack_heads(self, packed: Tensor) -> Tensor:
        return packed.detach()

    def linear_of_heads(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        for head, of_head in enumerate(weight):
            out[:, head] = self.linear(x[:, head], of_head, None)

    def linear_argmax(self, x: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return self.argmax(self.linear(x, weight, None)[:, :count])

    def argmax_module(self, weight: Tensor) -> nn.Module | None:
        del weight
        return None

    def pack_gated(self, weight: Tensor) -> Tensor:
        return self.pack(weight)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.silu_and_mul(self.linear(x, weight, bias))

    def stored_panels(self, dtype: torch.dtype) -> StoredPanels | None:
        del dtype
        return None

    def expert_kernels(self) -> ExpertKernels | None:
        return None

    def join_experts(self, experts: Mapping[int, ExpertWeights], sizes: ExpertSizes) -> JoinedExperts | None:
        del experts, sizes
        return None

    def adapter_kernels(self) -> AdapterKernels:
        return ReferenceAdapterKernels()

    def recurrent_kernels(self) -> RecurrentKernels:
        return ReferenceRecurrentKernels()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Rounds to the input's dtype before the weight is applied."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
        return weight * x32.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def full_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, offset: float, is_centred: bool
    ) -> Tensor:
        x32 = x.float()
        x32 = x32 - x32.mean(-1, keepdim=True) if is_centred else x32
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * (weight.float() + offset)
        return (x32 if bias is None else x32 + bias.float()).to(x.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`cos` and `sin` have the dtype of `x`."""
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def rotate_once(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.rotate(x.float(), cos, sin).to(x.dtype)

    def add_(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def activate(self, x: Tensor, activation: str) -> Tensor:
        if activation in ("gelu", "gelu_tanh"):
            return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
        if activation in ("relu", "relu2"):
            return x.relu() if activation == "relu" else x.relu().square()
        if activation == "quick_gelu":
            x32 = x.float()
            return (x32 * torch.sigmoid(1.702 * x32)).to(x.dtype)
        assert activation == "silu", activation
        return F.silu(x)

    def activate_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activate(gate, activation) * up

    def bound(self, x: Tensor, cap: float) -> Tensor:
        return ((x.float() / cap).tanh() * cap).to(x.dtype)

    def argmax(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = rows.float().max(dim=-1)
        return values, indices

    def prob_sums(self, logits: Tensor, maxima: Tensor, factors: Tensor) -> Tensor:
        blocks = _row_blocks(logits, maxima, factors)
        return torch.cat([_prob_weights(*each).sum(dim=-1, keepdim=True) for each in blocks])

    def invert_cdf(self, logits: Tensor, maxima: Tensor, factors: Tensor, sums: Tensor, targets: Tensor) -> Tensor:
        found = [
            torch.searchsorted(_prob_weights(*each).cumsum(dim=-1), sought.unsqueeze(1), right=True).squeeze(1)
            for *each, sought in _row_blocks(logits, maxima, factors, targets)
        ]
        return torch.where((targets < 0) | (targets >= sums.sum(dim=-1)), -1, torch.cat(found))

    def count_above(self, logits: Tensor, values: Tensor) -> Tensor:
        rows = _row_blocks(logits, values)
        return torch.cat([(each.float() > limits.unsqueeze(1)).sum(dim=-1) for each, limits in rows])

    def random_bits(self, keys: Tensor, step: int) -> Tensor:
        streams, samples, positions = keys.cpu().unbind()
        bits = random_bits(streams.numpy().view(np.uint64), samples.numpy(), positions.numpy() + step)
        return torch.from_numpy(bits).to(keys.device)

    def draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        maxima, columns = self.argmax(logits)
        sums = self.prob_sums(logits, maxima, draws.factors)
        targets = random_shares(self.random_bits(draws.keys, draws.step), sums.sum(dim=-1))
        found = self.invert_cdf(logits, maxima, draws.factors, sums, targets)
        ids = torch.where(draws.factors > 0, found, columns)
        return ids.masked_fill(~maxima.isfinite(), draws.otherwise), maxima

    def top_logits(self, logits: Tensor, count: int) -> Tensor:
        return top_k_of_rows(logits, count)

    def forbid_(self, logits: Tensor, allowed: Tensor, rows: Tensor, mask_rows: Tensor, first_id: int) -> None:
        ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
        words = F.pad(allowed, (0, max(0, -(-(first_id + logits.shape[1]) // 32) - allowed.shape[1])))
        for row, mask_row in zip(torch.split(rows, 1), torch.split(mask_rows, 1), strict=True):
            is_allowed = words[mask_row][:, ids // 32] >> ids % 32 & 1 == 1
            logits[row] = torch.where(is_allowed, logits[row], -torch.inf)

    def filter_(self, logits: Tensor, filters: LogitFilters) -> None:
        """Sorts each row; the host reads nothing back."""
        for rows, maxima, factors, min_logits, top_k, top_p in _row_blocks(logits, *filters.tensors()):
            ordered = rows.sort(dim=-1, descending=True).values
            has_count = (top_k > 0) & (top_k < rows.shape[1])
            last = ordered.gather(1, (top_k - 1).clamp(0, rows.shape[1] - 1).unsqueeze(1)).squeeze(1)
            least = torch.maximum(min_logits, torch.where(has_count, last, -torch.inf))
            weights = _prob_weights(ordered, maxima, factors).masked_fill_(ordered < least.unsqueeze(1), 0)
            running = weights.cumsum(dim=-1)
            targets = (top_p * running[:, -1].double()).ceil().long().clamp(min=1)
            index = torch.searchsorted(running, targets.unsqueeze(1)).clamp(max=rows.shape[1] - 1)
            nucleus = torch.where(top_p < 1.0, ordered.gather(1, index).squeeze(1), -torch.inf)
            rows.masked_fill_(rows < torch.maximum(least, nucleus).unsqueeze(1), -torch.inf)


def _prob_weights(logits: Tensor, maxima: Tensor, factors: Tensor) -> Tensor:
    powers = ((logits.float() - maxima.unsqueeze(1)) * factors.unsqueeze(1)).double().exp2_()
    return powers.mul_(2.0**PROB_WEIGHT_BITS).to(torch.int64)


def _row_blocks(logits: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    """Blocks of rows, whose size does not change results. On the CPU they are smaller: the system maps the memory of
    large intermediate results again each time.
    """
    most = _MAX_BLOCK_ELEMENTS if logits.is_cpu else _MAX_BLOCK_ELEMENTS_OFF_CPU
    size = max(1, most // max(1, logits.shape[1]))
    return list(zip(*(torch.split(each, size) for each in (logits, *others)), strict=True))
