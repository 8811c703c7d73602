"""Families with latent attention against transformers: logits, steps, ranks, stages, weights, each entry of a row."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quantised_files
import torch
from expert_checkpoints import expert_folder
from expert_models import load, new_model
from family_checks import ids_and_logprobs
from family_mutants import entries
from json_files import edit
from latent_checkpoints import CASES, LATENT, latent_folder, latent_reference, thinned_latent_folder
from newer_checkpoints import NEWER
from our_model import is_noticed, load_model, prompt_logits
from quantised_files import FORMATS, Format, fp8_block, quantise
from reference_models import Oracle, greedy_without_cache, random_prompt, relative_error, their_logits
from safetensors.torch import load_file, save_file
from thread_groups import on_ranks
from torch import Tensor
from transformers import AutoConfig
from two_stages import TwoStages

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.errors import AdapterError, ConfigError, ModelConfigError, SpmdError
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.adapters.prompt_adapter import keys_values_for
from spmd_worker.model.adapters.source import adapter_from_tensors
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.latent_attention import LatentAttention, LatentProjection
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.latent_rows import LATENT_ROWS
from spmd_worker.model_config.families.longcat_rows import LONGCAT_ROWS
from spmd_worker.model_config.families.mistral_large_rows import MISTRAL_LARGE_ROWS
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.topology import RankLayout, Stage, check_divides
from spmd_worker.worker.memory.estimate import cache_spec, weights_bytes

TOLERANCE = 1e-4
PROMPTS = [random_prompt(length, seed=7, vocab_size=96) for length in (1, 17, 40)]
LONG = [random_prompt(length, seed=8, vocab_size=96) for length in (130, 5)]
MARKS: dict[str, Any] = {"deepseek_v3": [], "minicpm3_plain": pytest.mark.stress}
each_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.matrix)) for name in CASES]
)

oracle = Oracle(latent_reference, PROMPTS)
expected, worst_error = oracle.expected, oracle.worst_error


@pytest.mark.guarantee("Models compute what transformers computes")
@each_case
def test_logits_equal_transformers_with_full_and_thin_files(name: str):
    """transformers computes keys and values of all heads: absorbed and expanded agree."""
    model = load_model(latent_folder(name))
    logits = prompt_logits(model, PROMPTS)
    assert worst_error(name, logits) < TOLERANCE / 5
    assert all(map(torch.equal, prompt_logits(model, PROMPTS, 7), logits))
    full, thin = (read_model_files(each(name)).model_config for each in (latent_folder, thinned_latent_folder))
    assert thin == full


@pytest.mark.stress
@pytest.mark.parametrize("name", CASES)
def test_oracle_reads_thin_files_as_full_ones(name: str):
    """None of our code is asked: what it is compared with says the same of both files."""
    (thin,) = their_logits(latent_reference(name, is_thinned=True), PROMPTS[-1:])
    assert relative_error(thin, expected(name)[-1]) < 1e-6


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("deepseek_v3", "float32"), ("mistral4", "bfloat16"), ("mistral_large4", "float32")),
        pytest.param("deepseek_v32", "float32", marks=pytest.mark.stress),
        ("longcat_flash", "float32"),
        *(pytest.param(each, "bfloat16", marks=pytest.mark.stress) for each in ("mistral_large4", "longcat_flash")),
        *(pytest.param("glm_moe_dsa", each, marks=pytest.mark.stress) for each in ("float32", "bfloat16")),
        pytest.param("glm_moe_dsa_shared", "bfloat16", marks=pytest.mark.stress),
        pytest.param("deepseek_v32", "bfloat16", marks=pytest.mark.stress),
    ],
)
def test_row_has_equal_bits_alone_batched_and_chunked(name: str, dtype: str):
    model = load_model(latent_folder(name), dtype=dtype)
    whole = prompt_logits(model, LONG)
    for chunk in (7, 16, 63, 64, 65) if dtype == "float32" else (16, 65):
        assert all(map(torch.equal, prompt_logits(model, LONG, chunk), whole)), chunk
    assert torch.equal(prompt_logits(model, [LONG[0][:70]], 1)[0], whole[0][:70])
    assert torch.equal(prompt_logits(model, LONG[1:])[0], whole[1])


def test_chunks_differ_with_products_of_all_rows(monkeypatch: pytest.MonkeyPatch):
    """Negative control: torch's batched matmul, whose rows know each other."""

    def linear_of_heads(self: CpuKernels, x: Tensor, weight: Tensor, out: Tensor) -> None:
        out.copy_(torch.einsum("thi,hoi->tho", x, self.unpack_heads(weight)))

    model = load_model(latent_folder("deepseek_v3"))
    monkeypatch.setattr(CpuKernels, "linear_of_heads", linear_of_heads)
    whole = prompt_logits(model, PROMPTS)
    parts = [prompt_logits(model, PROMPTS, chunk) for chunk in (1, 7)]
    assert not all(map(torch.equal, [*parts[0], *parts[1]], whole * 2))
    assert relative_error(parts[0][2], whole[2]) < TOLERANCE


def test_latents_of_unusual_size_run_in_plain_torch(tmp_path: Path):
    """Complete keys fit the compiled attention, their values do not."""
    config = json.loads((latent_folder("deepseek_v3") / "config.json").read_text())
    config |= {"kv_lora_rank": 24, "qk_rope_head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path, load_format="dummy", num_blocks=8) as llm:
        (output,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1


def test_bfloat16_is_near_float32():
    """In the mean: now and then a token goes to another expert."""
    found = prompt_logits(load_model(latent_folder("deepseek_v3"), dtype="bfloat16"), PROMPTS)
    ours, theirs = torch.cat(found).float(), torch.cat(expected("deepseek_v3"))
    assert 1e-3 < float((ours - theirs).norm() / theirs.norm()) < 0.1


def test_absorbed_attention_equals_expanded():
    """A layer by itself, whose keys and values are computed from the checkpoint's matrix in float64."""
    model = load_model(latent_folder("deepseek_v3"))
    layer, config = model.model.layers[1].self_attn, model.model_config.layers[1]
    assert isinstance(layer, LatentAttention)
    latent = config.latent
    assert latent is not None
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(9, 4, latent.query_size, generator=generator)
    latents = torch.randn(9, latent.rank, generator=generator)
    tensors = load_file(latent_folder("deepseek_v3") / "model.safetensors")
    matrix = tensors["model.layers.1.self_attn.kv_b_proj.weight"].double().view(4, -1, latent.rank)
    keys, values = matrix.split((latent.nope_size, latent.value_size), dim=1)
    absorbed = torch.empty(9, 4, latent.rank)
    layer.kv_b_proj.to_latents(queries[..., : latent.nope_size], absorbed)
    scores = torch.einsum("thc,sc->hts", absorbed.double(), latents.double())
    expanded = torch.einsum("hnc,sc->hsn", keys, latents.double())
    wanted = torch.einsum("thn,hsn->hts", queries[..., : latent.nope_size].double(), expanded)
    assert relative_error(scores, wanted) < 1e-5
    weights = wanted.softmax(-1)
    found = layer.kv_b_proj.to_values(torch.einsum("hts,sc->thc", weights, latents.double()).float())
    wanted = torch.einsum("hts,hvc,sc->thv", weights, values, latents.double())
    assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v3", "mistral_large4_plain", "longcat_flash"),
        *(pytest.param(each, marks=pytest.mark.stress) for each in ("deepseek_v2_lite", "deepseek_v32", "glm_moe_dsa")),
    ],
)
def test_shards_equal_transformers_and_stages_one_rank(name: str):
    folder = latent_folder(name)

    def run(group: GroupHandle) -> list[Tensor]:
        model = new_model(folder, group)
        return [logits[:, : model.lm_head.shard.num_owned] for logits in prompt_logits(model, PROMPTS)]

    whole = [torch.cat(shards, dim=1) for shards in zip(*on_ranks(2, run), strict=True)]
    assert worst_error(name, whole) < TOLERANCE
    whole = prompt_logits(new_model(folder), PROMPTS, 7)
    staged = prompt_logits(TwoStages(folder, new_model), PROMPTS, 7)  # type: ignore[arg-type]  # as much as is used
    assert all(map(torch.equal, staged, whole))


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
ROWS = [random_prompt(length, seed=3, vocab_size=96) for length in (22, 40)]
ROWS += [ROWS[1][:36] + ROWS[0][:5]]


outputs = partial(ids_and_logprobs, params=GREEDY)


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v3", "longcat_flash"),
        *(
            pytest.param(each, marks=pytest.mark.stress)
            for each in ("mistral_large4", "deepseek_v32", "glm_moe_dsa_shared")
        ),
    ],
)
def test_greedy_rows_are_transformers_in_any_schedule(name: str):
    """Alone without a prefix cache, in one batch with one, cold and warm, and preempted by swapping."""
    folder, given = latent_folder(name), {"max_model_len": 64}
    with LLM(folder, num_blocks=60, enable_prefix_caching=False, **given) as llm:
        cold = [outputs(llm, [row])[0] for row in ROWS]
    assert [ids for ids, _ in cold] == [
        greedy_without_cache(latent_reference(name), row, GREEDY.max_tokens) for row in ROWS
    ]
    with LLM(folder, num_blocks=60, **given) as llm:
        assert outputs(llm, ROWS) == cold
        assert outputs(llm, ROWS) == cold
    few = {"num_blocks": 17, "preemption_mode": "swap", "block_size": 4, "swap_space": 0.01}
    with LLM(folder, **few, **given) as llm:
        assert outputs(llm, ROWS) == cold


def all_equal(one: DecoderForCausalLM, other: DecoderForCausalLM) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v3", "mistral_large4", "longcat_flash"),
        *(pytest.param(each, marks=pytest.mark.stress) for each in ("kimi_k25", "deepseek_v32")),
    ],
)
def test_weights_are_viewed_and_updated_by_name(name: str):
    """Packed ones by the compiled kernels, and those of two ranks."""
    folder = latent_folder(name)
    model, files = load_model(folder), load_file(latent_folder(name) / "model.safetensors")
    # transformers saves a norm of Kimi K2.5's tower by another name than the hub's.
    canonical = model.model_config.names.canonical
    tensors = {each: tensor for each, tensor in files.items() if not model.weights.names.is_derived(canonical(each))}
    with model.as_checkpoint() as view:
        assert {each: torch.equal(value, tensors[each]) for each, value in view.named_parameters()} == dict.fromkeys(
            tensors, True
        )
    whole = prompt_logits(model, PROMPTS)
    for given in (tensors, latent_reference(name).state_dict()):
        for parameter in model.parameters():
            parameter.data.zero_()
        assert model.load_weights(list(given.items())) == set(tensors)
        assert all(map(torch.equal, prompt_logits(model, PROMPTS), whole))

    def run(group: GroupHandle) -> dict[str, int]:
        with new_model(folder, group).as_checkpoint() as view:
            return {each: parameter.numel() for each, parameter in view.named_parameters()}

    first, second = on_ranks(2, run)
    projection = next(each for each in tensors if "kv_b" in each)
    assert first[projection] + second[projection] == tensors[projection].numel()
    assert all(first.get(each, 0) + second.get(each, 0) >= tensors[each].numel() for each in tensors)


def test_some_rows_of_a_packed_projection_are_replaced():
    """Rows that begin and end within heads."""
    model = load_model(latent_folder("deepseek_v3"))
    projection = model.model.layers[0].self_attn.kv_b_proj
    assert isinstance(projection, LatentProjection)
    assert projection.is_packed
    rows, columns = projection.shape_of("weight")
    assert (rows, columns) == (4 * (32 + 48), 32)
    whole = projection.read_region("weight", ((0, rows), (0, columns))).clone()
    region, values = ((70, 250), (3, 20)), torch.randn(180, 17)
    projection.write_region("weight", region, values)
    assert torch.equal(projection.read_region("weight", region), values)
    whole[70:250, 3:20] = values
    assert torch.equal(projection.read_region("weight", ((0, rows), (0, columns))), whole)


def test_adapters_of_the_projection_from_latents_are_rejected():
    model = load_model(latent_folder("deepseek_v3"))
    loaded = LoadedAdapters(model, AdapterLimits(max_loras=1, max_lora_rank=4, max_cpu_loras=1))

    def adapter(*modules: tuple[str, int, int]) -> Any:
        generator, tensors = torch.Generator().manual_seed(1), {}
        for module, num_outputs, num_inputs in modules:
            prefix = f"base_model.model.model.layers.1.self_attn.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, num_inputs, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(num_outputs, 4, generator=generator)
        return adapter_from_tensors({"peft_type": "LORA", "r": 4, "lora_alpha": 4}, tensors)

    with pytest.raises(AdapterError, match=r"kv_b_proj.* merge the adapter with model.lora_merge"):
        loaded.prepare(adapter(("kv_b_proj", 320, 32)))
    others = adapter(("q_a_proj", 32, 64), ("q_b_proj", 192, 32), ("kv_a_proj_with_mqa", 48, 64), ("o_proj", 64, 192))
    plain = prompt_logits(model, PROMPTS[1:2])[0]
    loaded.commit(loaded.prepare(others))
    adapted = prompt_logits(model, PROMPTS[1:2], loaded=loaded, digests=[others.digest])[0]
    assert relative_error(adapted, plain) > 0.01
    assert torch.equal(prompt_logits(model, PROMPTS[1:2], 5, loaded=loaded, digests=[others.digest])[0], adapted)


def test_adapters_of_indexers_change_the_choice():
    model = load_model(latent_folder("deepseek_v32"))
    loaded = LoadedAdapters(model, AdapterLimits(max_loras=1, max_lora_rank=4, max_cpu_loras=1))
    generator, tensors = torch.Generator().manual_seed(1), {}
    for layer in range(3):
        for module, num_outputs, num_inputs in (("wq_b", 16 * 32, 32), ("wk", 32, 64)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.indexer.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, num_inputs, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(num_outputs, 4, generator=generator)
    adapter = adapter_from_tensors({"peft_type": "LORA", "r": 4, "lora_alpha": 4}, tensors)
    loaded.commit(loaded.prepare(adapter))
    plain, given = prompt_logits(model, PROMPTS[1:2])[0], {"loaded": loaded, "digests": [adapter.digest]}
    adapted = prompt_logits(model, PROMPTS[1:2], **given)[0]
    assert torch.equal(adapted[:12], plain[:12]), "these tokens see all keys"
    assert relative_error(adapted, plain) > 0.01
    assert torch.equal(prompt_logits(model, PROMPTS[1:2], 5, **given)[0], adapted)


def test_shared_choices_stay_on_one_stage():
    config = read_model_files(latent_folder("glm_moe_dsa_shared")).model_config
    check_divides(RankLayout(2), config)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2 .* choices of keys"):
        check_divides(RankLayout(1, 2), config)
    check_divides(RankLayout(1, 2), read_model_files(latent_folder("glm_moe_dsa")).model_config)


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        (partial(latent_folder, "deepseek_v3"), "keeps latents"),
        (partial(expert_folder, "minimax_m3"), "virtual tokens have no keys by which layers of this model choose"),
    ],
)
def test_keys_of_virtual_tokens_are_rejected(folder: Callable[[], Path], words: str):
    config = read_model_files(folder()).model_config
    adapter = SimpleNamespace(subject="adapter", tensor=torch.zeros(4, 3 * 2 * config.head_size))
    stage: Any = Stage(0, 3, is_first=True, is_last=True)
    given: Any = adapter
    with pytest.raises(AdapterError, match=f"{words} .* PREFIX_TUNING is not supported"):
        keys_values_for(given, config, torch.float32, stage, (0, 1))


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("deepseek_v32", marks=pytest.mark.stress)])
def test_fp8_blocks_are_dequantised(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantised_files, "BLOCK", (16, 16))
    blocks = Format({"quant_method": "fp8", "weight_block_size": [16, 16], "fmt": "e4m3"}, fp8_block)
    monkeypatch.setitem(FORMATS, "latent blocks", blocks)
    stored, plain = quantise(latent_folder(name), tmp_path, "latent blocks")
    one, other = (prompt_logits(load_model(folder), PROMPTS) for folder in (stored, plain))
    assert all(map(torch.equal, one, other))
    assert worst_error(name, one) > TOLERANCE


def test_layers_that_speculate_are_ignored(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(latent_folder("deepseek_v3"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert all_equal(new_model(folder), new_model(latent_folder("deepseek_v3")))


def with_layers(config: ModelConfig, change: Callable[[LayerConfig], LayerConfig]) -> ModelConfig:
    return replace(config, layers=tuple(map(change, config.layers)))


def with_experts(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    def change(layer: LayerConfig) -> LayerConfig:
        return layer if layer.experts is None else replace(layer, experts=replace(layer.experts, **changes))

    return lambda config: with_layers(config, change)


def with_indexer(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    def change(layer: LayerConfig) -> LayerConfig:
        latent = layer.latent
        assert latent is not None
        assert latent.indexer is not None
        return replace(layer, latent=replace(latent, indexer=replace(latent.indexer, **changes)))

    return lambda config: with_layers(config, change)


def with_latent(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    def change(layer: LayerConfig) -> LayerConfig:
        assert layer.latent is not None
        return replace(layer, latent=replace(layer.latent, **changes))

    return lambda config: with_layers(config, change)


def with_rope(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, ropes=(replace(config.ropes[0], **changes),))


def with_scale(root: Callable[[LayerConfig], int]) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: with_layers(config, lambda layer: replace(layer, scale=root(layer) ** -0.5))


MISTAKES: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig]]] = {
    "halves are rotated": ("deepseek_v3", with_rope(is_interleaved=False)),
    "scale without YaRN": ("deepseek_v3", with_scale(lambda layer: 48)),
    "scale of the unrotated part": ("deepseek_v3", with_scale(lambda layer: 32)),
    "no scaling of experts": ("deepseek_v3", with_experts(scaling=1.0)),
    "no groups": ("deepseek_v3", with_experts(num_groups=1, num_chosen_groups=1)),
    "a group's best": ("deepseek_v3", with_experts(groups_by_best=True)),
    "a group's two best": ("deepseek_v2", with_experts(groups_by_best=False)),
    "not renormalised": ("deepseek_v3", with_experts(renormalises=False)),
    "softmax": ("deepseek_v3", with_experts(score="softmax")),
    "queries that do not grow": ("mistral4", with_rope(query_growth=0.0)),
    "a part of the part": ("mistral4", with_rope(partial_factor=0.5)),
    "sigmoid": ("mistral4", with_experts(score="sigmoid")),
    "every key is seen": ("deepseek_v32", with_indexer(num_chosen=1000)),
    "a key too few": ("deepseek_v32", with_indexer(num_chosen=11)),
    "neighbours are rotated": ("deepseek_v32", with_indexer(is_interleaved=True)),
    "halves are rotated by an indexer": ("glm_moe_dsa", with_indexer(is_interleaved=False)),
    "latents that are not multiplied": ("longcat_flash", with_latent(multiplier=1.0)),
    "queries that are not multiplied": ("longcat_flash", with_scale(lambda layer: 48)),
    "identity experts' weights are renormalised": ("longcat_flash", with_experts(renormalises=True)),
    "norms of latents with the usual epsilon": ("mistral_large4", with_latent(norm_eps=1e-6)),
    "logits without a bound": ("mistral_large4", lambda config: replace(config, logit_cap=0.0)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_detects_each_mistake(mistake: str):
    assert _is_detected(*MISTAKES[mistake])


def _is_detected(name: str, change: Callable[[ModelConfig], ModelConfig]) -> bool:
    folder = latent_folder(name)
    model = load_model(folder, change(read_model_files(folder).model_config))
    return worst_error(name, prompt_logits(model, PROMPTS)) > 10 * TOLERANCE


def test_comparison_detects_norms_with_the_files_epsilon():
    assert _is_detected("deepseek_v3", with_latent(norm_eps=0.03))


def is_case_noticed(name: str) -> bool:
    def logits_of(folder: Path) -> list[Tensor]:
        return prompt_logits(load_model(folder), PROMPTS[1:2])

    def is_right(logits: list[Tensor]) -> bool:
        return relative_error(logits[0], expected(name)[1]) < TOLERANCE

    return is_noticed((latent_folder(name), thinned_latent_folder(name)), logits_of, is_right)


MINIMAL = {"vocab_size": 300_000, "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 5}
MINIMAL |= {"num_attention_heads": 64, "num_experts_per_tok": 2}
TYPES = {"DeepseekV2": "deepseek_v2", "DeepseekV3": "deepseek_v3", "Glm4MoeLite": "glm4_moe_lite"}
TYPES |= {"Mistral4": "mistral4", "DeepseekV32": "deepseek_v32", "GlmMoeDsa": "glm_moe_dsa"}
_UNSEEN = ("models", "defaults", "required", "names.ignores_later_layers", "variants")


SAME_FUNCTION = {
    # Stacks that are as in memory are read without it too; what is viewed and saved has other names.
    ("Mistral4ForCausalLM", "names.stacked"),
    # A head for drafts.
    ("LongcatFlashForCausalLM", "names.ignored_prefixes"),
    # Names in memory, by which weights are updated.
    *(("MistralLarge4ForConditionalGeneration", f"names.{each}") for each in ("aliases", "layer_aliases")),
}


def mutants(row: Family) -> list[tuple[str, Family]]:
    """The row with one entry as Llama has it, or without one default or required value."""
    tables = [
        (f"{table}.{key}", replace(row, **{table: {each: given[each] for each in given if each != key}}))
        for table in ("defaults", "required")
        for given in [getattr(row, table)]
        for key in given
    ]
    return entries(row, Family(), *_UNSEEN) + tables


def readings(architecture: str) -> list[Any]:
    """Meanings of minimal files, of one with no sizes, and of others for each value that is required."""
    whole = {"architectures": [architecture], **MINIMAL}
    files = [whole, {"architectures": [architecture], "num_experts_per_tok": 2}, {"architectures": [architecture]}]
    files += [{**whole, key: "other"} for key in FAMILIES[architecture].required]
    files += [
        {**whole, **other} for other in ({"attention_bias": True}, {"mlp_bias": True}, {"num_key_value_heads": 3})
    ]
    files += [{**whole, "mlp_layer_types": ["sparse"] * 5, "routed_scaling_factor": 2.0, "n_group": 2}]
    files += [{**whole, key: None} for key in ("q_lora_rank", "rope_parameters")]
    files += [{**whole, "mlp_layer_types": ["sparse"] * 5}]
    found: list[Any] = []
    for config in files:
        try:
            found.append(model_config_of(config, Path("config.json")))
        except SpmdError as error:
            found.append(str(error))
    return found


@pytest.mark.stress
@pytest.mark.parametrize(
    "architecture", [each for each in (*LATENT_ROWS, *MISTRAL_LARGE_ROWS, *LONGCAT_ROWS) if each not in NEWER]
)
def test_comparison_detects_each_row_entry_set_to_plain(architecture: str, monkeypatch: pytest.MonkeyPatch):
    cases = [name for name, (family, _) in CASES.items() if architecture.startswith(f"{family}For")]
    right, silent = readings(architecture), []
    for what, mutant in mutants(FAMILIES[architecture]):
        monkeypatch.setitem(FAMILIES, architecture, mutant)
        if readings(architecture) == right and not any(map(is_case_noticed, cases)):
            silent.append(what)
    assert [what for what in silent if (architecture, what) not in SAME_FUNCTION] == []


@pytest.mark.parametrize("family", TYPES)
def test_defaults_of_omitted_keys_equal_transformers(family: str):
    config = {"architectures": [f"{family}ForCausalLM"], "model_type": TYPES[family]}
    config |= {"num_experts_per_tok": 2} if family == "DeepseekV2" else {}
    theirs, ours = AutoConfig.for_model(**config), model_config_of(config, Path("config.json"))
    layer, experts = ours.layers[-1], ours.layers[-1].experts
    assert layer.latent is not None
    assert experts is not None
    sizes = ("vocab_size", "hidden_size", "num_layers", "max_position_embeddings")
    assert [getattr(ours, each) for each in sizes] == [
        getattr(theirs, each.replace("num_layers", "num_hidden_layers")) for each in sizes
    ]
    assert (layer.num_heads, layer.intermediate_size) == (theirs.num_attention_heads, theirs.intermediate_size)
    assert (layer.latent.rank, layer.latent.query_rank) == (theirs.kv_lora_rank, theirs.q_lora_rank)
    parts = (layer.latent.nope_size, layer.latent.rope_size, layer.latent.value_size)
    assert parts == (theirs.qk_nope_head_dim, theirs.qk_rope_head_dim, theirs.v_head_dim)
    if layer.latent.indexer is not None:
        found = (layer.latent.indexer.num_heads, layer.latent.indexer.head_size, layer.latent.indexer.num_chosen)
        assert found == (theirs.index_n_heads, theirs.index_head_dim, theirs.index_topk)
    assert (layer.latent.indexer is not None) == hasattr(theirs, "index_topk")
    assert layer.norm.eps == theirs.rms_norm_eps
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert (experts.num_experts, experts.num_chosen) == (theirs.n_routed_experts, theirs.num_experts_per_tok)
    assert (experts.intermediate_size, experts.scaling) == (theirs.moe_intermediate_size, theirs.routed_scaling_factor)
    assert experts.shared_size == theirs.n_shared_experts * theirs.moe_intermediate_size
    assert experts.renormalises == theirs.norm_topk_prob
    assert (experts.num_groups, experts.num_chosen_groups) == (theirs.n_group or 1, theirs.topk_group or 1)
    num_dense = sum(each.experts is None for each in ours.layers)
    kinds = getattr(theirs, "mlp_layer_types", None)
    assert num_dense == (kinds.count("dense") if kinds else theirs.first_k_dense_replace)
    assert ours.ropes[0].query_growth == theirs.rope_parameters.get("llama_4_scaling_beta", 0.0)


BAD = [
    ("DeepseekV3", {"rope_interleave": False}, "rope_interleave=False is not supported, only True"),
    ("DeepseekV2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported, only False"),
    ("DeepseekV2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported, only 'greedy'"),
    ("DeepseekV3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7"),
    ("DeepseekV3", {"kv_lora_rank": 0}, "kv_lora_rank=0 must be a whole number from 1"),
    ("DeepseekV3", {"q_lora_rank": 1.5}, "q_lora_rank=1.5 must be a whole number from 1"),
    ("Glm4MoeLite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types=['dense'] must list 5 of dense and sparse"),
    ("DeepseekV32", {"index_topk": 0}, "index_topk=0 must be a whole number from 1"),
    ("DeepseekV32", {"index_n_heads": 1.5}, "index_n_heads=1.5 must be a whole number from 1"),
    ("DeepseekV32", {"index_head_dim": 32}, "index_head_dim=32 must be at least qk_rope_head_dim, 64"),
    (
        "GlmMoeDsa",
        {"indexer_types": ["full"] * 4},
        "indexer_types=['full', 'full', 'full', 'full'] must list 5 of full",
    ),
    ("GlmMoeDsa", {"index_topk_pattern": "SFFFF"}, "must let the first layer choose the keys"),
    ("GlmMoeDsa", {"index_topk_pattern": 5}, "index_topk_pattern=5 must list 5 of F and S"),
    ("GlmMoeDsa", {"index_topk_freq": 1.5}, "index_topk_freq=1.5 must be a whole number from 0"),
    ("GlmMoeDsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave=False is not supported, only True"),
]


@pytest.mark.parametrize(("family", "keys", "message"), BAD, ids=[f"{each[0]} {list(each[1])}" for each in BAD])
def test_invalid_latent_keys_are_rejected_by_key(family: str, keys: dict[str, Any], message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**MINIMAL, "architectures": [f"{family}ForCausalLM"], **keys}))
    with pytest.raises(ModelConfigError) as caught:
        read_model_files(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name", ["deepseek_v2_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa_shared", "mistral_large4", "longcat_flash"]
)
def test_planned_weights_equal_parameters(name: str):
    config = read_model_files(latent_folder(name)).model_config
    for size in (1, 2):
        found = on_ranks(
            size, lambda group: sum(each.nbytes for each in new_model(latent_folder(name), group).parameters())
        )
        planned = [weights_bytes(config, RankLayout(size), rank, "float32", "cuda") for rank in range(size)]
        assert planned == found


REAL: dict[str, tuple[str, dict[str, Any], float]] = {
    "DeepSeek-V2-Lite": ("DeepseekV2", {"num_hidden_layers": 27, "num_experts_per_tok": 6, "q_lora_rank": None}, 30.4),
    "DeepSeek-V3": ("DeepseekV3", {}, 68.6),
    "GLM-4.7-Flash": ("Glm4MoeLite", {}, 52.9),
    "Mistral Small 4": ("Mistral4", {}, 22.5),
    # Latents and an indexer's keys.
    "DeepSeek-V3.2": ("DeepseekV32", {}, 83.9),
    "GLM-5": ("GlmMoeDsa", {}, 107.3),
}


@pytest.mark.parametrize("model", REAL)
def test_cache_bytes_of_a_token_are_latents(model: str):
    family, keys, kib = REAL[model]
    config = model_config_of({"architectures": [f"{family}ForCausalLM"], **keys}, Path("config.json"))
    for size in (1, 4):
        spec = cache_spec(config, RankLayout(size), 0, "bfloat16", 16)
        assert abs(spec.block_bytes / 16 / 1024 - kib) < 0.05
        assert {(each.num_heads, each.value_size) for each in spec.shapes} == {(1, 0)}


def test_int8_leaves_the_projection_from_latents(tmp_path: Path):
    """Of a model without experts, which are not quantised."""
    folder = tmp_path / "model"
    shutil.copytree(latent_folder("deepseek_v3"), folder)
    edit(folder / "config.json", first_k_dense_replace=LATENT["num_hidden_layers"])
    model, _ = load(latent_folder("deepseek_v3"))
    tensors = load_file(folder / "model.safetensors")
    dense = {each: tensor for each, tensor in tensors.items() if ".mlp." not in each}
    for layer in range(LATENT["num_hidden_layers"]):
        names = ("gate_proj", "up_proj", "down_proj")
        dense |= {
            f"model.layers.{layer}.mlp.{each}.weight": tensors[f"model.layers.0.mlp.{each}.weight"] for each in names
        }
    save_file({each: tensor.clone() for each, tensor in dense.items()}, folder / "model.safetensors", {"format": "pt"})
    plain, quantised = (prompt_logits(load_model(folder, quantization=each), PROMPTS) for each in (None, "int8"))
    model = load_model(folder, quantization="int8")
    attention = model.model.layers[0].self_attn
    assert attention.o_proj.weight.dtype == attention.latent_proj.weight.dtype == torch.int8
    assert attention.kv_b_proj.weight.dtype == torch.float32
    assert 1e-3 < max(map(relative_error, quantised, plain)) < 0.2
    planned = weights_bytes(model.model_config, RankLayout(1), 0, "float32", "cpu", "int8")
    assert planned == sum(each.nbytes for each in {id(each): each for each in model.parameters()}.values())
