"""Decodes audio and makes its features in a process with limits (`tokenizer/bounded_process.py`): a file whose decoder
never ends, takes all memory or crashes ends as the error of its row.

A conversation has a request with the file, or with samples, whose answer has the windows; then one for the features of
each window, so that neither an answer nor the computing of one grows with the audio's length.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from spmd_worker.media.audio_decode import decode_audio, samples_of
from spmd_worker.media.audio_features import log_mel, prompt_features
from spmd_worker.media.audio_limits import AudioLimits
from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.audio_settings import SAMPLING_RATE, AudioSettings
from spmd_worker.media.audio_source import GivenSamples
from spmd_worker.media.audio_tokens import audio_tokens
from spmd_worker.media.audio_wave import BLOCK_SAMPLES, Block, Recording
from spmd_worker.media.audio_windows import AudioWindow, windows
from spmd_worker.media.media_id import NUM_BYTES
from spmd_worker.media.media_process import MediaProcess, with_errors
from spmd_worker.media.prepared import AudioFeatures
from spmd_worker.media.source import AUDIO
from spmd_worker.tokenizer.bounded_process import PAYLOAD, BoundedProcess, serve

CPU_S: Final = 60
_SPEED: Final = 60
"""Seconds of audio for one more second of computing. An hour of MP3 takes a few seconds, of FLAC with eight channels
half of both: a machine's other work must not decide a row's answer."""
MEMORY_BYTES: Final = 640 << 20
_MEMORY_PER_SECOND: Final = 4 * (3 * SAMPLING_RATE + 2 * 48_000)
"""Samples in blocks and as one array; samples that a caller gives, twice."""


class IsolatedAudioPreparer(MediaProcess):
    """Prepares audio, one file after the other."""

    def __init__(self, settings: AudioSettings, limits: AudioLimits) -> None:
        self._settings = settings
        start = {"settings": asdict(settings), "limits": asdict(limits)}
        memory_bytes = MEMORY_BYTES + 3 * limits.max_audio_bytes + _MEMORY_PER_SECOND * limits.max_audio_s
        super().__init__(AUDIO, BoundedProcess(__name__, start, CPU_S + limits.max_audio_s // _SPEED, memory_bytes))

    def prepare(self, source: bytes | GivenSamples, source_digest: bytes) -> Iterator[PreparedAudio]:
        """Windows in their order. Take all of them before the next call. Raises MediaError."""
        if isinstance(source, bytes):
            answer = self._ask({"shape": None, PAYLOAD: source})
        else:
            described = {"shape": source.samples.shape, "rate": source.sampling_rate}
            answer = self._ask({**described, PAYLOAD: source.samples.tobytes()})
        bounds = answer["windows"]
        for index, (start_s, end_s) in enumerate(bounds):
            found = self._ask({"window": index})
            features = np.frombuffer(found[PAYLOAD], np.float32).reshape(self._settings.num_mel_bins, -1)
            yield PreparedAudio(
                media_id=bytes.fromhex(found["media_id"]),
                features=AudioFeatures(features),
                num_rows=found["num_rows"],
                num_patches=found["num_patches"],
                start_s=start_s,
                end_s=end_s,
                duration_s=bounds[-1][1],
                source_digest=source_digest,
                text=found["text"],
            )


# In the process.


class _Conversation:
    """The windows of the audio that came last."""

    def __init__(self, settings: AudioSettings, limits: AudioLimits) -> None:
        self._settings, self._limits = settings, limits
        self._windows: list[AudioWindow] = []

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._features(request["window"]) if "window" in request else self._opened(request)

    def _opened(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self._windows = []
        if request["shape"] is None:
            samples = decode_audio(request.get(PAYLOAD, b""), self._limits)
        else:
            given = np.frombuffer(request.get(PAYLOAD, b""), np.float32).reshape(request["shape"])
            samples = samples_of(Recording(request["rate"], len(given), given.shape[1], _blocks(given)), self._limits)
        if self._settings.kind:
            # A recording in a prompt is not cut.
            audio_tokens(len(samples), self._settings)
        self._windows = windows(samples, self._settings.num_samples)
        return {"windows": [(each.start_s, each.end_s) for each in self._windows]}

    def _features(self, index: int) -> Mapping[str, Any]:
        if index >= len(self._windows):
            return {"error": "its process has ended and was started again"}
        samples, settings = self._windows[index].samples, self._settings
        if settings.kind:
            num_frames, *found = audio_tokens(len(samples), settings)
            sizes = dict(zip(("num_patches", "num_rows", "text"), found))
            features = prompt_features(samples, settings, num_frames)
        else:
            features, num_rows = log_mel(samples, settings), settings.num_rows
            sizes = {"num_rows": num_rows, "num_patches": num_rows, "text": ""}
        data = features.tobytes()
        return {"media_id": audio_id_of(data, settings).hex(), **sizes, PAYLOAD: data}


def _blocks(samples: Block) -> Iterator[Block]:
    """[frames, channels] of [channels, samples]."""
    for start in range(0, samples.shape[1], BLOCK_SAMPLES):
        yield np.ascontiguousarray(samples[:, start : start + BLOCK_SAMPLES].T)


def audio_id_of(features: bytes, settings: AudioSettings) -> bytes:
    """The name of prepared audio (`media_id.py`): blake2b-128 of the settings and the features."""
    described = json.dumps(asdict(settings), sort_keys=True).encode("ascii")
    return blake2b(described + b"\n" + features, digest_size=NUM_BYTES, person=b"spmd-enc-audio").digest()


def _open(start: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    return with_errors(_Conversation(AudioSettings(**start["settings"]), AudioLimits(**start["limits"])).answer)


if __name__ == "__main__":
    sys.exit(serve(_open))
