"""`lora_merge`: the weights are those that PEFT's `merge_and_unload` makes of the adapter, rounded once."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import family_folder
from json_files import edit
from our_model import load_model
from peft import PeftModel
from peft_adapters import write_adapter
from reference_models import checkpoint_folder, open_reference
from run_folder import made_once
from safetensors.torch import load_file, save_file

from spmd_worker.base.errors import AdapterError
from spmd_worker.model.adapters import merge
from spmd_worker.model.decoder import DecoderForCausalLM

PATTERNS = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"layers.1.mlp.up_proj": 5}}
SOME = {"target_modules": ["q_proj", "o_proj", "up_proj", "down_proj", "lm_head"]}
TIED = {"target_modules": ["lm_head"]}
CASES: dict[str, tuple[Callable[[], Path], dict[str, Any]]] = {
    "llama, patterns, head": (lambda: checkpoint_folder("llama3"), {"lora_alpha": 16, **PATTERNS, **SOME}),
    "gpt2, transposed and fused": (lambda: family_folder("gpt2"), {"use_rslora": True, "fan_in_fan_out": True}),
    "phi3, fused": (lambda: family_folder("phi3"), {"r": 20, "target_modules": ["qkv_proj", "gate_up_proj"]}),
}


def adapter_of(model: Path, case: str, config: dict[str, Any]) -> Path:
    """The adapter of a case, written once a run."""
    return made_once(
        f"merged {case}", lambda folder: write_adapter(open_reference(model), folder, tuple(config.items()))
    )


def weights_of(model: DecoderForCausalLM) -> dict[str, torch.Tensor]:
    with model.as_checkpoint() as view:
        return {name: each.detach().clone() for name, each in view.named_parameters()}


@pytest.mark.guarantee("lora_merge makes the weights of PEFT's merge_and_unload", is_control_inside=True)
@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_those_of_peft(case: str, monkeypatch: pytest.MonkeyPatch):
    folder_of, config = CASES[case]
    folder = folder_of()
    adapter = adapter_of(folder, case, config)
    expected = PeftModel.from_pretrained(open_reference(folder), adapter).merge_and_unload().state_dict()
    plain, ours = weights_of(load_model(folder)), weights_of(load_model(folder, lora_merge=adapter))
    assert {name for name in ours if not torch.equal(ours[name], plain[name])} == {
        name for name in expected if name in plain and (expected[name] - plain[name]).abs().max() > 1e-3
    }
    for name, values in ours.items():
        torch.testing.assert_close(values, expected[name], rtol=0, atol=1e-5)
    rounded = weights_of(load_model(folder, dtype="bfloat16", lora_merge=adapter))
    assert all(torch.equal(rounded[name], values.bfloat16()) for name, values in ours.items())
    monkeypatch.setattr(merge, "scaled", lambda module: module.b.float())
    unscaled = weights_of(load_model(folder, lora_merge=adapter))
    assert max(float((unscaled[name] - expected[name]).abs().max()) for name in ours) > 1e-3, "negative control"


def rewritten(adapter: Path, folder: Path, config: dict[str, Any], **tensors: torch.Tensor | None) -> Path:
    """The adapter with other values in its files; None leaves a tensor out."""
    shutil.copytree(adapter, folder)
    edit(folder / "adapter_config.json", **config)
    changed = load_file(folder / "adapter_model.safetensors") | tensors
    kept = {name: each for name, each in changed.items() if each is not None}
    save_file(kept, folder / "adapter_model.safetensors")
    return folder


MODULE = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
FAULTS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None], str]] = {
    "sizes": (
        {},
        {MODULE.format(1, "A"): torch.zeros(4, 65), MODULE.format(1, "B"): torch.zeros(64, 4)},
        r"layers\.1\.self_attn\.q_proj: is \[64, 65\] \[outputs, inputs\], but .*q_proj\.weight has \[64, 64\]",
    ),
    "another model": (
        {},
        {MODULE.format(7, "A"): torch.zeros(4, 64), MODULE.format(7, "B"): torch.zeros(64, 4)},
        r"model\.layers\.7\.self_attn\.q_proj: the model has no such matrix",
    ),
    "saved": ({}, {"base_model.model.model.norm.weight": torch.ones(64)}, r"model\.norm\.weight: a saved module"),
    "transposed": ({"fan_in_fan_out": True}, {}, "fan_in_fan_out=true: the model's matrices are not transposed"),
    "half": ({}, {MODULE.format(0, "B"): None}, "has lora_A alone: the file is not complete"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_unfit_adapter_is_refused_with_its_module(fault: str, tmp_path: Path):
    config, tensors, words = FAULTS[fault]
    folder, case = checkpoint_folder("llama3"), "llama, patterns, head"
    adapter = rewritten(adapter_of(folder, case, CASES[case][1]), tmp_path / "adapter", config, **tensors)
    with pytest.raises(AdapterError, match=words) as raised:
        load_model(folder, lora_merge=adapter)
    assert str(adapter) in str(raised.value)


def test_adapter_of_tied_head_is_refused():
    folder = checkpoint_folder("qwen2_tied")
    adapter = adapter_of(folder, "tied head", TIED)
    with pytest.raises(AdapterError, match="lm_head: is tied to the embedding"):
        load_model(folder, lora_merge=adapter)
