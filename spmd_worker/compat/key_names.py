"""Errors that speak of keys of the configuration, in the words of who wrote `LLM(...)`: its keywords.

Checks are made once, for a command line and for `LLM`, and name keys as a command line has them; here is what each key
is called in a call.
"""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Final, TypeVar

from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import SpmdError
from spmd_worker.compat.engine_args import GROUPS, EngineArgs
from spmd_worker.compat.keywords import KEYWORDS, Effect

_Made = TypeVar("_Made", bound=type)

_OF_ROWS: Final = "sampling"
_PYTHONIC: Final = {"true": "True", "false": "False", "null": "None"}


def _names() -> dict[str, str]:
    """Key of the configuration -> the keyword of `LLM`, or words where there is none."""
    own = {(kind, key or name): name for kind, names in GROUPS.items() for name, key in names.items()}
    # The last two are arguments of `chat` and `chat_messages`.
    own_names = ("tool_call_format", "reasoning_format")
    names = {"model.path": "model", **{f"model.{name}": name for name in own_names}}
    for group, hint in typing.get_type_hints(RunConfig).items():
        if not dataclasses.is_dataclass(hint):
            continue
        for spec in dataclasses.fields(hint):
            is_default = group == _OF_ROWS
            without = f"override_generation_config[{spec.name!r}]" if is_default else f"the configured {spec.name}"
            names.setdefault(f"{group}.{spec.name}", own.get((typing.cast(type, hint), spec.name), without))
    return names


KEY_NAMES: Final[Mapping[str, str]] = _names()
_KEYS: Final = "|".join(map(re.escape, KEY_NAMES))
_KEY: Final = re.compile(rf"(?<![\w/.-])({_KEYS})(?![\w/])(?!\.\w)(=(?:true|false|null)\b)?")
_WITH_TWO_NAMES: Final = ("timeout_s",)
_VLLM_NAMES: Final = {
    row.ours: row.name for row in KEYWORDS.values() if row.effect is Effect.RENAMED and row.ours not in _WITH_TWO_NAMES
}
"""Our keyword -> vLLM's for it, which an error uses unless ours was given."""


def in_keywords(text: str, given: Iterable[str] = ()) -> str:
    """`text` with keywords of `LLM` for keys, and Python's values; `given` are keywords that the caller gave."""
    names = {row.ours: row.name for row in map(KEYWORDS.get, given) if row is not None and row.effect is Effect.RENAMED}
    ours = dict.fromkeys(given)

    def keyword(found: re.Match[str]) -> str:
        name = KEY_NAMES[found[1]]
        name = name if name in ours else names.get(name, _VLLM_NAMES.get(name, name))
        return name + (f"={_PYTHONIC[found[2][1:]]}" if found[2] else "")

    spoken = _KEY.sub(keyword, text)
    return text if spoken == text else re.sub(r"\bnull\b", "None", spoken).replace("true or false", "True or False")


def speaks_keywords(made: _Made) -> _Made:
    """A class whose public methods raise errors, and return outputs with errors, in the words of `in_keywords`."""
    for name, method in list(vars(made).items()):
        if name != "__init__" and name.startswith("_"):
            continue
        if isinstance(method, classmethod):
            setattr(made, name, classmethod(_spoken(method.__func__)))
        elif inspect.isfunction(method):
            setattr(made, name, _spoken(method))
    return made


def _spoken(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        arguments = [kwargs, *(vars(each) for each in (*args, *kwargs.values()) if isinstance(each, EngineArgs))]
        given = [name for each in arguments for name, value in each.items() if value is not None]
        try:
            result = method(*args, **kwargs)
        except (SpmdError, ValueError, TypeError, RuntimeError) as error:
            error.args = tuple(in_keywords(each, given) if isinstance(each, str) else each for each in error.args)
            reasons = getattr(error, "reasons", None)
            if isinstance(reasons, dict):
                reasons.update({index: in_keywords(each) for index, each in reasons.items()})
            raise
        for output in result if isinstance(result, list) else ():
            error_text = getattr(output, "error", None)
            if isinstance(error_text, str):
                output.error = in_keywords(error_text)
        return result

    return called
