"""Models with recurrent states on two ranks that share memory: stages and replicas have one rank's bits, shards its
numbers to 1e-4. One launch does all, because starting ranks takes seconds.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
from state_models import answers, state_folder
from state_rows import SETTINGS

LAYOUTS = {
    "pipeline": {"pipeline_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "data": {"data_parallel_size": 2},
}
NUM_ROWS = 4
CROWDED = {"num_blocks": 17, "max_num_seqs": 6, "max_num_batched_tokens": 56}
"""Rows are cut, and preempted."""

ANSWERS = """
import json, os, sys
from pathlib import Path
from spmd_worker import LLM
from state_rows import answers_of, state_rows

job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
rows, params = state_rows(job["num_rows"])
answers = {}
for name, folder in job["folders"].items():
    for layout, sizes in job["layouts"].items():
        with LLM(folder, **sizes, **job["settings"]) as llm:
            # Later from snapshots. Replicas take rows as they have room: of three times a row is twice with one of two.
            answers[f"{name} {layout}"] = [
                answers_of(llm.generate(rows, params, use_tqdm=False)) for _ in range(3)
            ]
            counters = llm.llm_engine.counters
            answers[f"{name} {layout} counts"] = [counters.num_preemptions, counters.num_snapshot_hits]
(out / f"{os.environ['RANK']}.json").write_text(json.dumps(answers))
"""


def check(names: list[str], tmp_path: Path, layouts: list[str]) -> None:
    settings = {**SETTINGS, **CROWDED}
    job = {
        "folders": {name: str(state_folder(name)) for name in names},
        "layouts": {layout: LAYOUTS[layout] for layout in layouts},
        "settings": settings,
        "num_rows": NUM_ROWS,
    }
    first, second = ranks.reports_of_job(ANSWERS, 2, tmp_path, job)
    for name in names:
        expected = json.loads(json.dumps(answers(name)[0][:NUM_ROWS]))
        for layout in layouts:
            compare(first[f"{name} {layout}"], expected, layout)
            assert first[f"{name} {layout}"] == second[f"{name} {layout}"]
            (num_preemptions, num_hits), (_, other_hits) = (each[f"{name} {layout} counts"] for each in (first, second))
            # Blocks behind the windows of LFM3 go back to the pool, so no row of it is preempted.
            assert num_preemptions > 0 or layout == "data" or name == "lfm3"
            assert (num_hits + other_hits if layout == "data" else min(num_hits, other_hits)) > 0


def compare(found: list[Any], expected: list[Any], layout: str) -> None:
    for each in found:
        if layout != "tensor":
            assert each == expected, layout
            continue
        for row, their_row in zip(each, expected, strict=True):
            for (ids, logprobs), (their_ids, their_logprobs) in zip(row, their_row, strict=True):
                assert ids == their_ids
                assert logprobs == pytest.approx(their_logprobs, abs=1e-4)


@pytest.mark.matrix
def test_states_on_two_ranks_match_one_rank(tmp_path: Path) -> None:
    check(["lfm2"], tmp_path, ["pipeline", "tensor"])


@pytest.mark.stress
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("lfm2", ["data"]),
        ("lfm2_moe", [*LAYOUTS]),
        ("lfm3", [*LAYOUTS]),
        ("qwen3_5", [*LAYOUTS]),
        ("nemotron", [*LAYOUTS]),
    ],
)
def test_other_states_on_two_ranks_match_one_rank(name: str, layouts: list[str], tmp_path: Path) -> None:
    check([name], tmp_path, layouts)
