"""Sizes of weights of one byte an element as GPUs have them: a row's numbers, then its float32 scales, one at least and
room for one for each group of 128 inputs, padded to 128 bytes, so that rows begin at multiples of 16 bytes for the
tensor memory accelerator, and of 128 where 128 divides the inputs. Needs no torch.
"""

from typing import Final

GROUP: Final = 128
"""Inputs of a group that has a scale of its own."""
_ALIGNED: Final = 16
_SCALES: Final = 32
"""Scales in 128 bytes."""


def fits_bytes(num_inputs: int) -> bool:
    """Whether a weight with this many inputs is quantised: others stay plain, because no row would be aligned."""
    return num_inputs % _ALIGNED == 0


def row_bytes(num_inputs: int) -> int:
    """Bytes of a row, scales included."""
    return num_inputs + GROUP * -(-_num_groups(num_inputs) // _SCALES)


def inputs_of(num_bytes: int) -> int:
    """Inputs of a row of `num_bytes`."""
    # n groups and ceil(n / 32) blocks of scales; the last group may be short.
    is_short = num_bytes % GROUP > 0
    num_groups = (num_bytes // GROUP + is_short) * _SCALES // (_SCALES + 1)
    num_inputs = (num_groups - is_short) * GROUP + num_bytes % GROUP
    assert row_bytes(num_inputs) == num_bytes, num_bytes
    return num_inputs


def byte_rows_bytes(num_outputs: int, num_inputs: int, itemsize: int) -> int:
    """Bytes of a weight, packed if it fits, else of `itemsize` an element."""
    return num_outputs * (row_bytes(num_inputs) if fits_bytes(num_inputs) else num_inputs * itemsize)


def _num_groups(num_inputs: int) -> int:
    return -(-num_inputs // GROUP)
