"""Which requests an engine can answer at all: checked once, before anything is queued, so that one costs the others
nothing.

Imports no torch, for the reader of rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spmd_worker.base.config.plain_values import plain_int, shown
from spmd_worker.model_config.pooling import PoolingConfig
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.grammar.forms import GrammarError
from spmd_worker.replica.sequence.pooling_params import PoolingParams, check_task
from spmd_worker.replica.sequence.request import RequestId, as_token_ids, check_sampling
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.replica.sequence.taken_params import truncated_prompt
from spmd_worker.tokenizer.tokenizer import Tokenizer

_NO_REQUEST: Final = RequestId(-1)
_MAX_ID_DIGITS: Final = 19
_SHORT_TEXT: Final = 10_000
"""Characters that are encoded in a moment."""
_MOST_CHARACTERS: Final = 1 << 22
"""Of a text that is encoded, which takes about a second and 200 MiB for each million; as much as a chat template may
write.
"""
_CHARACTERS_A_TOKEN: Final = 16
"""So many fit a model of any length."""


def as_request_ids(given: Any) -> list[RequestId]:
    """One request id, or each of an iterable: as a number, as `add_request` returns it, or as text, as outputs have it.

    A text that is no number is the id of no request. Raises TypeError for anything else.
    """
    is_several = isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray)
    return [_as_request_id(each) for each in (given if is_several else [given])]


def _as_request_id(value: Any) -> RequestId:
    if isinstance(value, str):
        is_number = value.isascii() and value.isdigit() and len(value) <= _MAX_ID_DIGITS
        return RequestId(int(value)) if is_number else _NO_REQUEST
    number = plain_int(value)
    if number is None:
        raise TypeError(
            f"{shown(value)} is no request id: give the number that add_request returned, an output's request_id, or "
            f"several of these in a list"
        )
    return RequestId(number)


class RequestError(ValueError):
    """A request that could never be answered: the message names what to change, `code` is an error row's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one engine can answer; `max_model_len` counts prompt and output tokens. `grammars` compiles the forms that
    answers must have; without it there are none to be had. With `pooling` rows are pooled, and none generates.
    """

    vocab_size: int
    max_model_len: int
    has_tokenizer: bool
    grammars: GrammarCompiler | None = None
    pooling: PoolingConfig | None = None

    def truncate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> Sequence[int]:
        """What the parameters leave of a prompt (`truncate_prompt_tokens`). Raises TypeError for what is no request."""
        check_sampling(sampling)
        if sampling.truncate_prompt_tokens is None:
            return prompt_token_ids
        sampling.check()
        return truncated_prompt(self._token_ids(prompt_token_ids), sampling, self.max_model_len)

    def check(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, pooling: PoolingParams | None = None
    ) -> None:
        """Raise RequestError for what is wrong first, TypeError for what is no request."""
        check_sampling(sampling)
        self.check_runner(pooling)
        # An output token needs no place behind a prompt that is only scored or pooled: nothing is computed with it.
        is_all = pooling is not None or (sampling.prompt_logprobs is not None and sampling.max_tokens == 1)
        self._check_prompt(self._token_ids(prompt_token_ids), num_output_tokens=0 if is_all else 1)
        sampling.check()
        self._check_sampling(sampling)

    def check_text(
        self, tokenizer: Tokenizer, *texts: str, is_cut: bool = False, most: int | None = None, key: str = ""
    ) -> None:
        """Raise RequestError for texts, which are encoded together, that have too many tokens whatever these are, or
        too many characters to count them: such are not encoded. With `most` the limit is that one, of the name `key`.
        `is_cut`: any number of tokens fits.
        """
        num_characters = sum(map(len, texts))
        if num_characters <= _SHORT_TEXT:
            return
        least = 0 if is_cut else sum(tokenizer.min_num_tokens(text) for text in texts)
        if least > self.max_model_len:
            raise self._too_long(f"at least {least}")
        if most is not None and least > most:
            raise RequestError("prompt_too_long", f"the prompt has at least {least} tokens, more than {key}={most}")
        bound = max(_MOST_CHARACTERS, _CHARACTERS_A_TOKEN * self.max_model_len)
        if num_characters > bound:
            message = f"the prompt has {num_characters} characters, and no more than {bound} are encoded: shorten it"
            raise RequestError("prompt_too_long", message)

    def check_runner(self, pooling: PoolingParams | None) -> None:
        """Raise RequestError for a row that another runner serves."""
        try:
            if pooling is not None:
                check_task(pooling.task or "embed", self.pooling)
        except ValueError as error:
            raise RequestError("wrong_runner", str(error)) from None
        if pooling is None and self.pooling is not None:
            raise RequestError(
                "wrong_runner",
                f"this run pools (model.runner=pooling) and gives {', '.join(self.pooling.tasks)}: text is generated "
                f"by one with model.runner=generate",
            )

    def _token_ids(self, prompt_token_ids: Sequence[int]) -> tuple[int, ...]:
        try:
            return as_token_ids(prompt_token_ids)
        except ValueError:
            raise RequestError(
                "token_out_of_vocabulary",
                f"token id of more than 64 bits is outside the vocabulary of {self.vocab_size} tokens",
            ) from None

    def _check_prompt(self, prompt_token_ids: tuple[int, ...], num_output_tokens: int) -> None:
        if not prompt_token_ids:
            raise RequestError("empty_prompt", "the prompt has no tokens: give at least one")
        least, most = min(prompt_token_ids), max(prompt_token_ids)
        if least < 0 or most >= self.vocab_size:
            outside = least if least < 0 else most
            raise RequestError(
                "token_out_of_vocabulary", f"token id {outside} is outside the vocabulary of {self.vocab_size} tokens"
            )
        if len(prompt_token_ids) + num_output_tokens > self.max_model_len:
            raise self._too_long(str(len(prompt_token_ids)))

    def _too_long(self, count: str) -> RequestError:
        held = "the prompt: truncate_prompt_tokens=-1 cuts it, else"
        held = held if self.pooling is not None else "the prompt and at least one output token:"
        return RequestError(
            "prompt_too_long",
            f"the prompt has {count} tokens but model.max_model_len is {self.max_model_len}, which must hold {held} "
            f"shorten the prompt or raise model.max_model_len",
        )

    def _check_sampling(self, sampling: SamplingParams) -> None:
        if sampling.stop and not self.has_tokenizer:
            message = "stop strings need a tokenizer.json in the model folder: use stop_token_ids"
            raise RequestError("tokenizer_missing", message)
        if sampling.bad_words and not self.has_tokenizer:
            message = "bad_words need a tokenizer.json in the model folder: use bad_words_ids"
            raise RequestError("tokenizer_missing", message)
        if sampling.structured_outputs is not None:
            self._check_form(sampling.structured_outputs)
        try:
            sampling.check_vocabulary(self.vocab_size)
        except ValueError as error:
            raise RequestError("token_out_of_vocabulary", str(error)) from None

    def _check_form(self, form: StructuredOutputsParams) -> None:
        if self.grammars is None or not self.has_tokenizer:
            message = "structured_outputs need a tokenizer.json in the model folder: use allowed_token_ids"
            raise RequestError("tokenizer_missing", message)
        try:
            self.grammars.check(form)
        except GrammarError as error:
            raise RequestError(error.code, f"structured_outputs: {error}") from None
