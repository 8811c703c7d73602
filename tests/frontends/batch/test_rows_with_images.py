"""Rows with images: parsed, encoded, and prepared ahead in their order."""

import base64
import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from image_doors import PAD, WRITTEN, HerePreparer, image_prompts, image_tokenizer
from jobs_of_rows import openai_row
from media_models import noise, saved

from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.image_prompts import ImagePrompts, num_media_bytes
from spmd_worker.engine.validation import RequestLimits
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.batch.media_window import MediaWindow
from spmd_worker.frontends.openai.openai_request import CHAT_URL
from spmd_worker.frontends.openai.pooled_row import EncodedPooledRow, encode_pooled
from spmd_worker.frontends.openai.row import EncodedRow, Row, RowError
from spmd_worker.frontends.openai.row_encoding import RowContext, resolve
from spmd_worker.frontends.openai.row_parser import parse_row
from spmd_worker.frontends.serve.request_reader import RequestReader
from spmd_worker.frontends.serve.token_requests import TOKENIZE_URL, answer_tokens
from spmd_worker.model_config.pooling import last_token_pooling
from spmd_worker.replica.scheduler.media_rows import MediaRowLimits
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.messages import InvalidRequestError

WIDE = noise(64, 96)
NUM_BYTES = 64 * 96 * 3
URL = "data:image/png;base64," + base64.b64encode(saved(WIDE)).decode()
PART = {"type": "image_url", "image_url": {"url": URL}}
CHAT = [{"role": "user", "content": [PART, {"type": "text", "text": "what?"}]}]


class Door:
    """A job's rows up to the engine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokenizer = folder, image_tokenizer(folder)

    def images(self, **preparer: Any) -> ImagePrompts:
        return image_prompts(self.folder, self.tokenizer, **preparer)

    def limits(self, images: ImagePrompts | None, **given: Any) -> RequestLimits:
        given = {"media": MediaRowLimits(num_rows=4096), **given}
        return RequestLimits(self.tokenizer.vocab_size, 4096, has_tokenizer=True, images=images, **given)

    def resolve(self, fields: dict[str, Any], **preparer: Any) -> EncodedRow | RowError:
        row = parse(fields)
        if isinstance(row, RowError):
            return row
        return resolve(row, RowContext(self.tokenizer, self.limits(self.images(**preparer))))


def parse(fields: dict[str, Any], index: int = 0) -> Row | RowError:
    return parse_row(index, json.dumps(fields).encode(), SamplingParams())


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Door:
    folder = tmp_path_factory.mktemp("images")
    (folder / "a.png").write_bytes(saved(WIDE))
    return Door(folder)


def test_forms_of_a_row_have_the_same_tokens(door: Door):
    text = f"<user>{WRITTEN}what?<answer>"
    body = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": CHAT}}
    ids = door.tokenizer.encode(text)
    rows: list[dict[str, Any]] = [
        body,
        {"messages": CHAT},
        {"messages": [{"role": "user", "content": [{"type": "image"}, "what?"]}], "images": ["a.png"]},
        {"prompt": text, "images": [URL]},
        {"prompt": text, "images": "a.png"},
        {"prompt": text, "images": [{"bytes": None, "path": "a.png"}]},
        {"prompt": text, "images": [{"bytes": URL, "path": "ignored.png"}]},
        {"prompt_token_ids": ids, "images": [URL]},
    ]
    found = [door.resolve(each, root=door.folder) for each in rows]
    first = found[0]
    assert isinstance(first, EncodedRow)
    assert len(first.content.token_ids) == len(ids) + 5
    assert [each.num_rows for each in first.content.media_items] == [6]
    for each in found:
        assert isinstance(each, EncodedRow), each
        assert replace(each.content, text=first.content.text) == first.content
        assert num_media_bytes(each.media) == NUM_BYTES
    assert [each.content.text for each in found if isinstance(each, EncodedRow)] == [text] * 7 + [None]


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"prompt": "a", "images": [URL]}, "placeholder_mismatch", "0 placeholders"),
        ({"prompt": WRITTEN, "images": ["gone.png"]}, "image_missing", "gone.png"),
        ({"prompt": WRITTEN, "images": ["/etc/hostname"]}, "image_outside_root", "hostname"),
        ({"prompt": WRITTEN, "images": ["http://a/b.png"]}, "images_unsupported", "download it first"),
        ({"prompt": WRITTEN, "images": ["data:image/png;base64,AAAA"]}, "image_unreadable", ""),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image_missing", "has no image"),
        ({"messages": [*CHAT, {"role": "user", "content": PAD}]}, "reserved_token", PAD),
        ({"prompt": WRITTEN, "images": [URL], "truncate_prompt_tokens": 3}, "conflicting_keys", "truncate_prompt"),
    ],
)
def test_bad_images_are_error_rows(door: Door, fields: dict[str, Any], code: str, words: str):
    found = door.resolve(fields, root=door.folder)
    assert isinstance(found, RowError)
    assert (found.code, words in found.message) == (code, True), found


@pytest.mark.parametrize("media", [MediaRowLimits(num_rows=5), MediaRowLimits(9, 9, 1, True, max_num_tokens=5)])
def test_images_that_never_fit_are_error_rows(door: Door, media: MediaRowLimits):
    """They would wait for ever."""
    images = door.images()
    generated, pooled = parse({"prompt": WRITTEN, "images": [URL]}), parse({"embed": WRITTEN, "images": [URL]})
    assert isinstance(generated, Row)
    assert isinstance(pooled, Row)
    found = resolve(generated, RowContext(door.tokenizer, door.limits(images, media=media)))
    assert isinstance(found, RowError)
    assert (found.code, "6 tokens" in found.message) == ("image_too_long", True)
    limits = door.limits(images, media=media, pooling=last_token_pooling(8))
    with pytest.raises(InvalidRequestError, match="an image of 6 tokens"):
        encode_pooled(pooled, RowContext(door.tokenizer, limits))


def test_model_without_images_rejects_rows_with_them(door: Door):
    row = parse({"prompt": WRITTEN, "images": [URL]})
    assert isinstance(row, Row)
    found = resolve(row, RowContext(door.tokenizer, door.limits(None)))
    assert isinstance(found, RowError)
    assert found.code == "images_unsupported"
    (ready,) = drained(MediaWindow(None, 0), [row])
    assert ready.media is None


def test_pooled_rows_take_messages_and_images(door: Door):
    text = f"<user>{WRITTEN}what?"
    body = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"messages": CHAT}}
    rows = [body, {"embed": {"messages": CHAT}}, {"embed": text, "images": ["a.png"]}]
    found: list[EncodedPooledRow] = []
    for fields in rows:
        row = parse(fields)
        assert isinstance(row, Row), row
        images = door.images(root=door.folder)
        limits = door.limits(images, pooling=last_token_pooling(8))
        context = RowContext(door.tokenizer, limits)
        found.append(encode_pooled(row, context))
        assert encode_pooled(row, context, found[-1].media) == found[-1]
    assert [each.texts for each in found] == [found[0].texts] * 3
    assert len(found[0].texts[0].token_ids) == len(door.tokenizer.encode(text)) + 5
    bad = parse({"embed": text, "images": ["a.png"], "truncate_prompt_tokens": 4})
    assert isinstance(bad, Row)
    with pytest.raises(InvalidRequestError, match="may cut an image"):
        encode_pooled(bad, RowContext(door.tokenizer, limits))


def test_server_prepares_the_images_of_a_request(door: Door):
    images = door.images(root=door.folder)
    reader = RequestReader(SamplingParams(), RowContext(door.tokenizer, door.limits(images)))
    body = json.dumps({"messages": CHAT, "stream": True}).encode()
    (row,) = reader.read(0, CHAT_URL, body, None).rows
    assert isinstance(row, EncodedRow)
    assert [each.num_rows for each in row.content.media_items] == [6]
    with pytest.raises(InvalidRequestError, match="images are not counted here"):
        answer_tokens(reader, TOKENIZE_URL, json.dumps({"messages": CHAT}).encode())


def rows_of(door: Door, *images: str | None) -> list[Row]:
    rows = []
    for index, each in enumerate(images):
        fields: dict[str, Any] = {"prompt": "a"} if each is None else {"prompt": WRITTEN, "images": [each]}
        row = parse(fields, index)
        assert isinstance(row, Row)
        rows.append(row)
    return rows


def drained(window: MediaWindow, rows: list[Row]) -> list[Any]:
    for row in rows:
        window.put(row)
    found = []
    while (ready := window.next_ready(0)) is not None:
        found.append(ready)
    return found


def test_no_row_passes_one_whose_images_are_prepared(door: Door):
    images = door.images(root=door.folder, holds=True)
    preparer = images.preparer
    assert isinstance(preparer, HerePreparer)
    window = MediaWindow(images, 1 << 30)
    assert drained(window, rows_of(door, "a.png", None, "gone.png", "a.png")) == []
    assert [len(each) for each in preparer.asked] == [1, 1, 1]
    preparer.held[2].is_held = preparer.held[1].is_held = False
    assert window.next_ready(0) is None
    preparer.held[0].is_held = False
    found = drained(window, [])
    assert [each.row.index for each in found] == [0, 1, 2, 3]
    assert isinstance(found[2].row, RowError)
    assert found[2].row.code == "image_missing"
    assert [len(each.media or ()) for each in found] == [1, 0, 0, 1]


def test_prepared_images_are_bounded_in_bytes(door: Door):
    images = door.images(root=door.folder)
    preparer = images.preparer
    assert isinstance(preparer, HerePreparer)
    window = MediaWindow(images, 2 * NUM_BYTES)
    for row in rows_of(door, *["a.png"] * 20):
        window.put(row)
    most = 0
    for _ in range(20):
        # What a running row holds leaves room for one more.
        ready = window.next_ready(NUM_BYTES)
        ready = window.next_ready(NUM_BYTES) if ready is None else ready
        assert ready is not None
        assert window.next_ready(2 * NUM_BYTES) is None
        most = max(most, window.num_bytes)
    assert most <= 8 * NUM_BYTES
    assert len(preparer.asked) == 20
    assert len(window) == 0


def test_row_larger_than_the_window_runs_alone(door: Door):
    window = MediaWindow(door.images(root=door.folder), 1)
    for row in rows_of(door, "a.png", None):
        window.put(row)
    assert window.next_ready(0) is None
    assert window.next_ready(1) is None
    ready = window.next_ready(0)
    assert ready is not None
    assert num_media_bytes(ready.media or ()) == NUM_BYTES
    assert window.next_ready(NUM_BYTES) is not None


def test_window_of_rows_is_bounded(door: Door):
    window = MediaWindow(door.images(root=door.folder, holds=True), 1 << 30)
    row = rows_of(door, "a.png")[0]
    count = 0
    while window.has_room:
        window.put(row)
        count += 1
    assert count == 64


PARTS = {"content": [{"type": "image_url", "image_url": {"url": URL}}]}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("score", {"text_1": "a", "text_2": PARTS}),
        ("score", {"text_1": ["a"], "text_2": ["b", PARTS]}),
        ("rerank", {"query": PARTS, "documents": ["a"]}),
        ("rerank", {"query": "a", "documents": PARTS}),
        ("rerank", {"query": "a", "documents": ["b", PARTS]}),
        ("score", {"text_1": "a", "text_2": "b", "images": [URL]}),
    ],
)
def test_scored_texts_have_no_images(url: str, body: dict[str, Any]):
    found = parse(openai_row("a", f"/v1/{url}", body))
    assert isinstance(found, RowError), found
    assert found.code == "images_unsupported"
    assert "are texts alone: embed images in rows of /v1/embeddings" in found.message


def test_pauses_count_while_images_are_prepared(door: Door):
    window = MediaWindow(door.images(root=door.folder, holds=True), 1 << 30)
    window.pause(0)
    assert window.wait_s == 0
    window.put(rows_of(door, "a.png")[0])
    assert window.next_ready(0) is None
    window.pause(0)
    assert window.wait_s > 0


@pytest.mark.parametrize("form", ["list of bytes", "list of structs", "bytes", "struct"])
def test_parquet_images_are_read_without_base64(door: Door, tmp_path: Path, form: str):
    data, bytes_type = saved(WIDE), pyarrow.binary()
    struct = pyarrow.struct({"bytes": bytes_type, "path": pyarrow.string()})
    kinds = {"list of bytes": pyarrow.list_(bytes_type), "list of structs": pyarrow.list_(struct), "bytes": bytes_type}
    one = {"bytes": data, "path": "any.png"}
    values = {"list of bytes": [data], "list of structs": [one], "bytes": data, "struct": one}
    columns = {
        "messages": [[{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "b"}]}]],
        "images": pyarrow.array([values[form]], type=kinds.get(form, struct)),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    ((_, line),) = RowReader((tmp_path / "a.parquet",))
    found = door.resolve(json.loads(line))
    assert isinstance(found, EncodedRow), found
    assert found.media[0].source_digest == sha256(data).digest()
    assert found.content.text == f"<user>{WRITTEN}b<answer>"
    ((_, cut),) = RowReader((tmp_path / "a.parquet",), max_line_bytes=len(data))
    assert len(cut) == len(data) + 1


def test_parquet_bytes_of_other_columns_are_rejected(tmp_path: Path):
    for name in ("image", "imagesx"):
        pyarrow.parquet.write_table(pyarrow.table({name: [[b"a"]]}), tmp_path / "a.parquet")
        with pytest.raises(ConfigError, match=rf"column {name}\[\] has the unsupported type binary"):
            list(RowReader((tmp_path / "a.parquet",)))
