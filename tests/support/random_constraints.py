"""Forms drawn at random, for answers that are looked at by somebody else: `jsonschema` and `re`.

Everything that a random model could go on with for ever is bounded, and properties are closed but where one is drawn
that says what the others are.
"""

import random
from typing import Any

LETTERS = 'abcxyzAZ019 _-"\\/é世😀'
PATTERNS = ("^[a-z]{1,6}$", "^[A-F0-9]{2}(-[A-F0-9]{2}){1,3}$", "^(yes|no|may be)$", "^a[^b]?c+d{1,3}$", "^[a-c]{0,3}$")
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
LEAVES = ("integer", "number", "boolean", "null", "string", "string", "pattern", "format", "enum", "const", "types")
NESTED = ("object", "object", "array", "tuple", "anyOf", "oneOf", "allOf", "ref", "map")
NUM_DEFINITIONS = 3


def drawn_schema(drawn: random.Random) -> dict[str, Any]:
    """An object or an array, whose definitions refer to later ones, the last to itself."""
    schema = _nested(drawn, drawn.choice(("object", "object", "array", "tuple")), 3)
    definitions: dict[str, Any] = {f"d{number}": _schema(drawn, 1, number + 1) for number in range(NUM_DEFINITIONS)}
    rest = {"anyOf": [{"type": "null"}, {"type": "null"}, {"$ref": "#/$defs/list"}]}
    properties = {"value": _leaf(drawn, drawn.choice(LEAVES)), "next": rest}
    definitions["list"] = {
        "type": "object",
        "properties": properties,
        "required": ["next"],
        "additionalProperties": False,
    }
    return {**schema, "$defs": definitions}


def drawn_value(drawn: random.Random, depth: int = 1) -> Any:
    """Any JSON value."""
    kind = drawn.randrange(8 if depth else 6)
    if kind < 6:
        text = "".join(drawn.choices(LETTERS, k=drawn.randrange(6)))
        return (None, True, drawn.randint(-99, 999), drawn.randint(-999, 999) / 8, text, "")[kind]
    values = [drawn_value(drawn, depth - 1) for _ in range(drawn.randrange(3))]
    return values if kind == 6 else {f"k{number}": value for number, value in enumerate(values)}


def drawn_regex(drawn: random.Random, depth: int = 3) -> str:
    """A pattern that means the same to `re` and to Rust's regular expressions."""
    if depth == 0 or drawn.random() < 0.25:
        return _atom(drawn)
    kind = drawn.randrange(4)
    inner = [drawn_regex(drawn, depth - 1) for _ in range(drawn.randint(2, 3))]
    if kind == 0:
        return f"({'|'.join(inner)})"
    if kind == 1:
        return f"(?:{inner[0]}){_times(drawn)}"
    return "".join(inner)


def _atom(drawn: random.Random) -> str:
    atoms = ("a", "b", "0", " ", "é", "世", r"\.", r"\\", r"\[", '"', "[a-c]", "[^a-y]", "[0-9]", "[à-ÿ_-]", ".")
    return drawn.choice(atoms)


def _times(drawn: random.Random) -> str:
    least = drawn.randrange(3)
    return drawn.choice(("?", "*", "+", f"{{{least}}}", f"{{{least},{least + drawn.randint(1, 3)}}}"))


def _schema(drawn: random.Random, depth: int, first_definition: int = 0) -> dict[str, Any]:
    if depth == 0 or drawn.random() < 0.4:
        return _leaf(drawn, drawn.choice(LEAVES))
    kind = drawn.choice(NESTED)
    return _nested(drawn, kind, depth, first_definition)


def _nested(drawn: random.Random, kind: str, depth: int, first_definition: int = 0) -> dict[str, Any]:
    def inner() -> dict[str, Any]:
        return _schema(drawn, depth - 1, first_definition)

    if kind == "object":
        names = drawn.sample(("a", "b", "long name", "é", 'q"', "x-y"), drawn.randrange(5))
        required = drawn.sample(names, drawn.randint(0, len(names)))
        return _object({name: inner() for name in names}, required)
    if kind == "map":
        found = {"type": "object", "patternProperties": {"^k[0-9]$": inner()}, "additionalProperties": False}
        return found | {"maxProperties": drawn.randint(1, 3)}
    if kind == "array":
        least = drawn.randrange(3)
        return {"type": "array", "items": inner(), "minItems": least, "maxItems": least + drawn.randrange(3)}
    if kind == "tuple":
        first = [inner() for _ in range(drawn.randint(1, 3))]
        rest = drawn.choice((False, {"type": "boolean"}))
        return {"type": "array", "prefixItems": first, "items": rest, "minItems": len(first), "maxItems": 4}
    if kind == "anyOf":
        return {"anyOf": [inner() for _ in range(drawn.randint(2, 3))]}
    if kind == "oneOf":
        # Alternatives that exclude each other: of others the engine says that it does not enforce them.
        return {"oneOf": [_object({"kind": {"const": name}, "of": inner()}, ["kind"]) for name in ("p", "q")]}
    if kind == "allOf":
        low = drawn.randint(-50, 50)
        return {"type": "integer", "allOf": [{"minimum": low}, {"maximum": low + drawn.randrange(300)}]}
    assert kind == "ref", kind
    later = [f"d{number}" for number in range(first_definition, NUM_DEFINITIONS)]
    return {"$ref": f"#/$defs/{drawn.choice([*later, 'list'])}"}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _leaf(drawn: random.Random, kind: str) -> dict[str, Any]:
    if kind in ("integer", "number"):
        return {"type": kind, **_bounds(drawn, kind)}
    if kind == "string":
        least = drawn.randrange(3)
        return {"type": "string", "minLength": least, "maxLength": least + drawn.randrange(8)}
    if kind == "pattern":
        return {"type": "string", "pattern": drawn.choice(PATTERNS)}
    if kind == "format":
        return {"type": "string", "format": drawn.choice(FORMATS)}
    if kind == "enum":
        return {"enum": [drawn_value(drawn) for _ in range(drawn.randint(1, 4))]}
    if kind == "const":
        return {"const": drawn_value(drawn)}
    if kind == "types":
        types = drawn.sample(("integer", "boolean", "null"), drawn.randint(1, 3))
        return {"type": types}
    return {"type": kind}


def _bounds(drawn: random.Random, kind: str) -> dict[str, Any]:
    """Wide enough to hold a number of any kind."""
    if drawn.random() < 0.3:
        return {"multipleOf": drawn.choice((2, 5, 7)), "minimum": 0, "maximum": 400} if kind == "integer" else {}
    low = drawn.randint(-500, 500) / (1 if kind == "integer" else 4)
    low, high = (int(low), int(low) + drawn.randint(2, 900)) if kind == "integer" else (low, low + 250.5)
    lower = drawn.choice(("minimum", "exclusiveMinimum"))
    return {lower: low, drawn.choice(("maximum", "exclusiveMaximum")): high}
