"""Checkpoint names of draft heads: of a layer behind the target's last, of Qwen's beside the model's layers, and of an
EAGLE-3 head's own files.

All other tensors of the files are the target's, or derived, and are skipped.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final

from spmd_worker.model.layers.weight_slice import ModelTensor, WeightSlice
from spmd_worker.model.weights.checkpoint_names import CheckpointNames
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ranks.topology import Stage, complete_model

_MIDLAYER: Final = "midlayer."
_MIDLAYER_ALIASES: Final = ("layers.0.", "model.layers.0.", "model.midlayer.")
_TOPS: Final = ("embed_tokens", "fc", "norm", "lm_head")
_QWEN_LAYER: Final = "mtp.layers.0."
_QWEN_TOPS: Final = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


class DraftNames(CheckpointNames):
    """Names of a head of one layer. `is_needed` has the tensors of the head, by the table's name."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__(model_config, complete_model(model_config))
        # The head of the target is not this one's.
        self.tied = None
        self._needed: frozenset[str] = frozenset()

    def tensors(self, stage_slices: Callable[[Stage], Sequence[WeightSlice]]) -> dict[str, ModelTensor]:
        pieces = stage_slices(complete_model(self._model_config))
        found = {piece.checkpoint_name: piece.tensor for piece in pieces}
        self._needed = frozenset(found)
        return found

    def is_derived(self, name: str) -> bool:
        return name not in self._needed

    def embedding_in(self, files: Collection[str]) -> tuple[str, str] | None:
        """A head's embedding has one name."""
        del files
        return None


class EmbeddingNames(DraftNames):
    """The name of the target's embedding in its own files."""

    def embedding_in(self, files: Collection[str]) -> tuple[str, str] | None:
        return CheckpointNames.embedding_in(self, files)

    def _is_known(self, name: str) -> bool:
        # Where all names are derived, none would get the prefix that files may leave out.
        return self.has_module(name) or self._is_of_tower(name) or CheckpointNames.is_derived(self, name)


class QwenNames(DraftNames):
    """Names of a head beside the layers of Qwen3-Next or Qwen3.5. The embedding has the target's name."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__(model_config)
        tops = {f"model.{top}": f"mtp.{top}" for top in _QWEN_TOPS}
        self._tops |= tops
        self._top_modules |= set(tops.values())

    def _layer_prefix(self, index: int) -> str:
        assert index == 0, index
        return _QWEN_LAYER

    def _layer_of(self, name: str) -> tuple[int, str] | None:
        return (0, name.removeprefix(_QWEN_LAYER)) if name.startswith(_QWEN_LAYER) else None


class EagleNames(DraftNames):
    """Names in the files of EAGLE-3's authors, and of those who name the layer as a model's first."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__(model_config)
        self._tops = {("lm_head" if top == "lm_head" else f"model.{top}"): top for top in _TOPS}
        self._top_modules = set(_TOPS)

    def _layer_prefix(self, index: int) -> str:
        assert index == 0, index
        return _MIDLAYER

    def _layer_of(self, name: str) -> tuple[int, str] | None:
        return (0, name.removeprefix(_MIDLAYER)) if name.startswith(_MIDLAYER) else None

    def _table_name(self, given_name: str) -> str:
        for alias in _MIDLAYER_ALIASES:
            if given_name.startswith(alias):
                return _MIDLAYER + given_name.removeprefix(alias)
        module = given_name.removeprefix("model.").rpartition(".")[0]
        return given_name.removeprefix("model.") if module in _TOPS else given_name
