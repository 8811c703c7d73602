"""Triton backend for NVIDIA GPUs: our kernels, steps recorded as CUDA graphs, all-reduce in rank order or by a tree.

The default on CUDA where it computes the model (choice.py). Runs on the CPU if TRITON_INTERPRET=1 was set before Triton
was imported, for tests.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import torch

from kv_cache.block import num_blocks_for
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.chosen_keys import lists_keys
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cache_dtype import cache_dtype_of
from spmd_worker.ops.attention.triton import HEAD_SIZES, LATENT_SIZES, TritonBackend, TritonFixedAttention
from spmd_worker.ops.kernels.api import QuantisedKernels
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.kernels.triton import adapters as triton_adapters
from spmd_worker.ops.kernels.triton import attention, attention_kernels, fp8, matmul
from spmd_worker.ops.kernels.triton import experts as triton_experts
from spmd_worker.ops.kernels.triton.compile_ahead import compiling
from spmd_worker.ops.kernels.triton.int8_model import Int8TritonKernels
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.ops.kernels.triton.launching import capability, is_interpreted
from spmd_worker.ops.kernels.triton.peer_sums import PeerSums, SymmetricMemory, half_bytes
from spmd_worker.ops.sampling.token_masks import TokenMasks
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.groups import ParallelGroups
from spmd_worker.replica.grammar.row_grammar import BITS
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.backends.backend import DeviceBackend, Operations
from spmd_worker.worker.memory.device import is_on_any_rank
from spmd_worker.worker.memory.window_groups import grouping_of
from spmd_worker.worker.runner.dummy_steps import (
    drafting_step,
    greedy_step,
    in_groups,
    max_step,
    prompt_step,
    warm_up_steps,
    with_adapter,
)
from spmd_worker.worker.runner.model_runner import ModelRunner
from spmd_worker.worker.runner.step_graphs import CudaGraph, StepGraph, StepGraphs

logger = logging.getLogger(__name__)

_MAX_PEER_BYTES: Final = 1 << 26
"""Larger sums are split into pieces."""
_WARM_UP_ROWS: Final = 65
"""Rows that sample in the larger of two warm-up steps."""
_Made = TypeVar("_Made")
_KEY: Final = "executor.device_backend=triton"
_WAY_OUT: Final = "leave executor.device_backend at auto and executor.worker_cls at null, which takes plain torch there"
_LEAST_CAPABILITY: Final = (8, 0)
"""Of GPUs with bfloat16 and asynchronous copies, which the kernels' pipelines use."""


class TritonDevice(DeviceBackend):
    """`executor.device_backend=triton`."""

    keeps_state = True

    def wrap_groups(self, groups: ParallelGroups) -> ParallelGroups:
        # Sums in rank order make a row's output independent of its batch with tensor parallelism too.
        groups = super().wrap_groups(groups)
        tensor = replace(groups.tensor, adds_in_order=True, adds_by_tree=self._has_leaves)
        if tensor.size > 1 and self.device.type == "cuda":
            tensor = replace(tensor, fast=self._peer_sums(tensor, groups.control))
        elif tensor.fast is not None:
            # Interpreted: the norm behind sums in shared memory is the CPU's, with other bits.
            tensor.fast.close()
            tensor = replace(tensor, fast=None)
        return replace(groups, tensor=tensor)

    @property
    def _has_leaves(self) -> bool:
        """Whether ranks go on with the tree over leaves that one rank adds."""
        return self.resolved.layout.num_leaves > 1 and self.resolved.layout.has_leaves

    def operations(self) -> Operations:
        reason = self.unsupported()
        if reason is not None:
            raise ConfigError(f"{_KEY} {reason}: {_WAY_OUT}")
        quantised = self._quantised_kernels()
        cache_dtype = cache_dtype_of(getattr(torch, self.resolved.dtype), self.resolved.cache_dtype)
        return Operations(
            quantised or TritonKernels(), TritonBackend(cache_dtype), quantised, decodes_experts=quantised is None
        )

    def unsupported(self) -> str | None:
        model_config = self.resolved.model_config
        if is_interpreted() != (self.device.type == "cpu"):
            return "computes on CUDA, without TRITON_INTERPRET: use device=cuda"
        if is_interpreted() and self.resolved.dtype == "bfloat16":
            return "is interpreted, and Triton's interpreter does not support bfloat16: use model.dtype=float32"
        for layer in model_config.layers:
            group = layer.num_heads // layer.num_kv_heads
            if layer.latent is not None or layer.compressed is not None:
                if layer.head_size not in LATENT_SIZES:
                    return f"supports latents of up to {LATENT_SIZES[-1]} numbers, not {layer.head_size}"
                continue
            if layer.head_size not in HEAD_SIZES or group > attention.MAX_GROUP:
                return (
                    f"supports head sizes from {HEAD_SIZES[0]} to {HEAD_SIZES[-1]} and at most "
                    f"{attention.MAX_GROUP} query heads per key-value head, not {layer.head_size} and {group}"
                )
        return self._lacks_on_device() if self.device.type == "cuda" else None

    def _quantised_kernels(self) -> QuantisedKernels | None:
        """Kernels of `model.quantization`. Raises ConfigError if the device does not multiply FP8."""
        quantization, dtype = self.resolved.config.model.quantization, getattr(torch, self.resolved.dtype)
        if quantization is None:
            return None
        if quantization == "int8":
            return Int8TritonKernels(dtype)
        way_out = "use model.quantization=int8, or leave it out"
        if is_interpreted():
            raise ConfigError(f"model.quantization=fp8: Triton's interpreter rounds FP8 wrongly: {way_out}")
        found = capability(self.device)
        if found < fp8.FIRST_CAPABILITY:
            raise ConfigError(
                f"model.quantization=fp8 needs a GPU of compute capability 8.9 or later, which multiplies FP8, and "
                f"{torch.cuda.get_device_name(self.device)} has {found[0]}.{found[1]}: {way_out}"
            )
        return fp8.Fp8TritonKernels(dtype)

    def arithmetic(self, attention: AttentionBackend) -> str:
        return f"Triton kernels{' interpreted' if is_interpreted() else ''}, {super().arithmetic(attention)}"

    def can_record(self, tensor: GroupHandle) -> bool:
        # A recorded step has fixed launches. NCCL's sums may wait on the host; pooling models compute large chunks,
        # which keep a GPU busy anyway; tables of several groups have no fixed tensors yet.
        model_config = self.resolved.model_config
        if self.resolved.config.executor.enforce_eager or model_config.pooling is not None or self._unrecorded:
            return False
        return tensor.size == 1 or isinstance(tensor.fast, PeerSums)

    @property
    def _unrecorded(self) -> str:
        """The steps that are never recorded, in words; empty if there are none."""
        if self.resolved.model_config.encoder_part is not None:
            return "of encoder-decoder models"
        layers = self.resolved.model_config.layers
        if any(each.chooser is not None and not lists_keys(each) for each in layers):
            return "of models whose tokens see runs of keys that an indexer chooses"
        if any(layer.ngrams is not None for layer in layers):
            return "of models with embedded n-grams"
        has_groups = grouping_of(self.resolved).groups.num_groups > 1
        return "with block tables of several groups of layers (cache.window_groups)" if has_groups else ""

    def new_graphs(
        self, model: DecoderForCausalLM, tensor: GroupHandle, adapters: LoadedAdapters | None = None
    ) -> StepGraphs | None:
        if self._unrecorded and not self.resolved.config.executor.enforce_eager:
            logger.info("steps %s are not recorded as CUDA graphs", self._unrecorded, extra=SAME_ON_EVERY_RANK)
        new_graph = self.graph_maker() if self.can_record(tensor) else None
        if new_graph is None:
            return None
        scheduler, block_size = self.resolved.config.scheduler, self.resolved.config.cache.block_size
        max_tokens, max_seqs = scheduler.max_num_batched_tokens, self.resolved.max_num_seqs
        max_blocks = num_blocks_for(self.resolved.max_sequence_len, block_size)
        if self.resolved.model_config.is_attention_free:
            # Steps have no block tables: a column that nobody reads.
            max_blocks = 1
        sizes, has_states = (max_tokens, max_seqs, max_blocks, block_size), self.resolved.model_config.has_states
        fixed = TritonFixedAttention(
            *sizes, self.device, has_states=has_states, lists_above=_lists_above(self.resolved.model_config)
        )
        reset_sums = tensor.fast.reset_sums if isinstance(tensor.fast, PeerSums) else None
        return StepGraphs(model, fixed, new_graph, max_tokens, max_seqs, reset_sums, adapters)

    def graph_maker(self) -> Callable[[], StepGraph] | None:
        """A factory of empty graphs; None if kernels are interpreted."""
        return partial(CudaGraph, torch.cuda.graph_pool_handle()) if self.device.type == "cuda" else None

    @property
    def compiles_ahead(self) -> bool:
        return self.device.type == "cuda"

    def compile_ahead(self, new_runner: Callable[[], ModelRunner], num_blocks: int, num_threads: int) -> str:
        """Run the warm-up with launches that only compile."""
        with compiling(self.device, num_threads) as compiled:
            self.warm_up(lambda graphs: new_runner(), None, num_blocks)
        return str(compiled)

    def warm_up(
        self, new_runner: Callable[[StepGraphs | None], ModelRunner], graphs: StepGraphs | None, num_blocks: int
    ) -> None:
        """Compile every kernel that a later step can launch, in each of Triton's specialisations: attention has kernels
        for short rows that decode, for long ones and for chunks. Then record the decode steps, largest first, because
        smaller graphs reuse its memory, and those with adapters before those without. Other steps are recorded when
        they first occur.

        Not covered: joining partial attention results of pooled rows, which is compiled for the first row that ends
        with a one-token chunk after a long prefix.
        """
        scheduler, pooling = self.resolved.config.scheduler, self.resolved.model_config.pooling
        block_size, max_model_len = self.resolved.config.cache.block_size, self.resolved.max_model_len
        runner = new_runner(None)
        num_tokens = min(_WARM_UP_ROWS, scheduler.max_num_batched_tokens)
        num_keys = max(attention_kernels.SEGMENT, _lists_above(self.resolved.model_config) or 0) + 1
        num_keys = 1 if pooling is not None else max(1, min(num_keys, max_model_len - 1))
        steps = warm_up_steps(num_tokens, num_keys, block_size, num_blocks, pooling)
        if self.resolved.model_config.is_encoder:
            # Whose cache has the blocks of one step of at most `max_num_seqs`.
            sizes = (max_model_len, block_size, pooling)
            steps = (max_step(num_tokens, 1, *sizes), max_step(1, 1, *sizes))
        if self.resolved.most_drafts and self.resolved.model_config.has_states:
            steps = (*steps, drafting_step(block_size, num_blocks))
        for number, scheduled in enumerate(steps):
            runner.forward(number, in_groups(scheduled, runner.num_groups))
            runner.sample()
        self.warm_up_masks(runner)
        with nullcontext(0) if runner.adapters is None else runner.adapters.placeholder() as adapter:
            adapters = (adapter, 0) if adapter else (0,)
            if not is_interpreted():
                self._warm_up_matmuls(runner, num_blocks, adapters)
            if graphs is None:
                return
            runner, max_seqs = new_runner(graphs), self.resolved.max_num_seqs
            counts = [size for size in graphs.sizes if size < max_seqs]
            for number, count in enumerate((max_seqs, *reversed(counts))):
                for each in adapters:
                    step = in_groups(greedy_step(count, block_size, num_blocks), runner.num_groups)
                    runner.forward(number, with_adapter(step, each))
                    runner.sample()

    def _warm_up_matmuls(self, runner: ModelRunner, num_blocks: int, adapters: Sequence[int]) -> None:
        """Compile GEMMs in the tiles of each bucket of rows, experts' too, in steps of rows with each of `adapters`,
        and the head up to a row a sequence.
        """
        scheduler, model_config = self.resolved.config.scheduler, self.resolved.model_config
        sizes = (self.resolved.max_model_len, self.resolved.config.cache.block_size, num_blocks)
        max_tokens = scheduler.max_num_batched_tokens
        if model_config.is_encoder:
            # Whose cache has the blocks of one step of at most `max_num_seqs`.
            max_tokens = min(max_tokens, self.resolved.max_num_seqs * max(1, self.resolved.max_model_len - 1))
        num_tokens = {*matmul.warm_up_rows(max_tokens), *self._expert_token_counts()}
        if len(adapters) > 1 and max_tokens > triton_adapters.MAX_FEW_ROWS:
            num_tokens.add(triton_adapters.MAX_FEW_ROWS + 1)
        for number, count in enumerate(sorted(num_tokens, reverse=True)):
            for adapter in adapters:
                step = in_groups(prompt_step(count, *sizes, model_config.pooling), runner.num_groups)
                runner.forward(number, with_adapter(step, adapter))
                runner.sample()
        if runner.sampler is None:
            return
        dtype = getattr(torch, self.resolved.dtype)
        with torch.inference_mode():
            for count in matmul.warm_up_rows(self.resolved.max_num_seqs):
                hidden = torch.zeros((count, model_config.hidden_size), dtype=dtype, device=self.device)
                runner.compute_logits(hidden)

    def _expert_token_counts(self) -> tuple[int, ...]:
        """Numbers of tokens of steps that take the tiles of routers and experts for more than a few rows."""
        experts = [layer.experts for layer in self.resolved.model_config.layers if layer.experts is not None]
        most = self.resolved.config.scheduler.max_num_batched_tokens
        means = (triton_experts.MAX_FEW_ROWS, triton_experts.MAX_SOME_ROWS)
        counts = {mean * each.num_choices // each.num_chosen + 1 for mean in means for each in experts}
        counts.add(triton_experts.ROUTER_FEW_TOKENS + 1)
        return tuple(sorted((count for count in counts if count <= most), reverse=True))

    def warm_up_masks(self, runner: ModelRunner) -> None:
        """Compile the token masks of grammars: two greedy rows, one with logprobs, cover shards and complete rows."""
        if runner.sampler is None:
            return
        model_config = self.resolved.model_config
        rows = [SampleRow(SamplingParams(temperature=0.0, logprobs=wanted), 0, 0, 1, (0,), ()) for wanted in (None, 1)]
        allowed = torch.full((2, -(-model_config.vocab_size // BITS)), -1, dtype=torch.int32, device=self.device)
        dtype = getattr(torch, self.resolved.dtype)
        hidden = torch.zeros((2, model_config.hidden_size), dtype=dtype, device=self.device)
        with torch.inference_mode():
            logits = runner.compute_logits(hidden)
            runner.sampler.sample(logits, rows, TokenMasks(allowed, {0: 0, 1: 1}))

    def _peer_sums(self, tensor: GroupHandle, control: GroupHandle) -> PeerSums | None:
        """All-reduce over peer memory of the GPUs; None, on every rank, if it is not available."""
        assert tensor.group is not None, tensor
        max_bytes = self.resolved.config.scheduler.max_num_batched_tokens * self.resolved.model_config.hidden_size * 4
        buffer_bytes = min(max_bytes, _MAX_PEER_BYTES)
        num_bytes = 2 * half_bytes(buffer_bytes, tensor.size)
        own = _on_all_ranks(control, lambda: SymmetricMemory.allocate(num_bytes, self.device))
        group = tensor.group
        memory = None if own is None else _on_all_ranks(control, lambda: SymmetricMemory(group, own))
        return None if memory is None else PeerSums(memory, tensor.rank, buffer_bytes, adds_by_tree=tensor.adds_by_tree)

    def _lacks_on_device(self) -> str | None:
        """The GPU's lack for these kernels, without which the first launch would fail."""
        name, found = torch.cuda.get_device_name(self.device), torch.cuda.get_device_capability(self.device)
        if found < _LEAST_CAPABILITY:
            least, has = (".".join(map(str, each)) for each in (_LEAST_CAPABILITY, found))
            return f"needs compute capability {least}, and {name} has {has}"
        itemsize = getattr(torch, self.resolved.dtype).itemsize
        layers = self.resolved.model_config.layers
        max_head_size = max(layer.head_size for layer in layers)
        max_group = max(
            1 if layer.latent or layer.compressed else layer.num_heads // layer.num_kv_heads for layer in layers
        )
        properties: Any = torch.cuda.get_device_properties(self.device)  # torch's stub lacks the attribute
        sizes = ((properties.major, properties.minor), max_head_size, max_group, itemsize)
        tiles = (attention.few_tile(*sizes), attention.many_tile(*sizes))
        of_heads = (max_head_size, itemsize)
        has_biases = any(layer.has_distance_bias or layer.distances is not None for layer in layers)
        of_attention = max(attention.shared_bytes(tile, *of_heads, has_biases=has_biases) for tile in tiles)
        needed = max(of_attention, matmul.shared_bytes(itemsize))
        available = int(properties.shared_memory_per_block_optin)
        if available < needed:
            return (
                f"needs {needed:,} bytes of shared memory per block for heads of {max_head_size} in "
                f"{self.resolved.dtype}, and {name} has {available:,}"
            )
        return None


def _lists_above(model_config: ModelConfig) -> int | None:
    """Keys of a sequence that all of its tokens see in each layer; more are listed. None if no layer lists keys."""
    layers = model_config.layers
    most = [each.chooser.most_seen for each in layers if each.chooser is not None and lists_keys(each)]
    most += [0 for each in layers if each.compressed is not None and each.compressed.rate]
    return min(most, default=None)


def _on_all_ranks(control: GroupHandle, call: Callable[[], _Made]) -> _Made | None:
    """Result of `call`; None, on every rank, if it fails on any."""
    made, reason = None, "another rank"
    try:
        made = call()
    except Exception as error:  # torch raises various types for GPUs that do not support it
        reason = f"{type(error).__name__}: {error}"
    if is_on_any_rank(control, made is None):
        logger.warning("GPUs have no access to each other's memory: sums go through NCCL (%s)", reason)
        return None
    return made
