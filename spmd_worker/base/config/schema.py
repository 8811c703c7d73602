"""Every key of a run, typed, checked and frozen.

The defaults stand here and nowhere else; `conf/` holds named sets of values, Hydra merges them with the command line,
and `config_compose.py` turns the result into a `RunConfig`. Knows nothing about Hydra, files, models or ranks: rules
that need a model or a world (a tensor-parallel size that must divide the heads) live where those are known.
"""

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Final

from spmd_worker.base.config.plain_values import plain_bool, plain_float, plain_int, plain_text, shown
from spmd_worker.base.errors import ConfigError

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS: Final = ("auto", "dummy")
EXECUTOR_BACKENDS: Final = ("auto", "external_launcher", "uniproc", "multiproc")
DEVICE_BACKENDS: Final = ("auto", "cpu", "torch", "triton")
PREEMPTION_MODES: Final = ("auto", "swap", "recompute")
POLICIES: Final = ("fcfs",)
RESUME_MODES: Final = ("auto", "never", "force")
DEVICES: Final = ("auto", "cpu", "cuda")
MAX_TIMEOUT_S: Final = 7 * 24 * 3600
QUANTIZATIONS: Final = ("int8",)
RUNNERS: Final = ("auto", "generate", "pooling")
POOLING_TYPES: Final = ("last", "mean", "cls")
LOGPROBS_MODES: Final = ("raw_logprobs", "processed_logprobs", "tempered_logprobs")
TOOL_CALL_FORMATS: Final = ("auto", "none", "hermes", "llama3_json", "mistral", "harmony")
REASONING_FORMATS: Final = ("auto", "none", "think", "mistral", "harmony")


def checked_value(key: str, value: Any, hint: Any) -> Any:
    """`value` as the type that `hint`, a field's annotation, wants: int, float, bool, str, list[...], one of the groups
    below, or `X | None` of these.

    A whole number is whatever Python takes as an index (numpy's and torch's integers too), a number any real one, and
    neither is true or false. What is kept is Python's own int or float: ranks compare configurations as text. Raises
    ConfigError: the key, the value, and what it must be.
    """
    for kind in _alternatives(hint):
        try:
            return _as_type(value, kind)
        except TypeError:
            continue
        except OverflowError:
            raise ConfigError(f"{key}={shown(value)} must fit 64 bits") from None
    raise ConfigError(f"{key}={shown(value, _MOST_SHOWN)} must be {type_words(hint)}")


def type_words(hint: Any) -> str:
    """What a field's annotation says, for people."""
    return " or ".join(_TYPE_WORDS.get(kind) or f"a {kind.__name__}" for kind in _alternatives(hint))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _as_type(value: Any, kind: Any) -> Any:
    """Raises TypeError, for an integer that no float can hold too; OverflowError for one of more than 64 bits."""
    if kind in _PLAIN:
        plain = _PLAIN[kind](value)
        if plain is None or (plain in (math.inf, -math.inf) and plain_int(value) is not None):
            raise TypeError
        if kind is int and not -(2**63) <= plain < 2**64:
            raise OverflowError
        return plain
    if typing.get_origin(kind) is list and isinstance(value, list | tuple):
        return [_as_type(each, *typing.get_args(kind)) for each in value]
    if typing.get_origin(kind) or not isinstance(value, kind):
        raise TypeError
    return value


_PLAIN: Final[dict[Any, Any]] = {int: plain_int, float: plain_float, bool: plain_bool, str: plain_text}
_TYPE_WORDS: Final[dict[Any, str]] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[int]: "a list of whole numbers, such as [10,8]",
    list[str]: "a list of texts, such as [a,b]",
    types.NoneType: "null",
}


def _check_types(record: Any, group: str = "") -> None:
    """First in every `__post_init__`: each field is of its annotated type, or can be made so."""
    for name, hint in typing.get_type_hints(type(record)).items():
        value = checked_value(f"{group}.{name}" if group else name, getattr(record, name), hint)
        # Frozen, and nobody has seen it yet.
        object.__setattr__(record, name, value)


@dataclass(frozen=True)
class ModelOptions:
    """Which model: a Hugging Face folder, or a name on the hub (ORG/NAME), of which `revision` is a branch, tag or
    commit; null is main. `max_model_len` null takes the model's own length (tokens).

    `logprobs_mode` says of which logits log-probabilities are: as the model gave them (`raw_logprobs`), those divided
    by the row's temperature (`tempered_logprobs`, what a trainer computes of a completion), or after penalties,
    temperature and filters, as they were drawn from (`processed_logprobs`).

    `quantization` int8 quantises weights when they are loaded, and what they multiply as it comes (W8A8): answers are
    then the same bits for every tensor-parallel size too.

    Weights that are NaN or infinite, new ones too, are refused unless `allow_nonfinite`.

    `runner` is what rows get: tokens (generate) or vectors and scores (pooling); auto is what the folder is for.
    `pooling_type` (last, mean or cls) replaces the folder's, and `default_prompt_name` the name of its prompt that is
    put before each text ('' for none). `classifier_from_token`, such as [no,yes], makes a
    generating model one that scores: by how much likelier the second token is than the first. Vectors are cut to
    `dimensions` that config.json does not name only with `allow_any_dimensions`.
    `tool_call_format` (hermes, llama3_json, mistral, harmony) and `reasoning_format` (think, mistral, harmony) say how
    the model writes tool calls and reasoning, which chat rows get back as `tool_calls` and `reasoning_content`; auto
    goes by its chat template, none leaves them in the content.
    """

    path: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    load_format: str = "auto"
    quantization: str | None = None
    logprobs_mode: str = "raw_logprobs"
    allow_nonfinite: bool = False
    runner: str = "auto"
    pooling_type: str | None = None
    classifier_from_token: list[str] | None = None
    default_prompt_name: str | None = None
    allow_any_dimensions: bool = False
    tool_call_format: str = "auto"
    reasoning_format: str = "auto"

    def __post_init__(self) -> None:
        """Check each key alone."""
        _check_types(self, "model")
        _check_choice("model.runner", self.runner, RUNNERS)
        if self.pooling_type is not None:
            _check_choice("model.pooling_type", self.pooling_type, POOLING_TYPES)
        if self.classifier_from_token is not None and len(self.classifier_from_token) != 2:
            raise ConfigError(
                f"model.classifier_from_token={self.classifier_from_token} must be two tokens, such as [no,yes]"
            )
        _check_choice("model.dtype", self.dtype, DTYPES)
        _check_choice("model.load_format", self.load_format, LOAD_FORMATS)
        if self.quantization is not None:
            _check_choice("model.quantization", self.quantization, QUANTIZATIONS, "nor null")
        _check_choice("model.logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        _check_choice("model.tool_call_format", self.tool_call_format, TOOL_CALL_FORMATS)
        _check_choice("model.reasoning_format", self.reasoning_format, REASONING_FORMATS)
        _check_at_least("model.max_model_len", self.max_model_len, 1)


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks divide the work: world size = data x pipeline x tensor.

    `pipeline_layers` is the number of layers of each stage, such as [10,8]; null shares the weights out evenly.

    With `enable_expert_parallel` each rank of a tensor-parallel group has some experts whole, else columns of all.
    `expert_placement` says which: linear (the first ranks the first experts), round_robin, or a JSON file
    {"owners": [...]} with the rank of each expert, or such a list for each layer. `invariant_experts`: what experts
    give does not depend on the number of ranks, for more traffic.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    pipeline_layers: list[int] | None = None
    enable_expert_parallel: bool = False
    expert_placement: str = "linear"
    invariant_experts: bool = False

    def __post_init__(self) -> None:
        """Check each key alone."""
        _check_types(self, "parallel")
        _check_at_least("parallel.tensor_parallel_size", self.tensor_parallel_size, 1)
        _check_at_least("parallel.pipeline_parallel_size", self.pipeline_parallel_size, 1)
        _check_at_least("parallel.data_parallel_size", self.data_parallel_size, 1)
        for key in ("expert_placement", "invariant_experts"):
            value = getattr(self, key)
            if value not in ("linear", False) and not self.enable_expert_parallel:
                raise ConfigError(
                    f"parallel.{key}={str(value).lower() if value is True else value} is about experts that ranks hold "
                    f"whole: set parallel.enable_expert_parallel=true, or leave it out"
                )


@dataclass(frozen=True)
class ExecutorConfig:
    """Who starts the workers: `auto` is external_launcher under torchrun, else uniproc for one rank and multiproc for
    more; multiproc starts them on this node without a launcher, and the qualified name of a class
    (`package.module.Class`) is imported.

    The plan's digest is compared across ranks every `digest_every` steps (0: never). No rank waits for another longer
    than `timeout_s` seconds. `worker_cls` is the qualified name of another worker class, `worker_extension_cls` of one
    whose methods every worker gets beside its own. `enforce_eager` has every kernel launched by itself where a worker
    would launch whole steps as CUDA graphs (`device_backend` triton on a GPU): the same bits, and nothing is recorded.
    `device_backend` is what a device computes with: `cpu` (compiled kernels), `torch`, `triton`, or the qualified name
    of a `DeviceBackend`; `auto` is cpu on a CPU, else torch.
    With `argmax_screen` a copy of the head in int8 finds the few logits of a greedy row that may be its largest, where
    that is faster (bfloat16 on a CPU with AVX-512 VNNI and without AMX): the same bits, for vocabulary x hidden bytes.
    """

    backend: str = "auto"
    digest_every: int = 1
    timeout_s: float = 300.0
    worker_cls: str | None = None
    worker_extension_cls: str | None = None
    enforce_eager: bool = False
    device_backend: str = "auto"
    argmax_screen: bool = True

    def __post_init__(self) -> None:
        """Check each key alone."""
        _check_types(self, "executor")
        if "." not in self.backend:
            _check_choice("executor.backend", self.backend, EXECUTOR_BACKENDS, "nor the qualified name of a class")
        if "." not in self.device_backend:
            choices = (DEVICE_BACKENDS, "nor the qualified name of a class")
            _check_choice("executor.device_backend", self.device_backend, *choices)
        _check_at_least("executor.digest_every", self.digest_every, 0)
        if not 1 <= self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"executor.timeout_s={self.timeout_s:g} must be from 1 to {MAX_TIMEOUT_S} seconds")


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache. `num_blocks` null measures memory and takes `gpu_memory_utilization` of it.

    `swap_space_gib` is host memory a rank for sequences that are preempted; null is 4, and 0 where the cache takes all
    of the host's memory that it can use: on the CPU without `num_blocks`. `host_tier_gib` is host memory a rank for
    prefix blocks that lost their place.
    """

    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space_gib: float | None = None
    enable_prefix_caching: bool = True
    host_tier_gib: float = 0.0

    def __post_init__(self) -> None:
        """Check each key alone."""
        _check_types(self, "cache")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"cache.block_size={self.block_size} must be a power of two, such as 16")
        _check_at_least("cache.num_blocks", self.num_blocks, 1)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"cache.gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and at most 1, such as 0.9"
            )
        _check_at_least("cache.swap_space_gib", self.swap_space_gib, 0)
        _check_at_least("cache.host_tier_gib", self.host_tier_gib, 0)
        if self.host_tier_gib and not self.enable_prefix_caching:
            raise ConfigError(
                f"cache.host_tier_gib={self.host_tier_gib:g} keeps prefix blocks, and "
                f"cache.enable_prefix_caching=false makes none: enable it, or leave cache.host_tier_gib at 0"
            )


@dataclass(frozen=True)
class SchedulerConfig:
    """How much runs at once: sequences in a step, tokens in a step.

    Where the cache does not suffice, `preemption_mode` swap copies a sequence's blocks to the host, recompute drops
    them, and auto takes the cheaper way by counting. With `async_scheduling` a step is decided and launched before the
    token ids of the one before it are read; null does so on a GPU where the pipeline has one stage.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    preemption_mode: str = "auto"
    policy: str = "fcfs"
    async_scheduling: bool | None = None

    def __post_init__(self) -> None:
        """Check each key alone, and that every running sequence can have its token."""
        _check_types(self, "scheduler")
        _check_at_least("scheduler.max_num_seqs", self.max_num_seqs, 1)
        _check_at_least("scheduler.max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _check_choice("scheduler.preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        _check_choice("scheduler.policy", self.policy, POLICIES)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"scheduler.max_num_seqs={self.max_num_seqs}: each running sequence needs a token a step; "
                f"raise the first or lower the second"
            )


@dataclass(frozen=True)
class SamplingConfig:
    """Defaults for rows. Null takes the model's generation_config.json where it has the key, else vLLM's default."""

    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: list[str] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        """Check types; `SamplingParams` has the rules."""
        _check_types(self, "sampling")

    def given(self) -> dict[str, Any]:
        """The keys that are set, in declaration order."""
        return {
            spec.name: getattr(self, spec.name)
            for spec in dataclasses.fields(self)
            if getattr(self, spec.name) is not None
        }


@dataclass(frozen=True)
class RowLimits:
    """What a single row may be and ask for: one that goes beyond is an error row. Null is no limit but the model's.

    `max_line_bytes` of its line, `max_nesting` levels of JSON, `max_prompt_tokens`, `max_n` samples (best_of too),
    `max_tokens` of output (of rows that name no number, the most they get), `max_stop_strings` (stop token ids too),
    `max_logit_bias` entries (of the lists of allowed tokens and bad words too).
    """

    max_line_bytes: int = 16 * 1024 * 1024
    max_nesting: int = 64
    max_prompt_tokens: int | None = None
    max_n: int = 1024
    max_tokens: int | None = None
    max_stop_strings: int = 64
    max_logit_bias: int = 1024

    def __post_init__(self) -> None:
        """Check each key alone."""
        _check_types(self, "limits")
        for spec in dataclasses.fields(self):
            _check_at_least(f"limits.{spec.name}", getattr(self, spec.name), 0 if spec.name in _MAY_BE_NONE else 1)
        if self.max_nesting > _MAX_NESTING:
            raise ConfigError(f"limits.max_nesting={self.max_nesting} must be at most {_MAX_NESTING}")


_MOST_SHOWN: Final = 500
_MOST_MEMORY_GIB: Final = 2**20
_MAY_BE_NONE: Final = ("max_stop_strings", "max_logit_bias")
_MAX_NESTING: Final = 256
"""What readers of JSON, whose stacks end somewhere, take everywhere."""


@dataclass(frozen=True)
class JobConfig:
    """A batch job: rows in, rows out. `run_dir` null is `<output>.run` beside the output.

    A job that was ended goes on where it was (`resume` auto; force: although it has changed; never: refuses a run
    directory that holds a run). Finished rows are made durable every `commit_rows` rows or `commit_s` seconds.
    `step_log` writes the stream of step messages to `steps.log` in the run directory, for `spmd-worker-replay`.
    `prometheus_file` is rewritten while the job runs, for node_exporter's textfile collector; it needs the extra
    `metrics`. With `private` only the user can read what the job writes.
    """

    input: str | None = None
    output: str | None = None
    run_dir: str | None = None
    resume: str = "auto"
    max_rows: int | None = None
    max_error_rows: int | None = None
    commit_rows: int = 256
    commit_s: float = 5.0
    step_log: bool = False
    prometheus_file: str | None = None
    private: bool = False

    def __post_init__(self) -> None:
        """Check each key alone."""
        _check_types(self, "job")
        _check_choice("job.resume", self.resume, RESUME_MODES)
        _check_at_least("job.max_rows", self.max_rows, 0)
        _check_at_least("job.max_error_rows", self.max_error_rows, 0)
        _check_at_least("job.commit_rows", self.commit_rows, 1)
        _check_at_least("job.commit_s", self.commit_s, 0)


@dataclass(frozen=True)
class ServeConfig:
    """The server (`python -m spmd_worker.serve`), on rank 0: where it listens (port 0: any that is free).

    `max_queued` sequences may wait beside the `scheduler.max_num_seqs` that run; one more is refused with 429. When the
    server is asked to end, requests have `drain_s` to be answered. A client that leaves what it is sent unread for
    `reader_timeout_s` is cut off. Its key is no part of the configuration.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_queued: int = 1024
    drain_s: float = 10.0
    reader_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Check each key alone."""
        _check_types(self, "serve")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"serve.port={self.port} must be from 0 (any that is free) to 65535")
        _check_at_least("serve.max_queued", self.max_queued, 0)
        if not 0 <= self.drain_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"serve.drain_s={self.drain_s:g} must be from 0 to {MAX_TIMEOUT_S} seconds")
        if not 0 < self.reader_timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"serve.reader_timeout_s={self.reader_timeout_s:g} must be above 0 and at most {MAX_TIMEOUT_S} seconds"
            )


@dataclass(frozen=True)
class PlanConfig:
    """`plan=true`, which is `plan.enabled=true`, prints the layout and the memory plan and exits: with 1 where they
    cannot run. `memory_gib` plans for another machine: GiB of memory of the machine that all ranks share, with
    device=cuda of each rank's GPU; null is this machine's, and GPUs of common sizes.
    """

    enabled: bool = False
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        """Check each key alone."""
        _check_types(self, "plan")
        if self.memory_gib is None:
            return
        if not 0 < self.memory_gib <= _MOST_MEMORY_GIB:
            raise ConfigError(
                f"plan.memory_gib={self.memory_gib:g} must be above 0 and at most {_MOST_MEMORY_GIB}, such as 64"
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
    """A whole run."""

    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    limits: RowLimits = field(default_factory=RowLimits)
    job: JobConfig = field(default_factory=JobConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    device: str = "auto"
    seed: int = 0
    plan: PlanConfig = field(default_factory=PlanConfig)

    def __post_init__(self) -> None:
        """Check the top keys, and rules between groups."""
        if isinstance(self.plan, bool):
            object.__setattr__(self, "plan", PlanConfig(self.plan))
        _check_types(self)
        _check_choice("device", self.device, DEVICES)
        _check_defaults(self.sampling, self.limits)
        if self.cache.host_tier_gib and not self.executor.digest_every:
            raise ConfigError(
                f"cache.host_tier_gib={self.cache.host_tier_gib:g} cannot run with executor.digest_every=0: ranks say "
                f"that a transfer has finished with their digests; set executor.digest_every to 1 or more"
            )


def _check_defaults(sampling: SamplingConfig, limits: RowLimits) -> None:
    """Defaults beyond a limit would make an error of every row that names nothing else."""
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


def _check_choice(key: str, value: str, choices: tuple[str, ...], but: str = "") -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}{but and ', ' + but}")


def _check_at_least(key: str, value: float | None, least: int) -> None:
    # Written so that NaN fails. What is infinite could not be written into a manifest, which is JSON.
    if value is not None and not least <= value < math.inf:
        raise ConfigError(f"{key}={value} must be {least} or more{'' if value != math.inf else ', and finite'}")
