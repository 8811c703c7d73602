"""The cache of several ranks is preempted, finds and loads in the same steps on all of them.

Each rank hashes with another seed and has another memory budget; tokens are those of one rank that had room.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ranks
from reference_models import checkpoint_folder, mixed_prompts

from spmd_worker import LLM, SamplingParams

NAME = "llama3"
HEAD = [11 + index % 60 for index in range(48)]
PROMPTS = [[*HEAD, *prompt] for prompt in mixed_prompts(5, 30, seed=3)] + mixed_prompts(3, 50, seed=4)
PARAMS = [
    SamplingParams(n=1 + index % 3, temperature=0.9, max_tokens=10 + index, ignore_eos=True, seed=index)
    for index in range(len(PROMPTS))
]
SETTINGS = {"max_model_len": 140, "max_num_batched_tokens": 64, "max_num_seqs": 16}
CROWDED = {
    "swap": {"num_blocks": 18, "preemption_mode": "swap", "swap_space": 0.01},
    "recompute": {"num_blocks": 18, "preemption_mode": "recompute"},
    "verified": {"num_blocks": 22, "preemption_mode": "recompute", "verify_hits": 3, "verify_steps": 9},
    "fp8": {"num_blocks": 18, "preemption_mode": "swap", "swap_space": 0.01, "kv_cache_dtype": "fp8"},
    "tier": {"num_blocks": 18, "preemption_mode": "auto", "swap_space": 0, "host_tier_gib": 0.01},
}

SCRIPT = """
import os, sys
import json
from dataclasses import asdict
from pathlib import Path
from spmd_worker import LLM, SamplingParams

job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
params = [SamplingParams(**each) for each in job["params"]]
answers = {}
for name, settings in job["kinds"].items():
    with LLM(job["folder"], tensor_parallel_size=2, **job["settings"], **settings) as llm:
        cache, loaded = llm.llm_engine.scheduler.cache, []
        finish = cache.finish_transfer
        cache.finish_transfer = lambda number: (loaded.append(number), finish(number))[1]
        for round in range(2):
            outputs = llm.generate(job["prompts"], params, use_tqdm=False)
            if int(os.environ["RANK"]) == 0 and round == 0:
                llm.reset_prefix_cache()  # rank 0's word counts
        scheduler = llm.llm_engine.scheduler
        scheduler.check_integrity()
        answers[name] = {
            "token_ids": [[each.token_ids for each in output.outputs] for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "counters": asdict(scheduler.counters),
            "transfers": loaded,
            "used": [scheduler.cache.num_used_blocks, scheduler.cache.num_used_host_blocks],
        }
(out / f"{os.environ['RANK']}.json").write_text(json.dumps(answers))
"""


def answers_of_two_ranks(tmp_path: Path) -> list[dict[str, Any]]:
    job = {
        "folder": str(checkpoint_folder(NAME)),
        "prompts": PROMPTS,
        "params": [asdict(each) for each in PARAMS],
        "settings": SETTINGS,
        "kinds": CROWDED,
    }
    return ranks.reports_of_job(SCRIPT, 2, tmp_path, job, env={"SPMD_WORKER_CHECK": "1"}, hash_seeds=True)


@pytest.mark.matrix
def test_two_ranks_preempt_alike_and_match_one_rank(tmp_path: Path):
    by_rank = answers_of_two_ranks(tmp_path)
    assert by_rank[0] == by_rank[1]
    expected = {}
    for dtype in ("auto", "fp8"):
        roomy = {"num_blocks": 1000, "enable_prefix_caching": False, "kv_cache_dtype": dtype}
        with LLM(checkpoint_folder(NAME), **roomy, **SETTINGS) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        expected[dtype] = [[each.token_ids for each in output.outputs] for output in outputs]
    assert expected["fp8"] != expected["auto"]
    for name, answer in by_rank[0].items():
        assert answer["token_ids"] == expected["fp8" if name == "fp8" else "auto"], name
        assert answer["counters"]["num_preemptions"] > 0 or name == "verified", name
        assert sum(answer["cached"]) > 0, name
        assert answer["used"] == [0, 0], name
    assert by_rank[0]["verified"]["counters"]["num_verified_hits"] > 2
    assert by_rank[0]["verified"]["counters"]["num_verified_steps"] > 2
    assert by_rank[0]["swap"]["counters"]["num_recomputed_tokens"] == 0
    assert by_rank[0]["swap"]["counters"]["num_swapped_out"] > 0
    assert by_rank[0]["recompute"]["counters"]["num_recomputed_tokens"] > 0
    assert by_rank[0]["tier"]["transfers"] == list(range(1, len(by_rank[0]["tier"]["transfers"]) + 1)) != []
    tier, recompute = by_rank[0]["tier"]["counters"], by_rank[0]["recompute"]["counters"]
    assert tier["num_recomputed_tokens"] < recompute["num_recomputed_tokens"], "some of it came from the tier"
    assert tier["num_loaded_blocks"] > 0
