"""Checks of one tensor that a file, a trainer or `apply_model` gives for a weight, with the same messages for all.

They raise CheckpointError, which is a ValueError, or TypeError for anything but a name and a tensor. A message begins
with `subject`: the file and the tensor's name, or the name alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from spmd_worker.base.config.plain_values import plain_int, shown
from spmd_worker.base.errors import CheckpointError

WEIGHT_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes of plain weights, by their names in safetensors."""
WHOLE_NUMBERS: Final = (".tid2eid",)
"""Endings of the names of tables of whole numbers, which may be of these types too."""
INTEGER_DTYPES: Final[Mapping[str, torch.dtype]] = {"I32": torch.int32, "I64": torch.int64}


def check_pair(name: object, tensor: object) -> None:
    """Raise TypeError for anything but a name and a tensor."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a weight is a {type(name).__name__}: give pairs of a name, as text, and a tensor")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: is a {type(tensor).__name__}: give pairs of a name and a tensor")


def pairs_of(weights: Iterable[object]) -> Iterator[tuple[str, Tensor]]:
    """The pairs of a name and a tensor. Raises TypeError for anything else, such as a dict or names alone."""
    if isinstance(weights, Mapping):
        raise TypeError("weights are a dict: give its items(), pairs of a name and a tensor")
    for pair in weights:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"a weight is a {type(pair).__name__}: give pairs of a name and a tensor")
        check_pair(*pair)
        yield pair[0], pair[1]


def check_data(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError for a tensor without data in this process, or of a dtype that weights do not have."""
    # A DTensor, recognised by its method. Gathering it is a collective, which the caller has to order.
    if hasattr(tensor, "full_tensor"):
        raise CheckpointError(
            f"{name}: is sharded: give it to LLM.update_weights or LLM.load_weights, which take shards, or pass its "
            f"full_tensor()"
        )
    if tensor.is_meta:
        raise CheckpointError(f"{name}: is on the meta device and has no data")
    if tensor.layout != torch.strided:
        raise CheckpointError(f"{name}: has the layout {tensor.layout}, but weights must be dense: give its to_dense()")
    is_table = name.endswith(WHOLE_NUMBERS) and tensor.dtype in INTEGER_DTYPES.values()
    if tensor.dtype not in WEIGHT_DTYPES.values() and not is_table:
        dtypes = ", ".join(map(str, WEIGHT_DTYPES.values()))
        raise CheckpointError(f"{name}: has the dtype {tensor.dtype}, but weights must have one of {dtypes}")


def checked_shape(subject: str, shape: object) -> tuple[int, ...]:
    """A shape that came from outside. Raises CheckpointError for anything but a list of sizes."""
    sizes = (
        [plain_int(size) for size in shape] if isinstance(shape, Sequence) and not isinstance(shape, str) else [None]
    )
    found = [size for size in sizes if size is not None and size >= 0]
    if len(found) < len(sizes):
        raise CheckpointError(f"{subject}={shown(shape)} must be a list of sizes, those of the checkpoint's tensor")
    return tuple(found)


def check_finite(subject: str, values: Tensor, dtype: torch.dtype, start: Sequence[int] = ()) -> None:
    """Raise CheckpointError for an element not finite in `dtype`. `start` is the index of the first one."""
    if is_finite(values, dtype):
        return
    inside = values.to(dtype).isfinite().logical_not().nonzero()[0].tolist()
    index = [first + offset for first, offset in zip(start or [0] * len(inside), inside, strict=True)]
    raise CheckpointError(
        f"{subject} has {float(values[tuple(inside)]):g} at {index}, which is not finite in {dtype}: the weights are "
        f"damaged or their training diverged; set model.allow_nonfinite=true to load them anyway (rows with non-finite "
        f"logits become error rows), or another model.dtype if the value is only too large for this one"
    )


def bounded(values: Tensor) -> Tensor:
    """Finite numbers in place of infinite ones, for checks of bounds; NaN stays NaN."""
    return values.clamp(-1, 1)


def is_finite(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether every element is finite after rounding to `dtype`."""
    return values.numel() == 0 or bool(finite_flag(values, dtype))


def finite_flag(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`is_finite` of at least one element as a bool tensor without dimensions, which stays on the device."""
    # Minimum and maximum are NaN if an element is.
    return torch.stack(values.aminmax()).to(dtype).isfinite().all()


def tied_head_fault(head: str, fault: str, way_out: str) -> str:
    """Message about a head that cannot be tied to the embedding."""
    return f"{head} {fault}, but config.json sets tie_word_embeddings: {way_out}"
