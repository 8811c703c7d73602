"""A pooling row: its texts as ids for an engine, and the body of its response."""

from collections.abc import Iterable
from dataclasses import dataclass

from spmd_worker.base.config.schema import RowLimits
from spmd_worker.compat.prompts import Encoded, TextPair, apply_pooling, encode_prompt
from spmd_worker.engine.validation import RequestError, RequestLimits
from spmd_worker.frontends.openai.decimals import shortest_decimals
from spmd_worker.frontends.openai.openai_body import JsonObject
from spmd_worker.frontends.openai.pooling_body import Spell, pair_scores, pooling_body
from spmd_worker.frontends.openai.prompt_values import RowProblem
from spmd_worker.frontends.openai.row import Prompt, Row, RowError, TextPrompt, shape_of
from spmd_worker.frontends.openai.row_parser import encode
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.pooling_params import PoolingParams, pooled_sampling, resolve_pooling
from spmd_worker.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedPooledRow:
    """A row that can run: the ids and the parameters of each of its texts. `are_pairs`: a text is both of a pair.
    `measure` compares the vectors of a row that scores.
    """

    row: Row
    params: PoolingParams
    texts: tuple[tuple[tuple[int, ...], PoolingParams], ...]
    are_pairs: bool
    measure: str = "cosine"


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """Outputs of all texts of a row, in their order."""

    outputs: tuple[RequestOutput, ...]
    finished: bool = True

    @property
    def failed(self) -> RequestOutput | None:
        """Output of the first text without a vector; its error is the row's."""
        return next((output for output in self.outputs if output.error is not None), None)

    @property
    def error(self) -> str | None:
        return None if self.failed is None else self.failed.error

    @property
    def error_code(self) -> str | None:
        """Code of the row's error."""
        return None if self.failed is None else self.failed.error_code


def encode_pooled(
    row: Row, tokenizer: Tokenizer | None, engine: RequestLimits, limits: RowLimits
) -> EncodedPooledRow | RowError:
    """Encode a row's texts as ids within the limits of `engine`."""
    try:
        return _encoded(row, tokenizer, engine, limits.max_prompt_tokens)
    except (RowProblem, RequestError) as problem:
        return RowError(row.index, row.custom_id, shape_of(row.kind), problem.code, str(problem))


def _encoded(
    row: Row, tokenizer: Tokenizer | None, engine: RequestLimits, max_prompt_tokens: int | None
) -> EncodedPooledRow:
    ask = row.pooling
    assert ask is not None, "a row that is pooled"
    engine.check_runner(ask.params)
    config = engine.pooling
    assert config is not None, "what was let pass is pooled here"
    try:
        taken = resolve_pooling(ask.params, config)
    except ValueError as error:
        raise RowProblem("invalid_value", str(error)) from None
    are_pairs = bool(ask.num_firsts) and config.task == "classify"
    prompts: Iterable[Prompt | TextPair] = ask.prompts
    if are_pairs:
        firsts, seconds = ask.prompts[: ask.num_firsts], ask.prompts[ask.num_firsts :]
        firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
        # Lazily: the first pair that is too long ends it, before all are built.
        pairs = (TextPair(_text(first), _text(second)) for first, second in zip(firsts, seconds))
        prompts = pairs if config.encodes_inside else (TextPrompt(pair.first + pair.second) for pair in pairs)
    texts = []
    for prompt in prompts:
        encoded = _cut(prompt, tokenizer, engine, ask.params)
        engine.check(encoded.token_ids, pooled_sampling(taken, config), taken)
        num_tokens = len(encoded.token_ids)
        if max_prompt_tokens is not None and num_tokens > max_prompt_tokens:
            message = f"the prompt has {num_tokens} tokens, more than limits.max_prompt_tokens={max_prompt_tokens}"
            raise RowProblem("prompt_too_long", message)
        assert encoded.pooling is not None, "taken"
        texts.append((encoded.token_ids, encoded.pooling))
    return EncodedPooledRow(row, taken, tuple(texts), are_pairs, config.similarity)


def _cut(
    prompt: Prompt | TextPair, tokenizer: Tokenizer | None, engine: RequestLimits, params: PoolingParams
) -> Encoded:
    """Encode a prompt, truncated like `apply_pooling`."""

    def need_tokenizer() -> Tokenizer:
        assert tokenizer is not None, "of text"
        return tokenizer

    def check_text(*texts: str) -> None:
        engine.check_text(need_tokenizer(), *texts, is_cut=params.truncate_prompt_tokens is not None)

    if isinstance(prompt, TextPair):
        if tokenizer is None:
            raise RowProblem("tokenizer_missing", "the model folder has no tokenizer.json: give ids")
        check_text(prompt.first, prompt.second)
        encoded = encode_prompt(prompt, need_tokenizer)
    else:
        text, token_ids = encode(prompt, tokenizer, check_text)
        # The text of a chat template is truncated as ids: its special tokens are part of the text.
        encoded = Encoded(text if isinstance(prompt, TextPrompt) else None, token_ids)
    try:
        apply_pooling(encoded, params, engine.pooling, engine.max_model_len, need_tokenizer)
    except ValueError as error:
        raise RowProblem("invalid_value", str(error)) from None
    if encoded.error is not None:
        raise RowProblem("invalid_value", encoded.error)
    return encoded


def pooled_response(
    encoded: EncodedPooledRow, output: PooledOutput, model_name: str, spell: Spell = shortest_decimals
) -> JsonObject:
    """Body of the response to an OpenAI row."""
    row = encoded.row
    assert row.pooling is not None, "a row that is pooled"
    scores = pair_scores(row.pooling, output.outputs, are_pairs=encoded.are_pairs, measure=encoded.measure)
    return pooling_body(row, output.outputs, scores, model_name, spell)


def _text(prompt: object) -> str:
    assert isinstance(prompt, TextPrompt), "rows that score have texts"
    return prompt.text
