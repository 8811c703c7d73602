"""A row of audio: its windows as requests, and their answers as one transcript."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from spmd_worker.compat.encoder_prompts import NO_TRUNCATION, EncoderPrompts, of_window
from spmd_worker.compat.prompts import Encoded
from spmd_worker.engine.request_error import RequestError
from spmd_worker.frontends.openai.openai_body import finite
from spmd_worker.frontends.openai.prompt_ids import encode
from spmd_worker.frontends.openai.prompt_values import invalid_request
from spmd_worker.frontends.openai.row import AudioPrompt, EncodedRow, Row
from spmd_worker.frontends.openai.row_encoding import RowContext, finish_row
from spmd_worker.frontends.openai.transcript import Segment, Transcript
from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.errors import MediaError
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.media.source import AUDIO
from spmd_worker.model_config.decoder_generation import DecoderGeneration
from spmd_worker.replica.sequence.decoder_prompt import DecoderPrompt, detected_language, segments
from spmd_worker.replica.sequence.outputs import CompletionOutput, RequestOutput
from spmd_worker.tokenizer.languages import language_code, language_name
from spmd_worker.tokenizer.messages import InvalidRequestError
from spmd_worker.tokenizer.tokenizer import Tokenizer


class WindowTimes(NamedTuple):
    """Begin and end of a window of audio, in seconds."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class EncodedAudioRow:
    """A row that can run: a request for each window of its audio. `generation` and `tokenizer` read the answers."""

    row: Row
    prompt: AudioPrompt
    windows: tuple[EncodedRow, ...]
    times: tuple[WindowTimes, ...]
    duration_s: float
    generation: DecoderGeneration
    tokenizer: Tokenizer | None

    @property
    def media(self) -> tuple[PreparedMedia, ...]:
        return tuple([each for window in self.windows for each in window.media])

    def named(self, custom_id: str) -> "EncodedAudioRow":
        """The row under a name, which its random numbers depend on."""
        return replace(self, windows=tuple([replace(each, custom_id=custom_id) for each in self.windows]))

    def without_media(self) -> "EncodedAudioRow":
        return replace(self, windows=tuple([each.without_media() for each in self.windows]))

    @property
    def num_sequences(self) -> int:
        """Samples of all windows."""
        return sum(each.sampling.num_sequences for each in self.windows)

    @property
    def has_timestamps(self) -> bool:
        """Whether the answers have timestamps between their texts."""
        rules = self.windows[0].sampling.token_rules
        return rules is not None and rules.timestamps is not None


@invalid_request(errors=RequestError)
def encode_audio(row: Row, context: RowContext, media: Sequence[PreparedMedia] | None = None) -> EncodedAudioRow:
    """Encode a row's windows. `media` are these, prepared before; None: they are prepared here. Raises
    InvalidRequestError.
    """
    engine, tokenizer = context.engine, context.tokenizer
    prompt, prompts = row.prompt, engine.encoder_prompts
    assert isinstance(prompt, AudioPrompt), "a row of audio"
    adapters = context.models.adapters_of(row)
    engine.check_runner(None)
    if prompts is None or prompts.audio is None:
        if engine.images is not None and AUDIO in engine.images.media:
            instead = "give recordings under audios, with a prompt or messages"
            raise InvalidRequestError(f"this model hears audio inside of prompts: {instead}", "audio_unsupported")
        raise InvalidRequestError("this model reads no audio: give text", "audio_unsupported")
    if row.sampling.truncate_prompt_tokens is not None:
        raise InvalidRequestError(NO_TRUNCATION, "conflicting_keys")
    decoder = _decoder(prompt, prompts, tokenizer)
    windows = _windows(prompt, prompts, media)
    encoded = []
    for window in windows:
        given = Encoded(decoder.token_ids, media=(window,), encoder=of_window(window), rules=decoder.rules)
        encoded.append(finish_row(row, given, adapters, context))
    times = tuple([WindowTimes(each.start_s, each.end_s) for each in windows])
    return EncodedAudioRow(row, prompt, tuple(encoded), times, windows[0].duration_s, prompts.generation, tokenizer)


def _decoder(prompt: AudioPrompt, prompts: EncoderPrompts, tokenizer: Tokenizer | None) -> DecoderPrompt:
    with invalid_request():
        if prompt.decoder is not None:
            return prompts.decoder_of(encode(prompt.decoder, tokenizer, adds_special_tokens=False)[1])
        return prompts.speech_decoder(
            tokenizer,
            language=prompt.language,
            task=prompt.task,
            timestamps=prompt.has_timestamps,
            prompt_text=prompt.text or "",
        )


def _windows(
    prompt: AudioPrompt, prompts: EncoderPrompts, media: Sequence[PreparedMedia] | None
) -> list[PreparedAudio]:
    try:
        given = prompts.need_audio().prepare(prompt.source) if media is None else media
    except MediaError as error:
        raise InvalidRequestError(f"{prompt.key}: {error}", error.code) from None
    return [each for each in given if isinstance(each, PreparedAudio)]


def joined_output(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """The answers to all windows as one: sample i is that of each window, one behind the other. An error is that of
    the first window without an answer.
    """
    first = outputs[0]
    failed = next((each for each in outputs if each.error is not None), None)
    if failed is not None:
        return failed
    samples = [_joined(samples) for samples in zip(*[each.outputs for each in outputs], strict=True)]
    prompt_ids = [token_id for each in outputs for token_id in each.prompt_token_ids]
    num_cached = sum(each.num_cached_tokens for each in outputs)
    return replace(first, prompt_token_ids=prompt_ids, outputs=samples, num_cached_tokens=num_cached)


def _joined(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    logprobs = [position for each in parts for position in each.logprobs or ()]
    ended = next((each for each in parts if each.finish_reason == "length"), parts[-1])
    return replace(
        ended,
        text="".join([each.text for each in parts]),
        token_ids=[token_id for each in parts for token_id in each.token_ids],
        logprobs=None if parts[0].logprobs is None else logprobs,
        cumulative_logprob=None
        if parts[0].cumulative_logprob is None
        else sum(each.cumulative_logprob or 0.0 for each in parts),
    )


def transcript_of(encoded: EncodedAudioRow, outputs: Sequence[RequestOutput], sample: int = 0) -> Transcript:
    """The transcript of one sample of each window."""
    parts = [each.outputs[sample] for each in outputs]
    found = [each for part, times in zip(parts, encoded.times, strict=True) for each in _segments(encoded, part, times)]
    texts = [each.text for each in found] if encoded.has_timestamps else [_text(encoded, part) for part in parts]
    return Transcript(
        text="".join(texts).strip(),
        segments=tuple(found),
        duration_s=encoded.duration_s,
        task=encoded.prompt.task,
        language=_language(encoded, parts),
        temperature=encoded.row.sampling.temperature,
    )


def _language(encoded: EncodedAudioRow, parts: Sequence[CompletionOutput]) -> str | None:
    """English name of the text's language: that of the row, or the one that the first window has."""
    prompt, speech = encoded.prompt, encoded.generation.speech
    if prompt.task == "translate" or (speech is not None and not speech.languages):
        return "english"
    if prompt.language is not None:
        return language_name(language_code(prompt.language))
    token_ids = (*encoded.windows[0].content.token_ids, *parts[0].token_ids)
    code = None if speech is None else detected_language(encoded.generation, token_ids)
    return None if code is None else language_name(code)


def _text(encoded: EncodedAudioRow, part: CompletionOutput) -> str:
    """Text of a window that was decoded without timestamps, which may have some nevertheless."""
    if encoded.tokenizer is None or encoded.row.kind == "plain":
        return part.text
    return encoded.tokenizer.decode(_text_ids(encoded, part), skip_special_tokens=True)


def _text_ids(encoded: EncodedAudioRow, part: CompletionOutput) -> list[int]:
    return [each for each in part.token_ids if each < encoded.generation.end_token_id]


def _segments(encoded: EncodedAudioRow, part: CompletionOutput, times: WindowTimes) -> Iterator[Segment]:
    if not encoded.has_timestamps or encoded.tokenizer is None:
        return
    logprobs = _text_logprobs(encoded, part)
    for start_s, end_s, token_ids in segments(encoded.generation, part.token_ids, *times):
        text = encoded.tokenizer.decode(token_ids, skip_special_tokens=True)
        mean = None
        if logprobs is not None:
            mean = finite(sum(next(logprobs) for _ in token_ids) / len(token_ids))
        yield Segment(start_s, end_s, text, tuple(token_ids), times.start_s, mean)


def _text_logprobs(encoded: EncodedAudioRow, part: CompletionOutput) -> Iterator[float] | None:
    """Log-probabilities of the tokens of text, in their order."""
    if part.logprobs is None:
        return None
    end = encoded.generation.end_token_id
    pairs = zip(part.token_ids, part.logprobs, strict=True)
    return (position[token_id].logprob for token_id, position in pairs if token_id < end)
