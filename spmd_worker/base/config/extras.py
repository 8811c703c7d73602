"""Optional packages: an error names the extra that installs a missing one."""

from typing import NoReturn

from spmd_worker.base.errors import ConfigError


def raise_missing_package(package: str, extra: str, feature: str, error: ImportError) -> NoReturn:
    """Raise ConfigError for `feature`, which needs `package`: from the except clause of its import."""
    raise ConfigError(
        f"{feature} needs {package}, which is not installed: pip install 'spmd-worker[{extra}]'"
    ) from error
