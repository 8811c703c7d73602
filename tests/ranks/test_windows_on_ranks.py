"""Models with windows on two ranks: the same bits whether blocks behind a window go back to the pool or not."""

import json
from pathlib import Path

import pytest
import ranks
from compressed_checkpoints import compressed_folder
from family_checkpoints import family_folder

LAYOUTS = {
    # The only full layer of Gemma's seven is on the second stage.
    "pipeline": {"pipeline_parallel_size": 2, "pipeline_layers": [5, 2]},
    "tensor": {"tensor_parallel_size": 2},
    "data": {"data_parallel_size": 2},
}
ANSWERS = """
import json, os, sys
from pathlib import Path
from spmd_worker import LLM
from state_rows import answers_of, state_rows

folder, sizes, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
rows, params = state_rows(4, num_samples=3)
rows = [{"prompt_token_ids": row["prompt_token_ids"][:100]} for row in rows]
settings = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "block_size": 4, "max_num_seqs": 8}
crowded = {"num_blocks": 12, "max_num_batched_tokens": 16, "preemption_mode": "swap", "swap_space": 0.1}
found = {}
for name, options in {"all": {"num_blocks": 400, "window_groups": False}, "windows": crowded}.items():
    with LLM(folder, **sizes, **settings, **options) as llm:
        found[name] = [answers_of(llm.generate(rows, params, use_tqdm=False)) for _ in range(2)]
        found[f"{name} counts"] = [llm.llm_engine.counters.num_preemptions, llm.llm_engine.scheduler.cache.num_groups]
(out / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("gemma3", "pipeline", marks=pytest.mark.matrix),
        *(pytest.param("gemma3", each, marks=pytest.mark.stress) for each in ("tensor", "data")),
        *(pytest.param("deepseek_v4_groups", each, marks=pytest.mark.stress) for each in LAYOUTS),
    ],
)
def test_window_groups_on_two_ranks_keep_bits(name: str, layout: str, tmp_path: Path) -> None:
    """Also of DeepSeek V4, of whose layers window groups have a part."""
    folder = family_folder(name) if name == "gemma3" else compressed_folder(name)
    first, second = ranks.reports(ANSWERS, 2, tmp_path, [folder, json.dumps(LAYOUTS[layout])])
    assert first["windows"] == first["all"] == second["windows"]
    assert first["windows"][0] == first["windows"][1]
    num_preemptions, num_groups = first["windows counts"]
    assert num_groups == (7 if name == "gemma3" else 8)
    assert num_preemptions > 0 or layout == "data"
    assert first["all counts"][1] == 1
