"""Compiled attention: close to the formula, and the same bits for a row however it is computed.

The bits are compared for every instruction set that this machine runs: each is one arithmetic, kept by itself.
"""

import math
from dataclasses import replace

import pytest
import torch
from looped import looped
from native_builds import NATIVE, library_for
from native_libraries import each_library
from paged_steps import Sizes, columns_of, error, formula, pieces, run, sequence, together
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spmd_worker.ops.attention import sdpa
from spmd_worker.ops.attention.cpu import CpuBackend, cpu_backend_or_reason
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.distance_scores import DistanceScores

WHOLE = 10_000
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
GROUPS = [(2, 1), (1, 2), (3, 3), (2, 4), (1, 7), (2, 8), (1, 20)]
HEAD_SIZES = [16, 32, 48, 64, 80, 96, 112, 128, 256, 512]
ODD_PLACES = [1, 7, 50, 64, 100]

each_dtype = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])


def backend_for(instruction_set: str, sizes: Sizes) -> CpuBackend:
    return CpuBackend(library_for(instruction_set), sizes.dtype, (sizes.head_size,), sizes.block_size)


def is_close(result, expected, dtype) -> bool:
    return error(result, expected) < (2e-6 if dtype == FLOAT32 else 4e-3)


@each_library
@each_dtype
@looped("head_size", HEAD_SIZES)
def test_every_head_size_agrees_with_the_formula(instruction_set, dtype, head_size):
    sizes = Sizes(dtype=dtype, num_kv_heads=2, group_size=3, head_size=head_size)
    one = sequence(203, sizes)
    assert is_close(run(backend_for(instruction_set, sizes), one, WHOLE), formula(one), dtype)


WINDOWS = [0, 1, 50, 64, 150, -50, -64]
"""Below 0: chunks."""
FEW_GROUPS = [(1, 2), (1, 7)]


def each_group_and_window():
    """All groups without a window and with one, all windows with two of the groups; the rest in the stress tier."""
    few = {(group, window) for group in FEW_GROUPS for window in WINDOWS if window != -64}
    return [
        pytest.param(*group, window, marks=[] if window in (0, 50) or (group, window) in few else pytest.mark.stress)
        for group in GROUPS
        for window in WINDOWS
    ]


@pytest.mark.gate(
    "1-7-*-native",
    "2-1-50-*-native",
    "2-4-*-native",
    "1-20-0-*-native",
    "3-3-*-native",
    "1-7-64-*",
    "3-3-0-*",
)
@each_library
@each_dtype
@pytest.mark.parametrize(("num_kv_heads", "group_size", "window"), each_group_and_window())
def test_every_group_and_window_agrees_with_the_formula(instruction_set, dtype, num_kv_heads, group_size, window):
    sizes = Sizes(dtype, num_kv_heads, group_size, head_size=32, window=window)
    one = sequence(203, sizes)
    backend = backend_for(instruction_set, sizes)
    whole = run(backend, one, WHOLE)
    assert is_close(whole, formula(one), dtype)
    assert torch.equal(run(backend, one, 1), whole)


@pytest.mark.gate("*-bfloat16-native", "50-3.0-float32-native", "0-0.5-*")
@each_library
@each_dtype
@pytest.mark.parametrize(
    ("window", "score_cap"),
    [
        *((0, 3.0), (50, 3.0)),
        *(pytest.param(*each, marks=pytest.mark.matrix) for each in ((-50, 3.0), (0, 0.5), (50, 50.0))),
        *(pytest.param(*each, marks=pytest.mark.stress) for each in ((-50, 0.5), (-50, 50.0), (0, 50.0), (50, 0.5))),
    ],
)
def test_capped_scores_match_formula_in_any_chunks(instruction_set, dtype, window, score_cap):
    sizes = Sizes(dtype=dtype, group_size=3, window=window, score_cap=score_cap)
    one, backend = sequence(203, sizes), backend_for(instruction_set, sizes)
    whole = run(backend, one, WHOLE)
    assert is_close(whole, formula(one), dtype)
    # Few scores here come near a bound of 50.
    other_cap = 0.7 * score_cap if score_cap < 50 else 5.0
    assert not is_close(whole, formula(replace(one, sizes=replace(sizes, score_cap=other_cap))), dtype)
    for chunk in ODD_PLACES:
        assert torch.equal(run(backend, one, chunk), whole), chunk
    for other, result in zip((one, one), together(backend, [one, one], [1, 66]), strict=True):
        assert torch.equal(result, run(backend, other, WHOLE)[-len(result) :])


@each_library
@each_dtype
def test_sinks_match_formula_in_any_chunks(instruction_set, dtype):
    sizes = Sizes(dtype=dtype, group_size=3, window=50, has_sinks=True)
    one, backend = sequence(203, sizes), backend_for(instruction_set, sizes)
    whole = run(backend, one, WHOLE)
    assert is_close(whole, formula(one), dtype)
    assert not is_close(whole, formula(replace(one, sizes=replace(sizes, has_sinks=False))), dtype)
    for chunk in (1, 7, 64):
        assert torch.equal(run(backend, one, chunk), whole), chunk
    for result in together(backend, [one, one], [1, 66]):
        assert torch.equal(result, whole[-len(result) :])


FAR, NEAR = 300, 20
"""Distances of a bias: of all keys, and of those around the query, so that tiles are inside, outside and across."""


@pytest.mark.gate("*-native", "20-*")
@each_library
@each_dtype
@pytest.mark.parametrize(
    ("max_distance", "more"),
    [
        (NEAR, {"group_size": 1}),
        (FAR, {"group_size": 3}),
        pytest.param(NEAR, {"group_size": 3, "window": 50, "score_cap": 3.0}, marks=pytest.mark.matrix),
        pytest.param(1, {"group_size": 3, "has_sinks": True, "block_size": 4}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_distance_bias_matches_formula_in_any_chunks(instruction_set, dtype, max_distance, more):
    sizes = Sizes(dtype=dtype, head_size=32, max_distance=max_distance, **more)
    one, backend = sequence(203, sizes), backend_for(instruction_set, sizes)
    whole = run(backend, one, WHOLE)
    assert is_close(whole, formula(one), dtype)
    for chunk in (1, 7, 64):
        assert torch.equal(run(backend, one, chunk), whole), chunk
    for result in together(backend, [one, one, one], [1, 66, 1]):
        assert torch.equal(result, whole[-len(result) :])
    for other in (0, 2 * max_distance):
        control = replace(one, sizes=replace(sizes, max_distance=other))
        assert not is_close(whole, formula(control), dtype), "negative control: another bias"
    other = replace(one, sizes=replace(sizes, block_size=2))
    assert torch.equal(run(backend_for(instruction_set, other.sizes), other, 50), whole)


@each_library
@each_dtype
@pytest.mark.parametrize("max_distance", [NEAR, pytest.param(FAR, marks=pytest.mark.matrix)])
def test_bidirectional_distance_bias_matches_formula(instruction_set, dtype, max_distance):
    sizes = Sizes(dtype=dtype, group_size=1, head_size=32, sees_later=True, max_distance=max_distance)
    rows, backend = [sequence(length, sizes, seed=length) for length in (7, 131)], backend_for(instruction_set, sizes)
    alone = [run(backend, one, WHOLE) for one in rows]
    assert all(is_close(result, formula(one), dtype) for result, one in zip(alone, rows, strict=True))
    assert all(map(torch.equal, together(backend, rows, [7, 131]), alone))


@each_library
@each_dtype
@looped("more", [{}, {"block_size": 2, "window": 50}])
def test_scores_of_embedded_distances_match_formula(instruction_set, dtype, more):
    sizes = Sizes(dtype=dtype, group_size=1, head_size=32, sees_later=True, num_embedded=48, **more)
    rows = [sequence(length, sizes, seed=length) for length in (1, 7, 64, 131)]
    backend = backend_for(instruction_set, sizes)
    alone = [run(backend, one, WHOLE) for one in rows]
    assert all(is_close(result, formula(one), dtype) for result, one in zip(alone, rows, strict=True))
    assert all(map(torch.equal, together(backend, rows, [1, 7, 64, 131]), alone))
    control = replace(rows[-1], sizes=replace(sizes, num_embedded=46))
    assert not is_close(alone[-1], formula(control), dtype), "negative control: other columns"


@pytest.mark.parametrize("window", [0, 50])
def test_plain_torch_adds_scores_of_distances_too(window):
    sizes = Sizes(group_size=1, head_size=32, sees_later=True, num_embedded=48, window=window)
    for one in (sequence(1, sizes), sequence(131, sizes)):
        assert is_close(run(SdpaBackend(), one, WHOLE), formula(one), FLOAT32)


@pytest.mark.parametrize("is_of_keys", [False, True])
def test_scores_of_one_kind_are_as_with_zeros(is_of_keys):
    sizes = Sizes(group_size=1, head_size=32, sees_later=True)
    query, key, value = sequence(90, sizes).parts
    blocks = torch.arange(90) // 16
    metadata = AttentionMetadata((0, 90), (90,), torch.arange(6)[None], blocks, torch.arange(90) % 16, sees_later=True)
    columns = columns_of(torch.arange(-89, 90), 16).int()
    scores = torch.randn(90, 2, 16)
    tables = (None, scores) if is_of_keys else (scores, None)
    found = []
    for backend in (backend_for(NATIVE, sizes), SdpaBackend()):
        cache = torch.zeros(6, *backend.block_shape(2, 16, 32))
        backend.write(key, value, cache, metadata)
        both = [torch.zeros_like(scores) if each is None else each for each in tables]
        for given in (tables, both):
            given = DistanceScores(*given, columns)
            found.append(backend.attend(query, cache, metadata, 0.1, 0, distance_scores=given))
        with pytest.raises(AssertionError):
            backend.attend(query, cache, metadata, 0.1, 0, distance_scores=DistanceScores(*both, columns[1:-1]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert error(found[0], found[2]) < 1e-5


@each_dtype
def test_bias_of_zeros_changes_no_bit(dtype, monkeypatch):
    """The softmax with biases and that without are one computation."""
    sizes = Sizes(dtype=dtype, group_size=3, max_distance=NEAR)
    one, backend = sequence(203, sizes), backend_for(NATIVE, sizes)
    biased, plain = (
        run(backend, replace(one, sizes=replace(sizes, max_distance=distance)), 50) for distance in (NEAR, 0)
    )
    monkeypatch.setattr(Sizes, "distance_bias", torch.zeros(sizes.num_heads, 2 * NEAR + 1))
    assert torch.equal(run(backend, one, 50), plain)
    assert not torch.equal(biased, plain), "negative control"


@pytest.mark.parametrize(
    "bias",
    [torch.zeros(8, 40), torch.zeros(7, 41), torch.zeros(8, 41).double(), torch.zeros(41, 8).t()],
    ids=["even", "heads", "dtype", "strided"],
)
def test_misshaped_distance_bias_is_rejected(bias):
    backend, query = backend_for(NATIVE, Sizes()), torch.zeros(1, 8, 64)
    cache = torch.zeros(4, *backend.block_shape(2, 16, 64))
    metadata = AttentionMetadata((0, 1), (20,), torch.tensor([[0, 1]]), torch.tensor([1]), torch.tensor([3]))
    backend.attend(query, cache, metadata, 1.0, 0, distance_bias=torch.zeros(8, 41))
    with pytest.raises(AssertionError):
        backend.attend(query, cache, metadata, 1.0, 0, distance_bias=bias)


@pytest.mark.parametrize("window", [0, 50])
def test_plain_torch_takes_sinks_too(window):
    one = sequence(90, Sizes(group_size=3, window=window, has_sinks=True))
    for chunk in (WHOLE, 7):
        assert is_close(run(SdpaBackend(), one, chunk), formula(one), FLOAT32)


@pytest.mark.parametrize("window", [0, 50, -50])
def test_plain_torch_bounds_scores_too(window):
    one = sequence(90, Sizes(group_size=3, window=window, score_cap=3.0))
    for chunk in (WHOLE, 7):
        assert is_close(run(SdpaBackend(), one, chunk), formula(one), FLOAT32)


@pytest.mark.parametrize("sees_later", [False, True])
@pytest.mark.parametrize(("window", "max_distance"), [(0, 20), (0, 200), (50, 20)])
def test_plain_torch_adds_distance_bias_too(window, max_distance, sees_later):
    sizes = Sizes(group_size=3, window=window, max_distance=max_distance, sees_later=sees_later)
    one = sequence(90, sizes)
    for chunk in (WHOLE,) if sees_later else (WHOLE, 7, 1):
        assert is_close(run(SdpaBackend(), one, chunk), formula(one), FLOAT32)
    assert not is_close(
        run(SdpaBackend(), one, WHOLE), formula(replace(one, sizes=replace(sizes, max_distance=0))), FLOAT32
    )


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that was made."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        found = [each.numel() for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        self.num_elements = max(self.num_elements, *found, 0)
        return made


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("more", [{"score_cap": 3.0}, {"has_sinks": True}], ids=str)
def test_plain_torch_writes_few_scores_down_at_once(window, more, monkeypatch):
    """All scores of a chunk were, several times over; no estimate had them, and a long row took the memory of all."""
    one = sequence(203, Sizes(group_size=3, window=window, **more))
    num_heads = one.sizes.num_heads
    with LargestTensor() as seen:
        whole = run(SdpaBackend(), one, WHOLE)
    assert seen.num_elements >= 203 * num_heads * 203, "negative control: so few are written down together"
    monkeypatch.setattr(sdpa, "_MAX_CPU_SCORES", 203 * num_heads * 8)
    with LargestTensor() as seen:
        result = run(SdpaBackend(), one, WHOLE)
    assert is_close(result, formula(one), FLOAT32)
    assert is_close(result, whole, FLOAT32)
    # Keys and values of all heads, and the mask, are there in whole.
    assert seen.num_elements < 203 * num_heads * 203
    # A row alone has more scores than are allowed.
    monkeypatch.setattr(sdpa, "_MAX_CPU_SCORES", 1)
    assert is_close(run(SdpaBackend(), one, WHOLE), formula(one), FLOAT32)


@pytest.mark.gate("*-native", "50-7-*")
@each_library
@each_dtype
@pytest.mark.parametrize("group_size", [1, *(pytest.param(each, marks=pytest.mark.stress) for each in (3, 4)), 7])
@pytest.mark.parametrize("window", [0, 50])
def test_chunks_have_the_bits_of_the_complete_prompt(instruction_set, dtype, group_size, window):
    sizes = Sizes(dtype=dtype, group_size=group_size, window=window)
    one = sequence(331, sizes)
    backend = backend_for(instruction_set, sizes)
    whole = run(backend, one, WHOLE)
    # Token by token takes longest.
    for chunk in ODD_PLACES if group_size in (1, 7) else ODD_PLACES[1:]:
        assert torch.equal(run(backend, one, chunk), whole), chunk


def test_the_chunk_test_can_fail():
    """Negative control: torch's own attention does not keep the promise."""
    one = sequence(331, Sizes())
    whole = run(SdpaBackend(), one, WHOLE)
    assert is_close(whole, formula(one), FLOAT32)
    assert not all(torch.equal(run(SdpaBackend(), one, chunk), whole) for chunk in ODD_PLACES)


@each_library
@each_dtype
def test_row_bits_independent_of_the_batch(instruction_set, dtype):
    sizes = Sizes(dtype=dtype, group_size=3)
    lengths, last_chunks = [1, 64, 65, 130, 331, 17, 200], [1, 64, 1, 66, 1, 3, 200]
    sequences = [sequence(length, sizes, seed) for seed, length in enumerate(lengths)]
    backend = backend_for(instruction_set, sizes)
    batched = together(backend, sequences, last_chunks)
    for one, last_chunk, result in zip(sequences, last_chunks, batched, strict=True):
        assert torch.equal(result, run(backend, one, WHOLE)[-last_chunk:])


@pytest.mark.gate("*-native", "40-*")
@each_library
@each_dtype
@pytest.mark.parametrize("window", [0, 40])
def test_block_size_and_placement_change_no_bit(instruction_set, dtype, window):
    whole = None
    for block_size in (16, 2, 4, 8, 32, 64, 128, 256):
        sizes = Sizes(dtype=dtype, block_size=block_size, window=window)
        backend, one = backend_for(instruction_set, sizes), sequence(203, sizes)
        few = 1 if block_size == 2 else 5
        results = [run(backend, one, chunk, order_seed) for chunk, order_seed in ((WHOLE, 0), (50, 1), (few, 2))]
        whole = results[0] if whole is None else whole
        assert all(torch.equal(result, whole) for result in results), block_size


@each_library
@each_dtype
def test_threads_change_no_bit(instruction_set, dtype):
    sizes = Sizes(dtype=dtype)
    one, backend = sequence(203, sizes), backend_for(instruction_set, sizes)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(run(backend, one, 100))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@each_library
@each_dtype
def test_heads_of_a_rank_have_the_same_bits(instruction_set, dtype):
    sizes = Sizes(dtype=dtype, num_kv_heads=4, group_size=3)
    one = sequence(203, sizes)
    whole = run(backend_for(instruction_set, sizes), one, WHOLE)
    for head in range(4):
        query, key, value = one.parts
        mine = torch.cat((query[:, 3 * head : 3 * head + 3], key[:, head : head + 1], value[:, head : head + 1]), dim=1)
        shard = replace(one, merged=mine, sizes=replace(sizes, num_kv_heads=1))
        result = run(backend_for(instruction_set, shard.sizes), shard, 64)
        assert torch.equal(result, whole[:, 3 * head : 3 * head + 3])


@each_library
@each_dtype
@looped("last", [70, 77, 95])
@looped("trouble", [math.nan, math.inf, -math.inf])
def test_overflowed_token_leaves_earlier_rows_unchanged(instruction_set, dtype, last, trouble):
    """Its key and value are in the tile that earlier rows of the same chunk read, with probability zero."""
    sizes = Sizes(dtype=dtype, group_size=3)
    healthy = sequence(130, sizes)
    broken = replace(healthy, merged=healthy.merged.clone())
    broken.merged[last, sizes.num_heads :] = trouble
    backend = backend_for(instruction_set, sizes)
    expected, result = run(backend, healthy, WHOLE), run(backend, broken, WHOLE)
    assert torch.equal(result[:last], expected[:last])
    assert not result[last:].isfinite().any()


@each_library
@each_dtype
def test_tokens_before_the_window_do_not_matter(instruction_set, dtype):
    sizes = Sizes(dtype=dtype, window=20)
    healthy = sequence(130, sizes)
    broken = replace(healthy, merged=healthy.merged.clone())
    broken.merged[67, sizes.num_heads :] = math.nan
    backend = backend_for(instruction_set, sizes)
    expected, result = run(backend, healthy, WHOLE), run(backend, broken, WHOLE)
    assert torch.equal(result[:67], expected[:67])
    assert result[67:87].isnan().all()
    assert torch.equal(result[87:], expected[87:])


@each_library
@each_dtype
def test_large_scores_neither_overflow_nor_lose_the_largest(instruction_set, dtype):
    sizes = Sizes(dtype=dtype)
    one = sequence(203, sizes)
    one.merged[:, : sizes.num_heads] *= 100
    result = run(backend_for(instruction_set, sizes), one, WHOLE)
    # Weights are near 0 or 1, so what counts is how well the scores themselves are known.
    assert error(result, formula(one)) < (1e-4 if dtype == FLOAT32 else 1e-2)


@pytest.mark.gate("*-native", "bfloat16-*")
@each_library
@each_dtype
def test_row_of_one_key_is_its_value(instruction_set, dtype):
    """To the bit, whatever its score. In bfloat16 the largest score was rounded and the others were not, so that from
    about 100,000 on its own probability was not 1.
    """
    sizes = Sizes(dtype=dtype, num_kv_heads=1, group_size=3, head_size=32, window=1)
    one = sequence(130, sizes)
    factors = torch.exp2(0.45 * torch.arange(130)).view(-1, 1, 1)
    one.merged[:, : -sizes.num_kv_heads] = (factors * one.merged[:, : -sizes.num_kv_heads].float()).to(dtype)
    backend, (query, key, value) = backend_for(instruction_set, sizes), one.parts
    scores = (query * key.repeat_interleave(sizes.group_size, dim=1)).double().sum(-1)
    assert scores.max() > 2.0**100
    assert scores.min() < -(2.0**100)
    expected = value.repeat_interleave(sizes.group_size, dim=1)
    assert torch.equal(run(backend, one, WHOLE), expected)
    assert torch.equal(run(backend, one, 9), expected)


def test_block_layout_of_bfloat16_and_float32():
    """The packing that DESIGN.md gives; what swaps and copies blocks does not know it."""
    for dtype, pair in ((BFLOAT16, 2), (FLOAT32, 1)):
        sizes = Sizes(dtype=dtype, num_kv_heads=2, group_size=1, head_size=16, block_size=4)
        backend = backend_for(NATIVE, sizes)
        shape = backend.block_shape(2, 4, 16)
        assert shape == (2 * 2 * 4 * 16,)
        cache = torch.zeros(3, *shape, dtype=dtype)
        key = torch.arange(4 * 2 * 16).view(4, 2, 16).to(dtype)
        value = -key
        metadata = AttentionMetadata((0, 4), (4,), torch.tensor([[2]]), torch.full((4,), 2), torch.arange(4))
        backend.write(key, value, cache, metadata)
        assert not cache[:2].any()
        heads = cache[2].view(2, 2, -1)
        keys, values = heads[:, 0].view(2, 16 // pair, 4, pair), heads[:, 1].view(2, 4 // pair, 16, pair)
        assert torch.equal(keys.permute(2, 0, 1, 3).flatten(2), key)
        assert torch.equal(values.permute(1, 3, 0, 2).flatten(0, 1), value)


@each_library
@each_dtype
@looped("block_size", [4, 16, 32])
def test_tokens_written_together_or_one_by_one(instruction_set, dtype, block_size):
    """Beginnings and ends at odd places, blocks of one token, and a sequence that goes on in a block behind its own."""
    sizes = Sizes(dtype=dtype, num_kv_heads=3, group_size=1, head_size=48, block_size=block_size)
    backend = backend_for(instruction_set, sizes)
    numbers, places = torch.Generator().manual_seed(block_size), []
    block = 0
    for start, count in [(0, 2), (3, 1), (1, 70), (block_size - 1, 2), (2, 1), (2, 33), (1, 1), (0, 1), (3, 40)]:
        places += [(block + place // block_size, place % block_size) for place in range(start, start + count)]
        block = places[-1][0] + 1
    num_tokens = len(places)
    blocks, offsets = torch.tensor(places).unbind(1)
    key, value = (torch.randn(num_tokens, 3, 48, generator=numbers).to(dtype) for _ in range(2))
    earlier = torch.randn(block, *backend.block_shape(3, block_size, 48), generator=numbers).to(dtype)
    at_once, one_by_one, swapped = earlier.clone(), earlier.clone(), earlier.clone()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        backend.write(key, value, at_once, _written(blocks, offsets))
    finally:
        torch.set_num_threads(before)
    for token in range(num_tokens):
        here = slice(token, token + 1)
        backend.write(key[here], value[here], one_by_one, _written(blocks[here], offsets[here]))
        there = slice(token ^ 1, (token ^ 1) + 1) if (token ^ 1) < num_tokens else here
        backend.write(key[there], value[there], swapped, _written(blocks[here], offsets[here]))
    assert torch.equal(at_once, one_by_one)
    assert not torch.equal(at_once, swapped)


def _written(blocks, offsets) -> AttentionMetadata:
    """Of a write, which looks at no tables."""
    tables = torch.zeros(1, len(blocks), dtype=torch.int64)
    return AttentionMetadata((0, len(blocks)), (len(blocks),), tables, blocks.clone(), offsets.clone())


@each_library
@each_dtype
def test_attend_projected_equals_separate_calls(instruction_set, dtype):
    sizes = Sizes(dtype=dtype, num_kv_heads=2, group_size=3, head_size=64)
    backend, kernels = backend_for(instruction_set, sizes), CpuKernels(library_for(instruction_set))
    metadata = AttentionMetadata(
        query_starts=(0, 2, 39),
        context_lengths=(30, 37),
        block_tables=torch.tensor([[0, 3, 0], [1, 2, 4]]),
        token_blocks=torch.tensor([3, 3, *[1] * 16, *[2] * 16, *[4] * 5]),
        token_offsets=torch.tensor([12, 13, *range(16), *range(16), *range(5)]),
    )
    numbers = torch.Generator().manual_seed(0)
    projected = torch.randn(39, 10 * 64, generator=numbers).to(dtype)
    angles = tuple(torch.randn(39, 32, generator=numbers).to(dtype) for _ in range(2))
    earlier = torch.randn(5, *backend.block_shape(2, 16, 64), generator=numbers).to(dtype)
    query, key, value = (part.reshape(39, -1, 64) for part in projected.split([6 * 64, 2 * 64, 2 * 64], dim=1))
    caches = earlier.clone(), earlier.clone()
    backend.write(kernels.rotate(key, *angles), value, caches[0], metadata)
    expected = backend.attend(kernels.rotate(query, *angles), caches[0], metadata, 0.125, 0)
    result = backend.attend_projected(projected.clone(), angles, caches[1], metadata, 6, 0.125, 0)
    assert torch.equal(result.view(expected.shape), expected)
    assert torch.equal(*caches)
    assert not torch.equal(caches[0], earlier)
    with pytest.raises(AssertionError, match="39"):
        backend.attend_projected(projected[:38], angles, caches[1], metadata, 6, 0.125, 0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("block_tables", torch.tensor([[0, 9]]), "block_tables: 0 to 9 of 4"),
        ("block_tables", torch.tensor([[0, -1]]), "block_tables: -1 to 0 of 4"),
        ("token_blocks", torch.tensor([4]), "token_blocks: 4 to 4 of 4"),
        ("token_offsets", torch.tensor([16]), "token_offsets: 16 to 16 of 16"),
        ("context_lengths", (33,), "33"),
        ("context_lengths", (0,), "0"),
    ],
)
def test_metadata_out_of_bounds_is_rejected(field, value, words):
    sizes = Sizes()
    backend = backend_for(NATIVE, sizes)
    cache = torch.zeros(4, *backend.block_shape(2, 16, 64))
    good = AttentionMetadata((0, 1), (20,), torch.tensor([[0, 1]]), torch.tensor([1]), torch.tensor([3]))
    query = torch.zeros(1, 8, 64)
    assert backend.attend(query, cache, good, 1.0, 0).shape == (1, 8, 64)
    with pytest.raises(AssertionError, match=words):
        backend.attend(query, cache, replace(good, **{field: value}), 1.0, 0)


def test_only_the_last_step_is_kept():
    """Its groups of layers, each checked once."""
    backend, query = backend_for(NATIVE, Sizes()), torch.zeros(1, 8, 64)
    cache = torch.zeros(4, *backend.block_shape(2, 16, 64))
    for length in (20, 21, 22):
        first = AttentionMetadata((0, 1), (length,), torch.tensor([[0, 1]]), torch.tensor([1]), torch.tensor([3]))
        other = replace(first, block_tables=torch.tensor([[2, 3]]))
        for metadata in (first, other, first):
            backend.attend(query, cache, metadata, 1.0, 0)
        assert [each.source for each in backend._checked.values()] == [first, other]


def test_what_is_not_supported_is_said_in_words():
    assert "float16" in str(cpu_backend_or_reason(torch.float16, (64,), 16))
    assert "not 72" in str(cpu_backend_or_reason(FLOAT32, (72,), 16))
    assert "not 592" in str(cpu_backend_or_reason(FLOAT32, (592,), 16))
    assert "not 24" in str(cpu_backend_or_reason(FLOAT32, (64,), 24))
    assert "not 1" in str(cpu_backend_or_reason(FLOAT32, (64,), 1))
    assert isinstance(cpu_backend_or_reason(BFLOAT16, (80,), 2), CpuBackend)
    with pytest.raises(ValueError, match="multiple of 16"):
        CpuBackend(library_for(NATIVE), FLOAT32, (72,), 16)


BOTH_WAYS = [
    pytest.param(window, marks=[] if window == 50 else pytest.mark.matrix if window == 0 else pytest.mark.stress)
    for window in (50, 0, 1, 2, 64, 65, 150)
]


@each_library
@each_dtype
@pytest.mark.parametrize("window", BOTH_WAYS)
def test_bidirectional_attention_matches_formula(instruction_set, dtype, window):
    sizes = Sizes(dtype=dtype, num_kv_heads=1, group_size=3, head_size=48, window=window, sees_later=True)
    lengths = (7, 64, 131)
    rows, backend = [sequence(length, sizes, seed=length) for length in lengths], backend_for(instruction_set, sizes)
    alone = [run(backend, one, WHOLE) for one in rows]
    assert all(is_close(result, formula(one), dtype) for result, one in zip(alone, rows, strict=True))
    assert all(map(torch.equal, together(backend, rows, list(lengths)), alone))
    assert all(map(torch.equal, together(backend, rows[::-1], list(lengths[::-1])), alone[::-1]))
    other = replace(rows[-1], sizes=replace(sizes, block_size=2))
    assert torch.equal(run(backend_for(instruction_set, other.sizes), other, WHOLE), alone[-1])
    if dtype == FLOAT32:
        assert is_close(run(SdpaBackend(), rows[-1], WHOLE), alone[-1].double(), dtype)
    # The control: causal attention is something else.
    causal = replace(rows[-1], sizes=replace(sizes, sees_later=False))
    assert window == 1 or not is_close(alone[-1], formula(causal), dtype)


IMAGES = (range(1, 4), range(60, 141), range(143, 201))


@each_library
@each_dtype
@pytest.mark.parametrize("window", [0, 20])
def test_tokens_of_images_see_all_of_them(instruction_set, dtype, window):
    """Images over ends of tiles and work items, longer than the window."""
    sizes = Sizes(dtype=dtype, num_kv_heads=1, group_size=3, head_size=48, window=window, images=IMAGES)
    one, backend = sequence(203, sizes), backend_for(instruction_set, sizes)
    whole = run(backend, one, WHOLE)
    assert is_close(whole, formula(one), dtype)
    for ends in ([1, 60, 142], [4, 20, 59, 141, 202], [*range(4, 60), 143, 201]):
        assert torch.equal(pieces(backend, one, ends), whole), ends
    text = sequence(90, replace(sizes, images=()), seed=1)
    (beside, other) = together(backend, [text, one], [90, 60])
    assert torch.equal(beside, run(backend, text, WHOLE)), "text beside an image"
    assert torch.equal(other, whole[-60:])
    # Control: causal attention is something else, but before images.
    causal = run(backend, replace(one, sizes=replace(sizes, images=())), WHOLE)
    assert torch.equal(causal[:1], whole[:1])
    assert not is_close(causal, formula(one), dtype)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("score_cap", [0.0, 3.0])
def test_plain_torch_sees_whole_images_too(window, score_cap):
    sizes = Sizes(group_size=3, window=window, images=IMAGES, score_cap=score_cap)
    one, text = sequence(203, sizes), sequence(90, replace(sizes, images=()), seed=1)
    assert is_close(run(SdpaBackend(), one, WHOLE), formula(one), FLOAT32)
    assert is_close(pieces(SdpaBackend(), one, [4, 59, 142]), formula(one), FLOAT32)
    assert torch.equal(together(SdpaBackend(), [text, one], [90, 60])[0], run(SdpaBackend(), text, WHOLE))


UNSEEN = ((5, 32), (70, 131), (131, 131))
"""Keys that are seen, and tokens: behind the last window of the first tokens too."""


@each_library
@each_dtype
@looped("more", [{}, {"window": 20}, {"window": 20, "score_cap": 3.0}, {"max_distance": NEAR}])
def test_tokens_behind_a_bound_are_seen_by_none(instruction_set, dtype, more):
    sizes = Sizes(dtype=dtype, group_size=1, head_size=32, sees_later=True, **more)
    rows = [sequence(end, replace(sizes, num_seen=seen), seed=end + seen) for seen, end in UNSEEN]
    backend = backend_for(instruction_set, sizes)
    alone = [run(backend, one, WHOLE) for one in rows]
    for one, result in zip(rows, alone, strict=True):
        assert is_close(result, formula(one), dtype)
        assert is_close(run(SdpaBackend(), one, WHOLE), formula(one), dtype)
    assert all(map(torch.equal, together(backend, rows, [end for _, end in UNSEEN]), alone))
    # A bound of all tokens is none; the control: without the bound the row is something else.
    plain = [run(backend, replace(one, sizes=sizes), WHOLE) for one in rows]
    assert [torch.equal(*pair) for pair in zip(plain, alone, strict=True)] == [False, False, True]


@pytest.mark.parametrize("last", [[0, 2, 2], [2, 1, 2], [1, 1, 3]], ids=["itself", "order", "end"])
def test_sight_out_of_bounds_is_rejected(last):
    backend = backend_for(NATIVE, Sizes())
    cache = torch.zeros(2, *backend.block_shape(2, 16, 64))
    tokens = (torch.tensor([[0]]), torch.zeros(3, dtype=torch.int64), torch.arange(3))
    good = AttentionMetadata((0, 3), (3,), *tokens, last_visible=torch.tensor([1, 1, 2], dtype=torch.int32))
    query = torch.zeros(3, 8, 64)
    backend.attend(query, cache, good, 1.0, 0)
    sight = torch.tensor(last if last[0] else [0, 0, 2], dtype=torch.int32)
    with pytest.raises(AssertionError, match="tensor"):
        backend.attend(query, cache, replace(good, last_visible=sight), 1.0, 0)
