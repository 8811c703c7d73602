"""Transcripts in OpenAI's response formats."""

import json
import re
from typing import Any

import pytest
from openai.types.audio import TranscriptionVerbose

from spmd_worker.frontends.openai.transcript import Segment, Transcript, clock_text, compression_ratio, transcript_body

SEGMENTS = (
    Segment(0.0, 4.5, " Hello there.", (1, 2), 0.0, -0.25),
    Segment(29.5, 3671.04, " To --> you,\n\n and\x85me", (3,), 29.02, -0.5),
)
TRANSCRIPT = Transcript("Hello there. To you", SEGMENTS, 3671.041, "transcribe", "english", 0.0)


def test_texts_of_each_format() -> None:
    assert transcript_body(TRANSCRIPT, "text") == "Hello there. To you\n"
    usage = {"type": "duration", "seconds": 3672}
    assert transcript_body(TRANSCRIPT, "json") == {"text": "Hello there. To you", "usage": usage}
    assert transcript_body(TRANSCRIPT, "srt") == (
        "1\n00:00:00,000 --> 00:00:04,500\nHello there.\n\n2\n00:00:29,500 --> 01:01:11,040\nTo -> you, and me\n\n"
    )
    assert transcript_body(TRANSCRIPT, "vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:04.500\nHello there.\n\n00:00:29.500 --> 01:01:11.040\nTo -> you, and me\n\n"
    )


def test_verbose_body_is_one_of_the_client() -> None:
    body = transcript_body(TRANSCRIPT, "verbose_json")
    assert isinstance(body, dict)
    assert json.loads(json.dumps(body)) == body
    read = TranscriptionVerbose.model_construct(**body)
    assert read.to_dict() == body
    first, second = body["segments"]
    assert set(first) == set(
        TranscriptionVerbose.model_fields["segments"].annotation.__args__[0].__args__[0].model_fields
    )
    assert (first["id"], first["start"], first["end"], first["seek"], first["tokens"]) == (0, 0.0, 4.5, 0, [1, 2])
    assert (second["id"], second["seek"], second["avg_logprob"]) == (1, 2902, -0.5)
    assert (body["duration"], body["language"], body["task"]) == (3671.04, "english", "transcribe")


@pytest.mark.parametrize(
    ("time_s", "text"), [(0.0, "00:00:00.000"), (59.9996, "00:01:00.000"), (86400, "24:00:00.000")]
)
def test_clocks_carry(time_s: float, text: str) -> None:
    assert clock_text(time_s, ".") == text


def test_repeated_text_has_a_high_compression_ratio() -> None:
    assert compression_ratio("again and " * 40) > 2.4 > compression_ratio("Some words that differ.")
    assert compression_ratio("") == 0.0


def test_cues_of_no_segments_are_empty() -> None:
    empty: Any = Transcript("", (), 1.0, "translate", None, 0.0)
    assert [transcript_body(empty, each) for each in ("srt", "vtt", "text")] == ["", "WEBVTT\n\n", "\n"]
    assert not re.search("-->", str(transcript_body(empty, "verbose_json")))
