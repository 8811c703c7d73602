"""Hybrids, latent caches and two shapes of layers in bfloat16, beside transformers in bfloat16 and in float32.

A distance is in bfloat16 roundings: 2^-9 of the spread of the logits, the most by which rounding changes a number near
it. It is the median over logits, because now and then a token goes to another expert.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bailing_checkpoints
import compressed_checkpoints
import conv_checkpoints
import delta_checkpoints
import expert_checkpoints
import kimi_checkpoints
import latent_checkpoints
import mamba_checkpoints
import pytest
import qwen4_checkpoints
import recent_checkpoints
import torch
from hybrid_runs import run_rows
from our_model import load_model
from reference_models import random_prompt
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

# LongRoPE has other factors behind 64 tokens, in transformers by those of a call, here by those of a row.
ROWS = [random_prompt(length, seed=7, vocab_size=96) for length in (5, 33, 62)]
ROUNDING = 2.0**-9


@dataclass(frozen=True, slots=True)
class Case:
    """A folder of float32 weights, and transformers' model of it."""

    folder: Callable[[], Path]
    reference: Callable[[], PreTrainedModel]


def cases_of(module: Any, kind: str, names: Any) -> dict[str, Case]:
    """Of a module of checkpoints."""
    folder, reference = (getattr(module, f"{kind}_{what}") for what in ("folder", "reference"))
    return {f"{kind} {name}": Case(partial(folder, name), partial(reference, name)) for name in names}


CASES = {
    **cases_of(compressed_checkpoints, "compressed", compressed_checkpoints.CASES),
    **cases_of(conv_checkpoints, "conv", conv_checkpoints.CASES),
    **cases_of(delta_checkpoints, "delta", delta_checkpoints.DELTA_CASES),
    **cases_of(kimi_checkpoints, "kimi", kimi_checkpoints.KIMI_CASES),
    **cases_of(bailing_checkpoints, "bailing", bailing_checkpoints.BAILING_CASES),
    **cases_of(latent_checkpoints, "latent", latent_checkpoints.CASES),
    **cases_of(qwen4_checkpoints, "qwen4", ("qwen4", "qwen4_sigmoid")),
    **cases_of(mamba_checkpoints, "mamba", mamba_checkpoints.MAMBA_CASES),
    **cases_of(expert_checkpoints, "expert", ("minimax_m3", "minimax_m3_text")),
    # Roundings add up in the eleven layers of the other case of Gemma 3n, in transformers too.
    **cases_of(recent_checkpoints, "recent", [name for name in recent_checkpoints.CASES if name != "gemma3n_other"]),
}


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> Tensor:
    return torch.cat([model(torch.tensor([row]), use_cache=False).logits[0].float() for row in ROWS])


def in_bfloat16(case: Case) -> PreTrainedModel:
    """transformers' model as it opens the folder: buffers, and what it says, stay in float32."""
    model = case.reference()
    opened: PreTrainedModel = type(model).from_pretrained(case.folder(), config=model.config, dtype=torch.bfloat16)
    return opened.eval()


def distance(one: Tensor, other: Tensor) -> float:
    """In roundings."""
    return float((one - other).abs().median() / (ROUNDING * other.std()))


def are_near(ours: float, theirs: float, apart: float, most: float = 20, slack: float = 1.25) -> bool:
    """Whether we are about as far from float32 as transformers, and no farther from it than it from float32."""
    return max(ours, apart) < slack * theirs < most


@pytest.mark.guarantee("Models compute what transformers computes")
@pytest.mark.stress
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_near_transformers(name: str):
    case = CASES[name]
    right, theirs = logits_of(case.reference()), logits_of(in_bfloat16(case))
    model = load_model(case.folder(), dtype="bfloat16")
    ours = torch.cat(run_rows([model], ROWS)[0])
    distances = [distance(ours, right), distance(theirs, right), distance(ours, theirs)]
    print(f"ROUNDINGS {name}: ours {distances[0]:.1f}, transformers {distances[1]:.1f}, apart {distances[2]:.1f}")
    # Rounded scores choose other keys.
    chooses = any(layer.chooser is not None for layer in model.model_config.layers)
    # Means of groups, which transformers rounds twice, are rounded once.
    has_means = any(layer.compressed is not None for layer in model.model_config.layers)
    assert are_near(*distances, most=50 if chooses else 20, slack=1.4 if has_means else 1.25)


def test_comparison_detects_coarser_weights(tmp_path: Path):
    """Negative control: weights of four bits in place of eight."""
    case, folder = CASES["conv lfm2"], tmp_path / "coarse"
    shutil.copytree(case.folder(), folder)
    path = folder / "model.safetensors"
    tensors = {name: tensor.to(torch.float8_e4m3fn).float() for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    right, theirs = logits_of(case.reference()), logits_of(in_bfloat16(case))
    ours = torch.cat(run_rows([load_model(folder, dtype="bfloat16")], ROWS)[0])
    assert not are_near(distance(ours, right), distance(theirs, right), distance(ours, theirs))
