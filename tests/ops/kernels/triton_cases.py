"""Kernels of a GPU, interpreted on CPU tensors: run in a process of its own, where TRITON_INTERPRET is set in time.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_cases.py
                                                                  prints {case: what went wrong, or ""}
    python tests/ops/kernels/triton_cases.py cuda                     the same on a GPU

Right indices, masks, dtypes and order of joins. In float16 and float32 only: the interpreter truncates where a GPU
rounds to bfloat16, and multiplies bfloat16's bit patterns as integers. Matmuls are numpy's here, so a GPU's bits,
registers and races are not seen. Attention is in triton_attention_cases.py.
"""

import json
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from triton_interpreter import make_faster

from spmd_worker.ops.attention.cache_dtype import FP8, to_cache
from spmd_worker.ops.kernels.api import LogitFilters
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.kernels.triton import (
    matmul,
    peer_sums,
    rows,
    sampling,
    sampling_kernels,
    tiles,
)
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.ops.kernels.triton.launching import is_interpreted
from spmd_worker.ops.kernels.triton.peer_sums import PeerSums
from spmd_worker.ops.sampling import read_back
from spmd_worker.ops.sampling.sampler import Sampler
from spmd_worker.ranks.communicator import single_group
from spmd_worker.replica.sequence.sampled import NON_FINITE
from spmd_worker.replica.sequence.sampling_params import SamplingParams

make_faster()
BLOCK = 8
REFERENCE = ReferenceKernels()


def tolerance(dtype: torch.dtype) -> float:
    return 4e-3 if dtype == torch.float16 else 2e-5


def assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    difference = (got.double() - expected.double()).abs().max().item()
    assert difference < tolerance(dtype) * max(1.0, expected.abs().max().item()), difference


SMALL = tiles.Tile(16, 16, 32, 4, 2)


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
        # Those that are not turned, or are turned before; keys in one piece, values among others.
        cache.zero_()
        rows.write_rows(keys, v, cache, slots)
        assert torch.equal(cache, expected)
        # In FP8, of all magnitudes and beyond.
        for large in (1.0, 2.0**-8, 300.0, math.inf):
            reduced = torch.zeros(cache.shape, dtype=FP8)
            rows.write_rows(keys * large, v * large, reduced, slots)
            assert torch.equal(reduced, to_cache(expected * large, FP8).where(expected != 0, reduced)), large


def logits_of_every_kind(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a wider tensor. Equal ones, both zeros, minus infinity in places and nearly everywhere."""
    logits = (3 * torch.randn(num_rows, size + 5)).to(dtype)[:, 2 : size + 2]
    logits[0] = logits[0].round()
    logits[1, 1:] = -torch.inf
    logits[2, 1::3] = -torch.inf
    logits[3, ::2], logits[3, 1::2] = 0.0, -0.0
    return logits


def drawn_by(num_rows: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    factors = torch.tensor([1.44, 0.3, 9.0, 1e38, 1e-30])[torch.arange(num_rows) % 5]
    return logits.float().amax(1), factors


def masses_are_the_references_and_found_in_any_pieces() -> None:
    for size, dtype in ((1, torch.float32), (16, torch.float16), (35, torch.float32)):
        logits = logits_of_every_kind(7, size, dtype)
        largest, factors = drawn_by(7, logits)
        each = sampling.prob_sums(
            logits.reshape(-1, 1), largest.repeat_interleave(size), factors.repeat_interleave(size)
        )
        each = each.view(7, size)
        expected = (((logits.float() - largest[:, None]) * factors[:, None]).double().exp2() * 2.0**40).floor().long()
        assert torch.allclose(each.double(), expected.double(), rtol=4e-7, atol=1)
        sums = sampling.prob_sums(logits, largest, factors)
        assert sums.shape == (7, -(-size // sampling_kernels.PIECE))
        assert torch.equal(sums.sum(1), each.sum(1))
        running = each.cumsum(1)
        for share in (0.0, 0.3, 0.999, 1.0):
            targets = (running[:, -1].double() * share).long().clamp(max=running[:, -1] - 1)
            found = sampling.invert_cdf(logits, largest, factors, sums, targets)
            assert torch.equal(found, torch.searchsorted(running, targets[:, None], right=True)[:, 0]), (size, share)
            # Control: the sums of other pieces lead elsewhere.
            if sums.shape[1] > 1 and share == 0.3:
                other = sampling.invert_cdf(logits, largest, factors, sums.roll(1, 1), targets)
                assert not torch.equal(other, found)
        for beyond in (running[:, -1], -1 - targets):
            assert sampling.invert_cdf(logits, largest, factors, sums, beyond).tolist() == [-1] * 7


def larger_logits_are_counted_as_the_reference_does() -> None:
    for size, dtype in ((1, torch.float32), (163, torch.float16)):
        logits = logits_of_every_kind(7, size, dtype)
        logits[5, ::2] = torch.nan
        values = logits[:, size // 2].clone().float()
        values[4], values[6] = -torch.inf, torch.inf
        expected = (logits.float() > values[:, None]).sum(1)
        assert torch.equal(sampling.count_above(logits, values), expected)
        assert expected[4] == size


def what_a_form_forbids_is_forbidden() -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    allowed = torch.randint(-(2**31), 2**31 - 1, (3, 4), generator=generator, dtype=torch.int32)
    which, places = torch.tensor([4, 0, 2]), torch.tensor([1, 1, 0])
    for first_id in (0, 32, 45):
        logits = logits_of_every_kind(6, 110, torch.float16)
        found, expected = logits.clone(), logits.clone()
        sampling.forbid_(found, allowed, which, places, first_id)
        REFERENCE.forbid_(expected, allowed, which, places, first_id)
        assert torch.equal(found, expected)
        assert torch.equal(found[[1, 3, 5]], logits[[1, 3, 5]])
        assert not torch.equal(found, logits)


def filters_leave_what_the_reference_leaves() -> None:
    kinds = [(0, 1.0), (3, 1.0), (0, 0.5), (7, 0.9), (1, 0.1), (39, 0.999), (0, 1e-9), (400, 1.0)]
    for size in (1, 40):
        logits = logits_of_every_kind(len(kinds), size, torch.float32)
        largest, factors = drawn_by(len(logits), logits)
        lowest = torch.full((len(logits),), -torch.inf)
        lowest[::3] = largest[::3] - 2.0
        top_k = torch.tensor([kind[0] for kind in kinds])
        top_p = torch.tensor([kind[1] for kind in kinds], dtype=torch.float64)
        filters = LogitFilters(largest, factors, lowest, top_k, top_p)
        found, expected = logits.clone(), logits.clone()
        sampling.filter_(found, filters)
        REFERENCE.filter_(expected, filters)
        assert torch.equal(found, expected), size
        alone = logits[5:6].clone()
        sampling.filter_(alone, LogitFilters(*(each[5:6] for each in filters.tensors())))
        assert torch.equal(alone, found[5:6])
        # Control: one more of each row.
        sampling.filter_(logits, LogitFilters(largest, factors, lowest, top_k + 1, top_p))
        assert size == 1 or not torch.equal(logits, expected)


def rows_that_are_not_finite_have_no_token_and_harm_no_row_beside_them() -> None:
    """As on a device, where the host does not look which rows these are before all are drawn."""
    kinds = [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5, "logprobs": 2}, {"logprobs": 1}, {"temperature": 0}]
    rows = [SampleRow(SamplingParams(**kind), stream, 0, 1, (1,), [2]) for stream, kind in enumerate(kinds * 4)]
    sampler = Sampler(single_group(), 0, 70, (), "raw_logprobs", TritonKernels())
    logits = logits_of_every_kind(len(rows), 70, torch.float32)
    logits = torch.where(logits.isfinite().any(1, keepdim=True), logits, 0.0)
    broken = logits.clone()
    for third, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        broken[6 * third : 6 * third + 6, 35 * (third < 2) :] = value
    free_on, read_back._FREE_ON = read_back._FREE_ON, ()
    try:
        expected, found = sampler.sample(logits[18:], rows[18:]), sampler.sample(broken, rows)
    finally:
        read_back._FREE_ON = free_on
    assert NON_FINITE not in expected.token_ids
    assert found.token_ids == (NON_FINITE,) * 18 + expected.token_ids
    assert found.logprobs == (None,) * 18 + expected.logprobs


class Peers:
    """The memory of ranks that are threads here, of which one runs at a time: `meet` hands over."""

    def __init__(self, size: int, part_bytes: int, *, adds_by_tree: bool = False) -> None:
        self._adds_by_tree = adds_by_tree
        num_bytes = 2 * peer_sums.half_bytes(part_bytes, size)
        self.views = [torch.full((num_bytes,), 255, dtype=torch.uint8) for _ in range(size)]
        self.addresses = torch.tensor([view.data_ptr() for view in self.views], dtype=torch.int64)
        self._met, self._turn, self.num_meetings = threading.Barrier(size, timeout=60), threading.Lock(), 0
        self._room_bytes = part_bytes

    def barrier(self) -> None:
        self.num_meetings += 1
        self._turn.release()
        self._met.wait()
        self._turn.acquire()

    def on_each(self, call: Callable[[PeerSums, int], torch.Tensor]) -> list[torch.Tensor]:
        """What each rank gets."""
        size, device = len(self.views), torch.get_default_device()

        def run(rank: int) -> torch.Tensor:
            with self._turn, torch.device(device):
                return call(PeerSums(self, rank, self._room_bytes, adds_by_tree=self._adds_by_tree), rank)

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(run, range(size)))


def parts_of(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Of very different sizes: their sum's last bits depend on the order."""
    return [(torch.randn(shape) * 10.0 ** (rank % 3)).to(dtype) for rank in range(size)]


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def ranks_add_up_in_their_order_in_one_round_in_two_and_in_pieces() -> None:
    for size, dtype in ((2, torch.float16), (3, torch.float32)):
        parts = parts_of(size, (7, 24), dtype)
        expected = summed(parts)
        for room, one_round, num_meetings in ((4096, 4096, 1), (4096, 64, 2), (256, 4096, None), (256, 64, None)):
            peer_sums.ONE_ROUND_BYTES = one_round
            peers = Peers(size, room)
            # Three sums one after the other: the halves take turns.
            for turn in range(3):
                found = peers.on_each(lambda sums, rank, parts=parts: sums.all_reduce(parts[rank].clone()))
                assert all(torch.equal(each, expected) for each in found), (size, dtype, room, one_round, turn)
            assert num_meetings is None or peers.num_meetings == 3 * size * num_meetings
        # Control: in another order other bits, from three ranks on.
        assert torch.equal(summed(parts[::-1]), expected) == (size == 2)
    strided = [part.t() for part in parts_of(2, (6, 5), torch.float32)]
    found = Peers(2, 512).on_each(
        lambda sums, rank: sums.all_reduce(strided[rank].clone(memory_format=torch.preserve_format))
    )
    assert all(torch.equal(each, summed(strided)) for each in found)


def a_sum_and_the_norm_behind_it_are_the_two_one_after_the_other() -> None:
    for dtype, room, one_round in ((torch.float16, 4096, 4096), (torch.float32, 256, 4096), (torch.float32, 4096, 64)):
        peer_sums.ONE_ROUND_BYTES = one_round
        parts, weight = parts_of(3, (9, 20), dtype), torch.randn(20).to(dtype)
        residual = torch.randn(9, 20).to(dtype)
        expected_residual = residual.clone()
        expected = rows.add_rms_norm(summed(parts), expected_residual, weight, 1e-5)
        residuals = [residual.clone() for _ in range(3)]
        found = Peers(3, room).on_each(
            lambda sums, rank, given=(parts, residuals, weight): sums.all_reduce_add_rms_norm(
                given[0][rank], given[1][rank], given[2], 1e-5
            )
        )
        assert all(torch.equal(each, expected) for each in found), (dtype, room, one_round)
        assert all(torch.equal(each, expected_residual) for each in residuals)


def ranks_gather_and_are_told_in_pieces_too() -> None:
    values = [torch.randn(5, 3, dtype=torch.float64) for _ in range(3)]
    for room in (128, 4096):
        found = Peers(3, room).on_each(lambda sums, rank: sums.all_gather(values[rank]))
        assert all(torch.equal(each, torch.stack(values)) for each in found)
        found = Peers(3, room).on_each(lambda sums, rank: sums.broadcast(values[rank].clone(), 1))
        assert all(torch.equal(each, values[1]) for each in found)


def what_is_launched_again_finds_both_halves_free() -> None:
    """Sums in a graph are in the halves that they were in when it was recorded, however many there were before."""
    peer_sums.ONE_ROUND_BYTES = 4096
    parts = parts_of(2, (40,), torch.float32)
    peers = Peers(2, 512)

    def sum_twice(sums: PeerSums, rank: int) -> torch.Tensor:
        turns = []
        for num_sums in (1, 2):
            for _ in range(num_sums):
                total = sums.all_reduce(parts[rank].clone())
            sums.reset_sums()
            turns.append(sums._turn)
        assert turns == [0, 0]
        return total

    assert all(torch.equal(each, summed(parts)) for each in peers.on_each(sum_twice))
    # A meeting for each sum, and one where all start anew: nobody reads any more what is written next.
    assert peers.num_meetings == 2 * (3 + 2)


def control_a_rank_that_does_not_wait_adds_up_what_is_not_there() -> None:
    parts = parts_of(2, (40,), torch.float32)
    peers = Peers(2, 512)
    peers.barrier = lambda: None
    found = peers.on_each(lambda sums, rank: sums.all_reduce(parts[rank].clone()))
    assert not all(torch.equal(each, summed(parts)) for each in found)


CASES: tuple[Callable[[], None], ...] = (
    matmuls_are_right,
    a_rows_matmul_does_not_depend_on_the_others,
    rows_are_normed_as_the_reference_does,
    queries_and_keys_are_turned_and_written_as_the_reference_does,
    masses_are_the_references_and_found_in_any_pieces,
    larger_logits_are_counted_as_the_reference_does,
    what_a_form_forbids_is_forbidden,
    filters_leave_what_the_reference_leaves,
    rows_that_are_not_finite_have_no_token_and_harm_no_row_beside_them,
    ranks_add_up_in_their_order_in_one_round_in_two_and_in_pieces,
    a_sum_and_the_norm_behind_it_are_the_two_one_after_the_other,
    ranks_gather_and_are_told_in_pieces_too,
    what_is_launched_again_finds_both_halves_free,
    control_a_rank_that_does_not_wait_adds_up_what_is_not_there,
)


def in_gate() -> bool:
    """Whether fewer sizes and dtypes are asked for: the stress tier and a GPU run all of them."""
    return "gate" in sys.argv


def run(case: Callable[[], None]) -> str:
    torch.manual_seed(7)
    try:
        case()
    except Exception:  # the other cases are still worth their answers
        return traceback.format_exc()
    return ""


def set_device() -> None:
    """The device of the command line, as the default; one thread."""
    torch.set_default_device("cuda" if "cuda" in sys.argv else "cpu")
    assert is_interpreted() == ("cuda" not in sys.argv), "set TRITON_INTERPRET=1, or say cuda"
    torch.set_num_threads(1)


def report(cases: Iterable[Callable[[], None]]) -> None:
    """Run cases and print {case: what went wrong, or ""}."""
    print(json.dumps({case.__name__: run(case) for case in cases}))


def main() -> None:
    set_device()
    sampling_kernels.PIECE, sampling_kernels.BLOCK = 16, 32
    if is_interpreted():
        sampling_kernels.PART, sampling_kernels.FILTER_BLOCK, sampling_kernels.LISTED = 64, 64, 16
    matmul.FLOAT32 = tiles.Tile(32, 16, 32, 4, 2, False, False, False)
    report(CASES)


if __name__ == "__main__":
    main()
