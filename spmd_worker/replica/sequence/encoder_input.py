"""The encoder's input of a row of an encoder-decoder model, and how it stands before the decoder's prompt.

positions:   encoder ... encoder  padding | decoder's prompt  answer
             ^ rows of the input  ^ up to a whole block

The encoder's positions are `Request.num_virtual_tokens`; the keys and values there are of the encoder's rows, and move,
fork, swap and are found in the prefix cache as all others. The rows are those of the request's only `MediaItem`, whose
name is in the hashes of the blocks: all keys of the row depend on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from kv_cache.block import num_blocks_for
from spmd_worker.replica.sequence.media_items import NUM_MEDIA_ID_BYTES, MediaItem

PADDING_ID: Final = 0
"""Id of positions behind the input's rows, and of audio's."""


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """`token_ids` has one id for each row: a text's own, with its special tokens, or placeholders for audio.
    `media_id` names all that the rows depend on but the weights.
    """

    media_id: bytes
    token_ids: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    def num_positions(self, block_size: int) -> int:
        """Positions before the decoder's: whole blocks."""
        return num_blocks_for(self.num_rows, block_size) * block_size

    def before(self, token_ids: Sequence[int], block_size: int) -> tuple[tuple[int, ...], MediaItem]:
        """The ids of a request whose decoder's prompt is `token_ids`, and its item."""
        padding = (PADDING_ID,) * (self.num_positions(block_size) - self.num_rows)
        item = MediaItem(self.media_id, ((0, self.num_rows),), self.num_rows)
        return (*self.token_ids, *padding, *token_ids), item


def encoder_text(token_ids: Sequence[int]) -> EncoderInput:
    """The input of an encoder that reads these ids, one or more."""
    name = ",".join(map(str, token_ids)).encode()
    return EncoderInput(
        blake2b(name, digest_size=NUM_MEDIA_ID_BYTES, person=b"spmd-enc-text").digest(), tuple(token_ids)
    )


def is_text(given: EncoderInput) -> bool:
    """Whether the encoder reads the ids of an input: those of audio are placeholders alone, which a text may be too."""
    return any(given.token_ids) or given.media_id == _name_of_placeholders(given.num_rows)


@lru_cache(maxsize=8)
def _name_of_placeholders(num_rows: int) -> bytes:
    return encoder_text((PADDING_ID,) * num_rows).media_id


def encoder_audio(media_id: bytes, num_rows: int) -> EncoderInput:
    """The input of an encoder that reads prepared audio of that name."""
    return EncoderInput(media_id, (PADDING_ID,) * num_rows)
