"""Rewrites a JSON Schema for the engine so that every answer is valid: keywords that llguidance interprets differently
from JSON Schema validators are written so that both agree, or rejected.

llguidance computes with 64-bit floats, so numbers with more digits change; it has ASCII character classes in patterns,
where Python's `re`, which jsonschema validates with, has Unicode's; and a name that occurs twice in an answer counts as
two.
"""

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from spmd_worker.replica.sequence.structured_outputs import SCHEMAS_BY_NAME, VALUE_KEYS

_EXACT: Final = 2**53
"""Integers up to this are exact as floats."""
_MAX_EXPONENT: Final = 22
"""Powers of ten up to this are exact as floats: every parser reads a number of `_EXACT` times one of them correctly."""
_MAX_BOUND: Final = 2**63 - 1024
"""The maximum float that fits a 64-bit integer."""
_MAX_CLOSED: Final = 10**12
_SMALLEST: Final = 1e-20
"""The number next to 0."""
_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_MAX_DIVISOR: Final = 2**10
"""A float that is a multiple of 1/1024 divides others with an exact remainder."""

_SPACE: Final = r"\x1c-\x1f\x85\s"
_NEGATED: Final = {"D": r"[^\p{Nd}]", "W": r"[^_\p{L}\p{N}]", "S": f"[^{_SPACE}]"}
"""Characters that are neither digit, letter nor space for either side."""
_EXCLUDED: Final = {"d": r"\p{Nd}", "w": r"_\p{L}\p{N}", "s": _SPACE}
"""Members of a negated class."""
_QUANTIFIER: Final = re.compile(r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}")

_YEAR: Final = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE: Final = f"^(?:{_YEAR}-(?:0[13-9]|1[0-2])-[0-9]{{2}}|{_YEAR}-02-(?:[01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
"""Dates as the engine generates them: no year 0000, 29 February only in leap years."""
_DATES: Final = ("date", "date-time")

_ESCAPES: Final = 'nrbtf\\"'
_OTHER_CONTROL: Final = re.compile("[\x00-\x07\x0b\x0e-\x1f]")


class SchemaProblem(ValueError):
    """A part of a schema that cannot be enforced: the key, the value, the rule, the alternative."""


def exact_schema(schema: Any) -> Any:
    """A copy, rewritten where needed. Raises SchemaProblem."""
    try:
        exact = _exact(schema)
    except RecursionError:
        raise SchemaProblem("the schema is nested too deeply") from None
    # JSON can write other control characters only as numeric escapes.
    if isinstance(exact, dict) and not any(
        _OTHER_CONTROL.search(each) for each in _leaves(exact) if isinstance(each, str)
    ):
        own = exact.get("x-guidance")
        # Else a name of the schema could be escaped: "\u0061" for "a".
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
            inexact = next((each for each in _leaves(schema[key]) if not _is_exact(each)), None)
            if inexact is not None:
                raise _inexact(key, inexact, "write it as text")
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


def _leaves(value: Any) -> Iterator[Any]:
    """Scalars at any depth, and keys."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if not isinstance(value, list):
        yield value
        return
    for each in value:
        yield from _leaves(each)


def _is_exact(value: Any) -> bool:
    """Whether a number is unchanged after the engine has read it; true for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    if isinstance(value, int):
        return abs(value) <= _EXACT
    if not math.isfinite(value) or abs(value) > _EXACT:
        return False
    # The shortest decimal.
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int), value
    return int("".join(map(str, digits))) <= _EXACT and abs(exponent) <= _MAX_EXPONENT


def _bound(made: dict[str, Any]) -> None:
    """Move integer bounds that no float equals to the next float inside; others must be exact."""
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
    """Replace exclusive bounds: the engine allows an integer that a bound excludes if the other bound, here or in a
    schema joined with this one, is less than 1 away: `exclusiveMinimum=0, maximum=0.5` allows 0. The next number inside
    becomes an inclusive bound.
    """
    if _is_of_integers(made.get("type")):
        return
    for key, name, sign in ((_LOWER[1], _LOWER[0], 1), (_UPPER[1], _UPPER[0], -1)):
        value = made.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value != int(value) or value * sign < 0 or abs(value) >= _MAX_CLOSED:
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
    """Inclusive integer bound; None if it does not fit a 64-bit integer."""
    is_lower = key in _LOWER
    value += (key == "exclusiveMinimum") - (key == "exclusiveMaximum")
    near = float(value)
    if is_lower and int(near) < value:
        near = math.nextafter(near, math.inf)
    elif not is_lower and int(near) > value:
        near = math.nextafter(near, -math.inf)
    return int(near) if abs(near) <= _MAX_BOUND else None


def _check_parts(made: Mapping[str, Any]) -> None:
    part = made.get("multipleOf")
    if isinstance(part, bool) or not isinstance(part, int | float):
        return
    is_whole = math.isfinite(part) and part == int(part)
    if not _is_exact(part) or not (is_whole or part * _MAX_DIVISOR == int(part * _MAX_DIVISOR)):
        raise SchemaProblem(
            f"multipleOf={part!r} is not a multiple of 1/1024, by which floats divide exactly: leave it out, or use "
            f"whole numbers of a smaller unit"
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
    """Rewritten `patternProperties`. If other names are allowed too, both readers must match the same names."""
    is_closed = made.get("additionalProperties") is False
    found: dict[str, Any] = {}
    for pattern, schema in made["patternProperties"].items():
        exact = _exact_pattern(pattern) if is_closed else "".join(map(_python_piece, _pieces(pattern)))
        found[exact] = schema
    return found


def _python_piece(piece: str) -> str:
    """Python's meaning of a piece of a pattern. Raises SchemaProblem for one that cannot be written."""
    if re.fullmatch(r"\\[wWsSD]|\[.*\\[dDwWsS].*\]", piece, re.DOTALL):
        raise SchemaProblem(
            f"patternProperties: {piece} means more characters to one validator than to another: name them "
            f"([A-Za-z0-9_]), or set additionalProperties to false"
        )
    return {".": r"[^\n]", "$": r"\n?$", r"\d": r"\p{Nd}"}.get(piece, piece)


def _exact_pattern(pattern: str) -> str:
    """A pattern that matches only what Python's `re` matches."""
    return "".join(map(_narrow_piece, _pieces(pattern)))


def _narrow_piece(piece: str) -> str:
    if len(piece) == 2 and piece[0] == "\\":
        return _NEGATED.get(piece[1], piece)
    if len(piece) < 2 or piece[0] != "[":
        return piece
    words = _EXCLUDED if piece.startswith("[^") else _NEGATED
    return re.sub(r"\\(.)", lambda found: words.get(found[1], found[0]), piece, flags=re.DOTALL)


def _pieces(pattern: str) -> Iterator[str]:
    """Escapes, classes, and single characters. Raises SchemaProblem for a piece with another meaning in the engine."""
    position, was_quantifier = 0, False
    while position < len(pattern):
        quantifier = _QUANTIFIER.match(pattern, position)
        if quantifier is not None:
            piece = quantifier[0]
            if was_quantifier and piece != "?":
                raise SchemaProblem(f"pattern={pattern[:80]!r} has {piece} after another quantifier: use parentheses")
        elif pattern[position] == "\\":
            piece = pattern[position : position + 2]
        elif pattern[position] == "[":
            piece = pattern[position : _end_of_class(pattern, position)]
        else:
            piece = pattern[position]
        # The question mark of a group follows its parenthesis.
        was_quantifier = quantifier is not None and pattern[position - 1 : position] != "("
        position += len(piece)
        yield piece


def _end_of_class(pattern: str, start: int) -> int:
    position = start + 2 if pattern.startswith("[^", start) else start + 1
    first = position
    while position < len(pattern):
        if pattern[position] == "]" and position > first:
            return position + 1
        if pattern[position] == "[" or pattern[position : position + 2] in ("&&", "--", "~~"):
            raise SchemaProblem(
                f"pattern={pattern[:80]!r} has {pattern[position : position + 2]} in a character class, which regex "
                f"engines read differently: write a backslash before it, or the characters themselves"
            )
        position += 2 if pattern[position] == "\\" else 1
    return len(pattern)
