import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from property_examples import examples
from tokenizer_folders import CHATML, write_byte_level, write_llama_style
from transformers import AutoTokenizer

from spmd_worker.base.config.schema import RowLimits
from spmd_worker.engine.validation import RequestLimits
from spmd_worker.frontends.openai.row import ChatPrompt, EncodedRow, Row, RowError, TextPrompt, TokensPrompt
from spmd_worker.frontends.openai.row_encoding import RowContext, resolve
from spmd_worker.frontends.openai.row_parser import CustomIds, parse_row
from spmd_worker.frontends.openai.row_writer import format_error
from spmd_worker.replica.sequence.sampling_params import SAMPLING_KEYS, SamplingParams
from spmd_worker.tokenizer.tokenizer import Tokenizer

DEFAULTS = SamplingParams(temperature=0.5, max_tokens=7)


def parse(fields, defaults=DEFAULTS):
    line = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return parse_row(3, line, defaults)


def body_row(url, **body):
    return {"custom_id": "x", "method": "POST", "url": url, "body": body}


def completion(**body):
    return body_row("/v1/completions", **{"model": "m", "prompt": "hi", **body})


def chat(**body):
    return body_row("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **body})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(write_byte_level(tmp_path_factory.mktemp("model"), chat_template=CHATML))


@pytest.fixture(scope="module")
def tokenizer_without_template(tmp_path_factory):
    return Tokenizer.open(write_byte_level(tmp_path_factory.mktemp("model")))


# ---- rows that are well formed


def test_plain_row_combines_defaults_and_its_own_values():
    row = parse({"prompt": "hi", "custom_id": "a", "temperature": 0, "stop": "x", "logit_bias": {"5": 1}})
    assert row == Row(
        3,
        "a",
        "plain",
        TextPrompt("hi"),
        SamplingParams(temperature=0, max_tokens=7, stop=("x",), logit_bias=((5, 1.0),)),
    )


def test_plain_row_may_hold_token_ids_or_conversation():
    assert parse({"prompt_token_ids": [1, 2]}).prompt == TokensPrompt((1, 2))
    messages = [{"role": "system", "content": "a", "name": None}, {"role": "user", "content": "b"}]
    row = parse({"messages": messages, "chat_template_kwargs": {"enable_thinking": False}})
    expected = ({"role": "system", "content": "a"}, {"role": "user", "content": "b"})
    assert row.prompt == ChatPrompt(expected, {"enable_thinking": False})
    assert (row.kind, row.custom_id) == ("plain", None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (True, False)),
        ({"add_generation_prompt": None, "continue_final_message": None}, (True, False)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"add_generation_prompt": False, "continue_final_message": True}, (False, True)),
        ({"add_generation_prompt": True, "continue_final_message": False}, (True, False)),
    ],
)
def test_conversation_ends_as_row_says(given, expected):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for prompt in (parse(chat(messages=messages, **given)).prompt, parse({"messages": messages, **given}).prompt):
        assert (prompt.add_generation_prompt, prompt.continue_final_message) == expected
        assert prompt.continued == ("b" if expected[1] else None)


@pytest.mark.parametrize("url", ["/v1/embeddings", "/classify", None])
def test_pooled_conversation_may_be_continued(url):
    """Regression: it was an unknown key."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def row_of(**given):
        body = {"messages": messages, **given}
        return parse({"embed": body} if url is None else body_row(url, **body))

    prompt = row_of(continue_final_message=True).prompt
    assert (prompt.add_generation_prompt, prompt.continued) == (False, "b")
    both = row_of(continue_final_message=True, add_generation_prompt=True)
    assert both.code == "conflicting_keys"
    assert "the default" not in both.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a", "logprobs": 99}, "logprobs=99 must be from 0 to 64"),
        ({"prompt": "a", "logprobs": -1}, "logprobs=-1 requests the entire vocabulary: give at most 64"),
        ({"prompt": "a", "prompt_logprobs": 65}, "prompt_logprobs=65 must be from 0 to 64"),
        (completion(logprobs=-2), "logprobs=-2 must be from 0 to 64"),
        (chat(logprobs=True, top_logprobs=99), "top_logprobs=99 must be from 0 to 64"),
        (chat(logprobs=True, top_logprobs=-1), "top_logprobs=-1 requests the entire vocabulary: give at most 64"),
        ({"prompt": "a", "prompt_logprobs": 65, "prompt_logprob_start": 0}, None),
        (chat(max_completion_tokens=0), "max_completion_tokens=0 must be a whole number, 1 or more"),
        (chat(max_completion_tokens="5"), "max_completion_tokens='5' must be a whole number, 1 or more"),
        (completion(max_completion_tokens=0, echo=True), None),
    ],
)
def test_message_names_keys_and_values_of_rows(fields, message):
    """Regression: it offered -1, which no row gets, and named keys that the chat had not."""
    assert getattr(parse(fields), "message", None) == message


def test_every_sampling_key_is_known_in_both_shapes():
    values = {key: getattr(DEFAULTS, key) for key in SAMPLING_KEYS}
    assert parse({"prompt": "hi", **values}).sampling == DEFAULTS
    assert parse(completion(**values)).sampling == DEFAULTS


def test_null_is_default_unless_it_has_a_meaning():
    defaults = SamplingParams(temperature=0.5, max_tokens=7, seed=1, logprobs=2, stop=("x",))
    nothing = dict.fromkeys(SAMPLING_KEYS)
    for row in (parse({"prompt": "hi", **nothing}, defaults), parse(completion(**nothing), defaults)):
        assert row.sampling == SamplingParams(temperature=0.5, max_tokens=None, stop=("x",))


def test_null_prompt_is_absent():
    assert parse({"prompt": None, "prompt_token_ids": [1], "messages": None}).prompt == TokensPrompt((1,))


def test_message_text_parts_are_those_templates_know():
    content = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    (message,) = parse({"messages": [{"role": "user", "content": content}]}).prompt.messages
    assert message["content"] == [{"type": "text", "text": text} for text in "abc"]
    (message,) = parse({"messages": [{"role": "user", "content": []}]}).prompt.messages
    assert message["content"] == ""


def test_media_of_rows_fill_parts_of_their_type():
    kinds = ("video", "audio", "image", "video")
    content = [{"type": kind} for kind in kinds]
    given = {"images": "a.png", "videos": ["a.mp4", ["b.png"]], "audios": ["a.wav"]}
    prompt = parse({"messages": [{"role": "user", "content": content}], **given}).prompt
    assert prompt.media == ("image", "audio", "image", "image")
    first, second = prompt.images[0], prompt.images[3]
    assert (first.video, *prompt.images[1:3], second.video) == ("a.mp4", "a.wav", "a.png", ["b.png"])
    text = parse({"prompt": "a", **given}).prompt
    assert text.media == ("image", "image", "image", "audio")
    assert (text.images[0], text.images[2].video, text.images[3]) == ("a.png", ["b.png"], "a.wav")


def test_completion_body_is_mapped():
    row = parse(
        completion(max_tokens=5, stop=["a", "b"], logprobs=2, n=2, seed=9, user="u", top_k=4, stream=False, echo=False)
    )
    sampling = SamplingParams(temperature=0.5, max_tokens=5, stop=("a", "b"), logprobs=2, n=2, seed=9, top_k=4)
    assert row == Row(3, "x", "completion", TextPrompt("hi"), sampling, "m")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", TextPrompt("a")),
        ([1, 2], TokensPrompt((1, 2))),
        (["a"], TextPrompt("a")),
        ([[1, 2]], TokensPrompt((1, 2))),
    ],
)
def test_completion_prompt_may_be_text_ids_or_list(prompt, expected):
    assert parse(completion(prompt=prompt)).prompt == expected


def test_chat_body_is_mapped():
    row = parse(chat(max_completion_tokens=5, logprobs=True, top_logprobs=3, response_format={"type": "text"}, n=2))
    assert row.kind == "chat"
    assert row.prompt == ChatPrompt(({"role": "user", "content": "hi"},))
    assert row.sampling == SamplingParams(temperature=0.5, max_tokens=5, logprobs=3, n=2)
    assert parse(chat(logprobs=True)).sampling.logprobs == 0
    assert parse(chat(logprobs=False, top_logprobs=0)).sampling.logprobs is None
    assert parse(chat(max_tokens=4, max_completion_tokens=4)).sampling.max_tokens == 4


def test_plain_rows_and_completions_accept_best_of():
    expected = SamplingParams(temperature=0.5, max_tokens=7, n=2, best_of=4)
    assert parse({"prompt": "hi", "n": 2, "best_of": 4}).sampling == expected
    assert parse(completion(n=2, best_of=4)).sampling == expected
    assert parse(completion(best_of=1)).sampling.num_sequences == 1
    # A default that does not fit the row can be taken back.
    defaults = SamplingParams(best_of=4)
    assert parse(completion(n=5), defaults).code == "invalid_value"
    assert parse(completion(n=5, best_of=None), defaults).sampling == SamplingParams(n=5)


def test_chat_body_may_set_best_of_of_one():
    """OpenAI's chat has no best_of; the 1 that it would have by default means one sample for each of n choices."""
    for nothing in (None, 1):
        row = parse(chat(n=3, best_of=nothing), SamplingParams(best_of=4))
        assert row.sampling == SamplingParams(n=3)


def test_escaped_zero_characters_and_line_separators_are_text():
    assert parse(b'{"prompt": "a\\u0000\xe2\x80\xa8b"}').prompt == TextPrompt("a\x00\u2028b")


def test_nesting_limit_is_reached_exactly():
    deep = "[" * 61 + "]" * 61
    fields = '{"messages": [{"role": "user", "content": "x", "extra": %s}]}'
    assert isinstance(parse((fields % deep).encode()), Row)
    assert parse((fields % f"[{deep}]").encode()).code == "nested_too_deeply"


# ---- rows that are not

BAD_LINES = {
    "not json": (b"hello", "invalid_json"),
    "truncated": (b'{"prompt": "a', "invalid_json"),
    "two objects": (b'{"prompt": "a"} {"prompt": "b"}', "invalid_json"),
    "duplicate key": (b'{"prompt": "a", "prompt": "b"}', "invalid_json"),
    "nested duplicate key": (b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "invalid_json"),
    "nan": (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
    "infinity": (b'{"prompt": "a", "temperature": -Infinity}', "invalid_json"),
    "float overflow": (b'{"prompt": "a", "temperature": 1e999}', "invalid_value"),
    "digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
    "big seed": (b'{"prompt": "a", "seed": ' + b"9" * 100 + b"}", "invalid_value"),
    "big top_k": (b'{"prompt": "a", "top_k": 99999999999}', "invalid_value"),
    "raw zero": (b'{"prompt": "a\x00"}', "invalid_json"),
    "mark inside": (b'\xef\xbb\xbf{"prompt": "a"}', "invalid_json"),
    "latin-1": ('{"prompt": "é"}'.encode("latin-1"), "invalid_utf8"),
    "utf-16": ('{"prompt": "a"}'.encode("utf-16"), "invalid_utf8"),
    "encoded surrogate": (b'{"prompt": "\xed\xa0\x80"}', "invalid_utf8"),
    "list": (b"[1]", "not_an_object"),
    "string": (b'"a"', "not_an_object"),
    "number": (b"12", "not_an_object"),
    "null": (b"null", "not_an_object"),
    "deep list": (b"[" * 100_000 + b"]" * 100_000, "nested_too_deeply"),
    "deep object": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested_too_deeply"),
    "deep unclosed": (b"[" * 1_000_000, "nested_too_deeply"),
    "deep value": (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "nested_too_deeply"),
}

BAD_PLAIN_ROWS = {
    "empty": ({}, "missing_prompt"),
    "no prompt": ({"custom_id": "a", "temperature": 0}, "missing_prompt"),
    "two prompts": ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "conflicting_prompts"),
    "text and ids": ({"prompt": "a", "prompt_token_ids": [1]}, "conflicting_prompts"),
    "prompt not text": ({"prompt": 3}, "invalid_value"),
    "empty prompt": ({"prompt": ""}, "empty_prompt"),
    "ids not a list": ({"prompt_token_ids": "1 2"}, "invalid_value"),
    "ids not numbers": ({"prompt_token_ids": [1, "2"]}, "invalid_value"),
    "ids with true": ({"prompt_token_ids": [1, True]}, "invalid_value"),
    "ids with floats": ({"prompt_token_ids": [1.0]}, "invalid_value"),
    "no ids": ({"prompt_token_ids": []}, "empty_prompt"),
    "messages not a list": ({"messages": "hi"}, "invalid_value"),
    "no messages": ({"messages": []}, "empty_prompt"),
    "message not an object": ({"messages": ["hi"]}, "invalid_value"),
    "message without role": ({"messages": [{"content": "hi"}]}, "invalid_value"),
    "message without content": ({"messages": [{"role": "user"}]}, "invalid_value"),
    "content a number": ({"messages": [{"role": "user", "content": 5}]}, "invalid_value"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_value"),
    "image of a number": ({"prompt": "a", "images": [3]}, "invalid_value"),
    "image bytes": ({"prompt": "a", "images": [{"bytes": "abc"}]}, "invalid_value"),
    "images of embeddings": ({"prompt_embeds": "a", "images": ["a.png"]}, "conflicting_keys"),
    "images of no part": ({"messages": [{"role": "user", "content": "a"}], "images": ["a"]}, "placeholder_mismatch"),
    "video": ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "invalid_value"),
    "part without text": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "invalid_value"),
    "template kwargs": ({"prompt": "a", "chat_template_kwargs": {}}, "conflicting_keys"),
    "text to continue": ({"prompt": "a", "continue_final_message": True}, "conflicting_keys"),
    "conversation ending twice": (
        {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True},
        "conflicting_keys",
    ),
    "template kwargs a list": (
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": [1]},
        "invalid_value",
    ),
    "negative max_tokens": ({"prompt": "a", "max_tokens": -1}, "invalid_value"),
    "max_tokens text": ({"prompt": "a", "max_tokens": "5"}, "invalid_value"),
    "max_tokens float": ({"prompt": "a", "max_tokens": 5.0}, "invalid_value"),
    "max_tokens true": ({"prompt": "a", "max_tokens": True}, "invalid_value"),
    "temperature": ({"prompt": "a", "temperature": -0.1}, "invalid_value"),
    "top_p": ({"prompt": "a", "top_p": 0}, "invalid_value"),
    "n": ({"prompt": "a", "n": 0}, "invalid_value"),
    "best_of below n": ({"prompt": "a", "n": 3, "best_of": 2}, "invalid_value"),
    "best_of a float": ({"prompt": "a", "best_of": 2.0}, "invalid_value"),
    "stop": ({"prompt": "a", "stop": [""]}, "invalid_value"),
    "half a character in stop": ({"prompt": "a", "stop": ["a\ud800"]}, "invalid_value"),
    "half a character in bad_words": ({"prompt": "a", "bad_words": ["b", "a\ud800"]}, "invalid_value"),
    "bias": ({"prompt": "a", "logit_bias": {"x": 1}}, "invalid_value"),
    "unknown key": ({"prompt": "a", "temprature": 0}, "unknown_key"),
    "unknown key without a neighbour": ({"prompt": "a", "zzz": 0}, "unknown_key"),
    "custom_id": ({"prompt": "a", "custom_id": 5}, "invalid_value"),
}

BAD_OPENAI_ROWS = {
    "no custom_id": ({"method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}, "missing_key"),
    "no body": ({"custom_id": "x", "method": "POST", "url": "/v1/completions"}, "missing_key"),
    "no url": ({"custom_id": "x", "method": "POST", "body": {}}, "missing_key"),
    "get": ({**completion(), "method": "GET"}, "invalid_value"),
    "body a list": ({**completion(), "body": [1]}, "invalid_value"),
    "extra key": ({**completion(), "temperature": 0}, "unknown_key"),
    "embeddings": (body_row("/v1/embeddings", input=5), "invalid_value"),
    "other url": (body_row("/v1/responses", input="a"), "unsupported_url"),
    "url a number": (body_row(5, prompt="a"), "unsupported_url"),
    "url a list": (body_row([], prompt="a"), "unsupported_url"),
    "no prompt": (body_row("/v1/completions", model="m"), "missing_prompt"),
    "no messages": (body_row("/v1/chat/completions", model="m"), "missing_prompt"),
    "messages for completions": (completion(messages=[]), "unknown_key"),
    "prompt for chat": (chat(prompt="a"), "unknown_key"),
    "several prompts": (completion(prompt=["a", "b"]), "unsupported_value"),
    "mixed prompt": (completion(prompt=[1, "b"]), "unsupported_value"),
    "several id lists": (completion(prompt=[[1], [2]]), "unsupported_value"),
    "empty list": (completion(prompt=[]), "empty_prompt"),
    "stream": (completion(stream=True), "unsupported_value"),
    "stream as number": (completion(stream=1), "unsupported_value"),
    "echo as number": (completion(echo=1), "invalid_value"),
    "echo in a chat": (chat(echo=True), "unsupported_value"),
    "continued and begun": (chat(continue_final_message=True, add_generation_prompt=True), "conflicting_keys"),
    "continued as a number": (chat(continue_final_message=1), "invalid_value"),
    "begun as a word": (chat(add_generation_prompt="no"), "invalid_value"),
    "continued text": (completion(continue_final_message=True), "unknown_key"),
    "ids asked for by a word": (completion(return_token_ids="yes"), "invalid_value"),
    "no tokens without echo": (completion(max_tokens=0), "invalid_value"),
    "best_of below n": (completion(n=3, best_of=2), "invalid_value"),
    "best_of true": (completion(best_of=True), "invalid_value"),
    "best_of beyond 32 bits": (completion(best_of=2**31), "invalid_value"),
    "best_of in a chat": (chat(best_of=2), "unsupported_value"),
    "best_of true in a chat": (chat(best_of=True), "unsupported_value"),
    "suffix": (completion(suffix="x"), "unsupported_value"),
    "tools": (chat(tools=[{"type": "function"}]), "invalid_value"),
    "tools in a completion": (completion(tools=[{"type": "function"}]), "unsupported_value"),
    "unknown format in a completion": (completion(response_format={"type": "xml"}), "unsupported_value"),
    "schema without a name in a completion": (
        completion(response_format={"type": "json_schema", "json_schema": {"schema": {}}}),
        "invalid_value",
    ),
    "a form twice in a completion": (
        completion(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
        "conflicting_keys",
    ),
    "a form twice": (
        chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
        "conflicting_keys",
    ),
    "a call's arguments": (
        chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
        "invalid_value",
    ),
    "a call's arguments that are nested too deeply": (
        chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}]),
        "invalid_value",
    ),
    "logprobs true in a completion": (completion(logprobs=True), "invalid_value"),
    "logprobs a number in a chat": (chat(logprobs=2), "invalid_value"),
    "top_logprobs alone": (chat(top_logprobs=2), "conflicting_keys"),
    "top_logprobs text": (chat(logprobs=True, top_logprobs="2"), "invalid_value"),
    "negative top_logprobs": (chat(logprobs=True, top_logprobs=-2), "invalid_value"),
    "two limits": (chat(max_tokens=2, max_completion_tokens=3), "conflicting_keys"),
    "model": (chat(model=5), "invalid_value"),
    "temperature": (chat(temperature=-1), "invalid_value"),
    "unknown key": (chat(tempreature=1), "unknown_key"),
}


@pytest.mark.parametrize("name", sorted(BAD_LINES))
def test_invalid_json_line_is_an_error_row(name):
    line, code = BAD_LINES[name]
    row = parse(line)
    assert isinstance(row, RowError)
    assert (row.index, row.code, row.shape) == (3, code, "plain")


@pytest.mark.parametrize("name", sorted(BAD_PLAIN_ROWS))
def test_bad_plain_row_is_an_error_row(name):
    fields, code = BAD_PLAIN_ROWS[name]
    row = parse(fields)
    assert isinstance(row, RowError)
    assert (row.code, row.shape) == (code, "plain")


@pytest.mark.parametrize(
    ("fields", "way_out"),
    [
        ({"prompt": [1, 2]}, "prompt=[1, 2] must be a string: token ids are given as prompt_token_ids"),
        ({"prompt": [{"role": "user"}]}, "a conversation is given as messages"),
        ({"prompt": ["a", "b"]}, "each of several prompts needs a row of its own"),
        ({"prompt_token_ids": "hi"}, "must be a list of token ids: text is given as prompt"),
        ({"embed": ["a", "b"]}, "embed=['a', 'b'] must be a text, or token ids: each of several texts needs a row"),
        ({"prompt": "a", "model": "sql"}, "not of a plain row; a plain row takes adapter"),
        (
            {"prompt": "a", "multi_modal_data": {}},
            "'multi_modal_data' is a key of prompts in Python: a row takes images",
        ),
    ],
)
def test_value_under_another_key_names_its_own(fields, way_out):
    row = parse(fields)
    assert isinstance(row, RowError)
    assert way_out in row.message


@pytest.mark.parametrize("name", sorted(BAD_OPENAI_ROWS))
def test_bad_openai_row_is_an_openai_error_row(name):
    fields, code = BAD_OPENAI_ROWS[name]
    row = parse(fields)
    assert isinstance(row, RowError)
    assert (row.code, row.shape, row.custom_id) == (code, "openai", fields.get("custom_id"))


def test_line_beyond_limit_is_error_row_naming_it():
    line = b'{"prompt": "aaaaaaaa"}'
    assert isinstance(parse_row(0, line, DEFAULTS, RowLimits(max_line_bytes=len(line))), Row)
    row = parse_row(0, line, DEFAULTS, RowLimits(max_line_bytes=len(line) - 1))
    assert (row.code, row.message) == (
        "line_too_long",
        f"the line is longer than limits.max_line_bytes={len(line) - 1}",
    )


def test_error_messages_name_key_value_and_way_out():
    assert (
        "unknown key 'temprature': did you mean 'temperature'? Known keys: prompt"
        in parse({"prompt": "a", "temprature": 0}).message
    )
    misplaced = parse({"prompt": "a", "response_format": {"type": "json_object"}})
    assert misplaced.code == "unknown_key"
    assert misplaced.message.startswith("'response_format' is a key of an OpenAI row's body")
    assert misplaced.message.endswith("a plain row takes structured_outputs")
    unsupported = parse({"prompt": "a", "use_beam_search": True}).message
    assert unsupported == "use_beam_search=True is not supported: give a script that calls LLM.beam_search"
    for fields in ({"prompt": "a", "guided_choice": ["b"]}, completion(guided_choice=["b"])):
        assert ': give "structured_outputs": {"choice": ...}. Known keys: ' in parse(fields).message
    assert parse({"prompt": "a", "max_tokens": -1}).message == "max_tokens=-1 must be 1 or more"
    assert parse({"prompt": "a", "messages": [1]}).message == "the row has prompt and messages: give one of them"
    assert "use one of /v1/completions, /v1/chat" in parse(body_row("/v1/responses", input="a")).message
    assert "appears twice" in parse(b'{"a": 1, "a": 2}').message


def test_values_in_messages_are_cut():
    rows = [
        parse({"prompt": [1] * 100_000}),
        parse({"prompt": "a", "x" * 100_000: 1}),
        parse({"prompt": "a", "stop": 5 * [[]] * 10_000}),
        parse({"prompt": "a", "custom_id": ["x"] * 10_000}),
    ]
    assert all(isinstance(row, RowError) and len(row.message) < 1200 for row in rows)


# ---- resolving


def resolved(fields, tokenizer, vocab_size=400, max_model_len=64):
    return resolve(parse(fields), RowContext(tokenizer, limits_of(tokenizer, vocab_size, max_model_len)))


def limits_of(tokenizer, vocab_size=400, max_model_len=64):
    return RequestLimits(vocab_size, max_model_len, has_tokenizer=tokenizer is not None)


def test_text_prompt_is_encoded_with_concrete_limit(tokenizer):
    row = resolved({"prompt": "hello", "custom_id": "a"}, tokenizer)
    assert isinstance(row, EncodedRow)
    assert (row.index, row.custom_id, row.content.text) == (3, "a", "hello")
    assert row.content.token_ids == tuple(tokenizer.encode("hello"))
    assert row.sampling == DEFAULTS


def test_conversation_is_rendered_and_encoded_without_special_tokens(tokenizer):
    """The template's own special tokens stay."""
    row = resolved(chat(), tokenizer)
    assert row.content.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert row.content.token_ids == tuple(tokenizer.encode(row.content.text, add_special_tokens=False))


def test_special_tokens_are_added_as_asked(tmp_path):
    """vLLM's defaults: to text, and not to what a template has written."""
    folder = write_llama_style(tmp_path, chat_template="<s>{{ messages[0].content }}")
    tokenizer, oracle = Tokenizer.open(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "hello"}]
    for row, default in (
        ({"prompt": "hello"}, True),
        ({"messages": messages}, False),
        (completion(prompt="hello"), True),
        (chat(messages=messages), False),
    ):
        for asked in (None, True, False):
            given = {"add_special_tokens": asked}
            fields = {**row, "body": {**row["body"], **given}} if "body" in row else {**row, **given}
            found = resolved(fields, tokenizer)
            adds = default if asked is None else asked
            assert list(found.content.token_ids) == oracle.encode(found.content.text, add_special_tokens=adds)
    # Control: there is something to add.
    assert oracle.encode("hello") != oracle.encode("hello", add_special_tokens=False)
    row = parse({"prompt": "a", "source_language": "fr", "add_special_tokens": False})
    assert "source_language='fr' is a special token, and add_special_tokens=false adds none" in row.message


def test_special_tokens_have_the_spaces_of_the_library():
    key = "spaces_between_special_tokens"
    for row in (lambda **given: {"prompt": "hi", **given}, completion, chat):
        assert isinstance(parse(row(**{key: True}, skip_special_tokens=False)), Row)
        # Text without special tokens has none between them.
        assert isinstance(parse(row(**{key: False})), Row)
        error = parse(row(**{key: False}, skip_special_tokens=False))
        assert (error.code, f"{key}=false is not supported with" in error.message) == ("unsupported_value", True)
        assert parse(row(**{key: 1})).message == f"{key}=1 must be true or false"


def test_reasoning_effort_reaches_templates_that_read_it(tmp_path, tokenizer):
    folder = write_byte_level(tmp_path, chat_template="{{ reasoning_effort | default('medium') }}:")
    reads = Tokenizer.open(folder)
    for effort, text in (("low", "low:"), (None, "medium:")):
        assert resolved(chat(reasoning_effort=effort), reads).content.text == text
    same = chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "low"})
    assert resolved(same, reads).content.text == "low:"
    differ = parse(chat(reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"}))
    assert differ.code == "conflicting_keys"
    unread = resolved(chat(reasoning_effort="low"), tokenizer)
    assert unread.code == "unsupported_value"
    assert "reasoning_effort='low': the model's chat template does not read it" in unread.message
    assert "must be one of none, minimal, low" in parse(chat(reasoning_effort="much")).message
    assert parse(completion(reasoning_effort="low")).code == "unsupported_value"
    plain = parse({"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "low"})
    assert plain.message.endswith("a plain row takes chat_template_kwargs")


VLLM_KEYS = {
    "use_beam_search": (False, True, "LLM.beam_search"),
    "length_penalty": (1.0, 0.5, "length_penalty=0.5"),
    "truncation_side": ("left", "right", "a text that is cut"),
    "return_weight_versions": (False, True, "weight_versions of LLM.generate's outputs"),
    "return_tokens_as_token_ids": (False, True, "return_token_ids"),
    "kv_transfer_params": (None, {"a": 1}, "kv_transfer_params={"),
    "vllm_xargs": ({}, {"a": 1}, "vllm_xargs={'a': 1} is not supported: leave it out"),
}


@pytest.mark.parametrize("make", [completion, chat])
def test_values_of_vllm_that_change_nothing_are_accepted(make):
    neutral = {key: value for key, (value, *_) in VLLM_KEYS.items()}
    assert parse(make(**neutral, session_id="s")) == parse(make())
    for key, (_, value, words) in VLLM_KEYS.items():
        row = parse(make(**{key: value}))
        assert row.code == "unsupported_value"
        assert words in row.message
    assert parse(chat(documents=[], mm_processor_kwargs={}, chat_template=None)) == parse(chat())
    assert "give chat_template_kwargs" in parse(chat(chat_template="{{ messages }}")).message


@pytest.mark.parametrize("make", [completion, chat])
def test_listed_ids_replace_the_top_tokens(make):
    asks = {"logprobs": True, "top_logprobs": 2} if make is chat else {"logprobs": 2}
    sampling = parse(make(logprob_token_ids=[7, 5], **asks)).sampling
    assert (sampling.logprobs, sampling.logprob_token_ids, sampling.num_top_logprobs) == (None, (7, 5), 0)
    assert parse(make(logprob_token_ids=[], **asks)) == parse(make(**asks))
    plain = parse({"prompt": "a", "logprob_token_ids": [7, 5]}, SamplingParams(logprobs=3))
    assert (plain.sampling.logprobs, plain.sampling.logprob_token_ids) == (None, (7, 5))
    for more, code, words in (
        ({"logprob_token_ids": [7]}, "conflicting_keys", "logprob_token_ids needs logprobs: add logprobs="),
        ({"logprob_token_ids": ["a"], **asks}, "invalid_value", "'a' must be a token id"),
        ({"logprob_token_ids": [0] * 129, **asks}, "invalid_value", "has 129 ids: give at most 128"),
    ):
        row = parse(make(**more))
        assert (row.code, words in row.message) == (code, True), row.message
    assert parse(completion(logprobs=1, echo=True, logprob_token_ids=[7])).code == "conflicting_keys"
    assert "leave logprobs out" in parse({"prompt": "a", "logprob_token_ids": [7, 5], "logprobs": 1}).message


@pytest.mark.parametrize("url", ["/v1/embeddings", "/classify", "/pooling"])
def test_values_of_vllm_pool_texts_and_messages(url):
    """Regression: bodies that generate took `add_special_tokens`, and those that pool did not."""
    talk = [{"role": "user", "content": "hello"}]
    neutral = {"embed_dtype": "float32", "endianness": "native", "chat_template": None, "mm_processor_kwargs": {}}
    given = body_row(url, input="a", add_special_tokens=True, **neutral)
    assert parse(given) == parse(body_row(url, input="a"))
    assert isinstance(parse(body_row(url, input=[5], add_special_tokens=False)), Row)
    for adds in (False, True):
        assert parse(body_row(url, messages=talk, add_special_tokens=adds)).prompt.adds_special_tokens == adds
    for key, value in (("add_special_tokens", False), ("embed_dtype", "float16"), ("chat_template", "x")):
        row = parse(body_row(url, input="a", **{key: value}))
        assert (row.code, "leave it out" in row.message) == ("unsupported_value", True)


def test_answers_of_clients_are_sent_back(tokenizer):
    user = {"role": "user", "content": "hi"}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "refusal": None}
    for answer, text in ((refused, "no"), ({"role": "assistant", "content": None, "tool_calls": None}, "")):
        row = resolved(chat(messages=[user, answer, user]), tokenizer)
        assert f"<|im_start|>assistant\n{text}<|im_end|>" in row.content.text
    assert parse(chat(messages=[{"role": "user", "content": None}])).message == "messages[0] has no content"


@pytest.mark.parametrize("value", ["", "é", 5, "a\nb", "a" * 513, " ", " a", "a "], ids=lambda value: str(value)[:5])
def test_request_id_is_printable(value):
    for fields in (completion(request_id=value), body_row("/v1/embeddings", input="a", request_id=value)):
        row = parse(fields)
        assert isinstance(row, RowError), row
        assert (row.code, "must be 1 to 512 printable characters of ASCII" in row.message) == ("invalid_value", True)
    assert parse(completion(request_id="a b")).request_id == "a b"
    assert parse({"prompt": "a", "request_id": "x"}).message.startswith("'request_id' is a key of an OpenAI row's body")


def test_token_ids_need_no_tokenizer():
    row = resolved({"prompt_token_ids": [0, 399]}, None)
    assert (row.content.text, row.content.token_ids, row.sampling.detokenize) == (None, (0, 399), False)


@pytest.mark.parametrize(("asked", "given"), [(None, 54), (5, 5), (54, 54), (55, 54), (2**31 - 1, 54)])
def test_max_tokens_is_requested_number_or_the_rest(asked, given):
    row = resolved({"prompt_token_ids": [1] * 10, "max_tokens": asked}, None)
    assert row.sampling.max_tokens == given


def test_prompt_must_leave_one_token_of_length():
    assert resolved({"prompt_token_ids": [1] * 63}, None).sampling.max_tokens == 1
    row = resolved({"prompt_token_ids": [1] * 64}, None)
    assert row.code == "prompt_too_long"
    assert "64 tokens" in row.message
    assert "model.max_model_len is 64" in row.message


@pytest.mark.parametrize("fields", [{}, {"min_tokens": 1}])
def test_scored_only_prompt_may_fill_the_length(fields: dict[str, Any]):
    """As `LLM.generate` answers it. It was a ValueError that ended the job."""
    row = resolved({"prompt_token_ids": [1] * 64, "max_tokens": 1, "prompt_logprobs": 0, **fields}, None)
    assert row.sampling.max_tokens == 1
    assert (
        resolved({"prompt_token_ids": [1] * 65, "max_tokens": 1, "prompt_logprobs": 0}, None).code == "prompt_too_long"
    )


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt_token_ids": [1, 400]}, "token_out_of_vocabulary"),
        ({"prompt_token_ids": [-1, 5]}, "token_out_of_vocabulary"),
        ({"prompt_token_ids": [10**100]}, "token_out_of_vocabulary"),
        ({"prompt_token_ids": [1], "stop_token_ids": [400]}, "token_out_of_vocabulary"),
        ({"prompt_token_ids": [1], "logit_bias": {"400": 1}}, "token_out_of_vocabulary"),
        ({"prompt_token_ids": [1], "max_tokens": None, "min_tokens": 100}, "invalid_value"),
        ({"prompt": "a\ud800"}, "invalid_unicode"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "invalid_unicode"),
        # Such a row once ended the job.
        ({"prompt_token_ids": [2**70], "truncate_prompt_tokens": 5}, "token_out_of_vocabulary"),
    ],
)
def test_row_the_model_cannot_run_is_error_row(tokenizer, fields, code):
    row = resolved(fields, tokenizer)
    assert isinstance(row, RowError)
    assert (row.index, row.code) == (3, code)


def test_text_is_an_error_row_without_tokenizer():
    for fields in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        assert resolved(fields, None).code == "tokenizer_missing"
    assert resolved({"prompt_token_ids": [1], "stop": "a"}, None).code == "tokenizer_missing"


def test_missing_or_failing_template_is_an_error_row(tokenizer_without_template, tmp_path):
    assert resolved(chat(), tokenizer_without_template).code == "chat_template_missing"
    failing = Tokenizer.open(write_byte_level(tmp_path, chat_template="{{ raise_exception('no system role') }}"))
    row = resolved(chat(), failing)
    assert (row.code, row.shape, row.message) == ("chat_template_error", "openai", "chat template: no system role")


def test_second_row_with_custom_id_is_error_row():
    ids = CustomIds()
    first, second = parse({"prompt": "a", "custom_id": "x"}), parse({"prompt": "b", "custom_id": "x"})
    assert ids.check(first) is first
    error = ids.check(second)
    assert (error.code, error.custom_id) == ("duplicate_custom_id", "x")
    assert "'x' was used by an earlier row" in error.message
    nameless = parse({"prompt": "a"})
    assert ids.check(nameless) is nameless
    assert ids.check(nameless) is nameless
    surrogate = parse({"prompt": "a", "custom_id": "\ud800"})
    assert ids.check(surrogate) is surrogate


def test_error_row_keeps_its_custom_id_and_error():
    ids = CustomIds()
    bad = parse({"custom_id": "x"})
    assert ids.check(bad).code == "missing_prompt"
    assert ids.check(bad).code == "missing_prompt"
    assert ids.check(parse({"prompt": "a", "custom_id": "x"})).code == "duplicate_custom_id"


# ---- anything at all

OTHER_KEYS = (
    "prompt prompt_token_ids messages custom_id method url body role content stream tools logprobs top_logprobs "
    "max_completion_tokens model chat_template_kwargs continue_final_message add_generation_prompt type text Infinity"
)
KEYS = st.sampled_from([*OTHER_KEYS.split(), *SAMPLING_KEYS])
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["POST", "/v1/completions", "/v1/chat/completions", "user", "text", "\ud800", "\x00"]),
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.integers(0, 5), st.floats(), TEXTS)
JSON_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.one_of(KEYS, TEXTS), inner, max_size=5)),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just("user")}, optional={"content": JSON_VALUES, "name": JSON_VALUES}), max_size=3
)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "prompt": SCALARS,
        "prompt_token_ids": st.lists(st.integers(-2, 500), max_size=4),
        "messages": MESSAGES,
        **dict.fromkeys(SAMPLING_KEYS, SCALARS),
    },
)
BODIES = st.builds(
    lambda url, body: body_row(url, **body),
    st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    st.fixed_dictionaries(
        {"messages": MESSAGES}, optional={"temperature": SCALARS, "logprobs": SCALARS, "top_logprobs": SCALARS}
    ),
)


def check_outcome(line, tokenizer):
    row = parse_row(0, line, DEFAULTS)
    assert isinstance(row, Row | RowError)
    if isinstance(row, Row):
        row = resolve(row, RowContext(tokenizer, limits_of(tokenizer)))
    assert isinstance(row, EncodedRow | RowError)
    if isinstance(row, RowError):
        json.loads(format_error(row))
    else:
        assert len(row.content.token_ids) + row.sampling.max_tokens <= 64
        assert all(0 <= token_id < 400 for token_id in row.content.token_ids)


@examples(300)
@given(line=st.binary(max_size=60))
@example(line=b'{"a":' * 2000)
def test_random_bytes_are_row_or_error_row(tokenizer, line):
    check_outcome(line, tokenizer)


@examples(400)
@given(fields=st.one_of(JSON_VALUES, ROWS, BODIES, st.dictionaries(KEYS, JSON_VALUES, max_size=5)))
def test_random_json_is_row_or_error_row(tokenizer, fields):
    check_outcome(json.dumps(fields).encode(), tokenizer)


@examples(200)
@given(fields=ROWS, cut=st.integers(0, 400), value=st.integers(0, 255))
def test_damaged_row_is_row_or_error_row(tokenizer, fields, cut, value):
    line = bytearray(json.dumps({"prompt": "a", **fields}).encode())
    line[cut % len(line)] = value
    check_outcome(bytes(line), tokenizer)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "hello", "priority": -3},
        {"embed": "hello", "priority": -3},
        {"audio": "a.wav", "priority": -3},
        {"method": "POST", "url": "/v1/completions", "body": {"prompt": "hi", "priority": -3}},
        {"method": "POST", "url": "/v1/embeddings", "body": {"input": "hi", "priority": -3}},
    ],
)
def test_row_of_any_kind_has_priority(fields):
    fields = {"custom_id": "x", **fields}
    assert parse(fields).priority == -3
    holder = fields.get("body", fields)
    holder["priority"] = None
    assert parse(fields).priority == 0
    for wrong in (True, 1.5, "1", 2**63):
        holder["priority"] = wrong
        assert parse(fields).message.startswith("priority=")


def test_row_with_priority_needs_its_policy(tokenizer):
    row = parse({"prompt": "hello", "priority": 2})
    refused = resolve(row, RowContext(tokenizer, limits_of(tokenizer)))
    assert (refused.code, refused.message) == (
        "unsupported_value",
        "priority=2 needs scheduler.policy=priority: set it, or leave priority out",
    )
    allowed = RequestLimits(400, 64, has_tokenizer=True, allows_priority=True)
    assert resolve(row, RowContext(tokenizer, allowed)).content.priority == 2
