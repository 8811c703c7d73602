"""Version of torch's own operators, as far as it decides bits."""

import torch


def torch_version() -> str:
    """On the CPU they choose by instruction sets; a GPU and its libraries are a region of their own."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
