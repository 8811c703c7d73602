"""A rank's slices of checkpoint tensors, as `checkpoint_slice` and as text of the model's inspection."""

from pathlib import Path

import pytest
import torch
from expert_checkpoints import expert_folder
from family_checkpoints import family_folder
from reference_models import checkpoint_folder
from safetensors.torch import load_file
from thread_groups import ThreadGroup, on_ranks
from torch import Tensor

from spmd_worker.model.decoder import DecoderForCausalLM, Stage
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import HeldSlice
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.worker.inspection import describe_model, describe_slices

pytestmark = pytest.mark.finding(number="D5")

CASES = [
    (checkpoint_folder, "llama3", 2),
    (checkpoint_folder, "qwen2", 4),  # with key-value heads that two ranks have
    (family_folder, "gpt2", 2),  # with matrices the other way round, three of attention in one
    (family_folder, "phi3", 2),  # with three matrices of attention in one, gates and what they open in another
    (expert_folder, "qwen3_moe", 2),
    (expert_folder, "gpt_oss", 2),
]


def open_model(
    folder: Path, group: ThreadGroup | None = None, layout: ExpertLayout | None = None, stage: Stage | None = None
) -> DecoderForCausalLM:
    config = read_model_files(folder).model_config
    context = LayerContext(
        group or single_group(0), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("cpu"), layout
    )
    model = build_model(context, config, stage)
    with model.weights.open(folder) as checkpoint:
        model.weights.fill(checkpoint)
    return model


def shown(model: DecoderForCausalLM) -> dict[str, tuple[Tensor, HeldSlice]]:
    with model.as_checkpoint() as view:
        return {name: (each.detach().clone(), each.checkpoint_slice) for name, each in view.named_parameters()}


@pytest.mark.parametrize(("folder_of", "name", "size"), CASES, ids=[f"{name} {size}" for _, name, size in CASES])
def test_parameter_has_its_checkpoint_slice(folder_of, name: str, size: int):
    folder = folder_of(name)
    stored: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    num_cut, whole = 0, 0
    covered = {key: torch.zeros(tensor.shape, dtype=torch.bool) for key, tensor in stored.items()}
    for each in on_ranks(size, lambda group: shown(open_model(folder, group))):
        for key, (values, held) in each.items():
            if key not in stored:
                continue
            assert held.checkpoint_shape == stored[key].shape
            assert torch.equal(held.of(stored[key]).float(), values), key
            rows = torch.arange(stored[key].numel()).view(stored[key].shape)
            covered[key].view(-1)[held.of(rows).reshape(-1)] = True
            num_cut, whole = num_cut + (not held.is_complete), whole + held.is_complete
    assert num_cut > 8
    assert whole > 4
    assert len(covered) - sum(bool(each.all()) for each in covered.values()) == 0


def test_inspection_says_rows_of_merged_layers_and_padding():
    texts = on_ranks(2, lambda group: describe_slices(open_model(checkpoint_folder("llama3"), group)))
    assert texts[1].splitlines() == [
        "slices of the checkpoint:",
        "  model.embed_tokens.weight rows 128 to 211 of 211",
        "  model.layers.0-2.self_attn.q_proj.weight rows 32 to 64 of 64, in qkv_proj",
        "  model.layers.0-2.self_attn.k_proj.weight rows 16 to 32 of 32, in qkv_proj",
        "  model.layers.0-2.self_attn.v_proj.weight rows 16 to 32 of 32, in qkv_proj",
        "  model.layers.0-2.self_attn.o_proj.weight columns 32 to 64 of 64",
        "  model.layers.0-2.mlp.gate_proj.weight rows 45 to 90 of 90, in gate_up_proj",
        "  model.layers.0-2.mlp.up_proj.weight rows 45 to 90 of 90, in gate_up_proj",
        "  model.layers.0-2.mlp.down_proj.weight columns 45 to 90 of 90",
        "  lm_head.weight rows 128 to 211 of 211",
        "  model.embed_tokens.weight: 45 rows of padding",
        "  lm_head.weight: 45 rows of padding",
    ]


def test_inspection_says_experts_and_layers_of_a_rank():
    folder, layout = expert_folder("qwen3_moe"), ExpertLayout(((0, 1, 0, 1, 0, 1, 0, 1),) * 4)
    models = on_ranks(2, lambda group: open_model(folder, group, layout))
    assert "\n  experts 1,3,5,7 of 8 in layers 0-3\n" in describe_slices(models[1])
    assert "mlp.experts" not in describe_slices(models[1])
    assert "            1,3,5,7: Expert\n" in describe_model(models[1])
    cut = on_ranks(2, lambda group: describe_slices(open_model(folder, group)))[1]
    assert "  model.layers.0-3.mlp.experts.0-7.gate_proj.weight rows 16 to 32 of 32, in gate_up_proj\n" in cut
    stage = Stage(1, 3, is_first=False, is_last=True)
    text = describe_slices(open_model(checkpoint_folder("llama3"), stage=stage))
    padding = "  lm_head.weight: 45 rows of padding"
    assert text == f"slices of the checkpoint:\n  layers 1 to 3 of 3\n{padding}"
    whole = describe_slices(open_model(checkpoint_folder("llama3")))
    assert whole == f"slices of the checkpoint:\n  model.embed_tokens.weight: 45 rows of padding\n{padding}"


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ((((192, 288),), ((0, 4),)), "rows 192 to 288 of 288"),
        ((((0, 8), (16, 20), (24, 28)), ((0, 4),)), "rows 0 to 8, 16 to 20 and 24 to 28 of 288"),
        ((((0, 9),), ((2, 4),)), "rows 0 to 9 of 288, columns 2 to 4 of 4"),
        ((((0, 288),), ((0, 4),)), "complete"),
    ],
)
def test_slice_as_text(ranges, words: str):
    assert str(HeldSlice((288, 4), ranges)) == words
