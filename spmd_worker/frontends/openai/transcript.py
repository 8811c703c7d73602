"""A transcript as text, JSON, or subtitles: OpenAI's response formats of audio.

Formats of cues: SubRip (.srt) and WebVTT (https://www.w3.org/TR/webvtt1/).
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
RESPONSE_FORMATS: Final[tuple[ResponseFormat, ...]] = get_args(ResponseFormat)
TIMED_FORMATS: Final = ("srt", "verbose_json", "vtt")
"""Formats with segments, whose rows are decoded with timestamps."""
Task = Literal["transcribe", "translate"]

_ARROW: Final = "-->"
_FRAMES_PER_SECOND: Final = 100


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the text between two timestamps, in seconds from the beginning of the audio. `window_start_s` is the
    beginning of its window. `avg_logprob` is the mean of its tokens', None if they were not asked for.
    """

    start_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...]
    window_start_s: float = 0.0
    avg_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Transcript:
    """Text of an audio, and its segments where it was decoded with timestamps. `language` is that of the audio, or
    English for a translation, None if it is unknown.
    """

    text: str
    segments: tuple[Segment, ...]
    duration_s: float
    task: Task
    language: str | None
    temperature: float


def transcript_body(transcript: Transcript, response_format: ResponseFormat) -> dict[str, Any] | str:
    """Body of a response: an object, or text for the formats that are no JSON."""
    if response_format == "json":
        return {"text": transcript.text, "usage": duration_usage(transcript.duration_s)}
    if response_format == "verbose_json":
        return _verbose(transcript)
    if response_format == "srt":
        return "".join(f"{number}\n{cue}" for number, cue in enumerate(_cues(transcript.segments, ","), 1))
    if response_format == "vtt":
        return "".join(("WEBVTT\n\n", *_cues(transcript.segments, ".")))
    return f"{transcript.text}\n"


def duration_usage(duration_s: float) -> dict[str, Any]:
    """OpenAI's usage of models whose input is counted in seconds, whole ones."""
    return {"type": "duration", "seconds": math.ceil(duration_s)}


def clock_text(time_s: float, separator: str) -> str:
    """A time as hh:mm:ss and milliseconds."""
    minutes, milliseconds = divmod(round(time_s * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02}:{minutes:02}:{seconds:02}{separator}{milliseconds:03}"


def _cues(segments: Sequence[Segment], separator: str) -> list[str]:
    return [
        f"{clock_text(each.start_s, separator)} {_ARROW} {clock_text(each.end_s, separator)}\n{_line(each.text)}\n\n"
        for each in segments
    ]


def _line(text: str) -> str:
    """Text of a cue: an empty line would end it, an arrow begin another."""
    return " ".join(text.split()).replace(_ARROW, "->")


def _verbose(transcript: Transcript) -> dict[str, Any]:
    return {
        "task": transcript.task,
        "language": transcript.language,
        "duration": round(transcript.duration_s, 2),
        "text": transcript.text,
        "segments": [_segment(index, each, transcript) for index, each in enumerate(transcript.segments)],
        "usage": duration_usage(transcript.duration_s),
    }


def _segment(index: int, segment: Segment, transcript: Transcript) -> dict[str, Any]:
    """A segment under Whisper's names; `seek` is the first frame of its window, of 10 ms each."""
    return {
        "id": index,
        "seek": round(segment.window_start_s * _FRAMES_PER_SECOND),
        "start": round(segment.start_s, 2),
        "end": round(segment.end_s, 2),
        "text": segment.text,
        "tokens": list(segment.token_ids),
        "temperature": transcript.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": compression_ratio(segment.text),
        # It needs the probability of a token that the prompt does not have.
        "no_speech_prob": None,
    }


def compression_ratio(text: str) -> float:
    """Whisper's measure of repeated text: bytes of the text for each byte of its deflated form."""
    data = text.encode("utf-8", "surrogatepass")
    return round(len(data) / len(zlib.compress(data)), 4)
