"""Run directories with links, FIFOs or damaged files: a job and the tools report them, and follow no link."""

import json
import os
import random
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from fresh_files import write_new
from jobs_of_rows import job_config, run_here
from ranks import REPOSITORY
from stress_seed import SEED

from spmd_worker.base.errors import ConfigError, JobError, JournalError, SpmdError
from spmd_worker.base.files import JobFileError, create_job_file, open_job_file, read_job_file, write_file
from spmd_worker.base.liveness.error_file import ErrorRecord, read_records, write_record, write_stacks
from spmd_worker.base.liveness.failure_diagnosis import Diagnosis, RankStatus
from spmd_worker.base.liveness.heartbeat import RankHeartbeat
from spmd_worker.base.metrics.step_stats import read_step_stats
from spmd_worker.frontends.batch.run_dir import journal as journal_module
from spmd_worker.frontends.batch.run_dir.journal import JournalRecord, RowJournal
from spmd_worker.frontends.batch.run_dir.manifest import read_manifest
from spmd_worker.worker.trace_profiler import TraceProfiler

MODEL = REPOSITORY / "scripts" / "demo" / "model"
RECORD = ErrorRecord(0, 1e9, (RankStatus(0, RankHeartbeat(0, "n", 1, 1, 1, 2, "execute")),), Diagnosis((0,), "x"), "t")
JOB_FILES = (
    "manifest.json",
    "journal",
    "rows.part",
    "lock",
    "metrics.json",
    "steps.csv",
    "steps.log",
    "provenance.json",
)
FILES = (*JOB_FILES, "error.rank0.json", "stacks.rank0.txt", "report.html", "timeline.json", "manifest.json.partial")
SECRET = b"not the job's\n"


def run(folder: Path, **keys: Any) -> None:
    given = {"run_dir": str(folder / "run"), "step_log": True, "max_error_rows": 0, **keys}
    run_here(job_config(folder, MODEL, sampling={"max_tokens": 4}, **given))


@pytest.fixture(autouse=True)
def _without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of tables says the same in a hundredth of the time."""
    monkeypatch.setattr("spmd_worker.frontends.tools.report.can_draw", lambda: False)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job with too many error rows has left: journal, metrics and all."""
    folder = tmp_path_factory.mktemp("left")
    (folder / "rows.jsonl").write_text('{"prompt": "add 1 2 ="}\nno row\n{"prompt": "sort 3 1 ="}\n')
    with pytest.raises(JobError):
        run(folder)
    write_record(folder / "run", RECORD)
    return folder


@pytest.fixture
def folder(left: Path, tmp_path: Path) -> Path:
    """A copy of it, under one name in every test: a manifest holds the name of the input."""
    shutil.copytree(left, tmp_path / "job")
    (tmp_path / "job" / "secret").write_bytes(SECRET)
    for name in ("manifest.json", "out.jsonl"):
        path = tmp_path / "job" / name
        path.unlink(missing_ok=True)
    return tmp_path / "job"


def tell(name: str, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """A tool's exit code and all that it printed, to a stream as its own is."""
    assert isinstance(sys.stdout, TextIOWrapper)
    sys.stdout.reconfigure(errors="backslashreplace")
    code = import_module(f"spmd_worker.frontends.tools.{name}").main([str(each) for each in arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def tell_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[int, str]]:
    run_dir = folder / "run"
    told = {name: tell(name, capsys, run_dir) for name in ("doctor", "collect", "report", "replay")}
    for name, (code, words) in told.items():
        assert code in (0, 1, 2), name
        assert words.strip(), name
        assert "Traceback" not in words.replace("\nRank 0:", ""), words
    return told


def links(kind: str, path: Path, target: Path) -> None:
    """Put it in the place of `path`."""
    path.unlink(missing_ok=True)
    if kind == "symbolic link":
        path.symlink_to(target)
    elif kind == "link to nothing":
        path.symlink_to(target.with_name("absent"))
    elif kind == "hard link":
        os.link(target, path)
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        here = os.getcwd()
        # The name of a socket is short.
        os.chdir(path.parent)
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(here)


KINDS = {
    "symbolic link": "is a symbolic link",
    "link to nothing": "is a symbolic link",
    "hard link": "has 2 links",
    "FIFO": "is a FIFO",
    "folder": "is a folder",
    "socket": "is a socket",
}


@pytest.mark.gate("*-symbolic link", "lock-*", "manifest.json-*")
@pytest.mark.finding(number="C2")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_job_rejects_links_in_its_run_directory(folder: Path, name: str, kind: str):
    links(kind, folder / "run" / name, folder / "secret")
    names = sorted(os.listdir(folder / "run"))
    with pytest.raises(ConfigError, match=f"job.run_dir=.*: {name} {KINDS[kind]}"):
        run(folder)
    assert (folder / "secret").read_bytes() == SECRET
    assert sorted(os.listdir(folder / "run")) == names
    assert not list(folder.glob("absent"))


@pytest.mark.finding(number="C2")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("manifest.json", kind) for kind in KINDS),
        *(("steps.csv", kind) for kind in ("symbolic link", "FIFO", "folder")),
        *((name, "FIFO") for name in ("journal", "rows.part", "metrics.json", "steps.log", "error.rank0.json", "lock")),
        *((name, "symbolic link") for name in ("report.html", "timeline.json", "stages.csv")),
    ],
)
def test_tools_follow_no_link_of_a_run_directory(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
):
    links(kind, folder / "run" / name, folder / "secret")
    told = tell_all(folder, capsys)
    assert (folder / "secret").read_bytes() == SECRET
    assert "not the job's" not in str(told)
    assert any(KINDS[kind] in words for _, words in told.values()) or name == "lock"


@pytest.mark.finding(number="C2")
def test_run_directory_itself_may_be_a_link(folder: Path):
    (folder / "run").rename(folder / "elsewhere")
    (folder / "run").symlink_to("elsewhere", target_is_directory=True)
    run(folder, max_error_rows=1, resume="force")
    assert (folder / "run").is_symlink()
    assert (folder / "out.jsonl").read_bytes().count(b"\n") == 3


@pytest.mark.finding(number="C2")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "use",
    [
        create_job_file,
        read_job_file,
        lambda path: open_job_file(path, os.O_RDWR | os.O_CREAT),
        lambda path: write_file(path.with_suffix(""), b"x"),
        lambda path: RowJournal(path.parent, 1, 1.0),
    ],
    ids=["begin", "read", "open", "replace", "journal"],
)
def test_own_file_is_regular_with_one_link(tmp_path: Path, kind: str, use: Callable[[Path], Any]):
    (tmp_path / "secret").write_bytes(SECRET)
    is_journal = "RowJournal" in str(use.__code__.co_names)  # type: ignore[attr-defined]  # a function
    path = tmp_path / ("journal" if is_journal else "a.partial")
    links(kind, path, tmp_path / "secret")
    with pytest.raises(JobFileError, match=rf"{path.name} {KINDS[kind]}, but .*one link"):
        use(path)
    assert (tmp_path / "secret").read_bytes() == SECRET
    assert not (tmp_path / "absent").exists()


@pytest.mark.finding(number="C2")
def test_stacks_go_elsewhere_when_name_is_a_link(tmp_path: Path):
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "stacks.rank0.txt").symlink_to("secret")
    assert write_stacks(tmp_path, 0) == "stderr"
    assert (tmp_path / "secret").read_bytes() == SECRET


def test_records_go_nowhere_for_impossible_folder(tmp_path: Path):
    """Regression: a name that is too long raised, behind the error that the record was for."""
    write_record(tmp_path / ("x" * 256), RECORD)
    assert write_stacks(tmp_path / ("x" * 256), 0) == "stderr"


@pytest.mark.finding(number="C2")
@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "FIFO"])
def test_profile_overwrites_no_link(tmp_path: Path, kind: str):
    (tmp_path / "secret").write_bytes(SECRET)
    links(kind, tmp_path / "trace.rank0.json", tmp_path / "secret")
    with pytest.raises(JobFileError, match=KINDS[kind]):
        TraceProfiler(0).prepare_start_profile(str(tmp_path))


# Damage.


def flips(content: bytes, chance: random.Random, number: int) -> Iterator[bytes]:
    for _ in range(number):
        damaged = bytearray(content)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        yield bytes(damaged)


def cuts(content: bytes, chance: random.Random, number: int) -> Iterator[bytes]:
    yield b""
    for _ in range(number):
        yield content[: chance.randrange(1, len(content))]


def rewritten(content: bytes, chance: random.Random, number: int) -> Iterator[bytes]:
    """JSON with values of other types or sizes, and missing or duplicate keys."""
    value = json.loads(content)
    odd = [None, "x", -1, 10**30, 1e308, [], {}, [[]], True, "\ud800", 10**400]
    for _ in range(number):
        key = chance.choice(list(value))
        yield json.dumps({**value, key: chance.choice(odd)}).encode()
        yield json.dumps({name: each for name, each in value.items() if name != key}).encode()
        yield content.replace(b"{", b'{"%s": 1, ' % key.encode(), 1)
    yield b"[" * 100_000
    yield b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    yield b'{"rows": ' + b"9" * 10_000 + b"}"
    yield content.replace(b'"', b'"\xff', 1)


def damages(content: bytes, name: str, number: int) -> Iterator[bytes]:
    chance = random.Random(f"{name} {SEED}")
    yield from flips(content, chance, number)
    yield from cuts(content, chance, max(3, number // 5))
    if name.endswith(".json"):
        yield from rewritten(content, chance, max(2, number // 10))


@pytest.mark.finding(number="C3")
def test_damaged_manifest_is_rejected_with_reason(folder: Path, left: Path):
    path = folder / "run" / "manifest.json"
    content = (left / "run" / "manifest.json").read_bytes()
    num_refused = 0
    for damaged in damages(content, path.name, 300):
        write_new(path, damaged)
        if json_or_none(damaged) == json.loads(content):
            continue
        with pytest.raises(ConfigError, match=r"manifest\.json .*: give .*job\.run_dir, .*remove"):
            read_manifest(path)
        num_refused += 1
    assert num_refused > 300
    path.write_bytes(content.replace(b'"overridden"', b'"overridten"'))
    with pytest.raises(ConfigError, match=r"manifest\.json is damaged"):
        run(folder)
    path.write_bytes(content)
    assert read_manifest(path) is not None


def json_or_none(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


@pytest.mark.finding(number="C3")
def test_manifest_without_checksum_counts_when_run_has_ended(tmp_path: Path):
    """Versions before had none; one that has not ended is of another version of the code, and is refused."""
    path = tmp_path / "manifest.json"
    path.write_text('{"format_version": 1, "has_ended": true}')
    assert read_manifest(path) is not None
    path.write_text('{"format_version": 1, "has_ended": false}')
    with pytest.raises(ConfigError, match="version 2"):
        read_manifest(path)


@pytest.mark.finding(number="C3")
@pytest.mark.parametrize("name", ["metrics.json", "error.rank0.json", "steps.csv", "steps.log", "lock"])
def test_tools_report_damage(folder: Path, capsys: pytest.CaptureFixture[str], name: str):
    check_damage(folder, capsys, name, 10)


@pytest.mark.stress
@pytest.mark.finding(number="C3")
@pytest.mark.parametrize("name", [*JOB_FILES, "error.rank0.json", "stages.csv"])
def test_tools_report_any_damage(folder: Path, capsys: pytest.CaptureFixture[str], name: str):
    check_damage(folder, capsys, name, 300)


def check_damage(folder: Path, capsys: pytest.CaptureFixture[str], name: str, number: int) -> None:
    path = folder / "run" / name
    content = path.read_bytes() if path.exists() else b"replica,stage,step,start_us,end_us\n0,0,1,5,9\n0,1,1,9,12\n"
    for damaged in damages(content, name, number):
        write_new(path, damaged)
        tell_all(folder, capsys)


@pytest.mark.finding(number="C3")
def test_error_record_of_other_types_is_an_error(tmp_path: Path):
    good = RECORD.as_plain()
    assert ErrorRecord.from_plain(good) == RECORD
    beat = good["ranks"][0]["heartbeat"]
    for change in (
        *({"wall_s": value} for value in (10**400, "x", -1, 1e300)),
        *({"ranks": value} for value in ([], None, [1], "x", [{**good["ranks"][0], "heard_ago_s": 1e300}])),
        *({"ranks": [{**good["ranks"][0], "heartbeat": {**beat, "step": value}}]} for value in ("x", None, 10**30)),
        *({"diagnosis": value} for value in ([], {"ranks": ["x"], "text": ""}, {"ranks": 1, "text": ""})),
    ):
        (tmp_path / "error.rank0.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(ValueError, match=r"error\.rank0\.json: not .*error record"):
            read_records(tmp_path)


@pytest.mark.finding(number="C3")
@pytest.mark.parametrize("digits", [20, 5000])
def test_step_statistics_of_huge_numbers_are_damaged(left: Path, tmp_path: Path, digits: int):
    header, line, *_ = (left / "run" / "steps.csv").read_text().splitlines()
    (tmp_path / "steps.csv").write_text(f"{header}\n{'9' * digits}{line[line.index(',') :]}\n")
    with pytest.raises(SpmdError, match=r"line 2 .*step='9+', .*not .*count"):
        read_step_stats(tmp_path / "steps.csv")


@pytest.mark.finding(number="C3")
def test_journal_reports_rows_lost_to_damage(left: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for name in ("journal", "rows.part"):
        shutil.copy(left / "run" / name, tmp_path / name)
    content = bytearray((tmp_path / "journal").read_bytes())
    content[12] ^= 4
    (tmp_path / "journal").write_bytes(content)
    journal = RowJournal(tmp_path, 1, 1.0)
    journal.close()
    assert journal.num_rows == 0
    assert "journal is damaged at byte 8: 2 finished rows behind it are not used" in caplog.text


@pytest.mark.finding(number="C3")
def test_journal_row_beyond_any_input_is_rejected(tmp_path: Path):
    line = b"{}\n"
    record = JournalRecord(2**62, 0, 0, len(line), crc32(line), 0, 0, 0, None)
    (tmp_path / "rows.part").write_bytes(line)
    (tmp_path / "journal").write_bytes(journal_module._HEADER + record.pack())
    with pytest.raises(JournalError, match="beyond any input"):
        RowJournal(tmp_path, 1, 1.0)


@pytest.mark.stress
@pytest.mark.finding(number="C2")
@pytest.mark.parametrize("number", range(60))
def test_random_run_directory_damage_is_reported(
    left: Path, folder: Path, capsys: pytest.CaptureFixture[str], number: int
):
    """Two files are links, FIFOs or damaged: the job and all tools report errors, and link targets are unchanged."""
    chance = random.Random(f"{number + 60 * (SEED - 1)} run directory")
    for name in chance.sample(FILES, 2):
        path = folder / "run" / name
        if chance.random() < 0.6 or not path.exists():
            links(chance.choice(list(KINDS)), path, folder / "secret")
        else:
            path.write_bytes(next(chance.choice([flips, cuts])(path.read_bytes(), chance, 1)))
    tell_all(folder, capsys)
    try:
        run(folder, max_error_rows=1, resume="force")
    except (SpmdError, OSError) as error:
        assert str(error).strip()  # noqa: PT017
    else:
        assert (folder / "out.jsonl").read_bytes() == (left / "out.jsonl").read_bytes()
    assert (folder / "secret").read_bytes() == SECRET
