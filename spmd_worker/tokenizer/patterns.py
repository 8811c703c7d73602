"""Checks whether matching a tokenizer's regular expression takes time linear in the text.

A backtracking engine takes time quadratic in the text, or worse, where an alternative can fail after it has consumed an
unbounded run. An alternative is known to be linear when it is a sequence of single characters and classes of which all
after the first unbounded one may be empty: from there on it cannot fail. Before it there may be few choices. A few
published ones differ, and are linear together with another alternative, which consumes the characters they give back.
"""

import re
from typing import Final

_MAX_CHARACTERS: Final = 4000
_MAX_ALTERNATIVES: Final = 64
_MAX_CHOICES: Final = 100
"""Ways to match the part before the first unbounded atom, each of which may be tried at each character."""

_ATOM: Final = re.compile(
    r"(?:\[\^?(?:[^\[\]\\]|\\[pP]\{\^?\w+\}|\\[^pPxuoOcgkQEdDhHRXNyY]|\\[dD])+\]"
    r"|\\[pP]\{\^?\w+\}|\\[sSdDwWrnt]|\\[^\w\s]|[^\\\[\](){}|*+?.^$])"
    r"(?P<quantifier>\+\+|\?\+|\*\+|\+|\?|\*|\{\d{1,2}(?:,\d{0,2})?\})?"
)

_TOKEN: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
"""An escape, a class or a character."""

_CONTRACTIONS: Final = (
    *("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"),
    *("'(?i:[sdmt]|ll|ve|re)", "'(?:[sdmt]|ll|ve|re)", "(?i:[sdmt]|ll|ve|re)"),
)
_UPPER_THEN_LOWER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"


def _without_han(alternative: str) -> str:
    """Kimi's form of one with two classes of letters: the same without characters of Han in both."""
    return alternative.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")


_CASED: Final = [(_UPPER_THEN_LOWER, _UPPER), (_without_han(_UPPER_THEN_LOWER), _without_han(_UPPER))]
_LINEAR_WITH: Final = {
    **dict.fromkeys((*_CONTRACTIONS, r"\s+(?!\S)", " ?[^(\\s|[.,!?…。，、।۔،])]+"), ""),
    **dict.fromkeys((r"\s*[\r\n]+", r"\s*[\r\n]", r"\s*\r?\n"), r"\s+"),
    _UPPER_THEN_LOWER: _UPPER,
    **{f"{lower}{each}?": f"{upper}{each}?" for lower, upper in _CASED for each in _CONTRACTIONS},
    **{f"{upper}{each}?": "" for _, upper in _CASED for each in _CONTRACTIONS},
}
"""Alternative -> the other one that it needs, "" for none. GPT-4's, Llama 3's, Qwen's, Mistral's, BLOOM's, Kimi's."""


def is_linear(pattern: str) -> bool:
    """Whether finding all matches is known to take time linear in the text."""
    if len(pattern) > _MAX_CHARACTERS:
        return False
    # Files have these characters unescaped or escaped.
    pattern = pattern.replace("\r", r"\r").replace("\n", r"\n").replace("\t", r"\t")
    alternatives = _alternatives(pattern)
    if len(alternatives) == 1 and pattern.startswith("(") and pattern.endswith(")") and pattern[1] != "?":
        alternatives = _alternatives(pattern[1:-1])
    return len(alternatives) <= _MAX_ALTERNATIVES and all(
        _LINEAR_WITH[each] in ("", *alternatives) if each in _LINEAR_WITH else _cannot_fail(each)
        for each in alternatives
    )


def _alternatives(pattern: str) -> list[str]:
    """Alternatives between the bars that are outside groups and classes."""
    found, depth = [""], 0
    for token in _TOKEN.findall(pattern):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += token
    return found


def _cannot_fail(alternative: str) -> bool:
    """Whether it matches at least one character, and nothing that must match follows an unbounded atom."""
    index, num_choices, is_unbounded, needs_one = 0, 1, False, False
    while index < len(alternative):
        atom = _ATOM.match(alternative, index)
        if atom is None:
            return False
        least, most = _counts(atom["quantifier"] or "")
        if is_unbounded and least > 0:
            return False
        needs_one |= least > 0
        is_unbounded |= most is None
        num_choices *= 1 if is_unbounded or most is None else most - least + 1
        index = atom.end()
    return needs_one and num_choices <= _MAX_CHOICES


def _counts(quantifier: str) -> tuple[int, int | None]:
    """Minimum and maximum matches of an atom; None: unbounded."""
    if quantifier.startswith("{"):
        least, _, most = quantifier[1:-1].partition(",")
        return int(least), int(most or least) if "," not in quantifier or most else None
    return {"": (1, 1), "?": (0, 1), "*": (0, None), "+": (1, None)}[quantifier[:1]]
