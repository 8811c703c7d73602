"""Optional packages: an error says whether one is missing, or installed and broken, and how to install or repair it."""

from typing import Final, NamedTuple, NoReturn

from spmd_worker.base.errors import ConfigError

_MAX_CAUSES: Final = 10
_MAX_REASON: Final = 300


class PackageFault(NamedTuple):
    """The reason for which a package is of no use, as a predicate, and the way out."""

    reason: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.way_out}"


def package_fault(package: str, extra: str | None, error: Exception, module: str | None = None) -> PackageFault:
    """Fault of `package`, whose import raised `error`: it is missing; or it is there, and its import fails, as with a
    library or a package that it needs, or with a wrong version of it. `extra` None: it is in none. `module` is its name
    in Python, if that is not the package's.
    """
    wanted = package if extra is None else f"'spmd-worker[{extra}]'"
    # fsspec raises a sentence of its own from the error.
    causes = [error]
    while isinstance(causes[-1].__cause__, Exception) and len(causes) < _MAX_CAUSES:
        causes.append(causes[-1].__cause__)
    name = module or package.replace("-", "_")
    if any(isinstance(each, ModuleNotFoundError) and each.name == name for each in causes):
        return PackageFault("is not installed", f"pip install {wanted}")
    reason = " ".join(str(causes[-1]).split())[:_MAX_REASON]
    return PackageFault(
        f"is installed but cannot be imported ({type(causes[-1]).__name__}: {reason})",
        f"pip install {wanted} installs what it lacks, pip install --force-reinstall --no-deps {package} repairs it",
    )


def raise_missing_package(package: str, extra: str | None, feature: str, error: ImportError) -> NoReturn:
    """Raise ConfigError for `feature`, which needs `package`: from the except clause of its import. Arguments are those
    of `package_fault`.
    """
    raise ConfigError(f"{feature} needs {package}, which {package_fault(package, extra, error)}") from error


def package_error(package: str, extra: str, error: ImportError) -> ImportError:
    """Error of a module that is of no use without a package, whose import raised `error`: of its kind, so that callers
    that do without a missing module do so without this one.
    """
    kind = ModuleNotFoundError if isinstance(error, ModuleNotFoundError) else ImportError
    return kind(f"{package} {package_fault(package, extra, error)}", name=error.name)
