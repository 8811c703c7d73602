"""`logit_scale` of models whose class in transformers leaves it out: Aya Vision and Command A Vision."""

from typing import Any

_FAMILIES = ("aya_vision", "cohere2_vision")


def scale_logits(model: Any) -> Any:
    """The model of transformers, whose logits are scaled as those of its text's own class are."""
    if model.config.model_type in _FAMILIES:
        model.lm_head.register_forward_hook(lambda _, given, logits: logits * model.config.text_config.logit_scale)
    return model
