"""Logits of a model whose ranks are threads of this process, with the CPU's kernels and leaves.

Knows nothing of processes, engines and sampling.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hybrid_runs import BLOCK_SIZE, run_rows
from our_model import prompt_logits
from thread_groups import on_ranks
from torch import Tensor

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.native.library import native_library
from spmd_worker.ops.attention.cpu import CpuBackend
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.leaves import num_leaves


def logits_on(
    size: int, folder: Path, dtype: torch.dtype, rows: Sequence[Sequence[int]], chunk: int | None, **options: Any
) -> list[Tensor]:
    """Float32 logits [tokens, vocabulary] of each row, `chunk` tokens of each a step, on `size` ranks. `options`: those
    of `shard`.
    """

    def run(group: Any) -> list[Tensor]:
        model = shard(folder, dtype, group, **options)
        if model.model.joined_layers is None:
            found, _ = run_rows([model], rows, chunk)
        else:
            found = prompt_logits(model, [list(row) for row in rows], chunk)
        return [logits[:, : model.lm_head.shard.num_owned] for logits in found]

    shards = [run(single_group())] if size == 1 else on_ranks(size, run, adds_by_tree=True)
    return [torch.cat(parts, dim=1) for parts in zip(*shards, strict=True)]


def shard(
    folder: Path,
    dtype: torch.dtype,
    group: Any,
    *,
    kernels: Kernels | None = None,
    layout: ExpertLayout | None = None,
    most: int = 8,
) -> DecoderForCausalLM:
    """A rank's model, packed; a folder without files of weights has dummy ones."""
    config = read_model_files(folder).model_config
    library = native_library()
    assert not isinstance(library, str), library
    sizes = tuple(dict.fromkeys(each.head_size for each in config.layers))
    context = LayerContext(
        group,
        kernels or CpuKernels(library),
        CpuBackend(library, dtype, sizes, BLOCK_SIZE),
        dtype,
        torch.device("cpu"),
        layout,
        num_leaves=num_leaves(config, most),
    )
    model = build_model(context, config)
    if any(folder.glob("*.safetensors")):
        with model.weights.open(folder) as checkpoint:
            model.weights.fill(checkpoint)
    else:
        model.weights.fill(model.weights.dummy())
    model.pack_weights()
    assert isinstance(model, DecoderForCausalLM)
    return model
