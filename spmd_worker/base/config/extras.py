"""Optional packages: an error names the extra that installs a missing one."""

from typing import NoReturn

from spmd_worker.base.errors import ConfigError


def refuse_without(package: str, extra: str, what: str, error: ImportError) -> NoReturn:
    """Raise ConfigError for `what`, which needs `package`: from the except clause of its import."""
    raise ConfigError(f"{what} needs {package}, which is not installed: pip install 'spmd-worker[{extra}]'") from error
