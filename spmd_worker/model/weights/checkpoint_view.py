"""A model as its checkpoint has it, for code that looks at weights by name and changes them: `LLM.apply_model`.

A tree of torch modules without a forward pass. Its parameters have the checkpoint's names, this rank's slices as their
shapes, and the weights' values, and are made when they are first asked for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from spmd_worker.model.weights.held_weights import HeldWeight

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], set[str]]
CheckChange = Callable[[str, Tensor], None]


class CheckpointView(nn.Module):
    """The root: `named_parameters`, `state_dict`, `model.layers[0].mlp.up_proj.weight` and the rest work as in torch.

    `parameter.checkpoint_slice` says which part of the checkpoint's tensor a parameter is (`HeldSlice`).

    What is changed through it counts once `write_back` was called, and at once where the weight is not packed. Every
    parameter that was asked for is kept until then: unpacked, a packed one takes as much memory again.

    `names` maps the names of the view to those of `held`; two names of one weight give one parameter.
    """

    def __init__(
        self,
        held: Mapping[str, HeldWeight],
        names: Mapping[str, str],
        load_weights: LoadWeights,
        check_change: CheckChange,
        **attributes: Any,
    ) -> None:
        super().__init__()
        self._shown = _Shown(held, check_change)
        self._load_weights = load_weights
        _grow(self, self._shown, names)
        for name, value in attributes.items():
            setattr(self, name, value)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load whole tensors (`WeightStore.load`). Parameters that were asked for before show the new values."""
        loaded = self._load_weights(weights)
        self._shown.read_again(loaded)
        return loaded

    def write_back(self) -> None:
        """Make the parameters that were asked for the weights of the model, changed or not.

        To find out which were changed, each would be unpacked once more, which takes as long as to pack it. And a
        tensor does not know: what is done to `parameter.data` leaves its version as it was. Raises what `check_change`
        raises of any of them, before anything is written.
        """
        self._shown.write_back()


class _Shown:
    """The parameters that were asked for."""

    def __init__(self, held: Mapping[str, HeldWeight], check_change: CheckChange) -> None:
        self._held, self._check_change = held, check_change
        self._parameters: dict[str, nn.Parameter] = {}

    def get(self, name: str) -> nn.Parameter:
        if name not in self._parameters:
            parameter = nn.Parameter(self._held[name].read(), requires_grad=False)
            parameter.checkpoint_slice = self._held[name].held_slice  # type: ignore[attr-defined]  # for the caller
            self._parameters[name] = parameter
        return self._parameters[name]

    def put(self, name: str, parameter: nn.Parameter) -> None:
        self._parameters[name] = parameter

    @torch.no_grad()
    def read_again(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._parameters:
                self._parameters[name].copy_(self._held[name].read())

    @torch.no_grad()
    def write_back(self) -> None:
        for name, parameter in self._parameters.items():
            self._check_change(name, parameter.detach())
        for name, parameter in self._parameters.items():
            self._held[name].write(parameter.detach())


class _Parameters(MutableMapping[str, nn.Parameter | None]):
    """What a module of the view has for `_parameters`: torch looks each up when it is asked for it, and not before."""

    def __init__(self, shown: _Shown, names: Mapping[str, str]) -> None:
        self._shown, self._names = shown, names

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._shown.get(self._names[name])

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or name not in self._names:
            raise ValueError(f"{name}: weights of the checkpoint can be changed, not added or removed")
        self._shown.put(self._names[name], parameter)

    def __delitem__(self, name: str) -> None:
        self[name] = None

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Layers(nn.Module):
    """Modules by number, as the checkpoint numbers them: a stage of a pipeline has some of them."""

    def __getitem__(self, index: int) -> nn.Module:
        return list(self.children())[index] if index < 0 else self.get_submodule(str(index))

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __len__(self) -> int:
        return len(self._modules)


def _grow(module: nn.Module, shown: _Shown, names: Mapping[str, str]) -> None:
    """Give a module its parameters and the modules below it."""
    own = {name: checkpoint_name for name, checkpoint_name in names.items() if "." not in name}
    module.__dict__["_parameters"] = _Parameters(shown, own)
    below: dict[str, dict[str, str]] = {}
    for name, checkpoint_name in names.items():
        first, _, rest = name.partition(".")
        if rest:
            below.setdefault(first, {})[rest] = checkpoint_name
    for first, rests in below.items():
        is_list = all(rest.partition(".")[0].isdigit() for rest in rests)
        child = _Layers() if is_list else nn.Module()
        module.add_module(first, child)
        _grow(child, shown, rests)
