"""A model in FP8: numbers and scales of FP8 checkpoints are computed with as they are stored, after updates too."""

from pathlib import Path
from typing import Any

import pytest
import quantised_files
import torch
from fp8_device import FP8
from quantised_files import FORMATS, Format, fp8_block, fp8_row, fp8_tensor, quantise
from reference_models import CheckpointSpec, LlamaConfig, write_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import ConfigError
from spmd_worker.model.weights import store
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.dequantised_checkpoint import DequantisedCheckpoint
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ops.kernels.fp8 import Fp8Weights
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.worker.memory.estimate import weights_bytes

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
BLOCKS = Format({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, fp8_block)
KINDS = {
    "rows": (FORMATS["float_row"], fp8_row),
    "tensor": (FORMATS["fp8_tensor"], fp8_tensor),
    "blocks": (BLOCKS, fp8_block),
}
PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def stored_folder(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> Path:
    """With blocks of 128 x 128."""
    monkeypatch.setattr(quantised_files, "BLOCK", (128, 128))
    monkeypatch.setitem(FORMATS, kind, KINDS[kind][0])
    source = write_checkpoint(folder / f"source{seed}", CheckpointSpec(LlamaConfig, SIZES), seed=seed)
    return quantise(source, folder / str(seed), kind)[0]


def packed_weights(llm: LLM) -> dict[str, Tensor]:
    layers = llm.llm_engine.executor.driver_worker.model_runner.model.model.layers
    return {
        f"{index}.{name}": layer.get_parameter(f"{name}.weight") for index, layer in enumerate(layers) for name in PARTS
    }


def answer(llm: LLM) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": [3, 50, 7, *range(20)]}], params, use_tqdm=False)
    return [output.outputs[0].logprobs for output in outputs]


def assert_as_stored(folder: Path, packed: dict[str, Tensor]) -> None:
    """Literally the file's numbers, and the scales of each row or group."""
    files, weights = load_file(folder / "model.safetensors"), Fp8Weights(torch.bfloat16)
    for name, weight in packed.items():
        layer, module = name.split(".", 1)
        stored = [f"model.layers.{layer}.{part}.weight" for part in PARTS[module]]
        assert torch.equal(
            weights.numbers(weight).view(torch.uint8), torch.cat([files[each].view(torch.uint8) for each in stored])
        )
        expected = []
        for each in stored:
            rows = len(files[each])
            scales = files.get(f"{each}_scale", files.get(f"{each}_scale_inv")).float()
            if "weight_scale_inv" in f"{each}_scale_inv" and f"{each}_scale_inv" in files:
                scales = scales.repeat_interleave(128, 0)[:rows]
            expected.append(scales.reshape(-1, 1).expand(rows, 1) if scales.ndim == 0 else scales.view(rows, -1))
        assert torch.equal(weights.scales(weight), torch.cat(expected)), name


@pytest.mark.gate("tensor-float32", "blocks-bfloat16", "rows-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_numbers_and_scales_stay_as_stored(
    tmp_path: Path, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    folder = stored_folder(tmp_path, kind, monkeypatch)
    with LLM(folder, dtype=dtype, num_blocks=40, **FP8) as llm:
        assert_as_stored(folder, packed_weights(llm))
        kept = answer(llm)
        llm.apply_model(lambda model: {name: each.sum().item() for name, each in model.named_parameters()})
        assert_as_stored(folder, packed_weights(llm))
        assert answer(llm) == kept
    # Control: quantised anew, numbers or scales are others.
    monkeypatch.setattr(store, "stored_scales", lambda source, held: None)
    with LLM(folder, dtype=dtype, num_blocks=40, **FP8) as llm, pytest.raises((AssertionError, RuntimeError)):
        assert_as_stored(folder, packed_weights(llm))


@pytest.mark.gate("rows", "blocks")
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_reloaded_checkpoint_is_as_stored_too(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    first, other = (stored_folder(tmp_path, kind, monkeypatch, seed) for seed in (0, 1))
    with LLM(other, dtype="bfloat16", num_blocks=40, **FP8) as llm:
        expected = answer(llm)
    with LLM(first, dtype="bfloat16", num_blocks=40, **FP8) as llm:
        assert answer(llm) != expected
        llm.collective_rpc("reload_weights", args=(str(other),))
        assert_as_stored(other, packed_weights(llm))
        assert answer(llm) == expected
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights", args=(str(first),))
        assert_as_stored(first, packed_weights(llm))


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_any_rows_and_groups_are_read(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Shares of ranks: rows that begin inside a block, inputs that are groups; others have none."""
    folder = stored_folder(tmp_path, kind, monkeypatch)
    files = Checkpoint.open(folder)
    opened = DequantisedCheckpoint.open(files, read_model_files(folder).model_config.quantization)
    name = "model.layers.0.mlp.down_proj.weight"
    whole = opened.row_scales(name, ((0, 256), (0, 384)))
    assert whole.shape == (256, 3 if kind == "blocks" else 1)
    for columns in ((0, 384), (128, 256)):
        part = opened.row_scales(name, ((100, 200), columns))
        groups = slice(columns[0] // 128, columns[1] // 128) if kind == "blocks" else slice(None)
        assert torch.equal(part, whole[100:200, groups])
    assert (opened.row_scales(name, ((0, 256), (64, 192))) is None) == (kind == "blocks")
    assert opened.row_scales("model.norm.weight", ((0, 256),)) is None


@pytest.mark.parametrize("is_tied", [False, True])
def test_bytes_of_a_gpu_are_planned_exactly(tmp_path: Path, is_tied: bool):
    """The reference packs as the kernels of GPUs do."""
    spec = CheckpointSpec(LlamaConfig, SIZES | {"tie_word_embeddings": is_tied})
    folder = write_checkpoint(tmp_path / "model", spec)
    with LLM(folder, dtype="bfloat16", num_blocks=40, **FP8) as llm:
        model = llm.llm_engine.executor.driver_worker.model_runner.model
        assert model.lm_head.weight.dtype == torch.bfloat16, "the head is not quantised"
        held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    model_config = read_model_files(folder).model_config
    assert held == weights_bytes(model_config, RankLayout(1), 0, "bfloat16", "cuda", "fp8")
    assert held < weights_bytes(model_config, RankLayout(1), 0, "bfloat16", "cuda")


def test_fp8_is_refused_where_nothing_multiplies_it(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "model", CheckpointSpec(LlamaConfig, SIZES))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"device": "cpu"}, "computes on GPUs"),
        ({"device": "cpu", "device_backend": "torch"}, "set device_backend=triton"),
    ]
    for arguments, words in refused:
        with pytest.raises(ConfigError, match=words):
            LLM(folder, quantization="fp8", num_blocks=40, **arguments)
