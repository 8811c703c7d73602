"""Kernels of GPUs that choose, list and compress keys, interpreted on CPU tensors: see triton_cases.py, whose process
and words these share.

TRITON_INTERPRET=1 python tests/ops/kernels/triton_listed_cases.py          prints {case: what went wrong, or ""}
TRITON_INTERPRET=1 python tests/ops/kernels/triton_listed_cases.py gate     fewer tokens in other tiles
python tests/ops/kernels/triton_listed_cases.py cuda                        the same on a GPU
"""

import json
import sys
from collections.abc import Callable
from itertools import accumulate
from unittest import mock

import torch
from torch import Tensor
from triton_attention_cases import tiles
from triton_cases import assert_near, in_gate, run

from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.attention.triton import TritonBackend, TritonFixedAttention
from spmd_worker.ops.kernels.group_keys import GroupKeys
from spmd_worker.ops.kernels.triton import attention_kernels, listed, listed_kernels
from spmd_worker.ops.kernels.triton.attention import Tile
from spmd_worker.ops.kernels.triton.launching import is_interpreted

BLOCK, RATE, PLACES = 8, 3, 3
Chunk = tuple[int, int]
"""First token of a sequence that a step computes, and the end."""
LENGTHS = (23, 2, 50)


def step_of(chunks: list[Chunk]) -> AttentionMetadata:
    """Blocks of sequence i are i, i + 3, i + 6 and so on."""
    tables = torch.arange(len(LENGTHS)).unsqueeze(1) + torch.arange(8) * len(LENGTHS)
    used = [(index, *chunk) for index, chunk in enumerate(chunks) if chunk[0] < chunk[1]]
    positions = torch.cat([torch.arange(first, end) for _, first, end in used])
    blocks = torch.cat([tables[index, torch.arange(first, end) // BLOCK] for index, first, end in used])
    starts = (0, *accumulate(end - first for _, first, end in used))
    lengths, own = tuple(end for _, _, end in used), tables[[index for index, _, _ in used]]
    return AttentionMetadata(starts, lengths, own, blocks, positions % BLOCK)


WHOLE = [(0, length) for length in LENGTHS]
CUTS = ([(20, 23), (0, 0), (31, 50)], [(22, 23), (1, 2), (49, 50)], [(0, 0), (0, 0), (17, 18)])


def rows_of(chunks: list[Chunk]) -> Tensor:
    """Indices of the tokens of a step among all."""
    before = (0, *accumulate(LENGTHS))
    return torch.cat([torch.arange(start + first, start + end) for start, (first, end) in zip(before, chunks)])


def view_of(layer: Tensor, first: int, *shape: int) -> Tensor:
    """A part of each block of a cache [blocks, elements]."""
    size = shape[0] * shape[1]
    return layer[:, first : first + size].unflatten(1, shape)


def best_of(scores: Tensor, num_chosen: int) -> Tensor:
    """Stable: of equal scores the lower number is first."""
    return scores.sort(descending=True, stable=True).indices[:num_chosen].sort().values


def tokens_are_placed_and_padding_is_nowhere() -> None:
    starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([0, 3, 4, 4, 90], [7, 1, 5, 300]))
    sequences, positions = (torch.full((95,), 77, dtype=torch.int32) for _ in range(2))
    listed.place_tokens(starts, lengths, 4, sequences, positions)
    assert sequences[:90].tolist() == [0] * 3 + [1] + [3] * 86
    assert positions.tolist() == [4, 5, 6, 0, *range(214, 300), *[-1] * 5]


def best_scores_are_chosen_and_ties_by_number() -> None:
    """Few different scores, and of all sizes; a program has several parts of a row."""
    num_seen = torch.tensor([200, 6, 5, 1, 0, 137], dtype=torch.int32)
    scores = torch.randn(6, 200) * torch.randint(0, 2, (6, 200)) * 10.0 ** torch.randint(-9, 9, (6, 200))
    # Zeros of both signs are one score.
    scores = scores + 0.0
    scores[0] = -scores[0].abs().sign() + 0.0
    chosen = torch.full((6, 6), -7, dtype=torch.int32)
    listed_kernels.choose_keys[(6,)](scores, num_seen - 1, chosen, 0, 6, 200, 6, RATE=1, BATCH=32)
    for row, count in enumerate(num_seen.tolist()):
        expected = best_of(scores[row, :count], 6)
        assert chosen[row, : len(expected)].tolist() == expected.tolist(), (row, chosen[row], expected)
        assert (chosen[row, len(expected) :] == -7).all()


def choices_are_those_of_the_formula_for_any_batch() -> None:
    """Keys of tokens and of groups, one head size that is two powers of two; not of heads that are a power of two."""
    for rate, heads, size, dtype in ((1, 5, 24, torch.float32), (RATE, 4, 16, torch.float16)):
        num_chosen, layer = 6, torch.full((24, 40 + BLOCK * size), torch.nan).to(dtype)
        keys = view_of(layer, 8, BLOCK if rate == 1 else PLACES, size)
        count, step, backend = sum(LENGTHS), step_of(WHOLE), TritonBackend()
        queries, weights = torch.randn(count, heads, size).to(dtype), torch.randn(count, heads)
        values = torch.randn(count, size).to(dtype)
        of_device = backend.listed_keys()(step, BLOCK)
        of_device.write(values, keys, BLOCK, rate)
        found = of_device.choose(queries, weights, keys, BLOCK, num_chosen, rate)
        places = ((step.token_blocks, step.token_offsets // rate), rows_of(WHOLE))
        for token, position in enumerate(torch.cat([torch.arange(length) for length in LENGTHS]).tolist()):
            first = token - position
            own = first + rate - 1 + torch.arange((position + 1) // rate) * rate
            assert torch.equal(keys[places[0][0][own], places[0][1][own]], values[own])
            products = (queries[token].double() @ values[own].double().T).relu()
            scores = (products * weights[token].double().unsqueeze(1)).sum(0)
            expected = best_of(scores, num_chosen)
            assert found[token, : len(expected)].tolist() == expected.tolist(), (rate, token)
        for cut in CUTS:
            rows = rows_of(cut)
            tokens = backend.listed_keys()(step_of(cut), BLOCK)
            again = tokens.choose(queries[rows], weights[rows], keys, BLOCK, num_chosen, rate)
            seen = (step_positions(cut) + 1) // rate
            inside = torch.arange(num_chosen) < seen.unsqueeze(1)
            assert torch.equal(again[inside], found[rows][inside])
        with mock.patch.object(listed, "_SCORES", 100):
            again = of_device.choose(queries, weights, keys, BLOCK, num_chosen, rate)
        inside = torch.arange(num_chosen) < ((step_positions(WHOLE) + 1) // rate).unsqueeze(1)
        assert torch.equal(again[inside], found[inside])


def step_positions(chunks: list[Chunk]) -> Tensor:
    return torch.cat([torch.arange(first, end) for first, end in chunks])


class Attended:
    """Keys of tokens and of groups of one layer, in one cache; what nobody has written is NaN."""

    def __init__(self, heads: int, size: int, window: int, *, chooses: bool) -> None:
        self.layer = torch.full((24, (BLOCK + PLACES) * size + 16), torch.nan)
        self.keys = self.layer[:, : BLOCK * size].view(24, 1, 1, BLOCK, size)
        self.entries = view_of(self.layer, BLOCK * size + 16, PLACES, size)
        count, self.window, self.size = sum(LENGTHS), window, size
        self.queries, self.values = torch.randn(count, heads, size), torch.randn(count, size)
        self.groups, self.sinks = torch.randn(count, size), torch.randn(heads)
        self.numbers: Tensor | None = None
        if chooses:
            order = [torch.arange(max(int(each + 1) // RATE, 0)) for each in step_positions(WHOLE)]
            self.numbers = torch.zeros(count, 4, dtype=torch.int32)
            for row, each in zip(self.numbers, order):
                own = each[torch.randperm(len(each))[:4]].sort().values
                row[: len(own)] = own
        step, backend = step_of(WHOLE), TritonBackend()
        backend.write(self.values.unsqueeze(1), None, self.keys, step)
        backend.listed_keys()(step, BLOCK).write(self.groups, self.entries, BLOCK, RATE)

    def attend(self, chunks: list[Chunk]) -> Tensor:
        rows = rows_of(chunks)
        numbers = None if self.numbers is None else self.numbers[rows]
        groups = GroupKeys(self.entries, RATE, 100 if numbers is None else 4, numbers)
        tokens = TritonBackend().listed_keys()(step_of(chunks), BLOCK)
        given = (self.queries[rows], self.keys, 0.3, self.size, groups, self.window)
        return tokens.attend(*given, sinks=self.sinks)

    def listed(self, token: int, position: int) -> Tensor:
        """Its keys, those of tokens first."""
        own = self.values[max(token - self.window + 1, token - position) : token + 1]
        numbers = torch.arange((position + 1) // RATE)
        if self.numbers is not None:
            numbers = self.numbers[token, : len(numbers)].long()
        return torch.cat((own, self.groups[token - position + numbers * RATE + RATE - 1]))

    def alone(self, keys: Tensor, query: Tensor) -> Tensor:
        """Attention of one query to keys that are copied into blocks, by the kernels of sequences."""
        count, backend = len(keys), TritonBackend()
        cache = torch.full((-(-count // BLOCK), 1, 1, BLOCK, self.size), torch.nan)
        at = torch.arange(count)
        tables = torch.arange(len(cache)).unsqueeze(0)
        backend.write(
            keys.unsqueeze(1), None, cache, AttentionMetadata((0, count), (count,), tables, at // BLOCK, at % BLOCK)
        )
        step = AttentionMetadata((0, 1), (count,), tables, at[-1:] // BLOCK, at[-1:] % BLOCK)
        return backend.attend(query, cache, step, 0.3, 0, sinks=self.sinks, value_size=self.size)


def lists_have_the_bits_of_copied_keys() -> None:
    """Windows that fill a list's segment and do not, entries by choice and all, tokens before the first group."""
    for heads, size, window, chooses in ((4, 16, 5, True), (18, 24, 40, False)):
        step = Attended(heads, size, window, chooses=chooses)
        found = step.attend(WHOLE)
        for token in (0, 1, 2, 22, 23, 24, 26, 40, 74):
            position = int(step_positions(WHOLE)[token])
            keys, query = step.listed(token, position), step.queries[token : token + 1]
            assert torch.equal(found[token], step.alone(keys, query)[0]), (heads, token)
            scores = query[0].double() @ keys.double().T * 0.3
            weights = torch.cat((scores, step.sinks.double().unsqueeze(1)), 1).softmax(1)[:, :-1]
            assert_near(found[token], weights @ keys.double(), torch.float32)
        for cut in CUTS:
            assert torch.equal(step.attend(cut), found[rows_of(cut)])
        for few, many in ((Tile(32, 4, 2, 1), Tile(64, 4, 2, 1)), (Tile(64, 4, 2, 1), Tile(32, 4, 2, 1))):
            if in_gate() and heads > 4:
                break
            with tiles(few=few, many=many), mock.patch.object(listed, "_MOST_HEADS", {0: 64}):
                for chunks in CUTS[:2] if in_gate() else (WHOLE,):
                    assert torch.equal(step.attend(chunks), found[rows_of(chunks)])
        # Control: another order of the same keys is another sum.
        keys = step.listed(74, 49)
        assert not torch.equal(step.alone(keys.flip(0), step.queries[74:])[0], found[74])


class Means:
    """Rows and entries of one layer, in one cache; what nobody has written is NaN."""

    def __init__(self, size: int, *, overlaps: bool) -> None:
        self.size, self.overlaps, self.width = size, overlaps, size * (1 + overlaps)
        self.layer = torch.full((24, BLOCK * 2 * self.width + PLACES * size + 8), torch.nan)
        self.rows = view_of(self.layer, 8, BLOCK, 2 * self.width)
        self.entries = view_of(self.layer, 8 + BLOCK * 2 * self.width, PLACES, size)
        self.values, self.bias = torch.randn(sum(LENGTHS), 2 * self.width), torch.randn(RATE, self.width)

    def of_step(self, chunks: list[Chunk]) -> Tensor:
        tokens = TritonBackend().listed_keys()(step_of(chunks), BLOCK)
        tokens.write(self.values[rows_of(chunks)], self.rows, BLOCK, cleared=self.entries)
        given = (self.rows, self.bias, RATE, self.size)
        return tokens.compress(*given, overlaps=self.overlaps, dtype=torch.float32)

    def expected(self, token: int, position: int) -> Tensor:
        """The mean of the group that a token ends, in float64."""
        size, width, bias = self.size, self.width, self.bias
        own = self.values[token + 1 - RATE : token + 1].double()
        parts = [(own[:, width - size : width], own[:, -size:] + bias[:, -size:])]
        if self.overlaps and position >= RATE:
            before = self.values[token + 1 - 2 * RATE : token + 1 - RATE].double()
            parts.insert(0, (before[:, :size], before[:, width : width + size] + bias[:, :size]))
        numbers, gates = (torch.cat(each) for each in zip(*parts, strict=True))
        return (numbers * gates.softmax(0)).sum(0)


def entries_are_means_of_their_groups() -> None:
    """Complete prompts and chunks; the places of a block that has begun are 0 until then."""
    begun = torch.zeros(24, dtype=torch.bool)
    begun[step_of(WHOLE).token_blocks] = True
    for overlaps in (False, True):
        means = Means(20, overlaps=overlaps)
        found = means.of_step(WHOLE)
        assert (means.entries[begun] == 0).all()
        assert means.entries[~begun].isnan().all()
        assert means.layer[:, :8].isnan().all()
        for token, position in enumerate(step_positions(WHOLE).tolist()):
            if (position + 1) % RATE == 0:
                assert_near(found[token], means.expected(token, position), torch.float32)
        for cut in CUTS:
            ends = (step_positions(cut) + 1) % RATE == 0
            assert torch.equal(means.of_step(cut)[ends], found[rows_of(cut)][ends])
    # Control: another bias.
    means.bias = means.bias + torch.arange(RATE).unsqueeze(1)
    assert not torch.equal(means.of_step(WHOLE)[27], found[27])


def padding_writes_nothing_and_has_no_keys() -> None:
    """Steps in tensors that stay, as those of graphs."""
    step, fixed = (
        Attended(4, 16, 5, chooses=False),
        TritonFixedAttention(8, 4, 8, BLOCK, torch.get_default_device(), lists_above=9),
    )
    found = step.attend(WHOLE)
    for cut in CUTS[1:]:
        metadata, rows = step_of(cut), rows_of(cut)
        count = len(rows)
        numbers = [torch.tensor(each, dtype=torch.int32) for each in (metadata.query_starts, metadata.context_lengths)]
        metadata = AttentionMetadata(
            *(metadata.query_starts, metadata.context_lengths, metadata.block_tables),
            *(metadata.token_blocks, metadata.token_offsets),
            starts=numbers[0],
            lengths=numbers[1],
        )
        filled = fixed.fill(metadata, 8)
        assert filled.longest == 64
        before, backend = step.layer.clone(), TritonBackend()
        padded = torch.cat((step.values[rows], torch.randn(8 - count, 16)))
        tokens = backend.listed_keys()(filled, BLOCK)
        tokens.write(padded, step.keys[:, 0, 0], BLOCK)
        assert torch.equal(step.layer.nan_to_num(9.0), before.nan_to_num(9.0))
        queries = torch.cat((step.queries[rows], torch.randn(8 - count, 4, 16)))
        groups = GroupKeys(step.entries, RATE, 100)
        out = tokens.attend(queries, step.keys, 0.3, 16, groups, step.window, step.sinks)
        assert torch.equal(out[:count], found[rows])


CASES: tuple[Callable[[], None], ...] = (
    tokens_are_placed_and_padding_is_nowhere,
    best_scores_are_chosen_and_ties_by_number,
    choices_are_those_of_the_formula_for_any_batch,
    lists_have_the_bits_of_copied_keys,
    entries_are_means_of_their_groups,
    padding_writes_nothing_and_has_no_keys,
)


def main() -> None:
    torch.set_default_device("cuda" if "cuda" in sys.argv else "cpu")
    assert is_interpreted() == ("cuda" not in sys.argv), "set TRITON_INTERPRET=1, or say cuda"
    torch.set_num_threads(1)
    attention_kernels.TILE, attention_kernels.SEGMENT, listed.SCORE_TILE = 16, 32, 16
    with tiles(few=Tile(32, 4, 2, 1), many=Tile(32, 4, 2, 1)):
        print(json.dumps({case.__name__: run(case) for case in CASES}))


if __name__ == "__main__":
    main()
