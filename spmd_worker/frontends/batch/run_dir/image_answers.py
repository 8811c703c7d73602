"""Entries of a job's manifest that its answers to images depend on, besides the images themselves."""

from dataclasses import asdict
from hashlib import blake2b
from typing import Any, Final

from spmd_worker.media.decode import check_pillow
from spmd_worker.media.media_root import resolved_media_root
from spmd_worker.media.versions import decoder_versions
from spmd_worker.resolved import ResolvedRun

_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_KEYS: Final = ("image_background", "image_min_pixels", "image_max_pixels", "image_processor", "video_processor")


def image_answers(resolved: ResolvedRun) -> dict[str, Any]:
    """Entries of a manifest: versions of Pillow and its decoders, files and numbers by which images are prepared, and
    the folder of paths. Empty for a model without images. Raises OSError, ConfigError for a folder of images without
    Pillow.
    """
    config, processor = resolved.config, resolved.image_processor
    if processor is None:
        return {}
    digest = blake2b(digest_size=16)
    for name in _FILES:
        path = resolved.model_folder / name
        digest.update(name.encode() + (path.read_bytes() if path.is_file() else b""))
    root = config.job.media_root
    if root is not None:
        check_pillow()
    return {
        **{f"model.{key}": getattr(config.model, key) for key in _KEYS},
        "job.media_root": resolved_media_root(root),
        "files of the image processor": digest.hexdigest(),
        "image processor": _plain(asdict(processor)),
        **({} if resolved.video_processor is None else {"video processor": _plain(asdict(resolved.video_processor))}),
        **{f"version of {name}": version for name, version in decoder_versions().items()},
    }


def _plain(values: dict[str, Any]) -> str:
    return ", ".join([f"{key}={value}" for key, value in values.items()])
