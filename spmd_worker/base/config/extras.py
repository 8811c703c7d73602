"""Optional packages: an error names the extra, or the package, that installs a missing one."""

from typing import NoReturn

from spmd_worker.base.errors import ConfigError


def raise_missing_package(package: str, extra: str | None, feature: str, error: ImportError) -> NoReturn:
    """Raise ConfigError for `feature`, which needs `package`: from the except clause of its import. `extra` None: it is
    in none.
    """
    wanted = package if extra is None else f"'spmd-worker[{extra}]'"
    raise ConfigError(f"{feature} needs {package}, which is not installed: pip install {wanted}") from error


def package_error(package: str, extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Error of a module that is of no use without a package, whose import raised `error`: that one is missing, or it is
    there and a package or a module that it needs is not.
    """
    fault = "is not installed" if error.name == package else f"cannot be imported ({error})"
    return ModuleNotFoundError(f"{package} {fault}: pip install 'spmd-worker[{extra}]'", name=error.name)
