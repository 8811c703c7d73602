"""Tensors of `prompt_embeds` as the bytes that `EmbedsReader` checks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from spmd_worker.engine.embeds_reader import KEY, EmbedsReader
from spmd_worker.engine.validation import RequestLimits
from spmd_worker.replica.sequence.input_rows import PromptRows


def rows_of_tensor(value: Any, reader: EmbedsReader) -> PromptRows:
    """Rows of a tensor on any device, or of a numpy array, [tokens, width] or [1, tokens, width]. Raises TypeError for
    another type, RequestError for other dtypes and shapes.
    """
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{KEY} is a {type(value).__name__}: give a tensor [tokens, {reader.width}]")
    dtype = str(value.dtype).removeprefix("torch.")
    # Before the numbers are copied.
    reader.checked_shape(dtype, value.shape)
    numbers = value.detach().to_dense().cpu().contiguous()
    return reader.of_array(dtype, value.shape, numbers.view(torch.uint8).numpy().data.cast("B"))


def row_reading(limits: RequestLimits) -> Callable[[Any], PromptRows]:
    """`rows_of_tensor` of an engine's reader."""
    assert limits.rows is not None, "an engine's limits have a reader"
    return partial(rows_of_tensor, reader=limits.rows)
