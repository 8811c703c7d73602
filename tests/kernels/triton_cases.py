"""Kernels of a GPU, interpreted on CPU tensors: run in a process of its own, where TRITON_INTERPRET is set in time.

    TRITON_INTERPRET=1 python tests/kernels/triton_cases.py       prints {case: what went wrong, or ""}
    python tests/kernels/triton_cases.py cuda                     the same on a GPU

Right indices, masks, dtypes and order of joins. In float16 and float32 only: the interpreter truncates where a GPU
rounds to bfloat16, and multiplies bfloat16's bit patterns as integers. Matmuls are numpy's here, so a GPU's bits,
registers and races are not seen. Tiles are cut down: as many cases with a few keys.
"""

import json
import math
import sys
import traceback
from collections.abc import Callable

import torch
import torch.nn.functional as F

from spmd_worker.kernels.reference import ReferenceKernels
from spmd_worker.kernels.triton import attention, attention_kernels, matmul, rows
from spmd_worker.kernels.triton.launching import is_interpreted

BLOCK = 8
REFERENCE = ReferenceKernels()
Heads = tuple[int, int, int]  # query heads, key-value heads, head size
Chunk = tuple[int, int, int]  # sequence, first query, end


class Step:
    """Sequences in a paged cache whose blocks lie in random order. What no sequence has written is NaN."""

    def __init__(self, lengths: list[int], heads: Heads, dtype: torch.dtype) -> None:
        generator = torch.Generator(torch.get_default_device()).manual_seed(sum(lengths))
        self.num_heads, num_kv_heads, size = heads
        counts = [-(-length // BLOCK) for length in lengths]
        order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
        # Of two layers, as a cache by blocks is: a layer's blocks lie apart.
        self.cache = torch.full((len(order), 2, 2, num_kv_heads, BLOCK, size), math.nan, dtype=dtype)[:, 1]
        self.keys, self.values = [], []
        for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            blocks, order = order[:count], order[count:]
            self.tables[index, :count] = torch.tensor(blocks)
            pair = torch.randn(2, length, num_kv_heads, size, generator=generator).to(dtype)
            for position in range(length):
                self.cache[blocks[position // BLOCK], :, :, position % BLOCK] = pair[:, position]
            self.keys.append(pair[0])
            self.values.append(pair[1])
        self.queries = [torch.randn(length, self.num_heads, size, generator=generator).to(dtype) for length in lengths]
        self.sinks = torch.randn(self.num_heads, generator=generator)

    def attend(
        self, chunks: list[Chunk], splits: bool = True, extra: int = 0, **arguments: object
    ) -> list[torch.Tensor]:
        """Each chunk's rows. `extra` keys too many are planned: for controls."""
        starts = [0]
        for _, first, end in chunks:
            starts.append(starts[-1] + end - first)
        _, _, num_kv_heads, _, size = self.cache.shape
        window = arguments.get("window", 0)
        tables = self.tables[[index for index, _, _ in chunks]]
        ends = [end + extra for _, _, end in chunks]
        heads = (self.num_heads, num_kv_heads, size)
        plan = attention.plan_attention(starts, ends, tables, *heads, window, splits=splits)
        queries = torch.cat([self.queries[index][first:end] for index, first, end in chunks]).flatten(1)
        out = attention.attend(queries, self.cache, plan, self.num_heads, size**-0.5, **arguments)
        return list(out.split([end - first for _, first, end in chunks]))

    def reference(self, chunk: Chunk, window: int = 0, score_cap: float = 0.0, sinks: object = None) -> torch.Tensor:
        """torch's, in float64."""
        index, first, end = chunk
        q = self.queries[index][first:end].double().transpose(0, 1)
        group = len(q) // self.keys[index].shape[1]
        k, v = (
            each[index][:end].double().repeat_interleave(group, 1).transpose(0, 1) for each in (self.keys, self.values)
        )
        position, key = torch.arange(first, end)[:, None], torch.arange(end)[None]
        seen = (key <= position) & (key > position - (window or 2**30))
        if not score_cap and sinks is None:
            return F.scaled_dot_product_attention(q, k, v, seen, scale=q.shape[2] ** -0.5).transpose(0, 1)
        scores = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
        scores = score_cap * (scores / score_cap).tanh() if score_cap else scores
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, self.sinks.double().view(-1, 1, 1).expand(-1, end - first, 1)), -1)
        return (scores.softmax(-1)[..., :end] @ v).transpose(0, 1)


def tolerance(dtype: torch.dtype) -> float:
    return 4e-3 if dtype == torch.float16 else 2e-5


def assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    difference = (got.double() - expected.double()).abs().max().item()
    assert difference < tolerance(dtype) * max(1.0, expected.abs().max().item()), difference


def attention_is_right() -> None:
    for heads, dtype in (((3, 1, 16), torch.float32), ((4, 2, 16), torch.float16), ((4, 2, 80), torch.float32)):
        step = Step([1, 37, 70], heads, dtype)
        chunks = [(0, 0, 1), (1, 27, 37), (2, 69, 70)]
        for chunk, found in zip(chunks, step.attend(chunks), strict=True):
            assert_near(found, step.reference(chunk), dtype)


def a_window_is_right_and_what_is_before_it_is_never_read() -> None:
    step = Step([70], (3, 1, 16), torch.float32)
    for chunk, window in (((0, 69, 70), 5), ((0, 69, 70), 40), ((0, 60, 70), 40)):
        assert_near(step.attend([chunk], window=window)[0], step.reference(chunk, window), torch.float32)
    expected = step.attend([(0, 69, 70)], window=5)[0]
    step.cache[step.tables[0, :8]] = math.nan  # positions 0 to 63
    assert torch.equal(step.attend([(0, 69, 70)], window=5)[0], expected)


def bounded_scores_and_sinks_are_right() -> None:
    step = Step([70], (3, 1, 16), torch.float32)
    for chunk in ((0, 69, 70), (0, 60, 70)):
        for arguments in ({"score_cap": 2.0}, {"sinks": step.sinks}):
            found = step.attend([chunk], **arguments)[0]
            assert_near(found, step.reference(chunk, **arguments), torch.float32)


def a_rows_bits_do_not_depend_on_how_it_was_cut() -> None:
    step = Step([70, 13], (3, 1, 16), torch.float32)
    (alone,) = step.attend([(0, 69, 70)])
    (whole,) = step.attend([(0, 30, 70)])
    beside = step.attend([(1, 12, 13), (0, 66, 70)])
    (unsplit,) = step.attend([(0, 69, 70)], splits=False)
    assert torch.equal(alone[0], whole[-1])
    assert torch.equal(whole[-4:], beside[1])
    assert torch.equal(alone, unsplit)


def only_the_lone_query_of_a_sequence_is_split() -> None:
    """Prompts were, where a tile holds a query: of models with more than half of ROWS query heads a key-value head."""
    group = attention_kernels.ROWS
    assert attention.plan_items([0, 1], [70], group).joins == [[0, 0, 3]]
    prompt = attention.plan_items([0, 5, 6], [70, 20], group)
    assert (len(prompt.items), prompt.joins, prompt.num_partials) == (6, [], 0)
    assert attention.plan_items([0, attention_kernels.ROWS + 1], [70], 1).joins == []


def control_other_cuts_give_other_bits() -> None:
    step = Step([70], (3, 1, 16), torch.float32)
    (one,) = step.attend([(0, 69, 70)])
    kept, attention_kernels.SEGMENT = attention_kernels.SEGMENT, 48
    (other,) = step.attend([(0, 69, 70)])
    attention_kernels.SEGMENT = kept
    assert not torch.equal(one, other)
    assert_near(one, other, torch.float32)


def control_a_key_too_many_is_found() -> None:
    step = Step([69], (3, 1, 16), torch.float32)
    assert step.attend([(0, 68, 69)])[0].isfinite().all()
    assert not step.attend([(0, 68, 69)], extra=1)[0].isfinite().all()


SMALL = matmul.Tile(16, 16, 32, 4, 2)


def matmuls_are_right() -> None:
    for (m, n, k), dtype in (((1, 40, 96), torch.float32), ((37, 24, 70), torch.float16)):
        x, weight, bias = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype) * k**-0.5, torch.randn(n).to(dtype)
        for added in (None, bias):
            expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
            assert_near(matmul.linear(x, weight, added, SMALL), expected, dtype)
            gated = matmul.gated_linear(x, weight, added, SMALL)
            assert_near(gated, REFERENCE.silu_and_mul(expected), dtype)
            separate = REFERENCE.silu_and_mul(matmul.linear(x, weight, added, SMALL))
            assert_near(gated, separate, dtype)


def a_rows_matmul_does_not_depend_on_the_others() -> None:
    x, weight = torch.randn(65, 96), torch.randn(24, 96)
    whole = matmul.linear(x, weight, None)
    for row in (0, 17, 64):
        assert torch.equal(matmul.linear(x[row : row + 1], weight, None)[0], whole[row])
    # Control: a split of K, joined in float32, is another chain.
    split = matmul.linear(x[:, :32], weight[:, :32], None) + matmul.linear(x[:, 32:], weight[:, 32:], None)
    assert not torch.equal(split, whole)


def rows_are_normed_as_the_reference_does() -> None:
    for dtype in (torch.float16, torch.float32):
        x, residual, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((3, 70), (3, 70), (70,), (70,)))
        expected_residual = residual.clone()
        expected = REFERENCE.add_rms_norm(x, expected_residual, weight, 1e-5)
        found = rows.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(residual, expected_residual)
        assert_near(found, expected, dtype)
        assert_near(rows.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), dtype)
        for added, offset, is_centred in ((bias, 0.0, True), (None, 1.0, False)):
            arguments = {"offset": offset, "is_centred": is_centred}
            found = rows.full_norm(x, weight, added, 1e-5, **arguments)
            assert_near(found, REFERENCE.full_norm(x, weight, added, 1e-5, **arguments), dtype)
        assert torch.equal(rows.rms_norm(x[1:2], weight, 1e-5)[0], rows.rms_norm(x, weight, 1e-5)[1])


def queries_and_keys_are_turned_and_written_as_the_reference_does() -> None:
    num_heads, num_kv_heads, size = 3, 2, 12
    slots = torch.tensor([5, -1, 2 * BLOCK], dtype=torch.int32)
    for dtype in (torch.float16, torch.float32):
        projected = torch.randn(3, (num_heads + 2 * num_kv_heads) * size).to(dtype)
        cos, sin = torch.randn(3, size // 2).to(dtype), torch.randn(3, size // 2).to(dtype)
        cache = torch.zeros(3, 2, num_kv_heads, BLOCK, size, dtype=dtype)
        q, k, v = projected.view(3, -1, size).split([num_heads, num_kv_heads, num_kv_heads], 1)
        turned, keys, expected = REFERENCE.rotate(q, cos, sin), REFERENCE.rotate(k, cos, sin), cache.clone()
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot // BLOCK, 0, :, slot % BLOCK] = keys[row]
                expected[slot // BLOCK, 1, :, slot % BLOCK] = v[row]
        rows.rotate_and_write(projected, cos, sin, cache, slots, num_heads)
        assert torch.equal(projected[:, : num_heads * size], turned.flatten(1))
        assert torch.equal(cache, expected)


CASES: tuple[Callable[[], None], ...] = (
    attention_is_right,
    a_window_is_right_and_what_is_before_it_is_never_read,
    bounded_scores_and_sinks_are_right,
    a_rows_bits_do_not_depend_on_how_it_was_cut,
    only_the_lone_query_of_a_sequence_is_split,
    control_other_cuts_give_other_bits,
    control_a_key_too_many_is_found,
    matmuls_are_right,
    a_rows_matmul_does_not_depend_on_the_others,
    rows_are_normed_as_the_reference_does,
    queries_and_keys_are_turned_and_written_as_the_reference_does,
)


def run(case: Callable[[], None]) -> str:
    torch.manual_seed(7)
    try:
        case()
    except Exception:  # the other cases are still worth their answers
        return traceback.format_exc()
    return ""


def main() -> None:
    torch.set_default_device("cuda" if "cuda" in sys.argv else "cpu")
    assert is_interpreted() == ("cuda" not in sys.argv), "set TRITON_INTERPRET=1, or say cuda"
    torch.set_num_threads(1)
    attention_kernels.ROWS, attention_kernels.TILE, attention_kernels.SEGMENT = 16, 16, 32
    matmul.FLOAT32 = matmul.Tile(32, 16, 32, 4, 2)
    print(json.dumps({case.__name__: run(case) for case in CASES}))


if __name__ == "__main__":
    main()
