"""Weights changed through `LLM.apply_model` answer as a checkpoint with the same change, to the last bit.

Each kind of weight by itself on one rank, all kinds at once on several. The sizes fit the panels of the AMX unit, which
is emulated where the processor has none.
"""

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
from native_libraries import HAS_AMX, NATIVE, WITH_AMX, WITHOUT_AMX, library_for, needs_avx512
from reference_models import CheckpointSpec, LlamaConfig, mixed_prompts, write_checkpoint
from run_folder import made_once
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmd_worker import LLM, SamplingParams
from spmd_worker.attention import cpu
from spmd_worker.kernels.cpu import native

PROMPTS = [{"prompt_token_ids": prompt} for prompt in mixed_prompts(4, 40, seed=3)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=0)
OVERRIDES = {
    "untied": {"intermediate_size": 128, "attention_bias": True, "mlp_bias": True},
    "tied": {"intermediate_size": 128, "tie_word_embeddings": True},
}
KINDS = [*(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")), "embed_tokens", "lm_head"]
KINDS += ["input_layernorm", "post_attention_layernorm", "model.norm", "bias"]
PLAIN = WITHOUT_AMX if HAS_AMX else NATIVE

each_dtype = pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.matrix)])
each_arithmetic = pytest.mark.parametrize(
    "instruction_set", [pytest.param(WITH_AMX, marks=needs_avx512), pytest.param(PLAIN, marks=pytest.mark.matrix)]
)


def change(name: str, weight: Tensor, kind: str) -> None:
    """Those of a kind in the first layer become zero, others are scaled, by factors that bfloat16 does not round."""
    if kind in name:
        weight *= 0 if name.startswith("model.layers.0.") and kind in KINDS else (-0.5, 2.0, -1.0)[len(name) % 3]


def folders(checkpoint: str, kind: str) -> tuple[Path, Path]:
    def write(folder: Path) -> None:
        shutil.copytree(base, folder)
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            change(name, tensor, kind)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    spec = CheckpointSpec(LlamaConfig, OVERRIDES[checkpoint])
    base = made_once(f"weights {checkpoint}", lambda folder: write_checkpoint(folder, spec))
    return base, made_once(f"weights {checkpoint} {kind}", write)


def change_all(model: torch.nn.Module, kind: str) -> None:
    for name, parameter in model.named_parameters():
        change(name, parameter.data, kind)


def compare(base: Path, changed: Path, kind: str, dtype: str, **layout: int) -> None:
    options = {"dtype": dtype, "num_blocks": 64, "max_model_len": 128, **layout}
    with LLM(changed, **options) as llm:
        expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    with LLM(base, **options) as llm:
        before = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.apply_model(partial(change_all, kind=kind))
        llm.set_weight_version(1)
        after = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert repr(after) == repr(expected) != repr(before)


@each_dtype
@each_arithmetic
@pytest.mark.parametrize(
    ("checkpoint", "kind"), [("untied", kind) for kind in KINDS] + [("tied", "embed_tokens"), ("tied", "q_proj")]
)
def test_a_changed_kind_of_weight_answers_as_a_checkpoint_with_it(
    monkeypatch: pytest.MonkeyPatch, checkpoint: str, kind: str, instruction_set: str, dtype: str
):
    for module in (native, cpu):
        monkeypatch.setattr(module, "native_library", lambda: library_for(instruction_set))
    compare(*folders(checkpoint, kind), kind, dtype)


@each_dtype
@each_arithmetic
@pytest.mark.parametrize(
    ("checkpoint", "layout"),
    [
        ("untied", "tensor_parallel_size"),
        ("tied", "pipeline_parallel_size"),
        pytest.param("untied", "pipeline_parallel_size", marks=pytest.mark.matrix),
        pytest.param("tied", "tensor_parallel_size", marks=pytest.mark.matrix),
    ],
)
def test_weights_changed_on_two_ranks_answer_as_a_checkpoint_with_the_change(
    checkpoint: str, layout: str, instruction_set: str, dtype: str
):
    arguments = [*folders(checkpoint, "."), dtype, layout, instruction_set]
    done = ranks.run_forked([__file__, *arguments], 2, timeout_s=120)
    assert done.returncode == 0, done.output


if __name__ == "__main__":
    base, changed, dtype, layout, instruction_set = sys.argv[1:]
    native.native_library = cpu.native_library = lambda: library_for(instruction_set)
    compare(Path(base), Path(changed), ".", dtype, **{layout: 2})
