"""Self-attention of one decoder layer over the paged cache.

T: tokens of the step; Hq, Hkv: query and key-value heads of this rank; D: head size.
"""

from torch import Tensor, nn

from spmd_worker.attention.metadata import AttentionMetadata
from spmd_worker.distributed.topology import shard_range
from spmd_worker.layers.context import LayerContext
from spmd_worker.layers.linear import RowParallelLinear, kv_head_range, qkv_linear
from spmd_worker.layers.norm import RMSNorm
from spmd_worker.model_config.model_config import ModelConfig


class Attention(nn.Module):
    """Projections, optional norm of queries and keys (Qwen3), rotary embedding, attention, output projection."""

    def __init__(self, context: LayerContext, model_config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        group, head_size = context.tensor_group, model_config.head_size
        first_head, end_head = shard_range(model_config.num_heads, group.size, group.rank)
        first_kv_head, end_kv_head = kv_head_range(model_config.num_kv_heads, group.size, group.rank)
        self.num_heads, self.num_kv_heads, self.head_size = (
            end_head - first_head,
            end_kv_head - first_kv_head,
            head_size,
        )
        self._sizes = [heads * head_size for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        self.window, self.scale = model_config.sliding_windows[layer_index], head_size**-0.5
        self._kernels, self._backend = context.kernels, context.attention
        self.qkv_proj = qkv_linear(
            context,
            model_config.hidden_size,
            model_config.num_heads,
            model_config.num_kv_heads,
            head_size,
            model_config.has_qkv_bias,
        )
        self.o_proj = RowParallelLinear(
            context,
            (first_head * head_size, end_head * head_size),
            model_config.num_heads * head_size,
            model_config.hidden_size,
            model_config.has_output_bias,
        )
        self.q_norm = RMSNorm(context, head_size, model_config.rms_norm_eps) if model_config.has_qk_norm else None
        self.k_norm = RMSNorm(context, head_size, model_config.rms_norm_eps) if model_config.has_qk_norm else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        is_fused: bool = True,
    ) -> Tensor:
        """[T, hidden] -> [T, hidden], this rank's part; writes this step's keys and values before it reads."""
        projected = self.qkv_proj(x)
        attended = None
        if is_fused and self.q_norm is None:
            attended = self._backend.attend_projected(
                projected, (cos, sin), layer_cache, metadata, self.num_heads, self.scale, self.window
            )
        if attended is None:
            attended = self._attend(projected, cos, sin, layer_cache, metadata)
        output: Tensor = self.o_proj(attended)
        return output

    def _attend(
        self, projected: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Step by step: [T, (Hq + 2 * Hkv) * D] -> [T, Hq * D]."""
        parts = projected.split_with_sizes(self._sizes, dim=-1)
        query, key, value = (part.view(len(projected), -1, self.head_size) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self._kernels.rotate(query, cos, sin), self._kernels.rotate(key, cos, sin)
        self._backend.write(key, value, layer_cache, metadata)
        return self._backend.attend(query, layer_cache, metadata, self.scale, self.window).view(len(projected), -1)
