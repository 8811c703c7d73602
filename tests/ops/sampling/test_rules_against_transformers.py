"""Rules of tokens against transformers' logits processors: answers to random logits, whole and by shards.

Logits of a step are a table's row for the last token and the position, so that answers differ by every choice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from native_builds import native
from thread_groups import on_ranks
from transformers import GenerationConfig
from transformers.generation import logits_process as theirs

from spmd_worker.model.layers.embedding import VocabularyShard
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.sampling import rule_choice
from spmd_worker.ops.sampling.sampler import Sampled, Sampler
from spmd_worker.ops.sampling.token_masks import TokenMasks
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.grammar.step_masks import ConstrainedRow, GrammarMasks
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampled import NON_FINITE
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.token_rules import TimestampRules, TokenRules

VOCAB_SIZE, EOS, LANGUAGES, TASK, NO_TIMESTAMPS, FIRST = 131, 60, (62, 63, 64), 70, 72, 73
PROMPT, NUM_TOKENS, NUM_ROWS = (61, 3, 4, 3), 14, 50
CPU = torch.device("cpu")


def whisper(first_index: int | None = 20) -> TokenRules:
    return TokenRules(
        suppress_tokens=(1, 2, 9, *range(61, 72)),
        begin_suppress_tokens=(5, EOS),
        timestamps=TimestampRules(FIRST, EOS, first_index),
    )


def their_timestamps(first_index: int | None, begin: int) -> theirs.LogitsProcessor:
    config = GenerationConfig(eos_token_id=EOS, no_timestamps_token_id=NO_TIMESTAMPS)
    config.max_initial_timestamp_index = first_index
    return theirs.WhisperTimeStampLogitsProcessor(config, begin_index=begin)


def their_whisper(first_index: int | None = 20, num_before: int = 0) -> list[theirs.LogitsProcessor]:
    begin = len(PROMPT) + num_before
    return [
        theirs.SuppressTokensAtBeginLogitsProcessor((5, EOS), begin),
        theirs.SuppressTokensLogitsProcessor((1, 2, 9, *range(61, 72))),
        their_timestamps(first_index, begin),
    ]


def their_lengths() -> list[theirs.LogitsProcessor]:
    """In the order of transformers: no repetition, then the minimum, then the forced end."""
    return [
        theirs.NoRepeatNGramLogitsProcessor(2),
        theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, [EOS], device="cpu"),
        theirs.ForcedEOSTokenLogitsProcessor(len(PROMPT) + NUM_TOKENS, EOS),
    ]


@dataclass(frozen=True)
class Case:
    rules: TokenRules
    processors: Callable[[], list[theirs.LogitsProcessor]]
    bias: float
    """Added to logits of timestamps: some answers have many of them."""


DETECTED = replace(whisper(), first_tokens=LANGUAGES, forced_tokens=(TASK,))
CASES = {
    "timestamps": Case(whisper(), their_whisper, 0.0),
    "few timestamps": Case(whisper(), their_whisper, -2.0),
    "any first timestamp": Case(whisper(None), lambda: their_whisper(None), -1.0),
    "detected language": Case(DETECTED, lambda: their_whisper(20, 2), -1.0),
    "lengths": Case(TokenRules(forced_eos_token_id=EOS, min_new_tokens=6, no_repeat_ngram_size=2), their_lengths, 0.0),
}


def step_logits(last_ids: list[int], position: int, bias: float) -> torch.Tensor:
    """[R, V]; the row's own table."""
    rows = []
    for index, last in enumerate(last_ids):
        generator = torch.Generator().manual_seed((index * 64 + position) * VOCAB_SIZE + last)
        rows.append(2 * torch.randn(VOCAB_SIZE, generator=generator))
    logits = torch.stack(rows)
    logits[:, FIRST:] += bias
    logits[:, EOS] += 1.0
    return logits


def their_answers(case: Case) -> list[list[int]]:
    """All of `NUM_TOKENS`; rows go on behind an end, as ours here."""
    ids = torch.tensor([PROMPT] * NUM_ROWS)
    processors = case.processors()
    for position in range(NUM_TOKENS):
        logits = step_logits(ids[:, -1].tolist(), position, case.bias)
        forced = position - bool(case.rules.first_tokens)
        if position < case.rules.begin_index:
            allowed = case.rules.first_tokens if forced < 0 else (case.rules.forced_tokens[forced],)
            logits = torch.full_like(logits, -torch.inf).index_copy(1, torch.tensor(allowed), logits[:, list(allowed)])
        else:
            for each in processors:
                logits = each(ids, logits)
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    return ids[:, len(PROMPT) :].tolist()


def our_step(logits: torch.Tensor, rows: list[SampleRow], masks: TokenMasks, size: int) -> Sampled:
    if size == 1:
        return Sampler(single_group(), 0, VOCAB_SIZE, (EOS,), "raw_logprobs").sample(logits, rows, masks)

    def run(group: GroupHandle) -> Sampled:
        shard = VocabularyShard(VOCAB_SIZE, size, group.rank)
        own = torch.full((len(rows), shard.size), -torch.inf)
        own[:, : shard.num_owned] = logits[:, shard.start : shard.stop]
        kernels = CpuKernels(native())
        return Sampler(group, shard.start, VOCAB_SIZE, (EOS,), "raw_logprobs", kernels).sample(own, rows, masks)

    found = on_ranks(size, run)
    assert all(each == found[0] for each in found)
    return found[0]


def masks_of(rules: TokenRules, outputs: list[list[int]]) -> TokenMasks:
    grammars = GrammarMasks(GrammarCompiler(lambda: None, VOCAB_SIZE, (EOS,)))
    rows = [
        ConstrainedRow(index, SequenceKey(RequestId(index), 0), None, ids, False, True, rules, PROMPT, NUM_TOKENS)
        for index, ids in enumerate(outputs)
    ]
    grammars.begin(rows)
    return TokenMasks.of_step(grammars.end(), CPU)


def our_answers(case: Case, size: int = 1, num_rows: int = NUM_ROWS, **sampling: object) -> list[list[int]]:
    params = SamplingParams(token_rules=case.rules, **{"temperature": 0.0, **sampling})
    outputs: list[list[int]] = [[] for _ in range(num_rows)]
    rows = [SampleRow(params, index, 0, len(PROMPT), PROMPT, ids) for index, ids in enumerate(outputs)]
    for position in range(NUM_TOKENS):
        logits = step_logits([(ids or PROMPT)[-1] for ids in outputs], position, case.bias)
        sampled = our_step(logits, rows, masks_of(case.rules, outputs), size)
        for ids, token_id in zip(outputs, sampled.token_ids, strict=True):
            ids.append(token_id)
    return outputs


@pytest.mark.parametrize("name", CASES)
def test_greedy_answers_equal_transformers(name: str):
    case = CASES[name]
    expected = their_answers(case)
    assert our_answers(case) == expected
    # By gathered logits.
    assert our_answers(case, num_rows=10, logprobs=2, logit_bias={4: 0.0}) == expected[:10]
    # Negative control: the rules matter in most answers.
    free = our_answers(Case(TokenRules(suppress_tokens=(130,)), case.processors, case.bias))
    assert sum(own != other for own, other in zip(expected, free, strict=True)) > NUM_ROWS // 2


@pytest.mark.parametrize("size", [2, 3])
def test_rules_hold_at_every_tensor_parallel_size(size: int):
    for name, sampling in (("few timestamps", {}), ("detected language", {"temperature": 1.0, "seed": 3})):
        assert our_answers(CASES[name], size, 12, **sampling) == our_answers(CASES[name], 1, 12, **sampling)


def test_comparison_of_probabilities_is_needed(monkeypatch: pytest.MonkeyPatch):
    """Negative control: without it answers have more text."""
    monkeypatch.setattr(rule_choice, "prefer_timestamps", lambda *given: None)
    assert our_answers(CASES["few timestamps"]) != their_answers(CASES["few timestamps"])


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_smallest_excess_of_timestamps_decides(size: int):
    """One timestamp as probable as the best text, and another of 2^-39 of that: float32 could not add them."""
    logits = torch.full((3, VOCAB_SIZE), -90.0)
    logits[:, 7] = 3.0
    logits[:, FIRST + 1] = 3.0
    logits[1, VOCAB_SIZE - 1] = 3.0 - 27.0
    logits[2, VOCAB_SIZE - 1] = torch.nan
    params = SamplingParams(temperature=0.0, token_rules=whisper())
    rows = [SampleRow(params, 0, 0, 3, PROMPT, [FIRST, 8]) for _ in range(3)]
    masks = masks_of(whisper(), [row.output_token_ids for row in rows])
    assert our_step(logits, rows, masks, size).token_ids == (7, FIRST + 1, NON_FINITE)


def test_detected_language_is_most_probable_at_any_temperature():
    case = CASES["detected language"]
    greedy = [ids[:2] for ids in our_answers(case)]
    for sampling in ({"temperature": 2.0}, {"temperature": 2.0, "top_k": 5}):
        found = our_answers(case, **sampling)
        assert [ids[:2] for ids in found] == greedy
        assert found != our_answers(case)
    # Negative control: as allowed tokens alone it would be drawn.
    drawn = [SamplingParams(temperature=2.0, allowed_token_ids=list(LANGUAGES))] * NUM_ROWS
    rows = [SampleRow(each, index, 0, 4, PROMPT, []) for index, each in enumerate(drawn)]
    logits = step_logits([PROMPT[-1]] * NUM_ROWS, 0, case.bias)
    assert list(our_step(logits, rows, TokenMasks.of_step(None, CPU), 1).token_ids) != [ids[0] for ids in greedy]
