"""A JSON Schema as the engine must be given it, so that every answer is valid: what llguidance reads otherwise than
JSON Schema's validators is written in a way that both read alike, or refused.

It computes with 64-bit floats, so that numbers with more digits become others; it knows ASCII classes of characters in
patterns, where Python's `re`, by which jsonschema validates, has Unicode's; and names that an answer has twice count as
two.
"""

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from spmd_worker.replica.sequence.structured_outputs import SCHEMAS_BY_NAME, VALUE_KEYS

_EXACT: Final = 2**53
"""Whole numbers up to it are exact as floats."""
_MOST_EXPONENT: Final = 22
"""Powers of ten up to it are exact as floats: a number of `_EXACT` times such a one is read right by every reader."""
_MOST_BOUND: Final = 2**63 - 1024
"""The largest float that a 64-bit integer can be."""
_MOST_CLOSED: Final = 10**12
_SMALLEST: Final = 1e-20
"""Stands for the number next to 0."""
_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_MOST_PLACES: Final = 2**10
"""A float that is a whole number of its parts has a remainder by others that is exact too."""

_SPACE: Final = r"\x1c-\x1f\x85\s"
_NEGATED: Final = {"D": r"[^\p{Nd}]", "W": r"[^_\p{L}\p{N}]", "S": f"[^{_SPACE}]"}
"""What is no digit, letter or space to either side."""
_EXCLUDED: Final = {"d": r"\p{Nd}", "w": r"_\p{L}\p{N}", "s": _SPACE}
"""In a negated class."""
_QUANTIFIER: Final = re.compile(r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}")

_YEAR: Final = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE: Final = f"^(?:{_YEAR}-(?:0[13-9]|1[0-2])-[0-9]{{2}}|{_YEAR}-02-(?:[01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
"""Of dates as the engine has them: no year 0000, no 29 February but in leap years."""
_DATES: Final = ("date", "date-time")

_ESCAPES: Final = 'nrbtf\\"'
_OTHER_CONTROL: Final = re.compile("[\x00-\x07\x0b\x0e-\x1f]")


class SchemaProblem(ValueError):
    """What of a schema cannot be enforced: the key, the value, the rule, the way out."""


def exact_schema(schema: Any) -> Any:
    """A copy, changed where it must be. Raises SchemaProblem."""
    try:
        exact = _exact(schema)
    except RecursionError:
        raise SchemaProblem("the schema is nested too deeply") from None
    if isinstance(exact, dict) and not _has_other_controls(exact):
        own = exact.get("x-guidance")
        # Else a name that the schema has could be written as another: "\u0061" for "a".
        exact["x-guidance"] = {"json_allowed_escapes": _ESCAPES, **(own if isinstance(own, dict) else {})}
    return exact


def _exact(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_exact(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            made[key] = {name: _exact(each) for name, each in value.items()}
        else:
            made[key] = value if key in VALUE_KEYS or key == "x-guidance" else _exact(value)
    for key in ("const", "enum"):
        if key in schema:
            _check_values(key, schema[key])
    _bound(made)
    _close_bounds(made)
    _check_parts(made)
    _check_names(made)
    if isinstance(made.get("pattern"), str):
        made["pattern"] = _exact_pattern(made["pattern"])
    if isinstance(made.get("patternProperties"), dict):
        made["patternProperties"] = _exact_names(made)
    if made.get("format") in _DATES:
        others = made.get("allOf")
        made["allOf"] = [*(others if isinstance(others, list) else []), {"pattern": _DATE}]
    return made


def _check_values(key: str, value: Any) -> None:
    """Numbers, however deep."""
    if isinstance(value, list):
        for each in value:
            _check_values(key, each)
    elif isinstance(value, dict):
        for each in value.values():
            _check_values(key, each)
    elif not _is_exact(value):
        raise _inexact(key, value, "write it as text")


def _is_exact(value: Any) -> bool:
    """Whether a number is the same after the engine has read it; what is no number is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    if isinstance(value, int):
        return abs(value) <= _EXACT
    if not math.isfinite(value) or abs(value) > _EXACT:
        return False
    digits, exponent = _digits(value)
    return digits <= _EXACT and abs(exponent) <= _MOST_EXPONENT


def _digits(value: float) -> tuple[int, int]:
    """Its shortest decimal: all digits as a whole number, and the power of ten that it is multiplied with."""
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int), value
    return int("".join(map(str, digits))), exponent


def _bound(made: dict[str, Any]) -> None:
    """Bounds of whole numbers that no float is become the next float inside; others must be exact."""
    for key in (*_LOWER, *_UPPER):
        value = made.get(key)
        if value is None or _is_exact(value):
            continue
        is_whole = _is_of_integers(made.get("type")) and math.isfinite(value) and value == int(value)
        inside = _whole_bound(key, int(value)) if is_whole else None
        if inside is None:
            raise _inexact(key, value, "name another bound, or none")
        del made[key]
        name = _LOWER[0] if key in _LOWER else _UPPER[0]
        choose = max if key in _LOWER else min
        other = made.get(name)
        made[name] = inside if other is None or not _is_exact(other) else choose(inside, other)


def _close_bounds(made: dict[str, Any]) -> None:
    """The engine allows a whole number that a bound excludes where the other bound, here or in a schema that is joined
    with this one, is less than 1 away: `exclusiveMinimum=0, maximum=0.5` has 0. The next inside is another's bound.
    """
    if _is_of_integers(made.get("type")):
        return
    for key, name, sign in ((_LOWER[1], _LOWER[0], 1), (_UPPER[1], _UPPER[0], -1)):
        value = made.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value != int(value) or value * sign < 0 or abs(value) >= _MOST_CLOSED:
            continue
        del made[key]
        size = abs(int(value))
        inside = sign * (size + float(f"1e{len(str(size)) - 15}") if size else _SMALLEST)
        other = made.get(name)
        choose = max if sign > 0 else min
        made[name] = choose(inside, other) if isinstance(other, int | float) else inside


def _is_of_integers(kind: Any) -> bool:
    kinds = kind if isinstance(kind, list) else [kind]
    return "integer" in kinds and "number" not in kinds


def _whole_bound(key: str, value: int) -> int | None:
    """As an inclusive one; None for what no 64-bit integer is."""
    is_lower = key in _LOWER
    value += (key == "exclusiveMinimum") - (key == "exclusiveMaximum")
    near = float(value)
    if is_lower and int(near) < value:
        near = math.nextafter(near, math.inf)
    elif not is_lower and int(near) > value:
        near = math.nextafter(near, -math.inf)
    return int(near) if abs(near) <= _MOST_BOUND else None


def _check_parts(made: Mapping[str, Any]) -> None:
    part = made.get("multipleOf")
    if isinstance(part, bool) or not isinstance(part, int | float):
        return
    is_whole = math.isfinite(part) and part == int(part)
    if not _is_exact(part) or not (is_whole or part * _MOST_PLACES == int(part * _MOST_PLACES)):
        raise SchemaProblem(
            f"multipleOf={part!r} is no sum of halves, quarters and so on, by which floats divide exactly: leave it "
            f"out, or use whole numbers of a smaller unit"
        )


def _check_names(made: Mapping[str, Any]) -> None:
    least, required = made.get("minProperties"), made.get("required")
    if isinstance(least, bool) or not isinstance(least, int | float):
        return
    num_required = len(dict.fromkeys(map(str, required))) if isinstance(required, list) else 0
    if least - num_required >= 2:
        raise SchemaProblem(
            f"minProperties={least} asks for {least - num_required} names that required does not list, and an answer "
            f"may have one name twice: list them under required"
        )


def _inexact(key: str, value: Any, way_out: str) -> SchemaProblem:
    return SchemaProblem(
        f"{key}={repr(value)[:80]} is not exact where numbers are 64-bit floats (whole numbers to 2**53, others of 15 "
        f"digits): {way_out}"
    )


def _exact_names(made: Mapping[str, Any]) -> dict[str, Any]:
    """`patternProperties`. Where other names are allowed too, no name may be one of these to one reader alone."""
    is_closed = made.get("additionalProperties") is False
    found: dict[str, Any] = {}
    for pattern, schema in made["patternProperties"].items():
        exact = _exact_pattern(pattern) if is_closed else "".join(map(_python_piece, _pieces(pattern)))
        found[exact] = schema
    return found


def _python_piece(piece: str) -> str:
    """What Python's `re` takes it for. Raises SchemaProblem for what cannot be written."""
    if re.fullmatch(r"\\[wWsSD]|\[.*\\[dDwWsS].*\]", piece, re.DOTALL):
        raise SchemaProblem(
            f"patternProperties: {piece} means more characters to one validator than to another: name them "
            f"([A-Za-z0-9_]), or set additionalProperties to false"
        )
    return {".": r"[^\n]", "$": r"\n?$", r"\d": r"\p{Nd}"}.get(piece, piece)


def _exact_pattern(pattern: str) -> str:
    """Allows nothing that Python's `re` does not find."""
    return "".join(map(_narrow_piece, _pieces(pattern)))


def _narrow_piece(piece: str) -> str:
    if len(piece) == 2 and piece[0] == "\\":
        return _NEGATED.get(piece[1], piece)
    if len(piece) < 2 or piece[0] != "[":
        return piece
    words = _EXCLUDED if piece.startswith("[^") else _NEGATED
    return re.sub(r"\\(.)", lambda found: words.get(found[1], found[0]), piece, flags=re.DOTALL)


def _pieces(pattern: str) -> Iterator[str]:
    """Escapes, classes, and single characters. Raises SchemaProblem for what means another thing to the engine."""
    place, was_quantifier = 0, False
    while place < len(pattern):
        quantifier = _QUANTIFIER.match(pattern, place)
        if quantifier is not None:
            piece = quantifier[0]
            if was_quantifier and piece != "?":
                raise SchemaProblem(
                    f"pattern={pattern[:80]!r} has {piece} behind another number of times: put what it is about in "
                    f"parentheses"
                )
        elif pattern[place] == "\\":
            piece = pattern[place : place + 2]
        elif pattern[place] == "[":
            piece = pattern[place : _end_of_class(pattern, place)]
        else:
            piece = pattern[place]
        # A group's own question mark comes behind its parenthesis.
        was_quantifier = quantifier is not None and pattern[place - 1 : place] != "("
        place += len(piece)
        yield piece


def _end_of_class(pattern: str, start: int) -> int:
    place = start + 2 if pattern.startswith("[^", start) else start + 1
    first = place
    while place < len(pattern):
        if pattern[place] == "]" and place > first:
            return place + 1
        if pattern[place] == "[" or pattern[place : place + 2] in ("&&", "--", "~~"):
            raise SchemaProblem(
                f"pattern={pattern[:80]!r} has {pattern[place : place + 2]} in a class of characters, which readers "
                f"take differently: write a backslash before it, or the characters themselves"
            )
        place += 2 if pattern[place] == "\\" else 1
    return len(pattern)


def _has_other_controls(value: Any) -> bool:
    """Characters that JSON writes by their numbers alone."""
    if isinstance(value, str):
        return _OTHER_CONTROL.search(value) is not None
    if isinstance(value, list):
        return any(map(_has_other_controls, value))
    if isinstance(value, dict):
        return any(_has_other_controls(key) or _has_other_controls(each) for key, each in value.items())
    return False
