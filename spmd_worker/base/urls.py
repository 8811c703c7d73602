"""URLs in texts that people read, without their users and queries, which may be passwords and signatures."""

import re
from typing import Any, Final

# Paths of pathlib have one slash of two.
_ANY: Final = r"\b(?:(?!file:|memory:)[a-z][a-z0-9+.-]*://|(?:https?|s3|gs|az|hf):/)"
_USER: Final = re.compile(rf"({_ANY})[^/?#\s'\"]*@", re.IGNORECASE)
_QUERY: Final = re.compile(rf"({_ANY}[^\s?'\"]*\?)(?!\.\.\.)[^\s'\")]+", re.IGNORECASE)


def without_credentials(text: str) -> str:
    """The text with `https://host/x?...` for `https://user:password@host/x?signature`."""
    return _QUERY.sub(r"\1...", _USER.sub(r"\1", text)) if ":/" in text else text


def all_without_credentials(value: Any) -> Any:
    """The value, whose texts, and those in its lists and mappings, are without credentials."""
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, list):
        return [all_without_credentials(each) for each in value]
    if isinstance(value, dict):
        return {key: all_without_credentials(each) for key, each in value.items()}
    return value
