"""Placeholders of images in texts and ids, and the tokens that take their rows."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from media_models import MODELS, media_processor, noise, tokenizer_of_all_media
from tokenizers import Tokenizer

from spmd_worker.media.errors import MediaError
from spmd_worker.media.placeholders import PLACEHOLDERS, Encode, gemma_text
from spmd_worker.media.prepared import ImagePixels, PreparedImage
from spmd_worker.media.preparing import prepare
from spmd_worker.replica.sequence.media_items import check_media

KINDS = tuple(MODELS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of_all_media()


@pytest.fixture(scope="module")
def encode(tokenizer: Tokenizer) -> Encode:
    return lambda text: list(tokenizer.encode(text).ids)


def images_of(kind: str, folder: Path, num_images: int = 2) -> list[PreparedImage]:
    processor = media_processor(folder, kind)
    sizes = [(97, 161), (130, 57), (20, 20)][:num_images]
    return [prepare(noise(*size), processor, is_alone=num_images == 1) for size in sizes]


def mismatch(call: object, *arguments: object) -> str:
    assert callable(call)
    with pytest.raises(MediaError) as caught:
        call(*arguments)
    assert caught.value.code == "placeholder_mismatch"
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_text_of_an_image_has_a_token_for_each_row(kind: str, tmp_path: Path, tokenizer: Tokenizer):
    placeholders = PLACEHOLDERS[kind]
    assert placeholders.marker in placeholders.written
    for image in images_of(kind, tmp_path):
        assert image.text.count(placeholders.image_token) == image.num_rows
        lines, columns = image.token_grid
        assert lines * columns == (image.num_rows if kind.startswith(("qwen", "glm", "paddleocr", "exaone")) else 0)
    for token in (*placeholders.reserved, placeholders.marker, placeholders.image_token):
        assert tokenizer.token_to_id(token) is not None


@pytest.mark.guarantee("A prompt has one placeholder for each image")
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_counts_are_refused_with_both_numbers(kind: str, tmp_path: Path, encode: Encode):
    placeholders, images = PLACEHOLDERS[kind], images_of(kind, tmp_path)
    taken = sum(image.num_rows for image in images)
    image_id = encode(placeholders.image_token)[0]
    for number in (0, 1, 3):
        text = f"a{placeholders.written * number}b"
        message = mismatch(placeholders.expand_text, text, images)
        assert f"the prompt has {number} placeholders" in message
        assert f"it has 2 images, which take {taken} image tokens" in message
        assert f"{taken} image tokens" in mismatch(placeholders.expand_ids, encode(text), images, encode)
    # Expanded, but an image token short, or one too many, or those of one image alone.
    whole = encode(placeholders.expand_text(placeholders.written * 2, images))
    at = len(whole) - 1 - whole[::-1].index(image_id)
    for ids in (whole[:at] + whole[at + 1 :], [*whole[:at], image_id, *whole[at:]], encode(images[0].text)):
        mismatch(placeholders.expand_ids, ids, images, encode)
        mismatch(placeholders.media_items, ids, images, image_id)


@pytest.mark.control("A prompt has one placeholder for each image")
def test_counts_of_rows_alone_would_accept_a_moved_image(tmp_path: Path, encode: Encode):
    """The tokens between lines of an image belong to it: a number of image tokens is not enough."""
    images = images_of("pixtral", tmp_path)
    whole = encode(PLACEHOLDERS["pixtral"].expand_text("[IMG] and [IMG]", images))
    turned = whole[::-1]
    image_id = encode("[IMG]")[0]
    assert turned.count(image_id) == whole.count(image_id)
    assert PLACEHOLDERS["pixtral"].expand_ids(whole, images, encode) == whole
    mismatch(PLACEHOLDERS["pixtral"].expand_ids, turned, images, encode)


@given(st.lists(st.sampled_from(["\n", "\n\n", "a", " ", "<start_of_image>"]), max_size=24))
def test_line_ends_join_as_in_the_text(pieces: list[str]):
    """Any run of line ends on either side of an image, or between two."""
    text, tokenizer = "".join(pieces), tokenizer_of_all_media()
    placeholders = PLACEHOLDERS["gemma3"]
    pixels = ImagePixels((np.zeros((28, 28, 3), np.uint8),), (2, 2), (28, 28))
    image = PreparedImage(bytes(16), pixels, gemma_text(4), 4, 4, (0, 0), b"")
    images = [image] * text.count(placeholders.marker)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    whole = encode(placeholders.expand_text(text, images))
    assert placeholders.expand_ids(encode(text), images, encode) == whole
    assert placeholders.expand_ids(whole, images, encode) == whole


def test_image_of_one_row_is_expanded_or_left(tmp_path: Path, encode: Encode):
    """A placeholder and an expanded image have the same number of image tokens; only one has the end."""
    image = prepare(noise(9, 9), media_processor(tmp_path, "pixtral"), is_alone=True)
    assert image.text == "[IMG][IMG_END]"
    expand = PLACEHOLDERS["pixtral"].expand_ids
    whole = encode("a[IMG][IMG_END]b")
    assert expand(encode("a[IMG]b"), [image], encode) == whole
    assert expand(whole, [image], encode) == whole


def test_marker_within_the_text_of_an_image_is_not_expanded_again(tmp_path: Path):
    images = images_of("llava", tmp_path)
    assert PLACEHOLDERS["llava"].expand_text("<image>x<image>", images) == "<image>" * 36 + "x" + "<image>" * 36


def test_expanded_gemma_prompt_with_markers_left_is_refused(tmp_path: Path, encode: Encode):
    """A prompt in which one image is expanded and another one is not."""
    images = images_of("gemma3", tmp_path)
    half = encode(f"{images[0].text} and <start_of_image>")
    assert "16 image token ids" in mismatch(PLACEHOLDERS["gemma3"].expand_ids, half, images, encode)


def test_expanded_ids_need_no_placeholder_token(tmp_path: Path, encode: Encode):
    """A tokenizer may have none where a processor replaces a text."""
    images, expand = images_of("aya_vision", tmp_path, 1), PLACEHOLDERS["aya_vision"].expand_ids
    whole = encode(images[0].text)

    def plain(text: str) -> list[int]:
        return list(encode(text.replace("<image>", "< image >")))

    assert expand(whole, images, plain) == whole
    with pytest.raises(MediaError, match="the tokenizer has no token '<image>'"):
        expand(plain("<image>"), images, plain)


def test_prompt_without_images_stays_as_it_is(encode: Encode):
    ids = encode("<image> is a word here")
    assert PLACEHOLDERS["llava"].expand_ids(ids, [], encode) == ids


@pytest.mark.parametrize("kind", KINDS)
def test_items_have_the_tokens_of_their_images(kind: str, tmp_path: Path, encode: Encode):
    placeholders, images = PLACEHOLDERS[kind], images_of(kind, tmp_path, 3)
    ids = encode(placeholders.expand_text(f"a{placeholders.written * 2} b {placeholders.written}", images))
    image_id = encode(placeholders.image_token)[0]
    items = placeholders.media_items(ids, images, image_id)
    check_media(items, len(ids))
    places = [start + index for item in items for start, count in item.runs for index in range(count)]
    assert places == [index for index, token_id in enumerate(ids) if token_id == image_id]
    for item, image in zip(items, images, strict=True):
        assert (item.media_id, item.num_rows, item.num_patches) == (image.media_id, image.num_rows, image.num_patches)
        assert item.grid == image.token_grid
        assert all(first[0] + first[1] < second[0] for first, second in zip(item.runs, item.runs[1:]))


def test_runs_of_adjacent_images_end_at_their_rows(tmp_path: Path):
    images = images_of("llava", tmp_path)
    items = PLACEHOLDERS["llava"].media_items([7] * 36 + [7] * 36 + [1], images, 7)
    assert [item.runs for item in items] == [((0, 36),), ((36, 36),)]


@pytest.mark.parametrize("kind", KINDS)
def test_reserved_text_is_refused(kind: str):
    placeholders = PLACEHOLDERS[kind]
    placeholders.check_reserved("an image, [img] and < image > are words")
    for token in placeholders.reserved:
        with pytest.raises(MediaError) as caught:
            placeholders.check_reserved(f"before{token}behind")
        assert caught.value.code == "reserved_token"
        assert repr(token) in str(caught.value)


def test_tokenizer_without_the_tokens_is_named(tmp_path: Path, encode: Encode):
    images = images_of("llava", tmp_path)
    letters = lambda text: [ord(letter) for letter in text]  # noqa: E731
    with pytest.raises(MediaError, match="no token '<image>': it splits into 7") as caught:
        PLACEHOLDERS["llava"].expand_ids([1], images, letters)
    assert caught.value.code == "images_unsupported"
    joined = lambda text: [1] if text.count("<") > 1 else encode(text)  # noqa: E731
    with pytest.raises(MediaError, match="makes 0 image tokens of the 36"):
        PLACEHOLDERS["llava"].expand_ids([1], images, joined)
