"""Masks of forms in the sampler: in every shard of the vocabulary what they are in the whole, and before all else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from native_builds import library_for
from native_libraries import each_vector_library
from thread_groups import on_ranks

from spmd_worker.model.layers.embedding import VocabularyShard
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.sampling.sampler import Sampled, Sampler
from spmd_worker.ops.sampling.token_masks import TokenMasks
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.replica.grammar.row_grammar import RowGrammar
from spmd_worker.replica.grammar.step_masks import StepMasks
from spmd_worker.replica.sequence.sampled import GRAMMAR_FAILED, NON_FINITE
from spmd_worker.replica.sequence.sampling_params import SamplingParams

VOCAB_SIZE, EOS, NUM_ROWS = 211, (5,), 40
CPU = torch.device("cpu")
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0.7, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 1.0, "min_tokens": 9, "frequency_penalty": 0.5},
    {"temperature": 1.0, "allowed_token_ids": [3, 4, 5]},
]


def step() -> tuple[torch.Tensor, list[SampleRow], StepMasks]:
    """Every third row has no mask, the tenth no token; a mask leaves 1 to 5 tokens, on either side of each border."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator)
    rows = [
        SampleRow(SamplingParams(**KINDS[index % len(KINDS)]), index, 0, 3, (1, 2, 3), [7]) for index in range(NUM_ROWS)
    ]
    indices = tuple(index for index in range(NUM_ROWS) if index % 3 and index != 10)
    is_allowed = np.zeros((len(indices), VOCAB_SIZE), dtype=np.bool_)
    for place in range(len(indices)):
        is_allowed[place, torch.randint(VOCAB_SIZE, (1 + place % 5,), generator=generator).numpy()] = True
    return logits, rows, StepMasks(indices, packed(is_allowed), 0, (10,))


def packed(is_allowed: np.ndarray) -> np.ndarray:
    """Bool [M, tokens] -> int32 [M, words]."""
    whole_words = np.pad(is_allowed, ((0, 0), (0, -is_allowed.shape[1] % 32)))
    return np.packbits(whole_words, axis=1, bitorder="little").view(np.int32)


def unpacked(bits: np.ndarray, vocab_size: int) -> np.ndarray:
    return np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size].astype(bool)


def sharded(size: int, masks: TokenMasks) -> list[Sampled]:
    logits, rows, _ = step()

    def run(group: GroupHandle) -> Sampled:
        shard = VocabularyShard(VOCAB_SIZE, size, group.rank)
        mine = torch.full((NUM_ROWS, shard.size), -torch.inf)
        mine[:, : shard.num_owned] = logits[:, shard.start : shard.stop]
        return Sampler(group, shard.start, VOCAB_SIZE, EOS, "raw_logprobs").sample(mine, rows, masks)

    return on_ranks(size, run)


def whole(masks: TokenMasks) -> Sampled:
    logits, rows, _ = step()
    return Sampler(single_group(), 0, VOCAB_SIZE, EOS, "raw_logprobs").sample(logits, rows, masks)


def follows(sampled: Sampled) -> bool:
    _, _, masks = step()
    chosen = [sampled.token_ids[index] for index in masks.indices]
    return bool(unpacked(masks.allowed, VOCAB_SIZE)[np.arange(len(chosen)), chosen].all())


def test_masked_rows_sample_allowed_tokens():
    _, _, masks = step()
    sampled, free = whole(TokenMasks.of_step(masks, CPU)), whole(TokenMasks.of_step(None, CPU))
    assert follows(sampled)
    assert not follows(free)
    assert sampled.token_ids[10] == GRAMMAR_FAILED
    assert [sampled.token_ids[i] for i in range(0, NUM_ROWS, 3)] == [free.token_ids[i] for i in range(0, NUM_ROWS, 3)]
    for index in masks.indices:
        if sampled.logprobs[index] is not None:
            likeliest = list(free.logprobs[index].items())[1:]
            assert dict(likeliest).items() <= sampled.logprobs[index].items()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_shards_choose_what_the_whole_vocabulary_does(size: int):
    masks = TokenMasks.of_step(step()[2], CPU)
    found = sharded(size, masks)
    assert all(each == found[0] for each in found)
    assert found[0].token_ids == whole(masks).token_ids


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_mask_hides_no_nonfinite_logit(value: float, size: int):
    """Where it forbids all such logits of a row, the row was answered unless log-probabilities were asked for."""
    logits, rows, step_masks = step()
    allowed = unpacked(step_masks.allowed, VOCAB_SIZE)
    damaged = step_masks.indices[::2]
    for place, index in enumerate(step_masks.indices):
        if index in damaged:
            # In the first shard or in the last.
            forbidden = np.flatnonzero(~allowed[place])
            logits[index, int(forbidden[0 if place % 4 else -1])] = value

    def run(group: GroupHandle) -> Sampled:
        shard = VocabularyShard(VOCAB_SIZE, size, group.rank)
        mine = torch.full((NUM_ROWS, shard.size), -torch.inf)
        mine[:, : shard.num_owned] = logits[:, shard.start : shard.stop]
        masks = TokenMasks.of_step(step_masks, CPU)
        return Sampler(group, shard.start, VOCAB_SIZE, EOS, "raw_logprobs").sample(mine, rows, masks)

    usual = whole(TokenMasks.of_step(step_masks, CPU))
    for found in on_ranks(size, run):
        assert [index for index, each in enumerate(found.token_ids) if each == NON_FINITE] == list(damaged)
        others = [index for index in range(NUM_ROWS) if index not in damaged]
        assert [found.token_ids[index] for index in others] == [usual.token_ids[index] for index in others]


def test_mask_without_shard_offset_is_detected():
    masks = TokenMasks.of_step(step()[2], CPU)
    apply = TokenMasks.apply
    try:
        TokenMasks.apply = lambda self, kernels, logits, first_id: apply(self, kernels, logits, 0)
        found = sharded(2, masks)
    finally:
        TokenMasks.apply = apply
    assert found[0].token_ids != whole(masks).token_ids


class Matcher:
    """As llguidance's, of a form that lets these tokens follow."""

    def __init__(self, allowed: list[int]) -> None:
        self.allowed = allowed

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        import ctypes

        bits = (ctypes.c_uint32 * (num_bytes // 4)).from_address(pointer)
        for token_id in self.allowed:
            bits[token_id // 32] |= 1 << token_id % 32

    def is_error(self) -> bool:
        return False


class Table:
    is_canonical, vocab_size = False, 96


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 64, 70])
def test_bits_beyond_the_vocabulary_are_never_tokens(vocab_size: int):
    allowed = [0, 30, 31, 32, 63, 69, 70, 95]
    bits = np.zeros(3, dtype=np.int32)
    RowGrammar(lambda can_force: Matcher(allowed), Table(), vocab_size, ()).fill(bits)
    found = np.flatnonzero(unpacked(bits[None], 96)[0]).tolist()
    assert found == [each for each in allowed if each < vocab_size]
    beyond = RowGrammar(lambda can_force: Matcher([vocab_size, 95]), Table(), vocab_size, ())
    beyond.fill(np.zeros(3, dtype=np.int32))
    assert beyond.problem == "no token can follow"


def test_rows_are_numbered_anew():
    _, _, masks = step()
    some = TokenMasks.of_step(replace(masks, failed=()), CPU).of([2, 3, 7])
    assert dict(some.mask_rows) == {0: masks.indices.index(2), 2: masks.indices.index(7)}


@each_vector_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first_id", "count"), [(0, VOCAB_SIZE), (40, 50), (37, 9), (200, 60)])
def test_compiled_masks_equal_reference_and_bits(instruction_set, dtype, first_id: int, count: int):
    """Of some rows, the rest as it was; columns that no bit is of are forbidden."""
    _, _, masks = step()
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(9, count, generator=generator).to(dtype)
    token_masks = TokenMasks.of_step(replace(masks, failed=()), CPU).of([2, 6, 1, 6, 4, 0, 7, 8, 22])
    found = []
    for kernels in (CpuKernels(library_for(instruction_set)), ReferenceKernels()):
        rows = logits.clone()
        token_masks.apply(kernels, rows, first_id)
        found.append(rows)
    assert torch.equal(*found)
    is_allowed = np.pad(unpacked(masks.allowed, VOCAB_SIZE), ((0, 0), (0, 100)))[:, first_id : first_id + count]
    for row, values in enumerate(found[0]):
        place = token_masks.mask_rows.get(row)
        kept = torch.ones(count, dtype=torch.bool) if place is None else torch.from_numpy(is_allowed[place])
        assert torch.equal(values, torch.where(kept, logits[row], -torch.inf)), row
    assert 0 < len(token_masks.mask_rows) < 9
