"""Builds a model from its config: one class for all families, which differ in data (`model_config/families/`)."""

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ranks.topology import Stage, complete_model


def build_model(
    context: LayerContext, model_config: ModelConfig, stage: Stage | None = None, *, allows_nonfinite: bool = False
) -> DecoderForCausalLM:
    """The model, or a stage of it, uninitialised. `allows_nonfinite`: weights may be NaN or infinite."""
    stage = stage or complete_model(model_config)
    return DecoderForCausalLM(context, model_config, stage, allows_nonfinite=allows_nonfinite).eval()
