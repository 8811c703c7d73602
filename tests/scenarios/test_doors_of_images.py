"""Images through every door, calls, rows and requests: the same answer, and the same codes of what has none."""

import base64
import sys
from pathlib import Path
from typing import Any

import pytest
from image_models import PICTURES, image_folder
from jobs_of_rows import answers_of_job, openai_row
from media_answers import content_of, with_files
from media_models import saved
from PIL import Image
from serving import ServedHere
from waiting import wait_until

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.schema import ModelOptions, PlanConfig, RunConfig
from spmd_worker.frontends.serve import engine_loop
from spmd_worker.media.placeholders import PLACEHOLDERS
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

CHAT = "/v1/chat/completions"
SAMPLING: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
FILES = [saved(each) for each in PICTURES]
URLS = ["data:image/png;base64," + base64.b64encode(each).decode() for each in FILES]
TEXT = {"type": "text", "text": "\nWhat is it?"}


def url_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def conversation(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, TEXT]}]


def body(*urls: str) -> dict[str, Any]:
    return {"messages": conversation(*map(url_part, urls)), **SAMPLING}


BAD = {
    "image_unreadable": [URLS[0], "data:image/png;base64," + base64.b64encode(FILES[0][:200]).decode()],
    "too_many_images": [URLS[0]] * 33,
    "image_outside_root": ["/etc/hostname"],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_files(tmp_path_factory.mktemp("root"), {f"{number}.png": data for number, data in enumerate(FILES)})


def answers_of_calls(root: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """Text and length of the prompt, of each form of a call, and the words of errors."""
    conversations = [
        conversation(*map(url_part, URLS)),
        conversation(url_part(URLS[0]), {"type": "image_pil", "image_pil": Image.fromarray(PICTURES[1])}),
        conversation({"type": "image", "image": PICTURES[0]}, url_part(str(root / "1.png"))),
    ]
    bad = [conversation(*map(url_part, urls)) for urls in BAD.values()]
    text = f"<user>{PLACEHOLDERS['qwen3_vl'].written * 2}{TEXT['text']}<answer>"
    params, options = SamplingParams(**SAMPLING), {"device": "cpu", "allowed_local_media_path": str(root)}
    with LLM(str(image_folder("qwen3_vl")), dtype="float32", num_blocks=128, **options) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
        outputs += llm.generate([{"prompt": text, "multi_modal_data": {"image": FILES}}], params, use_tqdm=False)
        errors = llm.chat(bad, params, use_tqdm=False, on_error="row")
    found = [(each.outputs[0].text, len(each.prompt_token_ids or ())) for each in outputs]
    return found, [str(each.error) for each in errors]


def answers_of_server() -> tuple[tuple[str, int], list[tuple[int, str]]]:
    """Text and length of the prompt; status and code of each error. An idle server, which steps rarely, holds no
    pixels of the last request.
    """
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(engine_loop, "max_step_interval_s", lambda timeout_s: 1e6)
        return ask_server()


def ask_server() -> tuple[tuple[str, int], list[tuple[int, str]]]:
    with ServedHere(model=image_folder("qwen3_vl")) as server:
        media = server.engine.executor.driver_worker.model_runner.media
        status, served, _ = server.client.ask(CHAT, body(*URLS))
        assert status == 200, served
        server.exchange.reserve(0, 1)
        server.exchange.max_media_bytes = 1
        assert server.client.ask(CHAT, body(*URLS))[0] == 429
        server.exchange.free(0, 1)
        assert server.client.ask(CHAT, body(*URLS))[0] == 200
        refused = [server.client.ask(CHAT, body(*urls))[:2] for urls in BAD.values()]
        wait_until(lambda: media.num_held_bytes == 0)
    return content_of(served), [(status, answer["error"]["code"]) for status, answer in refused]


@pytest.mark.guarantee("One image, one answer: calls, rows and requests", is_control_inside=True)
def test_doors_of_images_give_the_same_answer(root: Path, tmp_path: Path):
    rows: list[Any] = [
        openai_row("urls", CHAT, body(*URLS)),
        openai_row("paths", CHAT, body("0.png", f"file://{root}/1.png")),
        openai_row("other", CHAT, body(URLS[1], URLS[0])),
        {"messages": conversation({"type": "image"}, {"type": "image"}), "images": ["0.png", URLS[1]], **SAMPLING},
        *[openai_row(code, CHAT, body(*urls)) for code, urls in BAD.items()],
    ]
    first, second, other, third, *bad = answers_of_job(tmp_path, image_folder("qwen3_vl"), rows, media_root=root)
    right = content_of(first["response"]["body"])
    assert content_of(second["response"]["body"]) == right
    assert (third["outputs"][0]["text"], third["usage"]["prompt_tokens"]) == right
    # Negative control: the other order.
    assert content_of(other["response"]["body"])[0] != right[0]
    assert [each["error"]["code"] for each in bad] == list(BAD)
    answers, words = answers_of_calls(root)
    assert answers == [right] * 4
    for said, wanted in zip(words, ("image 1: the image cannot be decoded", "33 images", "is outside of"), strict=True):
        assert wanted in said
    assert answers_of_server() == (right, [(400, code) for code in BAD])


def lines_of_plan(**options: Any) -> list[str]:
    """Those of a plan that are about images."""
    model = ModelOptions(path=str(image_folder("qwen3_vl")), dtype="float32", **options)
    config = RunConfig(model=model, plan=PlanConfig(enabled=True), device="cpu")
    lines = describe_plan(make_plan(resolve_run(config, "cpu"))).splitlines()
    return [line for line in lines if line.startswith(("images", "an image"))]


def test_plan_tells_tokens_and_patches_of_images(monkeypatch: pytest.MonkeyPatch):
    """The plan has the folder's sizes, or those of the family, and says nothing without Pillow."""
    kept = "images     rows of 4,096 tokens are kept (cache.media_rows_gib), 2.0 MiB of a rank's weights"
    assert lines_of_plan() == [
        kept,
        "an image   54 tokens and 216 patches for 640 x 480 pixels, 60 tokens and 240 patches for 1920 x 1080 pixels; "
        "limits.max_image_tokens is 4,096",
    ]
    assert lines_of_plan(image_max_pixels=16_777_216) == [
        kept,
        "an image   300 tokens and 1,200 patches for 640 x 480 pixels, 2,040 tokens and 8,160 patches for 1920 x 1080 "
        "pixels; limits.max_image_tokens is 4,096",
    ]
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert lines_of_plan() == [kept]
