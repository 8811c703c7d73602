"""Rows given in place of tokens: vectors of `prompt_embeds` and of prompt adapters, named by their contents.

The vectors themselves do not travel with steps: the first stage's first tensor rank holds them (`RowStore`), and every
rank knows their positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from spmd_worker.replica.sequence.record_checks import CheckedRecord

EMBEDDINGS: Final = "embeddings"
"""Kind of rows that stand for outputs of the embedding: the layers compute their positions as any token's."""
KEYS_VALUES: Final = "keys_values"
"""Kind of rows that are keys and values of all layers: their positions are not computed."""
_KINDS: Final = (EMBEDDINGS, KEYS_VALUES)
NUM_DIGEST_BYTES: Final = 16
PLACEHOLDER: Final = 0
"""Token id at positions of rows."""


@dataclass(frozen=True, slots=True)
class InputRows(CheckedRecord):
    """Positions [start, start + num_rows) of a prompt, whose rows are those of `content`: one digest of 16 bytes of all
    rows together (`content_digest`), which only equal rows share, or one of each row (`row_digests`), so that prompts
    share the blocks of the rows with which both begin. Rows of `KEYS_VALUES` are the first positions.
    """

    content: bytes
    start: int
    num_rows: int
    kind: str = EMBEDDINGS

    @property
    def end(self) -> int:
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of one prompt with their numbers: `data` has `num_rows` rows of the model's dtype, `content` names each."""

    content: bytes
    num_rows: int
    data: bytes

    def at(self, start: int) -> InputRows:
        return InputRows(self.content, start, self.num_rows)


def content_digest(kind: str, dtype: str, shape: Sequence[int], data: bytes | memoryview) -> bytes:
    """Name of rows: of their kind, their dtype, such as "bfloat16", their shape and every bit of their numbers."""
    head = f"{kind}:{dtype}:{'x'.join(map(str, shape))}:".encode()
    hasher = blake2b(head, digest_size=NUM_DIGEST_BYTES, person=b"spmd-rows-1")
    hasher.update(data)
    return hasher.digest()


def row_digests(dtype: str, num_rows: int, data: bytes) -> bytes:
    """Names of `num_rows` rows of embeddings, each of its own numbers."""
    size = len(data) // num_rows
    head = blake2b(f"{EMBEDDINGS}:{dtype}:{size}:".encode(), digest_size=NUM_DIGEST_BYTES, person=b"spmd-row-1")
    digests = []
    for start in range(0, len(data), size):
        hasher = head.copy()
        hasher.update(data[start : start + size])
        digests.append(hasher.digest())
    return b"".join(digests)


def check_rows(rows: Sequence[InputRows], num_tokens: int) -> None:
    """Raise ValueError unless `rows` are in order, apart, and inside a prompt of `num_tokens` tokens."""
    end = 0
    for each in rows:
        if (
            len(each.content) not in (NUM_DIGEST_BYTES, NUM_DIGEST_BYTES * each.num_rows)
            or each.kind not in _KINDS
            or each.num_rows < 1
            or each.start < end
        ):
            raise ValueError(f"Request.rows has {each}: give named rows in order, without overlap")
        if each.kind == KEYS_VALUES and each.start:
            raise ValueError(f"Request.rows has {each}: keys and values are those of the first positions")
        end = each.end
    if end > num_tokens:
        raise ValueError(f"Request.rows end at {end}, the prompt has {num_tokens} tokens")


def ids_without(rows: Sequence[InputRows], token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """`token_ids` without those at positions of rows."""
    known: list[int] = []
    end = 0
    for each in rows:
        known += token_ids[end : each.start]
        end = each.end
    return (*known, *token_ids[end:])
