"""The folder below which the images and audio of a run lie."""

import os
from pathlib import Path

from spmd_worker.base.errors import ConfigError


def resolved_media_root(root: str | None) -> str | None:
    """`job.media_root` with all links followed. Raises ConfigError unless it is a folder, before any row fails."""
    if root is None:
        return None
    # Not Path.is_dir, which raises OSError below a folder that may not be entered.
    if not os.path.isdir(root):
        raise ConfigError(f"job.media_root={root} is not a folder: give the one below which prompts name their files")
    return str(Path(root).resolve())
