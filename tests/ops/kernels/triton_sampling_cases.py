"""Sampling on a GPU, interpreted on CPU tensors, beside its definition: run in a process of its own.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_sampling_cases.py
                                                                  prints {case: what went wrong, or ""}
    python tests/ops/kernels/triton_sampling_cases.py long            with the cases of the stress tier
    python tests/ops/kernels/triton_sampling_cases.py cuda            all of them on a GPU

Histories of rows on the device against `sampling/processors.py` over many steps, and whole samplers against the one
that composes the reference kernels on the CPU. Blocks are cut down, so that a small vocabulary has several.
"""

import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import torch

from spmd_worker.ops.kernels.api import LogitFilters
from spmd_worker.ops.kernels.random import random_bits
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.kernels.top_k import top_k
from spmd_worker.ops.kernels.triton import penalties, penalty_kernels, sampling, sampling_kernels
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.ops.kernels.triton.launching import is_interpreted
from spmd_worker.ops.kernels.triton.penalties import RowHistories
from spmd_worker.ops.sampling import read_back
from spmd_worker.ops.sampling.processors import process_logits
from spmd_worker.ops.sampling.sampler import Sampler
from spmd_worker.ops.sampling.token_masks import NO_MASKS, TokenMasks
from spmd_worker.ranks.communicator import single_group
from spmd_worker.replica.sequence.sampled import NON_FINITE, NOT_READ
from spmd_worker.replica.sequence.sampling_params import SamplingParams

EOS = (5, 9)
DEVICE = "cuda" if "cuda" in sys.argv else "cpu"
V = 131 if DEVICE == "cpu" else 1501


def kinds_of_rows(pick: Callable[[int], list[int]]) -> list[dict[str, object]]:
    """Nine kinds, of which the eighth forbids all that it allows."""
    return [
        {},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": -0.31},
        {"repetition_penalty": 0.8, "frequency_penalty": 0.11, "logit_bias": {i: 1.5 - i % 4 for i in pick(70)}},
        {"min_tokens": 3, "stop_token_ids": pick(3)},
        {"bad_words_ids": [pick(1), pick(2), [1, 2, 3], [*range(11), 4]], "repetition_penalty": 1.1},
        {"allowed_token_ids": pick(9), "bad_words_ids": [pick(1)]},
        {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 99, "bad_words_ids": [[5]]},
        {"allowed_token_ids": pick(30), "stop_token_ids": pick(9), "min_tokens": 2, "presence_penalty": 2.0,
         "repetition_penalty": 1e38},
    ]  # fmt: skip


def kind(number: int, rng: random.Random) -> SamplingParams:
    kinds = kinds_of_rows(lambda count: rng.sample(range(V), count))
    return SamplingParams(temperature=0.0, max_tokens=200, **kinds[number % len(kinds)]).frozen()


def new_row(number: int, rng: random.Random, num_outputs: int = 0) -> SampleRow:
    prompt = tuple(rng.randrange(V) for _ in range(1 + number % 14)) if number % 9 != 5 else (*range(11), 1, 2)
    outputs = [rng.randrange(V) for _ in range(num_outputs)]
    return SampleRow(kind(number, rng), number, 0, len(prompt), prompt, outputs)


def hostile(logits: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Minus infinity here and there, NaN, zeros of both signs, and rows with nothing left but a few."""
    for values in logits:
        what = rng.randrange(8)
        if what == 0:
            values[::7] = -torch.inf
        elif what == 1:
            values[rng.randrange(V)] = torch.nan
        elif what == 2:
            kept = values[3:5].clone()
            values[:] = -torch.inf
            values[3:5] = kept
        elif what == 3:
            values[:] = -torch.inf
        elif what == 4:
            values[::3], values[1::3] = 0.0, -0.0
    return logits


def defined(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """`process_logits` on the CPU. A token that is not read yet is replaced before: `histories_of` knows it."""
    on_cpu = logits.cpu().clone()
    process_logits(on_cpu, list(rows), EOS)
    return on_cpu


def are_equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Every bit, but of NaN."""
    found, expected = found.cpu(), expected.cpu()
    same = (found.view(torch.int32) == expected.view(torch.int32)) | (found.isnan() & expected.isnan())
    return bool(same.all())


def run_steps(num_steps: int, seed: int, *, is_ahead: bool = False) -> bool:
    """Rows that come, go, come back, fork and are sent again, in another order each step; whether all had the bits of
    the definition. With `is_ahead` the host learns of a token one step later, unless the row leaves.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    histories = RowHistories(V, EOS, torch.device(DEVICE))
    rows = [new_row(number, rng, number % 3) for number in range(9)]
    away: list[SampleRow] = []
    prepared, last, is_right = None, [], True
    unread: dict[int, int] = {}
    for step in range(num_steps):
        if step % 4 == 3:
            rows, away, unread = changed(rows, away, unread, rng)
            prepared = None
        if not (prepared is not None and last == [id(row) for row in rows] and histories.is_next(prepared)):
            prepared = histories.prepare(rows)
        last = [id(row) for row in rows]
        logits = hostile(torch.randn(len(rows), V, generator=generator) * 4, rng)
        with read(rows, unread):
            expected = defined(logits, rows)
        found = logits.to(DEVICE)
        histories.process_(found, prepared)
        is_right &= are_equal(found, expected)
        tokens = [rng.randrange(V) for _ in rows]
        tokens[0] = 3  # a word of many tokens is completed now and then
        histories.append_(prepared, torch.tensor(tokens, device=DEVICE))
        for row, token in zip(rows, tokens, strict=True):
            outputs = row.output_token_ids
            assert isinstance(outputs, list)
            if id(outputs) in unread:
                outputs[-1] = unread.pop(id(outputs))
            outputs.append(NOT_READ if is_ahead else token)
            if is_ahead:
                unread[id(outputs)] = token
    return is_right


class read:  # a context manager
    """Tokens that are not read yet, as the device knows them."""

    def __init__(self, rows: Sequence[SampleRow], unread: dict[int, int]) -> None:
        self._lists = [row.output_token_ids for row in rows if id(row.output_token_ids) in unread]
        self._unread = unread

    def __enter__(self) -> None:
        for outputs in self._lists:
            outputs[-1] = self._unread[id(outputs)]

    def __exit__(self, *_: object) -> None:
        for outputs in self._lists:
            outputs[-1] = NOT_READ


def changed(
    rows: list[SampleRow], away: list[SampleRow], unread: dict[int, int], rng: random.Random
) -> tuple[list[SampleRow], list[SampleRow], dict[int, int]]:
    """Two rows leave, those that had left come back, one is sent again, one forks, one is new; in another order."""
    left, stay = rows[:2], rows[2:]
    for row in (*left, stay[0], stay[1]):
        if id(row.output_token_ids) in unread:
            row.output_token_ids[-1] = unread.pop(id(row.output_token_ids))
    again = stay[0]._replace(output_token_ids=list(stay[0].output_token_ids))
    fork = stay[1]._replace(sample_index=7, output_token_ids=list(stay[1].output_token_ids))
    rows = [again, fork, *stay[1:10], *away, new_row(rng.randrange(90), rng)]
    rng.shuffle(rows)
    # Of rows that are gone for good: another list may get the address of theirs.
    alive = {id(row.output_token_ids) for row in (*rows, *left)}
    return rows, left, {key: token for key, token in unread.items() if key in alive}


def histories_have_the_bits_of_the_definition() -> None:
    assert run_steps(9, 1)


def histories_have_its_bits_a_step_ahead() -> None:
    assert run_steps(6, 2, is_ahead=True)


def histories_have_its_bits_over_many_steps() -> None:
    assert all(run_steps(40, seed, is_ahead=seed % 2 == 0) for seed in range(3, 9))


def histories_keep_what_they_have_when_tables_grow() -> None:
    rng, histories = random.Random(4), RowHistories(V, EOS, torch.device(DEVICE))
    rows = [new_row(number, rng) for number in (1, 5)]
    rows[1] = rows[1]._replace(sampling=SamplingParams(bad_words_ids=[[4, 8]], repetition_penalty=2.0).frozen())
    for count in (2, 2, 12, 40):
        while len(rows) < count:
            rows.append(new_row(len(rows), rng))
        prepared = histories.prepare(rows)
        logits = torch.randn(len(rows), V)
        expected, found = defined(logits, rows), logits.to(DEVICE)
        histories.process_(found, prepared)
        assert are_equal(found, expected), count
        tokens = [4] * len(rows)
        histories.append_(prepared, torch.tensor(tokens, device=DEVICE))
        for row in rows:
            row.output_token_ids.append(4)
        # A step whose ids the host does not know keeps them on the device.
        prepared = histories.prepare(rows)


def a_row_sampled_twice_starts_again() -> None:
    rng, histories = random.Random(5), RowHistories(V, EOS, torch.device(DEVICE))
    rows = [new_row(number, rng, 2) for number in range(9)]
    for _ in range(3):
        logits = torch.randn(len(rows), V)
        expected, found, prepared = defined(logits, rows), logits.to(DEVICE), histories.prepare(rows)
        histories.process_(found, prepared)
        assert are_equal(found, expected)
        histories.append_(prepared, torch.full((len(rows),), 3, device=DEVICE))
        assert not histories.is_next(prepared)


def a_row_whose_request_is_sent_again_keeps_its_state() -> None:
    """It goes ahead of its id, which is on the device alone."""
    rng, histories = random.Random(7), RowHistories(V, EOS, torch.device(DEVICE))
    rows = [new_row(number, rng, 2) for number in (1, 2, 3, 5, 8)]
    prepared = histories.prepare(rows)
    histories.append_(prepared, torch.full((len(rows),), 3, device=DEVICE))
    for row in rows:
        row.output_token_ids.append(NOT_READ)
    again = [row._replace(prompt_token_ids=(*row.prompt_token_ids,), sampling=_copy(row.sampling)) for row in rows]
    logits = torch.randn(len(rows), V)
    with read(again, {id(row.output_token_ids): 3 for row in rows}):
        expected = defined(logits, again)
    found = logits.to(DEVICE, copy=True)
    histories.process_(found, histories.prepare(again))
    assert are_equal(found, expected)


def _copy(sampling: SamplingParams) -> SamplingParams:
    return sampling.clone().frozen()


def a_row_alone_has_the_same_bits() -> None:
    rng = random.Random(6)
    rows = [new_row(number, rng, 4) for number in range(9)]
    logits = torch.randn(len(rows), V).to(DEVICE)
    found = logits.clone()
    histories = RowHistories(V, EOS, torch.device(DEVICE))
    histories.process_(found, histories.prepare(rows))
    for index, row in enumerate(rows):
        alone, histories = logits[index : index + 1].clone(), RowHistories(V, EOS, torch.device(DEVICE))
        histories.process_(alone, histories.prepare([row]))
        assert are_equal(alone, found[index : index + 1])


def control_a_stale_count_is_found() -> None:
    with mock.patch.object(RowHistories, "append_", lambda _, prepared, __: _note(prepared)):
        assert not run_steps(4, 1)


def _note(prepared: penalties.ProcessedRows) -> None:
    """The host believes that the device was given the tokens."""
    for slot in prepared.slots:
        if slot is not None:
            slot.num_known += 1


def control_a_slot_without_reset_is_found() -> None:
    with mock.patch.object(penalty_kernels, "clear", mock.MagicMock()), mock.patch.object(penalties, "_SLOTS_A_ROW", 1):
        assert not all(run_steps(12, seed) for seed in range(1, 5))


def control_a_key_without_its_sample_is_found() -> None:
    """A fork would take its parent's counts."""
    keys_of = penalties._keys_of

    def careless(rows: Sequence[SampleRow]) -> list:
        return [None if key is None else (0, 0, at) for at, key in enumerate(keys_of(rows))]

    has_tokens = mock.patch.object(penalties, "_is_known", mock.MagicMock(return_value=True))
    with mock.patch.object(penalties, "_keys_of", careless), has_tokens:
        assert not run_steps(12, 1)


def random_numbers_are_the_hosts() -> None:
    streams = [0, 1, 2**63, 2**64 - 1, 0x299F31D0A4093822]
    samples, positions = [0, 1, 7, 1023, 2**32 - 1], [0, 3, 1234, 2**31, 2**32 - 9]
    keys = torch.from_numpy(np.array([np.array(streams, np.uint64).view(np.int64), samples, positions]))
    for step in (0, 1, 5):
        expected = random_bits(streams, samples, np.array(positions) + step)
        assert sampling.random_bits(keys.to(DEVICE), step).tolist() == expected.tolist()
        assert ReferenceKernels().random_bits(keys, step).tolist() == expected.tolist()


def maxima_and_top_logits_are_the_references() -> None:
    rng = random.Random(8)
    for dtype in (torch.float32, torch.float16) if is_interpreted() else (torch.float32, torch.bfloat16):
        logits = hostile(torch.randn(8, V), rng).to(dtype)
        logits[2, [3, 40, 90]] = 9.0
        logits[3, 7] = torch.inf
        on_device = logits.to(DEVICE)
        for found, expected in zip(sampling.argmax(on_device), ReferenceKernels().argmax(logits), strict=True):
            same = (found.cpu() == expected) | (found.cpu().isnan() & expected.isnan())
            assert bool(same.all()), dtype
        for count, num_rows in ((1, 8), (3, 8), (V + 3, 1)):
            found = sampling.top_logits(on_device[:num_rows], count).tolist()
            for values, pairs in zip(logits, found):
                listed = [(int(token_id), value) for value, token_id in pairs if token_id >= 0]
                assert listed == top_k(values, count)[: len(listed)]
                assert len(listed) >= min(count, V) - int(values.isnan().sum())
                assert all(pair == [-1.0, -1.0] for pair in pairs[min(count, V) :])


def filtered_rows(seed: int) -> tuple[torch.Tensor, LogitFilters]:
    """Rows of every kind of filter: of few numbers and of many, of minus infinity, narrow and wide ones."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kinds = [(3, 1.0), (0, 0.5), (7, 0.9), (1, 0.1), (60, 0.999), (0, 1e-9), (400, 1.0), (130, 0.97), (40, 0.3)]
    scales = torch.tensor([[rng.choice((1e-6, 1.0, 9.0))] for _ in kinds])
    logits = torch.randn(len(kinds), V, generator=generator) * scales
    for values in logits:
        what = rng.randrange(5)
        if what == 0:
            values[:] = values.round()
        elif what == 1:
            values[rng.randrange(V) :] = -torch.inf
            values[0] = 1.0
        elif what == 2:
            values[:] = rng.choice((0.0, -2.5, 1e30))
        elif what == 3:
            values[::2], values[1::2] = 0.0, -0.0
    maxima = logits.amax(1)
    factors = torch.tensor([rng.choice((1.4, 0.01, 30.0)) for _ in kinds])
    lowest = torch.full((len(kinds),), -torch.inf)
    lowest[::3] = maxima[::3] - 2.0
    top_k, top_p = torch.tensor([each[0] for each in kinds]), torch.tensor([each[1] for each in kinds]).double()
    return logits, LogitFilters(maxima, factors, lowest, top_k, top_p)


def are_filtered_alike(seed: int) -> bool:
    logits, filters = filtered_rows(seed)
    expected, found = logits.clone(), logits.to(DEVICE, copy=True)
    ReferenceKernels().filter_(expected, filters)
    sampling.filter_(found, LogitFilters(*(each.to(DEVICE) for each in filters.tensors())))
    return are_equal(found, expected)


def filters_keep_what_the_reference_keeps() -> None:
    assert are_filtered_alike(1)


def filters_keep_it_with_longer_lists_too() -> None:
    assert all(are_filtered_alike(seed) for seed in range(2, 6))
    with mock.patch.object(sampling_kernels, "LISTED", 256):
        assert all(are_filtered_alike(seed) for seed in range(8, 12))


def asking() -> list[dict[str, object]]:
    return [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "logprobs": 3},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.2, "top_k": 7, "min_p": 0.01, "logprobs": 0, "return_sampling_mask": True},
        {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 1},
        {"temperature": 1e30, "frequency_penalty": 0.5, "logit_bias": {9: 3.0}},
        {"temperature": 1.0, "min_tokens": 3},
        {"temperature": 0.0, "bad_words_ids": [[7, each] for each in range(60, V)], "logprobs": -1},
        {"temperature": 1.0, "allowed_token_ids": list(range(90, 130)), "top_k": 3, "return_sampling_mask": True},
        {"temperature": 1e-4, "presence_penalty": 0.5},
        {"temperature": 0.0, "token_rules": {"timestamps": {"first_token_id": 80, "end_token_id": 50}}},
        {"temperature": 1.0, "token_rules": {"timestamps": {"first_token_id": 99, "end_token_id": 50}}, "logprobs": 2},
        {"temperature": 1.5, "token_rules": {"first_tokens": [3, 4]}},
    ]


def sampled(kernels: ReferenceKernels, device: str, mode: str, num_steps: int) -> list:
    """Steps of the same tuple of rows, then of other rows: each step's result."""
    rng = random.Random(9)
    generator = torch.Generator().manual_seed(9)
    sampler = Sampler(single_group(), 0, V, EOS, mode, kernels)
    rows = tuple(
        SampleRow(SamplingParams(**each).frozen(), 2**63 + index, index % 2, 3, (1, 2, 3), [7] * (index % 3))
        for index, each in enumerate(asking())
    )
    found = []
    for step in range(num_steps):
        if step == num_steps - 1:
            rows = tuple(row for index, row in enumerate(rows) if index % 5)
        logits = torch.randn(len(rows), V, generator=generator) * 2
        logits[:3] = hostile(logits[:3], rng)
        logits[3, 9] = torch.nan
        masks = NO_MASKS
        if step > 1:
            allowed = torch.full((2, -(-V // 32)), 0x0F0F0F0F, dtype=torch.int32, device=device)
            masks = TokenMasks(allowed, {1: 0, 4: 1}, (2,))
        result = sampler.sample(logits.to(device), rows, masks)
        found.append(result)
        for row, token in zip(rows, result.token_ids, strict=True):
            row.output_token_ids.append(max(token, 0))
    return found


def samplers_agree(mode: str, num_steps: int) -> None:
    expected = sampled(ReferenceKernels(), "cpu", mode, num_steps)
    found = sampled(TritonKernels(), DEVICE, mode, num_steps)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [each.kept_ids for each in found] == [each.kept_ids for each in expected]
    assert all(any(each.kept_ids) for each in expected)
    assert any(NON_FINITE in each.token_ids for each in expected)
    for one, other in zip(found, expected, strict=True):
        for entries, others in zip(one.logprobs, other.logprobs, strict=True):
            assert (entries is None) == (others is None)
            assert list(entries or ()) == list(others or ())
            for token, entry in (entries or {}).items():
                value = others[token].logprob
                # Weights are of powers in float32 here and in float64 there.
                assert entry.rank == others[token].rank
                assert entry.logprob == value or abs(entry.logprob - value) < 1e-5
    if DEVICE == "cpu" and num_steps > 4:
        with mock.patch.object(read_back, "_FREE_ON", ()):
            assert repr(sampled(TritonKernels(), DEVICE, mode, num_steps)) == repr(found)


def sampled_tokens_are_the_references() -> None:
    samplers_agree("raw_logprobs", 2 if "gate" in sys.argv else 3)


def processed_logprobs_are_the_references() -> None:
    samplers_agree("processed_logprobs", 5)


def control_a_position_that_stays_is_found() -> None:
    draw = TritonKernels.draw
    with mock.patch.object(TritonKernels, "draw", staticmethod(lambda x, how: draw(x, _still(how)))):
        found = sampled(TritonKernels(), DEVICE, "raw_logprobs", 4)
    expected = sampled(ReferenceKernels(), "cpu", "raw_logprobs", 4)
    assert [each.token_ids for each in found] != [each.token_ids for each in expected]


def _still(how: object) -> object:
    return type(how)(how.factors, how.keys, 0, how.otherwise)


CASES: tuple[Callable[[], None], ...] = (
    random_numbers_are_the_hosts,
    histories_have_its_bits_a_step_ahead,
    a_row_whose_request_is_sent_again_keeps_its_state,
    sampled_tokens_are_the_references,
    filters_keep_what_the_reference_keeps,
    control_a_stale_count_is_found,
)
LONG_CASES: tuple[Callable[[], None], ...] = (
    filters_keep_it_with_longer_lists_too,
    maxima_and_top_logits_are_the_references,
    histories_have_the_bits_of_the_definition,
    histories_keep_what_they_have_when_tables_grow,
    a_row_sampled_twice_starts_again,
    a_row_alone_has_the_same_bits,
    control_a_slot_without_reset_is_found,
    histories_have_its_bits_over_many_steps,
    processed_logprobs_are_the_references,
    control_a_key_without_its_sample_is_found,
    control_a_position_that_stays_is_found,
)


def run(case: Callable[[], None]) -> str:
    torch.manual_seed(7)
    begin = time.process_time()
    print(case.__name__, end=" ", file=sys.stderr, flush=True)
    try:
        case()
    except Exception:  # the other cases are still worth their answers
        return traceback.format_exc()
    finally:
        print(f"{time.process_time() - begin:.2f} s", file=sys.stderr, flush=True)
    return ""


def main() -> None:
    assert is_interpreted() == (DEVICE == "cpu"), "set TRITON_INTERPRET=1, or say cuda"
    torch.set_num_threads(1)
    # No fewer elements than threads on a GPU.
    scale = 1 if DEVICE == "cpu" else 16
    sampling_kernels.PIECE, sampling_kernels.BLOCK, sampling_kernels.PART = 16 * scale, 32 * scale, 64 * scale
    sampling_kernels.FILTER_BLOCK, sampling_kernels.LISTED = 64 * scale, 16 * scale
    penalty_kernels.BLOCK, penalty_kernels.WORDS = 64 * scale, 16
    cases = CASES if DEVICE == "cpu" and "long" not in sys.argv else (*CASES, *LONG_CASES)
    print(json.dumps({case.__name__: run(case) for case in cases}))


if __name__ == "__main__":
    main()
