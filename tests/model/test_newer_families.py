"""Families that the tested transformers does not have, against what a newer one gave: logits, greedy ids, defaults.

Float32, 1e-4 of the largest logit. What was recorded, and how, is in `newer_checkpoints.py`.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import write_adapter
from family_checks import (
    check_rejected,
    check_stages,
    check_steps,
    check_tensors,
    logits_of_ranks,
    planned_models,
    readings_of,
    silent_mutants,
    without_each,
)
from family_mutants import entries
from hybrid_runs import run_rows
from newer_checkpoints import CASES, NEWER, NUM_GREEDY, PROMPTS, record, write_newer
from our_model import is_noticed, load_model
from reference_models import relative_error
from run_folder import made_once
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard
from trainer_shards import sharded

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.errors import AdapterError, CheckpointError
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.adapters.source import read_adapter
from spmd_worker.model.weights.shard_receiver import content_digests, make_round, recorded
from spmd_worker.model.weights.tensor_shards import shard_of
from spmd_worker.model.weights.trainer_digest import trainer_sums
from spmd_worker.model.weights.weight_comparison import combined_digests
from spmd_worker.model.weights.weight_deltas import apply_deltas
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.table import CLASSES_OF_OTHERS, FAMILIES
from spmd_worker.model_config.model_config import model_config_of, read_model_files

TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_GREEDY, ignore_eos=True)
each_case = pytest.mark.parametrize("name", CASES)
each_architecture = pytest.mark.parametrize("architecture", NEWER)


@cache
def folder_of(name: str) -> Path:
    return made_once(f"newer {name}", lambda folder: write_newer(folder, name))


def is_right(name: str, logits: list[Tensor]) -> bool:
    """Whether the last logits of each prompt are the recorded ones."""
    pairs = zip(logits, record(name)["logits"], strict=True)
    return all(relative_error(ours[-1:], torch.tensor([theirs])) < TOLERANCE for ours, theirs in pairs)


def config_with(architecture: str, **keys: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": NEWER[architecture], **keys}


@pytest.mark.guarantee("Models compute what transformers computes")
@each_case
def test_steps_have_recorded_logits_and_equal_bits(name: str):
    assert is_right(name, check_steps(load_model(folder_of(name)), PROMPTS))


@each_case
def test_ranks_have_recorded_logits_and_stages_bits(name: str):
    for size in (2, 4):
        assert is_right(name, logits_of_ranks(folder_of(name), size, PROMPTS, 7)), size
    check_stages(folder_of(name), 1, PROMPTS, 7)


@each_case
def test_engine_gives_recorded_ids_cold_and_cached(name: str):
    rows = [PROMPTS[1], [*PROMPTS[2], *PROMPTS[2], *PROMPTS[1]], [*PROMPTS[2], *PROMPTS[2], 5]]
    with LLM(folder_of(name), num_blocks=60, max_num_batched_tokens=19, max_num_seqs=2) as llm:
        # States are kept where rows were seen to part.
        cold, _, warm = (llm.generate(rows, GREEDY, use_tqdm=False) for _ in range(3))
        assert llm.llm_engine.counters.num_cached_prompt_tokens > 0
    ids, again = ([list(each.outputs[0].token_ids) for each in outputs] for outputs in (cold, warm))
    assert ids == again
    assert ids[0] == record(name)["greedy"]


@each_case
def test_tensors_have_names_of_files_and_planned_bytes(name: str):
    files = load_file(folder_of(name) / "model.safetensors")
    check_tensors(folder_of(name), separated(name, files))
    for _ in planned_models(read_model_files(folder_of(name)).model_config):
        pass


SEPARATE: dict[str, tuple[str, dict[str, int]]] = {
    "sarvam_moe": (
        "attention.query_key_value",
        {f"self_attn.{part}_proj": size for part, size in zip("qkv", (64, 32, 32))},
    ),
    "param2moe": (
        "attention.query_key_value",
        {f"self_attn.{part}_proj": size for part, size in zip("qkv", (128, 64, 64))},
    ),
    "lara_mini": (
        "linear_attn.in_proj",
        {f"linear_attn.in_proj_{part}": size for part, size in (("qkv", 112), ("z", 48), ("b", 4), ("a", 4))},
    ),
}
"""Tensors of layers that files have joined, and the modules whose rows they are, which transformers has in memory."""


def separated(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their names in files, with those of `SEPARATE` as in memory."""
    joined, modules = SEPARATE.get(name, ("-", {}))
    found: dict[str, Tensor] = {}
    for each, tensor in tensors.items():
        if joined in each:
            parts = tensor.split([*modules.values()])
            found |= {each.replace(joined, module): part for module, part in zip(modules, parts, strict=True)}
        else:
            found[each] = tensor
    return found


@pytest.mark.parametrize("name", ["sarvam_moe", "lara_mini"])
def test_parts_of_joined_tensors_are_updated_alone(name: str):
    joined, modules = SEPARATE[name]
    first, last = (f"model.layers.0.{each}.weight" for each in (next(iter(modules)), [*modules][-1]))
    rows, name_of = modules[next(iter(modules))], f"model.layers.0.{joined}.weight"
    model = load_model(folder_of(name))
    whole = load_file(folder_of(name) / "model.safetensors")[name_of]
    given = separated(name, {name_of: whole + 1.0})
    with pytest.raises(CheckpointError, match=rf"{last}: has the shape \[1, 64\], but the model's has"):
        model.load_weights([(last, torch.ones(1, 64))])
    assert model.load_weights([(first, given[first])]) == {name_of}
    expected = whole.clone()
    expected[:rows] += 1.0
    with model.as_checkpoint() as view:
        assert torch.equal(view.get_parameter(name_of), expected)
    report = model.weights.report()
    assert report is not None
    assert name_of not in report[1]
    assert first not in report[1]
    assert last in report[1]
    # As a difference and in shards, after which the tensor of the file is complete.
    with torch.no_grad():
        apply_deltas(model.weights, [(last, torch.ones_like(given[last]))], "")
    shards = [shard_of(each, sharded(given[each], (Shard(0),), (1,), 0)) for each in [*given][1:-1]]
    own = make_round(model.weights, shards, 1 << 10)
    with torch.no_grad(), recorded(model.weights, own, content_digests(shards)):
        for shard, targets in zip(shards, own.targets, strict=True):
            for target in targets:
                target.write(shard.read(target.region))
    expected[rows:] += 1.0
    with model.as_checkpoint() as view:
        assert torch.equal(view.get_parameter(name_of), expected)
    assert not {first, last, name_of} & {*(model.weights.report() or ((), ()))[1]}
    sums = [trainer_sums(model.weights, pairs) for pairs in (given.items(), [(name_of, whole + 1.0)])]
    digests = [combined_digests({name_of: whole.shape}, [each]) for each in sums]
    assert digests[0] == digests[1]
    model.weights.allows_nonfinite = False
    with pytest.raises(CheckpointError, match=f"{first}: .*nan"):
        model.load_weights([(first, given[first] * float("nan"))])


@pytest.mark.parametrize("name", ["sarvam_moe", "lara_mini"])
def test_adapters_of_joined_and_separate_modules_are_equal(name: str, tmp_path: Path):
    joined, modules = SEPARATE[name]
    base, end = folder_of(name), joined.rpartition(".")[2]
    folders = [write_adapter(tmp_path / "joined", base, 3, [end]), tmp_path / "separate"]
    shutil.copytree(*folders)
    tensors: dict[str, Tensor] = {}
    for each, tensor in load_file(folders[0] / "adapter_model.safetensors").items():
        parts = tensor.split([*modules.values()]) if "lora_B" in each else [tensor.clone() for _ in modules]
        tensors |= {each.replace(joined, module): part for module, part in zip(modules, parts, strict=True)}
    save_file({each: tensor.contiguous() for each, tensor in tensors.items()}, folders[1] / "adapter_model.safetensors")
    config = folders[1] / "adapter_config.json"
    targets = [each.rpartition(".")[2] for each in modules]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": targets}))
    model, found = load_model(base), [run_rows([load_model(base)], PROMPTS, 17)[0]]
    for folder in folders:
        loaded, source = (
            LoadedAdapters(model, AdapterLimits(max_loras=1, max_lora_rank=8, max_cpu_loras=2)),
            read_adapter(folder),
        )
        loaded.commit(loaded.prepare(source))
        found.append(run_rows([model], PROMPTS, 17, loaded=loaded, digests=[source.digest] * len(PROMPTS))[0])
        found.append(run_rows([load_model(base, lora_merge=folder)], PROMPTS, 17)[0])
    both = replace(source, modules={**source.modules, **read_adapter(folders[0]).modules})
    with pytest.raises(AdapterError, match=f"{joined}: has matrices of model.layers.0.{next(iter(modules))}, as"):
        loaded.prepare(both)
    plain, with_joined, merged, with_separate, merged_separate = found
    assert all(map(torch.equal, with_joined, with_separate))
    assert all(map(torch.equal, merged, merged_separate))
    assert max(map(relative_error, with_joined, merged)) < TOLERANCE
    assert min(map(relative_error, with_joined, plain)) > 100 * TOLERANCE


ALIASES = {
    "exaone": ("model.layers.1.self_attn.o_proj.weight", "transformer.h.1.attn.attention.out_proj.weight"),
    "sarvam_moe": ("model.layers.1.self_attn.q_norm.weight", "model.layers.1.attention.query_layernorm.weight"),
    "minicpm5_moe": ("model.layers.1.self_attn.q_gate_proj.weight", "model.layers.1.self_attn.q_proj.weight"),
    "lara_mini": ("model.layers.0.linear_attn.norm.weight", "model.layers.0.linear_attn.out_norm.weight"),
}


@pytest.mark.parametrize("name", ALIASES)
def test_tensors_are_updated_by_names_of_memory(name: str):
    in_memory, in_file = ALIASES[name]
    model = load_model(folder_of(name))
    values = torch.full(model.weights.shapes[in_file], 0.5)
    assert model.load_weights([(in_memory, values)]) == {in_file}
    with model.as_checkpoint() as view:
        assert torch.equal(view.get_parameter(in_file), values)


def few_keys(architecture: str) -> dict[str, Any]:
    """A file with the sizes that a row may have no defaults for, as the class has them."""
    defaults = record(NEWER[architecture])["defaults"]
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return config_with(architecture, **{key: defaults[key] for key in sizes if key in defaults})


@each_architecture
def test_missing_keys_have_recorded_defaults(architecture: str):
    defaults = {**record(NEWER[architecture])["defaults"]}
    whole, found = readings_of([{**defaults, **config_with(architecture)}, few_keys(architecture)])
    assert whole is not None
    assert found == whole


OF_HUB: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "ExaoneForCausalLM": (
        {},
        {
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
    ),
    **{
        name: (
            {"score_function": "sigmoid", "use_bias": False},
            {
                "n_routed_experts": "num_experts",
                "n_shared_experts": "num_shared_experts",
                "attention_bias": "use_qkv_bias",
            },
        )
        for name in ("SarvamMoEForCausalLM", "Param2MoEForCausalLM")
    },
    "SarvamMLAForCausalLM": (
        {"score_function": "sigmoid", "q_head_dim": 48},
        {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    ),
}
"""What the hub's files have besides, and their names of keys."""


@pytest.mark.parametrize("architecture", OF_HUB)
def test_older_keys_and_borrowed_classes_are_the_same_model(architecture: str):
    """transformers saves these models with the class of another family."""
    written = dict(record(NEWER[architecture])["config"])
    borrowed, own = CLASSES_OF_OTHERS[written["model_type"]]
    assert (written["architectures"], own) == ([borrowed], architecture)
    others, names = OF_HUB[architecture]
    older = {names.get(key, key): value for key, value in written.items() if key != "rope_parameters"}
    rope = dict(written["rope_parameters"])
    older["rope_theta"] = rope.pop("rope_theta")
    if architecture == "SarvamMLAForCausalLM":
        older["rope_scaling"] = {"type": "deepseek_yarn", **{key: rope[key] for key in rope if key != "rope_type"}}
    elif rope["rope_type"] != "default":
        older["rope_scaling"] = rope
    first, second = readings_of([written, {**older, **others, "architectures": [architecture]}], with_reasons=True)
    assert first == second
    assert first.architecture == architecture
    # Negative control: the other family has other defaults or names.
    assert model_config_of({**written, "model_type": "llama"}, Path("config.json")).architecture == borrowed


BAD: list[tuple[str, dict[str, Any], str]] = [
    (
        "SarvamMoEForCausalLM",
        {"score_function": "softmax"},
        "score_function='softmax' is not supported, only 'sigmoid'",
    ),
    ("Param2MoEForCausalLM", {"use_bias": True}, "use_bias=True is not supported, only False"),
    (
        "Param2MoEForCausalLM",
        {"n_routed_experts": None, "num_experts": 0},
        "num_experts=0 must be a whole number from 1 to 4096",
    ),
    ("SarvamMLAForCausalLM", {"rope_scaling": 3}, "rope_scaling=3 must be an object"),
    ("SarvamMLAForCausalLM", {"rope_scaling": {"type": "deepseek_yarn", "factor": "x"}}, "rope yarn factor='x'"),
    ("MiniCPM5MoEForCausalLM", {"use_gated_attention": False}, "=False is not supported, only True"),
    ("LaraMiniForCausalLM", {"layer_types": ["linear_attention"] * 3}, "layer_types must list 6 of"),
    ("LaraMiniForCausalLM", {"sliding_window": None}, "sliding_window=None"),
    ("LaraMiniForCausalLM", {"linear_num_value_heads": 7}, "is not a multiple of linear_num_key_heads=2"),
    ("ExaoneForCausalLM", {"num_hidden_layers": None, "num_layers": 10**9}, "num_layers=1000000000 must be a whole"),
]


@pytest.mark.parametrize(("architecture", "keys", "message"), BAD, ids=[f"{each[0]} {[*each[1]]}" for each in BAD])
def test_invalid_keys_are_rejected_by_key(architecture: str, keys: dict[str, Any], message: str):
    check_rejected({**record(NEWER[architecture])["config"], **config_with(architecture), **keys}, message)


def test_model_type_of_any_other_value_changes_no_row():
    for kind in (None, 3, ["exaone"], {"a": 1}, "llama", "x" * 1_000_000):
        config = {**record("exaone")["config"], "model_type": kind}
        assert model_config_of(config, Path("config.json")).architecture == "LlamaForCausalLM"


OTHER_KEYS: list[dict[str, Any]] = [
    {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "num_key_value_heads": 2},
    {"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "use_qk_norm": False},
    {"mlp_layer_types": ["dense", "sparse"] * 2, "num_hidden_layers": 4},
    {"rope_scaling": {"type": "deepseek_yarn", "factor": 2.0}},
    {"head_dim": 577, "num_key_value_heads": 3},
    {"hidden_size": 1024},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
]
"""What a row may read otherwise than the plain one."""
OF_NAMES = ("aliases", "layer_aliases", "separate", "ignores_later_layers")
UNSEEN = ("models", "defaults", "required", *(f"names.{each}" for each in OF_NAMES))
SAME_FUNCTION = {
    # Nothing but tensors that no model reads; what is derived is not in the record.
    ("ExaoneForCausalLM", "names.ignored"),
    # Stacks that are as in memory are read without it too; what is viewed and saved has other names.
    ("LaraMiniForCausalLM", "names.stacked"),
}


@pytest.mark.stress
@each_architecture
def test_comparison_detects_each_row_entry_set_to_plain(architecture: str, monkeypatch: pytest.MonkeyPatch):
    name, row = NEWER[architecture], FAMILIES[architecture]
    written, few = record(name)["config"] | config_with(architecture), few_keys(architecture)
    others = {"hidden_act": "gelu", "n_shared_experts": 3, "attention_bias": True}
    older = {old: {**written, **others}[key] for key, old in row.older_keys.items()}
    files = [written, few, config_with(architecture), {**written, "rope_parameters": None}]
    files += [{**{key: written[key] for key in written if key not in row.older_keys}, **older}]
    files += [{**few, key: "other"} for key in row.required]
    files += [{**few, key: 16} for key in ("num_local_experts", "n_routed_experts", "num_experts")]
    files += [{**few, **keys} for keys in OTHER_KEYS]
    mutants = entries(row, Family(), *UNSEEN) + without_each(row, "defaults", "required", "older_keys")
    mutants = [(what, mutant) for what, mutant in mutants if (architecture, what) not in SAME_FUNCTION]

    def logits_of(folder: Path) -> list[Tensor]:
        return run_rows([load_model(folder)], PROMPTS)[0]

    read: Callable[[], list[Any]] = lambda: readings_of(files, with_reasons=True)  # noqa: E731

    def is_seen() -> bool:
        return is_noticed([made_with(name, architecture)], logits_of, partial(is_right, name))

    silent = silent_mutants(monkeypatch, architecture, mutants, read, is_seen)
    assert not silent, ", ".join(silent)


def made_with(name: str, architecture: str) -> Path:
    """The case's folder with this architecture's name."""

    def write(folder: Path) -> None:
        write_newer(folder, name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **config_with(architecture)}))

    return made_once(f"newer {architecture}", write)
