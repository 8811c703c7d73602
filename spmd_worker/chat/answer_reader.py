"""A chat answer's tokens -> its message: reasoning, content, tool calls.

Text is what decoding gives, with the special tokens in it by which the model's format marks its parts, which decoding
leaves out. An answer that is streamed is read as it comes, each of its characters once, and a whole one in one piece.
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
from spmd_worker.tokenizer.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What an answer's text, or a piece of it, comes to. `content` is "" where there is none."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """How the answers of one request are read. `request` None asks for no tools; `starts_in_reasoning`: the prompt's
    end has opened it. Without a tokenizer texts are as they are given.
    """

    format: ChatFormat
    request: ChatRequest | None = None
    starts_in_reasoning: bool = False
    tokenizer: Tokenizer | None = None

    @property
    def reads(self) -> bool:
        """Whether an answer can have anything but content."""
        return self.wants_calls or self.format.is_harmony or self.format.reasoning in REASONING_MARKERS

    @property
    def is_named(self) -> bool:
        """Whether the function that is called was named: its calls end as answers do, with `stop`."""
        return self.request is not None and self.request.name is not None

    def marked_text(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> "MarkedText":
        """For one answer to this prompt."""
        return MarkedText(self.tokenizer, self.format.markers, prompt_token_ids, sampling)

    def read(self, text: str) -> ChatAnswer:
        """Of a whole text."""
        return self.stream().read(text, is_end=True)

    def stream(self) -> "AnswerStream":
        """For one answer whose text comes in pieces."""
        return AnswerStream(self)

    @property
    def wants_calls(self) -> bool:
        """Whether calls are looked for."""
        return self.request is not None and self.request.wants_calls and self.format.tool_calls != NONE


class AnswerStream:
    """One answer: what comes of each piece of its text."""

    def __init__(self, reader: AnswerReader) -> None:
        request, markers = reader.request, REASONING_MARKERS.get(reader.format.reasoning)
        self._harmony: HarmonyReader | None = None
        if reader.format.is_harmony:
            is_json = request is not None and request.schema is not None
            self._harmony = HarmonyReader(has_calls=reader.wants_calls, is_json=is_json)
        self._reasoning: ReasoningReader | None = None
        if markers is not None:
            self._reasoning = ReasoningReader(markers, is_open=reader.starts_in_reasoning)
        self._calls: CallReader = NoCalls()
        if request is not None and reader.wants_calls and self._harmony is None:
            self._calls = call_reader(reader.format.tool_calls, request)
        self._content = Content()
        self._is_parallel = request is None or request.is_parallel
        self.num_calls = 0

    def read(self, text: str, *, is_end: bool) -> ChatAnswer:
        """What has become certain with the next piece, which is the last one where `is_end`."""
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
    """The text of one completion of a request with this prompt, as it goes on, with the special tokens that are among
    `markers`: every output of the completion is given once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        markers: Sequence[str],
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
    ) -> None:
        self._sampling = sampling
        # Others are in the text as it is.
        kept = {} if tokenizer is None or not sampling.skip_special_tokens else tokenizer.special_ids(markers)
        self._markers = {token_id: text for text, token_id in kept.items()}
        self._decoder: IncrementalDecoder | None = None
        if tokenizer is not None and kept:
            self._decoder = IncrementalDecoder(tokenizer, prompt_token_ids, True, tuple(kept.values()))
        self._num_tokens = self._num_characters = 0
        # What a stop string may still take back.
        self._held: list[_Piece] = []
        self._has_ended = False

    def read(self, completion: CompletionOutput) -> str:
        """What is new in the completion with all of its tokens so far."""
        if self._has_ended:
            return ""
        self._has_ended = completion.finished()
        if self._decoder is None:
            new = completion.text[self._num_characters :]
            self._num_characters += len(new)
            return new
        token_ids = _shown_ids(completion, self._sampling)
        pieces = self._pieces(self._decoder, token_ids[self._num_tokens :])
        self._num_tokens = len(token_ids)
        if self._sampling.stop:
            return self._shown(pieces, len(completion.text))
        return "".join([piece.text for piece in pieces])

    def _pieces(self, decoder: IncrementalDecoder, token_ids: Sequence[int]) -> list["_Piece"]:
        """What is new. A marker is one by its token: a model may spell the same text with other tokens, and then it is
        text like any other.
        """
        pieces = []
        for token_id in token_ids:
            text, marker = decoder.append([token_id]), self._markers.get(token_id, "")
            before, found, after = text.rpartition(marker) if marker else ("", "", text)
            pieces += [_Piece(before, is_marker=False), _Piece(found, is_marker=True), _Piece(after, is_marker=False)]
        if self._has_ended:
            pieces.append(_Piece(decoder.flush(), is_marker=False))
        return pieces

    def _shown(self, pieces: list["_Piece"], num_characters: int) -> str:
        """So much more of the text that `num_characters` of it are in no marker: a stop string ends it, or may."""
        given, count, self._held = _cut([*self._held, *pieces], num_characters - self._num_characters)
        self._num_characters += count
        return given


class _Piece(NamedTuple):
    """Of an answer's text."""

    text: str
    is_marker: bool


def _shown_ids(completion: CompletionOutput, sampling: SamplingParams) -> list[int]:
    """Without the token that ended it, as in its text."""
    ends_by_id = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
    is_hidden = ends_by_id and not sampling.include_stop_str_in_output
    return completion.token_ids[:-1] if is_hidden else completion.token_ids


def _cut(pieces: list[_Piece], length: int) -> tuple[str, int, list[_Piece]]:
    """So much of a text that `length` characters of it, if it has so many, are in no marker; how many they are; and the
    rest.
    """
    given, count = "", 0
    for index, (text, is_marker) in enumerate(pieces):
        if not is_marker and len(text) > length - count:
            num_left = length - count
            rest = [_Piece(text[num_left:], is_marker=False), *pieces[index + 1 :]]
            return given + text[:num_left], length, rest
        given += text
        count += 0 if is_marker else len(text)
    return given, count, []
