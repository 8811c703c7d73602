"""Hypothesis strategies for every record of a step, every small change of a record, and a model of a run's steps."""

import dataclasses
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from hypothesis import strategies as st

from kv_cache.block_ops import BlockOps
from kv_cache.state_ops import NO_STATE_OPS, StateOps
from spmd_worker.replica.lockstep.wire.message import StepMessage
from spmd_worker.replica.sequence.events import (
    Abort,
    Admit,
    Close,
    CommitWeights,
    EndRound,
    EndWorkerEvent,
    FinishTransfers,
    Interrupt,
    ResetMediaRows,
    ResetPrefixCache,
    SetWeightVersion,
    WorkerEvent,
)
from spmd_worker.replica.sequence.media_items import NUM_MEDIA_ID_BYTES, EncodeMedia
from spmd_worker.replica.sequence.metadata import (
    SequenceData,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan

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
        "n": st.integers(1, 1000),
        "best_of": st.none() | st.integers(1000, 1024),
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
cache_events = (
    st.sampled_from([ResetPrefixCache(), ResetMediaRows()])
    | words.map(SetWeightVersion)
    | token_ids.map(FinishTransfers)
)
ends = st.sampled_from([Close(), EndRound()]) | st.builds(Interrupt, few, texts)
worker_events = st.builds(WorkerEvent, words, texts, st.binary()) | st.builds(EndWorkerEvent, words, texts)
worker_events |= st.builds(CommitWeights, words, words)
events = st.lists(requests.map(Admit) | words.map(Abort) | ends | cache_events | worker_events, max_size=3).map(tuple)
slots = st.just(-1) | counts
sequence_data = st.builds(SequenceData, few, token_ids, token_ids, counts, counts, samples, slots)
sequence_deltas = st.builds(SequenceDataDelta, few, token_ids, counts, token_ids, counts, counts, samples, slots)
snapshots = st.builds(SequenceGroupMetadata, requests, st.lists(sequence_data, max_size=3).map(tuple))
deltas = st.builds(SequenceGroupMetadataDelta, few | words, st.lists(sequence_deltas, max_size=3).map(tuple))
pairs = st.lists(st.tuples(small, words), max_size=3).map(tuple)
block_ops = st.builds(BlockOps, pairs, pairs, pairs, pairs, pairs, counts)
state_ops = st.builds(StateOps, pairs, pairs, pairs)
keys = st.builds(SequenceKey, words | few, few | words)
plans = st.builds(
    StepPlan,
    step=words,
    groups=st.lists(deltas | snapshots, max_size=5).map(tuple),
    block_ops=block_ops,
    finished_sequences=st.lists(keys, max_size=3).map(tuple),
    finished_request_ids=token_ids,
    num_tokens=counts,
    continuing=st.lists(keys, max_size=5).map(tuple),
    continuing_token_ids=token_ids,
    continuing_num_ids=st.just(()) | token_ids,
    continuing_blocks=st.lists(st.tuples(small | words, words), max_size=3).map(tuple),
    state_ops=st.just(NO_STATE_OPS) | state_ops,
    encode=st.lists(st.builds(EncodeMedia, words, few, few), max_size=2).map(tuple),
    drop_rows=st.lists(st.binary(max_size=16), max_size=2).map(tuple),
)
sampled_ids = token_ids.map(SampledIds) | st.lists(token_ids, max_size=4).map(SampledIds.from_rows)
messages = st.builds(
    lambda plan, events, sampled, digest, mask_checksums: StepMessage(
        plan.step, events, plan, sampled.token_ids, digest, sampled.num_ids, mask_checksums
    ),
    plans,
    events,
    sampled_ids,
    st.binary(max_size=32),
    st.lists(st.integers(0, 2**32 - 1), max_size=2).map(tuple),
)


def with_checksum(data: bytes) -> bytes:
    """The bytes with a checksum that is right for them: what a clever attacker, not a flipped bit, would send."""
    return data + struct.pack("<I", crc32(data))


def every_change(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each small change of a record, by the path of what changes: leaves, and the lengths and order of lists.

    It walks whatever fields a record has, so a new one is changed without being named here.
    """
    if isinstance(value, StepMessage):
        yield from _changes_of_message(value)
    elif dataclasses.is_dataclass(value):
        for spec in dataclasses.fields(value):
            for inner, changed in every_change(getattr(value, spec.name), f"{path}.{spec.name}"):
                yield from _replaced(value, inner, **{spec.name: changed})
    elif isinstance(value, tuple):
        yield from _changes_of_tuple(value, path)
    else:
        yield path, _other(value)


def _changes_of_message(message: StepMessage) -> Iterator[tuple[str, StepMessage]]:
    for inner, plan in every_change(message.plan, "plan"):
        yield inner, dataclasses.replace(message, plan=plan, step=plan.step)
    for name in ("events", "sampled_token_ids", "num_sampled_ids", "mask_checksums"):
        for inner, changed in every_change(getattr(message, name), name):
            yield from _replaced(message, inner, **{name: changed})


def _changes_of_tuple(value: tuple, path: str) -> Iterator[tuple[str, tuple]]:
    make = type(value)._make if hasattr(value, "_fields") else tuple
    for place, entry in enumerate(value):
        for inner, changed in every_change(entry, f"{path}[{place}]"):
            yield inner, make((*value[:place], changed, *value[place + 1 :]))
    if make is not tuple or not value or path.endswith("]"):
        # A tuple in a list is a pair, and stays one.
        return
    yield f"{path} cut", value[:-1]
    yield f"{path} longer", (*value, value[-1])
    if value[0] != value[-1]:
        yield f"{path} reversed", value[::-1]


def _replaced(record: Any, path: str, **changes: Any) -> Iterator[tuple[str, Any]]:
    """Nothing where the record refuses the change or makes the same of it."""
    try:
        changed = dataclasses.replace(record, **changes)
    except ValueError:
        return
    if changed != record:
        yield path, changed


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if value is None:
        return 20
    if isinstance(value, bytes) and len(value) == NUM_MEDIA_ID_BYTES:
        # A name keeps its length.
        return bytes([value[0] ^ 1]) + value[1:]
    if isinstance(value, str | bytes):
        return value + (b"x" if isinstance(value, bytes) else "x")
    return value / 2 + 0.25 if isinstance(value, float) else value - 1 if value > 2**62 else value + 1


def sampled_by(plan: StepPlan) -> list[SequenceKey]:
    """Sequences of the ids that a plan samples, in order."""
    found = list(plan.continuing)
    for group in plan.groups:
        for data in group.sequences:
            found += [SequenceKey(group.request_id, data.sample_index + fork) for fork in range(data.num_samples)]
    return found


@dataclass
class RunModel:
    """Plans that mostly go on from one another, as a scheduler's do, with everything else thrown in now and then.

    What sampled goes on; forks are first listed as deltas; prompts are computed in chunks; blocks move now and then.
    Token values are arbitrary: it exercises the codec, which never looks at whether a plan makes sense.
    """

    chance: random.Random
    regularity: float = 0.9
    nums_of_ids: tuple[int, ...] = (1,)
    next_request_id: int = 0
    last: StepPlan = field(default_factory=lambda: StepPlan(0))

    def next_message(self) -> StepMessage:
        """The next step's message: sampled ids in the order of the last plan's rows."""
        last_keys = sampled_by(self.last)
        sampled = {
            key: tuple(self.chance.randrange(150_000) for _ in range(self.chance.choice(self.nums_of_ids)))
            for key in last_keys
        }
        known = dict.fromkeys([*self.last.continuing, *_listed(self.last)])
        ended = [key for key in last_keys if self._is_odd()]
        steady = [key for key in last_keys if key in known and key not in ended]
        forks = [key for key in last_keys if key not in known and key not in ended]
        deltas = [self._fork(key, sampled[key]) for key in forks] + self._chunks()
        if self._is_odd():
            steady, deltas = self._disturbed(steady, deltas)
        arrivals = [self._arrival() for _ in range(self.chance.randrange(3))]
        appended = SampledIds.from_rows([(9,) if self._is_odd() else sampled.get(key, (8,)) for key in steady])
        plan = StepPlan(
            step=self.last.step + 1,
            groups=(*deltas, *arrivals),
            block_ops=self._moves() if self._is_odd() else BlockOps(),
            finished_sequences=tuple(ended),
            finished_request_ids=tuple(key.request_id for key in ended),
            num_tokens=len(steady) + len(deltas),
            continuing=tuple(steady),
            continuing_token_ids=appended.token_ids,
            continuing_num_ids=appended.num_ids,
            continuing_blocks=tuple(
                (place, self.chance.randrange(2**17)) for place in range(len(steady)) if self.chance.random() < 0.1
            ),
        )
        events = (FinishTransfers((self.last.block_ops.transfer,)),) if self.last.block_ops.transfer else ()
        self.last = plan
        ids = SampledIds.from_rows(sampled.values())
        mask_checksums = (self.chance.randrange(2**32),) if self._is_odd() else ()
        return StepMessage(plan.step, events, plan, ids.token_ids, bytes(16), ids.num_ids, mask_checksums)

    def _is_odd(self) -> bool:
        return self.chance.random() > self.regularity

    def _moves(self) -> BlockOps:
        """Some pairs of every kind, and the transfer that goes on with them."""
        kinds = [
            tuple((self.chance.randrange(2**17), self.chance.randrange(2**17)) for _ in range(self.chance.randrange(4)))
            for _ in range(5)
        ]
        return BlockOps(*kinds, transfer=self.last.step + 1 if kinds[3] or kinds[4] else 0)

    def _fork(self, key: SequenceKey, token_ids: tuple[int, ...]) -> SequenceGroupMetadataDelta:
        return SequenceGroupMetadataDelta(
            key.request_id, (SequenceDataDelta(key.sample_index, token_ids, 0, (4, 5, 6), 40, 1, 1),)
        )

    def _chunks(self) -> list[SequenceGroupMetadataDelta]:
        """Prompts that the last plan left unfinished go on, and mostly end."""
        return [
            SequenceGroupMetadataDelta(
                group.request_id,
                tuple(
                    SequenceDataDelta(
                        data.sample_index, (), 2, (self.chance.randrange(9999),), 32, 8, int(not self._is_odd())
                    )
                    for data in group.sequences
                ),
            )
            for group in self.last.groups
            if all(data.num_samples == 0 for data in group.sequences)
        ]

    def _disturbed(self, steady: list, deltas: list) -> tuple[list, list]:
        """Another order; a stranger; one that copies a block, and so is a delta."""
        kind = self.chance.randrange(3)
        if kind == 0:
            self.chance.shuffle(steady)
        elif kind == 1:
            steady.insert(self.chance.randrange(len(steady) + 1), SequenceKey(10**6, self.chance.randrange(3)))
        elif steady:
            key = steady.pop(self.chance.randrange(len(steady)))
            data = SequenceDataDelta(key.sample_index, (7,), 1, (self.chance.randrange(9999),), 33, 1, 1)
            deltas.insert(0, SequenceGroupMetadataDelta(key.request_id, (data,)))
        return steady, deltas

    def _arrival(self) -> SequenceGroupMetadata:
        """A new request, computed in one piece or not, whose n samples fork at once."""
        self.next_request_id += 1
        n = self.chance.choice([1, 1, 1, 2, 3])
        sampling = SamplingParams(n=n, best_of=self.chance.choice([None, None, n, n + 1]))
        num_samples = self.chance.choice([0, sampling.num_sequences, sampling.num_sequences])
        request = Request(self.next_request_id, (1,) * 40, sampling, self.chance.getrandbits(64))
        return SequenceGroupMetadata(request, (SequenceData(0, (), (1, 2, 3), 0, 40, num_samples),))


def _listed(plan: StepPlan) -> list[SequenceKey]:
    return [SequenceKey(group.request_id, data.sample_index) for group in plan.groups for data in group.sequences]
