"""The verify tool prints "same" for equal files, else row, sample, token and both values of the first difference."""

import copy
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_worker.base.remote_names import file_path
from spmd_worker.frontends.batch.output_file import write_lines
from spmd_worker.frontends.batch.output_parts import claim_folder


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Compare two lists of rows: (exit code, last line of standard output or the error)."""
    main = import_module("spmd_worker.frontends.tools.verify").main

    def run(first: list[Any], second: list[Any], *options: str) -> tuple[int, str]:
        paths = [write(tmp_path / name, rows) for name, rows in (("a.jsonl", first), ("b.jsonl", second))]
        code = main([*map(str, paths), *options])
        captured = capsys.readouterr()
        return code, (captured.out or captured.err).splitlines()[-1]

    return run


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def logprob(token_id: int, value: float) -> dict[str, Any]:
    return {"token_id": token_id, "token": f"t{token_id}", "logprob": value, "rank": 1}


def plain_row(number: int, *, n: int = 2, has_logprobs: bool = True) -> dict[str, Any]:
    outputs = []
    for index in range(n):
        ids = [number + index + step for step in range(4)]
        output = {
            "index": index,
            "text": f"answer {number} of {index}",
            "token_ids": ids,
            "finish_reason": "length",
            "stop_reason": None,
        }
        if has_logprobs:
            output["logprobs"] = [[logprob(i, -0.5), logprob(i + 1, -1.5)] for i in ids]
        outputs.append(output)
    usage = {"prompt_tokens": 3, "completion_tokens": 4 * n}
    return {"custom_id": f"row-{number}", "index": number, "outputs": outputs, "usage": usage, "error": None}


def openai_row(number: int, choice: dict[str, Any]) -> dict[str, Any]:
    body = {
        "id": f"cmpl-{number}",
        "choices": [{"index": 0, "finish_reason": "stop", "stop_reason": None, **choice}],
        "usage": {"prompt_tokens": 3},
    }
    response = {"status_code": 200, "request_id": f"req-{number}", "body": body}
    return {"id": f"batch-{number}", "custom_id": f"row-{number}", "response": response, "error": None}


def chat_row(number: int) -> dict[str, Any]:
    content = [
        {"token": token, "logprob": -0.25, "bytes": [1], "top_logprobs": [{"token": token, "logprob": -0.25}]}
        for token in ("Hel", "lo")
    ]
    choice = {"message": {"role": "assistant", "content": "Hello"}, "logprobs": {"content": content}}
    return openai_row(number, choice)


def completion_row(number: int) -> dict[str, Any]:
    logprobs = {
        "tokens": ["Hel", "lo"],
        "token_logprobs": [-0.25, -0.5],
        "top_logprobs": [{"Hel": -0.25}, {"lo": -0.5}],
        "text_offset": [0, 3],
    }
    return openai_row(number, {"text": "Hello", "logprobs": logprobs})


def changed(row: dict[str, Any], path: list[Any], value: Any) -> dict[str, Any]:
    row = copy.deepcopy(row)
    place: Any = row
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return row


ROWS = [plain_row(0), plain_row(1), plain_row(2, n=1, has_logprobs=False), chat_row(3), completion_row(4)]
CHOICE = ["response", "body", "choices", 0]

DIFFERENCES = [
    (1, ["outputs", 1, "token_ids", 2], 77, "sample 1, token 2: 4 in the first, 77 in the second"),
    (1, ["outputs", 0, "token_ids", 3], 77, "sample 0, token 3: 4 in the first, 77 in the second"),
    (0, ["outputs", 0, "token_ids"], [0, 1, 2], "sample 0, token 3: 3 in the first, nothing in the second"),
    (2, ["outputs", 0, "token_ids"], [2, 3, 4, 5, 6], "sample 0, token 4: nothing in the first, 6 in the second"),
    (
        0,
        ["outputs", 1, "logprobs", 2, 1, "logprob"],
        -1.5000001,
        "sample 1, token 2: logprobs[1].logprob: -1.5 in the first, -1.5000001 in the second",
    ),
    (
        0,
        ["outputs", 1, "logprobs", 3, 0, "rank"],
        2,
        "sample 1, token 3: logprobs[0].rank: 1 in the first, 2 in the second",
    ),
    (
        0,
        ["outputs", 0, "text"],
        "answer 0 or 0",
        'sample 0, text, character 10: "answer 0 of 0" in the first, "answer 0 or 0" in the second',
    ),
    (
        0,
        ["outputs", 0, "finish_reason"],
        "stop",
        'sample 0, finish_reason: "length" in the first, "stop" in the second',
    ),
    (0, ["outputs", 0, "stop_reason"], 7, "sample 0, stop_reason: null in the first, 7 in the second"),
    (0, ["error"], {"code": "x"}, 'error: null in the first, {"code": "x"} in the second'),
    (0, ["prompt_logprobs"], [None], "prompt_logprobs: null in the first, [null] in the second"),
    (
        3,
        [*CHOICE, "logprobs", "content", 1, "token"],
        "lo!",
        'sample 0, token 1: "lo" in the first, "lo!" in the second',
    ),
    (
        3,
        [*CHOICE, "logprobs", "content", 1, "top_logprobs", 0, "logprob"],
        -0.3,
        "sample 0, token 1: logprobs.top_logprobs[0].logprob: -0.25 in the first, -0.3 in the second",
    ),
    (
        3,
        [*CHOICE, "message", "content"],
        "Hallo",
        'sample 0, text, character 1: "Hello" in the first, "Hallo" in the second',
    ),
    (
        3,
        [*CHOICE, "message", "tool_calls"],
        [{"id": "call_1"}],
        'sample 0, message.tool_calls: nothing in the first, [{"id": "call_1"}] in the second',
    ),
    (4, [*CHOICE, "logprobs", "tokens", 0], "Hal", 'sample 0, token 0: "Hel" in the first, "Hal" in the second'),
    (
        4,
        [*CHOICE, "logprobs", "token_logprobs", 1],
        -0.75,
        "sample 0, token 1: logprobs.logprob: -0.5 in the first, -0.75 in the second",
    ),
    (4, [*CHOICE, "finish_reason"], "length", 'sample 0, finish_reason: "stop" in the first, "length" in the second'),
]


def test_equal_rows_of_every_shape_are_the_same(verify):
    assert verify(ROWS, copy.deepcopy(ROWS)) == (0, "same")
    assert verify(ROWS, ROWS, "--tokens-only") == (0, "same")
    assert verify(ROWS, ROWS, "--bytes") == (0, "same")
    assert verify([], []) == (0, "same")


@pytest.mark.parametrize(("number", "path", "value", "words"), DIFFERENCES, ids=lambda value: str(value)[:40])
def test_difference_is_named_with_position_and_both_values(verify, number, path, value, words):
    """The position is row, sample and token."""
    other = [changed(row, path, value) if index == number else row for index, row in enumerate(ROWS)]
    assert verify(ROWS, other) == (1, f'row {number} (custom_id "row-{number}"), {words}')


def test_first_sign_of_difference_is_named(verify):
    """Log-probabilities part before the token that they lead to, and an earlier row before a later one."""
    early = changed(ROWS[0], ["outputs", 0, "logprobs", 1, 0, "logprob"], -9.0)
    both = changed(early, ["outputs", 0, "token_ids", 2], 99)
    later = changed(ROWS[1], ["outputs", 0, "token_ids", 0], 99)
    code, line = verify(ROWS, [both, later, *ROWS[2:]])
    assert (code, line) == (
        1,
        'row 0 (custom_id "row-0"), sample 0, token 1: logprobs[0].logprob: -0.5 in the first, -9.0 in the second',
    )
    code, line = verify(ROWS, [both, later, *ROWS[2:]], "--tokens-only")
    assert (code, line) == (1, 'row 0 (custom_id "row-0"), sample 0, token 2: 2 in the first, 99 in the second')


def test_answers_without_ids_are_counted_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Regression: "3 rows, 4 tokens" of which two had no token ids."""
    texts = [openai_row(number, {"text": "Hello"}) for number in (1, 2)]
    path = str(write(tmp_path / "a.jsonl", [plain_row(0, n=1), *texts]))
    assert import_module("spmd_worker.frontends.tools.verify").main([path, path]) == 0
    assert capsys.readouterr().out == "3 rows, 4 tokens, and 2 answers by text alone\nsame\n"


def test_tokens_only_leaves_log_probabilities_out(verify):
    other = [changed(ROWS[0], ["outputs", 0, "logprobs", 0, 0, "logprob"], -0.25), *ROWS[1:]]
    other[0]["prompt_logprobs"] = [None]
    assert verify(ROWS, other)[0] == 1
    assert verify(ROWS, other, "--tokens-only") == (0, "same")


def test_logprobs_do_not_matter_for_equal_tokens(verify):
    with_logprobs, without = [plain_row(0)], [plain_row(0, has_logprobs=False)]
    assert verify(with_logprobs, without)[1].endswith("in the first, nothing in the second")
    assert verify(with_logprobs, without, "--tokens-only") == (0, "same")


def test_numbers_are_compared_by_their_bits(verify):
    def row(value: float) -> dict[str, Any]:
        return changed(ROWS[0], ["outputs", 0, "logprobs", 0, 0, "logprob"], value)

    assert verify([row(0.0)], [row(-0.0)])[0] == 1
    assert verify([row(1)], [row(1.0)])[0] == 1
    assert verify([row(0.1)], [row(0.1000000000000000055)]) == (0, "same")


def test_usage_model_and_response_ids_are_not_compared(verify):
    other = copy.deepcopy(ROWS)
    other[0]["usage"]["prompt_tokens"] = 99
    other[3]["id"] = "batch-9"
    other[3]["response"]["body"]["model"] = "another"
    assert verify(ROWS, other) == (0, "same")


def test_rows_match_by_custom_id_in_any_order(verify):
    assert verify(ROWS, ROWS[::-1]) == (0, "same")
    other = [changed(row, ["outputs", 0, "token_ids", 0], 9) if row["custom_id"] == "row-1" else row for row in ROWS]
    assert verify(ROWS, other[::-1])[1].startswith('row 1 (custom_id "row-1"), sample 0, token 0: 1 in the first, 9')


def test_rows_without_custom_id_are_matched_by_index(verify):
    rows = [changed(plain_row(number), ["custom_id"], None) for number in range(3)]
    assert verify(rows, rows[::-1]) == (0, "same")
    other = [rows[0], rows[1], changed(rows[2], ["outputs", 0, "text"], "else")]
    assert verify(rows, other)[1].startswith("row 2, sample 0, text, character 0")


def test_repeated_custom_ids_are_paired_in_order(verify):
    """The runtime answers a repeated custom_id with an error row that carries it too."""
    refused = {"custom_id": "row-0", "index": 1, "error": {"code": "duplicate_custom_id", "message": "..."}}
    assert verify([ROWS[0], refused], [ROWS[0], refused]) == (0, "same")
    assert verify([ROWS[0], refused], [ROWS[0], ROWS[0]])[1].startswith('row 1 (custom_id "row-0"), error: {"code"')


def test_missing_rows_are_named_on_either_side(verify):
    code, line = verify(ROWS, ROWS[:3])
    assert code == 1
    assert line.startswith('row 3 (custom_id "row-3") of ')
    assert line.endswith("b.jsonl")
    code, line = verify(ROWS[:3], ROWS)
    assert code == 1
    assert line.startswith('row 3 (custom_id "row-3") of ')
    assert line.endswith("a.jsonl, which has 3 rows (2 fewer)")
    renamed = [*ROWS[:4], changed(ROWS[4], ["custom_id"], "row-x")]
    assert verify(ROWS, renamed)[1].startswith('row 4 (custom_id "row-4") of ')


def test_another_number_of_samples_is_a_difference(verify):
    fewer = changed(ROWS[0], ["outputs"], ROWS[0]["outputs"][:1])
    assert verify(ROWS, [fewer, *ROWS[1:]])[1].endswith("2 samples in the first, 1 in the second")


def test_bytes_are_compared_as_they_are(verify):
    assert verify(ROWS, ROWS[::-1], "--bytes")[0] == 1
    other = [ROWS[0], changed(ROWS[1], ["usage", "prompt_tokens"], 4), *ROWS[2:]]
    place = len(json.dumps(ROWS[0])) + 1 + json.dumps(ROWS[1]).index('3, "completion')
    code, line = verify(ROWS, other, "--bytes")
    assert (code, line.split(":")[0]) == (1, f"line 2, byte {place}")
    assert verify(ROWS, ROWS[:4], "--bytes")[1].endswith("b'' in the second")


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_token_lists_are_same_exactly_when_equal(first: list[int], second: list[int]):
    module = import_module("spmd_worker.frontends.tools.verify")
    rows = [changed(ROWS[2], ["outputs", 0, "token_ids"], ids) for ids in (first, second)]
    difference = module.compare_rows(*rows, tokens_only=False, totals=module.Totals())
    assert (difference is None) == (first == second)


@pytest.mark.parametrize("line", ["[1]", "not json", '{"half": '])
def test_incomparable_files_exit_with_2_and_reason(verify, tmp_path: Path, capsys, line: str):
    main = import_module("spmd_worker.frontends.tools.verify").main
    good, bad = write(tmp_path / "good", ROWS[:1]), tmp_path / "bad"
    bad.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    assert main([str(bad), str(good)]) == 2
    assert f"{bad}, line 2: " in capsys.readouterr().err
    assert main([str(good), str(tmp_path / "absent")]) == 2
    why = f"cannot read {tmp_path / 'absent'}: No such file or directory"
    assert capsys.readouterr().err == f"python -m spmd_worker.tools.verify: {why}\n"
    assert main([str(good), str(tmp_path / "absent"), "--bytes"]) == 2


@pytest.mark.gate("local-*", "s3-a.jsonl.zst", "s3-part-*.jsonl")
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.parquet", "part-*.jsonl", "part-*.jsonl.gz"])
@pytest.mark.parametrize("where", ["local", "s3"])
def test_outputs_of_every_kind_are_compared(s3: Any, tmp_path: Path, capsys, name: str, where: str):
    """Regression: `s3://bucket/a.jsonl` was the file `s3:/bucket/a.jsonl`, and a compressed output no JSON."""
    main = import_module("spmd_worker.frontends.tools.verify").main
    output, other = f"{s3.bucket if where == 's3' else tmp_path}/{name}", tmp_path / "other.jsonl"
    lines = [json.dumps(each).encode() + b"\n" for each in ROWS]
    for path in (output, str(other)):
        write_lines(lines, file_path(path), part_rows=3)
    assert main([output, str(other)]) == 0
    assert main([output, output, "--bytes"]) == 0
    if name.endswith(".jsonl"):
        assert main([str(other), output, "--bytes"]) == 0
    write_lines(lines[:-1], file_path(str(other)))
    assert main([str(other), output]) == 1
    assert main([f"{output}.gone", str(other)]) == 2
    assert f"cannot read {output}.gone: " in capsys.readouterr().err or "*" in name


def test_unfinished_outputs_are_not_compared(tmp_path: Path, capsys):
    """Regression: two jobs that had written no part yet were the same."""
    main = import_module("spmd_worker.frontends.tools.verify").main
    pattern = tmp_path / "part-*.jsonl"
    claim_folder(pattern)
    assert main([str(pattern), str(pattern)]) == 2
    assert f"{pattern} is not complete (0 parts in " in capsys.readouterr().err
    write_lines([json.dumps(each).encode() + b"\n" for each in ROWS], pattern, part_rows=3)
    assert main([str(tmp_path / "p-*.jsonl"), str(pattern)]) == 2
    assert "p-*.jsonl: " in (error := capsys.readouterr().err)
    assert "would be replaced" not in error
    (tmp_path / "part-00001.jsonl").unlink()
    assert main([str(pattern), str(pattern)]) == 2
    assert f"cannot read {tmp_path}/part-00001.jsonl: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("column", [{"prompt": ["a"]}, {"json": [7]}])
def test_parquet_of_no_output_is_named(tmp_path: Path, capsys, column: dict[str, Any]):
    main = import_module("spmd_worker.frontends.tools.verify").main
    pyarrow.parquet.write_table(pyarrow.table(column), tmp_path / "a.parquet")
    assert main([str(tmp_path / "a.parquet")] * 2) == 2
    assert "a.parquet is no output of a job: it has no column json" in capsys.readouterr().err


def pooled_row(**answer: Any) -> dict[str, Any]:
    return {"custom_id": "a", "index": 0, **answer, "usage": {"prompt_tokens": 3}, "error": None}


def openai_pooled_row(**answer: Any) -> dict[str, Any]:
    return {"custom_id": "a", "response": {"status_code": 200, "body": {"model": "m", **answer}}, "error": None}


@pytest.mark.parametrize("options", [(), ("--tokens-only",)])
@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        (pooled_row(embedding=[0.5, 1.0]), pooled_row(embedding=[0.5, 2.0]), "embedding[1]: 1.0 in the first, 2.0 in"),
        (pooled_row(scores=[0.5]), pooled_row(scores=[0.5, 0.25]), "scores[1]: nothing in the first, 0.25 in"),
        (pooled_row(scores=[0.5]), pooled_row(embedding=[0.5]), "embedding: nothing in the first, [0.5] in"),
        (
            openai_pooled_row(data=[{"index": 0, "embedding": "AAAAAA=="}]),
            openai_pooled_row(data=[{"index": 0, "embedding": "AAAAgA=="}]),
            'data[0].embedding: "AAAAAA==" in the first',
        ),
        (
            openai_pooled_row(results=[{"index": 1, "relevance_score": 0.5}]),
            openai_pooled_row(results=[{"index": 0, "relevance_score": 0.5}]),
            "results[0].index: 1 in the first, 0 in",
        ),
    ],
    ids=["embedding", "scores", "another kind", "OpenAI's", "a reranker's"],
)
def test_pooled_rows_are_compared_by_their_numbers(verify, mine, theirs, said, options):
    assert verify([mine], [mine], *options) == (0, "same")
    code, line = verify([mine], [theirs], *options)
    assert code == 1
    assert said in line


def test_row_without_an_answer_is_not_the_same(verify):
    code, line = verify([pooled_row(vector=[1.0])], [pooled_row(vector=[2.0])])
    assert code == 2
    assert "has neither error nor outputs, choices, embedding" in line


def test_too_deeply_nested_line_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "deep.jsonl"
    path.write_text("[" * 200_000 + "\n")
    assert import_module("spmd_worker.frontends.tools.verify").main([str(path), str(path)]) == 2
    assert "line 1: nested too deeply" in capsys.readouterr().err


@pytest.mark.finding(number="D11")
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"outputs": 5}, "outputs must be a list, not 5"),
        ({"outputs": [{"token_ids": 7}]}, "token_ids must be a list, not 7"),
        ({"outputs": [{"logprobs": {"tokens": "x"}}]}, 'tokens must be a list, not "x"'),
    ],
)
def test_damaged_rows_are_neither_same_nor_different(verify, answer: dict[str, Any], said: str):
    code, words = verify([answer], [answer])
    assert code == 2
    assert words.endswith(said)


@pytest.mark.finding(number="D11")
def test_options_that_exclude_each_other_are_rejected(verify, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The second was ignored, as were the files beside --images."""
    for options, words in (
        (["--bytes", "--tokens-only"], "--bytes compares all"),
        (["--images", "x"], "give two files"),
    ):
        with pytest.raises(SystemExit):
            verify([], [], *options)
        assert words in capsys.readouterr().err


def test_lone_surrogate_is_shown_by_its_number(tmp_path: Path):
    """A terminal cannot print it."""
    for name, text in (("a.jsonl", "x\ud800"), ("b.jsonl", "y")):
        write(tmp_path / name, [{"outputs": [{"text": text}]}])
    command = [sys.executable, "-m", "spmd_worker.tools.verify", "a.jsonl", "b.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert '"x\\ud800" in the first, "y" in the second' in done.stdout
