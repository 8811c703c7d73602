"""FP8 on two ranks: every rank has the same answers, near those of one rank; updates leave what a fresh engine has."""

from pathlib import Path
from typing import Any

import pytest
import ranks
from quantised_files import quantise
from reference_models import CHECKPOINTS, checkpoint_folder, mixed_prompts, write_checkpoint

SCRIPT = """
import json, os, sys
from pathlib import Path
from fp8_device import FP8
from safetensors.torch import load_file
from spmd_worker import LLM, SamplingParams

job, rank = json.loads(Path(sys.argv[1]).read_text()), int(os.environ["RANK"])
params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
other = list(load_file(Path(job["other"], "model.safetensors")).items())

def answer(llm):
    outputs = llm.generate(job["prompts"], params, use_tqdm=False)
    return [[each.logprob for entry in output.prompt_logprobs[1:] for each in entry.values()] for output in outputs]

found = {}
for name, folder, size in job["engines"]:
    with LLM(folder, tensor_parallel_size=size, dtype="float32", num_blocks=60, **FP8) as llm:
        found[name] = answer(llm)
        llm.apply_model(lambda model: [each.sum().item() for each in model.parameters()])
        found[f"{name}, looked at"] = answer(llm)
        if name.startswith("plain"):
            llm.update_weights(other)
            found[f"{name}, updated"] = answer(llm)
Path(sys.argv[2], f"{rank}.json").write_text(json.dumps(found))
"""


def furthest(first: list[list[float]], second: list[list[float]]) -> float:
    """Largest difference of two log-probabilities."""
    pairs = [pair for rows in zip(first, second, strict=True) for pair in zip(*rows, strict=True)]
    return max(abs(one - other) for one, other in pairs)


@pytest.mark.matrix
def test_fp8_on_two_ranks_is_near_that_of_one(tmp_path: Path):
    folder = checkpoint_folder("llama_biased")
    other = write_checkpoint(tmp_path / "other", CHECKPOINTS["llama_biased"], seed=1)
    stored = quantise(folder, tmp_path, "float_row")[0]
    kinds: list[tuple[str, Path]] = [("plain", folder), ("fresh", other), ("stored", stored)]
    engines = [(f"{name} {size}", str(each), size) for name, each in kinds for size in (1, 2)]
    job: dict[str, Any] = {"engines": engines, "prompts": mixed_prompts(4, 30, seed=9), "other": str(other)}
    found, second = ranks.reports_of_job(SCRIPT, 2, tmp_path, job, timeout_s=300)
    for name, _ in kinds:
        # With one rank an engine, each answers its own prompts, which are the same.
        assert found[f"{name} 2"] == second[f"{name} 2"]
        assert 0 < furthest(found[f"{name} 1"], found[f"{name} 2"]) < 0.2
        for size in (1, 2):
            assert found[f"{name} {size}, looked at"] == found[f"{name} {size}"], "showing weights changes none"
    for size in (1, 2):
        assert found[f"plain {size}, updated"] == found[f"fresh {size}"]
        # Controls: other weights have other answers, and numbers of a file are not those that are quantised anew.
        assert furthest(found[f"plain {size}"], found[f"fresh {size}"]) > 0.2
