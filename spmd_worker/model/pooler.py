"""The head of a model that pools: hidden states of a row -> its vector or scores, in float32.

Rows are pooled one by one, each by the same operations in the same order, so that a row's numbers depend on the row
alone. Whole on every rank of the last stage.

H: hidden size; D: numbers of the vector; L: labels.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import WeightSlice, whole
from spmd_worker.model_config.pooling import HeadConfig, PoolingConfig

HEAD: Final = "lm_head"
"""Our name of the head for tokens, of which a classifier from tokens takes two rows."""


_FUNCTIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""Of one vector by itself, so each element has the same place in it always."""


class Pooler(CheckpointLayer):
    """`score` [labels, H], where the model has scores, is a weight of the checkpoint; dense layers have files of their
    own (`take_denses`) and are no part of weight updates.
    """

    is_float32 = True

    def __init__(self, context: LayerContext, config: PoolingConfig, vocab_size: int) -> None:
        super().__init__()
        self.config, self._vocab_size, self._device = config, vocab_size, context.device
        num_rows = len(config.label_token_ids) or config.num_labels * config.has_score_weight
        if num_rows:
            empty = torch.empty(num_rows, config.hidden_size, dtype=torch.float32, device=context.device)
            self.score = nn.Parameter(empty, requires_grad=False)
        self._take_head(context, config)
        # No parameters: what loads, drops and updates weights works on those of the checkpoint.
        self._denses: list[tuple[Tensor, Tensor | None, str]] = []

    def _take_head(self, context: LayerContext, config: PoolingConfig) -> None:
        """What an encoder has before its scores, and their bias."""
        own, size, head = replace(context, dtype=torch.float32), config.hidden_size, config.head
        self.score_bias = own.parameter(config.num_labels) if config.has_score_bias else None
        if head is None:
            return
        self.dense = own.parameter(size, size)
        self.dense_bias = own.parameter(size) if head.has_bias else None
        self.norm = own.parameter(size) if head.norm is not None else None
        self.norm_bias = own.parameter(size) if head.norm is not None and head.norm.has_bias else None

    def take_denses(self, weights: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Weight [out, in] and bias [out] of each of `config.denses`, float32."""
        for dense, (weight, bias) in zip(self.config.denses, weights, strict=True):
            moved = None if bias is None else bias.to(self._device)
            self._denses.append((weight.to(self._device), moved, dense.activation))

    def forward(self, pooled: Tensor, *, dimensions: int | None, normalizes: bool, activates: bool) -> Tensor:
        """Float32 [H] -> float32 [D], or [L] of a model that scores."""
        x = pooled
        for weight, bias, activation in self._denses:
            x = _activated(_product(weight, x) if bias is None else _product(weight, x) + bias, activation)
        if self.config.task == "classify":
            scores = self._scored(x)
            return _activated(scores, self.config.activation) if activates else scores
        x = x if dimensions is None else x[:dimensions]
        x = F.normalize(x, dim=0) if normalizes else x
        return x[: self.config.max_dimensions or None] if dimensions is None else x

    def _scored(self, x: Tensor) -> Tensor:
        """[H] -> [L]; what dense layers make of it are the scores where nothing else makes some."""
        if not self.config.has_score_weight and not self.config.label_token_ids:
            return x
        x = x if self.config.head is None else self._headed(x, self.config.head)
        scores = _product(self.score, x)
        scores = scores if self.score_bias is None else scores + self.score_bias
        # (no, yes), or what is taken as it is.
        return scores[1:] - scores[:1] if len(self.config.label_token_ids) == 2 else scores

    def _headed(self, x: Tensor, head: HeadConfig) -> Tensor:
        """[H] -> [H]."""
        x = _product(self.dense, x)
        x = _activated(x if self.dense_bias is None else x + self.dense_bias, head.activation)
        return x if head.norm is None else F.layer_norm(x, x.shape, self.norm, self.norm_bias, head.norm.eps)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name."""
        size = self.config.hidden_size
        if self.config.label_token_ids:
            for row, token_id in enumerate(self.config.label_token_ids):
                source, destination = ((token_id, token_id + 1), (0, size)), ((row, row + 1), (0, size))
                shape = (self._vocab_size, size)
                yield WeightSlice(f"{HEAD}.weight", shape, source, f"{prefix}.score", destination)
        elif self.config.has_score_weight:
            shape = (self.config.num_labels, size)
            yield whole(f"{prefix}.weight", shape, f"{prefix}.score")
            if self.score_bias is not None:
                yield whole(f"{prefix}.bias", shape[:1], f"{prefix}.score_bias")
        if self.config.head is not None:
            yield whole(f"{prefix}.dense.weight", (size, size), f"{prefix}.dense")
            for name, own in (("dense.bias", "dense_bias"), ("norm.weight", "norm"), ("norm.bias", "norm_bias")):
                if getattr(self, own) is not None:
                    yield whole(f"{prefix}.{name}", (size,), f"{prefix}.{own}")


def _product(weight: Tensor, x: Tensor) -> Tensor:
    """[out, in] x [in] -> [out]. Each output is a sum of its own, whatever the number of threads."""
    return (weight * x).sum(1)


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "softmax":
        return torch.softmax(x, 0)
    function = _FUNCTIONS.get(activation)
    return x if function is None else function(x)
