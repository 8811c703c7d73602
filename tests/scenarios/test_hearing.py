"""Recordings in prompts of text: transformers' answers, every door, batch, chunk, cache and layout."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hearing_models import KINDS, RATE, WRITTEN, hearing_folder, original_folder, recording, their_answer
from jobs_of_rows import answers_of_job, openai_row
from media_answers import (
    CHAT,
    NUM_TOKENS,
    SAMPLING,
    TEXT,
    answers,
    audio_part,
    body,
    check_two_ranks,
    cold_answers,
    content_of,
    conversation,
    data_url,
    noted_again,
    with_files,
    write_answers,
)
from serving import ServedHere
from speech_models import wave_file

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.schema import ModelOptions, PlanConfig, RunConfig
from spmd_worker.compat.audio_reading import PendingRecordings
from spmd_worker.frontends.tools.verify import main as verify
from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

ROOMY: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 8, "num_blocks": 96, "max_model_len": 256}
FIRST, SECOND, THIRD = recording(20_000, 1), recording(9_001, 2), recording(20_000, 3)


def text_of(kind: str, num: int) -> str:
    return f"first {WRITTEN[kind]}" + f", then {WRITTEN[kind]}" * (num - 1) + " what?"


def prompt_of(kind: str, *recordings: Any) -> dict[str, Any]:
    return {"prompt": text_of(kind, len(recordings)), "multi_modal_data": {"audio": list(recordings)}}


def prompts(kind: str) -> list[Any]:
    """The third has the first one's ids behind another recording."""
    return [
        prompt_of(kind, FIRST, SECOND),
        {"prompt": "Text alone, between two that hear."},
        prompt_of(kind, THIRD, SECOND),
        prompt_of(kind, SECOND),
        prompt_of(kind, SECOND, SECOND),
    ]


def opened(kind: str, **options: Any) -> LLM:
    return LLM(str(hearing_folder(kind)), **{**ROOMY, **options})


IN_GATE = ("qwen2_audio", "qwen3_asr", "glmasr")
IN_WINDOWS = ("voxtral", "glmasr", "audioflamingo3")


def of_tiers(kinds: Iterable[str]) -> list[Any]:
    return [each if each in IN_GATE else pytest.param(each, marks=pytest.mark.stress) for each in kinds]


@pytest.fixture(scope="module", params=of_tiers(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(kind: str) -> Iterator[LLM]:
    with opened(kind) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm: LLM, kind: str) -> list[Any]:
    return cold_answers(llm, prompts(kind))


@pytest.mark.guarantee("Answers to recordings are those of transformers")
@pytest.mark.parametrize("lengths", [(20_000, 9_001), (32_000,), (31_999, 961), (9_001, 5_000, 12_345)])
def test_answers_equal_transformers(llm: LLM, kind: str, lengths: tuple[int, ...]):
    given = [recording(each, index) for index, each in enumerate(lengths)]
    ((ids, answer, _),) = answers(llm, [prompt_of(kind, *given)])
    assert (ids, answer) == their_answer(kind, text_of(kind, len(given)), given, NUM_TOKENS)


@pytest.mark.parametrize("lengths", [(70_003,), (32_001, 64_000)])
@pytest.mark.parametrize("kind", of_tiers(IN_WINDOWS), indirect=True, scope="module")
def test_windows_answer_as_transformers(llm: LLM, kind: str, lengths: tuple[int, ...]):
    """Recordings longer than the 2 s that these models hear at once."""
    given = [recording(each, index) for index, each in enumerate(lengths)]
    ((ids, answer, _),) = answers(llm, [prompt_of(kind, *given)])
    assert (ids, answer) == their_answer(kind, text_of(kind, len(given)), given, NUM_TOKENS)


@pytest.mark.stress
def test_original_files_give_the_same_answers():
    found = []
    for folder in (hearing_folder("qwen3_asr"), original_folder()):
        with LLM(str(folder), **ROOMY) as made:
            found.append(answers(made, prompts("qwen3_asr")))
    assert found[0] == found[1]


@pytest.mark.control("Answers to recordings are those of transformers")
def test_other_recordings_give_other_answers(expected: list[Any]):
    assert expected[0][0] == expected[2][0]
    assert expected[0][1] != expected[2][1]


@pytest.mark.guarantee("An answer to a recording does not depend on its batch, chunks or cache")
def test_batches_and_caches_give_the_same_bits(llm: LLM, kind: str, expected: list[Any]):
    llm.reset_prefix_cache()
    for _ in range(2):
        assert answers(llm, prompts(kind)) == expected


@pytest.mark.control("An answer to a recording does not depend on its batch, chunks or cache")
def test_comparison_detects_names_without_contents(kind: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch):
    """Recordings of one length have one name, so the third prompt gets the first one's rows and blocks."""
    result = PendingRecordings.result

    def named_by_length(pending: PendingRecordings) -> list[PreparedAudio]:
        return [replace(each, media_id=round(1e6 * each.duration_s).to_bytes(16, "little")) for each in result(pending)]

    monkeypatch.setattr(PendingRecordings, "result", named_by_length)
    with opened(kind) as made:
        found = [answers(made, [each])[0] for each in prompts(kind)]
    assert found[0] == expected[0] == found[2]
    assert found[2] != expected[2]


@pytest.mark.parametrize("chunk", [7, 16])
def test_chunks_give_the_same_bits(kind: str, chunk: int, expected: list[Any]):
    with opened(kind, max_num_batched_tokens=chunk, max_num_seqs=4) as made:
        assert answers(made, prompts(kind)) == expected


def test_dropped_features_are_made_again(llm: LLM, kind: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch):
    """A call that holds the features of no prompt that waits."""
    made = noted_again(monkeypatch)
    llm.reset_prefix_cache()
    assert answers(llm, prompts(kind)) == expected
    # Four prompts hear: each is prepared before the call's first step, and before its own.
    assert len(made) == 8


def test_preempted_prompts_hear_again(kind: str, expected: list[Any]):
    """Too few blocks for all prompts, and memory for the rows of one."""
    few = {"num_blocks": 14, "max_model_len": 112, "preemption_mode": "recompute", "media_rows_gib": 60 * 256 / 2**30}
    with opened(kind, **few) as made:
        assert answers(made, prompts(kind)) == expected


LAYOUTS = {"tensor": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}


def main(kind: str, folder: Path, layout: str) -> None:
    with opened(kind, **LAYOUTS[layout]) as made:
        write_answers(made, prompts(kind), folder)


@pytest.mark.stress
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_answer_as_one(kind: str, layout: str, expected: list[Any], tmp_path: Path):
    check_two_ranks(__file__, kind, layout, expected, tmp_path)


def url_part(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


url_of = partial(data_url, kind="audio/wav")
FILES = [wave_file(each) for each in (FIRST, SECOND)]
PARTS = [audio_part(each) for each in FILES]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
BAD: dict[str, list[Any]] = {
    "audio_too_long": [audio_part(wave_file(recording(32_001)))],
    "audio_empty": [PARTS[0], audio_part(wave_file(recording(320)))],
    "audio_unreadable": [audio_part(b"junk")],
    "audio_missing": [{"type": "audio"}],
    "audio_outside_root": [url_part("/etc/hostname")],
    "too_many_audios": [PARTS[1]] * 33,
    "images_unsupported": [PARTS[0], PICTURE],
    "invalid_value": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
    "reserved_token": [PARTS[0], {"type": "text", "text": "<|AUDIO|>"}],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_files(tmp_path_factory.mktemp("root"), {f"{number}.wav": data for number, data in enumerate(FILES)})


def answers_of_calls(root: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """Text and length of the prompt, of each form of a call, and the words of errors."""
    read = [np.frombuffer(each[44:], "<i2").astype(np.float32) / 32768 for each in FILES]
    conversations = [
        conversation(*PARTS),
        conversation({"type": "audio", "audio": read[0]}, {"type": "audio", "audio": (read[1], RATE)}),
        conversation({"type": "audio", "audio_url": str(root / "0.wav")}, url_part(url_of(FILES[1]))),
    ]
    text = f"<user>{WRITTEN['qwen2_audio'] * 2}{TEXT['text']}<answer>"
    data = [FILES[0], {"array": read[1], "sampling_rate": RATE}]
    params = SamplingParams(**SAMPLING)
    with opened("qwen2_audio", allowed_local_media_path=str(root)) as made:
        outputs = made.chat(conversations, params, use_tqdm=False)
        outputs += made.generate({"prompt": text, "multi_modal_data": {"audio": data}}, params, use_tqdm=False)
        errors = made.chat([conversation(*each) for each in BAD.values()], params, use_tqdm=False, on_error="row")
        errors += made.generate({"prompt": text, "multi_modal_data": {"image": 1}}, params, on_error="row")
    found = [(each.outputs[0].text, len(each.prompt_token_ids or ())) for each in outputs]
    return found, [str(each.error) for each in errors]


@pytest.mark.guarantee("One recording, one answer: calls, rows and requests", is_control_inside=True)
def test_doors_of_recordings_give_the_same_answer(root: Path, tmp_path: Path):
    folder = hearing_folder("qwen2_audio")
    open_parts = conversation({"type": "audio"}, {"type": "audio"})
    rows: list[Any] = [
        openai_row("data", CHAT, body(*PARTS)),
        openai_row("paths", CHAT, body(url_part("0.wav"), url_part(f"file://{root}/1.wav"))),
        openai_row("other", CHAT, body(*PARTS[::-1])),
        {"messages": open_parts, "audios": ["0.wav", url_of(FILES[1])], **SAMPLING},
        *[openai_row(code, CHAT, body(*parts)) for code, parts in BAD.items()],
        {"prompt": "?", "images": ["0.png"]},
        {"prompt": "?", "images": ["0.png"], "audios": ["0.wav"]},
        {"audio": "0.wav", **SAMPLING},
        {"prompt": WRITTEN["qwen2_audio"], "audios": ["0.wav"], "truncate_prompt_tokens": 9},
    ]
    first, second, other, third, *bad = answers_of_job(tmp_path, folder, rows, media_root=root)
    right = content_of(first["response"]["body"])
    assert content_of(second["response"]["body"]) == right
    assert (third["outputs"][0]["text"], third["usage"]["prompt_tokens"]) == right
    # Negative control: the other order.
    assert content_of(other["response"]["body"])[0] != right[0]
    codes = [each["error"]["code"] for each in bad]
    assert codes == [*BAD, *["images_unsupported"] * 2, "audio_unsupported", "conflicting_keys"]
    said = dict(zip([*BAD, "", "", "audio", "cut"], [each["error"]["message"] for each in bad], strict=True))
    assert said["too_many_audios"].startswith("the prompt has 33 recordings")
    assert "give recordings under audios" in said["audio"]
    assert "a recording of this prompt" in said["cut"]
    assert verify(["--images", str(tmp_path / "out.jsonl.run")]) == 0
    metrics = json.loads((tmp_path / "out.jsonl.run" / "metrics.json").read_text())
    assert (metrics["recordings"], metrics["recording_tokens"] > 8, "images" in metrics) == (8, True, False)
    found, words = answers_of_calls(root)
    assert found == [right] * 4
    for word, wanted in zip(words, ("2 s of a recording", "recording 1: the audio has 320 samples"), strict=False):
        assert wanted in word
    assert all(words)
    with ServedHere(model=folder) as server:
        status, served, _ = server.client.ask(CHAT, body(*PARTS))
        assert (status, content_of(served)) == (200, right)
        status, served, _ = server.client.ask(CHAT, body(*BAD["audio_too_long"]))
        assert (status, served["error"]["code"]) == (400, "audio_too_long")
        status, served, _ = server.client.ask("/tokenize", {"messages": conversation(*PARTS)})
        assert (status, "recordings are not counted here" in str(served)) == (400, True)


def test_plan_tells_tokens_of_recordings():
    model = ModelOptions(path=str(hearing_folder("qwen2_audio")), dtype="float32")
    config = RunConfig(model=model, plan=PlanConfig(enabled=True), device="cpu")
    lines = describe_plan(make_plan(resolve_run(config, "cpu"))).splitlines()
    assert "recordings of 2 s take 50 tokens each" in lines


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
