"""Prompts of text, images and recordings: transformers' answers, every door, batch, chunk, cache and layout."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hearing_models import RATE, recording
from jobs_of_rows import answers_of_job, openai_row
from media_answers import (
    CHAT,
    GREEDY,
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
from media_models import noise, saved
from omni_models import VIDEO_FPS, VIDEO_SIZE, Given, omni_folder, text_of, their_answer, written
from safetensors.torch import load_file
from serving import ServedHere
from speech_models import wave_file

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.schema import ModelOptions, PlanConfig, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.image_prompts import ImagePrompts
from spmd_worker.compat.media_keywords import media_values
from spmd_worker.frontends.tools.verify import main as verify
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

ROOMY: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 8, "num_blocks": 128, "max_model_len": 320}
P, Q, R = noise(97, 61, 3), noise(130, 157, 4), noise(97, 61, 5)
A, B, C = recording(20_000, 1), recording(17_001, 2), recording(20_000, 3)
MIXED: dict[str, list[Given]] = {
    "images first": [("image", P), ("audio", A), ("image", Q), ("audio", B)],
    "audio first": [("audio", B), ("audio", A), ("image", Q)],
    "other contents": [("image", R), ("audio", C), ("image", Q), ("audio", B)],
    "images": [("image", Q), ("image", P)],
    "audio": [("audio", recording(9_001, 4))],
    "again": [("audio", A), ("image", P), ("audio", A), ("image", P)],
}
"""The third has the first one's ids with another picture and another recording."""
CLIP = [noise(60, 90, index) for index in range(5)]
VIDEOS: list[list[Given]] = [
    [("video", CLIP)],
    [("audio", B), ("video", CLIP[:3]), ("image", Q), ("video", CLIP), ("audio", A)],
]


def prompt_of(kind: str, media: list[Given]) -> dict[str, Any]:
    data: dict[str, Any] = {name: [given for medium, given in media if medium == name] for name in ("image", "audio")}
    data["video"] = [(np.stack(given), {"fps": VIDEO_FPS}) for medium, given in media if medium == "video"]
    return {"prompt": text_of(kind, media), "multi_modal_data": data}


def prompts(kind: str) -> list[Any]:
    return [*[prompt_of(kind, media) for media in MIXED.values()], {"prompt": "Text alone, behind others."}]


def opened(kind: str, **options: Any) -> LLM:
    videos = {"video_processor": {"size": json.dumps(VIDEO_SIZE["size"])}}
    return LLM(str(omni_folder(kind)), **{**ROOMY, **videos, **options})


@pytest.fixture(scope="module", params=[pytest.param("qwen2_5_omni", marks=pytest.mark.stress), "qwen3_omni"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(kind: str) -> Iterator[LLM]:
    with opened(kind) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm: LLM, kind: str) -> list[Any]:
    return cold_answers(llm, prompts(kind))


@pytest.mark.guarantee("Answers to images and recordings in one prompt are those of transformers")
def test_answers_equal_transformers(kind: str, expected: list[Any]):
    for media, (ids, answer, _) in zip(MIXED.values(), expected, strict=False):
        assert (ids, answer) == their_answer(kind, media, NUM_TOKENS)


@pytest.mark.control("Answers to images and recordings in one prompt are those of transformers")
def test_other_contents_and_orders_give_other_answers(llm: LLM, kind: str, expected: list[Any]):
    assert expected[0][0] == expected[2][0]
    assert expected[0][1] != expected[2][1]
    given = dict(prompt_of(kind, MIXED["images first"]))
    for name in ("image", "audio"):
        data = {**given["multi_modal_data"], name: given["multi_modal_data"][name][::-1]}
        ((_, answer, _),) = answers(llm, [{**given, "multi_modal_data": data}])
        assert answer != expected[0][1], name


@pytest.mark.guarantee("An answer to images and recordings does not depend on its batch, chunks or cache")
def test_batches_and_caches_give_the_same_bits(llm: LLM, kind: str, expected: list[Any]):
    llm.reset_prefix_cache()
    for _ in range(2):
        assert answers(llm, prompts(kind)) == expected


@pytest.mark.control("An answer to images and recordings does not depend on its batch, chunks or cache")
@pytest.mark.stress
def test_comparison_detects_names_without_contents(kind: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch):
    """The third prompt gets the first one's rows and blocks."""
    prepare, names = ImagePrompts.prepare, dict[Any, bytes]()

    def named_by_sizes(images: ImagePrompts, *given: Any) -> tuple[PreparedMedia, ...]:
        found = prepare(images, *given)
        return tuple([replace(each, media_id=names.setdefault(each.content.sizes, each.media_id)) for each in found])

    monkeypatch.setattr(ImagePrompts, "prepare", named_by_sizes)
    with opened(kind) as made:
        found = [answers(made, [each])[0] for each in prompts(kind)[:3]]
    assert found[0] == expected[0] == found[2]
    assert found[2] != expected[2]


@pytest.mark.stress
@pytest.mark.parametrize("chunk", [7, 16])
def test_chunks_give_the_same_bits(kind: str, chunk: int, expected: list[Any]):
    with opened(kind, max_num_batched_tokens=chunk, max_num_seqs=4) as made:
        assert answers(made, prompts(kind)) == expected


def test_dropped_contents_are_made_again(llm: LLM, kind: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch):
    """A call that holds the pixels and features of no prompt that waits."""
    made = noted_again(monkeypatch)
    llm.reset_prefix_cache()
    assert answers(llm, prompts(kind)) == expected
    assert len(made) == 2 * len(MIXED)


@pytest.mark.stress
def test_preempted_prompts_see_and_hear_again(kind: str, expected: list[Any]):
    """Too few blocks for all prompts, and memory for the rows of one."""
    few = {"num_blocks": 32, "max_model_len": 240, "preemption_mode": "recompute", "media_rows_gib": 480 * 128 / 2**30}
    with opened(kind, **few) as made:
        assert answers(made, prompts(kind)) == expected


LAYOUTS = {"tensor": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_layers": [3, 1], "pipeline_parallel_size": 2}}


def main(kind: str, folder: Path, layout: str) -> None:
    with opened(kind, **LAYOUTS[layout]) as made:
        write_answers(made, prompts(kind), folder)


@pytest.mark.stress
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_answer_as_one(kind: str, layout: str, expected: list[Any], tmp_path: Path):
    check_two_ranks(__file__, kind, layout, expected, tmp_path)


@pytest.mark.stress
@pytest.mark.guarantee("A trainer's towers make the next rows", is_control_inside=True)
def test_weights_sleep_change_and_are_saved(kind: str, expected: list[Any], tmp_path: Path):
    files = load_file(omni_folder(kind) / "model.safetensors")
    given = prompts(kind)[:1]
    with opened(kind) as made:
        made.sleep(level=1)
        made.wake_up()
        assert answers(made, given) == expected[:1]
        made.save_checkpoint(tmp_path / "checkpoint")
        kept = load_file(tmp_path / "checkpoint" / "model.safetensors")
        assert {*kept} <= {*files}
        assert all(torch.equal(tensor, files[name]) for name, tensor in kept.items())
        made.llm_engine.model_executor.save_sharded_state(path=tmp_path / "state")
        for part in ("visual.blocks.0.norm1.weight", "audio_tower.layers.0.self_attn_layer_norm.weight"):
            made.start_weight_update(partial=True)
            made.update_weights([(part, files[f"thinker.{part}"] * -2)])
            made.finish_weight_update()
            assert answers(made, given)[0][1] != expected[0][1], part
            made.collective_rpc("reload_weights")
            assert answers(made, given) == expected[:1]
    for folder, options in ((tmp_path / "checkpoint", {}), (tmp_path / "state", {"load_format": "sharded_state"})):
        with LLM(str(folder), **ROOMY, **options) as again:
            assert answers(again, given) == expected[:1]


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


WAVE, PNG = wave_file(A), saved(P)
SOUND, PICTURE = audio_part(WAVE), image_part(data_url(PNG, "image/png"))
BAD: dict[str, list[Any]] = {
    "audio_empty": [PICTURE, audio_part(wave_file(recording(320)))],
    "audio_unreadable": [PICTURE, audio_part(b"junk")],
    "image_unreadable": [SOUND, image_part(data_url(b"junk", "image/png"))],
    "image_missing": [SOUND, {"type": "image"}],
    "audio_missing": [PICTURE, {"type": "audio"}],
    "too_many_audios": [PICTURE, *[SOUND] * 33],
    "too_many_images": [SOUND, *[PICTURE] * 33],
    "video_missing": [PICTURE, {"type": "video_url", "video_url": {"url": "a.mp4"}}],
    "reserved_token": [PICTURE, {"type": "text", "text": "<|AUDIO|>"}],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_files(tmp_path_factory.mktemp("root"), {"a.wav": WAVE, "p.png": PNG})


@pytest.mark.guarantee(
    "Images and recordings of one prompt, one answer: calls, rows and requests", is_control_inside=True
)
def test_doors_of_both_media_give_the_same_answer(root: Path, tmp_path: Path):
    folder, text = omni_folder("qwen2_5_omni"), "".join([written("qwen2_5_omni", each) for each in ("audio", "image")])
    open_parts = conversation({"type": "audio"}, {"type": "image"})
    written_out = f"<user>{text}{TEXT['text']}<answer>"
    rows: list[Any] = [
        openai_row("data", CHAT, body(SOUND, PICTURE)),
        openai_row("paths", CHAT, body({"type": "audio_url", "audio_url": {"url": "a.wav"}}, image_part("p.png"))),
        openai_row("other", CHAT, body(PICTURE, SOUND)),
        {"messages": open_parts, "audios": ["a.wav"], "images": ["p.png"], **SAMPLING},
        {"prompt": written_out, "audios": ["a.wav"], "images": ["p.png"], **SAMPLING},
        *[openai_row(code, CHAT, body(*parts)) for code, parts in BAD.items()],
        {"prompt": written_out, "images": ["p.png"], **SAMPLING},
        {"messages": open_parts, "images": ["p.png"], **SAMPLING},
    ]
    first, second, other, third, fourth, *bad = answers_of_job(tmp_path, folder, rows, media_root=root)
    right = content_of(first["response"]["body"])
    assert content_of(second["response"]["body"]) == right
    for each in (third, fourth):
        assert (each["outputs"][0]["text"], each["usage"]["prompt_tokens"]) == right
    # Negative control: the other order.
    assert content_of(other["response"]["body"])[0] != right[0]
    codes = [each["error"]["code"] for each in bad]
    assert codes == [*BAD, "placeholder_mismatch", "audio_missing"]
    assert verify(["--images", str(tmp_path / "out.jsonl.run")]) == 0
    metrics = json.loads((tmp_path / "out.jsonl.run" / "metrics.json").read_text())
    assert (metrics["images"], metrics["recordings"]) == (5, 5)
    assert metrics["image_tokens"] != metrics["recording_tokens"]
    params = SamplingParams(**SAMPLING)
    with opened("qwen2_5_omni") as made:
        outputs = made.chat(conversation({"type": "audio", "audio": (A_READ, RATE)}, PICTURE), params, use_tqdm=False)
        data = {"image": P, "audio": WAVE}
        outputs += made.generate({"prompt": written_out, "multi_modal_data": data}, params, use_tqdm=False)
        outputs += made.generate({"prompt": written_out, "multi_modal_data": {**data, "video": []}}, params)
    assert [(each.outputs[0].text, len(each.prompt_token_ids or ())) for each in outputs] == [right] * 3
    with ServedHere(model=folder) as server:
        status, served, _ = server.client.ask(CHAT, body(SOUND, PICTURE))
        assert (status, content_of(served)) == (200, right)


def test_answers_about_videos_equal_transformers(llm: LLM, kind: str):
    for media in VIDEOS:
        llm.reset_prefix_cache()
        ((ids, answer, _),) = answers(llm, [prompt_of(kind, media)])
        assert (ids, answer) == their_answer(kind, media, NUM_TOKENS)


def test_sound_of_videos_is_refused_clearly(llm: LLM, kind: str):
    del kind
    asked = {"use_audio_in_video": True}
    words = "mm_processor_kwargs has use_audio_in_video, which is not supported: the sound of videos"
    (refused,) = llm.generate({"prompt": "a", "mm_processor_kwargs": asked}, GREEDY, use_tqdm=False, on_error="row")
    assert words in str(refused.error)
    with pytest.raises(ValueError, match=words):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, mm_processor_kwargs=asked)
    with pytest.raises(ConfigError, match=words):
        media_values({"mm_processor_kwargs": asked})
    assert media_values({"mm_processor_kwargs": {"use_audio_in_video": False}}) == {}


# As the file has it, in 16 bits.
A_READ = torch.frombuffer(bytearray(WAVE[44:]), dtype=torch.int16).float().div(32768).numpy()


def test_plan_has_both_towers():
    model = ModelOptions(path=str(omni_folder("qwen3_omni")), dtype="float32")
    lines = describe_plan(
        make_plan(resolve_run(RunConfig(model=model, plan=PlanConfig(enabled=True)), "cpu"))
    ).splitlines()
    assert any(line.startswith("media ") and "rows of" in line for line in lines)
    assert any(line.startswith("an image ") for line in lines)
    assert "recordings of 2400 s take 31,200 tokens each" in lines


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
