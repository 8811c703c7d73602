"""A few rows of logits at a time, so that what is computed between them stays in a core's caches.

Whole, float64 logits of 256 rows and 25,000 ids are 50 MB, and each operation on them memory that the system maps anew.
Only for what is computed row by row: on the CPU bits do not depend on how rows are taken.
"""

from typing import Final

from torch import Tensor

_NUMBERS_AT_ONCE: Final = 1 << 18


def row_blocks(logits: Tensor) -> list[slice]:
    """Of [K, V], in order: a few rows at a time on the CPU, all at once elsewhere, where each call has its price."""
    num_rows, num_columns = logits.shape
    size = max(1, _NUMBERS_AT_ONCE // max(1, num_columns)) if logits.device.type == "cpu" else max(1, num_rows)
    return [slice(start, start + size) for start in range(0, num_rows, size)]
