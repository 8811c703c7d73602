"""A step as one layer sees it. The decoder fills in what its layers have; each module reads what it computes with.

T: tokens of the step; P: numbers of a layer.
"""

from dataclasses import dataclass

from torch import Tensor

from kv_cache.layer_states import LayerStates
from spmd_worker.model.layers.distances import StepDistances
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.layers.run_indexer import StepRuns
from spmd_worker.ops.attention.metadata import AttentionMetadata, WantedTokens
from spmd_worker.ops.kernels.adapters import StepAdapters


@dataclass(slots=True)
class LayerStep:
    """All tokens of a step, in one layer."""

    ropes: tuple[Angles, ...]
    """Angles of each rope of the model."""
    cache: Tensor | None
    """The layer's blocks; None if it keeps no keys."""
    metadata: AttentionMetadata
    wanted: WantedTokens | None = None
    """Tokens whose outputs are computed, if the layer `supports_wanted`; None: all."""
    states: LayerStates | None = None
    adapters: StepAdapters | None = None
    is_fused: bool = True
    """Whether attention and gates may be one call with the GEMM before."""
    entries: tuple[Tensor | None, AttentionMetadata] | None = None
    """Cache of compressed entries, and the metadata of its blocks, if it is not the end of `cache`."""
    distance_bias: Tensor | None = None
    """Bias of all layers, if they share one: `AttentionBackend.attend`."""
    distances: StepDistances | None = None
    """Embedded distances, if attention multiplies by them."""
    seen: AttentionMetadata | None = None
    """`CrossStep.seen`, if layers attend to an encoder's rows."""
    inputs: Tensor | None = None
    """[T, P], inputs of the layer's own."""
    token_ids: Tensor | None = None
    """int64 [T], for layers that read ids."""
    runs: StepRuns | None = None
    """Runs that end in the step, if layers choose keys by runs."""
    routes: list[Tensor] | None = None
    """A layer with experts appends those of each token: `Router`."""
    choice: list[Tensor] | None = None
    """The last choice of keys (`ChosenKeys.choose`), which a layer with an indexer replaces."""
    carried: list[Tensor] | None = None
    """The output of experts between the layer that computes it and the one that adds it (`shortcut_layer`)."""

    @property
    def key_cache(self) -> Tensor:
        """`cache` of a layer that keeps keys."""
        assert self.cache is not None, "the layer keeps keys"
        return self.cache
