"""Parts of a tokenizer.json of byte-level BPE, and the expressions by which published models split a text into words.

Shared by what makes one: of a GGUF file's metadata, and of files of ranks (`tokenizer/byte_ranks.py`).
"""

from typing import Any, Final

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s+(?!\S)|\s+"
CL100K: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
_CASED: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
QWEN2: Final = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35: Final = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
TEKKEN: Final = "|".join([*_CASED, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", _SPACES])
O200K: Final = "|".join(
    [
        *(f"{each}{_CONTRACTIONS}?" for each in _CASED),
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", _SPACES),
    ]
)
KIMI: Final = "|".join(
    [
        r"[\p{Han}]+",
        *(f"{each}{_CONTRACTIONS}?".replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]") for each in _CASED),
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", _SPACES),
    ]
)
"""Kimi's: runs of Han are words, whatever is before them, and in no other word."""


def _byte_characters() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {chr(value if value in printable else next(others)): value for value in range(256)}


BYTES: Final = _byte_characters()
"""GPT-2's table: printable character -> the byte it encodes."""
_CHARACTERS: Final = {value: character for character, value in BYTES.items()}
SEQUENCE: Final = "sequence".capitalize()
"""The library's word for steps, and for a text between special tokens."""


def byte_text(token: bytes) -> str:
    """A token's bytes in characters of GPT-2's table."""
    return token.decode("latin-1").translate(_CHARACTERS)


def byte_step(*, use_regex: bool) -> dict[str, Any]:
    """The pre-tokenizer or decoder between bytes and characters. `use_regex`: splits a text as GPT-2 does."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def split_step(pattern: str) -> dict[str, Any]:
    """The pre-tokenizer that splits a text into the matches of a regular expression and what is between them."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def bpe_model(vocabulary: dict[str, int], merges: list[list[str]], **changed: Any) -> dict[str, Any]:
    """The model: text -> id, pairs of texts in the order of merging, and other values of its settings."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **changed,
        "vocab": vocabulary,
        "merges": merges,
    }


def added_token(number: int, content: str, **flags: bool) -> dict[str, Any]:
    """An added token: special, and matched as it is, unless `flags` say otherwise."""
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": content, **usual, **flags}


def around(first: str | None, last: str | None, ids: dict[str, int]) -> dict[str, Any] | None:
    """The post-processor that puts tokens before and behind a text; None for none. `ids`: those of the tokens."""
    used = [each for each in (first, last) if each is not None]
    if not used:
        return None

    def one(sequence: str, type_id: int) -> list[dict[str, Any]]:
        before, after = (
            [{"SpecialToken": {"id": each, "type_id": type_id}}] if each is not None else [] for each in (first, last)
        )
        return [*before, {SEQUENCE: {"id": sequence, "type_id": type_id}}, *after]

    return {
        "type": "TemplateProcessing",
        "single": one("A", 0),
        "pair": [*one("A", 0), *one("B", 1)],
        "special_tokens": {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in used},
    }
