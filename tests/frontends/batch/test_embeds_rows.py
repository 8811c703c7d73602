"""Rows of a job with `prompt_embeds`: files under the folder of the input, base64 text, and what is rejected."""

import base64
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_of_rows import answers_of_job, openai_row
from reference_models import checkpoint_folder
from safetensors.torch import load_file, save, save_file
from serving import MODEL, ServedHere

IDS = [[5, 6, 7, 8], list(range(60, 100)), [9, 10]]
GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    return load_file(checkpoint_folder("llama3") / "model.safetensors")["model.embed_tokens.weight"]


def text_of(rows: torch.Tensor) -> str:
    return base64.b64encode(save({"any": rows})).decode()


def test_files_and_texts_answer_as_ids(tmp_path: Path, table: torch.Tensor):
    (tmp_path / "rows").mkdir()
    save_file({"a": table[IDS[0]], "prompt_embeds": table[IDS[1]]}, tmp_path / "rows/two.safetensors")
    save_file({"one": table[IDS[2]][None]}, tmp_path / "one.safetensors")
    given: list[Any] = [
        {"path": "rows/two.safetensors", "tensor": "a"},
        {"path": "rows/two.safetensors"},
        {"path": str(tmp_path / "one.safetensors")},
        *[text_of(table[ids]) for ids in IDS],
    ]
    rows = [{"prompt_token_ids": ids, **GREEDY} for ids in IDS]
    rows += [{"prompt_embeds": each, **GREEDY} for each in given]
    rows += [openai_row(f"o{i}", "/v1/completions", {"prompt": ids, **GREEDY}) for i, ids in enumerate(IDS)]
    rows += [openai_row(f"e{i}", "/v1/completions", {"prompt_embeds": each, **GREEDY}) for i, each in enumerate(given)]
    answers = answers_of_job(tmp_path, checkpoint_folder("llama3"), rows)
    plain = [(each["outputs"], each["usage"]) for each in answers[:9]]
    assert plain == plain[:3] * 3
    bodies = [(each["response"]["body"]["choices"], each["response"]["body"]["usage"]) for each in answers[9:]]
    assert bodies == bodies[:3] * 3
    assert bodies[1][1]["prompt_tokens"] == 40


def test_invalid_rows_are_error_rows(tmp_path: Path, table: torch.Tensor):
    inside, outside = tmp_path / "job", tmp_path / "outside.safetensors"
    (inside / "folder").mkdir(parents=True)
    save_file({"rows": table[:3]}, outside)
    save_file({"a": table[:3], "b": table[3:6]}, inside / "two.safetensors")
    (inside / "link.safetensors").symlink_to(outside)
    os.mkfifo(inside / "fifo.safetensors")
    torch.save({"rows": table[:3]}, inside / "pickle.safetensors")
    (inside / "cut.safetensors").write_bytes(outside.read_bytes()[:-1])
    nan = table[:3].clone()
    nan[1, 4] = torch.nan
    big = torch.full((2, 64), 3e38)
    pickled = base64.b64encode((inside / "pickle.safetensors").read_bytes()).decode()
    cases: list[tuple[Any, str, str]] = [
        ({"path": "../outside.safetensors"}, "embeddings_outside", "is outside of"),
        ({"path": "link.safetensors"}, "embeddings_outside", "is outside of"),
        ({"path": "/etc/passwd"}, "embeddings_outside", "is outside of"),
        ({"path": "a\0b"}, "embeddings_outside", "is outside of"),
        ({"path": "\ud800"}, "embeddings_missing", "cannot be the name of a file"),
        ({"path": "none.safetensors"}, "embeddings_missing", "No such file"),
        ({"path": "folder"}, "embeddings_missing", "directory"),
        ({"path": "fifo.safetensors"}, "embeddings_missing", "not a regular file"),
        ({"path": "pickle.safetensors"}, "invalid_embeddings", "a pickle, which is never read"),
        ({"path": "cut.safetensors"}, "invalid_embeddings", "truncated"),
        ({"path": "two.safetensors"}, "invalid_embeddings", "no tensor 'prompt_embeds': it has a, b"),
        ({"path": "two.safetensors", "tensor": "c"}, "invalid_embeddings", "no tensor 'c'"),
        ({"file": "two.safetensors"}, "invalid_value", "must be an object with path"),
        (pickled, "invalid_embeddings", "a pickle, which is never read"),
        ("no base64!", "invalid_embeddings", "is not base64"),
        ("", "invalid_embeddings", "is not a safetensors file"),
        (text_of(nan), "invalid_embeddings", "[1][4] is not finite"),
        (text_of(big.double()), "invalid_embeddings", "is F64"),
        (text_of(table[:3, :7].contiguous()), "invalid_embeddings", "has the shape [3, 7]"),
        (text_of(table[[1] * 513]), "prompt_too_long", "513 rows"),
        (7, "invalid_value", "must be base64 text"),
    ]
    rows: list[Any] = [{"prompt_embeds": value, "max_tokens": 1} for value, _, _ in cases]
    good = {"prompt_embeds": text_of(table[:3]), "max_tokens": 1}
    rows += [good | {"prompt": "a"}, good | {"prompt_logprobs": 1}, good | {"truncate_prompt_tokens": 2}, good]
    rows += [openai_row("e", "/v1/completions", good | {"echo": True})]
    answers = answers_of_job(inside, checkpoint_folder("llama3"), rows)
    for answer, (value, code, reason) in zip(answers, cases):
        assert answer["error"]["code"] == code, (value, answer)
        assert reason in answer["error"]["message"], (value, answer)
    both, needs_ids, truncated, fine, echoed = answers[len(cases) :]
    codes = [each["error"]["code"] for each in (both, needs_ids, truncated)]
    assert codes == ["conflicting_prompts", "conflicting_keys", "conflicting_keys"]
    assert fine["error"] is None
    assert "echo repeats" in echoed["error"]["message"]


def test_server_takes_texts_and_no_files():
    weights = load_file(MODEL / "model.safetensors")
    table = next(each for name, each in weights.items() if name.endswith("embed_tokens.weight"))
    body = {"max_tokens": 4, "temperature": 0}
    with ServedHere(max_queued=4) as server:
        by_ids = server.client.ask("/v1/completions", body | {"prompt": [10, 11, 12]})[1]
        by_rows = server.client.ask("/v1/completions", body | {"prompt_embeds": text_of(table[[10, 11, 12]])})[1]
        assert (by_rows["choices"], by_rows["usage"]) == (by_ids["choices"], by_ids["usage"])
        # As clients send it that require a prompt.
        beside = body | {"prompt": "", "prompt_embeds": text_of(table[[10, 11, 12]])}
        assert server.client.ask("/v1/completions", beside)[1]["choices"] == by_ids["choices"]
        status, said, _ = server.client.ask("/v1/completions", beside | {"prompt": "a"})
        assert (status, said["error"]["code"]) == (400, "conflicting_prompts")
        status, said, _ = server.client.ask("/v1/completions", body | {"prompt_embeds": {"path": "a.safetensors"}})
        assert (status, said["error"]["code"]) == (400, "embeddings_outside")
