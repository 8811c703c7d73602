"""Parts of LongCat-Flash that other latent attention does not have: experts without weights, experts that are added
two layers later, two of our layers for one of the file; and its keys of config.json.
"""

import shutil
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from expert_models import new_model
from family_checks import adapter_logits, check_adapters, check_rejected
from latent_checkpoints import latent_folder, latent_reference
from our_model import load_model, prompt_logits
from reference_models import Oracle, random_prompt
from safetensors.torch import load_file, save_file
from thread_groups import on_ranks
from torch import Tensor

from spmd_worker.base.errors import ConfigError
from spmd_worker.model.adapters.targets import AdapterTargets
from spmd_worker.model.layers.experts import SparseFeedForward
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.model.shortcut_layer import Layer
from spmd_worker.model_config.model_config import model_config_of, read_model_files
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.topology import RankLayout, balanced_layers, check_divides

NAME, ARCHITECTURE = "longcat_flash", "LongcatFlashForCausalLM"
TOLERANCE = 1e-4
PROMPTS = [random_prompt(length, seed=7, vocab_size=96) for length in (1, 17, 40)]
OWNERS = ((0, 1, 1, 0, 0, 1, 0, 1),) * 4
oracle = Oracle(latent_reference, PROMPTS)


def test_files_have_no_tensors_of_identity_experts(tmp_path: Path):
    """Those of the hub; transformers writes gates of them."""
    folder = tmp_path / "hub"
    shutil.copytree(latent_folder(NAME), folder)
    tensors = load_file(folder / "model.safetensors")
    unused = [name for name in tensors if any(f".experts.{index}." in name for index in range(8, 13))]
    assert len(unused) == 2 * 5 * 2
    kept = {name: tensor for name, tensor in tensors.items() if name not in unused}
    kept["model.mtp.layers.0.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    ours, written = (prompt_logits(load_model(each), PROMPTS) for each in (folder, latent_folder(NAME)))
    assert all(map(torch.equal, ours, written))


@pytest.mark.parametrize("layout", [ExpertLayout(OWNERS), ExpertLayout(OWNERS, is_exact=True)])
def test_experts_on_two_ranks_equal_transformers(layout: ExpertLayout):
    """Each identity expert's output is in the sum once."""

    def run(group: GroupHandle) -> list[Tensor]:
        model = new_model(latent_folder(NAME), group, layout=layout)
        return [logits[:, : model.lm_head.shard.num_owned] for logits in prompt_logits(model, PROMPTS)]

    whole = [torch.cat(shards, dim=1) for shards in zip(*on_ranks(2, run), strict=True)]
    assert oracle.worst_error(NAME, whole) < TOLERANCE


def test_adapters_of_all_projections_are_those_of_peft(tmp_path: Path):
    """Both attentions of each layer of the file; PEFT takes feed-forwards for experts."""
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    reference = partial(deepcopy, latent_reference(NAME))
    check_adapters(oracle, NAME, *adapter_logits(latent_folder(NAME), reference, targets, tmp_path, PROMPTS))
    of_layer = {f"model.layers.1.mlps.{half}.{part}_proj" for half in (0, 1) for part in ("gate", "up", "down")}
    assert of_layer < set(AdapterTargets(load_model(latent_folder(NAME))).linears)


def test_comparison_detects_identity_experts_left_out(monkeypatch: pytest.MonkeyPatch):
    """Negative control. Tokens are counted for experts with weights alone."""
    monkeypatch.setattr(SparseFeedForward, "_with_identity", lambda layer, results, inputs, ids: results)
    model = load_model(latent_folder(NAME))
    assert oracle.worst_error(NAME, prompt_logits(model, PROMPTS)) > 10 * TOLERANCE
    loads = model.expert_loads()
    assert {index: len(counts) for index, counts in loads.items()} == {0: 8, 2: 8}
    assert 0 < sum(loads[0]) < 5 * sum(map(len, PROMPTS))


def test_comparison_detects_experts_added_too_early(monkeypatch: pytest.MonkeyPatch):
    """Negative control: before the second attention, which then sees them."""
    fed_forward = Layer.fed_forward

    def early(layer: Layer, x: Tensor, residual: Tensor, step: LayerStep) -> None:
        assert step.carried is not None
        if layer.dense is None:
            step.carried.append(torch.zeros_like(residual))
        fed_forward(layer, x, residual, step)
        if step.carried:
            residual.add_(step.carried.pop())

    monkeypatch.setattr(Layer, "fed_forward", early)
    assert oracle.worst_error(NAME, prompt_logits(load_model(latent_folder(NAME)), PROMPTS)) > 10 * TOLERANCE


def test_stages_have_both_halves_of_a_layer():
    config = read_model_files(latent_folder(NAME)).model_config
    assert config.layer_numbers == (0, 0, 1, 1)
    assert balanced_layers(config, 2) == (2, 2)
    real = model_config_of({"architectures": [ARCHITECTURE]}, Path("config.json"))
    assert all(count % 2 == 0 for count in balanced_layers(real, 3))
    check_divides(RankLayout(1, 2, pipeline_layers=(2, 2)), config)
    with pytest.raises(ConfigError, match=r"\[1,3\] divides layers that are one .* give multiples of 2, such as \[2,2"):
        check_divides(RankLayout(1, 2, pipeline_layers=(1, 3)), config)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=3 is more than the model's 2 layers"):
        check_divides(RankLayout(1, 3), config)


def test_missing_keys_have_the_defaults_of_transformers():
    theirs = transformers.LongcatFlashConfig()
    ours = model_config_of({"architectures": [ARCHITECTURE]}, Path("config.json"))
    first, second = ours.layers[:2]
    latent, experts = first.latent, first.experts
    assert latent is not None
    assert experts is not None
    assert second.experts is None
    assert (ours.num_layers, ours.vocab_size, ours.hidden_size) == (
        *(theirs.num_hidden_layers, theirs.vocab_size),
        theirs.hidden_size,
    )
    assert (latent.rank, latent.query_rank, latent.value_size) == (
        *(theirs.kv_lora_rank, theirs.q_lora_rank),
        theirs.v_head_dim,
    )
    assert (latent.nope_size, latent.rope_size) == (theirs.qk_nope_head_dim, theirs.qk_rope_head_dim)
    assert (experts.num_experts, experts.num_identity) == (theirs.n_routed_experts, theirs.zero_expert_num)
    assert (experts.num_chosen, experts.intermediate_size) == (theirs.moe_topk, theirs.expert_ffn_hidden_size)
    assert (experts.scaling, first.intermediate_size) == (theirs.routed_scaling_factor, theirs.ffn_hidden_size)
    assert (first.num_heads, first.norm.eps) == (theirs.num_attention_heads, theirs.rms_norm_eps)
    assert (ours.max_position_embeddings, ours.eos_token_ids) == (theirs.max_position_embeddings, (2,))
    assert ours.ropes[0].rope_theta == theirs.rope_parameters["rope_theta"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"zero_expert_type": "zero"}, "zero_expert_type='zero' is not supported, only 'identity'"),
    ({"zero_expert_num": -1}, "zero_expert_num=-1 must be a whole number from 0"),
    ({"zero_expert_num": 1.5}, "zero_expert_num=1.5 must be a whole number from 0"),
    ({"q_lora_rank": None}, "q_lora_rank=None must be a number"),
    ({"qk_head_dim": 128}, "qk_head_dim=128 must be qk_nope_head_dim + qk_rope_head_dim, 192"),
    ({"num_layers": 0}, "num_layers=0 must be a whole number from 1"),
    ({"moe_topk": 800}, "moe_topk=800 is more than the 768 experts"),
    ({"router_bias": True}, "router_bias=True is not supported"),
    ({"mla_scale_q_lora": False}, "mla_scale_q_lora=False is not supported"),
    ({"expert_ffn_hidden_size": "x"}, "expert_ffn_hidden_size='x' must be a whole number"),
]


@pytest.mark.parametrize(
    ("keys", "message"), BAD, ids=[next(iter(keys)) + str(index) for index, (keys, _) in enumerate(BAD)]
)
def test_invalid_keys_are_rejected_by_key(keys: dict[str, Any], message: str):
    check_rejected({"architectures": [ARCHITECTURE], **keys}, message)
