"""Small jobs whose machine loses power at any moment, and which go on from what may be left. See power_loss.py.

    LD_PRELOAD=recorded_io.so python tests/support/power_loss_job.py FOLDER COUNT SEED CASE...

Each case is a job that is recorded once. Of every state that a crash may leave, the files are looked at: what the job
has called done (a commit, its output, its end) must be there. COUNT of the states, drawn from SEED, or all where it is
0, are gone on from: the same bytes in the end, no committed row done again. Prints one line of JSON a case.
"""

import contextlib
import ctypes
import io
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

from composed_once import compose_once
from power_loss import Disk, Operation, Tree, crashes, digest_of, read_recording, snapshot, write_tree

import launch
from spmd_worker.frontends.batch.run_dir.job_files import MANIFEST_NAME, METRICS_NAME, PROVENANCE_NAME
from spmd_worker.frontends.batch.run_dir.journal import _HEADER, JOURNAL_NAME, LINES_NAME, RECORD_BYTES, JournalRecord

MODEL = Path(__file__).resolve().parents[2] / "scripts" / "demo" / "model"
ROWS = [{"prompt": f"add {index} 7 =", "max_tokens": 2 + index % 3, "ignore_eos": True} for index in range(8)]
LIBRARY = ctypes.CDLL(None)
RULES = {"any order": {}, "in order": {"is_ordered": True}}
"""What is certain of names: see `Disk`."""
NUM_DRAWN = 2
STOPS = False
"""At the first trouble, where one is what is looked for."""


@dataclass(frozen=True, slots=True)
class Job:
    """A command. Paths are below the folder that is recorded."""

    output: str
    run_dir: str
    seed: int = 0
    more: tuple[str, ...] = ()

    @property
    def journal(self) -> str:
        return f"{self.run_dir}/{JOURNAL_NAME}"

    @property
    def manifest(self) -> str:
        return f"{self.run_dir}/{MANIFEST_NAME}"

    def arguments(self, folder: Path) -> list[str]:
        return [
            *(f"model.path={MODEL}", "model.dtype=float32", "device=cpu", "cache.num_blocks=16"),
            *("model.max_model_len=64", "job.commit_rows=2", "job.commit_s=1000", f"seed={self.seed}"),
            *("sampling.temperature=3", f"job.input={folder / 'rows.jsonl'}", f"job.output={folder / self.output}"),
            *(f"job.run_dir={folder / self.run_dir}", *self.more),
        ]

    def run(self, folder: Path) -> tuple[int | None, str]:
        """The exit code, None for an exception that was not caught, and what was said on stderr."""
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                return launch.main(self.arguments(folder)), said.getvalue()
            except Exception as error:
                return None, f"{said.getvalue()}{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Case:
    """A job, and what is there before it: everything certain. `outputs` is by seed what an output holds."""

    job: Job
    before: Tree
    outputs: dict[int, bytes]

    @property
    def expected(self) -> bytes:
        return self.outputs[self.job.seed]


@dataclass(slots=True)
class Done:
    """What a job has called done so far, by its syncs: so many rows, and the output."""

    num_rows: int = 0
    has_output: bool = False


@dataclass(slots=True)
class State:
    """Files that a crash may leave, where it may come from, and the most that was done then."""

    name: str
    tree: Tree
    done: Done


@dataclass(slots=True)
class Found:
    """Of one case."""

    operations: int = 0
    states: int = 0
    resumed: int = 0
    refused: int = 0
    troubles: list[str] = field(default_factory=list)


def fresh(folder: Path, tree: Tree) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_tree(folder, tree)


def input_tree() -> Tree:
    return {"rows.jsonl": "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()}


def records_in(journal: bytes | None) -> list[JournalRecord]:
    """Whole ones from the start."""
    found: list[JournalRecord] = []
    while record := JournalRecord.unpack((journal or b"")[len(_HEADER) + len(found) * RECORD_BYTES :][:RECORD_BYTES]):
        found.append(record)
    return found


def num_records(journal: bytes | None) -> int:
    return len(records_in(journal))


def json_in(tree: Tree, path: str) -> dict[str, Any]:
    """Empty where there is none, or something else."""
    try:
        return dict(json.loads(tree.get(path) or b"{}"))
    except ValueError:
        return {}


def record(folder: Path, case: Case) -> tuple[dict[str, tuple[int, bytes | None]], list[Operation], Tree]:
    """What was there, what the job did to it, and what was there then. It ends well."""
    fresh(folder, case.before)
    before, log = snapshot(folder), folder.with_name("recording")
    assert LIBRARY.recorded_io_start(str(folder).encode(), str(log).encode()) == 0
    code, said = case.job.run(folder)
    LIBRARY.recorded_io_stop()
    assert code == 0, said
    after = {path: content for path, (_, content) in snapshot(folder).items() if path}
    return before, read_recording(log.read_bytes(), folder), after


def states_of(folder: Path, case: Case, seed: int, **rule: bool) -> tuple[list[State], int]:
    """Every state once, with the most that was done when a crash could leave it; and how many calls there were."""
    before, operations, after = record(folder, case)
    disk, chance, states = Disk(before, **rule), random.Random(seed), dict[bytes, State]()
    is_over = json_in(case.before, case.job.manifest).get("has_ended", False)
    done = Done(0 if is_over else num_records(case.before.get(case.job.journal)))
    for number in range(len(operations) + 1):
        if number:
            disk.apply(operations[number - 1])
            take_note(done, disk, operations[number - 1], case)
        for name, tree in crashes(disk, chance, NUM_DRAWN):
            state = states.setdefault(digest_of(tree), State("", tree, Done(-1)))
            if done.num_rows > state.done.num_rows or done.has_output > state.done.has_output:
                state.name = f"{number} calls, {name}"
            state.done.num_rows = max(state.done.num_rows, done.num_rows)
            state.done.has_output |= done.has_output
    differing = [path for path in {*after, *disk.tree()} if after.get(path, b"?") != disk.tree().get(path, b"?")]
    assert not differing, f"the recording has not all that was done to {differing}"
    return list(states.values()), len(operations)


def take_note(done: Done, disk: Disk, operation: Operation, case: Case) -> None:
    """Of what the job may call done after a call."""
    job = case.job
    if operation.kind == "unlink" and operation.path == job.journal:
        done.num_rows = 0
    elif operation.kind == "sync":
        node = disk.node_of(operation.inode)
        if node is disk.node_at(job.journal):
            done.num_rows = num_records(disk.content(job.journal))
        if node is disk.node_at(str(Path(job.output).parent)):
            done.has_output |= disk.content(job.output) == case.expected


def seen_in(state: State, case: Case) -> list[str]:
    """What is wrong with the files that a crash has left."""
    tree, job, found = state.tree, case.job, list[str]()
    output, old = tree.get(job.output), case.before.get(job.output)
    if output not in (old, case.expected):
        found.append("something else than an output has its name")
    if state.done.has_output and output != case.expected:
        found.append("the output is lost")
    manifest = json_in(tree, job.manifest)
    if job.manifest in tree and not manifest:
        found.append("the manifest is none")
    if manifest.get("has_ended") and output != case.outputs[manifest["config"]["seed"]]:
        found.append("the run is said to have ended, and its output is not there")
    elif not manifest.get("has_ended"):
        records, lines = records_in(tree.get(job.journal)), tree.get(f"{job.run_dir}/{LINES_NAME}") or b""
        if len(records) < state.done.num_rows:
            found.append(f"{state.done.num_rows} rows were committed and {len(records)} are there")
        named = [lines[each.offset :][: each.length] for each in records]
        if any(crc32(line) != each.checksum for line, each in zip(named, records, strict=True)):
            found.append("a record names a line that is not there")
        if manifest and job.output.endswith(".jsonl") and not all(line in case.expected for line in named):
            found.append("a line is another run's")
    provenance = json_in(tree, f"{job.run_dir}/{PROVENANCE_NAME}")
    # Until a run has ended, the former output's provenance may be there, whose digest says so.
    described = (output,) if manifest.get("has_ended") else (output, old)
    is_plain = provenance and output is not None and job.output.endswith(".jsonl")
    if is_plain and provenance["output"]["sha256"] not in [sha256(each).hexdigest() for each in described if each]:
        found.append("the provenance is of another output")
    return found


def gone_on_from(folder: Path, state: State, case: Case, found: Found) -> list[str]:
    """What is wrong with how the job goes on."""
    fresh(folder, state.tree)
    code, said = case.job.run(folder)
    found.resumed += 1
    if code != 0:
        is_in_words = code == 1 and len(re.findall(r"^error: \S", said, re.MULTILINE)) == 1 and "Traceback" not in said
        if is_in_words and not state.done.num_rows and not state.done.has_output:
            found.refused += 1
            return []
        return [f"exit code {code}: {said[-600:]}"]
    if (folder / case.job.output).read_bytes() != case.expected:
        return ["other bytes"]
    has_ended = json_in(state.tree, case.job.manifest).get("has_ended", False)
    resumed_rows = json.loads((folder / case.job.run_dir / METRICS_NAME).read_text())["resumed_rows"]
    if resumed_rows < state.done.num_rows and not has_ended:
        return [f"{state.done.num_rows} rows were committed and {resumed_rows} are there"]
    return []


def try_case(folder: Path, case: Case, count: int, seed: int, **rule: bool) -> Found:
    """Look at all states, and go on from `count` of them."""
    states, operations = states_of(folder, case, seed, **rule)
    found = Found(operations=operations, states=len(states))
    for state in states:
        found.troubles += [f"{state.name}: {each}" for each in seen_in(state, case)]
    for state in random.Random(seed).sample(states, min(count or len(states), len(states))):
        if STOPS and found.troubles:
            break
        found.troubles += [f"{state.name}: {each}" for each in gone_on_from(folder, state, case, found)]
    return found


# The cases.


def plain_case(folder: Path, job: Job, before: Tree | None = None) -> Case:
    """Of a job whose folders are not there yet, unless `before` has them."""
    outputs = {}
    for seed in {0, job.seed}:
        fresh(folder, input_tree())
        code, said = replace(job, seed=seed).run(folder)
        assert code == 0, said
        outputs[seed] = (folder / job.output).read_bytes()
    assert len(outputs) == len(set(outputs.values())), "two seeds have the same answers"
    return Case(job, input_tree() if before is None else before, outputs)


def resumed_case(folder: Path) -> Case:
    """A job that goes on from a journal with two commits and half of a third, whose lines are there with more."""
    case = plain_case(folder, replace(JSONL, more=("job.step_log=true",)))
    for state in states_of(folder, case, 0)[0]:
        journal = state.tree.get(JSONL.journal) or b""
        # The fifth record lies across the end of a sector.
        if num_records(journal) == 4 and (len(journal) - len(_HEADER)) % RECORD_BYTES and state.done.num_rows == 4:
            return Case(case.job, state.tree, case.outputs)
    raise AssertionError("no crash leaves half of a record")


def next_run_case(folder: Path) -> Case:
    """A run that has ended, whose journal's removal did not come to the disk; then the command with another seed."""
    case = plain_case(folder, replace(JSONL, seed=1))
    for state in states_of(folder, Case(JSONL, input_tree(), case.outputs), 0)[0]:
        has_ended = json_in(state.tree, JSONL.manifest).get("has_ended", False)
        if has_ended and num_records(state.tree.get(JSONL.journal)) == len(ROWS):
            return Case(case.job, state.tree, case.outputs)
    raise AssertionError("no crash leaves the journal of a run that has ended")


JSONL = Job("answers/of today/out.jsonl", "answers/of today/out.jsonl.run")
CASES: dict[str, Callable[[Path], Case]] = {
    "jsonl": lambda folder: plain_case(folder, JSONL),
    "parquet": lambda folder: plain_case(folder, Job("out.parquet", "runs/one")),
    "resumed": resumed_case,
    "next run": next_run_case,
}


def main() -> int:
    folder, count, seed, *names = sys.argv[1:]
    compose_once()
    troubles = 0
    for name in names:
        name, _, rule = name.partition(", ")
        case = CASES[name](Path(folder) / "job")
        found = try_case(Path(folder) / "job", case, int(count), int(seed), **RULES[rule])
        troubles += len(found.troubles)
        line = {
            **asdict(found),
            "case": name,
            "rule": rule,
            "troubles": len(found.troubles),
            "some": found.troubles[:12],
        }
        os.write(1, f"{json.dumps(line)}\n".encode())
    return int(bool(troubles))


if __name__ == "__main__":
    sys.exit(main())
