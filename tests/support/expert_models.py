"""Models of the families with experts, ours and transformers', and their logits."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_checkpoints import CASES, expert_folder, expert_reference
from plain_models import in_tiers
from reference_models import Oracle, random_prompt
from safetensors.torch import load_file, save_file

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model.weights.store import LoadReport
from spmd_worker.model_config.model_config import ModelConfig, read_model_files
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.topology import Stage

TOLERANCE = 1e-4
# Beyond every window, around a block of 16.
PROMPTS = [random_prompt(length, seed=7, vocab_size=96) for length in (1, 6, 17, 40)]
NUM_EXPERTS = 8
LINEAR, ROUND_ROBIN = ((0, 0, 0, 0, 1, 1, 1, 1),), ((0, 1) * 4,)
# One list a layer; in the second a rank has nearly all, in the third all.
PLACED = ((0, 0, 0, 0, 1, 1, 1, 1), (1, 0, 0, 0, 0, 0, 0, 0), (0,) * 8, (1, 1, 0, 0, 1, 0, 1, 0))


SECOND = ("qwen3_moe_sparse_step", "qwen2_moe_window", "glm4v_moe", "gpt_oss_limit", "glm4_moe_plain", "granite_moe")
"""Cases of families of which there is another."""

quick = partial(in_tiers, among=CASES, rest=pytest.mark.matrix)


def each_and_all(*names: str, later: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """As `quick`, with whether all ways are compared: with `names`, and in the stress tier with all cases."""
    marks = {name: pytest.mark.stress if name in later else pytest.mark.matrix for name in CASES}
    some = [pytest.param(name, False, marks=mark, id=name) for name, mark in marks.items() if name not in names]
    whole = [pytest.param(name, True, marks=pytest.mark.matrix, id=f"{name}-all ways") for name in names]
    others = [
        pytest.param(name, True, marks=pytest.mark.stress, id=f"{name}-all ways") for name in CASES if name not in names
    ]
    return pytest.mark.parametrize(("name", "in_all_ways"), [*some, *whole, *others])


oracle = Oracle(expert_reference, PROMPTS)
expected, worst_error = oracle.expected, oracle.worst_error


def load(
    folder: Path,
    group: GroupHandle | None = None,
    stage: Stage | None = None,
    config: ModelConfig | None = None,
    layout: ExpertLayout | None = None,
    kernels: Kernels | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[DecoderForCausalLM, LoadReport]:
    """Packed by nobody."""
    config = config or read_model_files(folder).model_config
    context = LayerContext(
        group or single_group(),
        kernels or ReferenceKernels(),
        SdpaBackend(),
        dtype,
        torch.device("cpu"),
        layout,
    )
    model = build_model(context, config, stage)
    with model.weights.open(folder) as checkpoint:
        report = model.weights.fill(checkpoint)
    return model, report


def new_model(*arguments: Any, **named: Any) -> DecoderForCausalLM:
    return load(*arguments, **named)[0]


def changed(name: str, folder: Path, change: Any) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(expert_folder(name), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
