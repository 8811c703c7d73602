"""Parts of a layer that mix tokens, by `LayerConfig.mixer`: one place that knows every kind.

Each is a module `forward(x, step)` from [T, hidden] and a `LayerStep` to this rank's part of [T, hidden]. A layer with
several adds their outputs.
"""

from typing import Final

from torch import nn

from spmd_worker.model.layers.attention import Attention
from spmd_worker.model.layers.compressed_attention import CompressedAttention
from spmd_worker.model.layers.delta_net import DeltaNet
from spmd_worker.model.layers.latent_attention import LatentAttention
from spmd_worker.model.layers.mamba import Mamba
from spmd_worker.model.layers.mamba1 import Mamba1
from spmd_worker.model.layers.short_conv import ShortConv

MIXERS: Final[dict[str, tuple[tuple[str, type[nn.Module]], ...]]] = {
    "attention": (("self_attn", Attention),),
    "attention_and_mamba": (("self_attn", Attention), ("mamba", Mamba)),
    "compressed": (("self_attn", CompressedAttention),),
    "latent": (("self_attn", LatentAttention),),
    "conv": (("conv", ShortConv),),
    "delta": (("linear_attn", DeltaNet),),
    "mamba1": (("mamba", Mamba1),),
    "mamba": (("mamba", Mamba),),
    "none": (),
}
"""(Name in the layer, class) of the modules of each kind. The names are those of most checkpoints."""
