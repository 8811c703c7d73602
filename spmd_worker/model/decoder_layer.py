"""One layer of the stack: mixers of tokens, attention to an encoder's rows, feed-forward, and norms around each.

T: tokens of the step; W: tokens of `WantedTokens`.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from spmd_worker.model.layers.attention import Attention
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.cross_attention import CrossAttention
from spmd_worker.model.layers.experts import SparseFeedForward
from spmd_worker.model.layers.feed_forward import FeedForward
from spmd_worker.model.layers.gated_streams import StreamMixer
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.model.layers.mixers import MIXERS
from spmd_worker.model.layers.norm import FullNorm, Norm, RMSNorm, new_norm
from spmd_worker.model.layers.relative_bias import RelativeBiasTable
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.ops.kernels.adapters import AdapterStack
from spmd_worker.ops.kernels.api import LayerSizes, LayerWeights


class DecoderLayer(nn.Module):
    """Attention and feed-forward on a residual stream, with norms at any of four positions: before and after each. In
    a decoder with an encoder, attention to the encoder's rows is between the two, with norms at two more.

    A layer that `defers` has plain norms before both and no others: an output is summed over ranks and added together
    with the next norm, in one call. Otherwise it is summed and added at once.
    """

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int, *, defers: bool) -> None:
        super().__init__()
        assert layer.is_plain_wiring or not defers, layer
        self.config, self.hidden_size = layer, hidden_size
        self._group, self._defers, self._multiplier = context.parts_group, defers, layer.residual_multiplier
        self._dtype = context.dtype
        self._mixers = MIXERS[layer.mixer]
        for name, mixer_class in self._mixers:
            self.add_module(name, mixer_class(context, layer, hidden_size))
        self.mlp: FeedForward | SparseFeedForward | None = None
        if layer.has_feed_forward:
            self.mlp = (FeedForward if layer.experts is None else SparseFeedForward)(context, layer, hidden_size)
        norms = [new_norm(context, hidden_size, layer.norm) if is_used else None for is_used in layer.norms]
        self.input_layernorm, self.attention_output_norm, self.post_attention_layernorm, self.mlp_output_norm = norms
        self.relative_bias: RelativeBiasTable | None = None
        """Table of this layer alone, if it has one."""
        self.cross_attn: CrossAttention | None = None
        if layer.has_cross_attention:
            self.cross_attn = CrossAttention(context, layer, hidden_size)
        self.cross_attention_norm, self.cross_attention_output_norm = (
            new_norm(context, hidden_size, layer.norm) if is_used else None for is_used in layer.cross_norms
        )

    def forward(self, part: Tensor | None, residual: Tensor, step: LayerStep) -> tuple[Tensor | None, Tensor]:
        """`part`: this rank's part of the last layer's output, None if nothing is left to add; `residual`: the stream,
        changed in place -> the same two of this layer. All [T, hidden]; with `wanted`, if `supports_wanted`, the
        results are [W, hidden], and only keys and values of the other tokens are computed.
        """
        parallel_input, wanted = None, step.wanted
        if self._mixers:
            x = normed(self.input_layernorm, part, residual)
            if self.config.is_parallel:
                assert x is not residual, "a layer with a parallel feed-forward has a norm before attention"
                parallel_input = x if self.post_attention_layernorm is None else self.post_attention_layernorm(residual)
            if self.relative_bias is not None:
                step = replace(step, distance_bias=self.relative_bias.table())
            part = self._mixed(x, step)
            if wanted is not None:
                residual, step = residual[wanted.rows], replace(step, adapters=wanted.adapters)
                if not len(residual):
                    return part, residual
            part = self._added(part, self.attention_output_norm, residual)
        if self.cross_attn is not None:
            assert part is None, "layers with cross-attention add at once"
            x = normed(self.cross_attention_norm, None, residual)
            output = self.cross_attn(x, step.key_cache, step.seen)
            part = self._added(output, self.cross_attention_output_norm, residual)
        if self.mlp is None:
            return part, residual
        x = normed(self.post_attention_layernorm, part, residual) if parallel_input is None else parallel_input
        return self.fed_forward(x, residual, step), residual

    def fed_forward(self, x: Tensor, residual: Tensor, step: LayerStep) -> Tensor | None:
        """The feed-forward of `x`: a part that is still to be added to the stream, or None."""
        return self._added(self._fed(x, step), self.mlp_output_norm, residual)

    def _fed(self, x: Tensor, step: LayerStep, router_input: Tensor | None = None) -> Tensor:
        """This rank's part of the feed-forward of `x`. `router_input` is as in `SparseFeedForward.forward`."""
        assert self.mlp is not None, "a layer without a feed-forward has nothing to do here"
        more: dict[str, Any] = {}
        if self.config.experts is not None:
            more = {"slots": step.metadata.slots, "routes": step.routes}
            more |= {"token_ids": step.token_ids, "router_input": router_input}
        part: Tensor = self.mlp(x, step.adapters, is_fused=step.is_fused, **more)
        return part

    def _mixed(self, x: Tensor, step: LayerStep) -> Tensor:
        """The sum of the mixers' outputs, in their order."""
        (first, _), *others = self._mixers
        part: Tensor = getattr(self, first)(x, step)
        if not others:
            return part
        # Parts have one buffer in symmetric memory. Outputs are rounded before they are added, as on one rank.
        has_tree = self._group.has_tree
        total = self._complete(part) if has_tree else part.clone()
        for name, _ in others:
            output = getattr(self, name)(x, step)
            total = total.add_(self._complete(output) if has_tree else output)
        return self._group.once(total) if has_tree else total

    def _complete(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts."""
        return self._group.sum_parts(part, self._dtype)

    @property
    def supports_wanted(self) -> bool:
        """Whether tokens can be left out: each is computed by itself, and no tokens of experts are counted. A state is
        a function of all tokens, and a choice that is taken from another layer is that of all.
        """
        return (
            self._defers
            and isinstance(self.mlp, FeedForward)
            and not (self.config.has_states or self.config.takes_choice)
        )

    def _added(self, part: Tensor, norm: Norm | None, residual: Tensor) -> Tensor | None:
        """The scaled part if it is still to be added; None if it was added here."""
        if self._defers and self._multiplier == 1.0:
            return part
        if self._defers and not self._group.has_tree:
            return part.mul_(self._multiplier)
        if self._defers:
            # A sum is rounded before it is multiplied, as on one rank.
            return self._group.once(self._complete(part) * self._multiplier)
        x, norms_sums = self._complete(part), self.config.norms_sums
        x = x if norm is None or norms_sums else norm(x)
        residual.add_(x if self._multiplier == 1.0 else x * self._multiplier)
        if norm is not None and norms_sums:
            residual.copy_(norm(residual))
        return None

    @property
    def _attention(self) -> Attention:
        attention = self.self_attn
        assert isinstance(attention, Attention), "layers with other mixers are not joined"
        return attention

    @property
    def _dense(self) -> FeedForward | None:
        """The feed-forward of a layer without experts."""
        assert self.config.experts is not None or isinstance(self.mlp, FeedForward), "layers without any are not joined"
        return self.mlp if isinstance(self.mlp, FeedForward) else None

    def weights(self) -> LayerWeights:
        attention, dense = self._attention, self._dense
        gates, down = (None, None) if dense is None else (dense.gate_up_proj, dense.down_proj)
        return LayerWeights(
            input_norm=norm_weight(self.input_layernorm),
            qkv=attention.qkv_proj.weight,
            qkv_bias=attention.qkv_proj.bias,
            query_norm=norm_weight(attention.q_norm),
            key_norm=norm_weight(attention.k_norm),
            output=attention.o_proj.weight,
            output_bias=attention.o_proj.rank_bias,
            attention_output_norm=norm_weight(self.attention_output_norm),
            feed_forward_norm=norm_weight(self.post_attention_layernorm),
            gates=None if gates is None else gates.weight,
            gates_bias=None if gates is None else gates.bias,
            down=None if down is None else down.weight,
            down_bias=None if down is None else down.rank_bias,
            feed_forward_output_norm=norm_weight(self.mlp_output_norm),
            window=attention.window,
            rope=-1 if self.config.rope is None else self.config.rope,
        )

    def adapter_stacks(self) -> tuple[AdapterStack | None, ...]:
        attention, dense = self._attention, self._dense
        of_dense = (None, None) if dense is None else (dense.gate_up_proj.adapters, dense.down_proj.adapters)
        return (attention.qkv_proj.adapters, attention.o_proj.adapters, *of_dense)

    def sizes(self) -> LayerSizes:
        attention, dense = self._attention, self._dense
        return LayerSizes(
            hidden_size=self.hidden_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_size=attention.head_size,
            intermediate_size=0 if dense is None else dense.intermediate_size,
            norm=self.config.norm,
            scale=attention.scale,
            score_cap=self.config.score_cap,
            activation="silu" if dense is None else self.config.activation,
            multiplier=self._multiplier,
            defers=self._defers,
            output_leaf_ends=attention.o_proj.leaf_ends,
            down_leaf_ends=() if dense is None else dense.down_proj.leaf_ends,
        )


def norm_weight(norm: nn.Module | None) -> Tensor | None:
    """The weight of a norm of one row that has no bias; None without a norm."""
    if norm is None:
        return None
    assert isinstance(norm, RMSNorm | FullNorm), "layers with other norms are not joined"
    assert isinstance(norm, RMSNorm) or (norm.weight is not None and norm.bias is None), "norms are not joined with it"
    return norm.weight


def normed(norm: Norm | StreamMixer | None, part: Tensor | None, residual: Tensor) -> Tensor:
    """The residual stream, normed if there is a norm, after a deferred part was added to it."""
    if part is not None:
        assert isinstance(norm, RMSNorm), "layers defer only to plain norms"
        together: Tensor = norm(part, residual)
        return together
    return residual if norm is None else norm(residual)
