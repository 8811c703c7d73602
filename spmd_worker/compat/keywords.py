"""Table of every keyword of vLLM's `LLM(...)` and `EngineArgs(...)`, of 0.32 and of older releases that scripts still
name, with its effect here; `resolve_keywords` applies it.

A keyword has the same meaning here, another name here, no effect, or is rejected with the reason and the alternative. A
rejected keyword accepts neutral values. Keywords that set a key of the configuration, vLLM's and ours, come from the
schema of the key; the others are listed here. Values are validated where they are used.
"""

import difflib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.options import Key, keys_of
from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.speculative_words import OLD_KEYWORDS

logger = logging.getLogger(__name__)


class Effect(Enum):
    """Effect of a keyword here; the values are shown in docs and help texts."""

    SAME = "the same"
    RENAMED = "another name here"
    NONE = "no effect"
    REJECTED = "rejected"
    OURS = "only here"


@dataclass(frozen=True, slots=True)
class Keyword:
    """One row of the table. `words` are its meaning, why it has no effect, or why it is rejected and the alternative.

    `ours` is the name here. `values` maps values of vLLM's to ours. `neutral` are values of a rejected keyword, besides
    `default` and empty ones, that are accepted. `annotation` is its type in a signature.
    """

    name: str
    effect: Effect
    words: str
    default: Any = None
    ours: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    neutral: tuple[Any, ...] = ()
    annotation: Any = Any


def keywords_of(key: Key) -> Iterator[Keyword]:
    """Rows of a configuration key: its keyword, and vLLM's other names for it."""
    option, ours = key.option, key.keyword
    if ours is None:
        return
    effect = Effect.SAME if option.is_vllms else Effect.OURS
    default = None if option.is_open else key.default
    annotation = option.accepts or key.hint | None
    yield Keyword(ours, effect, option.meaning, default, ours, option.vllm_values, annotation=annotation)
    for name in option.vllm_names:
        yield Keyword(name, Effect.RENAMED, option.meaning, None, ours, annotation=annotation)


_OF_LLM: Final = (
    Keyword(
        "generation_config",
        Effect.SAME,
        "defaults of prompts without parameters: `auto` (the model folder's generation_config.json) or `vllm` (vLLM's)",
        "auto",
        "generation_config",
        annotation=str | None,
    ),
    Keyword(
        "override_generation_config",
        Effect.SAME,
        "single defaults: keys of sampling parameters, `do_sample` and `max_new_tokens`",
        None,
        "override_generation_config",
        annotation=Mapping[str, Any] | None,
    ),
    Keyword(
        "chat_template",
        Effect.SAME,
        "a chat template's text, a file of it, or the name of one of the folder's; `chat` takes another one",
        None,
        "chat_template",
        annotation=str | Path | None,
    ),
    Keyword(
        "limit_mm_per_prompt",
        Effect.SAME,
        '`{"image": n, "video": m, "audio": k}` are `max_images`, `max_videos` and `max_audios`; 0: none are taken',
        annotation=Mapping[str, Any] | None,
    ),
    Keyword(
        "mm_processor_kwargs",
        Effect.SAME,
        "`min_pixels` and `max_pixels` are `image_min_pixels` and `image_max_pixels`; keys of "
        "`image_processor`, such as size and max_patches, replace values of `preprocessor_config.json`, "
        "cap_pixels_per_frame, max_video_tokens, fps and numbers of frames those of `video_preprocessor_config.json` "
        "(`video_processor`)",
        annotation=Mapping[str, Any] | None,
    ),
    Keyword(
        "media_io_kwargs",
        Effect.SAME,
        '`{"image": {"rgba_background_color": [r, g, b]}}` is `image_background`',
        annotation=Mapping[str, Any] | None,
    ),
    Keyword("language_model_only", Effect.SAME, "true: no images, videos and audio", False, annotation=bool),
    Keyword(
        "speculative_config",
        Effect.SAME,
        'drafts, such as `{"method": "suffix"}`, with vLLM\'s keys, a dict or JSON: the group of that name in '
        "[Configuration](configuration.md), and the table below",
        annotation=Mapping[str, Any] | str | None,
    ),
    *(
        Keyword(name, Effect.SAME, f"`{key}` of `speculative_config`", annotation=str | int | None)
        for name, key in OLD_KEYWORDS.items()
    ),
)
"""Keywords without a configuration key."""

_WITHOUT_EFFECT: Final = {
    "code from a model folder is never executed; other architectures are rejected": "trust_remote_code=false",
    "the tokenizer is the model's, and no code is loaded": "code_revision tokenizer_revision",
    "downloads use the environment of huggingface_hub: HF_TOKEN, HF_HOME, HF_HUB_CACHE": "hf_token download_dir",
    "this name is for servers": "served_model_name",
    "CUDA graphs are captured for our own sizes, and nothing is compiled": (
        "max_seq_len_to_capture=8192 cuda_graph_sizes cudagraph_capture_sizes max_cudagraph_capture_size "
        "compilation_config optimization_level performance_mode ir_op_priority cudagraph_metrics=false "
        "jit_monitor_mode jit_monitor_verbose=false sleep_mode_offload_cudagraph=false"
    ),
    "the device selects kernels and collectives, with bit-identical results": (
        "disable_custom_all_reduce=false attention_backend attention_config kernel_config linear_backend "
        "moe_backend all2all_backend disable_cascade_attn=false use_fp64_gumbel=false enable_flashinfer_autotune "
        "enable_bf16x3_router_gemm enable_batch_sharded_sampling gdn_prefill_backend kda_prefill_backend "
        "kda_decode_backend sparse_indexer_topk_backend=auto enable_hc_sp=false "
        "disable_nccl_for_dp_synchronization data_parallel_backend=mp dcp_comm_backend dcp_q_replicate "
        "dcp_kv_cache_interleave_size=1 cp_kv_cache_interleave_size=1 kv_sharing_fast_prefill=false"
    ),
    "steps are scheduled in another way, and answers do not depend on the schedule": (
        "max_num_partial_prefills=1 max_long_partial_prefills=1 long_prefill_token_threshold=0 "
        "long_prefill_token_threshold_adaptive=false max_num_active_seqs max_num_scheduled_tokens "
        "scheduler_delay_factor=0.0 scheduler_reserve_full_isl=true prefill_schedule_interval=1 watermark "
        "num_scheduler_steps=1 multi_step_stream_outputs=true num_lookahead_slots=0 use_v2_block_manager=true "
        "disable_hybrid_kv_cache_manager disable_async_output_proc=false stream_interval=1 max_num_queued_reqs "
        "max_num_queued_tokens enable_dbo=false ubatch_size=0 dbo_decode_token_threshold=32 "
        "dbo_prefill_token_threshold=512 dp_sync_interval=1"
    ),
    "cached blocks are found by a digest of everything that they depend on": (
        "prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit"
    ),
    "safetensors are always read in parallel and without a copy": (
        "max_parallel_loading_workers safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size ignore_patterns use_tqdm_on_load=true pt_load_map_location=cpu "
        "config_format=auto"
    ),
    "prompts may be token ids without a tokenizer; `detokenize=False` disables text": "skip_tokenizer_init=false",
    "use our own statistics: `get_metrics`, `llm_engine.watch_steps`, `start_profile(folder)`": (
        "disable_log_stats=true aggregate_engine_logging=false show_hidden_metrics_for_version "
        "custom_histogram_buckets otlp_traces_endpoint collect_detailed_traces kv_cache_metrics=false "
        "kv_cache_metrics_sample per_request_spec_decode_metrics=none enable_layerwise_nvtx_tracing=false "
        "enable_mfu_metrics=false enable_logging_iteration_details=false enable_mm_processor_stats=false "
        "profiler_config shutdown_timeout=0 fail_on_environ_validation=false tokens_only=false"
    ),
    "Python's logging is used: configure the logger `spmd_worker`": ("logging_config log_level log_config_file"),
    "ranks and addresses come from torchrun's environment": (
        "master_addr master_port node_rank=0 nnodes=1 data_parallel_address data_parallel_rpc_port "
        "ray_workers_use_nsight=false"
    ),
    "the ranks of a node divide its cores themselves": (
        "numa_bind=false numa_bind_nodes numa_bind_cpus renderer_num_workers=1 tokenizer_pool_size=0 "
        "tokenizer_pool_type tokenizer_pool_extra_config"
    ),
    "steps without adapters are computed as in a run without any": "specialize_active_lora=false",
    "labels are those of the adapter's own files": "max_lora_cls_labels",
    "prompt adapters are loaded when they are added": "enable_prompt_adapter=false",
    "virtual tokens count in `max_model_len`": "max_prompt_adapter_token=0",
    "prompts of embeddings are always accepted": "enable_prompt_embeds=false",
    "an image is encoded by one rank, and ranks encode different images: vLLM's `data`": (
        "mm_encoder_tp_mode=weights enable_multimodal_encoder_data_parallel=false"
    ),
    "prepared images are held until their requests end; `media_rows_gib` is the memory of encoded ones": (
        "mm_processor_cache_gb=4 mm_processor_cache_type mm_shm_cache_max_object_size_mb=128 "
        "disable_mm_preprocessor_cache=false mm_ipc_gpu_memory_gb mm_tensor_ipc enable_shm_tensor_arena=false"
    ),
    "images have the name of their prepared pixels, by blake2b": "mm_hasher_algorithm",
    "images are encoded by the runtime's own kernels, in the model's dtype": (
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin=1.5 mm_processor_device=auto mm_device_do_normalize"
    ),
    "placeholders are where the chat template writes them": "interleave_mm_strings=false",
    "the memory of an image of `max_image_tokens` is part of the plan": "skip_mm_profiling=false",
    "a prompt is cut anywhere but inside of an image that must be seen whole: answers are the same": (
        "disable_chunked_mm_input=false"
    ),
    "tokens of videos are not pruned": "video_pruning_rate video_pruning_method",
    "images are encoded in the ranks of the model": "ec_manager_config",
    "the supported families have no layers of this kind": (
        "mamba_config mamba_cache_dtype=auto mamba_ssm_cache_dtype=auto mamba_block_size mamba_cache_mode=none "
        "enable_mamba_shared_prefix_checkpoint=false mamba_backend mamba_ssu_algorithm "
        "enable_mamba_cache_stochastic_rounding=false mamba_cache_philox_rounds=0 replayssm_buffer_len "
        "use_replayssm engram_config swa_bounded_replay=true"
    ),
    "expert_placement is static, without replicas, and a rank reads only its own experts": (
        "eplb_config enable_eplb=false enable_ep_weight_filter=false enable_elastic_ep=false "
        "elastic_ep_max_dp_size num_redundant_experts=0 eplb_window_size=1000 eplb_step_interval=3000 "
        "eplb_log_balancedness=false"
    ),
    "a row requests constrained decoding (structured_outputs), for which there is one backend": (
        "structured_outputs_config reasoning_parser= reasoning_parser_plugin reasoning_config "
        "guided_decoding_backend guided_decoding_disable_fallback guided_decoding_disable_any_whitespace "
        "guided_decoding_disable_additional_properties logits_processor_pattern"
    ),
    "an option of a feature whose own keyword is rejected": (
        "offload_backend=auto offload_group_size=0 offload_num_in_group=1 offload_prefetch_step=1 offload_params "
        "cpu_offload_params kv_offloading_backend speculative_disable_mqa_scorer=false "
        "speculative_disable_by_batch_size disable_logprobs_during_spec_decoding "
        "allow_deprecated_quantization=false fault_tolerance_config io_processor_plugin"
    ),
    "every engine can sleep and wake up": "enable_sleep_mode=false",
    "an option of vLLM's own allocator or weight transfer": "enable_cumem_allocator enable_nccl_comm_suspend=false",
    "`weight_transfer_config` names a transport of vLLM's servers": "weight_transfer_config",
    "read by platforms of vLLM's": "additional_config override_neuron_config",
    "`logprobs` has its own limit, `-1` asks for all": "max_logprobs=20",
}
"""Reason -> names, with vLLM's default unless it is None."""

_REJECTED: Final = {
    "config.json defines it, and weights run dequantised: leave it out": "quantization_config",
    "kv_cache_dtype is of all layers, and nothing is scaled: leave it out": (
        "calculate_kv_scales=false kv_cache_dtype_skip_layers"
    ),
    "give enable_lora and a LoRARequest, or adapters={name: folder}: leave it out": "qlora_adapter_name_or_path",
    "adapters are computed in the model's dtype: leave it out": "lora_dtype=auto",
    "an adapter changes the modules of which its files have tensors: leave it out": "lora_target_modules",
    "adapters add no tokens: leave it out, or add them to the checkpoint": "lora_extra_vocab_size=256|0",
    "adapters have one scaling for all lengths: leave it out": "long_lora_scaling_factors",
    "each rank has the rows or columns of an adapter that belong to its weights: leave it out": (
        "fully_sharded_loras=false"
    ),
    "adapters have no biases: leave it out, or merge the adapter (PEFT's merge_and_unload)": "enable_lora_bias=false",
    "experts have no adapters: leave it out": "enable_mixed_moe_lora_format=false enable_moe_shared_loras=false",
    "adapters change the language model alone: leave it out": ("default_mm_loras enable_tower_connector_lora=false"),
    "all ranks and replays must compute equal logits, which custom code cannot guarantee: use "
    "allowed_token_ids, bad_words or logit_bias of SamplingParams": "logits_processors",
    "head_dtype alone is read, which is a keyword here; config.json defines the rest: edit it": "hf_overrides",
    "config.json defines it: edit it and leave this out": "rope_scaling rope_theta hf_config_path",
    "config.json defines the attention windows: edit it and leave this out": "disable_sliding_window=false",
    "model classes are those of this package: leave it out": "model_impl=auto|vllm model_class_overrides",
    "config and weights are read from one folder, `model`: leave it out": "model_weights=",
    "runner selects generation or pooling: leave it out": "task=auto|generate",
    'runner="pooling" runs the task of the folder: leave it out, or give classifier_from_token': "convert=auto|none",
    "the folder's files or pooling_type define the pooling: leave it out": "pooler_config override_pooler_config",
    "models produce text, vectors or scores here: leave it out": "diffusion_config",
    "the model folder's tokenizer.json is used: leave it out, or replace the file in the folder": "tokenizer",
    "tokenizer.json is read by the tokenizers library: leave it out": "tokenizer_mode=auto|hf",
    "every rank runs this package's scheduler: leave it out": "scheduler_cls",
    "all ranks have equally many blocks: give num_blocks or gpu_memory_utilization": "kv_cache_memory_bytes",
    "give host_tier_gib, GiB of host memory of each rank": "kv_offloading_size=null|0",
    "all weights are on the device: leave it out, or use more ranks": "cpu_offload_gb=0",
    "ranks are divided by tensor_parallel_size, pipeline_parallel_size and data_parallel_size: leave it out": (
        "prefill_context_parallel_size=1 decode_context_parallel_size=1"
    ),
    "data_parallel_size, or a world of more ranks than one engine needs, makes replicas: leave it out": (
        "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_hybrid_lb=false "
        "data_parallel_external_lb=false data_parallel_multi_port_external_lb=false"
    ),
    "a rank has the device of its LOCAL_RANK: set CUDA_VISIBLE_DEVICES instead": "device_ids",
    "rows ask for them: give SamplingParams(return_routed_experts=True)": "enable_return_routed_experts=false",
    "rows ask for what they need: leave it out": "aux_output_config",
    "answers are not watermarked: leave it out": "watermark_config",
    "sleep level 2 drops all weights: leave it out, or sleep at level 1": "sleep_preserve_parameter_names",
    "rows ask for masks: give SamplingParams(return_sampling_mask=True)": "return_sampling_mask=false",
    "rows of images are not accepted: give the images, or prompt_embeds": "enable_mm_embeds=false",
    "images are encoded in the ranks of the model: leave it out": "mm_encoder_only=false",
    "images of other computers are not read: download them first": "allowed_media_domains",
    "give connector and connector_options: blocks in files, or from engine to engine": "kv_transfer_config",
    "engines exchange nothing but blocks: leave it out": "kv_events_config ec_transfer_config",
    "a failure of one rank ends all ranks, and a job resumes: leave it out": "enable_fault_tolerance=false",
    "`spmd-worker-replay` replays a run's step log: leave it out": "enable_trace_replay=false",
    "the only loader has no settings: leave it out": "model_loader_extra_config",
    "attention is computed in the model's dtype: leave it out": "override_attention_dtype",
}
"""Reason and alternative -> names, with neutral values, vLLM's default first; None and empty values are neutral."""


def _listed(effect: Effect, table: Mapping[str, str]) -> Iterator[Keyword]:
    for words, names in table.items():
        for entry in names.split():
            name, sign, values = entry.partition("=")
            default, *neutral = map(_value, values.split("|")) if sign else (None,)
            yield Keyword(name, effect, words, default, neutral=tuple(neutral))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


_ROWS: Final = (
    *(row for key in keys_of(RunConfig).values() for row in keywords_of(key)),
    *_OF_LLM,
    *_listed(Effect.NONE, _WITHOUT_EFFECT),
    *_listed(Effect.REJECTED, _REJECTED),
)

KEYWORDS: Final[Mapping[str, Keyword]] = {row.name: row for row in _ROWS}
"""The table by vLLM's names, without `model`."""

_logged: set[str] = set()


def resolve_keywords(given: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Our keywords and values for the keywords of a call. Keywords without effect are logged once per process, at debug
    level.

    Raises TypeError for an unknown keyword, naming the nearest; ConfigError for a rejected value and for two names of
    one keyword with different values.
    """
    own: dict[str, Any] = {}
    for name, value in _without_overrides(given).items():
        row = KEYWORDS.get(name)
        if row is None:
            nearest = difflib.get_close_matches(name, KEYWORDS, n=1)
            hint = f": did you mean {nearest[0]}?" if nearest else ": docs/reference/vllm_names.md lists the known ones"
            raise TypeError(f"LLM has no keyword {name}{hint}")
        plain = _plain(value)
        if row.effect is Effect.NONE:
            if name not in _logged and is_given(row, plain):
                _logged.add(name)
                logger.debug("LLM: %s=%s has no effect here: %s", name, shown(plain), row.words)
        elif row.effect is Effect.REJECTED:
            is_model = name == "tokenizer" and str(plain) == str(model)
            if not (is_empty(plain) or is_model or any(_equals(plain, each) for each in (row.default, *row.neutral))):
                raise ConfigError(f"{name}={shown(plain)} is rejected: {row.words}")
        elif row.effect is not Effect.RENAMED:
            is_key = plain is None or isinstance(plain, str) or type(plain) is int
            own.setdefault(name, row.values.get(plain, plain) if is_key else plain)
    for row in KEYWORDS.values():
        value = given.get(row.name)
        if row.effect is Effect.RENAMED and value is not None:
            known = own.get(row.ours)
            if is_given(KEYWORDS[row.ours], known) and known != value:
                names = f"{row.name}={value!r} and {row.ours}={known!r}"
                raise ConfigError(f"{names} are one setting here: give {row.ours} alone")
            own[row.ours] = value
    return own


def _without_overrides(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keywords with vLLM's way to say `head_dtype`, `hf_overrides={"head_dtype": "float32"}`, as ours."""
    overrides = given.get("hf_overrides")
    if not isinstance(overrides, Mapping) or list(overrides) != ["head_dtype"] or given.get("head_dtype") is not None:
        return given
    value = _plain(overrides["head_dtype"])
    others = {name: each for name, each in given.items() if name != "hf_overrides"}
    return others | {"head_dtype": None if value == "model" else value}


def is_given(row: Keyword, value: Any) -> bool:
    """Whether a value differs from the default, which `EngineArgs` passes on, too."""
    return value is not None and not _equals(value, row.default)


def is_empty(value: Any) -> bool:
    """Whether a value is None or an empty string or container."""
    return value is None or (isinstance(value, str | list | tuple | dict | set | frozenset) and not value)


def _plain(value: Any) -> Any:
    """A torch dtype or an enumeration's member as text, a class as its qualified name."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    text = str(value) if type(value).__name__ == "dtype" else ""
    return text.removeprefix("torch.") if text.startswith("torch.") else value


def _equals(value: Any, other: Any) -> bool:
    """Equality of plain values only: an array's or a config object's may raise. True does not equal 1."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    plain = str | int | float
    return isinstance(value, plain) and isinstance(other, plain) and value == other
