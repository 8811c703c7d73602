"""`quantization_config` is read as its writers mean it, and what is unknown is one sentence with the key."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from quantised_files import FORMATS, compressed, modelopt
from test_model_config import write_folder

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.model_config.quantization import MODELOPT_FILE, READ_METHODS, read_quantization
from spmd_worker.model_config.weight_format import Quantization

PATH = Path("/m/config.json")
GPTQ = FORMATS["gptq"].config
AWQ = FORMATS["awq"].config
W4 = FORMATS["w4a16"].config
BNB = {**FORMATS["nf4_nested"].config}
MIXED = modelopt(
    "MIXED_PRECISION",
    ignore=["lm_head", "model.layers.1*", "*.mlp.gate"],
    quantized_layers={
        "model.layers.0.mlp.experts": {"quant_algo": "nvfp4", "group_size": 16},
        "model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"},
    },
)


def read(config: Any, **others: Any) -> Quantization:
    found = read_quantization({"quantization_config": config, **others}, PATH)
    assert found is not None
    return found


def test_absent_quantization_config_means_plain_weights():
    assert read_quantization({}, PATH) is None
    assert read_quantization({"quantization_config": None, "text_config": {}}, PATH) is None
    assert read_quantization({"quantization_config": {}}, PATH) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fp8_block", "FP8 in blocks of 32 x 16 (fp8)"),
        ("fp8_tensor", "FP8 with one scale a tensor or a row (fp8)"),
        ("fbgemm_fp8", "FP8 with one scale a row (fbgemm_fp8)"),
        ("gptq", "4-bit integers in groups of 16 (gptq)"),
        ("gptq_order", "4-bit integers in groups of 16 (act-order) (gptq)"),
        ("gptq_rows", "4-bit integers with one scale a row (gptq)"),
        ("awq", "4-bit integers in groups of 16 (awq)"),
        ("float_tensor", "FP8 with one scale a tensor (compressed-tensors)"),
        ("w8a16_rows", "8-bit integers with one scale a row (compressed-tensors)"),
        ("nf4_nested", "NF4 in blocks (bitsandbytes)"),
        ("bnb_int8", "8-bit integers with one scale a row (bitsandbytes)"),
        ("nvfp4", "FP4 in groups of 16 (modelopt)"),
        ("nvfp4_packed", "FP4 in groups of 16 (compressed-tensors)"),
        ("modelopt_fp8", "FP8 with one scale a tensor (modelopt)"),
    ],
)
def test_quantization_formats_have_names_for_people(name: str, words: str):
    assert read(FORMATS[name].config).words == words


def test_older_quantization_keys_are_read():
    """Files of 2024 have compression_config; multimodal ones may have the key in text_config."""
    older = {key: value for key, value in W4.items() if key != "quant_method"}
    assert read_quantization({"compression_config": older}, PATH) == read(W4)
    assert read_quantization({"text_config": {"quantization_config": AWQ}}, PATH) == read(AWQ)


def test_supported_method_names_are_all_read():
    assert {FORMATS[name].config["quant_method"] for name in FORMATS} | {"mxfp4"} == set(READ_METHODS)


def weights(**changes: Any) -> dict[str, Any]:
    """The W4A16 config with keys of `weights` changed."""
    config = compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=16)
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


def nvfp4(**changes: Any) -> dict[str, Any]:
    """The config of compressed-tensors' NVFP4 with keys of `weights` changed."""
    arguments = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    return compressed("nvfp4-pack-quantized", **{**arguments, **changes})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "higgs"}, ["quant_method='higgs'", "dequantize()"]),
        (BNB | {"load_in_4bit": False}, ["load_in_4bit=False and load_in_8bit=false: one of them must be true"]),
        (BNB | {"load_in_8bit": True}, ["load_in_4bit=True and load_in_8bit=true: one of them must be true"]),
        (BNB | {"load_in_4bit": 1}, ["load_in_4bit=1 is not supported, only false or true"]),
        (BNB | {"bnb_4bit_quant_type": "int4"}, ["bnb_4bit_quant_type='int4' is not supported, only nf4 or fp4"]),
        (BNB | {"bnb_4bit_quant_storage": "int32"}, ["bnb_4bit_quant_storage='int32' is not supported, only uint8"]),
        (BNB | {"bnb_4bit_use_double_quant": "no"}, ["bnb_4bit_use_double_quant='no' is not supported"]),
        ({"quant_method": "gguf"}, ["quant_method='gguf'", "safetensors"]),
        ({"quant_method": "gguf", "types": {"Q9_Z": []}}, ["types", "Q9_Z", "no type of GGUF"]),
        ({"quant_method": "gguf", "types": {"F16": []}}, ["types", "F16", "no type of GGUF"]),
        ({"quant_method": "gguf", "types": {"Q4_K": ["re:.*"]}}, ["types.Q4_K", "no patterns"]),
        ({"quant_method": "gguf", "types": {"Q4_K": "x"}}, ["types.Q4_K", "names of modules"]),
        ({"quant_method": "gguf", "types": ["Q4_K"]}, ["types"]),
        *(
            ({"quant_method": name}, [f"quant_method={name!r} is not supported", "bfloat16"])
            for name in ("hqq", "quanto", "aqlm", "vptq", "eetq", "torchao", "nvfp4", "quark", "exl2")
        ),
        ({"quant_method": "intel/auto-round"}, ["quant_method='intel/auto-round'", "export it as auto_gptq"]),
        ({"quant_method": "guess"}, ["quant_method='guess' is unknown", "supported are fp8, fbgemm_fp8"]),
        ({"bits": 4}, ["quant_method=None is unknown"]),
        ({"quant_method": ["gptq"]}, ["quant_method=['gptq'] is unknown"]),
        ("gptq", ["quantization_config='gptq' must be an object"]),
        ({**GPTQ, "bits": 3}, ["bits=3 is not supported, only 4 or 8"]),
        ({**GPTQ, "bits": 4.0}, ["bits=4.0 is not supported"]),
        ({**GPTQ, "bits": "4"}, ["bits='4' is not supported"]),
        ({**GPTQ, "group_size": 0}, ["group_size=0 must be -1 (all inputs) or a whole number from 1"]),
        ({**GPTQ, "group_size": True}, ["group_size=True must be"]),
        (
            {**GPTQ, "checkpoint_format": "marlin"},
            ["checkpoint_format='marlin' is not supported, only gptq or gptq_v2"],
        ),
        ({**GPTQ, "desc_act": "yes"}, ["desc_act='yes' is not supported, only false or true"]),
        ({**GPTQ, "sym": 1}, ["sym=1 is not supported"]),
        ({**GPTQ, "dynamic": {r"+:.*\.0\..*": {"bits": 8}}}, ["dynamic has '+:", "begin with -:"]),
        ({**GPTQ, "dynamic": ["a"]}, ["dynamic=['a'] must be an object"]),
        ({**AWQ, "bits": 8}, ["bits=8 is not supported, only 4"]),
        ({**AWQ, "version": "gemv"}, ["version='gemv' is not supported, only gemm"]),
        ({**AWQ, "zero_point": False}, ["zero_point=False is not supported, only true"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ["weight_block_size=[128] must list two whole numbers"]),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, ["weight_block_size=[0, 128] must list"]),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt='e5m2' is not supported, only e4m3"]),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, ["modules_to_not_convert must list names"]),
        ({"quant_method": "fp8", "modules_to_not_convert": [3]}, ["modules_to_not_convert must list names"]),
        (
            {**W4, "format": "mxfp4-pack-quantized"},
            ["format='mxfp4-pack-quantized' is not supported, only float-quantized"],
        ),
        ({**W4, "format": "nvfp4-pack-quantized"}, ["weights.type='int' is not supported, only float"]),
        (nvfp4(strategy="group"), ["weights.strategy='group' is not supported, only tensor_group"]),
        (nvfp4(group_size=32), ["weights.group_size=32 is not supported, only 16"]),
        (nvfp4(symmetric=False), ["weights.symmetric=False is not supported, only true"]),
        (modelopt("NVFP4_AWQ"), ["quant_algo='NVFP4_AWQ' is not supported, only FP8, FP8_PER", "bfloat16"]),
        ({"quant_method": "modelopt"}, ["quant_algo=None is not supported, only FP8"]),
        (modelopt("NVFP4", group_size=32), ["group_size=32 is not supported, only 16"]),
        (modelopt("NVFP4", ignore="lm_head"), ["ignore must list names of modules"]),
        (modelopt("NVFP4", ignore=["*a*b*c*d*e*"]), ["ignore has the pattern", "4 repeats"]),
        (modelopt("NVFP4", ignore=["re:(a+)+$"]), ["ignore has the pattern '(a+)+$'", "none of a group"]),
        (
            modelopt("MIXED_PRECISION", quantized_layers={"re:(": {"quant_algo": "FP8"}}),
            ["quantized_layers has the pattern '('", "must be a regular expression"],
        ),
        (modelopt("MIXED_PRECISION"), ["quantized_layers=None must have the formats of 1 to"]),
        (
            modelopt("MIXED_PRECISION", quantized_layers={"model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_AWQ"}}),
            ["quantized_layers.model.layers.0.mlp.up_proj.quant_algo='W4A16_AWQ' is not supported, only FP8"],
        ),
        (
            modelopt("MIXED_PRECISION", quantized_layers={"lm_head": 4}),
            ["quantized_layers.lm_head=4 must be an object"],
        ),
        ({**W4, "format": "marlin-24"}, ["format='marlin-24' is not supported"]),
        ({**W4, "sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config is not supported"]),
        ({**W4, "transform_config": {"config_groups": {}}}, ["transform_config is not supported"]),
        ({**W4, "config_groups": {}}, ["config_groups={} must describe how weights are stored"]),
        ({**W4, "config_groups": {"a": {"targets": ["Linear"]}}}, ["config_groups.a.weights=None must describe how"]),
        (weights(num_bits=3), ["config_groups.group_0.weights.num_bits=3 is not supported, only 4 or 8"]),
        (weights(type="float"), ["weights.type='float' is not supported, only int"]),
        (weights(strategy="tensor_group"), ["weights.strategy='tensor_group' is not supported"]),
        (weights(strategy="block"), ["weights.block_structure=None must list two whole numbers"]),
        (weights(group_size=-2), ["weights.group_size=-2 must be"]),
        (weights(symmetric="no"), ["weights.symmetric='no' is not supported, only true or false"]),
        ({**W4, "ignore": ["re:(a+)+$"]}, ["ignore has the pattern '(a+)+$'", "none of a group"]),
        ({**W4, "ignore": ["re:.*a.*b.*c.*d.*e"]}, ["ignore has the pattern", "4 repeats"]),
        ({**W4, "ignore": ["re:("]}, ["ignore has the pattern '('", "must be a regular expression"]),
    ],
)
def test_unsupported_quantization_error_names_file_and_key(config: Any, words: list[str]):
    with pytest.raises(ModelConfigError) as caught:
        read(config)
    message = str(caught.value)
    assert message.startswith("/m/config.json: quantization_config")
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("config", [GPTQ, AWQ, W4, BNB, MIXED, FORMATS["fp8_block"].config])
@pytest.mark.parametrize("value", [None, 7, "x", [], {}, [[]], -1, True, 1e9])
def test_any_value_of_a_key_never_crashes(config: dict[str, Any], value: Any):
    """Each is read, or a ModelConfigError."""
    for key in (*config, "weight_block_size", "modules_to_not_convert", "dynamic", "transform_config"):
        with contextlib.suppress(ModelConfigError):
            read({**config, key: value})


def test_quantization_groups_rank_ignore_lists_names_then_classes():
    eight = FORMATS["w8a16_rows"].config["config_groups"]["group_0"]
    groups = {
        "a": W4["config_groups"]["group_0"],
        "b": {**eight, "targets": ["re:.*down_proj"]},
        "c": {**eight, "targets": ["model.layers.1.self_attn"]},
    }
    found = read({**W4, "config_groups": groups, "ignore": ["lm_head", r"re:.*layers\.2\..*"]})

    def bits(name: str) -> int | None:
        format_ = found.format_of(name)
        return None if format_ is None else format_.bits

    assert bits("model.layers.0.mlp.up_proj") == 4
    assert bits("model.layers.0.mlp.down_proj") == 8
    assert bits("model.layers.1.self_attn.q_proj") == 8
    assert bits("model.layers.11.self_attn.q_proj") == 4
    assert bits("model.layers.2.mlp.down_proj") is None
    assert bits("lm_head") is None
    assert bits("model.lm_head2") == 4


OVERLAPPING = {
    "Linear": 16,
    "re:.*proj": 32,
    "re:.*mlp.*proj": 64,
    "model.layers.0.mlp.up_proj": 128,
}
"""Sizes of groups by targets of which several mean one module."""


def overlapping(targets: Iterable[str]) -> Quantization:
    group = W4["config_groups"]["group_0"]
    sizes = ((target, {**group["weights"], "group_size": OVERLAPPING[target]}) for target in targets)
    return read({**W4, "config_groups": {each: {**group, "targets": [each], "weights": made} for each, made in sizes}})


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("mlp.gate_proj", "re:.*mlp.*proj"),
        ("self_attn.q_proj", "re:.*proj"),
        ("mlp.gate", "Linear"),
    ],
)
def test_overlapping_groups_prefer_names_then_alphabetical_expressions(name: str, target: str, in_order: bool):
    """As compressed-tensors has it: see test_against_quantisers.py."""
    found = overlapping(OVERLAPPING if in_order else reversed(OVERLAPPING)).format_of(f"model.layers.0.{name}")
    assert found is not None
    assert found.block_columns == OVERLAPPING[target]


def test_modelopt_layers_have_own_formats():
    """Wildcards mean what a shell's do."""
    found = read(MIXED)
    assert found.words == "FP4 in groups of 16 and FP8 with one scale a tensor (modelopt)"
    expert, other = (found.format_of(f"model.layers.0.{name}") for name in ("mlp.experts.7.up_proj", "mlp.up_proj"))
    assert expert == read(modelopt("NVFP4")).groups[0].format
    assert other is None
    excluded = read(modelopt("FP8", ignore=MIXED["ignore"], exclude_modules=["model.layers.2.self_attn*"]))
    assert excluded.format_of("model.layers.0.mlp.gate_proj") == read(modelopt("FP8")).groups[0].format
    for name in ("model.layers.0.mlp.gate", "model.layers.1.mlp", "model.layers.17.mlp", "model.layers.2.self_attn.o"):
        assert excluded.format_of(name) is None, name


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("fp8_pb_wo", "FP8 in blocks of 128 x 128 (modelopt)"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "FP8 with one scale a row (modelopt)"),
        ("W4A16_NVFP4", "FP4 in groups of 16 (modelopt)"),
    ],
)
def test_modelopt_file_of_its_own_is_read(tmp_path: Path, algorithm: str, words: str):
    """Older releases write it; it counts if config.json says nothing."""
    description = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    folder = write_folder(tmp_path)
    before = read_model_files(folder)
    (folder / MODELOPT_FILE).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": description}))
    files = read_model_files(folder)
    found = files.model_config.quantization
    assert before.model_config.quantization is None
    assert files.digest != before.digest
    assert found is not None
    assert found.words == words
    assert found.format_of("lm_head") is None
    assert found.key_words == "quantization.quant_algo of hf_quant_config.json"
    write_folder(tmp_path, quantization_config=AWQ)
    assert read_model_files(folder).model_config.quantization == read(AWQ)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "hf_quant_config.json must be a JSON object"),
        ("{}", "hf_quant_config.json: quantization.quant_algo=None is not supported, only FP8"),
        ('{"quantization": 5}', "hf_quant_config.json: quantization=5 must be an object"),
        ('{"quantization": {"quant_algo": "INT4"}}', "hf_quant_config.json: quantization.quant_algo='INT4' is not"),
    ],
)
def test_error_in_modelopt_file_names_it(tmp_path: Path, text: str, words: str):
    (write_folder(tmp_path) / MODELOPT_FILE).write_text(text)
    with pytest.raises(ModelConfigError) as caught:
        read_model_files(tmp_path)
    assert words in str(caught.value)


def test_modelopt_with_quantised_cache_alone_has_plain_weights():
    found = read({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"})
    assert found.format_of("model.layers.0.mlp.up_proj") is None
    assert found.words == "plain weights (modelopt)"


def test_modelopt_may_export_plain_models(tmp_path: Path):
    """Its file, which was ignored before it was read, says null then: such folders were refused."""
    description = {"quant_algo": None, "kv_cache_quant_algo": None}
    folder = write_folder(tmp_path)
    (folder / MODELOPT_FILE).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": description}))
    assert read_model_files(folder).model_config.quantization is None
    assert read_quantization({"quantization_config": {"quant_method": "modelopt", **description}}, folder) is None


def test_gptqmodel_rules_can_leave_modules_plain():
    found = read({**GPTQ, "dynamic": {r"-:.*\.mlp\.gate$": {}}})
    assert found.format_of("model.layers.0.mlp.gate") is None
    assert found.format_of("model.layers.0.mlp.gate_proj") is not None


ARGUMENTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "channel",
    "symmetric": True,
    "type": "int",
}
TOKENS = {**ARGUMENTS, "dynamic": True, "strategy": "token", "observer": None}
DENSE = {"format": "dense", "global_sparsity": 0.14, "ignore": [], "sparsity_structure": "unstructured", "targets": []}


def on_the_hub(kind: str, **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it, every key."""
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": {**group, "weights": {**ARGUMENTS, **weights}}},
        "format": kind,
        "global_compression_ratio": 1.24,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": DENSE,
        "transform_config": {},
        "version": "0.12.2",
    }


def with_inputs(config: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    group = {**config["config_groups"]["group_0"], "input_activations": inputs}
    return {**config, "config_groups": {"group_0": group}}


CACHE = {**ARGUMENTS, "type": "float", "strategy": "tensor"}
HUB: dict[str, tuple[dict[str, Any], str]] = {
    "W8A8": (with_inputs(on_the_hub("int-quantized"), TOKENS), "8-bit integers with one scale a row"),
    "W8A8 static": (
        with_inputs(on_the_hub("int-quantized"), {**ARGUMENTS, "strategy": "tensor", "symmetric": False}),
        "8-bit integers with one scale a row",
    ),
    "FP8 dynamic": (
        with_inputs(on_the_hub("float-quantized", type="float"), {**TOKENS, "type": "float"}),
        "FP8 with one scale a row",
    ),
    "FP8, cache too": (
        {**on_the_hub("float-quantized", type="float", strategy="tensor"), "kv_cache_scheme": CACHE},
        "FP8 with one scale a tensor",
    ),
    "FP8 block": (
        on_the_hub("float-quantized", type="float", strategy="block", block_structure=[128, 128]),
        "FP8 in blocks of 128 x 128",
    ),
    "W4A16": (
        on_the_hub("pack-quantized", num_bits=4, strategy="group", group_size=128, actorder="weight"),
        "4-bit integers in groups of 128",
    ),
    "W4A16 asymmetric": (
        on_the_hub("pack-quantized", num_bits=4, strategy="group", group_size=128, symmetric=False),
        "4-bit integers in groups of 128",
    ),
    "each group its own": (
        {
            **on_the_hub("mixed-precision"),
            "config_groups": {"a": {**on_the_hub("")["config_groups"]["group_0"], "format": "int-quantized"}},
        },
        "8-bit integers with one scale a row",
    ),
    "GPTQ": (
        {
            "bits": 4,
            "damp_percent": 0.01,
            "desc_act": False,
            "group_size": 128,
            "model_file_base_name": None,
            "modules_in_block_to_quantize": None,
            "quant_method": "gptq",
            "static_groups": False,
            "sym": True,
            "true_sequential": True,
            "use_exllama": True,
            "exllama_config": {"version": 1},
            "tokenizer": None,
        },
        "4-bit integers in groups of 128",
    ),
    "GPTQ 8 bits": (
        {"bits": 8, "desc_act": True, "group_size": 128, "quant_method": "gptq", "sym": False},
        "8-bit integers in groups of 128 (act-order)",
    ),
    "AWQ": (
        {
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "GEMM",
            "zero_point": True,
            "backend": "autoawq",
            "do_fuse": False,
        },
        "4-bit integers in groups of 128",
    ),
    "unsloth's": (
        {
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": None,
            "llm_int8_threshold": 6.0,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "quant_method": "bitsandbytes",
        },
        "NF4 in blocks",
    ),
    "NVFP4": (
        {
            "config_groups": {
                "group_0": {
                    "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "targets": ["Linear"],
                }
            },
            "ignore": ["lm_head", "model.layers.0.self_attn*", "model.vision_tower*"],
            "quant_algo": "NVFP4",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "producer": {"name": "modelopt", "version": "0.37.0"},
            "quant_method": "modelopt",
        },
        "FP4 in groups of 16",
    ),
    "NVFP4 by llm-compressor": (
        with_inputs(
            on_the_hub(
                "nvfp4-pack-quantized",
                type="float",
                num_bits=4,
                strategy="tensor_group",
                group_size=16,
                scale_dtype="torch.float8_e4m3fn",
            ),
            {**TOKENS, "num_bits": 4, "strategy": "tensor_group", "dynamic": "local", "group_size": 16},
        ),
        "FP4 in groups of 16",
    ),
    "FP8, cache too, older": (
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ["lm_head"],
            "kv_cache_scheme": "static",
        },
        "FP8 with one scale a tensor or a row",
    ),
}


@pytest.mark.parametrize("name", HUB)
def test_configs_of_the_hub_are_read(name: str):
    """Key by key as their writers leave them; what is said of activations and caches changes no weight."""
    config, words = HUB[name]
    found = read(config)
    assert found.words == f"{words} ({config['quant_method']})"
    is_listed = "lm_head" in [*config.get("ignore", ()), *config.get("ignored_layers", ())]
    assert (found.format_of("lm_head") is None) == is_listed
    assert found.format_of("model.layers.3.mlp.down_proj") is not None
