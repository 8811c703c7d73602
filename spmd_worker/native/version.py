"""Identity of the compiled kernels: their sources and flags. No compiler may change a bit (`build._FLAGS`)."""

import platform
from pathlib import Path

from spmd_worker.base.numerical_policy import source_version


def native_version() -> str:
    """Digest of the sources, and the C library, of which the scans use a function."""
    return f"{source_version(str(Path(__file__).parent))}, {' '.join(platform.libc_ver())}".strip(", ")
