"""Answers to rows of audio: transcripts in OpenAI's formats, and plain rows."""

from collections.abc import Sequence
from typing import Any

from spmd_worker.frontends.openai.audio_row import EncodedAudioRow, joined_output, transcript_of
from spmd_worker.frontends.openai.openai_body import JsonObject
from spmd_worker.frontends.openai.row_writer import json_line, plain_result, response_line
from spmd_worker.frontends.openai.transcript import Transcript, transcript_body
from spmd_worker.replica.sequence.outputs import RequestOutput


def audio_body(encoded: EncodedAudioRow, outputs: Sequence[RequestOutput]) -> JsonObject | str:
    """Body of a response to a transcription or translation: text for the formats that are no JSON."""
    return transcript_body(transcript_of(encoded, outputs), encoded.row.response_format)


def audio_line(encoded: EncodedAudioRow, outputs: Sequence[RequestOutput], model_name: str) -> bytes:
    """Output line of a row of audio, with its line end."""
    if encoded.row.kind != "plain":
        return response_line(encoded.row, audio_body(encoded, outputs))
    record = plain_result(encoded.windows[0], joined_output(outputs))
    for sample, found in enumerate(record["outputs"]):
        found |= _spoken(encoded, transcript_of(encoded, outputs, sample))
    return json_line({**record, "duration": round(encoded.duration_s, 2)})


def _spoken(encoded: EncodedAudioRow, transcript: Transcript) -> dict[str, Any]:
    """Further keys of a plain row's sample: with timestamps, its text is without them."""
    if not encoded.has_timestamps:
        return {"language": transcript.language}
    times = [
        {"start": round(each.start_s, 2), "end": round(each.end_s, 2), "text": each.text}
        for each in transcript.segments
    ]
    return {"text": transcript.text, "language": transcript.language, "segments": times}
