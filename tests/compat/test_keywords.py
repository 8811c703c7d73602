"""vLLM's keywords of `LLM(...)` and `EngineArgs(...)`: each means something, nothing, or is refused in words."""

import inspect
import json
import logging
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from looped import looped
from reference_models import checkpoint_folder

from spmd_worker import LLM, EngineArgs, SamplingParams
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import ConfigError, ModelConfigError
from spmd_worker.compat import keywords
from spmd_worker.compat.engine_args import run_config
from spmd_worker.compat.keywords import KEYWORDS, Effect, Keyword, resolve_keywords
from spmd_worker.executor.uniproc import UniProcExecutor
from spmd_worker.worker.worker import Worker

FOLDER = "a model"

# The named parameters of vLLM 0.34's LLM, without those that LLM alone has there.
VLLM_LLM = (
    "runner",
    "convert",
    "tokenizer",
    "tokenizer_mode",
    "skip_tokenizer_init",
    "trust_remote_code",
    "allowed_local_media_path",
    "allowed_media_domains",
    "tensor_parallel_size",
    "dtype",
    "quantization",
    "revision",
    "tokenizer_revision",
    "seed",
    "gpu_memory_utilization",
    "cpu_offload_gb",
    "offload_group_size",
    "offload_num_in_group",
    "offload_prefetch_step",
    "offload_params",
    "enforce_eager",
    "enable_return_routed_experts",
    "return_sampling_mask",
    "disable_custom_all_reduce",
    "hf_token",
    "hf_overrides",
    "mm_processor_kwargs",
    "pooler_config",
    "structured_outputs_config",
    "profiler_config",
    "attention_config",
    "kv_cache_memory_bytes",
    "compilation_config",
    "quantization_config",
    "logits_processors",
    "spec_method",
    "spec_model",
    "spec_tokens",
)

# Of its EngineArgs.
VLLM_ENGINE = (
    *("watermark_config", "log_level", "logging_config", "log_config_file", "max_num_active_seqs", "enable_hc_sp"),
    *("enable_shm_tensor_arena", "sparse_indexer_topk_backend", "kda_decode_backend", "elastic_ep_max_dp_size"),
    *("long_prefill_token_threshold_adaptive", "max_lora_cls_labels", "aux_output_config", "custom_histogram_buckets"),
    *("engram_config", "sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names", "swa_bounded_replay"),
    *("enable_mamba_shared_prefix_checkpoint", "enable_extensible_kv_cache", "max_num_inflight_kv_loads"),
    *("cache_aware_admission_window", "cache_aware_admission_threshold", "monokernel", "sleep_mode_backend"),
    *("checkpoint_prepare_on_startup", "shuffle_safetensors_files", "watchdog_config"),
)

# What a trainer's colocate mode passes, and what an inference script of another framework asks the signature for.
TRAINER: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": 0.3,
    "max_model_len": None,
    "max_num_seqs": 16,
    "distributed_executor_backend": "external_launcher",
    "seed": 3,
    "max_num_batched_tokens": 4096,
    "logprobs_mode": "processed_logprobs",
    "enable_sleep_mode": False,
    "model_impl": "vllm",
    "quantization": None,
    "trust_remote_code": False,
}
ASKED_FOR = (
    "enable_sleep_mode",
    "disable_cascade_attn",
    "load_format",
    "mm_processor_cache_gb",
    "speculative_config",
    "logprobs_mode",
    "quantization",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "limit_mm_per_prompt",
    "enable_expert_parallel",
)


def config(**arguments: Any) -> RunConfig:
    return run_config({"model": FOLDER, **arguments})


def parameters_of(made: Callable[..., object]) -> dict[str, Any]:
    named = list(inspect.signature(made).parameters.values())
    return {each.name: each.default for each in named if each.kind is not inspect.Parameter.VAR_KEYWORD}


def named_by_llm(table: Mapping[str, Keyword]) -> dict[str, Any]:
    return {row.name: row.default for row in table.values() if row.effect in (Effect.SAME, Effect.OURS)}


@pytest.mark.guarantee("LLM takes every keyword of vLLM's, as the table says")
def test_effective_keywords_are_llm_parameters_with_table_defaults():
    assert named_by_llm(KEYWORDS) == {
        name: default for name, default in parameters_of(LLM).items() if name not in ("self", "model")
    }


@pytest.mark.control("LLM takes every keyword of vLLM's, as the table says")
def test_keyword_check_detects_a_missing_row():
    """Negative control."""
    assert named_by_llm({name: row for name, row in KEYWORDS.items() if name != "dtype"}) != named_by_llm(KEYWORDS)


@looped("name", [*VLLM_LLM, *VLLM_ENGINE, *ASKED_FOR, *TRAINER])
def test_vllm_keywords_are_in_the_table(name: str):
    assert KEYWORDS[name].words or KEYWORDS[name].effect is Effect.SAME
    assert name in inspect.signature(EngineArgs).parameters


def test_keywords_at_default_or_none_change_nothing():
    assert config(**{row.name: row.default for row in KEYWORDS.values()}) == config()
    assert config(**dict.fromkeys(KEYWORDS)) == config()


REJECTED = [row for row in KEYWORDS.values() if row.effect is Effect.REJECTED]


@looped("row", REJECTED)
def test_rejected_keyword_names_value_and_reason(row: Keyword):
    """Values that ask for nothing are accepted."""
    value = not row.default if isinstance(row.default, bool) else "something"
    with pytest.raises(ConfigError) as refused:
        resolve_keywords({row.name: value}, FOLDER)
    assert str(refused.value) == f"{row.name}={value!r} is rejected: {row.words}"
    assert len(row.words) > 30
    for neutral in ({}, [], (), "", None, row.default, *row.neutral):
        assert resolve_keywords({row.name: neutral}, FOLDER) == {}


def test_true_and_one_are_different_keyword_values():
    for given in ({"cpu_offload_gb": True}, {"decode_context_parallel_size": True}, {"enable_mm_embeds": 1}):
        with pytest.raises(ConfigError, match="is rejected"):
            config(**given)


def test_fp8_cache_without_scales_or_exceptions():
    for given in ({"calculate_kv_scales": True}, {"kv_cache_dtype_skip_layers": ["0"]}):
        with pytest.raises(ConfigError, match=r"is rejected: kv_cache_dtype is of all layers"):
            config(kv_cache_dtype="fp8", **given)
    assert config(kv_cache_dtype="fp8", calculate_kv_scales=False, kv_cache_dtype_skip_layers=[]).cache.dtype == "fp8"


@pytest.mark.parametrize(
    ("given", "group", "key", "expected"),
    [
        ({"dtype": torch.bfloat16}, "model", "dtype", "bfloat16"),
        ({"dtype": torch.float32}, "model", "dtype", "float32"),
        ({"dtype": "half"}, "model", "dtype", "float16"),
        ({"dtype": "float"}, "model", "dtype", "float32"),
        ({"dtype": "auto"}, "model", "dtype", "auto"),
        ({"load_format": "safetensors"}, "model", "load_format", "auto"),
        ({"distributed_executor_backend": None}, "executor", "backend", "auto"),
        ({"distributed_executor_backend": "mp"}, "executor", "backend", "multiproc"),
        ({"distributed_executor_backend": "uni"}, "executor", "backend", "uniproc"),
        ({"distributed_executor_backend": "external_launcher"}, "executor", "backend", "external_launcher"),
        (
            {"distributed_executor_backend": UniProcExecutor},
            "executor",
            "backend",
            "spmd_worker.executor.uniproc.UniProcExecutor",
        ),
        ({"worker_cls": Worker}, "executor", "worker_cls", "spmd_worker.worker.worker.Worker"),
        ({"worker_cls": "auto"}, "executor", "worker_cls", None),
        ({"worker_extension_cls": ""}, "executor", "worker_extension_cls", None),
        ({"enforce_eager": True}, "executor", "enforce_eager", True),
        ({"num_gpu_blocks_override": 77}, "cache", "num_blocks", 77),
        ({"num_gpu_blocks_override": 77, "num_blocks": 77}, "cache", "num_blocks", 77),
        ({"distributed_timeout_seconds": 9}, "executor", "timeout_s", 9.0),
        ({"enable_prefix_caching": None}, "cache", "enable_prefix_caching", True),
        ({"enable_chunked_prefill": False}, "scheduler", "enable_chunked_prefill", False),
        ({"max_num_seqs": 4096}, "scheduler", "max_num_batched_tokens", 4096),
        ({"generation_config": "vllm"}, "sampling", "max_tokens", 16),
        ({"generation_config": "vllm"}, "sampling", "temperature", 1.0),
        ({"override_generation_config": {"max_new_tokens": 5}}, "sampling", "max_tokens", 5),
        ({"override_generation_config": {"do_sample": False}}, "sampling", "temperature", 0.0),
        ({"limit_mm_per_prompt": {"image": 2, "video": 1}}, "limits", "max_images", 2),
        ({"limit_mm_per_prompt": {"image": {"count": 3, "width": 9}}}, "limits", "max_images", 3),
        ({"language_model_only": True}, "limits", "max_images", 0),
        ({"max_images": 4, "limit_mm_per_prompt": {"image": 4}}, "limits", "max_images", 4),
        ({"mm_processor_kwargs": {"min_pixels": 784, "max_pixels": 9999}}, "model", "image_max_pixels", 9999),
        ({"mm_processor_kwargs": {"size": {"height": 8}}}, "model", "image_processor", {"size": '{"height": 8}'}),
        ({"image_processor": {"max_patches": 6}}, "model", "image_processor", {"max_patches": "6"}),
        ({"allowed_local_media_path": "/data"}, "job", "media_root", "/data"),
        ({"allowed_local_media_path": ""}, "job", "media_root", None),
        (
            {"media_io_kwargs": {"image": {"rgba_background_color": (0, 255, 16, 255)}}},
            "model",
            "image_background",
            "#00ff10",
        ),
    ],
)
def test_vllm_keyword_values_become_config_values(given: dict[str, Any], group: str, key: str, expected: object):
    assert getattr(getattr(config(**given), group), key) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seq": 3}, "LLM has no keyword max_num_seq: did you mean max_num_seqs?"),
        ({"tensor_paralel_size": 2}, "LLM has no keyword tensor_paralel_size: did you mean tensor_parallel_size?"),
        ({"frobnicate": 1}, "LLM has no keyword frobnicate: docs/reference/vllm_names.md lists the known ones"),
    ],
)
def test_unknown_keyword_error_names_the_nearest(given: dict[str, Any], message: str):
    for made in (LLM, EngineArgs):
        with pytest.raises(TypeError) as refused:
            made(checkpoint_folder("llama3"), **given)
        assert str(refused.value) == message


def test_renamed_keyword_overrides_default_of_our_name():
    """`LLM` and `EngineArgs` name every setting with its default: the keyword was refused as a second value of it."""
    for given in ({}, {"expert_placement": "linear"}, vars(EngineArgs(FOLDER))):
        arguments = {**given, "model": FOLDER, "enable_expert_parallel": True}
        made = run_config({**arguments, "expert_placement_strategy": "round_robin"})
        assert made.parallel.expert_placement == "round_robin"
        assert run_config({**arguments, "num_gpu_blocks_override": 9}).cache.num_blocks == 9
    words = r"expert_placement_strategy='linear' and expert_placement='round_robin' .*one"
    with pytest.raises(ConfigError, match=words):
        config(expert_placement="round_robin", expert_placement_strategy="linear", enable_expert_parallel=True)


def test_invalid_keyword_value_has_the_command_line_message():
    for given, words in (
        ({"distributed_executor_backend": "ray"}, r"executor\.backend=ray .*not .*auto"),
        ({"dtype": torch.int8}, r"model\.dtype=int8 .*not .*auto"),
        ({"generation_config": "folder"}, r"generation_config='folder' must .*auto"),
        (
            {"override_generation_config": {"eos_token_id": 3}},
            r"override_generation_config .*unsupported key 'eos_token_id'",
        ),
        ({"num_blocks": 3, "num_gpu_blocks_override": 4}, r"num_gpu_blocks_override=4 and num_blocks=3 .*one setting"),
        ({"limit_mm_per_prompt": 3}, r"limit_mm_per_prompt=3 must be a dict"),
        ({"limit_mm_per_prompt": {"image": -1}}, r"limit_mm_per_prompt=\{'image': -1\} must be a number"),
        ({"limit_mm_per_prompt": {"image": 2}, "max_images": 3}, r"max_images=3, and vLLM's keyword says 2"),
        ({"mm_processor_kwargs": {"do_pan_and_scan": True}}, r"unsupported key 'do_pan_and_scan': give size"),
        ({"media_io_kwargs": {"video": {"num_frames": 4}}}, r"media_io_kwargs has 'video': give"),
        ({"media_io_kwargs": {"image": {"rgba_background_color": [0, 256, 0]}}}, r"three numbers from 0 to 255"),
    ):
        with pytest.raises(ConfigError, match=words):
            config(**given)


def test_keyword_without_effect_is_logged_once_at_debug(caplog: pytest.LogCaptureFixture):
    keywords._logged.clear()
    with caplog.at_level(logging.DEBUG, logger="spmd_worker.compat.keywords"):
        for _ in range(3):
            config(max_cudagraph_capture_size=64, max_seq_len_to_capture=8192, revision=None)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.getMessage().startswith("LLM: max_cudagraph_capture_size=64 has no effect here: ")


@pytest.mark.finding(number="D4")
def test_trust_remote_code_is_accepted_without_running_code(tmp_path: Path):
    """It was an error for every model."""
    folder = checkpoint_folder("llama3")
    with LLM(folder, trust_remote_code=True, num_blocks=64) as llm:
        assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)) == 1
    assert run_config(vars(EngineArgs(str(folder), trust_remote_code=True))) == run_config({"model": str(folder)})
    given = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "own.py").write_text("raise SystemExit('this ran')\n")
    text = json.dumps({**given, "architectures": ["OwnForCausalLM"], "auto_map": auto_map})
    (tmp_path / "config.json").write_text(text)
    for trusts in (True, False):
        with pytest.raises(ModelConfigError, match="OwnForCausalLM"):
            LLM(tmp_path, trust_remote_code=trusts)


def test_engine_args_are_a_dataclass():
    made = EngineArgs(FOLDER, max_num_seqs=4, dtype="half")
    made.seed = 7
    assert [spec.name for spec in fields(made)] == ["model", *KEYWORDS]
    assert asdict(made) == vars(made)
    assert run_config(asdict(made)) == config(max_num_seqs=4, dtype="float16", seed=7)
    assert (EngineArgs(FOLDER), made) == (EngineArgs(FOLDER), made)
    assert EngineArgs(FOLDER) != made


def test_trainer_and_script_arguments_make_an_engine():
    folder = checkpoint_folder("llama3")
    trainer = {**TRAINER, "distributed_executor_backend": None, "dtype": torch.float32, "hf_overrides": {}}
    with LLM(model=str(folder), tokenizer=str(folder), enforce_eager=True, num_blocks=64, **trainer) as llm:
        expected = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    arguments = EngineArgs(str(folder), num_gpu_blocks_override=64, generation_config="vllm")
    with LLM.from_engine_args(arguments) as llm:
        assert llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False) == expected
        assert llm.get_default_sampling_params() == SamplingParams()


def test_cli_parser_has_an_option_for_every_argument():
    parser = EngineArgs.add_cli_args(ArgumentParser())
    parser.add_argument("--prompts", type=int, default=4)
    assert EngineArgs.from_cli_args(parser.parse_args(["--model", FOLDER])) == EngineArgs(FOLDER)
    words = "--model m -tp 2 --dtype half --enforce-eager --no-enable-chunked-prefill --seed 7 --max-model-len None"
    words += " --hf-overrides {} --pipeline-layers [3,4] --gpu-memory-utilization 0.5 --swap-space 2 --prompts 9"
    made = EngineArgs.from_cli_args(parser.parse_args(words.split()))
    assert made == EngineArgs(
        "m",
        tensor_parallel_size=2,
        dtype="half",
        enforce_eager=True,
        enable_chunked_prefill=False,
        seed=7,
        hf_overrides={},
        pipeline_layers=[3, 4],
        gpu_memory_utilization=0.5,
        swap_space=2,
    )
    assert run_config(vars(made)).parallel.pipeline_layers == [3, 4]
    given = vars(parser.parse_args(["--model", FOLDER]))
    given.pop("prompts")
    assert run_config(given) == config()
    assert "--scheduler-cls" in parser.format_help()
