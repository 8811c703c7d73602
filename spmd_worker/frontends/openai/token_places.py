"""Tokens of a pooled text and their places in it, so that who reads a row's answer needs no tokenizer."""

from dataclasses import dataclass

from spmd_worker.frontends.openai.row import ReadPrompt, TextPrompt
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
        """Places of a prompt's `token_ids`. Its text is encoded once more, as the folder's `form` says, to at most
        `max_tokens`; None for all.
        """
        tokens = tuple([tokenizer.token(token_id) for token_id in token_ids])
        if not isinstance(prompt, TextPrompt) or prompt.images or form.message_format:
            return TokenPlaces(tokens, None)
        num_before = len(form.prompt)
        ids, offsets = tokenizer.encode_with_offsets(form.prompt + prompt.text, max_tokens)
        # Decoders keep the last tokens.
        if not token_ids or tuple(ids[-len(token_ids) :]) != token_ids:
            return TokenPlaces(tokens, None)
        places = [(max(0, start - num_before), max(0, end - num_before)) for start, end in offsets[-len(token_ids) :]]
        return TokenPlaces(tokens, tuple(places))
