"""Modules named vllm with this package's names, for programs that import vLLM themselves.

No package of that name is needed, and an installed one is not used after this.
"""

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_OURS: Final = "_is_of_spmd_worker"


def put_modules(modules: Mapping[str, Mapping[str, Any]], importer: str) -> None:
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
