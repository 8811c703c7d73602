"""Modules named vllm with this package's names, for programs that import vLLM themselves, and a runner for them.

No package of that name is needed, and an installed one is not used after this.
"""

import os
import runpy
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

_OURS: Final = "_is_of_spmd_worker"
_Installed = TypeVar("_Installed")


def install_modules(modules: Mapping[str, Mapping[str, Any]], importer: str) -> None:
    """Install these modules for all later imports, parents first; existing ones get more names.

    Raises ImportError if another module vllm was imported already: `importer` has to come before it.
    """
    loaded = sys.modules.get("vllm")
    if loaded is not None and not hasattr(loaded, _OURS):
        raise ImportError(f"vllm was imported already: import {importer} before it")
    for name, names in modules.items():
        module = sys.modules.get(name)
        if module is None:
            module = sys.modules[name] = ModuleType(name, "Names of spmd_worker that others look for in vLLM.")
            module.__spec__ = ModuleSpec(name, None, is_package=True)
            # It has no files: other names are an ImportError, which programs interpret as an older vLLM.
            module.__path__ = []
            setattr(module, _OURS, True)
        for each, value in names.items():
            setattr(module, each, value)
        parent, _, own_name = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own_name, module)


def check_release(package: str, found: str, release: str) -> None:
    """Raise ImportError unless `found` is a version of `release`."""
    if not f"{found}.".startswith(f"{release}."):
        raise ImportError(
            f"{package} {found} is installed and this package knows the calls of {release}: "
            f"pip install '{package}=={release}.*'"
        )


def installed(install: Callable[[], _Installed], module: str) -> _Installed:
    """The value that `install` returns. Where `module` is the program itself, an ImportError is a SystemExit of
    one line.
    """
    try:
        return install()
    except ImportError as error:
        if module != "__main__":
            raise
        raise SystemExit(f"error: {error}") from None


def run_program(arguments: list[str], usage: str, message: str, package: str | None = None) -> None:
    """Run SCRIPT.py, or a module of `package`; rank 0 first reports `message`. Raises SystemExit without arguments, and
    for a script that is no file.
    """
    usage = f"usage: python -m {usage} [ARGUMENT ...]"
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{usage}\n")
        return
    if not arguments:
        raise SystemExit(usage)
    is_script = package is None or arguments[0].endswith(".py")
    if is_script and not Path(arguments[0]).is_file():
        raise SystemExit(f"{arguments[0]} is not a file: give the script to run\n{usage}")
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{message}\n")
    sys.argv = arguments
    if is_script:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        runpy.run_module(f"{package}.{arguments[0]}", run_name="__main__", alter_sys=True)
