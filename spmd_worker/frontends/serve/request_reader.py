"""Parses the body of a request into the same row as in a batch file, with the same code.

A request has in addition `stream` and `stream_options`, and, without a seed, a name for its random stream. A row of a
file has its `custom_id`, or its index; a request has the header `X-Custom-Id`, or its content. The time of arrival is
never used: the answer does not depend on other clients.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.config.schema import RowLimits
from spmd_worker.base.files import JsonError, parse_json_object
from spmd_worker.compat.image_prompts import num_media_bytes
from spmd_worker.frontends.openai.audio_request import AUDIO_TASKS
from spmd_worker.frontends.openai.audio_row import EncodedAudioRow, encode_audio
from spmd_worker.frontends.openai.openai_request import COMPLETIONS_URL, IGNORED_KEYS
from spmd_worker.frontends.openai.pooled_row import encode_pooled_in_turns
from spmd_worker.frontends.openai.pooling_request import MAX_INPUTS
from spmd_worker.frontends.openai.prompt_values import SPACES_KEY, check_keys
from spmd_worker.frontends.openai.row import EncodedRow
from spmd_worker.frontends.openai.row_encoding import RowContext, encode_row
from spmd_worker.frontends.openai.row_outputs import EncodedSplitRow, is_split
from spmd_worker.frontends.openai.row_parser import parse_fields
from spmd_worker.frontends.openai.turns import Turns, result_of
from spmd_worker.frontends.serve.audio_form import body_of_form
from spmd_worker.frontends.serve.multipart import is_multipart, read_form
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.messages import InvalidRequestError, optional_flag

_STREAM_KEYS: Final = ("stream", "stream_options")
_STREAM_OPTIONS: Final = ("include_usage", "continuous_usage_stats", "include_obfuscation")
_UNNAMED_KEYS: Final = (*IGNORED_KEYS, "cache_salt", "request_id", "include_reasoning", SPACES_KEY)
"""Keys that change nothing of what a request samples."""
_NAMED_KEYS: Final = tuple(
    re.compile(rf"{before}((\w+)(?:\[\d+\]|\.\w+)*)")
    for before in (r"(?:prompt\[\d+\]: )?(?:unknown key '|entries of |the )?", "")
)
"""Beginnings of errors: the key, with what it holds, and the key alone."""
_DIGEST_BYTES: Final = 16
_UNNAMED: Final = "request"


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """`includes_usage`: a stream ends with the usage. `counts_in_chunks`: other chunks have that of their choice."""

    is_streamed: bool
    includes_usage: bool = False
    counts_in_chunks: bool = False


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A request that can run: one row, or one for each prompt."""

    rows: tuple[EncodedRow | EncodedSplitRow, ...]
    stream: StreamOptions

    @property
    def request_id(self) -> str | None:
        """The client's name for the answer."""
        row = self.rows[0]
        return row.request_id if isinstance(row, EncodedRow) else row.row.request_id

    @property
    def num_sequences(self) -> int:
        """Sequences of the request, which it runs at once if they fit."""
        return sum(
            row.sampling.num_sequences if isinstance(row, EncodedRow) else row.num_sequences for row in self.rows
        )

    @property
    def must_fit(self) -> bool:
        """Whether all sequences have to fit at once. Windows of audio, which may be an hour, wait for one another."""
        return not any(isinstance(row, EncodedAudioRow) for row in self.rows)

    @property
    def num_media_bytes(self) -> int:
        """Bytes of the prepared images and audio."""
        return sum(num_media_bytes(row.media) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Parser of an engine's requests. Any thread may use it."""

    defaults: SamplingParams
    context: RowContext

    def read(self, index: int, url: str, data: bytes, custom_id: str | None, content_type: str = "") -> ServedRow:
        """Parse a body; `custom_id` is the header's, `index` the request's number. A request of audio may be a form
        with the file. Raises InvalidRequestError.
        """
        return result_of(self.read_in_turns(index, url, data, custom_id, content_type))

    def read_in_turns(
        self, index: int, url: str, data: bytes, custom_id: str | None, content_type: str = ""
    ) -> Turns[ServedRow]:
        """`read`, with a pause after each of several texts."""
        is_form = url in AUDIO_TASKS and is_multipart(content_type)
        body = body_of_form(read_form(data, content_type)) if is_form else parse_body(data, self.context.limits)
        with naming_keys(body):
            return (yield from self._rows(index, url, body, custom_id))

    def _rows(self, index: int, url: str, body: dict[str, Any], custom_id: str | None) -> Turns[ServedRow]:
        stream = _stream_of(body)
        fields = {key: value for key, value in body.items() if key not in _STREAM_KEYS}
        prompts = _prompts(url, fields)
        if len(prompts) > MAX_INPUTS:
            message = f"prompt has {len(prompts)} prompts, more than {MAX_INPUTS}: send more requests"
            raise InvalidRequestError(message, "limit_exceeded")
        if len(prompts) < 2:
            row = yield from self._read_one(index, url, fields, custom_id, is_streamed=stream.is_streamed)
            return ServedRow((row,), stream)
        name = content_name(url, fields) if custom_id is None else custom_id
        rows: list[EncodedRow | EncodedSplitRow] = []
        for number, prompt in enumerate(prompts):
            # Each like a single one, under its own name.
            one, own_name = {**fields, "prompt": prompt}, f"{name}#{number}" if number else name
            try:
                rows.append((yield from self._read_one(index, url, one, own_name, is_streamed=stream.is_streamed)))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt[{number}]: {error}", error.code) from None
            yield
        return ServedRow(tuple(rows), stream)

    def _read_one(
        self, index: int, url: str, fields: dict[str, Any], custom_id: str | None, *, is_streamed: bool
    ) -> Turns[EncodedRow | EncodedSplitRow]:
        # Content is named only for what can run: rejected bodies may have megabytes.
        line = {"custom_id": custom_id or _UNNAMED, "method": "POST", "url": url, "body": fields}
        row = parse_fields(index, line, self.defaults, self.context.limits)
        if is_split(row):
            if is_streamed:
                message = "vectors, scores and transcripts cannot be streamed: leave out stream"
                raise InvalidRequestError(message, "unsupported_value")
            if row.pooling is not None:
                return (yield from encode_pooled_in_turns(row, self.context))
            return encode_audio(row, self.context).named(content_name(url, fields) if custom_id is None else custom_id)
        # With echo and logprobs those of the prompt are in the choices.
        is_echoed = row.echo is not None and fields.get("prompt_logprobs") is None
        for name in ("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "return_routed_experts"):
            value = getattr(row.sampling, name)
            is_asked = value is not None and value is not False
            if is_streamed and is_asked and not (is_echoed and name == "prompt_logprobs"):
                message = f"{name} cannot be streamed: leave out stream or {name}"
                raise InvalidRequestError(message, "unsupported_value")
        encoded = encode_row(row, self.context)
        return replace(encoded, custom_id=content_name(url, fields) if custom_id is None else custom_id)


@contextmanager
def naming_keys(body: Mapping[str, Any]) -> Iterator[None]:
    """Block whose InvalidRequestErrors without a `param` get the key of `body` with which their message begins."""
    try:
        yield
    except InvalidRequestError as error:
        found = [each.match(str(error)) for each in _NAMED_KEYS]
        error.param = error.param or next((each[1] for each in found if each is not None and each[2] in body), None)
        raise


def parse_body(data: bytes, limits: RowLimits) -> dict[str, Any]:
    """The object of a body. Raises InvalidRequestError."""
    try:
        # One level less than a line of a file, in which the body is nested.
        return parse_json_object(data, max_nesting=limits.max_nesting - 1)
    except JsonError as error:
        raise InvalidRequestError(f"the body {error}", error.code) from None


def _prompts(url: str, fields: Mapping[str, Any]) -> list[Any]:
    """Prompts of a completion with several texts, or lists of ids; else empty."""
    given = fields.get("prompt")
    is_several = isinstance(given, list) and any(isinstance(each, str | list) for each in given)
    return list(given or ()) if is_several and url == COMPLETIONS_URL else []


def content_name(url: str, body: Mapping[str, Any]) -> str:
    """Default name of a request: a digest of all that its answer depends on besides the model."""
    fields = {key: value for key, value in body.items() if key not in _UNNAMED_KEYS}
    text = json.dumps([url, fields], sort_keys=True, separators=(",", ":"), default=_digest_of_file)
    return f"content:{blake2b(text.encode('ascii'), digest_size=_DIGEST_BYTES).hexdigest()}"


def _digest_of_file(value: bytes) -> str:
    return blake2b(value, digest_size=_DIGEST_BYTES).hexdigest()


def _stream_of(body: Mapping[str, Any]) -> StreamOptions:
    """The options of a body. Raises InvalidRequestError."""
    is_streamed, options = optional_flag(body, "stream"), body.get("stream_options")
    if options is None:
        return StreamOptions(is_streamed)
    if not isinstance(options, dict):
        raise InvalidRequestError(f"stream_options={shown(options)} must be an object")
    check_keys(options, _STREAM_OPTIONS, " in stream_options", "stream_options")
    flags = {key: optional_flag(options, key, prefix="stream_options.") for key in _STREAM_OPTIONS}
    # vLLM's option adds to `include_usage`, and alone it does nothing.
    counts_in_chunks = flags["include_usage"] and flags["continuous_usage_stats"]
    return StreamOptions(is_streamed, flags["include_usage"], counts_in_chunks)
