"""Answers that repeat themselves: a row ends once its last tokens are some tokens several times over.

vLLM's `repetition_detection`. A pure function of the row's own tokens, so every replica decides alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from spmd_worker.base.config.plain_values import plain_int, shown
from spmd_worker.base.names import hint, with_keyword_hints

_MOST: Final = 4096
"""Largest pattern and count: each token of a row is compared with so many."""


@with_keyword_hints()
@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """A row ends when its last tokens are `min_count` times the same pattern of `min_pattern_size` to
    `max_pattern_size` tokens. Both sizes 0: no row ends so; `min_pattern_size` 0 is 1.

    Raises ValueError naming field, value and rule.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = plain_int(getattr(self, spec.name))
            if value is None or not 0 <= value <= _MOST:
                raise ValueError(
                    f"{spec.name}={shown(getattr(self, spec.name))} must be a whole number from 0 to {_MOST}"
                )
            object.__setattr__(self, spec.name, value)
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"min_pattern_size={self.min_pattern_size} must not exceed max_pattern_size={self.max_pattern_size}"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError(f"min_count={self.min_count} must be 2 or more: tokens that come once are no repetition")

    def is_found(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of `token_ids` repeat themselves."""
        if not self.max_pattern_size:
            return False
        longest = min(self.max_pattern_size, len(token_ids) // self.min_count)
        return any(self._repeats(token_ids, size) for size in range(max(self.min_pattern_size, 1), longest + 1))

    def _repeats(self, token_ids: Sequence[int], size: int) -> bool:
        # The last token first: nearly every pattern ends there.
        last, num_compared = len(token_ids) - 1, size * (self.min_count - 1)
        return all(token_ids[last - index] == token_ids[last - index - size] for index in range(num_compared))


def as_repetition_detection(name: str, value: Any) -> RepetitionDetectionParams | None:
    """The record from itself, a mapping or None; None where it ends no row. Raises ValueError."""
    known = [spec.name for spec in fields(RepetitionDetectionParams)]
    if value is not None and not isinstance(value, RepetitionDetectionParams):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}={shown(value)} must be a mapping with {', '.join(known)}")
        unknown = next((key for key in value if key not in known), None)
        if unknown is not None:
            raise ValueError(f"{name}: unknown key {shown(unknown)}{hint(str(unknown), known)}")
        try:
            value = RepetitionDetectionParams(**value)
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from None
    return value if value is not None and value.max_pattern_size else None
