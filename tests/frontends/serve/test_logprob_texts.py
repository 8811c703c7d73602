"""Log-probabilities' texts, bytes and offsets: those of the answer's text, whole, streamed and in a job's rows."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jobs_of_rows import answers_of_job, openai_row
from openai.types import Completion
from openai.types.chat import ChatCompletion
from serving import JSON, MODEL, Client, ServedHere, joined, without_names

from spmd_worker import LLM, SamplingParams
from spmd_worker.engine import outputs
from spmd_worker.tokenizer.tokenizer import Tokenizer

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "add 12 3 ="}]
SMILEYS = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "a😀b€ 你"}}}
DRAWN = {"temperature": 1.2, "max_tokens": 24, "ignore_eos": True}
TOKENIZER = Tokenizer.open(MODEL)
SPECIAL = TOKENIZER.special_ids(list(TOKENIZER.vocabulary()))
BYTES = [i for i in range(TOKENIZER.vocab_size) if (TOKENIZER.level_bytes(i) or b"")[:1] in b"\xf0\x9f\x98\x80\xe2 a"]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with ServedHere() as served:
        yield served.client


def requests() -> list[tuple[str, JSON]]:
    """Whole characters of several tokens, drawn bytes, ends that are special tokens, and stop strings."""
    found: list[tuple[str, JSON]] = [
        (CHAT, {"messages": USER, "max_tokens": 60, "temperature": 0, "response_format": SMILEYS}),
        (CHAT, {"messages": USER, "max_tokens": 20, "temperature": 0}),
        (TEXT, {"prompt": "add 1 2 =", "max_tokens": 20, "temperature": 0}),
    ]
    for seed in (1, 2):
        drawn = {**DRAWN, "seed": seed, "allowed_token_ids": BYTES}
        found += [(TEXT, {"prompt": "é", **drawn}), (CHAT, {"messages": USER, **drawn})]
        cut = {**DRAWN, "seed": seed, "stop": ["1", "a ", "😀", "\ufffd"]}
        found += [(TEXT, {"prompt": "add 1 2 =", **cut}), (CHAT, {"messages": USER, **cut})]
        found += [(TEXT, {"prompt": "add 1 2 =", **cut, "include_stop_str_in_output": True})]
        found += [(TEXT, {"prompt": "a", **DRAWN, "seed": seed, "skip_special_tokens": seed % 2 == 0})]
    return [(url, {**body, "logprobs": True, "top_logprobs": 3} if url == CHAT else {**body, "logprobs": 3})
            for url, body in found]  # fmt: skip


REQUESTS = requests()


def check_choice(choice: JSON) -> None:
    """Tokens that are in the text begin there, which special ones that are skipped and what a stop string cut are not,
    and the bytes of all are the text.
    """
    if "text" in choice:
        logprobs, text = choice["logprobs"], choice["text"]
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(logprobs["top_logprobs"])
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        for token, offset, top in zip(
            logprobs["tokens"], logprobs["text_offset"], logprobs["top_logprobs"], strict=True
        ):
            assert token in top
            is_cut = offset == len(text) and choice["finish_reason"] == "stop"
            assert text[offset:].startswith(token) or is_cut or token in SPECIAL, (text, token, offset)
        return
    text, content = choice["message"]["content"], choice["logprobs"]["content"]
    own = b"".join(bytes(each["bytes"]) for each in content)
    assert own.decode("utf-8", "replace") == text
    assert all(each["bytes"] is not None for entry in content for each in entry["top_logprobs"])


@pytest.mark.finding(number="A8")
def test_bytes_and_offsets_are_the_texts(client: Client, tmp_path: Path):
    rows = [openai_row(str(number), url, body) for number, (url, body) in enumerate(REQUESTS)]
    answers = [answer["response"]["body"] for answer in answers_of_job(tmp_path, MODEL, rows)]

    def ask(request: tuple[str, JSON]) -> tuple[JSON, JSON]:
        url, body = request
        return client.ask(url, body)[1], joined(client.stream(url, {**body, "stream_options": {"include_usage": True}}))

    with ThreadPoolExecutor(4) as pool:
        asked = list(pool.map(ask, REQUESTS))
    for (url, _), of_job, (whole, streamed) in zip(REQUESTS, answers, asked, strict=True):
        assert without_names(whole) == without_names(of_job) == without_names(streamed)
        (Completion if url == TEXT else ChatCompletion).model_validate(whole)
        for choice in whole["choices"]:
            check_choice(choice)
    assert answers[0]["choices"][0]["message"]["content"] == '"a😀b€ 你"'
    parts = [each for each in answers[0]["choices"][0]["logprobs"]["content"] if each["bytes"] == [0xF0]]
    assert [each["token"] for each in parts] == [""], "the beginning of the smiley"


def echoes() -> list[JSON]:
    """Prompts that begin or end in part of a character, and that hold special tokens."""
    smiley = TOKENIZER.encode("a😀", add_special_tokens=False)
    special = next(iter(SPECIAL))
    prompts = [smiley, smiley[1:], smiley[2:], smiley[:-1], smiley[:2], [*smiley, SPECIAL[special], *smiley]]
    prompts += [f"a{special}b 😀 c", f"{special}b c", f"{special}{special} 😀"]
    found: list[JSON] = [{"prompt": each, "skip_special_tokens": skips} for each in prompts for skips in (True, False)]
    found = [{**each, "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0} for each in found]
    return [*found, *({**each, "max_tokens": 0} for each in found)]


@pytest.mark.finding(number="A8")
def test_echoed_prompt_has_its_tokens_at_their_offsets(client: Client, tmp_path: Path):
    bodies = echoes()
    rows = [openai_row(str(number), TEXT, body) for number, body in enumerate(bodies)]
    answers = [answer["response"]["body"]["choices"][0] for answer in answers_of_job(tmp_path, MODEL, rows)]
    for body, choice in zip(bodies, answers, strict=True):
        streamed = joined(client.stream(TEXT, {**body, "stream_options": {"include_usage": True}}))["choices"][0]
        assert streamed == choice, body
        text, logprobs = choice["text"], choice["logprobs"]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            is_left_out = token in SPECIAL and body["skip_special_tokens"]
            assert text[offset:].startswith(token) or is_left_out, (body, choice)
        if isinstance(body["prompt"], str) and body["max_tokens"]:
            # No token of it is left out.
            assert "".join(logprobs["tokens"]) == text


@pytest.mark.finding(number="A8")
def test_log_probabilities_of_output_have_bytes():
    params = SamplingParams(**DRAWN, seed=3, logprobs=2, prompt_logprobs=1)
    with LLM(MODEL, num_blocks=64) as llm:
        (output,) = llm.generate(["add 😀 é ="], params, use_tqdm=False)
    (completion,) = output.outputs
    json.dumps(completion.logprobs)
    entries = [next(iter(each.values())) for each in completion.logprobs or []]
    assert b"".join(bytes(each.token_bytes or ()) for each in entries).decode("utf-8", "replace") == completion.text
    positions = output.prompt_logprobs or []
    prompt = [position[i] for position, i in zip(positions, output.prompt_token_ids, strict=True) if position]
    first = TOKENIZER.decode(output.prompt_token_ids[:1])
    assert first + "".join(each.decoded_token or "" for each in prompt) == "add 😀 é ="


@pytest.mark.finding(number="A8")
def test_logprob_check_detects_text_behind_stop_string(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The negative control."""
    body: dict[str, Any] = {"messages": USER, **DRAWN, "logprobs": True, "stop": [str(i) for i in range(10)]}
    (whole,) = answers_of_job(tmp_path, MODEL, [openai_row("x", CHAT, body)])
    check_choice(whole["response"]["body"]["choices"][0])
    monkeypatch.setattr(outputs, "_truncate_logprobs", lambda logprobs, _length: logprobs)
    (tmp_path / "again").mkdir()
    (uncut,) = answers_of_job(tmp_path / "again", MODEL, [openai_row("x", CHAT, body)])
    assert uncut["response"]["body"]["choices"][0]["finish_reason"] == "stop"
    with pytest.raises(AssertionError):
        check_choice(uncut["response"]["body"]["choices"][0])
