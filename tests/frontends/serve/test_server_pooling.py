"""A server of a model that pools: bodies are those of a job's rows, and OpenAI's client takes them."""

import base64
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from jobs_of_rows import answers_of_job, openai_row
from json_files import edit
from pooling_models import pooling_folder, reference_logits_of_labels
from serving import KEY, ServedHere
from waiting import wait_until

from spmd_worker.frontends.openai import openai_stream
from spmd_worker.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.matrix

TEXTS = ["hello world", "the cache", "naïve café 你好"]
LABELS = ["no", "perhaps", "yes"]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": TEXTS[0]}),
    ("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": [[40, 50, 60], [7]], "dimensions": 16, "model": "named"}),
    ("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}),
    ("/v1/rerank", {"query": TEXTS[0], "documents": [TEXTS[2], TEXTS[0], TEXTS[1]], "top_n": 2}),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServedHere]:
    with ServedHere(max_num_seqs=4, model=pooling_folder("last"), max_queued=12) as served:
        yield served
        assert served.thread.is_alive()
        wait_until(lambda: served.num_used_blocks == 0 and served.exchange.num_sequences == 0)


def without_names(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in ("id", "created", "model")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A job's answers to the same bodies."""
    folder = tmp_path_factory.mktemp("job")
    rows = [openai_row(str(number), url, body) for number, (url, body) in enumerate(REQUESTS)]
    answers = answers_of_job(folder, pooling_folder("last"), rows, num_blocks=64)
    return [without_names(answer["response"]["body"]) for answer in answers]


def answers(server: ServedHere) -> list[dict[str, Any]]:
    """All at once."""
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        found = list(pool.map(lambda each: server.client.ask(*each), REQUESTS))
    assert [status for status, _, _ in found] == [200] * len(REQUESTS), found
    return [body for _, body, _ in found]


@pytest.mark.guarantee("/v1/embeddings, score, rerank: a job's numbers")
def test_concurrent_pooling_requests_equal_job(server: ServedHere, expected: list[dict[str, Any]]) -> None:
    found = answers(server)
    assert [without_names(body) for body in found] == expected
    own = server.client.ask("/v1/models", method="GET")[1]["data"][0]["id"]
    assert [body["model"] for body in found] == [own, own, "named", own, own]
    assert found[3]["id"].startswith("score-")
    assert found[4]["id"] != answers(server)[4]["id"]


@pytest.mark.control("/v1/embeddings, score, rerank: a job's numbers")
def test_comparison_detects_texts_in_another_order(
    server: ServedHere, expected: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    body = openai_stream.pooling_body
    monkeypatch.setattr(openai_stream, "pooling_body", lambda row, outputs, *rest: body(row, outputs[::-1], *rest))
    found = [without_names(each) for each in answers(server)]
    assert [one == other for one, other in zip(found, expected)] == [True, False, False, False, False]


def test_openai_client_accepts_vectors(server: ServedHere) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.client.port}/v1", api_key=KEY, max_retries=0) as client:
        # It asks for base64 by itself.
        found = client.embeddings.create(model="m", input=TEXTS)
        plain = client.embeddings.create(model="m", input=TEXTS, encoding_format="float")
    for one, other in zip(found.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding)
    assert found.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("url", "body", "code", "words"),
    [
        ("/v1/completions", {"prompt": "a"}, "wrong_runner", "model.runner"),
        ("/v1/embeddings", {"input": "a", "stream": True}, "unsupported_value", "cannot be streamed"),
        ("/v1/embeddings", {"input": ["a"] * 17}, "limit_exceeded", "17 sequences"),
        ("/v1/embeddings", {"input": ["a", "hello " * 300]}, "prompt_too_long", "tokens"),
        ("/v1/embeddings", {"input": [[4000]]}, "token_out_of_vocabulary", "4000"),
    ],
)
def test_unanswerable_request_is_reported(
    server: ServedHere, url: str, body: dict[str, Any], code: str, words: str
) -> None:
    status, found, _ = server.client.ask(url, body)
    assert (status, found["error"]["code"]) == (400, code)
    assert words in found["error"]["message"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose labels have names."""
    folder = tmp_path_factory.mktemp("classifier")
    shutil.copytree(pooling_folder("labels"), folder, dirs_exist_ok=True)
    edit(folder / "config.json", id2label={str(index): name for index, name in enumerate(LABELS)})
    return folder


def test_classes_equal_transformers_and_rows(classifier: Path, tmp_path: Path) -> None:
    """Regression: there was no /classify."""
    tokenizer = Tokenizer.open(classifier)
    prompts = [tokenizer.encode(text) for text in [*TEXTS, "add 1 2", "z"]]
    body = {"input": prompts, "model": "named"}
    with ServedHere(model=classifier, max_queued=12) as served:
        status, found, _ = served.client.ask("/classify", body)
        texts = served.client.ask("/classify", {"input": TEXTS})[1]
        raw = served.client.ask("/classify", {"input": TEXTS[0], "use_activation": False})[1]["data"]
        refused = served.client.ask("/v1/embeddings", {"input": "a"})[1]["error"]
    assert (status, found["object"], found["model"], found["id"][:9]) == (200, "list", "named", "classify-")
    num_tokens = sum(map(len, prompts))
    assert found["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    logits = [reference_logits_of_labels("labels", prompt) for prompt in prompts]
    for index, (entry, expected) in enumerate(zip(found["data"], logits, strict=True)):
        assert entry["probs"] == pytest.approx(expected.softmax(0).tolist(), abs=1e-5)
        named = {"index": index, "label": LABELS[int(expected.argmax())], "num_classes": 3}
        assert entry == {**named, "probs": entry["probs"]}
    assert len({entry["label"] for entry in found["data"]}) > 1
    assert texts["data"] == found["data"][:3]
    assert raw[0]["probs"] == pytest.approx(logits[0].tolist(), abs=1e-5)
    assert refused["code"] == "wrong_runner"
    rows = [openai_row("a", "/classify", body), openai_row("b", "/classify", {"input": TEXTS[0]})]
    first, second = answers_of_job(tmp_path, classifier, rows, "out.parquet", num_blocks=64)
    assert without_names(json.loads(first["json"])["response"]["body"]) == without_names(found)
    assert (first["scores"], second["scores"]) == (None, pytest.approx(found["data"][0]["probs"]))


def test_labels_without_names_have_those_of_transformers() -> None:
    with ServedHere(model=pooling_folder("reward"), max_queued=4) as served:
        ((entry,), scores) = (
            served.client.ask(url, body)[1]["data"]
            for url, body in (("/classify", {"input": "a b"}), ("/score", {"text_1": "a", "text_2": " b"}))
        )
    assert entry == {"index": 0, "label": "LABEL_0", "probs": [scores[0]["score"]], "num_classes": 1}


@pytest.mark.parametrize(
    ("folder", "task", "path", "key"),
    [
        ("last", None, "/v1/embeddings", "embedding"),
        ("last", "embed", "/v1/embeddings", "embedding"),
        ("labels", None, "/classify", "probs"),
        ("reward", "reward", "", ""),
    ],
)
def test_pooling_has_the_numbers_of_its_task(folder: str, task: str | None, path: str, key: str, tmp_path: Path):
    model = pooling_folder(folder)
    body: dict[str, Any] = {"input": TEXTS, "model": "named", **({} if task is None else {"task": task})}
    with ServedHere(model=model, max_queued=8) as served:
        status, found, _ = served.client.ask("/pooling", {**body, "request_id": "run-7"})
        packed = served.client.ask("/pooling", {**body, "encoding_format": "base64"})[1]["data"]
        refused = [served.client.ask("/pooling", {**body, "task": each}) for each in ("token_classify", "generate", 5)]
        raw = {"input": TEXTS, "use_activation": False}
        others = served.client.ask(path or "/classify", {"input": TEXTS} if path else raw)[1]
    assert (status, found["id"], found["object"], found["model"]) == (200, "pooling-run-7", "list", "named")
    expected = [each[key or "probs"] for each in others["data"]]
    assert found["data"] == [{"index": i, "object": "pooling", "data": each} for i, each in enumerate(expected)]
    assert found["usage"] == others["usage"]
    for entry, numbers in zip(packed, expected, strict=True):
        assert np.frombuffer(base64.b64decode(entry["data"]), "<f4").tolist() == pytest.approx(numbers)
    assert [each[0] for each in refused] == [400] * 3
    assert "names a *ForTokenClassification" in refused[0][1]["error"]["message"]
    rows = [openai_row("a", "/pooling", body), openai_row("b", "/pooling", {**body, "input": TEXTS[1]})]
    first, second = answers_of_job(tmp_path, model, rows, "out.parquet", num_blocks=64)
    assert without_names(json.loads(first["json"])["response"]["body"]) == without_names(found)
    assert second["embedding" if folder == "last" else "scores"] == pytest.approx(expected[1])


def test_leaving_client_frees_slots_of_its_texts(server: ServedHere) -> None:
    server.allow(0)
    try:
        connection = server.client.send("/v1/embeddings", {"input": TEXTS * 4})
        wait_until(lambda: server.exchange.num_sequences == 12)
        connection.close()
        wait_until(lambda: server.exchange.num_sequences == 0)
    finally:
        server.allow(None)
    assert server.client.ask("/v1/embeddings", {"input": TEXTS * 4})[0] == 200


def test_generating_server_says_which_runner_has_vectors() -> None:
    with ServedHere(max_queued=4) as served:
        for path in ("/v1/embeddings", "/pooling"):
            status, found, _ = served.client.ask(path, {"input": "a"})
            assert (status, found["error"]["code"]) == (400, "wrong_runner")
            assert "model.runner=pooling" in found["error"]["message"]


def test_ending_server_fails_open_requests(tmp_path: Path) -> None:
    with ServedHere(model=pooling_folder("last"), max_queued=4, drain_s=0) as served, ThreadPoolExecutor(1) as pool:
        served.allow(0)
        found = pool.submit(served.client.ask, "/v1/embeddings", {"input": TEXTS})
        wait_until(lambda: len(served.exchange._open) == 1)
        served.exchange.fail("planted")
        status, body, _ = found.result()
        served.allow(None)
    assert (status, body["error"]["message"]) == (503, "planted")
