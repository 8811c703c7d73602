"""Versions of what decodes images and audio: the pixels or samples of a file may differ between them."""

import numpy as np


def decoder_versions() -> dict[str, str]:
    """Versions of Pillow and of its decoders of JPEG, WebP and TIFF; empty where Pillow is not installed."""
    try:
        import PIL
        from PIL import features
    except ImportError:
        return {}
    found = {
        "libjpeg-turbo": features.version_feature("libjpeg_turbo"),
        "libwebp": features.version("webp"),
        "libtiff": features.version("libtiff"),
    }
    found |= _of_videos()
    return {"Pillow": PIL.__version__, **{name: version for name, version in found.items() if version}}


def _of_videos() -> dict[str, str | None]:
    """Versions of PyAV and of its decoders, where it is installed."""
    try:
        import av
    except ImportError:
        return {}
    libraries = {name: ".".join(map(str, av.library_versions.get(name, ()))) for name in ("libavcodec", "libswscale")}
    return {"PyAV": av.__version__, **libraries}


def audio_decoder_versions() -> dict[str, str]:
    """Versions of numpy, whose Fourier transform makes the features, and of what decodes and resamples audio, as far as
    it is installed.
    """
    found = {"numpy": np.__version__}
    try:
        import soundfile

        found["soundfile"], found["libsndfile"] = soundfile.__version__, soundfile.__libsndfile_version__
    except (ImportError, OSError):
        pass
    try:
        import soxr

        found["soxr"], found["libsoxr"] = soxr.__version__, soxr.__libsoxr_version__
    except ImportError:
        pass
    return found
