"""Compare two output files of the runtime: the same rows, token for token and bit for bit?

    python -m spmd_worker.tools.verify A.jsonl B.jsonl
        compares token ids, log-probabilities, texts, errors
    python -m spmd_worker.tools.verify A.jsonl B.jsonl --tokens-only
        leaves the log-probabilities out
    python -m spmd_worker.tools.verify A.jsonl B.jsonl --bytes
        compares the files byte by byte

Prints "same" and exits with 0; or names the first row that differs, its sample, the token (counted from 0 in the
output: the row's step) and both values, and exits with 1; or reports why that is unknown, and exits with 2. Embeddings,
scores and results of pooling rows are compared bit for bit with and without --tokens-only. Rows, plain or OpenAI's, are
matched by custom_id, so their order does not matter; those without one by their index. A row's usage, model name and
response ids are not compared.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from spmd_worker.frontends.tools.program import make_parser, print_error

GENERATED = ("outputs", "choices")
POOLED = ("embedding", "scores", "data", "results")
"""Keys of generated answers, and of pooled ones: plain, OpenAI's, and a reranker's."""

MAX_VALUE_CHARACTERS = 100
NUM_CONTEXT_CHARACTERS = 20


class VerifyError(Exception):
    """The files cannot be compared; the message names the file or line, and the reason."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One output of a row. `tokens` are ids, or texts where the row has no ids; both lists are None where absent.
    `rest` is a chat message without its content.
    """

    tokens: list[Any] | None
    logprobs: list[Any] | None
    text: Any
    rest: Any
    finish_reason: Any
    stop_reason: Any


@dataclass(frozen=True, slots=True)
class Row:
    """One line. `position` counts lines from 0; `key` finds the row in the other file."""

    position: int
    key: tuple[str, Any, int]
    value: dict[str, Any]

    @property
    def name(self) -> str:
        custom_id = self.value.get("custom_id")
        return f"row {self.position}" + ("" if custom_id is None else f" (custom_id {json.dumps(custom_id)})")


@dataclass(slots=True)
class Totals:
    """Numbers of compared rows and tokens."""

    rows: int = 0
    tokens: int = 0


def compare_files(first: Path, other: Path, *, tokens_only: bool, totals: Totals) -> str | None:
    """The first difference as text, None if there is none."""
    unmatched: dict[tuple[str, Any, int], Row] = {}
    rest = read_rows(other)
    for row in read_rows(first):
        theirs = find_row(row.key, unmatched, rest)
        if theirs is None:
            return f"{row.name} of {first} is missing in {other}"
        for each, path in ((row, first), (theirs, other)):
            if each.value.get("error") is None and not any(key in body_of(each.value) for key in GENERATED + POOLED):
                raise VerifyError(f"{each.name} of {path} has no error, and no {', '.join(GENERATED + POOLED)}")
        try:
            difference = compare_rows(row.value, theirs.value, tokens_only=tokens_only, totals=totals)
        except VerifyError as error:
            raise VerifyError(f"{row.name} of {first} or {other}: {error}") from None
        if difference is not None:
            return f"{row.name}, {difference}"
        totals.rows += 1
    extra = [*unmatched.values(), *rest]
    if extra:
        return f"{extra[0].name} of {other} is missing in {first}, which has {totals.rows} rows ({len(extra)} fewer)"
    return None


def find_row(key: tuple[str, Any, int], unmatched: dict[tuple[str, Any, int], Row], rest: Iterator[Row]) -> Row | None:
    """Find a row, reading on until it comes; in files of one order it is the next."""
    while key not in unmatched:
        row = next(rest, None)
        if row is None:
            return None
        unmatched[row.key] = row
    return unmatched.pop(key)


def read_rows(path: Path) -> Iterator[Row]:
    """Parse the rows. Raises VerifyError for a line that is not a JSON object."""
    seen: Counter[tuple[str, Any]] = Counter()
    for position, line in enumerate(line for line in each_line(path) if line.strip()):
        value = parse_object(line, f"{path}, line {position + 1}")
        name = row_name(value, position)
        # A repeated custom_id is an error row: both lines carry it.
        yield Row(position, (*name, seen[name]), value)
        seen[name] += 1


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise VerifyError(f"{where}: not JSON: {error}") from error
    except RecursionError as error:
        raise VerifyError(f"{where}: nested too deeply to be read") from error
    if not isinstance(value, dict):
        raise VerifyError(f"{where}: a JSON object was expected, not {type(value).__name__}")
    return value


def row_name(value: dict[str, Any], position: int) -> tuple[str, Any]:
    """Key that a row is matched by."""
    if isinstance(value.get("custom_id"), str):
        return "custom_id", value["custom_id"]
    index = value.get("index")
    return "index", index if isinstance(index, int) else position


def compare_rows(mine: dict[str, Any], theirs: dict[str, Any], *, tokens_only: bool, totals: Totals) -> str | None:
    error = first_difference(mine.get("error"), theirs.get("error"), "error")
    if error is not None:
        return error
    my_body, their_body = body_of(mine), body_of(theirs)
    for key in POOLED:
        pooled = first_difference(my_body.get(key, Absent), their_body.get(key, Absent), key)
        if pooled is not None:
            return pooled
    if not tokens_only:
        prompt = first_difference(my_body.get("prompt_logprobs"), their_body.get("prompt_logprobs"), "prompt_logprobs")
        if prompt is not None:
            return prompt
    my_samples, their_samples = samples_of(my_body), samples_of(their_body)
    for index, (one, two) in enumerate(zip(my_samples, their_samples)):
        difference = compare_samples(one, two, tokens_only=tokens_only)
        if difference is not None:
            return f"sample {index}, {difference}"
        totals.tokens += len(one.tokens or ())
    if len(my_samples) != len(their_samples):
        return f"{len(my_samples)} samples in the first, {len(their_samples)} in the second"
    return None


def body_of(row: dict[str, Any]) -> dict[str, Any]:
    """Body of a row: the row itself if plain; OpenAI's is in the response."""
    response = row.get("response")
    body = response.get("body") if isinstance(response, dict) else row
    return body if isinstance(body, dict) else {}


def samples_of(body: dict[str, Any]) -> list[Sample]:
    entries = list_of(body, "outputs" if "outputs" in body else "choices")
    return [sample_of(entry) for entry in entries if isinstance(entry, dict)]


def list_of(values: dict[str, Any], key: str) -> list[Any]:
    """A list; [] for null or a missing key. Raises VerifyError for any other type."""
    value = values.get(key)
    if value is not None and not isinstance(value, list):
        raise VerifyError(f"{key} must be a list, not {shown(value)}")
    return value or []


def sample_of(entry: dict[str, Any]) -> Sample:
    logprobs = logprobs_by_position(entry.get("logprobs"))
    tokens = list_of(entry, "token_ids") if entry.get("token_ids") is not None else None
    if tokens is None and logprobs is not None:
        tokens = [position.get("token") if isinstance(position, dict) else position for position in logprobs]
    message = entry.get("message")
    text = message.get("content") if isinstance(message, dict) else entry.get("text")
    rest = {key: value for key, value in message.items() if key != "content"} if isinstance(message, dict) else None
    return Sample(tokens, logprobs, text, rest, entry.get("finish_reason"), entry.get("stop_reason"))


def logprobs_by_position(logprobs: Any) -> list[Any] | None:
    """Log-probabilities per position: a list in plain rows; under "content" in chat; parallel lists in completions."""
    if not isinstance(logprobs, dict):
        return logprobs if isinstance(logprobs, list) else None
    content = logprobs.get("content")
    if isinstance(content, list):
        return content
    columns = {"token": "tokens", "logprob": "token_logprobs", "top": "top_logprobs"}
    lists = [list_of(logprobs, name) for name in columns.values()]
    return [dict(zip(columns, values)) for values in zip(*lists)]


def compare_samples(mine: Sample, theirs: Sample, *, tokens_only: bool) -> str | None:
    """Compare by position: a token, then its log-probabilities, so that the earliest difference is reported."""
    positions = max(len(mine.tokens or ()), len(theirs.tokens or ()))
    for position in range(positions):
        one, two = entry(mine.tokens, position), entry(theirs.tokens, position)
        difference = first_difference(one, two, f"token {position}")
        if difference is None and not tokens_only:
            one, two = entry(mine.logprobs, position), entry(theirs.logprobs, position)
            difference = first_difference(one, two, f"token {position}: logprobs")
        if difference is not None:
            return difference
    return (
        compare_texts(mine.text, theirs.text)
        or first_difference(mine.rest, theirs.rest, "message")
        or first_difference(mine.finish_reason, theirs.finish_reason, "finish_reason")
        or first_difference(mine.stop_reason, theirs.stop_reason, "stop_reason")
    )


class Absent:
    """Placeholder after the end of the shorter list."""


def entry(values: list[Any] | None, position: int) -> Any:
    return values[position] if values is not None and position < len(values) else Absent


def compare_texts(mine: Any, theirs: Any) -> str | None:
    if mine == theirs:
        return None
    if not (isinstance(mine, str) and isinstance(theirs, str)):
        return first_difference(mine, theirs, "text")
    place = first_place(mine, theirs)
    window = slice(max(0, place - NUM_CONTEXT_CHARACTERS), place + NUM_CONTEXT_CHARACTERS)
    return f"text, character {place}: {shown(mine[window])} in the first, {shown(theirs[window])} in the second"


def first_difference(mine: Any, theirs: Any, path: str) -> str | None:
    """First path at which two JSON values differ, with both values. 1 and 1.0, and 0.0 and -0.0, are different."""
    if mine is Absent and theirs is Absent:
        return None
    if type(mine) is type(theirs):
        if isinstance(mine, dict):
            pairs = [
                (f"{path}.{key}", mine.get(key, Absent), theirs.get(key, Absent))
                for key in dict.fromkeys(mine | theirs)
            ]
            return first_of(pairs)
        if isinstance(mine, list):
            length = max(len(mine), len(theirs))
            return first_of([(f"{path}[{i}]", entry(mine, i), entry(theirs, i)) for i in range(length)])
        if repr(mine) == repr(theirs):
            return None
    return f"{path}: {shown(mine)} in the first, {shown(theirs)} in the second"


def first_of(pairs: list[tuple[str, Any, Any]]) -> str | None:
    differences = (first_difference(mine, theirs, path) for path, mine, theirs in pairs)
    return next((difference for difference in differences if difference is not None), None)


def shown(value: Any) -> str:
    if value is Absent:
        return "nothing"
    # A lone surrogate cannot be printed.
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}..."


def first_place(mine: str | bytes, theirs: str | bytes) -> int:
    """Index of the first difference; the length of the shorter one if it begins the longer."""
    pairs = enumerate(zip(mine, theirs))
    return next((place for place, (one, two) in pairs if one != two), min(len(mine), len(theirs)))


def compare_bytes(first: Path, other: Path) -> str | None:
    offset = 0
    for number, (mine, theirs) in enumerate(zip_longest(each_line(first), each_line(other), fillvalue=b"")):
        if mine != theirs:
            place = first_place(mine, theirs)
            values = [repr(line[place:][:NUM_CONTEXT_CHARACTERS]) for line in (mine, theirs)]
            return f"line {number + 1}, byte {offset + place}: {values[0]} in the first, {values[1]} in the second"
        offset += len(mine)
    return None


def each_line(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as stream:
            yield from stream
    except IsADirectoryError:
        raise VerifyError(
            f"{path}: is a folder: give the output of a job (job.output), not its run directory"
        ) from None
    except OSError as error:
        raise VerifyError(f"cannot read {path}: {error.strerror}") from error


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("verify", __doc__)
    parser.add_argument("first", type=Path, help="output rows, JSON Lines")
    parser.add_argument("second", type=Path, help="output rows of another run of the same input")
    parser.add_argument("--tokens-only", action="store_true", help="leave out the log-probabilities")
    parser.add_argument("--bytes", action="store_true", help="compare the files byte by byte")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    totals = Totals()
    try:
        if options.bytes:
            difference = compare_bytes(options.first, options.second)
        else:
            difference = compare_files(options.first, options.second, tokens_only=options.tokens_only, totals=totals)
    except VerifyError as error:
        print_error("verify", error)
        return 2
    if difference is not None:
        print(difference)
        return 1
    if not options.bytes:
        print(f"{totals.rows} rows, {totals.tokens} tokens")
    print("same")
    return 0
