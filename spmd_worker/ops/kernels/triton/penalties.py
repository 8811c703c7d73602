"""Launches of penalty_kernels.py, and the tables that they read: token counts and tails of rows, kept on the device.

A row's state is found by comparison, not sent with a step's plan: it is that of the row's own list of output tokens,
which only grows, by the tokens that `append_` was given. So a row that is new, has forked, was sent again or sampled
twice does not match, and starts again from its tokens; a row that was preempted or swapped and comes back matches. A
row that goes ahead of its ids is in every step, so its state is never dropped: the least recently used rows that are
not in a step lose theirs.

R: rows of a step; V: vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_worker.ops.kernels.api import MAX_LOGIT
from spmd_worker.ops.kernels.host_copies import send
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.kernels.triton import penalty_kernels
from spmd_worker.ops.kernels.triton.launching import power_of_two
from spmd_worker.replica.sequence.sampled import NOT_READ
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_BITS: Final = 32
_MIN_WIDTH: Final = 8
"""Tokens of a tail."""
_SLOTS_A_ROW: Final = 4
_MIN_COUNT_ROWS: Final = 8

_Key = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class _Slot:
    """A row's state: tail and length at `index`, counts in `count_row` or nowhere; `num_known` output tokens. The row
    keeps its list alive, whose address is its key.
    """

    index: int
    row: SampleRow
    count_row: int = -1
    num_known: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedRows:
    """Rows of a step as tensors on the device: see penalty_kernels.py. `slots`: None for a row without a state."""

    slots: list[_Slot | None]
    rows: Tensor
    factors: Tensor
    stops: Tensor
    words: Tensor
    bias_ids: Tensor
    biases: Tensor
    before: Tensor
    allowed: Tensor
    uses_mask: Tensor
    must_decide: bool
    must_apply: bool


class RowHistories:
    """Implements `kernels.api.RowHistories`."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._vocab_size, self._eos_token_ids, self._device = vocab_size, eos_token_ids, device
        self._slots: dict[_Key, _Slot] = {}
        """The least recently used first."""
        self._free: list[int] = []
        self._free_counts: list[int] = []
        self._counts = self._zeros(0, vocab_size)
        self._tails, self._lengths = self._zeros(0, _MIN_WIDTH), self._zeros(0)
        self._allowed: dict[int, tuple[SamplingParams, Tensor]] = {}
        self._nothing = self._zeros(4)

    def prepare(self, sample_rows: Sequence[SampleRow]) -> ProcessedRows:
        """Rows of a step, in the order of their logits; starts those that the device does not know."""
        self._grow_tails(max([_width_of(row.sampling) for row in sample_rows], default=_MIN_WIDTH))
        slots = self._take_slots(sample_rows)
        self._start([slot for slot in slots if slot is not None and not _is_known(slot)])
        lists = _Lists(self._tails.shape[1])
        fields = np.zeros((len(sample_rows), int(penalty_kernels.FIELDS)), dtype=np.int32)
        factors = np.zeros((len(sample_rows), 3), dtype=np.float32)
        masks = self._masks_of(sample_rows)
        for index, (row, slot) in enumerate(zip(sample_rows, slots, strict=True)):
            sampling = row.sampling
            own = (-1, -1) if slot is None else (slot.index, slot.count_row)
            stop_ids = (*self._eos_token_ids, *sampling.stop_token_ids) if sampling.min_tokens else ()
            allowed_row = -1 if sampling.allowed_token_ids is None else masks[id(sampling)]
            min_length = row.first_position + sampling.min_tokens
            fields[index, :11] = (*own, allowed_row, min_length, *lists.add(sampling, stop_ids))
            repetition = min(max(sampling.repetition_penalty, 1 / MAX_LOGIT), MAX_LOGIT)
            factors[index] = (repetition, sampling.presence_penalty, sampling.frequency_penalty)
        rows, sent_factors, stops, words, bias_ids, biases = send((fields, factors, *lists.arrays()), self._device)
        tables = [table for _, table in self._allowed.values()]
        return ProcessedRows(
            slots=slots,
            rows=rows,
            factors=sent_factors,
            stops=stops,
            words=words,
            bias_ids=bias_ids,
            biases=biases,
            before=torch.empty(max(lists.num_before, 4), dtype=torch.float32, device=self._device),
            allowed=torch.stack(tables) if tables else self._nothing,
            uses_mask=torch.zeros(len(sample_rows), dtype=torch.int32, device=self._device),
            must_decide=bool(tables) or lists.is_used,
            must_apply=bool(tables) or any(slot is not None and slot.count_row >= 0 for slot in slots),
        )

    def is_next(self, prepared: ProcessedRows) -> bool:
        """Whether the rows have gone on by the tokens that were appended, and nothing else."""
        return all(slot is None or _is_known(slot) for slot in prepared.slots)

    def process_(self, logits: Tensor, prepared: ProcessedRows) -> None:
        """Float32 [R, V]: `process_logits`."""
        assert logits.dtype == torch.float32, logits.dtype
        assert logits.stride(1) == 1, logits.stride()
        if not logits.numel():
            return
        size, stride, num_words = logits.shape[1], logits.stride(0), -(-self._vocab_size // _BITS)
        block = penalty_kernels.BLOCK
        if prepared.must_decide:
            penalty_kernels.decide[(len(logits),)](
                *(logits, prepared.rows, self._tails, self._lengths, prepared.allowed, prepared.stops, prepared.words),
                *(prepared.bias_ids, prepared.biases, prepared.before, prepared.uses_mask, size, stride, num_words),
                WIDTH=self._tails.shape[1],
                WORDS=penalty_kernels.WORDS,
                BLOCK=block,
                **penalty_kernels.LAUNCH,
            )
        if prepared.must_apply:
            penalty_kernels.apply[(len(logits), -(-size // block))](
                *(logits, prepared.rows, prepared.factors, self._counts, prepared.allowed, prepared.uses_mask),
                *(size, stride, num_words),
                BLOCK=block,
                **penalty_kernels.LAUNCH,
            )

    def append_(self, prepared: ProcessedRows, token_ids: Tensor) -> None:
        """Add the sampled tokens, int64 [R], to the rows' states."""
        kept = [slot for slot in prepared.slots if slot is not None]
        if not kept:
            return
        penalty_kernels.append[(len(token_ids),)](
            *(token_ids, prepared.rows, self._counts, self._tails, self._lengths, self._vocab_size),
            WIDTH=self._tails.shape[1],
            **penalty_kernels.APPEND_LAUNCH,
        )
        for slot in kept:
            slot.num_known += 1

    def _take_slots(self, sample_rows: Sequence[SampleRow]) -> list[_Slot | None]:
        """Rows that need a state take theirs, a free one, or that of a row which is not in this step."""
        keys = _keys_of(sample_rows)
        kept = self._slots
        for key in keys:
            # Moved to the end: no row of this step loses its slot to another.
            if key is not None and (slot := kept.pop(key, None)) is not None:
                kept[key] = slot
        num_kept = sum(key is not None for key in keys)
        num_counted = sum(row.sampling.has_penalties for row in sample_rows)
        self._grow(num_kept, num_counted)
        slots: list[_Slot | None] = []
        for key, row in zip(keys, sample_rows, strict=True):
            if key is None:
                slots.append(None)
                continue
            slot = kept.get(key)
            if slot is None:
                if not self._free:
                    self._drop_oldest()
                slot = kept[key] = _Slot(self._free.pop(), row)
            elif row.prompt_token_ids != slot.row.prompt_token_ids:
                slot.num_known = -1
            # A request that is sent again, for another of its samples, has other objects of the same values.
            slot.row = row
            slots.append(slot)
        for slot, row in zip(slots, sample_rows, strict=True):
            if slot is not None and row.sampling.has_penalties and slot.count_row < 0:
                while not self._free_counts:
                    self._drop_oldest()
                slot.count_row, slot.num_known = self._free_counts.pop(), -1
        return slots

    def _drop_oldest(self) -> None:
        slot = self._slots.pop(next(iter(self._slots)))
        self._free.append(slot.index)
        if slot.count_row >= 0:
            self._free_counts.append(slot.count_row)

    def _start(self, slots: list[_Slot]) -> None:
        """Give the device the tokens of rows that it does not know."""
        if not slots:
            return
        tokens: list[int] = []
        starts = np.zeros((len(slots), 5), dtype=np.int32)
        width, longest = self._tails.shape[1], 1
        for index, slot in enumerate(slots):
            prompt, outputs = slot.row.prompt_token_ids, slot.row.output_token_ids
            assert NOT_READ not in outputs, "a row that goes ahead of its ids keeps its state"
            own = [*prompt, *outputs]
            starts[index] = (slot.index, slot.count_row, len(tokens), len(prompt), len(own))
            tokens += own
            longest = max(longest, len(own) if slot.count_row >= 0 else 1)
            slot.num_known = len(outputs)
        token_ids, sent = send((np.array(tokens or [0], dtype=np.int32), starts), self._device)
        block, size = penalty_kernels.BLOCK, self._vocab_size
        if len(self._counts):
            penalty_kernels.clear[(len(slots), -(-size // block))](
                self._counts, sent, size, BLOCK=block, **penalty_kernels.LAUNCH
            )
        penalty_kernels.start[(len(slots), -(-longest // block))](
            *(token_ids, sent, self._counts, self._tails, self._lengths, size),
            WIDTH=width,
            BLOCK=block,
            **penalty_kernels.LAUNCH,
        )

    def _grow(self, num_rows: int, num_counted: int) -> None:
        """Enlarge the tables; their contents are kept, because ids of a row may be nowhere but here."""
        num_slots, num_counts = len(self._lengths), len(self._counts)
        if num_rows > num_slots // _SLOTS_A_ROW:
            size = power_of_two(_SLOTS_A_ROW * num_rows)
            self._tails, self._lengths = self._longer(self._tails, size), self._longer(self._lengths, size)
            self._free += range(num_slots, size)
        if num_counted > num_counts:
            size = max(_MIN_COUNT_ROWS, power_of_two(num_counted))
            self._counts = self._longer(self._counts, size)
            self._free_counts += range(num_counts, size)

    def _grow_tails(self, width: int) -> None:
        """Enlarge the tails: the token at position p moves from p % old to p % new."""
        old = self._tails.shape[1]
        if width <= old:
            return
        positions = self._lengths.long().unsqueeze(1) - 1 - torch.arange(old, device=self._device)
        tails = self._zeros(len(self._tails), width)
        self._tails = tails.scatter_(1, positions % width, self._tails.gather(1, positions % old))

    def _masks_of(self, sample_rows: Sequence[SampleRow]) -> dict[int, int]:
        """Row of the masks of each sampling parameters' allowed ids; sends those that are new."""
        asking = {id(row.sampling): row.sampling for row in sample_rows if row.sampling.allowed_token_ids is not None}
        self._allowed = {key: kept for key, kept in self._allowed.items() if key in asking}
        new = [key for key in asking if key not in self._allowed]
        if new:
            num_words = -(-self._vocab_size // _BITS)
            sent = send([_mask_of(asking[key].allowed_token_ids or (), num_words) for key in new], self._device)
            self._allowed |= {key: (asking[key], mask) for key, mask in zip(new, sent, strict=True)}
        return {key: index for index, key in enumerate(self._allowed)}

    def _longer(self, table: Tensor, num_rows: int) -> Tensor:
        longer = self._zeros(num_rows, *table.shape[1:])
        longer[: len(table)] = table
        return longer

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)


class _Lists:
    """Stop ids, bad words and biases of all rows, one row's after another's; words of `width` tokens."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._stops: list[int] = []
        self._words: list[list[int]] = []
        self._bias_ids: list[int] = []
        self._biases: list[float] = []
        self.num_before = 0

    def add(self, sampling: SamplingParams, stops: Sequence[int]) -> tuple[int, ...]:
        """The fields from STOP_FROM on."""
        words, width = sampling.bad_words_ids, self._width
        begins = (len(self._stops), len(self._words), len(self._bias_ids), self.num_before)
        self._stops += stops
        self._words += [[-1] * (width - len(word)) + list(word) for word in words]
        self._bias_ids += [token_id for token_id, _ in sampling.logit_bias]
        self._biases += [bias for _, bias in sampling.logit_bias]
        self.num_before += max(len(stops), len(words))
        ends = (len(self._stops), len(self._words), len(self._bias_ids))
        return begins[0], ends[0], begins[1], ends[1], begins[2], ends[2], begins[3]

    @property
    def is_used(self) -> bool:
        return bool(self._stops or self._words or self._bias_ids)

    def arrays(self) -> tuple[NDArray[np.int32] | NDArray[np.float32], ...]:
        """Not empty: a kernel needs an address."""
        return (
            np.array(self._stops or [0], dtype=np.int32),
            np.array(self._words or [[-1] * self._width], dtype=np.int32),
            np.array(self._bias_ids or [0], dtype=np.int32),
            np.array(self._biases or [0.0], dtype=np.float32),
        )


def _keys_of(sample_rows: Sequence[SampleRow]) -> list[_Key | None]:
    """The address of each row's list, its sample, and how many rows before it have the same; None for a row that needs
    no state.
    """
    keys: dict[_Key, None] = {}
    found: list[_Key | None] = []
    for row in sample_rows:
        sampling = row.sampling
        # A row past its minimum is no longer processed, so its state would fall behind.
        if not (sampling.has_penalties or sampling.bad_words_ids or row.must_not_stop):
            found.append(None)
            continue
        key = (id(row.output_token_ids), row.sample_index, 0)
        while key in keys:
            key = (*key[:2], key[2] + 1)
        keys[key] = None
        found.append(key)
    return found


def _is_known(slot: _Slot) -> bool:
    return slot.num_known == len(slot.row.output_token_ids)


def _width_of(sampling: SamplingParams) -> int:
    """Tokens that a tail must have for the longest bad word, up to a power of two."""
    return power_of_two(max([_MIN_WIDTH, *map(len, sampling.bad_words_ids)]))


def _mask_of(token_ids: Sequence[int], num_words: int) -> NDArray[np.int32]:
    bits = np.zeros(num_words * _BITS, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
