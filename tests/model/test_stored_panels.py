"""Weights of 4 bits and FP8 that are held as their checkpoint has them on CPUs: they read as dequantised ones, shares
are cut where groups are, the plan knows their bytes, and only files replace them.

Answers: scenarios/test_stored_weights.py.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from row_panels import PanelKernels
from safetensors.torch import load_file, save_file
from stored_checkpoints import GGUF_KINDS, KINDS, SIZES, write_stored
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers import checkpoint_layer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model.weight_memory import WeightMemory
from spmd_worker.model_config.hub import locate_model
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.model_config.stored_format import AFFINE4, AFFINE8, EXPERTS, INT4, IQ4, MXFP4, NF4, StoredFormat
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.cpu.native import cpu_kernels
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.stored_weights import NOTHING_STORED, find_stored_panels
from spmd_worker.ranks.topology import RankLayout, Stage, complete_model
from spmd_worker.worker.memory.estimate import expert_bytes, weights_bytes

pytestmark = pytest.mark.usefixtures("own_hub_cache")

GROUPS, ROWS = StoredFormat("int4", 1, 32), StoredFormat("int4", 1, 0)
FP8, FP8_GROUPS = StoredFormat("e4m3", 1, 0), StoredFormat("e4m3", 1, 128)
ATTENTION = ("self_attn.qkv_proj", "self_attn.o_proj")
DENSE = ("mlp.gate_up_proj", "mlp.down_proj")
SHARED = ("mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj")
FORMATS: dict[str, dict[int, dict[str, StoredFormat]]] = {
    "gptq": {index: dict.fromkeys((*ATTENTION, *DENSE), GROUPS) for index in (0, 1)},
    "w4a16": {index: dict.fromkeys((*ATTENTION, *DENSE), ROWS) for index in (0, 1)},
    "awq": {
        0: dict.fromkeys((*ATTENTION, *SHARED, EXPERTS), GROUPS),
        1: dict.fromkeys((*ATTENTION, *DENSE), GROUPS),
    },
    "mxfp4": {index: {EXPERTS: MXFP4} for index in (0, 1)},
    "fp8_dense": {index: dict.fromkeys((*ATTENTION, *DENSE), FP8_GROUPS) for index in (0, 1)},
    "fp8_whole": {index: dict.fromkeys((*ATTENTION, *DENSE), FP8) for index in (0, 1)},
    "fp8_shared": {
        0: dict.fromkeys((*ATTENTION, *SHARED, EXPERTS), FP8),
        1: dict.fromkeys((*ATTENTION, *DENSE), FP8),
    },
    "nf4": {index: dict.fromkeys((*ATTENTION, *DENSE), NF4) for index in (0, 1)},
    "gguf": {
        0: dict(zip((*ATTENTION, *DENSE), (AFFINE8, AFFINE4, AFFINE4, AFFINE8), strict=True)),
        1: dict(zip((*ATTENTION, *DENSE), (AFFINE4, AFFINE4, INT4, IQ4), strict=True)),
    },
    "gguf_experts": {
        index: dict(zip((*ATTENTION, *SHARED, EXPERTS), (AFFINE8, *[AFFINE4] * 3, AFFINE8), strict=True))
        for index in (0, 1)
    },
}
"""Formats by kind of checkpoint, index of the layer and name in it."""
ONE, TWO = RankLayout(1), RankLayout(2)
CPU = single_group(), PanelKernels(), SdpaBackend(), torch.bfloat16, torch.device("cpu")
APART = RankLayout(2, experts=ExpertLayout(((0, 1, 1, 0),)))


WITH_EXPERTS = ("awq", "fp8_shared", "mxfp4", "gguf_experts")


def folder_of(tmp_path: Path, kind: str) -> Path:
    path = write_stored(tmp_path / kind, kind)
    return locate_model(str(path), None).folder if kind in GGUF_KINDS else path


def config_of(folder: Path) -> ModelConfig:
    return read_model_files(folder).model_config


def new_model(
    folder: Path, layout: RankLayout = ONE, rank: int = 0, *, is_stored: bool = True, kernels: Kernels | None = None
) -> DecoderForCausalLM:
    config, group = config_of(folder), GroupHandle(tuple(range(layout.tensor_parallel_size)), rank, None)
    stored = find_stored_panels(config, layout) if is_stored else NOTHING_STORED
    parts = kernels or PanelKernels(), SdpaBackend(), torch.bfloat16, torch.device("cpu"), layout.experts
    return build_model(LayerContext(group, *parts, stored=stored.formats), config, complete_model(config))


def loaded(*arguments: Any, **options: Any) -> DecoderForCausalLM:
    model = new_model(*arguments, **options)
    with model.weights.open(arguments[0], model.model_config.quantization) as source:
        model.weights.fill(source)
    model.pack_weights()
    return model


def weights_of(model: DecoderForCausalLM) -> dict[str, Tensor]:
    """This rank's parts of all weights, by checkpoint name."""
    return {name: held.read().clone() for name, held in model.weights.held.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name in found:
        assert torch.equal(found[name], expected[name]), name


def held_as_stored(model: DecoderForCausalLM) -> set[str]:
    """Names of parameters that are."""
    return {name for name, each in model.named_parameters() if each.dtype == torch.uint8}


@pytest.mark.guarantee("Weights that stay as stored are the dequantised ones")
@pytest.mark.parametrize("kind", FORMATS)
@torch.no_grad()
def test_weights_as_stored_read_as_dequantised_ones(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    """In plain torch's rows and in panels of compiled kernels, some rows at a time, on every rank of three layouts."""
    monkeypatch.setattr(checkpoint_layer, "_READ_ELEMENTS", 3000)
    folder, kernels = folder_of(tmp_path, kind), (PanelKernels(), cpu_kernels(torch.bfloat16)[0])
    for layout in (ONE, TWO, *([APART] if kind in WITH_EXPERTS else [])):
        formats = find_stored_panels(config_of(folder), layout).formats
        assert formats == FORMATS[kind]
        for rank in range(layout.tensor_parallel_size):
            expected = loaded(folder, layout, rank, is_stored=False)
            assert held_as_stored(expected) == set()
            for each in kernels:
                found = loaded(folder, layout, rank, kernels=each)
                names = {f"model.layers.{index}.{name}." for index, names in formats.items() for name in names}
                held = held_as_stored(found)
                assert all(any(name.startswith(beginning) for beginning in names) for name in held)
                assert all(any(name.startswith(beginning) for name in held) for beginning in names)
                assert_equal(weights_of(found), weights_of(expected))


@torch.no_grad()
def test_fused_files_fill_panels(tmp_path: Path):
    """Queries, keys and values one after the other, and head by head; without gates too."""
    fused = {"architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
    by_head = {"architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "rotary_pct": 0.25}
    for keys, first in ((fused, "mlp.gate_up_proj"), (by_head, "mlp.up_proj")):
        folder = write_stored(tmp_path / first, "gptq", **keys)
        for layout in (ONE, TWO):
            formats = find_stored_panels(config_of(folder), layout).formats
            assert [*formats[0]] == [*ATTENTION, first, "mlp.down_proj"]
            for rank in range(layout.tensor_parallel_size):
                found, expected = (loaded(folder, layout, rank, is_stored=each) for each in (True, False))
                assert len(held_as_stored(found)) == 2 * len(formats[0])
                assert_equal(weights_of(found), weights_of(expected))
                name = next(name for name in found.weights.shapes if "query_key_value" in name or "qkv_proj" in name)
                with pytest.raises(CheckpointError, match="dequantize_weights"):
                    found.load_weights([(name, torch.zeros(found.weights.shapes[name]))])


@pytest.mark.control("Weights that stay as stored are the dequantised ones")
@torch.no_grad()
def test_comparison_sees_one_changed_nibble(tmp_path: Path):
    folder = write_stored(tmp_path / "gptq", "gptq")
    model, before = loaded(folder), weights_of(loaded(folder))
    model.model.layers[0].mlp.down_proj.weight.data[5, 9] ^= 1
    differs = [name for name, each in weights_of(model).items() if not torch.equal(each, before[name])]
    assert differs == ["model.layers.0.mlp.down_proj.weight"]


@pytest.mark.guarantee("The plan's bytes are those of the run")
@pytest.mark.parametrize("kind", FORMATS)
def test_memory_of_weights_as_stored_is_planned(tmp_path: Path, kind: str):
    folder = folder_of(tmp_path, kind)
    config = config_of(folder)
    for layout in (ONE, TWO, *([APART] if kind in WITH_EXPERTS else [])):
        stored = find_stored_panels(config, layout)
        for rank in range(layout.tensor_parallel_size):
            for kernels in (PanelKernels(), cpu_kernels(torch.bfloat16)[0]):
                model = new_model(folder, layout, rank, kernels=kernels)
                held = sum(each.nbytes for each in model.parameters())
                assert held == weights_bytes(config, layout, rank, "bfloat16", "cpu", stored=stored), (layout, rank)
                experts = [each for layer in model.sparse_layers.values() for each in layer.experts.parameters()]
                num_bytes = sum(each.nbytes for each in experts)
                assert num_bytes == expert_bytes(config, layout, rank, "bfloat16", stored), (layout, rank)


def keys_of(kind: str, **keys: Any) -> ModelConfig:
    config, format_ = KINDS[kind]
    config = {**SIZES, **config, "quantization_config": dict(format_.config), **keys}
    return model_config_of(config, Path("config.json"))


def test_weights_that_are_no_panels_are_dequantised():
    """One by one, on all ranks, with the reason of the first."""
    for keys, layout, lost, words in (
        (
            {"intermediate_size": 160},
            TWO,
            DENSE[1:],
            r"layer 0, mlp.down_proj: 128 outputs and 80 inputs",
        ),
        ({"intermediate_size": 208}, TWO, DENSE, r"mlp.gate_up_proj: 208 outputs and 128 inputs, .* of 32 and 32"),
        ({"head_dim": 8}, RankLayout(4), ATTENTION, r"layer 0, self_attn.qkv_proj: 24 outputs and 128 inputs"),
    ):
        found = find_stored_panels(keys_of("gptq", **keys), layout)
        for names in found.formats.values():
            assert not set(lost) & set(names), keys
        assert re.search(words, found.reason), (keys, found.reason)
    groups = {**KINDS["gptq"][1].config, "group_size": 64}
    # Columns 0 to 96 and 96 to 192, and heads 0 to 64 and 64 to 128.
    found = find_stored_panels(keys_of("gptq", quantization_config=groups), TWO)
    assert [*found.formats[0]] == [*ATTENTION, "mlp.gate_up_proj"]
    assert "mlp.down_proj: inputs 0 to 96, a rank's share, do not begin and end at 4-bit integers" in found.reason
    # A block of 128 is cut off.
    found = find_stored_panels(keys_of("fp8_dense", intermediate_size=192), ONE)
    assert [*found.formats[0]] == [*ATTENTION, "mlp.gate_up_proj"]
    assert "inputs 0 to 192, a rank's share, do not begin and end at FP8 in groups of 128" in found.reason
    # The first two ranks' columns would fit, the others' do not.
    found = find_stored_panels(keys_of("gptq", quantization_config=groups, head_dim=64), RankLayout(4, num_leaves=4))
    assert [*found.formats[0]] == [*ATTENTION, "mlp.gate_up_proj"]
    assert "mlp.down_proj: inputs 128 to 160, a rank's share" in found.reason
    for changes, words in (
        ({"desc_act": True}, "act-order"),
        ({"group_size": 16}, "a multiple of 32 inputs, not 4-bit integers in groups of 16"),
        ({"bits": 8}, ""),
    ):
        found = find_stored_panels(keys_of("gptq", quantization_config={**groups, **changes}), ONE)
        assert (dict(found.formats), words in found.reason, bool(found.reason)) == ({}, True, bool(words))


def test_merged_weights_have_one_format():
    """Files that leave one of the merged ones plain have all of them dequantised."""
    ignored = {"modules_to_not_convert": ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"]}
    config = {**KINDS["gptq"][1].config, **ignored}
    found = find_stored_panels(keys_of("gptq", quantization_config=config), ONE)
    assert [*found.formats[0]] == ["self_attn.o_proj", *DENSE]
    assert [*found.formats[1]] == [*ATTENTION, "mlp.gate_up_proj"]
    assert "self_attn.qkv_proj: matrices that are multiplied together are stored in several formats" in found.reason
    # Names of newer releases count too.
    config = {**KINDS["gptq"][1].config, "modules_to_not_convert": ["model.language_model.layers.0.mlp"]}
    newer = {"architectures": ["Qwen2VLForConditionalGeneration"], "quantization_config": config}
    newer |= {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
    assert [*find_stored_panels(keys_of("gptq", **newer), ONE).formats[0]] == [*ATTENTION]


def test_types_of_gguf_are_held_together():
    """The smallest format that holds all types of matrices that are multiplied together, in any order."""
    own = {name: f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"}
    for types, wanted, reason in (
        ({"Q4_0": "qkvo"}, (INT4, INT4), ""),
        ({"Q4_K": "qko", "Q4_1": "v"}, (AFFINE4, AFFINE4), ""),
        ({"IQ4_NL": "qk", "IQ4_XS": "vo"}, (IQ4, IQ4), ""),
        ({"Q4_0": "qk", "Q4_K": "vo"}, (AFFINE8, AFFINE4), ""),
        ({"Q6_K": "v", "IQ4_XS": "qko"}, (AFFINE8, IQ4), ""),
        ({"Q2_K": "qkv", "Q3_K": "o"}, (None, AFFINE8), "kernels do not read Q2_K"),
        ({"Q4_K": "qk", "Q5_K": "o"}, (None, AFFINE8), "together some are plain, and some Q4_K"),
    ):
        names = {type_: [own[each] for each in letters] for type_, letters in types.items()}
        found = find_stored_panels(keys_of("gptq", quantization_config={"quant_method": "gguf", "types": names}), TWO)
        formats = {name: each for name, each in zip(ATTENTION, wanted, strict=True) if each is not None}
        assert found.formats == {0: formats}, types
        assert reason in found.reason
    groups = {"quant_method": "gguf", "types": {"Q4_K": [own["o"]]}}
    found = find_stored_panels(keys_of("gptq", quantization_config=groups, head_dim=16), RankLayout(4, num_leaves=4))
    assert not found.formats
    assert "16 inputs, a rank's share, are not multiples of 16 and 32" in found.reason


@torch.no_grad()
def test_only_files_replace_weights_as_stored(tmp_path: Path):
    for kind in ("gptq", "awq"):
        first, second = (write_stored(tmp_path / f"{kind}{seed}", kind, seed) for seed in (0, 1))
        # The second of two ranks, which does not have experts 0 and 3.
        model, expected = loaded(first, APART, 1), weights_of(loaded(second, APART, 1, is_stored=False))
        before, addresses = weights_of(model), [each.data_ptr() for each in model.parameters()]
        names = ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"]
        names += ["model.layers.0.mlp.experts.0.up_proj.weight"] if kind == "awq" else []
        for name in names:
            with pytest.raises(CheckpointError, match=r"is held in 4-bit integers in groups of 32.*dequantize_weights"):
                model.load_weights([(name, torch.zeros(model.weights.shapes[name]))])
        with pytest.raises(CheckpointError, match="replaced by reload_weights"):
            model.load_weights([(names[0].replace(".weight", ".qweight"), torch.zeros(1))])
        with model.as_checkpoint() as view:
            assert torch.equal(view.get_parameter(names[0]), before[names[0]])
        with pytest.raises(CheckpointError, match="dequantize_weights"), model.as_checkpoint() as view:
            view.get_parameter(names[0]).data.mul_(2)
        assert_equal(weights_of(model), before)
        with model.weights.open(second, config_of(second).quantization) as source:
            model.weights.reload(source)
        assert_equal(weights_of(model), expected)
        assert [each.data_ptr() for each in model.parameters()] == addresses
        norm = "model.norm.weight"
        assert model.load_weights([(norm, torch.ones(model.weights.shapes[norm]))]) == {norm}
        # Ranks of other stages refuse them too: all come to the same result.
        context = LayerContext(*CPU, stored=find_stored_panels(config_of(first), APART).formats)
        stage = build_model(context, config_of(first), Stage(1, 2, is_first=False, is_last=True))
        for name in names:
            with pytest.raises(CheckpointError, match="dequantize_weights"):
                stage.load_weights([(name, torch.zeros(model.weights.shapes[name]))])


@torch.no_grad()
def test_weights_that_files_have_otherwise_are_dequantised(tmp_path: Path):
    """Plain ones of which config.json does not know, and a hidden act-order; with all of their linear layer, or all
    experts of their layer, on every rank and stage: all refuse the same updates.
    """
    for kind, module, shape, together in (
        ("gptq", "model.layers.0.self_attn.k_proj", (64, 128), "model.layers.0.self_attn.q_proj"),
        ("awq", "model.layers.0.mlp.experts.1.up_proj", (64, 128), "model.layers.0.mlp.experts.3.down_proj"),
    ):
        folder, other = write_stored(tmp_path / kind, kind), "model.layers.1.mlp.down_proj"
        file, kept = folder / "model.safetensors", "model.layers.1.self_attn.o_proj"
        tensors = {name: each for name, each in load_file(file).items() if not name.startswith(f"{module}.")}
        tensors[f"{module}.weight"] = torch.full(shape, 0.5)
        if kind == "gptq":
            tensors[f"{other}.g_idx"] = tensors[f"{other}.g_idx"].flip(0)
        save_file(tensors, file, metadata={"format": "pt"})
        for layout in (TWO, *([APART] if kind == "awq" else [])):
            for rank in range(layout.tensor_parallel_size):
                found, expected = (loaded(folder, layout, rank, is_stored=each) for each in (True, False))
                assert_equal(weights_of(found), weights_of(expected))
                assert len(held_as_stored(found)) == (6 if kind == "gptq" else 8)
                with found.weights.open(folder, config_of(folder).quantization) as source:
                    found.weights.reload(source)
                assert_equal(weights_of(found), weights_of(expected))
                shapes = found.weights.shapes
                for each in (module, together, *([other] if kind == "gptq" else [])):
                    found.load_weights([(f"{each}.weight", torch.ones(shapes[f"{each}.weight"]))])
        context = LayerContext(*CPU, stored=find_stored_panels(config_of(folder), ONE).formats)
        stage = build_model(context, config_of(folder), Stage(1, 2, is_first=False, is_last=True))
        with stage.weights.open(folder, config_of(folder).quantization) as source:
            stage.weights.fill(source)
        stage.load_weights([(f"{together}.weight", torch.ones(shapes[f"{together}.weight"]))])
        with pytest.raises(CheckpointError, match="dequantize_weights"):
            stage.load_weights([(f"{kept}.weight", torch.ones(shapes[f"{kept}.weight"]))])


@torch.no_grad()
def test_files_that_do_not_fit_are_refused(tmp_path: Path):
    """Scales and FP8 that are not finite; of a reload numbers in another order, too."""
    folder = write_stored(tmp_path / "gptq", "gptq")
    model, file, before = loaded(folder), folder / "model.safetensors", weights_of(loaded(folder))
    module, right = "model.layers.1.mlp.down_proj", load_file(file)
    order, scales = right[f"{module}.g_idx"].flip(0), right[f"{module}.scales"].clone()
    scales[3, 7] = torch.inf
    for part, wrong, words in (
        ("g_idx", order, rf"{module}.weight is not stored in 4-bit integers in groups of 32 .*dequantize_weights=true"),
        ("scales", scales, r"down_proj.weight' has -?(inf|nan) at \[7, (9[6-9]|1[01]\d|12[0-7])\]"),
    ):
        save_file({**right, f"{module}.{part}": wrong}, file, metadata={"format": "pt"})
        if part == "scales":
            with pytest.raises(CheckpointError, match=words):
                loaded(folder)
        with (
            model.weights.open(folder, config_of(folder).quantization) as source,
            pytest.raises(CheckpointError, match=words),
        ):
            model.weights.reload(source)
        assert_equal(weights_of(model), before)
    folder = write_stored(tmp_path / "fp8", "fp8_dense")
    file, name = folder / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file)
    tensors[name].view(torch.uint8)[5, 9] = 0xFF
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj.weight' has nan at \[5, 9\]"):
        loaded(folder)


@torch.no_grad()
@pytest.mark.parametrize("keeps", [True, False])
def test_weights_as_stored_sleep_and_wake(tmp_path: Path, keeps: bool):
    folder, kernels = write_stored(tmp_path / "awq", "awq"), cpu_kernels(torch.bfloat16)[0]
    model = loaded(folder, kernels=kernels)
    before, memory = weights_of(model), WeightMemory(model, kernels)
    assert memory.num_bytes == sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    memory.release(memory.copy_to_host() if keeps else None)
    assert memory.restore(memory.allocate()) == keeps
    if not keeps:
        with model.weights.open(folder, config_of(folder).quantization) as source:
            model.weights.reload(source)
    assert_equal(weights_of(model), before)
