"""Outputs of running requests: cumulative, or the difference to the previous one.

Text that was returned never changes: incomplete characters and possible beginnings of stop strings are held back.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace

from spmd_worker.engine.outputs import (
    completion_output,
    encoder_prompt_token_ids,
    logprobs_with_text,
    num_cached_tokens,
    token_texts,
)
from spmd_worker.replica.sequence.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from spmd_worker.replica.sequence.sampling_params import RequestOutputKind
from spmd_worker.replica.sequence.sequence import FinishReason, Sequence, SequenceGroup
from spmd_worker.replica.sequence.weight_spans import spans_of
from spmd_worker.tokenizer.incremental_decoder import IncrementalDecoder
from spmd_worker.tokenizer.token_texts import TokenTexts
from spmd_worker.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class _Shown:
    """State of one sequence: sizes of its previous output, final text so far, log-probabilities with text."""

    decoder: IncrementalDecoder | None = None
    num_decoded: int = 0
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_texts: TokenTexts | None = None
    num_tokens: int = 0
    num_characters: int = 0


@dataclass(slots=True)
class PartialOutputs:
    """Partial outputs of one request, of `kind`; `prompt` and `encoder_prompt` are the texts encoded, if any."""

    kind: RequestOutputKind
    prompt: str | None
    tokenizer: Tokenizer | None
    encoder_prompt: str | None = None
    _shown: defaultdict[int, _Shown] = field(default_factory=lambda: defaultdict(_Shown))

    def partial(self, group: SequenceGroup, metrics: RequestMetrics | None) -> RequestOutput | None:
        """Output of the group so far; None without new tokens, or if its samples are ranked at the end."""
        if group.request.sampling.is_ranked:
            return None
        completions = [self._partial(sequence) for sequence in group.sequences]
        found = [each for each in completions if each is not None]
        if not found:
            return None
        if self.kind is RequestOutputKind.CUMULATIVE:
            found = [each or self._cumulative(sequence) for each, sequence in zip(completions, group.sequences)]
        return RequestOutput(
            request_id=str(group.request.request_id),
            prompt=self.prompt,
            prompt_token_ids=list(group.request.own_token_ids),
            outputs=found,
            finished=False,
            num_cached_tokens=num_cached_tokens(group),
            metrics=metrics,
            encoder_prompt=self.encoder_prompt,
            encoder_prompt_token_ids=encoder_prompt_token_ids(group.request),
        )

    def final(self, output: RequestOutput) -> RequestOutput:
        """The last output of the request; with `kind` delta, the rest of each completion."""
        if self.kind is not RequestOutputKind.DELTA:
            return output
        return replace(output, outputs=[self._rest(each) for each in output.outputs])

    def _partial(self, sequence: Sequence) -> CompletionOutput | None:
        """Output of a sequence; None without new tokens."""
        shown = self._shown[sequence.sample_index]
        if len(sequence.output_token_ids) == shown.num_tokens:
            return None
        completion = self._cumulative(sequence)
        if self.kind is RequestOutputKind.DELTA:
            return self._rest(completion)
        shown.num_tokens, shown.num_characters = len(completion.token_ids), len(completion.text)
        return completion

    def _cumulative(self, sequence: Sequence) -> CompletionOutput:
        has_failed = sequence.finish_reason in (FinishReason.ERROR, FinishReason.GRAMMAR_ERROR)
        text = None if sequence.finish_reason and not has_failed else self._certain_text(sequence)
        completion = completion_output(sequence.sample_index, sequence, self.tokenizer, text, self._logprobs(sequence))
        # The error is reported once, with the request's last output.
        return replace(completion, finish_reason=None) if has_failed else completion

    def _rest(self, completion: CompletionOutput) -> CompletionOutput:
        shown = self._shown[completion.index]
        tokens, characters = shown.num_tokens, shown.num_characters
        shown.num_tokens, shown.num_characters = len(completion.token_ids), len(completion.text)
        return replace(
            completion,
            text=completion.text[characters:],
            token_ids=completion.token_ids[tokens:],
            logprobs=None if completion.logprobs is None else completion.logprobs[tokens:],
            weight_versions=spans_of(tuple(completion.weight_versions), len(completion.token_ids), tokens),
            sampling_mask=None if completion.sampling_mask is None else completion.sampling_mask.after(tokens),
        )

    def _logprobs(self, sequence: Sequence) -> list[TokenLogprobs] | None:
        if not sequence.request.sampling.returns_logprobs:
            return None
        shown = self._shown[sequence.sample_index]
        shown.token_texts = shown.token_texts or token_texts(sequence, self.tokenizer)
        is_last = sequence.finish_reason is not None
        new = sequence.logprobs[len(shown.logprobs) :]
        shown.logprobs += logprobs_with_text(new, shown.token_texts, is_last=is_last)
        # Copies: the caller owns an output, maybe in another thread.
        return [dict(each) for each in shown.logprobs]

    def _certain_text(self, sequence: Sequence) -> str:
        """Beginning of the text of a running sequence that no later token changes."""
        sampling = sequence.request.sampling
        if self.tokenizer is None or not sampling.detokenize:
            return ""
        if sampling.stop:
            num_held = 0 if sampling.include_stop_str_in_output else max(map(len, sampling.stop)) - 1
            text = sequence.text or ""
            return text[: max(len(text) - num_held, 0)]
        shown = self._shown[sequence.sample_index]
        if shown.decoder is None:
            prompt = sequence.request.known_token_ids
            shown.decoder = IncrementalDecoder(self.tokenizer, prompt, sampling.skip_special_tokens)
        shown.text += shown.decoder.append(sequence.output_token_ids[shown.num_decoded :])
        shown.num_decoded = len(sequence.output_token_ids)
        return shown.text
