"""Quantised models answer as transformers does with the dequantised weights, on one rank and on two.

The ranks read the quantised files, each its shard; transformers reads float32 files of the dequantised weights.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from expert_checkpoints import expert_folder, open_experts
from our_model import load_model, prompt_logits
from quantised_files import FORMATS, quantise, quantise_experts
from reference_models import CheckpointSpec, LlamaConfig, Qwen2Config, open_reference, random_prompt, write_checkpoint

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import CheckpointError

LIMIT_S = 200.0
# Ids below the 96 that models with experts have here.
PROMPTS = [[token % 96 for token in random_prompt(length, seed=5)] for length in (3, 21, 40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SIZES = {"intermediate_size": 96, "num_hidden_layers": 2}
"""Halves of 48 rows, which are no whole number of FP8 blocks: both ranks read the block between them."""
OTHERS = [
    *("fbgemm_fp8", "gptq_order", "gptq_v2_8bits", "awq", "float_tensor", "int_row_zeros", "w4a16_zeros"),
    *("w4a16_order", "w8a16_rows", "fp4", "nvfp4_packed", "modelopt_fp8"),
]
STAGES = ["gptq_order", "w4a16_zeros", "nf4_nested"]
SETS = [
    pytest.param("tensor_parallel_size", ["fp8_block", "nf4_nested"], id="one"),
    pytest.param(
        "tensor_parallel_size", ["gptq_v2_8bits", "awq", "bnb_int8", "nvfp4"], id="two", marks=pytest.mark.matrix
    ),
    pytest.param("tensor_parallel_size", OTHERS, id="others", marks=pytest.mark.stress),
    pytest.param("pipeline_parallel_size", STAGES, id="stages", marks=pytest.mark.matrix),
]

ON_EACH_RANK = """
    import json, os, sys
    from pathlib import Path
    from spmd_worker import LLM, SamplingParams

    folder, prompts, way, *models = sys.argv[1:]
    prompts = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    greedy, answers = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), []
    for model in models:
        with LLM(model, **{way: 2}, dtype="float32", device="cpu", num_blocks=64, max_num_seqs=4) as llm:
            answers.append([list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy)])
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(answers))
"""
"""Greedy ids of every model. In a script of its own, because ranks need no transformers."""


def source_of(folder: Path, name: str) -> Path:
    """Every second format on Qwen2, which has biases."""
    kind = (LlamaConfig, Qwen2Config)[list(FORMATS).index(name) % 2]
    path = folder / f"{kind.__name__}"
    if not path.exists():
        write_checkpoint(path, CheckpointSpec(kind, SIZES))
    return path


@torch.no_grad()
def transformers_ids(folder: Path, opened: Callable[[Path], Any] = open_reference) -> list[list[int]]:
    model = opened(folder)
    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(GREEDY.max_tokens or 0):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


@pytest.mark.gate("two")
@pytest.mark.parametrize(("way", "names"), SETS)
def test_two_ranks_have_transformers_ids_on_dequantised_weights(tmp_path: Path, way: str, names: list[str]):
    folders = {name: quantise(source_of(tmp_path, name), tmp_path, name) for name in names}
    arguments = [tmp_path, json.dumps(PROMPTS), way, *(folders[name][0] for name in names)]
    ranks.run_ranks(ON_EACH_RANK, 2, LIMIT_S, arguments).checked()
    by_rank = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert by_rank[0] == by_rank[1]
    expected = {name: transformers_ids(plain) for name, (_, plain) in folders.items()}
    assert dict(zip(names, by_rank[0], strict=True)) == expected
    # Negative control: quantised otherwise it answers otherwise.
    assert len({str(ids) for ids in expected.values()}) >= min(len(names), 4)


@pytest.mark.parametrize("name", ["fp8_block", pytest.param("gptq_v2_8bits", marks=pytest.mark.matrix)])
def test_dequantised_logits_are_bit_identical_to_plain_files(tmp_path: Path, name: str):
    quantised, plain = quantise(source_of(tmp_path, name), tmp_path, name)
    ours, theirs = (prompt_logits(load_model(folder), PROMPTS) for folder in (quantised, plain))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


EXPERTS = {
    "mxfp4": "gpt_oss",
    "fp8_block": "qwen3_moe",
    "gptq_order": "mixtral",
    "nf4_nested": "qwen3_moe",
    "nvfp4": "mixtral",
}


def quantised_experts(folder: Path, name: str) -> tuple[Path, Path]:
    source = expert_folder(EXPERTS[name])
    return quantise_experts(source, folder) if name == "mxfp4" else quantise(source, folder, name)


@pytest.mark.parametrize("name", ["mxfp4", pytest.param("fp8_block", marks=pytest.mark.matrix)])
def test_dequantised_experts_are_bit_identical_to_plain_files(tmp_path: Path, name: str):
    quantised, plain = quantised_experts(tmp_path, name)
    before, ours, theirs = (
        prompt_logits(load_model(folder), PROMPTS) for folder in (expert_folder(EXPERTS[name]), quantised, plain)
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    # Negative control: they are others than those that were quantised.
    assert not any(torch.equal(a, b) for a, b in zip(ours, before, strict=True))


@pytest.mark.stress
def test_two_ranks_have_transformers_ids_on_dequantised_experts(tmp_path: Path):
    folders = [quantised_experts(tmp_path, name) for name in EXPERTS]
    arguments = [tmp_path, json.dumps(PROMPTS), "tensor_parallel_size", *(quantised for quantised, _ in folders)]
    ranks.run_ranks(ON_EACH_RANK, 2, LIMIT_S, arguments).checked()
    by_rank = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert by_rank[0] == by_rank[1]
    assert by_rank[0] == [transformers_ids(plain, open_experts) for _, plain in folders]


@pytest.mark.matrix
def test_dropped_weights_are_dequantised_again_from_files(tmp_path: Path):
    quantised, _ = quantise(source_of(tmp_path, "awq"), tmp_path, "awq")
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(quantised, dtype="float32", device="cpu", num_blocks=64) as llm:
        before = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == before


def test_missing_scale_is_named_before_any_allocation(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    quantised, _ = quantise(source_of(tmp_path, "awq"), tmp_path, "awq")
    tensors = load_file(quantised / "model.safetensors")
    del tensors["model.layers.1.self_attn.v_proj.scales"]
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.v_proj\.scales"):
        load_model(quantised)
