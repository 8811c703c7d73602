"""Interface of a device backend: kernels, attention, groups, warm-up, CUDA graphs, the name of its arithmetic.

`executor.device_backend` names it: one of ours, or the qualified name of your own class, which is built as
`Class(resolved, device)` and may wrap another (tests/worker/test_wrapping_backend.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Final

import torch

from spmd_worker.base.config.speculation import CPU_STEP_TOKENS, GPU_STEP_TOKENS
from spmd_worker.base.numerical_policy import (
    ADAPTERS,
    ATTENTION,
    CHOICE,
    DEVICE,
    EXPERTS,
    LAYERS,
    RANK_SUM,
    ROW_PARALLEL,
    SAMPLING,
    STATES,
    NumericalPolicy,
    Region,
)
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.numerics import layers_region
from spmd_worker.model.weights.sharded_state import placement_digest
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.kernels.api import Kernels, QuantisedKernels
from spmd_worker.ops.sampling.numerics import choice_region
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.groups import ParallelGroups
from spmd_worker.ranks.shared_memory import share_memory
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.runner.model_runner import ModelRunner
from spmd_worker.worker.runner.step_graphs import StepGraphs

_GPU_LIBRARIES: Final = ("triton", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclass(frozen=True, slots=True)
class Operations:
    """Kernels and attention of one model. `quantised` are the same kernels if weights are quantised. `is_native`: GEMMs
    and attention use the compiled kernels, so torch's own threads have little to do in a step. `decodes_experts`: the
    kernels compute MXFP4 and FP8 experts as they are stored.
    """

    kernels: Kernels
    attention: AttentionBackend
    quantised: QuantisedKernels | None = None
    is_native: bool = False
    decodes_experts: bool = False


class DeviceBackend(ABC):
    """One rank's device in one run. The worker calls, in this order: `wrap_groups` when the groups are joined,
    `operations` when it loads the model, `compile_ahead` before it measures memory and `can_record` when it does,
    `new_graphs` when the cache is allocated, `warm_up` last; `arithmetic` any time after `operations`. The device is
    the current one in each call.
    """

    def __init__(self, resolved: ResolvedRun, device: torch.device) -> None:
        self.resolved, self.device = resolved, device

    @property
    def keeps_state(self) -> bool:
        """Whether copies to the device have a cost, so that it keeps what steps have in common (`batch_state.py`)."""
        return self.device.type != "cpu"

    def wrap_groups(self, groups: ParallelGroups) -> ParallelGroups:
        """The groups with this device's faster or exact collectives, which `ParallelGroups.destroy` closes; every rank
        calls this. By default CPU ranks add by a tree, and those of one host share memory.
        """
        if self.device.type != "cpu":
            return groups
        groups = replace(groups, tensor=replace(groups.tensor, adds_by_tree=True))
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
        """Kernels and attention for the run's model; an argmax module applies `executor.argmax_screen`. Raises
        ConfigError for a model that this device cannot compute.
        """

    def unsupported(self) -> str | None:
        """The backend's lack for the run's model or device, as the end of a sentence; None if it has all.
        `executor.device_backend=auto` asks it.
        """
        return None

    def arithmetic(self, attention: AttentionBackend) -> str:
        """Name of the order in which numbers are added: ranks that differ in it compute different bits. On a GPU it
        depends on the device and the versions of libraries. Kernel sources are compared with the rest of the code.
        """
        return self._device_words()

    @property
    def step_tokens(self) -> int:
        """Tokens that a step computes while it reads the weights: more cost time."""
        return GPU_STEP_TOKENS if self.device.type == "cuda" else CPU_STEP_TOKENS

    def _device_words(self) -> str:
        if self.device.type != "cuda":
            return f"torch, {torch.backends.cpu.get_cpu_capability()}"
        major, minor = torch.cuda.get_device_capability(self.device)
        words = [f"torch {torch.__version__} on {torch.cuda.get_device_name(self.device)} (sm_{major}{minor})"]
        words += [f"{name} {version}" for name in _GPU_LIBRARIES if (version := _installed_version(name))]
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch's own is not typed
        precision = torch.get_float32_matmul_precision()
        return ", ".join([*words, f"cuDNN {cudnn}", f"float32 products: {precision}"])

    def numerical_policy(self, operations: Operations, tensor: GroupHandle) -> NumericalPolicy:
        """The run's regions, by what the parts in use state of themselves. `tensor` is the wrapped group."""
        resolved, model_config = self.resolved, self.resolved.model_config
        quantised, layers = operations.quantised, model_config.layers
        has_experts = any(layer.experts is not None for layer in layers)
        regions = operations.kernels.numerics(getattr(torch, resolved.dtype))
        is_there = {
            EXPERTS: has_experts,
            STATES: model_config.has_states,
            ADAPTERS: resolved.config.model.adapter_limits is not None,
            SAMPLING: model_config.pooling is None,
        }
        regions = {name: region for name, region in regions.items() if is_there.get(name, True)}
        has_plain_sums = has_experts or model_config.has_states or any(layer.latent is not None for layer in layers)
        is_exact = quantised is not None and quantised.integer is not None and not has_plain_sums
        num_leaves = resolved.layout.num_leaves
        regions[ROW_PARALLEL] = regions[ROW_PARALLEL].with_constants(leaves=num_leaves)
        if SAMPLING in regions:
            regions[CHOICE] = choice_region()
        experts = resolved.layout.experts
        if has_experts and experts is not None and not experts.is_exact:
            regions[EXPERTS] = regions[EXPERTS].with_constants(owners=placement_digest(experts))
        regions |= {
            ATTENTION: operations.attention.numerics(),
            RANK_SUM: tensor.numerics(num_leaves, is_exact=is_exact),
            LAYERS: layers_region(),
            DEVICE: Region(self._device_words(), "", {"dtype": resolved.dtype}),
        }
        return NumericalPolicy(regions)

    def can_record(self, tensor: GroupHandle) -> bool:
        """Whether steps may be recorded as graphs, for which memory is reserved then. `tensor` is the wrapped group."""
        return False

    def new_graphs(
        self, model: DecoderForCausalLM, tensor: GroupHandle, adapters: LoadedAdapters | None = None
    ) -> StepGraphs | None:
        """Graphs of steps, whose rows may have `adapters`; None if every step is launched kernel by kernel."""
        return None

    @property
    def compiles_ahead(self) -> bool:
        """Whether `compile_ahead` does anything."""
        return False

    def compile_ahead(self, new_runner: Callable[[], ModelRunner], num_blocks: int, num_threads: int) -> str:
        """Compile kernels that steps launch, in threads, before any step runs. Runners use a cache of `num_blocks`
        blocks. Returns what was done in words, for the log.
        """
        raise NotImplementedError

    def warm_up(  # noqa: B027  # optional
        self, new_runner: Callable[[StepGraphs | None], ModelRunner], graphs: StepGraphs | None, num_blocks: int
    ) -> None:
        """Run once what later steps run, so that the first is as fast as others. Runners of `new_runner` write into the
        cache of `num_blocks` blocks, which is still unused; expert counts are reset afterwards.
        """


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
