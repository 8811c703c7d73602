"""Parses a chat answer's tokens into its message: reasoning, content, tool calls.

The text is the decoded one plus the special tokens that mark parts in the model's format, which decoding omits. A
streamed answer is parsed as it comes, each of its characters once, and a complete one in one piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spmd_worker.chat.answer_parts import CallReader, Content, Part, ToolCall
from spmd_worker.chat.call_parsers import NoCalls, call_reader
from spmd_worker.chat.chat_format import NONE, REASONING_MARKERS, ChatFormat
from spmd_worker.chat.chat_request import ChatRequest
from spmd_worker.chat.harmony import HarmonyReader
from spmd_worker.chat.reasoning import ReasoningReader
from spmd_worker.replica.sequence.outputs import CompletionOutput
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.incremental_decoder import IncrementalDecoder
from spmd_worker.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """Parsed text of an answer, or of a piece of it. `content` may be ""."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Parser settings for the answers of one request. `request` None has no tools; `starts_in_reasoning`: the prompt
    has opened it; `is_inside`: answers go on inside a text of the prompt. Without a tokenizer texts are used as given.
    """

    format: ChatFormat
    request: ChatRequest | None = None
    starts_in_reasoning: bool = False
    tokenizer: Tokenizer | None = None
    is_inside: bool = False

    @property
    def reads(self) -> bool:
        """Whether an answer can have anything but content."""
        return self.wants_calls or self.format.is_harmony or self.format.reasoning in REASONING_MARKERS

    @property
    def is_named(self) -> bool:
        """Whether `tool_choice` names the function: its calls end like other answers, with `stop`."""
        return self.request is not None and self.request.name is not None

    def marked_text(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> "MarkedText":
        """Text with markers of one answer to this prompt."""
        return MarkedText(self.tokenizer, self.format.markers, prompt_token_ids, sampling)

    def read(self, text: str) -> ChatAnswer:
        return AnswerStream(self).read(text, is_end=True)

    @property
    def wants_calls(self) -> bool:
        """Whether the answer is searched for calls."""
        return self.request is not None and self.request.wants_calls and self.format.tool_calls != NONE


class AnswerStream:
    """Parser of one answer, piece by piece."""

    def __init__(self, reader: AnswerReader) -> None:
        request, markers = reader.request, REASONING_MARKERS.get(reader.format.reasoning)
        self._harmony: HarmonyReader | None = None
        if reader.format.is_harmony:
            is_json = request is not None and request.schema is not None
            self._harmony = HarmonyReader(has_calls=reader.wants_calls, is_json=is_json, is_inside=reader.is_inside)
        self._reasoning: ReasoningReader | None = None
        if markers is not None:
            self._reasoning = ReasoningReader(markers, is_open=reader.starts_in_reasoning, is_inside=reader.is_inside)
        self._calls: CallReader = NoCalls()
        if request is not None and reader.wants_calls and self._harmony is None:
            self._calls = call_reader(reader.format.tool_calls, request)
        self._content = Content()
        self._is_parallel = request is None or request.is_parallel
        self.num_calls = 0

    def read(self, text: str, *, is_end: bool) -> ChatAnswer:
        """The parts that have become certain with the next piece; `is_end`: the last one."""
        reasoning, parts = self._parts(text, is_end=is_end)
        content, calls = self._content.read(parts, is_end=is_end)
        kept = calls if self._is_parallel else calls[: max(1 - self.num_calls, 0)]
        self.num_calls += len(kept)
        return ChatAnswer(content, reasoning, tuple(kept))

    def _parts(self, text: str, *, is_end: bool) -> tuple[str, list[Part]]:
        if self._harmony is not None:
            return self._harmony.read(text, is_end=is_end)
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.read(text, is_end=is_end)
        return reasoning, self._calls.read(text, is_end=is_end)


class MarkedText:
    """Text of one completion as it grows, with those of `markers` that are special tokens; takes every output once."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        markers: Sequence[str],
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
    ) -> None:
        self._sampling = sampling
        # The text has all others already.
        kept = {} if tokenizer is None or not sampling.skip_special_tokens else tokenizer.special_ids(markers)
        self._markers = {token_id: text for text, token_id in kept.items()}
        self._decoder: IncrementalDecoder | None = None
        if tokenizer is not None and kept:
            self._decoder = IncrementalDecoder(tokenizer, prompt_token_ids, True, tuple(kept.values()))
        self._num_tokens = self._num_characters = 0
        # Text that a stop string may still remove.
        self._held: list[_Piece] = []
        self._has_ended = False

    def read(self, completion: CompletionOutput) -> str:
        """The new text of the completion, given all of its tokens so far."""
        if self._has_ended:
            return ""
        self._has_ended = completion.finished()
        if self._decoder is None:
            new = completion.text[self._num_characters :]
            self._num_characters += len(new)
            return new
        # Without the token that ended it, as in its text.
        ends_by_id = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        is_hidden = ends_by_id and not self._sampling.include_stop_str_in_output
        token_ids = completion.token_ids[:-1] if is_hidden else completion.token_ids
        pieces = self._pieces(self._decoder, token_ids[self._num_tokens :])
        self._num_tokens = len(token_ids)
        if not self._sampling.stop:
            return "".join([piece.text for piece in pieces])
        # Up to the length outside markers: a stop string ends the text, or may.
        num_new = len(completion.text) - self._num_characters
        given, count, self._held = _cut([*self._held, *pieces], num_new)
        self._num_characters += count
        return given

    def _pieces(self, decoder: IncrementalDecoder, token_ids: Sequence[int]) -> list["_Piece"]:
        """The new pieces. A marker is identified by its token: the same text of other tokens is ordinary text."""
        pieces = []
        for token_id in token_ids:
            text, marker = decoder.append([token_id]), self._markers.get(token_id, "")
            before, found, after = text.rpartition(marker) if marker else ("", "", text)
            pieces += [_Piece(before, is_marker=False), _Piece(found, is_marker=True), _Piece(after, is_marker=False)]
        if self._has_ended:
            pieces.append(_Piece(decoder.flush(), is_marker=False))
        return pieces


class _Piece(NamedTuple):
    """A piece of an answer's text."""

    text: str
    is_marker: bool


def _cut(pieces: list[_Piece], length: int) -> tuple[str, int, list[_Piece]]:
    """The text up to `length` characters outside markers, if it has as many; their number; and the remaining pieces."""
    given, count = "", 0
    for index, (text, is_marker) in enumerate(pieces):
        if not is_marker and len(text) > length - count:
            num_left = length - count
            rest = [_Piece(text[num_left:], is_marker=False), *pieces[index + 1 :]]
            return given + text[:num_left], length, rest
        given += text
        count += 0 if is_marker else len(text)
    return given, count, []
