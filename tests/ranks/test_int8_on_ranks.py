"""int8: tokens, log-probabilities and updated weights are the same bits for every tensor-parallel size and in stages.

One launch of four ranks makes all engines, one after the other: of one rank, of two, of four, and of two stages.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from expert_checkpoints import expert_folder
from reference_models import CHECKPOINTS, checkpoint_folder, mixed_prompts, write_checkpoint
from safetensors.torch import load_file, save_file

from spmd_worker import SamplingParams

DEMO = Path(__file__).parents[2] / "scripts" / "demo" / "model"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
KINDS = [
    GREEDY,
    replace(GREEDY, logprobs=None, prompt_logprobs=None),
    replace(GREEDY, logprobs=None, prompt_logprobs=None, temperature=1.0, n=2, seed=5),
    replace(GREEDY, temperature=0.8, top_p=0.9, seed=7, prompt_logprobs=None),
    replace(GREEDY, temperature=1.3, seed=3, prompt_logprobs=None),
]
SETTINGS = {"num_blocks": 60, "max_model_len": 100, "max_num_batched_tokens": 48, "max_num_seqs": 8}
BIASED_LAYOUTS = ("one", "four")
LAYOUTS = {
    "one": {},
    "two": {"tensor_parallel_size": 2},
    "four": {"tensor_parallel_size": 4},
    "stages": {"pipeline_parallel_size": 2},
    "experts of two": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "experts of four": {"tensor_parallel_size": 4, "enable_expert_parallel": True, "expert_placement": "round_robin"},
}
FEW = (BIASED_LAYOUTS, ("one", "two", "stages"), ("one", "experts of four"))
ALL = (
    BIASED_LAYOUTS,
    ("one", "two", "four", "stages"),
    ("one", "stages", "experts of two", "experts of four"),
)
"""Layouts of a model with layers that fit no panels, one with layers that do, and one with experts."""

SCRIPT = """
import json, os, sys
from pathlib import Path
from plain_outputs import without_times
from safetensors.torch import load_file
from spmd_worker import LLM, SamplingParams
from spmd_worker.model.layers.linear import RowParallelLinear
from spmd_worker.worker.memory.estimate import weights_bytes

job, rank = json.loads(Path(sys.argv[1]).read_text()), int(os.environ["RANK"])
params = [SamplingParams(**each) for each in job["params"]]
other = list(load_file(Path(job["other"], "model.safetensors")).items())

def answer(llm):
    return [without_times(each) for each in llm.generate(job["prompts"], params, use_tqdm=False)]

def attempt(action):
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def bytes_of(worker):
    resolved, model = worker.resolved, worker.get_model()
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    own_rank = worker.environment.rank % worker.layout.world_size
    arguments = (resolved.model_config, resolved.layout, own_rank, resolved.dtype, "cpu")
    return [held, weights_bytes(*arguments, "int8"), weights_bytes(*arguments)]

weight = "model.layers.0.self_attn.o_proj.weight"

def doubled_on_one(model):
    model.get_parameter(weight).mul_(2 if rank == 1 else 1)

def run(folder, layout, **more):
    with LLM(folder, quantization="int8", **layout, **job["settings"], **more) as llm:
        found = {"answers": answer(llm), "bytes": llm.collective_rpc(bytes_of)[0]}
        if folder == job["folders"][0][0]:
            llm.apply_model(lambda model: [each.sum().item() for each in model.parameters()])
            found["looked at"] = answer(llm)
            if layout.get("tensor_parallel_size", 1) > 1:
                found["changed"] = attempt(lambda: llm.apply_model(lambda model: model.get_parameter(weight).mul_(2)))
                found["unchanged"] = attempt(lambda: answer(llm))
                attempt(lambda: llm.apply_model(doubled_on_one))
                llm.llm_engine.executor.driver_worker.model_runner.model.weights.update.rejected_calls.clear()
                found["uncounted"] = attempt(lambda: answer(llm))
                found["changed on one"] = attempt(lambda: llm.apply_model(doubled_on_one))
                found["not the same"] = [attempt(lambda: answer(llm)) for _ in range(2)]
            llm.update_weights(other)
            found["updated"] = answer(llm)
        return found

found = {}
for folder, dtype, names in job["folders"]:
    for name, layout in job["layouts"].items():
        if name not in names:
            continue
        found[f"{Path(folder).name} {name}"] = run(folder, layout, dtype=dtype)
found["failed"] = attempt(lambda: run(job["broken"], {"tensor_parallel_size": 4}, dtype="float32"))
fresh, dtype = job["other"], job["folders"][0][1]
found["fresh"] = run(fresh, {}, dtype=dtype)
RowParallelLinear._full_row_maxima = lambda self, maxima: maxima
found["control"] = run(job["folders"][1][0], {"tensor_parallel_size": 2}, dtype=job["folders"][1][1])
Path(sys.argv[2], f"{rank}.json").write_text(json.dumps(found))
"""


def broken_for_the_last_rank(folder: Path) -> Path:
    """A number that is none, where the last of four ranks alone reads it."""
    write_checkpoint(folder, CHECKPOINTS["llama_biased"])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][-1, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def run_all(tmp_path: Path, layouts: tuple[tuple[str, ...], ...]) -> tuple[list[dict[str, Any]], list[str]]:
    first = checkpoint_folder("llama_biased")
    kinds = (first, "float32"), (DEMO, "bfloat16"), (expert_folder("qwen2_moe"), "bfloat16")
    job = {
        "folders": [(str(folder), dtype, of) for (folder, dtype), of in zip(kinds, layouts, strict=True)],
        "other": str(write_checkpoint(tmp_path / "other", CHECKPOINTS["llama_biased"], seed=1)),
        "broken": str(broken_for_the_last_rank(tmp_path / "broken")),
        "layouts": LAYOUTS,
        # Every model has the first 96 ids.
        "prompts": [[3 + token_id % 93 for token_id in each] for each in mixed_prompts(5, 30, seed=9)],
        "params": [asdict(each) for each in KINDS],
        "settings": SETTINGS,
    }
    names = [Path(folder).name for folder, _, _ in job["folders"]]
    return ranks.reports_of_job(SCRIPT, 4, tmp_path, job, timeout_s=400), names


@pytest.mark.guarantee("int8: the same bits on any number of ranks", is_control_inside=True)
@pytest.mark.matrix
@pytest.mark.parametrize("chosen", [FEW, pytest.param(ALL, marks=pytest.mark.stress)], ids=["few", "all"])
def test_int8_layouts_match_one_rank_bit_for_bit(tmp_path: Path, chosen: tuple[tuple[str, ...], ...]):
    """Layouts are every tensor-parallel size, and stages; experts are complete on a rank."""
    by_rank, names = run_all(tmp_path, chosen)
    for name, layouts in zip(names, chosen, strict=True):
        expected = by_rank[0][f"{name} one"]
        for found in by_rank:
            for layout in layouts:
                assert found[f"{name} {layout}"]["answers"] == expected["answers"], (name, layout)
    first = names[0]
    for found in by_rank:
        for layout in BIASED_LAYOUTS:
            of = found[f"{first} {layout}"]
            assert of["looked at"] == of["answers"], "showing weights changes none"
            assert of["updated"] == by_rank[0]["fresh"]["answers"], "as if the engine had begun with them"
        four = found[f"{first} four"]
        assert "load_weights" in four["changed"], "ranks have parts of its rows"
        assert four["unchanged"] == four["answers"], "what all ranks refuse changes nothing"
        # Negative control: what is not counted nobody compares.
        assert four["uncounted"] == four["answers"]
        is_refused = isinstance(four["changed on one"], str)
        assert is_refused == (found is by_rank[1])
        # Until whole weights are loaded, which "updated" shows.
        assert all("RanksDisagreeError" in each and "apply_model rejected" in each for each in four["not the same"])
        # Ranks that have loaded do not wait for what another would exchange.
        assert "RankFailedError: rank 3 failed while loading the model" in found["failed"]
        for value in [each for name, each in found.items() if name != "failed"]:
            held, counted, plain = value["bytes"]
            assert held == counted < plain
    # Negative control: with the scales of each rank's share of a row the answers are others.
    assert by_rank[0]["control"]["answers"] != by_rank[0][f"{names[1]} one"]["answers"]
