"""Entries of a job's manifest that its answers to images and audio depend on, besides the images and the audio."""

from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from spmd_worker.compat.audio_reading import run_audio_settings
from spmd_worker.media.decode import check_pillow
from spmd_worker.media.media_root import resolved_media_root
from spmd_worker.media.versions import audio_decoder_versions, decoder_versions
from spmd_worker.resolved import ResolvedRun

_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_KEYS: Final = ("image_background", "image_min_pixels", "image_max_pixels", "image_processor", "video_processor")


def media_answers(resolved: ResolvedRun) -> dict[str, Any]:
    """Entries of a manifest: versions of decoders, files and numbers by which images and audio are prepared, and the
    folder of paths. Empty for a model without either. Raises OSError; ConfigError for images without Pillow.
    """
    return image_answers(resolved) | _audio_answers(resolved)


def image_answers(resolved: ResolvedRun) -> dict[str, Any]:
    """The entries of images alone."""
    config, processor, videos = resolved.config, resolved.image_processor, resolved.video_processor
    if processor is None:
        return {}
    files, root = _digest(resolved.model_folder, *_FILES, "video_preprocessor_config.json"), config.job.media_root
    if root is not None:
        check_pillow()
    return {
        **{f"model.{key}": getattr(config.model, key) for key in _KEYS},
        "job.media_root": resolved_media_root(root),
        "files of the image processor": files,
        "image processor": _plain(processor),
        **({} if videos is None else {"video processor": _plain(videos)}),
        **{f"version of {name}": version for name, version in decoder_versions().items()},
    }


def _audio_answers(resolved: ResolvedRun) -> dict[str, Any]:
    settings = run_audio_settings(resolved)
    if settings is None:
        return {}
    return {
        "job.media_root": resolved_media_root(resolved.config.job.media_root),
        "files of the audio processor": _digest(resolved.model_folder, *_FILES),
        "audio processor": _plain(settings),
        **{f"version of {name}": version for name, version in audio_decoder_versions().items()},
    }


def _digest(folder: Path, *names: str) -> str:
    """Digest of the files that are there."""
    paths = [folder / name for name in names]
    parts = [path.name.encode() + (path.read_bytes() if path.is_file() else b"") for path in paths]
    return blake2b(b"".join(parts), digest_size=16).hexdigest()


def _plain(record: Any) -> str:
    return ", ".join([f"{key}={value}" for key, value in asdict(record).items()])
