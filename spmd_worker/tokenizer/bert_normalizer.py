"""Normalizer of BERT's tokenizer classes, which transformers makes from `do_lower_case`, `strip_accents` and
`tokenize_chinese_chars` of tokenizer_config.json, whatever tokenizer.json has.
"""

from collections.abc import Mapping
from typing import Any, Final

_CLASSES: Final = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
_MODELS: Final = ("bert",)
"""Supported model types to which AutoTokenizer assigns such a class if none is named."""
BERT_NORMALIZER: Final = "BertNormalizer"


def bert_normalizer(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any] | None:
    """The normalizer as in tokenizer.json; None for another tokenizer class. `settings` is tokenizer_config.json,
    `model` config.json. Raises ValueError.
    """
    named = settings.get("tokenizer_class") or model.get("tokenizer_class")
    is_bert = named.removesuffix("Fast") in _CLASSES if isinstance(named, str) else model.get("model_type") in _MODELS
    if not is_bert:
        return None
    for key, value in settings.items():
        allowed = {"do_lower_case": bool, "tokenize_chinese_chars": bool, "strip_accents": bool | None}.get(key)
        if allowed is not None and not isinstance(value, allowed):
            raise ValueError(f"{key}={str(value)[:80]!r} must be true or false")
    return {
        "type": BERT_NORMALIZER,
        "clean_text": True,
        "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
        "strip_accents": settings.get("strip_accents"),
        "lowercase": settings.get("do_lower_case", True),
    }
