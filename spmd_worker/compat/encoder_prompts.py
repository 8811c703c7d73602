"""Prompts of encoder-decoder models: what the encoder reads, and the ids with which the decoder begins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from spmd_worker.base.config.plain_values import shown
from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.errors import MediaError
from spmd_worker.model_config.decoder_generation import DecoderGeneration
from spmd_worker.replica.sequence.decoder_prompt import DecoderPrompt, decoder_prompt, rules_after, text_prompt
from spmd_worker.replica.sequence.encoder_input import EncoderInput, encoder_audio, encoder_text
from spmd_worker.tokenizer.tokenizer import Tokenizer

NO_CHAT: Final = "an encoder-decoder model has no conversations: give the text or audio of its encoder as a prompt"
NO_TRUNCATION: Final = "truncate_prompt_tokens is not supported for encoder-decoder models: shorten the encoder's text"
OF_TEXT: Final = "source_language goes with the encoder's text: token ids have its token"
_AUDIO: Final = "audio"


class PendingAudio(Protocol):
    """Audio that is being prepared. `result` raises MediaError."""

    def done(self) -> bool: ...

    def result(self) -> Sequence[PreparedAudio]: ...


class AudioReader(Protocol):
    """A file, a path, a URL or samples -> the windows of the audio (`AudioPreparer`)."""

    def prepare(self, source: Any) -> Sequence[PreparedAudio]: ...

    def submit(self, source: Any) -> PendingAudio: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EncoderPrompts:
    """Prompts for one encoder-decoder model. `audio` is None for an encoder that reads text."""

    generation: DecoderGeneration
    audio: AudioReader | None = None

    def need_audio(self) -> AudioReader:
        """Reader of audio. Raises MediaError for an encoder of text."""
        if self.audio is None:
            raise MediaError("audio_unsupported", "the model's encoder reads text: give text, and no audio")
        return self.audio

    def one_window(self, source: Any) -> tuple[EncoderInput, PreparedAudio]:
        """The input of a prompt whose audio is one window. Raises MediaError."""
        windows = self.need_audio().prepare(source)
        if len(windows) > 1:
            raise MediaError(
                "audio_too_long",
                f"the audio of {windows[0].duration_s:.1f} s is longer than what the encoder reads at once: give it as "
                f"{len(windows)} prompts, or to a job or a server, which cut it and join the texts",
            )
        return of_window(windows[0]), windows[0]

    def of_ids(self, token_ids: Sequence[int]) -> EncoderInput:
        """The input of an encoder of text. Raises ValueError for an encoder of audio, and for no ids."""
        if self.audio is not None:
            raise ValueError(f"the model's encoder reads {_AUDIO}: give {_AUDIO}, and the decoder's prompt with it")
        if not token_ids:
            raise ValueError("the encoder's prompt has no tokens: give at least one")
        return encoder_text(token_ids)

    def decoder_of(self, token_ids: Sequence[int]) -> DecoderPrompt:
        """The decoder's prompt of the caller. The model's start token is added before it unless it is there: text that
        was spoken before stands in front of it in prompts of audio.
        """
        start = self.generation.start_token_id
        is_there = start in token_ids if self.audio is not None else [*token_ids[:1]] == [start]
        ids = tuple(token_ids) if is_there else (start, *token_ids)
        return DecoderPrompt(ids, rules_after(self.generation, ids))

    def text_decoder(self, tokenizer: Tokenizer | None, target_language: str | None = None) -> DecoderPrompt:
        """The decoder's prompt of a model that reads text. Raises ValueError for an unknown language."""
        return text_prompt(self.generation, tokenizer, target_language)

    def speech_decoder(self, tokenizer: Tokenizer | None, **speech: Any) -> DecoderPrompt:
        """The decoder's prompt of a model that reads audio; `speech` are keywords of `decoder_prompt`. Raises
        ValueError.
        """
        return decoder_prompt(self.generation, tokenizer, **speech)


def of_window(window: PreparedAudio) -> EncoderInput:
    """The input of an encoder that reads a window of audio."""
    return encoder_audio(window.media_id, window.num_rows)


def audio_of(data: Any) -> Any:
    """Audio of vLLM's `multi_modal_data`, None without any. Raises MediaError for several, and for other kinds."""
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise MediaError("audio_unsupported", f"multi_modal_data={shown(data)} must be a dict: {{'audio': audio}}")
    others = [str(kind) for kind, value in data.items() if kind != _AUDIO and value is not None]
    if others:
        message = f"multi_modal_data has {', '.join(others)}: the model's encoder reads audio alone"
        raise MediaError("audio_unsupported", message)
    given = data.get(_AUDIO)
    # Samples may be a list of numbers.
    if not isinstance(given, list) or not given or isinstance(given[0], int | float):
        return given
    if len(given) > 1:
        raise MediaError("audio_unsupported", f"the prompt has {len(given)} audios: the encoder reads one")
    return given[0]
