"""Every keyword of vLLM's `LLM(...)` and `EngineArgs(...)`, of 0.32 and of older releases that scripts still name: what
it does here. Data, and `own_arguments`, which reads it.

A keyword means the same here, has another name here, is without effect, or is refused with the reason and the way out.
A refused keyword takes the values that ask for nothing. What `LLM` has beside vLLM's keywords stands here too.
Knows nothing of configurations, models or ranks: whether a value is right is checked where it is used.
"""

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from spmd_worker.base.errors import ConfigError

logger = logging.getLogger(__name__)


class Effect(Enum):
    """What a keyword of vLLM's does here; the values are words for people."""

    SAME = "the same"
    RENAMED = "another name here"
    NONE = "without effect"
    REFUSED = "refused"
    OURS = "only here"


@dataclass(frozen=True, slots=True)
class Keyword:
    """One row of the table. `words` say what differs, why it is without effect, or the reason and the way out.

    `default` is what is passed on when nothing is given. `ours` is the name here. `values` are values of vLLM's under
    the names that they have here. `neutral` are values of a refused keyword, besides `default` and what is empty, that
    ask for nothing.
    """

    name: str
    effect: Effect
    words: str
    default: Any = None
    ours: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    neutral: tuple[Any, ...] = ()


def _same(name: str, default: Any, words: str = "", values: Mapping[Any, Any] | None = None) -> Keyword:
    return Keyword(name, Effect.SAME, words, default, name, values or {})


def _renamed(name: str, ours: str, words: str) -> Keyword:
    return Keyword(name, Effect.RENAMED, words, None, ours)


def _none(words: str, **defaults: Any) -> tuple[Keyword, ...]:
    return tuple([Keyword(name, Effect.NONE, words, default) for name, default in defaults.items()])


def _refused(words: str, *neutral: Any, **defaults: Any) -> tuple[Keyword, ...]:
    return tuple([Keyword(name, Effect.REFUSED, words, default, neutral=neutral) for name, default in defaults.items()])


def _ours(name: str, default: Any, words: str) -> Keyword:
    return Keyword(name, Effect.OURS, words, default, name)


_ON: Final = {None: True}

_ROWS: Final = (
    # What the engine computes with.
    _same(
        "dtype",
        "auto",
        "`torch.dtype` values too; float16 needs a GPU, and `auto` never turns float32 into a shorter type",
        {"half": "float16", "float": "float32"},
    ),
    _same("seed", 0, "rows without a seed of their own draw by it; no generator of the process is set", {None: 0}),
    _same("max_model_len", None, "at most the model's own length", {-1: None, "auto": None}),
    _same("max_num_seqs", None),
    _same("max_num_batched_tokens", None),
    _same("gpu_memory_utilization", None, "default 0.9; on the CPU of the host's memory"),
    _same("block_size", None, "default 16; a power of two"),
    _same("swap_space", None, "GiB of host memory a rank for preempted sequences, as in vLLM's first engine"),
    _same("preemption_mode", None, "`auto`, `swap` or `recompute`"),
    _same("enable_prefix_caching", True, values=_ON),
    _same("enable_chunked_prefill", True, values=_ON),
    _same(
        "async_scheduling",
        None,
        "a step is launched before the ids of the one before it are read; None: on a GPU, with one stage",
    ),
    _same(
        "load_format",
        "auto",
        "`auto` reads safetensors; `dummy` is random weights",
        {"safetensors": "auto", "hf": "auto"},
    ),
    _same(
        "quantization",
        None,
        "`int8`: weights and what they multiply are quantised as they come, on the CPU; what the checkpoint's own "
        "config.json says is read in any case, and needs no keyword",
    ),
    _same(
        "logprobs_mode",
        "raw_logprobs",
        "`raw_logprobs`, `processed_logprobs`, or `tempered_logprobs`: by the temperature alone",
    ),
    _same(
        "runner",
        "auto",
        "`auto` is what the folder is for; `pooling` for `embed` of a model that generates",
    ),
    _same(
        "generation_config",
        "auto",
        "`auto` (the model folder's) or `vllm` (vLLM's defaults), for prompts without parameters",
    ),
    _same("override_generation_config", None, "keys of sampling parameters, `do_sample` and `max_new_tokens`"),
    _same("chat_template", None, "a file or the text of it; `chat` takes another one"),
    _same("revision", None, "a branch, tag or commit of a model on the hub; of no effect for a folder"),
    # Ranks.
    _same("tensor_parallel_size", 1),
    _same("pipeline_parallel_size", 1),
    _same("data_parallel_size", 1, "replicas of one engine share its prompts; every rank gets every output"),
    _same(
        "enable_expert_parallel",
        False,
        "ranks of a tensor-parallel group have experts whole; their tokens are the same, so nothing is sent about; "
        "replicas (data_parallel_size) share none: each has all, which is said",
    ),
    _same(
        "distributed_executor_backend",
        "auto",
        "None: `external_launcher` under torchrun, else `uni` for one rank and `mp` for more; also an `Executor` class "
        "or its qualified name",
        {None: "auto", "mp": "multiproc", "uni": "uniproc"},
    ),
    _same("worker_cls", None, "a `WorkerBase` class or its qualified name", {"auto": None, "": None}),
    _same("worker_extension_cls", None, "a class or its qualified name", {"": None}),
    _same(
        "enforce_eager",
        False,
        "CUDA graphs are those of `device_backend` triton, on a GPU; elsewhere every kernel is launched by itself",
    ),
    _renamed("num_gpu_blocks_override", "num_blocks", "a cache of a fixed number of blocks"),
    _renamed("expert_placement_strategy", "expert_placement", "which rank has which experts"),
    _renamed("distributed_timeout_seconds", "timeout_s", "no rank waits for another longer"),
    _renamed("cpu_distributed_timeout_seconds", "timeout_s", "no rank waits for another longer"),
    _ours("num_blocks", None, "a cache of a fixed number of blocks"),
    _ours("host_tier_gib", None, "GiB of host memory a rank for prefix blocks that lost their place"),
    _ours("pipeline_layers", None, "the layers of each stage, such as [10, 8]"),
    _ours("expert_placement", "linear", "`linear`, `round_robin` or a JSON file with the rank of each expert"),
    _ours("invariant_experts", False, "what experts give does not depend on the number of ranks"),
    _ours("timeout_s", None, "seconds that a rank waits for another"),
    _ours("device_backend", "auto", "`cpu`, `torch` or `triton`, or a `DeviceBackend` class by its qualified name"),
    _ours(
        "argmax_screen",
        True,
        "a copy of the head in int8 finds what may be a greedy row's largest logit: the same bits",
    ),
    _ours("device", "auto", "`auto`, `cpu` or `cuda`"),
    _ours("allow_nonfinite", False, "load weights that are NaN or infinite, which are refused otherwise"),
    _ours("pooling_type", None, "`last`, `mean` or `cls`, in place of what the folder says"),
    _ours("classifier_from_token", None, 'two tokens, such as ["no", "yes"]: how much likelier the second is'),
    _ours("default_prompt_name", None, "the folder's prompt that is put before texts that are pooled, `''` for none"),
    _ours("allow_any_dimensions", False, "cut vectors to lengths that config.json does not name"),
    # Without effect.
    *_none(
        "code from a model folder is never run: the families in the README need none, and a folder of another "
        "architecture is refused by name",
        trust_remote_code=False,
    ),
    *_none("the tokenizer is the model's, and no code is read", code_revision=None, tokenizer_revision=None),
    *_none(
        "downloads use what huggingface_hub reads: HF_TOKEN, HF_HOME, HF_HUB_CACHE", hf_token=None, download_dir=None
    ),
    *_none("this name is for servers", served_model_name=None),
    *_none(
        "CUDA graphs are recorded for sizes of our own, where there are some, and nothing is compiled",
        max_seq_len_to_capture=8192,
        cuda_graph_sizes=None,
        cudagraph_capture_sizes=None,
        max_cudagraph_capture_size=None,
        compilation_config=None,
        optimization_level=None,
        performance_mode=None,
        ir_op_priority=None,
        cudagraph_metrics=False,
        jit_monitor_mode=None,
        jit_monitor_verbose=False,
        sleep_mode_offload_cudagraph=False,
    ),
    *_none(
        "kernels and exchanges are chosen by the device, with the same result bit for bit",
        disable_custom_all_reduce=False,
        attention_backend=None,
        attention_config=None,
        kernel_config=None,
        linear_backend=None,
        moe_backend=None,
        all2all_backend=None,
        disable_cascade_attn=False,
        use_fp64_gumbel=False,
        enable_flashinfer_autotune=None,
        enable_bf16x3_router_gemm=None,
        enable_batch_sharded_sampling=None,
        gdn_prefill_backend=None,
        kda_prefill_backend=None,
        kda_decode_backend=None,
        sparse_indexer_topk_backend="auto",
        enable_hc_sp=False,
        disable_nccl_for_dp_synchronization=None,
        data_parallel_backend="mp",
        dcp_comm_backend=None,
        dcp_q_replicate=None,
        dcp_kv_cache_interleave_size=1,
        cp_kv_cache_interleave_size=1,
        kv_sharing_fast_prefill=False,
    ),
    *_none(
        "steps are planned another way, and an answer does not depend on the plan",
        max_num_partial_prefills=1,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=0,
        long_prefill_token_threshold_adaptive=False,
        max_num_active_seqs=None,
        max_num_scheduled_tokens=None,
        scheduler_delay_factor=0.0,
        scheduler_reserve_full_isl=True,
        prefill_schedule_interval=1,
        watermark=None,
        num_scheduler_steps=1,
        multi_step_stream_outputs=True,
        num_lookahead_slots=0,
        use_v2_block_manager=True,
        disable_hybrid_kv_cache_manager=None,
        disable_async_output_proc=False,
        stream_interval=1,
        max_num_queued_reqs=None,
        max_num_queued_tokens=None,
        enable_dbo=False,
        ubatch_size=0,
        dbo_decode_token_threshold=32,
        dbo_prefill_token_threshold=512,
        dp_sync_interval=1,
    ),
    *_none(
        "cached blocks are found by a digest of all that they depend on",
        prefix_caching_hash_algo=None,
        prefix_cache_retention_interval=None,
        prefix_match_unit=None,
    ),
    *_none(
        "there is one way to read safetensors, in parallel and without a copy",
        max_parallel_loading_workers=None,
        safetensors_load_strategy=None,
        safetensors_prefetch_num_threads=None,
        safetensors_prefetch_block_size=None,
        ignore_patterns=None,
        use_tqdm_on_load=True,
        pt_load_map_location="cpu",
        config_format="auto",
    ),
    *_none(
        "prompts may come as token ids whether or not there is a tokenizer; `detokenize=False` switches text off",
        skip_tokenizer_init=False,
    ),
    *_none(
        "a job measures itself: `get_metrics`, `llm_engine.watch_steps`, `start_profile(folder)`",
        disable_log_stats=True,
        aggregate_engine_logging=False,
        show_hidden_metrics_for_version=None,
        custom_histogram_buckets=None,
        otlp_traces_endpoint=None,
        collect_detailed_traces=None,
        kv_cache_metrics=False,
        kv_cache_metrics_sample=None,
        per_request_spec_decode_metrics="none",
        enable_layerwise_nvtx_tracing=False,
        enable_mfu_metrics=False,
        enable_logging_iteration_details=False,
        enable_mm_processor_stats=False,
        profiler_config=None,
        shutdown_timeout=0,
        fail_on_environ_validation=False,
        tokens_only=False,
    ),
    *_none(
        "Python's logging says what is shown and where: set up the logger `spmd_worker`",
        logging_config=None,
        log_level=None,
        log_config_file=None,
    ),
    *_none(
        "torchrun's environment says which rank this is and where the others are",
        master_addr=None,
        master_port=None,
        node_rank=0,
        nnodes=1,
        data_parallel_address=None,
        data_parallel_rpc_port=None,
        ray_workers_use_nsight=False,
    ),
    *_none(
        "ranks of a node share its cores out by themselves",
        numa_bind=False,
        numa_bind_nodes=None,
        numa_bind_cpus=None,
        renderer_num_workers=1,
        tokenizer_pool_size=0,
        tokenizer_pool_type=None,
        tokenizer_pool_extra_config=None,
    ),
    *_none(
        "without adapters (`enable_lora`) nothing asks for it",
        max_loras=1,
        max_lora_rank=16,
        max_cpu_loras=None,
        lora_dtype="auto",
        max_lora_cls_labels=None,
        lora_target_modules=None,
        lora_extra_vocab_size=256,
        long_lora_scaling_factors=None,
        fully_sharded_loras=False,
        enable_lora_bias=False,
        default_mm_loras=None,
        enable_tower_connector_lora=False,
        specialize_active_lora=False,
        enable_mixed_moe_lora_format=False,
        enable_moe_shared_loras=False,
        max_prompt_adapters=1,
        max_prompt_adapter_token=0,
    ),
    *_none(
        "models of text have no other inputs",
        limit_mm_per_prompt=None,
        mm_processor_kwargs=None,
        mm_processor_cache_gb=4,
        mm_processor_cache_type=None,
        mm_hasher_algorithm=None,
        mm_shm_cache_max_object_size_mb=128,
        mm_encoder_tp_mode="weights",
        mm_encoder_attn_backend=None,
        mm_encoder_attn_dtype=None,
        mm_encoder_fp8_scale_path=None,
        mm_encoder_fp8_scale_save_path=None,
        mm_encoder_fp8_scale_save_margin=1.5,
        mm_tensor_ipc=None,
        mm_processor_device="auto",
        mm_ipc_gpu_memory_gb=None,
        mm_device_do_normalize=None,
        media_io_kwargs=None,
        interleave_mm_strings=False,
        language_model_only=False,
        skip_mm_profiling=False,
        video_pruning_rate=None,
        video_pruning_method=None,
        disable_mm_preprocessor_cache=False,
        disable_chunked_mm_input=False,
        enable_multimodal_encoder_data_parallel=False,
        allowed_local_media_path="",
        allowed_media_domains=None,
        ec_manager_config=None,
        enable_shm_tensor_arena=False,
    ),
    *_none(
        "the families that run here have no layers of this kind",
        mamba_config=None,
        mamba_cache_dtype="auto",
        mamba_ssm_cache_dtype="auto",
        mamba_block_size=None,
        mamba_cache_mode="none",
        enable_mamba_shared_prefix_checkpoint=False,
        mamba_backend=None,
        mamba_ssu_algorithm=None,
        enable_mamba_cache_stochastic_rounding=False,
        mamba_cache_philox_rounds=0,
        replayssm_buffer_len=None,
        use_replayssm=None,
        engram_config=None,
        swa_bounded_replay=True,
    ),
    *_none(
        "experts stay where expert_placement puts them, once each, and a rank reads its own alone",
        eplb_config=None,
        enable_eplb=False,
        enable_ep_weight_filter=False,
        enable_elastic_ep=False,
        elastic_ep_max_dp_size=None,
        num_redundant_experts=0,
        eplb_window_size=1000,
        eplb_step_interval=3000,
        eplb_log_balancedness=False,
    ),
    *_none(
        "a row asks for constrained decoding (structured_outputs), and one engine does it",
        structured_outputs_config=None,
        reasoning_parser="",
        reasoning_parser_plugin=None,
        reasoning_config=None,
        guided_decoding_backend=None,
        guided_decoding_disable_fallback=None,
        guided_decoding_disable_any_whitespace=None,
        guided_decoding_disable_additional_properties=None,
        logits_processor_pattern=None,
    ),
    *_none(
        "an option of what is refused by its own keyword",
        offload_backend="auto",
        offload_group_size=0,
        offload_num_in_group=1,
        offload_prefetch_step=1,
        offload_params=None,
        cpu_offload_params=None,
        kv_offloading_backend=None,
        speculative_disable_mqa_scorer=False,
        speculative_disable_by_batch_size=None,
        disable_logprobs_during_spec_decoding=None,
        allow_deprecated_quantization=False,
        calculate_kv_scales=False,
        kv_cache_dtype_skip_layers=None,
        fault_tolerance_config=None,
        io_processor_plugin=None,
    ),
    *_none("every engine can sleep and wake up: nothing has to be prepared for it", enable_sleep_mode=False),
    *_none("an option of vLLM's own allocator or weight transfer", enable_cumem_allocator=None),
    *_none("an option of vLLM's own allocator or weight transfer", enable_nccl_comm_suspend=False),
    *_none("`weight_transfer_config` names a transport of vLLM's servers", weight_transfer_config=None),
    *_none("read by platforms of vLLM's", additional_config=None, override_neuron_config=None),
    *_none("`logprobs` has its own limit, `-1` asks for all", max_logprobs=20),
    # Refused.
    *_refused(
        "what the checkpoint's own config.json says is read, and weights run dequantised: leave it out",
        quantization_config=None,
    ),
    *_refused("the cache has the model's dtype: leave it out", "auto", kv_cache_dtype="auto"),
    *_refused(
        "there is no speculative decoding: leave it out, answers are the same",
        speculative_config=None,
        speculative_model=None,
        num_speculative_tokens=None,
        spec_method=None,
        spec_model=None,
        spec_tokens=None,
    ),
    *_refused(
        "there are no adapters: merge them into the checkpoint (PEFT's merge_and_unload) and leave it out",
        enable_lora=False,
        enable_prompt_adapter=False,
        qlora_adapter_name_or_path=None,
    ),
    *_refused(
        "ranks must agree on every logit and a log must replay it, which code of the caller's cannot promise: use "
        "allowed_token_ids, bad_words or logit_bias of SamplingParams",
        logits_processors=None,
    ),
    *_refused("config.json says what the model is: edit it and leave this out", hf_overrides=None, rope_scaling=None),
    *_refused("config.json says what the model is: edit it and leave this out", rope_theta=None, hf_config_path=None),
    *_refused(
        "config.json says which layers look back how far: edit it and leave this out", disable_sliding_window=False
    ),
    *_refused("model classes are those of this package: leave it out", "auto", "vllm", model_impl="auto"),
    *_refused("model classes are those of this package: leave it out", model_class_overrides=None),
    *_refused("config and weights are read from one folder, `model`: leave it out", model_weights=""),
    *_refused("runner says whether tokens or vectors are given: leave it out", "auto", "generate", task="auto"),
    *_refused(
        'runner="pooling" does what the folder is for; classifier_from_token makes a classifier: leave it out',
        "auto",
        "none",
        convert="auto",
    ),
    *_refused(
        "the folder's files say how rows are pooled, or pooling_type: leave it out",
        pooler_config=None,
        override_pooler_config=None,
    ),
    *_refused("models give text, vectors or scores here: leave it out", diffusion_config=None),
    *_refused(
        "the model folder's tokenizer.json is read: leave it out, or put the tokenizer's files into the model folder",
        tokenizer=None,
    ),
    *_refused("tokenizer.json is read by the tokenizers library: leave it out", "auto", "hf", tokenizer_mode="auto"),
    *_refused("rows are served first come, first served: leave it out", "fcfs", scheduling_policy="fcfs"),
    *_refused("every rank runs this package's scheduler: leave it out", scheduler_cls=None),
    *_refused(
        "sizes of the cache are numbers of blocks, the same on every rank: give num_blocks, or gpu_memory_utilization",
        kv_cache_memory_bytes=None,
    ),
    *_refused("give host_tier_gib, GiB of host memory of each rank", 0, kv_offloading_size=None),
    *_refused("weights are on the device whole: leave it out, or use more ranks", 0, cpu_offload_gb=0),
    *_refused(
        "ranks are divided by tensor_parallel_size, pipeline_parallel_size and data_parallel_size: leave it out",
        1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
    ),
    *_refused(
        "replicas are made by data_parallel_size, or by a world of more ranks than one engine needs: leave it out",
        data_parallel_rank=None,
        data_parallel_start_rank=None,
        data_parallel_size_local=None,
        data_parallel_hybrid_lb=False,
        data_parallel_external_lb=False,
        data_parallel_multi_port_external_lb=False,
    ),
    *_refused("a rank has the device of its LOCAL_RANK: set CUDA_VISIBLE_DEVICES instead", device_ids=None),
    *_refused(
        "which experts a token met is not returned: leave it out",
        enable_return_routed_experts=False,
        aux_output_config=None,
    ),
    *_refused("answers are not watermarked: leave it out", watermark_config=None),
    *_refused(
        "after level 2 all weights are loaded again: leave it out, or sleep at level 1, which keeps them",
        sleep_preserve_parameter_names=None,
    ),
    *_refused(
        "it is not returned: with top_k 0, top_p 1 and min_p 0 every token is kept, so that none is needed",
        return_sampling_mask=False,
    ),
    *_refused("prompts are text or token ids: leave it out", enable_prompt_embeds=False, enable_mm_embeds=False),
    *_refused("models of text have no encoder: leave it out", mm_encoder_only=False),
    *_refused(
        "one engine hands nothing to another: leave it out",
        kv_transfer_config=None,
        kv_events_config=None,
        ec_transfer_config=None,
    ),
    *_refused("a failure of one rank ends all, and a job resumes: leave it out", enable_fault_tolerance=False),
    *_refused("`spmd-worker-replay` replays a run's step log: leave it out", enable_trace_replay=False),
    *_refused("there is one loader, without settings: leave it out", model_loader_extra_config=None),
    *_refused("attention is computed in the model's dtype: leave it out", override_attention_dtype=None),
)

KEYWORDS: Final[Mapping[str, Keyword]] = {row.name: row for row in _ROWS}
"""The table by vLLM's names, `model` aside."""

_MAX_SHOWN: Final = 80
_said: dict[str, None] = {}


def own_arguments(given: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """`LLM`'s own keywords and values for a call's keywords. What is without effect is logged once a process, at debug
    level.

    Raises TypeError for a keyword that nobody knows, naming the nearest; ConfigError for what is refused and for two
    names of one keyword with different values.
    """
    own: dict[str, Any] = {}
    for name, value in given.items():
        row = KEYWORDS.get(name)
        if row is None:
            raise TypeError(_unknown(name))
        plain = _plain(value)
        if row.effect is Effect.NONE:
            _say_once(row, plain)
        elif row.effect is Effect.REFUSED:
            _check_neutral(row, plain, model)
        elif row.effect is not Effect.RENAMED:
            own.setdefault(name, _translated(row, plain))
    for row in KEYWORDS.values():
        if row.effect is Effect.RENAMED and given.get(row.name) is not None:
            _set_renamed(own, row, given[row.name])
    return own


def _unknown(name: str) -> str:
    nearest = difflib.get_close_matches(name, KEYWORDS, n=1)
    hint = f": did you mean {nearest[0]}?" if nearest else ": docs/vllm.md lists those there are"
    return f"LLM has no keyword {name}{hint}"


def _plain(value: Any) -> Any:
    """A dtype of torch and a member of an enumeration as text, a class as its qualified name."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    text = str(value) if type(value).__name__ == "dtype" else ""
    return text.removeprefix("torch.") if text.startswith("torch.") else value


def _translated(row: Keyword, value: Any) -> Any:
    is_key = value is None or isinstance(value, str) or type(value) is int
    return row.values.get(value, value) if is_key else value


def _set_renamed(own: dict[str, Any], row: Keyword, value: Any) -> None:
    known = own.get(row.ours)
    # `LLM` and `EngineArgs` pass their own default on, whether or not it was given.
    is_given = known is not None and not _equals(known, KEYWORDS[row.ours].default)
    if is_given and known != value:
        raise ConfigError(f"{row.name}={value!r} and {row.ours}={known!r} are one setting here: give {row.ours} alone")
    own[row.ours] = value


def _say_once(row: Keyword, value: Any) -> None:
    if row.name in _said or value is None or _equals(value, row.default):
        return
    _said[row.name] = None
    logger.debug("LLM: %s=%s is without effect here: %s", row.name, _short(value), row.words)


def _check_neutral(row: Keyword, value: Any, model: Any) -> None:
    is_empty = value is None or (isinstance(value, str | list | tuple | dict | set | frozenset) and not value)
    is_model = row.name == "tokenizer" and str(value) == str(model)
    if not (is_empty or is_model or any(_equals(value, each) for each in (row.default, *row.neutral))):
        raise ConfigError(f"{row.name}={_short(value)} is refused: {row.words}")


def _equals(value: Any, other: Any) -> bool:
    """Of plain values only: what an array or a config object calls equal is its own business. True is not 1."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    plain = str | int | float
    return isinstance(value, plain) and isinstance(other, plain) and value == other


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
