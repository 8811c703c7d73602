"""Groups that ended -> what callers get: text, finish reasons, log-probabilities with their tokens' text."""

import math
import struct
from collections.abc import Iterable

from spmd_worker.replica.sequence.outputs import (
    GRAMMAR_FAILED,
    NON_FINITE_LOGITS,
    NON_FINITE_VECTOR,
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from spmd_worker.replica.sequence.sequence import FinishReason, Sequence, SequenceGroup
from spmd_worker.tokenizer.token_texts import TokenTexts
from spmd_worker.tokenizer.tokenizer import IncrementalDecoder, Tokenizer


def request_output(
    group: SequenceGroup, prompt: str | None, tokenizer: Tokenizer | None, metrics: RequestMetrics | None = None
) -> RequestOutput:
    """`prompt` is the text that was encoded, if there was any.

    Of `best_of` samples the best `n` come back, best first, with indices counted anew and with the
    `cumulative_logprob` that ranked them, also where the row did not ask for log-probabilities. A request of which one
    sample's logits, or those of the prompt's tokens, were not finite has an error and no outputs.
    """
    sampling = group.request.sampling
    if group.request.pooling is not None:
        return _pooled_output(group, prompt, metrics)
    trouble = _trouble(group)
    if trouble is not None:
        error_code, error = trouble
        return RequestOutput(
            request_id=str(group.request.request_id),
            prompt=prompt,
            prompt_token_ids=list(group.request.prompt_token_ids),
            finished=True,
            num_cached_tokens=group.num_cached_tokens or 0,
            error=error,
            error_code=error_code,
        )
    wants_prompt_logprobs = sampling.prompt_logprobs is not None
    return RequestOutput(
        request_id=str(group.request.request_id),
        prompt=prompt,
        prompt_token_ids=list(group.request.prompt_token_ids),
        outputs=[completion_output(index, sequence, tokenizer) for index, sequence in enumerate(_returned(group))],
        finished=True,
        prompt_logprobs=_prompt_logprobs(group, tokenizer) if wants_prompt_logprobs else None,
        num_cached_tokens=group.num_cached_tokens or 0,
        metrics=metrics,
    )


def _trouble(group: SequenceGroup) -> tuple[str, str] | None:
    """Why a request has no answer: the code and the words of its error."""
    position = _non_finite_position(group)
    if position is not None:
        error = (
            f"the model's logits for {position} are not finite: its numbers overflow in model.dtype, or its "
            f"weights are damaged; see model.dtype and model.allow_nonfinite"
        )
        return NON_FINITE_LOGITS, error
    position = _position(group, FinishReason.FORM_ERROR)
    if position is None:
        return None
    error = (
        f"structured_outputs: no token may follow as {position}, or to know which takes more than the limits of "
        "the grammars' engine (see spmd_worker/replica/grammar/compiler.py): give a form that is "
        "simpler, or can always go on"
    )
    return GRAMMAR_FAILED, error


def _pooled_output(group: SequenceGroup, prompt: str | None, metrics: RequestMetrics | None) -> RequestOutput:
    output = RequestOutput(
        request_id=str(group.request.request_id),
        prompt=prompt,
        prompt_token_ids=list(group.request.prompt_token_ids),
        finished=True,
        num_cached_tokens=group.num_cached_tokens or 0,
        metrics=metrics,
    )
    reason = group.sequences[0].finish_reason
    if reason is FinishReason.ERROR:
        output.error_code = NON_FINITE_VECTOR
        output.error = (
            "the row's vector is not finite: its numbers overflow in model.dtype, or its weights are damaged; see "
            "model.dtype and model.allow_nonfinite"
        )
    elif reason is not FinishReason.ABORT:
        assert group.vector is not None, group.request.request_id
        output.vector = list(struct.unpack(f"<{len(group.vector) // 4}f", group.vector))
    return output


def _non_finite_position(group: SequenceGroup) -> str | None:
    """In words, the first position whose logits were not finite: of the prompt, else of the first such sample."""
    for position, entries in enumerate(group.prompt_logprobs):
        if entries is not None and any(math.isnan(entry.logprob) for entry in entries.values()):
            return f"token {position} of the prompt"
    return _position(group, FinishReason.ERROR)


def _position(group: SequenceGroup, reason: FinishReason) -> str | None:
    """In words, where the first sample ended that ended for this reason."""
    for sequence in group.sequences:
        if sequence.finish_reason is reason:
            sample = f" of sample {sequence.sample_index}" if len(group.sequences) > 1 else ""
            return f"output token {len(sequence.output_token_ids)}{sample}"
    return None


def _returned(group: SequenceGroup) -> list[Sequence]:
    """The sequences whose completions the row gets, in order; those of an aborted row are ranked as they stand."""
    sampling = group.request.sampling
    if not sampling.is_ranked:
        return group.sequences
    # Sequences are in sample order and sorting keeps it among equal ones: the earlier sample wins.
    return sorted(group.sequences, key=_improbability)[: sampling.n]


def _improbability(sequence: Sequence) -> float:
    """The less the better. What is no number (logits that overflowed) comes last, as what is impossible does."""
    logprob = sequence.cumulative_logprob
    return math.inf if math.isnan(logprob) else -logprob


def completion_output(
    index: int,
    sequence: Sequence,
    tokenizer: Tokenizer | None,
    text: str | None = None,
    logprobs: list[TokenLogprobs] | None = None,
) -> CompletionOutput:
    """A sequence as it stands; `text` and `logprobs` where they are known."""
    sampling = sequence.request.sampling
    # Sequences that are only ranked have log-probabilities too.
    if logprobs is None and sampling.logprobs is not None:
        logprobs = spelled_logprobs(sequence.logprobs, token_texts(sequence, tokenizer), is_last=True)
    is_whole = text is None
    text = _text(sequence, tokenizer) if text is None else text
    if logprobs is not None and is_whole and tokenizer is not None and sampling.detokenize:
        logprobs = _truncate_logprobs(logprobs, len(text))
    return CompletionOutput(
        index=index,
        text=text,
        # An output is its reader's: one sample may have ended while others of its request go on.
        token_ids=list(sequence.output_token_ids),
        cumulative_logprob=sequence.cumulative_logprob if sampling.needs_logprobs else None,
        logprobs=logprobs,
        finish_reason=sequence.finish_reason.value if sequence.finish_reason else None,
        stop_reason=sequence.stop_reason,
    )


def token_texts(sequence: Sequence, tokenizer: Tokenizer | None) -> TokenTexts | None:
    """What spells the tokens of a sequence from its first on, where there is a tokenizer."""
    if tokenizer is None:
        return None
    return TokenTexts(tokenizer, sequence.request.prompt_token_ids, sequence.request.sampling.skip_special_tokens)


def spelled_logprobs(
    entries: Iterable[TokenLogprobs | None], texts: TokenTexts | None, *, is_last: bool
) -> list[TokenLogprobs]:
    """With the text and bytes of each token, where there is a tokenizer. `is_last`: no tokens follow."""
    positions = [each for each in entries if each is not None]
    if texts is None:
        return positions
    spelled = texts.spell([list(each) for each in positions], is_last=is_last)
    return [
        {
            token_id: Logprob(entry.logprob, entry.rank, token_text.text, tuple(token_text.own_bytes))
            for (token_id, entry), token_text in zip(position.items(), found, strict=True)
        }
        for position, found in zip(positions, spelled, strict=True)
    ]


def _prompt_logprobs(group: SequenceGroup, tokenizer: Tokenizer | None) -> list[TokenLogprobs | None]:
    """Those of the prompt's tokens, whose first, behind nothing, has none."""
    positions = list(group.prompt_logprobs)
    if tokenizer is None or not positions:
        return positions
    texts = TokenTexts(tokenizer, (), group.request.sampling.skip_special_tokens)
    ids = group.request.prompt_token_ids
    num_without = next((i for i, each in enumerate(positions) if each is not None), len(positions))
    texts.spell([[token_id] for token_id in ids[:num_without]], is_last=False)
    return [*positions[:num_without], *spelled_logprobs(positions[num_without:], texts, is_last=True)]


def _truncate_logprobs(logprobs: list[TokenLogprobs], num_characters: int) -> list[TokenLogprobs]:
    """Those of a text that a stop string, or a stop token, has cut: what was cut off has no bytes."""
    num_left, num_whole = num_characters, 0
    for number, position in enumerate(logprobs):
        entry = next(iter(position.values()))
        length = len(entry.decoded_token or "") if entry.token_bytes else 0
        if length > num_left:
            break
        num_left -= length
        # Parts of a character that is cut off are cut off with it.
        num_whole = num_whole if entry.token_bytes and not length else number + 1
    else:
        return logprobs
    cut = [_without_bytes(each) for each in logprobs[num_whole:]]
    if num_left:
        (token_id, entry), *others = logprobs[number].items()
        shown = (entry.decoded_token or "")[:num_left]
        first = entry._replace(decoded_token=shown, token_bytes=tuple(shown.encode("utf-8", "surrogatepass")))
        cut[number - num_whole] = {token_id: first, **dict(others)}
    return [*logprobs[:num_whole], *cut]


def _without_bytes(position: TokenLogprobs) -> TokenLogprobs:
    (token_id, entry), *others = position.items()
    return {token_id: entry._replace(token_bytes=()), **dict(others)}


def _text(sequence: Sequence, tokenizer: Tokenizer | None) -> str:
    sampling = sequence.request.sampling
    if tokenizer is None or not sampling.detokenize:
        return ""
    if sequence.text is not None:
        return sequence.text
    decoder = IncrementalDecoder(tokenizer, sequence.request.prompt_token_ids, sampling.skip_special_tokens)
    has_hidden_end = _ends_by_id(sequence) and not sampling.include_stop_str_in_output
    return decoder.finish(sequence.output_token_ids[:-1] if has_hidden_end else sequence.output_token_ids)


def _ends_by_id(sequence: Sequence) -> bool:
    """Whether the last token is what ended the sequence: what it spells is treated as a stop string is."""
    return sequence.finish_reason is FinishReason.STOP and not isinstance(sequence.stop_reason, str)
