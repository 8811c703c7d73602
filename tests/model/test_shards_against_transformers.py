"""Logits of tensor-parallel shards equal transformers'.

Ranks are threads of this process; torchrun's ranks are in tests/parallel. The vocabulary of 211 and the 90 columns
divide by no number of ranks, and with 4 ranks the two key-value heads are held twice.
"""

from pathlib import Path

import pytest
import torch
from our_model import prompt_logits
from plain_models import new_model
from reference_models import (
    CheckpointSpec,
    LlamaConfig,
    checkpoint_folder,
    open_reference,
    random_prompt,
    reference_logits,
    reference_model,
    relative_error,
    write_checkpoint,
)
from thread_groups import on_ranks
from torch import Tensor

from spmd_worker.model.layers import attention, linear
from spmd_worker.ranks.communicator import GroupHandle

PROMPTS = [random_prompt(length, seed=11) for length in (1, 17, 60)]
CASES = [
    ("llama2", 2),
    ("llama3", 4),
    ("llama_tied", 2),
    ("llama_biased", 4),
    ("llama_head_dim", 2),
    ("llama_nine_heads", 3),
    ("llama_nine_heads", 9),
    ("mistral", 4),
    ("qwen2", 4),
    ("qwen2_tied", 2),
    ("qwen3", 2),
    ("qwen3_biased_window", 4),
]


def sharded_logits(folder: Path, size: int, prompts: list[list[int]]) -> list[list[Tensor]]:
    """Every rank's logits of its own token ids, without padding, for each prompt."""

    def run(group: GroupHandle) -> list[Tensor]:
        model = new_model(folder, group)
        return [logits[:, : model.lm_head.shard.num_owned] for logits in prompt_logits(model, prompts)]

    return on_ranks(size, run)


def worst_error(name: str, size: int) -> float:
    by_rank = sharded_logits(checkpoint_folder(name), size, PROMPTS)
    whole = [torch.cat(shards, dim=1) for shards in zip(*by_rank, strict=True)]
    expected = [reference_logits(reference_model(name), prompt) for prompt in PROMPTS]
    return max(map(relative_error, whole, expected))


@pytest.mark.gate("llama_nine_heads-3", "qwen2_tied-2", "mistral-4", "qwen3_biased_window-4", "llama_head_dim-2")
@pytest.mark.parametrize(("name", "size"), CASES)
def test_logits_of_shards_are_transformers(name: str, size: int):
    assert worst_error(name, size) < 1e-4


def test_rank_without_token_ids_takes_part(tmp_path: Path):
    """50 ids fit the padded shard of the first rank, so the second has none."""
    folder = write_checkpoint(tmp_path, CheckpointSpec(LlamaConfig, {"vocab_size": 50, "tie_word_embeddings": True}))
    prompt = random_prompt(30, 0, vocab_size=50)
    (first,), (second,) = sharded_logits(folder, 2, [prompt])
    assert second.shape == (30, 0)
    assert relative_error(first, reference_logits(open_reference(folder), prompt)) < 1e-4


def test_comparison_detects_key_value_heads_on_wrong_ranks(monkeypatch: pytest.MonkeyPatch):
    right = attention.kv_head_range
    monkeypatch.setattr(attention, "kv_head_range", lambda heads, size, rank: right(heads, size, size - 1 - rank))
    assert worst_error("llama3", 4) > 1e-2


@pytest.mark.control("Tensor parallelism: one rank's answers")
def test_comparison_detects_bias_added_by_every_rank(monkeypatch: pytest.MonkeyPatch):
    def forward(self: linear.RowParallelLinear, x: Tensor, adapters: None) -> Tensor:
        return self._kernels.linear(x, self.weight, self.bias)

    monkeypatch.setattr(linear.RowParallelLinear, "forward", forward)
    assert worst_error("llama_biased", 2) > 1e-2
