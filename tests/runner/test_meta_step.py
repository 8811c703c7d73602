"""A step on the meta device, whose tensors have no values: whatever the host would read of them raises."""

from pathlib import Path

import pytest
import torch
from our_model import BLOCK_SIZE
from ranks import REPOSITORY

from kv_cache.block import BlockId
from kv_cache.cache_engine import CacheEngine
from spmd_worker.attention.sdpa import SdpaBackend
from spmd_worker.config.schema import ModelOptions, RunConfig
from spmd_worker.distributed.communicator import single_group
from spmd_worker.distributed.topology import whole_model
from spmd_worker.kernels.reference import ReferenceKernels
from spmd_worker.layers.context import LayerContext
from spmd_worker.memory.estimate import cache_spec
from spmd_worker.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.models.registry import build_model
from spmd_worker.resolved import resolve_run
from spmd_worker.runner.model_runner import ModelRunner
from spmd_worker.sampling.sampler import Sampler
from spmd_worker.sequence.request import Request, RequestId
from spmd_worker.sequence.sampling_params import SamplingParams

META = torch.device("meta")
MODEL = REPOSITORY / "scripts" / "demo" / "model"
NO_VALUES = "meta tensor"


class ReadingKernels(ReferenceKernels):
    """Looks at a value, as a careless kernel would."""

    def rms_norm(self, x, weight, eps):
        assert x.sum().item() == x.sum().item()
        return super().rms_norm(x, weight, eps)


def new_runner(kernels: ReferenceKernels, folder: Path = MODEL) -> ModelRunner:
    resolved = resolve_run(RunConfig(model=ModelOptions(path=str(folder), dtype="float32"), device="cpu"), "cpu")
    config, attention = resolved.model_config, SdpaBackend()
    context = LayerContext(single_group(), kernels, attention, torch.float32, META)
    model = build_model(context, config, whole_model(config))
    spec = cache_spec(config, resolved.layout, 0, "float32", BLOCK_SIZE)
    shape = attention.block_shape(spec.num_kv_heads, BLOCK_SIZE, spec.head_size)
    engine = CacheEngine(spec, shape, 16, 0, torch.float32, META)
    engine.allocate()
    sampler = Sampler(single_group(), 0, config.vocab_size, config.eos_token_ids, "raw_logprobs", kernels)
    return ModelRunner(model, engine, sampler, BLOCK_SIZE, single_group())


def step() -> list[ScheduledSequence]:
    """Three sequences that decode, greedy and drawn, and a chunk of a prompt."""
    found = []
    for index, temperature in enumerate((0.0, 1.0, 0.7, 0.0)):
        prompt, count = tuple(range(20)), 6 if index == 3 else 1
        request = Request(RequestId(index), prompt, SamplingParams(temperature=temperature), index)
        blocks = [BlockId(2 * index), BlockId(2 * index + 1)]
        sequence = MirroredSequence(request, 0, [5] if count == 1 else [], blocks, 0, 20 if count == 1 else 3)
        found.append(ScheduledSequence(sequence, count, num_samples=int(count == 1)))
    return found


def test_a_step_of_decodes_and_a_chunk_reads_nothing_back_before_its_logits():
    new_runner(ReferenceKernels()).forward(0, step())


def test_a_planted_read_back_is_found():
    with pytest.raises((RuntimeError, NotImplementedError), match=NO_VALUES):
        new_runner(ReadingKernels()).forward(0, step())


def test_choosing_tokens_reads_back_and_is_found():
    runner = new_runner(ReferenceKernels())
    runner.forward(0, step())
    with pytest.raises((RuntimeError, NotImplementedError), match=NO_VALUES):
        runner.sample()
