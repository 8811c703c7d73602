"""A package that is not installed, as imports see it."""

import sys

import pytest


class _Absent:
    """A finder for which the package is not there."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        del path, target
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def remove_package(patch: pytest.MonkeyPatch, package: str) -> None:
    """Let imports of the package fail, and of its modules, until `patch` is undone."""
    for each in [each for each in sys.modules if each == package or each.startswith(f"{package}.")]:
        patch.delitem(sys.modules, each)
    patch.setattr(sys, "meta_path", [_Absent(package), *sys.meta_path])
