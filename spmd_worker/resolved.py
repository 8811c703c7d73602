"""A run resolved: what its configuration and its model's files come to, made once per process and passed down.

Whoever needs the model config, the layout of ranks, the dtype, the longest sequence or the default sampling parameters
takes them from here: constructors assign, and read no file. Knows files' contents and rules; needs no torch, so that a
plan needs none. Memory is resolved later, by those who measure it (`memory/plan.py`).
"""

from dataclasses import dataclass, replace
from pathlib import Path

from spmd_worker.config.schema import ParallelConfig, RunConfig
from spmd_worker.distributed.expert_layout import expert_layout_of
from spmd_worker.distributed.topology import RankLayout, check_divides, layout_of
from spmd_worker.errors import ConfigError
from spmd_worker.model_config.hub import locate_model
from spmd_worker.model_config.hub_cache import ModelLocation
from spmd_worker.model_config.model_config import ModelConfig, ModelFiles, read_model_files
from spmd_worker.sequence.defaults import default_sampling
from spmd_worker.sequence.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """Use `resolve_run`. `device_type` is "cpu" or "cuda", `max_model_len` counts tokens, `files_digest` is of the
    bytes of config.json and generation_config.json, `location` says where the files are.
    """

    config: RunConfig
    model_config: ModelConfig
    layout: RankLayout
    device_type: str
    dtype: str
    max_model_len: int
    default_sampling: SamplingParams
    files_digest: str
    location: ModelLocation

    @property
    def model_folder(self) -> Path:
        """The Hugging Face model folder."""
        return self.location.folder


@dataclass(frozen=True, slots=True)
class EngineModelConfig:
    """What an engine runs, by the names that programs written for vLLM read: `model` is the folder, `max_model_len`
    counts tokens of a prompt and its answer.
    """

    model: str
    dtype: str
    max_model_len: int
    seed: int


def resolve_run(config: RunConfig, device_type: str) -> ResolvedRun:
    """Find the model, read its files and resolve. Raises ConfigError or ModelConfigError."""
    if config.model.path is None:
        raise ConfigError(
            "model.path is not set: give a Hugging Face model folder, such as scripts/demo/model (for plan=true its "
            "config.json is enough)"
        )
    location = find_model(config)
    return resolve(config, read_model_files(location.folder), device_type, location)


def find_model(config: RunConfig) -> ModelLocation:
    """Where the model's files are; a model of the hub's is downloaded where it is not here. A plan and random weights
    need none. Raises ModelConfigError.
    """
    needs_weights = not config.plan and config.model.load_format != "dummy"
    return locate_model(config.model.path or "", config.model.revision, needs_weights=needs_weights)


def resolve(
    config: RunConfig, files: ModelFiles, device_type: str, location: ModelLocation | None = None
) -> ResolvedRun:
    """As `resolve_run`, of files that were read already. Raises ConfigError."""
    layout = _layout(config.parallel, files.model_config)
    return ResolvedRun(
        config=config,
        model_config=files.model_config,
        layout=layout,
        device_type=device_type,
        dtype=_dtype(config, files.model_config, device_type),
        max_model_len=_max_model_len(config, files.model_config),
        default_sampling=default_sampling(config.sampling, files.generation_config),
        files_digest=files.digest,
        location=location or ModelLocation(config.model.path or "", config.model.path or ""),
    )


def resolve_again(resolved: ResolvedRun, parallel: ParallelConfig) -> ResolvedRun:
    """The same run over ranks divided in another way; no file is read. Raises ConfigError."""
    layout = _layout(parallel, resolved.model_config)
    return replace(resolved, config=replace(resolved.config, parallel=parallel), layout=layout)


def _layout(parallel: ParallelConfig, model_config: ModelConfig) -> RankLayout:
    """With whose experts are whose. Raises ConfigError."""
    layout = replace(layout_of(parallel), experts=expert_layout_of(parallel, model_config))
    check_divides(layout, model_config)
    return layout


def _dtype(config: RunConfig, model_config: ModelConfig, device_type: str) -> str:
    """The dtype the model runs in. Raises ConfigError for one the device cannot compute with."""
    if device_type == "cpu" and config.model.dtype == "float16":
        raise ConfigError("model.dtype=float16 is not supported on the CPU: use bfloat16 (as small) or float32 (exact)")
    if config.model.dtype != "auto":
        return config.model.dtype
    return "float32" if device_type == "cpu" and model_config.dtype == "float16" else model_config.dtype


def _max_model_len(config: RunConfig, model_config: ModelConfig) -> int:
    """Longest sequence, tokens. Raises ConfigError for more than the model was made for."""
    wanted = config.model.max_model_len
    if wanted is not None and wanted > model_config.max_model_len:
        raise ConfigError(
            f"model.max_model_len={wanted} is more than the model's {model_config.max_model_len} tokens: "
            f"lower it or leave it null"
        )
    max_model_len = wanted or model_config.max_model_len
    tokens = config.scheduler.max_num_batched_tokens
    if not config.scheduler.enable_chunked_prefill and tokens < max_model_len:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens={tokens} cannot hold a prompt of model.max_model_len={max_model_len} "
            f"with scheduler.enable_chunked_prefill=false: raise it to {max_model_len} or enable chunked prefill"
        )
    return max_model_len
