"""`executor.verify_steps`: a row of a decode step that is computed again by itself has the same bits, whatever the
model keeps of it, and a number that depended on other rows is an error that names row, token and rank.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from conv_checkpoints import conv_folder
from cross_rows import cross_folder
from expert_checkpoints import expert_folder
from latent_checkpoints import latent_folder
from reference_models import checkpoint_folder
from state_models import state_folder
from torch import Tensor

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import StepMismatchError
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.worker.runner.row_repeat import RowRepeater

FOLDERS: dict[str, Callable[[], Path]] = {
    "llama": lambda: checkpoint_folder("llama3"),
    "latents": lambda: latent_folder("deepseek_v3"),
    "convolutions": lambda: conv_folder("lfm2"),
    "delta nets": lambda: state_folder("qwen3_5"),
    "mamba": lambda: state_folder("nemotron"),
    "experts": lambda: expert_folder("qwen3_moe"),
}
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 96, "max_num_seqs": 8, "num_blocks": 40}
PROMPTS = [{"prompt_token_ids": [5 + (row * 3 + index) % 80 for index in range(4 + 9 * row)]} for row in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=3, max_tokens=5, ignore_eos=True, logprobs=2, top_p=0.9)
EACH = [GREEDY, DRAWN, GREEDY, DRAWN]


def new_llm(kind: str, **settings: Any) -> LLM:
    return LLM(FOLDERS[kind](), **{**SETTINGS, "max_num_batched_tokens": 16, "verify_steps": 1, **settings})


def answers_of(llm: LLM, params: Any = GREEDY) -> list[Any]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


STRESSED = ("latents", "delta nets", "mamba", "experts")
STRESS = [pytest.param(kind, "bfloat16", marks=pytest.mark.stress) for kind in STRESSED]


@pytest.mark.guarantee("executor.verify_steps finds what depends on other rows")
@pytest.mark.parametrize(("kind", "dtype"), [("llama", "float32"), ("convolutions", "float32"), *STRESS])
def test_repeated_rows_have_the_same_bits(kind: str, dtype: str) -> None:
    with new_llm(kind, dtype=dtype, verify_steps=0) as llm:
        expected = [answers_of(llm), answers_of(llm, EACH)]
    with new_llm(kind, dtype=dtype) as llm:
        assert [answers_of(llm), answers_of(llm, EACH)] == expected
        assert llm.llm_engine.counters.num_verified_steps >= 10


def of_batch(right: Callable[..., Any], moved: float) -> Callable[..., Any]:
    """`right`, whose results move if there are several rows."""

    def wrong(self: Any, *inputs: Any, **options: Any) -> Tensor:
        result: Tensor = right(self, *inputs, **options)
        return result + moved * result.mean() if len(result) > 1 else result

    return wrong


@pytest.mark.guarantee("executor.verify_steps finds what depends on other rows")
@pytest.mark.parametrize(
    ("method", "params", "what"),
    [("forward", GREEDY, "hidden states"), ("compute_logits", DRAWN, "logits"), ("argmax_logits", GREEDY, "argmax")],
)
def test_batch_dependent_kernel_is_named(
    monkeypatch: pytest.MonkeyPatch, method: str, params: SamplingParams, what: str
) -> None:
    right = getattr(DecoderForCausalLM, method)
    wrong = of_batch(right, 1e-3)
    if method == "argmax_logits":

        def wrong(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
            maxima, columns = right(self, hidden)
            return maxima, (columns + 1) % 8 if len(hidden) > 1 else columns

    monkeypatch.setattr(DecoderForCausalLM, method, wrong)
    with new_llm("llama", dtype="float32") as llm, pytest.raises(StepMismatchError) as caught:
        answers_of(llm, params)
    expected = (
        rf"rank 0, step \d+: row \d of \d, request \d, sample 0, token at position \d+: its {what} differ from those "
        rf"of the same row computed by itself \(verify_steps\): .*{'element' if method == 'forward' else 'token id'}"
    )
    assert re.match(expected, str(caught.value)), caught.value


@pytest.mark.control("executor.verify_steps finds what depends on other rows")
def test_uncompared_repetition_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the row is computed again, and the worker compares nothing."""
    monkeypatch.setattr(DecoderForCausalLM, "forward", of_batch(DecoderForCausalLM.forward, 1e-3))
    monkeypatch.setattr(RowRepeater, "_check", lambda *arguments: None)
    monkeypatch.setattr(torch, "equal", lambda *tensors: True)
    with new_llm("llama", dtype="float32") as llm:
        answers_of(llm)
        assert llm.llm_engine.counters.num_verified_steps > 0


def test_state_that_is_not_put_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated row would advance its recurrent state twice."""
    monkeypatch.setattr(RowRepeater, "_states", lambda self, scheduled: [])
    with new_llm("convolutions", dtype="float32") as llm, pytest.raises(StepMismatchError, match="hidden states"):
        answers_of(llm)


@pytest.mark.parametrize("name", ["t5", pytest.param("m2m100", marks=pytest.mark.stress)])
def test_decoder_with_encoder_is_repeated(name: str) -> None:
    ids = [4, 5, 6, 7, 8, 9]
    prompts = [{"encoder_prompt": {"prompt_token_ids": ids[: 3 + row]}, "decoder_prompt": None} for row in range(3)]
    settings = {"num_blocks": 80, "max_model_len": 64, "dtype": "float32"}
    with LLM(cross_folder(name), device="cpu", verify_steps=1, **settings) as llm:
        llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.llm_engine.counters.num_verified_steps > 0


PIPELINE = """
import os, sys
from spmd_worker import LLM, SamplingParams
from spmd_worker.model.decoder import DecoderForCausalLM

folder, fault = sys.argv[1:]
right = DecoderForCausalLM.forward

def forward(self, *given, **named):
    hidden = right(self, *given, **named)
    is_wrong = fault == "wrong" and os.environ["RANK"] == "1" and len(hidden) > 1
    return hidden + 1e-3 * hidden.mean() if is_wrong else hidden

DecoderForCausalLM.forward = forward
prompts = [{"prompt_token_ids": [5 + row, 6, 7]} for row in range(4)]
params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
settings = {"device": "cpu", "num_blocks": 40, "verify_steps": 1, "max_model_len": 64}
for layout in ("tensor_parallel_size", "pipeline_parallel_size"):
    with LLM(folder, **{layout: 2}, **settings) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        assert llm.llm_engine.counters.num_verified_steps >= 5
os.write(1, b"equal\\n")
"""


@pytest.mark.stress
@pytest.mark.parametrize("fault", ["none", "wrong"])
def test_ranks_and_stages_repeat_rows_together(fault: str) -> None:
    arguments = [str(checkpoint_folder("llama3")), fault]
    done = ranks.run_ranks(PIPELINE, 2, timeout_s=240, arguments=arguments)
    if fault == "none":
        assert done.returncode == 0, done.output
        assert done.stdout.count("equal") == 2
    else:
        assert done.returncode != 0
        assert "StepMismatchError" in done.output, done.output
        assert "rank 1, step" in done.output, done.output
