"""Head of a pooling model: the pooled hidden state of a row, or the states of its tokens -> vectors or scores, in
float32.

Rows are pooled one by one, each with the same operations in the same order, so a row's result depends on the row alone.
Every rank of the last stage has the full pooler.

H: hidden size; D: elements of the vector; L: labels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import WeightSlice, replicated
from spmd_worker.model_config.pooling import HeadConfig, PoolingConfig

HEAD: Final = "lm_head"
"""Our name of the token head, of which a classifier from tokens uses two rows."""


_FUNCTIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "softmax": partial(torch.softmax, dim=0),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""Applied to one vector at a time, so an element always has the same index in its tensor."""


class Pooler(CheckpointLayer):
    """`score` [labels, H], if the model has scores, is a weight of the checkpoint; dense layers have files of their own
    (`set_denses`) and take no part in weight updates. An encoder may have a dense layer and a norm before the scores.
    """

    is_float32 = True

    def __init__(self, context: LayerContext, config: PoolingConfig, vocab_size: int) -> None:
        super().__init__()
        self.config, self._vocab_size, self._device = config, vocab_size, context.device
        context, size, head = replace(context, dtype=torch.float32), config.hidden_size, config.head
        num_rows = len(config.label_token_ids) or config.num_labels * config.has_score_weight
        if num_rows:
            self.score = context.parameter(num_rows, size)
        has_bias = config.has_score_weight and config.has_score_bias
        self.score_bias = context.parameter(config.num_labels) if has_bias else None
        if head is not None:
            self.dense = context.parameter(size, size)
            self.dense_bias = context.parameter(size) if head.has_bias else None
            self.norm = context.parameter(size) if head.norm is not None else None
            self.norm_bias = context.parameter(size) if head.norm is not None and head.norm.has_bias else None
        # No parameters: those are loaded, dropped and updated from the checkpoint.
        self._denses: list[dict[str, Tensor]] = []

    def set_denses(self, weights: Sequence[Mapping[str, Tensor]]) -> None:
        """Tensors of each of `config.denses`, by the names in its file, float32."""
        for _, tensors in zip(self.config.denses, weights, strict=True):
            self._denses.append({name: each.to(self._device) for name, each in tensors.items()})

    def forward(
        self,
        pooled: Tensor,
        *,
        dimensions: int | None,
        normalizes: bool,
        activates: bool,
        is_for_tokens: bool = False,
    ) -> Tensor:
        """Float32 [H], or with late pooling [T, H] -> float32 [D], or scores [L] of a model that classifies.

        `is_for_tokens`: states [T, H] -> a vector of each token [T, D], or its scores [T, L]. Dense layers take states
        of tokens if the model has no vectors of rows (late interaction), else a token's vector is its state.
        """
        if is_for_tokens:
            return self._of_tokens(pooled, dimensions=dimensions, normalizes=normalizes, activates=activates)
        x = self._projected(pooled)
        if self.config.task == "classify":
            scores = self._scores(x)
            return _activate(scores, self.config.activation) if activates else scores
        x = x if dimensions is None else x[:dimensions]
        x = F.normalize(x, dim=0) if normalizes else x
        return x[: self.config.max_dimensions or None] if dimensions is None else x

    def _of_tokens(self, states: Tensor, **options: Any) -> Tensor:
        """One token after another, so that neither chunks nor other rows change a bit."""
        return torch.stack([self._of_token(each, **options) for each in states.unbind(0)])

    def _of_token(self, state: Tensor, *, dimensions: int | None, normalizes: bool, activates: bool) -> Tensor:
        """[H] -> [D] or [L]."""
        if self.config.task == "token_classify":
            scores = self._scores(state)
            return _activate(scores, self.config.activation) if activates else scores
        if self.config.task == "token_embed":
            state = self._projected(state)
            state = self._scores(state) if self.config.has_score_weight else state
        state = state[:dimensions]
        return F.normalize(state, dim=0) if normalizes else state

    def _projected(self, x: Tensor) -> Tensor:
        """[H] -> [D], by the dense layers."""
        for dense, tensors in zip(self.config.denses, self._denses, strict=True):
            y = _activate(_linear(x, tensors["linear.weight"], tensors.get("linear.bias")), dense.activation)
            if dense.has_residual:
                y = y + (_linear(x, tensors["residual.weight"], None) if dense.has_residual_matrix else x)
            x = y
        return x

    def _scores(self, x: Tensor) -> Tensor:
        """[H] or [T, H] -> [L]. Without a score weight the outputs of the dense layers are the scores."""
        config = self.config
        if not config.has_score_weight and not config.label_token_ids:
            return x
        if config.head is not None:
            x = self._late_mean(x, config.head) if config.pooling_type == "late" else self._headed(x, config.head)
        scores = _linear(x, self.score, self.score_bias)
        # Two rows are those of the tokens for no and yes.
        return scores[1:] - scores[:1] if len(config.label_token_ids) == 2 else scores

    def _headed(self, x: Tensor, head: HeadConfig) -> Tensor:
        """[H] -> [H]."""
        x = _activate(_linear(x, self.dense, self.dense_bias), head.activation)
        return x if head.norm is None else F.layer_norm(x, x.shape, self.norm, self.norm_bias, head.norm.eps)

    def _late_mean(self, states: Tensor, head: HeadConfig) -> Tensor:
        """[T, H] -> [H], token by token: the scores are linear, so their mean is that of the mean."""
        total = torch.zeros_like(states[0])
        for token in states.unbind(0):
            total += self._headed(token, head)
        return total / len(states)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        size = self.config.hidden_size
        if self.config.label_token_ids:
            for row, token_id in enumerate(self.config.label_token_ids):
                source, destination = ((token_id, token_id + 1), (0, size)), ((row, row + 1), (0, size))
                shape = (self._vocab_size, size)
                yield WeightSlice(f"{HEAD}.weight", shape, source, f"{prefix}.score", destination)
        for name, own in _CHECKPOINT_NAMES.items():
            parameter: nn.Parameter | None = getattr(self, own, None)
            if parameter is not None and not (own == "score" and self.config.label_token_ids):
                yield replicated(f"{prefix}.{name}", tuple(parameter.shape), f"{prefix}.{own}")


_CHECKPOINT_NAMES: Final = {
    "weight": "score",
    "bias": "score_bias",
    "dense.weight": "dense",
    "dense.bias": "dense_bias",
    "norm.weight": "norm",
    "norm.bias": "norm_bias",
}


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[in] x [out, in] + [out] -> [out]. Each output is a sum of its own, whatever the number of threads."""
    outputs = (weight * x).sum(1)
    return outputs if bias is None else outputs + bias


def _activate(x: Tensor, activation: str) -> Tensor:
    return _FUNCTIONS[activation](x) if activation in _FUNCTIONS else x
