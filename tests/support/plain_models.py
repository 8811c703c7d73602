"""Our model of a checkpoint with kernels of plain torch, on one rank or several, and cases in tiers."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.model_config import ModelConfig, read_model_files
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.topology import Stage


def new_model(
    folder: Path, group: GroupHandle | None = None, stage: Stage | None = None, config: ModelConfig | None = None
) -> DecoderForCausalLM:
    """Not packed."""
    options = (ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("cpu"))
    context = LayerContext(group or single_group(), *options)
    model = build_model(context, config or read_model_files(folder).model_config, stage)
    with model.weights.open(folder) as checkpoint:
        model.weights.fill(checkpoint)
    return model


def in_tiers(
    *names: str, among: Iterable[str], rest: pytest.MarkDecorator = pytest.mark.stress, slow: Iterable[str] = ()
) -> pytest.MarkDecorator:
    """Cases `among`; all but `names` are in another tier, `slow` ones in the stress tier."""
    later = {name: pytest.mark.stress if name in slow else rest for name in among}
    marks = {name: [] if name in names else mark for name, mark in later.items()}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])
