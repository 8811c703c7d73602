"""Errors that speak of keys of the configuration, in the words of who wrote `LLM(...)`: its keywords.

Checks are made once, for a command line and for `LLM`, and name keys as a command line has them; here is what each key
is called in a call.
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

_OF_ROWS: Final = "sampling"
_PYTHONIC: Final = {"true": "True", "false": "False", "null": "None"}


# Arguments of `LLM(...)`, and of `chat` and `chat_messages`.
_ARGUMENTS: Final = {
    "model.path": "model",
    "model.tool_call_format": "tool_call_format",
    "model.reasoning_format": "reasoning_format",
}


def _name_of(key: Key) -> str:
    """The keyword of `LLM`, or words where there is none."""
    without = f"override_generation_config[{key.field!r}]" if key.group == _OF_ROWS else f"the configured {key.field}"
    return key.keyword or _ARGUMENTS.get(key.name, without)


KEY_NAMES: Final[Mapping[str, str]] = {key.name: _name_of(key) for key in keys_of(RunConfig).values() if key.group}
"""Key of the configuration -> its name in a call. Keys without a group have the same name in both."""
_KEYS: Final = "|".join(map(re.escape, KEY_NAMES))
_KEY: Final = re.compile(rf"(?<![\w/.-])({_KEYS})(?![\w/])(?!\.\w)(=(?:true|false|null)\b)?")
_VLLM_NAMES: Final = {
    key.keyword: key.option.vllm_names[0] for key in keys_of(RunConfig).values() if len(key.option.vllm_names) == 1
}
"""Our keyword -> vLLM's for it where it has one, which an error uses unless ours was given."""


def with_keyword_names(text: str, given: Iterable[str] = ()) -> str:
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
    """A class whose public methods raise errors, and return outputs with errors, in the words of `with_keyword_names`."""
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
        given = [name for name, value in kwargs.items() if value is not None]
        for made in (*args, *kwargs.values()):
            if isinstance(made, EngineArgs):
                given += [name for name, row in KEYWORDS.items() if is_given(row, getattr(made, name))]
        try:
            result = method(*args, **kwargs)
        except (SpmdError, ValueError, TypeError, RuntimeError) as error:
            error.args = tuple(with_keyword_names(each, given) if isinstance(each, str) else each for each in error.args)
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
