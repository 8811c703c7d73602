"""Keys of rows: what rows share at their beginning, their keys share."""

from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest

from spmd_worker.chat.chat_request import ChatRequest
from spmd_worker.frontends.batch.prefix_key import prefix_key, share_beginning
from spmd_worker.frontends.openai.row import (
    AudioPrompt,
    ChatPrompt,
    EmbedsPrompt,
    EncoderPrompt,
    PoolingInputs,
    Prompt,
    Row,
    TextPrompt,
    TokensPrompt,
)
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.replica.sequence.sampling_params import SamplingParams

LONG = "".join(f"line {number} of a long document\n" for number in range(400))


def row_of(prompt: Prompt, **values: Any) -> Row:
    return Row(0, None, "plain", prompt, SamplingParams(), **values)


def chat(*contents: Any) -> ChatPrompt:
    roles = ("system", "user", "assistant")
    return ChatPrompt(tuple({"role": roles[index], "content": each} for index, each in enumerate(contents)))


def num_shared(prompt: Prompt, other: Prompt) -> int:
    return num_equal(prefix_key(row_of(prompt)), prefix_key(row_of(other)))


def num_equal(key: bytes, other: bytes) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(key, other)))


@pytest.mark.parametrize(
    "prompts",
    [
        [TextPrompt("x" * 80 + tail) for tail in ("abc", "abd", "z")],
        [TokensPrompt((5,) * 80 + tail) for tail in ((7, 8, 9), (7, 8, 6), (1,))],
        [chat("x" * 80, tail) for tail in ("abc", "abd", "z")],
        [chat([{"type": "text", "text": "x" * 80 + tail}]) for tail in ("abc", "abd", "z")],
        [TextPrompt(LONG[:5000] + tail) for tail in ("a" * 600 + "b", "a" * 600 + "c", "z" * 601)],
        [EncoderPrompt(TextPrompt("x" * 80 + tail)) for tail in ("abc", "abd", "z")],
        [chat([{"type": "image_url", "image_url": {"url": f"data:{tail}"}}], "x") for tail in ("same", "same", "z")],
    ],
    ids=["text", "ids", "chat", "parts", "long", "encoder", "images"],
)
def test_longer_common_beginning_has_longer_common_key(prompts: list[Prompt]):
    near, far = num_shared(prompts[0], prompts[1]), num_shared(prompts[0], prompts[2])
    assert near > far >= 4
    assert num_shared(prompts[0], prompts[0]) == len(prefix_key(row_of(prompts[0])))


def test_rows_of_another_adapter_or_salt_share_nothing():
    prompt = TextPrompt("x" * 200)
    salted = SamplingParams(cache_salt="a")
    rows = [row_of(prompt), row_of(prompt, adapter="a"), row_of(prompt, model="m"), row_of(prompt, prompt_adapter="p")]
    keys = [prefix_key(row) for row in [*rows, replace(rows[0], sampling=salted)]]
    assert not any(share_beginning(key, other, 1) for index, key in enumerate(keys) for other in keys[:index])
    assert share_beginning(keys[0], prefix_key(row_of(TextPrompt("x" * 200 + "y"))), 3)


def test_tools_come_before_the_messages():
    tools = [({"type": "function", "function": {"name": name}},) for name in ("a", "b")]
    keys = [prefix_key(row_of(chat("x" * 200), request=ChatRequest(tools=each))) for each in (*tools, tools[0])]
    assert keys[0] == keys[2]
    assert num_equal(keys[0], keys[1]) < len(keys[0]) - 200


def test_key_of_huge_prompt_is_bounded():
    words = [TextPrompt(LONG * 20), TokensPrompt(tuple(range(100_000))), chat("a", LONG * 20)]
    assert [len(prefix_key(row_of(prompt))) < 3200 for prompt in words] == [True] * 3


def test_prompts_without_text_have_no_key_of_their_own():
    audio, embeds = AudioPrompt("a" * 100), EmbedsPrompt("b" * 100)
    assert prefix_key(row_of(audio)) == prefix_key(row_of(embeds))
    assert not share_beginning(prefix_key(row_of(audio)), prefix_key(row_of(embeds)), 1)
    huge = prefix_key(row_of(TokensPrompt((1 << 70, 2))))
    assert huge == prefix_key(row_of(audio))


def test_pooling_row_has_key_of_first_text():
    prompts = (TextPrompt("query"), TextPrompt("text"))
    pooled = row_of(prompts[0], pooling=PoolingInputs(prompts, PoolingParams(task="embed")))
    assert prefix_key(pooled) == prefix_key(row_of(prompts[0]))


@pytest.mark.parametrize(("num_bytes", "quarters", "expected"), [(60, 1, False), (100, 1, True), (100, 3, False)])
def test_shared_part_is_measured_in_quarters(num_bytes: int, quarters: int, expected: bool):
    key, other = b"a" * 400, b"a" * num_bytes + b"b" * (400 - num_bytes)
    assert share_beginning(key, other, quarters) is expected
