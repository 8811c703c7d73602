"""Filters, penalties, bias and minimum length against transformers' own logits processors, which nobody here wrote."""

from collections.abc import Callable

import pytest
import torch
from native_builds import native
from transformers.generation import logits_process as theirs

from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.sampling.filters import filter_logits
from spmd_worker.ops.sampling.processors import process_logits
from spmd_worker.replica.sequence.sampling_params import SamplingParams

VOCAB_SIZE = 211
EOS = (3, 7)
PROMPT, OUTPUT = [1, 2, 2, 3, 50], [4, 4, 5, 200]
IDS = torch.tensor([[*PROMPT, *OUTPUT]])


def random_logits(seed: int) -> torch.Tensor:
    """Without ties: of equal logits transformers keeps some, we all."""
    return 3 * torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


FILTERS: dict[str, tuple[dict[str, float], list[theirs.LogitsProcessor]]] = {
    "top-k 1": ({"top_k": 1}, [theirs.TopKLogitsWarper(1)]),
    "top-k 7": ({"top_k": 7}, [theirs.TopKLogitsWarper(7)]),
    "top-k of more than there are": ({"top_k": 500}, [theirs.TopKLogitsWarper(500)]),
    "top-p 0.1": ({"top_p": 0.1}, [theirs.TopPLogitsWarper(0.1)]),
    "top-p 0.9": ({"top_p": 0.9}, [theirs.TopPLogitsWarper(0.9)]),
    "top-p 0.999": ({"top_p": 0.999}, [theirs.TopPLogitsWarper(0.999)]),
    "min-p 0.05": ({"min_p": 0.05}, [theirs.MinPLogitsWarper(0.05)]),
    "min-p 1": ({"min_p": 1.0}, [theirs.MinPLogitsWarper(1.0)]),
    "top-k, then top-p": ({"top_k": 20, "top_p": 0.8}, [theirs.TopKLogitsWarper(20), theirs.TopPLogitsWarper(0.8)]),
    "min-p, then top-k": ({"min_p": 0.01, "top_k": 4}, [theirs.MinPLogitsWarper(0.01), theirs.TopKLogitsWarper(4)]),
}


@pytest.mark.guarantee("Filters")
@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_keeps_what_transformers_keeps(name: str):
    sampling, processors = FILTERS[name]
    for seed in range(20):
        logits = random_logits(seed)
        ours, expected = logits[0].clone(), logits
        filter_logits(CpuKernels(native()), ours.unsqueeze(0), [SamplingParams(**sampling)])
        for processor in processors:
            expected = processor(IDS, expected)
        assert torch.equal(ours, expected[0]), seed


@pytest.mark.control("Filters")
def test_the_comparison_of_filters_sees_another_number():
    """Negative control."""
    ours, logits = random_logits(0)[0].clone(), random_logits(0)
    filter_logits(CpuKernels(native()), ours.unsqueeze(0), [SamplingParams(top_k=8)])
    assert not torch.equal(ours, theirs.TopKLogitsWarper(7)(IDS, logits)[0])


def minimum(num_tokens: int) -> theirs.LogitsProcessor:
    return theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), num_tokens, list(EOS), device="cpu")


PROCESSORS: dict[str, tuple[dict[str, object], Callable[[], list[theirs.LogitsProcessor]]]] = {
    "repetition penalty": ({"repetition_penalty": 1.7}, lambda: [theirs.RepetitionPenaltyLogitsProcessor(1.7)]),
    "a penalty below 1": ({"repetition_penalty": 0.6}, lambda: [theirs.RepetitionPenaltyLogitsProcessor(0.6)]),
    "bias": (
        {"logit_bias": {0: 5.0, 210: -100.0, 7: 2.5}},
        lambda: [theirs.SequenceBiasLogitsProcessor({(0,): 5.0, (210,): -100.0, (7,): 2.5})],
    ),
    "fewer tokens than the minimum": ({"min_tokens": 5}, lambda: [minimum(5)]),
    "as many tokens as the minimum": ({"min_tokens": 4}, lambda: [minimum(4)]),
    "bias, then penalty": (
        {"logit_bias": {4: 2.0}, "repetition_penalty": 1.3},
        lambda: [
            theirs.SequenceBiasLogitsProcessor({(4,): 2.0}),
            theirs.RepetitionPenaltyLogitsProcessor(1.3),
        ],
    ),
}


def bad_words(ids: list[list[int]]) -> theirs.LogitsProcessor:
    return theirs.NoBadWordsLogitsProcessor(ids, eos_token_id=torch.tensor([210]))


def allowed(ids: list[int]) -> theirs.LogitsProcessor:
    return theirs.PrefixConstrainedLogitsProcessor(lambda _batch, _ids: ids, num_beams=1)


# The context ends in ..., 50, 4, 4, 5, 200: beginnings that are there, are not, and are longer than all of it.
BAD_WORDS = [
    *([7], [200], [200, 9], [5, 200, 10], [4, 200, 11], [200, 200, 12], [1, 2, 2, 3, 50, 4, 4, 5, 200, 13]),
    *([50, 4, 4, 5, 200, 14], [3, 4, 4, 5, 200, 15], [9, 1, 2, 2, 3, 50, 4, 4, 5, 200, 16], [*range(100, 150)]),
]
PROCESSORS |= {
    "bad words": ({"bad_words_ids": BAD_WORDS}, lambda: [bad_words(BAD_WORDS)]),
    "a bad word of one token": ({"bad_words_ids": [[0]]}, lambda: [bad_words([[0]])]),
    "bad words that begin elsewhere": ({"bad_words_ids": [[4, 9], [5, 5]]}, lambda: [bad_words([[4, 9], [5, 5]])]),
    "allowed tokens": ({"allowed_token_ids": [0, 210, 7]}, lambda: [allowed([0, 210, 7])]),
    "allowed tokens, then bad words": (
        {"allowed_token_ids": [0, 9, 7, 31], "bad_words_ids": BAD_WORDS},
        lambda: [allowed([0, 9, 7, 31]), bad_words(BAD_WORDS)],
    ),
    "allowed tokens, then bias and penalty": (
        {"allowed_token_ids": [4, 9], "logit_bias": {9: 3.0, 11: 5.0}, "repetition_penalty": 1.3},
        lambda: [
            allowed([4, 9]),
            theirs.SequenceBiasLogitsProcessor({(9,): 3.0, (11,): 5.0}),
            theirs.RepetitionPenaltyLogitsProcessor(1.3),
        ],
    ),
}


def processed(seed: int, sampling: dict[str, object]) -> torch.Tensor:
    values = random_logits(seed)
    row = SampleRow(SamplingParams(**sampling), 0, 0, len(PROMPT), PROMPT, OUTPUT)
    process_logits(values, [row], EOS)
    return values


@pytest.mark.guarantee("Sampling keys have vLLM's meanings")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_are_processed_as_transformers_does(name: str, seed: int):
    sampling, processors = PROCESSORS[name]
    expected = random_logits(seed)
    for processor in processors():
        expected = processor(IDS, expected)
    torch.testing.assert_close(processed(seed, sampling), expected, rtol=1e-6, atol=0)


@pytest.mark.control("Sampling keys have vLLM's meanings")
def test_the_comparison_of_processors_sees_another_number():
    """Negative control."""
    expected = theirs.RepetitionPenaltyLogitsProcessor(1.71)(IDS, random_logits(0))
    assert not torch.allclose(processed(0, {"repetition_penalty": 1.7}), expected, rtol=1e-6)


def test_mask_prefix_off_by_one_is_detected():
    """Negative control."""
    expected = bad_words([[5, 200, 10]])(IDS, random_logits(0))
    assert torch.equal(processed(0, {"bad_words_ids": [[5, 200, 10]]}), expected)
    assert not torch.equal(processed(0, {"bad_words_ids": [[4, 200, 10]]}), expected)


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        ({"allowed_token_ids": [9], "bad_words_ids": [[9]]}, [9]),
        ({"allowed_token_ids": [9, 10], "bad_words_ids": [[9], [200, 10]]}, [9, 10]),
        ({"allowed_token_ids": [9, 10], "bad_words_ids": [[9], [201, 10]]}, [10]),
        ({"allowed_token_ids": list(EOS), "min_tokens": 5}, list(EOS)),
        ({"allowed_token_ids": [*EOS, 8], "min_tokens": 5}, [8]),
    ],
)
def test_what_would_leave_no_token_is_not_forbidden(sampling: dict[str, object], left: list[int]):
    assert torch.nonzero(processed(0, sampling)[0].isfinite()).flatten().tolist() == left


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_before_the_filters_is_transformers(temperature: float):
    logits = random_logits(9)
    ours = logits.clone()
    filter_logits(CpuKernels(native()), ours, [SamplingParams(top_p=0.8, temperature=temperature)])
    expected = theirs.TopPLogitsWarper(0.8)(IDS, theirs.TemperatureLogitsWarper(temperature)(IDS, logits))
    assert torch.equal(ours.isfinite(), expected.isfinite())
