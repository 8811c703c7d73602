"""Source languages of translators: the token of a language stands before a text or after its end, by the class of the
tokenizer. transformers goes by the class too, whatever tokenizer.json has: files of older releases have it elsewhere.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import processors

from spmd_worker.base.config.plain_values import shown

_CLASSES: Final = {
    "NllbTokenizer": ("eng_Latn", True),
    "MBart50Tokenizer": ("en_XX", True),
    "MBartTokenizer": ("en_XX", False),
    "M2M100Tokenizer": ("en", True),
}
"""Class -> its language if none is named, and whether the token comes first."""
_CLASS_OF_MODEL: Final = {"mbart": "MBartTokenizer", "m2m_100": "M2M100Tokenizer"}
"""Classes that AutoTokenizer assigns if none is named."""
_END: Final = "</s>"

TokenId = Callable[[str], int | None]
"""Text of an added token -> its id, None for others."""


@dataclass(frozen=True, slots=True)
class SourceLanguage:
    """The language of texts that name none, and where its token stands."""

    default: str
    is_first: bool
    end: str = _END

    def around(self, language: str, token_id: TokenId) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids before and after a text in the language. Raises ValueError for an unknown one."""
        found, end = language_id(language, token_id), token_id(self.end)
        if found is None or end is None:
            raise unknown_language("source_language", language)
        return ((found,), (end,)) if self.is_first else ((), (end, found))

    def processor(self, token_id: TokenId) -> dict[str, Any] | None:
        """The `post_processor` of tokenizer.json for texts in the default language; None if it has no token."""
        token = next((each for each in token_names(self.default) if token_id(each) is not None), None)
        if token is None or token_id(self.end) is None:
            return None
        single, pair = [
            [token, *texts, self.end] if self.is_first else [*texts, self.end, token]
            for texts in (["$A"], ["$A", "$B"])
        ]
        special = [(each, token_id(each)) for each in (self.end, token)]
        made = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
        return dict(json.loads(made.__getstate__()))


def source_language(settings: Mapping[str, Any], model: Mapping[str, Any]) -> SourceLanguage | None:
    """The rule of a tokenizer's class; None for classes without source languages. `settings` are the contents of
    tokenizer_config.json, `model` those of config.json.
    """
    named = (
        settings.get("tokenizer_class")
        or model.get("tokenizer_class")
        or _CLASS_OF_MODEL.get(str(model.get("model_type")))
    )
    known = _CLASSES.get(named.removesuffix("Fast")) if isinstance(named, str) else None
    if known is None:
        return None
    default, is_first = known
    given = settings.get("src_lang")
    is_older = named == "NllbTokenizer" and settings.get("legacy_behaviour") is True
    end = settings.get("eos_token")
    return SourceLanguage(
        given if isinstance(given, str) and given else default,
        is_first and not is_older,
        end if isinstance(end, str) and end else _END,
    )


def has_languages(added: Mapping[str, int]) -> bool:
    """Whether a tokenizer has a token of one of the classes' own languages among its added ones."""
    return any(name in added for default, _ in _CLASSES.values() for name in token_names(default))


def token_names(language: str) -> tuple[str, str]:
    """Tokens that may stand for a language: `fra_Latn`, `fr_XX`, or `__fr__`."""
    return language, f"__{language}__"


def language_id(language: str, token_id: TokenId) -> int | None:
    """Id of the language's token, None for an unknown language."""
    return next((each for name in token_names(language) if (each := token_id(name)) is not None), None)


def unknown_language(key: str, language: str) -> ValueError:
    """The error of a language that the tokenizer has no token for."""
    return ValueError(
        f"{key}={shown(language)} is not a language token of this model's tokenizer: give one as it is written there, "
        f"such as fra_Latn, fr_XX or fr"
    )
