"""Step results as bytes and back: from the last stage of a pipeline to the ranks that did not sample.

Ids, log-probabilities and prompt log-probabilities, bit for bit; never logits.
"""

from typing import Final

from spmd_worker.replica.lockstep.wire.message import MessageError
from spmd_worker.replica.lockstep.wire.packing import ByteReader, ByteWriter
from spmd_worker.replica.lockstep.wire.record_codec import RecordCodec
from spmd_worker.replica.sequence.step import StepResult

_RESULT: Final = RecordCodec(StepResult, without=("finished_transfers",))


def encode_result(result: StepResult) -> bytes:
    """All except `finished_transfers`, which is a rank's own."""
    writer = ByteWriter()
    _RESULT.write(writer, (result,))
    return bytes(writer.data)


def decode_result(data: bytes) -> StepResult:
    """The inverse of `encode_result`. Raises MessageError for other bytes."""
    reader = ByteReader(data, len(data))
    values = _RESULT.read_fields(reader)
    if reader.num_left:
        raise MessageError(f"{reader.num_left} bytes left over")
    return StepResult(**values)
