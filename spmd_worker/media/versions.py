"""Versions of what decodes images: the pixels of a file may differ between them."""


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
