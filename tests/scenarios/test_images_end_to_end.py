"""Pictures from a prompt or a row to an answer: transformers' tokens, in calls and in jobs."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_doors import WRITTEN
from image_run_models import image_model_folder, their_ids
from media_models import noise, saved
from PIL import Image

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.schema import (
    CacheConfig,
    JobConfig,
    ModelOptions,
    RunConfig,
    SamplingConfig,
    SchedulerConfig,
)
from spmd_worker.engine.calls import call_runner
from spmd_worker.engine.data_parallel import prompts
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.frontends.batch.row_runner import RowRunner
from spmd_worker.frontends.tools.report import main as report
from spmd_worker.frontends.tools.verify import main as verify
from spmd_worker.llm_engine import LLMEngine
from spmd_worker.media.errors import MediaError
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.worker.runner.media_store import MediaStore

WIDE, HIGH = noise(64, 96), noise(128, 64, seed=1)
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, prompt_logprobs=0)
TEXT = f"see {WRITTEN} and {WRITTEN}"
CHAT = f"<user>{WRITTEN}what?<answer>"


@pytest.fixture(scope="module")
def llm() -> Any:
    options: dict[str, Any] = {"num_blocks": 60, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    with LLM(str(image_model_folder()), dtype="float32", device="cpu", **options) as made:
        yield made


def answer_of(llm: LLM, prompt: dict[str, Any]) -> Any:
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    return output


def with_images(*images: Any, **prompt: Any) -> dict[str, Any]:
    return {**prompt, "multi_modal_data": {"image": list(images)}}


@pytest.mark.guarantee("Answers to images are those of transformers")
def test_generated_ids_equal_transformers(llm: LLM):
    output = answer_of(llm, with_images(WIDE, HIGH, prompt=TEXT))
    assert llm.llm_engine.limits.images is not None
    images = llm.llm_engine.limits.images.prepare([WIDE, HIGH])
    assert output.outputs[0].token_ids == their_ids(output.prompt_token_ids, images, NUM_TOKENS)
    # The first token, and those of the images.
    assert output.prompt_logprobs.count(None) == 1 + 6 + 8
    (scores,) = llm.score_tokens([with_images(WIDE, HIGH, prompt=TEXT)], [output.outputs[0].token_ids])
    assert scores == [
        position[token].logprob for token, position in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)
    ]


@pytest.mark.control("Answers to images are those of transformers")
def test_other_images_give_other_answers(llm: LLM):
    """Behind the same ids, the first of them in the prefix cache."""
    first, other = (answer_of(llm, with_images(*each, prompt=TEXT)) for each in ((WIDE, WIDE), (WIDE, WIDE[::-1])))
    assert first.prompt_token_ids == other.prompt_token_ids
    assert first.outputs[0].token_ids != other.outputs[0].token_ids


def test_conversation_is_its_rendered_prompt(llm: LLM):
    part = {"type": "image_pil", "image_pil": Image.fromarray(WIDE)}
    talk = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
    chat, plain = llm.chat(talk, GREEDY, use_tqdm=False)[0], answer_of(llm, with_images(WIDE, prompt=CHAT))
    assert (chat.prompt, chat.prompt_token_ids) == (CHAT, plain.prompt_token_ids)
    assert chat.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.fixture
def small_window(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Calls hold the pixels of one image; bytes that the worker holds in each step."""
    seen: list[int] = []
    for module in (call_runner, prompts):
        monkeypatch.setattr(module, "half_window_bytes", lambda gib: WIDE.nbytes)
    apply = MediaStore.apply

    def noted(store: MediaStore, *args: Any) -> None:
        seen.append(store.num_held_bytes)
        apply(store, *args)

    monkeypatch.setattr(MediaStore, "apply", noted)
    yield seen
    assert not llm.llm_engine.has_unfinished_requests()


PICTURES = [WIDE, HIGH, noise(64, 96, seed=2), noise(64, 96, seed=3)]


def test_calls_hold_a_window_of_pixels(llm: LLM, small_window: list[int], monkeypatch: pytest.MonkeyPatch):
    given: list[Any] = [with_images(each, prompt=CHAT) for each in PICTURES]
    given.insert(2, {"prompt": "plain"})

    def ids() -> list[Any]:
        return [each.outputs[0].token_ids for each in llm.generate(given, GREEDY, use_tqdm=False)]

    found = ids()
    assert max(small_window) == max(each.nbytes for each in PICTURES)
    for module in (call_runner, prompts):
        monkeypatch.setattr(module, "half_window_bytes", lambda gib: 1e9)
    small_window.clear()
    assert ids() == found
    assert max(small_window) == sum(each.nbytes for each in PICTURES)


def test_image_changed_during_a_call_ends_it(llm: LLM, small_window: list[int], monkeypatch: pytest.MonkeyPatch):
    pictures = [np.copy(each) for each in PICTURES]
    run_step = LLMEngine.run_step

    def changing(engine: LLMEngine) -> Any:
        pictures[-1][:] = 0
        return run_step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(LLMEngine, "run_step", changing)
        with pytest.raises(MediaError, match="image 0 changed while the call ran"):
            llm.generate([with_images(each, prompt=CHAT) for each in pictures], GREEDY, use_tqdm=False)
    assert answer_of(llm, with_images(WIDE, prompt=CHAT)).outputs


def run_images(folder: Path, rows: list[Any], output: str, max_num_seqs: int = 4) -> tuple[bytes, dict[str, Any]]:
    """Output and provenance of a job."""
    (folder / "rows.jsonl").write_text("".join([json.dumps(row) + "\n" for row in rows]))
    config = RunConfig(
        model=ModelOptions(path=str(image_model_folder()), dtype="float32", max_model_len=128),
        cache=CacheConfig(num_blocks=60),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        sampling=SamplingConfig(temperature=0, max_tokens=NUM_TOKENS),
        job=JobConfig(
            input=str(folder / "rows.jsonl"),
            output=str(folder / output),
            media_root=str(folder / "images"),
            commit_rows=1,
        ),
        device="cpu",
    )
    run_job(config, RankEnvironment())
    provenance = json.loads((folder / f"{output}.run" / "provenance.json").read_text())
    return (folder / output).read_bytes(), provenance


@pytest.mark.stress
def test_rows_of_a_job_have_the_answers_of_calls(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "images"
    folder.mkdir()
    for name, pixels in (("wide.png", WIDE), ("high.png", HIGH)):
        (folder / name).write_bytes(saved(pixels))
    url = "data:image/png;base64," + base64.b64encode(saved(WIDE)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    rows = [
        {"prompt": TEXT, "images": ["wide.png", "high.png"]},
        {"messages": [{"role": "user", "content": content}]},
        {"prompt": WRITTEN, "images": ["gone.png"]},
        {"prompt": "plain"},
    ]
    expected = [
        answer_of(llm, with_images(WIDE, HIGH, prompt=TEXT)).outputs[0].token_ids,
        answer_of(llm, with_images(WIDE, prompt=CHAT)).outputs[0].token_ids,
        None,
        answer_of(llm, {"prompt": "plain"}).outputs[0].token_ids,
    ]
    output, provenance = run_images(tmp_path, rows, "whole.jsonl")
    answers = [json.loads(line) for line in output.splitlines()]
    assert [each["outputs"][0]["token_ids"] if not each["error"] else None for each in answers] == expected
    assert answers[2]["error"]["code"] == "image_missing"
    assert [each["usage"]["prompt_tokens"] for each in answers if not each["error"]] == [27, 27, 5]
    assert provenance["images"]["rows"] == 2
    metrics = json.loads((tmp_path / "whole.jsonl.run" / "metrics.json").read_text())
    assert (metrics["images"], metrics["media_wait_s"] > 0) == (3, True)
    assert report([str(tmp_path / "whole.jsonl.run")]) == 0
    assert re.search(r"waiting for images.*3 images, .* in towers", capsys.readouterr().out)
    # A job that failed and is started again has the same bytes, and the digest of images of both starts.
    with monkeypatch.context() as patch:
        step, seen = RowRunner.step, []

        def fail_later(runner: RowRunner) -> Any:
            answered = step(runner)
            seen.extend(answered)
            if len(seen) > 1:
                raise MemoryError("no more")
            return answered

        patch.setattr(RowRunner, "step", fail_later)
        with pytest.raises(MemoryError):
            run_images(tmp_path, rows, "cut.jsonl", max_num_seqs=1)
    again = run_images(tmp_path, rows, "cut.jsonl")
    assert (again[0], again[1]["images"]) == (output, provenance["images"])
    assert verify(["--images", str(tmp_path / "cut.jsonl.run")]) == 0
