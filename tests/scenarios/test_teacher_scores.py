"""`score_tokens` with candidates and most probable tokens: transformers' log-softmax, in the bits of `prompt_logprobs`,
whatever else runs.
"""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_models import checkpoint_folder, open_reference, reference_logits

from spmd_worker import LLM, SamplingParams
from spmd_worker.replica.sequence.prompt_scores import PromptScores
from spmd_worker.worker.runner import prompt_logprobs

PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 45, 46], list(range(60, 100))]
COMPLETIONS = [[9, 3, 8], [4] * 6, list(range(20, 40))]
SMALL: dict[str, Any] = {
    "device": "cpu",
    "block_size": 8,
    "num_blocks": 24,
    "max_model_len": 96,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
}
TOP_K = 70
CANDIDATES = [[1, 2, 200], [[each, 7, 150] for each in range(6)], [11]]


@pytest.fixture(scope="module")
def model() -> Path:
    return checkpoint_folder("llama3")


def scored(llm: LLM, order: tuple[int, ...] = (0, 1, 2)) -> dict[int, PromptScores]:
    lists = ([each[index] for index in order] for each in (PROMPTS, COMPLETIONS, CANDIDATES))
    prompts, completions, candidates = lists
    found = llm.score_tokens(prompts, completions, top_k=TOP_K, candidate_ids=candidates)
    return dict(zip(order, found, strict=True))


@pytest.mark.guarantee("score_tokens gives transformers' log-softmax of candidates and top tokens")
def test_scores_are_transformers_log_softmax(model: Path):
    with LLM(model, **SMALL) as llm:
        found = scored(llm)
        plain = llm.score_tokens(PROMPTS, COMPLETIONS)
    reference = open_reference(model)
    for index, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        scores, tokens, first = found[index], [*prompt, *completion], len(prompt) - 1
        expected = reference_logits(reference, tokens).log_softmax(-1).numpy()[first : len(tokens) - 1]
        assert (scores.start, scores.token_logprobs.tolist()) == (first, plain[index])
        rows = CANDIDATES[index] if index == 1 else [CANDIDATES[index]] * len(completion)
        for row, (logprobs, ids) in enumerate(zip(expected, rows, strict=True)):
            assert np.abs(scores.candidate_logprobs[row] - logprobs[ids]).max() < 1e-5
            assert np.abs(scores.top_logprobs[row] - np.sort(logprobs)[::-1][:TOP_K]).max() < 1e-5
            assert np.abs(scores.top_logprobs[row] - logprobs[scores.top_token_ids[row]]).max() < 1e-5
        assert scores.candidate_logprobs.dtype == scores.top_logprobs.dtype == np.float32
        assert scores.top_token_ids.shape == (len(completion), TOP_K)


@pytest.mark.control("score_tokens gives transformers' log-softmax of candidates and top tokens")
def test_shifted_rows_are_found(shared_llm: LLM, monkeypatch: pytest.MonkeyPatch):
    expected = scored(shared_llm)
    next_tokens = prompt_logprobs._next_tokens
    monkeypatch.setattr(prompt_logprobs, "_next_tokens", lambda request, rows: np.roll(next_tokens(request, rows), 1))
    assert scored(shared_llm)[0] != expected[0]


def test_scores_do_not_depend_on_other_rows(model: Path):
    """Alone, in another order, after hits, beside rows that sample: equal arrays, and equal to `prompt_logprobs`."""
    with LLM(model, **SMALL) as llm:
        expected = scored(llm)
        (hit,) = llm.generate([PROMPTS[2]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert hit.num_cached_tokens > 0
        assert scored(llm, (2, 0, 1)) == expected
        assert scored(llm, (2,)) == {2: expected[2]}
        teacher = SamplingParams(max_tokens=1, prompt_logprobs=TOP_K, prompt_logprob_token_ids=[11])
        teacher.prompt_logprob_start = len(PROMPTS[2]) - 1
        sampled = SamplingParams(temperature=1, max_tokens=30, ignore_eos=True)
        both = [[*PROMPTS[2], *COMPLETIONS[2]], PROMPTS[0], PROMPTS[1]]
        outputs = llm.generate(both, [teacher, sampled, sampled], use_tqdm=False)
        assert outputs[0].prompt_scores == expected[2]
        assert outputs[0].prompt_token_id_logprobs is not None
        # Blocks before the first scored row were found.
        assert outputs[0].num_cached_tokens == len(PROMPTS[2]) // 8 * 8 - 8
        (entries,) = llm.generate(both[:1], SamplingParams(max_tokens=1, prompt_logprobs=5), use_tqdm=False)
        for row, position in enumerate(entries.prompt_logprobs[len(PROMPTS[2]) :]):
            pairs = zip(
                expected[2].top_token_ids[row, :5].tolist(), expected[2].top_logprobs[row].tolist(), strict=False
            )
            following = (COMPLETIONS[2][row], float(expected[2].token_logprobs[row]))
            assert {token: entry.logprob for token, entry in position.items()} == dict([*pairs, following])


def test_shorter_lists_are_filled_up(model: Path):
    with LLM(model, **SMALL) as llm:
        ids = np.array([[3, -1], [4, 5]])
        (scores,) = llm.score_tokens([[5, 6]], [[7, 8]], candidate_ids=[ids])
        assert np.isneginf(scores.candidate_logprobs).tolist() == [[False, True], [False, False]]
        assert scores.top_logprobs is None
        (all_rows,) = llm.score_tokens([[5, 6]], [[7, 8]], start=0)
        assert (all_rows.start, len(all_rows.token_logprobs), all_rows.candidate_logprobs) == (0, 3, None)
        assert all_rows.token_logprobs[1:].tolist() == scores.token_logprobs.tolist()


def test_float32_head_scores_are_the_reported_bits(model: Path):
    params = SamplingParams(temperature=1.0, max_tokens=8, logprobs=0, seed=4, ignore_eos=True)
    found = {}
    for name, head in (("plain", {}), ("float32", {"hf_overrides": {"head_dtype": "float32"}})):
        with LLM(model, dtype="bfloat16", **head, **SMALL) as llm:
            completions = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
            ids = [each.token_ids for each in completions]
            reported = [[next(iter(each.values())).logprob for each in one.logprobs] for one in completions]
            assert llm.score_tokens(PROMPTS, ids) == reported
            found[name] = llm.score_tokens(PROMPTS, COMPLETIONS)
            constants = llm.numerical_policy().regions["head"].constants
            assert constants.get("logits") == ("float32" if head else None)
    pairs = zip(chain(*found["plain"]), chain(*found["float32"]), strict=True)
    differences = [abs(one - other) for one, other in pairs]
    assert 0 < max(differences) < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidate_ids": [[1], [2]]}, r"^2 candidate_ids for 1 prompt:"),
        ({"candidate_ids": [[[1], [2], [3]]]}, r"candidate_ids has 3 lists for 2 rows"),
        ({"candidate_ids": [[10**6]]}, r" candidate_ids: token id 1000000 is outside the vocabulary"),
        ({"start": 3}, r" start=3 of a prompt of 4 tokens.*at most 2: give a smaller one"),
        ({"start": [0, 1]}, r"2 numbers of start for 1 prompt:"),
        ({"top_k": 2000}, r"^top_k=2000 must be from 0 to 1024 in scores of a prompt \(candidate_ids, start\)"),
        ({"top_k": 1000}, r" top_k=1000 is more than the vocabulary"),
        ({"candidate_ids": [[]]}, r"candidate_ids"),
    ],
    ids=str,
)
def test_invalid_scores_are_explained(model: Path, options: dict[str, Any], message: str, shared_llm: LLM):
    with pytest.raises(ValueError, match=message):
        shared_llm.score_tokens([[5, 6]], [[7, 8]], **options)


@pytest.fixture(scope="module")
def shared_llm(model: Path) -> Any:
    with LLM(model, **SMALL) as llm:
        yield llm
