import gzip
import json
import os
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import zstandard
from file_limit import file_limit

from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.output_file import OutputFile

PLAIN = {
    "custom_id": "a",
    "index": 0,
    "outputs": [{"index": 0, "text": "é", "token_ids": [3, 4], "finish_reason": "stop", "stop_reason": 2}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2},
    "error": None,
}
REFUSED = {"custom_id": None, "index": 1, "error": {"code": "invalid_json", "message": "why"}}
CHAT = {
    "id": "batch-2",
    "custom_id": "c",
    "response": {
        "status_code": 200,
        "body": {
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "length"}
                | {"stop_reason": None}
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        },
    },
    "error": None,
}
LINES = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in (PLAIN, REFUSED, CHAT)]


def write(path, lines=LINES):
    with OutputFile.open(path) as output:
        for line in lines:
            output.write(line)
    return path


def test_lines_are_written_as_they_come(tmp_path):
    assert write(tmp_path / "out.jsonl").read_bytes() == b"".join(LINES)
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_empty_output_is_an_empty_file(tmp_path):
    assert write(tmp_path / "out.jsonl", []).read_bytes() == b""
    assert gzip.decompress(write(tmp_path / "out.jsonl.gz", []).read_bytes()) == b""
    assert pyarrow.parquet.read_table(write(tmp_path / "out.parquet", [])).num_rows == 0


def test_compressed_lines_are_equal_and_bytes_are_reproducible(tmp_path):
    packed = write(tmp_path / "out.jsonl.gz").read_bytes()
    assert gzip.decompress(packed) == b"".join(LINES)
    assert write(tmp_path / "other.jsonl.gz").read_bytes() == packed
    packed = write(tmp_path / "out.jsonl.zst").read_bytes()
    assert zstandard.ZstdDecompressor().decompressobj().decompress(packed) == b"".join(LINES)
    assert write(tmp_path / "other.jsonl.zst").read_bytes() == packed


def test_parquet_file_has_columns_and_the_complete_line(tmp_path):
    rows = pyarrow.parquet.read_table(write(tmp_path / "out.parquet")).to_pylist()
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert [row["custom_id"] for row in rows] == ["a", None, "c"]
    assert rows[0]["outputs"] == [
        {"index": 0, "text": "é", "token_ids": [3, 4], "finish_reason": "stop", "stop_reason": "2"}
    ]
    assert [(row["prompt_tokens"], row["completion_tokens"]) for row in rows] == [(5, 2), (None, None), (1, 1)]
    assert rows[1]["error"] == {"code": "invalid_json", "message": "why"}
    assert rows[1]["outputs"] == []
    assert rows[2]["outputs"][0]["text"] == "hi"
    assert [row["json"].encode() + b"\n" for row in rows] == LINES


def test_message_without_content_has_no_text_in_parquet(tmp_path):
    answer = json.loads(LINES[2])
    answer["response"]["body"]["choices"][0]["message"]["content"] = None
    with OutputFile.open(tmp_path / "out.parquet") as file:
        file.write(json.dumps(answer).encode() + b"\n")
    (row,) = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["outputs"][0]["text"] is None
    assert json.loads(row["json"]) == answer


def test_parquet_file_has_many_row_groups(tmp_path):
    lines = [json.dumps({**PLAIN, "index": index}).encode() + b"\n" for index in range(3000)]
    table = pyarrow.parquet.read_table(write(tmp_path / "out.parquet", lines))
    assert table["index"].to_pylist() == list(range(3000))


def test_lone_surrogate_stays_in_line_but_not_column(tmp_path):
    line = json.dumps({**PLAIN, "custom_id": "\ud800"}).encode() + b"\n"
    row = pyarrow.parquet.read_table(write(tmp_path / "out.parquet", [line])).to_pylist()[0]
    assert row["custom_id"] == "?"
    assert row["json"].encode() + b"\n" == line


def test_output_on_full_disk_is_named_and_removed(tmp_path):
    with file_limit(10_000), pytest.raises(OSError, match=r"File too large: '.*/out.jsonl.partial'"):
        write(tmp_path / "out.jsonl", LINES * 1000)
    # Also where the end of its buffer is what does not fit.
    with file_limit(10), pytest.raises(OSError, match=r"File too large: '.*/out.jsonl.partial'"):
        write(tmp_path / "out.jsonl")
    output = OutputFile.open(tmp_path / "o")
    output.write(LINES[0])
    with file_limit(10):
        # Its buffer is not written, after an error of the job's own.
        output.discard()
    assert not (tmp_path / "o.partial").exists()


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "out.parquet"])
def test_failed_job_leaves_the_output_unchanged(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"before\n")

    def write_and_fail():
        with OutputFile.open(path) as output:
            output.write(LINES[0])
            assert path.read_bytes() == b"before\n"
            raise KeyError

    with pytest.raises(KeyError):
        write_and_fail()
    assert path.read_bytes() == b"before\n"
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("line", [b"no end", b"two\nlines\n"])
def test_write_of_other_than_one_line_fails_assertion(tmp_path, line):
    output = OutputFile.open(tmp_path / "out.jsonl")
    with pytest.raises(AssertionError):
        output.write(line)
    output.discard()


def test_output_that_is_no_regular_file_is_rejected(tmp_path):
    with pytest.raises(FileExistsError, match="not a regular file"):
        OutputFile.open(tmp_path)
    with pytest.raises(FileExistsError, match="not a regular file"):
        OutputFile.open(Path("/dev/null"))


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("o.zst", "zstandard", "zstd"), ("o.parquet", "pyarrow", "parquet")]
)
def test_format_without_its_package_is_rejected_with_remedy(tmp_path, monkeypatch, name, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"^the output .*{name} needs {package}.*spmd-worker\[{extra}\]"):
        OutputFile.open(tmp_path / name)
    assert os.listdir(tmp_path) == []
