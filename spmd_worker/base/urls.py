"""URLs in texts that people read, without their users and queries, which may be passwords and signatures."""

import re
from typing import Any, Final

# Linear: a scheme starts where no character of a scheme is before it. Paths of pathlib have one slash of two.
_SCHEME: Final = (
    r"(?:(?<![a-z0-9+.\-])(?!(?:file|memory)://)[a-z0-9+.\-]++://|(?<![a-z0-9])(?:https?|s3|gs|az|hf):/(?!/))"
)
# In a password each character but a slash may be.
_USER: Final = re.compile(rf"({_SCHEME})[^/\s]*@", re.IGNORECASE)
# Up to a blank, or to the quote that was opened before it: a quote within a word is part of it.
_CLOSED: Final = r"(?:(?!(?P=quote)(?:[\s,;:.)\]}]|\Z))\S)*+"
_URL: Final = re.compile(rf"(?P<quote>['\"])?(?P<scheme>{_SCHEME})(?P<rest>(?(quote){_CLOSED}|\S*+))", re.IGNORECASE)
_AFTER: Final = ",;:.'`\")]}>\\"
"""Punctuation after a URL."""
_UNKNOWN: Final = "=@"
"""Characters that stand for a text's end that was cut away: what it continued is a user, or a query."""
_READ_CHARACTERS: Final = 4096
"""Characters of a long text that are read."""


def without_credentials(text: str) -> str:
    """The text with `https://host/x?...` for `https://user:password@host/x?signature`, in linear time. A question mark
    of a store's name is that of a pattern, as in `s3://bucket/part-?.jsonl`, unless `=` or `&` comes after it.
    """
    return _URL.sub(_without_query, _USER.sub(r"\1", text)) if ":/" in text else text


def shortened(text: str, most: int) -> str:
    """The text without credentials, cut to `most` characters, "..." at its end included; of a long text only the
    beginning is read.
    """
    num_read = max(most, _READ_CHARACTERS)
    if len(text) <= num_read:
        text = without_credentials(text)
        return text if len(text) <= most else f"{text[: most - 3]}..."
    return without_credentials(text[:num_read] + _UNKNOWN).removesuffix(_UNKNOWN)[: most - 3] + "..."


def _without_query(url: re.Match[str]) -> str:
    name, mark, query = url["rest"].partition("?")
    body = query.rstrip(_AFTER)
    is_query = url["scheme"].lower().startswith("http") or any(each in query for each in ("=", "&", ":/"))
    if not (body and is_query):
        return url[0]
    return f"{url['quote'] or ''}{url['scheme']}{name}{mark}...{query[len(body) :]}"


def all_without_credentials(value: Any) -> Any:
    """The value, whose texts, and those in its lists and mappings, are without credentials."""
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, list):
        return [all_without_credentials(each) for each in value]
    if isinstance(value, dict):
        return {key: all_without_credentials(each) for key, each in value.items()}
    return value
