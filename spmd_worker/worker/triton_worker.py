"""A worker that computes with our kernels in Triton:
`executor.worker_cls=spmd_worker.worker.triton_worker.TritonWorker`.

Not the default on CUDA until a GPU has run them: docs/decisions.md.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

import torch
from torch import nn

from kv_cache.block import num_blocks_for
from kv_cache.cache_engine import CacheEngine
from kv_cache.cache_sizing import MemoryMeasurement
from spmd_worker.base.errors import ConfigError
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.triton import HEAD_SIZES, TritonBackend, TritonFixedAttention
from spmd_worker.ops.kernels.api import Kernels, QuantisedKernels
from spmd_worker.ops.kernels.triton import attention, attention_kernels, matmul
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.ops.kernels.triton.launching import is_interpreted
from spmd_worker.ops.kernels.triton.peer_sums import PeerSums, SymmetricMemory, half_bytes
from spmd_worker.ops.sampling.row import SampleRow
from spmd_worker.ops.sampling.token_masks import TokenMasks
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.replica.grammar.row_grammar import BITS
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.memory.device import is_on_any_rank
from spmd_worker.worker.runner.step_graphs import CudaGraphs, StepGraph, StepGraphs
from spmd_worker.worker.runner.warm_up_steps import greedy_step, warm_up_steps
from spmd_worker.worker.sleep import GoingToSleep
from spmd_worker.worker.worker import Worker

logger = logging.getLogger(__name__)

_MOST_PEER_BYTES: Final = 1 << 26
"""A sum of more is cut into pieces."""
_Made = TypeVar("_Made")
_WAY_OUT = "leave executor.worker_cls at null"
_KEY = "executor.worker_cls=spmd_worker.worker.triton_worker.TritonWorker"


class TritonWorker(Worker):
    """On CUDA; on the CPU where TRITON_INTERPRET=1 was set before Triton was imported, for tests."""

    keeps_state = True

    def __init__(self, resolved: ResolvedRun, environment: RankEnvironment) -> None:
        super().__init__(resolved, environment)
        self._graphs: StepGraphs | None = None
        """What this worker's steps are launched by, once the cache is there."""

    def init_device(self) -> None:
        """See `Worker.init_device`. Ranks add up in their order, so that a row's answer depends on the row alone with
        tensor parallelism too: `GroupHandle.all_reduce` says what that costs.
        """
        super().init_device()
        assert self.groups is not None, "just joined"
        tensor = replace(self.groups.tensor, adds_in_order=True)
        if tensor.size > 1 and self.device.type == "cuda":
            with self.on_device():
                tensor = replace(tensor, fast=self._peer_sums(tensor, self.groups.control))
        self.groups = replace(self.groups, tensor=tensor)

    def _peer_sums(self, tensor: GroupHandle, control: GroupHandle) -> PeerSums | None:
        """Sums over memory that the GPUs see of each other; None, on every rank, where they do not."""
        assert tensor.group is not None, tensor
        most = self.config.scheduler.max_num_batched_tokens * self.model_config.hidden_size * 4
        room_bytes = min(most, _MOST_PEER_BYTES)
        num_bytes = 2 * half_bytes(room_bytes, tensor.size)
        own = _on_all_ranks(control, lambda: SymmetricMemory.allocate(num_bytes, self.device))
        group = tensor.group
        memory = None if own is None else _on_all_ranks(control, lambda: SymmetricMemory(group, own))
        return None if memory is None else PeerSums(memory, tensor.rank, room_bytes)

    def compile_or_warm_up_model(self) -> None:
        """See `WorkerBase.compile_or_warm_up_model`. Compiles every kernel that a later step can launch, in each form
        that Triton tells apart: which tiles a matmul takes follows from whether it has more than a few rows, so a step
        of few and one of more meet all. What is written into the cache nobody reads.

        Not met are the joining of partial results where rows are pooled, which the first row compiles that ends with a
        chunk of one token behind a long beginning; and, of experts that ranks hold whole, those that no made-up token
        is sent to, whose matmuls have forms of their own only where no other layer's are alike.
        """
        assert self._cache_engine is not None, "initialize_cache comes first"
        runner, pooling = self._new_runner(self._cache_engine), self.model_config.pooling
        num_tokens = min(matmul.MOST_FEW_ROWS + 1, self.config.scheduler.max_num_batched_tokens)
        num_keys = 1 if pooling is not None else max(1, min(attention_kernels.SEGMENT + 1, self.max_model_len - 1))
        sizes = (num_tokens, num_keys, self.config.cache.block_size, self._cache_engine.num_device_blocks)
        for number, scheduled in enumerate(warm_up_steps(*sizes, pooling)):
            runner.forward(number, scheduled)
            runner.sample()
        self._warm_up_masks()
        self._forget_expert_loads()
        self._record_decoding()

    def _record_decoding(self) -> None:
        """The graphs of steps in which rows decode and no more, the largest first: smaller ones find its memory. Other
        steps' are recorded when they are met.
        """
        if self._graphs is None:
            return
        assert self._cache_engine is not None, "initialize_cache comes first"
        runner = self._new_runner(self._cache_engine)
        runner.graphs = self._graphs
        most, block_size = self.config.scheduler.max_num_seqs, self.config.cache.block_size
        counts = [size for size in self._graphs.sizes if size < most]
        for number, count in enumerate((most, *reversed(counts))):
            runner.forward(number, greedy_step(count, block_size, self._cache_engine.num_device_blocks))
            runner.sample()

    def commit_sleep(self, staged: GoingToSleep) -> dict[str, int]:
        """See `Worker.commit_sleep`. Graphs go: what wakes up is elsewhere in the device's memory."""
        if self._graphs is not None:
            self._graphs.forget()
        return super().commit_sleep(staged)

    def apply_model(self, function: Callable[[nn.Module], Any]) -> Any:
        """See `Worker.apply_model`."""
        try:
            return super().apply_model(function)
        finally:
            self._look_at_addresses()

    def end_weight_update(self) -> None:
        """See `Worker.end_weight_update`."""
        super().end_weight_update()
        self._look_at_addresses()

    def reload_weights(self, folder: str | None = None) -> None:
        """See `Worker.reload_weights`."""
        super().reload_weights(folder)
        self._look_at_addresses()

    def get_model(self) -> nn.Module:
        """See `Worker.get_model`. Who has it may put weights elsewhere."""
        self._look_at_addresses()
        return super().get_model()

    def shutdown(self) -> None:
        """See `Worker.shutdown`."""
        self._graphs = None
        super().shutdown()

    def _look_at_addresses(self) -> None:
        if self._graphs is not None:
            self._graphs.look_at_addresses()

    def _start_on(self, engine: CacheEngine, num_device_blocks: int) -> None:
        super()._start_on(engine, num_device_blocks)
        new_graph = self._new_graph() if self._can_record() else None
        if new_graph is None:
            return
        assert isinstance(self._attention, TritonBackend), self._attention
        assert self.groups is not None, "init_device comes first"
        assert self._model is not None, "load_model comes first"
        assert self.model_runner is not None, "just made"
        scheduler, block_size, fast = self.config.scheduler, self.config.cache.block_size, self.groups.tensor.fast
        most, max_seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        max_blocks = num_blocks_for(self.max_model_len, block_size)
        attention = TritonFixedAttention(most, max_seqs, max_blocks, block_size, self.device)
        start_anew = fast.start_anew if isinstance(fast, PeerSums) else None
        self._graphs = StepGraphs(self._model, attention, new_graph, most, max_seqs, start_anew)
        self.model_runner.graphs = self._graphs

    def _new_graph(self) -> Callable[[], StepGraph] | None:
        """What makes graphs; None where kernels are interpreted, which is no device's work."""
        return CudaGraphs() if self.device.type == "cuda" else None

    def _can_record(self) -> bool:
        """Whether steps launch the same, whatever is in them. Experts are called one by one, after their tokens were
        counted; sums through NCCL may wait on the host; what pools is computed in large chunks, which keep a GPU busy.
        """
        if self.config.executor.enforce_eager or self.model_config.pooling is not None:
            return False
        has_experts = any(layer.experts is not None for layer in self.model_config.layers)
        assert self.groups is not None, "init_device comes first"
        tensor = self.groups.tensor
        return not has_experts and (tensor.size == 1 or isinstance(tensor.fast, PeerSums))

    def _measure(self) -> MemoryMeasurement:
        """What graphs hold beside: the memory of the largest step that is recorded, at most as much as was measured."""
        measurement = super()._measure()
        if not self._can_record():
            return measurement
        return replace(measurement, activation_bytes=2 * measurement.activation_bytes)

    def _warm_up_masks(self) -> None:
        """What a form forbids: two greedy rows, one reported, so that shards and whole rows are met."""
        model, groups = self._model, self.groups
        assert model is not None, "load_model comes first"
        assert groups is not None, "init_device comes first"
        if not model.stage.is_last or model.pooler is not None:
            return
        vocab_size = self.model_config.vocab_size
        rows = [SampleRow(SamplingParams(temperature=0.0, logprobs=wanted), 0, 0, 1, (0,), ()) for wanted in (None, 1)]
        allowed = torch.full((2, -(-vocab_size // BITS)), -1, dtype=torch.int32, device=self.device)
        hidden = torch.zeros(
            (2, self.model_config.hidden_size), dtype=getattr(torch, self.resolved.dtype), device=self.device
        )
        with torch.inference_mode():
            logits = model.compute_logits(hidden)
            self._new_sampler(model, groups).sample(logits, rows, TokenMasks(allowed, {0: 0, 1: 1}))

    def get_arithmetic(self) -> str:
        """See `WorkerBase.get_arithmetic`."""
        kernels = f"Triton kernels{' interpreted' if is_interpreted() else ''}"
        order = ", sums in the order of ranks" if self.layout.tensor_parallel_size > 1 else ""
        return f"{kernels}{order}, {super().get_arithmetic()}"

    def _choose_backends(self) -> tuple[Kernels, AttentionBackend, QuantisedKernels | None]:
        """Raises ConfigError for what these kernels cannot compute."""
        if is_interpreted() != (self.device.type == "cpu"):
            raise ConfigError(f"{_KEY} computes on CUDA: use device=cuda, or {_WAY_OUT}")
        if self.config.model.quantization is not None:
            raise ConfigError(f"{_KEY} computes with weights as they are: leave model.quantization at null")
        if is_interpreted() and self.resolved.dtype == "bfloat16":
            raise ConfigError(f"{_KEY}: Triton's interpreter has no bfloat16: use model.dtype=float32")
        if self.model_config.is_encoder:
            raise ConfigError(
                f"{_KEY} computes causal attention, and {self.model_config.architecture} is an encoder, whose tokens "
                f"see those behind them too: {_WAY_OUT}"
            )
        for layer in self.model_config.layers:
            group = layer.num_heads // layer.num_kv_heads
            if layer.head_size not in HEAD_SIZES or group > attention_kernels.ROWS:
                raise ConfigError(
                    f"{_KEY} takes heads of {HEAD_SIZES[0]} to {HEAD_SIZES[-1]} and at most {attention_kernels.ROWS} "
                    f"query heads a key-value head, not {layer.head_size} and {group}: {_WAY_OUT}"
                )
        if self.device.type == "cuda":
            self._check_shared_memory()
        return TritonKernels(), TritonBackend(), None

    def _check_shared_memory(self) -> None:
        """Raises ConfigError for a GPU whose shared memory cannot hold the tiles: the first launch would fail."""
        itemsize = getattr(torch, self.resolved.dtype).itemsize
        largest = max(layer.head_size for layer in self.model_config.layers)
        needed = max(attention.shared_bytes(largest, itemsize), matmul.shared_bytes(itemsize))
        properties: Any = torch.cuda.get_device_properties(self.device)  # torch's stub lacks the attribute
        there = int(properties.shared_memory_per_block_optin)
        if there < needed:
            raise ConfigError(
                f"{_KEY} needs {needed:,} bytes of shared memory a block for heads of {largest} in "
                f"{self.resolved.dtype}, and {torch.cuda.get_device_name(self.device)} has {there:,}: {_WAY_OUT}"
            )


def _on_all_ranks(control: GroupHandle, call: Callable[[], _Made]) -> _Made | None:
    """What `call` makes; None, on every rank, where it fails on any."""
    made, reason = None, "another rank"
    try:
        made = call()
    except Exception as error:  # whatever torch says of GPUs that cannot: others may be able to
        reason = f"{type(error).__name__}: {error}"
    if is_on_any_rank(control, made is None):
        logger.warning("GPUs do not see each other's memory: sums go through NCCL (%s)", reason)
        return None
    return made
