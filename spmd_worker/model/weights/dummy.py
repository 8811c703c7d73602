"""Random weights whose full tensors are the same for any number of ranks.

Each value is a function of (checkpoint name, seed, position in the full tensor), not of process, hash seed, threads or
rank, and no global generator is used. Follows "Parallel random numbers: as easy as 1, 2, 3" (Salmon et al., 2011): a
counter-based generator keyed by the name, restarted for each fixed block of positions.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod, sqrt
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from spmd_worker.model.layers.weight_slice import ModelTensor, Rectangle, WeightSlice
from spmd_worker.model.weights.region import plan_read, split_region

# Changing any of the first three changes the weights.
_BLOCK_ELEMENTS = 1 << 16
_EMBEDDING_STD = 0.02
_NORM = re.compile(r"(norm|(^|\.)ln_\w+)(\.norms\.\d+)?\.weight$", re.IGNORECASE)
# Short rows share a block, so gaps below its size cost nothing; larger gaps are skipped.
_MAX_GAP_ELEMENTS = _BLOCK_ELEMENTS


class DummyWeights:
    """A `WeightSource` of random float32 weights of reasonable scale for `tensors`.

    Matrices ~ N(0, 1 / fan_in), fan_in being the last dimension, or the last but one if `slices` transpose the matrix;
    embeddings and lm_head have a standard deviation of 0.02; norm weights a mean of 1 and a deviation of 0.1; other
    vectors (biases) a mean of 0 and a deviation of 0.1.
    """

    folder = Path("load_format=dummy")
    num_bytes_read = 0

    def __init__(self, tensors: Mapping[str, ModelTensor], slices: Iterable[WeightSlice], seed: int = 0) -> None:
        self._tensors, self._seed = tensors, seed
        self._transposed = {piece.checkpoint_name for piece in slices if piece.is_transposed}
        self._index = {name: index for index, name in enumerate(tensors)}

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        del name
        return torch.float32

    def position(self, name: str) -> tuple[str, int]:
        return "", self._index[name]

    def blocks(self, name: str, region: Rectangle, max_bytes: int) -> Iterator[Rectangle]:
        return split_region(self.shape(name), region, max_bytes // torch.float32.itemsize)

    def read(self, name: str, region: Rectangle) -> torch.Tensor:
        """The same values for any regions, in any thread."""
        shape = self.shape(name)
        *leading, num_outputs, num_inputs = (1, *shape)
        transposed = (*leading, num_inputs, num_outputs)[1:]
        mean, std = mean_and_std(name, transposed if name in self._transposed else shape)
        return torch.from_numpy(NormalStream(name, self._seed, shape).region(region)).mul_(std).add_(mean)

    def is_unused(self, name: str) -> bool:
        del name
        return False


def mean_and_std(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a dummy weight of this checkpoint name and full shape, inputs last."""
    if _NORM.search(name):
        return 1.0, 0.1
    # Stacked experts have their biases as the rows of a matrix.
    if len(shape) < 2 or name.endswith("_bias"):
        return 0.0, 0.1
    if "embed" in name or name.endswith(("lm_head.weight", "wte.weight", "wpe.weight")):
        return 0.0, _EMBEDDING_STD
    return 0.0, 1.0 / sqrt(shape[-1])


@dataclass(slots=True)
class NormalStream:
    """Standard normal float32 values, one per position of the full tensor of this name."""

    name: str
    seed: int
    shape: tuple[int, ...]
    _cached: tuple[int, NDArray[np.float32]] | None = field(default=None)

    def region(self, region: Rectangle) -> NDArray[np.float32]:
        plan = plan_read(self.shape, region, _MAX_GAP_ELEMENTS)
        buffer = np.empty(plan.buffer_shape, dtype=np.float32)
        flat, filled = buffer.reshape(-1), 0
        for begin, end in plan.runs:
            self._fill(flat[filled : filled + end - begin], begin)
            filled += end - begin
        return buffer[plan.wanted]

    def _fill(self, target: NDArray[np.float32], begin: int) -> None:
        filled = 0
        while filled < target.size:
            block, offset = divmod(begin + filled, _BLOCK_ELEMENTS)
            values = self._block(block)[offset : offset + target.size - filled]
            target[filled : filled + values.size] = values
            filled += values.size

    def _block(self, block: int) -> NDArray[np.float32]:
        # The rows of a column shard are generated in order, several from each block.
        if self._cached is None or self._cached[0] != block:
            digest = blake2b(f"{self.seed}:{self.name}".encode(), digest_size=16, person=b"spmd-dummy").digest()
            philox = np.random.Philox(key=int.from_bytes(digest, "little"), counter=[0, 0, 0, block])
            generator = np.random.Generator(philox)
            num_values = min(_BLOCK_ELEMENTS, prod(self.shape) - block * _BLOCK_ELEMENTS)
            self._cached = block, generator.standard_normal(num_values, dtype=np.float32)
        return self._cached[1]
