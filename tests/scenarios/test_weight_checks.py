"""`LLM.check_weights` and `LLM.tensor_digests`: weights as they are held, compared with a fresh load's and with those
of another layout; and `LLM.numerical_policy`, which says whether two engines compute the same bits.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
from adapter_folders import write_adapter
from latent_checkpoints import latent_folder
from ranks import REPOSITORY
from reference_models import checkpoint_folder
from torch import nn

from spmd_worker import LLM
from spmd_worker.base.errors import CheckpointError, WeightMismatchError
from spmd_worker.base.numerical_policy import NumericalPolicy
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.worker import weight_checks

FOLDERS: dict[str, Callable[[], Path]] = {
    "llama": lambda: checkpoint_folder("llama3"),
    "tied": lambda: REPOSITORY / "scripts" / "demo" / "model",
    "latents": lambda: latent_folder("deepseek_v3"),
}
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "num_blocks": 20}
NAME = "model.layers.1.mlp.down_proj.weight"


def new_llm(kind: str, **settings: Any) -> LLM:
    return LLM(FOLDERS[kind](), **{**SETTINGS, **settings})


def change(model: nn.Module) -> None:
    model.get_parameter(NAME)[3, 5] += 0.5


@pytest.mark.guarantee("LLM.check_weights finds a weight that is not the files'")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"quantization": "int8"}),
        ("tied", {"dtype": "bfloat16"}),
        pytest.param("latents", {}, marks=pytest.mark.stress),
    ],
)
def test_changed_weight_is_named(kind: str, settings: dict[str, Any]) -> None:
    name = NAME if kind != "latents" else NAME.replace("layers.1", "layers.0")
    with new_llm(kind, **settings) as llm:
        llm.check_weights()
        before = llm.tensor_digests()
        llm.apply_model(lambda model: model.get_parameter(name)[3].add_(0.5))
        with pytest.raises(
            WeightMismatchError, match=rf"^rank 0: {name} \(complete, in .*\) differs at \[3, 0\]: \S+ is"
        ):
            llm.check_weights()
        after = llm.tensor_digests()
        assert [each for each in before if before[each] != after[each]] == [name]
        llm.collective_rpc("reload_weights")
        llm.check_weights(FOLDERS[kind]())
        assert llm.tensor_digests() == before


@pytest.mark.control("LLM.check_weights finds a weight that is not the files'")
def test_skipped_comparison_of_weights_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_checks, "difference_from_files", lambda *arguments: "")
    with new_llm("llama") as llm:
        llm.apply_model(change)
        llm.check_weights()


def test_merged_adapter_is_merged_again(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", FOLDERS["llama"](), 0, ("q_proj", "down_proj"))
    with new_llm("llama") as llm:
        plain = llm.tensor_digests()
    with new_llm("llama", lora_merge=str(adapter), dtype="bfloat16") as llm:
        llm.check_weights()
    with new_llm("llama", lora_merge=str(adapter)) as llm:
        llm.check_weights()
        merged = llm.tensor_digests()
        llm.save_checkpoint(tmp_path / "saved")
    changed = [name for name in plain if plain[name] != merged[name]]
    assert changed == [name for name in plain if "q_proj.weight" in name or "down_proj.weight" in name]
    with new_llm("llama") as llm:
        llm.collective_rpc("reload_weights", args=(str(tmp_path / "saved"),))
        assert llm.tensor_digests() == merged
        with pytest.raises(WeightMismatchError, match=rf"^rank 0: {changed[0]} "):
            llm.check_weights()


def test_other_files_are_refused(tmp_path: Path) -> None:
    with new_llm("llama") as llm:
        with pytest.raises(CheckpointError, match=r"^rank 0: .*"):
            llm.check_weights(FOLDERS["latents"]())
        llm.save_sharded_state(tmp_path / "state")
        with pytest.raises(CheckpointError, match=r"^rank 0: .*holds a sharded state, and weights are compared by"):
            llm.check_weights(tmp_path / "state")
        llm.check_weights()


@pytest.mark.guarantee("Engines of equal numerical policies compute equal bits")
def test_policy_changes_with_what_decides_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dtype, kernels, leaves, quantisation and instruction set; not with what does not."""
    kinds: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"device_backend": "torch"}, {"max_leaves": 2}]
    kinds += [{"quantization": "int8"}, {"max_num_seqs": 3, "block_size": 32, "num_blocks": 40}]
    policies = []
    for kind in kinds:
        with new_llm("tied", **{"dtype": "float32", **kind}) as llm:
            policies.append(llm.numerical_policy())
    first, *others, same = policies
    assert len({each.digest for each in policies}) == len(policies) - 1
    assert same == first
    assert NumericalPolicy.from_dict(json.loads(json.dumps(first.as_dict()))) == first
    regions = [first.difference(each) for each in others]
    names = ["device", "column-parallel product", "row-parallel product", "sum over ranks"]
    assert [str(each).split(":")[0] for each in regions] == names
    right = CpuKernels.numerics

    def of_another_set(self: CpuKernels, dtype: Any) -> Any:
        regions = right(self, dtype)
        return regions | {"norm": type(regions["norm"])("native of another set", regions["norm"].version)}

    monkeypatch.setattr(CpuKernels, "numerics", of_another_set)
    with new_llm("tied", dtype="float32") as llm:
        assert str(first.difference(llm.numerical_policy())).startswith("norm: native ")
    changed = first.as_dict() | {"digest": "0" * 32}
    with pytest.raises(ValueError, match=r"^the policy has the digest 0000"):
        NumericalPolicy.from_dict(changed)


SCRIPT = """
import json, os, sys
from pathlib import Path
from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import SpmdError

folder, out, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3].split()
prompts = [{"prompt_token_ids": [5 + row, 6, 7]} for row in range(4)]
params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
rank, found = int(os.environ["RANK"]), {}
layouts = {"tp": {"tensor_parallel_size": 2}, "pp": {"pipeline_parallel_size": 2}, "dp": {"data_parallel_size": 2}}
for name in names:
    with LLM(folder, device="cpu", max_model_len=64, num_blocks=20, verify_steps=1, **layouts[name]) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        found[name] = [llm.numerical_policy().digest, llm.tensor_digests(), llm.llm_engine.counters.num_verified_steps]
        llm.check_weights()
        if name != "tp":
            continue

        def change(model):
            if rank == 1:
                model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5] += 0.5

        def change_norm(model):
            if rank == 1:
                model.get_parameter("model.norm.weight")[5] += 0.5

        for check, what in ((llm.check_weights, change), (llm.tensor_digests, change_norm)):
            llm.apply_model(what)
            try:
                check()
            except SpmdError as error:
                found[check.__name__] = f"{type(error).__name__}: {error}"
(out / f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.matrix
@pytest.mark.guarantee("Digests of weights are the same on any layout")
@pytest.mark.guarantee("Engines of equal numerical policies compute equal bits")
@pytest.mark.parametrize("layouts", ["tp", pytest.param("tp pp dp", marks=pytest.mark.stress)])
def test_layouts_have_the_same_digests(tmp_path: Path, layouts: str) -> None:
    ranks.run_ranks(SCRIPT, 2, timeout_s=240, arguments=[str(FOLDERS["tied"]()), tmp_path, layouts]).checked()
    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    with new_llm("tied") as llm:
        expected = [llm.numerical_policy().digest, llm.tensor_digests()]
    for found in by_rank:
        for name in layouts.split():
            assert found[name][:2] == expected, name
            assert found[name][2] >= 4
        assert found["check_weights"].startswith(
            "WeightMismatchError: rank 1: model.layers.1.mlp.up_proj.weight (rows "
        )
        assert found["tensor_digests"].startswith(
            "CheckpointError: model.norm.weight (complete) is not the same on ranks"
        )
