"""Masks of `TokenRules`: the tokens that may follow, from the record and the row's tokens alone.

`thinking`, and the rules of transformers' logits processors: ForcedBOSToken, ForcedEOSToken, SuppressTokens,
SuppressTokensAtBegin, MinNewTokensLength, NoRepeatNGram and WhisperTimeStamp. The last one's comparison of
probabilities is the sampler's.

V: vocabulary.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from spmd_worker.replica.sequence.token_rules import ThinkingRules, TimestampRules, TokenRules

BYTES_PER_WORD: Final = 4
_NUM_KEPT: Final = 64


def allowed_tokens(
    rules: TokenRules,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    *,
    max_tokens: int | None,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> NDArray[np.int32]:
    """A bit for each token, int32 [V / 32]: token t is bit t % 32 of word t / 32. Not to be changed."""
    if rules.num_beam_tokens is not None:
        # A beam's last token is not that of its row.
        cut, max_tokens = len(prompt_token_ids) - rules.num_beam_tokens, None
        prompt_token_ids, output_token_ids = prompt_token_ids[:cut], [*prompt_token_ids[cut:], *output_token_ids]
    num_outputs = len(output_token_ids)
    forced = _forced(rules, num_outputs, max_tokens, eos_token_ids)
    if not forced and rules.thinking is not None:
        forced = end_of_thinking(rules.thinking, output_token_ids)
    position = min(num_outputs - rules.begin_index, 1)
    waits = num_outputs < rules.min_new_tokens
    if forced or not (rules.no_repeat_ngram_size or rules.timestamps):
        return _fixed_bits(rules, forced, position, eos_token_ids if waits else (), vocab_size)
    allowed = _fixed(rules, position, eos_token_ids if waits else (), vocab_size).copy()
    size = rules.no_repeat_ngram_size
    if size:
        _forbid(allowed, repeating_tokens(size, prompt_token_ids, output_token_ids))
    if rules.timestamps is not None:
        _forbid_timestamps(allowed, rules.timestamps, output_token_ids[rules.begin_index :])
    return _packed(allowed)


def end_of_thinking(thinking: ThinkingRules, token_ids: Sequence[int]) -> tuple[int, ...]:
    """The next token of the end's marker, if an answer's reasoning has used up its budget; else ()."""
    if len(token_ids) < thinking.least_outputs:
        return ()
    begin, end = thinking.begin_token_ids, thinking.end_token_ids
    start, num_open = (behind_marker(begin, token_ids, 0), 0) if thinking.num_open is None else (0, thinking.num_open)
    while start is not None and (closed := behind_marker(end, token_ids, start)) is not None:
        start, num_open = behind_marker(begin, token_ids, closed), 0
    if start is None or len(token_ids) - start + num_open < thinking.budget:
        return ()
    # A part of the marker may be there.
    tail = tuple(token_ids[max(start, len(token_ids) - len(end) + 1) :])
    return (end[next(size for size in range(len(tail), -1, -1) if tail[len(tail) - size :] == end[:size])],)


def behind_marker(marker: tuple[int, ...], token_ids: Sequence[int], start: int) -> int | None:
    """Position behind the first `marker` from `start` on; None if there is none."""
    with suppress(ValueError):
        while True:
            start = token_ids.index(marker[0], start) + 1
            if tuple(token_ids[start - 1 : start - 1 + len(marker)]) == marker:
                return start - 1 + len(marker)
    return None


def repeating_tokens(size: int, *token_ids: Sequence[int]) -> list[int]:
    """Tokens that would complete a sequence of `size` tokens that has occurred before; the ids are one sequence."""
    known = [*chain.from_iterable(token_ids)]
    num_before = size - 1
    if len(known) < size or not num_before:
        return known[:] if size == 1 else []
    tail, found, start = known[-num_before:], [], num_before - 1
    # The last of the tokens before, which few positions have, is looked for first.
    with suppress(ValueError):
        while True:
            start = known.index(tail[-1], start, len(known) - 1) + 1
            if known[start - num_before : start] == tail:
                found.append(known[start])
    return found


def _forced(
    rules: TokenRules, num_outputs: int, max_tokens: int | None, eos_token_ids: tuple[int, ...]
) -> tuple[int, ...]:
    """The tokens of which the next one is one, whatever the other rules; () if it is not forced."""
    if num_outputs < rules.begin_index:
        begin = rules.begin_index - len(rules.forced_tokens)
        return rules.first_tokens if num_outputs < begin else (rules.forced_tokens[num_outputs - begin],)
    is_last = max_tokens is not None and num_outputs == max_tokens - 1
    return (rules.forced_eos_token_id,) if is_last and rules.forced_eos_token_id is not None else ()


@lru_cache(maxsize=_NUM_KEPT)
def _fixed_bits(
    rules: TokenRules, forced: tuple[int, ...], position: int, forbidden: tuple[int, ...], vocab_size: int
) -> NDArray[np.int32]:
    if not forced:
        return _packed(_fixed(rules, position, forbidden, vocab_size))
    allowed = np.zeros(vocab_size, dtype=np.bool_)
    allowed[list(forced)] = True
    return _packed(allowed)


@lru_cache(maxsize=_NUM_KEPT)
def _fixed(rules: TokenRules, position: int, forbidden: tuple[int, ...], vocab_size: int) -> NDArray[np.bool_]:
    """Bool [V], without the rules that look at tokens. `position` is 0 at the first token of the answer proper."""
    allowed = np.ones(vocab_size, dtype=np.bool_)
    _forbid(allowed, rules.suppress_tokens)
    _forbid(allowed, forbidden)
    if position == 0:
        _forbid(allowed, rules.begin_suppress_tokens)
    return allowed


def _forbid_timestamps(allowed: NDArray[np.bool_], rules: TimestampRules, answer: Sequence[int]) -> None:
    """Apply the rules of pairs and order after the tokens of the answer proper."""
    first = rules.first_token_id
    before = allowed.copy()
    allowed[first - 1] = False
    if not answer:
        allowed[:first] = False
        if rules.max_initial_index is not None:
            allowed[first + rules.max_initial_index + 1 :] = False
    else:
        has_begun = answer[-1] >= first
        has_pair = has_begun and (len(answer) < 2 or answer[-2] >= first)
        if has_pair:
            allowed[first:] = False
        elif has_begun:
            allowed[: rules.end_token_id] = False
        last = next((each for each in reversed(answer) if each >= first), None)
        if last is not None:
            # The second of a pair may repeat the first; a later one may not.
            allowed[first : last + (has_pair or not has_begun)] = False
    if not allowed.any():
        allowed[:] = before


def _forbid(allowed: NDArray[np.bool_], token_ids: Sequence[int]) -> None:
    """Forbid tokens, unless no other is left."""
    if not token_ids:
        return
    index = list(token_ids)
    before = allowed[index]
    allowed[index] = False
    if not allowed.any():
        allowed[index] = before


def _packed(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    bits = np.packbits(allowed, bitorder="little")
    padding = -len(bits) % BYTES_PER_WORD
    words = np.pad(bits, (0, padding)).view("<i4").astype(np.int32, copy=False)
    words.flags.writeable = False
    return words
