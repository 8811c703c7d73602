"""Modules named vllm with this package's names in them, for programs that import what they need of vLLM by themselves.

No package of that name is needed, and one that is installed is not used once these are there.
"""

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_OURS: Final = "_is_of_spmd_worker"


def put_modules(modules: Mapping[str, Mapping[str, Any]], importer: str) -> None:
    """Put these in front of whatever imports them from now on, parents first; those that are there get more names.

    Raises ImportError where another module vllm was imported already: `importer` has to come before it.
    """
    loaded = sys.modules.get("vllm")
    if loaded is not None and not hasattr(loaded, _OURS):
        raise ImportError(f"vllm was imported already: import {importer} before it")
    for name, names in modules.items():
        module = sys.modules.get(name)
        if module is None:
            module = sys.modules[name] = ModuleType(name, "Names of spmd_worker that others look for in vLLM.")
            module.__spec__ = ModuleSpec(name, None, is_package=True)
            # It has no files: what is not here is an ImportError, which is taken for an older vLLM.
            module.__path__ = []
            setattr(module, _OURS, True)
        for each, value in names.items():
            setattr(module, each, value)
        parent, _, own_name = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own_name, module)
