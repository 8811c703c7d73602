"""Pictures from a prompt or a row to an answer: transformers' tokens, in calls and in jobs."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cut_jobs import Ended, end_after
from hostile_images import CASES, scan_bomb
from image_doors import WRITTEN
from image_run_models import image_model_folder, their_ids
from jobs_of_rows import job_config, run_here, write_rows
from media_models import noise, saved
from PIL import Image

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.schema import (
    SchedulerConfig,
)
from spmd_worker.engine.calls import call_runner
from spmd_worker.engine.data_parallel import prompts
from spmd_worker.frontends.batch.row_runner import RowRunner
from spmd_worker.frontends.tools.report import main as report
from spmd_worker.frontends.tools.verify import main as verify
from spmd_worker.llm_engine import LLMEngine
from spmd_worker.media.errors import MediaError
from spmd_worker.worker.runner.media_store import MediaStore

WIDE, HIGH = noise(64, 96), noise(128, 64, seed=1)
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, prompt_logprobs=0)
TEXT = f"see {WRITTEN} and {WRITTEN}"
ENDLESS = "JPEG of 20,000 scans"
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


def write_images(folder: Path) -> Path:
    """Folder of the images of `run_images`."""
    images = folder / "images"
    images.mkdir()
    for name, pixels in (("wide.png", WIDE), ("high.png", HIGH)):
        (images / name).write_bytes(saved(pixels))
    return images


def run_images(folder: Path, rows: list[Any], output: str, max_num_seqs: int = 4) -> tuple[bytes, dict[str, Any]]:
    """Output and provenance of a job."""
    write_rows(folder, rows)
    config = job_config(
        folder,
        image_model_folder(),
        num_blocks=60,
        options={"dtype": "float32", "max_model_len": 128},
        sampling={"temperature": 0, "max_tokens": NUM_TOKENS},
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        output=str(folder / output),
        media_root=str(folder / "images"),
        commit_rows=1,
    )
    run_here(config)
    provenance = json.loads((folder / f"{output}.run" / "provenance.json").read_text())
    return (folder / output).read_bytes(), provenance


@pytest.mark.stress
def test_rows_of_a_job_have_the_answers_of_calls(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_images(tmp_path)
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


@pytest.mark.matrix
def test_cut_job_of_images_resumes_to_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its digest of images is that of the images of both starts."""
    write_images(tmp_path)
    names = [["wide.png", "high.png"], ["high.png"], ["gone.png"], [], ["wide.png"], ["high.png", "wide.png"]]
    rows = [{"prompt": " and ".join([WRITTEN] * len(each)) + "what?", "images": each} for each in names]
    rows[3].pop("images")
    whole, provenance = run_images(tmp_path, rows, "whole.jsonl")
    with monkeypatch.context() as patch:
        end_after(patch, 3)
        with pytest.raises(Ended):
            run_images(tmp_path, rows, "cut.jsonl", max_num_seqs=1)
    admit, admitted = RowRunner.admit, []
    monkeypatch.setattr(RowRunner, "admit", lambda self, *given: (admitted.append(given), admit(self, *given))[1])
    again, of_both = run_images(tmp_path, rows, "cut.jsonl")
    assert (again, of_both["images"]) == (whole, provenance["images"])
    assert len(admitted) == 3
    assert verify(["--images", str(tmp_path / "cut.jsonl.run")]) == 0


@pytest.mark.stress
def test_hostile_images_leave_the_rows_between(tmp_path: Path):
    """Each is an error row with its reason, one of them ended by the limit of computing; sound files of unusual kinds
    are answered, and rows between have the answers that they have without the others.
    """
    folder = write_images(tmp_path)
    cases = {**CASES, ENDLESS: (scan_bomb, "image_unreadable")}
    rows: list[Any] = []
    for number, (make, _) in enumerate(cases.values()):
        data, image = make(), f"{number}.bin"
        (folder / image).write_bytes(data)
        if number % 2 and len(data) < 1 << 20:
            image = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        good = {"images": ["wide.png"]} if number % 3 else {}
        rows.append({"prompt": CHAT, "images": [image]})
        rows.append({"prompt": f"{WRITTEN if good else ''}what is {number}?", **good})
    answers = [json.loads(line) for line in run_images(tmp_path, rows, "all.jsonl")[0].splitlines()]
    assert [each["index"] for each in answers] == list(range(2 * len(cases)))
    codes = {name: expected if isinstance(expected, str) else None for name, (_, expected) in cases.items()}
    hostile = dict(zip(cases, answers[::2], strict=True))
    assert {name: each["error"] and each["error"]["code"] for name, each in hostile.items()} == codes
    assert len([code for code in codes.values() if code]) > 60
    messages = {name: each["error"]["message"] for name, each in hostile.items() if each["error"]}
    assert all(re.match("image 0: .{9}", message) for message in messages.values())
    assert [name for name, message in messages.items() if "decoding was ended" in message] == [ENDLESS]
    alone = [json.loads(line) for line in run_images(tmp_path, rows[1::2], "good.jsonl")[0].splitlines()]
    assert [each["outputs"] for each in answers[1::2]] == [each["outputs"] for each in alone]
    assert all(len(each["outputs"][0]["token_ids"]) == NUM_TOKENS for each in alone)
