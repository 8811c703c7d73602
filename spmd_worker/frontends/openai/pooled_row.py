"""A pooling row: its texts as ids for an engine, and their outputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from spmd_worker.compat.late_texts import kept_tokens
from spmd_worker.compat.prompts import Encoded, PromptReader, TextPair, apply_pooling
from spmd_worker.compat.text_offsets import text_offsets
from spmd_worker.engine.request_error import RequestError
from spmd_worker.engine.validation import RequestLimits
from spmd_worker.frontends.openai.prompt_ids import encode, encode_with_images, prepare_images
from spmd_worker.frontends.openai.prompt_values import invalid_request
from spmd_worker.frontends.openai.row import ReadPrompt, Row, TextPrompt
from spmd_worker.frontends.openai.row_encoding import RowContext
from spmd_worker.frontends.openai.token_places import TokenPlaces
from spmd_worker.frontends.openai.turns import Turns, result_of
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.model_config.late_interaction import INPUT_TYPES
from spmd_worker.model_config.pooling import PoolingConfig
from spmd_worker.replica.sequence.late_chunking import LateChunkingMetadata, chunks_of
from spmd_worker.replica.sequence.pooling_params import PoolingParams, pooled_sampling, resolve_pooling
from spmd_worker.tokenizer.messages import InvalidRequestError
from spmd_worker.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedPooledRow:
    """A row that can run: its texts, or pairs, as ids; `pooling`, the model's, says how vectors are compared, and
    `labels` name scores. `places` are those of a plain row with numbers for each token; None without a tokenizer.
    `chunks` are parallel to `texts`, with late chunking.
    """

    row: Row
    params: PoolingParams
    texts: tuple[PromptContent, ...]
    are_pairs: bool
    pooling: PoolingConfig | None = None
    labels: tuple[str | None, ...] = ()
    places: TokenPlaces | None = None
    chunks: tuple[LateChunkingMetadata, ...] = ()

    @property
    def num_sequences(self) -> int:
        return len(self.texts)

    @property
    def media(self) -> tuple[PreparedMedia, ...]:
        return tuple([each for text in self.texts for each in text.media])

    def without_media(self) -> "EncodedPooledRow":
        return replace(self, texts=tuple([replace(each, media=()) for each in self.texts])) if self.media else self


def encode_pooled(row: Row, context: RowContext, media: Sequence[PreparedMedia] | None = None) -> EncodedPooledRow:
    """Encode a row's texts as ids. `media` are its images, prepared before. Raises InvalidRequestError."""
    return result_of(encode_pooled_in_turns(row, context, media))


def encode_pooled_in_turns(
    row: Row, context: RowContext, media: Sequence[PreparedMedia] | None = None
) -> Turns[EncodedPooledRow]:
    """`encode_pooled`, with a pause after each text."""
    tokenizer, engine = context.tokenizer, context.engine
    inputs = row.pooling
    assert inputs is not None, "a pooling row"
    with invalid_request(errors=RequestError):
        adapter_id = context.models.adapters_of(row).adapter_id
        engine.check_runner(inputs.params)
        engine.check_priority(row.priority)
        config = engine.pooling
        assert config is not None, "checked by check_runner"
        with invalid_request():
            params = resolve_pooling(inputs.params, config)
        are_pairs = bool(inputs.num_firsts) and config.task == "classify"
        prompts: Iterable[ReadPrompt | TextPair] = inputs.prompts
        if are_pairs:
            firsts, seconds = inputs.prompts[: inputs.num_firsts], inputs.prompts[inputs.num_firsts :]
            firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
            # Lazily: the first pair that is too long ends it, before all are built.
            pairs = (TextPair(_text(first), _text(second)) for first, second in zip(firsts, seconds))
            prompts = pairs if config.encodes_inside else (TextPrompt(pair.first + pair.second) for pair in pairs)
        texts: list[PromptContent] = []
        chunks: list[LateChunkingMetadata] = []
        places, num_of_row = None, 0
        for index, prompt in enumerate(prompts):
            given = inputs.params
            if config.late is not None and inputs.num_firsts:
                given = replace(given, input_type=INPUT_TYPES[index >= inputs.num_firsts])
            encoded = _truncated(prompt, context, given, media)
            engine.check(encoded, pooled_sampling(params, config))
            num_tokens, most = len(encoded.token_ids), context.limits.max_prompt_tokens
            num_of_row += params.num_vectors(num_tokens)
            engine.check_token_numbers(num_of_row, params)
            if most is not None and num_tokens > most:
                message = f"the prompt has {num_tokens} tokens, more than limits.max_prompt_tokens={most}"
                raise InvalidRequestError(message, "prompt_too_long")
            # The texts, which no answer has, are not kept.
            encoded.text, encoded.pair = None, None
            encoded.adapter, encoded.priority = adapter_id, row.priority
            texts.append(encoded)
            if row.kind == "pooled" and params.is_for_tokens and tokenizer is not None:
                assert isinstance(prompt, ReadPrompt), prompt
                most = _max_tokens(inputs.params, engine) if config.encodes_inside else None
                kept = kept_tokens(config.late, tokenizer, encoded.token_ids, given.input_type)
                with invalid_request():
                    if config.late is not None and given.input_type is not None:
                        places = TokenPlaces.of_late(
                            *(prompt, encoded.token_ids, tokenizer),
                            config.late,
                            given.input_type,
                            _max_tokens(given, engine),
                            engine.max_model_len,
                        ).of_tokens(kept)
                    else:
                        places = TokenPlaces.of(prompt, encoded.token_ids, tokenizer, config.text, most)
            if params.late_chunking_params is not None:
                offsets, most = None, num_tokens if config.encodes_inside else None
                if isinstance(prompt, TextPrompt) and not prompt.images and tokenizer is not None:
                    offsets = text_offsets(prompt.text, encoded.token_ids, tokenizer, config.text, most)
                chunks.append(chunks_of(params.late_chunking_params, num_tokens, offsets))
            yield
        named = (config.labels, places, tuple(chunks))
        return EncodedPooledRow(row, params, tuple(texts), are_pairs, config, *named)


def _max_tokens(params: PoolingParams, engine: RequestLimits) -> int | None:
    """Tokens to which a text is truncated; None for all of it."""
    length = params.truncate_prompt_tokens
    return engine.max_model_len if length == -1 else length


def _truncated(
    prompt: ReadPrompt | TextPair, context: RowContext, params: PoolingParams, media: Sequence[PreparedMedia] | None
) -> Encoded:
    """Encode a prompt, truncated like `apply_pooling`."""
    tokenizer, engine = context.tokenizer, context.engine

    def need_tokenizer() -> Tokenizer:
        assert tokenizer is not None, "text needs a tokenizer"
        return tokenizer

    def check_text(*texts: str) -> None:
        is_cut = params.truncate_prompt_tokens is not None or params.input_type is not None
        engine.check_text(need_tokenizer(), *texts, is_cut=is_cut)

    if isinstance(prompt, TextPair):
        if tokenizer is None:
            raise InvalidRequestError("the model folder has no tokenizer.json: give ids", "tokenizer_missing")
        check_text(prompt.first, prompt.second)
        encoded = PromptReader(need_tokenizer).encode(prompt)
    elif prompt.images:
        is_truncated = params.truncate_prompt_tokens is not None
        images = prepare_images(prompt, engine, is_truncated=is_truncated) if media is None else tuple(media)
        given = (prompt, images, tokenizer, engine, check_text)
        text, made = encode_with_images(*given, is_truncated=is_truncated)
        encoded = Encoded(made.token_ids, text, media=made.media, media_items=made.items)
    else:
        text, token_ids = encode(prompt, tokenizer, check_text)
        encoded = Encoded(token_ids, text)
    # The text of a chat template is truncated as ids: its special tokens are part of the text.
    encoded.text = encoded.text if isinstance(prompt, TextPrompt) else None
    with invalid_request():
        apply_pooling(encoded, params, engine.pooling, engine.max_model_len, need_tokenizer)
    if encoded.error is not None:
        raise InvalidRequestError(encoded.error)
    return encoded


def _text(prompt: object) -> str:
    assert isinstance(prompt, TextPrompt), "rows that score have texts"
    return prompt.text
