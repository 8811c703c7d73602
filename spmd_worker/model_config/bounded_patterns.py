"""Regular expressions of untrusted files that are sure to match fast. Needs no torch."""

import re
from typing import Final

MAX_PATTERN: Final = 500
"""Characters."""
MAX_REPEATS: Final = 4


def is_bounded(pattern: str) -> bool:
    """Whether `pattern` is a regular expression whose matching is polynomial: it has at most `MAX_REPEATS` repeats, no
    repeated group and no back-reference.
    """
    num_repeats = len(re.findall(r"(?<!\\)[*+{]", pattern))
    has_repeated_group = re.search(r"\)[*+{]|\\\d", pattern) is not None
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return not has_repeated_group and num_repeats <= MAX_REPEATS and len(pattern) <= MAX_PATTERN
