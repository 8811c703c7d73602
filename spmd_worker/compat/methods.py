"""Tables of vLLM's names of `LLM`, `LLMEngine`, executor and worker: differences of the supported ones, alternatives to
the others.

A missing attribute is an AttributeError with these texts, so `hasattr` is correct.
"""

from collections.abc import Mapping
from typing import Final

from spmd_worker.replica.sequence.sampling_params import SAMPLING_KEYS

LLM_METHODS: Final[Mapping[str, str]] = {
    "generate": "every rank passes the same prompts and gets every output; arguments of missing features are rejected",
    "chat": "contents are text; `tool_choice` as in OpenAI's API",
    "enqueue": "every rank passes the same prompts; returns the `request_id` of their outputs",
    "wait_for_completion": "takes ids too; no `output_type`; every rank gets every output",
    "beam_search": "`temperature` is 0; every end-of-sequence token of the model ends a beam; no `structured_outputs`",
    "embed": "arguments after the prompts are keyword-only; the vector is a list of numbers",
    "encode": "`pooling_task` None is the model's task; `token_embed` and `token_classify` give a list of lists",
    "classify": "",
    "score": "similarity of two texts, or the score of the pair; no images, no `chat_template`",
    "reward": "the score of a model with one label, without activation",
    "get_tokenizer": "transformers' tokenizer if transformers is installed, else one with the same methods",
    "get_default_sampling_params": "a mutable copy",
    "get_metrics": "counters, gauges and drafts by position of this rank's replica",
    "get_world_size": "",
    "collective_rpc": "under torchrun each rank has one worker, so one result; callables do not cross processes",
    "apply_model": "the function gets this rank's shard under the checkpoint's names, without a forward pass",
    "get_model_inspection": "as the worker's",
    "reset_prefix_cache": "no `reset_running_requests` while requests are unanswered; `reset_connector` has no effect",
    "reset_mm_cache": "drops the rows of images on every rank; no effect in text models",
    "sleep": '`mode` None is "keep" at level 0; at the others unanswered requests are an error then, not aborted; '
    "`reset_connector` has no effect",
    "wake_up": "after level 2 all weights must be loaded before anything is computed; ends a pause that `sleep` began",
    "start_profile": "takes the folder to write to",
    "stop_profile": "returns the files",
    "from_engine_args": "",
    "init_weight_transfer_engine": "IPC handles need no `init_info`; other transports are rejected with the way out",
    "start_weight_update": "`partial=True` keeps weights that are not given",
    "update_weights": "requests with `ipc_handles`, or pairs of name and tensor, whole or sharded",
    "finish_weight_update": "compares what the ranks have loaded",
}
"""Supported methods and their differences."""

_OF_PARAMS: Final = {key: f"it is a field of SamplingParams: SamplingParams({key}=...)" for key in SAMPLING_KEYS}

_TRUNCATED: Final = "give pooling_params=PoolingParams(truncate_prompt_tokens=...)"

CALL_KEYWORDS: Final[Mapping[str, Mapping[str, str]]] = {
    "generate": {
        **_OF_PARAMS,
        "prompt_token_ids": 'give prompts, such as [{"prompt_token_ids": ids}]',
        "guided_options_request": "give structured_outputs of SamplingParams",
    },
    "chat": {
        **_OF_PARAMS,
        "guided_options_request": "give structured_outputs of SamplingParams",
        "reasoning_effort": 'give chat_template_kwargs={"reasoning_effort": ...}',
        "documents": 'give chat_template_kwargs={"documents": ...}',
    },
    "embed": {"dimensions": "give pooling_params=PoolingParams(dimensions=...)"},
    "classify": {"truncate_prompt_tokens": _TRUNCATED},
    "reward": {"truncate_prompt_tokens": _TRUNCATED},
    "pause_generation": {"wait_for_inflight_requests": 'give mode="wait"'},
    "wait_for_completion": {"output_type": "every output is a RequestOutput: leave it out"},
    "start_profile": {
        "profile_prefix": "give the folder to write to: start_profile(folder)",
        "delay_iterations": "call start_profile when the steps begin: leave it out",
        "max_iterations": "call stop_profile when they end: leave it out",
        "profiler_kwargs": "torch's profiler is started in one way: leave it out",
    },
    "encode": {"prompt_token_ids": 'give prompts, such as [{"prompt_token_ids": ids}]'},
}
"""Keywords of older releases and other programs, and their alternatives."""

LLM_ABSENT: Final[Mapping[str, str]] = {
    "enqueue_chat": "render with get_tokenizer().apply_chat_template, and give enqueue the ids",
    "set_tokenizer": "the engine decodes with the tokenizer of the model folder: replace it there",
    "preprocess_chat": "render with get_tokenizer().apply_chat_template",
    "release_kv_cache_memory": 'sleep releases all memory: wake_up(tags=["weights"]) leaves the cache asleep',
    "start_draft_weight_update": "a draft model is loaded from its folder: start_weight_update is of the target",
    "shutdown": "call close",
    "engine_class": "it is type(llm.llm_engine)",
    "request_counter": "requests of a call are numbered from 0, those of llm_engine are named",
    "default_sampling_params": "call get_default_sampling_params",
    "vllm_config": "the configuration is llm_engine.config, the model's is model_config",
    **dict.fromkeys(("renderer", "io_processor", "input_processor"), "render with get_tokenizer()"),
}
"""Missing methods and attributes, and their alternatives."""

ENGINE_METHODS: Final[Mapping[str, str]] = {
    "from_engine_args": "further arguments have no effect",
    "add_request": "returns the name; tracing is not supported",
    "step": "partial outputs only if `output_kind` requests them",
    "abort_request": "",
    "has_unfinished_requests": "",
    "get_num_unfinished_requests": "",
    "get_supported_tasks": "",
    "get_tokenizer": "as `LLM`'s",
    "get_metrics": "as `LLM`'s",
    "reset_prefix_cache": "takes effect with the next step",
    "sleep": "as `LLM`'s",
    "wake_up": "as `LLM`'s",
    "is_sleeping": "",
    "pause_generation": "AsyncLLM's, of `LLM` too: ends queued requests in mode \"abort\", as vLLM's engine core does",
    "resume_generation": "AsyncLLM's, of `LLM` too",
    "is_paused": "AsyncLLM's; a property of `LLM`",
    "reset_mm_cache": "as `LLM`'s",
    "reset_encoder_cache": "as `reset_mm_cache`",
    "collective_rpc": "as `LLM`'s",
    "apply_model": "as `LLM`'s",
    "add_lora": "on all ranks together, or on none; other weights under a loaded id need `load_inplace`",
    "remove_lora": "refused while requests with the adapter are unanswered",
    "pin_lora": "",
    "list_loras": "",
    "add_prompt_adapter": "PEFT folders of prompt tuning, p-tuning and prefix tuning; on all ranks or on none",
    "remove_prompt_adapter": "refused while requests with the adapter are unanswered",
    "pin_prompt_adapter": "",
    "list_prompt_adapters": "",
}
"""Supported methods of `LLMEngine`, the class of `llm.llm_engine`."""

_PARTS: Final = "the engine encodes, steps and decodes in this process: use add_request and step"
_CONFIG: Final = "the configuration is `config`, the model's is `model_config`"
_PROFILE: Final = "call LLM.start_profile(folder) and LLM.stop_profile(), or worker_event with these names"

ENGINE_ABSENT: Final[Mapping[str, str]] = {
    "from_vllm_config": "give EngineArgs to from_engine_args",
    **dict.fromkeys(
        ("vllm_config", "cache_config", "parallel_config", "scheduler_config", "get_model_config"), _CONFIG
    ),
    **dict.fromkeys(("engine_core", "output_processor", "input_processor", "processor", "renderer"), _PARTS),
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILE),
    **dict.fromkeys(("do_log_stats", "do_log_stats_with_interval"), "read get_metrics"),
    "get_tokenizer_group": "call get_tokenizer",
    "has_unfinished_requests_dp": "each replica has its own requests: call has_unfinished_requests",
    "init_weight_transfer_engine": "weights are changed by the calls of LLM: use LLM.update_weights or apply_model",
}
"""Missing methods and attributes of `LLMEngine`, and their alternatives."""

EXECUTOR_NAMES: Final[Mapping[str, str]] = {
    "get_class": "takes `executor.backend` and the rank's environment",
    "collective_rpc": "as `LLM`'s",
    "execute_model": "takes a step plan; sampling is a part of it",
    "initialize_from_config": "takes the numbers of device and host blocks",
    "determine_available_memory": "bytes for each worker's cache, of complete blocks",
    "determine_num_available_blocks": "(device, host) blocks that fit on every worker",
    "get_kv_cache_specs": "bytes of a block and of each layer's, on each worker",
    "supported_tasks": "",
    "max_concurrent_batches": "steps in flight",
    "sleep": "as `LLM`'s, with a warning for a second one",
    "wake_up": "as `LLM`'s, with a warning where nothing sleeps",
    "is_sleeping": "",
    "sleeping_tags": "a tuple",
    "check_health": "every worker computes something",
    "register_failure_callback": "",
    "shutdown": "",
    "execute_dummy_batch": "between requests; no replica needs it, because replicas wait for nothing of each other",
    "take_draft_token_ids": "of the last step in which a model drafted; None for other methods",
    "profile": "takes the folder to write to",
    "reset_mm_cache": "drops the rows of images on every rank; no effect in text models",
    "init_kv_output_aggregator": "a transfer of blocks is finished when every worker has finished it",
    "reinitialize_distributed": "called by `LLM.reinitialize_distributed`",
    "uses_ray": "False",
    "supports_pp": "True",
}
"""Names of vLLM's executor, `llm.llm_engine.model_executor`, and their differences."""

WORKER_NAMES: Final[Mapping[str, str]] = {
    "rank": "",
    "local_rank": "",
    "device": "",
    "model_runner": "its `model` takes new weights",
    "is_driver_worker": "first of the ranks that share its layers",
    "vocab_size": "",
    "max_model_len": "",
    "init_device": "no generator is seeded: randomness is counter-based",
    "load_model": "",
    "get_kv_cache_spec": "one record, with an entry for each layer",
    "determine_available_memory": "bytes for the cache, of complete blocks",
    "determine_num_available_blocks": "(device, host) blocks",
    "initialize_cache": "takes the numbers of device and host blocks",
    "compile_or_warm_up_model": "",
    "execute_model": "takes a step plan; None if `sample_tokens` follows",
    "sample_tokens": "takes no grammar output: this worker computes its masks itself",
    "execute_dummy_batch": "in a cache of its own",
    "check_health": "",
    "get_model": "",
    "apply_model": "the function gets the checkpoint's names",
    "get_model_inspection": "with the slices of the checkpoint that this rank has, such as `rows 192 to 288 of 288`",
    "get_cache_block_size_bytes": "",
    "get_supported_tasks": "",
    "profile": "of this rank alone",
    "reset_mm_cache": "no effect: a plan drops the rows of images (`LLM.reset_mm_cache`)",
    "kv_cache": "one list of layers, which steps in flight share",
    "do_metadata_broadcast": "False: a step's metadata comes with the agreed plan",
    "shutdown": "",
}
"""Names of vLLM's worker and their differences. `sleep`, `wake_up` and adapters are calls of the executor or of `LLM`,
which change all workers between the same two steps.
"""
