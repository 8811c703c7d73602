"""Parses a line into a Row, and encodes a Row; any error becomes a RowError, never an exception.

The OpenAI format is parsed in `openai_request.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final

from spmd_worker.base.config.schema import RowLimits
from spmd_worker.base.errors import ChatTemplateError, TokenizerError
from spmd_worker.base.files import JsonError, parse_json_object
from spmd_worker.chat.chat_format import ChatFormat
from spmd_worker.engine.validation import RequestError, RequestLimits
from spmd_worker.frontends.openai.answer_form import answer_reader, check_template, form_problem, formed_sampling
from spmd_worker.frontends.openai.openai_request import OPENAI_ROW_KEYS, parse_openai
from spmd_worker.frontends.openai.pooling_request import PLAIN_KEYS as POOLING_KEYS
from spmd_worker.frontends.openai.pooling_request import PLAIN_TASKS, plain_pooling_row
from spmd_worker.frontends.openai.prompt_values import (
    RowProblem,
    chat_prompt,
    refuse_unknown_keys,
    sampling_from,
    short,
    text_prompt,
    tokens_prompt,
)
from spmd_worker.frontends.openai.row import (
    ChatPrompt,
    Echo,
    EncodedRow,
    ErrorShape,
    Prompt,
    Row,
    RowError,
    TokensPrompt,
    shape_of,
)
from spmd_worker.replica.sequence.resolved_params import resolve_params
from spmd_worker.replica.sequence.sampling_params import MAX_LOGPROBS, SAMPLING_KEYS, SamplingParams
from spmd_worker.tokenizer.token_texts import TokenTexts
from spmd_worker.tokenizer.tokenizer import Tokenizer, num_unfinished

_PROMPT_KEYS: Final = ("prompt", "prompt_token_ids", "messages")
_PLAIN_KEYS: Final = (*_PROMPT_KEYS, "custom_id", "chat_template_kwargs", *SAMPLING_KEYS)
ROW_KEYS: Final = tuple(dict.fromkeys((*_PLAIN_KEYS, *POOLING_KEYS, *OPENAI_ROW_KEYS)))
"""Keys of rows of all formats."""


_DEFAULT_LIMITS: Final = RowLimits()
_NO_FORMAT: Final = ChatFormat()
_MOST_TOKENS_KEY: Final = "limits.max_prompt_tokens"


def parse_row(index: int, line: bytes, defaults: SamplingParams, limits: RowLimits = _DEFAULT_LIMITS) -> Row | RowError:
    """Parse a line. `defaults` apply to every sampling key that the row leaves out.

    In both formats null means the default, except for the keys whose null has a meaning of its own: `best_of`, `seed`,
    `max_tokens` (as many as the model's length allows), `logprobs`, `prompt_logprobs`, and those whose null is off.
    """
    if len(line) > limits.max_line_bytes:
        message = f"the line is longer than limits.max_line_bytes={limits.max_line_bytes}"
        return RowError(index, None, "plain", "line_too_long", message)
    try:
        fields = parse_json_object(line, max_nesting=limits.max_nesting)
    except JsonError as error:
        return RowError(index, None, "plain", error.code, f"the line {error}")
    return parse_fields(index, fields, defaults, limits)


def parse_fields(index: int, fields: Mapping[str, Any], defaults: SamplingParams, limits: RowLimits) -> Row | RowError:
    """Parse the object of a line (`parse_row`)."""
    shape: ErrorShape = "openai" if any(key in fields for key in OPENAI_ROW_KEYS) else "plain"
    custom_id = fields.get("custom_id")
    if custom_id is not None and not isinstance(custom_id, str):
        return RowError(index, None, shape, "invalid_value", f"custom_id={short(custom_id)} must be a string")
    try:
        read = parse_openai if shape == "openai" else _parse_plain
        row = read(index, custom_id, fields, defaults)
        _check_limits(row.sampling, limits)
        return row
    except RowProblem as problem:
        return RowError(index, custom_id, shape, problem.code, str(problem))


def _check_limits(sampling: SamplingParams, limits: RowLimits) -> None:
    asked = (
        ("n", sampling.n, "max_n", limits.max_n),
        ("best_of", sampling.best_of or 0, "max_n", limits.max_n),
        ("max_tokens", sampling.max_tokens or 0, "max_tokens", limits.max_tokens),
        ("entries of stop", len(sampling.stop), "max_stop_strings", limits.max_stop_strings),
        ("entries of stop_token_ids", len(sampling.stop_token_ids), "max_stop_strings", limits.max_stop_strings),
        ("entries of logit_bias", len(sampling.logit_bias), "max_logit_bias", limits.max_logit_bias),
        (
            "entries of allowed_token_ids",
            len(sampling.allowed_token_ids or ()),
            "max_logit_bias",
            limits.max_logit_bias,
        ),
        ("entries of bad_words", len(sampling.bad_words), "max_logit_bias", limits.max_logit_bias),
        ("entries of bad_words_ids", len(sampling.bad_words_ids), "max_logit_bias", limits.max_logit_bias),
    )
    for what, value, name, most in asked:
        if most is not None and value > most:
            raise RowProblem("limit_exceeded", f"{what}: {value} is more than limits.{name}={most}")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) == -1:
            message = f"{name}=-1 asks for the whole vocabulary, which is too much for a file: ask for {MAX_LOGPROBS}"
            raise RowProblem("limit_exceeded", message)


def _parse_plain(index: int, custom_id: str | None, fields: Mapping[str, Any], defaults: SamplingParams) -> Row:
    if any(fields.get(task) is not None for task in PLAIN_TASKS) and not any(key in fields for key in _PROMPT_KEYS):
        return plain_pooling_row(index, custom_id, fields, defaults)
    refuse_unknown_keys(fields, _PLAIN_KEYS)
    prompt = _plain_prompt(fields)
    sampling = sampling_from(defaults, {key: fields[key] for key in SAMPLING_KEYS if key in fields})
    return Row(index, custom_id, "plain", prompt, sampling)


def _plain_prompt(fields: Mapping[str, Any]) -> Prompt:
    given = [key for key in _PROMPT_KEYS if fields.get(key) is not None]
    if not given:
        raise RowProblem("missing_prompt", f"the row has no prompt: give one of {', '.join(_PROMPT_KEYS)}")
    if len(given) > 1:
        raise RowProblem("conflicting_prompts", f"the row has {' and '.join(given)}: give one of them")
    value = fields[given[0]]
    template_kwargs = fields.get("chat_template_kwargs")
    if template_kwargs is not None and given[0] != "messages":
        raise RowProblem("conflicting_keys", f"chat_template_kwargs goes with messages, this row has {given[0]}")
    if given[0] == "prompt":
        return text_prompt("prompt", value)
    if given[0] == "prompt_token_ids":
        return tokens_prompt("prompt_token_ids", value)
    return chat_prompt(value, template_kwargs)


def resolve(
    row: Row,
    tokenizer: Tokenizer | None,
    engine: RequestLimits,
    limits: RowLimits = _DEFAULT_LIMITS,
    chat_format: ChatFormat = _NO_FORMAT,
) -> EncodedRow | RowError:
    """Encode the row's prompt and make its limits concrete: a request within the limits of `engine`.

    `max_tokens` becomes the row's value or the rest of the engine's `max_model_len`, whichever is less; without a value
    at most `limits.max_tokens`. `chat_format` is the model's format of tool calls and reasoning.
    """
    try:
        engine.check_runner(None)
        check_template(row, chat_format)
        text, token_ids = encode(row.prompt, tokenizer, _length_check(row, tokenizer, engine, limits))
        token_ids = tuple(engine.truncate(token_ids, row.sampling))
        sampling = formed_sampling(row, text, tokenizer, chat_format)
        engine.check(token_ids, sampling)
        echo = _echo(row, text, token_ids, tokenizer)
        if limits.max_prompt_tokens is not None and len(token_ids) > limits.max_prompt_tokens:
            message = f"the prompt has {len(token_ids)} tokens, more than {_MOST_TOKENS_KEY}="
            raise RowProblem("prompt_too_long", f"{message}{limits.max_prompt_tokens}")
        # A prompt that is only scored may fill the length: its one token is not computed.
        num_left = max(engine.max_model_len - len(token_ids), 1)
        if limits.max_tokens is not None:
            num_left = min(num_left, limits.max_tokens)
        sampling = _concrete_sampling(sampling, tokenizer is not None, num_left)
        _check_words(sampling, tokenizer, engine.vocab_size)
    except RowProblem as problem:
        return RowError(row.index, row.custom_id, shape_of(row.kind), problem.code, str(problem))
    except RequestError as problem:
        return RowError(row.index, row.custom_id, shape_of(row.kind), problem.code, form_problem(row, problem))
    reader = answer_reader(row, text, tokenizer, sampling, chat_format)
    return EncodedRow(
        *(row.index, row.custom_id, row.kind, text, token_ids, sampling, row.model, reader),
        echo=echo,
        returns_token_ids=row.returns_token_ids,
    )


def _echo(row: Row, text: str | None, token_ids: tuple[int, ...], tokenizer: Tokenizer | None) -> Echo | None:
    if row.echo is None:
        return None
    if tokenizer is None:
        raise RowProblem("tokenizer_missing", "echo needs the model's tokenizer.json: leave it out")
    if text is None or row.sampling.truncate_prompt_tokens is not None:
        skips_special = row.sampling.skip_special_tokens
        text = tokenizer.decode(token_ids, skip_special_tokens=skips_special)
        if row.echo != "prompt":
            # The unfinished character begins the completion's text.
            text = text[: len(text) - num_unfinished(tokenizer, token_ids, skips_special)]
    texts = TokenTexts(tokenizer, (), skip_special_tokens=False)
    ((first,),) = texts.spell([token_ids[:1]], is_last=len(token_ids) == 1)
    return Echo(text, first, row.echo == "prompt")


def _length_check(
    row: Row, tokenizer: Tokenizer | None, engine: RequestLimits, limits: RowLimits
) -> Callable[[str], None]:
    def check(text: str) -> None:
        if tokenizer is not None:
            is_cut = row.sampling.truncate_prompt_tokens is not None
            most = None if is_cut else limits.max_prompt_tokens
            engine.check_text(tokenizer, text, is_cut=is_cut, most=most, key=_MOST_TOKENS_KEY)

    return check


def encode(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    check_text: Callable[[str], None] = lambda text: None,
    adds_special_tokens: bool | None = None,
) -> tuple[str | None, tuple[int, ...]]:
    """Text of a prompt, None for token ids, and its ids. `check_text` is called with the text before it is encoded.
    Special tokens are added to text and not to a chat, whose template writes them, unless `adds_special_tokens` is
    given. Raises RowProblem, and what `check_text` raises.
    """
    if isinstance(prompt, TokensPrompt):
        return None, prompt.token_ids
    if tokenizer is None:
        raise RowProblem("tokenizer_missing", "the model folder has no tokenizer.json: give prompt_token_ids")
    is_chat = isinstance(prompt, ChatPrompt)
    text = _render(prompt, tokenizer) if isinstance(prompt, ChatPrompt) else prompt.text
    check_text(text)
    try:
        # A chat template writes the special tokens itself.
        adds = not is_chat if adds_special_tokens is None else adds_special_tokens
        return text, tuple(tokenizer.encode(text, add_special_tokens=adds))
    except TokenizerError as error:
        raise RowProblem("tokenizer_error", str(error)) from None
    except ValueError as error:
        raise RowProblem("invalid_unicode", str(error)) from None


def _render(prompt: ChatPrompt, tokenizer: Tokenizer) -> str:
    if not tokenizer.has_chat_template:
        message = "the model folder has no chat template (chat_template.jinja or tokenizer_config.json): give prompt"
        raise RowProblem("chat_template_missing", message)
    try:
        return tokenizer.apply_chat_template(prompt.messages, prompt.add_generation_prompt, prompt.template_kwargs)
    except ChatTemplateError as error:
        raise RowProblem("chat_template_error", str(error)[:500]) from None


def _concrete_sampling(sampling: SamplingParams, has_tokenizer: bool, num_left: int) -> SamplingParams:
    if sampling.min_tokens > num_left:
        message = f"min_tokens={sampling.min_tokens} but only {num_left} tokens of model.max_model_len are left"
        raise RowProblem("invalid_value", message)
    limit = num_left if sampling.max_tokens is None else min(sampling.max_tokens, num_left)
    return replace(sampling, max_tokens=limit, detokenize=sampling.detokenize and has_tokenizer).frozen()


def _check_words(sampling: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Check the row's bad words with the engine's conversion, before admission."""
    try:
        resolve_params(sampling, tokenizer, vocab_size)
    except ValueError as error:
        raise RowProblem("invalid_value", str(error)) from None


class CustomIds:
    """Stores every custom_id of a run, 16 bytes of digest for each, and rejects the second row that has it.

    Two ids of the billions a file may contain share a digest with a probability below 1e-18.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def check(self, row: Row | RowError) -> Row | RowError:
        """The row, or an error row when an earlier row had its custom_id. An error row is unchanged."""
        if row.custom_id is None:
            return row
        digest = blake2b(row.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        is_duplicate = digest in self._seen
        self._seen.add(digest)
        if not is_duplicate or isinstance(row, RowError):
            return row
        message = f"custom_id={short(row.custom_id)} was used by an earlier row: every custom_id must be unique"
        return RowError(row.index, row.custom_id, shape_of(row.kind), "duplicate_custom_id", message)
