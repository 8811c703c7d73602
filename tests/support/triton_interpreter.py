"""Triton's interpreter, without what takes a third of its time: device functions look for builtins to replace that the
launch has replaced already.

A launch replaces the builtins of `triton.language` by interpreted ones and puts them back at its end. Each call of a
device function does the same again: it lists and sorts all members of five modules and classes and finds nothing left.
Knows the interpreter's insides; nothing of kernels.
"""

import inspect
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def replace_builtins_once() -> None:
    """Where they are replaced already, nothing is looked for: the state is asked, so any thread may launch."""
    patch = interpreter._patch_lang

    def patch_unless_done(fn: FunctionType) -> Any:
        return interpreter._LangPatchScope() if _are_replaced(fn) else patch(fn)

    interpreter._patch_lang = patch_unless_done


def _are_replaced(fn: FunctionType) -> bool:
    languages = [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]
    # The last that a launch replaces, and the first that it puts back.
    last = tl.core.tensor_descriptor_base.store
    return bool(languages) and not any(map(tl.core.is_builtin, (last, *(each.load for each in languages))))
