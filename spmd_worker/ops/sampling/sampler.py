"""Logits of vocabulary shards -> token ids, the same on every rank of the tensor-parallel group.

Greedy rows exchange one (value, id) pair a rank; plain-temperature rows also the mass of each shard, and draw by
inverting the cumulative distribution with one counter-based uniform a row; masses are whole numbers, so that what is
drawn of equal logits does not depend on the number of ranks. Log-probabilities come from the shards too, by the same
masses (`shard_logprobs.py`). Only rows that need whole vocabularies (filters, penalties) have their logits gathered.
A row's token depends on its own logits,
parameters and key alone. A row with a logit that is NaN or infinite, or with none above minus infinity, gets
`NON_FINITE` in place of an id; every rank says so of the same rows, because each looks at the largest logits of all
shards. A row whose form lets no token follow gets `GRAMMAR_FAILED`; what other forms forbid is masked in each shard,
before everything else; log-probabilities that are raw are of all tokens.

R: rows to sample; Vs: token ids of this rank's shard; V: vocabulary; N: ranks of the group.
"""

from dataclasses import dataclass
from operator import methodcaller
from typing import NamedTuple

import torch
from torch import Tensor

from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.sampling.filters import bounded_temperature, factors_of, filter_logits
from spmd_worker.ops.sampling.processors import process_logits
from spmd_worker.ops.sampling.random import draw_bits
from spmd_worker.ops.sampling.read_back import Awaited, ReadBack, reads_are_free
from spmd_worker.ops.sampling.row import SampleRow
from spmd_worker.ops.sampling.shard_logprobs import log_masses, shard_logprobs
from spmd_worker.ops.sampling.token_masks import NO_MASKS, TokenMasks
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.sampled import GRAMMAR_FAILED, NON_FINITE
from spmd_worker.replica.sequence.sampling_params import ALL_LOGPROBS


@dataclass(frozen=True, slots=True)
class Sampled:
    """Parallel to the rows given; `logprobs` is empty when no row asked."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


class _Choice(NamedTuple):
    """Parallel to the rows: their tokens, int64 [K], and what was found out on the way, [K].

    `largest` float64: the largest logits of the vocabulary, where they are known.
    """

    token_ids: Tensor
    largest: Tensor | None = None


class _Launched(NamedTuple):
    """Some rows of a step, numbered in it by `indices`: their tokens, int64 [K] where they were chosen, and once they
    are read; and of some of them what is reported.
    """

    indices: list[int]
    chosen: Tensor
    token_ids: Awaited[list[int]]
    reports: list[tuple[list[int], Awaited[list[TokenLogprobs]]]]


@dataclass(frozen=True, slots=True)
class LaunchedSample:
    """Tokens of a step where they were chosen, int64 [R], before the host has read them."""

    chosen: Tensor
    parts: tuple[_Launched, ...]

    def collect(self) -> Sampled:
        """After the read-back. Rows that are in no part could take no token."""
        token_ids = [GRAMMAR_FAILED] * len(self.chosen)
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        for part in self.parts:
            for index, token_id in zip(part.indices, part.token_ids.value, strict=True):
                token_ids[index] = token_id
            for named, entries in part.reports:
                for place, entry in zip(named, entries.value, strict=True):
                    if token_ids[part.indices[place]] != NON_FINITE:
                        logprobs[part.indices[place]] = entry
        has_logprobs = any(entry is not None for entry in logprobs)
        return Sampled(tuple(token_ids), tuple(logprobs) if has_logprobs else ())


class Sampler:
    """`shard_start` is the first token id of this rank's shard."""

    def __init__(
        self,
        group: GroupHandle,
        shard_start: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        logprobs_mode: str,
        kernels: Kernels | None = None,
    ) -> None:
        self._kernels = ReferenceKernels() if kernels is None else kernels
        self._group, self._shard_start, self._vocab_size = group, shard_start, vocab_size
        self._eos_token_ids, self._logprobs_mode = eos_token_ids, logprobs_mode

    def sample(
        self, logits: Tensor, rows: list[SampleRow], masks: TokenMasks = NO_MASKS, read_back: ReadBack | None = None
    ) -> Sampled:
        """[R, Vs] and a row each; of those in `masks` the logits may change. Every rank of the group calls this with
        the same rows and masks. The host waits once for the device, for what `read_back` has to read as well.
        """
        read_back = read_back or ReadBack()
        launched = self.launch(logits, rows, masks, read_back)
        read_back.read()
        return launched.collect()

    def launch(self, logits: Tensor, rows: list[SampleRow], masks: TokenMasks, read_back: ReadBack) -> LaunchedSample:
        """As `sample`; the host has the tokens once `read_back` has read."""
        simple: list[int] = []
        others: list[int] = []
        for index, row in enumerate(rows):
            if index in masks.failed:
                continue
            # What is reported of a row with a mask is not what it is chosen by.
            is_whole = row.sampling.needs_logprobs and index in masks.places
            (others if row.needs_all_logits or is_whole else simple).append(index)
        launched: list[_Launched] = []
        if simple:
            shards, their_masks = _rows_of(logits, simple), masks.of(simple)
            self._forbid(shards, their_masks)
            launched.append(self._launch_shards(shards, simple, [rows[index] for index in simple], read_back))
        if others:
            gathered, their_masks = _rows_of(logits, others), masks.of(others)
            theirs = [rows[index] for index in others]
            launched.append(self._launch_gathered(gathered, others, theirs, their_masks, read_back))
        return LaunchedSample(_in_row_order(launched, len(rows), logits.device), tuple(launched))

    def launch_argmax(self, values: Tensor, columns: Tensor, read_back: ReadBack) -> LaunchedSample:
        """As `launch` for rows that are all plainly greedy, given each row's largest logit of this rank, [R], and its
        column in this rank's shard.
        """
        best_values, best_ids = self._best(values, columns, self._group)
        chosen = _where_finite(best_values, best_ids)
        part = _Launched(list(range(len(chosen))), chosen, _listed(chosen, read_back), [])
        return LaunchedSample(chosen, (part,))

    def gather(self, logits: Tensor) -> Tensor:
        """[K, Vs] on each rank -> float32 [K, V] on every rank; a new tensor that may be changed."""
        if self._group.size == 1:
            return logits[:, : self._vocab_size].to(torch.float32, copy=True)
        shards = self._group.all_gather(logits)
        return shards.transpose(0, 1).flatten(1)[:, : self._vocab_size].to(torch.float32, copy=True)

    def report(self, logits: Tensor, token_ids: list[int], num_likeliest: int) -> list[TokenLogprobs]:
        """[K, Vs] and a token each -> its log-probability, and those of the likeliest: the bits that `sample` reports
        of these logits in raw_logprobs mode. Every rank of the group calls this with the same tokens.
        """
        read_back = ReadBack()
        entries = self.launch_report(logits, token_ids, num_likeliest, read_back)
        read_back.read()
        return [entry for each in entries for entry in each.value]

    def launch_report(
        self, logits: Tensor, token_ids: list[int], num_likeliest: int, read_back: ReadBack
    ) -> list[Awaited[list[TokenLogprobs]]]:
        """What `report` returns, in pieces, of which the host has the values once `read_back` has read."""
        pieces = []
        for rows in _all_alone([num_likeliest] * len(token_ids)):
            count = len(rows)
            named = to_device(torch.tensor([token_ids[index] for index in rows], dtype=torch.int64), logits.device)
            pieces.append(
                self._of_shards(
                    _rows_of(logits, rows), named, [num_likeliest] * count, [1.0] * count, self._group, read_back
                )
            )
        return pieces

    def _forbid(self, logits: Tensor, masks: TokenMasks) -> None:
        """What the masks forbid, in place: [K, Vs]. A row that has a logit which is not finite keeps one."""
        if not masks.places:
            return
        rows = _places(list(masks.places), logits.device)
        largest = self._kernels.largest(logits)[0][rows]
        masks.apply(self._kernels, logits, self._shard_start)
        # Minus infinity everywhere may be a shard of padding alone. NaN is below nothing.
        logits[rows, 0] = logits[rows, 0].masked_fill(~(largest < torch.inf), torch.nan)

    def _launch_shards(
        self, logits: Tensor, indices: list[int], rows: list[SampleRow], read_back: ReadBack
    ) -> _Launched:
        """[K, Vs], of rows that need no more than maxima and sums."""
        choice = self._choose(logits, rows, self._group)
        reports = self._report(logits, rows, choice, self._group, read_back)
        return _Launched(indices, choice.token_ids, _listed(choice.token_ids, read_back), reports)

    def _launch_gathered(
        self, logits: Tensor, indices: list[int], rows: list[SampleRow], masks: TokenMasks, read_back: ReadBack
    ) -> _Launched:
        """[K, Vs], of rows that need whole vocabularies, of which every rank computes the same. What is reported of
        logits that nothing has changed comes from the shards even so: how a token was chosen makes no difference.
        """
        whole, alone = self.gather(logits), GroupHandle(ranks=(0,), rank=0, group=None)
        # Before they are processed: a row may forbid every token that it has.
        is_finite = self._kernels.largest(whole)[0].isfinite()
        masks.apply(self._kernels, whole, 0)
        process_logits(whole, rows, self._eos_token_ids)
        self._filter(whole, rows)
        ids = self._choose(whole, rows, alone, forbidden_id=0).token_ids
        choice = _Choice(ids.masked_fill(~is_finite, NON_FINITE))
        is_processed = self._logprobs_mode == "processed_logprobs"
        source, group = (whole, alone) if is_processed else (logits, self._group)
        reports = self._report(source, rows, choice, group, read_back)
        return _Launched(indices, choice.token_ids, _listed(choice.token_ids, read_back), reports)

    def _report(
        self, logits: Tensor, rows: list[SampleRow], choice: _Choice, group: GroupHandle, read_back: ReadBack
    ) -> list[tuple[list[int], Awaited[list[TokenLogprobs]]]]:
        """Log-probabilities of the rows that want some, of logits [K, Vs], or [K, V] of a group of one: which rows, and
        theirs. Where the host would wait to see which rows have no token, something is reported of these too.
        """
        reports = []
        wants = [index for index, row in enumerate(rows) if row.sampling.needs_logprobs]
        if wants and reads_are_free(choice.token_ids):
            token_ids = choice.token_ids.tolist()
            wants = [index for index in wants if token_ids[index] != NON_FINITE]
        for chosen in _all_alone([rows[index].sampling.logprobs or 0 for index in wants]):
            named = [wants[index] for index in chosen]
            asking = [rows[index].sampling for index in named]
            temperatures = [1.0] * len(named)
            if self._logprobs_mode != "raw_logprobs":
                temperatures = [1.0 if each.is_greedy else each.temperature for each in asking]
            counts = [each.logprobs or 0 for each in asking]
            ids, largest = _rows_of(choice.token_ids, named), choice.largest
            largest = None if largest is None else _rows_of(largest, named)
            own = _rows_of(logits, named)
            reports.append((named, self._of_shards(own, ids, counts, temperatures, group, read_back, largest)))
        return reports

    def _of_shards(
        self,
        logits: Tensor,
        token_ids: Tensor,
        nums_likeliest: list[int],
        temperatures: list[float],
        group: GroupHandle,
        read_back: ReadBack,
        largest: Tensor | None = None,
    ) -> Awaited[list[TokenLogprobs]]:
        """`token_ids` int64 [K]; `largest` float64 [K] are those of the whole vocabulary, where they are known."""
        if largest is None:
            values, columns = self._kernels.largest(logits)
            largest = self._best(values, columns, group)[0]
        factors = factors_of(temperatures, logits.device)
        masses = log_masses(self._kernels, logits, largest, factors, group)
        num_owned = max(0, min(logits.shape[1], self._vocab_size - self._first_id(group)))
        hot = torch.tensor([bounded_temperature(each) for each in temperatures], dtype=torch.float64)
        hot = to_device(hot, logits.device)
        numbers = (nums_likeliest, largest, masses, hot, group, num_owned)
        return shard_logprobs(self._kernels, logits, token_ids, *numbers, read_back)

    def _filter(self, logits: Tensor, rows: list[SampleRow]) -> None:
        """What top-k, top-p and min-p drop, in place: [K, V]."""
        cut = [index for index, row in enumerate(rows) if not row.sampling.is_greedy and row.sampling.has_filters]
        if not cut:
            return
        own = _rows_of(logits, cut)
        filter_logits(self._kernels, own, [rows[index].sampling for index in cut])
        if own is not logits:
            logits.index_copy_(0, _places(cut, logits.device), own)

    def _choose(
        self, logits: Tensor, rows: list[SampleRow], group: GroupHandle, forbidden_id: int = NON_FINITE
    ) -> _Choice:
        """Greedy or by inverting the cumulative distribution; `logits` are shards, or whole for a group of one.

        `forbidden_id` is for rows without a finite largest logit, which have no distribution to draw from.
        """
        values, columns = self._kernels.largest(logits)
        best_values, best_ids = self._best(values, columns, group)
        chosen = _where_finite(best_values, best_ids, forbidden_id)
        drawn = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
        if drawn and reads_are_free(best_values):
            is_drawable = best_values.isfinite().tolist()
            drawn = [index for index in drawn if is_drawable[index]]
        if drawn:
            drawn_rows, largest = [rows[index] for index in drawn], _rows_of(best_values, drawn)
            ids = _draw(self._kernels, _rows_of(logits, drawn), largest, drawn_rows, group, self._first_id(group))
            ids = _where_finite(largest, ids, forbidden_id)
            chosen = chosen.index_copy(0, _places(drawn, logits.device), ids)
        return _Choice(chosen, best_values)

    def _best(self, values: Tensor, columns: Tensor, group: GroupHandle) -> tuple[Tensor, Tensor]:
        """Each rank's largest values and their columns, [R] -> the largest of all and its id, [R] each; equal values
        go to the smaller id.
        """
        own = torch.stack((values.double(), (columns + self._first_id(group)).double()), dim=-1)
        pairs = group.all_gather(own)
        # Shards are in ascending order of ids and max returns the first maximum, so the smallest id wins.
        best, owners = pairs[:, :, 0].max(dim=0)
        return best, pairs[:, :, 1].gather(0, owners.unsqueeze(0)).squeeze(0)

    def _first_id(self, group: GroupHandle) -> int:
        return self._shard_start if group.size > 1 else 0


def _draw(
    kernels: Kernels, logits: Tensor, largest: Tensor, rows: list[SampleRow], group: GroupHandle, first: int
) -> Tensor:
    """Int64 [K]: the id at which the running mass, in the order of ids, passes a uniform share of the whole. Masses are
    whole numbers: the ids are the same however the vocabulary is cut. Any id for a row that has nothing to draw.
    """
    device = logits.device
    largest, factors = largest.float(), factors_of([row.sampling.temperature for row in rows], device)
    masses = kernels.masses(logits, largest, factors)
    before = group.all_gather(masses.sum(dim=-1)).cumsum(dim=0)
    bits = draw_bits([row.stream for row in rows], [row.sample_index for row in rows], [row.position for row in rows])
    targets = _shares(to_device(torch.from_numpy(bits), device), before[-1])
    offset = before[group.rank - 1] if group.rank else torch.zeros_like(targets)
    found = kernels.find_mass(logits, largest, factors, masses, targets - offset)
    owner = torch.searchsorted(before.t().contiguous(), targets.unsqueeze(1), right=True).squeeze(1)
    candidates = group.all_gather(found + first)
    # Beyond the last rank only where there is no distribution.
    owner = owner.clamp(max=group.size - 1)
    return candidates.gather(0, owner.unsqueeze(0)).squeeze(0)


def _shares(bits: Tensor, totals: Tensor) -> Tensor:
    """Int64 [K] of 53 bits, int64 [K] below 2^62 -> floor(bits x totals / 2^53), exactly, in numbers of 64 bits."""
    high, low = bits >> 26, bits & (1 << 26) - 1
    upper, lower = totals >> 30, totals & (1 << 30) - 1
    # high upper 2^56 + (low upper 2^4 + high lower) 2^26 + low lower, over 2^26 and then over 2^27.
    rest = (low * upper << 4) + high * lower + (low * lower >> 26)
    return (high * upper << 3) + (rest >> 27)


def _where_finite(values: Tensor, ids: Tensor, otherwise: int = NON_FINITE) -> Tensor:
    """Int64 [R]: ids, but `otherwise` where the value is not finite."""
    return ids.long().masked_fill(~values.isfinite(), otherwise)


def _all_alone(nums_likeliest: list[int]) -> list[list[int]]:
    """Which rows are reported together, in order: one that wants all tokens is by itself, for it is as large as all."""
    if ALL_LOGPROBS not in nums_likeliest:
        return [list(range(len(nums_likeliest)))] if nums_likeliest else []
    several = [index for index, each in enumerate(nums_likeliest) if each != ALL_LOGPROBS]
    alone = [[index] for index, each in enumerate(nums_likeliest) if each == ALL_LOGPROBS]
    return [several, *alone] if several else alone


def _rows_of(values: Tensor, indices: list[int]) -> Tensor:
    """The rows named, without a copy when they are all."""
    if len(indices) == values.shape[0]:
        return values
    return values.index_select(0, _places(indices, values.device))


def _places(indices: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(indices, dtype=torch.int64), device)


def _listed(token_ids: Tensor, read_back: ReadBack) -> Awaited[list[int]]:
    return read_back.later(methodcaller("tolist"), token_ids)


def _in_row_order(launched: list[_Launched], num_rows: int, device: torch.device) -> Tensor:
    """The tokens of all parts, int64 [R]."""
    if len(launched) == 1 and len(launched[0].indices) == num_rows:
        return launched[0].chosen
    chosen = torch.full((num_rows,), GRAMMAR_FAILED, dtype=torch.int64, device=device)
    for part in launched:
        chosen.index_copy_(0, _places(part.indices, device), part.chosen)
    return chosen
