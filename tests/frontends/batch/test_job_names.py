"""Names of a job's files are compared before any is changed: no other file is overwritten."""

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from ranks import REPOSITORY
from stress_seed import SEED

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import CacheConfig, JobConfig, ModelOptions, RunConfig, SamplingConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.frontends.batch.run_dir.file_names import matches
from spmd_worker.ranks.environment import RankEnvironment

LONG = "x" * 256
MODEL = REPOSITORY / "scripts" / "demo" / "model"
ROWS = b'{"prompt": "add 1 2 ="}\n{"prompt": "sort 3 1 ="}\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With an input, links to it and folders that are links; the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    os.link("rows.jsonl", "hard.jsonl")
    Path("soft.jsonl").symlink_to("rows.jsonl")
    Path("inner").mkdir()
    Path("elsewhere").symlink_to(tmp_path, target_is_directory=True)
    Path("model").mkdir()
    for path in MODEL.iterdir():
        Path("model", path.name).write_bytes(path.read_bytes())
    Path("linked").mkdir()
    for path in MODEL.iterdir():
        Path("linked", path.name).symlink_to(tmp_path / "model" / path.name)
    Path("owners.json").write_text("{}")
    Path("in[1]").mkdir()
    Path("in[1]/r-00000.jsonl").write_bytes(ROWS)
    os.mkfifo("pipe")
    return tmp_path


def job(model: str = "model", placement: str = "linear", **keys: Any) -> None:
    config = RunConfig(
        model=ModelOptions(path=model),
        parallel=ParallelConfig(expert_placement=placement, enable_expert_parallel=placement != "linear"),
        cache=CacheConfig(num_blocks=64),
        sampling=SamplingConfig(max_tokens=2),
        job=JobConfig(**{"input": "rows.jsonl", "output": "out.jsonl", **keys}),
        device="cpu",
    )
    run_job(config, RankEnvironment())


def contents(folder: Path) -> dict[str, Any]:
    """Every file: a rejected job must leave them unchanged."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        kind = path.lstat().st_mode
        found[name] = (kind, os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None)
    return found


COLLISIONS = {
    "metrics over the output": ({"prometheus_file": "out.jsonl"}, "job.output=out.jsonl and job.prometheus_file="),
    "metrics over the input": ({"prometheus_file": "rows.jsonl"}, "job.prometheus_file=rows.jsonl is also read"),
    "metrics over a hard link": ({"prometheus_file": "hard.jsonl"}, "job.prometheus_file=hard.jsonl is also read"),
    "metrics over a link": ({"prometheus_file": "soft.jsonl"}, "job.prometheus_file=soft.jsonl is also read"),
    "output over the input, absolute": ({"output": "{folder}/rows.jsonl"}, "is also read (job.input=rows.jsonl)"),
    "output over the input by ..": ({"output": "inner/../rows.jsonl"}, "is also read (job.input=rows.jsonl)"),
    "output over the input by a folder's link": ({"output": "elsewhere/rows.jsonl"}, "is also read"),
    "output over one of a pattern": ({"input": "*.jsonl", "output": "rows.jsonl"}, "is also read (job.input=*.jsonl)"),
    "metrics over the output by a folder's link": ({"prometheus_file": "elsewhere/out.jsonl"}, "are the same file"),
    "metrics over the unfinished output": ({"prometheus_file": "out.jsonl.partial"}, "are the same file"),
    "metrics over the output in capitals": ({"prometheus_file": "OUT.jsonl"}, "are the same file"),
    "metrics below the output": ({"prometheus_file": "out.jsonl/metrics"}, "are the same file"),
    "output over the journal": ({"run_dir": "run", "output": "run/journal"}, "journal is a file of the run directory"),
    "output below the journal": ({"run_dir": "run", "output": "run/journal/out"}, "journal is a file of the run"),
    "output over the lines": (
        {"run_dir": "run", "output": "elsewhere/run/rows.part"},
        "rows.part is a file of the",
    ),
    "output over the lock": ({"run_dir": "run", "output": "run/./lock"}, "lock is a file of the run directory itself"),
    "output over the metrics": ({"run_dir": "run", "output": "run/metrics.json"}, "metrics.json is a file of the run"),
    "metrics over the steps": (
        {"run_dir": "run", "prometheus_file": "run/steps.csv"},
        "steps.csv is a file of the",
    ),
    "metrics over the manifest": ({"prometheus_file": "out.jsonl.run/manifest.json"}, "manifest.json is a file of the"),
    "output over a step log": ({"run_dir": "run", "output": "run/Steps.log"}, "Steps.log is a file of the run"),
    "output over stacks": ({"run_dir": "run", "output": "run/stacks.rank0.txt"}, "is a file of the run directory"),
    "output over a report": ({"run_dir": "run", "output": "run/report.html"}, "is a file of the run directory itself"),
    "run directory over the output": ({"run_dir": "out.jsonl"}, "are the same file"),
    "run directory over the unfinished output": ({"run_dir": "out.jsonl.partial"}, "are the same file"),
    "run directory below the output": ({"run_dir": "out.jsonl/run"}, "are the same file"),
    "run directory over the metrics": ({"run_dir": "run", "prometheus_file": "run"}, "are the same file"),
    "output in the model": ({"output": "model/out.jsonl"}, "is in the folder of model.path=model"),
    "output over the weights": ({"output": "model/model.safetensors"}, "is in the folder of model.path"),
    "metrics in the model": ({"prometheus_file": "elsewhere/model/a.prom"}, "is in the folder of model.path"),
    "run directory in the model": ({"run_dir": "model/run"}, "is in the folder of model.path=model"),
    "run directory that is the model": ({"run_dir": "model"}, "is in the folder of model.path=model"),
    "output over a file that the model links to": (
        {"model": "linked", "output": "model/config.json"},
        "is also read (config.json of model.path=linked)",
    ),
    "metrics over the experts' placement": (
        {"placement": "owners.json", "prometheus_file": "owners.json"},
        "is also read (parallel.expert_placement=owners.json)",
    ),
    "metrics that a pattern finds": (
        {"input": "*.jsonl", "output": "inner/out", "prometheus_file": "m.jsonl"},
        "job.prometheus_file=m.jsonl matches job.input=*.jsonl",
    ),
    "parts over an input in brackets": (
        {"input": "in[1]/r-00000.jsonl", "output": "in[1]/r-*.jsonl"},
        "would replace in[1]/r-00000.jsonl, which is read",
    ),
    "parts over an input by a folder's link": (
        {"input": "elsewhere/in[1]/r-00000.jsonl", "output": "in[1]/r-*.jsonl"},
        "would replace elsewhere/in[1]/r-00000.jsonl, which is read",
    ),
    "parts that a pattern finds": (
        {"input": "*.jsonl", "output": "part-*.jsonl"},
        "job.output=part-*.jsonl matches job.input=*.jsonl",
    ),
    "manifest of parts that a pattern finds": ({"input": "*.js*", "output": "part-*.gz"}, "matches job.input"),
    "output that a pattern finds": (
        # Regression: the next job of the pattern read it, and the same one could not be started again.
        {"input": "*.jsonl"},
        "job.output=out.jsonl matches job.input=*.jsonl",
    ),
    "output of a pool that a pattern finds": (
        {"input": "*.jsonl", "pool": "pool"},
        "job.output=out.jsonl matches job.input=*.jsonl",
    ),
    "output that is a folder": ({"output": "inner"}, "exists and is not a regular file"),
    "output that names a folder": ({"output": "new/"}, "job.output=new/ names a folder"),
    "metrics over a FIFO": ({"prometheus_file": "pipe"}, "job.prometheus_file=pipe exists and is not a regular file"),
    "metrics over a folder": ({"prometheus_file": "inner"}, "job.prometheus_file=inner exists and is not a regular"),
    # Regression: named no key, and the record of the error, in that folder, raised in its own thread.
    "output too long": ({"output": LONG}, f"job.output={LONG} cannot be written (File name too long)"),
    "metrics too long": ({"prometheus_file": LONG}, f"job.prometheus_file={LONG} cannot be written"),
    "run directory too long": ({"run_dir": LONG}, f"job.run_dir={LONG} cannot be written (File name too long)"),
    "input too long": ({"input": LONG}, f"job.input={LONG} is not a file"),
    "run directory over the input": ({"run_dir": "rows.jsonl", "output": "new/out"}, "exists and is not a folder"),
}


@pytest.mark.finding(number="C1")
@pytest.mark.parametrize("name", COLLISIONS)
def test_job_rejects_names_of_one_file(folder: Path, name: str):
    keys, words = COLLISIONS[name]
    before = contents(folder)
    with pytest.raises(ConfigError) as refused:
        job(**{key: value.replace("{folder}", str(folder)) for key, value in keys.items()})
    assert words in str(refused.value)
    assert re.search(": give (another|a JSONL)", str(refused.value))
    assert contents(folder) == before


@pytest.mark.finding(number="C1")
@pytest.mark.parametrize("name", ["out.jsonl.partial", "metrics.prom.partial"])
@pytest.mark.parametrize("kind", ["link", "hard link", "fifo"])
def test_job_rejects_links_where_it_writes_first(folder: Path, name: str, kind: str):
    {"link": os.symlink, "hard link": os.link, "fifo": lambda _, to: os.mkfifo(to)}[kind]("rows.jsonl", name)
    before = contents(folder)
    with pytest.raises(ConfigError, match=rf" {name} .*, which (is a|has 3) "):
        job(prometheus_file="metrics.prom")
    assert contents(folder) == before


@pytest.mark.finding(number="C1")
@pytest.mark.parametrize("target", ["out.jsonl", "run/steps.csv"])
def test_job_rejects_target_of_standard_output(folder: Path, target: str, monkeypatch: pytest.MonkeyPatch):
    Path("run").mkdir()
    with open(target, "w", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        with pytest.raises(ConfigError, match="standard output"):
            job(run_dir="run")
    assert not list(Path("run").glob("lock"))


@pytest.mark.gate("a linked model", "run directory behind a link")
@pytest.mark.finding(number="C1")
@pytest.mark.parametrize(
    "keys",
    [
        {"run_dir": "run", "output": "run/out.jsonl", "prometheus_file": "run/metrics.prom"},
        {"run_dir": "elsewhere/run", "output": "out.jsonl"},
        {"input": "hard.jsonl", "output": "Rows.jsonl"},
        {"model": "linked", "input": "*.jsonl", "output": "inner/out.jsonl", "prometheus_file": "metrics.jsonl.prom"},
    ],
    ids=["in the run directory", "run directory behind a link", "another case", "a linked model"],
)
def test_job_runs_when_names_are_different_files(folder: Path, keys: dict[str, str]):
    """Negative control: names that only look alike, and a job that goes on finds them fit again."""
    job(**keys)
    job(**keys)
    assert Path(keys["output"]).read_bytes().count(b"\n") >= 2
    assert Path("rows.jsonl").read_bytes() == ROWS


@pytest.mark.finding(number="C1")
def test_pattern_matches_what_glob_finds(folder: Path):
    import glob

    Path("inner/deep").mkdir()
    names = ["rows.jsonl", ".hidden.jsonl", "inner/a.jsonl", "inner/deep/b.jsonl", "inner/deep/.c.jsonl"]
    for name in names:
        Path(name).write_text("")
    for pattern in ("*.jsonl", "**/*.jsonl", "inner/*", "inner/**", "*/*.jsonl", "inner/deep/.*", "r[a-p]ws.*", "**"):
        found = set(glob.glob(pattern, recursive=True))
        assert {name for name in names if matches(pattern, Path(name))} == found & set(names), pattern


@pytest.mark.stress
@pytest.mark.finding(number="C1")
@pytest.mark.parametrize("number", range(40))
def test_random_names_are_rejected_or_kept_apart(folder: Path, number: int):
    """A job of random names writes its output or reports an error, and changes no other file."""
    chance = random.Random(f"{number + 40 * (SEED - 1)} names")
    bases = [
        "rows.jsonl",
        "hard.jsonl",
        "out.jsonl",
        "run",
        "run/out.jsonl",
        "run/journal",
        "run/x",
        "model/config.json",
    ]
    bases += ["soft.jsonl", "run/steps.csv", "out.jsonl.partial", "OUT.jsonl", "inner", "linked/config.json", "a/b/c"]

    def drawn() -> str:
        name = chance.choice(bases)
        return chance.choice([name, f"./{name}", f"inner/../{name}", f"elsewhere/{name}", str(folder / name)])

    keys = {"input": chance.choice(["rows.jsonl", "*.jsonl", "soft.jsonl"]), "output": drawn(), "run_dir": drawn()}
    keys["prometheus_file"] = drawn()
    before = contents(folder)
    error = None
    try:
        job(model=chance.choice(["model", "linked"]), **keys)
    except ConfigError as refused:
        error = refused
    after = contents(folder)
    if error is not None:
        assert after == before, error
        return
    assert {name: after[name] for name in before} == before, keys
    lines = Path(keys["output"]).read_bytes().splitlines()
    assert len(lines) >= 2, keys
    assert all(line.startswith(b'{"custom_id":') for line in lines), keys
