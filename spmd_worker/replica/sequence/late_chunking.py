"""Late chunking: vectors of a text's chunks of so many tokens, each the mean of states that have attended to the whole
text (https://arxiv.org/abs/2409.04701), and the ranges that these vectors are of. Names and meanings are vLLM's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_worker.base.config.plain_values import plain_int, shown
from spmd_worker.base.names import hint, with_keyword_hints
from spmd_worker.replica.sequence.record_checks import INT64


@with_keyword_hints()
@dataclass(frozen=True, slots=True)
class LateChunkingParams:
    """`chunk_size` tokens a chunk, special tokens included; the last may have fewer. Raises ValueError naming the
    value and the rule.
    """

    chunk_size: int

    def __post_init__(self) -> None:
        size = plain_int(self.chunk_size)
        if size is None or not 1 <= size <= INT64[-1]:
            raise ValueError(f"chunk_size={shown(self.chunk_size)} must be a number of tokens, 1 or more")
        object.__setattr__(self, "chunk_size", size)


@dataclass(frozen=True, slots=True)
class LateChunk:
    """Range of a chunk: the first token and the one behind the last, and the same of characters of the text; None for
    special tokens alone, and without a text.
    """

    token_range: tuple[int, int]
    char_range: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class LateChunkingMetadata:
    """Chunks of a row of `input_tokens`, parallel to its vectors."""

    chunk_size: int
    input_tokens: int
    chunks: list[LateChunk]
    strategy: str = "fixed_tokens"


def chunks_of(
    params: LateChunkingParams, num_tokens: int, offsets: Sequence[tuple[int, int]] | None
) -> LateChunkingMetadata:
    """Chunks of a row; `offsets` are (start, end) of each token in the text, equal ones of special tokens."""
    chunks, size = [], params.chunk_size
    for start in range(0, num_tokens, size):
        end = min(start + size, num_tokens)
        places = [each for each in (offsets or ())[start:end] if each[0] < each[1]]
        characters = (min(place[0] for place in places), max(place[1] for place in places)) if places else None
        chunks.append(LateChunk((start, end), characters))
    return LateChunkingMetadata(size, num_tokens, chunks)


def as_late_chunking(value: Any) -> LateChunkingParams | None:
    """The record from itself, a mapping or None. Raises ValueError."""
    name = "late_chunking_params"
    if value is None or isinstance(value, LateChunkingParams):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={shown(value)} must be a mapping with chunk_size")
    unknown = next((key for key in value if key != "chunk_size"), None)
    if unknown is not None or not value:
        raise ValueError(f"{name} has {shown(unknown)}, not chunk_size alone{hint(str(unknown), ['chunk_size'])}")
    try:
        return LateChunkingParams(**value)
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from None
