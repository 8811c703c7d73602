"""Audio in prompts of text: the frames that a tower takes of a recording, and its tokens, by kind of model."""

from typing import NamedTuple

from spmd_worker.media.audio_settings import CHUNK_FRAMES, HOP_SAMPLES, SAMPLING_RATE, AudioSettings
from spmd_worker.media.errors import MediaError
from spmd_worker.media.image_texts import run_text


class AudioTokens(NamedTuple):
    """Frames of the features that are kept, rows behind the tower's convolutions, and tokens, with their text."""

    num_frames: int
    num_patches: int
    num_rows: int
    text: str


def audio_tokens(num_samples: int, settings: AudioSettings) -> AudioTokens:
    """Those of a recording. Raises MediaError for one that is too long for the model, or for a single token."""
    if num_samples > settings.num_samples:
        given = f"the audio is {num_samples / SAMPLING_RATE:g} s long and the model hears {settings.window_s} s"
        raise MediaError("audio_too_long", f"{given} of a recording: cut it into recordings of at most that")
    if settings.least_samples:
        return _of_chunks(num_samples, settings)
    heard, each = -(-num_samples // HOP_SAMPLES), settings.rows_per_token
    # The second convolution has stride 2; a row sees a frame behind its two.
    num_patches = (heard + 1) // 2
    if settings.counts_padding:
        num_patches = -(-heard // settings.chunk_frames) * settings.chunk_frames // 2
    num_rows = num_patches // each
    if not num_rows:
        least = 2 * (each - 1) * HOP_SAMPLES + 1
        rule = f"a token takes {least} samples at {SAMPLING_RATE:,} Hz"
        raise MediaError("audio_empty", f"the audio has {num_samples} samples, and {rule}: give a longer recording")
    # A last window that has no token is left out.
    most = -(-num_rows * each * 2 // settings.chunk_frames) * settings.chunk_frames
    if settings.has_exact_end:
        return AudioTokens(heard, num_patches, num_rows, run_text(settings.kind, num_rows))
    num_frames = most if settings.hears_padding else min(2 * num_patches + 1, most)
    return AudioTokens(num_frames, num_frames // 2, num_rows, run_text(settings.kind, num_rows))


def _of_chunks(num_samples: int, settings: AudioSettings) -> AudioTokens:
    """Tokens of chunks of frames that are convolved alone. A recording that is too short is padded."""
    num_frames = max(num_samples, settings.least_samples) // HOP_SAMPLES
    lengths = chunk_lengths(num_frames)
    return AudioTokens(num_frames, sum(lengths), sum(lengths), run_text(settings.kind, sum(lengths)))


def chunk_lengths(num_frames: int) -> list[int]:
    """Rows of each chunk behind three convolutions of stride 2."""
    chunks = [min(CHUNK_FRAMES, num_frames - start) for start in range(0, num_frames, CHUNK_FRAMES)]
    for _ in range(3):
        chunks = [(each + 1) // 2 for each in chunks]
    return chunks
