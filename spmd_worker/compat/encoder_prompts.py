"""Prompts of encoder-decoder models: what the encoder reads, and the ids with which the decoder begins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from spmd_worker.base.config.plain_values import shown
from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.errors import MediaError
from spmd_worker.model_config.encoder_part import EncoderPart
from spmd_worker.replica.sequence.encoder_input import EncoderInput, encoder_audio, encoder_text

NO_CHAT: Final = (
    "an encoder-decoder model has no chat template: give its encoder's text to LLM.generate, or to /v1/completions"
)
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

    part: EncoderPart
    audio: AudioReader | None = None

    def one_window(self, source: Any) -> tuple[EncoderInput, PreparedAudio]:
        """The input of a prompt whose audio is one window. Raises MediaError."""
        windows = self.need_audio().prepare(source)
        if len(windows) > 1:
            first = windows[0]
            raise MediaError(
                "audio_too_long",
                f"the audio of {first.duration_s:.1f} s is longer than what the encoder reads at once: give it as "
                f"{len(windows)} prompts, or to a job or a server, which cut it and join the texts",
            )
        return self.of_window(windows[0]), windows[0]

    def need_audio(self) -> AudioReader:
        """Reader of audio. Raises MediaError for an encoder of text."""
        if self.audio is None:
            raise MediaError("audio_unsupported", "the model's encoder reads text: give text under encoder_prompt")
        return self.audio

    @staticmethod
    def of_window(window: PreparedAudio) -> EncoderInput:
        return encoder_audio(window.media_id, window.num_rows)

    def of_ids(self, token_ids: Sequence[int]) -> EncoderInput:
        """The input of an encoder of text. Raises ValueError for an encoder of audio, and for no ids."""
        if self.audio is not None:
            raise ValueError('the model\'s encoder reads audio: give "multi_modal_data": {"audio": ...}')
        if not token_ids:
            raise ValueError("the encoder's prompt has no tokens: give at least one")
        return encoder_text(token_ids)

    def decoder_ids(self, token_ids: Sequence[int] = ()) -> tuple[int, ...]:
        """The decoder's prompt. The model's start token is added before it unless it is there: text that was spoken
        before stands in front of it in prompts of audio.
        """
        start = self.part.start_token_id
        is_there = start in token_ids if self.part.audio is not None else [*token_ids[:1]] == [start]
        return tuple(token_ids) if is_there else (start, *token_ids)


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
    if isinstance(given, list) and len(given) == 1:
        return given[0]
    if isinstance(given, list):
        raise MediaError("audio_unsupported", f"the prompt has {len(given)} audios: the encoder reads one")
    return given


def media_num_bytes(media: Sequence[Any]) -> int:
    """Bytes of memory of prepared images and audio."""
    return sum(
        each.features.features.nbytes if isinstance(each, PreparedAudio) else sum(crop.nbytes for crop in each.pixels.crops)
        for each in media
    )
