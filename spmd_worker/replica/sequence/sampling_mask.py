"""Ids that could have been sampled at each output token: packed in step results and sequences, and as arrays.

A token's ids are packed as 0 and uint32 each, or as 1 and a bit per id of the vocabulary where that is shorter, both
little-endian: never more than one byte and an eighth of the vocabulary.

V: vocabulary; W: 64-bit words of a row of bits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_IDS: Final = b"\x00"
_BITS: Final = b"\x01"
_WORD_BITS: Final = 64


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Pack a few ids, ascending."""
    return _IDS + np.array(token_ids, dtype="<u4").tobytes()


def pack_bits(words: NDArray[np.uint64]) -> bytes:
    """Pack the ids t with bit t % 64 of word t / 64, [W]."""
    ids = _ids_of_bits(words)
    return _IDS + ids.tobytes() if ids.nbytes < words.nbytes else _BITS + words.astype("<u8").tobytes()


def unpacked_ids(packed: bytes) -> NDArray[np.uint32]:
    """The ids of one token, ascending."""
    if packed[:1] == _IDS:
        return np.frombuffer(packed, dtype="<u4", offset=1)
    return _ids_of_bits(np.frombuffer(packed, dtype="<u8", offset=1))


def _ids_of_bits(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    # Words first: nearly all are zero.
    places = np.flatnonzero(words)
    found = np.ascontiguousarray(words[places].astype("<u8")).view(np.uint8).reshape(-1, _WORD_BITS // 8)
    rows, columns = np.nonzero(np.unpackbits(found, axis=1, bitorder="little"))
    return (places[rows] * _WORD_BITS + columns).astype("<u4")


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """Ids of each output token, ascending: those of token i are `token_ids[offsets[i] : offsets[i + 1]]`, uint32. The
    sampled id is among them, and every other has been set to minus infinity.
    """

    token_ids: NDArray[np.uint32]
    offsets: NDArray[np.uint32]

    @staticmethod
    def from_packed(rows: Iterable[bytes]) -> "SamplingMask":
        """The mask of tokens whose ids are packed."""
        parts = [unpacked_ids(each) for each in rows]
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.uint32)
        return SamplingMask(np.concatenate([np.empty(0, np.uint32), *parts]).astype(np.uint32), offsets)

    def __len__(self) -> int:
        """Number of output tokens."""
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.uint32]:
        """The ids of output token `index`, from 0 on."""
        if not 0 <= index < len(self):
            raise IndexError(f"output token {index} of {len(self)}")
        return self.token_ids[self.offsets[index] : self.offsets[index + 1]]

    def after(self, num_tokens: int) -> "SamplingMask":
        """That of the tokens behind the first ones."""
        first = self.offsets[num_tokens]
        return SamplingMask(self.token_ids[first:], self.offsets[num_tokens:] - first)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return np.array_equal(self.token_ids, other.token_ids) and np.array_equal(self.offsets, other.offsets)

    __hash__: Any = None
