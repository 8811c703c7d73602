"""Identity of the Triton kernels: their sources, and the compiler's version."""

from pathlib import Path

import triton

from spmd_worker.base.numerical_policy import Region, source_version
from spmd_worker.ops.kernels.triton.launching import is_interpreted


def triton_region() -> Region:
    """A region that these kernels compute. Tiles change no bit: see tiles.py."""
    words = "Triton, interpreted" if is_interpreted() else "Triton"
    return Region(words, f"triton {triton.__version__}, {source_version(str(Path(__file__).parent))}")
