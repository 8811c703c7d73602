"""Triton's interpreter, without what takes two thirds of its time and computes nothing.

* Device functions look for builtins to replace that the launch has replaced already. A launch replaces the builtins of
  `triton.language` by interpreted ones and puts them back at its end; each call of a device function does the same
  again: it lists and sorts all members of five modules and classes and finds nothing left.
* Each tensor makes a type of its own, with a shape of objects, a name and checks: here once for each type.
* Each sum, difference and product of whole numbers is computed again in 64 bits, to see whether it overflows, and the
  answer is dropped unless the interpreter debugs.

Knows the interpreter's insides; nothing of kernels.
"""

import functools
import inspect
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter


def make_faster() -> None:
    """Once in a process, before the first launch."""
    replace_builtins_once()
    make_types_once()
    skip_unread_checks()


def replace_builtins_once() -> None:
    """Where they are replaced already, nothing is looked for: the state is asked, so any thread may launch."""
    patch = interpreter._patch_lang

    def patch_unless_done(fn: FunctionType) -> Any:
        return interpreter._LangPatchScope() if _are_replaced(fn) else patch(fn)

    interpreter._patch_lang = patch_unless_done


def _are_replaced(fn: FunctionType) -> bool:
    languages = _languages_of(fn)
    # The last that a launch replaces, and the first that it puts back.
    last = tl.core.tensor_descriptor_base.store
    return bool(languages) and not any(map(tl.core.is_builtin, (last, *(each.load for each in languages))))


@functools.cache
def _languages_of(fn: FunctionType) -> list[Any]:
    return [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]


def make_types_once() -> None:
    """Types of blocks, shapes of tensors and numpy's types are kept by name and shape, which they depend on alone."""
    make_block_type, make_tensor, find_dtype = (
        tl.core.block_type.__init__,
        tl.core.tensor.__init__,
        interpreter._get_np_dtype,
    )
    equals = tl.core.dtype.__eq__
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    dtypes: dict[str, np.dtype] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(each.value if isinstance(each, tl.constexpr) else each for each in shape)
        if key not in blocks:
            make_block_type(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])
        self.element_ty = element_ty

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.shape, self.numel = shapes[key]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def np_dtype(tt_dtype: Any) -> np.dtype:
        if tt_dtype.name not in dtypes:
            dtypes[tt_dtype.name] = find_dtype(tt_dtype)
        return dtypes[tt_dtype.name]

    tl.core.block_type.__init__, tl.core.tensor.__init__ = init_block_type, init_tensor
    tl.core.dtype.__eq__ = lambda self, other: self is other or equals(self, other)
    interpreter._get_np_dtype = np_dtype


def skip_unread_checks() -> None:
    """The checks for overflow end in an assertion that only a debugging interpreter makes."""
    check = semantic.TritonSemantic.binary_op_sanitize_overflow_impl

    def check_if_asserted(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            check(self, lhs, rhs, binary_op)

    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = check_if_asserted
