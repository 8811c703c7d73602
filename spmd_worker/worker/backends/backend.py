"""A device as a backend of the worker: kernels, attention, groups, warm-up, recorded steps, the name of its arithmetic.

A worker has one, by composition. `executor.device_backend` names it: one of ours, or the qualified name of a class of
your own, which is built as `Class(resolved, device)` and may wrap another (tests/worker/test_wrapping_backend.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Final

import torch

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.kernels.api import Kernels, QuantisedKernels
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.groups import ParallelGroups
from spmd_worker.ranks.shared_memory import share_memory
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.runner.model_runner import ModelRunner
from spmd_worker.worker.runner.step_graphs import StepGraphs

_GPU_LIBRARIES: Final = ("triton", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclass(frozen=True, slots=True)
class Operations:
    """Kernels and attention of one model. `quantised` are the kernels again where weights are quantised; `is_native`:
    GEMMs and attention are the compiled kernels', so that torch's own threads have little to do in a step.
    """

    kernels: Kernels
    attention: AttentionBackend
    quantised: QuantisedKernels | None = None
    is_native: bool = False


class DeviceBackend(ABC):
    """One rank's device in one run. The worker calls, in this order: `wrap_groups` when the groups are joined,
    `operations` when it loads the model, `can_record` when it measures memory, `new_graphs` when the cache is there,
    `warm_up` last; `arithmetic` from `operations` on. Each call runs with the device as the current one.
    """

    def __init__(self, resolved: ResolvedRun, device: torch.device) -> None:
        self.resolved, self.device = resolved, device

    @property
    def keeps_state(self) -> bool:
        """Whether the device keeps what steps have in common (`batch_state.py`): where copies to it are not free."""
        return self.device.type != "cpu"

    def wrap_groups(self, groups: ParallelGroups) -> ParallelGroups:
        """The groups with this device's faster or more exact collectives, which `ParallelGroups.destroy` closes. Every
        rank calls this. Ranks that compute on the CPUs of one host share memory.
        """
        if self.device.type != "cpu":
            return groups
        timeout_s = self.resolved.config.executor.timeout_s
        shared = replace(groups, tensor=share_memory(groups.tensor, timeout_s))
        try:
            return replace(shared, pipeline=share_memory(groups.pipeline, timeout_s))
        except BaseException:
            if shared.tensor.fast is not None:
                shared.tensor.fast.close()
            raise

    @abstractmethod
    def operations(self) -> Operations:
        """Kernels and attention for the run's model. Raises ConfigError for what this device cannot compute."""

    def arithmetic(self, attention: AttentionBackend) -> str:
        """The order in which numbers are added, in words: ranks that differ in it compute different bits. A GPU's
        libraries and compilers choose by device and version. The sources of kernels are compared with the rest of the
        code.
        """
        if self.device.type != "cuda":
            return f"torch, {torch.backends.cpu.get_cpu_capability()}"
        major, minor = torch.cuda.get_device_capability(self.device)
        words = [f"torch {torch.__version__} on {torch.cuda.get_device_name(self.device)} (sm_{major}{minor})"]
        words += [f"{name} {version}" for name in _GPU_LIBRARIES if (version := _installed_version(name))]
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch's own is not typed
        precision = torch.get_float32_matmul_precision()
        return ", ".join([*words, f"cuDNN {cudnn}", f"float32 products: {precision}"])

    def can_record(self, tensor: GroupHandle) -> bool:
        """Whether steps may be recorded and launched again: memory for it is set aside then. `tensor` is wrapped."""
        return False

    def new_graphs(self, model: DecoderForCausalLM, tensor: GroupHandle) -> StepGraphs | None:
        """A recorder of steps; None: every step is launched kernel by kernel."""
        return None

    def warm_up(  # noqa: B027  # where a first run costs what every run costs
        self, new_runner: Callable[[StepGraphs | None], ModelRunner], graphs: StepGraphs | None, num_blocks: int
    ) -> None:
        """Run what later steps run, so that the first is like the others. Runners of `new_runner` write into the cache
        of `num_blocks` blocks, which nobody reads yet; what experts count meanwhile is forgotten.
        """


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
