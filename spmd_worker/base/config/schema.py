"""Schema of a run: every key, typed, checked and frozen. Each key has one record with everything about it.

The defaults are here and nowhere else; `conf/` holds named sets of values, Hydra merges them with the command line,
and `compose.py` turns the result into a `RunConfig`. Knows nothing about Hydra, files, models or ranks: rules that need
a model or a world (a tensor-parallel size that must divide the heads) are where those are known.

To add an option, add its field here and run `python scripts/reference_pages.py`.
"""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.config.options import check_options, command_option, option, vllm_option
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.plain_values import plain_folder, sendable_text
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.base.errors import ConfigError

MAX_LOGPROBS: Final = 64
"""Most alternatives that `logprobs` and `prompt_logprobs` may ask for, unless they ask in Python for all."""

LOGPROBS_MODES: Final = ("raw_logprobs", "processed_logprobs", "tempered_logprobs")
MAX_TIMEOUT_S: Final = 7 * 24 * 3600
_EXECUTOR_BACKENDS: Final = ("auto", "external_launcher", "uniproc", "multiproc")
_DEVICE_BACKENDS: Final = ("auto", "cpu", "torch", "triton")
_OTHER_LOAD_FORMATS: Final = {
    **dict.fromkeys(
        ("safetensors", "hf", "fastsafetensors", "runai_streamer", "instanttensor"),
        "safetensors are read in large parts, on GPUs by several threads, without another reader: leave it out",
    ),
    "tensorizer": "nothing is read from tensorizer's files: save with save_streamed, and leave it out",
    "runai_streamer_sharded": "set sharded_state, which reads what save_sharded_state wrote",
    **dict.fromkeys(("pt", "npcache"), "pickles are never read: convert them to safetensors, and leave it out"),
    "mistral": "consolidated files are not read: download the files in the hub's names, and leave it out",
    "gguf": "GGUF is found by model.path, a file or a folder with one: leave it out",
    "bitsandbytes": "files that it quantised are read without it, and others are not quantised so: leave it out",
}
"""Values of vLLM's on a command line, and what to do instead. `LLM` takes those that have one here."""
_METHODS_OF_FILES: Final = (
    *("bitsandbytes", "compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mixed", "mxfp4", "fbgemm_fp8"),
    *("awq", "awq_marlin", "gptq", "gptq_marlin", "gguf"),
)
"""Values of vLLM's `quantization` that say how a checkpoint is stored."""
_MAX_MEMORY_GIB: Final = 2**20
_MOST_LORAS: Final = 8
"""Adapters of a step where `max_loras` is not given: each more makes its products smaller."""
_MAX_CPU_LORAS: Final = 2**16
"""Every layer has a table of as many."""
IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Formats of images that may be decoded, all but the last by default."""
IMAGE_PROCESSOR_KEYS: Final = (
    *("size", "max_patches", "min_patches", "crop_to_patches", "do_image_splitting", "max_soft_tokens", "fine_route"),
    *("min_image_tokens", "max_image_tokens", "min_tiles", "max_tiles"),
    *("max_slice_nums", "slice_mode", "downsample_mode", "use_image_id"),
)
VIDEO_PROCESSOR_KEYS: Final = (
    *("size", "min_pixels", "max_pixels", "cap_pixels_per_frame", "max_video_tokens"),
    *("fps", "num_frames", "min_frames", "max_frames"),
)
_MAX_LINE_BYTES: Final = 16 * 1024 * 1024
_MAX_NESTING: Final = 256
"""Nesting that every reader of JSON accepts: their stacks are limited."""


@dataclass(frozen=True)
class ModelOptions:
    """The model: its folder, dtype and length, and what rows get of it."""

    path: str | None = command_option(
        None,
        "Hugging Face folder, GGUF, or a name on the hub (`org/name`): found in its cache (`HF_HOME`, "
        "`HF_HUB_CACHE`), else downloaded (`pip install 'spmd-worker[hub]'`) unless `HF_HUB_OFFLINE=1`; the hub is "
        "asked once for the files about pooling where the cache lacks them; a folder of that name comes first",
        is_path=True,
        is_common=True,
    )
    revision: str | None = vllm_option(None, "branch, tag or commit of a name on the hub; null: main", is_common=True)
    dtype: str = vllm_option(
        "auto",
        "`auto` (the checkpoint's, else float32; for float16 on CPUs float32, in 4 bits or FP8 bfloat16), "
        "`float32`, `bfloat16` or `float16` (GPU only); `LLM` accepts a `torch.dtype` too",
        vllm_values={"half": "float16", "float": "float32"},
        accepts=Any,
        choices=("auto", "float32", "bfloat16", "float16"),
        is_common=True,
    )
    max_model_len: int | None = vllm_option(
        None,
        "longest sequence in tokens; null, and at most, the model's own",
        vllm_values={-1: None, "auto": None},
        least=1,
        is_common=True,
    )
    load_format: str = vllm_option(
        "auto",
        "`auto` reads safetensors, streamed ones in parallel, or GGUF; `sharded_state` reads what `save_sharded_state` "
        "wrote, `streamed` only what `save_streamed` did, `dummy` makes deterministic random weights",
        vllm_values={
            **dict.fromkeys(
                ("safetensors", "hf", "fastsafetensors", "runai_streamer", "instanttensor", "gguf"), "auto"
            ),
            "tensorizer": "streamed",
            "runai_streamer_sharded": "sharded_state",
        },
        choices=("auto", "dummy", "sharded_state", "streamed"),
    )
    quantization: str | None = vllm_option(
        None,
        "`int8` and `fp8` are W8A8: weight scales per output channel, activation scales per token; half the memory of "
        "bfloat16; no pooled rows. `int8` (experts too) has the same bits for every tensor-parallel size; `fp8` "
        "(GPUs from 8.9, no experts, no head) computes FP8 checkpoints with their scales; null: none",
        choices=("int8", "fp8"),
        is_common=True,
    )
    logprobs_mode: str = vllm_option(
        "raw_logprobs",
        "`raw_logprobs` of the model's logits; `processed_logprobs` after penalties, temperature and filters; "
        "`tempered_logprobs` of the logits divided by the temperature alone, as trainers compute them",
        choices=LOGPROBS_MODES,
    )
    head_dtype: str | None = option(
        None,
        "`float32`: logits are float32 sums over the model's own weights and hidden states, as trainers with a float32 "
        "head compute them; null: rounded to the model's dtype. Greedy rows get slower",
        choices=("float32",),
    )
    dequantize_weights: bool = option(
        False,
        "dequantise quantised files when they are loaded, as weight updates need; false: weights of 4 bits and FP8 on "
        "CPUs (in bfloat16) and MXFP4 and FP8 experts on GPUs stay in memory as their files have them, with the same "
        "bits",
    )
    allow_nonfinite: bool = option(
        False,
        "accept NaN or infinite weights, new ones too (rejected by default); a row whose logits are not finite is an "
        "error row (`non_finite_logits`) either way",
    )
    runner: str = vllm_option(
        "auto",
        "`generate`: rows get tokens; `pooling`: vectors or scores, also of a model that generates; `auto`: what the "
        "folder is for",
        choices=("auto", "generate", "pooling"),
        is_common=True,
    )
    pooling_type: str | None = option(
        None, "`last`, `mean` or `cls` instead of the folder's", choices=("last", "mean", "cls")
    )
    classifier_from_token: list[str] | None = option(
        None,
        "two tokens, such as `[no,yes]`, make a generating model one that scores: a row's score says how much more "
        "probable the second is than the first",
    )
    default_prompt_name: str | None = option(
        None,
        "name of the prompt in `config_sentence_transformers.json` that is put before each text that is pooled; null: "
        "the folder's own `default_prompt_name`, `''`: none",
    )
    allow_any_dimensions: bool = option(False, "cut vectors to `dimensions` that config.json does not name")
    chat_template: str | None = command_option(
        None,
        "chat template in place of the folder's, which may have none: a file, a text, or the name of another one of "
        "the folder",
    )
    tool_call_format: str = command_option(
        "auto",
        "syntax of the model's tool calls, which chat rows get back as `tool_calls`: `hermes`, `llama3_json`, "
        "`mistral`, `harmony`, or `none`, which leaves them in the content; auto goes by the chat template",
        choices=("auto", "none", "hermes", "llama3_json", "mistral", "harmony"),
    )
    reasoning_format: str = option(
        "auto",
        "syntax of the model's reasoning, which chat rows get back as `reasoning_content` and `thinking_token_budget` "
        "counts: `think`, `mistral`, `harmony`, or `none`, which leaves it in the content; auto goes by the chat "
        "template",
        choices=("auto", "none", "think", "mistral", "harmony"),
    )
    enable_lora: bool = vllm_option(False, "accept LoRA adapters; `adapters` sets it")
    max_loras: int | None = vllm_option(
        None,
        f"adapters in a step; null: 1, or the number of `adapters`, at most {_MOST_LORAS}",
        least=1,
        most=_MAX_CPU_LORAS,
    )
    max_lora_rank: int = vllm_option(64, "largest rank of an adapter", least=1, most=512)
    max_cpu_loras: int | None = vllm_option(
        None,
        "adapters that are loaded; one more evicts the one that was used longest ago; null: the larger of `max_loras` "
        "and the number of `adapters`",
        least=1,
        most=_MAX_CPU_LORAS,
    )
    lora_experts: bool = option(False, "LoRA adapters may have matrices for experts; they need room for all experts")
    max_prompt_adapters: int = vllm_option(
        16, "prompt adapters that are loaded; one more evicts the one that was used longest ago", least=1
    )
    adapters: dict[str, str] | None = option(
        None, "LoRA adapters loaded at the start, such as `{sql: /peft/folder}`", is_common=True
    )
    prompt_adapters: dict[str, str] | None = option(
        None, "prompt adapters loaded at the start, under other names", is_common=True
    )
    lora_merge: str | None = option(
        None, "folder of one adapter that is merged into the weights for all rows; it cannot be in `adapters` too"
    )
    image_min_pixels: int | None = option(
        None, "pixels to which smaller images are enlarged, for models whose image tokens follow the size", least=1
    )
    image_max_pixels: int | None = option(
        None,
        "pixels to which larger images are reduced, for models whose image tokens follow the size; null: the folder's",
        least=1,
    )
    image_background: str = option("#ffffff", "colour under transparent images")
    image_processor: dict[str, str] | None = option(
        None,
        f"values in place of those of `preprocessor_config.json`: {', '.join(IMAGE_PROCESSOR_KEYS)}, each as JSON",
    )
    video_processor: dict[str, str] | None = option(
        None,
        f"values in place of those of `video_preprocessor_config.json`: {', '.join(VIDEO_PROCESSOR_KEYS)}, each as "
        f"JSON",
    )

    def __post_init__(self) -> None:
        if isinstance(self.load_format, str) and self.load_format in _OTHER_LOAD_FORMATS:
            raise ConfigError(f"model.load_format={self.load_format}: {_OTHER_LOAD_FORMATS[self.load_format]}")
        if isinstance(self.quantization, str) and self.quantization in _METHODS_OF_FILES:
            raise ConfigError(
                f"model.quantization={self.quantization}: the model's config.json says how its weights are stored, and "
                f"they are read so: leave it out"
            )
        check_options(self, "model")
        _check_adapters(self)
        _check_images(self)
        if self.lora_merge is not None and self.load_format == "sharded_state":
            raise ConfigError(
                "model.lora_merge is rejected with model.load_format=sharded_state, whose weights are read as they "
                "were saved: merge the adapter into the original, and save that"
            )
        if self.classifier_from_token is not None and len(self.classifier_from_token) != 2:
            raise ConfigError(
                f"model.classifier_from_token={self.classifier_from_token} must be two tokens, such as [no,yes]"
            )

    @property
    def merged_adapter(self) -> str | None:
        """Folder of the adapter that `lora_merge` merges into the weights."""
        return None if self.lora_merge is None else plain_folder(self.lora_merge)

    @property
    def adapter_limits(self) -> AdapterLimits | None:
        """Limits of adapters; None where there are none."""
        num_named = len(self.adapters or ())
        if not (self.enable_lora or num_named):
            return None
        max_loras = self.max_loras or max(1, min(num_named, _MOST_LORAS))
        num_loaded = self.max_cpu_loras or max(max_loras, num_named)
        return AdapterLimits(max_loras, self.max_lora_rank, num_loaded, self.lora_experts)


def _check_images(model: ModelOptions) -> None:
    if not re.fullmatch("#[0-9a-fA-F]{6}", model.image_background):
        raise ConfigError(f"model.image_background={model.image_background} must be a colour, such as '#ffffff'")
    least, most = model.image_min_pixels, model.image_max_pixels
    if least is not None and most is not None and least > most:
        raise ConfigError(f"model.image_min_pixels={least} is above model.image_max_pixels={most}: lower it")
    instead = f"{', '.join(IMAGE_PROCESSOR_KEYS)}, or model.image_min_pixels and model.image_max_pixels"
    _check_processor("image_processor", model.image_processor, IMAGE_PROCESSOR_KEYS, instead)
    of_videos = VIDEO_PROCESSOR_KEYS
    _check_processor("video_processor", model.video_processor, of_videos, ", ".join(of_videos))


def _check_processor(key: str, given: dict[str, str] | None, known: tuple[str, ...], instead: str) -> None:
    for name, text in (given or {}).items():
        if name not in known:
            raise ConfigError(f"model.{key} has the unsupported key {name!r}: give {instead}")
        try:
            json.loads(text)
        except ValueError:
            raise ConfigError(f"model.{key} has {name}={text[:80]}, which is not JSON") from None


def _check_adapters(model: ModelOptions) -> None:
    """Check the names of adapters, and that as many are loaded as a step has and as are named."""
    named = {"adapters": model.adapters or {}, "prompt_adapters": model.prompt_adapters or {}}
    for key, folders in named.items():
        if not all(name and path for name, path in folders.items()):
            raise ConfigError(f"model.{key}={folders} must map names to folders, and neither may be empty")
        try:
            for text in (text for pair in folders.items() for text in pair):
                sendable_text(f"model.{key}: the text", text)
        except ValueError as error:
            raise ConfigError(f"{error}: rename the adapter or its folder") from None
    if model.lora_merge == "":
        raise ConfigError("model.lora_merge is empty: give the folder of an adapter, or leave it out")
    given = [(f"model.{key}.{name}", path) for key, folders in named.items() for name, path in folders.items()]
    for key, path in [*given, ("model.lora_merge", model.lora_merge or "")]:
        try:
            plain_folder(path)
        except ConfigError as error:
            raise ConfigError(f"{key}={error}") from None
    for name, path in named["adapters"].items():
        if model.lora_merge is not None and (model.lora_merge == name or model.merged_adapter == plain_folder(path)):
            raise ConfigError(
                f"model.lora_merge={model.lora_merge} is merged into the weights for all rows, and those that name "
                f"{name!r} of model.adapters would have it twice: give the folder as model.lora_merge and leave the "
                f"name out of model.adapters, or leave model.lora_merge out"
            )
    both = [name for name in named["adapters"] if name in named["prompt_adapters"]]
    if both:
        raise ConfigError(
            f"model.adapters and model.prompt_adapters both have {both[0]!r}, and rows name either by its name: rename "
            f"one"
        )
    num_named = len(named["prompt_adapters"])
    if num_named > model.max_prompt_adapters:
        raise ConfigError(
            f"model.max_prompt_adapters={model.max_prompt_adapters} are loaded, and model.prompt_adapters has "
            f"{num_named}: raise model.max_prompt_adapters to at least {num_named}, or name fewer"
        )
    if model.max_cpu_loras is not None:
        needed = {"max_loras": model.max_loras or 1, "adapters": len(model.adapters or ())}
        key = max(needed, key=needed.__getitem__)
        if model.max_cpu_loras < needed[key]:
            raise ConfigError(
                f"model.max_cpu_loras={model.max_cpu_loras} adapters are loaded, and model.{key} needs {needed[key]}: "
                f"raise model.max_cpu_loras to at least {needed[key]}, or lower model.{key}"
            )


def _check_class_or_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if "." not in value and value not in choices:
        raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}, nor the qualified name of a class")


@dataclass(frozen=True)
class ExecutorConfig:
    """The executor: who starts the workers, and how ranks wait for and check each other."""

    backend: str = vllm_option(
        "auto",
        "`external_launcher` (under torchrun), `uniproc` (one rank), `multiproc` (starts a process per rank on this "
        "node without torchrun), or the qualified name of an `Executor` class (`LLM` accepts the class too); auto: "
        "external_launcher under torchrun, else uniproc for one rank and multiproc for more",
        keyword="distributed_executor_backend",
        vllm_values={None: "auto", "mp": "multiproc", "uni": "uniproc"},
        accepts=str | type | None,
    )
    digest_every: int = command_option(
        1, "compare the ranks' plans every N steps; 0: never, and nothing at the start either", least=0
    )
    timeout_s: float = option(
        300.0,
        "limit in seconds of a rank's wait for another",
        least=1,
        most=MAX_TIMEOUT_S,
        vllm_names=("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"),
    )
    worker_cls: str | None = vllm_option(
        None,
        "qualified name of another worker class, a `WorkerBase`, whose `init_device` joins groups where there are "
        "other ranks (`LLM` accepts the class too)",
        vllm_values={"auto": None, "": None},
        accepts=str | type | None,
    )
    worker_extension_cls: str | None = vllm_option(
        None,
        "qualified name of a class whose methods every worker gets in addition to its own (`LLM` accepts the class "
        "too)",
        vllm_values={"": None},
        accepts=str | type | None,
    )
    enforce_eager: bool = vllm_option(
        False,
        "true: launch every kernel by itself, where `device_backend` triton would launch complete steps as CUDA "
        "graphs, with the same bits; elsewhere there are no graphs in any case",
    )
    device_backend: str = option(
        "auto",
        "`cpu` (compiled kernels), `torch`, `triton`, or the qualified name of a `DeviceBackend` class; auto: cpu on a "
        "CPU; on CUDA triton, or torch if triton lacks something for the model or the GPU, which is logged",
    )
    argmax_screen: bool = option(
        True,
        "on a CPU with AVX-512 VNNI and without AMX, an int8 copy of a bfloat16 head pre-filters the logits that may "
        "be a greedy row's argmax, and these alone are computed: the same bits, for a byte per element of the head",
    )

    verify_steps: int = option(
        0,
        "of one of this many decode steps a row is computed again by itself and compared with what its batch gave, bit "
        "by bit; a difference ends the run with an error; 0: none",
        least=0,
    )

    def __post_init__(self) -> None:
        check_options(self, "executor")
        _check_class_or_choice("executor.backend", self.backend, _EXECUTOR_BACKENDS)
        _check_class_or_choice("executor.device_backend", self.device_backend, _DEVICE_BACKENDS)


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache, and host memory for blocks that leave it."""

    dtype: str = vllm_option(
        "auto",
        "of cached keys and values: `auto`, the model's, or `fp8` (e4m3, unscaled): twice as many tokens in the memory "
        "of 16 bits, and other answers",
        keyword="kv_cache_dtype",
        vllm_values={"fp8_e4m3": "fp8"},
        choices=("auto", "fp8"),
    )
    block_size: int = vllm_option(16, "tokens in a block, a power of two")
    num_blocks: int | None = option(
        None,
        "blocks of the KV cache; null: measured, `gpu_memory_utilization` of the memory",
        vllm_names=("num_gpu_blocks_override",),
        least=1,
        is_common=True,
    )
    gpu_memory_utilization: float = vllm_option(
        0.9, "share of the device's (or this rank's share of the host's) memory to use", is_common=True
    )
    swap_space_gib: float | None = vllm_option(
        None,
        "GiB of host memory per rank for preempted sequences, never more than they can use; null: 4, and 0 on the CPU "
        "without `num_blocks`, where the cache itself is host memory",
        keyword="swap_space",
        least=0,
        is_common=True,
    )
    enable_prefix_caching: bool = vllm_option(True, "find full blocks again by what they hold", is_common=True)
    verify_hits: int = option(
        0,
        "one of this many prefix-cache hits is computed again and compared with what was found, bit by bit; a "
        "difference ends the run with an error; 0: none",
        least=0,
    )
    window_groups: bool | None = option(
        None,
        "layers with sliding windows have block tables of their own, so blocks behind a window go back to the pool, "
        "where that pays; false: every layer keeps all tokens of a row; null: true where steps are not recorded as "
        "CUDA graphs, which have one table",
    )
    num_state_snapshots: int | None = option(
        None,
        "recurrent states that are kept where prompts may be found again, for models that have states; null: twice "
        "`max_num_seqs`, and at most a quarter of the memory that running states leave",
        least=0,
    )
    host_tier_gib: float = option(0.0, "GiB per rank to which evicted prefix blocks are offloaded", least=0)
    media_rows_gib: float | None = option(
        None,
        "GiB per rank of the first stage for the rows of images and of encoder inputs, which are made again if they "
        "were dropped; null: twice `max_num_batched_tokens`, and the largest image or input at least",
        least=0,
    )
    connector: str | None = option(
        None,
        "where prefix blocks are kept outside the engine: `kv_cache.connectors.files:connect`, "
        "`kv_cache.connectors.shared_memory:connect`, or a factory of yours, `package.module:factory`",
    )
    connector_options: dict[str, str] | None = option(
        None, "options of the connector, such as `{folder:/data/kv,gib:20}`"
    )

    def __post_init__(self) -> None:
        """Check each key alone, and that a host tier or a connector has prefix blocks to keep."""
        check_options(self, "cache")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"cache.block_size={self.block_size} must be a power of two, such as 16")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"cache.gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and at most 1, such as 0.9"
            )
        if self.host_tier_gib and not self.enable_prefix_caching:
            raise ConfigError(
                f"cache.host_tier_gib={self.host_tier_gib:g} keeps prefix blocks, and "
                f"cache.enable_prefix_caching=false makes none: enable it, or leave cache.host_tier_gib at 0"
            )
        if self.verify_hits and not self.enable_prefix_caching:
            raise ConfigError(
                f"cache.verify_hits={self.verify_hits} verifies prefix-cache hits, and "
                f"cache.enable_prefix_caching=false has none: enable it, or leave cache.verify_hits at 0"
            )
        if not self.connector_options:
            object.__setattr__(self, "connector_options", None)
        if self.connector is None:
            if self.connector_options:
                raise ConfigError("cache.connector_options are given without cache.connector: name the connector")
            return
        if not self.enable_prefix_caching:
            raise ConfigError(
                f"cache.connector={self.connector} keeps prefix blocks, and cache.enable_prefix_caching=false makes "
                f"none: enable it, or leave cache.connector out"
            )
        if self.host_tier_gib:
            raise ConfigError(
                f"cache.connector={self.connector} and cache.host_tier_gib={self.host_tier_gib:g} both take evicted "
                f"prefix blocks: leave one of them out"
            )


@dataclass(frozen=True)
class SchedulerConfig:
    """The scheduler: how much runs at once, and what happens where the cache does not suffice."""

    max_num_seqs: int | None = vllm_option(
        None,
        "sequences in a step, others queue (samples of one row, too); null: 256, or its tokens or states if fewer",
        least=1,
        is_common=True,
    )
    max_num_batched_tokens: int = vllm_option(
        2048,
        "tokens in a step; `LLM` raises it to `max_num_seqs` where it is not given",
        is_open=True,
        least=1,
        is_common=True,
    )
    enable_chunked_prefill: bool = vllm_option(True, "cut long prompts into pieces that share steps with decoding")
    preemption_mode: str = vllm_option(
        "auto",
        "what happens to a preempted sequence: `swap` copies its blocks to the host, `recompute` drops them, `auto` is "
        "the cheaper by counting",
        choices=("auto", "swap", "recompute"),
    )
    policy: str = vllm_option(
        "fcfs",
        "`fcfs` serves requests in order of arrival, `priority` those with a lower `priority` first",
        keyword="scheduling_policy",
        choices=("fcfs", "priority"),
    )
    max_encode_patches: int = option(
        16_384,
        "patches of images, or rows of encoder inputs, that are encoded in a step, but for the first of the step",
        least=1,
    )
    max_encoder_len: int | None = option(
        None,
        "longest input of an encoder-decoder model's encoder, in tokens or rows of audio; null: the model's own, which "
        "only a model of relative positions (T5) may exceed",
        least=1,
    )
    async_scheduling: bool | None = vllm_option(
        None,
        "decide and launch a step before the token ids of the one before it are read; null: on a GPU where the "
        "pipeline has one stage",
    )

    def __post_init__(self) -> None:
        """Check each key alone, and that every running sequence can have its token."""
        check_options(self, "scheduler")
        if self.max_num_seqs is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"scheduler.max_num_seqs={self.max_num_seqs}: each running sequence needs a token a step; "
                f"raise the first or lower the second"
            )


@dataclass(frozen=True)
class SamplingConfig:
    """Defaults for rows. Null: the value in generation_config.json if the model has it, else vLLM's default."""

    n: int | None = command_option(None, "samples of a row", is_common=True)
    best_of: int | None = command_option(None, "samples to run, of which the `n` most probable are returned")
    temperature: float | None = command_option(None, "divides the logits; 0: argmax", is_common=True)
    top_p: float | None = command_option(
        None, "sample from the most probable tokens whose probabilities add up to it", is_common=True
    )
    top_k: int | None = command_option(None, "sample from the k most probable tokens; 0 or -1: all", is_common=True)
    min_p: float | None = command_option(None, "least probability of a token, as a share of the most probable one's")
    max_tokens: int | None = command_option(None, "limit of a row's output tokens", is_common=True)
    min_tokens: int | None = command_option(None, "output tokens before which no row ends")
    stop: list[str] | None = command_option(None, "texts that end a row, such as `[a,b]`", is_common=True)
    ignore_eos: bool | None = command_option(None, "go on after the end-of-sequence token")
    logprobs: int | None = command_option(
        None, f"log-probability of each output token and of the top k, at most {MAX_LOGPROBS}"
    )
    presence_penalty: float | None = command_option(None, "subtracted from logits of tokens that the output has")
    frequency_penalty: float | None = command_option(
        None, "subtracted once for each time that the output has the token"
    )
    repetition_penalty: float | None = command_option(
        None, "divides positive and multiplies negative logits of tokens that prompt or output have"
    )

    def __post_init__(self) -> None:
        """Check types; `SamplingParams` has the rules."""
        check_options(self, "sampling")

    def given(self) -> dict[str, Any]:
        """The keys that are set, in declaration order."""
        return {
            spec.name: getattr(self, spec.name)
            for spec in dataclasses.fields(self)
            if getattr(self, spec.name) is not None
        }


@dataclass(frozen=True)
class RowLimits:
    """Limits of a single row: one that goes beyond is an error row. Null is no limit but the model's."""

    max_line_bytes: int | None = command_option(
        None, "bytes of a row's line; null: 16 MiB, and 64 MiB for a model of images or audio", least=1
    )
    max_nesting: int = command_option(
        64, f"levels of JSON in a row, at most {_MAX_NESTING}", least=1, most=_MAX_NESTING
    )
    max_prompt_tokens: int | None = command_option(
        None, "tokens of a prompt; null: what the model's length leaves", least=1
    )
    max_n: int = command_option(1024, "samples of a row, `n` or `best_of`", least=1, most=1024)
    max_tokens: int | None = command_option(
        None, "limit of a row's `max_tokens`, and of its default; null: what the model's length leaves", least=1
    )
    max_stop_strings: int = command_option(64, "entries of `stop`, and of `stop_token_ids`", least=0)
    max_logit_bias: int = command_option(
        1024, "entries of `logit_bias`, and of lists of allowed tokens, bad words and rules", least=0
    )
    max_images: int = option(32, "images of a row; 0: the part of the model for images is not loaded", least=0)
    max_image_bytes: int = option(20 * 1024 * 1024, "bytes of an image's file", least=1)
    max_image_pixels: int = option(64_000_000, "pixels of an image, before it is resized", least=1)
    max_image_tokens: int = option(4096, "tokens of an image, or of two frames of a video, in the prompt", least=1)
    image_formats: list[str] | None = option(
        None, f"formats that are decoded, of {', '.join(IMAGE_FORMATS)}; null: all but {IMAGE_FORMATS[-1]}"
    )
    max_videos: int = option(4, "videos of a row; 0: videos are rejected", least=0)
    max_video_bytes: int = option(100 * 1024 * 1024, "bytes of a video's file", least=1)
    max_video_frames: int = option(768, "frames of a video that are taken", least=1)
    max_video_tokens: int = option(32_768, "tokens of a video in the prompt", least=1)
    max_audios: int = option(
        32,
        "recordings of a row, in a model of text and audio; 0: its part for audio is not loaded",
        least=0,
    )
    max_audio_bytes: int = option(25 * 1024 * 1024, "bytes of an audio file", least=1)
    max_audio_s: int = option(3600, "seconds of a row's audio, counted as it is decoded", least=1)

    def __post_init__(self) -> None:
        check_options(self, "limits")
        unknown = [each for each in self.image_formats or () if each.upper() not in IMAGE_FORMATS]
        if unknown or self.image_formats == []:
            shown = ",".join(self.image_formats or ())
            raise ConfigError(f"limits.image_formats=[{shown}] must be one or more of {', '.join(IMAGE_FORMATS)}")

    @property
    def num_line_bytes(self) -> int:
        """`max_line_bytes`, or the default of a model of text."""
        return _MAX_LINE_BYTES if self.max_line_bytes is None else self.max_line_bytes

    def for_media(self) -> "RowLimits":
        """The limits of a model that takes images or audio."""
        most = 4 * _MAX_LINE_BYTES if self.max_line_bytes is None else self.max_line_bytes
        return dataclasses.replace(self, max_line_bytes=most)


@dataclass(frozen=True)
class JobConfig:
    """A batch job: rows in, rows out."""

    input: str | None = command_option(
        None,
        "rows: JSONL (also `.gz`, `.zst`), Parquet, a pattern such as `'rows/*.jsonl'`; `-`, a FIFO or `/dev/stdin` is "
        "read once, as it comes",
        is_path=True,
        is_common=True,
    )
    output: str | None = command_option(
        None, "the file to write: JSONL, `.gz`, `.zst` or `.parquet`", is_path=True, is_common=True
    )
    run_dir: str | None = command_option(
        None,
        "metrics, step statistics and logs of the run; null: `<output>.run`, next to the output",
        is_path=True,
        is_common=True,
    )
    resume: str = command_option(
        "auto",
        "`auto`: continue a run that has not ended, if it is the same job; `force`: although it has changed; `never`: "
        "reject a run directory that holds a run",
        choices=("auto", "never", "force"),
        is_common=True,
    )
    max_rows: int | None = command_option(None, "only the first N rows", least=0, is_common=True)
    max_error_rows: int | None = command_option(
        None, "more error rows than this fail the job (its output is complete)", least=0, is_common=True
    )
    window_rows: int = command_option(
        8192,
        "rows read ahead: those with a common beginning are computed together, before the prefix cache forgets it; 0 "
        "or 1: in the order of the file",
        least=0,
    )
    pool: str | None = command_option(
        None,
        "folder that any number of jobs share, started any time on any machine: each leases ranges of the rows, the "
        "last one writes the output",
        is_path=True,
    )
    lease_s: float = command_option(
        60.0, "with `job.pool`: a job without a sign of life for this long loses its rows to the others", least=0.5
    )
    lease_rows: int = command_option(
        4096, "with `job.pool`: most rows that a job leases, and others compute again after its death", least=2
    )
    shard: str | None = command_option(
        None,
        "`i/n`, i from 0: only part i of n of the rows, as `answers-00003-of-00007.jsonl`; "
        "`spmd-worker-collect --merge` makes one output of all",
    )
    input_index: str | None = command_option(
        None, "index of the input, of `spmd-worker-index`: shards need not count the rows before theirs", is_path=True
    )
    part_rows: int = command_option(100_000, "rows of each part of an output in parts (`part-*.jsonl`)", least=1)
    commit_rows: int = command_option(256, "finished rows are made durable every N rows", least=1)
    commit_s: float = command_option(5.0, "and every N seconds", least=0)
    step_log: bool = command_option(
        False, "write every step's message to `steps.log` in the run directory, for `spmd-worker-replay`"
    )
    prometheus_file: str | None = command_option(
        None,
        "rewritten every few seconds, for node_exporter's textfile collector (a name that ends in `.prom`); needs the "
        "extra `metrics`",
        is_path=True,
    )
    media_root: str | None = option(
        None,
        "folder of the images, frames and audio that rows name by path; null: paths are rejected",
        keyword="allowed_local_media_path",
        is_vllms=True,
        vllm_values={"": None},
        is_path=True,
    )
    media_threads: int = option(2, "processes that decode images and audio, on each replica's first rank", least=1)
    media_window_gib: float = command_option(
        4.0, "GiB of prepared images and audio, held for rows that run or wait, on each replica's first rank", least=0
    )
    private: bool = command_option(False, "only the user can read what the job writes (files 0600, folders 0700)")

    def __post_init__(self) -> None:
        check_options(self, "job")


@dataclass(frozen=True)
class ServeConfig:
    """The server (`python -m spmd_worker.serve`), on rank 0. Its API key is not part of the configuration."""

    host: str = command_option(
        "127.0.0.1", "address where the server listens; another than loopback needs a key of your own"
    )
    port: int = command_option(8000, "port where the server listens; 0: any that is free", least=0, most=65535)
    max_queued: int = command_option(
        1024,
        "sequences that may wait in addition to the `scheduler.max_num_seqs` that run; one more is rejected with 429",
        least=0,
    )
    drain_s: float = command_option(
        10.0,
        "seconds, at most a week, that requests have to be answered when the server is asked to end",
        least=0,
        most=MAX_TIMEOUT_S,
    )
    reader_timeout_s: float = command_option(
        60.0, "seconds, at most a week, after which a client that does not read its response is disconnected"
    )

    def __post_init__(self) -> None:
        check_options(self, "serve")
        if not 0 < self.reader_timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"serve.reader_timeout_s={self.reader_timeout_s:g} must be above 0 and at most {MAX_TIMEOUT_S} seconds"
            )


@dataclass(frozen=True)
class PlanConfig:
    """The plan: layout and memory of a run, printed without running it. `plan=true` is `plan.enabled=true`."""

    enabled: bool = command_option(
        False,
        "`plan=true`: print ranks, bytes and blocks, and exit; with 1 where they cannot run",
        is_common=True,
    )
    memory_gib: float | None = command_option(
        None,
        "GiB of memory that a plan is made for: of the machine, which all ranks share, with `device=cuda` of each GPU; "
        "null: this machine's, and GPUs of common sizes",
    )

    def __post_init__(self) -> None:
        check_options(self, "plan")
        if self.memory_gib is None:
            return
        if not 0 < self.memory_gib <= _MAX_MEMORY_GIB:
            raise ConfigError(
                f"plan.memory_gib={self.memory_gib:g} must be above 0 and at most {_MAX_MEMORY_GIB}, such as 64"
            )
        if not self.enabled:
            raise ConfigError(
                f"plan.memory_gib={self.memory_gib:g} is the memory that a plan is made for, and a run measures its "
                f"own: add plan=true, or leave it out"
            )

    def __bool__(self) -> bool:
        return self.enabled


@dataclass(frozen=True)
class RunConfig:
    """A run."""

    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative_config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    limits: RowLimits = field(default_factory=RowLimits)
    job: JobConfig = field(default_factory=JobConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    device: str = option("auto", "`auto`, `cpu` or `cuda`", choices=("auto", "cpu", "cuda"), is_common=True)
    seed: int = vllm_option(
        0,
        "names the randomness of rows that have no seed of their own; no generator of the process is set",
        vllm_values={None: 0},
        is_common=True,
    )
    plan: PlanConfig = field(default_factory=PlanConfig)

    def __post_init__(self) -> None:
        """Check the top keys, and rules between groups."""
        if isinstance(self.plan, bool):
            object.__setattr__(self, "plan", PlanConfig(self.plan))
        check_options(self)
        _check_defaults(self.sampling, self.limits)
        if self.cache.host_tier_gib and not self.executor.digest_every:
            raise ConfigError(
                f"cache.host_tier_gib={self.cache.host_tier_gib:g} cannot run with executor.digest_every=0: ranks "
                f"report finished transfers with their digests; set executor.digest_every to 1 or more"
            )
        if self.cache.connector is not None and not self.executor.digest_every:
            raise ConfigError(
                f"cache.connector={self.cache.connector} cannot run with executor.digest_every=0: ranks report "
                f"finished transfers with their digests; set executor.digest_every to 1 or more"
            )


def _check_defaults(sampling: SamplingConfig, limits: RowLimits) -> None:
    """Check defaults against limits: a higher default would make every row without the key an error row."""
    logprobs = sampling.logprobs
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        reason = " requests the entire vocabulary, which no row or request gets: it" if logprobs == -1 else ""
        raise ConfigError(
            f"sampling.logprobs={logprobs}{reason} must be from 0 to {MAX_LOGPROBS}; in Python "
            f"SamplingParams(logprobs=-1) gives the entire vocabulary"
        )
    asked = {
        "sampling.n": (sampling.n, "max_n", limits.max_n),
        "sampling.best_of": (sampling.best_of, "max_n", limits.max_n),
        "sampling.max_tokens": (sampling.max_tokens, "max_tokens", limits.max_tokens),
        "sampling.stop": (len(sampling.stop or ()), "max_stop_strings", limits.max_stop_strings),
    }
    for key, (value, name, most) in asked.items():
        if value is not None and most is not None and value > most:
            raise ConfigError(
                f"{key} asks for {value}, more than limits.{name}={most}: lower the one or raise the other"
            )
