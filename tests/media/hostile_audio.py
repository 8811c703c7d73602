"""Audio files as they come: name -> bytes, and the number of samples at 16 kHz or the code that comes of them."""

import io
import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import soundfile
from numpy.typing import NDArray

RATE: Final = 16_000


def tone(num_samples: int = 4_000, num_channels: int = 1, seed: int = 0) -> NDArray[np.float32]:
    """[samples, channels] of noise that rises and falls."""
    noise = np.random.default_rng(seed).standard_normal((num_samples, num_channels)) * 0.1
    return (noise * (1 + np.sin(np.arange(num_samples) / 900))[:, None]).astype(np.float32)


def encoded(samples: NDArray[Any], kind: str, coding: str | None = None, rate: int = RATE) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=kind, subtype=coding)
    return out.getvalue()


def wave(
    content: bytes = b"\0\1" * 4000,
    coding: int = 1,
    channels: int = 1,
    rate: int = RATE,
    bits: int = 16,
    align: int | None = None,
    declared: int | None = None,
    before: bytes = b"",
) -> bytes:
    """A WAV file; `declared` is the size of its samples, if it is another, and `before` stands before its header."""
    align = channels * bits // 8 if align is None else align
    header = struct.pack("<HHIIHH", coding, channels, rate, rate * align % (1 << 32), align & 0xFFFF, bits)
    chunks = before + b"fmt " + struct.pack("<I", len(header)) + header
    chunks += b"data" + struct.pack("<I", len(content) if declared is None else declared) + content
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def floats(*values: float) -> bytes:
    return wave(np.array(values, "<f4").tobytes(), coding=3, bits=32)


def flac_that_declares(num_samples: int) -> bytes:
    """Its header's 36 bits for the number of samples."""
    data = bytearray(FLAC)
    data[21] = data[21] & 0xF0 | num_samples >> 32
    data[22:26] = struct.pack(">I", num_samples & 0xFFFF_FFFF)
    return bytes(data)


WAVE: Final = wave()
FLAC: Final = encoded(tone(), "FLAC")
OGG: Final = encoded(tone(), "OGG", "VORBIS")
MP3: Final = encoded(tone(), "MP3")
BAD: Final = "audio_unreadable"
LONG: Final = "audio_too_long"
CASES: Final[dict[str, tuple[Callable[[], bytes], int | str]]] = {
    # Sound files of unusual kinds.
    "WAV": (lambda: WAVE, 4000),
    "WAV of 192 kHz": (lambda: wave(rate=192_000), 334),
    "WAV of 8 channels": (lambda: wave(channels=8), 500),
    "WAV of 8 kHz": (lambda: wave(rate=8_000), 8000),
    "WAV of one sample": (lambda: wave(b"\0\1"), 1),
    "WAV of one sample at 48 kHz": (lambda: wave(b"\0\1", rate=48_000), 1),
    "WAV of an odd byte more": (lambda: wave(b"\0\1" * 10 + b"x"), 10),
    "WAV that was piped": (lambda: wave(declared=0xFFFF_FFFF), 4000),
    "WAV that was piped by sox": (lambda: wave(declared=0x7FFF_F000), 4000),
    "WAV with a chunk before its header": (lambda: wave(before=b"JUNK\3\0\0\0abc\0"), 4000),
    "WAV of mu-law": (lambda: encoded(tone(), "WAV", "ULAW"), 4000),
    "WAV of ADPCM": (lambda: encoded(tone(4040), "WAV", "MS_ADPCM"), 4048),
    "WAV of 13 bits": (lambda: wave(bits=13, align=2), 4000),
    "FLAC": (lambda: FLAC, 4000),
    "FLAC of unknown length": (lambda: flac_that_declares(0), 4000),
    "Opus": (lambda: encoded(tone(), "OGG", "OPUS"), 4000),
    "MP3": (lambda: MP3, 4000),
    "MP3 with a tag": (lambda: b"ID3\4\0\0\0\0\0\x0a" + bytes(10) + MP3, 4000),
    # Not audio, or none that is offered.
    "nothing": (lambda: b"", BAD),
    "one byte": (lambda: b"R", BAD),
    "zeros": (lambda: bytes(10_000), BAD),
    "HTML": (lambda: b"<!doctype html><html><body>404</body></html>", BAD),
    "PNG": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(100), BAD),
    "M4A": (lambda: b"\0\0\0\x18ftypM4A " + bytes(100), BAD),
    "WebM": (lambda: b"\x1a\x45\xdf\xa3" + bytes(100), BAD),
    "AIFF": (lambda: encoded(tone(), "AIFF"), BAD),
    "CAF": (lambda: encoded(tone(), "CAF"), BAD),
    "Matlab": (lambda: encoded(tone(), "MAT5"), BAD),
    "AVI": (lambda: b"RIFF\0\1\0\0AVI " + bytes(100), BAD),
    "AAC": (lambda: b"\xff\xf1\x50\x80" + bytes(200), BAD),
    "pickle": (lambda: b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00.", BAD),
    "MP3 of a frame's start alone": (lambda: b"\xff\xfb", BAD),
    "MP3 of a frame's start and zeros": (lambda: b"\xff\xfb\x90\0" + bytes(4000), BAD),
    "MP3 tag alone": (lambda: b"ID3\4\0\0\x7f\x7f\x7f\x7f" + bytes(100), BAD),
    "OGG of a page's start alone": (lambda: b"OggS" + bytes(24), BAD),
    "OGG of an unknown stream": (lambda: OGG.replace(b"vorbis", b"theora"), BAD),
    # Cut short or changed.
    "WAV cut": (lambda: WAVE[:5000], BAD),
    "WAV of a signature alone": (lambda: WAVE[:12], BAD),
    "WAV of a header alone": (lambda: WAVE[:36], BAD),
    "WAV of half a header": (lambda: WAVE[:30], BAD),
    "WAV whose samples come first": (lambda: wave(before=b"data\4\0\0\0\1\2\3\4"), BAD),
    "WAV with a chunk beyond the file": (lambda: wave(before=b"LIST\xff\xff\xff\xff"), BAD),
    "WAV with a short header": (lambda: b"RIFF\x20\0\0\0WAVEfmt \4\0\0\0\1\0\1\0data\4\0\0\0\0\0\0\0", BAD),
    "WAV of an unknown coding": (lambda: wave(coding=0x7777), BAD),
    "FLAC cut": (lambda: FLAC[: len(FLAC) // 2], BAD),
    "FLAC of a header alone": (lambda: FLAC[:42], BAD),
    "FLAC that declares 68 billion samples": (lambda: flac_that_declares((1 << 36) - 1), BAD),
    "OGG of headers alone": (lambda: OGG[:3000], BAD),
    "MP3 cut": (lambda: encoded(tone(30_000), "MP3")[:4000], BAD),
    "MP3 cut by less than a second": (lambda: MP3[: len(MP3) // 2], 623),
    "OGG cut, which is shorter": (lambda: encoded(tone(30_000), "OGG", "VORBIS")[:8000], 13_184),
    # Numbers beyond all sense.
    "WAV of no samples": (lambda: wave(b""), "audio_empty"),
    "WAV of no channels": (lambda: wave(channels=0), BAD),
    "WAV of 65,535 channels": (lambda: wave(bytes(65_535 * 2), channels=65_535), BAD),
    "WAV of 65 channels": (lambda: wave(bytes(65 * 2), channels=65), BAD),
    "WAV of 0 Hz": (lambda: wave(rate=0), BAD),
    "WAV of 1 Hz": (lambda: wave(rate=1), BAD),
    "WAV of 4 GHz": (lambda: wave(rate=0xFFFF_FFFF), BAD),
    "WAV of NaN": (lambda: floats(0.0, float("nan")), BAD),
    "WAV of infinity": (lambda: floats(0.0, float("inf")), BAD),
    "WAV of infinities that cancel": (lambda: wave(np.array([np.inf, -np.inf], "<f4").tobytes(), 3, 2, bits=32), BAD),
    "WAV of 1e30": (lambda: floats(1e30), BAD),
    # Longer than limits.max_audio_s, here 2.
    "WAV of 3 s": (lambda: wave(bytes(2 * 3 * RATE)), LONG),
    "WAV of 3 s at 1 kHz": (lambda: wave(bytes(2 * 3000), rate=1000), LONG),
    "FLAC of 10 min of silence": (lambda: encoded(np.zeros(600 * RATE, np.int16), "FLAC"), LONG),
    "MP3 of 3 s": (lambda: encoded(tone(3 * RATE), "MP3"), LONG),
}
