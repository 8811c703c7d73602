"""Ten million rows: opened, planned and started within bounded memory, for a file of any size.

The rows repeat valid ones; `job.max_rows` ends the job after a few, when everything that depends on the size of the
input has happened: it was digested, counted, and rows were read ahead.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
NUM_ROWS = 10_000_000
MOST_GROWTH_BYTES = 200 << 20
LIMIT_S = 900.0

SCRIPT = """
import json, resource, sys
from pathlib import Path
from spmd_worker.frontends.batch import job
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.base.config.schema import CacheConfig, JobConfig, ModelOptions, RunConfig, SamplingConfig
from spmd_worker.ranks.environment import RankEnvironment

folder, keep = Path(sys.argv[1]), sys.argv[2] == "keep"
def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def run(name, **given):
    run_job(RunConfig(model=ModelOptions(path=sys.argv[3]), cache=CacheConfig(num_blocks=64),
        sampling=SamplingConfig(max_tokens=2, temperature=0.0), device="cpu",
        job=JobConfig(input=str(folder / name), output=str(folder / f"{name}.out"), **given)), RankEnvironment())

run("few.jsonl")
if keep:
    # The control: a reader that keeps what it read.
    kept = list(open(folder / "many.jsonl", "rb"))
before = resident()
run("many.jsonl", max_rows=300)
# Of this program: getrusage would tell what the process was before it became one.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(json.dumps([before, int(peak) * 1024, resident()]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    rows = b"".join(json.dumps({"prompt": f"add {index % 50} 7 ="}).encode() + b"\n" for index in range(10_000))
    (folder / "few.jsonl").write_bytes(rows[: rows.index(b"\n", 9000) + 1])
    with open(folder / "many.jsonl", "wb") as stream:
        for _ in range(NUM_ROWS // 10_000):
            stream.write(rows)
    yield folder
    (folder / "many.jsonl").unlink()


def measure(folder: Path, what: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), what, str(MODEL)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=ranks.REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.guarantee("Input of any size is streamed")
@pytest.mark.stress
def test_ten_million_rows_start_in_bounded_memory(folder: Path):
    before, peak, _ = measure(folder, "stream")
    print(f"RESIDENT grew by at most {(peak - before) / 2**20:.0f} MiB")
    assert peak - before < MOST_GROWTH_BYTES
    manifest = json.loads((folder / "many.jsonl.out.run" / "manifest.json").read_text())
    assert manifest["num_rows"] == 300
    assert len((folder / "many.jsonl.out").read_bytes().splitlines()) == 300


@pytest.mark.control("Input of any size is streamed")
@pytest.mark.stress
def test_memory_bound_detects_reader_keeping_the_rows(folder: Path):
    """The control: the measure sees memory that grows with the file."""
    first, *_ = measure(folder, "stream")
    _, peak, _ = measure(folder, "keep")
    assert peak - first > MOST_GROWTH_BYTES
