"""Random weights whose full tensors are the same for any number of ranks.

Each value is a function of (checkpoint name, seed, position in the full tensor), not of process, hash seed, threads or
rank, and no global generator is used. Follows "Parallel random numbers: as easy as 1, 2, 3" (Salmon et al., 2011): a
counter-based generator keyed by the name, restarted for each fixed block of positions.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from math import prod, sqrt
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from spmd_worker.model.layers.weight_slice import ModelTensor, Rectangle, WeightSlice
from spmd_worker.model.weights.region import plan_read, split_region
from spmd_worker.model.weights.staging import HOST, HostStaging
from spmd_worker.model.weights.tensor_checks import WHOLE_NUMBERS

# Changing any of the first three changes the weights.
_BLOCK_ELEMENTS = 1 << 16
_EMBEDDING_STD = 0.02
_NORM = re.compile(
    r"(norm(_\d|_f|_embedding)?|post_norm\d|(^|\.)ln_\w+)(\.(norms\.)?\d+)?\.weight$|\.layer_scalar$|\.(router|per_expert)\.?_?scale$",
    re.IGNORECASE,
)
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

    def __init__(
        self,
        tensors: Mapping[str, ModelTensor],
        slices: Iterable[WeightSlice],
        seed: int = 0,
        staging: HostStaging = HOST,
    ) -> None:
        self._tensors, self._seed, self.staging = tensors, seed, staging
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
        *leading, num_outputs, num_inputs = (1, 1, *shape)
        transposed = (*leading, num_inputs, num_outputs)[2:]
        mean, std = mean_and_std(name, transposed if name in self._transposed else shape)
        plan = plan_read(shape, region, _MAX_GAP_ELEMENTS)
        buffer = self.staging.buffer(plan.buffer_shape, torch.float32)
        NormalStream(name, self._seed, shape).fill(buffer.numpy().reshape(-1), plan.runs)
        # Each product and sum is rounded, so a GPU has the same bits.
        return self.staging.sent(buffer)[plan.wanted].mul_(std).add_(mean)

    def is_unused(self, name: str) -> bool:
        del name
        return False


def mean_and_std(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a dummy weight of this checkpoint name and full shape, inputs last."""
    if _NORM.search(name):
        return 1.0, 0.1
    if name.endswith(WHOLE_NUMBERS):
        return 0.0, 0.0
    # Stacked experts have their biases as the rows of a matrix.
    if len(shape) < 2 or name.endswith("_bias"):
        return 0.0, 0.1
    if "embed" in name or name.endswith(("lm_head.weight", "shared.weight", "wte.weight", "wpe.weight")):
        return 0.0, _EMBEDDING_STD
    return 0.0, 1.0 / sqrt(shape[-1])


class NormalStream:
    """Standard normal float32 values, one per position of the full tensor of this name and shape. For one thread."""

    def __init__(self, name: str, seed: int, shape: tuple[int, ...]) -> None:
        digest = blake2b(f"{seed}:{name}".encode(), digest_size=16, person=b"spmd-dummy").digest()
        self._num_elements = prod(shape)
        self._philox = np.random.Philox(key=int.from_bytes(digest, "little"))
        self._generator = np.random.Generator(self._philox)
        # Setting a fresh state takes 1 us, a new generator 60 us, which threads would take one after another.
        self._state = self._philox.state
        self._cached: tuple[int, NDArray[np.float32]] | None = None

    def fill(self, target: NDArray[np.float32], runs: Iterable[tuple[int, int]]) -> None:
        """Fill `target` [n] with the values at the positions (begin, end) of the runs, one run after another."""
        filled = 0
        for begin, end in runs:
            self._fill(target[filled : filled + end - begin], begin)
            filled += end - begin

    def _fill(self, target: NDArray[np.float32], begin: int) -> None:
        filled = 0
        while filled < target.size:
            block, offset = divmod(begin + filled, _BLOCK_ELEMENTS)
            part = target[filled : filled + _BLOCK_ELEMENTS - offset]
            if offset == 0 and part.size == self._size_of(block):
                self._restart(block).standard_normal(out=part, dtype=np.float32)
            else:
                part[:] = self._block(block)[offset : offset + part.size]
            filled += part.size

    def _size_of(self, block: int) -> int:
        return min(_BLOCK_ELEMENTS, self._num_elements - block * _BLOCK_ELEMENTS)

    def _block(self, block: int) -> NDArray[np.float32]:
        # The rows of a column shard are generated in order, several from each block.
        if self._cached is None or self._cached[0] != block:
            values = self._restart(block).standard_normal(self._size_of(block), dtype=np.float32)
            self._cached = block, values
        return self._cached[1]

    def _restart(self, block: int) -> np.random.Generator:
        """The generator at the beginning of a block's values."""
        self._state["state"]["counter"][:] = (0, 0, 0, block)
        self._philox.state = self._state
        return self._generator
