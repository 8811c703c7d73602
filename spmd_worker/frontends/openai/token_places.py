"""Tokens of a pooled text and their places in it, so that who reads a row's answer needs no tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_worker.compat.late_texts import encode_late_text
from spmd_worker.compat.text_offsets import text_offsets
from spmd_worker.frontends.openai.row import ReadPrompt, TextPrompt
from spmd_worker.model_config.late_interaction import LateInteraction
from spmd_worker.model_config.sentence_folder import TextTransform
from spmd_worker.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """`tokens` of a row, as the vocabulary writes them, None for an id without one; and `offsets`, (start, end) of each
    in characters of the row's text, (0, 0) of special tokens and of the folder's prompt. None without a text that the
    tokenizer has encoded to these tokens.
    """

    tokens: tuple[str | None, ...]
    offsets: tuple[tuple[int, int], ...] | None

    @staticmethod
    def of(
        prompt: ReadPrompt,
        token_ids: tuple[int, ...],
        tokenizer: Tokenizer,
        form: TextTransform,
        max_tokens: int | None,
    ) -> "TokenPlaces":
        """Places of a prompt's `token_ids` (`text_offsets`)."""
        tokens = tuple([tokenizer.token(token_id) for token_id in token_ids])
        if not isinstance(prompt, TextPrompt) or prompt.images:
            return TokenPlaces(tokens, None)
        return TokenPlaces(tokens, text_offsets(prompt.text, token_ids, tokenizer, form, max_tokens))

    @staticmethod
    def of_late(
        prompt: ReadPrompt,
        token_ids: tuple[int, ...],
        tokenizer: Tokenizer,
        late: LateInteraction,
        input_type: str,
        length: int | None,
        max_model_len: int,
    ) -> "TokenPlaces":
        """Places in a query or a document (`encode_late_text`)."""
        tokens = tuple([tokenizer.token(token_id) for token_id in token_ids])
        if not isinstance(prompt, TextPrompt):
            return TokenPlaces(tokens, None)
        return TokenPlaces(
            tokens, encode_late_text(late, tokenizer, prompt.text, input_type, length, max_model_len).offsets
        )

    def of_tokens(self, kept: Sequence[int] | None) -> "TokenPlaces":
        """Those of the tokens of these indices, None for all."""
        if kept is None:
            return self
        offsets = None if self.offsets is None else tuple([self.offsets[index] for index in kept])
        return TokenPlaces(tuple([self.tokens[index] for index in kept]), offsets)
