"""collective_rpc on ranks, as a script uses it: what goes wrong on a rank says which rank and what."""

import json
from pathlib import Path

import ranks

from spmd_worker import LLM, SamplingParams

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"

SCRIPT = """
import json, os, sys, time, traceback
from pathlib import Path
from spmd_worker import LLM, SamplingParams

rank = int(os.environ["RANK"])

def fails_on_rank_1(worker):
    if worker.environment.rank == 1:
        raise KeyError("no such layer")
    return rank

def sleeps(worker):
    time.sleep(600)

def words(call):
    try:
        return call()
    except Exception as error:
        return "".join(traceback.format_exception_only(error))

with LLM(sys.argv[1], tensor_parallel_size=2, num_blocks=64, device="cpu") as llm:
    answers = [
        words(lambda: llm.collective_rpc("nonexistent")),
        words(lambda: llm.collective_rpc(fails_on_rank_1)),
        words(lambda: llm.collective_rpc(sleeps, timeout=0.2)),
        words(lambda: llm.collective_rpc("get_supported_tasks", timeout=240)),
    ]
    output = llm.generate(["copy q ="], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
(Path(sys.argv[2]) / f"{rank}.json").write_text(json.dumps([answers, output.outputs[0].text]))
"""


def test_rpc_errors_name_the_rank(tmp_path: Path):
    ranks.run_ranks(SCRIPT, 2, timeout_s=240, arguments=[MODEL, tmp_path]).checked()
    texts = []
    for rank in (0, 1):
        (missing, failing, late, in_time), text = json.loads((tmp_path / f"{rank}.json").read_text())
        assert missing == (
            f"AttributeError: rank {rank}: a worker has no method 'nonexistent'\non rank {rank}, in nonexistent\n"
        )
        expected = [0] if rank == 0 else "KeyError: 'no such layer'\non rank 1, in fails_on_rank_1\n"
        assert failing == expected
        assert late == f"TimeoutError: rank {rank} has not answered sleeps within 0.2 s\n"
        assert in_time == [["generate"]]
        texts.append(text)
    with LLM(MODEL, num_blocks=64, device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        assert texts == [llm.generate(["copy q ="], params, use_tqdm=False)[0].outputs[0].text] * 2
