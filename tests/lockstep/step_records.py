"""Hypothesis strategies for every record of a step, and a model of a run whose steps follow one another."""

import random
from dataclasses import dataclass, field

from hypothesis import strategies as st

from kv_cache.block_ops import BlockOps
from spmd_worker.lockstep.message import StepMessage
from spmd_worker.sequence.events import Abort, Admit, Close
from spmd_worker.sequence.metadata import (
    SequenceData,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)
from spmd_worker.sequence.request import Request
from spmd_worker.sequence.sampling_params import SamplingParams
from spmd_worker.sequence.sequence import SequenceKey
from spmd_worker.sequence.step import StepPlan

words = st.integers(-(2**63), 2**63 - 1)
small = st.integers(0, 40)
counts = st.one_of(small, st.integers(0, 2**31), words)
token_ids = st.lists(st.one_of(st.integers(0, 200), st.integers(0, 2**32), words), max_size=6).map(tuple)
samples = st.one_of(st.integers(0, 3), st.integers(0, 2**40))
few = st.integers(0, 5)
floats = st.floats(-2.0, 2.0)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)

sampling_params = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 1024),
        "temperature": st.floats(0.0, 1e300),
        "top_p": st.floats(0.0, 1.0, exclude_min=True),
        "top_k": st.integers(-1, 2**62),
        "min_p": st.floats(0.0, 1.0),
        "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
        "max_tokens": st.none() | st.integers(100, 2**62),
        "min_tokens": st.integers(0, 16),
        "stop": st.lists(texts, max_size=3),
        "stop_token_ids": st.lists(st.integers(0, 2**40), max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "logprobs": st.none() | st.integers(0, 64),
        "prompt_logprobs": st.none() | st.integers(0, 64),
        "presence_penalty": floats,
        "frequency_penalty": floats,
        "repetition_penalty": st.floats(0.0, 1e300, exclude_min=True),
        "logit_bias": st.dictionaries(st.integers(0, 2**40), st.floats(-100.0, 100.0), max_size=3),
        "skip_special_tokens": st.booleans(),
    },
).map(lambda given: SamplingParams(**given, detokenize=bool(given.get("stop", True))))

requests = st.builds(Request, words | few, token_ids, sampling_params, st.integers(0, 2**64 - 1))
events = st.lists(requests.map(Admit) | words.map(Abort) | st.just(Close()), max_size=3).map(tuple)
sequence_data = st.builds(SequenceData, few, token_ids, token_ids, counts, counts, samples)
sequence_deltas = st.builds(SequenceDataDelta, few, token_ids, counts, token_ids, counts, counts, samples)
snapshots = st.builds(SequenceGroupMetadata, requests, st.lists(sequence_data, max_size=3).map(tuple))
deltas = st.builds(SequenceGroupMetadataDelta, few | words, st.lists(sequence_deltas, max_size=3).map(tuple))
pairs = st.lists(st.tuples(small, words), max_size=3).map(tuple)
block_ops = st.builds(BlockOps, pairs, pairs, pairs)
plans = st.builds(
    StepPlan,
    step=words,
    groups=st.lists(deltas | snapshots, max_size=5).map(tuple),
    block_ops=block_ops,
    finished_sequences=st.lists(st.builds(SequenceKey, words, few), max_size=3).map(tuple),
    finished_request_ids=token_ids,
    num_tokens=counts,
)
messages = st.builds(
    lambda plan, events, sampled, digest: StepMessage(plan.step, events, plan, sampled, digest),
    plans,
    events,
    token_ids,
    st.binary(max_size=32),
)


@dataclass
class _Live:
    request_id: int
    sample_index: int
    num_computed_tokens: int
    num_blocks: int
    num_samples: int = 1


@dataclass
class RunModel:
    """Plans that mostly go on from one another, as a scheduler's do, with everything else thrown in now and then.

    Token values are arbitrary: it exercises the codec, which never looks at whether a plan makes sense.
    """

    chance: random.Random
    regularity: float = 0.9
    step: int = 0
    next_request_id: int = 0
    groups: list[list[_Live]] = field(default_factory=list)
    num_sampled: int = 0

    def next_message(self) -> StepMessage:
        """The next step's message: sampled ids in the order of the last plan's rows."""
        sampled = [self.chance.randrange(150_000) for _ in range(self.num_sampled)]
        chosen, ended = self._choose(self._with_last_sampled(sampled))
        updates = [self._update(rows) for rows in chosen]
        self.groups = [[row for row, _ in rows] for rows in chosen]
        for _ in range(self.chance.randrange(3)):
            updates.insert(*self._arrival())
        self.num_sampled = sum(row.num_samples for rows in self.groups for row in rows)
        self.step += 1
        plan = StepPlan(
            step=self.step,
            groups=tuple(updates),
            finished_sequences=tuple(SequenceKey(request_id, 0) for request_id in ended),
            finished_request_ids=tuple(ended),
            num_tokens=len(updates),
        )
        return StepMessage(self.step, (), plan, tuple(sampled), bytes(16))

    def _is_odd(self) -> bool:
        return self.chance.random() > self.regularity

    def _with_last_sampled(self, sampled: list[int]) -> list[list[tuple[_Live, tuple[int, ...]]]]:
        start, result = 0, []
        for rows in self.groups:
            paired = []
            for row in rows:
                paired.append((row, tuple(sampled[start : start + row.num_samples])))
                start += row.num_samples
            result.append(paired)
        return result

    def _choose(self, groups):
        """Some groups end, some lose a row, some are left out; now and then the order changes."""
        ended = [rows[0][0].request_id for rows in groups if self._is_odd()]
        kept = [rows for rows in groups if rows[0][0].request_id not in ended]
        kept = [rows[1:] if len(rows) > 1 and self._is_odd() else rows for rows in kept]
        kept = [rows[:1] + rows[2:] if len(rows) > 2 and self._is_odd() else rows for rows in kept]
        if self._is_odd():
            self.chance.shuffle(kept)
        return kept, ended

    def _update(self, rows):
        changed = []
        for row, sampled in rows:
            tokens = (7,) * self.chance.randrange(3) if self._is_odd() else sampled
            num_kept = self.chance.randrange(row.num_blocks + 1) if self._is_odd() else row.num_blocks
            blocks = (
                tuple(self.chance.randrange(9999) for _ in range(self.chance.randrange(2))) if self._is_odd() else ()
            )
            num_scheduled = self.chance.randrange(1, 500) if self._is_odd() else 1
            row.num_samples = self.chance.randrange(3) if self._is_odd() else 1
            changed.append(
                SequenceDataDelta(
                    row.sample_index, tokens, num_kept, blocks, row.num_computed_tokens, num_scheduled, row.num_samples
                )
            )
            row.num_computed_tokens += num_scheduled
            row.num_blocks = num_kept + len(blocks)
        if self._is_odd() and self._is_odd():
            return self._whole(rows)
        return SequenceGroupMetadataDelta(rows[0][0].request_id, tuple(changed))

    def _whole(self, rows):
        data = tuple(
            SequenceData(row.sample_index, (3,), (1,) * row.num_blocks, row.num_computed_tokens - 1, 1, row.num_samples)
            for row, _ in rows
        )
        return SequenceGroupMetadata(Request(rows[0][0].request_id, (1, 2), SamplingParams(), 5), data)

    def _arrival(self):
        """A new group somewhere in the plan."""
        rows = [_Live(self.next_request_id, index, 5, 2) for index in range(self.chance.choice([1, 1, 1, 2, 3]))]
        self.next_request_id += 1
        place = self.chance.randrange(len(self.groups) + 1)
        self.groups.insert(place, rows)
        return place, self._whole([(row, ()) for row in rows])
