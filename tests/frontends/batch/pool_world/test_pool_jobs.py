"""Jobs in a pool, with an engine: ended and begun again in this process, under two layouts' keys."""

import json
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cut_jobs import Ended
from jobs_of_rows import job_config, run_here, write_rows
from ranks import REPOSITORY, run_forked

from spmd_worker.base.config.schema import JobConfig, RunConfig, SchedulerConfig
from spmd_worker.base.errors import ConfigError, JobError, PoolError
from spmd_worker.frontends.batch import job as job_module
from spmd_worker.frontends.batch.pool_world import open_world as open_world_module
from spmd_worker.frontends.batch.pool_world.pool_worker import PoolWorker
from spmd_worker.frontends.batch.run_dir import world
from spmd_worker.frontends.batch.run_dir.shard import run_dir_of
from spmd_worker.frontends.batch.run_dir.world import world_dir
from spmd_worker.frontends.tools.doctor import examine

MODEL = REPOSITORY / "scripts" / "demo" / "model"
NUM_ROWS = 24


def config_of(folder: Path, **job: Any) -> RunConfig:
    scheduler = SchedulerConfig(max_num_seqs=8)
    return job_config(folder, MODEL, num_blocks=256, options={"dtype": "float32"}, scheduler=scheduler, **job)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows: list[Any] = [{"prompt": f"add {index} 7 =", "max_tokens": 3} for index in range(NUM_ROWS)]
    rows[3] |= {"custom_id": "a", "temperature": 0.9}
    rows[20] |= {"custom_id": "a"}
    rows[7] = {"prompt": 7}
    write_rows(tmp_path, rows)
    return tmp_path


def test_world_goes_on_where_another_ended(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """And a third one, which comes after the end, loads no model."""
    run_here(config_of(folder, output=str(folder / "one.jsonl")))
    config = config_of(folder, pool=str(folder / "pool"), lease_rows=16, commit_rows=2, step_log=True)
    num_left = [9]
    append = PoolWorker.append

    def end(worker: PoolWorker, *given: Any) -> None:
        append(worker, *given)
        num_left[0] -= 1
        if not num_left[0]:
            raise Ended

    with monkeypatch.context() as patch:
        patch.setattr(PoolWorker, "append", end)
        with pytest.raises(Ended):
            run_here(config)
    assert not (folder / "out.jsonl").exists()
    run_here(replace(config, scheduler=SchedulerConfig(max_num_seqs=3)))
    assert (folder / "out.jsonl").read_bytes() == (folder / "one.jsonl").read_bytes()
    metrics = json.loads((run_dir_of(config.job) / "metrics.json").read_text())
    assert (metrics["rows"], metrics["resumed_rows"]) == (NUM_ROWS - 9, 0)
    provenance = json.loads((run_dir_of(config.job) / "provenance.json").read_text())
    of_pool = json.loads((folder / "pool" / "merged" / "provenance.json").read_text())
    assert {**provenance["output"], "path": ""} == {**of_pool["output"], "path": ""}
    assert of_pool["answers"] == provenance["answers"]
    assert of_pool["error_codes"].pop("duplicate_custom_id") == 1
    assert list(of_pool["error_codes"].values()) == [1]
    ends = [json.loads(path.read_text())["how"] for path in sorted((folder / "pool" / "workers").glob("*.end"))]
    assert sorted(ends) == ["ended", "failed"]
    monkeypatch.setattr(job_module, "start_engine", lambda *_, **__: pytest.fail("the engine was started"))
    run_here(config)
    # Regression: its run directory was taken for one of a killed job.
    assert examine(run_dir_of(config.job)) == ([f"The run ended well: its output {folder}/out.jsonl is complete."], 0)
    with pytest.raises(JobError, match=r"2 error rows are more than job\.max_error_rows=1"):
        run_here(replace(config, job=replace(config.job, max_error_rows=1)))
    with pytest.raises(ConfigError, match=r"^seed is 5, and 0 in the pool"):
        run_here(replace(config, seed=5))
    # Regressions: both ended with exit code 0, the first if the index was not there within a second.
    monkeypatch.setattr(open_world_module, "_SCAN_S", 0.0)
    (folder / "more.jsonl").write_text((folder / "rows.jsonl").read_text() + '{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match=r"^job\.input has \d+ bytes in .*more\.jsonl, and \d+ in the pool"):
        run_here(replace(config, job=replace(config.job, input=str(folder / "more.jsonl"))))
    (folder / "out.jsonl").unlink()
    with pytest.raises(PoolError, match=r"has ended, but .*out\.jsonl is missing: restore the output, or remove"):
        run_here(config)


@pytest.mark.parametrize(
    ("pool", "change", "message"),
    [
        ("pool", {"resume": "never"}, r"^job\.resume=never and job\.pool=.*: leave out job\.resume"),
        ("pool", {"resume": "force"}, r"^job\.resume=force and job\.pool="),
        # Not job.run_dir, which was not given.
        ("out.jsonl", {}, r"^job\.output=\S+ and job\.pool=\S+ are the same file.*: give another job\.pool$"),
        ("pool", {"shard": "0/2"}, r"^job\.shard=0/2 and job\.pool=.* leave out one of them"),
        ("pool", {"input": "-"}, r"^job\.input=- is a stream"),
    ],
)
def test_contradicting_keys_are_rejected(folder: Path, pool: str, change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        run_here(config_of(folder, **change, pool=str(folder / pool)))
    assert not (folder / "pool").exists()


def test_ranks_of_a_late_world_load_no_model(folder: Path):
    """Regression: several ranks loaded the model before they learned that the pool had ended."""
    arguments = [
        *(f"model.path={MODEL}", "device=cpu", "cache.num_blocks=64", "parallel.tensor_parallel_size=2"),
        *(f"job.input={folder}/rows.jsonl", f"job.output={folder}/out.jsonl", f"job.pool={folder}/pool"),
    ]
    run_forked([REPOSITORY / "launch.py", *arguments], nproc=2, timeout_s=240).checked()
    written = (folder / "out.jsonl").stat().st_mtime_ns
    # Other weights would be another job.
    source = """
        import sys
        import launch
        from spmd_worker.executor.executor import Executor
        Executor.load_model = lambda executor: sys.exit("a model is loaded")
        sys.exit(launch.main())
    """
    (folder / "late.py").write_text(textwrap.dedent(source))
    late = run_forked([folder / "late.py", *arguments], nproc=2, timeout_s=240)
    assert late.exit_codes == (0, 0), late.output
    assert late.output.count("has ended: ") == 1
    assert (folder / "out.jsonl").stat().st_mtime_ns == written
    # A control: a world with work does load it.
    (folder / "pool" / "merged" / "merge.0002").unlink()
    assert "a model is loaded" in run_forked([folder / "late.py", *arguments], nproc=2, timeout_s=240).output


def test_other_folder_is_no_pool(folder: Path):
    (folder / "pool").mkdir()
    (folder / "pool" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"pool is not a pool: it has 'notes\.txt'"):
        run_here(config_of(folder, pool=str(folder / "pool")))
    assert [path.name for path in (folder / "pool").iterdir()] == ["notes.txt"]


def test_ranks_of_a_launch_share_a_folder():
    job = JobConfig(pool="p")
    alone = world_dir(job, {})
    assert alone.parent == Path("p/worlds")
    assert world_dir(replace(job, run_dir="r"), {}) == Path("r") / alone.name
    ranks = [{"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "n1.x", "MASTER_PORT": "29500"} for rank in range(2)]
    local = {world_dir(job, {**each, "LOCAL_WORLD_SIZE": "4"}) for each in ranks}
    wide = {world_dir(job, {**each, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a/b"}) for each in ranks}
    assert len(local) == 1
    assert len(wide) == 1
    assert next(iter(wide)).name.startswith("n1-x-29500-a-b-")
    assert len({alone, *local, *wide}) == 3


@pytest.mark.parametrize(
    "variables",
    [{}, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}],
)
def test_equal_containers_have_own_folders(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    """Regression: two pods with one host name, and launcher 1, had one folder; so had a pod that was started again."""
    job = JobConfig(pool="p")
    for name in ("getpid", "getppid"):
        monkeypatch.setattr(f"os.{name}", lambda: 1)
    monkeypatch.setattr("socket.gethostname", lambda: "pod-0")
    folders = []
    for node, start in (("boot a", 7), ("boot b", 7), ("boot a", 8), ("boot a", 8)):
        monkeypatch.setattr(world, "node_name", partial(str, node))
        monkeypatch.setattr(world, "start_time_of", {1: start}.get)
        folders.append(world_dir(job, variables))
    assert len(set(folders)) == 3
    assert folders[2] == folders[3]
    assert {folder.name.startswith("pod-0-1-") for folder in folders} == {True}


def test_long_names_of_launches_differ():
    """Regression: names were cut where they differed."""
    wide = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n" * 120}
    folders = [world_dir(JobConfig(pool="p"), {**wide, "TORCHELASTIC_RUN_ID": run_id}) for run_id in "ab"]
    assert folders[0] != folders[1]
    assert max(len(folder.name) for folder in folders) < 100
