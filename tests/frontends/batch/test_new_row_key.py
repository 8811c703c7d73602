"""A new row key is edits of two files: its field in the parameters, after which every rank has it, and its use in the
sampler.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import ranks
from ranks import REPOSITORY

EDITS = {
    "spmd_worker/replica/sequence/sampling_params.py": [
        ("    top_k: int = 0\n", "    epsilon_cutoff: float = 0.0\n"),
        ("        return self.top_k > 0 or", " self.epsilon_cutoff > 0.0 or"),
    ],
    "spmd_worker/ops/sampling/filters.py": [
        (
            "    factors, below, top_k, top_p = numbers or send(filter_numbers(samplings), logits.device)\n",
            "    for row, each in zip(logits, samplings):\n"
            "        probabilities = (row / each.temperature).softmax(-1)\n"
            "        is_low = probabilities < min(each.epsilon_cutoff, probabilities.max())\n"
            "        row.masked_fill_(is_low, -math.inf)\n",
        ),
    ],
}
"""Texts in the tree's files, each with the text inserted after it."""
ROW = {"prompt": "copy a b c d e f g =", "max_tokens": 12, "seed": 1}
ROWS = {
    "greedy": {"temperature": 0},
    "hot": {"temperature": 5},
    "hot and cut": {"temperature": 5, "epsilon_cutoff": 1.0},
    "unknown": {"epsilon_cut": 1.0},
}
"""Values of each row. A cutoff of 1 leaves only the argmax, at any temperature."""


@pytest.mark.stress
def test_new_row_key_is_edits_of_two_files(tmp_path: Path):
    shutil.copytree(REPOSITORY / "spmd_worker", tmp_path / "spmd_worker", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kv_cache", "conf", "launch.py"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    for name, edits in EDITS.items():
        text = (tmp_path / name).read_text(encoding="utf-8")
        for line, inserted in edits:
            assert text.count(line) == 1, line
            text = text.replace(line, line + inserted)
        (tmp_path / name).write_text(text, encoding="utf-8")
    lines = [json.dumps({"custom_id": name, **ROW, **values}) for name, values in ROWS.items()]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    keys = [f"model.path={REPOSITORY / 'scripts' / 'demo' / 'model'}", "job.input=rows.jsonl", "job.output=out.jsonl"]
    command = [sys.executable, "-c", "import sys, launch; sys.exit(launch.main())", *keys, "device=cpu"]
    ranks.run_command(command, timeout_s=240, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path).checked()
    answers = {row["custom_id"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert answers["hot and cut"]["outputs"] == answers["greedy"]["outputs"] != answers["hot"]["outputs"]
    assert answers["unknown"]["error"]["code"] == "unknown_key"
