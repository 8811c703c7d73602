"""Files that are complete or not there, and strict JSON."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from file_limit import file_limit

from spmd_worker.base import files
from spmd_worker.base.errors import ModelConfigError, TokenizerError
from spmd_worker.base.files import (
    JobFileError,
    JsonError,
    create_file,
    describe_os_error,
    make_folder_durably,
    parse_json_object,
    read_json_object,
    read_regular_file,
    write_file,
    write_json,
)
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.tokenizer import tokenizer_files
from spmd_worker.tokenizer.tokenizer import Tokenizer

MODEL = Path(__file__).resolve().parents[2] / "scripts" / "demo" / "model"


def test_file_write_replaces_all_bytes(tmp_path: Path):
    path = tmp_path / "a.txt"
    write_file(path, b"first")
    write_file(path, b"second", is_durable=False)
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("is_durable", [True, False])
def test_failed_write_leaves_only_the_old_file(tmp_path: Path, is_durable: bool):
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    with file_limit(10_000), pytest.raises(OSError, match="File too large") as caught:
        write_file(path, b"x" * 100_000, is_durable=is_durable)
    # The system names no file.
    assert describe_os_error(caught.value) == (
        f"{path}: File too large: finished rows are kept, so raise the limit of files' sizes (ulimit -f) and start the "
        "same command again"
    )
    assert describe_os_error(OSError(errno.ENOSPC, "Full", "a")) == (
        "a: Full: finished rows are kept, so free space and start the same command again"
    )
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    path = tmp_path / "none" / "a.txt"
    with pytest.raises(FileNotFoundError) as caught:
        write_file(path, b"x", is_durable=is_durable)
    assert describe_os_error(caught.value) == f"{path}: No such file or directory"


def test_os_error_is_described_with_its_file_first():
    assert describe_os_error(PermissionError(errno.EACCES, "Permission denied", "a/b")) == "a/b: Permission denied"
    assert describe_os_error(OSError(errno.EIO, "Input/output error")) == "Input/output error"
    own = JobFileError(Path("a/b"), "is a FIFO")
    for error in (own, OSError("rows.gz is damaged: give the complete file"), ValueError("of another kind")):
        assert describe_os_error(error) == str(error)


def test_durable_write_syncs_file_renames_and_syncs_folder(tmp_path: Path, monkeypatch):
    """In this order: a machine that crashes in between has the old file or the new one."""
    done: list[object] = []
    sync, replace = os.fsync, os.replace

    def record_sync(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def record_replace(partial: Path, path: Path) -> None:
        done.append("rename")
        replace(partial, path)

    monkeypatch.setattr(files.os, "fsync", record_sync)
    monkeypatch.setattr(files.os, "replace", record_replace)
    write_json(tmp_path / "a.json", {"a": 1})
    assert done == [str(tmp_path / "a.json.partial"), "rename", str(tmp_path)]
    done.clear()
    write_file(tmp_path / "a.json", b"x", is_durable=False)
    assert done == ["rename"]


def test_json_object_survives_writing_and_reading(tmp_path: Path):
    value = {"text": "\u00fc \ud800 \u2028", "numbers": [1, 2.5, None, True], "inner": {"a": {}}}
    write_json(tmp_path / "a.json", value)
    assert read_json_object(tmp_path / "a.json") == value


BAD = {
    "invalid UTF-8": (b'{"a": "\xff"}', "invalid_utf8", "is not UTF-8: invalid start byte at byte 7"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "invalid_json", "is not JSON: Unexpected UTF-8 BOM"),
    "cut short": (b'{"a": ', "invalid_json", "is not JSON: Expecting value at character 6"),
    "several lines": (b'{\n"a": }\n', "invalid_json", "is not JSON: Expecting value at line 2, column 6"),
    "a control character": (b'{"\n": 1}', "invalid_json", "is not JSON: Invalid control character at line 1, column 3"),
    "text without end": (b'{"a', "invalid_json", "is not JSON: Unterminated string starting at character 1"),
    "two objects": (b"{} {}", "invalid_json", "is not JSON: Extra data at character 3"),
    "a key twice": (b'{"x": {"a": 1, "a": 2}}', "invalid_json", "the key 'a' appears twice in one object"),
    "NaN": (b'{"a": NaN}', "invalid_json", "is not JSON: it has NaN"),
    "Infinity": (b'{"a": [-Infinity]}', "invalid_json", "is not JSON: it has -Infinity"),
    "a huge number": (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json", "an integer of thousands of digits"),
    "bottomless": (b'{"a": ' + b"[" * 200_000, "nested_too_deeply", "is nested too deeply"),
    "a list": (b"[]", "not_an_object", "must be a JSON object, not a list"),
    "null": (b"null", "not_an_object", "must be a JSON object, not null"),
    "empty": (b"", "invalid_json", "is not JSON: Expecting value at character 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_ambiguous_json_is_an_error(name: str, tmp_path: Path):
    data, code, message = BAD[name]
    with pytest.raises(JsonError) as caught:
        parse_json_object(data)
    assert caught.value.code == code
    assert message in str(caught.value)
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(JsonError) as of_file:
        read_json_object(tmp_path / "a.json")
    assert str(of_file.value) == f"{tmp_path / 'a.json'} {caught.value}"


def test_json_nesting_is_limited_when_asked():
    data = b'{"a": [[1]]}'
    assert parse_json_object(data, max_nesting=3) == {"a": [[1]]}
    with pytest.raises(JsonError, match=r"nested .*\b2 levels") as caught:
        parse_json_object(data, max_nesting=2)
    assert caught.value.code == "nested_too_deeply"


def test_json_infinity_is_accepted_when_allowed():
    """In a model's config.json, as Python's own json writes it, under keys that nobody here reads."""
    assert parse_json_object(b'{"time_step_limit": [0.0, Infinity]}', allows_nan=True)["time_step_limit"][1] > 1e300


def test_regular_file_reader_rejects_large_and_endless_files(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_bytes(b"x" * 100)
    assert read_regular_file(path, 100) == b"x" * 100
    with pytest.raises(OSError, match=r"config\.json .*more than 99 bytes"):
        read_regular_file(path, 99)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("fifo", "endless"):
        with pytest.raises(OSError, match=rf"{name} .*not .*regular file"):
            read_regular_file(tmp_path / name)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_endless_model_file_is_rejected_by_name(tmp_path: Path, name: str):
    for each in ("config.json", "tokenizer.json"):
        (tmp_path / each).write_bytes((MODEL / each).read_bytes())
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/dev/zero")
    if name == "tokenizer_config.json":
        # As if it were not there: what is no file is none.
        assert Tokenizer.open(tmp_path).chat_template_source is None
        return
    with pytest.raises(ModelConfigError, match=rf"{name} cannot .*{name} .*regular file"):
        read_model_files(tmp_path)


def test_oversized_tokenizer_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert tokenizer_files._MAX_BYTES == 256 << 20
    monkeypatch.setattr(tokenizer_files, "_MAX_BYTES", 20 << 20)
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate((20 << 20) + 1)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot .*more than 20,971,520 "):
        Tokenizer.open(tmp_path)


def test_folders_are_created_durably_from_first_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else a file that was synced could be gone with its folder."""
    synced: list[str] = []
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    make_folder_durably(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    make_folder_durably(tmp_path / "a" / "b")
    assert len(synced) == 2


@pytest.mark.parametrize("has_links", [True, False])
def test_one_of_many_writers_creates_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool):
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "planted")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    path, contents = tmp_path / "manifest.json", [b"%d" % number * 10_000 for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        created = list(threads.map(partial(create_file, path), contents))
    assert sorted(created) == [False, False, False, True]
    assert path.read_bytes() == contents[created.index(True)]
    assert [each.name for each in tmp_path.iterdir()] == ["manifest.json"]
