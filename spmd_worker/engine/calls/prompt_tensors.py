"""Tensors of `prompt_embeds` as the bytes that `EmbedsReader` checks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from spmd_worker.engine.embeds_reader import KEY, EmbedsReader
from spmd_worker.engine.request_error import RequestError
from spmd_worker.engine.validation import RequestLimits
from spmd_worker.replica.sequence.input_rows import PromptRows


def rows_of_tensor(value: Any, reader: EmbedsReader) -> PromptRows:
    """Rows of a tensor on any device, or of a numpy array, [tokens, width] or [1, tokens, width]. Raises TypeError for
    another type, RequestError for other dtypes and shapes.
    """
    if isinstance(value, np.ndarray):
        # torch takes neither all strides and byte orders of numpy nor its bfloat16.
        reader.checked_shape(value.dtype.name, value.shape)
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        return reader.of_array(value.dtype.name, value.shape, little.reshape(-1).view(np.uint8).data)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{KEY} is a {type(value).__name__}: give a tensor [tokens, {reader.width}]")
    dtype = str(value.dtype).removeprefix("torch.")
    # Before the numbers are copied.
    reader.checked_shape(dtype, value.shape)
    if value.is_meta:
        raise RequestError("invalid_embeddings", f"{KEY} is on the device meta, which has no numbers: give them")
    numbers = value.detach().to_dense().cpu().resolve_neg().contiguous()
    return reader.of_array(dtype, value.shape, numbers.view(torch.uint8).numpy().data.cast("B"))


def row_reading(limits: RequestLimits) -> Callable[[Any], PromptRows]:
    """`rows_of_tensor` of an engine's reader."""
    assert limits.rows is not None, "an engine's limits have a reader"
    return partial(rows_of_tensor, reader=limits.rows)
