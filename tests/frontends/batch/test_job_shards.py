"""Shards of a job, and their merge: the bytes of the job in one piece."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import ranks
from cut_jobs import Ended, end_after
from forked_child import in_child
from jobs_of_rows import job_config, run_here
from killed_writer import KILLED, FileCalls, calls_on_files
from pooling_models import pooling_folder

from spmd_worker.base.config.schema import JobConfig, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.remote_names import file_path
from spmd_worker.frontends.batch.input import file_pieces, input_index
from spmd_worker.frontends.batch.merge import merge_shards as merge_module
from spmd_worker.frontends.batch.merge import shard_runs
from spmd_worker.frontends.batch.merge.merge_shards import merge_shards
from spmd_worker.frontends.batch.output_file import read_lines, write_lines
from spmd_worker.frontends.batch.output_parts import claim_folder
from spmd_worker.frontends.batch.run_dir.job_files import is_job_file
from spmd_worker.frontends.batch.run_dir.run_lock import RunLock
from spmd_worker.frontends.batch.run_dir.shard import Shard, is_of_a_shard, output_of, run_dir_of
from spmd_worker.frontends.tools.collect import main as collect
from spmd_worker.frontends.tools.doctor import main as doctor
from spmd_worker.frontends.tools.index import main as index
from spmd_worker.frontends.tools.verify import main as verify

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
DRAWN = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "add 1 2 ="}], "max_tokens": 3, "temperature": 1.0}
LONG = "x " * 1000


def chat(custom_id: str) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": CHAT}


ROWS: list[Any] = [
    {"custom_id": "one", "prompt": "copy a b =", **DRAWN},
    {"custom_id": "rejected", "prompt": "copy a b =", "max_tokens": "many"},
    {"prompt": "copy a b =", **DRAWN},
    chat("chat"),
    {"custom_id": "long", "prompt": LONG},
    "",
    {"custom_id": "one", "prompt": "copy c =", **DRAWN},
    {"custom_id": "\udc80 \u2028 é", "prompt": "copy c =", **DRAWN},
    "not json",
    {"custom_id": "two", "prompt": "copy c =", **DRAWN},
    chat("chat"),
    {"custom_id": "one", "prompt": "copy d =", "max_tokens": -1},
    " ",
    {"custom_id": "rejected", "prompt": "copy d =", **DRAWN},
    {"custom_id": "long", "prompt": LONG},
    {"custom_id": "\udc80 \u2028 é", "prompt": "copy c =", **DRAWN},
    {"custom_id": "three", "prompt": "copy c =", **DRAWN},
    {"custom_id": "long", "prompt": "copy d =", **DRAWN},
    chat("one"),
    {"prompt": "copy e =", **DRAWN},
]
NUM_ROWS = sum(row not in ("", " ") for row in ROWS)


def write_rows(path: Path, rows: list[Any] = ROWS) -> None:
    path.write_text("".join([(row if isinstance(row, str) else json.dumps(row)) + "\r\n" for row in rows]))


def config_of(folder: Path, model: Path = MODEL, **job: Any) -> RunConfig:
    return job_config(folder, model, options={"dtype": "float32"}, **{"commit_rows": 1, **job})


def run(config: RunConfig) -> Path:
    """Returns the run directory."""
    run_here(config)
    return run_dir_of(config.job)


def cut(config: RunConfig, num_rows: int) -> None:
    """The job ends as one that is killed does, after so many rows."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        end_after(monkeypatch, num_rows)
        with pytest.raises(Ended):
            run(config)


def run_shards(config: RunConfig, count: int) -> list[Path]:
    return [run(replace(config, job=replace(config.job, shard=f"{index}/{count}"))) for index in range(count)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a job in one piece, out.jsonl, and in 1, 3 and 7 shards in formats of their own."""
    folder = tmp_path_factory.mktemp("shards")
    write_rows(folder / "rows.jsonl")
    run(config_of(folder))
    run_shards(config_of(folder, output=str(folder / "one.parquet")), 1)
    run_shards(config_of(folder), 3)
    run_shards(config_of(folder, output=str(folder / "cut" / "part-*.jsonl.gz"), part_rows=2), 4)
    assert index([str(folder / "rows.jsonl"), "--output", str(folder / "index")]) == 0
    run_shards(config_of(folder, output=str(folder / "seven.jsonl.zst"), input_index=str(folder / "index")), 7)
    return folder


NAMES = {
    1: "one-00000-of-00001.parquet.run",
    3: "out-*-of-00003.jsonl.run",
    4: "cut/part-*-of-00004.jsonl.gz.run",
    7: "seven-*-of-00007.jsonl.zst.run",
}


def folders_of(runs: Path, count: int) -> list[Path]:
    found = sorted(runs.glob(NAMES[count]))
    assert len(found) == count
    return found


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> list[Path]:
    """Run directories of three shards with outputs of their own, to be changed."""
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    return folders_of(tmp_path, 3)


@pytest.mark.guarantee("Merged shards are the bytes of the job in one piece")
@pytest.mark.parametrize(
    ("count", "suffix"), [(1, "jsonl"), (3, "jsonl"), (3, "jsonl.gz"), (3, "parquet"), (4, "jsonl"), (7, "zst")]
)
def test_merge_equals_job_in_one_piece(runs: Path, tmp_path: Path, count: int, suffix: str):
    expected, output = tmp_path / f"expected.{suffix}", tmp_path / f"merged.{suffix}"
    written = write_lines(read_lines(runs / "out.jsonl"), expected)
    folders = map(str, reversed(folders_of(runs, count)))
    assert collect(["--merge", *folders, "--output", str(output)]) == 0
    assert output.read_bytes() == expected.read_bytes()
    assert written["lines"] == NUM_ROWS
    provenance = json.loads((tmp_path / f"merged.{suffix}.run" / "provenance.json").read_text())
    assert provenance["output"] == {"path": str(output), **written}
    assert [each["shard"]["index"] for each in provenance["shards"]] == list(range(count))
    whole = json.loads((runs / "out.jsonl.run" / "provenance.json").read_text())
    assert provenance["answers"] == whole["answers"]
    assert provenance["duplicate_custom_ids"] == 7


def test_shards_in_parts_merge_into_parts(runs: Path, tmp_path: Path):
    """Regression: parts of shards were rejected, and merged into parts of 100,000 rows, not of job.part_rows."""
    folders = folders_of(runs, 4)
    parts = sorted(path.name for path in (runs / "cut" / "shard-00001-of-00004").iterdir())
    assert parts == ["manifest.json", "part-00000.jsonl.gz", "part-00001.jsonl.gz", "part-00002.jsonl.gz"]
    merge_shards(folders, tmp_path / "all" / "part-*.jsonl")
    found = sorted((tmp_path / "all").glob("part-*.jsonl"))
    lines = (runs / "out.jsonl").read_bytes().splitlines(keepends=True)
    assert [path.read_bytes() for path in found] == [b"".join(lines[at : at + 2]) for at in range(0, len(lines), 2)]
    for name in ("part-*.jsonl.gz", "part-00001.jsonl.gz", "manifest.json"):
        with pytest.raises(ConfigError, match=r"^--output .* is the output of shard 1/4, which is read: give another"):
            merge_shards(folders, runs / "cut" / "shard-00001-of-00004" / name)
    # Moved together.
    shutil.move(shutil.copytree(runs / "cut", tmp_path / "a"), tmp_path / "moved")
    (tmp_path / "moved" / "shard-00001-of-00004" / "part-00001.jsonl.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"moved/shard-00001-of-00004/part-00001"):
        merge_shards(sorted((tmp_path / "moved").glob("*.run")), tmp_path / "out.jsonl")


@pytest.mark.guarantee("Parts of a killed shard have the bytes of one that was not", is_control_inside=True)
def test_killed_shard_keeps_its_committed_parts(runs: Path, tmp_path: Path):
    write_rows(tmp_path / "rows.jsonl")
    config = config_of(tmp_path, output=str(tmp_path / "cut" / "part-*.jsonl.gz"), part_rows=2, shard="1/4")
    folder, whole = tmp_path / "cut" / "shard-00001-of-00004", runs / "cut" / "shard-00001-of-00004"

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}

    for num_rows in range(1, NUM_ROWS // 4):
        cut(config, num_rows)
        # A control: the job was cut before its output was complete.
        assert json.loads((folder / "manifest.json").read_text())["is_complete"] is False
        assert all((whole / name).read_bytes() == data for name, data in files().items() if "partial" not in name)
    run(config)
    assert files() == {name: (whole / name).read_bytes() for name in files()}
    assert len(files()) == len(list(whole.iterdir())) - 1


def test_merge_errors_name_the_output(copied: list[Path]):
    """Regression: some named `job.output` or `job.run_dir`, which a merge has not."""
    folder = copied[0].parent
    (folder / "file").touch()
    (folder / "a.jsonl.run").touch()
    (folder / "b.jsonl.run").mkdir()
    (folder / "b.jsonl.run" / "manifest.json").write_text("{}")
    (folder / "manifest.json").write_text('{"pattern": "c-*.jsonl", "parts": []}')
    (folder / "held.jsonl.run").mkdir()
    messages = []
    with RunLock(folder / "held.jsonl.run", folder / "other.jsonl"):
        for name in ("file/x.jsonl", "a.jsonl", "b.jsonl", "d-*.jsonl", "*-*.jsonl", "held.jsonl"):
            with pytest.raises(ConfigError) as caught:
                merge_shards(copied, folder / name)
            messages.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        merge_shards(copied, file_path("https://host/a.jsonl"))
    for message in [*messages, str(caught.value)]:
        assert "--output" in message
        # A lock's holder is shown with its command, which may name a file of a job.
        assert "job." not in message.partition(" (process ")[0], message


def test_merge_names_the_output_of_a_folder_claimed_late(copied: list[Path], monkeypatch: pytest.MonkeyPatch):
    """Regression: a folder that another output took after the merge's check was rejected as `job.output`."""
    folder = copied[0].parent / "late"

    def claim(*_: Any) -> None:
        folder.mkdir(exist_ok=True)
        claim_folder(folder / "a-*.jsonl")

    monkeypatch.setattr(merge_module, "check_merge", claim)
    with pytest.raises(ConfigError, match=r"^--output=.*b-\*\.jsonl: .* is of the output a-\*\.jsonl"):
        merge_shards(copied, folder / "b-*.jsonl")


def test_merge_replaces_output_and_can_be_verified(runs: Path, tmp_path: Path):
    output = tmp_path / "merged.jsonl"
    output.write_text("former")
    shutil.copytree(runs / "out.jsonl.run", f"{output}.run")
    merge_shards(folders_of(runs, 3), output)
    merge_shards(folders_of(runs, 7), output)
    assert {path.name for path in Path(f"{output}.run").iterdir()} == {"lock", "manifest.json", "provenance.json"}
    assert doctor([f"{output}.run"]) == 0
    assert output.read_bytes() == (runs / "out.jsonl").read_bytes()
    assert verify([str(output), str(runs / "out.jsonl")]) == 0
    assert verify(["--images", f"{output}.run"]) == 0


@pytest.fixture
def former(copied: list[Path]) -> tuple[Path, list[Path]]:
    """An output with its run, which a merge would replace, and the run directories to merge."""
    output = copied[0].parent / "merged.jsonl"
    run_dir = Path(f"{output}.run")
    shutil.copytree(copied[0].parent / "out.jsonl.run", run_dir)
    output.write_text("former")
    (run_dir / "provenance.json").write_text(json.dumps({"output": {"sha256": digest_of(output)}}))
    return output, copied


def digest_of(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def state_of(output: Path) -> tuple[str, str]:
    """Digests of an output, and of that in its provenance."""
    provenance = json.loads(Path(f"{output}.run", "provenance.json").read_text())
    return digest_of(output), provenance["output"]["sha256"]


def states_after_kills(output: Path, folders: list[Path], numbers: Iterable[int]) -> list[tuple[str, str]]:
    """The state after a kill in each of the calls that change a file, up to a merge that ends."""
    run_dir, found = Path(f"{output}.run"), []
    former, former_run = output.read_bytes(), shutil.copytree(run_dir, f"{output}.backup")
    for number in numbers:

        def merge(number: int = number) -> None:
            with calls_on_files(FileCalls(number)):
                merge_shards(folders, output)

        code = in_child(merge)
        found.append(state_of(output))
        if code == 0:
            break
        assert code == KILLED
        output.write_bytes(former)
        shutil.rmtree(run_dir)
        shutil.copytree(former_run, run_dir)
    return found


def check_states(found: list[tuple[str, str]], old: str, new: str) -> None:
    """The former output with its provenance; the new output, with the former's until it has its own."""
    states = [(old, old), (new, old), (new, new)]
    assert set(found) <= set(states)
    assert found == sorted(found, key=states.index)


@pytest.mark.guarantee("A killed merge loses neither output nor provenance")
def test_kill_at_any_call_of_a_merge_loses_nothing(former: tuple[Path, list[Path]], runs: Path):
    old, new = digest_of(former[0]), digest_of(runs / "out.jsonl")
    found = states_after_kills(*former, itertools.count())
    check_states(found, old, new)
    assert len(set(found)) == 3


@pytest.mark.control("A killed merge loses neither output nor provenance")
def test_kill_check_detects_early_removal(
    former: tuple[Path, list[Path]], runs: Path, monkeypatch: pytest.MonkeyPatch, control: Callable
):
    old, new, run_dir = digest_of(former[0]), digest_of(runs / "out.jsonl"), Path(f"{former[0]}.run")
    write = merge_module.write_lines

    def write_late(*given: Any, **named: Any) -> dict[str, Any]:
        (run_dir / "provenance.json").write_text('{"output": {"sha256": "none"}}')
        return write(*given, **named)

    monkeypatch.setattr(merge_module, "write_lines", write_late)
    found = states_after_kills(*former, range(3))
    with control():
        check_states(found, old, new)


def test_lost_output_of_a_shard_is_named(former: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch):
    output, folders = former
    monkeypatch.setattr(shard_runs, "size_of", lambda path: None)
    words = r"out-00000-of-00003\.jsonl, the output of shard 0/3, is missing: restore it, or remove"
    with pytest.raises(ConfigError, match=words):
        merge_shards(folders, output)
    assert output.read_text() == "former"


def test_failed_merge_leaves_the_former_run(former: tuple[Path, list[Path]]):
    """Regression: the provenance of the former output was removed before the shards were read."""
    output, folders = former
    before = {path.name for path in Path(f"{output}.run").iterdir()}
    folders[2].with_suffix("").write_text("changed")
    with pytest.raises(ConfigError, match=r"out-00002-of-00003\.jsonl has changed since shard"):
        merge_shards(folders, output)
    assert state_of(output) == (digest_of(output), digest_of(output))
    assert output.read_text() == "former"
    assert {path.name for path in Path(f"{output}.run").iterdir()} == before


def test_shards_answer_consecutive_rows(runs: Path):
    outputs = sorted(runs.glob("out-*.jsonl"))
    assert [path.name for path in outputs] == [f"out-0000{index}-of-00003.jsonl" for index in range(3)]
    lines = [len(path.read_bytes().splitlines()) for path in outputs]
    assert lines == [len(Shard(index, 3).rows(NUM_ROWS)) for index in range(3)]
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in folders_of(runs, 3)]
    assert [manifest["num_rows"] for manifest in manifests] == lines
    assert [[each["shard"]["start"], each["shard"]["stop"]] for each in manifests] == [[0, 6], [6, 12], [12, 18]]
    assert sum(json.loads((each / "metrics.json").read_text())["rows"] for each in folders_of(runs, 3)) == NUM_ROWS


def another_seed(folders: list[Path]) -> list[Path]:
    folder = folders[0].parent
    shutil.rmtree(folders[1])
    run(replace(config_of(folder, shard="1/3"), seed=7))
    return folders


def change(path: Path, before: bytes, after: bytes) -> None:
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after, 1))


def output_in(folder: Path) -> Path:
    return folder.with_suffix("")


def without_row(folders: list[Path]) -> list[Path]:
    path = output_in(folders[1])
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:-1]))
    return folders


def not_ended(folders: list[Path]) -> list[Path]:
    folder = folders[0].parent
    cut(config_of(folder, shard="2/3"), 2)
    return folders


def with_damaged_custom_ids(folders: list[Path]) -> list[Path]:
    path = folders[2] / "custom_ids"
    path.write_bytes(path.read_bytes()[:-24])
    return folders


CONTROLS: dict[str, tuple[Callable[[list[Path]], list[Path]], str]] = {
    "a row left out": (without_row, r"out-00001-of-00003\.jsonl has changed since shard 1/3 wrote it \(5 lines,"),
    "a changed line": (
        lambda folders: change(output_in(folders[2]), b'"index": 1', b'"index": 2') or folders,
        r"out-00002-of-00003\.jsonl has changed since shard 2/3 wrote it .*: restore it, or remove",
    ),
    "a shard twice": (lambda folders: [*folders, folders[1]], "are both shard 1/3: give each shard once"),
    "a shard left out": (lambda folders: [folders[0], folders[2]], "1/3 of job.shard missing among 2 run directories"),
    "a shard of another seed": (another_seed, r"seed is 0 in .* and 7 in .*, so they are shards of different jobs"),
    "a shard of another number": (
        lambda folders: [*folders[:2], folders_of(folders[0].parent, 7)[2]],
        "number of shards of job.shard is 3 in .* and 7 in .*: give",
    ),
    "all rows": (lambda folders: [*folders, folders[0].parent / "out.jsonl.run"], "is the run of all rows"),
    "no job": (lambda folders: [*folders, folders[0].parent], "holds no job: give the run directory of each shard"),
    "a shard that has not ended": (not_ended, "shard 2/3 has not ended: start it again"),
    "damaged custom ids": (with_damaged_custom_ids, "custom_ids is damaged: .* run it again"),
}


@pytest.mark.control("Merged shards are the bytes of the job in one piece")
@pytest.mark.parametrize("name", CONTROLS)
def test_merge_rejects_other_shards(copied: list[Path], capsys: pytest.CaptureFixture[str], name: str):
    make, why = CONTROLS[name]
    folders, output = make(copied), copied[0].parent / "merged.jsonl"
    output.write_text("former")
    with pytest.raises(ConfigError, match=why):
        merge_shards(folders, output)
    assert output.read_text() == "former"
    assert not list(output.parent.glob("merged*.partial"))
    assert collect(["--merge", *map(str, folders), "--output", str(output)]) == 2
    assert "collect: --merge" in capsys.readouterr().err


def test_merge_rejects_output_that_it_reads(copied: list[Path]):
    for output in (output_in(copied[1]), output_in(copied[0])):
        with pytest.raises(ConfigError, match=r"is the output of shard .*: give another file"):
            merge_shards(copied, output)


@pytest.mark.parametrize("name", ["out-00001-of-00007.jsonl", "out-00000-of-00003.jsonl.run/merged.jsonl"])
def test_merge_rejects_the_name_of_a_shard(copied: list[Path], name: str):
    """Regression: it replaced the output of another number of shards, and the next pattern of folders had its run."""
    output = copied[0].parent / name
    with pytest.raises(ConfigError, match=r"is a name of a shard's files .*: give another"):
        merge_shards(copied, output)
    assert not output.exists()


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("{runs}/rows.jsonl", "rows.jsonl is also read"),
        ("rows*.jsonl.gz", r"manifest\.json lists a-00000.jsonl, a part of another output, and would be replaced"),
        ("out-00001-of-00003.jsonl.run/custom_ids", "custom_ids is a file of the run directory itself"),
    ],
)
def test_merge_replaces_no_other_file(runs: Path, copied: list[Path], output: str, why: str):
    folder = copied[0].parent
    (folder / "manifest.json").write_text('{"parts": [{"part": "a-00000.jsonl"}]}')
    with pytest.raises(ConfigError, match=rf"--output=.*{why}"):
        merge_shards(copied, folder / output.format(runs=runs))


def test_killed_shard_resumes_with_the_same_bytes(copied: list[Path]):
    folder = copied[0].parent
    config = config_of(folder, shard="1/3")
    before = output_in(copied[1]).read_bytes()
    cut(config, 3)
    run(config)
    assert json.loads((copied[1] / "metrics.json").read_text())["resumed_rows"] == 3
    assert output_in(copied[1]).read_bytes() == before
    merge_shards(copied, folder / "merged.jsonl")
    assert (folder / "merged.jsonl").read_bytes() == (folder / "out.jsonl").read_bytes()


def test_merge_warns_of_forced_settings(copied: list[Path], capsys: pytest.CaptureFixture[str]):
    folder = copied[0].parent
    shutil.rmtree(copied[1])
    config = config_of(folder, shard="1/3", resume="force")
    cut(replace(config, seed=7), 2)
    run(config)
    assert collect(["--merge", *map(str, copied), "--output", str(folder / "merged.jsonl")]) == 0
    assert "warning: a shard was resumed with another seed (job.resume=force)" in capsys.readouterr().err


def test_run_directory_of_another_shard_is_rejected(tmp_path: Path):
    write_rows(tmp_path / "rows.jsonl", ROWS[:4])
    first, other = [config_of(tmp_path, run_dir=str(tmp_path / "run"), shard=f"{number}/2") for number in range(2)]
    cut(first, 1)
    run_dir_of(first.job).rename(run_dir_of(other.job))
    with pytest.raises(
        ConfigError, match=r"run-00001-of-00002 holds a run of shard 0/2 .*, and this is shard 1/2: give"
    ):
        run(other)
    run_dir_of(other.job).rename(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"holds a run of shard 0/2 .*, and this is all rows: give"):
        run(replace(other, job=replace(other.job, shard=None)))


def test_shard_is_shown_and_measured_by_itself(copied: list[Path], capsys: pytest.CaptureFixture[str]):
    folder = copied[0].parent
    run(config_of(folder, shard="1/3", prometheus_file=str(folder / "job.prom")))
    lines = (folder / "job-00001-of-00003.prom").read_text().splitlines()
    assert "spmd_worker_job_rows 6.0" in lines
    assert "spmd_worker_job_rows_done 6.0" in lines
    assert "6 of 6 rows" in capsys.readouterr().err
    assert collect([str(copied[1])]) == 2
    assert f"is complete: read {output_in(copied[1])}" in capsys.readouterr().err


def test_more_shards_than_rows_leave_some_empty(tmp_path: Path):
    """The job in one piece reads its rows by the index too."""
    write_rows(tmp_path / "rows.jsonl", ROWS[:1])
    config = config_of(tmp_path, output=str(tmp_path / "out.jsonl.gz"), max_rows=1)
    folders = run_shards(config, 2)
    index([str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "index")])
    run(replace(config, job=replace(config.job, input_index=str(tmp_path / "index"))))
    merge_shards(folders, tmp_path / "merged.jsonl.gz")
    assert (tmp_path / "merged.jsonl.gz").read_bytes() == (tmp_path / "out.jsonl.gz").read_bytes()


def test_vectors_of_shards_merge_into_parquet(tmp_path: Path):
    model = pooling_folder("last")
    write_rows(tmp_path / "rows.jsonl", [{"custom_id": f"{number % 3}", "embed": [40, number]} for number in range(5)])
    config = config_of(tmp_path, model, output=str(tmp_path / "out.parquet"))
    folders = run_shards(config, 2)
    run(config)
    merge_shards(folders, tmp_path / "merged.parquet")
    assert (tmp_path / "merged.parquet").read_bytes() == (tmp_path / "out.parquet").read_bytes()


def test_shard_reads_only_its_rows_with_an_index(copied: list[Path], monkeypatch: pytest.MonkeyPatch):
    """Rows before it may even have changed; without the index they are counted, and its own are checked."""
    folder = copied[0].parent
    with monkeypatch.context() as small:
        small.setattr(file_pieces, "BLOCK_BYTES", 64)
        small.setattr(input_index, "_PIECE_BYTES", 64)
        index([str(folder / "rows.jsonl"), "--output", str(folder / "small")])
    before = (folder / "out-00002-of-00003.jsonl").read_bytes()
    change(folder / "rows.jsonl", b"copy a b", b"copy x y")
    config = config_of(folder, shard="2/3", input_index=str(folder / "small"))
    run(config)
    assert (folder / "out-00002-of-00003.jsonl").read_bytes() == before
    change(folder / "rows.jsonl", b"copy e", b"copy f")
    with pytest.raises(ConfigError, match=r"^job\.input=.*rows\.jsonl changed since its rows were counted: start"):
        run(config)


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({"shard": "3"}, r"^job\.shard=3 is not i/n: give"),
        ({"shard": "-1/4"}, r"^job\.shard=-1/4 is not i/n: give"),
        ({"shard": "4/4"}, r"^job\.shard=4/4: shards are counted from 0: give 0/4 to 3/4"),
        ({"shard": "0/0"}, r"^job\.shard=0/0: shards are counted from 0: give 0/1 for all rows"),
        (
            {"shard": "0/2", "input": "-"},
            r"^job\.shard=0/2 and job\.input=-: a stream .*: write them to a file, or leave",
        ),
        ({"shard": "0/2", "pool": "pool"}, r"^job\.shard=0/2 and job\.pool=pool: .*: leave out"),
        ({"input_index": "absent"}, r"^job\.input_index=absent cannot be read .*: make the index again"),
        ({"input_index": "rows.jsonl"}, r"^job\.input_index=rows\.jsonl is not an index of .*: make the index again"),
        (
            {"shard": "0/2", "input": "o*.jsonl"},
            r"^job\.input=o\*\.jsonl has out-00001-of-00002\.jsonl, which a shard .*: give",
        ),
        (
            {"shard": "0/2", "output": "p-*.jsonl", "input": "shard-*/*"},
            r"^job\.input=shard-\*/\* has shard-00001-of-00003/p-00000.jsonl, which a shard .*: give",
        ),
        ({"shard": "1/3", "output": "out-*.jsonl", "input": "*.run/*"}, r"has out-00000-of-00002.jsonl.run/manif"),
        ({"shard": "1/3", "input": "*.run/*"}, r"^job\.input=.* has out-00000-of-00002.jsonl.run/manifest.json, which"),
    ],
)
def test_wrong_shard_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: dict[str, Any], why: str):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", ["x"])
    write_rows(tmp_path / "out-00001-of-00002.jsonl", ["x"])
    (tmp_path / "out-00000-of-00002.jsonl.run").mkdir()
    (tmp_path / "shard-00001-of-00003").mkdir()
    write_rows(tmp_path / "shard-00001-of-00003" / "p-00000.jsonl", ["x"])
    write_rows(tmp_path / "out-00000-of-00002.jsonl.run" / "manifest.json", ["x"])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=why):
        run(config_of(Path(), **job))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("out.jsonl", "out-00003-of-00007.jsonl"),
        ("v1.2.out.jsonl.zst", "v1.2.out-00003-of-00007.jsonl.zst"),
        ("v1.2.gz", "v1.2-00003-of-00007.gz"),
        ("out.parquet", "out-00003-of-00007.parquet"),
        ("out", "out-00003-of-00007"),
    ],
)
def test_shard_has_names_of_its_own(output: str, expected: str):
    job = JobConfig(output=f"folder/{output}", shard="3/7")
    assert output_of(job) == Path("folder") / expected
    assert run_dir_of(job) == Path("folder") / f"{expected}.run"
    assert run_dir_of(replace(job, run_dir="runs/a.b")) == Path("runs/a.b-00003-of-00007")
    assert is_job_file(job, Path("folder") / f"{expected}.partial")


def test_parts_of_a_shard_have_a_folder():
    for folder, run_folder in (("folder", "folder/"), ("s3://bucket/folder", "")):
        job = JobConfig(output=f"{folder}/part-*.jsonl.zst", shard="3/7")
        assert str(output_of(job)) == f"{folder}/shard-00003-of-00007/part-*.jsonl.zst"
        assert str(run_dir_of(job)) == f"{run_folder}part-00003-of-00007.jsonl.zst.run"
        others = [f"{folder}/shard-00001-of-00002/{name}" for name in ("part-00000.jsonl.zst", "manifest.json")]
        assert [is_of_a_shard(job, file_path(each)) for each in others] == [True, True]
        for each in (
            f"{folder}/shard-x/part-00000.jsonl",
            f"{folder}/part-00000.jsonl",
            "s3://b/shard-00001-of-00002/a",
        ):
            assert not is_of_a_shard(job, file_path(each))


def test_index_rejects_stream_and_its_own_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_rows(tmp_path / "rows.jsonl", ["x"])
    rows = str(tmp_path / "rows.jsonl")
    for name, output, why in (
        (rows, rows, "is also read"),
        (f"{tmp_path}/*.jsonl", f"{tmp_path}/i.jsonl", "would be read as rows"),
        ("-", "i", "is a stream"),
        ("absent", "i", ": absent is not a file"),
        (str(tmp_path), "i", f": {tmp_path} is not a file but a folder"),
    ):
        assert index([name, "--output", output]) == 2
        assert why in capsys.readouterr().err
    assert (tmp_path / "rows.jsonl").read_text() == "x\n"
