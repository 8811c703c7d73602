import bz2
import gzip
import json
import lzma
import os
import sys
import tracemalloc
from types import SimpleNamespace

import pandas
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from fresh_files import write_new

from spmd_worker.base.config.schema import RowLimits
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.remote_names import RemotePath
from spmd_worker.frontends.batch.input import input_files, row_reader
from spmd_worker.frontends.batch.input.input_files import check_format
from spmd_worker.frontends.batch.input.input_index import index_input
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.openai.row import RowError
from spmd_worker.frontends.openai.row_parser import parse_row
from spmd_worker.replica.sequence.sampling_params import SamplingParams

ROWS = [{"prompt": f"row {number} é"} for number in range(5)]
CONTENT = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def rows_of(name):
    return [json.loads(line) for _, line in RowReader.of(str(name))]


def test_compressed_files_are_read_as_their_content(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(CONTENT))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(CONTENT))
    assert rows_of(tmp_path / "a.jsonl.gz") == rows_of(tmp_path / "a.jsonl.zst") == ROWS
    assert index_input(RowReader.of(str(tmp_path / "a.jsonl.zst"))).num_rows == 5


def test_compressed_file_may_have_several_parts(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(CONTENT[:30]) + gzip.compress(CONTENT[30:]))
    (tmp_path / "a.zst").write_bytes(zstandard.compress(CONTENT[:30]) + zstandard.compress(CONTENT[30:]))
    assert rows_of(tmp_path / "a.gz") == rows_of(tmp_path / "a.zst") == ROWS


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_multi_part_files_of_many_chunks_are_read(tmp_path, suffix):
    content = b"".join(json.dumps({"prompt": os.urandom(40).hex()}).encode() + b"\n" for _ in range(5000))
    pack = gzip.compress if suffix == "gz" else zstandard.compress
    (tmp_path / f"a.{suffix}").write_bytes(pack(content) + pack(content))
    assert [line for _, line in RowReader.of(str(tmp_path / f"a.{suffix}"))] == (content + content).splitlines()


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_file_cut_anywhere_is_error_never_fewer_rows(tmp_path, suffix):
    """One of 0 bytes was an input without rows."""
    pack = gzip.compress if suffix == "gz" else zstandard.compress
    whole, path = pack(CONTENT), tmp_path / f"a.{suffix}"
    for length in range(len(whole)):
        write_new(path, whole[:length])
        with pytest.raises(OSError, match="truncated"):
            rows_of(path)
    path.write_bytes(pack(b""))
    assert rows_of(path) == []


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_uncompressed_file_is_reported_as_damaged(tmp_path, suffix):
    (tmp_path / f"a.{suffix}").write_bytes(CONTENT)
    with pytest.raises(OSError, match="is damaged"):
        rows_of(tmp_path / f"a.{suffix}")


def test_pattern_reads_files_by_name_and_numbers_on(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf"3"\n"4"')
    (tmp_path / "a.jsonl").write_bytes(b'"0"\n\n"1"')
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'"2"'))
    (tmp_path / "c.jsonl").mkdir()
    reader = RowReader.of(str(tmp_path / "*.jsonl*"))
    assert list(reader) == [(0, b'"0"'), (1, b'"1"'), (2, b'"2"'), (3, b'"3"'), (4, b'"4"')]
    assert index_input(reader).num_rows == 5


def test_existing_name_with_brackets_is_a_file(tmp_path):
    (tmp_path / "a[1].jsonl").write_bytes(b"0")
    assert list(RowReader.of(str(tmp_path / "a[1].jsonl"))) == [(0, b"0")]


def test_input_without_a_file_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="matches no file"):
        RowReader.of(str(tmp_path / "*.jsonl"))
    with pytest.raises(ConfigError, match="is not a file"):
        RowReader.of(str(tmp_path))


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_closed_standard_input_is_no_empty_input(monkeypatch, name):
    """Regression: the device was /dev/null then, and the job ended well with an output of no rows."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match=f"job.input={name}, and standard input is closed: give it rows"):
        input_files.open_stream(name)


def test_pattern_that_matches_other_formats_is_named(tmp_path):
    for name in ("a.jsonl", "notes.csv"):
        (tmp_path / name).write_bytes(CONTENT)
    with pytest.raises(ConfigError) as caught:
        RowReader.of(f"{tmp_path}/*")
    assert str(caught.value) == (
        f"job.input={tmp_path}/notes.csv: .csv is not supported: give JSONL, also as .gz or .zst, or .parquet: "
        f"{tmp_path}/* matches it, {tmp_path}/*.jsonl would not"
    )


def test_query_of_a_url_may_choose_the_format():
    """Regression: an export was refused for its name's suffix."""
    check_format("job.input", RemotePath("https://h/export.csv?format=jsonl"))
    for name in ("https://h/export.csv", "s3://b/export.csv?versionId=1"):
        with pytest.raises(ConfigError, match=r"\.csv is not supported: give"):
            check_format("job.input", RemotePath(name))


@pytest.mark.parametrize("name", ["a.jsonl.xz", "a.csv", "b.TAR", "c.Zip", "d.jsonl.GZ", "e.Parquet"])
def test_other_formats_are_rejected_by_suffix(tmp_path, name):
    """Each of their lines was an error row."""
    (tmp_path / name).write_bytes(CONTENT)
    words = (
        "is not known: write" if name[0] in "de" else "is not supported: give JSONL, also as .gz or .zst, or .parquet"
    )
    for given in (name, "*"):
        with pytest.raises(ConfigError, match=rf"^job\.input={tmp_path}/{name}: \.\w+ {words}"):
            RowReader.of(str(tmp_path / given))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(CONTENT), "gzip by its .*: name it with .gz, or decompress it"),
        (zstandard.compress(CONTENT), "zstd by its .*: name it with .zst, or decompress it"),
        (b"PAR1\x15\x04", "Parquet by its .*: name it with .parquet"),
        (lzma.compress(CONTENT), "xz by its .*: decompress it"),
        (bz2.compress(CONTENT), "bzip2 by its .*: decompress it"),
        (CONTENT.decode().encode("utf-16"), "UTF-16 by its .*: convert it to UTF-8"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "a pointer of Git LFS by its .*: run `git lfs pull` in its folder",
        ),
    ],
    ids=["gzip", "zstd", "Parquet", "xz", "bzip2", "UTF-16", "Git LFS"],
)
def test_other_formats_are_rejected_by_first_bytes(tmp_path, monkeypatch, content, words):
    """Pieces of a `.jsonl` that was gzip were error rows, "not UTF-8", of a job that ended well."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^job\.input={path} is {words}$"):
        RowReader.of(str(path))
    with path.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(ConfigError, match=rf"^job\.input=- is {words}$"):
            list(RowReader.of("-"))


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".parquet"])
def test_pointers_of_git_lfs_are_named_in_every_format(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=rf"^job\.input={path} is a pointer of Git LFS, not the file itself"):
        RowReader.of(str(path))


def test_unreadable_input_is_rejected_by_its_key(tmp_path, monkeypatch):
    """It was found when the model was loaded, as an error that did not name the key. `access` allows root all."""
    (tmp_path / "rows.jsonl").write_text("{}\n")
    monkeypatch.setattr(os, "access", lambda path, mode: os.path.isdir(path))
    for name in ("rows.jsonl", "*.jsonl"):
        with pytest.raises(ConfigError, match=r"job.input=.*/rows.jsonl cannot be read \(permission denied\)"):
            RowReader.of(str(tmp_path / name))


@pytest.mark.parametrize("pattern", ["*/*.jsonl", "**/*.jsonl", "*/rows.jsonl"])
def test_pattern_leaves_out_no_folder_or_link(tmp_path, monkeypatch, pattern):
    """Regression: rows in a folder that cannot be read, or behind a broken link, were missing from a job's output."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text("{}\n")
    for name in ("c", "lost+found"):
        (tmp_path / name).mkdir()
    assert len(RowReader.of(str(tmp_path / pattern)).paths) == 2
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: os.path.basename(path) != "lost+found")
        assert len(RowReader.of(str(tmp_path / pattern)).paths) == 2
        patch.setattr(os, "access", lambda path, mode: os.path.basename(path) != "b")
        with pytest.raises(ConfigError, match=rf"its folder {tmp_path}/b cannot be read \(permission denied\): change"):
            RowReader.of(str(tmp_path / pattern))
        # It may be entered, but not listed.
        patch.setattr(os, "access", lambda path, mode: os.path.basename(path) != "b" or not mode & os.R_OK)
        with pytest.raises(ConfigError, match=f"its folder {tmp_path}/b cannot be read"):
            RowReader.of(str(tmp_path / "**" / "rows.jsonl"))
    (tmp_path / "c" / "rows.jsonl").symlink_to("gone")
    with pytest.raises(ConfigError, match=rf"matches {tmp_path}/c/rows.jsonl, a link to a file that is not there"):
        RowReader.of(str(tmp_path / pattern))


def test_parquet_rows_are_objects_without_null_values(tmp_path):
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
    assert index_input(RowReader.of(str(tmp_path / "*.parquet"))).num_rows == 6


FRAME = pandas.DataFrame({"prompt": ["a", "b", "c", "d"], "max_tokens": [1, 2, 3, 4]})
FILTERED = FRAME[FRAME.max_tokens != 2]
LEFT = [{"prompt": prompt, "max_tokens": number} for prompt, number in (("a", 1), ("c", 3), ("d", 4))]


@pytest.mark.finding(number="D13")
@pytest.mark.parametrize(
    ("frame", "options", "rows"),
    [
        (FILTERED, {}, LEFT),
        (FILTERED, {"row_group_size": 2}, LEFT),
        (FILTERED.set_index(pandas.Index([5, 6, 7], name="row")), {}, LEFT),
        (FILTERED.set_index(pandas.date_range("2024-01-01", periods=3)), {}, LEFT),
        (FILTERED.set_index([pandas.Index([3, 1, 2]), pandas.Index(list("xyz"), name="k")]), {}, LEFT),
        # Its name is a row's key.
        (FILTERED.set_index("prompt"), {}, LEFT),
        (FRAME[FRAME.max_tokens > 9], {}, []),
        (pandas.DataFrame(), {}, []),
        # pandas makes floats of whole numbers with nulls.
        (
            pandas.DataFrame({"prompt": ["a", "b"], "max_tokens": [5, None], "temperature": [None, 0.5]}),
            {"index": True},
            [{"prompt": "a", "max_tokens": 5}, {"prompt": "b", "temperature": 0.5}],
        ),
        (
            pandas.DataFrame({"prompt": pandas.Categorical(["a", "b"]), "stop": [["x"], None]}, index=[4, 9]),
            {},
            [{"prompt": "a", "stop": ["x"]}, {"prompt": "b"}],
        ),
    ],
)
def test_frames_of_pandas_are_rows_without_their_index(tmp_path, frame, options, rows):
    frame.to_parquet(tmp_path / "a.parquet", **options)
    assert rows_of(tmp_path / "a.parquet") == rows
    for _, line in RowReader.of(str(tmp_path / "a.parquet")):
        assert not isinstance(parse_row(0, line, SamplingParams()), RowError)


@pytest.mark.finding(number="D13")
def test_columns_next_to_frame_index_are_keys(tmp_path, caplog):
    """An unknown column is an error row, as in JSONL; a column that is left out is logged once."""
    FILTERED.assign(topic="x").to_parquet(tmp_path / "a.parquet")
    with caplog.at_level("INFO", logger="spmd_worker"):
        lines = [line for _, line in RowReader.of(str(tmp_path / "a.parquet"))]
    assert [message.count("__index_level_0__: the index of a pandas frame") for message in caplog.messages] == [1]
    for line in lines:
        error = parse_row(0, line, SamplingParams())
        assert isinstance(error, RowError)
        assert error.message.startswith("unknown key 'topic'")
    # A file that pandas wrote and another program wrote anew has no word of the index.
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "__index_level_0__": [5]}), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [{"prompt": "a"}]


@pytest.mark.finding(number="D13")
def test_columns_with_one_name_are_rejected(tmp_path):
    """A row would have the last of them."""
    strings = pyarrow.array(["a"])
    inner = pyarrow.StructArray.from_arrays([strings, strings], names=["role", "role"])
    tables = {
        "2 columns have the name 'prompt'": pyarrow.table([strings, strings], names=["prompt", "prompt"]),
        "2 fields of sampling have the name 'role'": pyarrow.table({"sampling": inner}),
    }
    for words, table in tables.items():
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(ConfigError, match=words):
            rows_of(tmp_path / "a.parquet")


def test_columns_outside_json_are_rejected_by_name(tmp_path):
    table = pyarrow.table({"prompt": ["a"], "extra": pyarrow.array([{"when": b"x"}])})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"extra\.when .*unsupported type binary"):
        rows_of(tmp_path / "a.parquet")


def test_non_parquet_file_is_rejected(tmp_path):
    (tmp_path / "a.parquet").write_bytes(CONTENT)
    with pytest.raises(ConfigError, match="complete Parquet file"):
        rows_of(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("a.zst", "zstandard", "zstd"), ("a.parquet", "pyarrow", "parquet")]
)
def test_format_without_its_package_is_rejected_with_remedy(tmp_path, monkeypatch, name, package, extra):
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"job.input=.*{name} needs {package}.*spmd-worker\[{extra}\]"):
        rows_of(tmp_path / name)


def dictionary_of(text, num_rows):
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * num_rows, pyarrow.int32()), [text])


def peak_bytes_of(path, num_rows, **limits):
    """Of Python's objects and pyarrow's buffers, while the first rows are read."""
    tracemalloc.start()
    before, most = pyarrow.total_allocated_bytes(), 0
    for _, _ in zip(range(num_rows), RowReader((path,), **limits)):
        most = max(most, pyarrow.total_allocated_bytes() - before)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak + most


TEXT = "x" * 100_000


@pytest.mark.parametrize("shape", ["text", "list", "struct"])
def test_repeated_dictionary_text_takes_memory_of_few_rows(tmp_path, monkeypatch, shape):
    """1,000 rows of 100 kB in a file of some hundred bytes: a batch of them would be 100 MB."""
    column = dictionary_of(TEXT, 1000)
    if shape == "list":
        column = pyarrow.ListArray.from_arrays(list(range(1001)), column)
    if shape == "struct":
        column = pyarrow.StructArray.from_arrays([column], ["content"])
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 5_000
    assert peak_bytes_of(tmp_path / "a.parquet", 50) < 8 << 20
    index, line = next(iter(RowReader((tmp_path / "a.parquet",))))
    expected = {"text": TEXT, "list": [TEXT], "struct": {"content": TEXT}}[shape]
    assert (index, json.loads(line)) == (0, {"prompt": expected})
    # Negative control.
    monkeypatch.setattr(input_files.ParquetRows, "_size_of", lambda self, batch: 0)
    assert peak_bytes_of(tmp_path / "a.parquet", 50) > 50 << 20


def test_row_longer_than_line_limit_is_never_assembled(tmp_path):
    """One row of 100,000 times the same 100 kB: 10 GB."""
    column = pyarrow.ListArray.from_arrays([0, 1, 100_000], dictionary_of(TEXT, 100_000))
    pyarrow.parquet.write_table(pyarrow.table({"stop": column}), tmp_path / "a.parquet")
    assert peak_bytes_of(tmp_path / "a.parquet", 2) < 64 << 20
    lines = [line for _, line in RowReader((tmp_path / "a.parquet",), max_line_bytes=1 << 20)]
    assert json.loads(lines[0]) == {"stop": [TEXT]}
    assert lines[1] == b" " * ((1 << 20) + 1)


def test_rows_with_too_many_values_are_rejected_unread(tmp_path):
    column = pyarrow.ListArray.from_arrays([0, 5000], pyarrow.array([1] * 5000, pyarrow.int8()))
    pyarrow.parquet.write_table(pyarrow.table({"stop": column}), tmp_path / "a.parquet")
    reader = RowReader((tmp_path / "a.parquet",), max_line_bytes=4000)
    with pytest.raises(ConfigError, match=r"row group 0 .*5,000 values .*limits\.max_line_bytes=4,000"):
        list(reader)


def test_big_row_group_is_read_row_by_row(tmp_path, monkeypatch):
    monkeypatch.setattr(input_files, "_GROUP_BYTES", 1 << 20)
    texts = [f"{number:06}" + "x" * 100_000 for number in range(200)]
    table = pyarrow.table({"prompt": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False, write_batch_size=1)
    assert peak_bytes_of(tmp_path / "a.parquet", 200) < 12 << 20
    assert [json.loads(line)["prompt"] for _, line in RowReader((tmp_path / "a.parquet",))] == texts
    # Negative control: kept in dictionaries they grow with the group.
    monkeypatch.setattr(input_files, "_GROUP_BYTES", 1 << 30)
    assert peak_bytes_of(tmp_path / "a.parquet", 200) > 20 << 20


def test_row_group_bigger_than_declared_is_rejected(tmp_path, monkeypatch):
    texts = [f"{number:06}" + "x" * 100_000 for number in range(100)]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts}), tmp_path / "a.parquet", use_dictionary=False)
    reader = input_files.ParquetRows(tmp_path / "a.parquet", 1 << 20)
    says = SimpleNamespace(num_columns=0, num_rows=100, total_byte_size=1000)
    monkeypatch.setattr(input_files, "_GROUP_BYTES", 1 << 20)
    reader._plain = SimpleNamespace(num_row_groups=1, metadata=SimpleNamespace(row_group=lambda group: says))
    with pytest.raises(ConfigError, match=r"group 0 claims 1,000 bytes"):
        list(reader)


@pytest.mark.parametrize("is_large", [False, True], ids=["a small group", "row by row"])
@pytest.mark.parametrize("shape", ["text", "list"])
def test_invalid_utf_8_is_error_of_its_row(tmp_path, monkeypatch, shape, is_large):
    """Writers of Parquet do not look."""
    if is_large:
        monkeypatch.setattr(input_files, "_GROUP_BYTES", 1)
    texts = pyarrow.array([b"one", b"\xff\xfe", b"three"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    column = pyarrow.ListArray.from_arrays([0, 1, 2, 3], texts) if shape == "list" else texts
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "a.parquet")
    lines = [line for _, line in RowReader((tmp_path / "a.parquet",))]
    one, three = (["one"], ["three"]) if shape == "list" else ("one", "three")
    assert [json.loads(lines[0]), json.loads(lines[2])] == [{"prompt": one}, {"prompt": three}]
    row = parse_row(1, lines[1], SamplingParams(), RowLimits())
    assert isinstance(row, RowError)
    assert row.code == "invalid_utf8"


def test_damaged_page_is_error_naming_the_file(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [f"{number}" * 50 for number in range(100)]}), path)
    content = bytearray(path.read_bytes())
    content[60:200] = bytes(140)
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"parquet|[Cc]orrupt|snappy|damaged|page"):
        list(RowReader((path,)))


@pytest.mark.gate("-*", ".gz- *")
@pytest.mark.parametrize("blank", [b"\n", b" \t\r\n", b"\r\n"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_blank_lines_are_skipped_by_the_buffer(tmp_path, monkeypatch, suffix, blank):
    content = b"1\n" + blank * 300_000 + b" 2 \n" + blank * 70_000 + b"3\n" + blank
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    calls = []
    bounded = row_reader._bounded_lines
    monkeypatch.setattr(
        row_reader, "_bounded_lines", lambda *given: (calls.append(1) or line for line in bounded(*given))
    )
    assert list(RowReader((path,))) == [(0, b"1"), (1, b" 2 "), (2, b"3")]
    assert len(calls) < 2_000
    # Negative control.
    calls.clear()
    monkeypatch.setattr(row_reader, "_skip_blank_lines", lambda *_: None)
    assert list(RowReader((path,))) == [(0, b"1"), (1, b" 2 "), (2, b"3")]
    assert len(calls) > 370_000


def test_too_long_blank_line_is_a_row(tmp_path):
    """Other blank lines are not rows."""
    (tmp_path / "a.jsonl").write_bytes(b"\n\n" + b" " * 20 + b"\n\n" + b" " * 8 + b"\n1\n")
    lines = [line for _, line in RowReader((tmp_path / "a.jsonl",), max_line_bytes=8)]
    assert lines == [b" " * 9, b"1"]
