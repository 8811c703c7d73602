"""From logits to token ids: the right distribution, a row that depends on nothing but itself, shards that agree.

Shards are played by threads; the vocabulary of 211 ids does not divide, and with 8 ranks most of them own nothing.
"""

import bisect
import itertools
import math
import random

import numpy as np
import pytest
import torch
from native_builds import native
from thread_groups import on_ranks

import spmd_worker.ops.sampling.sampler as sampler_module
import spmd_worker.ops.sampling.shard_logprobs as shard_module
from spmd_worker.base.config.schema import LOGPROBS_MODES
from spmd_worker.model.layers.embedding import VocabularyShard
from spmd_worker.ops.kernels import reference
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.random import random_shares
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.sampling.filters import exponent_factors
from spmd_worker.ops.sampling.read_back import ReadBack
from spmd_worker.ops.sampling.sampler import Sampled, Sampler
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.sampled import NON_FINITE
from spmd_worker.replica.sequence.sampling_params import ALL_LOGPROBS, SamplingParams

VOCAB_SIZE = 211
EOS = (5,)


def row(stream: int = 1, position: int = 4, sample: int = 0, **sampling: object) -> SampleRow:
    return SampleRow(SamplingParams(**sampling), stream, sample, 3, (1, 2, 3), [7] * (position - 3))


def whole(logits: torch.Tensor, rows: list[SampleRow], mode: str = "raw_logprobs") -> Sampled:
    return Sampler(single_group(), 0, logits.shape[1], EOS, mode).sample(logits, rows)


def sharded(logits: torch.Tensor, rows: list[SampleRow], size: int, mode: str = "raw_logprobs") -> list[Sampled]:
    """What every rank of the group says, in rank order."""

    def run(group: GroupHandle) -> Sampled:
        shard = VocabularyShard(VOCAB_SIZE, size, group.rank)
        mine = torch.full((logits.shape[0], shard.size), -torch.inf)
        mine[:, : shard.num_owned] = logits[:, shard.start : shard.stop]
        return Sampler(group, shard.start, VOCAB_SIZE, EOS, mode).sample(mine, rows)

    return on_ranks(size, run)


KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 7},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.1},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "frequency_penalty": 0.5, "logit_bias": {9: 3.0}},
    {"temperature": 1.0, "min_tokens": 9},
    {"temperature": 0.7, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.0, "allowed_token_ids": [0, 9, 104, 105, 106, 210]},
    {"temperature": 1.0, "allowed_token_ids": list(range(90, 130))},
    {"temperature": 0.0, "bad_words_ids": [[each] for each in range(0, VOCAB_SIZE, 2)]},
    {"temperature": 1.0, "bad_words_ids": [[7, each] for each in range(100, VOCAB_SIZE)], "top_k": 9},
]


def mixed(count: int = 60) -> tuple[torch.Tensor, list[SampleRow]]:
    logits = 2 * torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    return logits, [row(stream=index, position=4 + index % 3, **KINDS[index % len(KINDS)]) for index in range(count)]


def chi_square(ids: tuple[int, ...], probabilities: torch.Tensor) -> float:
    """In standard deviations, by Wilson and Hilferty's cube root; ids expected fewer than 5 times are one class."""
    counts = torch.bincount(torch.tensor(ids), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(ids)
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum().unsqueeze(0)))
    expected = torch.cat((expected[~rare], expected[rare].sum().unsqueeze(0)))
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


DRAWS = 20_000


def draws(logits: torch.Tensor, **sampling: object) -> tuple[int, ...]:
    first = row(stream=12345, **sampling)
    rows = [first._replace(first_position=index) for index in range(DRAWS)]
    return whole(logits.expand(DRAWS, -1).contiguous(), rows).token_ids


def test_samples_follow_softmax_with_temperature():
    logits = 1.5 * torch.randn(60, generator=torch.Generator().manual_seed(1))
    ids = draws(logits, temperature=0.8)
    assert abs(chi_square(ids, torch.softmax(logits / 0.8, -1))) < 4
    # Negative control: the same draws are not those of a temperature that is a twentieth higher.
    assert chi_square(ids, torch.softmax(logits / 0.84, -1)) > 4


def test_samples_follow_filtered_distribution():
    logits = 1.5 * torch.randn(60, generator=torch.Generator().manual_seed(2))
    ids = draws(logits, temperature=1.3, top_k=10)
    cut = torch.where(logits >= logits.topk(10).values[-1], logits / 1.3, -torch.inf)
    assert abs(chi_square(ids, torch.softmax(cut, -1))) < 4
    assert chi_square(ids, torch.softmax(logits / 1.3, -1)) > 4


def test_samples_of_many_streams_follow_softmax():
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3))
    first = row()
    rows = [first._replace(stream=index // 4, sample_index=index % 4) for index in range(DRAWS)]
    ids = whole(logits.expand(DRAWS, -1).contiguous(), rows).token_ids
    assert abs(chi_square(ids, torch.softmax(logits, -1))) < 4


def test_greedy_takes_argmax_and_smallest_id_of_ties():
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[0, 200], logits[1, [70, 130, 199]] = 1.0, 2.0
    assert whole(logits, [row(temperature=0)] * 3).token_ids == (200, 70, 0)
    for size in (2, 4, 8):
        assert [each.token_ids for each in sharded(logits, [row(temperature=0)] * 3, size)] == [(200, 70, 0)] * size


def test_plainly_greedy_rows_need_the_argmax_alone():
    plainly = [kind for kind in KINDS if row(**kind).is_plainly_greedy]
    assert plainly == [{"temperature": 0.0}, {"temperature": 0.0, "top_k": 3, "top_p": 0.1}]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shard_argmax_gives_tokens_of_all_logits(size: int):
    # Few values, so that equal ones lie in one shard and in several.
    logits = (2 * torch.randn(60, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))).round()
    logits[3] = -torch.inf

    expected = whole(logits, [row(temperature=0)] * len(logits))
    assert on_ranks(size, lambda group: argmax_of(group, logits)) == [expected] * size
    # Negative control: without the shards' beginnings, or with the last of equal values, other ids come out.
    last = VOCAB_SIZE - 1 - logits.flip(1).argmax(dim=1)
    assert tuple(last.tolist()) != expected.token_ids


def test_tiny_temperature_is_greedy():
    logits, _ = mixed(20)
    greedy = whole(logits, [row(stream=index, temperature=0) for index in range(20)]).token_ids
    for temperature in (1e-6, 1e-5, 2e-5, 1e-3):
        assert whole(logits, [row(stream=i, temperature=temperature) for i in range(20)]).token_ids == greedy


def test_sampled_token_independent_of_the_batch():
    logits, rows = mixed()
    together = whole(logits, rows)
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    shuffled = whole(logits[order], [rows[index] for index in order])
    for place, index in enumerate(order):
        alone = whole(logits[index : index + 1], [rows[index]])
        assert alone.token_ids[0] == shuffled.token_ids[place] == together.token_ids[index]
        expected = together.logprobs[index]
        assert shuffled.logprobs[place] == expected == (alone.logprobs[0] if alone.logprobs else None)


def test_sampling_by_batch_index_is_detected(monkeypatch: pytest.MonkeyPatch):
    """Negative control: randomness named by place gives other tokens in another order."""
    random_bits = sampler_module.random_bits
    monkeypatch.setattr(
        sampler_module,
        "random_bits",
        lambda streams, samples, places: random_bits([*range(len(streams))], samples, places),
    )
    logits, rows = mixed()
    together = whole(logits, rows).token_ids
    reverse = whole(logits.flip(0), rows[::-1]).token_ids[::-1]
    assert reverse != together


def test_the_logits_given_are_not_changed():
    logits, rows = mixed()
    before = logits.clone()
    whole(logits, rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_shards_sample_ids_of_the_complete_vocabulary(size: int):
    logits, rows = mixed(240)
    expected = whole(logits, rows)
    assert sharded(logits, rows, size) == [expected] * size


REPORTING = [
    {**kind, "logprobs": count}
    for count in (0, 1, 5, 64)
    for kind in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 3.0})
]
REPORTING += [{"temperature": 0.6, "logprob_token_ids": ids} for ids in ([210, 0, 27], [5])]


def reporting(dtype: torch.dtype) -> tuple[torch.Tensor, list[SampleRow]]:
    """Logits with equal ones in several shards, at the ends of shards too, for rows that report."""
    logits = 2 * torch.randn(len(REPORTING) * 3, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    logits[::2, [0, 26, 27, 105, 106, 210]] = 3.5
    return logits.to(dtype), [row(stream=i, **REPORTING[i % len(REPORTING)]) for i in range(len(logits))]


@pytest.mark.gate("2-*")
@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.matrix)])
def test_shard_logprobs_have_bits_of_the_complete_vocabulary(size: int, dtype, mode: str):
    logits, rows = reporting(dtype)
    expected = whole(logits, rows, mode)
    assert sharded(logits, rows, size, mode) == [expected] * size
    for index in (0, 1, 2, 6, len(rows) - 1):
        (alone, _) = sharded(logits[index : index + 1], [rows[index]], size, mode)[:2]
        assert alone.logprobs == expected.logprobs[index : index + 1]


@pytest.mark.parametrize("numbers", [1, 500, 3000])
def test_block_size_of_rows_changes_no_bit(numbers: int, monkeypatch: pytest.MonkeyPatch):
    logits, rows = reporting(torch.bfloat16)
    expected = sharded(logits, rows, 2)
    monkeypatch.setattr(reference, "_MAX_BLOCK_ELEMENTS", numbers)
    assert sharded(logits, rows, 2) == expected


@pytest.mark.gate("1", "2")
@pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.matrix), 2, pytest.param(8, marks=pytest.mark.matrix)]
)
def test_logprobs_independent_of_how_token_was_sampled(size: int):
    logits, _ = mixed(120)
    rows = [
        row(stream=i, **{**KINDS[i % len(KINDS)], "logprobs": (0, 3, ALL_LOGPROBS)[i // len(KINDS) % 3]})
        for i in range(len(logits))
    ]

    def run(group: GroupHandle) -> tuple[Sampled, list[TokenLogprobs]]:
        shard = VocabularyShard(VOCAB_SIZE, size, group.rank)
        mine = torch.full((logits.shape[0], shard.size), -torch.inf)
        mine[:, : shard.num_owned] = logits[:, shard.start : shard.stop]
        sampler = Sampler(group, shard.start, VOCAB_SIZE, EOS, "raw_logprobs")
        sampled = sampler.sample(mine, rows)
        return sampled, [
            sampler.report(mine[index : index + 1], [token_id], rows[index].sampling.logprobs)[0]
            for index, token_id in enumerate(sampled.token_ids)
        ]

    for sampled, reported in on_ranks(size, run):
        assert list(sampled.logprobs) == reported, "to the last bit"
        assert {1, 3, 4, VOCAB_SIZE} <= {len(each) for each in reported}


@pytest.mark.parametrize("what", ["sums", "counts", "likeliest"])
def test_missing_parts_of_shards_are_detected(monkeypatch: pytest.MonkeyPatch, what: str):
    logits, rows = reporting(torch.float32)
    expected = whole(logits, rows)
    if what == "sums":
        monkeypatch.setattr(
            sampler_module, "log_normalisers", lambda kernels, logits, largest, *_: torch.zeros_like(largest)
        )
    elif what == "counts":
        monkeypatch.setattr(
            reference.ReferenceKernels, "count_above", lambda self, logits, values: torch.zeros(len(logits)).long()
        )
    else:
        find = shard_module.top_k
        monkeypatch.setattr(shard_module, "top_k", lambda values, count: find(values, count)[1:])
    assert sharded(logits, rows, 2)[0] != expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_overflowed_rows_have_no_logprobs(value: float):
    logits, rows = reporting(torch.float32)
    broken = logits.clone()
    broken[::3, 50:] = value
    found = sharded(broken, rows, 2)
    assert [each.token_ids for each in found] == [whole(broken, rows).token_ids] * 2
    kept = [index for index in range(len(rows)) if index % 3]
    expected = sharded(logits, rows, 2)[0]
    assert [found[1].logprobs[index] for index in kept] == [expected.logprobs[index] for index in kept]
    if value != -float("inf"):
        assert {found[0].token_ids[index] for index in range(0, len(rows), 3)} == {NON_FINITE}
        assert {found[0].logprobs[index] for index in range(0, len(rows), 3)} == {None}


def test_forbidden_token_is_never_sampled():
    logits, _ = mixed(40)
    odd = list(range(1, VOCAB_SIZE, 2))
    for temperature in (0.0, 1.0):
        only = [row(stream=index, temperature=temperature, allowed_token_ids=odd) for index in range(40)]
        never = [
            row(stream=index, temperature=temperature, bad_words_ids=[[each - 1] for each in (*odd, VOCAB_SIZE)])
            for index in range(40)
        ]
        plain = [row(stream=index, temperature=temperature) for index in range(40)]
        for size in (1, 2, 4):
            for masked in (only, never):
                (ids, *others) = [each.token_ids for each in sharded(logits, masked, size)]
                assert all(each == ids for each in others)
                assert set(ids) <= set(odd)
            # Negative control: without the mask even ones come.
            assert not set(sharded(logits, plain, size)[0].token_ids) <= set(odd)


def test_masked_row_is_not_plainly_greedy():
    """Or its step would take the largest logit before anything is forbidden."""
    assert row(temperature=0.0).is_plainly_greedy
    for masked in ({"allowed_token_ids": [1]}, {"bad_words_ids": [[1]]}):
        assert not row(temperature=0.0, **masked).is_plainly_greedy


def test_shards_without_first_id_are_detected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(VocabularyShard, "start", property(lambda self: 0, lambda self, value: None), raising=False)
    logits, rows = mixed(24)
    assert sharded(logits, rows, 2)[0].token_ids != whole(logits, rows).token_ids


def test_greedy_and_temperature_rows_exchange_no_logits():
    def run(kind: dict[str, object]) -> int:
        def count(group) -> int:
            shard = VocabularyShard(VOCAB_SIZE, 2, group.rank)
            Sampler(group, shard.start, VOCAB_SIZE, EOS, "raw_logprobs").sample(
                torch.zeros(12, shard.size), [row(stream=index, **kind) for index in range(12)]
            )
            return group.num_gathered_elements

        return on_ranks(2, count)[0]

    kinds = {
        "greedy": {"temperature": 0.0},
        "plain": {},
        "filtered": {"top_k": 5},
        "plain that reports": {"logprobs": 0},
        "tempered that reports": {"logprobs": 0, "temperature": 0.5},
        "greedy that reports three": {"logprobs": 3, "temperature": 0.0},
    }
    # A logit and a count, the latter as a pair; the sum unless the draw had it; pairs of the likeliest.
    assert {name: run(kind) / 12 for name, kind in kinds.items()} == {
        "greedy": 2,
        "plain": 2 + 1 + 1,
        "filtered": 128,
        "plain that reports": 4 + 1 + 1 + 2,
        "tempered that reports": 4 + 1 + 1 + 2,
        "greedy that reports three": 2 + 1 + 1 + 2 + 3 * 2,
    }


def test_raw_logprobs_are_those_before_anything_was_changed():
    logits, _ = mixed(1)
    sampled = whole(logits, [row(temperature=0.5, top_k=2, logit_bias={8: 50.0}, logprobs=5)])
    assert sampled.token_ids == (8,)
    expected = torch.log_softmax(logits[0].double(), -1)
    entries = sampled.logprobs[0]
    assert list(entries) == [8, *(token for token in expected.topk(5).indices.tolist() if token != 8)]
    for token, entry in entries.items():
        assert abs(entry.logprob - float(expected[token])) < 1e-5
        assert entry.rank == int((expected > expected[token]).sum()) + 1


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_ranked_row_gets_logprobs_0(mode: str):
    logits, _ = mixed(3)
    for kind in ({}, {"temperature": 0.5, "top_k": 4}, {"temperature": 0.0}):
        ranked = [row(stream=index, n=2, best_of=3, **kind) for index in range(3)]
        asked = [row(stream=index, n=3, logprobs=0, **kind) for index in range(3)]
        assert whole(logits, ranked, mode) == whole(logits, asked, mode)
        assert sharded(logits, ranked, 2, mode) == sharded(logits, asked, 2, mode)


def test_row_returning_all_samples_gets_no_logprobs():
    logits, _ = mixed(1)
    assert whole(logits, [row(n=3, best_of=3)]).logprobs == ()


def test_processed_logprobs_are_those_that_were_drawn_from():
    logits, _ = mixed(1)
    rows = [row(temperature=0.5, top_k=4, repetition_penalty=1.5, logprobs=4)]
    sampled = whole(logits, rows, "processed_logprobs")
    values = logits[0].double().clone()
    for token in (1, 2, 3, 7):
        values[token] = values[token] / 1.5 if values[token] > 0 else values[token] * 1.5
    values = torch.where(values >= values.topk(4).values[-1], values / 0.5, -torch.inf)
    expected = torch.log_softmax(values, -1)
    assert set(sampled.logprobs[0]) == set(expected.topk(4).indices.tolist())
    for token, entry in sampled.logprobs[0].items():
        assert abs(entry.logprob - float(expected[token])) < 1e-5


@pytest.mark.parametrize("size", [1, 2, 8])
def test_tempered_logprobs_are_of_logits_over_temperature(size: int):
    """What a trainer computes of a completion, whatever the token was chosen among."""
    logits, _ = mixed(6)
    kinds = [{}, {"top_k": 4}, {"top_p": 0.5, "min_p": 0.1}, {"repetition_penalty": 1.5}, {"logit_bias": {8: 9.0}}]
    rows = [row(stream=i, temperature=0.5, logprobs=4, **kind) for i, kind in enumerate(kinds)]
    rows.append(row(temperature=0.0, logprobs=4))
    expected = torch.log_softmax(logits.double() / torch.tensor([[0.5]] * 5 + [[1.0]]), -1)
    sampled = sharded(logits, rows, size, "tempered_logprobs")
    assert all(each == sampled[0] for each in sampled)
    for values, token_id, entries in zip(expected, sampled[0].token_ids, sampled[0].logprobs, strict=True):
        assert set(entries) == {token_id, *values.topk(4).indices.tolist()}
        for token, entry in entries.items():
            assert abs(entry.logprob - float(values[token])) < 1e-5
    # The other mode is the control: of rows that were filtered or penalised it reports others.
    processed = sharded(logits, rows, size, "processed_logprobs")[0].logprobs
    differ = [mine != theirs for mine, theirs in zip(sampled[0].logprobs, processed, strict=True)]
    assert differ == [False, True, True, True, True, False]


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("size", [1, 4])
def test_listed_ids_have_the_logprobs_of_all(size: int, mode: str):
    logits, _ = mixed(3 * len(KINDS))
    kinds = [KINDS[index % len(KINDS)] for index in range(len(logits))]
    ids = [[200, 3], [9], [], [VOCAB_SIZE - 1, 0, 100, 7]]
    asking = [{"logprob_token_ids": ids[index % 4] or None, "logprobs": None} for index in range(len(kinds))]
    every = whole(logits, [row(stream=i, **{**kind, "logprobs": -1}) for i, kind in enumerate(kinds)], mode)
    rows = [row(stream=i, **{**kind, **asks}) for i, (kind, asks) in enumerate(zip(kinds, asking, strict=True))]
    for sampled in sharded(logits, rows, size, mode):
        assert sampled.token_ids == every.token_ids
        for index, (found, all_of_it) in enumerate(zip(sampled.logprobs, every.logprobs, strict=True)):
            wanted = dict.fromkeys([sampled.token_ids[index], *ids[index % 4]])
            if not ids[index % 4]:
                assert found is None
                continue
            assert {token: entry.logprob for token, entry in found.items()} == {
                token: all_of_it[token].logprob if token in all_of_it else -torch.inf for token in wanted
            }
            above = [sum(each.logprob > entry.logprob for each in all_of_it.values()) for entry in found.values()]
            assert mode == "processed_logprobs" or [entry.rank - 1 for entry in found.values()] == above


def test_a_row_below_its_minimum_never_ends():
    logits = torch.zeros(200, VOCAB_SIZE)
    logits[:, 5] = 50.0
    below = [row(stream=index, min_tokens=9) for index in range(200)]
    assert 5 not in whole(logits, below).token_ids
    reached = [each._replace(output_token_ids=[7] * 9) for each in below]
    assert dict.fromkeys(whole(logits, reached).token_ids) == {5: None}


HOSTILE = [
    {"repetition_penalty": 1e-40},
    {"repetition_penalty": 1e-320, "top_p": 0.5},
    {"repetition_penalty": 1e300},
    {"repetition_penalty": 1e300, "temperature": 0.0},
    {"min_tokens": 9, "stop_token_ids": list(range(VOCAB_SIZE))},
    {"min_tokens": 9, "stop_token_ids": list(range(VOCAB_SIZE)), "top_k": 3, "top_p": 0.5, "min_p": 0.1},
    {"temperature": 1e300},
    {"temperature": 1e300, "top_k": 5, "top_p": 0.5},
    {"temperature": 1.1e-5, "top_p": 0.1, "min_p": 1.0},
    {"logit_bias": {8: -100.0}, "repetition_penalty": 1e30, "frequency_penalty": 2.0},
]


@pytest.mark.parametrize("logprobs", [None, 3])
@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_no_parameters_lead_outside_the_vocabulary(mode: str, logprobs: int | None):
    """Each of these rows once sampled the id after the last, which ended the job for all others."""
    logits, _ = mixed(len(HOSTILE))
    logits[:, 9] = 0.0
    rows = [row(stream=index, logprobs=logprobs, **kind) for index, kind in enumerate(HOSTILE)]
    sampled = whole(logits, rows, mode)
    assert all(0 <= token < VOCAB_SIZE for token in sampled.token_ids)
    for size in (2, 8):
        assert [each.token_ids for each in sharded(logits, rows, size, mode)] == [sampled.token_ids] * size


@pytest.mark.gate("part0-nan-8", "part1-nan-8", "part2--inf-8", "part2-inf-2", "*-inf-1")
@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", [slice(0, 1), slice(50, 53), slice(VOCAB_SIZE - 1, VOCAB_SIZE), slice(0, VOCAB_SIZE)])
def test_nonfinite_row_gets_no_id_on_any_rank(part: slice, value: float, size: int):
    logits, rows = mixed(len(KINDS))
    clean = whole(logits.clone(), rows)
    neighbours = logits.clone()
    logits[:, part] = value
    sampled = sharded(torch.cat((logits, neighbours)), rows + rows, size)
    assert sampled == sampled[:1] * size
    token_ids, logprobs = sampled[0].token_ids, sampled[0].logprobs
    # Of tokens that are impossible there may be some: those that are left are chosen from.
    is_left = value == -float("inf") and part != slice(0, VOCAB_SIZE)
    assert [token == NON_FINITE for token in token_ids[: len(KINDS)]] == [not is_left] * len(KINDS)
    assert is_left or logprobs[: len(KINDS)] == (None,) * len(KINDS)
    assert token_ids[len(KINDS) :] == clean.token_ids, "the rows beside it are as they were"
    argmaxes = on_ranks(size, lambda group: argmax_of(group, torch.cat((logits, neighbours))))
    greedy = [row(temperature=0)] * (2 * len(KINDS))
    assert argmaxes == [whole(torch.cat((logits, neighbours)), greedy)] * size


def argmax_of(group: GroupHandle, logits: torch.Tensor) -> Sampled:
    """What `launch_argmax` says of a rank's shard."""
    shard = VocabularyShard(VOCAB_SIZE, group.size, group.rank)
    mine = torch.full((len(logits), shard.size), -torch.inf)
    mine[:, : shard.num_owned] = logits[:, shard.start : shard.stop]
    sampler = Sampler(group, shard.start, VOCAB_SIZE, EOS, "raw_logprobs")
    return sampler.launch_argmax(*mine.max(dim=1), ReadBack()).collect()


def test_sampler_that_ignores_nonfinite_rows_is_detected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampler_module, "_where_finite", lambda values, ids, otherwise=-1: ids.long())
    with pytest.raises(AssertionError):
        test_nonfinite_row_gets_no_id_on_any_rank(slice(0, 1), float("nan"), 1)


def test_shares_of_a_total_are_exact():
    generator = random.Random(3)
    cases = [(generator.getrandbits(53), generator.getrandbits(1 + index % 62)) for index in range(2000)]
    cases += [(2**53 - 1, 2**62 - 1), (0, 2**62 - 1), (2**53 - 1, 2**40), (1, 1), (2**52, 3)]
    bits, totals = torch.tensor(cases, dtype=torch.int64).unbind(1)
    assert random_shares(bits, totals).tolist() == [one * other >> 53 for one, other in cases]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_match_definition_in_plain_python(dtype: torch.dtype):
    """A row draws the first id whose running mass exceeds its share of the whole; masses by the compiled kernels."""
    kernels = CpuKernels(native())
    logits = (3 * torch.randn(60, 1500, generator=torch.Generator().manual_seed(4))).to(dtype)
    rows = [row(stream=index, temperature=(0.5, 1.0, 2.0)[index % 3]) for index in range(60)]
    found = Sampler(single_group(), 0, 1500, EOS, "raw_logprobs", kernels).sample(logits, rows).token_ids
    for index, each in enumerate(rows):
        largest, factor = (
            logits[index].max().reshape(1).float(),
            torch.from_numpy(exponent_factors([each.sampling.temperature])),
        )
        columns = logits[index].unsqueeze(1)
        masses = kernels.prob_sums(columns, largest.expand(1500).contiguous(), factor.expand(1500).contiguous())
        running = list(itertools.accumulate(masses.flatten().tolist()))
        bits = int(sampler_module.random_bits([each.stream], [each.sample_index], [each.position])[0])
        assert found[index] == bisect.bisect_right(running, bits * running[-1] >> 53), index


def test_row_is_uniform_at_maximum_temperature():
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3))
    assert abs(chi_square(draws(logits, temperature=1e300), torch.full((40,), 1 / 40))) < 4


def test_the_hosts_generators_are_untouched_by_sampling():
    logits, rows = mixed()
    before = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
    whole(logits, rows)
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before
