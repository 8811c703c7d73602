"""Audio through every door, calls, rows and requests: the same transcript, and the same codes of what has none."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import openai
import pyarrow
import pyarrow.parquet
import pytest
from jobs_of_rows import answers_of_job, job_config, openai_row, read_rows, run_here
from media_answers import with_files
from serving import KEY, ServedHere
from speech_models import IDS, RATE, WINDOW_S, sound, speech_folder, wave_file

from spmd_worker import LLM, SamplingParams
from spmd_worker.frontends.tools.verify import main as verify
from spmd_worker.media.audio_windows import windows

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
SHORT, LONG = wave_file(sound(1.5, 1)), wave_file(sound(5.3, 2))
MOST = {"max_completion_tokens": 14}
PROMPT = ("<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>")
TOO_LONG = b"x" * ((25 << 20) + 1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {"short.wav": SHORT, "long.wav": LONG, "cut.wav": SHORT[:50], "junk.mp3": b"junk"}
    return with_files(tmp_path_factory.mktemp("root"), files)


def url(data: bytes) -> str:
    return "data:audio/wav;base64," + base64.b64encode(data).decode()


def body_of(answer: dict[str, Any]) -> Any:
    assert answer["error"] is None, answer
    return answer["response"]["body"]


def read_pieces(data: bytes) -> list[Any]:
    """Samples of the windows of a file."""
    import numpy as np

    samples = np.frombuffer(data[44:], "<i2").astype(np.float32) / 32768
    return [each.samples for each in windows(samples, WINDOW_S * RATE)]


@pytest.fixture(scope="module")
def calls() -> dict[str, list[Any]]:
    """Outputs of each window, by file, of `LLM.generate`."""
    params = SamplingParams(temperature=0, max_tokens=14)
    ids = [IDS[each] for each in PROMPT]
    found = {}
    with LLM(str(speech_folder()), dtype="float32", num_blocks=128, device="cpu") as llm:
        for name, data in (("short", SHORT), ("long", LONG)):
            pieces = read_pieces(data)
            prompts = [{"prompt": "".join(PROMPT), "multi_modal_data": {"audio": (each, RATE)}} for each in pieces]
            by_ids = [{"prompt_token_ids": ids, "multi_modal_data": {"audio": each}} for each in pieces]
            explicit = [
                {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": [each]}}, "decoder_prompt": ids}
                for each in pieces
            ]
            outputs = [llm.generate(each, params, use_tqdm=False) for each in (prompts, by_ids, explicit)]
            texts = [[each.outputs[0].token_ids for each in given] for given in outputs]
            assert texts[0] == texts[1] == texts[2]
            assert [each.prompt_token_ids for each in outputs[0]] == [ids] * len(pieces)
            found[name] = outputs[0]
        bad = [
            {"prompt": "", "multi_modal_data": {"audio": LONG}},
            {"prompt": "a"},
            {"prompt": "", "multi_modal_data": {"image": SHORT}},
            {"encoder_prompt": {"prompt": "a", "multi_modal_data": {"audio": SHORT}}},
            {"prompt": "", "multi_modal_data": {"audio": b"junk"}},
        ]
        errors = [each.error or "" for each in llm.generate(bad, params, use_tqdm=False, on_error="row")]
        with pytest.raises(ValueError, match="has no conversations"):
            llm.chat([{"role": "user", "content": "a"}], params, use_tqdm=False)
    for said, wanted in zip(errors, ("as 3 prompts", "reads audio", "audio alone", "must be empty", "not audio")):
        assert wanted in said
    return found


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "audio_missing": (TRANSCRIPTIONS, {"file": "gone.wav"}),
    "audio_outside_root": (TRANSCRIPTIONS, {"file": "/etc/hostname"}),
    "audio_unsupported": (TRANSCRIPTIONS, {"file_url": "https://a/b.wav"}),
    "audio_unreadable": (TRANSCRIPTIONS, {"file": "junk.mp3"}),
    "missing_prompt": (TRANSCRIPTIONS, {"model": "a"}),
    "conflicting_prompts": (TRANSCRIPTIONS, {"file": "short.wav", "file_url": "short.wav"}),
    "unsupported_value": (TRANSCRIPTIONS, {"file": "short.wav", "stream": True}),
    "invalid_value": (TRANSCRIPTIONS, {"file": "short.wav", "language": "klingon"}),
    "unknown_key": (TRANSCRIPTIONS, {"file": "short.wav", "languages": "de"}),
    "encoder_input_missing": ("/v1/completions", {"prompt": "a"}),
    "chat_template_missing": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    "conflicting_keys": (TRANSCRIPTIONS, {"file": "short.wav", "timestamp_granularities": ["segment"]}),
}


@pytest.fixture(scope="module")
def job(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a job, and its answers by custom_id."""
    bodies = {
        "short": {"file": "short.wav", "language": "de"},
        "url": {"file_url": url(SHORT), "language": "German", "model": "any", "response_format": "json"},
        "long": {"file": f"file://{root}/long.wav", "language": "de"},
        "text": {"file": "long.wav", "language": "de", "response_format": "text"},
        "verbose": {"file": "long.wav", "response_format": "verbose_json", "timestamp_granularities": ["segment"]},
        "srt": {"file": "long.wav", "response_format": "srt"},
        "vtt": {"file": "long.wav", "response_format": "vtt", "prompt": "What was said."},
        "sampled": {"file": "long.wav", "language": "de", "temperature": 1.0},
    }
    rows = [openai_row(name, TRANSCRIPTIONS, {**body, **MOST}) for name, body in bodies.items()]
    rows.append(
        openai_row("translated", TRANSLATIONS, {"file": "short.wav", "response_format": "verbose_json", **MOST})
    )
    rows += [openai_row(code, where, body) for code, (where, body) in BAD.items()]
    plain = {"audio": "long.wav", "temperature": 0, "max_tokens": 14}
    rows.append({"custom_id": "plain", **plain, "language": "de"})
    rows.append({"custom_id": "stamped", **plain, "timestamps": True, "n": 2, "logprobs": 0})
    rows.append({"custom_id": "given", **plain, "audio": {"path": "short.wav"}, "decoder_prompt": "".join(PROMPT)})
    folder = tmp_path_factory.mktemp("job")
    answers = answers_of_job(folder, speech_folder(), rows, media_root=root)
    return folder, {each["custom_id"]: each for each in answers}


@pytest.mark.guarantee("One recording, one transcript: calls, rows and requests", is_control_inside=True)
def test_rows_of_audio_have_the_texts_of_calls(job: tuple[Path, dict[str, Any]], calls: dict[str, list[Any]]) -> None:
    answers = job[1]
    texts = {name: "".join([each.outputs[0].text for each in found]) for name, found in calls.items()}
    assert len(calls["long"]) == 3
    words = {name: re.sub(r"<\|[0-9.]+\|>", "", text) for name, text in texts.items()}
    usage = {"type": "duration", "seconds": 2}
    assert body_of(answers["short"]) == body_of(answers["url"]) == {"text": words["short"], "usage": usage}
    assert body_of(answers["long"]) == {"text": words["long"], "usage": {**usage, "seconds": 6}}
    assert body_of(answers["text"]) == words["long"] + "\n"
    assert body_of(answers["sampled"])["text"] != words["long"]
    plain = answers["plain"]["outputs"][0]
    assert plain["text"] == texts["long"]
    assert plain["token_ids"] == [token_id for each in calls["long"] for token_id in each.outputs[0].token_ids]
    assert (plain["language"], answers["plain"]["duration"]) == ("german", 5.3)
    assert answers["plain"]["usage"] == {"prompt_tokens": 12, "completion_tokens": len(plain["token_ids"])}
    assert answers["given"]["outputs"][0]["text"] == texts["short"]
    # Negative control: the calls of the other file.
    assert words["short"] != words["long"][: len(words["short"])]


def test_segments_are_those_of_all_windows(job: tuple[Path, dict[str, Any]]) -> None:
    answers = job[1]
    verbose = body_of(answers["verbose"])
    segments = verbose["segments"]
    assert "".join([each["text"] for each in segments]).strip() == verbose["text"]
    assert len({each["seek"] for each in segments}) == 3
    starts = [each["start"] for each in segments]
    assert starts == sorted(starts)
    assert all(each["start"] <= each["end"] <= 5.3 for each in segments)
    assert all(-20 < each["avg_logprob"] < 0 for each in segments)
    assert verbose["language"] in ("english", "german", "french")
    assert (verbose["duration"], verbose["usage"]["seconds"]) == (5.3, 6)
    for name, arrow in (("srt", ","), ("vtt", ".")):
        times = re.findall(rf"(\d\d:\d\d:\d\d\{arrow}\d\d\d) --> ", body_of(answers[name]))
        assert len(times) >= 3
        assert times == sorted(times)
    assert len(re.findall(" --> ", body_of(answers["srt"]))) == len(segments)
    assert (body_of(answers["translated"])["task"], body_of(answers["translated"])["language"]) == (
        "translate",
        "english",
    )
    stamped = answers["stamped"]["outputs"]
    assert [each["segments"] for each in stamped] == [
        [{key: part[key] for key in ("start", "end", "text")} for part in segments]
    ] * 2
    assert len(stamped[0]["logprobs"]) == len(stamped[0]["token_ids"])


def test_bad_audio_has_one_code_at_rows(job: tuple[Path, dict[str, Any]]) -> None:
    errors = {code: job[1][code]["error"] for code in BAD}
    assert {code: each["code"] for code, each in errors.items()} == {code: code for code in BAD}
    for code in ("audio_missing", "audio_outside_root", "audio_unsupported", "audio_unreadable"):
        (key,) = BAD[code][1]
        assert errors[code]["message"].startswith(f"{key}: "), "regression: it named the file alone"


def test_manifest_and_verification_know_audio(job: tuple[Path, dict[str, Any]], root: Path) -> None:
    run_dir = job[0] / "out.jsonl.run"
    answers = json.loads((run_dir / "provenance.json").read_text())
    assert answers["images"]["rows"] == 12
    assert {"audio processor", "files of the audio processor", "job.media_root", "version of numpy"} <= set(
        answers["answers"]
    )
    assert verify(["--images", str(run_dir)]) == 0
    try:
        (root / "short.wav").write_bytes(SHORT + b"\0")
        assert verify(["--images", str(run_dir)]) == 1
    finally:
        (root / "short.wav").write_bytes(SHORT)


def test_server_answers_the_client_of_openai(job: tuple[Path, dict[str, Any]], root: Path) -> None:
    answers = job[1]
    with ServedHere(model=speech_folder(), max_num_seqs=2, max_queued=0) as server:
        base = f"http://127.0.0.1:{server.client.port}/v1"
        audio = openai.OpenAI(api_key=KEY, base_url=base, max_retries=0).audio
        more: dict[str, Any] = {"model": "m", "extra_body": MOST}
        found = audio.transcriptions.create(file=("a.wav", SHORT), language="de", **more)
        assert found.to_dict() == body_of(answers["short"])
        named = {**more, "extra_body": {**MOST, "request_id": "run-7", "priority": 0}}
        found = audio.transcriptions.create(file=("a.wav", SHORT), language="de", **named)
        assert (found.to_dict(), found._request_id) == (body_of(answers["short"]), "run-7")
        # Three windows where two sequences have room.
        with (root / "long.wav").open("rb") as file:
            timed = audio.transcriptions.create(
                file=file, response_format="verbose_json", timestamp_granularities=["segment"], **more
            )
        assert timed.to_dict() == body_of(answers["verbose"])
        text = audio.transcriptions.create(file=("a.wav", LONG), response_format="srt", **more)
        assert text == body_of(answers["srt"])
        text = audio.transcriptions.create(file=("a.wav", LONG), response_format="vtt", prompt="What was said.", **more)
        assert text == body_of(answers["vtt"])
        english = audio.translations.create(file=("a.wav", SHORT), response_format="verbose_json", **more)
        assert english.to_dict() == body_of(answers["translated"])
        sampled = [audio.transcriptions.create(file=("a.wav", LONG), temperature=1.0, **more).text for _ in range(2)]
        assert sampled[0] == sampled[1]
        for code, file in (
            ("audio_unreadable", b"junk"),
            ("audio_unreadable", SHORT[:50]),
            ("audio_too_large", TOO_LONG),
        ):
            with pytest.raises(openai.BadRequestError) as raised:
                audio.transcriptions.create(file=("a.wav", file), **more)
            assert raised.value.code == code
        with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
            audio.transcriptions.create(file=("a.wav", SHORT), stream=True, **more)
        by_json = server.client.ask(TRANSCRIPTIONS, {"file": url(SHORT), "language": "de", **MOST})
        assert by_json[:2] == (200, body_of(answers["short"]))
        # Another request's images or audio fill the server.
        server.exchange.reserve(0, 1)
        server.exchange.max_media_bytes = 1
        assert server.client.ask(TRANSCRIPTIONS, {"file": url(SHORT), **MOST})[0] == 429
        server.exchange.free(0, 1)
        assert server.client.ask(TRANSCRIPTIONS, b"--b", {"content-type": "multipart/form-data; boundary=b"})[0] == 400
        assert server.client.metric("spmd_worker_serve_sequences") == 0
        assert server.exchange.num_media_bytes == 0


def test_parquet_audio_is_read_without_base64(root: Path, tmp_path: Path, job: tuple[Path, dict[str, Any]]) -> None:
    """Columns as datasets has them."""
    struct = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    values = [{"bytes": LONG, "path": "a.wav"}, {"bytes": None, "path": "long.wav"}]
    columns = {"audio": pyarrow.array(values, struct), "language": ["de", "de"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    files = {"input": str(tmp_path / "rows.parquet"), "media_root": str(root)}
    sampling = {"temperature": 0.0, "max_tokens": 14}
    options = {"dtype": "float32"}
    run_here(job_config(tmp_path, speech_folder(), num_blocks=128, options=options, sampling=sampling, **files))
    lines = read_rows(tmp_path)
    assert [each["outputs"] for each in lines] == [job[1]["plain"]["outputs"]] * 2
