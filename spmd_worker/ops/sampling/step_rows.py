"""Rows of a step in the parts that they are sampled in, with what they ask for as tensors on the device.

A decode step nearly always continues the rows of the last one. Then the runner gives the sampler the same tuple, and
nothing here is computed or sent again.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_worker.ops.kernels.host_copies import send
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.sampling.token_masks import TokenMasks

Arrays: TypeAlias = Sequence[NDArray[Any]]


class SomeRows:
    """Rows of a step, by their `indices` in it. `kept` has what they ask for; `histories` is the sampler's."""

    def __init__(self, rows: Sequence[SampleRow], indices: Sequence[int], device: torch.device) -> None:
        self.indices = list(indices)
        self.rows = [rows[index] for index in self.indices]
        self.drawn = [index for index, row in enumerate(self.rows) if not row.sampling.is_greedy]
        self.filtered = [index for index in self.drawn if self.rows[index].sampling.has_filters]
        reported = [index for index, row in enumerate(self.rows) if row.sampling.needs_logprobs]
        self.beams = [index for index in reported if _is_beam(self.rows[index])]
        self.reported = [index for index in reported if index not in self.beams] if self.beams else reported
        ruled = [index for index, row in enumerate(self.rows) if row.sampling.token_rules is not None]
        self.timestamps = _first_timestamps(self.rows, ruled)
        self.drawn_first = [index for index in ruled if _draws_first_token(self.rows[index])]
        masked = [index for index, row in enumerate(self.rows) if row.sampling.return_sampling_mask]
        self.masked = [index for index in masked if not self.rows[index].sampling.is_greedy]
        self.masked_greedy = [index for index in masked if self.rows[index].sampling.is_greedy]
        self.has_processors = any(row.has_processors for row in self.rows)
        self.step = 0
        """Tokens since the rows were first sampled."""
        self.histories: Any = None
        self._device = device
        self._kept: dict[Hashable, list[Tensor]] = {}

    def kept(self, name: Hashable, make: Callable[[], Arrays]) -> list[Tensor]:
        """The arrays that `make` returns, on the device; made and sent when the name is asked for first."""
        found = self._kept.get(name)
        if found is None:
            found = self._kept[name] = send(make(), self._device)
        return found

    def rows_of(self, values: Tensor, name: Hashable, chosen: list[int]) -> Tensor:
        """`values` of the rows `chosen` among these; all rows without a copy. `name` is that of the choice."""
        if len(chosen) == values.shape[0]:
            return values
        return values.index_select(0, self.index(name, chosen))

    def index(self, name: Hashable, chosen: list[int]) -> Tensor:
        """Int64 [K]."""
        return self.kept(("index", name), lambda: (np.array(chosen, dtype=np.int64),))[0]

    def random_keys(self, name: Hashable, chosen: list[int]) -> Tensor:
        """Int64 [3, K], for `Kernels.random_bits`: stream, sample, position at step 0."""

        def make() -> Arrays:
            rows = [self.rows[index] for index in chosen]
            streams = np.array([row.stream for row in rows], dtype=np.uint64).view(np.int64)
            positions = np.array([row.position for row in rows], dtype=np.int64) - self.step
            samples = np.array([row.sample_index for row in rows], dtype=np.int64)
            return (np.stack((streams, samples, positions)),)

        return self.kept(("keys", name), make)[0]


def _first_timestamps(rows: Sequence[SampleRow], ruled: Sequence[int]) -> dict[int, list[int]]:
    """Id of the first timestamp -> the rows, of those with rules, whose timestamps begin there."""
    found: dict[int, list[int]] = {}
    for index in ruled:
        rules = rows[index].sampling.token_rules
        if rules is not None and rules.timestamps is not None:
            found.setdefault(rules.timestamps.first_token_id, []).append(index)
    return found


def _is_beam(row: SampleRow) -> bool:
    rules = row.sampling.token_rules
    return rules is not None and rules.num_beam_tokens is not None


def _draws_first_token(row: SampleRow) -> bool:
    """Whether the row's first token is the most probable of some, though it is drawn or several are reported."""
    rules = row.sampling.token_rules
    if rules is None or not rules.first_tokens or rules.num_beam_tokens:
        return False
    return not row.sampling.is_greedy or rules.num_beam_tokens == 0


class StepRows:
    """`simple` rows need only maxima and sums over shards of the vocabulary, `others` complete rows of logits. A row
    whose grammar failed is in neither.
    """

    def __init__(self, rows: Sequence[SampleRow], masks: TokenMasks, device: torch.device) -> None:
        simple: list[int] = []
        others: list[int] = []
        for index, row in enumerate(rows):
            if index in masks.failed:
                continue
            # Log-probabilities of a masked row are not of the logits that it is sampled from.
            has_mask = index in masks.mask_rows or row.sampling.token_rules is not None
            is_masked = row.sampling.needs_logprobs and has_mask
            (others if row.needs_all_logits or is_masked else simple).append(index)
        self.num_rows = len(rows)
        self.simple, self.others = SomeRows(rows, simple, device), SomeRows(rows, others, device)
        # A tuple is the same rows as long as it is the same object; a caller's list is not.
        self._rows = rows if rows and isinstance(rows, tuple) else None
        self._nums_outputs = _nums_outputs(rows)
        self._waiting = [row for row in rows if row.must_not_stop]
        self._masked, self._failed = tuple(masks.mask_rows), tuple(masks.failed)

    def continues(self, rows: Sequence[SampleRow], masks: TokenMasks) -> bool:
        """Whether a step samples these rows again, each as many tokens further, in the same parts; takes that over."""
        if rows is not self._rows or tuple(masks.mask_rows) != self._masked or tuple(masks.failed) != self._failed:
            return False
        nums_outputs = _nums_outputs(rows)
        step = nums_outputs[0] - self._nums_outputs[0]
        if nums_outputs != [number + step for number in self._nums_outputs]:
            return False
        if not all(row.must_not_stop for row in self._waiting):
            return False
        self.simple.step = self.others.step = step
        return True

    def parts(self) -> list[SomeRows]:
        return [part for part in (self.simple, self.others) if part.indices]


def _nums_outputs(rows: Sequence[SampleRow]) -> list[int]:
    return [len(row.output_token_ids) for row in rows]
