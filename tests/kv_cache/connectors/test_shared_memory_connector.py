"""Connector through shared memory: what is published is read bit for bit, and nothing else is ever used."""

import logging
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from forked_child import in_child
from fresh_files import write_new
from test_file_connector import IDENTITY, NAMES, SIZE, Memory, loaded, saved

from kv_cache.connectors import segment, shared_memory
from kv_cache.connectors.block_files import BlockFiles
from kv_cache.connectors.interface import ConnectorContext, ConnectorError
from kv_cache.connectors.segment import Producer, Segment
from kv_cache.connectors.shared_memory import connect

# The entry of a slot has 64 bytes.
FOUR_SLOTS = str(4 * (SIZE + 64) / 2**30)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Segments in a folder of the test's own."""
    monkeypatch.setattr(segment, "FOLDER", tmp_path)
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


def context_of(
    role_given: str, rank: int = 0, num_ranks: int = 1, replica: int = 0, **options: str
) -> ConnectorContext:
    return ConnectorContext({"name": "a", "role": role_given, **options}, IDENTITY, rank, num_ranks, replica)


@pytest.fixture
def producer() -> Iterator[shared_memory.SegmentMover]:
    made = connect(context_of("producer", gib=FOUR_SLOTS)).worker_half(Memory())
    yield made
    made.close()


@pytest.fixture
def consumer(producer: shared_memory.SegmentMover):
    connector, memory = connect(context_of("consumer")), Memory()
    finder, mover = connector.scheduler_half(), connector.worker_half(memory)
    yield finder, mover, memory
    finder.close()
    mover.close()


def test_consumer_reads_what_is_published(producer, consumer):
    finder, mover, memory = consumer
    assert (finder.find(NAMES), connect(context_of("consumer")).saves) == (0, False)
    assert saved(producer, 1, 1, 2) == (1,)
    assert finder.find([NAMES[1], NAMES[2], NAMES[0]]) == 2
    assert loaded(mover, 1, (1, 3), (2, 0)) == (1,)
    assert (memory.blocks[3], memory.blocks[0]) == (bytes([1]) * SIZE, bytes([2]) * SIZE)
    assert loaded(producer, 2, (1, 1)) == (2,)


def test_oldest_block_is_replaced_and_missed(consumer, caplog: pytest.LogCaptureFixture):
    finder, mover, _ = consumer
    (path,) = segment.FOLDER.iterdir()
    os.unlink(path)
    full = Producer(path, context_of("producer"), SIZE, 2 * (SIZE + 64))
    for name in NAMES[:3]:
        full.write(name, memoryview(bytes(SIZE)))
    assert [finder.find([name]) for name in NAMES] == [0, 1, 1, 0]
    assert loaded(mover, 1, (1, 3), (0, 2)) == (-1,)
    assert not [each for each in caplog.records if each.levelno > logging.INFO]
    full.close()
    assert finder.find([NAMES[1]]) == 0


@pytest.mark.guarantee("Replaced blocks in shared memory are not used")
def test_block_replaced_while_it_is_read_fails(producer, consumer, monkeypatch: pytest.MonkeyPatch):
    check_replacement(producer, consumer, monkeypatch)


@pytest.mark.control("Replaced blocks in shared memory are not used")
def test_without_checksums_replaced_blocks_are_used(producer, consumer, monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    monkeypatch.setattr(segment, "checksum", lambda name, content: bytes(16))
    with pytest.raises(AssertionError, match=r"\(1,\) == \(-1,\)"):
        check_replacement(producer, consumer, monkeypatch)


def check_replacement(producer, consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer is killed after half of a block: its entry is still the old block's, as the reader sees it."""
    _, mover, _ = consumer
    saved(producer, 1, 1)
    found = producer._producer._slots[NAMES[1]]
    _, start = segment._offsets(found, 4, SIZE)
    producer._producer._memory[start : start + SIZE // 2] = b"\xff" * (SIZE // 2)
    assert loaded(mover, 1, (1, 3)) == (-1,)


def test_all_ranks_must_have_a_block(folder: Path):
    movers = [connect(context_of("producer", rank, 2, gib=FOUR_SLOTS)).worker_half(Memory()) for rank in range(2)]
    saved(movers[0], 1, 0, 1)
    saved(movers[1], 1, 0)
    finder = connect(context_of("consumer", 0, 2)).scheduler_half()
    assert finder.find(NAMES) == 1
    replica = connect(context_of("producer", 1, 2, replica=1, gib=FOUR_SLOTS)).worker_half(Memory())
    saved(replica, 1, 1)
    assert finder.find(NAMES) == 2, "replicas have the same blocks"
    for each in (*movers, replica):
        each.close()
    assert (list(folder.iterdir()), finder.find(NAMES)) == ([], 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": "w2"}, "another weights: 'w1' there, 'w2' here"),
        ({"dtype": "bfloat16"}, "another dtype: 'float32' there, 'bfloat16' here"),
        ({"layout": "two ranks"}, "another layout: 'one rank' there, 'two ranks' here"),
        ({"layout": f"{'x' * 100}2"}, "another layout: 'one rank' there"),
        ({"block size": "32 tokens"}, "another block size: 'nothing' there, '32 tokens' here"),
    ],
)
def test_producer_of_other_blocks_is_named(producer, change: dict[str, str], words: str):
    other = replace(context_of("consumer"), identity={**IDENTITY, **change})
    with pytest.raises(ConnectorError, match=words):
        connect(other).scheduler_half()


def test_missing_producer_is_named():
    with pytest.raises(ConnectorError, match=r"no segment .*spmd-kv-a\.\*\.0: start the engine with role=producer"):
        connect(context_of("consumer")).scheduler_half()


def test_second_living_producer_is_rejected(producer):
    with pytest.raises(ConnectorError, match="belongs to another producer, which is alive"):
        connect(context_of("producer", gib=FOUR_SLOTS)).worker_half(Memory())
    producer.close()
    connect(context_of("producer", gib=FOUR_SLOTS)).worker_half(Memory()).close()


def produce_and_die() -> None:
    saved(connect(context_of("producer", gib=FOUR_SLOTS)).worker_half(Memory()), 1, 0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_blocks_of_a_killed_producer_are_read_and_replaced(folder: Path):
    assert in_child(produce_and_die) == -signal.SIGKILL
    connector, memory = connect(context_of("consumer")), Memory()
    finder, mover = connector.scheduler_half(), connector.worker_half(memory)
    assert finder.find(NAMES) == 2
    assert loaded(mover, 1, (1, 3)) == (1,)
    assert memory.blocks[3] == bytes([1]) * SIZE
    again = connect(context_of("producer", gib=FOUR_SLOTS)).worker_half(Memory())
    assert finder.find(NAMES) == 0
    saved(again, 1, 2)
    assert finder.find([NAMES[2]]) == 1
    again.close()


def start_and_die() -> None:
    segment.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    produce_and_die()


def test_memory_of_a_killed_start_is_taken_over(folder: Path):
    assert in_child(start_and_die) == -signal.SIGKILL
    assert [each.name for each in folder.iterdir()] == ["spmd-kv-a.0.0.new"]
    connect(context_of("producer", gib=FOUR_SLOTS)).worker_half(Memory()).close()
    assert list(folder.iterdir()) == []


def test_producers_that_start_at_once_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch):
    fallocate = os.posix_fallocate

    def second_starts(*given: int) -> None:
        fallocate(*given)
        with pytest.raises(ConnectorError, match="belongs to another producer, which is alive"):
            connect(context_of("producer", gib=FOUR_SLOTS)).worker_half(Memory())

    monkeypatch.setattr(os, "posix_fallocate", second_starts)
    first = connect(context_of("producer", gib=FOUR_SLOTS)).worker_half(Memory())
    assert [each.name for each in folder.iterdir()] == ["spmd-kv-a.0.0"]
    first.close()


@pytest.mark.parametrize("content", [b"", bytes(2**15), b"SPMDSHM1" + bytes(2**15)])
def test_other_files_are_not_read(folder: Path, content: bytes):
    (folder / "spmd-kv-a.0.0").write_bytes(content)
    with pytest.raises(ConnectorError, match="is not a segment of blocks"):
        Segment(folder / "spmd-kv-a.0.0", context_of("consumer"))


def test_damaged_headers_are_named_or_harmless(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """Every byte of both formats' headers is flipped, both are cut short, and the words are of other types. Words that
    were no JSON, or of other types, were a KeyError or TypeError of the consumer.
    """
    path, context = folder / "spmd-kv-a.0.0", context_of("consumer")
    mover = connect(context_of("producer", gib=FOUR_SLOTS)).worker_half(Memory())
    saved(mover, 1, 1)
    content, length = path.read_bytes(), len(segment._in_words(IDENTITY))
    mover.close()
    start, other_key = segment._HEADER.size, bytearray(content)
    other_key[8] ^= 1
    damaged = [content[:size] for size in (0, 8, start - 1, start, start + length, 2**14 - 1, 2**14, len(content) - 1)]
    damaged += [_flipped(other_key, index) for index in range(start + length)]
    for words in (b"", b"null", b"[]", b'{"weights":1}', b'{"weights":["x"]}', b'{"weights":[1,2]}', b"[" * 9000):
        damaged.append(bytes(_with_words(other_key, words)))
    for data in damaged:
        write_new(path, data)
        with pytest.raises(ConnectorError, match=re.escape(str(path))):
            Segment(path, context)
    for index in range(start + length):
        write_new(path, _flipped(content, index))
        with suppress(ConnectorError):
            read = Segment(path, context)
            assert read.read(NAMES[1]) == bytes([1]) * SIZE, "only the counter and unread words may differ"
            read.close()
    files = BlockFiles(tmp_path_factory.mktemp("files"), context)
    files.create()
    files.write(NAMES[1], memoryview(bytes([1]) * SIZE))
    whole = files.path(NAMES[1]).read_bytes()
    for data in (*[_flipped(whole, index) for index in range(48)], *[whole[:size] for size in range(48)]):
        write_new(files.path(NAMES[1]), data)
        assert (files.read(NAMES[1], SIZE), files.path(NAMES[1]).exists()) == (None, False)


def _flipped(data: bytes | bytearray, index: int) -> bytes:
    changed = bytearray(data)
    changed[index] ^= 0xFF
    return bytes(changed)


def _with_words(data: bytes | bytearray, words: bytes) -> bytearray:
    changed = bytearray(data)
    changed[segment._HEADER.size - 4 : segment._HEADER.size + len(words)] = len(words).to_bytes(4, "little") + words
    return changed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "../x"}, r"name='\.\./x' must be at most 100 letters"),
        ({"role": "both"}, "role='both' is not one of producer, consumer"),
        ({"gib": "1e-9"}, "holds no block of 64 bytes"),
        ({"size": "1"}, r"no option 'size'"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, str], message: str):
    with pytest.raises(ConnectorError, match=message):
        connect(context_of("producer", **options)).worker_half(Memory())


def test_memory_that_is_short_is_an_error(folder: Path):
    with pytest.raises(ConnectorError, match=r"bytes of shared memory .* are not available"):
        connect(context_of("producer", gib="1000000")).worker_half(Memory())
    assert list(folder.iterdir()) == []
