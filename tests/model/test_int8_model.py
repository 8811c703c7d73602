"""A model with int8 GEMMs: near transformers' logits, with equal bits of a row in any batch and chunks.

On more ranks: `tests/ranks/test_int8_on_ranks.py`.
"""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from expert_checkpoints import expert_folder
from expert_models import PROMPTS as EXPERT_PROMPTS
from expert_models import expected
from family_checkpoints import family_folder
from latent_checkpoints import latent_folder
from our_model import load_model, prompt_logits
from recent_checkpoints import recent_folder
from reference_models import checkpoint_folder, random_prompt, reference_logits, reference_model, relative_error
from safetensors.torch import load_file, save_file

from spmd_worker.llm import LLM
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.checkpoint_layer import PackedLayer
from spmd_worker.model.layers.embedding import VocabularyParallelHead
from spmd_worker.model.layers.experts import Expert
from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model.weights import store
from spmd_worker.model.weights.block_targets import block_targets
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model.weights.weight_comparison import first_difference
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ops.kernels.cpu import int8
from spmd_worker.ops.kernels.cpu.int8 import Int8CpuKernels
from spmd_worker.ops.kernels.int8 import Int8Kernels
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.memory.estimate import weights_bytes

PROMPTS = [random_prompt(length, seed=7) for length in (1, 15, 40)]
MOST_ERROR = 0.15
NAMES = ["llama_biased", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("llama_tied", "qwen3"))]


def quantised(name: str) -> DecoderForCausalLM:
    return load_model(checkpoint_folder(name), quantization="int8")


@pytest.mark.parametrize("name", NAMES)
def test_row_has_equal_bits_alone_batched_and_chunked(name: str):
    model = quantised(name)
    assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.int8
    whole = prompt_logits(model, PROMPTS)
    for chunk in (1, 7):
        assert all(map(torch.equal, prompt_logits(model, PROMPTS, chunk, is_fused=(True, False)), whole)), chunk
    for prompt, logits in zip(PROMPTS, whole, strict=True):
        assert torch.equal(prompt_logits(model, [prompt])[0], logits)


def test_logits_are_near_transformers_and_not_the_same():
    model, reference = quantised("llama_biased"), reference_model("llama_biased")
    errors = [
        relative_error(ours, reference_logits(reference, prompt))
        for prompt, ours in zip(PROMPTS, prompt_logits(model, PROMPTS), strict=True)
    ]
    assert 1e-3 < max(errors) < MOST_ERROR


def test_gemms_without_compiled_kernels_have_equal_bits(monkeypatch: pytest.MonkeyPatch):
    """One layer in plain torch: other operations than GEMMs may differ in the last bit."""
    assert isinstance(int8.int8_kernels(torch.float32)[0], Int8CpuKernels)
    attention = quantised("llama_biased").model.layers[0].self_attn
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    expected = attention.qkv_proj(x)
    monkeypatch.setattr(int8, "cpu_kernels", lambda dtype: (None, "no compiler"))
    kernels, reason = int8.int8_kernels(torch.float32)
    assert isinstance(kernels, Int8Kernels)
    assert reason == "no compiler"
    plain = quantised("llama_biased").model.layers[0].self_attn.qkv_proj
    assert plain.weight.ndim == 2
    assert torch.equal(plain(x), expected)


@pytest.mark.matrix
def test_embedding_projections_are_quantised_and_kept_when_read():
    """Projections between embeddings and layers (OPT-350M); `apply_model` writes back what it reads."""
    folder = family_folder("opt_350m")
    model = load_model(folder, quantization="int8")
    assert model.model.project_in.weight.dtype == torch.int8
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    assert held == weights_bytes(read_model_files(folder).model_config, RankLayout(1), 0, "float32", "cpu", "int8")
    with LLM(folder, quantization="int8", num_blocks=60) as llm:
        rows, params = (
            [{"prompt_token_ids": [3, 50, 7, *range(20)]}],
            SamplingParams(temperature=0, max_tokens=5, logprobs=3),
        )
        before = [output.outputs[0].logprobs for output in llm.generate(rows, params, use_tqdm=False)]
        llm.apply_model(lambda model: {name: each.sum().item() for name, each in model.named_parameters()})
        after = [output.outputs[0].logprobs for output in llm.generate(rows, params, use_tqdm=False)]
    assert after == before


@pytest.mark.parametrize("name", ["qwen2_moe", pytest.param("gpt_oss", marks=pytest.mark.matrix)])
def test_experts_are_quantised_and_rows_keep_their_bits(name: str, monkeypatch: pytest.MonkeyPatch):
    """Those of SiLU and a shared one; those with biases and bounded gates. The router is float32."""
    folder = expert_folder(name)
    model = load_model(folder, quantization="int8")
    mlp = model.model.layers[0].mlp
    assert mlp.gate.weight.dtype == torch.float32
    assert {each.down_proj.weight.dtype for each in mlp.experts.values()} == {torch.int8}
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    assert held == weights_bytes(read_model_files(folder).model_config, RankLayout(1), 0, "float32", "cpu", "int8")
    # Equal bits whether experts are one call or called one by one.
    whole = prompt_logits(model, EXPERT_PROMPTS)
    assert all(map(torch.equal, prompt_logits(model, EXPERT_PROMPTS, 7, is_fused=(True, False)), whole))
    assert torch.equal(prompt_logits(model, EXPERT_PROMPTS[2:3])[0], whole[2])
    # A token whose experts change by rounding is far away: most are not.
    errors = torch.cat([(ours - theirs).norm(dim=1) for ours, theirs in zip(whole, expected(name), strict=True)])
    errors = errors / torch.cat(expected(name)).norm(dim=1)
    assert 1e-3 < errors.median() < MOST_ERROR
    # Control: a forward of one expert after the other is what the single call replaces.
    monkeypatch.setattr(Expert, "forward", lambda *_, **__: pytest.fail("one by one"))
    assert torch.equal(prompt_logits(model, EXPERT_PROMPTS[2:3])[0], whole[2])


@pytest.mark.matrix
def test_int8_experts_follow_updates_and_sleep(tmp_path: Path):
    """A router too small for panels came back from `sleep(level=2)` as int8."""
    folder, other = expert_folder("qwen2_moe"), tmp_path / "other"
    before = load_file(folder / "model.safetensors")
    after = {name: each * 1.25 if "expert" in name else each for name, each in before.items()}
    shutil.copytree(folder, other)
    save_file(after, other / "model.safetensors", {"format": "pt"})
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=1)

    def answers(llm: LLM) -> list[object]:
        outputs = llm.generate([{"prompt_token_ids": EXPERT_PROMPTS[3]}], params, use_tqdm=False)
        return [each.outputs[0].logprobs for each in outputs]

    with LLM(other, quantization="int8", num_blocks=60) as llm:
        expected = answers(llm)
    with LLM(folder, quantization="int8", num_blocks=60) as llm:
        own = answers(llm)
        llm.update_weights(list(after.items()))
        assert answers(llm) == expected != own
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(list(before.items()))
        assert answers(llm) == own


@pytest.mark.parametrize(
    "make",
    [
        partial(checkpoint_folder, "llama_tied"),
        pytest.param(partial(expert_folder, "qwen3_vl_moe"), marks=pytest.mark.matrix),
        pytest.param(partial(family_folder, "gpt2"), marks=pytest.mark.matrix),
        pytest.param(partial(latent_folder, "deepseek_v3"), marks=pytest.mark.matrix),
    ],
    ids=["llama", "stacked experts", "transposed", "latent"],
)
def test_weights_quantised_while_they_are_read_are_the_same(make: Callable[[], Path], monkeypatch: pytest.MonkeyPatch):
    """Without a copy in the model's dtype."""
    plain: list[int] = []
    folder, pack = make(), WeightStore.pack

    def counted(weights: WeightStore) -> None:
        plain.append(sum(_is_plain(each) for each in weights._layers.values()))
        pack(weights)

    monkeypatch.setattr(WeightStore, "pack", counted)
    meanwhile = load_model(folder, quantization="int8")
    # Control: all weights are quantised after they are read.
    monkeypatch.setattr(PackedLayer, "is_quantised_when_filled", False)
    afterwards = load_model(folder, quantization="int8")
    assert plain[0] == 0 < plain[1]
    assert have_equal_bytes(meanwhile, afterwards)


def test_rows_that_files_have_in_pieces_are_read_whole(monkeypatch: pytest.MonkeyPatch):
    """As AWQ's and GPTQ's large ones are: a part of a row does not say its scale."""
    folder = checkpoint_folder("llama_tied")
    expected = load_model(folder, quantization="int8")
    monkeypatch.setattr(store, "_BLOCK_BYTES", 128)
    assert have_equal_bytes(load_model(folder, quantization="int8"), expected)


@pytest.mark.gate("flat", "stacks")
@pytest.mark.parametrize(
    "make",
    [
        partial(expert_folder, "dbrx"),
        pytest.param(partial(expert_folder, "gpt_oss"), marks=pytest.mark.matrix),
        pytest.param(partial(expert_folder, "granite_moe"), marks=pytest.mark.matrix),
        pytest.param(partial(expert_folder, "qwen3_vl_moe"), marks=pytest.mark.stress),
        pytest.param(partial(expert_folder, "step3p7"), marks=pytest.mark.stress),
        pytest.param(partial(recent_folder, "gemma4"), marks=pytest.mark.stress),
        pytest.param(partial(recent_folder, "llama4"), marks=pytest.mark.stress),
    ],
    ids=["flat", "transposed stacks", "stacks", "images", "biased stacks", "beside dense", "few stacks"],
)
@torch.no_grad()
def test_stacked_experts_are_updated_and_compared(make: Callable[[], Path]):
    """Their full rows were taken from a matrix, and from all experts of a flat one."""
    folder = make()
    model = load_model(folder, quantization="int8")
    fresh = {name: each.read().clone() for name, each in model.weights.held.items()}

    def scramble() -> None:
        for each in model.parameters():
            if each.dtype == torch.int8:
                each.random_(-5, 5)

    def has_fresh_values() -> bool:
        return all(torch.equal(model.weights.held[name].read(), each) for name, each in fresh.items())

    with model.weights.open(folder) as source:
        assert first_difference(model.weights, source) == ""
        tensors = [(name, source.read(name, full_rectangle(shape))) for name, shape in model.weights.shapes.items()]
        scramble()
        assert first_difference(model.weights, source) != ""
        model.weights.reload(source)
        assert has_fresh_values()
    scramble()
    model.weights.load(tensors)
    assert has_fresh_values()
    scramble()
    for name, tensor in tensors:
        for target in block_targets(model.weights, name, None, 700):
            target.write(tensor[tuple(slice(*bounds) for bounds in target.region)])
    assert has_fresh_values()


def have_equal_bytes(first: DecoderForCausalLM, second: DecoderForCausalLM) -> bool:
    names = [name for name, each in first.named_parameters() if each.dtype == torch.int8]
    return len(names) > 0 and all(torch.equal(first.get_parameter(name), second.get_parameter(name)) for name in names)


def _is_plain(layer: object) -> bool:
    is_tied = isinstance(layer, VocabularyParallelHead) and layer.is_tied
    return isinstance(layer, PackedLayer) and layer._quantised is not None and not layer.is_packed and not is_tied
