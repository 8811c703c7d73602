"""The least that the steps of a job can take on this machine: what each has to multiply at the rate that products reach
here, or what it has to read at the rate at which memory gives it, whichever takes longer.

Both rates are measured in the process that asks, by whichever of several ways is fastest, so that the floor moves with
the machine and with what else runs on it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

_REPEATS = 4
_PRODUCT_ROWS, _PRODUCT_SIZE = 256, 2048
_READ_BYTES = 1 << 27


class Rates(NamedTuple):
    """Of the threads that the process computes with."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(slots=True)
class StepWork:
    """What a step cannot do without: operations of its products and its attention, bytes of weights and of keys and
    values, each read once, however many sequences see them.
    """

    flops: float = 0.0
    num_bytes: float = 0.0

    def add_product(self, num_rows: int, num_weights: int, weight_bytes: int) -> None:
        """Rows by a matrix."""
        self.flops += 2.0 * num_rows * num_weights
        self.num_bytes += weight_bytes

    def add_attention(self, num_tokens: int, context_length: int, layers: "CachedLayers", num_read: int = 0) -> None:
        """The last `num_tokens` of a sequence, which see those before them: keys and values of a sequence are read once
        for all of them. `num_read` of its tokens lie in blocks that are read for another sequence of the step.
        """
        for window, count in layers.num_by_window.items():
            seen = min(context_length, window + num_tokens - 1) if window else context_length
            mean = min(seen - (num_tokens - 1) / 2, window or seen)
            self.flops += 4.0 * count * num_tokens * mean * layers.num_heads * layers.head_size
            # What lies before a window is read for nobody.
            again = max(0, num_read - (context_length - seen))
            self.num_bytes += count * (seen - again) * layers.token_bytes


@dataclass(frozen=True, slots=True)
class CachedLayers:
    """Of this rank: how many layers have each window (0: none), its query heads, and the bytes of one token's key and
    value in one layer.
    """

    num_by_window: dict[int, int]
    num_heads: int
    head_size: int
    token_bytes: float


def floor_s(steps: list[StepWork], rates: Rates) -> float:
    """Of all steps."""
    return sum(max(step.flops / rates.flops_per_s, step.num_bytes / rates.bytes_per_s) for step in steps)


def measure_rates(kernels: Any, dtype: Any) -> Rates:
    """With the kernels that the model computes with, and with torch's own operations."""
    import torch

    with torch.inference_mode():
        x = torch.randn(_PRODUCT_ROWS, _PRODUCT_SIZE).to(dtype)
        square = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE).to(dtype)
        packed = kernels.pack(square)
        product_s = min(_best_s(lambda: kernels.linear(x, packed, None)), _best_s(lambda: x @ square.T))
        tall = torch.zeros(_READ_BYTES // (_PRODUCT_SIZE * dtype.itemsize), _PRODUCT_SIZE, dtype=dtype)
        packed_tall, plain = kernels.pack(tall), torch.zeros(_READ_BYTES // 4)
        one_row = packed_tall.nbytes / _best_s(lambda: kernels.linear(x[:1], packed_tall, None))
    flops = 2.0 * _PRODUCT_ROWS * _PRODUCT_SIZE**2
    return Rates(flops / product_s, max(one_row, plain.nbytes / _best_s(plain.sum)))


def _best_s(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_REPEATS):
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return min(times)
