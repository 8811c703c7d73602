"""Rows that are pooled, on several ranks: stages and replicas give one rank's bits, shards its numbers, and ranks that
come to different vectors end.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
from pooling_models import change_of, changed_folder, pooling_folder
from reference_models import random_prompt
from safetensors import safe_open

from spmd_worker import LLM, PoolingParams

SHARED = random_prompt(40, 1)
PROMPTS = [SHARED, [17, 40, 5], [*SHARED[:35], 9, 33], random_prompt(60, 2)]
SETTINGS: dict[str, Any] = {"num_blocks": 80, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
NAMES = ("mean", "labels", "tokens")
CHUNKED: dict[str, Any] = {"task": "token_embed", "late_chunking_params": {"chunk_size": 5}}

SCRIPT = """
import json, os, sys
from pathlib import Path
from spmd_worker import LLM, PoolingParams

job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
answers = {}
for name, folder in job["folders"].items():
    with LLM(folder, **job["layout"], **job["settings"]) as llm:
        outputs = llm.encode([{"prompt_token_ids": each} for each in job["prompts"]], use_tqdm=False)
        if "token_embed" in llm.supported_tasks:
            rows = [{"prompt_token_ids": each} for each in job["prompts"]]
            outputs += llm.encode(rows, pooling_task="token_embed", use_tqdm=False)
            outputs += llm.encode(rows, PoolingParams(**job["chunked"]), use_tqdm=False)
    answers[name] = [each.outputs.data for each in outputs]
(out / f"{os.environ['RANK']}.json").write_text(json.dumps(answers))
"""

BENT = """
import os
from spmd_worker.model.pooler import Pooler
own = Pooler.forward
def bent(self, pooled, **options):
    vector = own(self, pooled, **options)
    return vector * (1.0 + 2.0**-20) if os.environ["RANK"] == "1" else vector
Pooler.forward = bent
"""


def run(
    tmp_path: Path, size: int, before: str = "", names: tuple[str, ...] = NAMES[:1], **layout: int
) -> ranks.CompletedRanks:
    job = {
        "folders": {name: str(pooling_folder(name)) for name in names},
        "prompts": PROMPTS,
        "settings": SETTINGS,
        "layout": layout,
        "chunked": CHUNKED,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    return ranks.run_ranks(before + SCRIPT, size, timeout_s=240, arguments=[tmp_path / "job.json", tmp_path])


def answers(tmp_path: Path, size: int) -> list[dict[str, list[list[float]]]]:
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[float]]]:
    found = {}
    for name in NAMES:
        with LLM(pooling_folder(name), device="cpu", **SETTINGS) as llm:
            rows = [{"prompt_token_ids": each} for each in PROMPTS]
            outputs = llm.encode(rows, use_tqdm=False)
            if "token_embed" in llm.supported_tasks:
                outputs += llm.encode(rows, pooling_task="token_embed", use_tqdm=False)
                outputs += llm.encode(rows, PoolingParams(**CHUNKED), use_tqdm=False)
        found[name] = [output.outputs.data for output in outputs]
    return found


@pytest.mark.gate("pipeline_parallel_size", "tensor_parallel_size")
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size"])
def test_vectors_of_two_ranks_match_one_rank(tmp_path: Path, alone: dict[str, list[list[float]]], layout: str) -> None:
    names = NAMES if layout == "pipeline_parallel_size" else NAMES[:1]
    run(tmp_path, 2, names=names, **{layout: 2}).checked()
    first, second = answers(tmp_path, 2)
    assert first == second
    if layout != "tensor_parallel_size":
        assert first == {name: alone[name] for name in names}
    for name in names:
        for ours, theirs in zip(first[name], alone[name], strict=True):
            assert np.array(ours) == pytest.approx(np.array(theirs), abs=1e-5)


UPDATED = """
import json, os, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from spmd_worker import LLM

job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
options = {"classifier_from_token": ["n", "y"], **job["layout"], **job["settings"]}
rows = [{"prompt_token_ids": each} for each in job["prompts"]]

def scores(llm):
    return [each.outputs.data for each in llm.encode(rows, use_tqdm=False)]

def change(model):
    for name, parameter in model.named_parameters():
        parameter.data.mul_(job["factors"][name])

with LLM(job["changed"], **options) as llm:
    found = {"new": scores(llm)}
with LLM(job["folder"], **options) as llm:
    found["old"] = scores(llm)
    llm.update_weights(load_file(Path(job["changed"], "model.safetensors")).items())
    found["updated"] = scores(llm)
    llm.collective_rpc("reload_weights")
    found["reloaded"] = scores(llm)
    llm.apply_model(change)
    llm.reset_prefix_cache()
    found["in place"] = scores(llm)
(out / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
"""


@pytest.mark.gate("pipeline_parallel_size")
@pytest.mark.parametrize(
    "layout", ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.matrix)]
)
def test_updated_two_token_classifier_reaches_every_rank(tmp_path: Path, layout: str) -> None:
    """Both rows are of one rank's part of the embedding, which alone failed; the other had the rows besides its own."""
    folder = pooling_folder("causal")
    with safe_open(folder / "model.safetensors", "pt") as file:
        factors = {name: change_of(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    factors["lm_head.weight"] = factors["model.embed_tokens.weight"]
    job = {
        "folder": str(folder),
        "changed": str(changed_folder("causal")),
        "factors": factors,
        "prompts": PROMPTS,
        "settings": SETTINGS,
        "layout": {layout: 2},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    ranks.run_ranks(UPDATED, 2, timeout_s=240, arguments=[tmp_path / "job.json", tmp_path]).checked()
    first, second = answers(tmp_path, 2)
    assert first == second
    assert first["new"] == first["updated"] == first["in place"] != first["old"]
    assert first["old"] == first["reloaded"]


@pytest.mark.stress
@pytest.mark.control("Vectors and scores: the row alone")
@pytest.mark.matrix
def test_vector_check_detects_ranks_that_differ(tmp_path: Path) -> None:
    """The control of what the ranks agree on."""
    done = run(tmp_path, 2, BENT, tensor_parallel_size=2)
    assert done.returncode != 0
    assert "sampled_token_ids" in done.output
