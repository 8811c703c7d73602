"""Windows of audio that is longer than what an encoder reads: cut where it is quietest, nothing left out or twice.

The cuts are vLLM's, and depend on the samples alone.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from spmd_worker.media.audio_settings import SAMPLING_RATE

Samples: TypeAlias = NDArray[np.float32]
"""[samples], of one channel, 16,000 a second."""
_SEARCH_SAMPLES: Final = SAMPLING_RATE
"""A cut is within the last second of a window."""
_QUIET_SAMPLES: Final = SAMPLING_RATE // 10
"""Samples whose energy is compared."""


class AudioWindow(NamedTuple):
    """Samples from `start_s` to `end_s` of audio."""

    start_s: float
    end_s: float
    samples: Samples


def windows(samples: Samples, num_samples: int) -> list[AudioWindow]:
    """Windows of at most `num_samples`, in order; their samples, one behind the other, are `samples`."""
    cuts = [*_cuts(samples, num_samples), len(samples)]
    starts = [0, *cuts[:-1]]
    return [
        AudioWindow(start / SAMPLING_RATE, end / SAMPLING_RATE, samples[start:end]) for start, end in zip(starts, cuts)
    ]


def _cuts(samples: Samples, num_samples: int) -> Iterator[int]:
    """Places between two windows."""
    start = 0
    while start + num_samples < len(samples):
        end = start + num_samples
        start = end - min(_SEARCH_SAMPLES, num_samples // 2)
        start += _quietest(samples[start:end])
        yield start


def _quietest(samples: Samples) -> int:
    """The first sample of the least energy's 100 ms. The last 100 ms are left out, as vLLM does."""
    num_pieces = max(len(samples) // _QUIET_SAMPLES - 1, 1)
    pieces = samples[: num_pieces * _QUIET_SAMPLES].reshape(num_pieces, -1).astype(np.float64)
    return int(np.argmin((pieces * pieces).sum(axis=1))) * _QUIET_SAMPLES
