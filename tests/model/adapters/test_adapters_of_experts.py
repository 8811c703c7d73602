"""LoRA of experts and routers: logits are PEFT's, and a row's bits do not depend on the batch, the chunks or the file.

PEFT wraps stacks (`target_parameters`); files with a module for each expert are made of such an adapter.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conv_checkpoints import conv_folder
from delta_checkpoints import delta_folder
from expert_checkpoints import CASES as FAMILIES
from expert_checkpoints import expert_folder, open_experts
from expert_models import PLACED, new_model
from hybrid_runs import run_rows
from latent_checkpoints import latent_folder
from leaf_models import leaf_folder
from mamba_checkpoints import mamba_folder, open_mamba
from our_model import load_model, prompt_logits
from peft import PeftModel
from peft_adapters import Settings, peft_logits, write_adapter
from recent_checkpoints import recent_folder
from reference_models import random_prompt, relative_error
from run_folder import made_once
from thread_groups import on_ranks
from torch import Tensor

from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.errors import AdapterError
from spmd_worker.model.adapters.expert_modules import by_expert
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.adapters.merge import weight_updates
from spmd_worker.model.adapters.peft_config import PeftConfig
from spmd_worker.model.adapters.source import (
    AdapterModule,
    AdapterSource,
    adapter_from_tensors,
    read_adapter,
    read_config,
    read_tensors,
)
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.experts import SparseFeedForward
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.leaves import num_leaves

LIMITS = AdapterLimits(max_loras=4, max_lora_rank=16, max_cpu_loras=4, of_experts=True)
PROMPTS = [random_prompt(length, 3, vocab_size=96) for length in (1, 17, 9, 30)]
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
PATTERNS: Settings = (
    ("rank_pattern", {"experts.down_proj": 5, "0.mlp.gate.weight": 2}),
    ("alpha_pattern", {r"layers\.1\.mlp\.experts\.gate_up_proj": 30}),
    ("use_rslora", True),
)
ANYWHERE = ("experts.gate_up_proj", "experts.down_proj")
FOLDERS = {
    "llama4": recent_folder,
    "gemma4": recent_folder,
    "deepseek_v3": latent_folder,
    "longcat_flash": latent_folder,
}
"""Checkpoints that are not of `expert_checkpoints`: PEFT takes inputs of Llama 4's stacks for outputs."""
BESIDE = ("dbrx", "mixtral", "qwen2_moe", "gpt_oss", "glm4_moe", "olmoe", "granite_moe")
"""DBRX has flat stacks, and the others are cases with more."""
CASES: dict[str, tuple[str, tuple[str, ...], Settings]] = {
    "mixtral": ("mixtral", (*STACKS, "mlp.gate.weight"), PATTERNS),
    "qwen2_moe": ("qwen2_moe", (*STACKS, "mlp.gate.weight", "shared_expert_gate.weight"), ()),
    "gpt_oss": ("gpt_oss", (*STACKS, "mlp.router.weight"), ()),
    "glm4_moe": ("glm4_moe", STACKS, ()),
    "down_alone": ("qwen3_moe", STACKS[1:], ()),
    "olmoe": ("olmoe", STACKS, ()),
    "granite_moe": ("granite_moe", ANYWHERE, ()),
    "llama4": ("llama4", ANYWHERE, ()),
    **{
        name: (name, ANYWHERE, ())
        for name in ("deepseek_v3", "longcat_flash", "gemma4", *FAMILIES)
        if name not in BESIDE
    },
}
"""Family, `target_parameters` and more arguments of LoraConfig."""


def folder_of(case: str) -> Path:
    family = CASES[case][0]
    return FOLDERS.get(family, expert_folder)(family)


def adapter_of(case: str) -> Path:
    """The PEFT folder of a case, of which attention has matrices too; written once a run."""
    _, parameters, more = CASES[case]
    options = {
        "r": 3,
        "lora_alpha": 9,
        "target_modules": r".*layers\.\d+\..*o(ut)?_proj",
        "target_parameters": list(parameters),
    }
    settings = tuple((options | dict(more)).items())
    name = f"adapter of experts {case}"
    return made_once(name, lambda folder: write_adapter(open_experts(folder_of(case)), folder, settings))


@cache
def our_model_of(case: str) -> DecoderForCausalLM:
    return load_model(folder_of(case), max_images=0)


@cache
def theirs(case: str) -> list[Tensor]:
    reference = open_experts(folder_of(case))
    model = PeftModel.from_pretrained(reference, adapter_of(case)).eval()
    return [peft_logits(model, prompt) for prompt in PROMPTS]


def loaded_logits(
    model: DecoderForCausalLM,
    sources: Sequence[AdapterSource | None],
    prompts: list[list[int]] = PROMPTS,
    **options: Any,
) -> list[Tensor]:
    """Logits of prompts, each with one of `sources`."""
    loaded = LoadedAdapters(model, LIMITS)
    for source in {each.digest: each for each in sources if each is not None}.values():
        loaded.commit(loaded.prepare(source))
    digests = [0 if each is None else each.digest for each in sources]
    return prompt_logits(model, prompts, loaded=loaded, digests=digests, **options)


def worst_error(case: str) -> float:
    source = read_adapter(adapter_of(case))
    found = loaded_logits(our_model_of(case), [source] * len(PROMPTS))
    return max(map(relative_error, found, theirs(case)))


@pytest.mark.gate("mixtral", "gpt_oss")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case: str):
    assert worst_error(case) < 1e-4
    plain = prompt_logits(our_model_of(case), PROMPTS)
    assert min(map(relative_error, plain, theirs(case))) > 1e-2


HYBRIDS = {
    "nemotron": (mamba_folder, ("experts.up_proj", "experts.down_proj")),
    "nemotron_latent": (mamba_folder, ("experts.up_proj", "experts.down_proj")),
    "lfm2_moe": (conv_folder, ANYWHERE),
    "qwen3_next": (delta_folder, ANYWHERE),
}


@pytest.mark.stress
@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_of_hybrids_are_those_of_peft(name: str, tmp_path: Path):
    """Experts without gates, and in fewer dimensions, are among them."""
    folder_of_kind, parameters = HYBRIDS[name]
    folder = folder_of_kind(name)
    settings = (
        ("target_modules", r".*self_attn\.o(ut)?_proj|.*mixer\.o_proj"),
        ("target_parameters", list(parameters)),
    )
    write_adapter(open_mamba(folder), tmp_path, settings)
    reference = PeftModel.from_pretrained(open_mamba(folder), tmp_path).eval()
    model, source = load_model(folder), read_adapter(tmp_path)
    loaded = LoadedAdapters(model, LIMITS)
    loaded.commit(loaded.prepare(source))
    found, _ = run_rows([model], PROMPTS, loaded=loaded, digests=[source.digest] * len(PROMPTS))
    plain, _ = run_rows([model], PROMPTS)
    for ours, without, prompt in zip(found, plain, PROMPTS, strict=True):
        assert relative_error(ours, peft_logits(reference, prompt)) < 1e-4
        assert relative_error(without, ours) > 1e-2


def _permuted(right: Callable[..., AdapterModule], module: AdapterModule, expert: int, rows: slice) -> AdapterModule:
    return right(module, (expert + 1) % module.num_experts, rows)


def _minor(right: Callable[..., AdapterModule], module: AdapterModule, expert: int, rows: slice) -> AdapterModule:
    """Columns of B expert by expert, like rows of A."""
    b = module.b.view(len(module.b), module.num_experts, module.rank)[rows, expert]
    return replace(right(module, expert, rows), b=b)


@pytest.mark.parametrize("fault", ["scale", "experts", "order", "wrappers"])
def test_comparison_detects_faults(fault: str, monkeypatch: pytest.MonkeyPatch):
    of_expert = AdapterModule.of_expert
    if fault == "scale":
        monkeypatch.setattr(PeftConfig, "scaling_of", lambda *_: 1.0)
    elif fault == "wrappers":
        right = PeftConfig.parameters_of
        monkeypatch.setattr(PeftConfig, "parameters_of", lambda *of: right(*of)[::-1])
        with pytest.raises(AdapterError, match=r"lora_A \[40, 64\] must be|experts"):
            worst_error("mixtral")
        return
    else:
        wrong = partial(_permuted if fault == "experts" else _minor, of_expert)
        monkeypatch.setattr(AdapterModule, "of_expert", lambda *of: wrong(*of))
    assert worst_error("mixtral") > 1e-3


def apart(source: AdapterSource, model: DecoderForCausalLM, names: Sequence[str]) -> AdapterSource:
    """The adapter as files have it whose model has a module for each matrix of an expert."""
    modules = {}
    for name, module in source.modules.items():
        matrices = names[:2] if name.endswith("gate_up_proj") else names[2:]
        rows = len(module.b) // len(matrices)
        for expert in range(module.num_experts):
            for part, matrix in enumerate(matrices):
                found = module.of_expert(expert, slice(part * rows, (part + 1) * rows))
                modules[f"{name.rpartition('.')[0]}.{expert}.{matrix}"] = found
        if not module.num_experts:
            modules[name] = module
    return replace(source, modules=modules)


@pytest.mark.gate("mixtral-*")
@pytest.mark.parametrize(
    ("case", "names"), [("mixtral", ("w1", "w3", "w2")), ("glm4_moe", ("gate_proj", "up_proj", "down_proj"))]
)
def test_modules_of_experts_have_the_bits_of_stacks(case: str, names: tuple[str, ...]):
    model, source = our_model_of(case), read_adapter(adapter_of(case))
    modules = apart(source, model, names)
    if case == "mixtral":
        older = {name.replace("mlp.", "block_sparse_moe."): each for name, each in modules.modules.items()}
        modules = replace(modules, modules=older)
    found, expected = (loaded_logits(model, [each] * len(PROMPTS)) for each in (modules, source))
    assert all(map(torch.equal, found, expected))


ROWS = [("bfloat16", None), ("float32", None), ("bfloat16", "int8")]


@pytest.mark.gate("mixtral-bfloat16-None", "mixtral-bfloat16-int8")
@pytest.mark.parametrize(("dtype", "quantization"), ROWS)
@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "qwen2_moe"])
def test_row_has_equal_bits_in_any_batch(case: str, dtype: str, quantization: str | None):
    model = load_model(folder_of(case), dtype=dtype, quantization=quantization)
    without = prompt_logits(model, PROMPTS)
    first = read_adapter(adapter_of(case))
    second = replace(first, modules={name: replace(each, scaling=-2.0) for name, each in first.modules.items()})
    sources = [first, None, second, first]
    mixed = loaded_logits(model, sources)
    assert all(map(torch.equal, loaded_logits(model, sources, chunk=4, is_fused=(True, False)), mixed))
    for prompt, source, logits, plain in zip(PROMPTS, sources, mixed, without, strict=True):
        assert torch.equal(loaded_logits(model, [source], [prompt])[0], logits)
        assert torch.equal(logits, plain) == (source is None)


LAYOUTS = {"columns": None, "experts": ExpertLayout(PLACED), "exact": ExpertLayout(PLACED, is_exact=True)}


@pytest.mark.gate("mixtral-columns", "mixtral-experts", "mixtral-exact")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "qwen2_moe"])
def test_logits_on_ranks_are_those_of_peft(case: str, layout: str):
    source = read_adapter(adapter_of(case))

    def run(group: Any) -> list[Tensor]:
        model = new_model(folder_of(case), group, layout=LAYOUTS[layout])
        logits = loaded_logits(model, [source] * len(PROMPTS))
        return [each[:, : model.lm_head.shard.num_owned] for each in logits]

    found = [torch.cat(shards, dim=1) for shards in zip(*on_ranks(2, run), strict=True)]
    assert max(map(relative_error, found, theirs(case))) < 1e-4


def leaf_adapter(model: DecoderForCausalLM) -> AdapterSource:
    """Matrices of all experts and of q_proj."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name in LoadedAdapters(model, LIMITS).targets.linears:
        if "experts" in name or "q_proj" in name:
            shape = model.weights.shapes[f"{name}.weight"]
            tensors[f"{name}.lora_A.weight"] = torch.randn((5, shape[1]), generator=generator) * shape[1] ** -0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn((shape[0], 5), generator=generator) * 0.3
    return adapter_from_tensors({"peft_type": "LORA", "r": 5, "lora_alpha": 5}, tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.stress)])
def test_leaves_give_any_number_of_ranks_equal_logits(dtype: torch.dtype):
    model_config = read_model_files(leaf_folder("mixtral")).model_config
    count = num_leaves(model_config, 8)

    def run(group: Any) -> list[Tensor]:
        parts = (group, ReferenceKernels(), SdpaBackend(), dtype, torch.device("cpu"))
        model = build_model(LayerContext(*parts, num_leaves=count), model_config)
        model.weights.fill(model.weights.dummy(0))
        model.pack_weights()
        source = leaf_adapter(model)
        logits = loaded_logits(model, [source, None, source, source])
        return [each[:, : model.lm_head.shard.num_owned] for each in logits]

    one, four = (
        [torch.cat(each, dim=1) for each in zip(*on_ranks(size, run, adds_by_tree=True), strict=True)]
        for size in (1, 4)
    )
    assert count >= 4
    assert all(map(torch.equal, one, four))


@pytest.mark.gate("gpt_oss")
@pytest.mark.parametrize("case", ["gpt_oss", "mixtral", "granite_moe"])
def test_merged_adapter_is_that_of_rows(case: str):
    model = load_model(folder_of(case), lora_merge=adapter_of(case))
    assert max(map(relative_error, prompt_logits(model, PROMPTS), theirs(case))) < 1e-4


def test_adapters_of_experts_are_refused():
    model, source = load_model(expert_folder("mixtral")), read_adapter(adapter_of("mixtral"))
    with pytest.raises(
        AdapterError, match=r"experts\.0\.w1, of 96 of experts: adapters .* need room .* model\.lora_experts=true"
    ):
        LoadedAdapters(model, replace(LIMITS, of_experts=False)).prepare(source)


FAULTS: dict[str, tuple[str, tuple[int, int], tuple[int, int], str]] = {
    "rank": (
        STACKS[0],
        (17, 64),
        (64, 17),
        r"experts: lora_A \[17, 64\] must be \[experts \* rank, inputs\], of the rank 2",
    ),
    "empty": (STACKS[0], (0, 64), (64, 0), r"experts: lora_A \[0, 64\] must be"),
    "count": (STACKS[0], (18, 64), (64, 18), "experts.gate_up_proj: the model has no such module"),
    "inputs": (
        STACKS[1],
        (16, 0),
        (64, 16),
        r"0\.w2: lora_A \[2, 0\] and lora_B \[64, 2\], but .* has 32 inputs and 64",
    ),
    "bias": ("experts.down_proj_bias", (2, 64), (8, 2), "has down_proj_bias, and adapters of biases are not computed"),
    "elsewhere": ("mlp.other.down_proj", (16, 32), (64, 16), "experts: lora_A has the rank 16"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_stack_that_does_not_fit_is_named(fault: str):
    parameter, a, b, words = FAULTS[fault]
    name = "base_model.model.model.layers.0.mlp.experts"
    tensors = {f"{name}.lora_A.weight": torch.ones(a), f"{name}.lora_B.weight": torch.ones(b)}
    config = {"peft_type": "LORA", "r": 2, "target_parameters": [parameter]}
    with pytest.raises(AdapterError, match=words):
        LoadedAdapters(our_model_of("mixtral"), LIMITS).prepare(adapter_from_tensors(config, tensors))


def test_trainers_tensors_may_have_any_strides():
    folder = adapter_of("mixtral")
    tensors, config = read_tensors(folder), read_config(folder)
    turned = {name: each.t().contiguous().t() for name, each in tensors.items()}
    model = our_model_of("mixtral")
    found, expected = (
        loaded_logits(model, [adapter_from_tensors(config, each)] * len(PROMPTS)) for each in (turned, tensors)
    )
    assert all(map(torch.equal, found, expected))


def test_step_without_loaded_adapter_calls_all_experts_at_once(monkeypatch: pytest.MonkeyPatch):
    model, source = load_model(expert_folder("mixtral")), read_adapter(adapter_of("mixtral"))
    loaded = LoadedAdapters(model, LIMITS)
    attention = replace(source, modules={name: each for name, each in source.modules.items() if "o_proj" in name})
    loaded.commit(loaded.prepare(attention))
    loaded.commit(loaded.prepare(source))
    loaded.remove(source.digest)
    monkeypatch.setattr(SparseFeedForward, "_calls", lambda *_: pytest.fail("one by one"))
    prompt_logits(model, PROMPTS[:1], loaded=loaded, digests=[attention.digest])


def stack_adapter(model: DecoderForCausalLM, *, is_turned: bool) -> AdapterSource:
    """Matrices of both stacks of layer 0 as a release of PEFT has them that knows no class's order, or does."""
    generator, tensors = torch.Generator().manual_seed(2), {}
    name = "base_model.model.model.layers.0.mlp.experts"
    for path, parameter in ((f"{name}.base_layer", STACKS[0]), (name, STACKS[1])):
        outputs, inputs = (64, 64) if parameter == STACKS[0] else (64, 32)
        module = AdapterModule(
            torch.randn(16, inputs, generator=generator), torch.randn(outputs, 16, generator=generator), 1.0, 8
        )
        module = module.turned() if is_turned else module
        tensors |= {f"{path}.lora_A.weight": module.a, f"{path}.lora_B.weight": module.b}
    return adapter_from_tensors({"peft_type": "LORA", "r": 2, "target_parameters": list(STACKS)}, tensors)


def test_square_stacks_turn_with_the_others():
    """OLMoE's gate_up_proj is square: its sizes do not say which dimension has inputs."""
    model = our_model_of("mixtral")
    names, shapes = model.weights.names, model.weights.shapes
    straight, turned = (by_expert(stack_adapter(model, is_turned=each), names, shapes) for each in (False, True))
    assert [*straight.modules] == [*turned.modules]
    for name, module in straight.modules.items():
        assert torch.equal(module.a, turned.modules[name].a)
        assert torch.equal(module.b, turned.modules[name].b), name


def test_second_matrices_of_an_expert_are_named():
    """Matrices in a stack and in a module of its expert, and under two names of a module: one was used, silently."""
    model = our_model_of("mixtral")
    source, pair = stack_adapter(model, is_turned=False), AdapterModule(torch.ones(2, 64), torch.ones(32, 2), 1.0)
    one, other = "model.layers.0.mlp.experts.3.w1", "model.layers.0.block_sparse_moe.experts.3.w1"
    for modules in (source.modules | {other: pair}, {one: pair, other: pair}):
        with pytest.raises(AdapterError, match=r"experts\.3\.w1"):
            weight_updates(replace(source, modules=modules), model.weights.names, model.weights.shapes)
        with pytest.raises(AdapterError, match=r"experts\.3\.w1"):
            LoadedAdapters(model, LIMITS).prepare(replace(source, modules=modules))
    again = {name.replace("mlp.", "block_sparse_moe."): module for name, module in source.modules.items()}
    words = r"block_sparse_moe\.experts\.down_proj: has matrices of .*0\.w2, as .*\.mlp\.experts\.down_proj has"
    with pytest.raises(AdapterError, match=words):
        LoadedAdapters(model, LIMITS).prepare(replace(source, modules=source.modules | again))


@pytest.mark.parametrize("module", ["gate_up_proj.foo", "gate_up_proj.-1", "down_proj.8", "down_proj.03"])
def test_expert_that_is_not_there_is_named(module: str):
    """A name that is no number ended a job that merges the adapter, by ValueError."""
    model, name = our_model_of("gpt_oss"), f"model.layers.0.mlp.experts.{module}"
    tensors = {f"{name}.lora_A.weight": torch.ones(2, 64), f"{name}.lora_B.weight": torch.ones(64, 2)}
    source = adapter_from_tensors({"peft_type": "LORA", "r": 2}, tensors)
    with pytest.raises(AdapterError, match=name.replace(".", r"\.")):
        weight_updates(source, model.weights.names, model.weights.shapes)
