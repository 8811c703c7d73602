"""An exact set of digests, of any size: they are in a file, and memory holds 2 to 4 bytes of each.

    recent     the last digests, as a set
    runs       digests on disk, sorted, each run as large as `recent` was
    filter     four bits of each digest on disk, in one word of 64 bits (a blocked Bloom filter): fewer than one new
               digest in a hundred is looked up in the file

The bits are there because a set that answered from the disk alone would read it for each new digest.
"""

import os
import tempfile
from array import array
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

DIGEST_BYTES: Final = 16
_MOST_RECENT: Final = 65_536
_DIGESTS_PER_WORD: Final = 4
"""Most digests per word of the filter, on average."""
_NUM_BITS: Final = 4
_FIRST_BYTES: Final = 256


class DigestSet:
    """Adds digests of 16 bytes, which are distributed evenly. The file is in `folder` (None: the system's for temporary
    ones), without a name, and made when more than `most_recent` have come.
    """

    def __init__(self, folder: Path | None = None, most_recent: int = _MOST_RECENT) -> None:
        self._folder, self._most_recent = folder, most_recent
        self._recent: set[bytes] = set()
        self._file: BinaryIO | None = None
        self._starts: list[array[int]] = []
        """Starts of a run's digests by their first byte, and the end, of each run."""
        self._words = array("Q")

    @property
    def num_held_bytes(self) -> int:
        """Bytes of memory for the digests on disk."""
        return 8 * len(self._words) + sum(4 * len(each) for each in self._starts)

    def add(self, digest: bytes) -> bool:
        """Add a digest; whether it was there before. Raises OSError."""
        if digest in self._recent or (self._starts and self._may_have(digest) and self._find(digest)):
            return True
        self._recent.add(digest)
        if len(self._recent) >= self._most_recent:
            self._flush()
        return False

    def close(self) -> None:
        """Forget all digests. Idempotent; nothing is added afterwards."""
        self._recent, self._starts, self._words = set(), [], array("Q")
        if self._file is not None:
            self._file.close()

    def _may_have(self, digest: bytes) -> bool:
        number = int.from_bytes(digest, "little")
        bits = number >> 64
        mask = 1 << (bits & 63) | 1 << (bits >> 6 & 63) | 1 << (bits >> 12 & 63) | 1 << (bits >> 18 & 63)
        return self._words[number & (len(self._words) - 1)] & mask == mask

    def _find(self, digest: bytes) -> bool:
        """Whether a run has the digest: its digests with the same first byte are read."""
        assert self._file is not None
        for run, starts in enumerate(self._starts):
            start, end = starts[digest[0]], starts[digest[0] + 1]
            offset = (run * self._most_recent + start) * DIGEST_BYTES
            data = os.pread(self._file.fileno(), (end - start) * DIGEST_BYTES, offset)
            at = data.find(digest)
            while at % DIGEST_BYTES and at >= 0:
                at = data.find(digest, at + 1)
            if at >= 0:
                return True
        return False

    def _flush(self) -> None:
        """Write the recent digests as a run."""
        data = b"".join(sorted(self._recent))
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  # closed by `close`
        self._file.seek(len(self._starts) * len(data))
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        first_bytes = np.frombuffer(data, np.uint8)[::DIGEST_BYTES]
        starts = np.searchsorted(first_bytes, np.arange(_FIRST_BYTES + 1))
        self._starts.append(array("I", starts.tolist()))
        self._recent.clear()
        num_digests = len(self._starts) * self._most_recent
        if num_digests > _DIGESTS_PER_WORD * len(self._words):
            self._grow(num_digests)
        else:
            self._set_bits(data)

    def _grow(self, num_digests: int) -> None:
        """Make the filter again, of twice the size, from the file."""
        assert self._file is not None
        # The former one first: they need not be in memory together.
        self._words = array("Q")
        num_words = 1 << (num_digests // _DIGESTS_PER_WORD).bit_length()
        self._words = array("Q", bytes(8)) * num_words
        for run in range(len(self._starts)):
            size = self._most_recent * DIGEST_BYTES
            self._set_bits(os.pread(self._file.fileno(), size, run * size))

    def _set_bits(self, data: bytes) -> None:
        numbers = np.frombuffer(data, "<u8").reshape(-1, 2)
        masks = np.zeros(len(numbers), np.uint64)
        for place in range(_NUM_BITS):
            masks |= np.uint64(1) << (numbers[:, 1] >> np.uint64(6 * place) & np.uint64(63))
        slots = numbers[:, 0] & np.uint64(len(self._words) - 1)
        np.bitwise_or.at(np.frombuffer(self._words, np.uint64), slots.astype(np.intp), masks)
