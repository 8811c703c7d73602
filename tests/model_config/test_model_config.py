"""config.json as transformers reads it: every key and its default, older and newer spellings, and what is refused.

The reference is transformers' own configuration classes; whatever the file holds, the answer is a shape or a
ModelConfigError, never another exception.
"""

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import families, spelled, windows_of
from property_examples import part_of
from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config import model_config as model_config_module
from spmd_worker.model_config.layer_config import LayerConfig, NormConfig
from spmd_worker.model_config.model_config import (
    ENCODERS,
    FAMILIES,
    ModelConfig,
    RopeParameters,
    model_config_of,
    read_model_files,
)

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
}
PATH = Path("folder/config.json")


def shape_of(architecture: str = "LlamaForCausalLM", **keys: Any) -> ModelConfig:
    return model_config_of({"architectures": [architecture], **SIZES, **keys}, PATH)


def write_folder(folder: Path, generation: dict[str, Any] | None = None, **keys: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], **SIZES, **keys}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_llama_config_is_read_key_by_key():
    model_config = shape_of(
        num_key_value_heads=4,
        head_dim=6,
        rms_norm_eps=1e-5,
        max_position_embeddings=1000,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        eos_token_id=[7, 9],
        torch_dtype="bfloat16",
        rope_theta=500.0,
    )
    layer = LayerConfig(
        num_heads=32,
        num_kv_heads=4,
        head_size=6,
        intermediate_size=90,
        scale=6**-0.5,
        norm=NormConfig(eps=1e-5),
        has_qkv_bias=True,
        has_output_bias=True,
        has_mlp_bias=True,
    )
    assert model_config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=211,
        hidden_size=64,
        layers=(layer,) * 30,
        norm=NormConfig(eps=1e-5),
        max_position_embeddings=1000,
        ropes=(RopeParameters(6, rope_theta=500.0, original_max_position_embeddings=1000),),
        has_tied_embeddings=True,
        dtype="bfloat16",
        eos_token_ids=(7, 9),
    )


def test_families_differ_in_biases_norms_and_head_size():
    differences = {}
    for name in MODEL_TYPES:
        layer = shape_of(name, attention_bias=True, mlp_bias=True, num_key_value_heads=4).layers[0]
        biases = (layer.has_qkv_bias, layer.has_output_bias, layer.has_mlp_bias)
        differences[name] = (*biases, layer.qk_norm == "head", layer.head_size)
    assert differences == {
        "LlamaForCausalLM": (True, True, True, False, 2),
        "MistralForCausalLM": (False, False, False, False, 2),
        "Qwen2ForCausalLM": (True, False, False, False, 2),
        "Qwen3ForCausalLM": (True, True, False, True, 128),
    }


@pytest.mark.parametrize("extra", [{}, {"use_sliding_window": True}, {"rope_theta": 5e5}])
@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_absent_keys_have_the_defaults_of_transformers(architecture: str, extra: dict[str, Any], tmp_path: Path):
    """A Mistral config without `sliding_window` or `num_key_value_heads` once ran without window, with 32 heads."""
    keys = {"architectures": [architecture], "model_type": MODEL_TYPES[architecture], **extra}
    theirs = AutoConfig.from_pretrained(write_folder(tmp_path, **keys))
    ours = read_model_files(tmp_path).model_config
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_size == (getattr(theirs, "head_dim", None) or 64 // 32)
    assert ours.norm.eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.has_tied_embeddings == theirs.tie_word_embeddings
    assert ours.ropes[0].rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    window = getattr(theirs, "sliding_window", None) or 0
    layer_types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 30
    assert windows_of(ours) == tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)


def test_null_differs_from_absent_for_family_defaults():
    assert windows_of(shape_of("MistralForCausalLM")) == (4096,) * 30
    assert windows_of(shape_of("MistralForCausalLM", sliding_window=None)) == (0,) * 30
    assert shape_of("Qwen2ForCausalLM", num_key_value_heads=None).num_kv_heads == 32
    assert shape_of("LlamaForCausalLM", eos_token_id=None).eos_token_ids == ()


def test_layer_types_override_the_older_window_rule():
    types = ["sliding_attention", "full_attention"] * 15
    keys = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 29}
    assert windows_of(shape_of("Qwen2ForCausalLM", **keys)) == (0,) * 29 + (5,)
    assert windows_of(shape_of("Qwen2ForCausalLM", layer_types=types, **keys)) == (5, 0) * 15


WITHOUT_WINDOW = [{"sliding_window": 5}, {"use_sliding_window": False, "sliding_window": 5}]
WITHOUT_WINDOW += [{"use_sliding_window": True, "sliding_window": None}]


@pytest.mark.parametrize("keys", WITHOUT_WINDOW)
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2_5_VLForConditionalGeneration"])
def test_sliding_layers_require_a_window(architecture: str, keys: dict[str, Any]):
    """As by transformers, where such a model ends with an error in its first step."""
    types = ["full_attention"] * 29 + ["sliding_attention"]
    with pytest.raises(ModelConfigError) as caught:
        shape_of(architecture, layer_types=types, **keys)
    key = "sliding_window=None" if keys.get("use_sliding_window") else "use_sliding_window="
    assert key in str(caught.value)
    assert "leaves sliding_attention in layer_types without a window: set" in str(caught.value)
    # Negative control: with a window, or with nothing that slides.
    right = {"use_sliding_window": True, "sliding_window": 5}
    assert windows_of(shape_of(architecture, layer_types=types, **right)) == (0,) * 29 + (5,)
    assert windows_of(shape_of(architecture, layer_types=["full_attention"] * 30, **keys)) == (0,) * 30


@pytest.mark.parametrize("keys", WITHOUT_WINDOW)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_transformers_rejects_sliding_layers_without_a_window(model_type: str, keys: dict[str, Any]):
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2}
    for types in (["full_attention"] * 2, ["full_attention", "sliding_attention"]):
        config = AutoConfig.for_model(model_type, **sizes, **keys, layer_types=types)
        model = AutoModelForCausalLM.from_config(config)
        if types[-1] == "full_attention":
            model(torch.tensor([[1, 2, 3]]), use_cache=False)
        else:
            with pytest.raises(ValueError, match="sliding_window"):
                model(torch.tensor([[1, 2, 3]]), use_cache=False)


def test_ignored_layer_types_need_no_window():
    """Their classes do not read the list of layers."""
    types = ["sliding_attention"] * 30
    assert windows_of(shape_of("MistralForCausalLM", layer_types=types, sliding_window=None)) == (0,) * 30
    assert windows_of(shape_of("LlamaForCausalLM", layer_types=types)) == (0,) * 30
    with pytest.raises(ModelConfigError, match="sliding_window=None leaves sliding_attention"):
        shape_of("Gemma2ForCausalLM", layer_types=types, sliding_window=None)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("scaling", "max_model_len"),
    [
        ({}, 256),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "dynamic", "factor": 2.5}, 640),
        ({**YARN, "factor": 16.0}, 1024),
        (YARN, 256),
        ({**YARN, "factor": 2.0}, 256),
        (LLAMA3, 256),
    ],
)
def test_max_model_len_counts_the_rope_scaling(scaling: dict[str, Any], max_model_len: int):
    assert shape_of(max_position_embeddings=256, rope_parameters=scaling).max_model_len == max_model_len


def test_older_and_newer_rope_keys_are_equal():
    newer = shape_of(rope_parameters={"rope_theta": 777.0, **LLAMA3})
    older_scaling = {**{key: value for key, value in LLAMA3.items() if key != "rope_type"}, "type": "llama3"}
    assert shape_of(rope_theta=777.0, rope_scaling=older_scaling) == newer
    assert shape_of(rope_theta=777.0, rope_scaling=LLAMA3) == newer
    assert shape_of(rope_theta=777.0, rope_parameters=LLAMA3) == newer


def test_yarn_derives_missing_length_and_factor():
    assert shape_of(max_position_embeddings=256, rope_parameters={"rope_type": "yarn", "factor": 4.0}).ropes == (
        RopeParameters(2, rope_type="yarn", factor=4.0, original_max_position_embeddings=256),
    )
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 64}
    assert shape_of(max_position_embeddings=256, rope_parameters=scaling).ropes[0].factor == 4.0


def test_generation_config_replaces_end_of_sequence_ids(tmp_path: Path):
    def ids(name: str, generation: dict[str, Any] | None = None) -> tuple[int, ...]:
        return read_model_files(write_folder(tmp_path / name, generation, eos_token_id=3)).model_config.eos_token_ids

    assert ids("1") == (3,)
    assert ids("2", {"eos_token_id": [4, 5]}) == (4, 5)
    assert ids("3", {"top_p": 0.5}) == (3,)
    assert ids("4", {"eos_token_id": None}) == (3,), "null hides nothing"


def test_end_of_sequence_ids_outside_vocabulary_are_dropped():
    """They can never be sampled; masking them for `min_tokens` once wrote outside the logits."""
    assert shape_of(eos_token_id=[210, 211, -1, 5]).eos_token_ids == (210, 5)


def error_result(folder: Path) -> str:
    with pytest.raises(ModelConfigError) as caught:
        read_model_files(folder)
    return str(caught.value)


def test_unsupported_architecture_is_rejected_with_its_reason(tmp_path: Path):
    message = error_result(write_folder(tmp_path, architectures=["RwkvForCausalLM"]))
    assert "RwkvForCausalLM" in message
    assert "is not supported: some of its layers have a recurrent state" in message
    assert "`spmd-worker families` lists the" in error_result(write_folder(tmp_path, architectures=None))
    assert "`spmd-worker families` lists the" in error_result(
        write_folder(tmp_path, architectures=[["LlamaForCausalLM"]])
    )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"auto_map": {"AutoModel": "modeling.Evil"}, "architectures": ["EvilForCausalLM"]},
            ["EvilForCausalLM", "auto_map", "never run"],
        ),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "gemma3_text"}},
            ["text_config.model_type='gemma3_text'", "mistral, ministral3"],
        ),
        (
            {"architectures": ["Glm46VForConditionalGeneration"], "text_config": {"model_type": "glm4v_moe_text"}},
            ["text_config.model_type='glm4v_moe_text'", "only glm4v_text"],
        ),
        (
            {"architectures": ["BloomForCausalLM"], "apply_residual_connection_post_layernorm": True},
            ["apply_residual_connection_post_layernorm=True", "only False"],
        ),
        ({"architectures": ["BloomForCausalLM"], "seq_length": 10**6}, ["seq_length=1000000 must be at most 131072"]),
        (
            {"architectures": ["MptForCausalLM"], "attn_config": {"alibi": False}},
            ["attn_config.alibi=False", "only True"],
        ),
        ({"architectures": ["MptForCausalLM"], "attn_config": 3}, ["attn_config=3 must be an object"]),
        ({"architectures": ["CohereForCausalLM"], "use_qk_norm": 1}, ["use_qk_norm=1", "true or false"]),
        ({"hidden_act": "xielu"}, ["hidden_act='xielu' is not supported, only silu"]),
        ({"architectures": ["FalconForCausalLM"], "alibi": True}, ["alibi=True", "only False"]),
        (
            {"architectures": ["FalconForCausalLM"], "new_decoder_architecture": True, "num_ln_in_parallel_attn": 3},
            ["num_ln_in_parallel_attn=3", "only 2"],
        ),
        ({"architectures": ["PhiForCausalLM"], "qk_layernorm": 1, "head_dim": 8}, ["qk_layernorm=1", "true or false"]),
        (
            {"architectures": ["OPTForCausalLM"], "do_layer_norm_before": "no"},
            ["do_layer_norm_before='no'", "only True"],
        ),
        (
            {
                "architectures": ["OPTForCausalLM"],
                "do_layer_norm_before": False,
                "layer_norm_elementwise_affine": False,
            },
            ["layer_norm_elementwise_affine=False", "only True"],
        ),
        ({"architectures": ["OPTForCausalLM"], "word_embed_proj_dim": 0}, ["word_embed_proj_dim=0", "whole number"]),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "gemma2"}},
            ["text_config.model_type='gemma2'", "only llama, mistral, qwen2, qwen3"],
        ),
        (
            {
                "architectures": ["HunYuanDenseV1ForCausalLM"],
                "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": "x"},
            },
            ["dynamic alpha='x'"],
        ),
        ({"architectures": ["BailingMoeForCausalLM"]}, ["BailingMoeForCausalLM", "is not supported", "experts"]),
        ({"architectures": ["Zamba2ForCausalLM"]}, ["is not supported", "recurrent state of a kind"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quantization_config.quant_method='hqq'", "bfloat16"]),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, ["longrope short_factor must list 1 numbers"]),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2, "original_max_position_embeddings": 1}},
            ["original_max_position_embeddings=1 must be 2 or more"],
        ),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}},
            ["high_freq_factor=0.5 must be low_freq_factor=1 or more"],
        ),
        ({"rope_scaling": {"type": "linear", "factor": 1e-320}}, ["linear factor=1e-320 must be a number from 1e-12"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling='yarn' must be an object"]),
        ({"hidden_act": "a\nb"}, [r"hidden_act='a\nb' is not supported"]),
        ({"hidden_act": "x" * 10**6}, ["hidden_act='" + "x" * 76 + "... is not supported"]),
        ({"rope_scaling": {"type": "ntk", "factor": 2}}, ["ntk", "llama3, yarn"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["linear factor=None"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["llama3 low_freq_factor=None"]),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": "64"}}, ["original_max_position_embeddings"]),
        ({"rope_parameters": {**YARN, "truncate": "no"}}, ["truncate='no'"]),
        ({"rope_parameters": {**YARN, "rope_theta": 1}}, ["rope_theta=1", "above 1", "yarn"]),
        ({"rope_parameters": {**YARN, "rope_theta": 0.5}}, ["rope_theta=0.5", "above 1", "yarn"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"hidden_act": "quick_gelu"}, ["hidden_act='quick_gelu'", "silu"]),
        ({"num_key_value_heads": 5}, ["32", "num_key_value_heads=5"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers=0"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers=1000000000"]),
        ({"num_hidden_layers": 9999}, ["num_hidden_layers=9999", "from 1 to 1024"]),
        ({"hidden_size": "64"}, ["hidden_size='64'"]),
        ({"hidden_size": True}, ["hidden_size=True"]),
        ({"head_dim": 3}, ["head_dim=3", "even"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps=-1.0"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings='yes'"]),
        ({"eos_token_id": "2"}, ["eos_token_id='2'"]),
        ({"layer_types": ["full_attention"], "architectures": ["MistralForCausalLM"]}, ["layer_types must list 30"]),
    ],
)
def test_config_error_names_file_key_and_value(keys: dict[str, Any], words: list[str], tmp_path: Path):
    message = error_result(write_folder(tmp_path, **keys))
    assert "config.json" in message
    for word in words:
        assert word in message


@pytest.mark.guarantee("A model folder's code is not run")
def test_folder_code_is_ignored_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO"):
        check_code_is_not_run(tmp_path)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}/model/config.json: auto_map is ignored: code in a model folder is never run"
    ]


def check_code_is_not_run(tmp_path: Path) -> None:
    """Of a folder whose architecture runs, and of one whose does not."""
    trace = tmp_path / "ran"
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    folder = write_folder(tmp_path / "model", auto_map=auto_map)
    other = write_folder(tmp_path / "other", auto_map=auto_map, architectures=["OwnForCausalLM"])
    for each in (folder, other):
        code = f"from pathlib import Path\nPath({str(trace)!r}).touch()\nfrom transformers import LlamaConfig\n"
        (each / "own.py").write_text(f"{code}class OwnConfig(LlamaConfig):\n    pass\n")
    assert read_model_files(folder).model_config == shape_of()
    assert "auto_map" in error_result(other)
    assert not trace.exists()


@pytest.mark.control("A model folder's code is not run")
def test_code_check_detects_folder_code_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control):
    """Negative control: a reader that has transformers look at the folder first, and trusts it."""
    ours = model_config_module.model_config_of

    def run_and_read(config: dict[str, Any], path: Path, **options: bool) -> ModelConfig:
        AutoConfig.from_pretrained(str(path.parent), local_files_only=True, trust_remote_code=True)
        return ours(config, path, **options)

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(model_config_module, "model_config_of", run_and_read)
    with control("not True"):
        check_code_is_not_run(tmp_path)
    assert (tmp_path / "ran").exists()


def test_folders_without_a_model_are_rejected(tmp_path: Path):
    assert f"model.path={tmp_path / 'missing'} is not a folder: give" in error_result(tmp_path / "missing")
    assert f"model.path=missing is not a folder in {Path.cwd()}: give" in error_result(Path("missing"))
    assert "does not exist" in error_result(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in error_result(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "is nested too deeply" in error_result(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "JSON object" in error_result(tmp_path)


WEIRD = [None, 0, -1, 1, 2.5, True, "", "abc", "4", [], [1], ["x"], {}, {"a": 1}, [[1]], 10**30, 1e308, math.nan]
ROPES = [
    {**YARN, "beta_fast": 3, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0},
    LLAMA3,
    {"type": "dynamic", "factor": 2.0},
    {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
    {"full_attention": LLAMA3, "sliding_attention": {"rope_type": "default"}},
]


def test_unsupported_dtype_is_logged_and_invalid_one_rejected(caplog: pytest.LogCaptureFixture):
    """Any text was float32, without a word."""
    for key in ("dtype", "torch_dtype"):
        for word in ("float64", "auto", "float8_e4m3fn", "bf16"):
            caplog.clear()
            assert shape_of(**{key: word}).dtype == "float32"
            (said,) = [record.getMessage() for record in caplog.records]
            assert said.startswith(f"{PATH}: {key}={word!r} is not one of float32, bfloat16, float16: model.dtype=auto")
        for value in (3, ["bfloat16"], {"": "bfloat16"}, True):
            with pytest.raises(ModelConfigError, match=rf"{key}=.* must .*type, .*bfloat16"):
                shape_of(**{key: value})
    caplog.clear()
    assert shape_of().dtype == shape_of(dtype=None).dtype == "float32"
    assert (
        shape_of(torch_dtype="torch.bfloat16").dtype == shape_of(dtype="bfloat16", torch_dtype="x").dtype == "bfloat16"
    )
    assert not caplog.records


@pytest.mark.gate(
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "GptOssForCausalLM",
    "DeepseekV2ForCausalLM",
    "Llama4ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM",
    "Qwen3_5ForCausalLM",
    "BambaForCausalLM",
    "Lfm2ForCausalLM",
    "KimiLinearForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "FalconForCausalLM",
    "OPTForCausalLM",
    "GPTNeoXForCausalLM",
    "Phi3ForCausalLM",
    "Glm4MoeForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "NemotronHForCausalLM",
    "Olmo3ForCausalLM",
    "Qwen2ForCausalLM",
    "Step3p7ForConditionalGeneration",
)
@pytest.mark.parametrize("architecture", families("HunYuanDenseV1ForCausalLM", "Mistral3ForConditionalGeneration"))
def test_config_values_raise_only_config_errors(architecture: str):
    """max_window_layers null, original_max_position_embeddings "abc" and others once ended in a traceback. Keys that
    are not of positions: beside the first kind of positions and one of the others, which are taken in turn.
    """
    place = list(FAMILIES).index(architecture)
    beside, turns = (0, 1 + place % (len(ROPES) - 1)), itertools.count(place)
    for number, rope in enumerate(ROPES):
        config = {
            **SIZES,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "layer_types": None,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "dtype": "float32",
            "eos_token_id": [3],
            "hidden_act": "silu",
            "partial_rotary_factor": 1.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
            "rope_parameters": rope,
            "rope_scaling": None,
        }
        config = spelled(architecture, {**config, **FAMILIES[architecture].defaults})
        for key in config if number in beside else ():
            for value in part_of(WEIRD, next(turns)):
                _shape_or_refusal({**config, key: value})
        for key in [*rope, "rope_theta", "truncate"]:
            for value in part_of(WEIRD, next(turns)):
                _shape_or_refusal({**config, "rope_parameters": {**rope, key: value}})


def _shape_or_refusal(config: dict[str, Any]) -> None:
    try:
        model_config = model_config_of(config, PATH)
    except ModelConfigError:
        return
    assert model_config.max_model_len > 0
    assert model_config.num_parameters > 0


@pytest.mark.finding(number="D17")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["Qwen3ForCausalLMM"], "; the nearest that run are Qwen3ForCausalLM, "),
        (["BertModell"], "; the nearest that run are BertModel"),
        (["Nothing"], "is unknown: `spmd-worker families`"),
        (None, "architectures=None must be a list of names: `spmd-worker families`"),
        ("Qwen3ForCausalLM", "architectures='Qwen3ForCausalLM' must be a list of names: `spmd-worker families`"),
        (["LEDForConditionalGeneration"], "is not supported: "),
        (["x" * 10_000] * 1000, "is unknown: `spmd-worker families`"),
    ],
)
def test_unknown_architecture_error_names_the_nearest(tmp_path: Path, given: Any, words: str):
    message = error_result(write_folder(tmp_path, architectures=given))
    assert words in message
    assert message.endswith(f"lists the {len(FAMILIES) + len(ENCODERS)} that run")
    assert message.count("ForCausalLM") <= 4
    # What is shown of a value is bounded, and so are the names that are compared.
    assert len(message) < 1000 + len(str(tmp_path))
