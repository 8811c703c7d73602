"""Bytes of audio to samples of one channel, 16,000 a second: channels averaged, resampled by soxr, as librosa does.

Audio is decoded and resampled in blocks, and counted meanwhile: a small file may hold days of silence, and what its
header says of its length may be wrong.
"""

import io
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from spmd_worker.base.config.extras import package_fault
from spmd_worker.media.audio_limits import FORMATS, MAX_CHANNELS, MAX_SAMPLING_RATE, MIN_SAMPLING_RATE, AudioLimits
from spmd_worker.media.audio_settings import SAMPLING_RATE
from spmd_worker.media.audio_wave import BLOCK_SAMPLES, Block, Recording, open_wave
from spmd_worker.media.audio_windows import Samples
from spmd_worker.media.errors import MediaError

if TYPE_CHECKING:
    from soundfile import SoundFile

_MAX_EXPLAINED: Final = 200
_MAX_LEVEL: Final = 1e9
"""Full scale is 1. Larger numbers than any format's whole ones are damage, and their squares would not be finite."""
_SIGNATURES: Final = (b"fLaC", b"OggS", b"ID3")
_MPEG: Final = ("MP3", "MPEG")
_LIBSNDFILE_NAMES: Final = ("WAVEX", "MPEG", *FORMATS)
_QUALITY: Final = "soxr_hq"
_UNKNOWN_FRAMES: Final = 1 << 62


def decode_audio(data: bytes, limits: AudioLimits) -> Samples:
    """Samples of an audio file. Raises MediaError; MemoryError passes."""
    recording = open_wave(data) or _open_with_libsndfile(data)
    return samples_of(recording, limits)


def samples_of(recording: Recording, limits: AudioLimits) -> Samples:
    """All samples of a recording. Raises MediaError; MemoryError passes."""
    _check_numbers(recording)
    rate = recording.sampling_rate
    pieces = _resampled(_counted(recording, limits), rate) if rate != SAMPLING_RATE else _counted(recording, limits)
    samples = np.concatenate([np.zeros(0, np.float32), *pieces])
    if not len(samples):
        raise MediaError("audio_empty", "the audio has no samples: give some, or leave the row out")
    return samples


def _check_numbers(recording: Recording) -> None:
    if not MIN_SAMPLING_RATE <= recording.sampling_rate <= MAX_SAMPLING_RATE:
        rule = f"must be {MIN_SAMPLING_RATE:,} to {MAX_SAMPLING_RATE:,} Hz"
        raise _unreadable(f"its sampling rate, {recording.sampling_rate:,} Hz, {rule}: resample it")
    if not 1 <= recording.num_channels <= MAX_CHANNELS:
        raise _unreadable(f"it has {recording.num_channels} channels, and may have 1 to {MAX_CHANNELS}: mix it down")


def _unreadable(why: str) -> MediaError:
    return MediaError("audio_unreadable", f"the audio cannot be decoded: {why}")


def _counted(recording: Recording, limits: AudioLimits) -> Iterator[Samples]:
    """Blocks of one channel. The end of a file before its declared length is an error."""
    num_frames = 0
    for block in recording.blocks:
        num_frames += len(block)
        if num_frames > limits.max_audio_s * recording.sampling_rate:
            rule = f"limits.max_audio_s={limits.max_audio_s}"
            raise MediaError("audio_too_long", f"the audio is longer than {rule}: cut it into parts, or raise it")
        with np.errstate(invalid="ignore", over="ignore"):
            mono = block.mean(axis=1)
        # False for NaN.
        if not (np.abs(mono) <= _MAX_LEVEL).all():
            raise _unreadable("it has samples that are not finite, or beyond all scales")
        yield mono
    if recording.num_frames is not None and num_frames < recording.num_frames:
        declared = f"it declares {recording.num_frames:,} samples or more"
        raise _unreadable(f"{declared} and has {num_frames:,}: it is cut short")


def _resampled(blocks: Iterable[Samples], rate: int) -> Iterator[Samples]:
    """The same samples in blocks of any size; as many as librosa gives."""
    try:
        import soxr
    except ImportError as error:
        raise _missing(f"audio of {rate:,} Hz", "soxr", error) from None
    stream = soxr.ResampleStream(rate, SAMPLING_RATE, 1, dtype="float32", quality=_QUALITY)
    num_given = num_resampled = 0
    for block in blocks:
        num_given += len(block)
        piece = stream.resample_chunk(block)
        num_resampled += len(piece)
        yield piece
    num_left = math.ceil(num_given * SAMPLING_RATE / rate) - num_resampled
    last = stream.resample_chunk(np.zeros(0, np.float32), last=True)[: max(num_left, 0)]
    yield np.pad(last, (0, max(num_left - len(last), 0)))


# What needs a decoder.


def _open_with_libsndfile(data: bytes) -> Recording:
    _check_format(data)
    try:
        import soundfile
    # OSError: without libsndfile, where its wheel has none.
    except (ImportError, OSError) as error:
        raise _missing("this format of audio", "soundfile", error) from None
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.SoundFileError as error:
        raise _unreadable(_explained(error)) from None
    if file.format not in _LIBSNDFILE_NAMES:
        raise _unreadable(f"{file.format} is not one of {', '.join(FORMATS)}")
    # Else it seeks after each block, which fails where a stream does not say how long it is.
    file.seekable = lambda: False
    return Recording(file.samplerate, file.channels, _num_declared(file), _blocks(file))


def _num_declared(file: "SoundFile") -> int | None:
    """Frames that must come, None where a header does not say it."""
    if file.format == "FLAC":
        return int(file.frames) if file.frames < _UNKNOWN_FRAMES else None
    # Counts in headers of MP3 are off by some frames where files were joined or tagged; OGG has none.
    return int(file.frames) - int(file.samplerate) if file.format in _MPEG else None


def _check_format(data: bytes) -> None:
    """Raise MediaError for bytes that do not begin as those of a known format."""
    is_wave = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    # A frame of MPEG: eleven bits, and a layer.
    is_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 0x06 != 0
    if not (is_wave or is_frame or data.startswith(_SIGNATURES)):
        known = ", ".join(FORMATS)
        message = f"{len(data):,} bytes are not audio that can be read: give one of {known} (ffmpeg -i FILE FILE.flac)"
        raise MediaError("audio_unreadable", message)


def _blocks(file: "SoundFile") -> Iterator[Block]:
    import soundfile

    buffer = np.empty((max(BLOCK_SAMPLES // file.channels, 1), file.channels), np.float32)
    while True:
        try:
            block = file.read(out=buffer)
        except soundfile.SoundFileError as error:
            raise _unreadable(_explained(error)) from None
        if not len(block):
            return
        yield block


def _explained(error: Exception) -> str:
    """The message of libsndfile, without the name that Python gives to the bytes."""
    return " ".join(str(getattr(error, "error_string", error)).split())[:_MAX_EXPLAINED] or type(error).__name__


def _missing(what: str, package: str, error: Exception) -> MediaError:
    return MediaError("extra_missing", f"{what} needs {package}, which {package_fault(package, 'audio', error)}")
