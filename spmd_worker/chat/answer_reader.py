"""A chat answer's tokens -> its message: reasoning, content, tool calls.

Text is what decoding gives, with the special tokens in it by which the model's format marks its parts, which decoding
leaves out. An answer that goes on is read anew with each of its tokens: what it has so far stays as it is.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from spmd_worker.chat.answer_parts import Part, ToolCall, content_of
from spmd_worker.chat.call_parsers import call_parser
from spmd_worker.chat.chat_format import NONE, REASONING_MARKERS, ChatFormat
from spmd_worker.chat.chat_request import ChatRequest
from spmd_worker.chat.harmony import harmony_parts
from spmd_worker.chat.reasoning import split_reasoning
from spmd_worker.sequence.outputs import CompletionOutput
from spmd_worker.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What an answer's text comes to. `content` is "" where there is none."""

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
        return self._wants_calls or self.format.is_harmony or self.format.reasoning in REASONING_MARKERS

    @property
    def is_named(self) -> bool:
        """Whether the function that is called was named: its calls end as answers do, with `stop`."""
        return self.request is not None and self.request.name is not None

    def marked_text(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> "MarkedText":
        """For one answer to this prompt."""
        return MarkedText(self.tokenizer, self.format.markers, prompt_token_ids, sampling)

    def read(self, text: str, is_whole: bool = True) -> ChatAnswer:
        """Of a text that may go on (`is_whole` false): what of its answer is certain."""
        reasoning, parts = self._parts(text, is_whole)
        calls = [part for part in parts if isinstance(part, ToolCall)]
        is_parallel = self.request is None or self.request.is_parallel
        return ChatAnswer(content_of(parts, is_whole), reasoning, tuple(calls if is_parallel else calls[:1]))

    def _parts(self, text: str, is_whole: bool) -> tuple[str, list[Part]]:
        if self.format.is_harmony:
            return harmony_parts(text, is_whole, has_calls=self._wants_calls)
        markers = REASONING_MARKERS.get(self.format.reasoning)
        reasoning = ""
        if markers is not None:
            reasoning, text = split_reasoning(text, is_whole, markers, is_open=self.starts_in_reasoning)
        if self.request is None or not self._wants_calls:
            return reasoning, [text]
        return reasoning, call_parser(self.format.tool_calls, self.request)(text, is_whole)

    @property
    def _wants_calls(self) -> bool:
        return self.request is not None and self.request.wants_calls and self.format.tool_calls != NONE


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
        self._marker = re.compile(f"({'|'.join(map(re.escape, kept))})")
        self._decoder: IncrementalDecoder | None = None
        if tokenizer is not None and kept:
            self._decoder = IncrementalDecoder(tokenizer, prompt_token_ids, True, tuple(kept.values()))
        self._num_tokens = 0
        self._text = ""
        self._has_ended = False

    def text_of(self, completion: CompletionOutput) -> str:
        """Of the completion with all of its tokens so far."""
        if self._decoder is None:
            return completion.text
        if not self._has_ended:
            token_ids = _shown_ids(completion, self._sampling)
            self._text += self._decoder.append(token_ids[self._num_tokens :])
            self._num_tokens = len(token_ids)
            if completion.finished():
                self._text += self._decoder.flush()
                self._has_ended = True
        if not self._sampling.stop:
            return self._text
        return _cut(self._text, self._marker, len(completion.text))


def _shown_ids(completion: CompletionOutput, sampling: SamplingParams) -> list[int]:
    """Without the token that ended it, as in its text."""
    ends_by_id = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
    is_hidden = ends_by_id and not sampling.include_stop_str_in_output
    return completion.token_ids[:-1] if is_hidden else completion.token_ids


def _cut(text: str, marker: re.Pattern[str], length: int) -> str:
    """So much of a text that `length` characters of it are in no marker: a stop string ends it, or may."""
    at = 0
    for number, piece in enumerate(marker.split(text)):
        # Every other piece is a marker.
        if number % 2 == 0 and len(piece) > length:
            return text[: at + length]
        at += len(piece)
        length -= 0 if number % 2 else len(piece)
    return text
