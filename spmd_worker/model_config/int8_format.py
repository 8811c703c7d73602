"""Packed sizes of int8 weights in bytes, as in `native/int8.h`, for packing and planning.

A weight [outputs, inputs] is in panels where its sizes fit them, as compiled kernels multiply it, else in rows. Needs
no torch.
"""

from typing import Final

PANEL: Final = 16
"""Outputs of a panel."""

STEP: Final = 32
"""Inputs of a step."""

ROW_STEP: Final = 64
"""Multiple of bytes to which a row of inputs is padded for the compiled GEMMs."""

SCALE_BYTES: Final = 4

MAX_INPUTS: Final = 131_072
"""Maximum inputs of a row: a longer sum of byte multiplications may overflow an int32."""

_TAIL_BYTES: Final = 2 * 64
_LONG_TAIL_BYTES: Final = 512


def fits_panels(num_outputs: int, num_inputs: int, *, is_gated: bool) -> bool:
    """Whether a weight of these sizes is in panels, in pairs of them if it `is_gated`."""
    return num_inputs % STEP == 0 and num_outputs % (PANEL * (1 + is_gated)) == 0


def panel_bytes(num_inputs: int) -> int:
    """Bytes of one panel: 16 an input, 16 scales, 16 initial sums, and zeros."""
    tail = _TAIL_BYTES if num_inputs % (2 * STEP) == 0 else _LONG_TAIL_BYTES
    return num_inputs * PANEL + tail


def inputs_of(num_bytes: int) -> int:
    """Inputs of a panel of `num_bytes`."""
    tail = _TAIL_BYTES if num_bytes % (2 * STEP * PANEL) == _TAIL_BYTES else _LONG_TAIL_BYTES
    num_inputs = (num_bytes - tail) // PANEL
    assert panel_bytes(num_inputs) == num_bytes, num_bytes
    return num_inputs


def int8_bytes(num_outputs: int, num_inputs: int, *, is_gated: bool = False) -> int:
    """Bytes of a packed weight, scales included."""
    if fits_panels(num_outputs, num_inputs, is_gated=is_gated):
        return num_outputs // PANEL * panel_bytes(num_inputs)
    return num_outputs * (num_inputs + SCALE_BYTES)


def row_bytes(num_inputs: int) -> int:
    """Bytes of a row of inputs, padded for the compiled GEMMs."""
    return -(-num_inputs // ROW_STEP) * ROW_STEP
