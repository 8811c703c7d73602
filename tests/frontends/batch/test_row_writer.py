import json
import math

import numpy
import pytest

from spmd_worker.frontends.openai.row import EncodedRow, RowError
from spmd_worker.frontends.openai.row_writer import format_error, format_result
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.replica.sequence.outputs import CompletionOutput, Logprob, RequestOutput
from spmd_worker.replica.sequence.prompt_scores import PromptScores
from spmd_worker.replica.sequence.sampling_mask import SamplingMask, pack_ids
from spmd_worker.replica.sequence.sampling_params import SamplingParams

LOGPROBS = [
    {5: Logprob(-1.5, 3, " b"), 7: Logprob(-0.5, 1, " a"), 8: Logprob(-0.7, 2, "\ufffd")},
    {9: Logprob(-math.inf, 1, "é")},
]


def encoded(kind="plain", custom_id="x", index=4, model=None, **sampling):
    return EncodedRow(index, custom_id, kind, PromptContent((1, 2, 3), "hi"), SamplingParams(**sampling), model)


def request_output(texts=("one",), **fields):
    outputs = [
        CompletionOutput(number, text, [5, 9], finish_reason="stop", stop_reason=9 if number else None)
        for number, text in enumerate(texts)
    ]
    return RequestOutput("4", "hi", [1, 2, 3], outputs, finished=True, **fields)


def with_logprobs(texts=("one",)):
    output = request_output(texts)
    for item in output.outputs:
        item.logprobs = LOGPROBS
    return output


def test_plain_row_has_exactly_the_designed_keys():
    line = format_result(encoded(), request_output(("one", "two")))
    assert line.endswith(b"\n")
    assert json.loads(line) == {
        "custom_id": "x",
        "index": 4,
        "outputs": [
            {"index": 0, "text": "one", "token_ids": [5, 9], "finish_reason": "stop", "stop_reason": None},
            {"index": 1, "text": "two", "token_ids": [5, 9], "finish_reason": "stop", "stop_reason": 9},
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
        "error": None,
    }


def test_plain_row_lists_logprobs_only_when_present():
    record = json.loads(format_result(encoded(logprobs=2), with_logprobs()))["outputs"][0]
    assert record["logprobs"] == [
        [
            {"token_id": 5, "token": " b", "logprob": -1.5, "rank": 3},
            {"token_id": 7, "token": " a", "logprob": -0.5, "rank": 1},
            {"token_id": 8, "token": "\ufffd", "logprob": -0.7, "rank": 2},
        ],
        [{"token_id": 9, "token": "é", "logprob": -9999.0, "rank": 1}],
    ]


def test_prompt_logprobs_begin_with_null():
    output = request_output(prompt_logprobs=[None, {2: Logprob(-1.0, 1, "b")}])
    expected = [None, [{"token_id": 2, "token": "b", "logprob": -1.0, "rank": 1}]]
    assert json.loads(format_result(encoded(), output))["prompt_logprobs"] == expected
    assert json.loads(format_result(encoded("chat"), output))["response"]["body"]["prompt_logprobs"] == expected


def test_rows_have_data_for_trainers():
    scores = PromptScores(
        1, numpy.float32([-0.5, -numpy.inf]), None, numpy.uint32([[7], [8]]), numpy.float32([[-1], [-2]])
    )
    experts = numpy.uint8([[[3, 1]], [[0, 2]], [[5, 4]]])
    output = request_output(prompt_scores=scores, prompt_routed_experts=experts)
    output.outputs[0].sampling_mask = SamplingMask.from_packed([pack_ids((5, 6)), pack_ids((9,))])
    output.outputs[0].routed_experts = experts[:1]
    plain = json.loads(format_result(encoded(), output))
    body = json.loads(format_result(encoded("completion"), output))["response"]["body"]
    for record, completion in ((plain, plain["outputs"][0]), (body, body["choices"][0])):
        assert completion["sampling_mask"] == {"token_ids": [5, 6, 9], "offsets": [0, 2, 3]}
        assert completion["routed_experts"] == {"dtype": "uint8", "shape": [1, 1, 2], "data": "AwE="}
        assert record["prompt_routed_experts"]["shape"] == [3, 1, 2]
        expected = {"start": 1, "token_logprobs": [-0.5, -9999.0], "top_logprobs": [[-1.0], [-2.0]]}
        assert record["prompt_scores"] == {**expected, "top_token_ids": [[7], [8]]}


def test_completion_row_has_the_openai_shape():
    line = format_result(encoded("completion", model="m", logprobs=2), with_logprobs())
    assert json.loads(line) == {
        "id": "batch-4",
        "custom_id": "x",
        "response": {
            "status_code": 200,
            "request_id": "req-4",
            "body": {
                "id": "cmpl-4",
                "object": "text_completion",
                "created": 0,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "text": "one",
                        "logprobs": {
                            "tokens": [" b", "é"],
                            "token_logprobs": [-1.5, -9999.0],
                            "top_logprobs": [{" b": -1.5, " a": -0.5, "\ufffd": -0.7}, {"é": -9999.0}],
                            "text_offset": [0, 2],
                        },
                        "finish_reason": "stop",
                        "stop_reason": None,
                    }
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            },
        },
        "error": None,
    }


def test_chat_row_has_the_openai_shape():
    body = json.loads(format_result(encoded("chat", logprobs=2), with_logprobs(), "served"))["response"]["body"]
    assert (body["id"], body["object"], body["model"]) == ("chatcmpl-4", "chat.completion", "served")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "one"}
    assert choice["logprobs"]["content"][0] == {
        "token": " b",
        "logprob": -1.5,
        "bytes": [32, 98],
        "top_logprobs": [
            {"token": " a", "logprob": -0.5, "bytes": [32, 97]},
            {"token": "\ufffd", "logprob": -0.7, "bytes": None},
        ],
    }
    assert choice["logprobs"]["content"][1]["bytes"] == [0xC3, 0xA9]


def test_token_is_named_by_id_without_tokenizer():
    output = request_output()
    output.outputs[0].logprobs = [{5: Logprob(-1.0, 1)}]
    body = json.loads(format_result(encoded("chat", logprobs=0), output))["response"]["body"]
    assert body["choices"][0]["logprobs"]["content"] == [
        {"token": "token_id:5", "logprob": -1.0, "bytes": None, "top_logprobs": []}
    ]


def test_error_row_has_error_and_no_outputs():
    line = format_error(RowError(2, None, "plain", "invalid_json", "why"))
    assert json.loads(line) == {
        "custom_id": None,
        "index": 2,
        "error": {"code": "invalid_json", "message": "why"},
    }
    line = format_error(RowError(2, "x", "openai", "unsupported_url", "why"))
    assert json.loads(line) == {
        "id": "batch-2",
        "custom_id": "x",
        "response": None,
        "error": {"code": "unsupported_url", "message": "why"},
    }


def test_request_rejected_by_engine_is_error_row():
    output = RequestOutput("4", None, [1], error="no room")
    assert json.loads(format_result(encoded(), output))["error"] == {"code": "request_refused", "message": "no room"}
    assert json.loads(format_result(encoded("chat"), output))["response"] is None


def test_answer_has_same_bytes_for_any_cache_hits():
    row = encoded("chat")
    assert format_result(row, request_output()) == format_result(row, request_output(num_cached_tokens=2))


@pytest.mark.parametrize(
    "text", ["naïve 你好 😀", "a\ud800b", "\u2028\u2029\x85", '\x00\n\r\t"\\', "\udc80\ud83d\ude00"]
)
def test_any_text_is_one_line_of_json(text):
    line = format_result(encoded(custom_id=text), request_output((text,)))
    assert len(line.decode("utf-8").splitlines()) == 1
    record = json.loads(line)
    expected = json.loads(json.dumps(text))
    assert (record["custom_id"], record["outputs"][0]["text"]) == (expected, expected)


def test_text_is_written_readably_when_encodable():
    assert "naïve 你好 😀".encode() in format_result(encoded(), request_output(("naïve 你好 😀",)))
