"""Which requests an engine can answer at all: checked before anything is queued, so that one costs the others nothing.

Knows prompts, sampling parameters and limits. Knows nothing about ranks or steps.
"""

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, Final

from spmd_worker.sequence.request import RequestId, as_token_ids, check_sampling
from spmd_worker.sequence.sampling_params import SamplingParams

_NO_REQUEST: Final = RequestId(-1)
_MAX_ID_DIGITS: Final = 19


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
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f"{value!r} is no request id: give the number that add_request returned, an output's request_id, or "
            f"several of these in a list"
        )
    return RequestId(index(value))


def check_request(
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
    max_num_seqs: int,
    has_tokenizer: bool,
) -> None:
    """Raise ValueError, naming what to change, for a request that could never be answered, TypeError for what is
    none.
    """
    prompt_token_ids = as_token_ids(prompt_token_ids)
    check_sampling(sampling)
    if not prompt_token_ids:
        raise ValueError("the prompt has no tokens: give at least one")
    outside = next((token for token in prompt_token_ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ValueError(f"token id {outside} is outside the vocabulary of {vocab_size} tokens")
    if len(prompt_token_ids) + 1 > max_model_len:
        raise ValueError(
            f"the prompt has {len(prompt_token_ids)} tokens but model.max_model_len is {max_model_len}, which "
            f"must hold the prompt and at least one output token: shorten the prompt or raise model.max_model_len"
        )
    if sampling.num_sequences > max_num_seqs:
        key = "n" if sampling.best_of is None else "best_of"
        raise ValueError(
            f"{key}={sampling.num_sequences} is more than scheduler.max_num_seqs="
            f"{max_num_seqs}: lower {key} or raise scheduler.max_num_seqs"
        )
    if sampling.stop and not has_tokenizer:
        raise ValueError("stop strings need a tokenizer.json in the model folder: use stop_token_ids")
    sampling.check_vocabulary(vocab_size)
