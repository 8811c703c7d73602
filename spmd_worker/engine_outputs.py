"""Groups that ended -> what callers get: text, finish reasons, log-probabilities with their tokens' text.

Knows sequences and the tokenizer. Knows nothing about scheduling.
"""

from spmd_worker.sequence.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from spmd_worker.sequence.sequence import FinishReason, Sequence, SequenceGroup
from spmd_worker.tokenizer import IncrementalDecoder, Tokenizer


def request_output(group: SequenceGroup, prompt: str | None, tokenizer: Tokenizer | None) -> RequestOutput:
    """`prompt` is the text that was encoded, if there was any."""
    sampling = group.request.sampling
    wants_prompt_logprobs = sampling.prompt_logprobs is not None
    return RequestOutput(
        request_id=str(group.request.request_id),
        prompt=prompt,
        prompt_token_ids=list(group.request.prompt_token_ids),
        outputs=[_completion(sequence, tokenizer) for sequence in group.sequences],
        finished=True,
        prompt_logprobs=[_spelled(each, tokenizer) for each in group.prompt_logprobs]
        if wants_prompt_logprobs
        else None,
    )


def _completion(sequence: Sequence, tokenizer: Tokenizer | None) -> CompletionOutput:
    has_logprobs = sequence.request.sampling.logprobs is not None
    logprobs = [spelled for each in sequence.logprobs if (spelled := _spelled(each, tokenizer)) is not None]
    return CompletionOutput(
        index=sequence.sample_index,
        text=_text(sequence, tokenizer),
        token_ids=sequence.output_token_ids,
        cumulative_logprob=sequence.cumulative_logprob if has_logprobs else None,
        logprobs=logprobs if has_logprobs else None,
        finish_reason=sequence.finish_reason.value if sequence.finish_reason else None,
        stop_reason=sequence.stop_reason,
    )


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


def _spelled(logprobs: TokenLogprobs | None, tokenizer: Tokenizer | None) -> TokenLogprobs | None:
    if logprobs is None or tokenizer is None:
        return logprobs
    return {
        token_id: entry._replace(decoded_token=tokenizer.token_text(token_id)) for token_id, entry in logprobs.items()
    }
