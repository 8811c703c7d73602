"""Runs with `lora_merge`: layouts, int8, weight updates afterwards, what ranks agree on, a job that is resumed, a plan.

One launch of two ranks makes all engines, one after the other.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
from adapter_folders import write_adapter
from cut_jobs import Ended, end_after
from jobs_of_rows import answers_of_job
from json_files import edit
from safetensors.torch import load_file, save_file

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.schema import ModelOptions, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.engine.kv_connector import weights_digest
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (1, 9, 40)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=0)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "another on rank 1": {"tensor_parallel_size": 2},
    "cut short on rank 1": {"tensor_parallel_size": 2},
}
INT8_LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"quantization": "int8"},
    "tensor": {"quantization": "int8", "tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and an adapter for it."""
    from reference_models import checkpoint_folder  # slow to import, so not on ranks

    model = checkpoint_folder("llama3")
    return model, write_adapter(tmp_path_factory.mktemp("merged") / "adapter", model, 0, TARGETS)


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs, each.prompt_logprobs) for each in outputs]


def logprobs_of(found: list[Any]) -> list[float]:
    return [entry.logprob for row in found for steps in row[1:] for step in steps if step for entry in step.values()]


def on_rank(folder: Path, merged: Path, others: dict[str, str]) -> None:
    """Compare the layouts on one rank; rank 1 has other adapters where the layout's name says so."""
    found: dict[str, list[Any]] = {}
    with LLM(folder, num_blocks=32) as llm:
        plain = answers(llm)
    for name, arguments in LAYOUTS.items():
        adapter = others.get(name, str(merged)) if os.environ["RANK"] == "1" else str(merged)
        try:
            llm = LLM(folder, num_blocks=32, lora_merge=adapter, **arguments)
        except (RuntimeError, ValueError) as error:
            said = f"rank {os.environ['RANK']}, {name}: {type(error).__name__}: {error}".replace("\n", " ")
            os.write(1, f"{said}\n".encode())
            continue
        with llm:
            found[name] = answers(llm)
            if name == "pipeline":
                # A trainer's tensors are taken as they are; files are merged again.
                llm.load_weights(load_file(folder / "model.safetensors").items())
                assert answers(llm) == plain
                llm.collective_rpc("reload_weights")
                llm.reset_prefix_cache()
                assert answers(llm) == found[name]
    assert found["one"] == found["pipeline"] != plain
    assert max(map(abs, differences(found["tensor"], found["one"]))) < 1e-4


def int8_on_rank(folder: Path, merged: Path) -> None:
    """Compare layouts of quantised weights with a run whose files have the merged ones."""
    found = {}
    for name, arguments in INT8_LAYOUTS.items():
        with LLM(folder, num_blocks=32, lora_merge=str(merged), **arguments) as llm:
            found[name] = answers(llm)
    with LLM(folder, num_blocks=32, lora_merge=str(merged)) as llm:
        weights = llm.apply_model(lambda model: {name: each.clone() for name, each in model.named_parameters()})[0]
    copy = merged.parent / f"merged {os.environ['RANK']}"
    shutil.copytree(folder, copy)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with LLM(copy, num_blocks=32, quantization="int8") as llm:
        assert answers(llm) == found["one"] == found["tensor"], "quantised after the merge"


def differences(found: list[Any], expected: list[Any]) -> list[float]:
    pairs = zip(logprobs_of(found), logprobs_of(expected), strict=True)
    return [one - other for one, other in pairs]


@pytest.mark.guarantee("A merged adapter has equal answers in all layouts", is_control_inside=True)
def test_layouts_and_updates_of_merged_adapter(folders: tuple[Path, Path], tmp_path: Path):
    model, adapter = folders
    merged, another, cut = (tmp_path / name for name in ("adapter", "another", "cut"))
    for each in (merged, another, cut):
        shutil.copytree(adapter, each)
    edit(another / "adapter_config.json", lora_alpha=3)
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    others = {"another on rank 1": str(another), "cut short on rank 1": str(cut)}
    done = ranks.run_forked([__file__, model, merged, json.dumps(others)], 2, timeout_s=120).checked()
    for rank in (0, 1):
        assert f"rank {rank}, another on rank 1: RanksDisagreeError: " in done.stdout
        assert f"rank {rank}, cut short on rank 1: RankFailedError: rank 1 failed while reading the" in done.stdout
    assert "ranks were given different adapters: lora_merge is" in done.stdout
    assert f"{weights}: truncated: " in done.stdout


@pytest.mark.stress
def test_merged_weights_are_quantised_after_the_merge(folders: tuple[Path, Path], tmp_path: Path):
    model, adapter = folders
    shutil.copytree(adapter, tmp_path / "adapter")
    ranks.run_forked([__file__, model, tmp_path / "adapter"], 2, timeout_s=240).checked()


def test_resumed_job_needs_the_same_adapter(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, adapter = folders
    shutil.copytree(adapter, tmp_path / "adapter")
    rows = [{**prompt, "max_tokens": 4, "ignore_eos": True} for prompt in PROMPTS]

    def run(folder: Path) -> list[dict[str, Any]]:
        return answers_of_job(tmp_path, model, rows, options={"lora_merge": str(folder)})

    with monkeypatch.context() as patch:
        end_after(patch, 1)
        with pytest.raises(Ended):
            run(tmp_path / "adapter")
    moved = shutil.move(tmp_path / "adapter", tmp_path / "moved")
    config = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps({**config, "use_rslora": True}))
    with pytest.raises(ConfigError, match=r'^model\.lora_merge is "[0-9a-f]{16}", and "'):
        run(moved)
    (moved / "adapter_config.json").write_text(json.dumps(config))
    manifest = json.loads((tmp_path / "out.jsonl.run" / "manifest.json").read_text())
    assert "adapter is merged into the weights for all rows: answers have other bits" in manifest["merged_adapter"]
    assert all(row["error"] is None for row in run(moved))


def test_plan_says_that_bits_are_others(folders: tuple[Path, Path]):
    options = ModelOptions(path=str(folders[0]), lora_merge="/a/sql")
    text = describe_plan(make_plan(resolve_run(RunConfig(model=options, device="cpu"), "cpu")))
    assert "adapter    /a/sql is merged into the weights for all rows: answers have other bits than those of" in text


def test_blocks_outside_depend_on_merged_contents(folders: tuple[Path, Path], tmp_path: Path):
    """A connector's blocks outlive the run, and the adapter's folder may have other contents by then."""
    model, adapter = folders
    config = json.loads((adapter / "adapter_config.json").read_text())

    def digest_with(folder: Path, **changes: Any) -> str:
        shutil.copytree(adapter, folder, dirs_exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        options = ModelOptions(path=str(model), lora_merge=str(folder))
        return weights_digest(resolve_run(RunConfig(model=options, device="cpu"), "cpu"))

    plain = weights_digest(resolve_run(RunConfig(model=ModelOptions(path=str(model)), device="cpu"), "cpu"))
    merged = digest_with(tmp_path / "one")
    assert merged == digest_with(tmp_path / "two")
    assert len({plain, merged, digest_with(tmp_path / "one", lora_alpha=9)}) == 3


if __name__ == "__main__":
    if len(sys.argv) > 3:
        on_rank(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        int8_on_rank(Path(sys.argv[1]), Path(sys.argv[2]))
