"""Versions of what decodes images and audio: the numbers of a file may differ between them."""

import contextlib


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
    return {"Pillow": PIL.__version__, **{name: version for name, version in found.items() if version}}


def audio_versions() -> dict[str, str]:
    """Versions of what decodes and resamples audio; without those that are not installed."""
    import numpy

    found = {"numpy": numpy.__version__}
    with contextlib.suppress(ImportError):
        import soundfile

        found |= {"soundfile": soundfile.__version__, "libsndfile": soundfile.__libsndfile_version__}
    with contextlib.suppress(ImportError):
        import soxr

        found |= {"soxr": soxr.__version__, "libsoxr": soxr.__libsoxr_version__}
    return found
