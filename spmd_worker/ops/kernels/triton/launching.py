"""Number of programs of a persistent kernel, properties of the device, and arguments that kernels have in common.

Bits do not depend on it. Under TRITON_INTERPRET=1, which must be set before triton is imported, kernels run on CPU
tensors, one program after another; a few programs then test that several share the work.
"""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from spmd_worker.ops.kernels.recurrent import StateSegments

_INTERPRETED_PROGRAMS = 3


@cache
def num_programs(device: torch.device, per_multiprocessor: int = 1) -> int:
    """Programs of a persistent kernel on `device`."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return per_multiprocessor * int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability of `device`; (0, 0) if kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on `device`; without a limit if kernels are interpreted."""
    if device.type != "cuda":
        return 1 << 30
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the attribute
    return int(properties.shared_memory_per_block_optin)


def is_interpreted() -> bool:
    """Whether kernels run on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def power_of_two(number: int) -> int:
    """The smallest power of two not below `number`, which is 1 or more."""
    return 1 << (number - 1).bit_length()


def segment_arguments(segments: StateSegments) -> tuple[Tensor | None, ...]:
    """Slots, starts, first positions and kept tokens of sequences, the last None where all are kept."""
    kept = segments.kept
    assert kept is None or (kept.dtype == torch.int32 and kept.shape == segments.slots.shape), (kept, segments.slots)
    return segments.slots, segments.starts, segments.firsts, kept
