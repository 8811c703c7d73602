"""Whether one tensor can be a weight, in one set of words, whoever brings it: a file, a trainer, `apply_model`.

All raise CheckpointError, which is a ValueError, but for what is not a name and a tensor at all. A `subject` is what a
message begins with: the file and the tensor's name, or its name alone.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError

WEIGHT_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes that a weight may be given in, by the word of safetensors."""


def check_pair(name: object, tensor: object) -> None:
    """Raise TypeError for what is not a name and a tensor."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a weight is a {type(name).__name__}: give pairs of a name, as text, and a tensor")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: is a {type(tensor).__name__}: give pairs of a name and a tensor")


def check_data(name: str, tensor: Tensor) -> None:
    """Its elements are here, of a dtype that weights have."""
    # A DTensor, known by its method. Gathering it is a collective, which is the caller's to order.
    if hasattr(tensor, "full_tensor"):
        raise CheckpointError(f"{name}: is sharded: pass its full_tensor()")
    if tensor.is_meta:
        raise CheckpointError(f"{name}: is on the meta device and has no data")
    if tensor.dtype not in WEIGHT_DTYPES.values():
        dtypes = ", ".join(map(str, WEIGHT_DTYPES.values()))
        raise CheckpointError(f"{name}: has the dtype {tensor.dtype}, weights have one of {dtypes}")


def check_finite(subject: str, values: Tensor, dtype: torch.dtype, start: Sequence[int] = ()) -> None:
    """Every element, rounded to `dtype`, is a finite number. `values` begin at the index `start` of the tensor."""
    if is_finite(values, dtype):
        return
    inside = values.to(dtype).isfinite().logical_not().nonzero()[0].tolist()
    index = [first + offset for first, offset in zip(start or [0] * len(inside), inside, strict=True)]
    raise CheckpointError(
        f"{subject} has {float(values[tuple(inside)]):g} at {index}, which is not finite in {dtype}: the weights are "
        f"damaged or their training diverged; set model.allow_nonfinite=true to load them all the same (rows whose "
        f"logits are not finite are error rows), or another model.dtype where the value is only too large"
    )


def is_finite(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether every element, rounded to `dtype`, is a finite number."""
    # Bounds are NaN where an element is, and are rounded as the elements will be.
    return values.numel() == 0 or bool(torch.stack(values.aminmax()).to(dtype).isfinite().all())


def tied_head_fault(head: str, fault: str, way_out: str) -> str:
    """The sentence about a head that cannot be one with the embedding."""
    return f"{head} {fault}, but tie_word_embeddings in config.json says that they are one: {way_out}"
