"""Types of the keywords of `LLM(...)` and `EngineArgs(...)`, for type checkers and editors.

Written by `python scripts/reference_pages.py`; do not edit it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

# fmt: off
_Others = TypedDict("_Others", {  # noqa: UP013  # one name a line otherwise
    "trust_remote_code": Any, "code_revision": Any, "tokenizer_revision": Any, "hf_token": Any, "download_dir": Any,
    "served_model_name": Any, "max_seq_len_to_capture": Any, "cuda_graph_sizes": Any,
    "cudagraph_capture_sizes": Any, "max_cudagraph_capture_size": Any, "compilation_config": Any,
    "optimization_level": Any, "performance_mode": Any, "ir_op_priority": Any, "cudagraph_metrics": Any,
    "jit_monitor_mode": Any, "jit_monitor_verbose": Any, "sleep_mode_offload_cudagraph": Any,
    "disable_custom_all_reduce": Any, "attention_backend": Any, "attention_config": Any, "kernel_config": Any,
    "linear_backend": Any, "moe_backend": Any, "all2all_backend": Any, "disable_cascade_attn": Any,
    "use_fp64_gumbel": Any, "enable_flashinfer_autotune": Any, "enable_bf16x3_router_gemm": Any,
    "enable_batch_sharded_sampling": Any, "gdn_prefill_backend": Any, "kda_prefill_backend": Any,
    "kda_decode_backend": Any, "sparse_indexer_topk_backend": Any, "enable_hc_sp": Any, "monokernel": Any,
    "disable_nccl_for_dp_synchronization": Any, "data_parallel_backend": Any, "dcp_comm_backend": Any,
    "dcp_q_replicate": Any, "dcp_kv_cache_interleave_size": Any, "cp_kv_cache_interleave_size": Any,
    "kv_sharing_fast_prefill": Any, "max_num_partial_prefills": Any, "max_long_partial_prefills": Any,
    "long_prefill_token_threshold": Any, "long_prefill_token_threshold_adaptive": Any, "max_num_active_seqs": Any,
    "max_num_scheduled_tokens": Any, "scheduler_delay_factor": Any, "scheduler_reserve_full_isl": Any,
    "prefill_schedule_interval": Any, "watermark": Any, "num_scheduler_steps": Any,
    "multi_step_stream_outputs": Any, "num_lookahead_slots": Any, "use_v2_block_manager": Any,
    "disable_hybrid_kv_cache_manager": Any, "disable_async_output_proc": Any, "stream_interval": Any,
    "max_num_queued_reqs": Any, "max_num_queued_tokens": Any, "enable_dbo": Any, "ubatch_size": Any,
    "dbo_decode_token_threshold": Any, "dbo_prefill_token_threshold": Any, "dp_sync_interval": Any,
    "max_num_inflight_kv_loads": Any, "cache_aware_admission_window": Any, "cache_aware_admission_threshold": Any,
    "prefix_caching_hash_algo": Any, "prefix_cache_retention_interval": Any, "prefix_match_unit": Any,
    "max_parallel_loading_workers": Any, "safetensors_load_strategy": Any, "safetensors_prefetch_num_threads": Any,
    "safetensors_prefetch_block_size": Any, "shuffle_safetensors_files": Any, "ignore_patterns": Any,
    "use_tqdm_on_load": Any, "pt_load_map_location": Any, "config_format": Any, "skip_tokenizer_init": Any,
    "disable_log_stats": Any, "aggregate_engine_logging": Any, "show_hidden_metrics_for_version": Any,
    "custom_histogram_buckets": Any, "otlp_traces_endpoint": Any, "collect_detailed_traces": Any,
    "kv_cache_metrics": Any, "kv_cache_metrics_sample": Any, "per_request_spec_decode_metrics": Any,
    "enable_layerwise_nvtx_tracing": Any, "enable_mfu_metrics": Any, "enable_logging_iteration_details": Any,
    "enable_mm_processor_stats": Any, "profiler_config": Any, "shutdown_timeout": Any,
    "fail_on_environ_validation": Any, "tokens_only": Any, "logging_config": Any, "log_level": Any,
    "log_config_file": Any, "master_addr": Any, "master_port": Any, "node_rank": Any, "nnodes": Any,
    "data_parallel_address": Any, "data_parallel_rpc_port": Any, "ray_workers_use_nsight": Any, "numa_bind": Any,
    "numa_bind_nodes": Any, "numa_bind_cpus": Any, "renderer_num_workers": Any, "tokenizer_pool_size": Any,
    "tokenizer_pool_type": Any, "tokenizer_pool_extra_config": Any, "specialize_active_lora": Any,
    "max_lora_cls_labels": Any, "enable_prompt_adapter": Any, "max_prompt_adapter_token": Any,
    "enable_prompt_embeds": Any, "mm_encoder_tp_mode": Any, "enable_multimodal_encoder_data_parallel": Any,
    "mm_processor_cache_gb": Any, "mm_processor_cache_type": Any, "mm_shm_cache_max_object_size_mb": Any,
    "disable_mm_preprocessor_cache": Any, "mm_ipc_gpu_memory_gb": Any, "mm_tensor_ipc": Any,
    "enable_shm_tensor_arena": Any, "mm_hasher_algorithm": Any, "mm_encoder_attn_backend": Any,
    "mm_encoder_attn_dtype": Any, "mm_encoder_fp8_scale_path": Any, "mm_encoder_fp8_scale_save_path": Any,
    "mm_encoder_fp8_scale_save_margin": Any, "mm_processor_device": Any, "mm_device_do_normalize": Any,
    "interleave_mm_strings": Any, "skip_mm_profiling": Any, "disable_chunked_mm_input": Any,
    "video_pruning_rate": Any, "video_pruning_method": Any, "ec_manager_config": Any, "mamba_config": Any,
    "mamba_cache_dtype": Any, "mamba_ssm_cache_dtype": Any, "mamba_block_size": Any, "mamba_cache_mode": Any,
    "enable_mamba_shared_prefix_checkpoint": Any, "mamba_backend": Any, "mamba_ssu_algorithm": Any,
    "enable_mamba_cache_stochastic_rounding": Any, "mamba_cache_philox_rounds": Any, "replayssm_buffer_len": Any,
    "use_replayssm": Any, "engram_config": Any, "swa_bounded_replay": Any, "eplb_config": Any, "enable_eplb": Any,
    "enable_ep_weight_filter": Any, "enable_elastic_ep": Any, "elastic_ep_max_dp_size": Any,
    "num_redundant_experts": Any, "eplb_window_size": Any, "eplb_step_interval": Any, "eplb_log_balancedness": Any,
    "structured_outputs_config": Any, "reasoning_parser": Any, "reasoning_parser_plugin": Any,
    "reasoning_config": Any, "guided_decoding_backend": Any, "guided_decoding_disable_fallback": Any,
    "guided_decoding_disable_any_whitespace": Any, "guided_decoding_disable_additional_properties": Any,
    "logits_processor_pattern": Any, "offload_backend": Any, "offload_group_size": Any, "offload_num_in_group": Any,
    "offload_prefetch_step": Any, "offload_params": Any, "cpu_offload_params": Any, "kv_offloading_backend": Any,
    "speculative_disable_mqa_scorer": Any, "speculative_disable_by_batch_size": Any,
    "disable_logprobs_during_spec_decoding": Any, "allow_deprecated_quantization": Any,
    "fault_tolerance_config": Any, "io_processor_plugin": Any, "enable_sleep_mode": Any, "sleep_mode_backend": Any,
    "enable_cumem_allocator": Any, "enable_nccl_comm_suspend": Any, "enable_extensible_kv_cache": Any,
    "watchdog_config": Any, "weight_transfer_config": Any, "additional_config": Any, "override_neuron_config": Any,
    "max_logprobs": Any, "quantization_config": Any, "calculate_kv_scales": Any, "kv_cache_dtype_skip_layers": Any,
    "qlora_adapter_name_or_path": Any, "lora_dtype": Any, "lora_target_modules": Any, "lora_extra_vocab_size": Any,
    "long_lora_scaling_factors": Any, "fully_sharded_loras": Any, "enable_lora_bias": Any,
    "enable_mixed_moe_lora_format": Any, "enable_moe_shared_loras": Any, "default_mm_loras": Any,
    "enable_tower_connector_lora": Any, "logits_processors": Any, "hf_overrides": Any, "rope_scaling": Any,
    "rope_theta": Any, "hf_config_path": Any, "disable_sliding_window": Any, "model_impl": Any,
    "model_class_overrides": Any, "model_weights": Any, "task": Any, "convert": Any, "pooler_config": Any,
    "override_pooler_config": Any, "diffusion_config": Any, "tokenizer": Any, "tokenizer_mode": Any,
    "scheduler_cls": Any, "kv_cache_memory_bytes": Any, "kv_offloading_size": Any, "cpu_offload_gb": Any,
    "prefill_context_parallel_size": Any, "decode_context_parallel_size": Any, "data_parallel_rank": Any,
    "data_parallel_start_rank": Any, "data_parallel_size_local": Any, "data_parallel_hybrid_lb": Any,
    "data_parallel_external_lb": Any, "data_parallel_multi_port_external_lb": Any, "device_ids": Any,
    "enable_return_routed_experts": Any, "aux_output_config": Any, "watermark_config": Any,
    "sleep_preserve_parameter_names": Any, "return_sampling_mask": Any, "enable_mm_embeds": Any,
    "mm_encoder_only": Any, "allowed_media_domains": Any, "kv_transfer_config": Any, "kv_events_config": Any,
    "ec_transfer_config": Any, "enable_fault_tolerance": Any, "enable_trace_replay": Any,
    "model_loader_extra_config": Any, "checkpoint_prepare_on_startup": Any, "override_attention_dtype": Any,
}, total=False)
# fmt: on


class LLMKeywords(_Others, total=False):
    """Keywords of `LLM(...)`; docs/reference/vllm_names.md says what each means."""

    revision: str | None
    dtype: Any
    max_model_len: int | None
    load_format: str | None
    quantization: str | None
    logprobs_mode: str | None
    head_dtype: str | None
    dequantize_weights: bool | None
    allow_nonfinite: bool | None
    runner: str | None
    pooling_type: str | None
    classifier_from_token: list[str] | None
    default_prompt_name: str | None
    allow_any_dimensions: bool | None
    reasoning_format: str | None
    enable_lora: bool | None
    max_loras: int | None
    max_lora_rank: int | None
    max_cpu_loras: int | None
    lora_experts: bool | None
    max_prompt_adapters: int | None
    adapters: dict[str, str] | None
    prompt_adapters: dict[str, str] | None
    lora_merge: str | None
    image_min_pixels: int | None
    image_max_pixels: int | None
    image_background: str | None
    image_processor: dict[str, str] | None
    video_processor: dict[str, str] | None
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    data_parallel_size: int | None
    pipeline_layers: list[int] | None
    enable_expert_parallel: bool | None
    expert_placement: str | None
    expert_placement_strategy: str | None
    invariant_experts: bool | None
    invariant_tensor_parallel: bool | None
    max_leaves: int | None
    distributed_executor_backend: str | type | None
    timeout_s: float | None
    distributed_timeout_seconds: float | None
    cpu_distributed_timeout_seconds: float | None
    worker_cls: str | type | None
    worker_extension_cls: str | type | None
    enforce_eager: bool | None
    device_backend: str | None
    argmax_screen: bool | None
    verify_steps: int | None
    kv_cache_dtype: str | None
    block_size: int | None
    num_blocks: int | None
    num_gpu_blocks_override: int | None
    gpu_memory_utilization: float | None
    swap_space: float | None
    enable_prefix_caching: bool | None
    verify_hits: int | None
    window_groups: bool | None
    num_state_snapshots: int | None
    host_tier_gib: float | None
    media_rows_gib: float | None
    connector: str | None
    connector_options: dict[str, str] | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    enable_chunked_prefill: bool | None
    preemption_mode: str | None
    scheduling_policy: str | None
    max_encode_patches: int | None
    max_encoder_len: int | None
    async_scheduling: bool | None
    max_images: int | None
    max_image_bytes: int | None
    max_image_pixels: int | None
    max_image_tokens: int | None
    image_formats: list[str] | None
    max_videos: int | None
    max_video_bytes: int | None
    max_video_frames: int | None
    max_video_tokens: int | None
    max_audios: int | None
    max_audio_bytes: int | None
    max_audio_s: int | None
    allowed_local_media_path: str | None
    media_threads: int | None
    device: str | None
    seed: int | None
    generation_config: str | None
    override_generation_config: Mapping[str, Any] | None
    chat_template: str | Path | None
    limit_mm_per_prompt: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None
    media_io_kwargs: Mapping[str, Any] | None
    language_model_only: bool
    speculative_config: Mapping[str, Any] | str | None
    spec_method: str | int | None
    spec_model: str | int | None
    spec_tokens: str | int | None
    speculative_model: str | int | None
    num_speculative_tokens: str | int | None
    ngram_prompt_lookup_max: str | int | None
    ngram_prompt_lookup_min: str | int | None
    speculative_draft_tensor_parallel_size: str | int | None
