"""Models that several ranks save together: one checkpoint of all slices, a state of every rank, all or nothing.

One launch does all, because starting ranks takes seconds.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from expert_checkpoints import expert_folder
from family_checkpoints import family_folder
from forked_workers import forked
from safetensors.torch import load_file
from test_weight_updates import MODEL, TP, answers, open_llm

from spmd_worker.base.errors import WorkerError

EXPERT_PARALLEL = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
STAGES, REPLICAS = {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}
CASES: dict[str, tuple[Callable[[str], Path], str, dict[str, Any]]] = {
    "fused heads": (family_folder, "gpt_neox", TP),
    "transposed": (family_folder, "gpt2", TP),
    "tied": (lambda _: MODEL, "", TP),
    "tied in stages": (lambda _: MODEL, "", STAGES),
    "padded head": (family_folder, "phi", TP),
    "experts": (expert_folder, "qwen2_moe", EXPERT_PARALLEL),
    "stacked experts": (expert_folder, "gpt_oss", TP),
    "replicas": (lambda _: MODEL, "", REPLICAS),
}

ON_EACH_RANK = """
import json, os, sys
from pathlib import Path
import torch
from file_limit import file_limit
from spmd_worker import LLM, SamplingParams

job, out, rank = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), int(os.environ["RANK"])
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
prompts, said = [{"prompt_token_ids": [3, 5, 7, 11, 13]}], {}

def answers(llm):
    outputs = llm.generate(prompts, params, use_tqdm=False)[0].outputs[0]
    return [outputs.token_ids, [next(iter(each.values())).logprob for each in outputs.logprobs]]

def error_of(call, *args):
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

for name, (folder, sizes) in job.items():
    settings = {**sizes, "dtype": "float32", "device": "cpu", "num_blocks": 32, "max_num_seqs": 4}
    paths = {kind: out / name / kind for kind in ("checkpoint", "streamed", "sharded_state")}
    with LLM(folder, **settings) as llm:
        before = answers(llm)
        if name == "tied":
            for failing in range(2):
                with file_limit(100_000 if rank == failing else 2**40):
                    said[f"full disk of rank {failing}"] = error_of(llm.save_sharded_state, out / "full" / "state")
            with file_limit(100_000 if rank == 0 else 2**40):
                said["full disk of the writer"] = error_of(llm.save_checkpoint, out / "full" / "checkpoint")
            said["other paths"] = error_of(llm.save_checkpoint, out / f"full{rank}")
            said["left"] = sorted(path.name for path in (out / "full").iterdir())
        for kind, path in paths.items():
            getattr(llm, f"save_{kind}")(path)
    for kind, load_format in {"sharded_state": "sharded_state", "streamed": "auto"}.items():
        if kind == "sharded_state" or name == "experts":
            with LLM(paths[kind], load_format=load_format, **settings) as llm:
                assert answers(llm) == before, (name, kind)
                if kind == "sharded_state":
                    llm.sleep(level=2)
                    llm.wake_up()
                    damaged = paths[kind] / "model-rank-1-part-0.safetensors"
                    if damaged.exists():
                        content = damaged.read_bytes()
                        if rank == 1:
                            damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
                        said[f"{name} damaged"] = error_of(llm.collective_rpc, "reload_weights")
                        said[f"{name} afterwards"] = error_of(answers, llm)
                        if rank == 1:
                            damaged.write_bytes(content)
                    llm.collective_rpc("reload_weights")
                    assert answers(llm) == before, (name, "reloaded")
(out / f"{rank}.json").write_text(json.dumps(said))
"""


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def check(names: list[str], tmp_path: Path) -> list[dict[str, Any]]:
    """What the ranks have said."""
    chosen = {name: CASES[name] for name in names}
    folders = {name: folder(case) for name, (folder, case, _) in chosen.items()}
    job = {name: [str(folders[name]), sizes] for name, (_, _, sizes) in chosen.items()}
    (tmp_path / "job.json").write_text(json.dumps(job))
    ranks.run_ranks(ON_EACH_RANK, 2, timeout_s=240, arguments=[tmp_path / "job.json", tmp_path]).checked()
    for name, folder in folders.items():
        expected = tensors(folder)
        for kind in ("checkpoint", "streamed"):
            saved = tensors(tmp_path / name / kind)
            assert saved.keys() == expected.keys(), (name, kind)
            differing = [each for each in saved if not torch.equal(saved[each], expected[each].float())]
            assert not differing, (name, kind, differing)
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]


def test_ranks_save_one_checkpoint_and_own_states(tmp_path: Path):
    first, second = check(["tied", "experts"], tmp_path)
    nothing, large = "nothing was saved to", "File too large"
    for failing, (own, other) in enumerate([(first, second), (second, first)]):
        key = f"full disk of rank {failing}"
        assert own[key].startswith(f"SaveError: {nothing}")
        assert large in own[key]
        assert other[key].startswith(f"SaveError: rank {failing}: {nothing}")
    assert large in first["full disk of the writer"]
    assert second["full disk of the writer"].startswith(f"SaveError: rank 0: {nothing}")
    assert "RanksDisagreeError" in first["other paths"]
    assert first["left"] == second["left"] == []
    for name in ("tied", "experts"):
        # Reloading is not a collective: the ranks compare before they compute.
        assert first[f"{name} damaged"] is None
        assert "it is damaged, copy it again" in second[f"{name} damaged"]
        assert first[f"{name} afterwards"].startswith("RankFailedError: rank 1 failed before generate: MissingWeights")
        assert second[f"{name} afterwards"].startswith("MissingWeightsError")


@pytest.mark.gate("fused heads")
@pytest.mark.parametrize(
    "names",
    [
        ["fused heads", "tied in stages", "stacked experts"],
        ["transposed", "padded head", "replicas"],
    ],
    ids=lambda names: names[0],
)
def test_other_layouts_save_one_checkpoint(tmp_path: Path, names: list[str]):
    check(names, tmp_path)


def test_worker_processes_save_together(tmp_path: Path):
    with forked(), open_llm(**STAGES) as llm:
        before = answers(llm)
        llm.llm_engine.model_executor.save_sharded_state(path=tmp_path / "state", max_size="1MB")
        llm.save_streamed(tmp_path / "streamed")
        with pytest.raises(WorkerError, match="holds files that this program has not saved"):
            llm.save_checkpoint(MODEL)
    saved, expected = tensors(tmp_path / "streamed"), tensors(MODEL)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    names = sorted(path.name for path in (tmp_path / "state").glob("*.safetensors"))
    assert names[0] == "model-pp-0-tp-0-part-0.safetensors"
    assert len(names) > 2
    with forked(), open_llm(tmp_path / "state", load_format="sharded_state", **STAGES) as llm:
        assert answers(llm) == before
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")
        assert answers(llm) == before
