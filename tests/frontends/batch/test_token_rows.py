"""Rows of jobs and of the server with numbers for each token: their keys, their places in the text, and formats."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cut_jobs import Ended, end_after
from encoder_models import encoder_folder, error, hidden_states, logits_of
from jobs_of_rows import answers_of_job, openai_row
from json_files import edit
from pooling_models import pooling_folder, reference_logits_of_tokens
from serving import ServedHere
from torch.nn import functional as F
from transformers import AutoTokenizer

from spmd_worker.base.config.schema import SchedulerConfig
from spmd_worker.frontends.batch.parquet_rows import VectorColumns, parquet_row
from spmd_worker.frontends.openai.decimals import shortest_decimals, shortest_text
from spmd_worker.frontends.tools import replay
from spmd_worker.tokenizer.tokenizer import Tokenizer

TEXTS = ["hello world", "naïve café 你好", "the cache"]
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose labels have names."""
    folder = tmp_path_factory.mktemp("tagger")
    shutil.copytree(encoder_folder("bert_tokens"), folder, dirs_exist_ok=True)
    edit(folder / "config.json", id2label={str(index): name for index, name in enumerate(LABELS)})
    return folder


def test_rows_name_tokens_places_and_labels(tagger: Path, tmp_path: Path) -> None:
    long = "hello " * 200
    asked: list[dict[str, Any]] = [
        {"custom_id": "a", "token_classify": TEXTS[1]},
        {"token_classify": [5, 300, 319], "use_activation": False},
        {"token_classify": long, "truncate_prompt_tokens": 12},
        {"token_classify": long},
        {"token_embed": "x"},
        {"token_classify": "x", "dimensions": 4},
    ]
    first, of_ids, cut, *refused = answers_of_job(tmp_path, tagger, asked)
    theirs = AutoTokenizer.from_pretrained(tagger)
    expected = theirs(TEXTS[1], return_offsets_mapping=True)
    assert list(first) == ["custom_id", "index", "scores", "labels", "tokens", "offsets", "usage", "error"]
    assert (first["labels"], first["usage"]) == (LABELS, {"prompt_tokens": len(expected["input_ids"])})
    assert first["tokens"] == theirs.convert_ids_to_tokens(expected["input_ids"])
    assert first["offsets"] == [list(each) for each in expected["offset_mapping"]]
    assert error(first["scores"], logits_of("bert_tokens", expected["input_ids"]).softmax(1)) < 1e-5
    # No character of the text is without a token.
    assert {index for start, end in first["offsets"] for index in range(start, end)} == set(range(len(TEXTS[1])))
    assert (of_ids["offsets"], len(of_ids["tokens"]), len(of_ids["scores"])) == (None, 3, 3)
    assert error(of_ids["scores"], logits_of("bert_tokens", [5, 300, 319])) < 1e-5
    short = theirs(long, truncation=True, max_length=12, return_offsets_mapping=True)
    assert cut["tokens"] == theirs.convert_ids_to_tokens(short["input_ids"])
    assert cut["offsets"] == [list(each) for each in short["offset_mapping"]]
    assert [each["error"]["code"] for each in refused] == ["prompt_too_long", "wrong_runner", "invalid_value"]


def test_places_of_decoders_and_prompts_count_the_own_text(tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(pooling_folder("tokens"))
    text = "the cache " * 9
    (row,) = answers_of_job(tmp_path, pooling_folder("tokens"), [{"token_classify": text, "truncate_prompt_tokens": 5}])
    expected = theirs(text, return_offsets_mapping=True)
    assert row["offsets"] == [list(each) for each in expected["offset_mapping"][-5:]]
    assert row["labels"] == [f"LABEL_{index}" for index in range(5)]
    assert error(row["scores"], reference_logits_of_tokens("tokens", expected["input_ids"][-5:]).softmax(1)) < 1e-5
    options = {"prompts": {"query": "find: "}, "default_prompt_name": "query"}
    shutil.copytree(encoder_folder("bert_mean"), tmp_path / "prompted")
    (tmp_path / "prompted" / "config_sentence_transformers.json").write_text(json.dumps(options))
    (row,) = answers_of_job(tmp_path, tmp_path / "prompted", [{"token_embed": TEXTS[0]}], "b.jsonl")
    found = [TEXTS[0][start:end] for start, end in row["offsets"]]
    ids = Tokenizer.open(tmp_path / "prompted").encode(f"find: {TEXTS[0]}")
    assert ("".join(found), len(found)) == (TEXTS[0], len(ids))
    assert error(row["token_embeddings"], F.normalize(hidden_states("bert", ids), dim=1)) < 1e-5
    assert list(row) == ["custom_id", "index", "token_embeddings", "tokens", "offsets", "usage", "error"]


@pytest.mark.matrix
def test_token_rows_have_equal_bytes_batched_resumed_replayed(
    tagger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [{"token_classify": TEXTS[number % 3] * (1 + number % 5)} for number in range(40)]
    rows = answers_of_job(tmp_path, tagger, asked, step_log=True)
    assert replay.main([str(tmp_path / "out.jsonl.run" / "steps.log"), "--with-model"]) == 0
    assert "40 of 40 tokens equal" in capsys.readouterr().out
    scheduler = SchedulerConfig(max_num_batched_tokens=300, max_num_seqs=3)
    with monkeypatch.context() as patch:
        end_after(patch, 20)
        with pytest.raises(Ended):
            answers_of_job(tmp_path, tagger, asked, "b.jsonl", scheduler=scheduler)
    assert answers_of_job(tmp_path, tagger, asked, "b.jsonl", scheduler=scheduler) == rows
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("name", "task", "column"), [("tokens", "token_classify", "scores"), ("last", "token_embed", "token_embeddings")]
)
def test_parquet_has_a_list_for_each_token(name: str, task: str, column: str, tmp_path: Path) -> None:
    """Plain rows, bodies of /pooling, plain and in base64, and a server's answers."""
    body = {"input": TEXTS[0], "task": task}
    asked = [
        {task: TEXTS[0]},
        openai_row("f", "/pooling", body),
        openai_row("b", "/pooling", {**body, "encoding_format": "base64"}),
        openai_row("m", "/pooling", {**body, "input": TEXTS}),
        {"embed": TEXTS[0]},
    ]
    plain, floats, packed, many, embedded = answers_of_job(tmp_path, pooling_folder(name), asked, "out.parquet")
    numbers = plain[column]
    assert np.shape(numbers) == (
        len(Tokenizer.open(pooling_folder(name)).encode(TEXTS[0])),
        5 if column == "scores" else 64,
    )
    assert floats[column] == packed[column] == numbers
    assert many[column] is None is embedded[column]
    of = {
        each: json.loads(row["json"])["response"]["body"] for each, row in (("f", floats), ("b", packed), ("m", many))
    }
    assert of["f"]["data"][0]["data"] == of["m"]["data"][0]["data"] == json.loads(plain["json"])[column]
    content = np.frombuffer(base64.b64decode(of["b"]["data"][0]["data"]), "<f4")
    assert content.reshape(np.shape(numbers)).tolist() == numbers
    if name == "last":
        assert (len(embedded["embedding"]), plain["embedding"]) == (64, None)
    with ServedHere(model=pooling_folder(name), max_queued=8) as served:
        status, found, _ = served.client.ask("/pooling", {**body, "input": TEXTS})
        data = served.client.ask("/pooling", {**body, "encoding_format": "base64"})[1]["data"]
    assert (status, found["data"]) == (200, of["m"]["data"])
    assert data == of["b"]["data"]


def test_rows_of_late_chunks_name_their_ranges(tmp_path: Path) -> None:
    chunking = {"late_chunking_params": {"chunk_size": 3}}
    body = {"input": TEXTS[:2], "task": "token_embed", **chunking}
    asked = [
        {"token_embed": TEXTS[1], **chunking},
        openai_row("p", "/pooling", body),
        openai_row("b", "/pooling", {**body, "input": TEXTS[1], "encoding_format": "base64"}),
        {"embed": TEXTS[1], **chunking},
        {"token_embed": TEXTS[1], "late_chunking_params": {"chunk_size": "a"}},
    ]
    plain, many, packed, *refused = answers_of_job(tmp_path, pooling_folder("last"), asked, "out.parquet")
    record, found = json.loads(plain["json"]), json.loads(many["json"])["response"]["body"]["data"][1]
    num_tokens = len(record["tokens"])
    ranges = record["late_chunking"]["chunks"]
    assert [each["token_range"][0] for each in ranges] == list(range(0, num_tokens, 3))
    assert len(record["token_embeddings"]) == len(ranges) < num_tokens == record["usage"]["prompt_tokens"]
    assert ranges[-1]["char_range"][1] == len(TEXTS[1])
    assert (found["late_chunking"], found["data"]) == (record["late_chunking"], record["token_embeddings"])
    assert packed["token_embeddings"] == plain["token_embeddings"]
    words = ("is for token_embed, and the task is embed", "chunk_size='a' must be a number of tokens")
    for row, said in zip(refused, words, strict=True):
        assert (row["error"]["code"], said in row["error"]["message"]) == ("invalid_value", True)
    with ServedHere(model=pooling_folder("last"), max_queued=8) as served:
        assert served.client.ask("/pooling", body)[1]["data"][1] == found


def test_texts_of_a_row_share_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd_worker.engine.validation.MAX_TOKEN_NUMBERS", 30)
    asked = [openai_row(name, "/pooling", {"input": [[40, 50, 60]] * count}) for name, count in (("a", 2), ("b", 3))]
    first, second = answers_of_job(tmp_path, pooling_folder("tokens"), asked)
    assert np.shape([each["data"] for each in first["response"]["body"]["data"]]) == (2, 3, 5)
    assert second["error"]["code"] == "limit_exceeded"


def test_columns_tell_vectors_from_those_of_tokens() -> None:
    columns = VectorColumns("embedding", 2, 3)

    def row(data: Any, num_tokens: int) -> dict[str, Any]:
        body = {"data": [{"data": data}], "usage": {"prompt_tokens": num_tokens}}
        line = json.dumps({"custom_id": None, "response": {"body": body}, "error": None})
        found = parquet_row(0, f"{line}\n".encode(), columns)
        return {key: found[key] for key in ("embedding", "token_embeddings")}

    def packed(*numbers: float) -> str:
        return base64.b64encode(np.array(numbers, "<f4").tobytes()).decode()

    assert row([1.0, 2.0], 2) == {"embedding": [1.0, 2.0], "token_embeddings": None}
    assert row(packed(1, 2), 2) == {"embedding": [1.0, 2.0], "token_embeddings": None}
    tokens = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert row(tokens, 2) == row(packed(1, 2, 3, 4, 5, 6), 2) == {"embedding": None, "token_embeddings": tokens}
    assert row([[1.0, 2.0]], 1) == {"embedding": None, "token_embeddings": None}
    assert row(packed(1, 2, 3, 4), 2) == {"embedding": None, "token_embeddings": None}


def test_rows_of_numbers_are_written_as_lists() -> None:
    numbers = np.random.default_rng(3).normal(size=(7, 5)).astype(np.float32)
    numbers[0, 0], numbers[1, 1], numbers[2, 2] = 0.0, 1e-30, -2.5
    expected = [shortest_decimals(each) for each in numbers]
    assert shortest_decimals(numbers) == expected
    assert shortest_text(numbers) == json.dumps(expected)
    assert shortest_text(numbers[:1, :1]) == "[[0.0]]"
