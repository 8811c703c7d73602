"""A row that is pooled: its texts as ids that an engine takes, and the body of its response."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from spmd_worker.batch.input.prompt_values import RowProblem
from spmd_worker.batch.input.row_parser import encode
from spmd_worker.batch.output.decimals import shortest_decimals
from spmd_worker.batch.output.openai_body import JsonObject
from spmd_worker.batch.output.pooling_body import Spell, pair_scores, pooling_body
from spmd_worker.batch.row import Prompt, Row, RowError, TextPrompt, shape_of
from spmd_worker.compat.prompts import TextPair
from spmd_worker.config.schema import RowLimits
from spmd_worker.engine.validation import RequestError, RequestLimits
from spmd_worker.sequence.outputs import RequestOutput
from spmd_worker.sequence.pooling_params import PoolingParams, pooled_sampling, taken_pooling, truncated_row
from spmd_worker.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedPooledRow:
    """A row that can run: the ids of each of its texts. `are_pairs`: a text is both of a pair; `num_first_tokens` are
    how many tokens of each text are of its first, where the model is told so.
    """

    row: Row
    params: PoolingParams
    texts: tuple[tuple[int, ...], ...]
    are_pairs: bool
    num_first_tokens: tuple[int | None, ...] = ()

    def requests(self) -> Iterator[tuple[tuple[int, ...], PoolingParams]]:
        """Ids and parameters of each text."""
        firsts = self.num_first_tokens or (None,) * len(self.texts)
        for token_ids, first in zip(self.texts, firsts, strict=True):
            yield token_ids, self.params if first is None else replace(self.params, num_first_tokens=first)


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """Of all texts of a row, in their order."""

    outputs: tuple[RequestOutput, ...]
    finished: bool = True

    @property
    def failed(self) -> RequestOutput | None:
        """The first of a text that has no vector; its error is the row's."""
        return next((output for output in self.outputs if output.error is not None), None)

    @property
    def error(self) -> str | None:
        """The row's error."""
        return None if self.failed is None else self.failed.error

    @property
    def error_code(self) -> str | None:
        """The same as a code."""
        return None if self.failed is None else self.failed.error_code


def encode_pooled(
    row: Row, tokenizer: Tokenizer | None, engine: RequestLimits, limits: RowLimits
) -> EncodedPooledRow | RowError:
    """A row with its texts as ids that an engine with the limits `engine` can pool."""
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
        taken = taken_pooling(ask.params, config)
    except ValueError as error:
        raise RowProblem("invalid_value", str(error)) from None
    are_pairs = bool(ask.num_firsts) and config.task == "classify"
    prompts: Iterable[Prompt | TextPair] = ask.prompts
    if are_pairs:
        firsts, seconds = ask.prompts[: ask.num_firsts], ask.prompts[ask.num_firsts :]
        firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
        # One at a time: the first that is too long ends it, before all are there.
        pairs = (TextPair(_text(first), _text(second)) for first, second in zip(firsts, seconds))
        prompts = pairs if config.is_encoder else (TextPrompt(pair.first + pair.second) for pair in pairs)
    texts, num_first_tokens = [], []
    for prompt in prompts:
        token_ids, num_first = _cut_ids(prompt, tokenizer, engine, ask.params.truncate_prompt_tokens)
        engine.check(token_ids, pooled_sampling(taken, config), taken)
        if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
            message = f"the prompt has {len(token_ids)} tokens, more than limits.max_prompt_tokens={max_prompt_tokens}"
            raise RowProblem("prompt_too_long", message)
        texts.append(token_ids)
        num_first_tokens.append(num_first if config.has_token_types else None)
    return EncodedPooledRow(row, taken, tuple(texts), are_pairs, tuple(num_first_tokens))


def _cut_ids(
    prompt: Prompt | TextPair, tokenizer: Tokenizer | None, engine: RequestLimits, length: int | None
) -> tuple[tuple[int, ...], int | None]:
    """The ids of a prompt, as `truncate_prompt_tokens` leaves them, and of a pair how many are of the first text."""
    if isinstance(prompt, TextPair):
        texts: tuple[str, str | None] = (prompt.first, prompt.second)
    elif isinstance(prompt, TextPrompt) and length is not None and engine.pooling and engine.pooling.is_encoder:
        texts = (prompt.text, None)
    else:
        return truncated_row(encode(prompt, tokenizer)[1], length, engine.max_model_len), None
    if tokenizer is None:
        raise RowProblem("tokenizer_missing", "the model folder has no tokenizer.json: give ids")
    try:
        token_ids, num_first = tokenizer.encode_inside(*texts, engine.max_model_len if length == -1 else length)
    except ValueError as error:
        raise RowProblem("invalid_value", str(error)) from None
    return tuple(token_ids), num_first if texts[1] is not None else None


def pooled_response(
    encoded: EncodedPooledRow, output: PooledOutput, model_name: str, spell: Spell = shortest_decimals
) -> JsonObject:
    """The body of the response to an OpenAI row."""
    row = encoded.row
    assert row.pooling is not None, "a row that is pooled"
    scores = pair_scores(row.pooling, output.outputs, are_pairs=encoded.are_pairs)
    return pooling_body(row, output.outputs, scores, model_name, spell)


def _text(prompt: object) -> str:
    assert isinstance(prompt, TextPrompt), "rows that score have texts"
    return prompt.text
