"""Architecture name -> model class.

Knows which class builds which architecture. The families' differences are data (`model_shape.FAMILIES`), so today one
class builds them all.
"""

from typing import Final

from spmd_worker.distributed.topology import Stage, whole_model
from spmd_worker.layers.context import LayerContext
from spmd_worker.model_config.model_config import FAMILIES, ModelShape
from spmd_worker.models.decoder import DecoderForCausalLM

MODEL_CLASSES: Final[dict[str, type[DecoderForCausalLM]]] = dict.fromkeys(FAMILIES, DecoderForCausalLM)


def build_model(context: LayerContext, shape: ModelShape, stage: Stage | None = None) -> DecoderForCausalLM:
    """The model of `shape`, or a stage of it, with uninitialised parameters.

    `read_model_shape` has refused unknown architectures.
    """
    return MODEL_CLASSES[shape.architecture](context, shape, stage or whole_model(shape)).eval()
