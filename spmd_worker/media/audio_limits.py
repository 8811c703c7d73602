"""AudioLimits: bounds on the audio of a row, before a model hears it."""

from dataclasses import dataclass
from typing import Final

FORMATS: Final = ("WAV", "FLAC", "OGG", "MP3")
"""Other formats are never tried."""
MIN_SAMPLING_RATE: Final = 1_000
MAX_SAMPLING_RATE: Final = 384_000
MAX_CHANNELS: Final = 64


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """`max_audio_bytes` bounds a file; `max_audio_s` is counted in decoded samples, and bounds arrays too."""

    max_audio_bytes: int = 25 << 20
    max_audio_s: int = 3600
