"""Logits of vocabulary shards -> token ids, the same on every rank of the tensor-parallel group.

Greedy rows exchange one (value, id) pair a rank; plain-temperature rows also the mass of each shard, and draw by
inverting the cumulative distribution with one counter-based uniform a row. Their log-probabilities come from the
shards too (`shard_logprobs.py`). Only rows that need whole vocabularies (filters, penalties; all but greedy ones
where bits must not depend on the number of ranks) have their logits gathered. A row's token depends on its own logits,
parameters and key alone. A row with a logit that is NaN or infinite, or with none above minus infinity, gets
`NON_FINITE` in place of an id; every rank says so of the same rows, because each looks at the largest logits of all
shards. A row whose form lets no token follow gets `FORM_FAILED`; what other forms forbid is masked in each shard,
before everything else; log-probabilities that are raw are of all tokens.

R: rows to sample; Vs: token ids of this rank's shard; V: vocabulary; N: ranks of the group.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from spmd_worker.distributed.communicator import GroupHandle
from spmd_worker.kernels.api import Kernels
from spmd_worker.kernels.reference import ReferenceKernels
from spmd_worker.sampling.filters import filter_logits
from spmd_worker.sampling.logprobs import log_softmax, token_logprobs
from spmd_worker.sampling.processors import process_logits
from spmd_worker.sampling.random import uniforms
from spmd_worker.sampling.row import SampleRow
from spmd_worker.sampling.row_blocks import row_blocks
from spmd_worker.sampling.running_sums import running_sums
from spmd_worker.sampling.shard_logprobs import log_masses, shard_logprobs
from spmd_worker.sampling.token_masks import NO_MASKS, TokenMasks
from spmd_worker.sequence.outputs import TokenLogprobs
from spmd_worker.sequence.sampled import FORM_FAILED, NON_FINITE
from spmd_worker.sequence.sampling_params import ALL_LOGPROBS

Value = TypeVar("Value")

_MOST_TEMPERATURE: Final = 1e30
"""Hotter is as hot: all tokens that are left are equally likely. Float32 has no larger powers to spare."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Parallel to the rows given; `logprobs` is empty when no row asked."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


class _Choice(NamedTuple):
    """Parallel to the rows: their tokens, and what was found out on the way, [K] each.

    `columns` int64: of the largest logit in this rank's shard; `largest` float64: of the vocabulary.
    """

    token_ids: list[int]
    columns: Tensor
    largest: Tensor

    def of(self, indices: list[int]) -> "_Choice":
        """Of the rows named."""
        return _Choice([self.token_ids[i] for i in indices], self.columns[indices], self.largest[indices])


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
        *,
        is_exact: bool = False,
    ) -> None:
        """With `is_exact` what is drawn and reported is computed of whole vocabularies, on one rank too: of equal
        logits it is then the same bits on any number of ranks, which sums over shards are not.
        """
        self._kernels = ReferenceKernels() if kernels is None else kernels
        self._group, self._shard_start, self._vocab_size = group, shard_start, vocab_size
        self._eos_token_ids, self._logprobs_mode, self._is_exact = eos_token_ids, logprobs_mode, is_exact

    def sample(self, logits: Tensor, rows: list[SampleRow], masks: TokenMasks = NO_MASKS) -> Sampled:
        """[R, Vs] and a row each; of those in `masks` the logits may change. Every rank of the group calls this with
        the same rows and masks.
        """
        simple: list[int] = []
        others: list[int] = []
        for index, row in enumerate(rows):
            if index in masks.failed:
                continue
            # What is reported of a row with a mask is not what it is chosen by.
            wants_whole = row.sampling.logprobs == ALL_LOGPROBS or index in masks.places
            is_whole = row.sampling.needs_logprobs and (self._group.size == 1 or wants_whole)
            is_whole = is_whole or (self._is_exact and (row.sampling.needs_logprobs or not row.sampling.is_greedy))
            (others if row.needs_all_logits or is_whole else simple).append(index)
        token_ids = [FORM_FAILED] * len(rows)
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if simple:
            shards = _rows_of(logits, simple)
            masks.of(simple).apply(shards, self._shard_start)
            sampled = self._sample_shards(shards, [rows[index] for index in simple])
            _scatter(sampled.token_ids, simple, token_ids)
            _scatter(sampled.logprobs, simple, logprobs)
        if others:
            their_masks = masks.of(others)
            sampled = self._sample_gathered(_rows_of(logits, others), [rows[index] for index in others], their_masks)
            _scatter(sampled.token_ids, others, token_ids)
            _scatter(sampled.logprobs, others, logprobs)
        has_logprobs = any(entry is not None for entry in logprobs)
        return Sampled(tuple(token_ids), tuple(logprobs) if has_logprobs else ())

    def sample_argmax(self, values: Tensor, columns: Tensor) -> Sampled:
        """As `sample` for rows that are all plainly greedy, given each row's largest logit of this rank, [R], and its
        column in this rank's shard.
        """
        best_values, best_ids = self._best(values, columns, self._group)
        return Sampled(tuple(_where_finite(best_values, best_ids).tolist()), ())

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
        if self._group.size == 1 or num_likeliest == ALL_LOGPROBS or self._is_exact:
            whole = log_softmax(self.gather(logits))
            return [token_logprobs(row, token, num_likeliest) for row, token in zip(whole, token_ids, strict=True)]
        return self._of_shards(logits, token_ids, [num_likeliest] * len(token_ids))

    def _sample_shards(self, logits: Tensor, rows: list[SampleRow]) -> Sampled:
        """[K, Vs], of rows that need no more than maxima and sums."""
        choice = self._choose(logits, rows, self._group)
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        wants = [
            index
            for index, row in enumerate(rows)
            if row.sampling.needs_logprobs and choice.token_ids[index] != NON_FINITE
        ]
        if wants:
            reported = self._report(_rows_of(logits, wants), [rows[index] for index in wants], choice.of(wants))
            _scatter(reported, wants, logprobs)
        return Sampled(tuple(choice.token_ids), tuple(logprobs))

    def _report(self, logits: Tensor, rows: list[SampleRow], choice: _Choice) -> list[TokenLogprobs]:
        """Log-probabilities of rows that all want some."""
        counts = [row.sampling.logprobs or 0 for row in rows]
        # Of such rows nothing was processed but the temperature.
        temperatures = self._reported_temperatures(rows, logits)
        return self._of_shards(logits, choice.token_ids, counts, (choice.columns, choice.largest), temperatures)

    def _log_softmax(self, logits: Tensor, rows: list[SampleRow], wants: list[int]) -> Tensor:
        """What is reported of the rows that `wants` names: [K, V]."""
        temperatures, values = self._reported_temperatures([rows[index] for index in wants], logits), logits[wants]
        return log_softmax(values if temperatures is None else values / temperatures)

    def _reported_temperatures(self, rows: list[SampleRow], logits: Tensor) -> Tensor | None:
        """What logits are divided by before they are reported, [K, 1]; None for 1."""
        return None if self._logprobs_mode == "raw_logprobs" else _temperatures(rows, logits.device)

    def _of_shards(
        self,
        logits: Tensor,
        token_ids: list[int],
        nums_likeliest: list[int],
        largest: tuple[Tensor, Tensor] | None = None,
        temperatures: Tensor | None = None,
    ) -> list[TokenLogprobs]:
        """`largest` are columns and values as in `_Choice`, where they are known; `temperatures` float32 [K, 1]."""
        if largest is None:
            values, columns = self._kernels.largest(logits)
            largest = columns, self._best(values, columns, self._group)[0]
        if temperatures is None:
            temperatures = torch.ones((len(token_ids), 1), device=logits.device)
        masses = log_masses(logits, *largest, temperatures, self._group)
        num_owned = max(0, min(logits.shape[1], self._vocab_size - self._shard_start))
        return shard_logprobs(
            logits, token_ids, nums_likeliest, largest[1], masses, temperatures, self._group, num_owned
        )

    def _sample_gathered(self, logits: Tensor, rows: list[SampleRow], masks: TokenMasks) -> Sampled:
        """[K, Vs], of rows that need whole vocabularies. What is reported of logits that no other id of the row has
        changed comes from the shards even so: how a token was chosen makes no difference.
        """
        sampled = self._sample_whole(self.gather(logits), rows, masks)
        if self._group.size == 1 or self._logprobs_mode == "processed_logprobs" or self._is_exact:
            return sampled
        wants = [
            index
            for index, (row, entry) in enumerate(zip(rows, sampled.logprobs, strict=True))
            if entry is not None and row.sampling.logprobs != ALL_LOGPROBS
        ]
        logprobs = list(sampled.logprobs)
        if wants:
            chosen = [sampled.token_ids[index] for index in wants]
            counts = [rows[index].sampling.logprobs or 0 for index in wants]
            temperatures = self._reported_temperatures([rows[index] for index in wants], logits)
            shards = _rows_of(logits, wants)
            _scatter(self._of_shards(shards, chosen, counts, temperatures=temperatures), wants, logprobs)
        return Sampled(sampled.token_ids, tuple(logprobs))

    def _sample_whole(self, logits: Tensor, rows: list[SampleRow], masks: TokenMasks) -> Sampled:
        """[K, V] on every rank: each computes the same, so nothing is exchanged."""
        # Before they are processed: a row may forbid every token that it has.
        is_finite = self._kernels.largest(logits)[0].isfinite().tolist()
        wants = [index for index, row in enumerate(rows) if row.sampling.needs_logprobs and is_finite[index]]
        reported: Tensor | None = None
        if wants and self._logprobs_mode != "processed_logprobs":
            reported = self._log_softmax(logits, rows, wants)
        masks.apply(logits, 0)
        process_logits(logits, rows, self._eos_token_ids)
        for values, row in zip(logits, rows, strict=True):
            if not row.sampling.is_greedy and row.sampling.has_filters:
                tempered = (values - values.max()) / min(row.sampling.temperature, _MOST_TEMPERATURE)
                filter_logits(tempered, row.sampling)
                values.masked_fill_(tempered == -torch.inf, -torch.inf)
        if wants and reported is None:
            reported = self._log_softmax(logits, rows, wants)
        alone = GroupHandle(ranks=(0,), rank=0, group=None)
        ids = self._choose(logits, rows, alone, forbidden_id=0).token_ids
        chosen = [token_id if finite else NON_FINITE for token_id, finite in zip(ids, is_finite, strict=True)]
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        for place, index in enumerate(wants):
            assert reported is not None, wants
            logprobs[index] = token_logprobs(reported[place], chosen[index], rows[index].sampling.logprobs or 0)
        return Sampled(tuple(chosen), tuple(logprobs))

    def _choose(
        self, logits: Tensor, rows: list[SampleRow], group: GroupHandle, forbidden_id: int = NON_FINITE
    ) -> _Choice:
        """Greedy or by inverting the cumulative distribution; `logits` are shards, or whole for a group of one.

        `forbidden_id` is for rows without a finite largest logit, which have no distribution to draw from.
        """
        values, columns = self._kernels.largest(logits)
        best_values, best_ids = self._best(values, columns, group)
        chosen: list[int] = _where_finite(best_values, best_ids, forbidden_id).tolist()
        is_drawable = best_values.isfinite().tolist()
        drawn = [index for index, row in enumerate(rows) if is_drawable[index] and not row.sampling.is_greedy]
        if drawn:
            drawn_rows = [rows[index] for index in drawn]
            first = self._first_id(group)
            ids = _draw(_rows_of(logits, drawn), best_values[drawn], drawn_rows, group, first)
            _scatter(ids, drawn, chosen)
        return _Choice(chosen, columns, best_values)

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


def _draw(logits: Tensor, largest: Tensor, rows: list[SampleRow], group: GroupHandle, first: int) -> list[int]:
    """The id at which the mass, summed in the order of ids (`running_sums`), passes a uniform share of the whole."""
    device = logits.device
    temperatures = _temperatures(rows, device).double()
    mass = torch.empty(logits.shape, dtype=torch.float64, device=device)
    for block in row_blocks(logits):
        shares = ((logits[block].double() - largest[block].unsqueeze(1)) / temperatures[block]).exp_()
        running_sums(shares, mass[block])
    totals = group.all_gather(mass[:, -1].contiguous())
    before = totals.cumsum(dim=0)
    draws = uniforms([row.stream for row in rows], [row.sample_index for row in rows], [row.position for row in rows])
    targets = torch.from_numpy(draws).to(device) * before[-1]
    offset = before[group.rank - 1] if group.rank else torch.zeros_like(targets)
    local = torch.searchsorted(mass, (targets - offset).unsqueeze(1), right=True).squeeze(1)
    # A target at the very end of a shard may be rounded past it: the last id with mass takes it.
    last = torch.searchsorted(mass, mass[:, -1:].contiguous()).squeeze(1)
    owner = torch.searchsorted(before.t().contiguous(), targets.unsqueeze(1), right=True).squeeze(1)
    found = torch.minimum(local, last) + first
    candidates = group.all_gather(found)
    owner = owner.clamp(max=group.size - 1).unsqueeze(0)
    return [int(token_id) for token_id in candidates.gather(0, owner).squeeze(0).tolist()]


def _where_finite(values: Tensor, ids: Tensor, otherwise: int = NON_FINITE) -> Tensor:
    """Int64 [R]: ids, but `otherwise` where the value is not finite."""
    return torch.where(values.isfinite(), ids.long(), otherwise)


def _temperatures(rows: list[SampleRow], device: torch.device) -> Tensor:
    """Float32 [K, 1]; 1 for greedy rows."""
    values = [1.0 if row.sampling.is_greedy else min(row.sampling.temperature, _MOST_TEMPERATURE) for row in rows]
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)


def _rows_of(logits: Tensor, indices: list[int]) -> Tensor:
    """The rows named, without a copy when they are all."""
    return logits if len(indices) == logits.shape[0] else logits[indices]


def _scatter(values: Iterable[Value], indices: list[int], target: list[Value]) -> None:
    for index, value in zip(indices, values, strict=True):
        target[index] = value
