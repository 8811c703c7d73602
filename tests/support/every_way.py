"""Small models with recurrent states, latent caches, several shapes of layers or newer rows of experts, the ways in
which their rows can be computed, and what a cache holds under each name afterwards.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bailing_checkpoints import bailing_folder
from compressed_checkpoints import compressed_folder
from delta_checkpoints import delta_folder
from expert_checkpoints import expert_folder
from family_checkpoints import family_folder
from kimi_checkpoints import kimi_folder
from latent_checkpoints import latent_folder
from mamba_checkpoints import mamba_folder
from qwen4_checkpoints import qwen4_folder
from recent_checkpoints import recent_folder
from state_models import state_folder
from state_rows import SETTINGS, state_rows
from state_segments import CHUNKS

from kv_cache.block import BlockHash
from spmd_worker import LLM, SamplingParams
from spmd_worker.model_config.model_config import read_model_files

_EXPERTS = ("granite_moe_swa", "hy_v3", "exaone_moe", "ernie_moe", "solar_open", "hunyuan_moe", "flex_olmo", "phimoe")
_FOLDERS: dict[str, tuple[tuple[str, ...], Callable[[str], Path]]] = {
    "convolutions": (("lfm2", "lfm2_moe", "lfm3"), state_folder),
    "delta nets": (("qwen3_5", "qwen3_5_images", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"), delta_folder),
    "latent": (
        (
            *("deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa_shared"),
            *("glm4_moe_lite", "mistral4", "kimi_k25", "mistral_large4", "longcat_flash"),
        ),
        latent_folder,
    ),
    "mamba": (("nemotron", "nemotron_latent", "granite", "falcon", "bamba", "jamba"), mamba_folder),
    "recent": (("llama4", "gemma4", "gemma4_dense", "gemma4_small", "gemma3n"), recent_folder),
    "kimi": (("kimi_linear",), kimi_folder),
    "streams": (("qwen4", "qwen4_sigmoid"), qwen4_folder),
    "bailing": (("bailing_hybrid",), bailing_folder),
    "compressed": (("deepseek_v4", "deepseek_v4_groups"), compressed_folder),
    "experts": ((*_EXPERTS, "step3p7", "minimax_m3", "minimax_m3_text"), expert_folder),
    "dense": (("granite_swa", "nanochat"), family_folder),
}
Kept = dict[tuple[str, bytes, int], torch.Tensor]
"""Bytes by "block" or "state", name, and layer, or kind of state."""

KINDS = {f"{part} {name}": (name, folder) for part, (names, folder) in _FOLDERS.items() for name in names}
"""One of each architecture: its case and the function that writes it."""

WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    **{f"chunks of {size}": {"max_num_batched_tokens": size, "max_num_seqs": min(size, 8)} for size in CHUNKS},
    "ahead of ids": {"async_scheduling": True},
    "every hit verified": {"verify_hits": 1},
}
PREEMPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", "swap_space": 1.0},
}
LONG, SHORT = (1, 58, 90, 121), (1, 30, 36, 20)
"""Tokens of rows after those that they share, for models of 256 tokens and of 128."""


def folder_of(kind: str) -> Path:
    name, folder = KINDS[kind]
    return folder(name)


def rows_for(kind: str, num_samples: int = 1) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    return state_rows(len(LONG), num_samples, LONG if is_long(kind) else SHORT)


def settings_for(kind: str, dtype: str) -> dict[str, Any]:
    settings = {**SETTINGS, "dtype": dtype, "max_model_len": 256 if is_long(kind) else 128}
    # Steps as long as a row would leave no blocks to give back, so layers would have one group.
    return {**settings, "max_num_batched_tokens": 65} if kind.endswith("_groups") else settings


def few_blocks(kind: str) -> dict[str, int]:
    """Settings with which some of four samples of each row are preempted."""
    num_blocks = 17 if is_long(kind) else 10
    return {"num_blocks": 9 if kind.endswith("_groups") else num_blocks, "max_num_seqs": 6}


def is_long(kind: str) -> bool:
    return read_model_files(folder_of(kind)).model_config.max_model_len >= 256


def kept_in(llm: LLM) -> Kept:
    """Bytes of each layer's part of each block, and of each snapshot, that a prefix can be found by."""
    scheduler, caches = llm.llm_engine.scheduler, llm.llm_engine.executor.driver_worker.worker.running.caches
    engine = caches.engine
    blocks: dict[BlockHash, int] = scheduler.cache._pool._index
    layers = list(engine.layer_caches)
    # Which layers share a block depends on settings. Names of the groups behind the first are longer by a byte.
    group_of, of_first = engine.spec.group_of or (0,) * len(layers), min(map(len, blocks), default=0)
    found: Kept = {}
    for name, block in blocks.items():
        group = name[-1] if len(name) > of_first else 0
        for number, layer in enumerate(layers):
            if layer is not None and group_of[number] == group:
                found["block", name[:of_first], number] = _bytes(layer[block])
    if engine.states is not None:
        for name, slot in scheduler.state_slots._pool._index.items():
            for number, tensor in enumerate(engine.states.lasting_tensors):
                found["state", name, number] = _bytes(tensor[:, slot])
    return found


def differences(kept: Kept, others: Kept) -> tuple[int, list[str]]:
    """How many parts both have, and which of those differ."""
    both = kept.keys() & others.keys()
    unlike = sorted(key for key in both if not torch.equal(kept[key], others[key]))
    return len(both), [f"{part} {name.hex()}, layer {number}" for part, name, number in unlike]


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8).clone()
