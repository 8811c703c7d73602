"""Validation of requests against the limits of an engine, before they are queued. Imports no torch, for row readers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spmd_worker.base.config.plain_values import plain_int, shown
from spmd_worker.compat.encoder_prompts import EncoderPrompts
from spmd_worker.compat.image_prompts import ImagePrompts
from spmd_worker.engine.embeds_reader import EmbedsReader
from spmd_worker.engine.encoder_limits import EncoderLimits, check_encoder_input
from spmd_worker.engine.request_error import RequestError
from spmd_worker.engine.thinking_budget import ThinkingBudget
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.model_config.pooling import PoolingConfig
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.grammar.llguidance_input import GrammarError
from spmd_worker.replica.scheduler.media_rows import NO_MEDIA, MediaRowLimits
from spmd_worker.replica.sequence.media_items import MediaItem, check_media
from spmd_worker.replica.sequence.pooling_params import (
    MAX_STEP_NUMBERS,
    MAX_TOKEN_NUMBERS,
    PoolingParams,
    check_task,
)
from spmd_worker.replica.sequence.request import RequestId, as_token_ids, check_sampling
from spmd_worker.replica.sequence.resolved_params import truncated_prompt
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.tokenizer.tokenizer import Tokenizer

_NO_REQUEST: Final = RequestId(-1)
_MAX_ID_DIGITS: Final = 19
_SHORT_TEXT: Final = 10_000
"""Characters of a text that is encoded without a check: it takes no time."""
_MAX_CHARACTERS: Final = 1 << 22
"""Maximum size of an encoded text, and of a chat template's; a million takes about a second and 200 MiB."""
_CHARACTERS_PER_TOKEN: Final = 16
"""Characters per token of the maximum model length that are always encoded."""


def as_request_ids(given: Any) -> list[RequestId]:
    """One request id or an iterable of them: numbers as `add_request` returns them, or text as in outputs.

    A text that is not a number is the id of no request. Raises TypeError for anything else.
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
            f"{shown(value)} is not a request id: give the number that add_request returned, an output's request_id, "
            f"or several of these in a list"
        )
    return RequestId(number)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one engine; `max_model_len` counts prompt and output tokens. `grammars` compiles structured outputs,
    which are rejected without it; `rows` reads prompts of embeddings, `images` images, whose limits are `media`. With
    `pooling` all rows are pooled. `encoder` are limits of the input that each row of an encoder-decoder model has,
    which `encoder_prompts` reads. `architecture` is the model's, for errors. `nums_chosen` are the numbers of experts
    that sparse layers choose for a token. `thinking` knows the markers of reasoning. `max_step_tokens` is
    `scheduler.max_num_batched_tokens`. `num_text_ids` is `ModelConfig.num_text_ids`, None for the complete vocabulary.
    """

    vocab_size: int
    max_model_len: int
    has_tokenizer: bool
    grammars: GrammarCompiler | None = None
    pooling: PoolingConfig | None = None
    rows: EmbedsReader | None = None
    images: ImagePrompts | None = None
    architecture: str = ""
    media: MediaRowLimits = NO_MEDIA
    encoder: EncoderLimits | None = None
    encoder_prompts: EncoderPrompts | None = None
    nums_chosen: tuple[int, ...] = ()
    thinking: ThinkingBudget | None = None
    allows_priority: bool = False
    max_step_tokens: int = 0
    num_text_ids: int | None = None

    def close(self) -> None:
        """End the processes that prepare images or audio. Idempotent."""
        if self.images is not None:
            self.images.preparer.close()
        if self.encoder_prompts is not None and self.encoder_prompts.audio is not None:
            self.encoder_prompts.audio.close()

    def truncate(self, prompt: PromptContent, sampling: SamplingParams) -> tuple[int, ...]:
        """The ids of a prompt after `truncate_prompt_tokens`. Raises TypeError for an invalid type, RequestError for a
        prompt of embeddings.
        """
        check_sampling(sampling)
        if sampling.truncate_prompt_tokens is None:
            return prompt.token_ids
        if prompt.rows is not None:
            message = "truncate_prompt_tokens cuts token ids, and this prompt has prompt_embeds: cut its rows"
            raise RequestError("conflicting_keys", message)
        sampling.check()
        return truncated_prompt(
            self._token_ids(prompt.token_ids), sampling, self.max_model_len - prompt.num_virtual_tokens
        )

    def check(self, prompt: PromptContent, sampling: SamplingParams) -> None:
        """Raise RequestError for the first invalid value, TypeError for an invalid type."""
        rows, encoder = prompt.rows, prompt.encoder
        check_sampling(sampling)
        self.check_runner(prompt.pooling)
        if rows is not None and sampling.scores_prompt and rows.num_rows == len(prompt.token_ids):
            message = "prompt_logprobs are those of token ids, and prompt_embeds have none: leave prompt_logprobs out"
            raise RequestError("conflicting_keys", message)
        token_ids = self._token_ids(prompt.token_ids)
        self._check_prompt(prompt, token_ids, sampling)
        if self.pooling is not None and self.pooling.shifted is not None:
            try:
                self.pooling.shifted.decoder_ids(token_ids)
            except ValueError as error:
                raise RequestError("invalid_value", str(error)) from None
        if prompt.media_items:
            if rows is not None or sampling.truncate_prompt_tokens is not None:
                key = "prompt_embeds" if rows is not None else "truncate_prompt_tokens"
                raise RequestError(
                    "conflicting_keys", f"{key} and images or audio exclude each other: leave one of them out"
                )
            self._check_media(prompt.media_items, len(token_ids))
        check_encoder_input(self.encoder, self.vocab_size, encoder)
        if encoder is not None and (rows is not None or prompt.num_virtual_tokens):
            key = "prompt_embeds" if rows is not None else "a prompt adapter"
            raise RequestError(
                "conflicting_keys", f"{key} and an encoder's input exclude each other: leave out the first"
            )
        sampling.check()
        try:
            sampling.check_scored_rows(len(token_ids))
        except ValueError as error:
            raise RequestError("invalid_value", str(error)) from None
        self._check_sampling(sampling)

    def check_text(
        self, tokenizer: Tokenizer, *texts: str, is_cut: bool = False, most: int | None = None, key: str = ""
    ) -> None:
        """Raise RequestError for texts, to be encoded together, with a minimum number of tokens above the model's
        limit, or above `most` of the name `key`, and for texts that are too large to encode. With `is_cut` the prompt
        will be truncated: any number of tokens fits. A text of an encoder-decoder model may be of either part.
        """
        num_characters = sum(map(len, texts))
        if num_characters <= _SHORT_TEXT:
            return
        least = 0 if is_cut else sum(tokenizer.min_num_tokens(text) for text in texts)
        encoder = self.encoder if self.encoder is not None and self.encoder.kind == "text" else None
        limit = self.max_model_len if encoder is None else max(self.max_model_len, encoder.max_len)
        if least > limit:
            count = f"at least {least}"
            raise self._too_long(count) if encoder is None else encoder.too_long(count)
        if most is not None and least > most:
            raise RequestError("prompt_too_long", f"the prompt has at least {least} tokens, more than {key}={most}")
        bound = max(_MAX_CHARACTERS, _CHARACTERS_PER_TOKEN * limit)
        if num_characters > bound:
            message = f"the prompt has {num_characters} characters, more than the limit of {bound}: shorten it"
            raise RequestError("prompt_too_long", message)

    def check_priority(self, priority: int) -> None:
        """Raise RequestError for a priority without its policy."""
        if priority and not self.allows_priority:
            message = f"priority={priority} needs scheduler.policy=priority: set it, or leave priority out"
            raise RequestError("unsupported_value", message)

    def check_token_numbers(self, num_vectors: int, pooling: PoolingParams) -> None:
        """Raise RequestError for a row whose tokens, or late chunks, have more numbers than a message holds."""
        if not pooling.is_for_tokens or self.pooling is None:
            return
        size, given = self.pooling.token_size, f"{pooling.task} with {self.pooling.token_size} numbers for each token"
        if num_vectors * size > MAX_TOKEN_NUMBERS:
            most = MAX_TOKEN_NUMBERS // size
            raise RequestError("limit_exceeded", f"{given} is for rows of at most {most} tokens, not {num_vectors}")
        if self.max_step_tokens * size > MAX_STEP_NUMBERS:
            raise RequestError(
                "limit_exceeded",
                f"{given} needs scheduler.max_num_batched_tokens={self.max_step_tokens} to be at most "
                f"{MAX_STEP_NUMBERS // size}: lower it",
            )

    def check_runner(self, pooling: PoolingParams | None) -> None:
        """Raise RequestError for a row of another runner."""
        try:
            if pooling is not None:
                check_task(pooling.task or (self.pooling.task if self.pooling else "pooling"), self.pooling)
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

    def _check_prompt(self, prompt: PromptContent, token_ids: tuple[int, ...], sampling: SamplingParams) -> None:
        pooling, num_virtual = prompt.pooling, prompt.num_virtual_tokens
        if not token_ids:
            raise RequestError("empty_prompt", "the prompt has no tokens: give at least one")
        if pooling is not None:
            self.check_token_numbers(pooling.num_vectors(len(token_ids)), pooling)
        least, most = min(token_ids), max(token_ids)
        if self._is_of_images(most, token_ids, prompt.media_items):
            # Its embedding is not looked up, and in some models there is none.
            most = max([each for each in token_ids if each != most], default=0)
        if least < 0 or most >= self.vocab_size:
            outside = least if least < 0 else most
            raise RequestError(
                "token_out_of_vocabulary", f"token id {outside} is outside the vocabulary of {self.vocab_size} tokens"
            )
        if self.num_text_ids is not None and most >= self.num_text_ids:
            raise RequestError(
                "token_out_of_vocabulary",
                f"token id {most} is for images or audio, and the model ({self.architecture}) runs with text alone: "
                f"leave out tokens from {self.num_text_ids} on",
            )
        # A prompt that is only scored or pooled needs no slot for an output token: it is not computed.
        is_all = pooling is not None or (sampling.scores_prompt and sampling.max_tokens == 1)
        if num_virtual + len(token_ids) + (0 if is_all else 1) > self.max_model_len:
            count = str(len(token_ids))
            raise self._too_long(f"{num_virtual} virtual and {count}" if num_virtual else count)

    def _is_of_images(self, token_id: int, token_ids: tuple[int, ...], media_items: Sequence[MediaItem]) -> bool:
        """Whether all tokens of an id take rows of images: one more, of a scored completion, is a token like others."""
        if not media_items or self.images is None or token_id not in self.images.token_ids:
            return False
        return sum(map(token_ids.count, self.images.token_ids)) == sum(item.num_rows for item in media_items)

    def _check_media(self, media_items: Sequence[MediaItem], num_tokens: int) -> None:
        code, message = self.media.refusal(media_items)
        if code:
            raise RequestError(code, message)
        try:
            check_media(media_items, num_tokens)
        except ValueError as error:
            raise RequestError("placeholder_mismatch", str(error)) from None

    def _too_long(self, count: str) -> RequestError:
        held = "the prompt: truncate it with truncate_prompt_tokens=-1,"
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
        if sampling.return_routed_experts and len(self.nums_chosen) != 1:
            reason = "has no experts" if not self.nums_chosen else "has layers that choose different numbers of experts"
            message = f"return_routed_experts=True, but the model {reason}: leave it out"
            raise RequestError("experts_unsupported", message)
        if sampling.thinking_token_budget is not None and self.thinking is not None:
            self.thinking.markers()
        if sampling.structured_outputs is not None:
            self._check_grammar(sampling.structured_outputs)
        try:
            sampling.check_vocabulary(self.vocab_size)
        except ValueError as error:
            raise RequestError("token_out_of_vocabulary", str(error)) from None

    def _check_grammar(self, form: StructuredOutputsParams) -> None:
        if self.grammars is None or not self.has_tokenizer:
            message = "structured_outputs need a tokenizer.json in the model folder: use allowed_token_ids"
            raise RequestError("tokenizer_missing", message)
        try:
            self.grammars.check(form)
        except GrammarError as error:
            raise RequestError(error.code, f"structured_outputs: {error}") from None
