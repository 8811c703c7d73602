"""Prompts with images of `LLM.generate` and `LLM.chat`, up to their tokens."""

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from image_doors import PAD, STRINGS_ALONE, WRITTEN, HerePreparer, image_prompts, image_tokenizer
from media_models import noise, saved

from spmd_worker.compat.call_images import images_of_call
from spmd_worker.compat.chat import ChatOptions, prepared_messages, render
from spmd_worker.compat.image_prompts import ImagePrompts, check_conversation, media_of
from spmd_worker.compat.image_reading import placeholders_of
from spmd_worker.compat.prompts import Encoded, PromptReader, apply_pooling
from spmd_worker.media.errors import MediaError
from spmd_worker.model_config.model_config import model_config_of
from spmd_worker.model_config.pooling import last_token_pooling
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.tokenizer.tokenizer import Tokenizer

WIDE, HIGH = noise(64, 96), noise(128, 64, seed=1)
NUM_WIDE, NUM_HIGH = 6, 8
"""Tokens of the two: squares of 32 pixels."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return image_tokenizer(folder)


@pytest.fixture
def images(folder: Path, tokenizer: Tokenizer) -> ImagePrompts:
    return image_prompts(folder, tokenizer)


def encoded(images: ImagePrompts | None, tokenizer: Tokenizer, prompt: Any, /, **given: Any) -> Encoded:
    options = {"check_text": lambda *_: None, "images": images, **given}
    return PromptReader(lambda: tokenizer, **options).encode(prompt)


def two(**prompt: Any) -> dict[str, Any]:
    return {"multi_modal_data": {"image": [WIDE, HIGH]}, **prompt}


def test_text_ids_and_expanded_ids_are_one_prompt(images: ImagePrompts, tokenizer: Tokenizer):
    text = f"a {WRITTEN} b {WRITTEN}"
    found = encoded(images, tokenizer, two(prompt=text, multi_modal_uuids={"image": ["x", "y"]}))
    assert (found.error, found.text, found.is_ids) == (None, text, False)
    start = len(tokenizer.encode("a <|vision_start|>"))
    second = start + NUM_WIDE + len(tokenizer.encode("<|vision_end|> b <|vision_start|>"))
    assert [each.runs for each in found.media_items] == [((start, NUM_WIDE),), ((second, NUM_HIGH),)]
    assert [each.grid for each in found.media_items] == [(2, 3), (4, 2)]
    assert [each.media_id for each in found.media] == [each.media_id for each in found.media_items]
    for ids in (tokenizer.encode(text), found.token_ids):
        given = encoded(images, tokenizer, two(prompt_token_ids=ids, prompt="its text"))
        assert (given.token_ids, given.media_items) == (found.token_ids, found.media_items)
        assert (given.text, given.is_ids, given.error) == ("its text", True, None)


@pytest.mark.parametrize("source", ["array", "file", "path", "data URL"])
def test_sources_of_one_picture_have_one_name(folder: Path, tokenizer: Tokenizer, source: str):
    data = saved(WIDE)
    (folder / "a.png").write_bytes(data)
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    given = {"array": WIDE, "file": data, "path": "a.png", "data URL": url}
    images = image_prompts(folder, tokenizer, root=folder)
    found = encoded(images, tokenizer, {"prompt": WRITTEN, "multi_modal_data": {"image": given[source]}})
    assert found.error is None
    assert found.media[0].media_id == images.prepare([WIDE])[0].media_id


@pytest.mark.parametrize(
    ("prompt", "given", "words"),
    [
        (two(prompt=WRITTEN), {}, "1 placeholders '<|image_pad|>', but it has 2 images"),
        (two(prompt_token_ids=[1, 2]), {}, "0 placeholder ids"),
        (two(prompt=WRITTEN), {"images": None}, "takes no images: the model runs with text alone, "),
        (two(prompt=WRITTEN), {"check_text": None}, "truncate_prompt_tokens cuts tokens"),
        (two(prompt_embeds=[[0.0]]), {}, "is text under prompt, or prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {"audio": [1]}}, {}, "has audio: only images"),
        ({"prompt": "a", "multi_modal_data": {"image": {"image_embeds": 1}}}, {}, "give the images themselves"),
        ({"prompt": "a", "multi_modal_data": [1]}, {}, "multi_modal_data=[1] must be a dict"),
        ({"prompt": WRITTEN, "multi_modal_data": {"image": "a.png"}}, {}, "a.png"),
        (two(prompt=WRITTEN, mm_processor_kwargs={"max_pixels": 9}), {}, "give others to LLM(...)"),
    ],
)
def test_unanswerable_image_prompt_says_why(
    images: ImagePrompts, tokenizer: Tokenizer, prompt: Any, given: dict[str, Any], words: str
):
    found = encoded(images, tokenizer, prompt, **given)
    assert words in (found.error or "")
    assert found.media_items == ()


@pytest.mark.parametrize(("video_token_id", "words"), [(9, "images and videos are"), (None, "images are")])
@pytest.mark.stress
def test_only_models_with_videos_offer_them(images: ImagePrompts, video_token_id: int | None, words: str):
    given = replace(images, kinds=(images.kinds[0]._replace(video_token_id=video_token_id),))
    with pytest.raises(MediaError, match=f"has x: only {words} supported, under 'image'"):
        media_of({"x": 1}, given)


@pytest.mark.parametrize(("shape", "is_kept"), [((64, 96), True), ((64, 90), False)])
def test_images_resized_before_keep_their_sizes(
    images: ImagePrompts, tokenizer: Tokenizer, shape: tuple[int, int], is_kept: bool
):
    prompt = {"prompt": WRITTEN, "multi_modal_data": {"image": noise(*shape)}}
    plain = encoded(images, tokenizer, prompt)
    found = encoded(images, tokenizer, {**prompt, "mm_processor_kwargs": {"do_resize": False}})
    assert plain.error is None
    if is_kept:
        assert (found.error, found.token_ids, found.media_items) == (None, plain.token_ids, plain.media_items)
    else:
        assert found.error is not None
        assert "image 0 of 90x64 pixels would be prepared as 96x64" in found.error


def test_prompt_without_images_is_as_before(images: ImagePrompts, tokenizer: Tokenizer):
    for data in (None, {}, {"image": None}, {"image": []}):
        found = encoded(images, tokenizer, {"prompt": PAD, "multi_modal_data": data})
        assert (found.token_ids, found.media) == (tuple(tokenizer.encode(PAD)), ())


def test_images_of_several_prompts_are_prepared_once(images: ImagePrompts, tokenizer: Tokenizer):
    of_call = images_of_call(images, 1e9)
    found = [encoded(of_call, tokenizer, two(prompt=WRITTEN * 2)) for _ in range(3)]
    assert isinstance(images.preparer, HerePreparer)
    of_call.preparer.submit([WIDE, HIGH])
    assert len(images.preparer.asked) == 1
    assert found[0].media[1] is found[2].media[1]


def test_pooled_prompt_with_images_is_not_truncated(images: ImagePrompts, tokenizer: Tokenizer):
    found = encoded(images, tokenizer, two(prompt=WRITTEN * 2))
    with pytest.raises(ValueError, match="may cut an image"):
        apply_pooling(found, PoolingParams(truncate_prompt_tokens=4), last_token_pooling(8), 99, lambda: tokenizer)
    ids = found.token_ids
    apply_pooling(found, PoolingParams(), last_token_pooling(8), 99, lambda: tokenizer)
    assert found.token_ids == ids


PARTS = [
    {"type": "image_url", "image_url": {"url": "one", "detail": "low"}},
    {"type": "image_url", "image_url": "one"},
    {"type": "image", "image": "one"},
    {"type": "image", "url": "one"},
    {"type": "image", "path": "one"},
    {"type": "input_image", "image_url": "one"},
    {"type": "image_pil", "image_pil": "one", "uuid": "x"},
]


@pytest.mark.parametrize("part", PARTS)
def test_image_parts_of_every_notation_are_one(tokenizer: Tokenizer, part: dict[str, Any]):
    messages = [{"role": "user", "content": ["see ", part, {"type": "text", "text": "?"}]}]
    prepared, sources = prepared_messages(messages)
    assert sources == ["one"]
    assert render(prepared, ChatOptions(), tokenizer) == f"<user>see {WRITTEN}?<answer>"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image", "image": 3},
        {"type": "image", "image": "a", "url": "b"},
        {"type": "image_url", "image_url": {"url": "one", "detail": "hgih"}},
    ],
)
def test_part_without_one_image_is_an_error(part: dict[str, Any]):
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[0\]"):
        prepared_messages([{"role": "user", "content": [part]}])


def test_template_without_parts_says_what_to_write(folder: Path, tokenizer: Tokenizer, images: ImagePrompts):
    other = image_tokenizer(folder / "strings", "{% for m in messages %}{{ m.content }}{% endfor %}")
    text = render([{"role": "user", "content": [{"type": "image"}]}], ChatOptions(), other)
    with pytest.raises(MediaError, match=r"does not write a placeholder .*render .*vision_start.* as prompt") as found:
        images.of_chat(text, images.prepare([WIDE]), other.encode)
    assert found.value.code == "placeholder_mismatch"
    with pytest.raises(ValueError, match="chat template"):
        render([{"role": "user", "content": [{"type": "image"}]}], ChatOptions(template=STRINGS_ALONE), other)


def test_text_that_stands_for_an_image_is_reserved(images: ImagePrompts):
    """The user's own placeholder took the image, and the rest of the prompt had none."""
    for content in (f"a {PAD}", [{"type": "image"}, {"type": "text", "text": f"a {PAD}"}]):
        with pytest.raises(MediaError, match=r"contains '<.image_pad.>'") as found:
            check_conversation(images, [{"role": "user", "content": content}])
        assert found.value.code == "reserved_token"
    check_conversation(images, [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}])


def test_text_of_a_video_is_reserved_in_models_that_take_videos():
    """Idefics3 has SmolVLM's texts, and no videos."""
    names = [f"{each}ForConditionalGeneration" for each in ("Idefics3", "SmolVLM")]
    files = [{"architectures": [each], "text_config": {}, "vision_config": {"patch_size": 14}} for each in names]
    visions = [model_config_of(each, Path("config.json"), with_images=True).vision for each in files]
    idefics, smolvlm = [placeholders_of(each) for each in visions if each is not None]
    idefics.check_reserved("a <video> tag")
    assert idefics.expand_text("a <video> tag", []) == "a <video> tag"
    with pytest.raises(MediaError, match="<video>"):
        smolvlm.check_reserved("a <video> tag")
