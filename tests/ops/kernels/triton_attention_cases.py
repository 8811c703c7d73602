"""Attention's kernels for GPUs, interpreted on CPU tensors: run in a process of its own, see triton_cases.py.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_attention_cases.py [wide]
                                                                  prints {case: what went wrong, or ""}
    python tests/ops/kernels/triton_attention_cases.py cuda           the same on a GPU

`wide` adds the cases of wide heads. Tiles are cut down: as many cases with a few keys.
"""

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import triton
import triton.language as tl
from decoding_steps import decoding
from paged_steps import columns_of
from triton_cases import BLOCK, assert_near, in_gate, report, set_device

from spmd_worker.ops.attention.cache_dtype import FP8, from_cache, to_cache
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.attention.triton import TritonBackend, TritonFixedAttention
from spmd_worker.ops.kernels.distance_scores import DistanceScores
from spmd_worker.ops.kernels.triton import attention, attention_kernels
from spmd_worker.ops.kernels.triton.attention import Launches, Tile
from spmd_worker.worker.runner.batch_state import BatchState

Heads = tuple[int, int, int]  # query heads, key-value heads, head size
Chunk = tuple[int, int, int]  # sequence, first query, end
SMALL = Tile(16, 4, 2, 1)
NEAR = 20
"""Distances with a bias of their own."""


@contextmanager
def tiles(few: Tile = SMALL, many: Tile = SMALL) -> Iterator[None]:
    chosen = {"few_tile": lambda *sizes: few, "many_tile": lambda *sizes: many}
    with mock.patch.multiple(attention, **chosen):
        yield


class Step:
    """Sequences in a paged cache whose blocks lie in random order. What no sequence has written is NaN."""

    def __init__(self, lengths: list[int], heads: Heads, dtype: torch.dtype, value_size: int = 0) -> None:
        generator = torch.Generator(torch.get_default_device()).manual_seed(sum(lengths))
        self.num_heads, num_kv_heads, size = heads
        sizes = (size, value_size or size)
        counts = [-(-length // BLOCK) for length in lengths]
        order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
        # Of two layers, as a cache by blocks is: a layer's blocks lie apart.
        numbers = num_kv_heads * BLOCK * sum(sizes)
        self.cache = torch.full((len(order), 2, numbers), math.nan, dtype=dtype)[:, 1]
        planes = self.cache.split([num_kv_heads * BLOCK * each for each in sizes], 1)
        self.pages = [
            plane.unflatten(1, (num_kv_heads, BLOCK, each)) for plane, each in zip(planes, sizes, strict=True)
        ]
        self.written: list[list[torch.Tensor]] = []
        for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            blocks, order = order[:count], order[count:]
            self.tables[index, :count] = torch.tensor(blocks)
            pair = [torch.randn(length, num_kv_heads, each, generator=generator).to(dtype) for each in sizes]
            for plane, rows in zip(self.pages, pair, strict=True):
                for position in range(length):
                    plane[blocks[position // BLOCK], :, position % BLOCK] = rows[position]
            self.written.append(pair)
        self.queries = [torch.randn(length, self.num_heads, size, generator=generator).to(dtype) for length in lengths]
        self.sinks = torch.randn(self.num_heads, generator=generator)
        self.bias = 2 * torch.randn(self.num_heads, 2 * NEAR + 1, generator=generator)

    def attend(
        self,
        chunks: list[Chunk],
        window: int = 0,
        *,
        splits: bool = True,
        is_causal: bool = True,
        extra: int = 0,
        images: tuple[range, ...] = (),
        num_seen: int = 0,
        **arguments: object,
    ) -> list[torch.Tensor]:
        """Each chunk's rows. `extra` keys too many are planned: for controls. Tokens of `images` see to their ends,
        none sees keys behind the first `num_seen`, if above 0.
        """
        starts = [0, *itertools.accumulate(end - first for _, first, end in chunks)]
        tables = self.tables[[index for index, _, _ in chunks]]
        ends = [end + extra for _, _, end in chunks]
        num_kv_heads, size = self.pages[0].shape[1], self.pages[0].shape[3]
        nothing = torch.empty(0)
        of_step = AttentionMetadata(tuple(starts), tuple(ends), tables, nothing, nothing, not is_causal)
        plan = attention.plan_attention(
            *(starts, ends, tables, self.num_heads, num_kv_heads, max(size, self.pages[1].shape[3]), window),
            itemsize=self.cache.element_size(),
            later=of_step.num_later_keys(window),
            splits=splits,
            last_visible=torch.cat([last_seen(first, end, images, num_seen) for _, first, end in chunks])
            if images or num_seen
            else None,
        )
        queries = torch.cat([self.queries[index][first:end] for index, first, end in chunks]).flatten(1)
        out = attention.attend_pages(queries, *self.pages, plan, self.num_heads, size**-0.5, **arguments)
        return list(out.split([end - first for _, first, end in chunks]))

    def reference(
        self,
        chunk: Chunk,
        window: int = 0,
        *,
        is_causal: bool = True,
        score_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
        images: tuple[range, ...] = (),
        num_seen: int = 0,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """In float64. `added` are further products of queries and keys."""
        index, first, end = chunk
        q = self.queries[index][first:end].double().transpose(0, 1)
        group = len(q) // self.pages[0].shape[1]
        k, v = (each[:end].double().repeat_interleave(group, 1).transpose(0, 1) for each in self.written[index])
        distance = torch.arange(end)[None] - torch.arange(first, end)[:, None]
        far = window or 2**30
        seen = (distance > -far) & (distance < (1 if is_causal else far))
        if images:
            seen = (distance > -far) & (torch.arange(end)[None] <= last_seen(first, end, images)[:, None])
        if num_seen:
            seen = seen & (torch.arange(end)[None] < num_seen)
        if window < 0:
            quotients = torch.arange(end) // -window
            seen = (distance <= 0) & (quotients[first:, None] == quotients)
        scores = q @ k.transpose(1, 2)
        scores = (scores if added is None else scores + added) * q.shape[2] ** -0.5
        scores = score_cap * (scores / score_cap).tanh() if score_cap else scores
        if distance_bias is not None:
            scores += distance_bias.double()[:, distance.clamp(-NEAR, NEAR) + NEAR]
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, end - first, 1)), -1)
        return (scores.softmax(-1)[..., :end].nan_to_num() @ v).transpose(0, 1)


def last_seen(first: int, end: int, images: tuple[range, ...], num_seen: int = 0) -> torch.Tensor:
    """int32: of the tokens [first, end) the last key that each sees, of its image or its own, or of the first
    `num_seen`.
    """
    if num_seen:
        return integers([min(num_seen, end) - 1] * (end - first))
    ends = {token: image.stop - 1 for image in images for token in image}
    return integers([ends.get(token, token) for token in range(first, end)])


def attention_is_right() -> None:
    for heads, dtype in (((3, 1, 16), torch.float32), ((4, 2, 16), torch.float16), ((2, 2, 80), torch.float32)):
        step = Step([1, 37, 70], heads, dtype)
        chunks = [(0, 0, 1), (1, 27, 37), (2, 69, 70)]
        for chunk, found in zip(chunks, step.attend(chunks), strict=True):
            assert_near(found, step.reference(chunk), dtype)


def heads_of_every_size_are_right() -> None:
    assert [attention.head_parts(size) for size in (16, 20, 80, 96, 112, 192, 224, 256, 576)] == [
        *((16, 0), (32, 0), (64, 16), (64, 32), (128, 0), (128, 64), (256, 0), (256, 0), (512, 64)),
    ]
    wide = [(64, 0), (96, 0), (128, 0), (192, 0), (192, 128), (256, 0), (512, 0), (576, 512)]
    wide = wide if "wide" in sys.argv else []
    for size, value_size in ((20, 0), (48, 32), (112, 0), *wide):
        step = Step([37], (2, 1, size), torch.float16, value_size)
        for chunk in ((0, 36, 37), (0, 20, 37)):
            assert_near(step.attend([chunk])[0], step.reference(chunk), torch.float16)


def a_window_is_right_and_what_is_before_it_is_never_read() -> None:
    step = Step([70], (3, 1, 16), torch.float32)
    for chunk, window in (((0, 69, 70), 5), ((0, 69, 70), 40), ((0, 60, 70), 40), ((0, 20, 70), -24)):
        assert_near(step.attend([chunk], window)[0], step.reference(chunk, window), torch.float32)
    expected = step.attend([(0, 69, 70)], 5)[0]
    step.cache[step.tables[0, :8]] = math.nan  # positions 0 to 63
    assert torch.equal(step.attend([(0, 69, 70)], 5)[0], expected)
    # A chunk ends; alone and with others a token has the same bits.
    step = Step([70], (3, 1, 16), torch.float32)
    both, alone = step.attend([(0, 60, 70)], -64)[0], step.attend([(0, 63, 64)], -64)[0]
    assert torch.equal(both[3], alone[0])
    assert torch.equal(step.attend([(0, 64, 65)], -64)[0][0], both[4])
    step.cache[step.tables[0, :8]] = math.nan
    assert torch.equal(step.attend([(0, 64, 70)], -64)[0], both[4:])


def capped_scores_and_sinks_are_right() -> None:
    step = Step([70], (3, 1, 16), torch.float32)
    for chunk in ((0, 69, 70), (0, 60, 70)):
        for arguments in ({"score_cap": 2.0}, {"sinks": step.sinks}):
            found = step.attend([chunk], **arguments)[0]
            assert_near(found, step.reference(chunk, **arguments), torch.float32)


def biases_of_distances_are_right_in_any_cut() -> None:
    step = Step([40, 13], (2, 1, 16), torch.float32)
    bias = {"distance_bias": step.bias}
    (whole,) = step.attend([(0, 0, 40)], **bias)
    assert_near(whole, step.reference((0, 0, 40), **bias), torch.float32)
    cut, _ = step.attend([(0, 29, 40), (1, 12, 13)], **bias)
    assert torch.equal(cut, whole[29:])
    for splits in (True, False):
        assert torch.equal(step.attend([(0, 39, 40)], splits=splits, **bias)[0], whole[-1:]), splits
    # A table of more distances than there are, as that of slopes.
    ends = [step.bias[:, each : each + 1].expand(-1, 50) for each in (0, 2 * NEAR)]
    assert torch.equal(step.attend([(0, 0, 40)], distance_bias=torch.cat((ends[0], step.bias, ends[1]), 1))[0], whole)
    both_ways = step.attend([(1, 0, 13)], is_causal=False, **bias)[0]
    assert_near(both_ways, step.reference((1, 0, 13), is_causal=False, **bias), torch.float32)
    more = bias | {"score_cap": 2.0, "sinks": step.sinks}
    assert_near(step.attend([(0, 35, 40)], 30, **more)[0], step.reference((0, 35, 40), 30, **more), torch.float32)
    # A bias of zeros changes no more than a rounding; control: another one changes more.
    (plain,) = step.attend([(0, 35, 40)])
    (nothing,) = step.attend([(0, 35, 40)], distance_bias=torch.zeros_like(step.bias))
    assert_near(plain, nothing.double(), torch.float32)
    assert not torch.allclose(plain, whole[35:], rtol=1e-2, atol=1e-2)


def a_cache_in_fp8_has_bits_of_rounded_numbers() -> None:
    for heads, dtype in (((3, 1, 16), torch.float32), ((2, 2, 80), torch.float16)):
        step = Step([37, 70], heads, dtype)
        chunks = [(0, 27, 37), (1, 69, 70)]
        exact, pages = step.attend(chunks), step.pages
        step.pages = [to_cache(each, FP8) for each in pages]
        found = step.attend(chunks)
        step.pages = [from_cache(each, dtype) for each in step.pages]
        assert all(map(torch.equal, found, step.attend(chunks)))
        assert not any(map(torch.equal, found, exact))


def scores_of_embedded_distances_are_right() -> None:
    step = Step([1, 20, 70], (2, 2, 16), torch.float16)
    chunks = [(0, 0, 1), (1, 0, 20), (2, 0, 70)]
    tables = [4 * torch.randn(2, 91, 16) for _ in range(2)]
    of_queries, of_keys = (each.to(torch.float16).transpose(0, 1) for each in tables)
    columns = columns_of(torch.arange(-74, 75), 16).int()
    kinds = ((of_queries, of_keys), (None, of_keys), (of_queries, None))
    for of_query, of_key in kinds[:2] if in_gate() else kinds:
        scores = DistanceScores(of_query, of_key, columns)
        found = step.attend(chunks, is_causal=False, distance_scores=scores)
        for chunk, rows, start in zip(chunks, found, (0, 1, 21), strict=True):
            length = chunk[2]
            distance = torch.arange(length) - torch.arange(length)[:, None]
            column = columns_of(distance, 16)
            added = torch.zeros(2, length, length, dtype=torch.float64)
            for table, at, turns in ((of_query, column, False), (of_key, column.t(), True)):
                if table is not None:
                    own = table[start : start + length].double().transpose(0, 1)
                    of_pairs = own.gather(2, at.expand(2, -1, -1))
                    added += of_pairs.transpose(1, 2) if turns else of_pairs
            assert_near(rows, step.reference(chunk, is_causal=False, added=added), torch.float16)
        own = DistanceScores(*[None if each is None else each[1:21] for each in (of_query, of_key)], columns)
        assert torch.equal(found[1], step.attend([chunks[1]], is_causal=False, distance_scores=own)[0])
    # Control.
    assert not torch.allclose(found[1], step.attend([chunks[1]], is_causal=False)[0], rtol=1e-2, atol=1e-2)


def encoders_see_both_ways() -> None:
    step = Step([1, 20, 50], (2, 1, 16), torch.float32)
    chunks = [(0, 0, 1), (1, 0, 20), (2, 0, 50)]
    for window in (7,) if in_gate() else (0, 7):
        found = step.attend(chunks, window, is_causal=False)
        for chunk, rows in zip(chunks, found, strict=True):
            assert_near(rows, step.reference(chunk, window, is_causal=False), torch.float32)
        assert torch.equal(found[1], step.attend([chunks[1]], window, is_causal=False)[0])
    # Control.
    assert not torch.equal(found[1], step.attend([chunks[1]], 7)[0])


def tokens_behind_a_bound_are_seen_by_none() -> None:
    """Bounds within, and a window before, the first tile; tokens whose window has no key before the bound."""
    step = Step([71, 12], (2, 2, 16), torch.float32)
    for window, num_seen in ((0, 9), (7, 40)):
        (found,) = step.attend([(0, 0, 71)], window, is_causal=False, num_seen=num_seen)
        assert_near(found, step.reference((0, 0, 71), window, is_causal=False, num_seen=num_seen), torch.float32)
        (beside, other) = step.attend([(0, 0, 71), (1, 0, 12)], window, is_causal=False, num_seen=num_seen)
        assert torch.equal(beside, found)
        assert_near(other, step.reference((1, 0, 12), window, is_causal=False, num_seen=num_seen), torch.float32)
        # Control.
        assert not torch.equal(step.attend([(0, 0, 71)], window, is_causal=False)[0], found)


def tokens_of_images_see_all_of_them() -> None:
    """Over ends of tiles and segments, with a window shorter than an image; chunks end where no image does."""
    images = (range(3, 5), range(10, 45), range(47, 70))
    kinds = (((2, 1, 16), torch.float32, 0), ((2, 2, 16), torch.float16, 7))
    for heads, dtype, window in kinds[1:] if in_gate() else kinds:
        step = Step([71, 12], heads, dtype)
        (whole,) = step.attend([(0, 0, 71)], window, images=images)
        assert_near(whole, step.reference((0, 0, 71), window, images=images), dtype)
        for first, end in itertools.pairwise((0, 3, 5, 46, 71)):
            cut, _ = step.attend([(0, first, end), (1, 11, 12)], window, images=images)
            assert torch.equal(cut, whole[first:end]), (first, end)
        # What a prefix hit inside an image leaves is one chunk.
        assert torch.equal(step.attend([(0, 16, 45)], window, images=images)[0], whole[16:45])
        (text,) = step.attend([(0, 0, 71)], window)
        assert torch.equal(text[:3], whole[:3])
        # Control.
        assert not torch.equal(text[20], whole[20])


def a_rows_bits_do_not_depend_on_how_it_was_cut() -> None:
    step = Step([70, 13], (3, 1, 16), torch.float32)
    (alone,) = step.attend([(0, 69, 70)])
    (whole,) = step.attend([(0, 30, 70)])
    beside = step.attend([(1, 12, 13), (0, 66, 70)])
    (unsplit,) = step.attend([(0, 69, 70)], splits=False)
    assert torch.equal(alone[0], whole[-1])
    assert torch.equal(whole[-4:], beside[1])
    assert torch.equal(alone, unsplit)


def a_rows_bits_do_not_depend_on_rows_of_a_tile() -> None:
    step = Step([70], (3, 1, 32), torch.float32)
    (expected,) = step.attend([(0, 30, 70)])
    for tile in (Tile(32, 4, 2, 1), Tile(64, 4, 2, 1), Tile(32, 4, 2, 1, parts=2)):
        with tiles(few=tile, many=tile):
            assert torch.equal(step.attend([(0, 30, 70)])[0], expected), tile
            assert torch.equal(step.attend([(0, 69, 70)])[0], expected[-1:]), tile


@triton.jit
def sums_of_rows(x, out, ROWS: tl.constexpr, N: tl.constexpr, TREE: tl.constexpr):
    r = tl.arange(0, ROWS)
    value = tl.load(x + r[:, None] * N + tl.arange(0, N)[None, :])
    if TREE:
        total = attention_kernels.tree_sum(value)
    else:
        total = tl.sum(value, 1)
    tl.store(out + r, total)


def weights_are_summed_by_a_tree() -> None:
    x = torch.rand(16, 64) ** 8
    expected = x[:, 0::2] + x[:, 1::2]
    while expected.shape[1] > 1:
        half = expected.shape[1] // 2
        expected = expected[:, :half] + expected[:, half:]
    out = torch.empty(16)
    for num_warps in (1, 4, 8):
        sums_of_rows[(1,)](x, out, ROWS=16, N=64, TREE=True, num_warps=num_warps, **attention_kernels.LAUNCH)
        assert torch.equal(out, expected[:, 0]), num_warps
    # Control: another order.
    sums_of_rows[(1,)](x, out, ROWS=16, N=64, TREE=False, **attention_kernels.LAUNCH)
    assert not torch.equal(out, expected[:, 0])


def integers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def made_items(
    starts: list[int], lengths: list[int], heads: tuple[int, int], window: int, later: int, *, splits: bool
) -> tuple[list, list, list]:
    """Few and many items and joins of a plan."""
    plan = attention.plan_attention(
        starts, lengths, torch.zeros(len(lengths), 1), *heads, 16, window, later=later, splits=splits
    )
    num_few, num_many, num_joins = plan.counts.tolist()
    many = plan.items[plan.num_few :]
    assert num_few <= plan.num_few
    assert num_many <= len(many)
    assert plan.launches.has_many or not num_many
    assert plan.launches.has_joins or not num_joins
    return plan.items[:num_few].tolist(), many[:num_many].tolist(), plan.joins[:num_joins].tolist()


def items_in_words(
    starts: list[int], lengths: list[int], group: int, window: int, later: int, *, splits: bool
) -> tuple[list, list, list]:
    """One item after the other."""
    segment, far, few, many, joins, partial = attention_kernels.SEGMENT, window or 2**30, [], [], [], 0
    for index, length in enumerate(lengths):
        start, stop = starts[index], starts[index + 1]
        own, per_tile = [], SMALL.rows // group
        for token in range(start, stop, per_tile):
            num_tokens = min(per_tile, stop - token)
            position = length - stop + token
            seen = min(position + num_tokens + later, length)
            first = (position // -window * -window if window < 0 else max(0, position - far + 1)) // segment
            own.append([index, token, num_tokens, position, seen, first, -(-seen // segment), -1])
        if not own:
            continue
        first, end = own[0][5], -(-length // segment)
        if stop - start == 1 and end - first > 1 and splits:
            few += [[*own[0][:5], each, each + 1, partial + each - first] for each in range(first, end)]
            joins.append([start, partial, end - first])
            partial += end - first
        elif len(own) == 1 and end - first == 1:
            few += own
        else:
            many += own[::-1]
    return few, many, joins


def items_are_all_the_work_there_is() -> None:
    chance = random.Random(5)
    for number in range(2 if in_gate() else 4):
        counts = [chance.choice([1, 1, 1, 2, 17, 70]) for _ in range(chance.randrange(3, 6))]
        starts = [0, *itertools.accumulate(counts)]
        lengths = [count + chance.choice([0, 3, 40, 700]) for count in counts]
        for group, window, later in ((1, 0, 0), (3, 0, 0), (4, 50, 0), (SMALL.rows, 33, 0), (3, -90, 0), (2, 50, 49)):
            arguments = (starts, lengths, (group, 1), window, later)
            expected = items_in_words(starts, lengths, group, window, later, splits=number % 4 > 0)
            assert made_items(*arguments, splits=number % 4 > 0) == expected
    # More sequences than are looked at at once, and items than are made at once.
    with mock.patch.multiple(attention, _BATCH=4, _EACH=2):
        assert made_items(*arguments, splits=True) == items_in_words(starts, lengths, 2, 50, 49, splits=True)


def decode_steps_need_fewer_launches() -> None:
    segment = attention_kernels.SEGMENT
    assert attention.launches_of([0, 1, 2], [segment, 3], 8) == Launches(False, False)
    assert attention.launches_of([0, 1, 2], [segment + 1, 3], 8) == Launches(False, True)
    assert attention.launches_of([0, 1, 2], [8 * segment, 3], 9) == Launches(False, True)
    assert attention.launches_of([0, 1, 2], [8 * segment, 3], 8) == Launches(True, True)
    assert attention.launches_of([0, 2, 3], [segment, 3], 8) == Launches(True, False)


def a_plan_in_tensors_that_stay_gives_the_same_bits() -> None:
    """Filled up, over the end of a segment: with a window and room for all partial results; without, and for two, where
    rows stay whole.
    """
    device, most = torch.get_default_device(), attention._MAX_PARTIALS
    num_heads, num_kv_heads, size = 2, 1, 16
    num_joined, kinds = [], set()
    for room, window in ((most, 20), (2, 0)):
        state, backend = BatchState(BLOCK, device), TritonBackend()
        fixed = TritonFixedAttention(6, 4, 8, BLOCK, device)
        cache = torch.randn(64, 2, num_kv_heads, BLOCK, size)
        with mock.patch.object(attention, "_MAX_PARTIALS", room):
            for scheduled in itertools.islice(decoding(3, attention_kernels.SEGMENT - 1, BLOCK, 2), 5):
                metadata, queries = state.build(scheduled).attention, torch.randn(5, num_heads, size)
                expected = TritonBackend().attend(queries[:3], cache, metadata, size**-0.5, window)
                filled = fixed.fill(metadata, 5)
                kinds.add(filled.kind)
                found = backend.attend(queries, cache, filled, size**-0.5, window)
                assert torch.equal(found[:3], expected), (room, window)
        (plan,) = fixed._plans.values()
        num_joined.append(int(plan.counts[2]))
    assert num_joined == [3, 0]
    assert kinds == {0, 1, 2}


def control_other_cuts_give_other_bits() -> None:
    step = Step([70], (3, 1, 16), torch.float32)
    (one,) = step.attend([(0, 69, 70)])
    with mock.patch.object(attention_kernels, "SEGMENT", 48):
        (other,) = step.attend([(0, 69, 70)])
    assert not torch.equal(one, other)
    assert_near(one, other, torch.float32)


def control_a_key_too_many_is_found() -> None:
    step = Step([69], (3, 1, 16), torch.float32)
    assert step.attend([(0, 68, 69)])[0].isfinite().all()
    assert not step.attend([(0, 68, 69)], extra=1)[0].isfinite().all()


CASES: tuple[Callable[[], None], ...] = (
    attention_is_right,
    heads_of_every_size_are_right,
    a_window_is_right_and_what_is_before_it_is_never_read,
    capped_scores_and_sinks_are_right,
    biases_of_distances_are_right_in_any_cut,
    a_cache_in_fp8_has_bits_of_rounded_numbers,
    scores_of_embedded_distances_are_right,
    encoders_see_both_ways,
    tokens_behind_a_bound_are_seen_by_none,
    tokens_of_images_see_all_of_them,
    a_rows_bits_do_not_depend_on_how_it_was_cut,
    a_rows_bits_do_not_depend_on_rows_of_a_tile,
    weights_are_summed_by_a_tree,
    items_are_all_the_work_there_is,
    decode_steps_need_fewer_launches,
    a_plan_in_tensors_that_stay_gives_the_same_bits,
    control_other_cuts_give_other_bits,
    control_a_key_too_many_is_found,
)


def main() -> None:
    set_device()
    attention_kernels.TILE, attention_kernels.SEGMENT = 16, 32
    with tiles():
        report(CASES)


if __name__ == "__main__":
    main()
