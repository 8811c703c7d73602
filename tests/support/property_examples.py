"""Number of examples that property tests draw: a fifth in the gate, all of them in the stress tier.

Examples are the same in every run, so the gate's fifth are the first of all. Properties that have a longer test of
their own in the stress tier say a plain number.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import settings

VARIABLE = "TESTS_ALL_EXAMPLES"
ALL = 100
"""If nothing else is said."""
_FRACTION, _LEAST, _NUM_PARTS = 5, 10, 3


def num_examples(count: int = ALL) -> int:
    return count if os.environ.get(VARIABLE) else max(count // _FRACTION, min(count, _LEAST))


def part_of(values: Sequence[Any], turn: int) -> Sequence[Any]:
    """A third of the values in the gate, another in each of three turns; all of them in the stress tier."""
    return values if os.environ.get(VARIABLE) else values[turn % _NUM_PARTS :: _NUM_PARTS]


def examples(count: int = ALL) -> Callable[[Any], Any]:
    """The decorator of a test that has `count` examples in the stress tier."""
    return settings(max_examples=num_examples(count))
