"""Audio as it comes: each file is decoded to what is expected, or fails with its code; none with another error."""

import io

import pytest
import soundfile
from hostile_audio import CASES, FLAC

from spmd_worker.media.audio_decode import decode_audio
from spmd_worker.media.audio_limits import AudioLimits
from spmd_worker.media.errors import MediaError

LIMITS = AudioLimits(max_audio_s=2)


@pytest.mark.guarantee("Hostile audio ends as error rows (SECURITY.md)")
@pytest.mark.parametrize("name", CASES)
def test_hostile_audio_has_expected_samples_or_code(name: str):
    make, expected = CASES[name]
    if isinstance(expected, str):
        with pytest.raises(MediaError) as caught:
            decode_audio(make(), LIMITS)
        assert caught.value.code == expected
        assert 0 < len(str(caught.value)) < 300
        assert "BytesIO" not in str(caught.value)
    else:
        samples = decode_audio(make(), LIMITS)
        assert samples.shape == (expected,)
        assert samples.dtype.name == "float32"


@pytest.mark.control("Hostile audio ends as error rows (SECURITY.md)")
def test_libsndfile_alone_reads_what_is_refused():
    """NaN passes, formats that are not offered are decoded, and errors have another class."""
    assert soundfile.read(io.BytesIO(CASES["AIFF"][0]()))[0].shape == (4000,)
    samples, _ = soundfile.read(io.BytesIO(CASES["WAV of NaN"][0]()))
    assert (samples != samples).any()
    with pytest.raises(soundfile.SoundFileError):
        soundfile.read(io.BytesIO(FLAC[:200]))
