"""Translates configuration keys in errors into the keywords of `LLM(...)`, for callers of `LLM`.

Checks are shared between command line and `LLM`, and name the keys of a command line.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Final, TypeVar

from spmd_worker.base.config.options import Key, keys_of
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import SpmdError
from spmd_worker.compat.engine_args import EngineArgs
from spmd_worker.compat.keywords import KEYWORDS, Effect, is_given

_Made = TypeVar("_Made", bound=type)

_PYTHONIC: Final = {"true": "True", "false": "False", "null": "None"}
_ARGUMENTS: Final = {f"model.{name}": name for name in ("chat_template", "tool_call_format")} | {"model.path": "model"}
"""Arguments of `chat` and `chat_messages`, and of `LLM(...)`, that are not in the table of keywords."""


_DICTS: Final = {"sampling": "override_generation_config", "speculative_config": "speculative_config"}
"""Group of keys -> the keyword whose dict has them."""


def _name_of(key: Key) -> str:
    """The keyword of `LLM`, or a description of a key without one."""
    of = _DICTS.get(key.group)
    without = f"the configured {key.field}" if of is None else f"{of}[{key.field!r}]"
    return key.keyword or _ARGUMENTS.get(key.name, without)


KEY_NAMES: Final[Mapping[str, str]] = {key.name: _name_of(key) for key in keys_of(RunConfig).values() if key.group}
"""Configuration key -> its name in a call. Keys without a group have the same name in both."""
_KEYS: Final = "|".join(map(re.escape, KEY_NAMES))
_KEY: Final = re.compile(rf"(?<![\w/.-])({_KEYS})(?![\w/])(?!\.\w)(=(?:true|false|null)\b)?")
_VLLM_NAMES: Final = {
    key.keyword: key.option.vllm_names[0] for key in keys_of(RunConfig).values() if len(key.option.vllm_names) == 1
}
"""Our keyword -> vLLM's only name for it, which errors use unless ours was given."""


def with_keyword_names(text: str, given: Iterable[str] = ()) -> str:
    """`text` with keywords of `LLM` and Python's values instead of keys; `given` are the keywords of the call."""
    names = {row.ours: row.name for row in map(KEYWORDS.get, given) if row is not None and row.effect is Effect.RENAMED}
    ours = dict.fromkeys(given)

    def keyword(found: re.Match[str]) -> str:
        name = KEY_NAMES[found[1]]
        name = name if name in ours else names.get(name, _VLLM_NAMES.get(name, name))
        return name + (f"={_PYTHONIC[found[2][1:]]}" if found[2] else "")

    translated = _KEY.sub(keyword, text)
    return (
        text
        if translated == text
        else re.sub(r"\bnull\b", "None", translated).replace("true or false", "True or False")
    )


def explain_in_keywords(made: _Made) -> _Made:
    """Class decorator: applies `with_keyword_names` to the errors that public methods raise or return in outputs."""
    for name, method in list(vars(made).items()):
        if name != "__init__" and name.startswith("_"):
            continue
        if isinstance(method, classmethod):
            setattr(made, name, classmethod(_translated(method.__func__)))
        elif inspect.isfunction(method):
            setattr(made, name, _translated(method))
    return made


def _translated(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = [name for name, value in kwargs.items() if value is not None]
        for made in (*args, *kwargs.values()):
            if isinstance(made, EngineArgs):
                given += [name for name, row in KEYWORDS.items() if is_given(row, getattr(made, name))]
        try:
            result = method(*args, **kwargs)
        except (SpmdError, ValueError, TypeError, RuntimeError) as error:
            error.args = tuple(
                with_keyword_names(each, given) if isinstance(each, str) else each for each in error.args
            )
            reasons = getattr(error, "reasons", None)
            if isinstance(reasons, dict):
                reasons.update({index: with_keyword_names(each) for index, each in reasons.items()})
            raise
        for output in result if isinstance(result, list) else ():
            error_text = getattr(output, "error", None)
            if isinstance(error_text, str):
                output.error = with_keyword_names(error_text)
        return result

    return called
