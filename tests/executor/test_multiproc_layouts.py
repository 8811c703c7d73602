"""Every layout over worker processes gives one process's tokens and log-probabilities.

Without tensor parallelism to the last bit.
"""

from collections.abc import Callable
from typing import Any

import pytest
from reference_models import checkpoint_folder, mixed_prompts
from scaled_norms import ONE_BIT_MORE, ScaledNorms, scale_norms

from spmd_worker import LLM, RequestOutput, SamplingParams
from spmd_worker.base.errors import ConfigError

pytestmark = pytest.mark.usefixtures("forked_workers_of_module")

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1)
DRAWN = SamplingParams(temperature=1.0, n=2, max_tokens=24, ignore_eos=True)
PROMPTS = mixed_prompts(10, 60, seed=3)
PARAMS = [GREEDY if index % 2 else DRAWN for index in range(len(PROMPTS))]
# So few blocks that sequences are preempted.
SETTINGS: dict[str, Any] = {
    "num_blocks": 30,
    "max_model_len": 190,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "swap_space": 0.01,
    "dtype": "float32",
    "device": "cpu",
}
LOGPROB_TOLERANCE = 1e-4


def answers(
    name: str = "llama_tied", change: Callable[[LLM], None] = lambda llm: None, **layout: Any
) -> list[RequestOutput]:
    """`change` is called before there are any."""
    backend = "multiproc" if layout else "uniproc"
    with LLM(checkpoint_folder(name), **SETTINGS, **layout, distributed_executor_backend=backend) as llm:
        change(llm)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert llm.llm_engine.counters.num_preemptions > 0
    return outputs


@pytest.fixture(scope="module")
def alone() -> list[RequestOutput]:
    return answers()


@pytest.mark.gate("three")
@pytest.mark.guarantee("executor.backend=multiproc answers as one rank")
@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2, "pipeline_layers": [1, 2]}, marks=pytest.mark.matrix),
        pytest.param({"pipeline_parallel_size": 3}, marks=pytest.mark.matrix),
    ],
    ids=["even", "uneven", "three"],
)
def test_stages_are_one_process_to_the_last_bit(alone: list[RequestOutput], layout: dict[str, Any]):
    assert answers(**layout) == alone


@pytest.mark.stress
@pytest.mark.control("executor.backend=multiproc answers as one rank")
@pytest.mark.matrix
def test_comparison_detects_one_weight_bit(alone: list[RequestOutput]):
    """Negative control."""
    layout = {"pipeline_parallel_size": 2, "worker_extension_cls": f"{ScaledNorms.__module__}.ScaledNorms"}
    assert answers(change=lambda llm: scale_norms(llm, 1, ONE_BIT_MORE), **layout) != alone


@pytest.mark.stress
@pytest.mark.matrix
def test_four_stages_equal_one_process_bitwise():
    name = "llama_four_layers"
    assert answers(name, pipeline_parallel_size=4) == answers(name)


@pytest.mark.gate("1")
@pytest.mark.matrix
@pytest.mark.parametrize("num_stages", [1, 2])
def test_tensor_parallelism_keeps_tokens(alone: list[RequestOutput], num_stages: int):
    outputs = answers(tensor_parallel_size=2, pipeline_parallel_size=num_stages)
    for mine, theirs in zip(outputs, alone, strict=True):
        assert [each.token_ids for each in mine.outputs] == [each.token_ids for each in theirs.outputs]
        for ours, other in zip(mine.outputs, theirs.outputs):
            for one, two in zip(ours.logprobs or [], other.logprobs or []):
                assert {key: value.logprob for key, value in one.items()} == pytest.approx(
                    {key: value.logprob for key, value in two.items()}, abs=LOGPROB_TOLERANCE
                )


def test_replicas_are_for_ranks_that_a_launcher_starts():
    words = r"data_parallel_size=2 cannot run with distributed_executor_backend=multiproc.*torchrun"
    with pytest.raises(ConfigError, match=words):
        answers(data_parallel_size=2)
