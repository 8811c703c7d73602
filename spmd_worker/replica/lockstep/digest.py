"""The digest that the replicas compare: blake2b over the bytes of every step's record so far.

The bytes are those that a record has on the wire (`wire/record_codec.py`), of the whole record, coded against nothing:
two replicas compare what they decided before anything was sent.
"""

from hashlib import blake2b
from typing import Final

from spmd_worker.replica.lockstep.difference import Record
from spmd_worker.replica.lockstep.wire.packing import ByteWriter
from spmd_worker.replica.lockstep.wire.record_codec import codec_of

NUM_DIGEST_BYTES: Final = 16
_PERSON: Final = b"spmd-lockstep-3"
_RECORD: Final = codec_of(Record)


class ChainedDigest:
    """Equal now means equal ever since: each digest covers the one before it and the record of its step."""

    def __init__(self, start: bytes = bytes(NUM_DIGEST_BYTES)) -> None:
        self.value = start

    def update(self, record: Record) -> bytes:
        """Take in one step and return the new digest, which `value` also holds."""
        writer = ByteWriter()
        _RECORD.write(writer, (record,))
        digest = blake2b(self.value, digest_size=NUM_DIGEST_BYTES, person=_PERSON)
        digest.update(writer.data)
        self.value = digest.digest()
        return self.value
