"""`score_tokens` returns the bits that were reported for sampled completions, in any layout."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

from spmd_worker import LLM, PromptsRefusedError, SamplingParams

PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 45, 46], [9], list(range(60, 100))]
SAMPLED = [
    SamplingParams(temperature=1, max_tokens=12, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=7, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, max_tokens=1, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=1.3, repetition_penalty=1.2, max_tokens=20, logprobs=1, ignore_eos=True),
]
# Few tokens a step, and too few blocks for all rows: prompts are cut into chunks, rows are preempted.
SMALL: dict[str, Any] = {
    "device": "cpu",
    "block_size": 8,
    "num_blocks": 16,
    "max_model_len": 96,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
}


def reported_and_scored(llm: LLM) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    """Reported with the tokens; scored; scored after another completion of the same rows."""
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, SAMPLED, use_tqdm=False)]
    reported = [
        [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs or [], strict=True)]
        for one in outputs
    ]
    completions = [one.token_ids for one in outputs]
    return reported, llm.score_tokens(PROMPTS, completions), llm.score_tokens(PROMPTS[::-1], completions[::-1])[::-1]


def main(model: Path, folder: Path, **layout: Any) -> None:
    """Writes a rank's report to a file."""
    with LLM(model, **SMALL, **layout) as llm:
        seen = reported_and_scored(llm)
        (folder / str(llm.llm_engine.engine_channel.rank)).write_text(json.dumps(seen))


@pytest.mark.guarantee("score_tokens gives the bits that were reported")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["raw_logprobs", pytest.param("processed_logprobs", marks=pytest.mark.matrix)])
def test_scores_are_the_bits_that_were_reported(model: Path, dtype: str, mode: str):
    with LLM(model, dtype=dtype, logprobs_mode=mode, **SMALL) as llm:
        reported, scored, again = reported_and_scored(llm)
        assert scored == again
        assert [len(each) for each in scored] == [12, 7, 1, 20]
        if mode == "raw_logprobs":
            assert scored == reported
        else:
            # Reported are those of the processed logits, which differ but where nothing was processed.
            assert [mine == theirs for mine, theirs in zip(scored, reported, strict=True)] == [True, True, False, False]


@pytest.mark.control("score_tokens gives the bits that were reported")
def test_comparison_detects_other_weights(model: Path):
    with LLM(model, **SMALL) as llm:
        reported, scored, _ = reported_and_scored(llm)
        completions = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SAMPLED, use_tqdm=False)]
        before = llm.score_tokens(PROMPTS, completions)
        llm.apply_model(lambda model: model.get_parameter("model.norm.weight").mul_(1.001))
        llm.reset_prefix_cache()
        after = llm.score_tokens(PROMPTS, completions)
        assert reported == scored
        assert all(mine != theirs for mine, theirs in zip(before, after, strict=True))


def test_scored_row_may_fill_max_model_len(model: Path):
    with LLM(model, **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=None, logprobs=0, ignore_eos=True)
        (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
        tokens = output.outputs[0].token_ids
        assert len(PROMPTS[0]) + len(tokens) == 96
        (scores,) = llm.score_tokens([PROMPTS[0]], [tokens])
        assert scores == [entry[token].logprob for token, entry in zip(tokens, output.outputs[0].logprobs, strict=True)]
        with pytest.raises(PromptsRefusedError, match=r"has 97 tokens .*max_model_len is 96") as refused:
            llm.score_tokens([PROMPTS[0]], [[*tokens, 1]])
        # It has no `on_error`.
        assert str(refused.value).endswith("\nleave them out")
        with pytest.raises(ValueError, match=r"^2 completions for 1 prompt:"):
            llm.score_tokens([PROMPTS[0]], [[1], [2]])
        with pytest.raises(ValueError, match=r"^completions\[1\] has no tokens"):
            llm.score_tokens([PROMPTS[0]] * 2, [[1], []])
        for wrong, said in (
            ("text", " is a str"),
            (torch.tensor([1]), " is a Tensor"),
            ([1.0], r"\[0\]=1.0 is a float"),
        ):
            with pytest.raises(TypeError, match=rf"^completions\[1\]{said}: give a "):
                llm.score_tokens([PROMPTS[0]] * 2, [[1], wrong])
        assert len(llm.score_tokens(PROMPTS[0], [[1, 2]])[0]) == 2


def test_prompt_without_tokens_is_rejected(model: Path):
    """The first token of its completion was left out: two scores for three tokens."""
    with LLM(model, **SMALL) as llm:
        with pytest.raises(PromptsRefusedError, match=r"prompt 1: .*no tokens, ") as refused:
            llm.score_tokens([[5], {"prompt_token_ids": []}], [[8], [5, 6, 7]])
        assert list(refused.value.reasons) == [1]
        assert not llm.llm_engine.has_unfinished_requests()
        assert len(llm.score_tokens([[5]], [[5, 6, 7]])[0]) == 3


@pytest.mark.gate("{'tensor_parallel_size': 2}")
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.matrix),
        pytest.param({"data_parallel_size": 2}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_scores_on_ranks_equal_reported_bits(model: Path, layout: dict[str, int], tmp_path: Path):
    ranks.run_forked([__file__, json.dumps(layout), model, tmp_path], 2, timeout_s=240).checked()
    first, second = (json.loads(path.read_text()) for path in sorted(tmp_path.iterdir()))
    assert first == second
    reported, scored, again = first
    assert reported == scored == again


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[3]), **json.loads(sys.argv[1]))
