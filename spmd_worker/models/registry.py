"""Architecture name -> model class.

The families' differences are data (`model_config/families/`), so today one class builds them all.
"""

from typing import Final

from spmd_worker.distributed.topology import Stage, whole_model
from spmd_worker.layers.context import LayerContext
from spmd_worker.model_config.model_config import ENCODERS, FAMILIES, ModelConfig
from spmd_worker.models.decoder import DecoderForCausalLM

MODEL_CLASSES: Final[dict[str, type[DecoderForCausalLM]]] = dict.fromkeys((*FAMILIES, *ENCODERS), DecoderForCausalLM)


def build_model(context: LayerContext, model_config: ModelConfig, stage: Stage | None = None) -> DecoderForCausalLM:
    """The model of `model_config`, or a stage of it, with uninitialised parameters.

    `read_model_files` has refused unknown architectures.
    """
    return MODEL_CLASSES[model_config.architecture](context, model_config, stage or whole_model(model_config)).eval()
