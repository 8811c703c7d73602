"""Our model of a hybrid with Mamba2 without engine or scheduler: `delta_runs.HybridRun` with its states."""

import torch
from delta_runs import HybridRun

from kv_cache.layer_states import LayerStates
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.mamba import Mamba


def new_mamba_states(model: DecoderForCausalLM, num_slots: int) -> list[LayerStates | None]:
    """NaN in every slot: a state that a row does not own shows."""
    states: list[LayerStates | None] = []
    for layer in model.model.layers:
        mixer = getattr(layer, "mamba", None)
        if not isinstance(mixer, Mamba):
            states.append(None)
            continue
        config = mixer.config
        shape = (config.num_heads, config.head_size, config.state_size)
        tail = (config.kernel_size - 1, config.num_channels)
        nan = torch.full((num_slots, *tail), torch.nan, dtype=model.model.dtype)
        states.append(LayerStates(torch.full((num_slots, *shape), torch.nan), nan))
    return states


def mamba_run(rows: list[list[int]], *models: DecoderForCausalLM) -> HybridRun:
    """Rows in a cache and slots of their own, through the stages of one model."""
    return HybridRun(models, rows, [new_mamba_states(model, len(rows)) for model in models])
