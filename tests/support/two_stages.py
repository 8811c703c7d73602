"""Two stages of a pipeline as one model, in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks.topology import Stage


class TwoStages:
    """Of the model in `folder`, the first layer in the first; `new_model` makes a stage. As much of a model as
    `our_model.prompt_logits` uses.
    """

    def __init__(self, folder: Path, new_model: Callable[..., DecoderForCausalLM]) -> None:
        self.model_config = read_model_files(folder).model_config
        self._cut, end = self.model_config.layers_in_one, self.model_config.num_layers
        first = Stage(0, self._cut, is_first=True, is_last=False)
        stages = (first, Stage(self._cut, end, is_first=False, is_last=True))
        self._stages = [new_model(folder, stage=stage) for stage in stages]
        self.model, self.lm_head = self._stages[0].model, self._stages[1].lm_head
        self.compute_logits = self._stages[1].compute_logits

    def __call__(self, *arguments: Any, is_fused: bool, adapters: None = None) -> Tensor:
        assert adapters is None, "these stages have none"
        *tokens, cache, metadata = arguments
        incoming = self._stages[0](*tokens, cache[: self._cut], metadata)
        return self._stages[1](*tokens, cache[self._cut :], metadata, incoming)
