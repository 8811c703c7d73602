"""Weights of a rank's own experts of one layer, one behind the other in memory, for kernels that compute all at once.
Numbers and scales of weights that are held as stored are two such tensors.

Each expert keeps its parameters, which are views of the stacked tensors: names, shapes, loading and updates in place do
not change. Parameters may be given other memory (waking up, code of `apply_model`): after `forget` the next step moves
them together again.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from spmd_worker.model_config.stored_format import StoredFormat
from spmd_worker.ops.kernels.api import ExpertStack

_PARAMETERS: Final = tuple(
    (module, name) for module in ("gate_up_proj", "down_proj") for name in ("weight", "bias", "weight_scales")
)


class StackedExperts:
    """Stacks the parameters of `experts`, which have a `gate_up_proj` and a `down_proj` and are the `own` ones,
    ascending, of `num_experts`. Results of `identity` experts, which have no parameters, are this rank's too. Not a
    module: its tensors are those of the experts.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module],
        own: Sequence[int],
        num_experts: int,
        activation: str,
        limit: float,
        bound: float,
        device: torch.device,
        stored: StoredFormat | None = None,
        *,
        is_gated: bool = True,
        identity: Sequence[int] = (),
    ) -> None:
        self._experts, self._activation, self._limit, self._bound = tuple(experts), activation, limit, bound
        self._stored, self._is_gated = stored, is_gated
        held = {*own, *identity}
        is_own = [int(index in held) for index in range(num_experts)]
        self._ids = torch.tensor(own, dtype=torch.int32).to(device)
        self.is_own: Tensor | None = None if all(is_own) else torch.tensor(is_own, dtype=torch.int32).to(device)
        """int32 [E]; None if this rank has all experts."""
        self._stack: ExpertStack | None = None

    def allocate(self, device: torch.device) -> None:
        """Give the parameters, built without memory, uninitialised memory side by side."""
        for module, name in _PARAMETERS:
            parameters = self._parameters(module, name)
            if parameters:
                shape = (len(parameters), *parameters[0].shape)
                stacked = torch.empty(shape, dtype=parameters[0].dtype, device=device)
                for expert, view in zip(self._experts, stacked, strict=True):
                    is_buffer = name == "weight_scales"
                    made = view if is_buffer else nn.Parameter(view, requires_grad=False)
                    setattr(expert.get_submodule(module), name, made)

    def get(self) -> ExpertStack:
        """The stack; where parameters do not lie side by side, they are moved first."""
        if self._stack is None:
            found = [self._stacked(*each) for each in _PARAMETERS]
            gate_up, gate_up_bias, gate_up_scales, down, down_bias, down_scales = found
            none = torch.empty((0, 0, 0), device=self._ids.device)
            has_bias = bool(self._experts) and self._experts[0].get_submodule("down_proj").rank_bias is not None
            self._stack = ExpertStack(
                ids=self._ids,
                gate_up=none if gate_up is None else gate_up,
                gate_up_bias=gate_up_bias,
                down=none if down is None else down,
                down_bias=down_bias if has_bias else None,
                activation=self._activation,
                limit=self._limit,
                bound=self._bound,
                stored=self._stored,
                gate_up_scales=gate_up_scales,
                down_scales=down_scales,
                is_gated=self._is_gated,
            )
        return self._stack

    def forget(self) -> None:
        """Hold no weights; the next `get` looks at their addresses."""
        self._stack = None

    def _parameters(self, module: str, name: str) -> list[Tensor]:
        found = [getattr(expert.get_submodule(module), name, None) for expert in self._experts]
        return [each for each in found if each is not None]

    def _stacked(self, module: str, name: str) -> Tensor | None:
        """[N, ...] of the parameters' memory; None if there are none."""
        parameters = self._parameters(module, name)
        if not parameters:
            return None
        stacked = _joined([each.data for each in parameters])
        if stacked is None:
            # Not of inference mode, in which a step runs: updates write to parameters outside it.
            with torch.inference_mode(False), torch.no_grad():
                stacked = torch.stack([each.data for each in parameters])
                for parameter, view in zip(parameters, stacked, strict=True):
                    parameter.data = view
        return stacked


def _joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """[N, ...] over the memory of N tensors that lie one behind the other in one storage; None if they do not."""
    first = tensors[0]
    start, size = first.data_ptr(), first.numel() * first.itemsize
    is_inside = first.storage_offset() * first.itemsize + len(tensors) * size <= first.untyped_storage().nbytes()
    is_joined = all(
        each.is_contiguous() and each.data_ptr() == start + index * size for index, each in enumerate(tensors)
    )
    if not is_inside or not is_joined:
        return None
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
