"""Opens what a run's prompts need if its model has an encoder and a decoder: generation, audio, limits, root."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from spmd_worker.base.config.schema import RunConfig
from spmd_worker.compat.encoder_prompts import EncoderPrompts
from spmd_worker.media.audio_limits import AudioLimits
from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.audio_preparer import AudioPreparer
from spmd_worker.media.audio_settings import AudioSettings, read_audio_settings
from spmd_worker.resolved import ResolvedRun


class LazyAudioPreparer:
    """An AudioPreparer, made for the first audio. Threads may share it."""

    def __init__(self, make: Callable[[], AudioPreparer]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: AudioPreparer | None = None

    @property
    def _preparer(self) -> AudioPreparer:
        with self._lock:
            self._made = self._made or self._make()
            return self._made

    def prepare(self, source: Any) -> Sequence[PreparedAudio]:
        return self._preparer.prepare(source)

    def submit(self, source: Any) -> Future[list[PreparedAudio]]:
        return self._preparer.submit(source)

    def close(self) -> None:
        """End the helper processes, if there are any. Idempotent."""
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.close()


def open_encoder_prompts(resolved: ResolvedRun) -> EncoderPrompts | None:
    """The prompts of a run; None for a model without an encoder. Raises ModelConfigError for unsupported features."""
    if resolved.decoder is None:
        return None
    settings = run_audio_settings(resolved)
    if settings is None:
        return EncoderPrompts(resolved.decoder)
    job = resolved.config.job
    root = None if job.media_root is None else Path(job.media_root)
    make = partial(AudioPreparer, settings, audio_limits(resolved.config), root, job.media_threads)
    return EncoderPrompts(resolved.decoder, LazyAudioPreparer(make))


def run_audio_settings(resolved: ResolvedRun) -> AudioSettings | None:
    """The numbers by which the audio of a run is prepared; None for a model without audio. Raises ModelConfigError."""
    part = resolved.model_config.encoder_part
    if part is None or part.audio is None:
        return None
    return read_audio_settings(resolved.model_folder, part.audio)


def audio_limits(config: RunConfig) -> AudioLimits:
    """Bounds on the audio of a row."""
    return AudioLimits(config.limits.max_audio_bytes, config.limits.max_audio_s)
