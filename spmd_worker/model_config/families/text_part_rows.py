"""Rows of the table: checkpoints that take images beside text, of which the text part is one of several families.

See `table.py`. Names of tensors are those of the hub's files, which transformers writes too.
"""

from dataclasses import replace
from typing import Any, Final

from spmd_worker.model_config.families.family import Family, Names

LANGUAGE_MODEL: Final = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.image_newline": "image_newline",
    "lm_head.": "language_model.lm_head.",
}
"""Beginnings of names since transformers 4.52, by those before."""
OTHER_INPUT: Final = ("vision_tower.", "multi_modal_projector.")
_LLAMA_SIZES: Final = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_QWEN_SIZES: Final = {**_LLAMA_SIZES, "vocab_size": 151936, "intermediate_size": 22016}
_SIZES: Final[dict[str, dict[str, Any]]] = {
    "llama": _LLAMA_SIZES,
    "mistral": {**_LLAMA_SIZES, "intermediate_size": 14336},
    "qwen2": _QWEN_SIZES,
    "qwen3": _QWEN_SIZES,
}
"""Of the classes, which files of these wrappers leave out."""
_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def inside(names: Names, prefix: str) -> Names:
    """The names of a model that is a part of another."""
    tops = {name: prefix + getattr(names, name) for name in ("embedding", "layers", "norm", "head")}
    return replace(names, **tops)  # type: ignore[arg-type]  # texts, all of them


def _text_of(models: str, names: Names, *kinds: str, tie_of_text: str = "never") -> Family:
    """A wrapper of these kinds of text, the first where a file says none."""
    return Family(
        models=models,
        names=names,
        is_text_part=True,
        tie_of_text=tie_of_text,
        text_families={kind: _ARCHITECTURES[kind] for kind in kinds},
        text_defaults={kind: _SIZES[kind] for kind in kinds},
    )


_LLAVA_NAMES: Final = replace(
    inside(Names(), "language_model."), ignored_prefixes=(*OTHER_INPUT, "image_newline"), aliases=LANGUAGE_MODEL
)
_SMOLVLM_NAMES: Final = Names(
    embedding="model.text_model.embed_tokens",
    layers="model.text_model.layers",
    norm="model.text_model.norm",
    ignored_prefixes=("model.vision_model.", "model.connector."),
)

TEXT_PART_ROWS: Final[dict[str, Family]] = {
    "Mistral3ForConditionalGeneration": Family(
        models="Mistral Small 3.1 and 3.2, Ministral 3, the text",
        names=replace(inside(Names(), "language_model."), ignored_prefixes=OTHER_INPUT, aliases=LANGUAGE_MODEL),
        is_text_part=True,
        tie_of_text="else",
        text_families={"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    ),
    "LlavaForConditionalGeneration": _text_of(
        "LLaVA 1.5, Pixtral, the text", _LLAVA_NAMES, "llama", "mistral", "qwen2", "qwen3", tie_of_text="also"
    ),
    "LlavaNextForConditionalGeneration": _text_of(
        "LLaVA 1.6 (NeXT), the text", _LLAVA_NAMES, "llama", "mistral", "qwen2", "qwen3"
    ),
    "LlavaOnevisionForConditionalGeneration": _text_of(
        "LLaVA-OneVision, the text", _LLAVA_NAMES, "qwen2", "qwen3", "llama", tie_of_text="also"
    ),
    "VipLlavaForConditionalGeneration": _text_of("ViP-LLaVA, the text", _LLAVA_NAMES, "llama", "mistral"),
    "InternVLForConditionalGeneration": _text_of(
        "InternVL 3 and 3.5, dense, in transformers' form, the text",
        _LLAVA_NAMES,
        "qwen2",
        "qwen3",
        "llama",
        tie_of_text="else",
    ),
    "Idefics3ForConditionalGeneration": _text_of("Idefics3, the text", _SMOLVLM_NAMES, "llama"),
    "SmolVLMForConditionalGeneration": _text_of("SmolVLM, SmolVLM2, the text", _SMOLVLM_NAMES, "llama"),
}
