"""AudioPreparer: audio of rows, prepared ahead of time in helper processes."""

from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path

from spmd_worker.media.audio_limits import AudioLimits
from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.audio_process import IsolatedAudioPreparer
from spmd_worker.media.audio_settings import AudioSettings
from spmd_worker.media.audio_source import AudioSource, Given, GivenSamples, given_audio
from spmd_worker.media.media_process import HelperThreads
from spmd_worker.media.source import AUDIO, read_source


class AudioPreparer(HelperThreads[IsolatedAudioPreparer]):
    """Audio of rows -> PreparedAudio, one for each window, `num_processes` rows at a time. Paths are below `root`;
    without it there are none.
    """

    def __init__(self, settings: AudioSettings, limits: AudioLimits, root: Path | None, num_processes: int = 2) -> None:
        super().__init__(AUDIO, [IsolatedAudioPreparer(settings, limits) for _ in range(num_processes)])
        self.settings, self.limits, self._root = settings, limits, root

    def prepare(self, source: AudioSource) -> list[PreparedAudio]:
        """All windows of one recording, in order. Raises MediaError."""
        return self.submit(source).result()

    def submit(self, source: AudioSource) -> Future[list[PreparedAudio]]:
        """`prepare` ahead of time, in the order in which recordings are submitted. Arrays are copied here; files are
        read when their turn comes.
        """
        return self._submitted(lambda: given_audio(source, self.limits), self._prepare_all)

    def _prepare_all(self, helper: IsolatedAudioPreparer, given: Given) -> list[PreparedAudio]:
        self._check_open()
        prepared = []
        for window in helper.prepare(*self._read(given)):
            prepared.append(window)
            self._check_open()
        return prepared

    def _read(self, given: Given) -> tuple[bytes | GivenSamples, bytes]:
        if isinstance(given, GivenSamples):
            return given, given.digest
        data = read_source(given, self._root, self.limits.max_audio_bytes, AUDIO)
        return data, sha256(data).digest()
