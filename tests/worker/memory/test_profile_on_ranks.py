"""Whether the largest step runs is one decision of all ranks, because the step contains collectives."""

import json
from pathlib import Path

import pytest
import ranks

MODEL = Path(__file__).resolve().parents[3] / "scripts/demo/model"

# On some ranks there is room for half the cache that could be used, which is a MiB. The step runs and is measured; its
# bytes, which on a model this small are the allocator's whims, are not counted.
SCRIPT = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
from kv_cache.cache_sizing import MemoryMeasurement
from spmd_worker import LLM, SamplingParams
from spmd_worker.worker import start

model, out, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
scarce_on, agreed = json.loads(sys.argv[3]), json.loads(sys.argv[4])

def measure_host(weights, activations, local_world_size):
    total = weights + 2**19 if rank in scarce_on else 2**40
    return MemoryMeasurement(total, weights, activations, 0, "estimated")

profile_host = start.profile_host
start.profile_host = lambda *arguments: replace(profile_host(*arguments), activation_bytes=0)
start.measure_host = measure_host
if not agreed:
    start.is_on_any_rank = lambda group, flag: flag
found = {}
try:
    settings = dict(max_model_len=64, max_num_seqs=16, max_num_batched_tokens=32, gpu_memory_utilization=1.0)
    settings |= dict(dtype="float32", device="cpu", timeout_s=60.0 if agreed else 2.0)
    with LLM(model, tensor_parallel_size=2, **settings) as llm:
        (local,) = llm.collective_rpc(lambda local: local)
        found["reason"], found["blocks"] = local.sizing.reason, llm.llm_engine.scheduler.cache.num_blocks
        (output,) = llm.generate(["1+2="], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        found["ids"] = output.outputs[0].token_ids
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
(out / f"{rank}.json").write_text(json.dumps(found))
"""


def run(tmp_path: Path, *, scarce_on: list[int], agreed: bool = True) -> list[dict[str, object]]:
    arguments = [MODEL, tmp_path, json.dumps(scarce_on), json.dumps(agreed)]
    done = ranks.run_ranks(SCRIPT, 2, timeout_s=240, arguments=arguments)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert done.returncode == 0, (done.output, found)
    return found


def test_all_ranks_profile_when_one_is_short(tmp_path: Path):
    found = run(tmp_path, scarce_on=[1])
    assert all("(measured)" in each["reason"] for each in found), found
    assert "limited by need" in found[0]["reason"]
    assert "limited by memory" in found[1]["reason"]
    assert found[0]["blocks"] == found[1]["blocks"] == 32, "the least of both"
    assert found[0]["ids"] == found[1]["ids"] != []


def test_no_rank_profiles_when_memory_suffices(tmp_path: Path):
    found = run(tmp_path, scarce_on=[])
    assert all("(estimated)" in each["reason"] for each in found), found
    assert found[0]["blocks"] == found[1]["blocks"] == 64


@pytest.mark.stress
@pytest.mark.matrix
def test_separate_decisions_deadlock_the_ranks(tmp_path: Path):
    """The negative control: with the agreement taken out, the start fails when the collectives time out."""
    found = run(tmp_path, scarce_on=[1], agreed=False)
    assert all("error" in each for each in found), found
