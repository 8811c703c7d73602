"""Random weights that are the same full tensors whatever the number of ranks that hold them.

Each value is a function of (checkpoint name, seed, position in the full tensor): no process, hash seed, thread count
or rank enters, and no generator of the host is read or written. Follows "Parallel random numbers: as easy as 1, 2, 3"
(Salmon et al., 2011): a counter-based generator keyed by the name, started anew for each fixed block of positions.
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from math import prod, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from spmd_worker.model.layers.weight_slice import PaddingSlice, Rectangle, WeightSlice
from spmd_worker.model.weights.coverage import check_parameters
from spmd_worker.model.weights.loader import copy_block, fill_paddings, parameters_by_name, shapes_of
from spmd_worker.model.weights.region import plan_read, split_region
from spmd_worker.native.threads import keep_alone

# Changing either of the first two changes the weights.
_BLOCK_ELEMENTS = 1 << 16
_EMBEDDING_STD = 0.02
_NORM = re.compile(r"(norm|(^|\.)ln_\w+)(\.norms\.\d+)?\.weight$", re.IGNORECASE)
# Rows of less than a block share their blocks, so generating through the gaps is free; larger gaps are skipped.
_MAX_GAP_ELEMENTS = _BLOCK_ELEMENTS
_MAX_BUFFER_ELEMENTS = 1 << 22


def fill_dummy(
    model: nn.Module,
    slices: Sequence[WeightSlice],
    paddings: Sequence[PaddingSlice],
    seed: int = 0,
    num_threads: int = 1,
) -> None:
    """Fill every parameter with random weights of reasonable scale, converted from float32. Idempotent. The values do
    not depend on `num_threads`, which share out the blocks of each tensor and compute alone (`keep_alone`).

    Matrices ~ N(0, 1 / fan_in) with fan_in the last dimension, embeddings and lm_head with a deviation of 0.02,
    weights of norms around 1 with a deviation of 0.1, other vectors (biases) around 0 with a deviation of 0.1.
    Raises CheckpointError when the slices do not cover the parameters exactly once.
    """
    parameters = parameters_by_name(model)
    check_parameters(slices, paddings, shapes_of(parameters))
    pieces = [piece for piece in slices if not piece.is_empty]
    # numpy and torch let other threads run while they fill and copy.
    with ThreadPoolExecutor(num_threads, "dummy-weights", keep_alone) as threads, torch.no_grad():
        for piece in pieces:
            blocks = list(split_region(piece.checkpoint_shape, piece.source, _MAX_BUFFER_ELEMENTS))
            # Neighbours are one thread's: they share blocks of the generator.
            each = -(-len(blocks) // num_threads)
            runs = [blocks[start : start + each] for start in range(0, len(blocks), each)]
            fill = partial(_fill_blocks, parameters[piece.parameter_name], piece, seed)
            # A thread alone would only be waited for.
            list(threads.map(fill, runs) if len(runs) > 1 else map(fill, runs))
        fill_paddings(parameters, paddings)


@torch.no_grad()
def _fill_blocks(parameter: nn.Parameter, piece: WeightSlice, seed: int, blocks: list[Rectangle]) -> None:
    stream = NormalStream(piece.checkpoint_name, seed, piece.checkpoint_shape)
    *leading, num_outputs, num_inputs = (1, *piece.checkpoint_shape)
    turned = (*leading, num_inputs, num_outputs)[1:]
    mean, std = mean_and_std(piece.checkpoint_name, turned if piece.is_transposed else piece.checkpoint_shape)
    for block in blocks:
        values = torch.from_numpy(stream.region(block)).mul(std).add(mean)
        copy_block(parameter, piece, block, values)


def mean_and_std(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a dummy weight, from its checkpoint name and full shape, inputs last."""
    if _NORM.search(name):
        return 1.0, 0.1
    # Biases of stacked experts are as many rows.
    if len(shape) < 2 or name.endswith("_bias"):
        return 0.0, 0.1
    if "embed" in name or name.endswith(("lm_head.weight", "wte.weight", "wpe.weight")):
        return 0.0, _EMBEDDING_STD
    return 0.0, 1.0 / sqrt(shape[-1])


@dataclass(slots=True)
class NormalStream:
    """Standard normal float32 values, one for each position of the full tensor of one name."""

    name: str
    seed: int
    shape: tuple[int, ...]
    _cached: tuple[int, NDArray[np.float32]] | None = field(default=None)

    def region(self, region: Rectangle) -> NDArray[np.float32]:
        """The values of a rectangle of the full tensor, in its shape."""
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
        # Rows of a column shard come in order, several to a block: the last block is most often the next one.
        if self._cached is None or self._cached[0] != block:
            generator = np.random.Generator(np.random.Philox(key=self._key(), counter=[0, 0, 0, block]))
            num_values = min(_BLOCK_ELEMENTS, prod(self.shape) - block * _BLOCK_ELEMENTS)
            self._cached = block, generator.standard_normal(num_values, dtype=np.float32)
        return self._cached[1]

    def _key(self) -> int:
        digest = blake2b(f"{self.seed}:{self.name}".encode(), digest_size=16, person=b"spmd-dummy").digest()
        return int.from_bytes(digest, "little")
