"""The triton backend, interpreted, with small tiles whose steps pass no leaf's end: a device backend that the ranks of
an engine import by its name.
"""

from small_steps import use_small_steps

from spmd_worker.ops.kernels.triton import matmul, tiles
from spmd_worker.worker.backends.triton import TritonDevice

use_small_steps()
# Interpreted, a step is one numpy product: it has to be the same for all leaves.
matmul.FLOAT32 = tiles.Tile(64, 64, 32, 4, 2, False, False, False)


class SmallLeaves(TritonDevice):
    """`TritonDevice`."""
