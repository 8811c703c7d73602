"""AudioPreparer: audio of rows, prepared ahead of time in helper processes."""

import contextlib
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from spmd_worker.media.audio_limits import AudioLimits
from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.audio_process import IsolatedAudioPreparer
from spmd_worker.media.audio_settings import AudioSettings
from spmd_worker.media.audio_source import AudioSource, Given, GivenSamples, given_audio
from spmd_worker.media.errors import MediaError
from spmd_worker.media.source import AUDIO, read_source


class AudioPreparer:
    """Audio of rows -> PreparedAudio, one for each window, `num_processes` rows at a time. Threads may share it.

    Paths are below `root`; without it there are none. Close it, or leave its `with`, to end threads and processes.
    """

    def __init__(self, settings: AudioSettings, limits: AudioLimits, root: Path | None, num_processes: int = 2) -> None:
        self.settings, self.limits = settings, limits
        self._root, self._is_closed = root, False
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="audio")
        self._idle: queue.SimpleQueue[IsolatedAudioPreparer] = queue.SimpleQueue()
        for _ in range(num_processes):
            self._idle.put(IsolatedAudioPreparer(settings, limits))

    def __enter__(self) -> "AudioPreparer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Rows that have not begun are cancelled; those that have end as errors, behind the window they are at."""
        self._is_closed = True
        self._threads.shutdown(cancel_futures=True)
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    def prepare(self, source: AudioSource) -> list[PreparedAudio]:
        """All windows of one recording, in order. Raises MediaError."""
        return self.submit(source).result()

    def submit(self, source: AudioSource) -> Future[list[PreparedAudio]]:
        """`prepare` ahead of time, in the order in which recordings are submitted. Arrays are copied here; files are
        read when their turn comes.
        """
        try:
            given = given_audio(source, self.limits)
        except MediaError as error:
            failed: Future[list[PreparedAudio]] = Future()
            failed.set_exception(error)
            return failed
        return self._threads.submit(self._prepare_all, given)

    def _prepare_all(self, given: Given) -> list[PreparedAudio]:
        helper = self._idle.get()
        try:
            self._check_is_open()
            prepared = []
            for window in helper.prepare(*self._read(given)):
                prepared.append(window)
                self._check_is_open()
            return prepared
        finally:
            self._idle.put(helper)

    def _read(self, given: Given) -> tuple[bytes | GivenSamples, bytes]:
        if isinstance(given, GivenSamples):
            return given, given.digest
        data = read_source(given, self._root, self.limits.max_audio_bytes, AUDIO)
        return data, sha256(data).digest()

    def _check_is_open(self) -> None:
        if self._is_closed:
            raise MediaError("audio_unreadable", "the run has ended before it was prepared")
