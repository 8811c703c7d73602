"""Connector to files: what is written counts once it is complete, undamaged, and of the same weights and layout."""

import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kv_cache.connectors.block_files import BlockFiles, SizeLimit
from kv_cache.connectors.files import FileMover, connect
from kv_cache.connectors.interface import ConnectorContext, ConnectorError

NAMES = [bytes([number]) * 16 for number in range(1, 5)]
IDENTITY = {"weights": "w1", "dtype": "float32", "layout": "one rank"}
SIZE = 64


class Memory:
    """Four blocks of 64 bytes; block n holds the byte n."""

    block_bytes = SIZE

    def __init__(self) -> None:
        self.blocks = [bytes([number]) * SIZE for number in range(4)]

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self.blocks[block_id]) for block_id in block_ids]

    def write(self, block_ids: Sequence[int], contents: Sequence[bytes]) -> None:
        for block_id, content in zip(block_ids, contents, strict=True):
            self.blocks[block_id] = bytes(content)


def context_of(folder: Path, rank: int = 0, num_ranks: int = 1, **options: str) -> ConnectorContext:
    return ConnectorContext({"folder": str(folder), **options}, IDENTITY, rank, num_ranks)


def halves(context: ConnectorContext):
    connector = connect(context)
    memory = Memory()
    return connector.scheduler_half(), connector.worker_half(memory), memory


def saved(mover: FileMover, number: int, *block_ids: int) -> tuple[int, ...]:
    mover.load(number, ())
    mover.save(number, [(block_id, NAMES[block_id]) for block_id in block_ids])
    return mover.finished()


def loaded(mover: FileMover, number: int, *pairs: tuple[int, int]) -> tuple[int, ...]:
    mover.load(number, [(NAMES[index], block_id) for index, block_id in pairs])
    mover.save(number, ())
    return mover.finished()


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*.kv"))


def test_second_job_finds_and_loads_the_bytes(tmp_path: Path):
    finder, mover, _ = halves(context_of(tmp_path))
    assert finder.find(NAMES) == 0
    assert saved(mover, 1, 0, 1, 2) == (1,)
    again, other, memory = halves(context_of(tmp_path))
    assert again.find(NAMES) == 3
    assert loaded(other, 1, (1, 3), (2, 0)) == (1,)
    assert (memory.blocks[3], memory.blocks[0]) == (bytes([1]) * SIZE, bytes([2]) * SIZE)
    assert other.finished() == ()


@pytest.mark.parametrize("topic", list(IDENTITY))
def test_other_weights_or_layout_find_nothing(tmp_path: Path, topic: str):
    saved(halves(context_of(tmp_path))[1], 1, 0)
    other = replace(context_of(tmp_path), identity={**IDENTITY, topic: "another"})
    assert halves(other)[0].find(NAMES) == 0
    assert '"dtype": "float32"' in connect(context_of(tmp_path))._files.about.read_text()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def flip_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


def swap(path: Path) -> None:
    """Another block's file, complete, under this name."""
    other = next(each for each in files_in(path.parents[2]) if each != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.guarantee("Damaged block files are computed again")
@pytest.mark.parametrize("damage", [cut, lengthen, empty, flip, flip_header, swap])
def test_damaged_file_fails_and_is_written_again(tmp_path: Path, damage, caplog: pytest.LogCaptureFixture):
    _, mover, memory = halves(context_of(tmp_path))
    saved(mover, 1, 0, 1)
    path = connect(context_of(tmp_path))._files.path(NAMES[1])
    damage(path)
    before = list(memory.blocks)
    assert loaded(mover, 2, (0, 2), (1, 3)) == (-2,)
    assert (memory.blocks, path.exists()) == (before, False)
    assert f"{path} is damaged" in caplog.text
    assert saved(mover, 3, 1) == (3,)
    assert loaded(mover, 4, (1, 3)) == (4,)
    assert memory.blocks[3] == bytes([1]) * SIZE


@pytest.mark.control("Damaged block files are computed again")
def test_without_checksums_damaged_files_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """Negative control."""
    monkeypatch.setattr(BlockFiles, "_checksum", lambda *_: bytes(16))
    with pytest.raises(AssertionError, match=r"\(2,\) == \(-2,\)"):
        test_damaged_file_fails_and_is_written_again(tmp_path, flip, caplog)


def test_missing_part_of_another_rank_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    contexts = [context_of(tmp_path, rank, num_ranks=2) for rank in range(2)]
    finder, first, _ = halves(contexts[0])
    second = connect(contexts[1]).worker_half(Memory())
    saved(first, 1, 0, 1)
    saved(second, 1, 0)
    assert finder.find(NAMES) == 1
    assert loaded(first, 2, (1, 2)) == (2,)
    assert loaded(second, 2, (1, 2)) == (-2,)
    # What a limit evicts is gone as well: a folder that is full warns of nothing.
    assert not [each for each in caplog.records if each.levelno > logging.INFO]


def test_rank_without_the_folder_is_an_error(tmp_path: Path):
    with pytest.raises(ConnectorError, match=r"rank 1 does not see .*about\.json"):
        connect(context_of(tmp_path, 1, 2)).worker_half(Memory())


def test_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    _, mover, _ = halves(context_of(tmp_path))
    replaced = Path.replace

    def fail(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    # So that no row waits for what is not there.
    assert saved(mover, 1, 0, 1) == (-1,)
    assert "no more blocks are saved by this job" in caplog.text
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "about.json"] == []
    monkeypatch.setattr(Path, "replace", replaced)
    saved(mover, 2, 2)
    assert files_in(tmp_path) == []


def test_killed_writer_leaves_no_findable_file(tmp_path: Path):
    """What a killed job was writing has another name, and goes when it is old."""
    finder, mover, _ = halves(context_of(tmp_path))
    saved(mover, 1, 0)
    (path,) = files_in(tmp_path)
    half = path.with_name(f".{path.name}.1.1.new")
    path.rename(half)
    os.truncate(half, 30)
    assert finder.find(NAMES) == 0
    SizeLimit(tmp_path, 2**20, 0, 1)
    assert half.exists()
    os.utime(half, (0, 0))
    SizeLimit(tmp_path, 2**20, 0, 1)
    assert not half.exists()


def test_least_recently_used_files_are_evicted(tmp_path: Path):
    finder, mover, _ = halves(context_of(tmp_path))
    saved(mover, 1, 0, 1, 2, 3)
    files = connect(context_of(tmp_path))._files
    for age, name in enumerate((NAMES[2], NAMES[0], NAMES[1], NAMES[3])):
        os.utime(files.path(name), ns=(age * 10**9, age * 10**9))
    loaded(mover, 2, (2, 0))
    num_bytes = files.path(NAMES[0]).stat().st_size
    SizeLimit(tmp_path, 3 * num_bytes, 0, 1)
    assert [files.path(name).exists() for name in NAMES] == [False, False, True, True]
    assert finder.find(NAMES) == 0


def test_two_ranks_divide_the_files_of_all_jobs(tmp_path: Path):
    for rank in range(4):
        context = context_of(tmp_path, rank, num_ranks=4)
        connect(context).scheduler_half()
        saved(connect(context).worker_half(Memory()), 1, 0, 1)
    num_bytes = files_in(tmp_path)[0].stat().st_size
    SizeLimit(tmp_path, 2 * num_bytes, 1, 2)
    assert [path.name[-4] for path in files_in(tmp_path) if path.name[-4] in "13"] == []
    assert len(files_in(tmp_path)) == 4


def test_limit_holds_while_a_job_writes(tmp_path: Path):
    limit = SizeLimit(tmp_path, 10 * 112, 0, 1)
    files = BlockFiles(tmp_path, context_of(tmp_path))
    files.create()
    for number in range(100):
        limit.add(files.write(number.to_bytes(16, "big"), memoryview(bytes(SIZE))))
        assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 10 * 112


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "the option folder is missing"),
        ({"folder": "/x", "size": "3"}, r"no option 'size': .* takes folder .*gib"),
        ({"folder": "/x", "gib": "many"}, "gib='many' must be a number of GiB above 0"),
        ({"folder": "/x", "gib": "-1"}, "gib='-1' must be"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, str], message: str):
    with pytest.raises(ConnectorError, match=message):
        connect(ConnectorContext(options, IDENTITY, 0, 1))


def test_folder_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConnectorError, match=r"cannot be written .*choose another folder"):
        connect(context_of(tmp_path / "file")).scheduler_half()


def test_read_only_folder_is_loaded_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Regression: refused at the start. Control: a folder that has to be made there."""
    saved(halves(context_of(tmp_path))[1], 1, 0)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    finder, mover, memory = halves(context_of(tmp_path))
    assert finder.find(NAMES) == 1
    assert loaded(mover, 1, (0, 3)) == (1,)
    assert memory.blocks[3] == bytes([0]) * SIZE
    with pytest.raises(ConnectorError, match=r"new cannot be written .* is no folder that you may write to"):
        connect(context_of(tmp_path / "new"))


def test_evictions_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="kv_cache")
    saved(halves(context_of(tmp_path))[1], 1, 0, 1)
    SizeLimit(tmp_path, 1, 0, 1)
    assert "2 of 2 files of blocks" in caplog.text
