"""LoRA adapters that one rank's model has loaded: their slots and, in the layers, their matrices.

An adapter is loaded in two phases, so that all ranks have it or none: `prepare` checks and slices it and changes
nothing, `commit` puts it into a slot. Slots are numbers of this rank alone; rows name adapters by digest.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.model.adapters.expert_modules import by_expert
from spmd_worker.model.adapters.source import AdapterSource, raise_problems
from spmd_worker.model.adapters.targets import AdapterTargets, TargetPart, num_inputs, scaled
from spmd_worker.model.adapters.text_part import text_part
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.linear import RowParallelLinear
from spmd_worker.model.weights.tensor_checks import is_finite
from spmd_worker.ops.kernels.adapters import AdapterSizes, AdapterStack, Matrices, StepAdapters

logger = logging.getLogger(__name__)

_NO_SCORES: Final[Mapping[str, Tensor]] = {}
NO_ADAPTER: Final = 0
"""Digest of a row without an adapter."""
_PLACEHOLDER = 1
"""Digest of an adapter that adds nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedAdapter:
    """A checked adapter that no row can use yet: this rank's matrices by layer, packed for its stack, and parameters
    that replace the pooler's, on the device.
    """

    digest: int
    packed: Mapping[str, Any]
    scores: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Place:
    """Slots of one layer in a stack, of `stride` layers, experts of one sparse layer, this one at `offset`."""

    stack: AdapterStack
    stride: int = 1
    offset: int = 0

    def slot(self, adapter: int) -> int:
        """The stack's slot for the adapter in slot `adapter`."""
        return adapter * self.stride + self.offset


class LoadedAdapters:
    """The adapters of one model. At most `limits.max_cpu_loras` of different contents are loaded at once: the caller
    removes those that are replaced before it commits another. The layers get their stacks here.
    """

    def __init__(self, model: DecoderForCausalLM, limits: AdapterLimits, base: str = "") -> None:
        """`base`: the model's path or hub name, with which an adapter's is compared; "": it is not. Raises ConfigError
        if there is no memory for as many adapters.
        """
        self._base = base
        self._other_bases = set[str]()
        """Bases of adapters that were warned of: a trainer pushes many adapters of one."""
        self._limits, self._kernels, self._dtype = limits, model.model.adapter_kernels, model.model.dtype
        self._weights = model.weights
        self.targets, device = AdapterTargets(model, of_experts=limits.of_experts), next(model.parameters()).device
        self._slots: dict[int, int] = {}
        """Slot of each adapter, by its digest."""
        self._scores: dict[int, Mapping[str, Tensor]] = {}
        self._device = device
        self.adapted_layers: frozenset[str] = frozenset()
        """Names of stacks that a loaded adapter has matrices in: steps skip the others."""
        self._places: dict[str, _Place] = {}
        """Places of layers' matrices, by name."""
        of_experts = {
            name: layer.accept_adapters(self._kernels, limits.max_cpu_loras)
            for name, layer in self.targets.sparse_layers.items()
            if not self.targets.why_no_experts
        }
        for name, parts in self.targets.parts.items():
            layer, found = self.targets.layers[name], self.targets.experts_of(name)
            try:
                if found is None:
                    layer.adapters = self._kernels.new_stack(self._sizes(name, parts))
                    self._places[name] = _Place(layer.adapters)
                    continue
                sparse, expert, matrix = found
                own = self.targets.sparse_layers[sparse].own
                stacks = of_experts[sparse].stacks
                if matrix not in stacks:
                    stacks[matrix] = self._kernels.new_stack(self._sizes(name, parts, len(own)))
                self._places[name] = _Place(stacks[matrix], len(own), own.index(int(expert)))
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise ConfigError(
                    f"model.max_cpu_loras={limits.max_cpu_loras} adapters of rank model.max_lora_rank="
                    f"{limits.max_lora_rank} have no room in memory: lower one of them ({error})"
                ) from error

    @property
    def merged(self) -> frozenset[int]:
        """Digests of adapters that the weights have in them."""
        return self._weights.merged_adapters

    @property
    def digests(self) -> tuple[int, ...]:
        """Digests of the loaded adapters, the earliest first."""
        return tuple(self._slots)

    @property
    def stacks(self) -> list[AdapterStack]:
        """Those of all layers, in one order."""
        return [*{id(place.stack): place.stack for place in self._places.values()}.values()]

    def _sizes(self, name: str, parts: Sequence[TargetPart], num_experts: int = 1) -> AdapterSizes:
        """Sizes of a layer's stack, or of that of as many experts with this one's sizes."""
        layer, bounds = self.targets.layers[name], tuple((part.start, part.stop) for part in parts)
        num_slots, max_rank = self._limits.max_cpu_loras * num_experts, self._limits.max_lora_rank
        leaf_ends = layer.adapter_leaf_ends if isinstance(layer, RowParallelLinear) else ()
        return AdapterSizes(
            num_slots, max_rank, num_inputs(layer), bounds, self._dtype_of(name), self._device, leaf_ends
        )

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if self.targets.layers[name].is_float32 else self._dtype

    def prepare(self, source: AdapterSource) -> StagedAdapter:
        """Check an adapter against the model and slice it; nothing is changed. Raises AdapterError, the same on every
        rank, which lists all that does not fit.
        """
        names = self._weights.names
        digest, source = source.digest, by_expert(text_part(source, names), names, self._weights.shapes)
        found: dict[str, str] = {}
        taken: dict[str, str] = {}
        of_experts: list[str] = []
        problems: list[str] = []
        for module, pair in source.modules.items():
            name, problem = self.targets.find(module)
            problem = problem or self._problem(source, module, name)
            if not problem and name in taken:
                problem = "a second adapter of its module"
            if problem and problem == self.targets.why_no_experts:
                of_experts.append(module)
            elif problem:
                problems.append(f"{module}: {problem}")
            elif not (is_finite(pair.a, self._dtype) and is_finite(scaled(pair), self._dtype)):
                problems.append(f"{module}: has numbers that are too large for {self._dtype}: set another model.dtype")
            found[module] = name
            taken[name] = module
        if of_experts:
            problems.insert(0, f"{of_experts[0]}, of {len(of_experts)} of experts: {self.targets.why_no_experts}")
        if source.config.is_transposed and not self.targets.are_transposed:
            problems.insert(0, f"{source.config.subject}: fan_in_fan_out=true: the model's matrices are not transposed")
        own, theirs = _model_names(self._base), _model_names(source.config.base_model)
        if own and theirs and own.isdisjoint(theirs) and source.config.base_model not in self._other_bases:
            self._other_bases.add(source.config.base_model)
            words = "%s: was trained for %s, and this run's model is %s: make sure that they are the same model"
            logger.warning(words, source.subject, source.config.base_model, self._base, extra=SAME_ON_EVERY_RANK)
        saved, faults = self._saved(source)
        raise_problems(source.subject, problems + faults)
        modules = {name: source.modules[module] for module, name in found.items()}
        matrices = {
            layer: [
                part.matrices(modules[part.module], self._dtype_of(layer)) if part.module in modules else None
                for part in parts
            ]
            for layer, parts in self.targets.parts.items()
        }
        scores = {name: each.to(self._device) for name, each in self.targets.scores(saved).items()}
        return StagedAdapter(digest, self._packed(matrices), scores)

    def commit(self, staged: StagedAdapter) -> None:
        """Load a prepared adapter, whose content is not loaded, for rows of the next step on. Nothing is allocated that
        might not be there: a rank that fails here differs from all others.
        """
        digest, used = staged.digest, self._slots.values()
        assert digest not in self._slots, f"{digest:016x} is loaded"
        slot = next((each for each in range(self._limits.max_cpu_loras) if each not in used), None)
        assert slot is not None, f"{len(used)} adapters are loaded, the most that model.max_cpu_loras allows"
        for name, packed in staged.packed.items():
            place = self._places[name]
            place.stack.write(place.slot(slot), packed)
        self._slots[digest] = slot
        self._scores[digest] = staged.scores
        self._note_layers()

    def discard(self, staged: StagedAdapter) -> None:
        """Forget a prepared adapter that another rank refused."""
        del staged

    def remove(self, digest: int) -> None:
        """Unload an adapter, of which no row may be in flight."""
        slot = self._slots.pop(digest)
        del self._scores[digest]
        for place in self._places.values():
            place.stack.clear(place.slot(slot))
        self._note_layers()

    @contextmanager
    def placeholder(self) -> Iterator[int]:
        """Context with the digest of an adapter for steps of warm-up and profiling, whose results nobody reads: one of
        all layers that adds nothing, or, if no slot is free, one that is loaded.
        """
        if len(self._slots) == self._limits.max_cpu_loras:
            yield next(iter(self._slots))
            return

        # All experts of a layer have the same zeros.
        of_stack: dict[int, Any] = {}
        packed = {}
        for name, place in self._places.items():
            if id(place.stack) not in of_stack:
                of_stack[id(place.stack)] = place.stack.pack(self._zeros(name))
            packed[name] = of_stack[id(place.stack)]
        self.commit(StagedAdapter(_PLACEHOLDER, packed, _NO_SCORES))
        try:
            yield _PLACEHOLDER
        finally:
            self.remove(_PLACEHOLDER)

    def _zeros(self, name: str) -> list[Matrices]:
        """Matrices of a layer that add nothing."""
        layer, dtype = self.targets.layers[name], self._dtype_of(name)
        a = torch.zeros((1, num_inputs(layer)), dtype=dtype)
        return [(a, torch.zeros((part.stop - part.start, 1), dtype=dtype)) for part in self.targets.parts[name]]

    def _note_layers(self) -> None:
        # Steps compare them: experts of a layer have one name.
        names = {id(place.stack): name for name, place in self._places.items() if not place.stack.is_empty}
        self.adapted_layers = frozenset(names.values())

    def _packed(self, matrices: Mapping[str, Sequence[Matrices | None]]) -> dict[str, Any]:
        """Matrices by layer, as its stack takes them; layers without any are left out."""
        return {name: self._places[name].stack.pack(parts) for name, parts in matrices.items() if any(parts)}

    def slot_of(self, digest: int) -> int:
        """Slot of a row's adapter; -1 for `NO_ADAPTER`."""
        return -1 if digest == NO_ADAPTER else self._slots[digest]

    def scores_of(self, digest: int) -> Mapping[str, Tensor]:
        """Parameters of the pooler that the adapter replaces, float32, by their names there."""
        return self._scores.get(digest, _NO_SCORES)

    def step(self, slots: Tensor) -> StepAdapters:
        """Adapters of a step's tokens by slot, int32 [T] on the device."""
        return self._kernels.step(slots, self._limits.max_cpu_loras)

    def _saved(self, source: AdapterSource) -> tuple[dict[str, Tensor], list[str]]:
        """Full weights by the checkpoint's names, and what is wrong with them."""
        found, problems = {}, []
        for given_name, tensor in source.saved.items():
            name, problem = self.targets.find_score(given_name, tensor.shape)
            found[name] = tensor
            if problem:
                problems.append(f"{given_name} (modules_to_save): {problem}")
        return found, problems

    def _problem(self, source: AdapterSource, module: str, name: str) -> str:
        """Reason why the matrices do not fit the module `name` of the checkpoint, or nothing."""
        pair, (outputs, inputs) = source.modules[module], self.targets.sizes(name)
        if (pair.a.shape[1], len(pair.b)) != (inputs, outputs):
            shapes = f"lora_A {list(pair.a.shape)} and lora_B {list(pair.b.shape)}"
            return f"{shapes}, but the model's module has {inputs} inputs and {outputs} outputs"
        if pair.rank > self._limits.max_lora_rank:
            return f"has the rank {pair.rank}, above model.max_lora_rank={self._limits.max_lora_rank}: raise it"
        return ""


def _model_names(path: str) -> set[str]:
    """Names that a path or hub name may give its model: its last part, and that of a hub's folder
    `models--org--name/snapshots/HASH`.
    """
    parts = path.rstrip("/").split("/")
    cached = [part.rpartition("--")[2] for part in parts if part.startswith("models--")]
    return {name for name in (parts[-1], *cached) if name}
