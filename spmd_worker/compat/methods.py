"""Methods of vLLM's `LLM` and `LLMEngine`: what differs in those that are here, and what to do about the others.

Data. An attribute that is not here is an AttributeError with these words, so that `hasattr` says the truth.
"""

from collections.abc import Mapping
from typing import Final

from spmd_worker.replica.sequence.sampling_params import SAMPLING_KEYS

_QUEUE: Final = "prompts are answered in the call: use generate, or LLMEngine's add_request and step"

LLM_METHODS: Final[Mapping[str, str]] = {
    "generate": "every rank passes the same prompts and gets every output; arguments for what is not here are refused",
    "chat": "contents are text; `tool_choice` as in OpenAI's API",
    "beam_search": "`temperature` is 0; every end-of-sequence token of the model ends a beam; `structured_outputs` may "
    "ask for nothing",
    "embed": "arguments after the prompts have names; the vector is a list of numbers",
    "encode": "`pooling_task` None is what the model does; one vector for each row, none for each token",
    "classify": "",
    "score": "of two texts the cosine, or the score of the second behind the first; no images; `chat_template` may ask "
    "for nothing",
    "reward": "the score of a model with one label, without activation",
    "get_tokenizer": "transformers' tokenizer where transformers is installed, else one with the same names",
    "get_default_sampling_params": "a copy, which may be changed",
    "get_metrics": "numbers and gauges of this rank's replica",
    "get_world_size": "",
    "collective_rpc": "under torchrun each rank has one worker, so one answer; callables do not cross processes",
    "apply_model": "the function gets this rank's shard under the checkpoint's names; it has no forward pass",
    "reset_prefix_cache": "`reset_running_requests` needs that no request is unanswered; the host tier goes with or "
    "without `reset_connector`",
    "reset_mm_cache": "nothing: models of text have no other inputs",
    "sleep": "levels 1 and 2, with no request unanswered, so `mode` is without effect; nothing has to be switched on",
    "wake_up": "after level 2 nothing is computed before all weights were loaded again",
    "start_profile": "takes the folder to write to",
    "stop_profile": "returns the files",
    "from_engine_args": "",
}
"""Methods that are here, and what differs."""

_OF_PARAMS: Final = {key: f"it is a field of SamplingParams: SamplingParams({key}=...)" for key in SAMPLING_KEYS}

_TRUNCATED: Final = "give pooling_params=PoolingParams(truncate_prompt_tokens=...)"

CALL_KEYWORDS: Final[Mapping[str, Mapping[str, str]]] = {
    "generate": {
        **_OF_PARAMS,
        "prompt_token_ids": 'give prompts, such as [{"prompt_token_ids": ids}]',
        "prompt_adapter_request": "there are no adapters: leave it out",
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
    "start_profile": {"profile_prefix": "give the folder to write to: start_profile(folder)"},
    "encode": {"prompt_token_ids": 'give prompts, such as [{"prompt_token_ids": ids}]'},
}
"""Keywords of calls of older releases and of other programs, and the way out."""

LLM_ABSENT: Final[Mapping[str, str]] = {
    "enqueue": _QUEUE,
    "enqueue_chat": _QUEUE,
    "wait_for_completion": _QUEUE,
    "set_tokenizer": "the engine decodes with the model folder's tokenizer: put another one there",
    "preprocess_chat": "render with get_tokenizer().apply_chat_template",
    "release_kv_cache_memory": 'sleep gives back all memory: wake_up(tags=["weights"]) leaves the cache asleep',
    "init_weight_transfer_engine": "weights are changed in this process: update_weights or apply_model",
    "shutdown": "call close",
    "engine_class": "it is type(llm.llm_engine)",
    "request_counter": "requests of a call are numbered from 0, those of llm_engine have names",
    "default_sampling_params": "call get_default_sampling_params",
    "vllm_config": "a run's configuration is llm_engine.config, what is known of its model is model_config",
    **dict.fromkeys(("renderer", "io_processor", "input_processor"), "render with get_tokenizer()"),
}
"""Methods and attributes that are not, and the way out."""

ENGINE_METHODS: Final[Mapping[str, str]] = {
    "from_engine_args": "what it takes beside the arguments is without effect",
    "add_request": "returns the name; `lora_request`, `priority` and tracing may ask for nothing",
    "step": "outputs before the end only where `output_kind` asks for them",
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
    "reset_mm_cache": "nothing",
    "reset_encoder_cache": "nothing",
    "collective_rpc": "as `LLM`'s",
    "apply_model": "as `LLM`'s",
}
"""Of `LLMEngine`, which `llm.llm_engine` is."""

_ADAPTERS: Final = "there are no adapters: merge them into the checkpoint (PEFT's merge_and_unload)"
_PARTS: Final = "an engine encodes, steps and decodes in this process: use add_request and step"
_CONFIG: Final = "a run's configuration is `config`, what is known of its model is `model_config`"
_PROFILE: Final = "call LLM.start_profile(folder) and LLM.stop_profile(), or worker_event of these names"

ENGINE_ABSENT: Final[Mapping[str, str]] = {
    "from_vllm_config": "give EngineArgs to from_engine_args",
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), _ADAPTERS),
    **dict.fromkeys(
        ("vllm_config", "cache_config", "parallel_config", "scheduler_config", "get_model_config"), _CONFIG
    ),
    **dict.fromkeys(("engine_core", "output_processor", "input_processor", "processor", "renderer"), _PARTS),
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILE),
    **dict.fromkeys(("do_log_stats", "do_log_stats_with_interval"), "read get_metrics"),
    "get_tokenizer_group": "call get_tokenizer",
    "has_unfinished_requests_dp": "each replica has requests of its own: call has_unfinished_requests",
    "init_weight_transfer_engine": "weights are changed in this process: LLM.update_weights or apply_model",
}
"""Of vLLM's `LLMEngine`, not here, and the way out."""
