"""Lower bound on the number of tokens of a text, without encoding it.

A token covers at most as many characters as the longest entry of the vocabulary has, so a text of n characters has at
least n / longest tokens (vLLM's `max_chars_per_token`). That holds only if normalizer, pre-tokenizer and model drop
nothing and no unknown token covers a run, so the characters that are counted depend on the tokenizer's components: all,
all but white space, or only ASCII letters and digits. Models that encode a long word as one unknown token (WordPiece,
WordLevel) give one token a word. Components that are not listed here give no bound.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import tokenizers

_MAX_COMPOSED: Final = 4
"""Maximum number of characters that NFC and NFKC compose into one: the longest canonical decomposition. Never two ASCII
ones.
"""

_LETTERS_AND_DIGITS: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_WORD: Final = re.compile(" [A-Za-z0-9]")

_SPACE_PATTERNS: Final = (r"\s+", " {2,}", "[ ]{2,}", r"\s{2,}", r"[\n\r\t ]+", "\n", "\r\n|\r", " ")
"""Regular expressions that match white space only."""
_WORD_PATTERNS: Final = (
    r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"\w+|[^\w\s]+",
)
"""Regular expressions that match everything but white space: CLIP, Whitespace."""


class Counted(IntEnum):
    """Characters of a text that are certain to be covered by tokens."""

    NONE = 0
    WORDS = 1
    """One token for each ASCII letter or digit after a space."""
    LETTERS_AND_DIGITS = 2
    """The ASCII ones, less one for each other character: a combining mark joins the character before it."""
    COMPOSED = 3
    """All, of which NFC or NFKC may make fewer."""
    CHARACTERS = 4
    BYTES = 5
    """UTF-8 bytes."""


@dataclass(frozen=True, slots=True)
class TokenBound:
    """One token covers at most `longest` of the `counted` characters."""

    counted: Counted
    longest: int = 1
    letters: bytes = _LETTERS_AND_DIGITS
    """Those ASCII letters and digits that the vocabulary has."""
    drops_space: bool = False
    """White space next to an added token belongs to it (`lstrip`, `rstrip`), however much it is."""

    def min_num_tokens(self, text: str) -> int:
        """Lower bound of the number of tokens, without special ones; 0 if unknown. Takes milliseconds a MB."""
        return -(-self._count(text) // self.longest)

    def _count(self, text: str) -> int:
        match self.counted:
            case Counted.NONE:
                return 0
            case Counted.WORDS:
                return sum(1 for _ in _WORD.finditer(text))
            case Counted.LETTERS_AND_DIGITS:
                ascii_text = _ascii(text)
                num_letters = len(ascii_text) - len(ascii_text.translate(None, self.letters))
                return max(0, num_letters - (len(text) - len(ascii_text)))
        if self.drops_space:
            text = "".join(text.split())
        if self.counted is Counted.COMPOSED:
            return max(len(_ascii(text)), len(text) // _MAX_COMPOSED)
        return len(text.encode("utf-8", "surrogatepass")) if self.counted is Counted.BYTES else len(text)


UNKNOWN: Final = TokenBound(Counted.NONE)


def token_bound(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int] | None = None) -> TokenBound:
    """The bound of a tokenizer without truncation, derived from its components. `vocabulary` is the model's, without
    added tokens, where the caller has it: a copy takes time.
    """
    normalizer, pre_tokenizer = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
    if not all(map(_keeps_sequences, _steps(backend.post_processor))):
        return UNKNOWN
    vocabulary = backend.get_vocab(with_added_tokens=False) if vocabulary is None else vocabulary
    if len(set(vocabulary.values())) < len(vocabulary):
        # Two texts with one id: either may be the one covered.
        return UNKNOWN
    steps = (*map(_normalized, normalizer), *map(_pre_tokenized, pre_tokenizer))
    counted = min(steps, default=Counted.CHARACTERS)
    if counted is Counted.NONE:
        return UNKNOWN
    added = backend.get_added_tokens_decoder().values()
    contents = [*(token.content for token in added), *(_through(backend, token.content) for token in added)]
    letters = bytes(each for each in _LETTERS_AND_DIGITS if _has_letter(backend, vocabulary, chr(each)))
    is_byte_level = any(step.get("type") == "ByteLevel" for step in (*normalizer, *pre_tokenizer))
    if isinstance(backend.model, tokenizers.models.WordPiece | tokenizers.models.WordLevel):
        splits = any(step.get("type") in _WORD_SPLITTERS for step in pre_tokenizer)
        splits = splits and all(step.get("type") != "Replace" for step in normalizer)
        keeps = len(_through(backend, "a b").split()) == 2 and letters == _LETTERS_AND_DIGITS
        words = max((content.count(" ") for content in contents), default=0) + 1
        return TokenBound(Counted.WORDS, words) if splits and keeps else UNKNOWN
    if not _covers_all(backend.model, vocabulary, is_byte_level):
        counted = Counted.LETTERS_AND_DIGITS
    elif counted is Counted.CHARACTERS and is_byte_level and not normalizer:
        counted = Counted.BYTES
    longest = max((1, *map(len, vocabulary), *(len(content.encode()) for content in contents)))
    return TokenBound(counted, longest, letters, any(token.lstrip or token.rstrip for token in added))


def _ascii(text: str) -> bytes:
    return text.encode("ascii", "ignore")


_WORD_SPLITTERS: Final = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")


def _steps(component: Any) -> list[Mapping[str, Any]]:
    """Parts of a normalizer, pre-tokenizer or post-processor in order, as in tokenizer.json."""
    return [] if component is None else _flat(json.loads(component.__getstate__()))


def _flat(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    parts = next((step[key] for key in ("normalizers", "pretokenizers", "processors") if key in step), None)
    return [step] if parts is None else [flat for part in parts for flat in _flat(part)]


_NORMALIZED: Final = {
    **dict.fromkeys(("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"), Counted.CHARACTERS),
    **dict.fromkeys(("NFC", "NFKC"), Counted.COMPOSED),
    **dict.fromkeys(("Precompiled", "Strip", "StripAccents", "BertNormalizer", "Nmt"), Counted.LETTERS_AND_DIGITS),
}
_PRE_TOKENIZED: Final = {
    **dict.fromkeys(("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"), Counted.CHARACTERS),
    **dict.fromkeys(("BertPreTokenizer", "Whitespace", "WhitespaceSplit"), Counted.LETTERS_AND_DIGITS),
}


def _normalized(step: Mapping[str, Any]) -> Counted:
    return _replaced(step) if step.get("type") == "Replace" else _NORMALIZED.get(str(step.get("type")), Counted.NONE)


def _replaced(step: Mapping[str, Any]) -> Counted:
    pattern, content = step["pattern"], str(step["content"])
    if not content.replace("\u2581", "").isascii():
        # It may be a mark that joins the character before it.
        return Counted.NONE
    text = pattern.get("String")
    if text is None:
        return Counted.LETTERS_AND_DIGITS if pattern.get("Regex") in _SPACE_PATTERNS else Counted.NONE
    if not text or _has_letters(text):
        return Counted.NONE
    return Counted.CHARACTERS if len(content) >= len(text) else Counted.LETTERS_AND_DIGITS


def _pre_tokenized(step: Mapping[str, Any]) -> Counted:
    match step.get("type"):
        case "CharDelimiterSplit":
            return Counted.NONE if _has_letters(str(step["delimiter"])) else Counted.LETTERS_AND_DIGITS
        case "Punctuation":
            return Counted.LETTERS_AND_DIGITS if step["behavior"] == "Removed" else Counted.CHARACTERS
        case "Split":
            return Counted.CHARACTERS if step["behavior"] != "Removed" else _removed(step)
    return _PRE_TOKENIZED.get(str(step.get("type")), Counted.NONE)


def _removed(step: Mapping[str, Any]) -> Counted:
    text, regex = step["pattern"].get("String"), step["pattern"].get("Regex")
    if step["invert"]:
        return Counted.LETTERS_AND_DIGITS if regex in _WORD_PATTERNS else Counted.NONE
    is_space = regex in _SPACE_PATTERNS if text is None else bool(text) and not _has_letters(text)
    return Counted.LETTERS_AND_DIGITS if is_space else Counted.NONE


def _has_letters(text: str) -> bool:
    """Whether it has an ASCII letter or digit, or a character that could normalize to one."""
    return not text.isascii() or any(each in _LETTERS_AND_DIGITS for each in text.encode("ascii"))


def _keeps_sequences(step: Mapping[str, Any]) -> bool:
    if step.get("type") != "TemplateProcessing":
        return step.get("type") in ("BertProcessing", "ByteLevel", "RobertaProcessing")
    single, pair = (
        [value["id"] for part in step[key] for kind, value in part.items() if kind != "SpecialToken"]
        for key in ("single", "pair")
    )
    return "A" in single and "A" in pair and "B" in pair


def _through(backend: tokenizers.Tokenizer, text: str) -> str:
    return text if backend.normalizer is None else str(backend.normalizer.normalize_str(text))


def _has_letter(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int], letter: str) -> bool:
    """Whether a letter or digit, at any position, becomes at least one character that the model has."""
    prefix = getattr(backend.model, "continuing_subword_prefix", None) or ""
    suffix = getattr(backend.model, "end_of_word_suffix", None) or ""
    is_by_word = isinstance(backend.model, tokenizers.models.WordPiece | tokenizers.models.WordLevel)
    found = [each for each in _through(backend, letter) if each.isascii() and each.isalnum()]
    forms = {start + each + end for each in found for start in ("", prefix) for end in ("", suffix)}
    return bool(found) and (is_by_word or all(form in vocabulary for form in forms))


def _covers_all(model: Any, vocabulary: Mapping[str, int], is_byte_level: bool) -> bool:
    """Whether every character becomes a token or part of one: none is dropped or joined with others as unknown."""
    if not isinstance(model, tokenizers.models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if model.byte_fallback and all(f"<0x{value:02X}>" in vocabulary for value in range(256)):
        return True
    if is_byte_level and all(each in vocabulary for each in tokenizers.pre_tokenizers.ByteLevel.alphabet()):
        return True
    return model.unk_token is not None and not model.fuse_unk
