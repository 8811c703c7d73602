"""Arguments of `LLM(...)`, with vLLM's names: their conversion to a configuration, and `EngineArgs`, their record."""

import inspect
import json
import os
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from spmd_worker.base.config.options import checked_value, groups_of, keys_of
from spmd_worker.base.config.schema import RunConfig, SamplingConfig, SchedulerConfig
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.names import hint
from spmd_worker.compat.keywords import KEYWORDS, Effect, Keyword, resolve_keywords
from spmd_worker.compat.llm_keywords import LLMKeywords
from spmd_worker.compat.media_keywords import media_values
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_Function = TypeVar("_Function", bound=Callable[..., None])

_VLLM_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "repetition_penalty")
"""Sampling parameters that a model's generation_config.json may set."""


def run_config(arguments: Mapping[str, Any]) -> RunConfig:
    """The configuration of `LLM(**arguments)`; None selects the default of the configuration. Raises ConfigError, which
    names the key of the command line, the value and the rule; TypeError for an unknown keyword.
    """
    model = arguments.get("model")
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    model = os.path.expanduser(model) if isinstance(model, str) else model
    own = resolve_keywords({name: value for name, value in arguments.items() if name != "model"}, model)
    own |= media_values(own)
    # Validated here, because it is compared here.
    max_num_seqs = checked_value("scheduler.max_num_seqs", own.get("max_num_seqs"), int | None)
    if max_num_seqs is not None and own.get("max_num_batched_tokens") is None:
        own["max_num_batched_tokens"] = max(max_num_seqs, SchedulerConfig().max_num_batched_tokens)
    values: dict[str, dict[str, Any]] = {"model": {"path": model}}
    for key in keys_of(RunConfig).values():
        if key.keyword is not None and own.get(key.keyword) is not None:
            values.setdefault(key.group, {})[key.field] = own[key.keyword]
    groups = {name: kind(**values[name]) for name, kind in groups_of(RunConfig).items() if name in values}
    sampling = _default_sampling(own.get("generation_config"), own.get("override_generation_config"))
    if own.get("speculative_config") is not None:
        groups["speculative_config"] = _speculation(own["speculative_config"])
    return RunConfig(**groups, sampling=sampling, **values.get("", {}))


def _speculation(given: Any) -> SpeculativeConfig:
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config={given!r} must be a dict, such as {{'method': 'ngram'}}")
    known = [spec.name for spec in fields(SpeculativeConfig)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(f"speculative_config has the unsupported key {unknown[0]!r}: give {', '.join(known)}")
    return SpeculativeConfig(**given)


def _default_sampling(source: Any, overrides: Any) -> SamplingConfig:
    """Default sampling parameters that override the model folder's generation_config.json."""
    if source not in (None, "auto", "vllm"):
        raise ConfigError(
            f"generation_config={source!r} must be auto (the model folder's generation_config.json) or vllm (vLLM's "
            f"defaults): override_generation_config sets single keys"
        )
    defaults = SamplingParams()
    values = {name: getattr(defaults, name) for name in _VLLM_DEFAULTS} if source == "vllm" else {}
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ConfigError(f"override_generation_config={overrides!r} must be a dict")
    given = dict(overrides or {})
    if "max_new_tokens" in given:
        given["max_tokens"] = given.pop("max_new_tokens")
    if given.pop("do_sample", True) is False:
        given |= {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    known = [spec.name for spec in fields(SamplingConfig)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(
            f"override_generation_config has the unsupported key {unknown[0]!r}: give {', '.join(known)}, "
            f"max_new_tokens or do_sample"
        )
    return SamplingConfig(**{**values, **given})


def with_keyword_signature(init: _Function) -> _Function:
    """Decorator: sets the signature that `help` and `inspect` show, with every keyword that has an effect."""
    own = [row for row in KEYWORDS.values() if row.effect in (Effect.SAME, Effect.OURS)]
    first, model, *_, rest = inspect.signature(init).parameters.values()
    parameters = [first, model, *(_parameter(row, inspect.Parameter.KEYWORD_ONLY) for row in own)]
    parameters.append(rest.replace(name="others", annotation=Any))
    vars(init)["__signature__"] = inspect.Signature(parameters, return_annotation=None)
    return init


def _parameter(row: Keyword, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(row.name, kind, default=row.default, annotation=row.annotation)


_SHORT_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "data_parallel_size": ("-dp",),
    "quantization": ("-q",),
}


def _cli_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None if text == "None" else text


def _with_fields(made: Any) -> Any:
    """Class decorator: makes a dataclass with the fields `model` and every keyword of the table."""
    made.__annotations__ = {"model": str, **{row.name: row.annotation for row in KEYWORDS.values()}}
    for row in KEYWORDS.values():
        setattr(made, row.name, row.default)
    parameters = [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str)]
    parameters += [_parameter(row, inspect.Parameter.POSITIONAL_OR_KEYWORD) for row in KEYWORDS.values()]
    made.__signature__ = inspect.Signature(parameters)
    return dataclass(init=False)(made)


_BY_CLASSMETHOD: Final = "give the arguments to LLM.from_engine_args or LLMEngine.from_engine_args"
_NOT_HERE: Final = {"create_engine_config": _BY_CLASSMETHOD, "create_model_config": _BY_CLASSMETHOD}


@_with_fields
class EngineArgs:
    """The arguments of `LLM(...)` as fields, for `LLM(**vars(args))`, `LLM.from_engine_args` and
    `LLMEngine.from_engine_args`, which validate them.
    """

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        """Add an option for each argument: `--tensor-parallel-size 2`, `--enforce-eager`, `--dtype half`. Values are
        parsed as JSON if possible, else as text. The result is for `LLM(**vars(...))`.
        """
        parser.add_argument("--model", type=str, default=None)
        for row in KEYWORDS.values():
            names = [*_SHORT_OPTIONS.get(row.name, ()), f"--{row.name.replace('_', '-')}"]
            words = row.effect.value + (f": {row.words}" if row.words else "")
            is_flag = isinstance(row.default, bool)
            kind: dict[str, Any] = {"action": BooleanOptionalAction} if is_flag else {"type": _cli_value}
            parser.add_argument(*names, default=row.default, help=words.replace("%", "%%"), **kind)
        return parser

    @classmethod
    def from_cli_args(cls, parsed: Namespace) -> "EngineArgs":
        """Make the record from the result of such a parser; the caller's other options are ignored."""
        return cls(**{name: getattr(parsed, name) for name in ("model", *KEYWORDS)})

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"EngineArgs has no attribute {name!r}{hint(name, KEYWORDS, _NOT_HERE)}")

    def __init__(self, model: str | Path, **arguments: Unpack[LLMKeywords]) -> None:
        """Raises TypeError for an unknown keyword, naming the nearest."""
        resolve_keywords(dict.fromkeys(arguments), model)
        defaults = {row.name: row.default for row in KEYWORDS.values()}
        vars(self).update({"model": model, **defaults, **arguments})
