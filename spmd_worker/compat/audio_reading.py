"""Opens what a run's prompts need of audio, and of an encoder and a decoder: generation, features, limits, root."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.encoder_prompts import EncoderPrompts
from spmd_worker.media.audio_limits import AudioLimits
from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.audio_preparer import AudioPreparer
from spmd_worker.media.audio_settings import AudioSettings, read_audio_settings
from spmd_worker.media.errors import MediaError
from spmd_worker.resolved import ResolvedRun

Prepared = TypeVar("Prepared")


class _Preparer(Protocol[Prepared]):
    def prepare(self, source: Any, /) -> list[Prepared]: ...

    def submit(self, source: Any, /) -> Future[list[Prepared]]: ...

    def close(self) -> None: ...


class LazyPreparer(Generic[Prepared]):
    """A preparer of images or audio, made for the first prompt that has some: text alone needs no Pillow. Threads may
    share it.
    """

    def __init__(self, make: Callable[[], _Preparer[Prepared]]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: _Preparer[Prepared] | None = None

    @property
    def _preparer(self) -> _Preparer[Prepared]:
        with self._lock:
            try:
                self._made = self._made or self._make()
            except ConfigError as error:
                raise MediaError("extra_missing", str(error)) from None
            return self._made

    def prepare(self, source: Any) -> list[Prepared]:
        return self._preparer.prepare(source)

    def submit(self, source: Any) -> Future[list[Prepared]]:
        try:
            return self._preparer.submit(source)
        except MediaError as error:
            failed: Future[list[Prepared]] = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        """End the helper processes, if there are any. Idempotent."""
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.close()


class PendingRecordings(NamedTuple):
    """Recordings of one prompt that are being prepared."""

    parts: tuple[Future[list[PreparedAudio]], ...]

    def done(self) -> bool:
        return all(each.done() for each in self.parts)

    def result(self) -> list[PreparedAudio]:
        """Raises MediaError, whose message has the number of the recording if it is of one."""
        found = []
        for index, each in enumerate(self.parts):
            try:
                found += each.result()
            except MediaError as error:
                where = "" if error.code == "too_many_audios" else f"recording {index}: "
                raise MediaError(error.code, f"{where}{error}") from None
        return found


class PromptAudio:
    """All recordings of a prompt, at most `max_audios`, as `ImagePreparer` prepares its images."""

    def __init__(self, preparer: LazyPreparer[PreparedAudio], max_audios: int) -> None:
        self._preparer, self._max_audios = preparer, max_audios

    def prepare(self, sources: Sequence[Any]) -> list[PreparedAudio]:
        return self.submit(sources).result()

    def submit(self, sources: Sequence[Any]) -> PendingRecordings:
        if len(sources) <= self._max_audios:
            return PendingRecordings(tuple([self._preparer.submit(each) for each in sources]))
        failed: Future[list[PreparedAudio]] = Future()
        rule = f"limits.max_audios={self._max_audios}"
        message = f"the prompt has {len(sources)} recordings, more than {rule}"
        failed.set_exception(MediaError("too_many_audios", message))
        return PendingRecordings((failed,))

    def close(self) -> None:
        self._preparer.close()


def open_encoder_prompts(resolved: ResolvedRun) -> EncoderPrompts | None:
    """The prompts of a run; None for a model without an encoder. Raises ModelConfigError for unsupported features."""
    if resolved.decoder is None:
        return None
    settings = run_audio_settings(resolved)
    if settings is None:
        return EncoderPrompts(resolved.decoder)
    return EncoderPrompts(resolved.decoder, new_audio_preparer(resolved, settings))


def new_audio_preparer(resolved: ResolvedRun, settings: AudioSettings) -> LazyPreparer[PreparedAudio]:
    """The preparer of a run's audio."""
    job = resolved.config.job
    root = None if job.media_root is None else Path(job.media_root)
    return LazyPreparer(partial(AudioPreparer, settings, audio_limits(resolved.config), root, job.media_threads))


def run_audio_settings(resolved: ResolvedRun) -> AudioSettings | None:
    """The numbers by which the audio of a run is prepared; None for a model without audio. Raises ModelConfigError."""
    part, vision = resolved.model_config.encoder_part, resolved.model_config.vision
    hearing = None if vision is None else vision.hearing
    audio = part.audio if part is not None else None if hearing is None else hearing.audio
    if audio is None:
        return None
    of_prompt = () if hearing is None else (hearing.kind, hearing.merge_size)
    return read_audio_settings(resolved.model_folder, audio, *of_prompt)


def audio_limits(config: RunConfig) -> AudioLimits:
    """Bounds on the audio of a row."""
    return AudioLimits(config.limits.max_audio_bytes, config.limits.max_audio_s)
