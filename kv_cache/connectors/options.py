"""Options of a connector: texts by name, checked when it is made."""

import re
from collections.abc import Mapping
from typing import Final

from kv_cache.connectors.interface import ConnectorError

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_names(options: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Raise ConnectorError for an option that is not `known` (name -> meaning)."""
    for name in options:
        if name not in known:
            listed = ", ".join(f"{each} ({meaning})" for each, meaning in known.items())
            raise ConnectorError(f"it has no option {name!r}: cache.connector_options takes {listed}")


def given_text(options: Mapping[str, str], name: str) -> str:
    """An option that must be given."""
    if not options.get(name):
        raise ConnectorError(f"the option {name} is missing: give cache.connector_options={{{name}:...}}")
    return options[name]


def plain_name(options: Mapping[str, str], name: str) -> str:
    """An option that becomes a part of a file's name."""
    text = given_text(options, name)
    if not _NAME.fullmatch(text):
        raise ConnectorError(
            f"{name}={text!r} must be at most 100 letters, digits, dots, dashes and underscores, and begin with one of "
            f"the first two"
        )
    return text


def gib_bytes(options: Mapping[str, str], default: str) -> int:
    """The option `gib` in bytes."""
    text = options.get("gib", default)
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib < 2**20:
        raise ConnectorError(f"gib={text!r} must be a number of GiB above 0, such as 20")
    return int(gib * 2**30)
