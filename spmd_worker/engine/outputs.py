"""Builds request outputs from finished groups: text, finish reasons, log-probabilities with their tokens' text."""

import math
import struct
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spmd_worker.compat.late_texts import kept_tokens
from spmd_worker.model_config.late_interaction import LateInteraction
from spmd_worker.replica.sequence.encoder_input import is_text
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
from spmd_worker.replica.sequence.prompt_scores import first_nan_row, joined_scores
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampling_mask import SamplingMask
from spmd_worker.replica.sequence.sequence import FinishReason, Sequence, SequenceGroup
from spmd_worker.replica.sequence.weight_spans import spans_of
from spmd_worker.tokenizer.incremental_decoder import IncrementalDecoder
from spmd_worker.tokenizer.token_texts import TokenTexts
from spmd_worker.tokenizer.tokenizer import Tokenizer

_NO_LOGPROB: Final = Logprob(0.0, 1)


def request_output(
    group: SequenceGroup,
    prompt: str | None,
    tokenizer: Tokenizer | None,
    metrics: RequestMetrics | None = None,
    encoder_prompt: str | None = None,
    late: LateInteraction | None = None,
) -> RequestOutput:
    """Output of a finished request. `prompt` and `encoder_prompt` are the texts that were encoded, if any. `late` says
    of which tokens vectors are left out.

    The best `n` of `best_of` samples are returned, best first, with new indices and with the `cumulative_logprob` that
    ranked them, even if the row did not ask for log-probabilities. A request whose logits, of a sample or of the
    prompt, were not finite has an error and no outputs.
    """
    request = group.request
    own_ids, encoder_ids = list(request.own_token_ids), encoder_prompt_token_ids(request)
    if request.pooling is not None and encoder_ids is not None:
        # The encoder reads the row, of which the decoder's ids are made.
        own_ids, encoder_ids = encoder_ids, None
    output = RequestOutput(
        request_id=str(request.request_id),
        prompt=prompt,
        prompt_token_ids=own_ids,
        finished=True,
        num_cached_tokens=num_cached_tokens(group),
        encoder_prompt=encoder_prompt,
        encoder_prompt_token_ids=encoder_ids,
    )
    if request.pooling is None:
        output.error_code, output.error = _error_of(group) or (None, None)
        if output.error is not None:
            return output
        sequences = enumerate(_returned(group))
        output.outputs = [completion_output(index, sequence, tokenizer) for index, sequence in sequences]
        if request.sampling.return_routed_experts:
            output.prompt_routed_experts = group.prompt_routed_experts.array(
                request.num_virtual_tokens, len(request.prompt_token_ids)
            )
        if request.sampling.has_score_arrays:
            output.prompt_scores = joined_scores(request, group.prompt_scores)
        elif request.sampling.prompt_logprobs is not None:
            output.prompt_logprobs = _prompt_logprobs(group, tokenizer)
            num_virtual = request.num_virtual_tokens
            num_tokens = num_virtual + len(output.prompt_token_ids)
            output.prompt_weight_versions = spans_of(group.prompt_spans, num_tokens, num_virtual)
    elif group.sequences[0].finish_reason is FinishReason.ERROR:
        output.error_code = NON_FINITE_VECTOR
        output.error = (
            "the row's vector is not finite: its numbers overflow in model.dtype, or its weights are damaged; see "
            "model.dtype and model.allow_nonfinite"
        )
    elif group.sequences[0].finish_reason is not FinishReason.ABORT:
        assert group.vector is not None, request.request_id
        if request.pooling.is_for_tokens:
            numbers = np.frombuffer(group.vector, dtype="<f4")
            output.token_vectors = numbers.reshape(request.pooling.num_vectors(len(output.prompt_token_ids)), -1)
            kept = kept_tokens(late, tokenizer, output.prompt_token_ids, request.pooling.input_type)
            output.token_vectors = output.token_vectors if kept is None else output.token_vectors[kept]
        else:
            output.vector = list(struct.unpack(f"<{len(group.vector) // 4}f", group.vector))
        output.prompt_weight_versions = list(group.prompt_spans)
    output.metrics = metrics
    return output


def num_cached_tokens(group: SequenceGroup) -> int:
    """Tokens of the caller's prompt that were found in the prefix cache, with those of an encoder's text; of a row that
    encoder and decoder read, the encoder's.
    """
    request, num_found = group.request, group.num_cached_tokens or 0
    num_of_text = min(num_found, len(encoder_prompt_token_ids(request) or ()))
    if num_of_text and request.pooling is not None:
        return num_of_text
    return num_of_text + max(num_found - request.num_virtual_tokens, 0)


def encoder_prompt_token_ids(request: Request) -> list[int] | None:
    """Ids of the text that an encoder reads; None for audio, and for a model without one."""
    given = request.encoder_input
    return list(given.token_ids) if given is not None and is_text(given) else None


def _error_of(group: SequenceGroup) -> tuple[str, str] | None:
    """Code and text of the error of a request, if it has one."""
    position = _non_finite_position(group)
    if position is not None:
        error = (
            f"the model's logits for {position} are not finite: its numbers overflow in model.dtype, or its "
            f"weights are damaged; see model.dtype and model.allow_nonfinite"
        )
        return NON_FINITE_LOGITS, error
    position = _position(group, FinishReason.GRAMMAR_ERROR)
    if position is None:
        return None
    error = (
        f"structured_outputs: the grammar allows no token as {position}, or deciding so exceeds the limits of the "
        "grammar engine (spmd_worker/replica/grammar/compiler.py): give a simpler schema, or one that can always "
        "continue"
    )
    return GRAMMAR_FAILED, error


def _non_finite_position(group: SequenceGroup) -> str | None:
    """Description of the first position with non-finite logits: of the prompt, else of the first such sample."""
    for position, entries in enumerate(group.prompt_logprobs):
        if entries is not None and any(math.isnan(entry.logprob) for entry in entries.values()):
            return f"token {position - group.request.num_virtual_tokens} of the prompt"
    row = first_nan_row(group.request, group.prompt_scores)
    if row is not None:
        return f"token {row + 1} of the prompt"
    return _position(group, FinishReason.ERROR)


def _position(group: SequenceGroup, reason: FinishReason) -> str | None:
    """Description of the position at which the first sample with this finish reason ended."""
    for sequence in group.sequences:
        if sequence.finish_reason is reason:
            sample = f" of sample {sequence.sample_index}" if len(group.sequences) > 1 else ""
            return f"output token {len(sequence.output_token_ids)}{sample}"
    return None


def _returned(group: SequenceGroup) -> list[Sequence]:
    """The sequences to return, in order; an aborted row is ranked with its tokens so far."""
    sampling = group.request.sampling
    if not sampling.is_ranked:
        return group.sequences
    # Sequences are in sample order and sorting is stable: the earlier of equal samples wins.
    return sorted(group.sequences, key=_improbability)[: sampling.n]


def _improbability(sequence: Sequence) -> float:
    """Sort key, best first. NaN (overflowed logits) comes last, with the impossible."""
    logprob = sequence.cumulative_logprob
    return math.inf if math.isnan(logprob) else -logprob


def completion_output(
    index: int,
    sequence: Sequence,
    tokenizer: Tokenizer | None,
    text: str | None = None,
    logprobs: list[TokenLogprobs] | None = None,
) -> CompletionOutput:
    """Output of a sequence so far; `text` and `logprobs` if they are known already."""
    sampling = sequence.request.sampling
    # Sequences that are only ranked have log-probabilities too.
    if logprobs is None and sampling.returns_logprobs:
        logprobs = logprobs_with_text(sequence.logprobs, token_texts(sequence, tokenizer), is_last=True)
    if text is None:
        text = _text(sequence, tokenizer)
        if logprobs is not None and tokenizer is not None and sampling.detokenize:
            logprobs = _truncate_logprobs(logprobs, len(text))
    return CompletionOutput(
        index=index,
        text=text,
        # A copy: the caller owns an output, and may have it while the request continues.
        token_ids=list(sequence.output_token_ids),
        cumulative_logprob=sequence.cumulative_logprob if sampling.needs_logprobs else None,
        logprobs=logprobs,
        finish_reason=sequence.finish_reason.value if sequence.finish_reason else None,
        stop_reason=sequence.stop_reason,
        weight_versions=spans_of(sequence.weight_spans, len(sequence.output_token_ids)),
        routed_experts=_routed_experts(sequence),
        sampling_mask=SamplingMask.from_packed(sequence.kept_ids) if sampling.return_sampling_mask else None,
    )


def _routed_experts(sequence: Sequence) -> NDArray[Any] | None:
    """Experts of the output's tokens but the last, once it has ended."""
    if not sequence.request.sampling.return_routed_experts or sequence.finish_reason is None:
        return None
    return sequence.routed_experts.array(0, max(len(sequence.output_token_ids) - 1, 0))


def token_texts(sequence: Sequence, tokenizer: Tokenizer | None) -> TokenTexts | None:
    """Texts of a sequence's tokens, from the first on; None without a tokenizer."""
    if tokenizer is None:
        return None
    return TokenTexts(tokenizer, sequence.request.known_token_ids, sequence.request.sampling.skip_special_tokens)


def logprobs_with_text(
    entries: Iterable[TokenLogprobs | None], texts: TokenTexts | None, *, is_last: bool
) -> list[TokenLogprobs]:
    """Add text and bytes of each token, if there is a tokenizer. `is_last`: no tokens follow."""
    positions = [each for each in entries if each is not None]
    if texts is None:
        return positions
    spelled = texts.decode([list(each) for each in positions], is_last=is_last)
    return [
        {
            token_id: Logprob(entry.logprob, entry.rank, token_text.text, tuple(token_text.own_bytes))
            for (token_id, entry), token_text in zip(position.items(), found, strict=True)
        }
        for position, found in zip(positions, spelled, strict=True)
    ]


def _prompt_logprobs(group: SequenceGroup, tokenizer: Tokenizer | None) -> list[TokenLogprobs | None]:
    """Log-probabilities of the prompt's tokens; the first has none, nor have rows of embeddings and image tokens."""
    request = group.request
    positions = list(group.prompt_logprobs)
    # An aborted request may have computed only some of its prompt.
    ids = list(request.prompt_token_ids[: len(positions)])
    for rows in reversed(request.rows):
        positions[rows.start : rows.end] = [None] * len(positions[rows.start : rows.end])
        del ids[rows.start : rows.end]
    del positions[: request.num_virtual_tokens], ids[: request.num_encoder_positions]
    positions[:1] = [None] * len(positions[:1])
    of_images = _image_positions(request, len(positions))
    for index in of_images:
        # They are between the texts of the others.
        positions[index] = {ids[index]: next(iter((positions[index] or {}).values()), _NO_LOGPROB)}
    if tokenizer is not None and positions:
        positions = _prompt_texts(request, positions, ids, tokenizer)
    for index in of_images:
        positions[index] = None
    return positions


def _image_positions(request: Request, num_positions: int) -> list[int]:
    """Positions of the prompt, without virtual tokens, that take rows of images."""
    runs = [run for item in request.media for run in item.runs]
    starts = [(start - request.num_virtual_tokens, count) for start, count in runs]
    return [each for start, count in starts for each in range(start, start + count) if 0 < each < num_positions]


def _prompt_texts(
    request: Request, positions: list[TokenLogprobs | None], ids: list[int], tokenizer: Tokenizer
) -> list[TokenLogprobs | None]:
    texts = TokenTexts(tokenizer, (), request.sampling.skip_special_tokens)
    num_with = len(positions) - positions.count(None)
    texts.decode([[token_id] for token_id in ids[: len(ids) - num_with]], is_last=False)
    with_text = iter(logprobs_with_text(positions, texts, is_last=True))
    return [None if each is None else next(with_text) for each in positions]


def _truncate_logprobs(logprobs: list[TokenLogprobs], num_characters: int) -> list[TokenLogprobs]:
    """Log-probabilities of a text truncated at a stop string or token: tokens that were cut off have no bytes."""
    num_left, num_kept = num_characters, 0
    for number, position in enumerate(logprobs):
        entry = next(iter(position.values()))
        length = len(entry.decoded_token or "") if entry.token_bytes else 0
        if length > num_left:
            break
        num_left -= length
        # Parts of a character that is cut off are cut off with it.
        num_kept = num_kept if entry.token_bytes and not length else number + 1
    else:
        return logprobs
    rest = []
    for (token_id, entry), *others in (position.items() for position in logprobs[num_kept:]):
        rest.append({token_id: entry._replace(token_bytes=()), **dict(others)})
    if num_left:
        (token_id, entry), *others = logprobs[number].items()
        shown = (entry.decoded_token or "")[:num_left]
        first = entry._replace(decoded_token=shown, token_bytes=tuple(shown.encode("utf-8", "surrogatepass")))
        rest[number - num_kept] = {token_id: first, **dict(others)}
    return [*logprobs[:num_kept], *rest]


def _text(sequence: Sequence, tokenizer: Tokenizer | None) -> str:
    sampling = sequence.request.sampling
    if tokenizer is None or not sampling.detokenize:
        return ""
    if sequence.text is not None:
        return sequence.text
    decoder = IncrementalDecoder(tokenizer, sequence.request.known_token_ids, sampling.skip_special_tokens)
    # The text of a token that ended the sequence is treated as a stop string.
    ends_by_id = sequence.finish_reason is FinishReason.STOP and not isinstance(sequence.stop_reason, str)
    is_hidden = ends_by_id and not sampling.include_stop_str_in_output
    return decoder.finish(sequence.output_token_ids[:-1] if is_hidden else sequence.output_token_ids)
