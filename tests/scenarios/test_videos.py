"""Videos through whole tiny models: transformers' answers, and the same bits in every batch, chunk, cache and layout;
calls, rows and requests.
"""

import base64
import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
from content_templates import SMOLVLM
from image_models import image_folder, media_kind, tokenizer_of_images
from jobs_of_rows import answers_of_job, openai_row
from media_models import noise, saved
from serving import ServedHere
from video_models import NUM_TOKENS, VIDEO_KINDS, Media, Video, prompt_of_media, their_video_answer, video

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.schema import ModelOptions, PlanConfig, RunConfig
from spmd_worker.frontends.tools.verify_images import compare_images
from spmd_worker.media.placeholders import PLACEHOLDERS
from spmd_worker.replica.scheduler import allocator
from spmd_worker.replica.scheduler.planner import Planner
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan
from spmd_worker.worker.runner import image_layout

ROOMY: dict[str, Any] = {"device": "cpu", "block_size": 8, "num_blocks": 160, "max_model_len": 320, "max_num_seqs": 6}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=1, ignore_eos=True)
CLIP = video(4, 90, 130, 0)
MEDIAS: list[Media] = [
    [CLIP],
    [noise(97, 61, 3), video(3, 60, 90, 7), noise(40, 80, 9)],
    # More pairs of frames than lines or columns, and slow.
    [video(6, 60, 60, 1), CLIP, video(7, 60, 60, 1, fps=3.0)],
    # As the first one, of other frames, and of other times.
    [video(4, 90, 130, 50)],
    [Video(CLIP.frames, fps=1.5)],
    [CLIP, CLIP],
]


def opened(kind: str, **options: Any) -> LLM:
    # Texts around frames are long in bytes.
    longer = {"num_blocks": 700, "max_model_len": 1400} if kind == "smolvlm" else {}
    return LLM(str(image_folder(kind)), **{"dtype": "float32", **ROOMY, **longer, **options})


def answers(
    kind: str, llm: LLM, medias: list[Media], params: SamplingParams = GREEDY
) -> list[tuple[list[int], list[int], list[float]]]:
    """Ids of prompts, of answers, and their log-probabilities."""
    found = []
    for each in llm.generate([prompt_of_media(kind, media) for media in medias], params, use_tqdm=False):
        (one,) = each.outputs
        logprobs = [step[token].logprob for step, token in zip(one.logprobs or [], one.token_ids, strict=True)]
        found.append((list(each.prompt_token_ids or ()), list(one.token_ids), logprobs))
    return found


@pytest.fixture(scope="module")
def models() -> Iterator[Any]:
    made: dict[str, Any] = {}

    def model(kind: str) -> tuple[LLM, list[Any]]:
        if kind not in made:
            llm, alone = opened(kind), []
            for media in MEDIAS:
                llm.reset_prefix_cache()
                alone += answers(kind, llm, [media])
            made[kind] = llm, alone
        return made[kind]

    yield model
    for llm, _ in made.values():
        llm.llm_engine.scheduler.check_integrity()
        llm.close()


def distance(theirs: tuple[list[int], list[int], list[float]], ours: tuple[list[int], list[int], list[float]]) -> float:
    """The largest difference of log-probabilities; infinite if ids differ."""
    if theirs[:2] != ours[:2]:
        return float("inf")
    return max([abs(first - second) for first, second in zip(theirs[2], ours[2], strict=True)])


@pytest.mark.gate("qwen2_5_vl", "qwen3_vl", "glm4v")
@pytest.mark.guarantee("Answers about videos are those of transformers")
@pytest.mark.parametrize("kind", VIDEO_KINDS)
def test_greedy_ids_are_those_of_transformers(kind: str, models: Any):
    _, alone = models(kind)
    for number in (1, 2, 4):
        assert distance(their_video_answer(kind, MEDIAS[number]), alone[number]) < 1e-4, number


@pytest.mark.control("Answers about videos are those of transformers")
def test_comparison_detects_another_video(models: Any, monkeypatch: pytest.MonkeyPatch):
    """Frames, times, and positions of an image."""
    kind = "qwen2_5_vl"
    llm, alone = models(kind)
    theirs = their_video_answer(kind, MEDIAS[0])
    assert [distance(theirs, alone[number]) > 0.001 for number in (3, 4)] == [True, True]
    positions = image_layout.rope_positions
    monkeypatch.setattr(
        image_layout, "rope_positions", lambda media, first, count: positions((), first, count) if media else None
    )
    llm.reset_prefix_cache()
    assert distance(theirs, answers(kind, llm, MEDIAS[:1])[0]) > 0.001
    llm.reset_prefix_cache()


@pytest.mark.gate("qwen2_5_vl")
@pytest.mark.guarantee("answers about videos are the same in every batch, chunk and cache")
@pytest.mark.parametrize("kind", VIDEO_KINDS)
def test_batched_and_warm_prompts_have_the_bits_of_alone(kind: str, models: Any):
    llm, alone = models(kind)
    counters = llm.llm_engine.counters
    llm.reset_prefix_cache()
    assert answers(kind, llm, MEDIAS) == alone
    before = counters.num_cached_prompt_tokens
    assert answers(kind, llm, MEDIAS[::-1]) == alone[::-1]
    assert counters.num_cached_prompt_tokens - before > sum([len(each[0]) for each in alone]) // 2
    # One set of ids, three answers.
    same = [alone[0], alone[3], *([alone[4]] if kind.startswith("qwen2") else [])]
    assert len({tuple(each[0]) for each in same}) == 1
    assert len({tuple(each[2]) for each in same}) == (2 if kind == "qwen2_vl" else len(same))


@pytest.mark.gate("qwen2_5_vl")
@pytest.mark.guarantee("answers about videos are the same in every batch, chunk and cache")
@pytest.mark.parametrize("kind", VIDEO_KINDS)
def test_prompt_cut_anywhere_has_one_answer(kind: str, models: Any, monkeypatch: pytest.MonkeyPatch):
    llm, alone = models(kind)
    num_tokens = len(alone[0][0])

    def budget(planner: Planner) -> int:
        return num_tokens if sum([each.num_computed_tokens for each in planner._queues.running]) else cut

    monkeypatch.setattr(Planner, "_token_budget", budget)
    for cut in range(9, num_tokens, 13):
        llm.reset_prefix_cache()
        assert answers(kind, llm, MEDIAS[:1]) == alone[:1], cut


@pytest.mark.control("answers about videos are the same in every batch, chunk and cache")
def test_names_without_frames_give_the_first_answer(models: Any, monkeypatch: pytest.MonkeyPatch):
    """Blocks named by ids alone: of other frames, and of the same at other times."""
    kind = "qwen2_5_vl"
    llm, alone = models(kind)
    llm.reset_prefix_cache()
    monkeypatch.setattr(allocator, "given_rows", lambda request, first: [])
    found = [answers(kind, llm, [MEDIAS[number]])[0] for number in (0, 3, 4)]
    assert found[:2] == [alone[0]] * 2
    # Text behind the video, of which no block is complete, has its own positions.
    assert found[2] != alone[4]
    llm.reset_prefix_cache()


@pytest.mark.stress
@pytest.mark.guarantee("answers about videos are the same in every batch, chunk and cache")
@pytest.mark.parametrize("kind", VIDEO_KINDS)
def test_cut_and_preempted_prompts_have_the_bits_of_alone(kind: str, models: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPMD_WORKER_CHECK", "1")
    roomy, alone = models(kind)
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=1, ignore_eos=True)
    # Two of them fit when they begin, and not when they end.
    medias = [MEDIAS[each] for each in (0, 3, 4)]
    expected = answers(kind, roomy, medias, params)
    shared = alone[0][0].index(tokenizer_of_images(kind).token_to_id(PLACEHOLDERS[media_kind(kind)].row_token) or 0)
    num_blocks = 2 * (len(alone[0][0]) // 8 + 1) + 4 - shared // 8
    small = {"num_blocks": num_blocks, "max_model_len": 8 * num_blocks, "max_num_batched_tokens": 7}
    with opened(kind, **small, max_encode_patches=40, preemption_mode="recompute") as llm:
        assert answers(kind, llm, medias, params) == expected
        assert llm.llm_engine.counters.num_preemptions > 0


def main(kind: str, folder: Path) -> None:
    with opened(kind, tensor_parallel_size=2) as llm:
        found = answers(kind, llm, MEDIAS)
        (folder / str(llm.llm_engine.engine_channel.rank)).write_text(json.dumps(found))


@pytest.mark.guarantee("answers about videos are the same in every batch, chunk and cache")
@pytest.mark.parametrize("kind", [pytest.param(each, marks=pytest.mark.stress) for each in VIDEO_KINDS])
def test_two_tensor_ranks_answer_as_one(kind: str, models: Any, tmp_path: Path):
    _, alone = models(kind)
    done = ranks.run_forked([__file__, kind, tmp_path], 2, timeout_s=240)
    assert done.returncode == 0, done.output
    first, second = (json.loads(each.read_text()) for each in sorted(tmp_path.iterdir()))
    assert first == second
    assert max([distance(tuple(ours), right) for ours, right in zip(first, alone, strict=True)]) < 2e-3


# Calls, rows and requests.

CHAT = "/v1/chat/completions"
SAMPLING: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
FILES = [saved(each) for each in CLIP.frames]
FRAMES_URL = "data:video/jpeg;base64," + ",".join([base64.b64encode(each).decode() for each in FILES])
QUESTION = {"type": "text", "text": "What is it?"}


def conversation(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, QUESTION]}], **SAMPLING}


URL = {"type": "video_url", "video_url": {"url": FRAMES_URL}}
PATHS = {"type": "video", "video": [f"{number}.png" for number in range(4)]}
BAD = {
    "videos_unsupported": {"type": "video_url", "video_url": {"url": "https://a/clip.mp4"}},
    "image_missing": {"type": "video", "video": ["0.png", "gone.png"]},
    "invalid_value": {"type": "video", "video": ["0.png"], "fps": -1},
    "unsupported_value": {"type": "video", "video": ["0.png"], "max_pixels": 3},
    "video_missing": {"type": "video"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    for number, data in enumerate(FILES):
        (folder / f"{number}.png").write_bytes(data)
    return folder


def text_of(answer: dict[str, Any]) -> tuple[str, int]:
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


@pytest.mark.guarantee("One video, one answer: calls, rows and requests", is_control_inside=True)
def test_doors_of_videos_give_the_same_answer(root: Path, tmp_path: Path):
    rows = [
        openai_row("url", CHAT, conversation(URL)),
        openai_row("paths", CHAT, conversation({**PATHS, "fps": 2})),
        {**conversation({"type": "video"}), "videos": [PATHS["video"]]},
        openai_row("slower", CHAT, conversation({**PATHS, "sample_fps": 1})),
        openai_row("image", CHAT, conversation({"type": "image_url", "image_url": {"url": "0.png"}}, PATHS)),
        *[openai_row(code, CHAT, conversation(part)) for code, part in BAD.items()],
    ]
    folder = image_folder("qwen2_5_vl")
    first, second, third, slower, both, *bad = answers_of_job(tmp_path, folder, rows, media_root=root)
    right = text_of(first["response"]["body"])
    assert text_of(second["response"]["body"]) == right
    assert (third["outputs"][0]["text"], third["usage"]["prompt_tokens"]) == right
    # Negative control: other times behind the same ids.
    assert text_of(slower["response"]["body"])[0] != right[0]
    assert text_of(both["response"]["body"])[1] > right[1]
    assert [each["error"]["code"] for each in bad] == list(BAD)
    metrics = json.loads((tmp_path / "out.jsonl.run" / "metrics.json").read_text())
    assert (metrics["videos"], metrics["images"], metrics["video_tokens"] % 5) == (5, 1, 0)
    assert compare_images(tmp_path / "out.jsonl.run") == (5, None)
    with LLM(str(folder), dtype="float32", allowed_local_media_path=str(root), **ROOMY) as llm:
        talks = [conversation(each)["messages"] for each in (URL, PATHS, {"type": "video", "video": CLIP.frames})]
        outputs = llm.chat(talks, SamplingParams(**SAMPLING), use_tqdm=False)
    assert [(each.outputs[0].text, len(each.prompt_token_ids or ())) for each in outputs] == [right] * 3
    with ServedHere(model=folder) as server:
        status, served, _ = server.client.ask(CHAT, conversation(URL))
        assert (status, text_of(served)) == (200, right)
        status, refused, _ = server.client.ask(CHAT, conversation(BAD["videos_unsupported"]))
        assert (status, refused["error"]["code"]) == (400, "videos_unsupported")


def of_ids(kind: str, number: int, ids: list[int] | None) -> dict[str, Any]:
    """A prompt of ids; None: those of its text with placeholders."""
    prompt = prompt_of_media(kind, MEDIAS[number])
    ids = tokenizer_of_images(kind).encode(prompt["prompt"]).ids if ids is None else ids
    return {"prompt_token_ids": ids, "multi_modal_data": prompt["multi_modal_data"]}


def test_expanded_ids_of_a_video_are_taken(models: Any):
    """As trainers pass them, with the tokens around a video that transformers keeps, and without."""
    for kind, number in (("glm4v", 2), ("qwen2_5_vl", 1), ("qwen3_vl", 1)):
        llm, alone = models(kind)
        ids, expected = alone[number][0], alone[number][1]
        for each in llm.generate([of_ids(kind, number, each) for each in (ids, None)], GREEDY, use_tqdm=False):
            assert (list(each.prompt_token_ids or ()), list(each.outputs[0].token_ids)) == (ids, expected)
    llm, alone = models("glm4v")
    given = [of_ids("glm4v", 1, each) for each in (None, alone[1][0])]
    mixed, refused = llm.generate(given, GREEDY, use_tqdm=False, on_error="row")
    assert list(mixed.prompt_token_ids or ()) == alone[1][0]
    assert "ids of images and frames are one in this model" in str(refused.error)
    kind, tokenizer = "qwen3_vl", tokenizer_of_images("qwen3_vl")
    llm, alone = models(kind)
    ids, (before, behind) = alone[0][0], (len(tokenizer.encode(each).ids) for each in ("Look:", "What is it?"))
    start, end = (tokenizer.token_to_id(f"<|vision_{each}|>") for each in ("start", "end"))
    kept = [*ids[:before], start, *ids[before:-behind], end, *ids[-behind:]]
    data = prompt_of_media(kind, MEDIAS[0])["multi_modal_data"]
    found = llm.generate({"prompt_token_ids": kept, "multi_modal_data": data}, GREEDY, use_tqdm=False)
    assert list(found[0].prompt_token_ids or ()) == kept
    short = {
        "prompt_token_ids": kept[:-behind],
        "multi_modal_data": prompt_of_media(kind, MEDIAS[5])["multi_modal_data"],
    }
    (refused,) = llm.generate(short, GREEDY, use_tqdm=False, on_error="row")
    assert "and 2 videos, which take" in str(refused.error)


@pytest.mark.stress
def test_ids_of_a_video_whose_text_joins_are_complete(models: Any):
    """SmolVLM's text ends with line ends."""
    llm, alone = models("smolvlm")
    given = [of_ids("smolvlm", 2, each) for each in (alone[2][0], None)]
    taken, refused = llm.generate(given, GREEDY, use_tqdm=False, on_error="row")
    assert list(taken.outputs[0].token_ids) == alone[2][1]
    assert "texts of videos join" in str(refused.error)


@pytest.mark.stress
def test_template_without_videos_is_completed(models: Any, tmp_path: Path):
    """SmolVLM2's own: transformers has another one for videos."""
    llm, _ = models("smolvlm")
    theirs = importlib.import_module("transformers.models.smolvlm.processing_smolvlm").DEFAULT_CHAT_TEMPLATE
    part = {"type": "video", "video": CLIP.frames}
    talk = [{"role": "user", "content": [part, QUESTION]}]
    found = [llm.chat(talk, GREEDY, chat_template=each, use_tqdm=False)[0] for each in (SMOLVLM, theirs)]
    assert found[0].prompt_token_ids == found[1].prompt_token_ids
    folder = shutil.copytree(image_folder("smolvlm"), tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": SMOLVLM}))
    rows = [openai_row("a", CHAT, conversation(URL))]
    (row,) = answers_of_job(tmp_path, folder, rows, media_root=tmp_path)
    assert row["response"]["body"]["usage"]["prompt_tokens"] == len(found[0].prompt_token_ids or ())


def test_plan_says_what_a_video_takes():
    config = RunConfig(
        model=ModelOptions(path=str(image_folder("qwen3_vl")), dtype="float32"),
        plan=PlanConfig(enabled=True),
        device="cpu",
    )
    text = describe_plan(make_plan(resolve_run(config, "cpu")))
    assert re.search("a video +16 tokens for 32 frames of 640 x 480 pixels; limits.max_video_tokens is 32,768", text)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
