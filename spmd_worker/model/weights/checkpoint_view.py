"""A model with the checkpoint's names, for code that reads and changes weights by name: `LLM.apply_model`.

A tree of torch modules without a forward pass. Its parameters have the checkpoint's names, the shapes of this rank's
slices and the weights' values, and are made when they are first accessed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from spmd_worker.model.weights.held_weights import HeldWeight


class _NeverCalled(nn.Module):
    """A module without a forward pass."""

    def register_forward_hook(self, *given: Any, **options: Any) -> Any:
        """Raise RuntimeError."""
        raise RuntimeError(
            "apply_model's module has the checkpoint's weights and no forward pass, so that no hook would be called: "
            "register hooks on the modules of collective_rpc(lambda worker: worker.get_model())"
        )

    register_forward_pre_hook = register_forward_hook


class CheckpointView(_NeverCalled):
    """The root: `named_parameters`, `state_dict`, `model.layers[0].mlp.up_proj.weight` and the rest work as in torch.

    `parameter.checkpoint_slice` is the part of the checkpoint's tensor that a parameter is (`HeldSlice`).

    Changes take effect at `write_back`, and at once if the weight is not packed. All accessed parameters are kept until
    then: an unpacked copy takes as much memory as the packed weight.

    `names` maps the names of the view to those of `held`; two names of one weight have one parameter.
    """

    def __init__(
        self,
        held: Mapping[str, HeldWeight],
        names: Mapping[str, str],
        load_weights: Callable[[Iterable[tuple[str, Tensor]]], set[str]],
        check_change: Callable[[str, Tensor], None],
        **attributes: Any,
    ) -> None:
        super().__init__()
        self._held, self._load_weights, self._check_change = held, load_weights, check_change
        self._accessed = _Accessed(held)
        _grow(self, self._accessed, names)
        for name, value in attributes.items():
            setattr(self, name, value)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load full tensors (`WeightStore.load`). Parameters that were accessed before have the new values."""
        loaded = self._load_weights(weights)
        for name in loaded & self._accessed.keys():
            self._accessed[name].copy_(self._held[name].read())
        return loaded

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the accessed parameters to the weights of the model, changed or not.

        Finding out which have changed would mean unpacking each again, which takes as long as packing it; and a
        tensor's version does not count changes of `parameter.data`. Raises what `check_change` raises, before any is
        written.
        """
        for name, parameter in self._accessed.items():
            self._check_change(name, parameter.detach())
        for name, parameter in self._accessed.items():
            self._held[name].write(parameter.detach())


class _Accessed(dict[str, nn.Parameter]):
    """Parameters by checkpoint name, made at the first access."""

    def __init__(self, held: Mapping[str, HeldWeight]) -> None:
        super().__init__()
        self._held = held

    def __missing__(self, name: str) -> nn.Parameter:
        parameter = self[name] = nn.Parameter(self._held[name].read(), requires_grad=False)
        parameter.checkpoint_slice = self._held[name].held_slice  # type: ignore[attr-defined]  # for the caller
        return parameter


class _Parameters(MutableMapping[str, nn.Parameter | None]):
    """`_parameters` of a module of the view, in which torch looks up a parameter at each access."""

    def __init__(self, accessed: _Accessed, names: Mapping[str, str]) -> None:
        self._accessed, self._names = accessed, names

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._accessed[self._names[name]]

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or name not in self._names:
            raise ValueError(f"{name}: weights of the checkpoint can be changed, but not added or removed")
        self._accessed[self._names[name]] = parameter

    def __delitem__(self, name: str) -> None:
        self[name] = None

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Layers(_NeverCalled):
    """Modules by their index in the checkpoint: a pipeline stage has some of them."""

    def __getitem__(self, index: int) -> nn.Module:
        return list(self.children())[index] if index < 0 else self.get_submodule(str(index))

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __len__(self) -> int:
        return len(self._modules)


def _grow(module: nn.Module, accessed: _Accessed, names: Mapping[str, str]) -> None:
    own = {name: checkpoint_name for name, checkpoint_name in names.items() if "." not in name}
    module.__dict__["_parameters"] = _Parameters(accessed, own)
    below: dict[str, dict[str, str]] = {}
    for name, checkpoint_name in names.items():
        first, _, rest = name.partition(".")
        if rest:
            below.setdefault(first, {})[rest] = checkpoint_name
    for first, rests in below.items():
        is_list = all(rest.partition(".")[0].isdigit() for rest in rests)
        child = _Layers() if is_list else _NeverCalled()
        module.add_module(first, child)
        _grow(child, accessed, rests)
