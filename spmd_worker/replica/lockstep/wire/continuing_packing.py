"""The continuing sequences of a plan as bytes, coded against the samples of the plan before.

They mostly are those that sampled in the last step, in the same order, each appending its ids: then only the indices of
those that dropped out are written, and no ids, because the sampled ids are in the message already.

    byte            bit 0: a selection of the last step's samples; bit 1: the appended ids are their samples
    dropped         counted indices, if bit 0; else the keys as pairs
    counted ...     appended ids, and their number per sequence (empty if each has one), unless bit 1
    pairs           (index, block) of the new blocks
"""

from itertools import pairwise
from typing import Final

from kv_cache.block import BlockId
from spmd_worker.replica.lockstep.wire.message import MessageError
from spmd_worker.replica.lockstep.wire.packing import ByteReader, ByteWriter
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampled import SampledIds, left_out, without
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan

_IS_SELECTION: Final = 1
_ARE_SAMPLED: Final = 2

Keys = tuple[SequenceKey, ...]


def write_continuing(writer: ByteWriter, plan: StepPlan, last_keys: Keys, sampled: SampledIds) -> None:
    """`last_keys` are the `sampling_keys` of the plan before, `sampled` their ids."""
    dropped = left_out(plan.continuing, last_keys)
    are_sampled = False
    if dropped is not None:
        given = (sampled if last_keys else SampledIds()).without(dropped)
        are_sampled = given == (plan.continuing_token_ids, plan.continuing_num_ids)
    writer.byte((dropped is not None) * _IS_SELECTION + are_sampled * _ARE_SAMPLED)
    if dropped is None:
        write_pairs(writer, plan.continuing)
    else:
        writer.counted(tuple(dropped))
    if not are_sampled:
        writer.counted(plan.continuing_token_ids)
        writer.counted(plan.continuing_num_ids)
    write_pairs(writer, plan.continuing_blocks)


def read_continuing(
    reader: ByteReader, last_keys: Keys, sampled: SampledIds
) -> tuple[Keys, tuple[int, ...], tuple[int, ...], tuple[tuple[int, BlockId], ...]]:
    """Keys, appended ids, numbers per sequence, new blocks: inverse of `write_continuing` with its arguments."""
    flags = reader.byte()
    if flags not in (0, _IS_SELECTION, _IS_SELECTION + _ARE_SAMPLED):
        raise MessageError(f"unknown flags {flags:#x} of continuing sequences")
    dropped: list[int] = []
    if flags & _IS_SELECTION:
        dropped = _read_dropped(reader, len(last_keys))
        keys = without(last_keys, dropped)
    else:
        keys = tuple([SequenceKey(RequestId(first), second) for first, second in read_pairs(reader)])
    if flags & _ARE_SAMPLED:
        given = (sampled if last_keys else SampledIds()).without(dropped)
    else:
        given = SampledIds(reader.counted(), reader.counted())
    return keys, *given, tuple([(index, BlockId(block)) for index, block in read_pairs(reader)])


def write_pairs(writer: ByteWriter, pairs: tuple[tuple[int, int], ...]) -> None:
    """A count and two columns."""
    writer.unsigned(len(pairs))
    writer.dense([first for first, _ in pairs])
    writer.column([second for _, second in pairs])


def read_pairs(reader: ByteReader) -> list[tuple[int, int]]:
    """The inverse of `write_pairs`."""
    count = reader.count()
    return list(zip(reader.dense(count), reader.column(count)))


def _read_dropped(reader: ByteReader, num_keys: int) -> list[int]:
    dropped = list(reader.counted())
    is_ascending = all(before < after for before, after in pairwise(dropped))
    if not is_ascending or (dropped and not 0 <= dropped[0] <= dropped[-1] < num_keys):
        raise MessageError(f"dropped indices {dropped[:10]} of {num_keys}")
    return dropped
