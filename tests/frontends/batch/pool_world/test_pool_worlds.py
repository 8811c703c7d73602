"""Worlds of a pool, in turns over a store with a clock of its own: whatever ends, the bytes of the job in one piece."""

import contextlib
import errno
import itertools
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pool_worlds import DEFAULTS, MemoryStore, TurnedWorld, one_piece, write_rows

from spmd_worker.base.config.schema import JobConfig, RowLimits
from spmd_worker.base.errors import ConfigError, PoolError
from spmd_worker.base.remote_files import replace_remote
from spmd_worker.frontends.batch.input.input_files import find_inputs
from spmd_worker.frontends.batch.input.input_index import IndexedFile, InputIndex, Mark, index_input
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.batch.input.stream_lines import StreamLines
from spmd_worker.frontends.batch.job_rows import JobInput
from spmd_worker.frontends.batch.pool.lease_log import LeaseLog
from spmd_worker.frontends.batch.pool.records import INPUT_INDEX_NAME, MERGE_LOG, Entry, RangeRecord, range_name
from spmd_worker.frontends.batch.pool.view import read_pool
from spmd_worker.frontends.batch.pool_world import input_content, merge, pool_index, pool_worker
from spmd_worker.frontends.batch.pool_world.held_range import SpansDone
from spmd_worker.frontends.batch.pool_world.parts import FinishedRow, decode_part, encode_part
from spmd_worker.frontends.batch.prefix_window import PrefixWindow
from spmd_worker.frontends.batch.run_dir.job_files import is_job_file
from spmd_worker.frontends.batch.run_dir.journal import RowKey
from spmd_worker.frontends.openai.row_writer import RowAnswer

NUM_ROWS = 60
LEASE_S = 10.0


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    return job_in(tmp_path)


def job_in(folder: Path, **changes: Any) -> JobConfig:
    write_rows(folder / "rows.jsonl", NUM_ROWS)
    config = JobConfig(
        input=str(folder / "rows.jsonl"),
        output=str(folder / "out.jsonl"),
        pool=str(folder / "pool"),
        lease_s=LEASE_S,
        lease_rows=16,
        commit_rows=4,
        commit_s=1000.0,
    )
    return replace(config, **changes)


def check(job: JobConfig) -> None:
    """The output has the bytes of one piece."""
    output = Path(job.output or "")
    one = output.with_name(f"one{''.join(output.suffixes)}")
    assert output.read_bytes() == one_piece(Path(job.input or ""), one)


def names(store: MemoryStore, text: str) -> list[str]:
    return [name for name in store.objects if text in name]


@pytest.mark.guarantee("A pool's output is that of one piece")
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_two_worlds_write_bytes_of_one_piece(tmp_path: Path, suffix: str):
    job, store = job_in(tmp_path, output=str(tmp_path / f"out{suffix}")), MemoryStore()
    worlds = [TurnedWorld(store, job) for _ in range(2)]
    while not all(world.rows.has_ended for world in worlds):
        for world in worlds:
            world.go_on()
    first = worlds[0].finish()
    second = worlds[1].finish()
    check(job)
    assert first == second
    assert sum(world.num_computed for world in worlds) == NUM_ROWS
    assert min(world.num_computed for world in worlds) > 0
    lines = one_piece(Path(job.input or ""), tmp_path / "one.jsonl").splitlines()
    assert first.num_error_rows == sum(json.loads(line)["error"] is not None for line in lines)
    assert b"duplicate_custom_id" in b"".join(lines)


def test_late_world_finds_the_end(job: JobConfig):
    store = MemoryStore()
    written = TurnedWorld(store, job).finish()
    late = TurnedWorld(store, job)
    assert late.world.earlier_output() == written
    assert late.finish() == written
    assert late.num_computed == 0


def crash(world: TurnedWorld) -> None:
    """Nothing: it is not called again."""


def wait_for_lease(store: MemoryStore, *others: TurnedWorld) -> None:
    store.now += LEASE_S + 1
    for other in others:
        other.beat()


def test_rows_of_killed_world_are_computed_again(job: JobConfig):
    store = MemoryStore()
    killed, other = TurnedWorld(store, job), TurnedWorld(store, job)
    killed.turn()
    killed.read()
    killed.answer(5)
    killed.turn()
    killed.answer(3)
    other.go_on()
    crash(killed)
    for _ in range(40):
        other.go_on()
    assert other.worker.held() == ()
    # Its lease lives: the other one waits, and merges nothing.
    other.turn()
    assert not other.rows.has_ended
    assert not other.rows.is_ready()
    assert names(store, "merged/") == []
    wait_for_lease(store, other)
    other.finish()
    check(job)
    # Five of the eight were committed.
    assert killed.num_computed + other.num_computed == NUM_ROWS + 3


def test_handed_back_rows_are_leased_at_once(job: JobConfig):
    store = MemoryStore()
    ended, other = TurnedWorld(store, job), TurnedWorld(store, job)
    ended.turn()
    ended.read()
    ended.answer(6)
    ended.world.leave("signalled")
    # Idempotent, and nothing is committed or leased afterwards.
    ended.world.leave("failed")
    ended.answer()
    ended.turn()
    assert ended.worker.num_dropped_rows == ended.num_computed - 6
    assert ended.worker.held() == ()
    num_before = other.num_computed
    other.finish()
    check(job)
    assert other.num_computed - num_before == NUM_ROWS - 6


def paused(job: JobConfig) -> tuple[MemoryStore, TurnedWorld, TurnedWorld]:
    """A world that has answers, and was silent for longer than a lease; the other one has all that it had."""
    store = MemoryStore()
    slow, other = TurnedWorld(store, job), TurnedWorld(store, job)
    slow.turn()
    slow.read()
    slow.answer(6)
    wait_for_lease(store, other)
    for _ in range(40):
        other.go_on()
    return store, slow, other


def test_world_that_was_paused_drops_its_rows(job: JobConfig):
    store, slow, other = paused(job)
    assert other.rows.has_ended
    before = dict(store.contents)
    slow.turn()
    assert slow.worker.held() == ()
    slow.answer()
    assert slow.worker.num_dropped_rows > 0
    assert not [name for name in names(store, "ranges/") if name not in before], "a lost lease has no more entries"
    slow.finish()
    check(job)


def test_heartbeat_notices_a_lost_lease(job: JobConfig):
    store = MemoryStore()
    slow, other = TurnedWorld(store, job), TurnedWorld(store, job)
    slow.turn()
    assert len(slow.worker.held()) == 2
    lost = {held.lease.log.number for held in slow.worker.held()}
    wait_for_lease(store, other)
    for _ in range(40):
        other.go_on()
    slow.beat()
    slow.turn()
    assert not lost & {held.lease.log.number for held in slow.worker.held()}
    slow.finish()
    check(job)


def test_waiting_rows_of_a_lost_lease_are_dropped(job: JobConfig):
    """Regression: they were computed, and their answers dropped."""
    store = MemoryStore()
    slow, other = TurnedWorld(store, job), TurnedWorld(store, job)
    slow.turn()
    window = PrefixWindow(slow.rows, 1000)
    while len(slow.running) < 2:
        found = window.next_row()
        slow.running += [] if found is None else [found]
    num_waiting = len(slow.rows.keys) - 2
    assert num_waiting > 0
    wait_for_lease(store, other)
    for _ in range(40):
        other.go_on()
    slow.beat()
    slow.turn()
    assert window.next_row() is None
    slow.answer()
    assert slow.world.lost_rows() == (2, num_waiting)
    assert slow.rows.keys == {}
    slow.finish()
    check(job)


def test_reclaimed_rows_in_flight_are_not_read_twice(job: JobConfig):
    """Their answers, computed for the lost lease, are those of the new one."""
    job = replace(job, lease_rows=4 * NUM_ROWS)
    store = MemoryStore()
    slow, other = TurnedWorld(store, job), TurnedWorld(store, job)
    slow.turn()
    slow.read()
    wait_for_lease(store, other)
    other.turn()
    other.world.leave("signalled")
    slow.beat()
    slow.turn()
    slow.turn()
    slow.read()
    assert len({found.row.index for found in slow.running}) == len(slow.running)
    slow.answer()
    slow.finish()
    check(job)
    assert slow.num_computed == NUM_ROWS


@pytest.mark.parametrize("kind", ["parts/", "ranges/", "merged/", "done/"])
def test_kill_at_each_write_loses_no_row(tmp_path: Path, kind: str):
    """Between a part and its entry, too: the n-th write of the kind is the world's last moment."""
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        job, store = job_in(folder), MemoryStore()
        killed = TurnedWorld(store, job)
        former = Path(job.output or "")
        former.write_text("former")
        store.before = strike(kind, number)
        with contextlib.suppress(Killed):
            killed.finish()
        if former.read_text() != "former":
            check(job)
        assert (f"{MERGE_LOG}.0002" in store.objects) <= (merge.PROVENANCE in store.objects)
        store.before = lambda kind, name: None
        store.now += LEASE_S + 1
        other = TurnedWorld(store, job)
        other.finish()
        check(job)
        assert killed.num_computed + other.num_computed <= NUM_ROWS + job.lease_rows
        assert sorted(path.name for path in folder.glob("out*")) == ["out.jsonl"]


def test_provenance_is_created_before_the_end(job: JobConfig):
    """Regression: it was replaced, which need not be durable, and the end is."""
    store, writes = MemoryStore(), list[tuple[str, str]]()
    world = TurnedWorld(store, job)
    store.before = lambda operation, name: writes.append((operation, name))
    world.finish()
    of_merge = [each for each in writes if each[1].startswith("merged/")]
    assert of_merge == [("create", name) for name in (f"{MERGE_LOG}.0001", merge.PROVENANCE, f"{MERGE_LOG}.0002")]


class Killed(BaseException):
    """Ends a world as a kill would."""


def strike(kind: str, number: int) -> Callable[[str, str], None]:
    left = [number]

    def before(operation: str, name: str) -> None:
        if name.startswith(kind):
            if not left[0]:
                raise Killed
            left[0] -= 1

    return before


def test_interrupted_commit_is_repeated_as_it_was(job: JobConfig):
    """An entry that may exist already names these rows and no others."""
    store = MemoryStore()
    world = TurnedWorld(store, job)
    world.turn()
    world.read()
    world.answer(4)

    def fail_after(operation: str, name: str) -> None:
        if name == "ranges/00000001.0002":
            store.before = lambda kind, name: None
            store.create(name, data_of_entry[0])
            raise InterruptedError

    data_of_entry: list[bytes] = []
    create = store.create

    def noting(name: str, data: bytes) -> bool:
        data_of_entry[:] = [data]
        return create(name, data)

    store.create = noting  # type: ignore[method-assign]  # notes what is written
    store.before = fail_after
    with pytest.raises(InterruptedError):
        world.worker._commit(world.worker.held()[1], ())
    world.answer(2)
    world.world.leave("signalled")
    TurnedWorld(store, job).finish()
    check(job)


def check_logs_of_paused_world(job: JobConfig, change: Callable[[TurnedWorld], object] = lambda slow: None) -> None:
    store, slow, other = paused(job)
    change(slow)
    for held in slow.worker.held():
        slow.worker._commit(held, ())
    other.finish()
    check(job)
    rows = [row for log in logs_of(store) for start, stop in log.spans for row in range(start, stop)]
    assert sorted(rows) == list(range(NUM_ROWS))


def logs_of(store: MemoryStore) -> list[LeaseLog]:
    """The logs of all ranges, entry by entry. Raises PoolError for one that no order of events explains."""
    logs = []
    for number in itertools.count():
        data = store.read(range_name(number))
        if data is None:
            return logs
        log = LeaseLog.of_range(number, RangeRecord.from_bytes("", data))
        while (data := store.read(log.entry_name)) is not None:
            log.apply(Entry.from_bytes("", data))
        logs.append(log)
    return logs


@pytest.mark.guarantee("A lost lease commits nothing")
def test_paused_world_cannot_commit(job: JobConfig):
    check_logs_of_paused_world(job)


@pytest.mark.control("A lost lease commits nothing")
def test_comparison_detects_commits_without_fencing(job: JobConfig):
    """Negative control: an entry replaces what another world wrote meanwhile."""

    class Unfenced(MemoryStore):
        def create(self, name: str, data: bytes) -> bool:
            self.touch(name, data)
            return True

        def read(self, name: str) -> bytes | None:
            return super().read(name) if name.startswith("workers/") else None

    def unfence(slow: TurnedWorld) -> None:
        store = Unfenced()
        store.objects, store.contents = slow.store.objects, slow.store.contents
        slow.worker._store = store

    with pytest.raises(PoolError, match=r"ranges/\d+\.\d+ of the pool is a .* created twice"):
        check_logs_of_paused_world(job, unfence)


@pytest.mark.control("A pool's output is that of one piece")
def test_comparison_detects_merge_of_first_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Negative control: a range is what its first part has."""
    rows_of = merge._rows_of

    def first(store: Any, done: Any) -> Any:
        (start, stop), *_ = done.parts[0].spans
        return rows_of(store, replace(done, parts=done.parts[:1], start=start, stop=stop))

    monkeypatch.setattr(merge, "_rows_of", first)
    monkeypatch.setattr("pool_worlds.TurnedWorld.answer", in_halves)
    with pytest.raises((PoolError, AssertionError)):
        test_two_worlds_write_bytes_of_one_piece(tmp_path, ".jsonl")


def in_halves(world: TurnedWorld, num_rows: int | None = None) -> None:
    from pool_worlds import answer_of

    world.running.sort(key=lambda found: -found.row.index)
    while world.running:
        for _ in range(min(4, len(world.running))):
            world.num_computed += 1
            world.output.add(answer_of(world.running.pop()))
        world.turn()


def test_damaged_part_ends_the_merge_with_its_name(job: JobConfig):
    store = MemoryStore()
    world = TurnedWorld(store, job)
    while not world.rows.has_ended:
        world.go_on()
    name = names(store, "parts/")[0]
    data = store.contents[name]
    for damaged in (data[:-1], data[:40] + b"x" + data[41:]):
        store.contents[name] = damaged
        with pytest.raises(PoolError, match=rf"{name} of the pool is damaged: restore"):
            world.world.write_output(None, {}, lambda doing: None)
    del store.contents[name]
    with pytest.raises(PoolError, match=rf"{name} of the pool is missing"):
        world.world.write_output(None, {}, lambda doing: None)
    assert list(Path(job.output or "").parent.glob("out*")) == []
    store.contents[name] = data
    world.finish()
    check(job)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": "/else/out.jsonl"}, r"^job\.output is /else/out\.jsonl, and .* in the pool"),
        ({"max_rows": 5}, r"^number of rows is 5, and 60 in the pool"),
        ({"lease_rows": 2}, r"^job\.lease_rows is 2, and 16 in the pool"),
    ],
)
def test_other_job_is_rejected_by_name(job: JobConfig, change: dict[str, Any], message: str):
    store = MemoryStore()
    TurnedWorld(store, job)
    with pytest.raises(ConfigError, match=message):
        TurnedWorld(store, replace(job, **change))


def test_other_answers_are_rejected_before_loading(job: JobConfig):
    store = MemoryStore()
    TurnedWorld(store, job, {"seed": 0, "arithmetic": "avx2"})
    # What is not known yet is not compared.
    world = TurnedWorld(store, job, {"seed": 0, "arithmetic": "avx2"}).world
    world._answers = {"seed": 0, "arithmetic": "not read yet"}
    world.check_equal()
    world._answers = {"seed": 1, "arithmetic": "not read yet"}
    with pytest.raises(ConfigError, match=r"^seed is 1, and 0 in the pool: every world"):
        world.check_equal()


def test_changed_input_is_rejected(job: JobConfig):
    world, path = TurnedWorld(MemoryStore(), job), Path(job.input or "")
    path.write_bytes(path.read_bytes().replace(b"row 3", b"row 4"))
    world.turn()
    with pytest.raises(ConfigError, match=r"rows\.jsonl changed"):
        world.read()


@pytest.mark.parametrize("has_ended", [True, False])
def test_other_input_of_equal_size_is_rejected(job: JobConfig, has_ended: bool):
    """Regression: a world that found no row to answer compared sizes only, and ended with exit code 0."""
    store = MemoryStore()
    first = TurnedWorld(store, job)
    if has_ended:
        first.finish()
    path, other = Path(job.input or ""), Path(job.input or "").with_name("other.jsonl")
    other.write_bytes(path.read_bytes())
    TurnedWorld(store, replace(job, input=str(other)))
    other.write_bytes(path.read_bytes().replace(b"row 58", b"row 85"))
    message = (
        r"^job\.input has other bytes in .*other\.jsonl than in the pool \(.*rows\.jsonl\): from byte 0 to \d+ their "
        r"digest is \w+, and \w+ in the pool: every .* give the pool's input, or another job\.pool"
    )
    with pytest.raises(ConfigError, match=message):
        TurnedWorld(store, replace(job, input=str(other)))
    with pytest.raises(ConfigError, match=r"^job\.input has [23] files, and 1 in the pool"):
        TurnedWorld(store, replace(job, input=str(path.with_name("*.jsonl"))))


def test_longer_remote_input_is_rejected(s3: Any, job: JobConfig):
    """Regression: of remote files no byte behind the pool's was looked for."""
    content, store, name = Path(job.input or "").read_bytes(), MemoryStore(), f"{s3.bucket}/rows.jsonl"
    replace_remote(name, content)
    job = replace(job, input=name)
    TurnedWorld(store, job).finish()
    for more, message in (
        (b'{"prompt": "more"}\n', r"^job\.input has \d+ bytes in s3:.*, and \d+ in the pool"),
        (b"", ""),
    ):
        replace_remote(name, content + more)
        with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
            pool_index.PoolIndex(store, RowReader.of(name)).wait(None)


def test_stale_index_is_not_put_into_the_pool(job: JobConfig):
    """Regression: it was, and kept every world from the pool."""
    store, path = MemoryStore(), Path(job.input or "")
    stale = index_input(RowReader.of(job.input or ""))
    path.write_bytes(path.read_bytes().replace(b"row 58", b"row 85"))
    with pytest.raises(ConfigError, match=r"than in job\.input_index \(.*make it again with spmd-worker-index"):
        pool_index.PoolIndex(store, RowReader.of(job.input or ""), stale).wait(None)
    assert INPUT_INDEX_NAME not in store.contents
    TurnedWorld(store, job).finish()
    check(job)


def test_worlds_that_read_at_once_compare_digests(job: JobConfig, monkeypatch: pytest.MonkeyPatch):
    """Another world's index came while this one read its own, other, input to the end."""
    store, reader = MemoryStore(), RowReader.of(job.input or "")
    monkeypatch.setattr(pool_index, "index_input", lambda *_: index_input(reader))
    monkeypatch.setattr(store, "read", lambda name: store.contents.get(name) if name in read else read.append(name))
    read: list[str] = []
    store.touch(INPUT_INDEX_NAME, InputIndex.of((), reader.max_line_bytes, 0).to_bytes())
    with pytest.raises(
        ConfigError, match=r"^job\.input has \d+ bytes in 1 file, \w+, and the pool's index 0 bytes in 0"
    ):
        pool_index.PoolIndex(store, reader).wait(None)


def test_large_input_is_compared_in_part():
    """Evenly spread pieces, the last one with them; of compressed files one at least."""
    marks = [Mark(number, number * 10, str(number)) for number in range(100)]
    plain = IndexedFile("a.jsonl", 1000, 100, tuple(marks))
    packed = [IndexedFile(f"{size}.gz", size, 1, (Mark(0, 0, ""),)) for size in (900, 500)]
    assert input_content._choose((plain,), 1000, 3) == [list(range(99, -1, -1))]
    assert input_content._choose((plain,), 250, 3) == [list(range(99, -1, -4))]
    assert input_content._choose(tuple(packed), 100, 3) == [[], [0]]
    assert input_content._choose((plain, *packed), 100, 3) == [list(range(99, -1, -10)), [], []]
    small = IndexedFile("b.jsonl", 1, 1, (Mark(0, 0, ""),))
    assert input_content._choose((small,) * 7, 100, 3) == [[0], [], [], [0], [], [], [0]]


@pytest.mark.parametrize("num_rows", [0, 7])
def test_pool_answers_the_first_rows_only(job: JobConfig, num_rows: int):
    job, store = replace(job, max_rows=num_rows), MemoryStore()
    TurnedWorld(store, job).finish()
    lines = one_piece(Path(job.input or ""), Path(job.output or "").with_name("one.jsonl")).splitlines(True)
    assert Path(job.output or "").read_bytes() == b"".join(lines[:num_rows])


def test_world_uses_index_that_another_makes(job: JobConfig, monkeypatch: pytest.MonkeyPatch):
    """While it reads, it looks now and then."""
    store = MemoryStore()
    reader = RowReader.of(job.input or "")
    whole = index_input(reader)
    monkeypatch.setattr(pool_index, "_ASK_S", 0.0)

    def never_ends(reader: RowReader, is_over: Callable[[], bool]) -> InputIndex:
        assert not is_over()
        store.touch(INPUT_INDEX_NAME, whole.to_bytes())
        assert is_over()
        return InputIndex.of((), reader.max_line_bytes, 0)

    monkeypatch.setattr(pool_index, "index_input", never_ends)
    assert pool_index.PoolIndex(store, reader).wait(None) == whole


def test_failing_look_for_an_index_is_repeated(job: JobConfig, monkeypatch: pytest.MonkeyPatch):
    """Regression: one transient error of the store ended the world."""
    reader, store = RowReader(find_inputs(job.input or "")), MemoryStore()
    read, looks = store.read, itertools.count()

    def fails_once(name: str) -> bytes | None:
        if next(looks) == 0:
            raise OSError(errno.EIO, "planted")
        return read(name)

    monkeypatch.setattr(store, "read", fails_once)
    assert pool_index.PoolIndex(store, reader).wait(None) == index_input(reader)


def test_part_has_its_rows_in_order():
    answers = [RowAnswer(5, b"five\n", "bad", 1, 0, 2, "ab" * 16), RowAnswer(3, b"three\n")]
    keys = [RowKey(7, b"i" * 16, True), RowKey(8)]
    data = encode_part([FinishedRow(key, answer) for key, answer in zip(keys, answers)])
    (three, first), (five, second) = decode_part("parts/a", data)
    assert (three.row, first, three.key, three.custom_id) == (3, b"three\n", 8, bytes(16))
    assert (five.row, second, five.error_code, five.media_digest) == (5, b"five\n", "bad", "ab" * 16)
    assert (five.key, five.custom_id, five.is_rejected) == (7, b"i" * 16, True)
    with pytest.raises(PoolError, match=r"^parts/a is not a part"):
        decode_part("parts/a", b"SPMD")


def test_custom_ids_of_done_rows_are_known(tmp_path: Path):
    """A range that is taken over rejects what one in one piece would, though the earlier row is done."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "custom_id": "x"}\n{"prompt": "b", "custom_id": "x"}\n')
    rows = JobInput(
        RowReader.of(str(tmp_path / "rows.jsonl")), JobConfig(), RowLimits(), DEFAULTS, SpansDone(((0, 1),))
    )
    found = rows.next_row()
    assert found is not None
    assert getattr(found.row, "code", None) == "duplicate_custom_id"


def test_error_of_the_store_ends_the_world(job: JobConfig):
    store = MemoryStore()
    world = TurnedWorld(store, job)
    world.worker._error = OSError(28, "No space left on device")
    for call in (world.rows.may_read, world.rows.is_ready, world.rows.next_row, lambda: world.output.show(0)):
        with pytest.raises(OSError, match="No space left"):
            call()


def read_to_end(rows: JobInput) -> list[int]:
    found = []
    while not rows.has_ended:
        row = rows.next_row()
        found += [] if row is None else [row.row.index]
    return found


def test_rows_of_a_lost_lease_end_quietly(job: JobConfig):
    """Regression: done rows that were not read yet counted as missing from the input."""
    lines = StreamLines(iter([(number, b"{}") for number in range(6)]))
    rows = JobInput(lines, job, RowLimits(), DEFAULTS, SpansDone(((3, 6),)))
    while rows.next_row() is None:
        continue
    rows.close()
    assert read_to_end(rows) == []
    # Negative control: a stream that ends early is an input that has changed.
    short = JobInput(StreamLines(iter(())), job, RowLimits(), DEFAULTS, SpansDone(((3, 6),)))
    with pytest.raises(ConfigError, match="has 0 rows now, and 3 later rows were answered before"):
        read_to_end(short)


def test_pool_folder_is_no_input(tmp_path: Path):
    job = job_in(tmp_path, input=str(tmp_path / "**"), pool=str(tmp_path / "pool"))
    (tmp_path / "pool" / "ranges").mkdir(parents=True)
    (tmp_path / "pool" / "ranges" / "00000000").write_text("{}")
    found = find_inputs(job.input or "", partial(is_job_file, job))
    assert found == (tmp_path / "rows.jsonl",)


def written_by(store: MemoryStore, world: TurnedWorld) -> list[str]:
    """Objects by a world."""
    worker = world.worker.member.worker
    return [name for name in store.objects if worker in name or f'"{worker}"'.encode() in store.contents[name]]


def replaced(job: JobConfig) -> tuple[MemoryStore, TurnedWorld, TurnedWorld]:
    """A pool that was removed under a world with answers, and another job's world in a pool of its name."""
    store = MemoryStore()
    old = TurnedWorld(store, job, {"model": "old"})
    old.turn()
    old.read()
    store.objects.clear()
    store.contents.clear()
    return store, old, TurnedWorld(store, job, {"model": "new"})


def test_removed_pool_ends_its_worlds(job: JobConfig):
    """Regression: a world of a pool that was removed went on in another job's pool of the same name."""
    store, old, new = replaced(job)
    old.answer()
    for call in (old.turn, lambda: old.world.leave("signalled"), old.turn):
        with pytest.raises(PoolError, match=f"it has no workers/{old.worker.member.worker}.json; end the worlds"):
            call()
        old.worker._is_closing = False
    assert written_by(store, old) == []
    new.finish()
    check(job)


def test_world_of_a_removed_pool_leases_nothing(job: JobConfig):
    store, old, _ = replaced(job)
    old.worker.member.leases.clear()
    with pytest.raises(PoolError, match="the pool was removed while worlds used it"):
        old.turn()
    assert written_by(store, old) == [f"workers/{old.worker.member.worker}.beat"]


def test_rows_of_a_stranger_are_not_merged(job: JobConfig):
    """The last defence: an operation that was under way when the pool was replaced."""
    store = MemoryStore()
    stranger, world = TurnedWorld(store, job), TurnedWorld(store, job)
    stranger.go_on()
    stranger.world.leave("signalled")
    store.delete(f"workers/{stranger.worker.member.worker}.json")
    with pytest.raises(PoolError, match=f"it has no workers/{stranger.worker.member.worker}.json"):
        world.finish()
    assert not Path(job.output or "").exists()


def test_remains_of_a_pool_are_no_pool(job: JobConfig):
    """Regression: without job.json another job went on with the rows of the one before."""
    store = MemoryStore()
    TurnedWorld(store, job, {"model": "old"}).go_on()
    store.delete("job.json")
    with pytest.raises(PoolError, match=r"has ranges/00000000, but no job.json: remove what is left"):
        TurnedWorld(store, job, {"model": "new"})


def test_ended_pool_without_its_job_is_none(job: JobConfig):
    """Regression: any other job was told that the output is complete."""
    store = MemoryStore()
    world = TurnedWorld(store, job, {"model": "old"})
    world.finish()
    store.delete("job.json")
    with pytest.raises(PoolError, match=r"but no job.json: remove what is left"):
        world.world.check_equal()


def test_world_that_left_shows_its_last_counts(job: JobConfig):
    """Regression: a world that was faster than its heartbeats had 0 rows in every report."""
    store = MemoryStore()
    world = TurnedWorld(store, job)
    world.go_on()
    store.now += 3.0
    world.world.leave("signalled")
    (state,) = read_pool(store).workers
    assert (state.counts["rows"] > 0, state.age_s, state.joined_age_s) == (True, 0.0, 3.0)


def test_merge_ends_with_its_lease(job: JobConfig):
    """Regression: a world that was paused while it merged replaced the complete manifest by that of its first parts."""
    job, store = replace(job, output=str(Path(job.output or "").with_name("part-*.jsonl")), part_rows=8), MemoryStore()
    slow, other = TurnedWorld(store, job), TurnedWorld(store, job)
    while not (slow.rows.has_ended and other.rows.has_ended):
        slow.go_on()
        other.go_on()
    manifest, calls, ended = Path(job.output or "").with_name("manifest.json"), itertools.count(), []

    def pause(doing: str) -> None:
        if next(calls) == 2:
            # Before the second range, which begins the second part.
            store.now += LEASE_S + 1
            other.world.write_output(None, {}, lambda doing: None)
            ended.append(manifest.stat().st_ino)

    slow.world.write_output(None, {}, pause)
    assert json.loads(manifest.read_text())["is_complete"]
    assert [manifest.stat().st_ino] == ended
    with pytest.raises(ConfigError, match=r"^job\.part_rows is 20, and 8 in the pool"):
        TurnedWorld(store, replace(job, part_rows=20))


def test_end_does_not_wait_for_a_failing_store(job: JobConfig, monkeypatch: pytest.MonkeyPatch):
    """Regression: SIGTERM took half a minute while the pool's disk was full."""
    store = MemoryStore()
    world = TurnedWorld(store, job)
    world.turn()
    world.read()
    world.answer()
    has_failed = threading.Event()

    def fail(kind: str, name: str) -> None:
        has_failed.set()
        raise OSError(28, "No space left on device")

    store.before = fail
    monkeypatch.setattr(pool_worker, "PAUSES_S", itertools.repeat(0.001))
    thread = threading.Thread(target=world.worker._run_turns)
    thread.start()
    has_failed.wait()
    with pytest.raises(OSError, match="No space left"):
        world.world.leave("signalled")
    thread.join()
