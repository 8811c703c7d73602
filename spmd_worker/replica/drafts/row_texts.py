"""Indexed text of each row that drafts: its prompt and output so far, extended by what it has sampled since.

A row's text is indexed when it first drafts and kept until the row ends: preemption does not lose it. Samples of one
prompt copy its index, which is made once.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sequence import Sequence, SequenceKey


class Text(Protocol):
    """Tokens in order, with an index that finds where they repeat."""

    def __len__(self) -> int: ...

    def extend(self, token_ids: Iterable[int]) -> None: ...

    def copy(self) -> Self: ...


_Text = TypeVar("_Text", bound=Text)


@dataclass(slots=True)
class _SharedPrompt(Generic[_Text]):
    """Index of a prompt of several samples; `num_rows` of them are followed."""

    text: _Text
    num_rows: int = 0


class RowTexts(Generic[_Text]):
    """Texts by the rows' keys. `make_text` makes an empty one for about so many tokens."""

    def __init__(self, make_text: Callable[[int], _Text]) -> None:
        self._make_text = make_text
        self._texts: dict[SequenceKey, _Text] = {}
        self._prompts: dict[RequestId, _SharedPrompt[_Text]] = {}

    def __len__(self) -> int:
        """Rows that are followed."""
        return len(self._texts)

    @property
    def num_prompts(self) -> int:
        """Prompts that are kept for their next samples."""
        return len(self._prompts)

    def text_of(self, sequence: Sequence) -> _Text:
        """All tokens of a row. Tokens are only ever appended to a row, one or several at once."""
        text = self._texts.get(sequence.key)
        if text is None:
            text = self._texts[sequence.key] = self._prompt_of(sequence)
        num_indexed, num_tokens = len(text), sequence.num_tokens
        assert num_indexed <= num_tokens, (sequence.key, num_indexed, num_tokens)
        if num_indexed < num_tokens:
            text.extend(sequence.token_ids(num_indexed, num_tokens))
        return text

    def forget(self, sequence: Sequence) -> None:
        """The row ended; one that never drafted has nothing here."""
        if self._texts.pop(sequence.key, None) is None:
            return
        prompt = self._prompts.get(sequence.key.request_id)
        if prompt is not None:
            prompt.num_rows -= 1
            if not prompt.num_rows:
                del self._prompts[sequence.key.request_id]

    def _prompt_of(self, sequence: Sequence) -> _Text:
        request = sequence.request
        if request.sampling.num_sequences == 1:
            return self._make_text(sequence.num_tokens)
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            prompt = _SharedPrompt(self._make_text(sequence.num_prompt_tokens))
            prompt.text.extend(request.prompt_token_ids)
            self._prompts[request.request_id] = prompt
        prompt.num_rows += 1
        return prompt.text.copy()
