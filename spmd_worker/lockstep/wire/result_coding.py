"""What a step sampled as bytes and back: from the last stage of a pipeline to the ranks that did not sample.

Ids, log-probabilities and prompt log-probabilities, bit for bit; never logits. Knows nothing about how the bytes
travel.
"""

from spmd_worker.lockstep.wire.message import MessageError
from spmd_worker.lockstep.wire.packing import ByteReader, ByteWriter
from spmd_worker.sequence.outputs import Logprob, TokenLogprobs
from spmd_worker.sequence.request import RequestId
from spmd_worker.sequence.step import StepResult


def encode_result(result: StepResult) -> bytes:
    """All but `finished_transfers`, which is a rank's own."""
    writer = ByteWriter()
    writer.signed(result.step)
    writer.counted(result.token_ids)
    _write_all(writer, result.logprobs)
    writer.unsigned(len(result.prompt_logprobs))
    for request_id, first, entries in result.prompt_logprobs:
        writer.signed(request_id)
        writer.signed(first)
        _write_all(writer, entries)
    return bytes(writer.data)


def decode_result(data: bytes) -> StepResult:
    """The inverse of `encode_result`. Raises MessageError for other bytes."""
    reader = ByteReader(data, len(data))
    step, token_ids, logprobs = reader.integer_64(), reader.counted(), _read_all(reader)
    prompt_logprobs = tuple(
        (RequestId(reader.integer_64()), reader.integer_64(), _read_all(reader)) for _ in range(reader.count())
    )
    if reader.num_left:
        raise MessageError(f"{reader.num_left} bytes left over")
    return StepResult(step, token_ids, logprobs, prompt_logprobs)


def _write_all(writer: ByteWriter, entries: tuple[TokenLogprobs | None, ...]) -> None:
    writer.unsigned(len(entries))
    for entry in entries:
        # One more than there are tokens, so that None has a number of its own.
        writer.unsigned(0 if entry is None else len(entry) + 1)
        for token_id, logprob in (entry or {}).items():
            writer.signed(token_id)
            writer.double(logprob.logprob)
            writer.signed(logprob.rank)


def _read_all(reader: ByteReader) -> tuple[TokenLogprobs | None, ...]:
    return tuple(_read_entry(reader) for _ in range(reader.count()))


def _read_entry(reader: ByteReader) -> TokenLogprobs | None:
    num_tokens = reader.unsigned() - 1
    if num_tokens < 0:
        return None
    if num_tokens > reader.num_left:
        raise MessageError(f"{num_tokens} log-probabilities announced with {reader.num_left} bytes left")
    entry: TokenLogprobs = {}
    for _ in range(num_tokens):
        token_id = reader.integer_64()
        entry[token_id] = Logprob(reader.double(), reader.integer_64())
    return entry
