"""A step on the meta device, whose tensors have no values: whatever the host would read of them raises."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from decoding_steps import decoding
from device_waits import DeviceWaits
from our_model import BLOCK_SIZE
from ranks import REPOSITORY

from kv_cache.block import BlockId
from kv_cache.cache_engine import CacheEngine
from spmd_worker.base.config.schema import ModelOptions, RunConfig
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.ops.attention.backend import block_shapes
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.sampling.sampler import Sampler
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.topology import complete_model
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.memory.estimate import cache_spec
from spmd_worker.worker.runner.model_runner import ModelRunner

META = torch.device("meta")
MODEL = REPOSITORY / "scripts" / "demo" / "model"
NO_VALUES = "meta tensor"
NUM_DECODING = 16


class ReadingKernels(ReferenceKernels):
    """Looks at a value, as a careless kernel would."""

    def rms_norm(self, x, weight, eps):
        assert x.sum().item() == x.sum().item()
        return super().rms_norm(x, weight, eps)


def new_runner(kernels: ReferenceKernels, folder: Path = MODEL, *, keeps_state: bool = True) -> ModelRunner:
    resolved = resolve_run(RunConfig(model=ModelOptions(path=str(folder), dtype="float32"), device="cpu"), "cpu")
    config, attention = resolved.model_config, SdpaBackend()
    context = LayerContext(single_group(), kernels, attention, torch.float32, META)
    model = build_model(context, config, complete_model(config))
    spec = cache_spec(config, resolved.layout, 0, "float32", BLOCK_SIZE)
    engine = CacheEngine(spec, block_shapes(attention, spec), 16, 0, torch.float32, META)
    engine.allocate()
    sampler = Sampler(single_group(), 0, config.vocab_size, config.eos_token_ids, "raw_logprobs", kernels)
    return ModelRunner(model, engine, sampler, BLOCK_SIZE, single_group(), keeps_state=keeps_state)


GREEDY_AND_DRAWN = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 0.0})
GREEDY = ({"temperature": 0.0},) * 4
OF_EACH_KIND = (
    {"temperature": 0.0, "logprobs": 2, "min_tokens": 9},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 0},
    {"temperature": 1.0, "logit_bias": {3: 1.0}, "bad_words_ids": [[4]]},
    {"temperature": 0.0, "prompt_logprobs": 2},
)


def step(kinds: Sequence[dict[str, object]] = GREEDY_AND_DRAWN) -> list[ScheduledSequence]:
    """Three sequences that decode, and a chunk of a prompt."""
    found = []
    for index, kind in enumerate(kinds):
        prompt, count = tuple(range(20)), 6 if index == 3 else 1
        request = Request(RequestId(index), prompt, SamplingParams(**kind), index)
        blocks = [BlockId(2 * index), BlockId(2 * index + 1)]
        sequence = MirroredSequence(request, 0, [5] if count == 1 else [], blocks, 0, 20 if count == 1 else 3)
        found.append(ScheduledSequence(sequence, count, num_samples=int(count == 1)))
    return found


def test_step_reads_nothing_back_before_logits():
    new_runner(ReferenceKernels()).forward(0, step())


def test_a_planted_read_back_is_found():
    with pytest.raises((RuntimeError, NotImplementedError), match=NO_VALUES):
        new_runner(ReadingKernels()).forward(0, step())


@pytest.mark.parametrize("kinds", [GREEDY, GREEDY_AND_DRAWN, OF_EACH_KIND], ids=["greedy", "drawn", "of each kind"])
def test_step_reads_back_once_without_upload_waits(kinds: Sequence[dict[str, object]]):
    runner = new_runner(ReferenceKernels())
    with DeviceWaits() as waits:
        runner.forward(0, step(kinds))
        result = runner.sample()
    assert (waits.read_backs, waits.uploads) == (["_to_copy"], [])
    assert len(result.token_ids) == 3
    assert [len(entries) for _, _, entries in result.prompt_logprobs] == [7] * (kinds is OF_EACH_KIND)


def test_read_back_count_detects_injected_read_back():
    runner = new_runner(ReadingKernels())
    with DeviceWaits() as waits:
        runner.forward(0, step())
        runner.sample()
    assert len(waits.read_backs) > 1


@pytest.mark.gate("True")
@pytest.mark.parametrize("keeps_state", [True, False])
def test_decode_step_sends_at_most_24_bytes_a_row(keeps_state: bool):
    """All of it: what the model, the sampler and the read-back send too. 256 rows have 6 KiB. And, as a control, one
    that is laid out anew.
    """
    runner = new_runner(ReferenceKernels(), keeps_state=keeps_state)
    sent = []
    for number, scheduled in zip(range(3), decoding(NUM_DECODING, 40, BLOCK_SIZE, 0)):
        with DeviceWaits() as waits:
            runner.forward(number, scheduled)
            assert len(runner.sample().token_ids) == NUM_DECODING
        assert (waits.read_backs, waits.uploads) == (["_to_copy"], [])
        sent.append(waits.num_bytes_up)
    assert (max(sent[1:]) <= 24 * NUM_DECODING) == keeps_state, sent


def test_choosing_tokens_reads_back_and_is_found():
    runner = new_runner(ReferenceKernels())
    runner.forward(0, step())
    with pytest.raises((RuntimeError, NotImplementedError), match=NO_VALUES):
        runner.sample()
