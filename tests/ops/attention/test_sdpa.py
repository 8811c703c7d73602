"""Attention in plain torch: long chunks are attended a slice of queries at a time, off the CPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from spmd_worker.ops.attention import sdpa


def attended(num_queries: int, num_keys: int, window: int, *, in_full: bool, sees_later: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    query, keys, values = (
        torch.randn(count, heads, 16, generator=generator)
        for count, heads in ((num_queries, 4), (num_keys, 2), (num_keys, 2))
    )
    num_later = (window - 1 if window else num_keys) if sees_later else 0
    arguments = (query, keys, values, 0, num_keys, 0.25, window, num_later)
    return sdpa._attend_unfused(*arguments, 30.0, torch.zeros(4)) if in_full else sdpa._attend_fused(*arguments)


@pytest.mark.parametrize("size", [1, 7, 32, 70])
@pytest.mark.parametrize("in_full", [False, True])
@pytest.mark.parametrize(("window", "sees_later"), [(0, False), (50, False), (50, True), (-64, False)])
def test_query_slices_see_the_keys_of_the_chunk(
    monkeypatch: pytest.MonkeyPatch, size: int, in_full: bool, window: int, sees_later: bool
):
    whole = attended(70, 300, window, in_full=in_full, sees_later=sees_later)
    asked = []

    def sliced(num_queries: int, num_heads: int, keys: Tensor, most_on_cpu: int | None = None) -> Iterator[slice]:
        asked.append((num_queries, num_heads, len(keys)))
        return (slice(start, min(start + size, num_queries)) for start in range(0, num_queries, size))

    monkeypatch.setattr(sdpa, "_query_slices", sliced)
    found = attended(70, 300, window, in_full=in_full, sees_later=sees_later)
    assert asked == [(70, 4, 300)]
    # Not bit for bit: the CPU's matmuls round a row by how many there are.
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(sdpa, "_query_slices", lambda *sizes: (slice(0, size), slice(0, 70 - size)))
    if size < 70:
        moved = attended(70, 300, window, in_full=in_full, sees_later=sees_later)
        assert not torch.allclose(moved, whole, rtol=1e-5, atol=1e-5), "negative control: other queries"


def test_scores_of_a_slice_are_bounded_off_cpu():
    """A chunk of 8192 tokens at 131072 of 32 heads had 2^35 scores at once."""
    keys = torch.empty(131072, 8, 128, device="meta")
    slices = list(sdpa._query_slices(8192, 32, keys))
    assert [each.start for each in slices] == [0, *(each.stop for each in slices[:-1])]
    assert slices[-1].stop == 8192
    assert max(each.stop - each.start for each in slices) * 32 * 131072 == 2**29
    assert len(list(sdpa._query_slices(2, 2**16, keys))) == 2, "at least one query"
    assert list(sdpa._query_slices(1000, 32, keys[:1000])) == [slice(0, 1000)]
    on_cpu = torch.empty(131072, 1, 1)
    assert list(sdpa._query_slices(8192, 32, on_cpu)) == [slice(0, 8192)]
    assert list(sdpa._query_slices(9, 32, on_cpu, 2**24))[:2] == [slice(0, 4), slice(4, 8)]


@pytest.mark.parametrize("num_queries", [1, 5])
def test_any_layout_of_torchs_result_is_taken(monkeypatch: pytest.MonkeyPatch, num_queries: int):
    """CUDA's kernels return heads behind tokens, of which a decode step's result had no view."""
    expected = attended(num_queries, 40, 0, in_full=False)
    attend = sdpa.F.scaled_dot_product_attention

    def tokens_first(*arguments: Tensor, **options: float) -> Tensor:
        return attend(*arguments, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", tokens_first)
    assert torch.equal(attended(num_queries, 40, 0, in_full=False), expected)
