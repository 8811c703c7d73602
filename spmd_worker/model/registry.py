"""Architecture name -> model class.

The families' differences are data (`model_config/families/`), so today one class builds them all.
"""

from typing import Final

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model_config.model_config import ENCODERS, FAMILIES, ModelConfig
from spmd_worker.ranks.topology import Stage, whole_model

MODEL_CLASSES: Final[dict[str, type[DecoderForCausalLM]]] = dict.fromkeys((*FAMILIES, *ENCODERS), DecoderForCausalLM)


def build_model(
    context: LayerContext, model_config: ModelConfig, stage: Stage | None = None, *, allows_nonfinite: bool = False
) -> DecoderForCausalLM:
    """The model of `model_config`, or a stage of it, with uninitialised parameters. `allows_nonfinite`: new weights may
    be NaN or infinite.

    `read_model_files` has refused unknown architectures.
    """
    model_class, stage = MODEL_CLASSES[model_config.architecture], stage or whole_model(model_config)
    return model_class(context, model_config, stage, allows_nonfinite=allows_nonfinite).eval()
