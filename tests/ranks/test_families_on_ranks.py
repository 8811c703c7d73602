"""Families whose layers are more than Llama's, on two ranks that share memory: tensor-parallel answers are one rank's
bit for bit, or to 1e-4 in models without leaves; those of two stages bit for bit, also in bfloat16. One launch does
all, because starting ranks takes seconds.
"""

from pathlib import Path
from typing import Any

import pytest
import ranks
from dense_checkpoints import LIKE_OTHERS
from expert_checkpoints import CASES as EXPERT_CASES
from expert_checkpoints import expert_folder
from family_checkpoints import ALL_CASES, family_folder
from reference_models import random_prompt

from spmd_worker import LLM, SamplingParams
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks.leaves import num_leaves

PROMPTS = [random_prompt(length, seed=5, vocab_size=96) for length in (2, 17, 44)]
SETTINGS = {"num_blocks": 60, "max_model_len": 80, "dtype": "float32"}
LAYOUTS = {"tensor": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}
IN_TURNS = (("tensor",), ("pipeline",))

ANSWERS = """
import json, os, sys
from pathlib import Path
from spmd_worker import LLM, SamplingParams

job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
answers = {}
for name, folder in job["folders"].items():
    for layout, sizes in job["layouts"][name].items():
        with LLM(folder, **sizes, **job["settings"]) as llm:
            outputs = llm.generate(job["prompts"], params, use_tqdm=False)
        answers[f"{name} {layout}"] = [
            [each.outputs[0].token_ids, [entry.logprob for step in each.outputs[0].logprobs for entry in step.values()]]
            for each in outputs
        ]
(out / f"{os.environ['RANK']}.json").write_text(json.dumps(answers))
"""


def folder_of(name: str) -> Path:
    return expert_folder(name) if name in EXPERT_CASES else family_folder(name)


def one_rank(name: str, dtype: str) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    with LLM(folder_of(name), **{**SETTINGS, "dtype": dtype}) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [
        [each.outputs[0].token_ids, [entry.logprob for step in each.outputs[0].logprobs for entry in step.values()]]
        for each in outputs
    ]


def check(names: dict[str, tuple[str, ...]], tmp_path: Path, dtype: str = "float32") -> None:
    """Families in those layouts; in bfloat16 ranks' sums of parts are others than one rank's."""
    folders = {name: str(folder_of(name)) for name in names}
    layouts = {name: {layout: LAYOUTS[layout] for layout in chosen} for name, chosen in names.items()}
    job = {"folders": folders, "prompts": PROMPTS, "settings": {**SETTINGS, "dtype": dtype}, "layouts": layouts}
    first, second = ranks.reports_of_job(ANSWERS, 2, tmp_path, job)
    assert first == second
    for name, chosen in names.items():
        expected = one_rank(name, dtype)
        assert "pipeline" not in chosen or first[f"{name} pipeline"] == expected, name
        if "tensor" not in chosen:
            continue
        if num_leaves(read_model_files(folder_of(name)).model_config, 2) == 2:
            assert first[f"{name} tensor"] == expected, name
            continue
        for (ids, logprobs), (their_ids, their_logprobs) in zip(first[f"{name} tensor"], expected, strict=True):
            assert ids == their_ids, name
            assert logprobs == pytest.approx(their_logprobs, abs=1e-4), name


@pytest.mark.parametrize(
    "is_complete", [pytest.param(False, marks=pytest.mark.matrix), pytest.param(True, marks=pytest.mark.stress)]
)
def test_families_with_each_layer_kind_match_one_rank(is_complete: bool, tmp_path: Path):
    """A third of the families take turns in the layouts, and all have both in the stress tier. Stages and shards in
    threads have all of them in test_families.py.
    """
    names = [name for name in ALL_CASES if name not in LIKE_OTHERS]
    if is_complete:
        check(dict.fromkeys(names, tuple(LAYOUTS)), tmp_path)
    else:
        check({name: IN_TURNS[number % 2] for number, name in enumerate(names[::3])}, tmp_path)


@pytest.mark.stress
def test_families_sharing_layer_kinds_match_one_rank(tmp_path: Path):
    check(dict.fromkeys(LIKE_OTHERS, tuple(LAYOUTS)), tmp_path)


@pytest.mark.stress
def test_families_with_experts_match_one_rank(tmp_path: Path):
    check(dict.fromkeys(EXPERT_CASES, tuple(LAYOUTS)), tmp_path)


@pytest.mark.stress
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_two_bfloat16_stages_match_one_bit_for_bit(kind: str, tmp_path: Path):
    check(dict.fromkeys(ALL_CASES if kind == "dense" else EXPERT_CASES, ("pipeline",)), tmp_path, "bfloat16")
