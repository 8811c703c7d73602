"""A thousand random kills of any rank, the launcher or all at once, in every phase of a job.

SPMD_WORKER_KILLS sets their number, in parts that run in any process; the last part is timed, alone on the machine.
TESTS_SEED sets the seed. Each job is killed and resumed with another layout up to six times, then ends: with the bytes
of an uninterrupted job, and without recomputing a committed row. After each kill no process, held lock or shared memory
is left. Each part ends with a row of figures.
"""

import fcntl
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import ranks
from job_attempts import LAYOUTS, LIMIT_S, Attempt, write_rows
from shared_names import FOLDER, shared_names
from stress_seed import SEED
from waiting import NotInTime, wait_until

from spmd_worker.base.errors import JournalError
from spmd_worker.frontends.batch.run_dir.journal import read_journal

SCRIPT = ranks.SUPPORT / "held_job.py"
NUM_KILLS = int(os.environ.get("SPMD_WORKER_KILLS", "1000"))
NUM_PARTS = 20
PARTS = [*range(NUM_PARTS - 1), pytest.param(NUM_PARTS - 1, marks=pytest.mark.timed)]
NUM_ROWS = 60
MOST_A_JOB = 6
SOON_S = 5.0
"""In which all are to be gone."""
LEFT_S = 60.0
"""What is there after so long stays."""
MOMENTS = {
    "imports": 1,
    "joining": 1,
    "loading": 1,
    "rows": 60,
    "commit": 6,
    "merge": NUM_ROWS,
    "rename": 6,
    "renamed": 6,
    "end": 1,
    "ended": 1,
}
"""Of a job's life, and how often each comes; a part of the kills strikes none of them but at a time that is drawn."""
OF_ANY_RANK = ("joining", "loading", "rows")


@dataclass
class Figures:
    """Figures of all kills."""

    kills: int = 0
    jobs: int = 0
    wrong: int = 0
    lost: int = 0
    doubled: int = 0
    left: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    moments: dict[str, int] = field(default_factory=dict)
    victims: dict[str, int] = field(default_factory=dict)

    def row(self) -> str:
        """A row of the table of docs/lab/reliability.md."""
        late = sum(each > SOON_S for each in self.seconds)
        times = f"median {statistics.median(self.seconds):.1f} s, worst {max(self.seconds):.1f} s, {late} after 5 s"
        counts = f"{self.wrong} wrong, {self.lost} lost, {self.doubled} doubled, {len(self.left)} left"
        return f"KILLS of seed {SEED}: {self.kills} kills of {self.jobs} jobs, {counts}; until all were gone {times}"


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill of one start of a job."""

    layout: str
    moment: str
    number: int
    held: int
    victim: str
    is_fresh: bool
    after_s: float

    @staticmethod
    def draw(chance: random.Random) -> "Kill":
        layout, moment = chance.choice(list(LAYOUTS)), chance.choice(list(MOMENTS))
        num_ranks = LAYOUTS[layout][0]
        held = chance.randrange(num_ranks) if moment in OF_ANY_RANK else 0
        victim = chance.choice(["launcher", "all", *(f"rank {rank}" for rank in range(num_ranks))])
        is_fresh = moment == "imports" and chance.random() < 0.5
        after_s = chance.uniform(0, 4.0 if is_fresh else 0.5)
        return Kill(layout, moment, chance.randint(1, MOMENTS[moment]), held, victim, is_fresh, after_s)

    def start(self, folder: Path) -> Attempt:
        (folder / "held").unlink(missing_ok=True)
        moment = "none" if self.moment == "imports" else self.moment
        script = [str(SCRIPT), moment, str(self.number), str(self.held), str(folder)]
        return Attempt(folder, self.layout, script=script, torchrun=(), is_fresh=self.is_fresh)

    def strike(self, attempt: Attempt) -> None:
        is_struck = False
        if self.victim == "all":
            is_struck = attempt.send(signal.SIGKILL, None) > 0
        elif self.victim != "launcher":
            # It may not be there yet, or not any more: the others do not wait for the merge.
            victims = (int(self.victim.removeprefix("rank ")), self.held)
            is_struck = any(attempt.send(signal.SIGKILL, rank) for rank in victims)
        if not is_struck:
            ranks.send(attempt.launcher, signal.SIGKILL)


@pytest.fixture
def figures() -> Iterator[Figures]:
    figures = Figures()
    yield figures
    if figures.seconds:
        print(f"\n{figures.row()}; {figures.moments} {figures.victims}\n{figures.left}", end="")


@pytest.mark.stress
@pytest.mark.parametrize("part", PARTS)
def test_kills_in_every_phase_keep_rows_exact(tmp_path: Path, figures: Figures, whole: bytes, part: int):
    chance, num_kills = (
        random.Random(f"{SEED} {part}"),
        NUM_KILLS * (part + 1) // NUM_PARTS - NUM_KILLS * part // NUM_PARTS,
    )
    while figures.kills < num_kills:
        figures.jobs += 1
        folder = tmp_path / f"job {figures.jobs}"
        folder.mkdir()
        write_rows(folder, NUM_ROWS)
        for _ in range(min(MOST_A_JOB, num_kills - figures.kills)):
            if not killed(folder, Kill.draw(chance), figures):
                break
        finish(folder, whole, chance, figures)
    assert not figures.wrong + figures.lost + figures.doubled, figures.row()
    assert not figures.left, figures.left
    if part == NUM_PARTS - 1:
        # The timed one: nothing else holds a rank up.
        assert max(figures.seconds) <= SOON_S, figures.row()


@pytest.mark.control("Ranks end with torchrun")
@pytest.mark.stress
def test_kill_test_detects_leftovers(tmp_path: Path, figures: Figures, monkeypatch: pytest.MonkeyPatch):
    """Negative control: a rank without a watchdog outlives its launcher."""
    monkeypatch.setitem(globals(), "LEFT_S", SOON_S)
    write_rows(tmp_path, NUM_ROWS)
    assert killed(tmp_path, Kill("two shards", "unwatched", 5, 0, "launcher", False, 0.0), figures)
    assert "processes" in str(figures.left)
    assert "lock" in str(figures.left)


# Helpers.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return whole_output(tmp_path_factory.mktemp("whole") / "job")


def whole_output(folder: Path) -> bytes:
    folder.mkdir()
    write_rows(folder, NUM_ROWS)
    attempt = Attempt(folder, "one rank")
    assert attempt.close() == 0, (folder / "log").read_text()
    return (folder / "out.jsonl").read_bytes()


def killed(folder: Path, kill: Kill, figures: Figures) -> bool:
    """Start the job and kill it, and see what is left then; false where the moment never came, and the job ended."""
    names: set[str] = set()
    attempt = kill.start(folder)

    def is_gone() -> bool:
        # Ranks that live on may share more memory until they end.
        pids = attempt.running()
        names.update(shared_names(pids))
        return not pids

    try:
        if kill.moment == "imports":
            if attempt.ends_within(kill.after_s):
                return False
        else:
            wait_until(lambda: (folder / "held").exists() or attempt.ends_within(0.0), LIMIT_S)
            if attempt.ends_within(0.0):
                return False
        is_gone()
        struck_s = time.monotonic()
        kill.strike(attempt)
        figures.kills += 1
        figures.moments[kill.moment] = figures.moments.get(kill.moment, 0) + 1
        figures.victims[kill.victim] = figures.victims.get(kill.victim, 0) + 1
        try:
            wait_until(is_gone, LEFT_S)
        except NotInTime:
            figures.left.append(f"{kill}: processes {attempt.running()}")
        figures.seconds.append(time.monotonic() - struck_s)
        figures.left += [f"{kill}: {each}" for each in left_in(folder, names)]
        print(f"{figures.kills} {kill}: {figures.seconds[-1]:.1f} s", flush=True)
        return True
    finally:
        attempt.kill(None)


def left_in(folder: Path, names: set[str]) -> list[str]:
    """Locks that are held, and shared memory of these names, which the job had."""
    found = []
    for path in (folder / "out.jsonl.run" / "lock", folder / "out.jsonl.partial"):
        if path.exists():
            try:
                # A process that is taken down shows no environment a moment before its files are closed.
                wait_until(lambda path=path: is_free(path), LEFT_S)
            except NotInTime:
                found.append(f"the lock {path.name}")
    try:
        wait_until(lambda: names.isdisjoint(os.listdir(FOLDER)), LEFT_S)
    except NotInTime:
        found.append(f"shared memory {names.intersection(os.listdir(FOLDER))}")
    return found


def is_free(path: Path) -> bool:
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def committed_rows(folder: Path) -> int | None:
    """Committed rows of the journal; None without a journal."""
    try:
        return sum(1 for _ in read_journal(folder / "out.jsonl.run"))
    except FileNotFoundError:
        return None
    except JournalError:
        # It may have been begun and no more.
        return 0


def finish(folder: Path, expected: bytes, chance: random.Random, figures: Figures) -> None:
    """Let the job end, and compare."""
    manifest = folder / "out.jsonl.run" / "manifest.json"
    has_ended = manifest.exists() and json.loads(manifest.read_text())["has_ended"]
    num_committed = 0 if has_ended else committed_rows(folder) or 0
    # Not under torchrun, which has nothing to do with how it ends.
    attempt = Attempt(folder, chance.choice(list(LAYOUTS)))
    assert attempt.close() == 0, (folder / "log").read_text()
    output = (folder / "out.jsonl").read_bytes()
    indices = [json.loads(line)["index"] for line in output.splitlines()]
    figures.wrong += output != expected
    figures.lost += len(set(range(NUM_ROWS)) - set(indices))
    figures.doubled += len(indices) - len(set(indices))
    metrics = json.loads((folder / "out.jsonl.run" / "metrics.json").read_text())
    figures.lost += max(num_committed - metrics["resumed_rows"], 0)
