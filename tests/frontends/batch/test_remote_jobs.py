"""Jobs whose input and output are in an S3 store, and outputs as parts: the bytes of a local job, also after kills."""

import contextlib
import gzip
import itertools
import json
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
import zstandard
from cut_jobs import Ended, end_after
from forked_child import in_child
from jobs_of_rows import job_config, run_here
from killed_writer import FileCalls, calls_on_files
from ranks import REPOSITORY
from s3_server import KEY, SECRET
from waiting import wait_until

import launch
from spmd_worker.base.config.schema import CacheConfig, JobConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.remote_files import list_remote, read_remote, replace_remote
from spmd_worker.base.remote_names import file_path
from spmd_worker.base.remote_store import RemoteError
from spmd_worker.base.remote_upload import remove_leftovers, write_remote
from spmd_worker.engine.startup import read_run
from spmd_worker.frontends.batch import open_job, output_parts
from spmd_worker.frontends.batch.input.input_scan import InputScan
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.batch.merge.merge_shards import merge_shards
from spmd_worker.frontends.batch.output_file import write_lines
from spmd_worker.frontends.batch.output_parts import CommittedParts, Part, claim_folder
from spmd_worker.frontends.batch.run_dir.job_files import check_job, run_dir_of
from spmd_worker.frontends.batch.run_dir.journal import RowJournal
from spmd_worker.frontends.batch.run_dir.manifest import make_manifest

MODEL = REPOSITORY / "scripts" / "demo" / "model"
NUM_ROWS = 12
LINES = [f'{{"prompt": "add {index} 7 =", "custom_id": "row {index}"}}\n'.encode() for index in range(NUM_ROWS)]

SAMPLING = {"max_tokens": 4, "temperature": 0.9}
config_of = partial(job_config, Path(), MODEL, sampling=SAMPLING, commit_rows=1)


def run(**job) -> None:
    run_here(config_of(**job))


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> bytes:
    """Output of the local job."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "rows.jsonl").write_bytes(b"".join(LINES))
    run(input=str(folder / "rows.jsonl"), output=str(folder / "out.jsonl"))
    return (folder / "out.jsonl").read_bytes()


def parquet_bytes(lines) -> bytes:
    sink = pyarrow.BufferOutputStream()
    rows = pyarrow.Table.from_pylist([json.loads(line) for line in lines])
    pyarrow.parquet.write_table(rows, sink, row_group_size=5)
    return sink.getvalue().to_pybytes()


PACKED = {
    ".jsonl": b"".join,
    ".jsonl.gz": lambda lines: gzip.compress(b"".join(lines), mtime=0),
    ".jsonl.zst": lambda lines: zstandard.compress(b"".join(lines)),
    ".parquet": parquet_bytes,
}


def parts_in(folder: str) -> dict[str, bytes]:
    """Files of an output in parts, by name."""
    names = list_remote(f"{folder}/*") if "://" in folder else sorted(map(str, Path(folder).iterdir()))
    return {
        name.rpartition("/")[2]: read_remote(name if "://" in name else f"file://{name}")
        for name in names
        if not name.endswith((".run", ".partial"))
    }


def check_parts(folder: str, answers: bytes, part_rows: int) -> None:
    """The parts have the job's lines, and the manifest describes them."""
    files = parts_in(folder)
    manifest = json.loads(files.pop("manifest.json"))
    lines = answers.splitlines(keepends=True)
    assert list(files.values()) == [b"".join(lines[at : at + part_rows]) for at in range(0, len(lines), part_rows)]
    assert [(each["part"], each["bytes"], each["sha256"]) for each in manifest["parts"]] == [
        (name, len(data), sha256(data).hexdigest()) for name, data in files.items()
    ]
    assert (manifest["is_complete"], manifest["rows"]) == (True, len(lines))
    assert manifest["lines"]["sha256"] == sha256(answers).hexdigest()


@pytest.mark.parametrize("suffix", PACKED)
def test_remote_rows_are_those_of_the_file(s3, suffix):
    for number in range(2):
        replace_remote(f"{s3.bucket}/rows-{number}{suffix}", PACKED[suffix](LINES[6 * number : 6 * number + 6]))
    reader = RowReader.of(f"{s3.bucket}/rows-*{suffix}")
    assert [json.loads(line) for _, line in reader] == [json.loads(line) for line in LINES]
    scan = InputScan(reader, None)
    found = scan.wait(60)
    assert (found.num_rows, scan.has_changed()) == (NUM_ROWS, False)
    replace_remote(f"{s3.bucket}/rows-1{suffix}", PACKED[suffix](LINES[6:]))
    assert not scan.has_changed()
    replace_remote(f"{s3.bucket}/rows-1{suffix}", PACKED[suffix](LINES[7:]))
    assert scan.has_changed()


@pytest.mark.guarantee("Faults of a remote store that pass change no byte")
def test_remote_job_writes_bytes_of_local_job(s3, answers, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "plantedsessiontoken")
    replace_remote(f"{s3.bucket}/rows.jsonl.gz", PACKED[".jsonl.gz"](LINES))
    output = f"{s3.bucket}/answers.jsonl.zst"
    write_remote(output).write(bytes(9 << 20))
    s3.fault = lambda number, method, path: "throttle" if number % 5 == 0 else None
    run(input=f"{s3.bucket}/rows.jsonl.gz", output=output)
    s3.fault = None
    assert zstandard.ZstdDecompressor().decompressobj().decompress(read_remote(output)) == answers
    # What a killed writer left is gone.
    assert remove_leftovers(output) == 0
    written = b"".join(path.read_bytes() for path in (tmp_path / "answers.jsonl.zst.run").iterdir())
    assert f"{s3.bucket}/rows.jsonl.gz".encode() in written
    for secret in (KEY, SECRET, "plantedsessiontoken"):
        assert secret not in written.decode("utf-8", "replace") + "".join(capfd.readouterr())


def test_signed_name_is_shown_without_its_query(tmp_path, monkeypatch):
    name = "http://me:plantedpass@127.0.0.1:9/rows.jsonl?X-Amz-Signature=plantedsignature"
    monkeypatch.setattr("spmd_worker.base.remote_store._MAX_TRIES", 1)
    with pytest.raises(ConfigError) as caught:
        run(input=name, output=str(tmp_path / "out.jsonl"))
    assert "job.input=http://127.0.0.1:9/rows.jsonl?..." in str(caught.value)
    assert "planted" not in str(caught.value)
    assert "planted" not in "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_configuration_is_shown_and_recorded_without_credentials(tmp_path, monkeypatch, capsys):
    """`--cfg job` printed names as they were given, and a manifest had the options of a connector."""
    name = "https://me:planted@host/rows.jsonl?X-Amz-Signature=planted"
    assert launch.main(["--cfg", "job", f"job.input={name}"]) == 0
    shown = capsys.readouterr().out
    assert "input: https://host/rows.jsonl?..." in shown
    assert launch.main(["--help", f"job.input={name}"]) == 0
    assert "planted" not in shown + capsys.readouterr().out
    # A text that is no name stays as it is.
    assert launch.main(["--cfg", "job", "sampling.stop=['https://x/?q','b']"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["sampling"]["stop"] == ["https://x/?q", "b"]
    options = {"url": "redis://me:planted@host/0", "name": "a"}
    cache = CacheConfig(connector="kv_cache.connectors.files:connect", connector_options=options)
    config = replace(config_of(input=name, output="s3://me:planted@b/x"), cache=cache)
    resolved = replace(read_run(config_of()), config=config)
    manifest = make_manifest(resolved, {}, None, None, {})
    assert manifest["config"]["cache"]["connector_options"] == {"url": "redis://host/0", "name": "a"}
    assert "planted" not in json.dumps(manifest)


@pytest.mark.guarantee("Committed parts are not written again")
@pytest.mark.parametrize("where", ["local", "s3"])
def test_resumed_parts_have_the_same_bytes(s3, answers, tmp_path, where):
    (tmp_path / "rows.jsonl").write_bytes(b"".join(LINES))
    folder = f"{s3.bucket}/answers" if where == "s3" else str(tmp_path / "answers")
    job = {"input": str(tmp_path / "rows.jsonl"), "output": f"{folder}/part-*.jsonl", "part_rows": 5}
    job |= {"run_dir": str(tmp_path / "run")}
    with pytest.MonkeyPatch.context() as patch:
        # The first part is committed while later rows are answered.
        wait_for_first_part(patch, tmp_path / "run" / "parts.json", 8)
        with pytest.raises(Ended):
            run(**job)
    first = parts_in(folder)
    assert json.loads(first["manifest.json"])["is_complete"] is False
    assert [each["rows"] for each in json.loads(first["manifest.json"])["parts"]] == [5]
    s3.requests.clear()
    stamp = None if where == "s3" else (tmp_path / "answers" / "part-00000.jsonl").stat().st_mtime_ns
    run(**job)
    check_parts(folder, answers, 5)
    assert not [path for method, path in s3.requests if method in ("PUT", "POST") and "part-00000" in path]
    assert stamp is None or stamp == (tmp_path / "answers" / "part-00000.jsonl").stat().st_mtime_ns


@pytest.mark.stress
def test_pool_on_s3_writes_bytes_of_local_job(s3, answers, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"".join(LINES))
    job = {"input": str(tmp_path / "rows.jsonl"), "output": f"{s3.bucket}/out/part-*.jsonl", "part_rows": 5}
    job |= {"pool": f"{s3.bucket}/pool", "lease_rows": 4, "run_dir": str(tmp_path / "worlds")}
    s3.fault = lambda number, method, path: "throttle" if number % 7 == 0 else None
    run(**job)
    s3.fault = None
    check_parts(f"{s3.bucket}/out", answers, 5)


@pytest.mark.stress
def test_remote_shards_merge_to_the_local_job(s3, answers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    replace_remote(f"{s3.bucket}/rows.jsonl", b"".join(LINES))
    for index in range(2):
        run(input=f"{s3.bucket}/rows.jsonl", output=f"{s3.bucket}/a.jsonl.gz", shard=f"{index}/2")
    names = [name.rpartition("/")[2] for name in list_remote(f"{s3.bucket}/a-*")]
    assert names == ["a-00000-of-00002.jsonl.gz", "a-00001-of-00002.jsonl.gz"]
    merge_shards([Path(f"{name}.run") for name in names], file_path(f"{s3.bucket}/merged.jsonl"))
    assert read_remote(f"{s3.bucket}/merged.jsonl") == answers


@pytest.mark.stress
def test_remote_shards_in_parts_merge_to_local_job(s3, answers, tmp_path, monkeypatch):
    """Regression: parts of shards were rejected."""
    monkeypatch.chdir(tmp_path)
    replace_remote(f"{s3.bucket}/rows.jsonl", b"".join(LINES))
    for index in range(2):
        job = {"input": f"{s3.bucket}/rows.jsonl", "output": f"{s3.bucket}/a/part-*.jsonl", "shard": f"{index}/2"}
        with pytest.MonkeyPatch.context() as patch:
            end_after(patch, 5)
            with pytest.raises(Ended):
                run(**job, part_rows=4)
        run(**job, part_rows=4)
        check_parts(f"{s3.bucket}/a/shard-0000{index}-of-00002", b"".join(answers.splitlines(True)[6 * index :][:6]), 4)
    folders = [Path(f"part-0000{index}-of-00002.jsonl.run") for index in range(2)]
    merge_shards(folders, file_path(f"{s3.bucket}/a/part-*.jsonl"))
    check_parts(f"{s3.bucket}/a", answers, 4)
    merge_shards(folders, file_path("merged.jsonl"))
    assert Path("merged.jsonl").read_bytes() == answers


def wait_for_first_part(patch, record: Path, num_rows: int) -> None:
    """End the job when so many rows are in its journal, and its first part is recorded."""
    end_after(patch, num_rows)
    add = output_parts.CommittedParts.add

    def added(parts, number, part):
        add(parts, number, part)
        (record.parent / "first").touch()

    patch.setattr(output_parts.CommittedParts, "add", added)
    append = RowJournal.append

    def waited(journal, key, answer):
        if journal.num_rows == num_rows - 1:
            wait_until((record.parent / "first").exists)
        append(journal, key, answer)

    patch.setattr(RowJournal, "append", waited)


@pytest.mark.control("Committed parts are not written again")
def test_part_check_detects_parts_without_record(s3, tmp_path, monkeypatch):
    lines = [b"1\n", b"2\n", b"3\n"]
    for _ in range(2):
        s3.requests.clear()
        write_lines(lines, file_path(f"{s3.bucket}/p-*.jsonl"), None, 2, tmp_path)
    assert not [path for method, path in s3.requests if method == "PUT" and "p-00000" in path]
    write_lines(lines, file_path(f"{s3.bucket}/p-*.jsonl"), None, 2)
    assert [path for method, path in s3.requests if method == "PUT" and "p-00000" in path]


@pytest.mark.parametrize("suffix", PACKED)
def test_parts_of_an_earlier_output_are_replaced(tmp_path, suffix):
    lines = [json.dumps({"custom_id": None, "error": None, "n": number}).encode() + b"\n" for number in range(7)]
    pattern = file_path(str(tmp_path / f"p-*{suffix}"))
    write_lines(lines, pattern, None, 2)
    (tmp_path / f"p-00009{suffix}").touch()
    whole = write_lines(lines[:3], pattern, None, 2)
    # Another's file stays.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("manifest.json", f"p-00000{suffix}", f"p-00001{suffix}", f"p-00009{suffix}")
    ]
    assert whole == {"lines": 3, "bytes": sum(map(len, lines[:3])), "sha256": sha256(b"".join(lines[:3])).hexdigest()}
    if suffix == ".parquet":
        assert pyarrow.parquet.read_table(tmp_path / "p-00001.parquet")["index"].to_pylist() == [2]


def test_killed_writers_leave_no_parts_of_an_earlier_output(tmp_path, monkeypatch):
    """Regression: a merge of fewer parts that was killed and repeated left those beyond, which only the first knew."""
    lines, pattern = [b"%d\n" % number for number in range(7)], file_path(str(tmp_path / "p-*.jsonl"))
    replace = output_parts._replace
    for number in range(4):
        write_lines(lines, pattern, None, 1)
        calls = itertools.count()

        def strike(path, data, number=number, calls=calls):
            if next(calls) == number:
                raise KeyboardInterrupt
            replace(path, data)

        monkeypatch.setattr(output_parts, "_replace", strike)
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                write_lines(lines[:2], pattern, None, 1)
        assert sorted(parts_in(str(tmp_path))) == ["manifest.json", "p-00000.jsonl", "p-00001.jsonl"]
        assert "earlier" not in json.loads((tmp_path / "manifest.json").read_bytes())
        monkeypatch.setattr(output_parts, "_replace", replace)


@pytest.mark.parametrize(
    "manifest",
    [
        b'{"parts": [{"part": "q-00000.jsonl"}]}',
        b'{"pattern": "p-*.jsonl", "parts": [], "earlier": ["q-00000.jsonl"]}',
        b'{"parts": [{"part": 7}]}',
        b"another's",
        b"",
    ],
)
def test_parts_replace_no_manifest_of_another(tmp_path, manifest):
    (tmp_path / "q-00000.jsonl").touch()
    (tmp_path / "manifest.json").write_bytes(manifest)
    with pytest.raises(ConfigError, match=r"manifest\.json .*would be replaced: give parts a folder of their own"):
        run(input=str(tmp_path / "q-00000.jsonl"), output=str(tmp_path / "p-*.jsonl"))
    assert (tmp_path / "manifest.json").read_bytes() == manifest
    assert (tmp_path / "q-00000.jsonl").exists()


def test_killed_claim_leaves_nothing_that_stays(tmp_path):
    """Regression: each kill of a start that created the manifest could leave a file."""
    pattern, names = tmp_path / "p-*.jsonl", []
    for number in itertools.count():

        def claim(number=number):
            with calls_on_files(FileCalls(number)):
                claim_folder(pattern)

        code = in_child(claim)
        names += [path.name for path in tmp_path.iterdir() if path.name != "manifest.json"]
        claim_folder(pattern)
        assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
        if code == 0:
            break
        (tmp_path / "manifest.json").unlink()
    assert len(names) >= 2


@pytest.mark.parametrize("where", ["local", "s3"])
def test_second_output_of_a_folder_is_rejected(s3, tmp_path, monkeypatch, where):
    """Regression: two jobs that looked at once into an empty folder replaced each other's manifest."""
    (tmp_path / "rows.jsonl").write_bytes(LINES[0])
    folder = f"{s3.bucket}/answers" if where == "s3" else str(tmp_path / "answers")
    job = {"input": str(tmp_path / "rows.jsonl"), "run_dir": str(tmp_path / "run")}
    check = open_job.check_files

    def look_before_another(resolved):
        check(resolved)
        (tmp_path / "answers").mkdir(exist_ok=True)
        claim_folder(file_path(f"{folder}/a-*.jsonl"), run="another")

    monkeypatch.setattr(open_job, "check_files", look_before_another)
    message = r"job\.output=.*b-\*\.jsonl: .*manifest\.json is of the output a-\*\.jsonl, whose job may be running, "
    with pytest.raises(ConfigError, match=f"{message}and would be replaced: give parts a folder of their own, or rem"):
        run(output=f"{folder}/b-*.jsonl", **job)
    # The other goes on.
    write_lines(LINES, file_path(f"{folder}/a-*.jsonl"), run="another")
    assert sorted(parts_in(folder)) == ["a-00000.jsonl", "manifest.json"]


@pytest.mark.gate("job", "pool")
@pytest.mark.guarantee("A remote output in parts is written by one job")
@pytest.mark.parametrize("kind", ["job", "pool"])
def test_second_job_of_a_remote_output_is_rejected(s3, answers, tmp_path, kind):
    """Regression: with another run directory it replaced the parts of the first, which went on with both."""
    (tmp_path / "rows.jsonl").write_bytes(b"".join(LINES))
    job = {"input": str(tmp_path / "rows.jsonl"), "output": f"{s3.bucket}/answers/part-*.jsonl", "part_rows": 5}
    own, other = ({**job, "run_dir": str(tmp_path / name)} for name in ("own", "other"))
    if kind == "pool":
        other["pool"] = f"{s3.bucket}/pool"
    with pytest.MonkeyPatch.context() as patch:
        wait_for_first_part(patch, tmp_path / "own" / "parts.json", 8)
        with pytest.raises(Ended):
            run(**own)
    before = parts_in(f"{s3.bucket}/answers")
    message = r"job\.output=.*manifest\.json is of another job with this output, .*: give parts a folder .*, or remove"
    with pytest.raises(ConfigError, match=message):
        run(**other)
    assert parts_in(f"{s3.bucket}/answers") == before
    run(**own)
    check_parts(f"{s3.bucket}/answers", answers, 5)
    # A complete output is replaced, and the journal of the first job is not used beside another's parts.
    run(**other)
    check_parts(f"{s3.bucket}/answers", answers, 5)


def test_job_stops_when_another_shows_parts(s3, tmp_path, monkeypatch):
    """Both may begin over a complete output; and a job whose parts were replaced writes all of them again."""
    pattern = file_path(f"{s3.bucket}/a/p-*.jsonl")
    write_lines([b"old\n"], pattern)
    over = sha256(read_remote(f"{s3.bucket}/a/manifest.json")).hexdigest()
    first = CommittedParts.open(pattern, 1, tmp_path, "first")
    with monkeypatch.context() as patch:
        # A kill before the manifest lists the part, which parts.json records.
        patch.setattr(CommittedParts, "_show", lambda *_: None)
        first.add(0, Part("p-00000.jsonl", 1, 4, "0"))
    first = CommittedParts.open(pattern, 1, tmp_path, "first")
    assert first.has(0)
    first.add(0, Part("p-00000.jsonl", 1, 4, "0"))
    second = CommittedParts(pattern, 1, None, [], [], "second", over)
    for call in (second.check_own, lambda: second.end({"lines": 0})):
        with pytest.raises(ConfigError, match=r"manifest\.json is of another job with this output"):
            call()
    assert CommittedParts.open(pattern, 1, tmp_path, "first").has(0)
    first.end({"lines": 1})
    # A kill before the run has ended.
    assert CommittedParts.open(pattern, 1, tmp_path, "first").has(0)
    write_lines([b"new\n"], pattern, None, 1)
    assert not CommittedParts.open(pattern, 1, tmp_path, "first").has(0)


@pytest.mark.control("A remote output in parts is written by one job")
def test_claim_check_detects_unnamed_runs(s3):
    pattern = file_path(f"{s3.bucket}/a/p-*.jsonl")
    claim_folder(pattern, run="first")
    claim_folder(pattern, run="first")
    claim_folder(pattern)
    with pytest.raises(ConfigError, match="of another job"):
        claim_folder(pattern, run="second")


@pytest.mark.stress
def test_merge_that_was_killed_is_repeated(s3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_bytes(b"".join(LINES))
    job = {"input": "rows.jsonl", "output": f"{s3.bucket}/a/part-*.jsonl", "part_rows": 2}
    for index in range(2):
        run(**job, shard=f"{index}/2")
    folders, output = sorted(tmp_path.glob("part-*-of-00002.jsonl.run")), file_path(f"{s3.bucket}/a/part-*.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(output_parts.CommittedParts, "end", lambda *_: (_ for _ in ()).throw(Ended()))
        with pytest.raises(Ended):
            merge_shards(folders, output)
    assert json.loads(read_remote(f"{s3.bucket}/a/manifest.json"))["is_complete"] is False
    with pytest.raises(ConfigError, match=r"^job\.output=.* is of another job with this output"):
        run(**job, run_dir="other")
    merge_shards(folders, output)
    assert json.loads(read_remote(f"{s3.bucket}/a/manifest.json"))["is_complete"] is True


def test_claim_replaces_nothing_in_stores_without_conditions(s3, monkeypatch):
    """Regression: where the condition is ignored, a start replaced the manifest of a complete output."""
    pattern = file_path(f"{s3.bucket}/a-*.jsonl")
    write_lines(LINES, pattern, None, 2)
    before = read_remote(f"{s3.bucket}/manifest.json")
    monkeypatch.setattr(output_parts, "create_remote", replace_remote)
    claim_folder(pattern)
    assert read_remote(f"{s3.bucket}/manifest.json") == before


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), RemoteError("s3://b/a", "down", is_transient=True)])
def test_claim_that_cannot_be_known_fails(s3, monkeypatch, error):
    def failing(name, data):
        raise error

    monkeypatch.setattr(output_parts, "create_remote", failing)
    with pytest.raises(type(error)):
        claim_folder(file_path(f"{s3.bucket}/a-*.jsonl"))
    assert read_remote(f"{s3.bucket}/manifest.json") is None


def test_claim_needs_no_conditional_writes(s3, monkeypatch):
    def unsupported(name, data):
        raise NotImplementedError

    monkeypatch.setattr(output_parts, "create_remote", unsupported)
    claim_folder(file_path(f"{s3.bucket}/a-*.jsonl"))
    with pytest.raises(ConfigError, match=r"manifest\.json is of the output a-"):
        claim_folder(file_path(f"{s3.bucket}/b-*.jsonl"))


REJECTED = {
    "two stars": ({"output": "a-*-*.jsonl"}, "parts have one"),
    "a star in a folder": ({"output": "a*/b.jsonl"}, "parts have one"),
    "a scheme that is only read": ({"output": "https://host/b.jsonl"}, "https:// is only read"),
    "an unknown scheme": ({"output": "ftp://host/b.jsonl"}, "ftp:// is not supported"),
    "a remote run directory": ({"output": "b.jsonl", "run_dir": "s3://b/run"}, "job.run_dir=s3://b/run must be local"),
    "a remote index": ({"output": "b.jsonl", "input_index": "s3://b/x?a=planted"}, "job.input_index=.* must be local"),
    "a remote file of metrics": ({"output": "b.jsonl", "prometheus_file": "s3://b/x"}, "job.prometheus_file=.* local"),
    "another format": (
        {"output": "b.jsonl.xz"},
        r"job.output=b.jsonl.xz: .xz is not supported: give JSONL, also as .gz",
    ),
    "parts in capitals": (
        {"output": "s3://b/a-*.jsonl.GZ"},
        r"job.output=s3://b/a-\*.jsonl.GZ: .GZ is not known: write .gz",
    ),
    # They were accepted, and gone when the job ended.
    "an output in memory": (
        {"output": "memory://b.jsonl"},
        "job.output=memory://b.jsonl is in memory, and would be lo",
    ),
    "parts in memory": ({"output": "Memory://a/b-*.jsonl"}, "would be lost when this process ends: give a path, or "),
    "a pool in memory": (
        {"output": "b.jsonl", "pool": "memory://p"},
        "job.pool=memory://p is in memory, and no other ",
    ),
    "a pool and a shard": (
        {"output": "b.jsonl", "pool": "s3://me:planted@b/x", "shard": "0/2"},
        "job.pool=s3://b/x: a pool divides the rows by itself",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_unusable_names_are_rejected(case):
    job, words = REJECTED[case]
    with pytest.raises(ConfigError, match=words) as caught:
        check_job(JobConfig(input="rows.jsonl", **job))
    assert "planted" not in str(caught.value)


def test_run_directory_is_local_and_named_by_the_output():
    names = ("s3://b/a/out.jsonl.zst", "s3://b/a/part-*.jsonl", "a/part-*.jsonl", "a/out.jsonl")
    found = [str(run_dir_of(JobConfig(output=name))) for name in names]
    assert found == ["out.jsonl.zst.run", "part-.jsonl.run", "a/part-.jsonl.run", "a/out.jsonl.run"]


def test_output_that_is_also_read_is_rejected(s3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, pattern in ((s3.bucket, "*"), (f"{s3.bucket}/in[1]", "part-00000")):
        replace_remote(f"{folder}/part-00000.jsonl", LINES[0])
        for output in ("part-00000.jsonl", "part-*.jsonl"):
            with pytest.raises(ConfigError, match="is also read"):
                run(input=f"{folder}/{pattern}.jsonl", output=f"{folder}/{output}")
    with pytest.raises(ConfigError, match=r"part-\*\.jsonl matches job\.input=s3://.*, and would be read too"):
        run(input=f"{s3.bucket}/*/*[l]", output=f"{s3.bucket}/new/part-*.jsonl")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "part-00000.jsonl").write_bytes(LINES[0])
    with pytest.raises(ConfigError, match="would replace"):
        run(input="a/*.jsonl", output="a/part-*.jsonl")
    with pytest.raises(ConfigError, match="cannot be written"):
        run(input="a/*.jsonl", output="s3://no-such-bucket/part-*.jsonl")
    with pytest.raises(ConfigError, match="is no file, and matches none"):
        run(input=f"{s3.bucket}/none-*", output="out.jsonl")
