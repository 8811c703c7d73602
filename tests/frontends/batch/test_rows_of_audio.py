"""Rows of audio: parsed, prepared ahead in their order, encoded as one request for each window."""

import json
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cut_jobs import Ended, end_after
from jobs_of_rows import answers_of_job, openai_row
from speech_models import IDS, sound, speech_folder, wave_file, write_tokenizer

from spmd_worker.compat.encoder_prompts import EncoderPrompts
from spmd_worker.engine.encoder_limits import EncoderLimits
from spmd_worker.engine.validation import RequestLimits
from spmd_worker.frontends.batch.media_window import MediaWindow
from spmd_worker.frontends.openai.audio_row import EncodedAudioRow, encode_audio, joined_output, transcript_of
from spmd_worker.frontends.openai.row import AudioPrompt, ImagesOfRow, Row, RowError
from spmd_worker.frontends.openai.row_encoding import RowContext
from spmd_worker.frontends.openai.row_parser import parse_row
from spmd_worker.frontends.openai.split_rows import SplitRows
from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.errors import MediaError
from spmd_worker.media.prepared import AudioFeatures
from spmd_worker.model_config.decoder_generation import DecoderGeneration, SpeechTokens
from spmd_worker.replica.sequence.outputs import CompletionOutput, RequestOutput
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.messages import InvalidRequestError
from spmd_worker.tokenizer.tokenizer import Tokenizer

URL = "/v1/audio/transcriptions"
NUM_BYTES = 80 * 4 * 4
SPEECH = SpeechTokens(
    IDS["<|notimestamps|>"],
    (("en", IDS["<|en|>"]), ("de", IDS["<|de|>"])),
    (("translate", IDS["<|translate|>"]), ("transcribe", IDS["<|transcribe|>"])),
    IDS["<|startofprev|>"],
    50,
)
GENERATION = DecoderGeneration(IDS["<|startoftranscript|>"], IDS["<|endoftext|>"], max_positions=64, speech=SPEECH)
STAMP = IDS["<|notimestamps|>"] + 1


def window(number: int, of: int, source: bytes = b"") -> PreparedAudio:
    features = AudioFeatures(np.full((80, 4), number, np.float32))
    digest = sha256(source).digest()
    return PreparedAudio(bytes([number]) * 16, features, 2, 2, 2.0 * number, 2.0 * number + 2, 2.0 * of, digest)


@dataclass
class HeldAudio:
    """Audio that is prepared when `is_held` is false."""

    made: list[PreparedAudio] | MediaError
    is_held: bool = False

    def done(self) -> bool:
        return not self.is_held

    def result(self) -> list[PreparedAudio]:
        if isinstance(self.made, MediaError):
            raise self.made
        return self.made


@dataclass
class HereAudio:
    """`AudioPreparer` of names: the number of windows, or an error."""

    holds: bool = False
    held: list[HeldAudio] = field(default_factory=list)

    def prepare(self, source: Any) -> list[PreparedAudio]:
        return self.submit(source).result()

    def submit(self, source: Any) -> HeldAudio:
        made: Any = MediaError("audio_missing", "gone")
        if source != "gone":
            made = [window(number, int(source), source.encode()) for number in range(int(source))]
        self.held.append(HeldAudio(made, self.holds))
        return self.held[-1]

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokenizer(folder)
    return Tokenizer.open(folder)


def limits(audio: HereAudio, tokenizer: Tokenizer) -> RequestLimits:
    prompts = EncoderPrompts(GENERATION, audio)
    encoder = EncoderLimits("audio", 10, may_raise=False)
    return RequestLimits(tokenizer.vocab_size, 64, has_tokenizer=True, encoder=encoder, encoder_prompts=prompts)


def parse(fields: dict[str, Any], index: int = 0) -> Row | RowError:
    return parse_row(index, json.dumps(fields).encode(), SamplingParams(temperature=0.7, n=2, max_tokens=5))


def body_row(**body: Any) -> Row | RowError:
    return parse(openai_row("a", URL, {"file": "1", **body}))


def test_defaults_of_bodies_are_those_of_openai() -> None:
    row = body_row()
    assert isinstance(row, Row)
    assert isinstance(row.prompt, AudioPrompt)
    assert (row.kind, row.response_format, row.prompt.task, row.prompt.has_timestamps) == (
        "audio",
        "json",
        "transcribe",
        False,
    )
    sampling = row.sampling
    assert (sampling.temperature, sampling.n, sampling.max_tokens, sampling.logprobs) == (0.0, 1, None, None)
    timed = body_row(
        response_format="verbose_json",
        timestamp_granularities=["segment"],
        temperature=0.5,
        seed=3,
        max_completion_tokens=7,
        chunking_strategy="auto",
        include=[],
        stream=False,
        language="",
        user="me",
    )
    assert isinstance(timed, Row)
    assert isinstance(timed.prompt, AudioPrompt)
    assert (timed.prompt.has_timestamps, timed.prompt.language) == (True, None)
    sampling = timed.sampling
    assert (sampling.temperature, sampling.seed, sampling.max_tokens, sampling.logprobs) == (0.5, 3, 7, 0)
    plain = parse({"audio": "1", "task": "translate"})
    assert isinstance(plain, Row)
    assert (plain.kind, plain.sampling.temperature, plain.sampling.n) == ("plain", 0.7, 2)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"file": None}, "missing_prompt"),
        ({"file_url": "2"}, "conflicting_prompts"),
        ({"file": 3}, "invalid_value"),
        ({"file": {"bytes": "AAAA"}}, "invalid_value"),
        ({"response_format": "xml"}, "invalid_value"),
        ({"response_format": "diarized_json"}, "invalid_value"),
        ({"response_format": "verbose_json", "timestamp_granularities": ["word"]}, "unsupported_value"),
        ({"timestamp_granularities": ["segment"]}, "conflicting_keys"),
        ({"stream": True}, "unsupported_value"),
        ({"include": ["logprobs"]}, "unsupported_value"),
        ({"chunking_strategy": {"type": "server_vad"}}, "unsupported_value"),
        ({"temperature": "warm"}, "invalid_value"),
        ({"language": 3}, "invalid_value"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "conflicting_keys"),
        ({"n": 2}, "unknown_key"),
    ],
)
def test_bad_bodies_are_error_rows(body: dict[str, Any], code: str) -> None:
    found = body_row(**body)
    assert isinstance(found, RowError)
    assert (found.code, found.shape) == (code, "openai"), found


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"audio": "1", "task": "sing"}, "invalid_value"),
        ({"audio": "1", "decoder_prompt": "a", "language": "de"}, "conflicting_keys"),
        ({"audio": "1", "decoder_prompt": ""}, "empty_prompt"),
        ({"audio": "1", "images": []}, "unknown_key"),
        ({"audio": "1", "timestamps": 1}, "invalid_value"),
        ({"audio": "1", "prompt": "a"}, "conflicting_prompts"),
        ({"audio": None}, "missing_prompt"),
        ({"encoder_prompt": "a", "prompt": "a"}, "conflicting_prompts"),
    ],
)
def test_bad_plain_rows_are_error_rows(fields: dict[str, Any], code: str) -> None:
    found = parse(fields)
    assert isinstance(found, RowError)
    assert found.code == code, found


def encoded_row(tokenizer: Tokenizer, num_windows: int, **body: Any) -> EncodedAudioRow:
    row = body_row(file=str(num_windows), **body)
    assert isinstance(row, Row), row
    return encode_audio(row, RowContext(tokenizer, limits(HereAudio(), tokenizer)))


def test_null_audio_is_no_audio() -> None:
    row = parse({"audio": None, "prompt": "a"})
    assert isinstance(row, Row), row
    assert not isinstance(row.prompt, AudioPrompt)


def test_structured_outputs_need_a_language(tokenizer: Tokenizer) -> None:
    """A grammar holds from the first token, and then no language would be detected."""
    audio = limits(HereAudio(), tokenizer)
    # These limits have no compiler of grammars, so a row that is not refused for its language meets that.
    for language, words in ((None, "give language"), ("de", "tokenizer.json")):
        row = parse({"audio": "1", "language": language, "structured_outputs": {"choice": ["a", "b"]}})
        assert isinstance(row, Row), row
        with pytest.raises(InvalidRequestError, match=words):
            encode_audio(row, RowContext(tokenizer, audio))


def test_windows_are_requests_with_one_prompt(tokenizer: Tokenizer) -> None:
    encoded = encoded_row(tokenizer, 3, language="de")
    start, language, task, last = (
        IDS[each] for each in ("<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>")
    )
    assert [each.content.token_ids for each in encoded.windows] == [(start, language, task, last)] * 3
    names = [each.content.encoder.media_id for each in encoded.windows if each.content.encoder is not None]
    assert names == [bytes([number]) * 16 for number in range(3)]
    assert [each.sampling.max_tokens for each in encoded.windows] == [60] * 3
    assert encoded.num_sequences == 3
    images = ImagesOfRow.of(encoded.media)
    assert images.num_bytes == 3 * NUM_BYTES
    # One file, however many windows.
    assert images.digest == ImagesOfRow.of(encoded.media[:1]).digest != ImagesOfRow.of([window(0, 1, b"2")]).digest
    detected = encoded_row(tokenizer, 1, response_format="srt")
    assert detected.windows[0].content.token_ids == (start,)
    assert detected.has_timestamps
    with pytest.raises(InvalidRequestError, match="klingon"):
        encoded_row(tokenizer, 1, language="klingon")


def output(token_ids: list[int], tokenizer: Tokenizer) -> RequestOutput:
    completion = CompletionOutput(0, tokenizer.decode(token_ids), token_ids, finish_reason="stop")
    return RequestOutput("0", None, [1], outputs=[completion], finished=True)


def test_transcript_joins_windows_and_shifts_times(tokenizer: Tokenizer) -> None:
    letters = tokenizer.encode("abc", add_special_tokens=False)[1:-1] or tokenizer.encode(
        "abc", add_special_tokens=False
    )
    encoded = encoded_row(tokenizer, 2, response_format="verbose_json")
    answer = [IDS["<|de|>"], IDS["<|transcribe|>"], STAMP, *letters, STAMP + 25, STAMP + 25, *letters, STAMP + 75]
    outputs = [output(answer, tokenizer), output([STAMP + 10, *letters, STAMP + 90], tokenizer)]
    found = transcript_of(encoded, outputs)
    text = tokenizer.decode(letters)
    assert [(each.start_s, each.end_s, each.text) for each in found.segments] == [
        (0.0, 0.5, text),
        (0.5, 1.5, text),
        (2.2, 3.8, text),
    ]
    assert (found.text, found.language, found.duration_s) == (text * 3, "german", 4.0)
    both = joined_output(outputs)
    assert both.outputs[0].token_ids == [*outputs[0].outputs[0].token_ids, *outputs[1].outputs[0].token_ids]
    failed = RequestOutput("1", None, [1], finished=True, error="no", error_code="non_finite_logits")
    assert joined_output([outputs[0], failed]) is failed


def test_window_of_rows_prepares_audio_in_order(tokenizer: Tokenizer) -> None:
    audio = HereAudio(holds=True)
    held = MediaWindow(None, 3 * NUM_BYTES, audio)
    rows = [parse({"audio": name}, index) for index, name in enumerate(("2", "gone", "2", "1"))]
    for row in rows:
        assert isinstance(row, Row)
        held.put(row)
    assert held.next_ready(0) is None
    for each in audio.held:
        each.is_held = False
    first, error = held.next_ready(0), held.next_ready(0)
    assert first is not None
    assert error is not None
    assert len(first.media or ()) == 2
    assert isinstance(error.row, RowError)
    assert error.row.code == "audio_missing"
    # No room beside the first row's two windows.
    assert held.next_ready(2 * NUM_BYTES) is None
    assert held.next_ready(0) is not None
    without = MediaWindow(None, 1 << 30)
    assert isinstance(rows[0], Row)
    without.put(rows[0])
    ready = without.next_ready(0)
    assert ready is not None
    assert ready.media is None


@pytest.mark.matrix
def test_cut_job_of_audio_resumes_to_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (tmp_path / f"{number}.wav").write_bytes(wave_file(sound(1 + 1.5 * number, number)))
    body = {"response_format": "verbose_json", "temperature": 1.0, "max_completion_tokens": 10}
    rows = [openai_row(str(number), URL, {"file": f"{number % 3}.wav", **body}) for number in range(9)]
    folders = [tmp_path / "whole", tmp_path / "cut"]
    for each in folders:
        each.mkdir()
    whole = answers_of_job(folders[0], speech_folder(), rows, media_root=tmp_path)
    with monkeypatch.context() as patch:
        end_after(patch, 4)
        with pytest.raises(Ended):
            answers_of_job(folders[1], speech_folder(), rows, media_root=tmp_path)
    admit, admitted = SplitRows.admit, []
    monkeypatch.setattr(SplitRows, "admit", lambda self, *given: (admitted.append(given), admit(self, *given))[1])
    assert answers_of_job(folders[1], speech_folder(), rows, media_root=tmp_path) == whole
    assert len(admitted) == 5
