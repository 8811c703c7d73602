"""Minimum length, bias and penalties against their formulas, written out one token at a time."""

import math
from collections import Counter

import pytest
import torch

from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.sampling.processors import process_logits
from spmd_worker.replica.sequence.sampling_params import SamplingParams

INF = math.inf
VOCAB_SIZE = 20
EOS = (3, 7)


def row(prompt: list[int] | None = None, output: list[int] | None = None, **sampling: object) -> SampleRow:
    prompt, output = prompt or [1], output or []
    return SampleRow(SamplingParams(**sampling), 0, 0, len(prompt), prompt, output)


def processed(rows: list[SampleRow], logits: torch.Tensor) -> torch.Tensor:
    values = logits.clone()
    process_logits(values, rows, EOS)
    return values


def naive(row: SampleRow, logits: list[float]) -> list[float]:
    """vLLM's order: minimum length, bias, repetition penalty, frequency and presence penalty."""
    sampling, values = row.sampling, list(logits)
    if len(row.output_token_ids) < sampling.min_tokens:
        for token in (*EOS, *sampling.stop_token_ids):
            values[token] = -INF
    for token, bias in sampling.logit_bias:
        values[token] += bias
    for token in dict.fromkeys([*row.prompt_token_ids, *row.output_token_ids]):
        penalty = sampling.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, count in Counter(row.output_token_ids).items():
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    return values


ROWS = [
    row(),
    row([1, 2, 2, 3], [4, 4, 5], repetition_penalty=1.7),
    row([1, 2, 2, 3], [4, 4, 5], repetition_penalty=0.6),
    row([1, 2], [4, 4, 4, 5], presence_penalty=0.5),
    row([1, 2], [4, 4, 4, 5], frequency_penalty=-0.75),
    row([1, 4], [4, 4, 4, 5], presence_penalty=-1.0, frequency_penalty=0.5, repetition_penalty=1.3),
    row([1, 2], [], presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=2.0),
    row(logit_bias={0: 5.0, 19: -100.0, "7": 2.5}),
    row([1], [2], min_tokens=2, stop_token_ids=[11]),
    row([1], [2, 2], min_tokens=2, stop_token_ids=[11]),
    row([3, 7], [3], min_tokens=5, logit_bias={3: 100.0}, repetition_penalty=1.5, frequency_penalty=1.0),
]


def test_penalties_skip_ids_beyond_the_vocabulary():
    logits = torch.linspace(-2, 2, VOCAB_SIZE).unsqueeze(0)
    sampling = {"repetition_penalty": 1.7, "presence_penalty": 0.5}
    expected = processed([row([1, 18], [4], **sampling)], logits)
    beyond = [row([1, VOCAB_SIZE, VOCAB_SIZE + 90, 18], [4], **sampling)]
    assert torch.equal(processed(beyond, logits), expected)
    assert not torch.equal(expected, logits)


@pytest.mark.parametrize("index", range(len(ROWS)))
def test_a_row_is_processed_by_its_formulas(index: int):
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(index))
    expected = torch.tensor([naive(ROWS[index], logits[0].tolist())])
    torch.testing.assert_close(processed([ROWS[index]], logits), expected)


def test_processors_change_no_other_row():
    logits = torch.randn(len(ROWS), VOCAB_SIZE, generator=torch.Generator().manual_seed(99))
    together = processed(ROWS, logits)
    for index, each in enumerate(ROWS):
        assert torch.equal(together[index], processed([each], logits[index : index + 1])[0])


def test_min_tokens_forbids_end_tokens_until_reached():
    logits = torch.zeros(1, VOCAB_SIZE)
    below = processed([row([1], [2], min_tokens=2, stop_token_ids=[11])], logits)[0]
    assert torch.nonzero(below == -INF).squeeze(1).tolist() == [3, 7, 11]
    reached = processed([row([1], [2, 2], min_tokens=2, stop_token_ids=[11])], logits)[0]
    assert torch.equal(reached, logits[0])


def test_no_bias_brings_a_forbidden_end_back():
    values = processed([row(min_tokens=1, logit_bias={3: 100.0})], torch.zeros(1, VOCAB_SIZE))[0]
    assert values[3] == -INF


@pytest.mark.parametrize("penalty", [1e-320, 1e-38, 1e38, 1e300])
def test_penalties_keep_logits_finite(penalty: float):
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    logits[0, 1] = 0.0
    values = processed([row([1, 2, 3, 5], [3], repetition_penalty=penalty, min_tokens=5)], logits)[0]
    assert torch.nonzero(values == -INF).squeeze(1).tolist() == list(EOS)
    assert values[[token for token in range(VOCAB_SIZE) if token not in EOS]].isfinite().all()
    assert values[1] == 0.0
    assert torch.equal(values[8:], logits[0, 8:])


@pytest.mark.parametrize(
    "changed", [{"repetition_penalty": 1.71}, {"presence_penalty": 0.01}, {"logit_bias": {4: 0.1}}]
)
def test_the_comparison_sees_another_parameter(changed: dict[str, object]):
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    given = {"prompt": [1, 2, 2, 3], "output": [4, 4, 5]}
    other = row(**given, **{"repetition_penalty": 1.7, **changed})
    expected = torch.tensor([naive(row(**given, repetition_penalty=1.7), logits[0].tolist())])
    assert not torch.allclose(processed([other], logits), expected, rtol=1e-4)
