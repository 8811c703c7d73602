"""Weights changed through `LLM.apply_model` answer as a checkpoint with the same change, to the last bit.

Each kind of weight by itself on one rank, all kinds at once on several. The sizes fit the panels of the AMX unit, which
is emulated where the processor has none.
"""

import shutil
from pathlib import Path

import pytest
import ranks
from changed_weights import ALL, change, compare
from native_libraries import HAS_AMX, NATIVE, WITH_AMX, WITHOUT_AMX, library_for, needs_avx512
from reference_models import CheckpointSpec, LlamaConfig, write_checkpoint
from run_folder import made_once
from safetensors.torch import load_file, save_file

from spmd_worker.attention import cpu
from spmd_worker.kernels.cpu import native
from spmd_worker.layers.checkpoint_layer import CheckpointLayer, PackedLayer
from spmd_worker.layers.embedding import VocabularyParallelEmbedding

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
    arguments = [*folders(checkpoint, ALL), dtype, layout, instruction_set]
    done = ranks.run_forked([ranks.REPOSITORY / "tests/changed_weights.py", *arguments], 2, timeout_s=240)
    assert done.returncode == 0, done.output


@needs_avx512
@pytest.mark.parametrize(("layer", "kind"), [(PackedLayer, "q_proj"), (VocabularyParallelEmbedding, "embed_tokens")])
def test_the_comparison_sees_weights_that_are_not_packed_again(
    monkeypatch: pytest.MonkeyPatch, layer: type[CheckpointLayer], kind: str
):
    """Negative control: panels, and the head of a tied model, stay as they were."""
    for module in (native, cpu):
        monkeypatch.setattr(module, "native_library", lambda: library_for(WITH_AMX))
    base, changed = folders("tied", kind)
    monkeypatch.setattr(layer, "write_region", CheckpointLayer.write_region if kind == "embed_tokens" else ignore)
    with pytest.raises(AssertionError):
        compare(base, changed, kind, "float32")


def ignore(*_: object) -> None:
    """In place of what writes."""
