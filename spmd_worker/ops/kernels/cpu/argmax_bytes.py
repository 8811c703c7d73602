"""Bytes that kernels keep alongside a head's weight to find its argmax faster. Needs no torch: nor does a plan."""

from typing import Final

from spmd_worker.model_config.int8_format import PANEL, fits_panels, panel_bytes

MIN_ELEMENTS: Final = 1 << 21
MAX_ELEMENTS: Final = 1 << 32
"""Range of elements of a weight that has an int8 pre-filter, whose pairs are numbered by an int32."""

_BOUNDS_BYTES: Final = 2 * 4


def argmax_bytes(num_outputs: int, num_inputs: int, dtype: str, device: str) -> int:
    """Bytes of the int8 pre-filter of a weight (`native/argmax_prefilter.cpp`): its panels, and two bounds each. 0
    unless the weight is bfloat16 on the CPU, fits panels and has a size that gains. A CPU on which a pre-filter is no
    faster keeps nothing either: it is counted all the same.
    """
    is_useful = device == "cpu" and dtype == "bfloat16" and MIN_ELEMENTS <= num_outputs * num_inputs <= MAX_ELEMENTS
    if not is_useful or not fits_panels(num_outputs, num_inputs, is_gated=False):
        return 0
    return num_outputs // PANEL * (panel_bytes(num_inputs) + _BOUNDS_BYTES)
