"""Version of torch's own operators, as far as it decides bits."""

import torch


def torch_version() -> str:
    """Release and the CPU's instruction sets, by which operators choose; a GPU has a region of its own."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
