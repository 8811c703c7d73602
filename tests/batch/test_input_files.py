import gzip
import json
import os
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from spmd_worker.batch.input.row_reader import RowReader
from spmd_worker.errors import ConfigError

ROWS = [{"prompt": f"row {number} é"} for number in range(5)]
CONTENT = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def rows_of(name):
    return [json.loads(line) for _, line in RowReader.of(str(name))]


def test_compressed_files_are_read_as_what_they_hold(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(CONTENT))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(CONTENT))
    assert rows_of(tmp_path / "a.jsonl.gz") == rows_of(tmp_path / "a.jsonl.zst") == ROWS
    assert RowReader.of(str(tmp_path / "a.jsonl.zst")).count() == 5


def test_a_compressed_file_may_have_several_parts(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(CONTENT[:30]) + gzip.compress(CONTENT[30:]))
    (tmp_path / "a.zst").write_bytes(zstandard.compress(CONTENT[:30]) + zstandard.compress(CONTENT[30:]))
    assert rows_of(tmp_path / "a.gz") == rows_of(tmp_path / "a.zst") == ROWS


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_large_files_of_many_pieces(tmp_path, suffix):
    content = b"".join(json.dumps({"prompt": os.urandom(40).hex()}).encode() + b"\n" for _ in range(5000))
    pack = gzip.compress if suffix == "gz" else zstandard.compress
    (tmp_path / f"a.{suffix}").write_bytes(pack(content) + pack(content))
    assert [line for _, line in RowReader.of(str(tmp_path / f"a.{suffix}"))] == (content + content).splitlines()


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_file_cut_off_anywhere_is_an_error_and_never_fewer_rows(tmp_path, suffix):
    whole = (gzip.compress if suffix == "gz" else zstandard.compress)(CONTENT)
    path = tmp_path / f"a.{suffix}"
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(OSError, match="cut off"):
            rows_of(path)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_file_that_is_not_compressed_is_an_error_that_says_so(tmp_path, suffix):
    (tmp_path / f"a.{suffix}").write_bytes(CONTENT)
    with pytest.raises(OSError, match="is damaged"):
        rows_of(tmp_path / f"a.{suffix}")


def test_a_pattern_reads_all_files_in_order_of_their_names_and_numbers_rows_on(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf"3"\n"4"')
    (tmp_path / "a.jsonl").write_bytes(b'"0"\n\n"1"')
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'"2"'))
    (tmp_path / "c.jsonl").mkdir()
    reader = RowReader.of(str(tmp_path / "*.jsonl*"))
    assert list(reader) == [(0, b'"0"'), (1, b'"1"'), (2, b'"2"'), (3, b'"3"'), (4, b'"4"')]
    assert reader.count() == 5


def test_a_name_with_brackets_is_a_file_where_there_is_one(tmp_path):
    (tmp_path / "a[1].jsonl").write_bytes(b"0")
    assert list(RowReader.of(str(tmp_path / "a[1].jsonl"))) == [(0, b"0")]


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="matches no file"):
        RowReader.of(str(tmp_path / "*.jsonl"))
    with pytest.raises(ConfigError, match="is not a file"):
        RowReader.of(str(tmp_path))


def test_parquet_rows_are_objects_without_what_is_null(tmp_path):
    rows = [
        {"prompt": "é", "max_tokens": 3, "logit_bias": None, "stop": ["a"]},
        {"prompt": None, "messages": [{"role": "user", "content": "x", "name": None}], "temperature": 0.5},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows + [{"messages": None}] * 2), tmp_path / "a.parquet")
    # The columns are those of the first row: a table has one schema.
    assert rows_of(tmp_path / "a.parquet")[0] == {"prompt": "é", "max_tokens": 3, "stop": ["a"]}
    schema = pyarrow.schema(
        {
            "prompt": pyarrow.large_string(),
            "messages": pyarrow.list_(pyarrow.struct({"role": pyarrow.string(), "name": pyarrow.string()})),
            "temperature": pyarrow.float32(),
        }
    )
    table = pyarrow.Table.from_pylist(
        [{"messages": [{"role": "user"}, None], "temperature": 0.5}, {"prompt": "x"}], schema=schema
    )
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet", row_group_size=1)
    assert rows_of(tmp_path / "b.parquet") == [
        {"messages": [{"role": "user"}, None], "temperature": 0.5},
        {"prompt": "x"},
    ]
    assert RowReader.of(str(tmp_path / "*.parquet")).count() == 6


def test_columns_that_json_cannot_hold_are_refused_by_name(tmp_path):
    table = pyarrow.table({"prompt": ["a"], "extra": pyarrow.array([{"when": b"x"}])})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"column extra.when has type binary.*cast it"):
        rows_of(tmp_path / "a.parquet")


def test_what_is_no_parquet_file_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_bytes(CONTENT)
    with pytest.raises(ConfigError, match="is no Parquet file"):
        rows_of(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("a.zst", "zstandard", "zstd"), ("a.parquet", "pyarrow", "parquet")]
)
def test_without_its_package_a_format_is_refused_with_the_way_to_get_it(tmp_path, monkeypatch, name, package, extra):
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"job.input=.*{name} needs {package}.*spmd-worker\[{extra}\]"):
        rows_of(tmp_path / name)
