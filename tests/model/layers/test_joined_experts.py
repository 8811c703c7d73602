"""Experts of a layer in one call have the bits of experts one by one, on one rank and on each of several."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from joined_models import DTYPES, PLAIN
from native_builds import ONEDNN, WITHOUT_AMX, library_for
from native_libraries import each_library, needs_products
from thread_groups import on_ranks
from torch import Tensor, nn

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.experts import Expert, SparseFeedForward, _weighted_sum
from spmd_worker.model_config.layer_config import ExpertsConfig, LayerConfig
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.cpu.int8 import Int8CpuKernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.expert_layout import ExpertLayout

HIDDEN = PLAIN.hidden_size
EXPERTS = ExpertsConfig(num_experts=9, num_chosen=3, intermediate_size=96)
KINDS: dict[str, LayerConfig] = {
    name: replace(PLAIN.layers[0], experts=replace(EXPERTS, **changes), activation=activation)
    for name, activation, changes in (
        ("silu", "silu", {}),
        ("biased", "silu", {"has_bias": True, "shared_size": 64}),
        ("gelu", "gelu_tanh", {"num_chosen": 1}),
        ("without gates", "relu2", {"is_gated": False}),
        ("clamped", "silu", {"limit": 0.9, "has_bias": True, "has_router_bias": True}),
        ("weighted inputs", "silu", {"score": "sigmoid_chosen", "weighs_inputs": True, "renormalises": False}),
        ("latent", "silu", {"latent_size": 32}),
    )
}
ROWS = (1, 2, 5, 40, 1700)
OWNERS = (0, 1, 1, 0, 1, 0, 0, 1, 1)

each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
each_kind = pytest.mark.parametrize("kind", KINDS)


def new_layer(
    kind: str,
    dtype: torch.dtype,
    instruction_set: str,
    group: GroupHandle | None = None,
    layout: ExpertLayout | None = None,
    num_leaves: int = 1,
    *,
    is_int8: bool = False,
) -> SparseFeedForward:
    library = library_for(instruction_set)
    quantised = Int8CpuKernels(library, dtype) if is_int8 else None
    context = LayerContext(
        *(group or single_group(), quantised or CpuKernels(library), SdpaBackend(), dtype, torch.device("cpu")),
        num_leaves=num_leaves,
        expert_layout=layout,
        quantised=quantised,
    )
    layer = SparseFeedForward(context, KINDS[kind], HIDDEN)
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    for module in layer.modules():
        if hasattr(module, "pack_weights"):
            module.pack_weights()
    return layer


def outputs(layer: SparseFeedForward, dtype: torch.dtype) -> list[Tensor]:
    """Results for several numbers of rows, with the tokens of each expert; rows of two are far apart in memory."""
    found = []
    for num_rows in ROWS:
        rows = torch.randn((num_rows, 2 * HIDDEN), generator=torch.Generator().manual_seed(num_rows)).to(dtype)
        layer.forget_num_tokens()
        found += [layer(rows[:, :HIDDEN]), torch.tensor(layer.num_tokens)]
    return found


def joined_and_one_by_one(
    layer: SparseFeedForward, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Tensor]]:
    with monkeypatch.context() as patch:
        patch.setattr(Expert, "forward", refuse)
        together = outputs(layer, dtype)
    with monkeypatch.context() as patch:
        patch.setattr(CpuKernels, "join_experts", lambda *_: None)
        layer.forget_addresses()
        apart = outputs(layer, dtype)
    layer.forget_addresses()
    return together, apart


def refuse(*_: object, **__: object) -> Tensor:
    raise NotImplementedError("one by one")


def are_equal(pair: tuple[list[Tensor], list[Tensor]]) -> bool:
    return all(map(torch.equal, *pair)) and not any(bool(each.isnan().any()) for each in pair[0])


@pytest.mark.gate(
    "*-native-*",
    "*-native without AMX-*",
    "*-x86-64-v3-*",
    "bfloat16-native with emulated AMX-*",
    "float32-native with emulated AMX-clamped",
)
@each_kind
@each_library
@each_dtype
def test_joined_experts_have_equal_bits(
    dtype: torch.dtype, instruction_set: str, kind: str, monkeypatch: pytest.MonkeyPatch
):
    if not library_for(instruction_set).gemm_dtypes:
        pytest.skip("no products of its own")
    layer = new_layer(kind, dtype, instruction_set, num_leaves=2 if kind == "biased" else 1)
    together, apart = joined_and_one_by_one(layer, dtype, monkeypatch)
    assert are_equal((together, apart))
    expert = layer.experts["4"]
    assert isinstance(expert, Expert)
    expert.down_proj.weight.view(-1)[5] += 1
    assert not all(map(torch.equal, outputs(layer, dtype), together))


@pytest.mark.gate(
    "native-*",
    "native without AMX-*",
    "x86-64-v3-*",
    "native with emulated AMX-clamped",
    "native with emulated AMX-gelu",
)
@each_kind
@each_library
def test_joined_int8_experts_have_equal_bits(instruction_set: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    dtype = torch.float32 if kind == "gelu" else torch.bfloat16
    layer = new_layer(kind, dtype, instruction_set, num_leaves=2, is_int8=True)
    together, apart = joined_and_one_by_one(layer, dtype, monkeypatch)
    assert are_equal((together, apart))
    expert = layer.experts["4"]
    assert isinstance(expert, Expert)
    assert expert.down_proj.weight.dtype == torch.int8
    expert.down_proj.weight.view(-1)[5] += 1
    assert not all(map(torch.equal, outputs(layer, dtype), together))


LAYOUTS = {
    "columns": None,
    "experts": ExpertLayout((OWNERS,)),
    "experts, exact": ExpertLayout((OWNERS,), is_exact=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["silu", "clamped"])
@needs_products
@each_dtype
def test_joined_experts_of_ranks_have_equal_bits(
    dtype: torch.dtype, kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
):
    def run(group: GroupHandle) -> list[Tensor]:
        layer = new_layer(kind, dtype, WITHOUT_AMX, group, LAYOUTS[layout], num_leaves=2 if layout == "columns" else 1)
        return outputs(layer, dtype)

    def on_two() -> list[list[Tensor]]:
        return on_ranks(2, run, adds_by_tree=layout != "experts")

    with monkeypatch.context() as patch:
        patch.setattr(Expert, "forward", refuse)
        together = on_two()
    monkeypatch.setattr(CpuKernels, "join_experts", lambda *_: None)
    assert all(map(are_equal, zip(together, on_two(), strict=True)))


@needs_products
def test_joined_experts_follow_parameters_that_move():
    """Code of `apply_model` may give a parameter other memory."""
    layer = new_layer("silu", torch.float32, WITHOUT_AMX)
    before = outputs(layer, torch.float32)
    for expert in layer.experts.values():
        assert isinstance(expert, Expert)
        expert.down_proj.weight.data = expert.down_proj.weight * 2
    layer.forget_addresses()
    after = outputs(layer, torch.float32)
    assert torch.equal(after[0], before[0] * 2)


@needs_products
def test_joined_experts_keep_the_memory_they_read():
    """A caller of `get_model` gave a parameter other memory two steps later: the freed memory was read."""
    layer = new_layer("silu", torch.float32, WITHOUT_AMX)
    expert = layer.experts["4"]
    assert isinstance(expert, Expert)
    weight = expert.down_proj.weight
    values = weight.detach().numpy().copy()
    read = weakref.ref(values)
    weight.data = torch.from_numpy(values)
    layer(torch.ones(1, HIDDEN))
    weight.data = weight.detach() * 2
    del values
    gc.collect()
    assert read() is not None
    layer.forget_addresses()
    gc.collect()
    assert read() is None


class _Doubled(nn.Module):
    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.expert = expert

    def forward(self, x: Tensor, *, is_fused: bool) -> Tensor:
        doubled: Tensor = self.expert(x, is_fused=is_fused) * 2
        return doubled


@needs_products
def test_experts_replaced_or_hooked_are_called():
    """Joined experts left out one that a caller of `get_model` had replaced: its outputs were zero."""
    layer = new_layer("silu", torch.float32, WITHOUT_AMX)
    rows = torch.randn((40, HIDDEN), generator=torch.Generator().manual_seed(0))
    layer.experts["4"] = _Doubled(layer.experts["4"])
    assert torch.equal(layer(rows), layer(rows, is_fused=False))
    hooked = new_layer("silu", torch.float32, WITHOUT_AMX)
    calls: list[int] = []
    for expert in hooked.experts.values():
        expert.register_forward_hook(lambda *_: calls.append(1))
    hooked(torch.ones(1, HIDDEN))
    assert len(calls) == EXPERTS.num_chosen
    assert hooked(torch.ones(0, HIDDEN)).shape == (0, HIDDEN)


@each_library
def test_weighted_sums_round_subnormals(instruction_set: str):
    """Processors that round to bfloat16 themselves flush subnormal numbers to zero, as torch does not."""
    if not library_for(instruction_set).gemm_dtypes:
        pytest.skip("no products of its own")
    layer = new_layer("silu", torch.bfloat16, instruction_set)
    joined = layer._joined_experts()
    assert joined is not None
    results = torch.full((6, HIDDEN), 3e-39, dtype=torch.bfloat16)
    total = joined.weighted_sum(results, torch.full((2, 3), 0.5))
    assert total.count_nonzero() == total.numel()
    assert torch.equal(total, _weighted_sum(results.view(2, 3, -1), torch.full((2, 3), 0.5)).bfloat16())


def test_experts_without_panels_are_not_joined(monkeypatch: pytest.MonkeyPatch):
    layer = new_layer("silu", torch.float32, ONEDNN)
    monkeypatch.setattr(Expert, "forward", refuse)
    with pytest.raises(NotImplementedError, match="one by one"):
        outputs(layer, torch.float32)
