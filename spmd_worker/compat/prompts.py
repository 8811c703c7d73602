"""The forms in which a prompt may come -> token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NotRequired, TypedDict

from spmd_worker.base.config.plain_values import plain_text
from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.pooled_texts import encode_pooled_text
from spmd_worker.model_config.pooling import PoolingConfig
from spmd_worker.replica.sequence.pooling_params import PoolingParams, taken_pooling, truncated_row
from spmd_worker.replica.sequence.request import as_token_ids
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.tokenizer.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any] | Sequence[int]
"""Text, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or token ids."""


class TextPrompt(TypedDict):
    """A prompt of text, as vLLM names it: a dict."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids, as vLLM names it: a dict. `prompt` is the text that they are, which the output repeats."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | TextPrompt | TokensPrompt
"""As vLLM names it."""
CheckText = Callable[..., None]
"""As `RequestLimits.check_text`: of a text, or of two that are encoded together, before they are."""

_PROMPT_KEYS: Final = ("prompt", "prompt_token_ids")
_EMPTY_KEYS: Final = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids", "token_type_ids")
"""More keys of vLLM's, which may ask for nothing."""
_SALT_KEY: Final = "cache_salt"


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that are encoded as one prompt, as the tokenizer encodes a pair."""

    first: str
    second: str


class Encoded:
    """A prompt as ids, or why it cannot be. `rope_regime` None is that of its length and parameters. `pooling` is as
    `taken_pooling` leaves it, None for a prompt that is answered. `is_ids`: it came as ids, and `text` is what the
    caller says that they are. Of a `pair`, `num_first_tokens` are the first text's. `form` is what the prompt itself
    asks of its answers, None where they are free. `cache_salt` None is that of the parameters.
    """

    __slots__ = (
        *("cache_salt", "error", "form", "is_ids", "num_first_tokens", "pair", "pooling", "rope_regime", "text"),
        "token_ids",
    )

    def __init__(self, text: str | None, token_ids: tuple[int, ...], error: str | None = None) -> None:
        self.text, self.token_ids, self.error = text, token_ids, error
        self.is_ids = False
        self.rope_regime: int | None = None
        self.pooling: PoolingParams | None = None
        self.pair: TextPair | None = None
        self.num_first_tokens: int | None = None
        self.form: StructuredOutputsParams | None = None
        self.cache_salt: str | None = None

    def salted(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the prompt's salt. Raises ValueError for what is none."""
        return params if self.cache_salt is None else replace(params, cache_salt=self.cache_salt).frozen()


def encode_prompt(prompt: Any, need_tokenizer: Callable[[], Tokenizer], check_text: CheckText | None = None) -> Encoded:
    """`need_tokenizer` raises ConfigError where there is none; it is asked for text only. `check_text` None is of a
    prompt that will be cut: any length fits.
    """
    if isinstance(prompt, Mapping):
        return _encode_mapping(prompt, need_tokenizer, check_text)
    if isinstance(prompt, TextPair):
        return encode_prompt(prompt, need_tokenizer, check_text)
    text = plain_text(prompt)
    if text is None:
        return _encode_ids(prompt)
    try:
        tokenizer = need_tokenizer()
        if check_text is not None:
            check_text(tokenizer, text)
        return Encoded(text, tuple(tokenizer.encode(text)))
    except (ConfigError, ValueError) as error:
        return Encoded(text, (), str(error))


def encode_prompt(
    pair: TextPair, need_tokenizer: Callable[[], Tokenizer], check_text: CheckText | None = None
) -> Encoded:
    """As `encode_prompt`, of two texts."""
    encoded = Encoded(None, ())
    try:
        tokenizer = need_tokenizer()
        if check_text is not None:
            check_text(tokenizer, pair.first, pair.second)
        token_ids, encoded.num_first_tokens = tokenizer.encode_inside(pair.first, pair.second)
        encoded.token_ids = tuple(token_ids)
    except (ConfigError, ValueError) as error:
        encoded.error = str(error)
    encoded.pair = pair
    return encoded


def apply_pooling(
    encoded: Encoded,
    params: PoolingParams,
    config: PoolingConfig | None,
    max_model_len: int,
    need_tokenizer: Callable[[], Tokenizer],
) -> None:
    """Give a prompt its `pooling`, and cut it as `params` say. Raises ValueError for what this run does not do, and for
    a length that leaves an encoder's text no token.
    """
    encoded.pooling = taken_pooling(params, config)
    assert config is not None, "of a run that pools"
    length = params.truncate_prompt_tokens
    most = max_model_len if length == -1 else length
    is_text = (encoded.text is not None and not encoded.is_ids) or encoded.pair is not None
    if is_text and ((most is not None and config.encodes_inside) or config.text.changes_texts):
        _encode_again(encoded, config, most, need_tokenizer)
    else:
        whole, encoded.token_ids = encoded.token_ids, truncated_row(encoded.token_ids, length, max_model_len)
        _count_first(encoded, len(whole) - len(encoded.token_ids))
    if encoded.pair is not None and encoded.error is None and config.gives_token_types:
        if encoded.num_first_tokens is None:
            raise ValueError("the tokenizer gives token types in an order that no model here takes")
        encoded.pooling = replace(encoded.pooling, num_first_tokens=encoded.num_first_tokens)


def _encode_again(
    encoded: Encoded, config: PoolingConfig, most: int | None, need_tokenizer: Callable[[], Tokenizer]
) -> None:
    """As the folder has its texts, and no more than `most` tokens."""
    if encoded.error is not None:
        return
    pair = encoded.pair
    first, second = (encoded.text or "", None) if pair is None else (pair.first, pair.second)
    token_ids, encoded.num_first_tokens = encode_pooled_text(config.text, need_tokenizer(), first, second, most)
    encoded.token_ids = tuple(token_ids)


def _count_first(encoded: Encoded, num_dropped: int) -> None:
    """Ids lose their beginning, where those of the first text are that the caller has counted."""
    pooling = encoded.pooling
    if num_dropped and pooling is not None and pooling.num_first_tokens is not None:
        encoded.pooling = replace(pooling, num_first_tokens=max(0, pooling.num_first_tokens - num_dropped))


def _encode_mapping(
    prompt: Mapping[str, Any], need_tokenizer: Callable[[], Tokenizer], check_text: CheckText | None
) -> Encoded:
    if _SALT_KEY in prompt:
        plain = {key: each for key, each in prompt.items() if key != _SALT_KEY}
        salted = _encode_mapping(plain, need_tokenizer, check_text)
        salted.cache_salt = prompt[_SALT_KEY]
        return salted
    unknown = [
        str(key) for key in prompt if key not in _PROMPT_KEYS and (key not in _EMPTY_KEYS or not _is_empty(prompt[key]))
    ]
    if unknown:
        return Encoded(
            None, (), f"a prompt has no key {', '.join(unknown)}: give {' or '.join(_PROMPT_KEYS)} and nothing else"
        )
    if "prompt_token_ids" in prompt:
        encoded = _encode_ids(prompt["prompt_token_ids"])
        encoded.is_ids, encoded.text = True, prompt["prompt"] if isinstance(prompt.get("prompt"), str) else None
        return encoded
    if isinstance(prompt.get("prompt"), str):
        return encode_prompt(prompt["prompt"], need_tokenizer, check_text)
    return Encoded(None, (), f"a prompt needs text under prompt, or prompt_token_ids; this one has {[*prompt]}")


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def _encode_ids(token_ids: Any) -> Encoded:
    try:
        return Encoded(None, as_token_ids(token_ids))
    except (TypeError, ValueError) as error:
        return Encoded(None, (), str(error))
