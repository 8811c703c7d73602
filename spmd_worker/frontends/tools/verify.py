"""Compare two outputs of the runtime: rows by their tokens, and bit for bit.

    python -m spmd_worker.tools.verify A.jsonl B.jsonl
        compares token ids, log-probabilities, texts, errors
    python -m spmd_worker.tools.verify A.jsonl B.jsonl --tokens-only
        ignores log-probabilities
    python -m spmd_worker.tools.verify A.jsonl B.jsonl --bytes
        compares the files byte by byte
    python -m spmd_worker.tools.verify --images A.jsonl.run
        reads the images or audio of a job again, and compares them with those that its answers are of

Outputs are named as in job.output, and may be compressed, Parquet, in parts (part-*.jsonl) and remote (s3://...).
Prints "same" and exits with 0; or prints the first row that differs, its sample, the token (counted from 0 in the
output) and both values, and exits with 1; or reports why the files cannot be compared, and exits with 2. Embeddings,
scores and results of pooling rows are compared bit for bit with and without --tokens-only. Rows, plain or OpenAI's, are
matched by custom_id in any order, or by their index without one. A row's usage, model name and response ids are not
compared.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.names import counted
from spmd_worker.base.remote_names import FilePath, file_path, is_remote, shown_name
from spmd_worker.frontends.batch.input.input_files import open_bytes
from spmd_worker.frontends.batch.output_file import read_lines
from spmd_worker.frontends.batch.output_parts import files_of
from spmd_worker.frontends.tools.program import ends_without_its_reader, make_parser, print_error
from spmd_worker.frontends.tools.verify_images import ImagesError, compare_images

GENERATED = ("outputs", "choices")
POOLED = ("embedding", "scores", "data", "results")
"""Keys of generated answers, and of pooled ones: plain, OpenAI's, and a reranker's."""

MAX_VALUE_CHARACTERS = 100
NUM_CONTEXT_CHARACTERS = 20


class VerifyError(Exception):
    """The files cannot be compared; the message names the file or line, and the reason."""


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
    """Numbers of compared rows and tokens, and of answers without ids or log-probabilities, of which texts are."""

    rows: int = 0
    tokens: int = 0
    texts: int = 0

    def __str__(self) -> str:
        texts = f", and {counted(self.texts, 'answer')} by text alone" if self.texts else ""
        return f"{counted(self.rows, 'row')}, {counted(self.tokens, 'token')}{texts}"


def compare_files(first: FilePath, other: FilePath, *, tokens_only: bool, totals: Totals) -> str | None:
    """The first difference as text; None for equal rows."""
    unmatched: dict[tuple[str, Any, int], Row] = {}
    rest = read_rows(other)
    for row in read_rows(first):
        # In files of one order it is the next.
        while row.key not in unmatched and (found := next(rest, None)) is not None:
            unmatched[found.key] = found
        theirs = unmatched.pop(row.key, None)
        if theirs is None:
            return f"{row.name} of {first} is missing in {other}"
        for each, path in ((row, first), (theirs, other)):
            if each.value.get("error") is None and not any(key in body_of(each.value) for key in GENERATED + POOLED):
                raise VerifyError(f"{each.name} of {path} has neither error nor {', '.join(GENERATED + POOLED)}")
        try:
            difference = compare_rows(row.value, theirs.value, tokens_only=tokens_only, totals=totals)
        except VerifyError as error:
            raise VerifyError(f"{row.name} of {first} or {other}: {error}") from None
        except RecursionError:
            raise VerifyError(f"{row.name} of {first} or {other}: nested too deeply to be compared") from None
        if difference is not None:
            return f"{row.name}, {difference}"
        totals.rows += 1
    extra = [*unmatched.values(), *rest]
    if extra:
        return f"{extra[0].name} of {other} is missing in {first}, which has {totals.rows} rows ({len(extra)} fewer)"
    return None


def read_rows(path: FilePath) -> Iterator[Row]:
    """Parse the rows. Raises VerifyError for a line that is not a JSON object."""
    seen: Counter[tuple[str, Any]] = Counter()
    for position, line in enumerate(line for line in each_line(path, is_decoded=True) if line.strip()):
        where = f"{path}, line {position + 1}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise VerifyError(f"{where}: not JSON: {error}") from error
        except RecursionError as error:
            raise VerifyError(f"{where}: nested too deeply to be read") from error
        if not isinstance(value, dict):
            raise VerifyError(f"{where}: expected a JSON object, not {type(value).__name__}")
        custom_id, index = value.get("custom_id"), value.get("index")
        if isinstance(custom_id, str):
            name: tuple[str, Any] = ("custom_id", custom_id)
        else:
            name = ("index", index if isinstance(index, int) else position)
        # A repeated custom_id is an error row: both lines have it.
        yield Row(position, (*name, seen[name]), value)
        seen[name] += 1


def compare_rows(mine: dict[str, Any], theirs: dict[str, Any], *, tokens_only: bool, totals: Totals) -> str | None:
    my_body, their_body = body_of(mine), body_of(theirs)
    pairs = [("error", mine.get("error"), theirs.get("error"))]
    pairs += [(key, my_body.get(key, Absent), their_body.get(key, Absent)) for key in POOLED]
    if not tokens_only:
        pairs.append(("prompt_logprobs", my_body.get("prompt_logprobs"), their_body.get("prompt_logprobs")))
    difference = first_of(pairs)
    if difference is not None:
        return difference
    my_samples, their_samples = samples_of(my_body), samples_of(their_body)
    for index, (one, two) in enumerate(zip(my_samples, their_samples)):
        difference = compare_samples(one, two, tokens_only=tokens_only)
        if difference is not None:
            return f"sample {index}, {difference}"
        totals.tokens += len(one["tokens"] or ())
        totals.texts += one["tokens"] is None
    if len(my_samples) != len(their_samples):
        return f"{len(my_samples)} samples in the first, {len(their_samples)} in the second"
    return None


def body_of(row: dict[str, Any]) -> dict[str, Any]:
    """The body of an OpenAI row's response; a plain row itself."""
    response = row.get("response")
    body = response.get("body") if isinstance(response, dict) else row
    return body if isinstance(body, dict) else {}


def samples_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    entries = list_of(body, "outputs" if "outputs" in body else "choices")
    return [sample_of(entry) for entry in entries if isinstance(entry, dict)]


def list_of(values: dict[str, Any], key: str) -> list[Any]:
    """A list; [] for null or a missing key. Raises VerifyError for any other type."""
    value = values.get(key)
    if value is not None and not isinstance(value, list):
        raise VerifyError(f"{key} must be a list, not {shown(value)}")
    return value or []


def sample_of(output: dict[str, Any]) -> dict[str, Any]:
    """Values to compare. `tokens` are ids, or texts if the row has no ids; `message` is without its content."""
    logprobs = logprobs_by_position(output.get("logprobs"))
    tokens = list_of(output, "token_ids") if output.get("token_ids") is not None else None
    if tokens is None and logprobs is not None:
        tokens = [position.get("token") if isinstance(position, dict) else position for position in logprobs]
    text, rest, message = output.get("text"), None, output.get("message")
    if isinstance(message, dict):
        text, rest = message.get("content"), {key: value for key, value in message.items() if key != "content"}
    reasons = {key: output.get(key) for key in ("finish_reason", "stop_reason")}
    return {"tokens": tokens, "logprobs": logprobs, "text": text, "message": rest, **reasons}


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


def compare_samples(mine: dict[str, Any], theirs: dict[str, Any], *, tokens_only: bool) -> str | None:
    """Compare by position: a token, then its log-probabilities, so that the earliest difference is reported."""
    lists = {"": "tokens"} if tokens_only else {"": "tokens", ": logprobs": "logprobs"}
    for position in range(max(len(mine["tokens"] or ()), len(theirs["tokens"] or ()))):
        difference = first_of(
            [
                (f"token {position}{suffix}", entry(mine[key], position), entry(theirs[key], position))
                for suffix, key in lists.items()
            ]
        )
        if difference is not None:
            return difference
    rest = ("message", "finish_reason", "stop_reason")
    return compare_texts(mine["text"], theirs["text"]) or first_of([(key, mine[key], theirs[key]) for key in rest])


class Absent:
    """Placeholder for a missing key, and for items behind the end of the shorter list."""


def entry(values: list[Any] | None, position: int) -> Any:
    return values[position] if values is not None and position < len(values) else Absent


def compare_texts(mine: Any, theirs: Any) -> str | None:
    if mine == theirs:
        return None
    if not (isinstance(mine, str) and isinstance(theirs, str)):
        return first_difference(mine, theirs, "text")
    index = differing_index(mine, theirs)
    window = slice(max(0, index - NUM_CONTEXT_CHARACTERS), index + NUM_CONTEXT_CHARACTERS)
    return f"text, character {index}: {shown(mine[window])} in the first, {shown(theirs[window])} in the second"


def first_difference(mine: Any, theirs: Any, path: str) -> str | None:
    """First path at which two JSON values differ, with both values. 1 and 1.0, and 0.0 and -0.0, are different."""
    if type(mine) is type(theirs):
        if isinstance(mine, dict):
            return first_of(
                [(f"{path}.{key}", mine.get(key, Absent), theirs.get(key, Absent)) for key in mine | theirs]
            )
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


def differing_index(mine: str | bytes, theirs: str | bytes) -> int:
    """Index of the first difference; the length of the shorter one if it begins the longer."""
    pairs = enumerate(zip(mine, theirs))
    return next((index for index, (one, two) in pairs if one != two), min(len(mine), len(theirs)))


def compare_bytes(first: FilePath, other: FilePath) -> str | None:
    offset = 0
    files = (each_line(path, is_decoded=False) for path in (first, other))
    for number, (mine, theirs) in enumerate(zip_longest(*files, fillvalue=b"")):
        if mine != theirs:
            index = differing_index(mine, theirs)
            values = [repr(line[index:][:NUM_CONTEXT_CHARACTERS]) for line in (mine, theirs)]
            return f"line {number + 1}, byte {offset + index}: {values[0]} in the first, {values[1]} in the second"
        offset += len(mine)
    return None


def each_line(path: FilePath, *, is_decoded: bool) -> Iterator[bytes]:
    """Lines of an output: of rows, whatever its format, or of its bytes as they are; of all parts in order."""
    each = path
    try:
        for each in files_of(path):
            if is_decoded:
                yield from read_lines(each)
            else:
                with open_bytes(each) as stream:
                    yield from stream
    except IsADirectoryError:
        raise VerifyError(f"{path}: is a folder: give the output of a job (job.output)") from None
    except OSError as error:
        raise VerifyError(f"cannot read {each}: {error.strerror or error}") from error
    except ConfigError as error:
        raise VerifyError(str(error)) from None


@ends_without_its_reader
def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("verify", __doc__)
    parser.add_argument("first", type=file_path, nargs="?", help="output rows, as in job.output")
    parser.add_argument("second", type=file_path, nargs="?", help="output rows of another run of the same input")
    parser.add_argument("--images", metavar="RUN_DIR", help="the run directory of a job with images, or audio")
    parser.add_argument("--tokens-only", action="store_true", help="ignore log-probabilities")
    parser.add_argument("--bytes", action="store_true", help="compare the files byte by byte")
    options = parser.parse_args(arguments)
    totals = Totals()
    if (options.second is None) == (options.images is None) or (options.images is not None and options.first):
        parser.error("give two files of output rows, or --images RUN_DIR")
    if options.tokens_only and options.bytes:
        parser.error("--bytes compares all of the files: leave out --tokens-only")
    try:
        if options.images is not None:
            if is_remote(options.images):
                where = shown_name(options.images)
                raise VerifyError(f"{where}: a run directory is on the machine of the job: copy it to a folder")
            num_rows, difference = compare_images(Path(options.images))
            if not num_rows and difference is None:
                print(f"{options.images}: no row of the job has images or audio: nothing is compared")
                return 0
        elif options.bytes:
            difference = compare_bytes(options.first, options.second)
        else:
            difference = compare_files(options.first, options.second, tokens_only=options.tokens_only, totals=totals)
    except (VerifyError, ImagesError) as error:
        print_error("verify", error)
        return 2
    if difference is not None:
        print(difference)
        return 1
    if not options.bytes and options.images is None:
        print(totals)
    print("same")
    return 0
