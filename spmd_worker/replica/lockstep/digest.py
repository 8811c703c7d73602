"""The digest that the replicas compare: blake2b over the bytes of all steps' records.

A record has the bytes of `wire/record_codec.py`, complete and not coded against earlier ones: two replicas compare
their decisions before anything is sent.
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
    """Each digest covers the one before it and the record of its step: equal digests, equal steps since the start."""

    def __init__(self, start: bytes = bytes(NUM_DIGEST_BYTES)) -> None:
        self.value = start

    def update(self, record: Record) -> bytes:
        """Add one step and return the new digest, which `value` also holds."""
        writer = ByteWriter()
        _RECORD.write(writer, (record,))
        digest = blake2b(self.value, digest_size=NUM_DIGEST_BYTES, person=_PERSON)
        digest.update(writer.data)
        self.value = digest.digest()
        return self.value
