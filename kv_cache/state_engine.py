"""Recurrent states of sequences, and their moves between slots of the device and of the host.

A slot holds everything that layers with states keep of one sequence, or of a snapshot. Layers whose states have one
shape share a tensor, and so do those whose tails have, and those whose saved inputs of drafts have.

Shapes: states float32 [layers of the shape, num_slots, *state shape],
        tails          [layers of the shape, num_slots, K - 1, C], K taps and C channels of a convolution,
        saved inputs   [layers of the shape, num_slots, most drafts, N], N numbers of a draft.
"""

from collections import Counter
from dataclasses import replace
from operator import itemgetter

import torch
from torch import Tensor

from kv_cache.cache_spec import CacheSpec, StateLayer
from kv_cache.host_memory import HostMemory, lazy_zeros, new_host_memory
from kv_cache.layer_states import LayerStates
from kv_cache.moves import check_moves, run_moves
from kv_cache.state_ops import StateOps

_Kind = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape in a slot, dtype, and whether it is of saved inputs."""


class StateEngine:
    """One rank's states: `allocate`, then any number of steps, then `release`; `allocate` may follow again.

    A fresh slot is zero. A slot that is taken again still holds its last owner's state, perhaps NaN: kernels begin a
    sequence from zeros at its first position, and nothing is erased here.
    """

    def __init__(
        self, spec: CacheSpec, num_slots: int, num_host_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert num_slots >= 1, num_slots
        self.spec, self.num_slots, self.num_host_slots = spec, num_slots, num_host_slots
        self._dtype, self._device = dtype, device
        self._tensors: tuple[Tensor, ...] | None = None
        self._hosts: tuple[HostMemory, ...] = ()
        self._layers: tuple[LayerStates | None, ...] = ()

    @property
    def layers(self) -> tuple[LayerStates | None, ...]:
        """The states of each layer of the stage, None for one without, between `allocate` and `release`."""
        assert self._tensors is not None, "the states are not allocated"
        return self._layers

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All memory of the device."""
        assert self._tensors is not None, "the states are not allocated"
        return self._tensors

    @property
    def lasting_tensors(self) -> tuple[Tensor, ...]:
        """`tensors` without the saved inputs of drafts, which mean nothing while a row does not lag."""
        num_lasting = len({kind for kinds in self._kinds() for kind in kinds if not kind[2]})
        return self.tensors[:num_lasting]

    def layer_states(self, layer: int) -> LayerStates | None:
        """The states of a layer of the stage; None if it has none."""
        return self.layers[layer]

    @property
    def num_device_bytes(self) -> int:
        """Bytes that `allocate` takes on the device."""
        return self.num_slots * self.spec.slot_bytes

    @property
    def num_host_bytes(self) -> int:
        """Host memory in use; on CUDA 0 before the first state moves there."""
        return sum(each.num_bytes for each in self._hosts)

    def allocate(self) -> None:
        """Make all slots, zero-filled; on the CPU they take memory when they are written."""
        assert self._tensors is None, "the states are allocated already"
        counts = Counter(sorted((kind for kinds in self._kinds() for kind in kinds), key=itemgetter(2)))
        # A tensor created in inference mode could not be written outside it, and the states outlive both.
        with torch.inference_mode(False):
            tensors = {kind: self._zeros((count, self.num_slots, *kind[0]), kind[1]) for kind, count in counts.items()}
            self._hosts = tuple([new_host_memory(each, self.num_host_slots) for each in tensors.values()])
        self._tensors = tuple(tensors.values())
        self._layers = self._by_layer(tensors)

    def release(self) -> None:
        """Drop all states. Views keep the memory alive, so drop them first."""
        self._tensors, self._hosts, self._layers = None, (), ()

    def execute(self, state_ops: StateOps) -> None:
        """Run one step's moves in the order swap out, copy, swap in (see `StateOps`); on CUDA in the order of the
        current stream. Raises ValueError naming the slot, before anything moves, as `CacheEngine.execute` does.

        Swaps move inputs of drafts too, copies do not: snapshots and forks begin where no row lags.
        """
        check_moves("state slot", state_ops, self.num_slots, self.num_host_slots)
        count = len(self.lasting_tensors)
        run_moves(state_ops, self.tensors[:count], self._hosts[:count])
        run_moves(replace(state_ops, copy=()), self.tensors[count:], self._hosts[count:])

    def _kinds(self) -> list[tuple[_Kind, ...]]:
        """Kinds of each layer's parts, in the order of `LayerStates`, without those that it lacks."""
        return [() if layer is None else tuple(filter(None, self._parts(layer))) for layer in self.spec.states]

    def _parts(self, layer: StateLayer) -> tuple[_Kind | None, ...]:
        """Kinds of a layer's state, None for a convolution alone, tail, and saved inputs, None without drafts; and of
        the last two of a second convolution, None without one.
        """
        state = (layer.state, torch.float32, False) if layer.state else None
        second = (layer.second_tail, self._dtype, False) if layer.second_tail[0] else None
        saved = [(each, self._dtype, True) if each[0] else None for each in (layer.saved, layer.second_saved)]
        return state, (layer.tail, self._dtype, False), saved[0], second, saved[1]

    def _by_layer(self, tensors: dict[_Kind, Tensor]) -> tuple[LayerStates | None, ...]:
        left = {kind: iter(tensor) for kind, tensor in tensors.items()}

        def states(layer: StateLayer) -> LayerStates:
            state, tail, *others = [None if kind is None else next(left[kind]) for kind in self._parts(layer)]
            assert tail is not None, layer
            return LayerStates(state, tail, *others)

        return tuple([None if layer is None else states(layer) for layer in self.spec.states])

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._device.type == "cpu":
            return lazy_zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self._device)
