"""Audio prepared in helper processes: the results of this process, and an end for files that would not end."""

import base64
import contextlib
import io
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hostile_audio import CASES, FLAC, MP3, OGG, RATE, WAVE, encoded, tone, wave
from waiting import wait_until

from spmd_worker.base.process import children_of, start_time_of
from spmd_worker.media import audio_process
from spmd_worker.media.audio_decode import decode_audio
from spmd_worker.media.audio_features import log_mel
from spmd_worker.media.audio_limits import AudioLimits
from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.audio_preparer import AudioPreparer
from spmd_worker.media.audio_process import IsolatedAudioPreparer
from spmd_worker.media.audio_settings import AudioSettings
from spmd_worker.media.audio_source import AudioSource
from spmd_worker.media.audio_windows import windows
from spmd_worker.media.errors import MediaError

SETTINGS, LIMITS = AudioSettings(80, 1), AudioLimits(max_audio_bytes=1 << 20, max_audio_s=4)
LONG = encoded(tone(3 * RATE), "FLAC")
SAMPLES = decode_audio(WAVE, LIMITS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audio")
    (folder / "a.wav").write_bytes(WAVE)
    return folder


@pytest.fixture(scope="module")
def preparer(folder: Path) -> Iterator[AudioPreparer]:
    with AudioPreparer(SETTINGS, LIMITS, folder, 1) as preparer:
        yield preparer


def code_of(preparer: AudioPreparer, source: Any) -> tuple[str, str]:
    with pytest.raises(MediaError) as caught:
        preparer.prepare(source)
    return caught.value.code, str(caught.value)


def process_of(preparer: AudioPreparer) -> int:
    helper = preparer._idle.get()
    preparer._idle.put(helper)
    assert helper.pid is not None
    return helper.pid


@pytest.mark.guarantee("Audio windows from helper processes are those of the whole audio")
def test_helper_process_equals_preparing_here(preparer: AudioPreparer):
    found = preparer.prepare(LONG)
    expected = windows(decode_audio(LONG, LIMITS), SETTINGS.num_samples)
    assert [(each.start_s, each.end_s) for each in found] == [(each.start_s, each.end_s) for each in expected]
    assert len(found) > 3
    for audio, window in zip(found, expected, strict=True):
        assert np.array_equal(audio.features.features, log_mel(window.samples, SETTINGS))
        assert (audio.num_rows, audio.num_patches, audio.duration_s) == (50, 50, 3.0)
        assert (audio.source_digest, audio.text, audio.token_grid) == (sha256(LONG).digest(), "", (0, 0))
    assert len({audio.media_id for audio in found}) == len(found)


@pytest.mark.control("Audio windows from helper processes are those of the whole audio")
def test_windows_of_other_audio_have_other_names(preparer: AudioPreparer):
    first, second = preparer.prepare(LONG), preparer.prepare(encoded(tone(3 * RATE, seed=1), "FLAC"))
    assert not {each.media_id for each in first} & {each.media_id for each in second}
    assert not np.array_equal(first[0].features.features, second[0].features.features)


def test_all_sources_of_a_recording_have_one_name(preparer: AudioPreparer, folder: Path):
    url = f"data:audio/wav;base64,{base64.b64encode(WAVE).decode()}"
    files: list[AudioSource] = [
        *(WAVE, url, "a.wav", folder / "a.wav", f"file://{folder}/a.wav"),
        *({"bytes": WAVE, "path": "b.wav"}, {"bytes": None, "path": "a.wav"}),
    ]
    stereo = np.stack([SAMPLES, SAMPLES])
    arrays: list[AudioSource] = [
        *(SAMPLES, SAMPLES[None], (SAMPLES, 16_000), (SAMPLES.astype(np.float64), 16_000.0), SAMPLES[::-1][::-1]),
        *({"array": SAMPLES, "sampling_rate": 16_000, "path": None}, SAMPLES.tolist(), stereo),
    ]
    found = [preparer.prepare(source)[0] for source in (*files, *arrays)]
    assert len({each.media_id for each in found}) == 1
    assert {each.source_digest for each in found[: len(files)]} == {sha256(WAVE).digest()}
    assert len({each.source_digest for each in found[len(files) :]}) == 2
    assert found[0].duration_s == 0.25


def test_array_of_another_rate_is_resampled(preparer: AudioPreparer):
    samples = tone(24_000, 2)
    (file,) = preparer.prepare(encoded(samples, "WAV", "FLOAT", 48_000))
    (array,) = preparer.prepare((samples.T, 48_000))
    assert (array.media_id, array.duration_s) == (file.media_id, 0.5)


def test_name_covers_the_settings():
    data = b"\0" * 32_000
    names = {audio_process.audio_id_of(data, AudioSettings(*each)) for each in ((80, 1), (128, 1), (80, 30))}
    assert len(names) == 3
    assert {len(each) for each in names} == {16}


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        (b"no audio", "audio_unreadable", "8 bytes are not audio"),
        ("/etc/passwd", "audio_outside_root", "outside of"),
        ("b.wav", "audio_missing", "cannot be read"),
        ("https://a/b.wav", "audio_unsupported", "audio is not downloaded"),
        ("data:audio/wav;base64", "audio_unreadable", "not a data URL"),
        (bytes((1 << 20) + 1), "audio_too_large", "limits.max_audio_bytes=1048576"),
        (3, "audio_unreadable", "int is not audio: give bytes"),
        (None, "audio_unreadable", "NoneType is not audio"),
        ({"url": "x"}, "audio_unreadable", "'url' is not audio"),
        ({"array": SAMPLES}, "audio_unreadable", 'has no "sampling_rate"'),
        ((SAMPLES, "16000"), "audio_unreadable", "must be a whole number of Hz"),
        ((SAMPLES, float("nan")), "audio_unreadable", "must be a whole number of Hz"),
        ((SAMPLES, 1), "audio_too_long", "limits.max_audio_s=4"),
        ((SAMPLES[:3], 1), "audio_unreadable", "1,000 to 384,000 Hz"),
        (np.zeros(80_000, np.float32), "audio_too_long", "limits.max_audio_s=4"),
        (np.zeros(9, np.int16), "audio_unreadable", "int16 must be floats from -1 to 1: divide"),
        (np.zeros((9, 2, 3), np.float32), "audio_unreadable", "shape [9, 2, 3]"),
        (np.zeros((500, 2), np.float32), "audio_unreadable", "at most 64 channels"),
        (np.zeros(0, np.float32), "audio_empty", "no samples"),
        ([], "audio_empty", "no samples"),
        (np.array([0, np.nan], np.float32), "audio_unreadable", "not finite"),
        (np.array([1e300]), "audio_unreadable", "not finite"),
        (["a"], "audio_unreadable", "must be floats"),
        ([[0.1], [0.1, 0.2]], "audio_unreadable", "not an array of samples"),
    ],
)
def test_bad_audio_has_a_code_and_words(preparer: AudioPreparer, source: Any, code: str, words: str):
    found, message = code_of(preparer, source)
    assert (found, words in message) == (code, True), message


def test_paths_need_a_root():
    with AudioPreparer(SETTINGS, LIMITS, None, 1) as preparer:
        code, message = code_of(preparer, "a.wav")
    assert (code, "job.media_root" in message) == ("audio_outside_root", True)


def test_ended_audio_process_is_started_again(preparer: AudioPreparer):
    preparer.prepare(WAVE)
    first = process_of(preparer)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: start_time_of(first) is None)
    assert preparer.prepare(WAVE)[0].num_rows == 50
    assert process_of(preparer) != first


def test_process_that_ends_between_windows_is_an_error():
    """The next process does not have the audio."""
    helper = IsolatedAudioPreparer(SETTINGS, LIMITS)
    found = helper.prepare(LONG, b"")
    next(found)
    helper.close()
    with pytest.raises(MediaError, match="was started again") as caught:
        list(found)
    assert caught.value.code == "audio_unreadable"
    helper.close()


def test_recordings_are_prepared_ahead_and_in_order(folder: Path):
    order: list[int] = []
    with AudioPreparer(SETTINGS, LIMITS, folder, 1) as preparer:
        futures: list[Future[list[PreparedAudio]]] = []
        for number in range(4):
            futures.append(preparer.submit(b"" if number == 2 else WAVE))
            futures[-1].add_done_callback(lambda _, number=number: order.append(number))
        assert [isinstance(future.exception(), MediaError) for future in futures] == [False, False, True, False]
        pid = process_of(preparer)
        assert pid in children_of(os.getpid())
    assert order == [0, 1, 2, 3]
    assert start_time_of(pid) is None


def test_close_ends_audio_behind_its_window(monkeypatch: pytest.MonkeyPatch):
    (window,) = IsolatedAudioPreparer(SETTINGS, LIMITS).prepare(WAVE, b"")
    preparer = AudioPreparer(SETTINGS, LIMITS, None, 1)

    def prepare_closing(*_: object) -> Iterator[PreparedAudio]:
        yield window
        preparer._is_closed = True
        yield window
        raise AssertionError("a third window was asked for")

    monkeypatch.setattr(IsolatedAudioPreparer, "prepare", prepare_closing)
    with pytest.raises(MediaError, match="the run has ended"):
        preparer.prepare(WAVE)
    preparer.close()


def test_memory_of_an_audio_process_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audio_process, "_MEMORY_PER_SECOND", 0)
    monkeypatch.setattr(audio_process, "MEMORY_BYTES", 95 << 20)
    helper = IsolatedAudioPreparer(SETTINGS, AudioLimits(max_audio_bytes=25 << 20))
    with pytest.raises(MediaError, match="it takes more than 170 MiB of memory") as caught:
        list(helper.prepare(wave(bytes(24 << 20)), b""))
    assert caught.value.code == "audio_unreadable"
    assert len(list(helper.prepare(WAVE, b""))) == 1
    helper.close()


# Long ones.


def silence(num_seconds: int, num_channels: int = 1) -> bytes:
    """A FLAC file, written second by second."""
    out, second = io.BytesIO(), np.zeros((RATE, num_channels), np.int16)
    with soundfile.SoundFile(out, "w", RATE, num_channels, format="FLAC") as file:
        for _ in range(num_seconds):
            file.write(second)
    return out.getvalue()


@pytest.mark.stress
def test_hostile_audio_ends_alike_in_the_process():
    helper = IsolatedAudioPreparer(SETTINGS, AudioLimits(max_audio_s=2))
    for name, (make, expected) in CASES.items():
        try:
            found: object = round(list(helper.prepare(make(), b""))[-1].end_s * RATE)
        except MediaError as error:
            found = error.code
        assert (name, found) == (name, expected)
    helper.close()


@pytest.mark.stress
def test_hours_of_audio_end_by_their_limits():
    """An hour is prepared; small files of many hours end as errors, at the default limits."""
    helper = IsolatedAudioPreparer(AudioSettings(80), AudioLimits())
    assert len(list(helper.prepare(silence(3600), b""))) == 125
    for seconds, num_channels in ((5 * 3600, 1), (3700, 8)):
        data = silence(seconds, num_channels)
        assert len(data) < 25 << 20
        with pytest.raises(MediaError) as caught:
            list(helper.prepare(data, b""))
        assert caught.value.code == "audio_too_long", str(caught.value)
    assert len(list(helper.prepare(WAVE, b""))) == 1
    helper.close()


@pytest.mark.stress
def test_audio_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch):
    """Five hours where days are allowed: more computing than this process may do."""
    monkeypatch.setattr(audio_process, "CPU_S", 2)
    monkeypatch.setattr(audio_process, "_SPEED", 1 << 21)
    helper = IsolatedAudioPreparer(SETTINGS, AudioLimits(max_audio_s=1 << 20))
    with pytest.raises(MediaError, match="decoding was ended: it took more than 2 s of computing"):
        list(helper.prepare(silence(5 * 3600), b""))
    assert len(list(helper.prepare(WAVE, b""))) == 1
    helper.close()


@pytest.mark.stress
def test_changed_bytes_end_as_windows_or_codes():
    """Random changes of files of all formats: features, or a MediaError, from the same process."""
    helper = IsolatedAudioPreparer(SETTINGS, LIMITS)
    files = [WAVE, FLAC, OGG, MP3, wave(rate=8_000), encoded(tone(), "OGG", "OPUS"), encoded(tone(), "WAV", "MS_ADPCM")]
    list(helper.prepare(WAVE, b""))
    first = helper.pid
    for data in files:
        for seed in range(200):
            changed, generator = bytearray(data), random.Random(seed)
            for _ in range(generator.randrange(1, 20)):
                changed[generator.randrange(12, len(data))] = generator.randrange(256)
            with contextlib.suppress(MediaError):
                assert all(np.isfinite(each.features.features).all() for each in helper.prepare(bytes(changed), b""))
    assert helper.pid == first
    helper.close()
