"""Changes that a caller of `get_model` makes to modules, which calls that join modules must follow: replaced modules
and parameters, hooks, another `forward`, and parameters that were given other memory.
"""

from typing import Any

from torch import nn


class ModuleWatch:
    """A module and all in it, as they were when the watch was made."""

    def __init__(self, module: nn.Module) -> None:
        modules = [*module.modules()]
        # Dicts of modules are looked up directly: a step waits for it.
        self._entries: list[tuple[dict[str, Any], str, Any]] = [
            (entries, name, value)
            for each in modules
            for entries in (each._modules, each._parameters)
            for name, value in entries.items()
        ]
        self._hooks = [hooks for each in modules for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        self._attributes = [vars(each) for each in modules]
        self._parameters = [each for each in module.parameters() if not each.is_mkldnn]
        self._seen = self._state()

    def has_changed(self) -> bool:
        """Whether anything is not as it was. Values of parameters that were changed in place do not count."""
        return any(entries.get(name) is not value for entries, name, value in self._entries) or (
            self._state() != self._seen
        )

    def _state(self) -> tuple[list[int], list[int], list[bool]]:
        """Addresses of parameters, numbers of hooks, and which modules have another `forward`."""
        addresses = [each.data_ptr() for each in self._parameters]
        return addresses, [*map(len, self._hooks)], ["forward" in each for each in self._attributes]
