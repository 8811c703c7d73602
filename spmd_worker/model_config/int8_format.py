"""How many bytes an int8 weight takes, packed: what `native/int8.h` says, for those who make it and for those who plan.

A weight [outputs, inputs] is in panels where its sizes fit them, as compiled kernels multiply it, else in rows.
Needs no torch.
"""

from typing import Final

PANEL: Final = 16
"""Outputs."""

STEP: Final = 32
"""Inputs."""

ROW_STEP: Final = 64
"""Bytes that a row of inputs is padded to a multiple of, as compiled products take it."""

SCALE_BYTES: Final = 4

MOST_INPUTS: Final = 131_072
"""Of a whole row: more products of two bytes may be larger, summed, than an int32."""

LEAST_SCREENED: Final = 1 << 21
MOST_SCREENED: Final = 1 << 32
"""Elements of a weight that has a screen, whose pairs are numbered by an int32."""

_BOUNDS_BYTES: Final = 2 * 4
_TAIL_BYTES: Final = 2 * 64
_LONG_TAIL_BYTES: Final = 512


def fits_panels(num_outputs: int, num_inputs: int, *, is_gated: bool) -> bool:
    """Whether a weight of these sizes is in panels, in pairs of them where it `is_gated`."""
    return num_inputs % STEP == 0 and num_outputs % (PANEL * (1 + is_gated)) == 0


def panel_bytes(num_inputs: int) -> int:
    """Of one panel: 16 bytes an input, 16 scales, 16 numbers to start from, and zeros."""
    tail = _TAIL_BYTES if num_inputs % (2 * STEP) == 0 else _LONG_TAIL_BYTES
    return num_inputs * PANEL + tail


def inputs_of(num_bytes: int) -> int:
    """The inputs of a panel of so many bytes."""
    tail = _TAIL_BYTES if num_bytes % (2 * STEP * PANEL) == _TAIL_BYTES else _LONG_TAIL_BYTES
    num_inputs = (num_bytes - tail) // PANEL
    assert panel_bytes(num_inputs) == num_bytes, num_bytes
    return num_inputs


def int8_bytes(num_outputs: int, num_inputs: int, *, is_gated: bool = False) -> int:
    """Of a weight, packed, scales included."""
    if fits_panels(num_outputs, num_inputs, is_gated=is_gated):
        return num_outputs // PANEL * panel_bytes(num_inputs)
    return num_outputs * (num_inputs + SCALE_BYTES)


def row_bytes(num_inputs: int) -> int:
    """Of a row of so many inputs, as compiled products take it."""
    return -(-num_inputs // ROW_STEP) * ROW_STEP


def screen_bytes(num_outputs: int, num_inputs: int) -> int:
    """Of the screen of a weight (`native/screened_argmax.cpp`): its panels, and two bounds each. 0 where its sizes fit
    none, or it is so small that a screen saves nothing.
    """
    is_worth_it = LEAST_SCREENED <= num_outputs * num_inputs <= MOST_SCREENED
    if not is_worth_it or not fits_panels(num_outputs, num_inputs, is_gated=False):
        return 0
    return num_outputs // PANEL * (panel_bytes(num_inputs) + _BOUNDS_BYTES)
