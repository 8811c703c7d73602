"""Pooled rows of a job: their settings, their bodies, and rows of the other runner."""

import base64
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from cut_jobs import Ended, end_after
from jobs_of_rows import answers_of_job, openai_row
from openai.types import CreateEmbeddingResponse
from pooling_models import SIZES, pooling_folder, reference_logits_of_labels, reference_vector
from pydantic import TypeAdapter

from spmd_worker.base.config.schema import SchedulerConfig
from spmd_worker.frontends.batch.row_runner import RowRunner
from spmd_worker.frontends.openai.row import Row, RowError
from spmd_worker.frontends.openai.row_parser import parse_row
from spmd_worker.frontends.replay.step_log import StepLogWriter, read_step_log
from spmd_worker.frontends.tools import replay
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.tokenizer import Tokenizer

TEXTS = ["hello world", "the cache", "naïve café 你好"]


def openai(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return openai_row(custom_id, f"/v1/{url}", body)


EMBEDDED = [
    openai("one", "embeddings", model="m", input=TEXTS[0]),
    openai("many", "embeddings", input=TEXTS, encoding_format="base64"),
    openai("ids", "embeddings", input=[40, 50, 60]),
    openai("lists", "embeddings", input=[[40, 50, 60], [7]], encoding_format="float", dimensions=16),
    {"custom_id": "plain", "embed": TEXTS[1], "dimensions": 32},
    {"embed": [40, 50, 60]},
    openai("score", "score", text_1=TEXTS[0], text_2=[TEXTS[0], TEXTS[1]]),
    openai("rank", "rerank", query=TEXTS[0], documents=[TEXTS[2], TEXTS[0], {"text": TEXTS[1]}], top_n=2),
    {"custom_id": "generates", "prompt": "hello"},
    {"custom_id": "classifies", "classify": "hello"},
    openai("chats", "chat/completions", messages=[{"role": "user", "content": "x"}]),
    openai("too many", "embeddings", input="x", dimensions=17),
    openai("outside", "embeddings", input=[[40], [4000]]),
    openai("long", "embeddings", input="hello " * 300),
    openai("cut", "embeddings", input="hello " * 300, truncate_prompt_tokens=-1),
]


def answered(
    folder: Path,
    name: str,
    rows: list[Any],
    output: str = "out.jsonl",
    model: Mapping[str, Any] | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    scheduler = SchedulerConfig(**settings)
    given = {"dtype": "auto", "num_blocks": 64, "scheduler": scheduler, "step_log": True, "options": model}
    return answers_of_job(folder, pooling_folder(name), rows, output, **given)


def token_ids(text: str) -> list[int]:
    return Tokenizer.open(pooling_folder("last")).encode(text)


def near(ours: list[float], prompt: str | list[int], dimensions: int | None = None) -> bool:
    prompt = token_ids(prompt) if isinstance(prompt, str) else prompt
    return ours == pytest.approx(reference_vector("last", prompt, dimensions).tolist(), abs=1e-5)


def test_every_row_kind_gets_vectors_or_named_error(tmp_path: Path) -> None:
    rows = answered(tmp_path, "last", EMBEDDED)
    by_id = {row["custom_id"]: row for row in rows}
    bodies = {name: row["response"]["body"] for name, row in by_id.items() if row.get("response")}
    for name in ("one", "ids", "lists"):
        TypeAdapter(CreateEmbeddingResponse).validate_python(bodies[name], strict=True)
    assert near(bodies["one"]["data"][0]["embedding"], TEXTS[0])
    assert bodies["one"]["model"] == "m"
    assert bodies["one"]["usage"] == {
        "prompt_tokens": len(token_ids(TEXTS[0])),
        "total_tokens": len(token_ids(TEXTS[0])),
    }
    for text, entry in zip(TEXTS, bodies["many"]["data"], strict=True):
        content = base64.b64decode(entry["embedding"])
        assert near(list(struct.unpack(f"<{SIZES['hidden_size']}f", content)), text)
    assert [entry["index"] for entry in bodies["many"]["data"]] == [0, 1, 2]
    assert near(bodies["lists"]["data"][0]["embedding"], [40, 50, 60], 16)
    assert near(bodies["lists"]["data"][1]["embedding"], [7], 16)
    assert near(by_id["plain"]["embedding"], TEXTS[1], 32)
    assert rows[5]["embedding"] == bodies["ids"]["data"][0]["embedding"]
    assert rows[5]["usage"] == {"prompt_tokens": 3}
    scores = [entry["score"] for entry in bodies["score"]["data"]]
    assert scores[0] == pytest.approx(1.0, abs=1e-12)
    first, second = (reference_vector("last", token_ids(text)) for text in TEXTS[:2])
    assert scores[1] == pytest.approx(float(first @ second), abs=1e-5)
    results = bodies["rank"]["results"]
    assert [len(results), results[0]["index"], results[0]["document"]] == [2, 1, {"text": TEXTS[0]}]
    assert results[0]["relevance_score"] > results[1]["relevance_score"]
    codes = {name: row["error"]["code"] for name, row in by_id.items() if row["error"]}
    assert codes == {
        "generates": "wrong_runner",
        "classifies": "wrong_runner",
        "chats": "wrong_runner",
        "too many": "invalid_value",
        "outside": "token_out_of_vocabulary",
        "long": "prompt_too_long",
    }
    assert "model.runner=generate" in by_id["generates"]["error"]["message"]


@pytest.mark.matrix
def test_pooled_rows_have_equal_bytes_in_any_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A classifier scores pairs."""
    rows = answered(tmp_path, "last", EMBEDDED)
    assert answered(tmp_path, "last", EMBEDDED, "b.jsonl", max_num_batched_tokens=8, max_num_seqs=2) == rows
    # Vectors are in the log by their digests, and computed again they have the same.
    assert replay.main([str(tmp_path / "b.jsonl.run" / "steps.log"), "--with-model"]) == 0
    assert re.search(r"([1-9]\d*) of \1 tokens equal", capsys.readouterr().out)
    (tmp_path / "scored").mkdir()
    asked = [
        {"classify": TEXTS[0]},
        {"reward": TEXTS[0]},
        openai("s", "score", text_1=TEXTS[0], text_2=TEXTS[1:]),
        openai("e", "embeddings", input="x"),
    ]
    plain, raw, scored, refused = answered(tmp_path / "scored", "reward", asked)
    logit = reference_logits_of_labels("reward", token_ids(TEXTS[0]))
    assert raw["scores"] == pytest.approx(logit.tolist(), abs=1e-5)
    assert plain["scores"] == pytest.approx(logit.sigmoid().tolist(), abs=1e-5)
    for entry, text in zip(scored["response"]["body"]["data"], TEXTS[1:], strict=True):
        pair = reference_logits_of_labels("reward", token_ids(TEXTS[0] + text)).sigmoid()
        assert entry["score"] == pytest.approx(float(pair), abs=1e-5)
    assert refused["error"]["code"] == "wrong_runner"
    assert "classify, score, reward" in refused["error"]["message"]


@pytest.mark.matrix
def test_killed_vector_job_ends_with_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(tmp_path, "last", EMBEDDED)
    whole = (tmp_path / "out.jsonl").read_bytes()
    for num_rows in (2, 6):
        output = f"killed {num_rows}.jsonl"
        with monkeypatch.context() as patch:
            end_after(patch, num_rows)
            with pytest.raises(Ended):
                answered(tmp_path, "last", EMBEDDED, output)
        assert not (tmp_path / output).exists()
        answered(tmp_path, "last", EMBEDDED, output)
        assert (tmp_path / output).read_bytes() == whole


@pytest.mark.matrix
def test_pooling_settings_are_replayed_from_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Negative control: without a setting in the log's header its vectors are others, or none."""
    for name, model in (
        ("mean", {"runner": "pooling", "pooling_type": "mean"}),
        ("token", {"runner": "pooling", "classifier_from_token": ["a", "b"]}),
    ):
        rows = [{"classify" if name == "token" else "embed": text} for text in TEXTS]
        assert not any(row["error"] for row in answered(tmp_path, "causal", rows, f"{name}.jsonl", model))
        log = tmp_path / f"{name}.jsonl.run" / "steps.log"
        assert replay.main([str(log), "--with-model"]) == 0
        assert re.search(r"([1-9]\d*) of \1 tokens equal", capsys.readouterr().out)
        found = read_step_log(log)
        # A folder that generates, with a classifier, pools by itself.
        others = [
            {"pooling_type": None, "classifier_from_token": None},
            *([{"runner": "auto"}] if name == "mean" else []),
        ]
        for changes in others:
            with StepLogWriter(tmp_path / "other.log", replace(found.header, **changes)) as writer:
                for payload in found.messages():
                    writer.write(payload)
            assert replay.main([str(tmp_path / "other.log"), "--with-model"]) != 0
        capsys.readouterr()


@pytest.mark.matrix
def test_texts_are_admitted_by_capacity_not_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, seen = RowRunner.step, []
    monkeypatch.setattr(RowRunner, "step", lambda self: (seen.append(self.num_requests), step(self))[1])
    rows = [openai(str(number), "embeddings", input=TEXTS * 4) for number in range(20)]
    found = answered(tmp_path, "last", rows, max_num_seqs=4)
    assert all(len(each["response"]["body"]["data"]) == 12 for each in found)
    # Twice what runs at a time, and the row with which there are more.
    assert max(seen) <= 2 * 4 + 12


@pytest.mark.matrix
def test_parquet_file_has_vectors_in_fixed_size_lists(tmp_path: Path) -> None:
    # A row may be called as what stands for numbers while a line is made (`decimals.py`).
    asked = [*EMBEDDED[:6], openai("\0numbers\0", "embeddings", input=TEXTS[0])]
    rows = answered(tmp_path, "last", asked, "out.parquet")
    kind = pyarrow.parquet.read_schema(tmp_path / "out.parquet").field("embedding").type
    assert kind == pyarrow.list_(pyarrow.float32(), SIZES["hidden_size"])
    assert near(rows[0]["embedding"], TEXTS[0])
    assert rows[5]["embedding"] == rows[2]["embedding"]
    assert [row["embedding"] is None for row in rows] == [False, True, False, True, True, False, False]
    assert (rows[6]["custom_id"], rows[6]["embedding"]) == ("\0numbers\0", rows[0]["embedding"])


def test_invalid_pooled_row_is_error_row_by_name() -> None:
    cases = {
        '{"embed": "a", "reward": "b"}': "conflicting_prompts",
        '{"embed": "a", "prompt": "b"}': "conflicting_prompts",
        '{"embed": null}': "missing_prompt",
        '{"embed": "a", "temperature": 1}': "unknown_key",
        '{"embed": ""}': "empty_prompt",
        '{"embed": "a", "dimensions": 0}': "invalid_value",
        '{"embed": 5}': "invalid_value",
        **{
            json.dumps(openai("x", url, **body)): code
            for url, body, code in (
                ("embeddings", {}, "missing_prompt"),
                ("embeddings", {"input": []}, "empty_prompt"),
                ("embeddings", {"input": ["a", 5]}, "invalid_value"),
                ("embeddings", {"input": "a", "encoding_format": "hex"}, "invalid_value"),
                ("embeddings", {"input": ["a"] * 2049}, "limit_exceeded"),
                ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "invalid_value"),
                ("rerank", {"query": "a", "documents": []}, "empty_prompt"),
                ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "invalid_value"),
            )
        },
    }
    for line, code in cases.items():
        row = parse_row(0, line.encode(), SamplingParams())
        assert isinstance(row, RowError), line
        assert row.code == code, line
    for line in (b'{"embed": "a"}', b'{"embed": "a", "prompt": null}', b'{"embed": null, "prompt": "a"}'):
        assert isinstance(parse_row(0, line, SamplingParams()), Row), line
    typo = parse_row(0, b'{"clasify": "a"}', SamplingParams())
    assert isinstance(typo, RowError)
    assert "did you mean 'classify'?" in typo.message
