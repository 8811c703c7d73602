"""Faults of transformers that comparisons go round: each is shown, and that the runtime does not have it."""

import shutil
from pathlib import Path

import pytest
import torch
from hybrid_runs import run_rows
from json_files import edit
from mamba_checkpoints import mamba_folder, mamba_reference, open_mamba
from our_model import load_model
from reference_models import random_prompt, relative_error
from safetensors.torch import load_file, save_file

TOLERANCE = 1e-4
ROW = random_prompt(70, seed=7, vocab_size=96)


@pytest.mark.stress
@torch.no_grad()
def test_nemotron_bounds_steps_in_prompts_alone(tmp_path: Path):
    """By `time_step_min`, which its decode does not read: only steps this small show it."""
    folder = tmp_path / "small steps"
    shutil.copytree(mamba_folder("nemotron"), folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("dt_bias"):
            tensor.sub_(8.0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    free = open_mamba(folder)(torch.tensor([ROW]), use_cache=False).logits[0]
    edit(folder / "config.json", time_step_min=0.001)
    bounded = open_mamba(folder)(torch.tensor([ROW]), use_cache=False).logits[0]
    assert relative_error(bounded, free) > 10 * TOLERANCE
    assert relative_error(run_rows([load_model(folder)], [ROW])[0][0], free) < TOLERANCE


@pytest.mark.stress
@torch.no_grad()
def test_bamba_decodes_at_position_zero_unless_told():
    model, prompt, last = mamba_reference("bamba"), torch.tensor([ROW[:-1]]), torch.tensor([ROW[-1:]])
    whole = model(torch.tensor([ROW]), use_cache=False).logits[0, -1:]
    given = {"position_ids": torch.tensor([[len(ROW) - 1]])}
    silent, told = (
        model(last, past_key_values=model(prompt, use_cache=True).past_key_values, **more).logits[0]
        for more in ({}, given)
    )
    assert relative_error(told, whole) < TOLERANCE < 0.01 < relative_error(silent, whole)
    ours = run_rows([load_model(mamba_folder("bamba"))], [ROW], 1)[0][0]
    assert relative_error(ours[-1:], whole) < TOLERANCE
