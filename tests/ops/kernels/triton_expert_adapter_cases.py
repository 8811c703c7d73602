"""Low-rank adapters of experts and routers on a GPU, interpreted on CPU tensors: see triton_cases.py.

OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_expert_adapter_cases.py
                                                              prints {case: what went wrong, or ""}
python tests/ops/kernels/triton_expert_adapter_cases.py gate  a few of them
python tests/ops/kernels/triton_expert_adapter_cases.py cuda  all on a GPU, in bfloat16 too
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import torch
from torch import Tensor
from triton_cases import in_gate, report, set_device
from triton_experts_cases import CLAMPED, CONFIG, HIDDEN, TILES, floats, new_layer, tokens

from spmd_worker.model.layers.expert_adapters import ExpertAdapters
from spmd_worker.model.layers.experts import SparseFeedForward
from spmd_worker.model_config.layer_config import ExpertsConfig
from spmd_worker.ops.kernels.adapters import (
    AdapterKernels,
    AdapterSizes,
    AdapterStack,
    Matrices,
    ReferenceAdapterKernels,
    StepAdapters,
)
from spmd_worker.ops.kernels.triton import adapters, expert_kernels, experts, matmul, placing, router_kernels
from spmd_worker.ops.kernels.triton.adapters import AdapterTile, TritonAdapterKernels
from spmd_worker.ops.kernels.triton.launching import is_interpreted
from spmd_worker.ops.kernels.triton.tiles import Tile

NUM_ADAPTERS, RANK, MAX_RANK = 3, 5, 16
"""The third slot is empty."""
OWNERS = (0, 1, 1, 0, 0, 1, 0)
PLAIN = replace(CONFIG, is_gated=False)
BOUNDED = replace(CONFIG, bound=0.5)
SHARED = replace(CONFIG, shared_size=24, has_shared_gate=True, score="sigmoid", scaling=1.7)
WEIGHS = replace(SHARED, has_shared_gate=False, score="sigmoid_chosen", weighs_inputs=True)
WEIGHS = replace(WEIGHS, renormalises=False, scaling=1.0)
FORMS = {"plain": CONFIG, "clamped": CLAMPED, "no gates": PLAIN, "bounded": BOUNDED, "shared": SHARED, "weighs": WEIGHS}


def fill(stack: AdapterStack, sizes: AdapterSizes, adapter: int, number: int, slot: int, columns: slice) -> None:
    """Matrices of expert `number`, or of the router, of one adapter; `columns` are the rank's inputs."""
    generator = torch.Generator().manual_seed(100 * adapter + number)

    def normal(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator, device="cpu") * width**-0.5

    found: list[Matrices] = []
    for start, stop in sizes.parts:
        a = normal(RANK, HIDDEN if sizes.num_inputs == HIDDEN else 24)[:, columns]
        found.append((a.to(sizes.dtype).contiguous(), normal(stop - start, RANK).to(sizes.dtype)))
    stack.write(slot, stack.pack(found))


def adapt(layer: SparseFeedForward, config: ExpertsConfig, dtype: torch.dtype) -> AdapterKernels:
    """Give a layer two adapters of all of its experts, of which the second has none for expert 3, and of its router."""
    kernels = ReferenceAdapterKernels() if layer._expert_kernels is None else TritonAdapterKernels()
    device, of_experts = torch.device(torch.get_default_device()), layer.accept_adapters(kernels, NUM_ADAPTERS)
    for name in ("gate_up_proj", "down_proj"):
        matrix = layer.experts[str(layer.own[0])].get_submodule(name)
        (num_outputs, num_inputs), halves = matrix.weight.shape, 1
        columns = slice(None)
        if name == "down_proj":
            columns = slice(*matrix.input_range)
        elif config.is_gated and not config.limit:
            halves = 2
        bounds = [half * num_outputs // halves for half in range(halves + 1)]
        parts = tuple(pairwise(bounds))
        sizes = AdapterSizes(NUM_ADAPTERS * len(layer.own), MAX_RANK, num_inputs, parts, dtype, device)
        of_experts.stacks[name] = kernels.new_stack(sizes)
        for adapter in range(NUM_ADAPTERS - 1):
            for place, expert in enumerate(layer.own):
                if (adapter, expert) != (1, 3):
                    fill(of_experts.stacks[name], sizes, adapter, expert, adapter * len(layer.own) + place, columns)
    outputs = len(layer.gate.weight)
    parts = ((0, config.num_choices), *[(config.num_choices, outputs)] * config.has_shared_gate)
    sizes = AdapterSizes(NUM_ADAPTERS, MAX_RANK, HIDDEN, parts, torch.float32, device)
    layer.gate.adapters = kernels.new_stack(sizes)
    for adapter in range(NUM_ADAPTERS - 1):
        fill(layer.gate.adapters, sizes, adapter, 50, adapter, slice(None))
    return kernels


def slots_of(count: int) -> Tensor:
    return torch.tensor([(7 * row) % 5 % 4 - 1 for row in range(count)], dtype=torch.int32)


def adapted(config: ExpertsConfig, dtype: torch.dtype, **options: object) -> Callable[..., Tensor]:
    """A layer with adapters, called with tokens and their slots."""
    layer = new_layer(config, dtype, **options)
    kernels = adapt(layer, config, dtype)

    def call(x: Tensor, of_rows: Tensor, **more: object) -> Tensor:
        return layer(x, kernels.step(of_rows, NUM_ADAPTERS), **more)

    return call


def adapters_add_what_the_reference_adds() -> None:
    for name in ("plain", "clamped", "shared") if in_gate() else FORMS:
        config = FORMS[name]
        for dtype in floats() if name in ("plain", "clamped") else floats()[:1]:
            x, slots = tokens(23, dtype), slots_of(23)
            found, expected = (adapted(config, dtype, is_reference=each)(x, slots) for each in (False, True))
            room = 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
            worst = (found - expected).abs().max().item() / expected.abs().max().item()
            assert worst <= room, (name, dtype, worst)
            plain = new_layer(config, dtype)(x)
            has_some = (slots >= 0) & (slots < NUM_ADAPTERS - 1)
            assert ((found - plain).abs().amax(1) > 1e-2).equal(has_some), (name, dtype)
            assert torch.equal(found[slots < 0], plain[slots < 0]), (name, dtype)


def rows_without_adapters_keep_their_bits() -> None:
    """Beside rows with NaN and an empty slot; what is beside them is above."""
    for config in (SHARED,) if in_gate() else FORMS.values():
        for dtype in floats()[:1] if in_gate() else floats():
            x, slots = tokens(23, dtype), slots_of(23)
            none = slots < 0
            # What adapters make of rows with NaN stays there.
            x[1] = torch.nan if slots[1] >= 0 else x[1]
            plain, call = new_layer(config, dtype)(x), adapted(config, dtype)
            assert torch.equal(call(x, slots)[none], plain[none]), (config, dtype)
            assert torch.equal(call(x, torch.full_like(slots, 2))[none], plain[none]), (config, dtype)


def a_row_alone_has_its_bits_in_a_batch() -> None:
    for config in (CONFIG, CLAMPED, SHARED):
        x, slots, call = tokens(23, torch.float32), slots_of(23), adapted(config, torch.float32)
        batched = call(x, slots)
        for row in (0, 1, 22):
            assert torch.equal(call(x[row : row + 1], slots[row : row + 1]), batched[row : row + 1]), row
        assert torch.equal(call(x.flip(0), slots.flip(0)), batched.flip(0))
        twice = call(torch.cat([x, x]), torch.cat([slots, slots.roll(1)]))
        assert torch.equal(twice[:23], batched)
        # A graph's padding has no experts.
        padded = torch.cat([x, torch.full_like(x[:4], torch.nan)]), torch.cat([slots, torch.full_like(slots[:4], -1)])
        cache_slots = torch.tensor([*range(23), *[-1] * 4], dtype=torch.int32)
        assert torch.equal(call(*padded, slots=cache_slots)[:23], batched)


def tiles_change_no_bit() -> None:
    x, slots, call = tokens(45, torch.float32), slots_of(45), adapted(SHARED, torch.float32)
    first = call(x, slots)
    usual = adapters.tile_for(45, torch.float32, (9, 0))
    for tile in (replace(usual, rows=32, rank=16), replace(usual, rows=64, num_expand_warps=8)):
        with mock.patch.object(adapters, "tile_for", return_value=tile):
            assert torch.equal(call(x, slots), first), tile
    with mock.patch.object(experts, "can_describe", return_value=False):
        assert torch.equal(call(x, slots), first)
    # Routers are float32, and placed with the tiles of another dtype.
    place = TritonAdapterKernels.step
    tile = replace(usual, rows=64)

    def placed_in_others(kernels: TritonAdapterKernels, *given: object) -> StepAdapters:
        with mock.patch.object(adapters, "tile_for", return_value=tile):
            return place(kernels, *given)

    with mock.patch.object(TritonAdapterKernels, "step", placed_in_others):
        assert torch.equal(call(x, slots), first)


def ranks_sum_to_one_rank() -> None:
    x, slots = tokens(23, torch.float32), slots_of(23)
    for config in (CONFIG, CLAMPED):
        whole = adapted(config, torch.float32)(x, slots)
        parts = [adapted(config, torch.float32, owners=OWNERS, rank=rank)(x, slots) for rank in (0, 1)]
        assert torch.allclose(parts[0] + parts[1], whole, atol=1e-5), config


def control_other_places_and_experts_are_found() -> None:
    place, step = placing.place, ExpertAdapters.step
    x, slots, call = tokens(23, torch.float32), slots_of(23), adapted(CONFIG, torch.float32)
    expected = call(x, slots)

    def moved(*arguments: object) -> placing.Placed:
        placed = place(*arguments)
        return replace(placed, order=placed.order.roll(1).clamp(0, placed.num_slots - 1))

    def shifted(self: ExpertAdapters, given: StepAdapters, ids: Tensor) -> object:
        return step(self, given, (ids + 1) % 7)

    for change in (
        lambda: mock.patch.object(placing, "place", moved),
        lambda: mock.patch.object(ExpertAdapters, "step", shifted),
    ):
        with change():
            assert not torch.allclose(call(x, slots), expected, atol=1e-3)


GATE: tuple[Callable[[], None], ...] = (
    adapters_add_what_the_reference_adds,
    rows_without_adapters_keep_their_bits,
    control_other_places_and_experts_are_found,
)
OTHERS: tuple[Callable[[], None], ...] = (
    a_row_alone_has_its_bits_in_a_batch,
    tiles_change_no_bit,
    ranks_sum_to_one_rank,
)


def main() -> None:
    set_device()
    if is_interpreted():
        # numpy adds a step along K in its own order.
        matmul.tile_for = lambda *sizes, is_gated: Tile(32, 16, 16, 4, 2, False, False, False)
        experts.FLOAT32 = experts.FEW_ROWS = experts.SOME_ROWS = TILES
        expert_kernels.BLOCK, router_kernels.PIECE = 32, 16
        experts.ROUTER = experts.ROUTER_MANY_ROWS = Tile(16, 16, 16, 4, 2)
        adapters.FLOAT16 = adapters.FLOAT32 = AdapterTile(16, 64, 64, 4, 2, 64, 16, 4)
    with torch.inference_mode():
        report(GATE if in_gate() else (*GATE, *OTHERS))


if __name__ == "__main__":
    main()
