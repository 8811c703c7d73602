"""Stop conditions of a sequence: end-of-sequence ids, stop ids, stop strings, length, repetition.

A pure function of a sequence's own tokens, so every replica decides alike. Stop strings are searched in the text as it
grows, also across token boundaries; only sequences that have them are decoded here.
"""

from collections.abc import Callable
from typing import Final, Protocol

from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sequence import FinishReason, Sequence, SequenceKey


class TextDecoder(Protocol):
    """Incremental detokenizer (`tokenizer.IncrementalDecoder`): schedulers do not import tokenizers."""

    def append(self, token_ids: list[int]) -> str:
        """Add tokens; returns the text that they complete."""

    def held(self) -> str:
        """Held-back text as it would be decoded now."""

    def flush(self) -> str:
        """Returns the text that was held back."""


REPETITION_DETECTED: Final = "repetition_detected"
"""vLLM's `stop_reason` of an answer that repeats itself."""

DecoderFactory = Callable[[Sequence], TextDecoder]


class StopChecker:
    """Decides after each token whether its sequence has ended, and sets `finish_reason`, `stop_reason` and `text`.

    `max_model_len` is in tokens, prompt included, without an encoder's positions. Without a decoder factory stop
    strings must not be asked for.
    """

    def __init__(self, eos_token_ids: tuple[int, ...], max_model_len: int, new_decoder: DecoderFactory | None) -> None:
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._new_decoder = new_decoder
        self._decoders: dict[SequenceKey, TextDecoder] = {}

    def max_output_tokens(self, request: Request) -> int:
        num_prompt_tokens = len(request.prompt_token_ids) - request.num_encoder_positions
        limit, max_tokens = self._max_model_len - num_prompt_tokens, request.sampling.max_tokens
        return limit if max_tokens is None else min(limit, max_tokens)

    def prepare(self, sequence: Sequence) -> None:
        """Compute `Sequence.num_outputs_plain` and `end_ids` once: tokens that they rule out need no `has_ended`."""
        request, sampling = sequence.request, sequence.request.sampling
        others = (sampling.structured_outputs, sampling.repetition_detection, request.pooling)
        if sampling.stop or any(each is not None for each in others):
            return
        sequence.num_outputs_plain = self.max_output_tokens(request)
        eos_token_ids = () if sampling.ignore_eos else self._eos_token_ids
        sequence.end_ids = (*eos_token_ids, *sampling.stop_token_ids)

    def has_ended(self, sequence: Sequence) -> bool:
        """Check the last token. Call once for each token, in order."""
        sampling, outputs = sequence.request.sampling, sequence.output_token_ids
        num_outputs, token_id = len(outputs), outputs[-1]
        # The sampler ends a grammar before `min_tokens` only where no other token is allowed.
        if num_outputs >= sampling.min_tokens or sampling.structured_outputs is not None:
            if token_id in self._eos_token_ids and not sampling.ignore_eos:
                sequence.finish_reason = FinishReason.STOP
            elif token_id in sampling.stop_token_ids and num_outputs >= sampling.min_tokens:
                sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, token_id
        # Like a stop string, the text of a token that ends the sequence is left out unless asked for.
        if sampling.stop and (sequence.finish_reason is None or sampling.include_stop_str_in_output):
            self._check_text(sequence)
        if sequence.finish_reason is None:
            num_tokens = sequence.num_prompt_tokens - sequence.request.num_encoder_positions + num_outputs
            is_at_end = num_tokens >= self._max_model_len
            if is_at_end or num_outputs == sampling.max_tokens:
                sequence.finish_reason = FinishReason.LENGTH
            elif num_outputs >= sampling.min_tokens and _repeats(sequence):
                sequence.finish_reason, sequence.stop_reason = FinishReason.REPETITION, REPETITION_DETECTED
            else:
                return False
        self.forget(sequence)
        return True

    def forget(self, sequence: Sequence) -> None:
        """Drop the decoder of a sequence that ended or was aborted; its held-back text joins its text."""
        decoder = self._decoders.pop(sequence.key, None)
        has_stop_string = sequence.finish_reason is FinishReason.STOP and isinstance(sequence.stop_reason, str)
        if decoder is not None and not has_stop_string:
            sequence.text = (sequence.text or "") + decoder.flush()

    def _check_text(self, sequence: Sequence) -> None:
        """Search the last token's text for a stop string."""
        sampling = sequence.request.sampling
        decoder = self._decoders.get(sequence.key)
        if decoder is None:
            assert self._new_decoder is not None, "stop strings need a tokenizer; admission must reject them without"
            decoder = self._decoders[sequence.key] = self._new_decoder(sequence)
        # Held-back text counts as it is now: a newline that is a fallback byte is held until the next word.
        num_searched = len(sequence.text or "") + len(decoder.held())
        sequence.text = (sequence.text or "") + decoder.append(sequence.output_token_ids[-1:])
        text = sequence.text + decoder.held()
        # Like vLLM, the first token that may complete a stop string is the one after the first `min_tokens`.
        if len(text) <= num_searched or len(sequence.output_token_ids) <= sampling.min_tokens:
            return
        match = first_match(text, sampling.stop, num_searched)
        if match is not None:
            start, stop_string = match
            sequence.text = text[: start + len(stop_string) * sampling.include_stop_str_in_output]
            sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, stop_string


def _repeats(sequence: Sequence) -> bool:
    detection = sequence.request.sampling.repetition_detection
    return detection is not None and detection.is_found(sequence.output_token_ids)


def first_match(text: str, stop_strings: tuple[str, ...], num_searched: int) -> tuple[int, str] | None:
    """Start of the earliest stop string, and the string; ties go to the longest.

    Only matches that end after the first `num_searched` characters are new, so the search begins just before them.
    """
    found = [(text.find(each, max(0, num_searched - len(each) + 1)), each) for each in stop_strings]
    matches = [(start, stop_string) for start, stop_string in found if start >= 0]
    return min(matches, key=lambda match: (match[0], -len(match[1])), default=None)
