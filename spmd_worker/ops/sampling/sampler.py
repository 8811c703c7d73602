"""Vocabulary-sharded logits -> token ids, the same on every rank of the tensor-parallel group.

Greedy rows exchange one (value, id) pair per rank. Rows with a plain temperature also exchange the sum of each shard's
probability weights, and sample by inverting the CDF with one counter-based uniform number per row; weights are
integers, so the sampled token does not depend on the number of ranks. Log-probabilities come from the shards too, by
the same weights (`shard_logprobs.py`). Only rows that need the complete vocabulary (filters, penalties) have their
logits gathered.
A row's token depends on its own logits, parameters and key alone. A row with a NaN or infinite logit, or with none
above minus infinity, gets `NON_FINITE` as its id, on every rank alike, because each sees the maxima of all shards. A
row whose grammar allows no token gets `GRAMMAR_FAILED`; other grammars, and rules of tokens, mask logits in each shard,
before everything else; raw log-probabilities are of the logits before the mask.

R: rows to sample; Vs: token ids of this rank's shard; V: vocabulary; N: ranks of the group.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_worker.ops.kernels.api import Draws, Kernels, RowHistories
from spmd_worker.ops.kernels.host_copies import send, to_device
from spmd_worker.ops.kernels.random import random_bits, random_shares
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.sampling.beam_logprobs import beam_logprobs
from spmd_worker.ops.sampling.filters import bounded_temperature, exponent_factors, filter_logits, filter_numbers
from spmd_worker.ops.sampling.kept_ids import launch_kept_ids
from spmd_worker.ops.sampling.processors import process_logits
from spmd_worker.ops.sampling.read_back import Awaited, ReadBack, reads_are_free
from spmd_worker.ops.sampling.rule_choice import apply_rules
from spmd_worker.ops.sampling.shard_argmax import best_of_shards
from spmd_worker.ops.sampling.shard_logprobs import log_normalisers, shard_logprobs
from spmd_worker.ops.sampling.shard_scores import Scores, shard_scores
from spmd_worker.ops.sampling.step_rows import Arrays, SomeRows, StepRows
from spmd_worker.ops.sampling.token_masks import NO_MASKS, TokenMasks
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.sampled import GRAMMAR_FAILED, NON_FINITE
from spmd_worker.replica.sequence.sampling_mask import pack_ids
from spmd_worker.replica.sequence.sampling_params import ALL_LOGPROBS, SamplingParams


@dataclass(frozen=True, slots=True)
class Sampled:
    """Parallel to the rows given; `logprobs`, and `kept_ids` of `return_sampling_mask`, are empty when no row asked."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    kept_ids: tuple[bytes | None, ...] = ()


class _Choice(NamedTuple):
    """Tokens of some rows, int64 [K], and maxima of their logits over the vocabulary, float64 [K], if known."""

    token_ids: Tensor
    maxima: Tensor | None = None


class _Launched(NamedTuple):
    """Some rows of a step, by their `indices` in it: tokens on the device, int64 [K], and after the read-back; and for
    some of them the log-probabilities, and the ids that the filters have kept.
    """

    indices: list[int]
    chosen: Tensor
    token_ids: Awaited[list[int]]
    reports: list[tuple[list[int], Awaited[list[TokenLogprobs]]]]
    kept: tuple[list[int], Awaited[list[bytes]]] | None = None
    greedy: tuple[int, ...] = ()
    """Rows that want ids and could get only one."""


@dataclass(frozen=True, slots=True)
class LaunchedSample:
    """Tokens of a step on the device, int64 [R], before the read-back."""

    chosen: Tensor
    parts: tuple[_Launched, ...]

    def collect(self) -> Sampled:
        """The result, after the read-back. Rows that are in no part have no token to sample."""
        token_ids = [GRAMMAR_FAILED] * len(self.chosen)
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        kept_ids: dict[int, bytes] = {}
        for launched in self.parts:
            indices = launched.indices
            for index, token_id in zip(indices, launched.token_ids.value, strict=True):
                token_ids[index] = token_id
            for named, entries in launched.reports:
                for row, entry in zip(named, entries.value, strict=True):
                    if token_ids[indices[row]] != NON_FINITE:
                        logprobs[indices[row]] = entry
            if launched.kept is not None:
                kept_ids |= {indices[row]: ids for row, ids in zip(launched.kept[0], launched.kept[1].value)}
            kept_ids |= {indices[row]: pack_ids((max(token_ids[indices[row]], 0),)) for row in launched.greedy}
        kept_ids = {index: ids for index, ids in kept_ids.items() if token_ids[index] != NON_FINITE}
        has_logprobs = any(entry is not None for entry in logprobs)
        kept = tuple([kept_ids.get(index) for index in range(len(token_ids))]) if kept_ids else ()
        return Sampled(tuple(token_ids), tuple(logprobs) if has_logprobs else (), kept)


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
        self._step: StepRows | None = None
        self._histories: RowHistories | None = None

    def sample(
        self, logits: Tensor, rows: Sequence[SampleRow], masks: TokenMasks = NO_MASKS, read_back: ReadBack | None = None
    ) -> Sampled:
        """[R, Vs], one row each; logits of rows in `masks` may change. Every rank of the group calls this with the same
        rows and masks. The host waits once for the device, for the other requests of `read_back` as well.
        """
        read_back = read_back or ReadBack()
        launched = self.launch(logits, rows, masks, read_back)
        read_back.read()
        return launched.collect()

    def launch(
        self, logits: Tensor, rows: Sequence[SampleRow], masks: TokenMasks, read_back: ReadBack
    ) -> LaunchedSample:
        """`sample` without the wait: the host has the tokens after `read_back.read`. The same tuple of rows as in the
        last step, in which each has as many tokens more, is prepared already.
        """
        step = self._step
        if step is None or not step.continues(rows, masks):
            step = self._step = StepRows(rows, masks, logits.device)
        launched: list[_Launched] = []
        for part in step.parts():
            own, their_masks = part.rows_of(logits, "all", part.indices), masks.of(part.indices)
            if part is step.others:
                launched.append(self._launch_gathered(own, part, their_masks, read_back))
            else:
                self._forbid(own, their_masks)
                apply_rules(self._kernels, own, part, self._group, self._shard_start)
                launched.append(self._launch_shards(own, part, read_back))
        return LaunchedSample(_in_row_order(launched, step, logits.device), tuple(launched))

    def launch_argmax(self, values: Tensor, columns: Tensor, read_back: ReadBack) -> LaunchedSample:
        """`launch` for rows that are all plainly greedy, given each row's maximum of this rank's shard, [R], and its
        column in the shard.
        """
        best_values, best_ids = best_of_shards(values, columns, self._group, self._first_id(self._group))
        chosen = _where_finite(best_values, best_ids)
        part = _Launched(list(range(len(chosen))), chosen, _listed(chosen, read_back), [])
        return LaunchedSample(chosen, (part,))

    def gather(self, logits: Tensor) -> Tensor:
        """[K, Vs] on each rank -> float32 [K, V] on every rank; a new tensor that may be changed."""
        if self._group.size == 1:
            return logits[:, : self._vocab_size].to(torch.float32, copy=True)
        shards = self._group.all_gather(logits)
        return shards.transpose(0, 1).flatten(1)[:, : self._vocab_size].to(torch.float32, copy=True)

    def report(self, logits: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        """[K, Vs] and one token per row -> log-probabilities of it and of the top tokens: the bits that `sample` gives
        for these logits in raw_logprobs mode. Every rank of the group calls this with the same tokens.
        """
        read_back = ReadBack()
        entries = self.launch_report(logits, token_ids, num_top, read_back)
        read_back.read()
        return [entry for each in entries for entry in each.value]

    def launch_report(
        self, logits: Tensor, token_ids: list[int], num_top: int, read_back: ReadBack
    ) -> list[Awaited[list[TokenLogprobs]]]:
        """The result of `report`, in pieces that are available after `read_back.read`."""
        pieces = []
        for rows in _report_groups([num_top] * len(token_ids)):
            count = len(rows)
            named, factors, divisors = send(
                (np.array([token_ids[index] for index in rows]), *_scales([1.0] * count)), logits.device
            )
            own = logits if count == len(logits) else logits.index_select(0, _index_tensor(rows, logits.device))
            pieces.append(self._of_shards(own, named, [num_top] * count, factors, divisors, self._group, read_back))
        return pieces

    def launch_scores(
        self, logits: Tensor, token_ids: NDArray[np.int64], num_top: int, read_back: ReadBack
    ) -> Awaited[Scores]:
        """[K, Vs] and int64 [K, C], negative for none -> `shard_scores` of these tokens and of the `num_top` most
        probable: the bits of `report`. Every rank of the group calls this with the same tokens.
        """
        (ids,) = send((token_ids,), logits.device)
        maxima, normalisers, num_owned = self._normalisers(logits)
        return shard_scores(logits, ids, num_top, maxima, normalisers, self._group, num_owned, read_back)

    def _normalisers(self, logits: Tensor) -> tuple[Tensor, Tensor, int]:
        """Maxima and normalisers of rows without temperature, float64 [K], and the ids of this shard."""
        (factors, _) = send(_scales([1.0] * len(logits)), logits.device)
        values, columns = self._kernels.argmax(logits)
        maxima = best_of_shards(values, columns, self._group, self._first_id(self._group))[0]
        normalisers = log_normalisers(self._kernels, logits, maxima, factors, self._group)
        return maxima, normalisers, max(0, min(logits.shape[1], self._vocab_size - self._first_id(self._group)))

    def _forbid(self, logits: Tensor, masks: TokenMasks) -> None:
        """Apply the masks in place: [K, Vs]. A row with a logit that is not finite keeps one."""
        if not masks.mask_rows:
            return
        rows = _index_tensor(list(masks.mask_rows), logits.device)
        maxima = self._kernels.argmax(logits)[0][rows]
        masks.apply(self._kernels, logits, self._shard_start)
        # Minus infinity everywhere may be a shard of padding alone. NaN compares as not below infinity.
        logits[rows, 0] = logits[rows, 0].masked_fill(~(maxima < torch.inf), torch.nan)

    def _launch_shards(self, logits: Tensor, part: SomeRows, read_back: ReadBack) -> _Launched:
        """[K, Vs], of rows that need maxima and sums alone."""
        choice = self._choose(logits, part, self._group)
        reports = self._report(logits, part, choice, self._group, read_back)
        return _Launched(part.indices, choice.token_ids, _listed(choice.token_ids, read_back), reports)

    def _launch_gathered(self, logits: Tensor, part: SomeRows, masks: TokenMasks, read_back: ReadBack) -> _Launched:
        """[K, Vs], of rows that need the complete vocabulary; every rank computes the same. Raw log-probabilities come
        from the shards all the same, so that they do not depend on how a token was sampled.
        """
        gathered, alone = self.gather(logits), GroupHandle(ranks=(0,), rank=0, group=None)
        # Before the processors: a row may forbid all of its tokens.
        is_finite = self._kernels.argmax(gathered)[0].isfinite()
        masks.apply(self._kernels, gathered, 0)
        self._process(gathered, part)
        apply_rules(self._kernels, gathered, part, alone, 0)
        self._filter(gathered, part)
        kept = None
        if part.masked:
            own = part.rows_of(gathered, "masked", part.masked)
            kept = (part.masked, launch_kept_ids(own, read_back))
        ids = self._choose(gathered, part, alone, forbidden_id=0).token_ids
        choice = _Choice(ids.masked_fill(~is_finite, NON_FINITE))
        if part.histories is not None:
            assert self._histories is not None
            self._histories.append_(part.histories, choice.token_ids)
        is_processed = self._logprobs_mode == "processed_logprobs"
        source, group = (gathered, alone) if is_processed else (logits, self._group)
        reports = self._report(source, part, choice, group, read_back)
        if part.beams:
            own, allowed, ids = (
                part.rows_of(each, "beams", part.beams) for each in (logits, gathered, choice.token_ids)
            )
            counts = [part.rows[index].sampling.num_top_logprobs for index in part.beams]
            group = self._group
            entries = beam_logprobs(self._kernels, own, allowed, ids, counts, group, self._shard_start, read_back)
            reports.append((part.beams, entries))
        listed = _listed(choice.token_ids, read_back)
        return _Launched(part.indices, choice.token_ids, listed, reports, kept, tuple(part.masked_greedy))

    def _process(self, logits: Tensor, part: SomeRows) -> None:
        """Masks, bias and penalties in place: [K, V]."""
        if not part.has_processors:
            return
        if not self._kernels.samples_on_device:
            process_logits(logits, part.rows, self._eos_token_ids)
            return
        if self._histories is None:
            self._histories = self._kernels.new_histories(self._vocab_size, self._eos_token_ids, logits.device)
        if part.histories is None or not self._histories.is_next(part.histories):
            part.histories = self._histories.prepare(part.rows)
        self._histories.process_(logits, part.histories)

    def _report(
        self, logits: Tensor, part: SomeRows, choice: _Choice, group: GroupHandle, read_back: ReadBack
    ) -> list[tuple[list[int], Awaited[list[TokenLogprobs]]]]:
        """Log-probabilities from logits [K, Vs], or [K, V] of a group of one: rows that want some, and their entries.
        Rows without a token are left out if the host can tell without waiting.
        """
        reports = []
        wants = part.reported
        if wants and reads_are_free(choice.token_ids):
            token_ids = choice.token_ids.tolist()
            wants = [index for index in wants if token_ids[index] != NON_FINITE]
        nums_top = [part.rows[index].sampling.num_top_logprobs for index in wants]
        for number, chosen in enumerate(_report_groups(nums_top)):
            named = [wants[index] for index in chosen]
            asking = [part.rows[index].sampling for index in named]
            # Without a row that has no token, which the host may have seen, these are other rows.
            name = ("report", number, self._logprobs_mode, tuple(named) if len(wants) < len(part.reported) else ())
            factors, divisors = part.kept(("scales", name), partial(self._scales, asking))
            counts = [nums_top[index] for index in chosen]
            listed = None
            if any(each.logprob_token_ids for each in asking):
                (listed,) = part.kept(("listed", name), partial(_listed_ids, asking))
            ids, maxima = part.rows_of(choice.token_ids, name, named), choice.maxima
            maxima = None if maxima is None else part.rows_of(maxima, name, named)
            own = part.rows_of(logits, name, named)
            given = (own, ids, counts, factors, divisors, group, read_back, maxima, listed)
            reports.append((named, self._of_shards(*given)))
        return reports

    def _scales(self, asking: list[SamplingParams]) -> Arrays:
        """`_scales` of the temperatures that log-probabilities are of."""
        if self._logprobs_mode == "raw_logprobs":
            return _scales([1.0] * len(asking))
        return _scales([1.0 if each.is_greedy else each.temperature for each in asking])

    def _of_shards(
        self,
        logits: Tensor,
        token_ids: Tensor,
        nums_top: list[int],
        factors: Tensor,
        divisors: Tensor,
        group: GroupHandle,
        read_back: ReadBack,
        maxima: Tensor | None = None,
        listed: Tensor | None = None,
    ) -> Awaited[list[TokenLogprobs]]:
        """`token_ids` int64 [K]; `maxima` float64 [K] of the complete vocabulary, if known; `listed` int64 [K, C] are
        more ids that are reported, -1 for none.
        """
        if maxima is None:
            values, columns = self._kernels.argmax(logits)
            maxima = best_of_shards(values, columns, group, self._first_id(group))[0]
        normalisers = log_normalisers(self._kernels, logits, maxima, factors, group)
        num_owned = max(0, min(logits.shape[1], self._vocab_size - self._first_id(group)))
        numbers = (nums_top, maxima, normalisers, divisors, group, num_owned)
        return shard_logprobs(self._kernels, logits, token_ids, *numbers, read_back, listed)

    def _filter(self, logits: Tensor, part: SomeRows) -> None:
        """Apply top-k, top-p and min-p in place: [K, V]."""
        if not part.filtered:
            return
        own = part.rows_of(logits, "filtered", part.filtered)
        samplings = [part.rows[index].sampling for index in part.filtered]
        filter_logits(self._kernels, own, samplings, part.kept("filters", partial(filter_numbers, samplings)))
        if own is not logits:
            logits.index_copy_(0, part.index("filtered", part.filtered), own)

    def _choose(self, logits: Tensor, part: SomeRows, group: GroupHandle, forbidden_id: int = NON_FINITE) -> _Choice:
        """Greedy, or by inverting the CDF; `logits` are shards, or complete for a group of one.

        `forbidden_id` is the token of rows without a finite maximum, which have no distribution.
        """
        kernels, drawn = self._kernels, part.drawn
        if drawn and group.size == 1 and kernels.samples_on_device:
            (factors,) = part.kept("factors", lambda: (_factors_or_zero(part.rows),))
            keys = part.random_keys("all", list(range(len(part.rows))))
            token_ids, maxima = kernels.draw(logits, Draws(factors, keys, part.step, forbidden_id))
            return _Choice(token_ids, maxima.double())
        values, columns = kernels.argmax(logits)
        best_values, best_ids = best_of_shards(values, columns, group, self._first_id(group))
        chosen = _where_finite(best_values, best_ids, forbidden_id)
        name: Hashable = "drawn"
        if drawn and reads_are_free(best_values):
            is_finite = best_values.isfinite().tolist()
            if not all(is_finite):
                drawn = [index for index in drawn if is_finite[index]]
                name = ("drawn", tuple(drawn))
        if drawn:
            maxima, own = part.rows_of(best_values, name, drawn), part.rows_of(logits, name, drawn)
            temperatures = [part.rows[index].sampling.temperature for index in drawn]
            (factors,) = part.kept(("factors", name), lambda: (exponent_factors(temperatures),))
            bits = self._random_bits(part, name, drawn, logits.device)
            ids = _sample(kernels, own, maxima, factors, bits, group, self._first_id(group))
            ids = _where_finite(maxima, ids, forbidden_id)
            chosen = chosen.index_copy(0, part.index(name, drawn), ids)
        return _Choice(chosen, best_values)

    def _random_bits(self, part: SomeRows, name: Hashable, drawn: list[int], device: torch.device) -> Tensor:
        """Int64 [K]: 53 random bits of each row `drawn`."""
        if self._kernels.samples_on_device:
            return self._kernels.random_bits(part.random_keys(name, drawn), part.step)
        rows = [part.rows[index] for index in drawn]
        numbers = ([row.stream for row in rows], [row.sample_index for row in rows], [row.position for row in rows])
        return to_device(torch.from_numpy(random_bits(*numbers)), device)

    def _first_id(self, group: GroupHandle) -> int:
        return self._shard_start if group.size > 1 else 0


def _sample(
    kernels: Kernels, logits: Tensor, maxima: Tensor, factors: Tensor, bits: Tensor, group: GroupHandle, first: int
) -> Tensor:
    """Int64 [K]: the id at which the running sum of weights, in the order of ids, passes a uniform share of the total.
    Weights are integers: the ids do not depend on the sharding. Any id for a row without a distribution.
    """
    maxima = maxima.float()
    sums = kernels.prob_sums(logits, maxima, factors)
    before = group.all_gather(sums.sum(dim=-1)).cumsum(dim=0)
    targets = random_shares(bits, before[-1])
    offset = before[group.rank - 1] if group.rank else torch.zeros_like(targets)
    found = kernels.invert_cdf(logits, maxima, factors, sums, targets - offset)
    owner = torch.searchsorted(before.t().contiguous(), targets.unsqueeze(1), right=True).squeeze(1)
    candidates = group.all_gather(found + first)
    # Beyond the last rank only without a distribution.
    owner = owner.clamp(max=group.size - 1)
    return candidates.gather(0, owner.unsqueeze(0)).squeeze(0)


def _scales(temperatures: list[float]) -> Arrays:
    """Factors of logits as exponents of two, float32 [K], and their divisors, float64 [K]."""
    return exponent_factors(temperatures), np.array([bounded_temperature(each) for each in temperatures])


def _factors_or_zero(rows: Sequence[SampleRow]) -> NDArray[np.float32]:
    """`exponent_factors`, float32 [R], and 0 of greedy rows."""
    is_greedy = np.array([row.sampling.is_greedy for row in rows])
    factors = exponent_factors([1.0 if row.sampling.is_greedy else row.sampling.temperature for row in rows])
    return np.where(is_greedy, np.float32(0.0), factors)


def _where_finite(values: Tensor, ids: Tensor, otherwise: int = NON_FINITE) -> Tensor:
    """Int64 [R]: ids, or `otherwise` if the value is not finite."""
    return ids.long().masked_fill(~values.isfinite(), otherwise)


def _report_groups(nums_top: list[int]) -> list[list[int]]:
    """Rows that are reported together, in order; a row that wants the complete vocabulary is alone, as it is large."""
    if ALL_LOGPROBS not in nums_top:
        return [list(range(len(nums_top)))] if nums_top else []
    several = [index for index, each in enumerate(nums_top) if each != ALL_LOGPROBS]
    alone = [[index] for index, each in enumerate(nums_top) if each == ALL_LOGPROBS]
    return [several, *alone] if several else alone


def _listed_ids(asking: list[SamplingParams]) -> Arrays:
    """`logprob_token_ids` of rows, int64 [K, C], filled up with -1."""
    rows = [each.logprob_token_ids or () for each in asking]
    width = max(map(len, rows))
    return (np.array([[*ids, *[-1] * (width - len(ids))] for ids in rows], dtype=np.int64),)


def _index_tensor(indices: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(indices, dtype=torch.int64), device)


def _listed(token_ids: Tensor, read_back: ReadBack) -> Awaited[list[int]]:
    return read_back.later(methodcaller("tolist"), token_ids)


def _in_row_order(launched: list[_Launched], step: StepRows, device: torch.device) -> Tensor:
    """The tokens of all parts, int64 [R]."""
    if len(launched) == 1 and len(launched[0].indices) == step.num_rows:
        return launched[0].chosen
    chosen = torch.full((step.num_rows,), GRAMMAR_FAILED, dtype=torch.int64, device=device)
    for part, each in zip(step.parts(), launched, strict=True):
        chosen.index_copy_(0, part.index("all", part.indices), each.chosen)
    return chosen
