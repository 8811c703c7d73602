"""Entries of a job's manifest that its answers to audio depend on, besides the audio itself."""

from dataclasses import asdict
from hashlib import blake2b
from typing import Any, Final

from spmd_worker.compat.audio_reading import run_audio_settings
from spmd_worker.media.media_root import resolved_media_root
from spmd_worker.media.versions import audio_decoder_versions
from spmd_worker.resolved import ResolvedRun

_FILES: Final = ("preprocessor_config.json", "processor_config.json")


def audio_answers(resolved: ResolvedRun) -> dict[str, Any]:
    """Entries of a manifest: versions of decoders, numbers by which audio is prepared, and the folder of paths. Empty
    for a model without audio. Raises OSError, ModelConfigError.
    """
    settings, root = run_audio_settings(resolved), resolved.config.job.media_root
    if settings is None:
        return {}
    digest = blake2b(digest_size=16)
    for name in _FILES:
        path = resolved.model_folder / name
        digest.update(name.encode() + (path.read_bytes() if path.is_file() else b""))
    return {
        "job.media_root": resolved_media_root(root),
        "files of the audio processor": digest.hexdigest(),
        "audio processor": ", ".join([f"{key}={value}" for key, value in asdict(settings).items()]),
        **{f"version of {name}": version for name, version in audio_decoder_versions().items()},
    }
