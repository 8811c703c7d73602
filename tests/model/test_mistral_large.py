"""What Mistral Large 4 has beside other latent attention: learned numbers of ropes and queries, layers that read the
latents of others, keys of several indexers beside one latent; and its keys of config.json.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from expert_models import new_model
from family_checks import check_rejected
from latent_checkpoints import latent_folder, latent_reference
from our_model import load_model, prompt_logits
from reference_models import Oracle, random_prompt, relative_error
from thread_groups import on_ranks
from torch import Tensor

from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.errors import AdapterError, ConfigError
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.adapters.source import adapter_from_tensors
from spmd_worker.model.layers.chosen_keys import ChosenKeys
from spmd_worker.model_config.families.vision_rows import read_vision
from spmd_worker.model_config.model_config import model_config_of, read_model_files
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.topology import RankLayout, check_divides
from spmd_worker.worker.memory.estimate import cache_spec

NAME, ARCHITECTURE = "mistral_large4", "MistralLarge4ForConditionalGeneration"
TOLERANCE = 1e-4
PROMPTS = [random_prompt(length, seed=7, vocab_size=96) for length in (1, 17, 40)]
oracle = Oracle(latent_reference, PROMPTS)


def test_two_ranks_equal_transformers():
    """Layers that read the latents of others have all of them on every rank."""

    def run(group: GroupHandle) -> list[Tensor]:
        model = new_model(latent_folder(NAME), group)
        return [logits[:, : model.lm_head.shard.num_owned] for logits in prompt_logits(model, PROMPTS)]

    whole = [torch.cat(shards, dim=1) for shards in zip(*on_ranks(2, run), strict=True)]
    assert oracle.worst_error(NAME, whole) < TOLERANCE


@pytest.mark.parametrize("part", ["rope_factors.alpha", "1.self_attn.softmax_scaling.scale", "softmax_scaling.bias"])
def test_comparison_detects_learned_numbers_left_out(part: str):
    """Negative control: neutral numbers in their place."""
    model = load_model(latent_folder(NAME))
    found = [each for name, each in model.named_parameters() if name.endswith(part)]
    assert found, part
    for each in found:
        each.fill_(float(part.endswith("bias")))
    assert oracle.worst_error(NAME, prompt_logits(model, PROMPTS)) > 10 * TOLERANCE


def test_one_slot_for_all_indexers_is_noticed_in_chunks(monkeypatch: pytest.MonkeyPatch):
    """Negative control: the keys of a later layer's indexer replace those of an earlier one."""
    model, parts_of = load_model(latent_folder(NAME)), ChosenKeys.parts_of

    def of_first_slot(chosen: ChosenKeys, layer_cache: Tensor) -> tuple[Tensor, Tensor]:
        latents, keys = parts_of(chosen, layer_cache)
        return latents, keys if not chosen._indexer.slot else parts_of(first, layer_cache)[1]

    first = model.model.layers[0].self_attn._chosen
    whole = prompt_logits(model, PROMPTS)
    assert all(map(torch.equal, prompt_logits(model, PROMPTS, 7), whole))
    monkeypatch.setattr(ChosenKeys, "parts_of", of_first_slot)
    assert relative_error(prompt_logits(model, PROMPTS, 7)[-1], whole[-1]) > 10 * TOLERANCE


def test_adapters_of_projections_change_answers_in_any_chunks():
    model = load_model(latent_folder(NAME))
    loaded = LoadedAdapters(model, AdapterLimits(max_loras=1, max_lora_rank=4, max_cpu_loras=1))

    def adapter(**sizes: tuple[int, int]) -> Any:
        generator, tensors = torch.Generator().manual_seed(1), {}
        for module, (num_outputs, num_inputs) in sizes.items():
            name = f"self_attn.{module.replace('indexer_', 'indexer.')}"
            prefix = f"base_model.model.model.language_model.layers.2.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, num_inputs, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(num_outputs, 4, generator=generator)
        return adapter_from_tensors({"peft_type": "LORA", "r": 4, "lora_alpha": 4}, tensors)

    with pytest.raises(AdapterError, match=r"kv_b_proj.* merge the adapter with model.lora_merge"):
        loaded.prepare(adapter(kv_b_proj=(4 * 80, 32)))
    with pytest.raises(AdapterError, match="no such module"):
        # Layer 2 reads the latents of layer 0.
        loaded.prepare(adapter(kv_a_proj_with_mqa=(48, 64)))
    found = adapter(q_proj=(192, 64), o_proj=(64, 192), indexer_wq_b=(16 * 32, 64), indexer_wk=(32, 64))
    loaded.commit(loaded.prepare(found))
    given: dict[str, Any] = {"loaded": loaded, "digests": [found.digest]}
    plain, adapted = prompt_logits(model, PROMPTS[2:])[0], prompt_logits(model, PROMPTS[2:], **given)[0]
    assert relative_error(adapted, plain) > 0.01
    assert torch.equal(prompt_logits(model, PROMPTS[2:], 5, **given)[0], adapted)


def test_layers_that_read_latents_have_none():
    """Blocks of layers 0, 1 and 5: a latent with a rope and two keys of indexers, one without, one with one key."""
    config = read_model_files(latent_folder(NAME)).model_config
    spec = cache_spec(config, RankLayout(2), 0, "float32", 16)
    kept = [None if each is None else (each.key_size, each.index_size) for each in spec.layers]
    assert kept == [(48, 64), (32, 32), None, None, None, (48, 32)]
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2 .* read keys of other layers"):
        check_divides(RankLayout(1, 2), config)
    check_divides(RankLayout(1, 2), read_model_files(latent_folder("mistral_large4_plain")).model_config)


def test_missing_keys_have_the_defaults_of_transformers():
    theirs, path = transformers.MistralLarge4Config().text_config, Path("config.json")
    kind = {"model_type": "mistral_large4_text"}
    for text in (None, {}, kind, {**kind, "rope_parameters": None}):
        config = {} if text is None else {"text_config": text}
        ours = model_config_of({"architectures": [ARCHITECTURE], **config}, path)
        assert [layer.rope is not None for layer in ours.layers] == [flag == 1 for flag in theirs.no_rope_layers]
        assert [layer.experts is None for layer in ours.layers] == [kind == "dense" for kind in theirs.mlp_layer_types]
        layer, plain = ours.layers[-2], ours.layers[-1]
        latent, experts = layer.latent, layer.experts
        assert latent is not None
        assert latent.indexer is not None
        assert plain.latent is not None
        assert experts is not None
        sizes = (latent.rank, latent.nope_size, latent.rope_size, latent.value_size, latent.query_rank)
        sizes_of_theirs = (theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim, theirs.v_head_dim, 0)
        assert sizes == sizes_of_theirs
        assert (plain.latent.nope_size, plain.latent.rope_size) == (theirs.qk_head_dim, 0)
        indexer = (latent.indexer.num_heads, latent.indexer.head_size, latent.indexer.num_chosen)
        assert indexer == (theirs.index_n_heads, theirs.index_head_dim, theirs.index_topk)
        assert (experts.num_experts, experts.num_chosen) == (theirs.n_routed_experts, theirs.num_experts_per_tok)
        assert (experts.intermediate_size, experts.shared_size) == (theirs.moe_intermediate_size,) * 2
        assert (experts.renormalises, experts.scaling, experts.num_groups) == (True, theirs.routed_scaling_factor, 1)
        numbers = (ours.vocab_size, ours.hidden_size, layer.intermediate_size, layer.num_heads, layer.norm.eps)
        assert numbers == (
            *(theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size, theirs.num_attention_heads),
            theirs.rms_norm_eps,
        )
        assert (ours.logit_cap, ours.max_model_len) == (30.0, theirs.max_position_embeddings)
        (rope,) = ours.ropes
        given = theirs.rope_parameters
        found = (rope.rope_type, rope.factor, rope.original_max_position_embeddings, rope.attention_factor)
        assert found == (
            given["rope_type"],
            given["factor"],
            given["original_max_position_embeddings"],
            given["attention_factor"],
        )
        assert {each.scale for each in ours.layers} == {theirs.qk_head_dim**-0.5}


def test_tower_of_a_file_without_one_is_that_of_transformers():
    theirs, found = (
        transformers.MistralLarge4Config(),
        read_vision("mistral_large4", {}, Path("config.json"), 6144, 1e-5),
    )
    assert found is not None
    assert found.tower is not None
    tower = found.tower
    assert (tower.hidden_size, tower.intermediate_size, tower.num_layers, tower.num_heads, tower.patch_size) == (
        *(theirs.vision_config.hidden_size, theirs.vision_config.intermediate_size),
        *(theirs.vision_config.num_hidden_layers, theirs.vision_config.num_attention_heads),
        theirs.vision_config.patch_size,
    )
    assert tower.activation == theirs.vision_config.hidden_act
    assert (found.image_token_id, found.merge_size) == (theirs.image_token_index, theirs.spatial_merge_size)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"kv_source_layers": [0, 1]}, "kv_source_layers=[0, 1] must list 4 layers, one for each"),
    ({"kv_source_layers": [0, 0, 2, 5]}, "kv_source_layers=5 must be a whole number from 0 to 3"),
    ({"kv_source_layers": [0, 2, 2, 3]}, "must give layer 1 itself, or the last layer before it"),
    # Layer 3 has no rope.
    ({"kv_source_layers": [0, 1, 2, 0]}, "must give layer 3 itself, or the last layer before it"),
    # transformers has the latents of layer 1 there.
    ({"kv_source_layers": [0, 1, 1, 0], "no_rope_layers": [1] * 4}, "must give layer 3 itself"),
    ({"no_rope_layers": [1, 1, 1, 2]}, "no_rope_layers=[1, 1, 1, 2] must list 4 of 0 and 1"),
    ({"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 must be a whole number from 1"),
    ({"index_head_dim": 32}, "index_head_dim=32 must be at least qk_rope_head_dim, 64"),
    ({"indexer_types": ["shared"] * 4}, "must let the first layer choose the keys"),
    ({"final_logit_softcapping": "x"}, "final_logit_softcapping='x' must be"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63"),
]


@pytest.mark.parametrize(("keys", "message"), BAD, ids=[str(index) for index in range(len(BAD))])
def test_invalid_keys_are_rejected_by_key(keys: dict[str, Any], message: str):
    text = {"model_type": "mistral_large4_text", "num_hidden_layers": 4, **keys}
    check_rejected({"architectures": [ARCHITECTURE], "text_config": text}, message)
