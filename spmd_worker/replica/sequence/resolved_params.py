"""Resolved sampling parameters of a request: frozen, and with token ids only, so that no worker needs a tokenizer."""

from dataclasses import replace

from spmd_worker.replica.sequence.pooling_params import truncated_row
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.tokenizer import Tokenizer


def resolve_params(sampling: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> SamplingParams:
    """`sampling` for workers. Raises ValueError for a field that breaks a rule, and without a needed tokenizer."""
    frozen = sampling.frozen()
    if not frozen.bad_words and frozen.truncate_prompt_tokens is None:
        return frozen
    sequences = [*frozen.bad_words_ids]
    for word in frozen.bad_words:
        sequences += bad_word_ids(word, tokenizer)
    # A tokenizer may have tokens that the model lacks, which cannot be sampled anyway.
    possible = [each for each in sequences if max(each) < vocab_size]
    return replace(frozen, bad_words=(), bad_words_ids=tuple(possible), truncate_prompt_tokens=None).frozen()


def bad_word_ids(word: str, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """vLLM's rule: token ids of a word alone, and after a space if that changes its first token."""
    if tokenizer is None:
        raise ValueError("bad_words need a tokenizer.json in the model folder: use bad_words_ids")
    text = word.lstrip()
    alone = tuple(tokenizer.encode(text, add_special_tokens=False))
    if not alone:
        raise ValueError(f"bad_words: this model's tokenizer encodes {word!r} as no token: leave it out")
    spaced = tuple(tokenizer.encode(f" {text}", add_special_tokens=False))
    has_other = len(spaced) == len(alone) and spaced[0] != alone[0]
    return [alone, spaced] if has_other else [alone]


def truncated_prompt(
    prompt_token_ids: tuple[int, ...], sampling: SamplingParams, max_model_len: int
) -> tuple[int, ...]:
    """Tokens of a prompt that `truncate_prompt_tokens` keeps: the last ones."""
    return truncated_row(
        prompt_token_ids, sampling.truncate_prompt_tokens, max(max_model_len - (sampling.max_tokens or 1), 1)
    )
