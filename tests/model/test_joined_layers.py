"""Layers joined into one call have the bits of separate layers, on one rank and on ranks with shared memory.

Layers are joined where there is a AMX unit; where the processor has none it is emulated.
"""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import ranks
import torch
from joined_models import DTYPES, ONE_RANK_SHAPES, PLAIN, SHAPES, are_equal, joined_and_one_by_one, new_model
from model_configs import with_layers
from native_builds import ONEDNN, WITH_AMX, WITHOUT_AMX
from native_libraries import each_library, needs_avx512, needs_products
from our_model import prompt_logits
from reference_models import random_prompt

from spmd_worker.model.layers.norm import RMSNorm
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.adapters import ReferenceAdapterKernels, StepAdapters
from spmd_worker.ops.kernels.cpu import layers
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.topology import Stage

LIMIT_S = 240.0
ALL_SHAPES = {**SHAPES, **ONE_RANK_SHAPES}
PROMPTS = [random_prompt(length, seed=5, vocab_size=96) for length in (1, 2, 16, 37, 90)]

UNFUSED = {
    **{name: SHAPES[name] for name in ("plain", "biased")},
    "no panels, normed queries": with_layers(PLAIN, intermediate_size=90, qk_norm="head"),
}

TIED = replace(PLAIN, has_tied_embeddings=True)
OTHER_HEADS = replace(PLAIN, layers=(PLAIN.layers[0], replace(PLAIN.layers[0], num_kv_heads=1), PLAIN.layers[0]))

each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@pytest.mark.gate(
    "float32-native with emulated AMX-windows-1",
    "bfloat16-native with emulated AMX-windows-*",
    "float32-native without AMX-windows-1",
    "bfloat16-native without AMX-windows-1",
    "bfloat16-native without AMX-norms of outputs-1",
    "bfloat16-*-7",
    "float32-native without AMX-*-7",
    "bfloat16-*-None",
)
@needs_products
@pytest.mark.parametrize("chunk", [None, 1, 7])
@pytest.mark.parametrize("model_config", ALL_SHAPES.values(), ids=ALL_SHAPES)
@pytest.mark.parametrize("instruction_set", [pytest.param(WITH_AMX, marks=needs_avx512), WITHOUT_AMX])
@each_dtype
def test_joined_layers_have_equal_bits(
    dtype: torch.dtype, instruction_set: str, model_config: ModelConfig, chunk: int | None
):
    model = new_model(model_config, dtype, instruction_set=instruction_set)
    assert are_equal(*joined_and_one_by_one(model, PROMPTS, chunk))


@pytest.mark.gate("*-7", "bfloat16-*-biased-None")
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("name", ["biased", "wide heads", "four norms, two ropes", "scaled experts"])
@each_library
@each_dtype
def test_joined_int8_layers_have_equal_bits(dtype: torch.dtype, instruction_set: str, name: str, chunk: int | None):
    model = new_model(ALL_SHAPES[name], dtype, instruction_set=instruction_set, has_bytes=True)
    assert model.model.layers[0].self_attn.qkv_proj.weight.dtype == torch.int8
    assert are_equal(*joined_and_one_by_one(model, PROMPTS, chunk))


class RefusingLayers:
    def run(self, *_: object) -> torch.Tensor:
        raise NotImplementedError("joined")


@needs_products
@pytest.mark.parametrize("size", [1, 2])
def test_step_with_adapters_on_ranks_is_not_joined(size: int):
    """Adapters add to complete sums, which the call has on one rank alone."""
    group = GroupHandle(tuple(range(size)), 0, None, adds_by_tree=True)
    stack = new_model(PLAIN, torch.bfloat16, group, stage=Stage(1, 3, is_first=False, is_last=False)).model
    backend = stack.layers[0].self_attn._backend
    stack.joined_layers = RefusingLayers()
    metadata = AttentionMetadata((0, 1), (1,), torch.tensor([[0]]), torch.tensor([0]), torch.tensor([0]))
    tokens, adapters = (
        (torch.zeros(1, dtype=torch.int64),) * 3,
        StepAdapters(torch.tensor([0]), 1, ReferenceAdapterKernels()),
    )

    def run(adapters: StepAdapters | None) -> torch.Tensor:
        cache = torch.zeros((2, 1, *backend.block_shape(2 // size, 16, 16)), dtype=torch.bfloat16)
        stream = torch.ones((1, PLAIN.hidden_size), dtype=torch.bfloat16)
        return stack(*tokens, cache, metadata, stream, adapters=adapters)

    for each in (None, adapters) if size == 1 else (None,):
        with pytest.raises(NotImplementedError, match="joined"):
            run(each)
    if size > 1:
        assert run(adapters).isfinite().all()


def test_int8_layers_on_ranks_are_not_joined():
    """Each of their GEMMs exchanges sums with the other ranks."""
    model = new_model(PLAIN, torch.bfloat16, GroupHandle((0, 1), 0, None), has_bytes=True, instruction_set=WITHOUT_AMX)
    assert model.model.joined_layers is None


@pytest.mark.gate("float32-*")
@pytest.mark.parametrize("instruction_set", [pytest.param(WITH_AMX, marks=[needs_products, needs_avx512]), WITHOUT_AMX])
@pytest.mark.parametrize("model_config", UNFUSED.values(), ids=UNFUSED)
@each_dtype
def test_unfused_step_has_equal_bits(dtype: torch.dtype, model_config: ModelConfig, instruction_set: str):
    """Unfused in all steps and in every second step: the next step reads the cache that one has written."""
    model = new_model(model_config, dtype, instruction_set=instruction_set)
    fused = prompt_logits(model, PROMPTS, chunk=7)
    assert are_equal(prompt_logits(model, PROMPTS, 7, is_fused=(False,)), fused)
    assert are_equal(prompt_logits(model, PROMPTS, 7, is_fused=(True, False)), fused)


@needs_products
@pytest.mark.parametrize("fused", ["gated_linear", "attend_projected", "run"])
def test_unfused_step_calls_no_fused_kernel(monkeypatch: pytest.MonkeyPatch, fused: str):
    model = new_model(PLAIN, torch.float32)
    layer, joined = model.model.layers[0], model.model.joined_layers

    def refuse(*_: object) -> None:
        raise NotImplementedError(fused)

    owner = {"gated_linear": layer.mlp.gate_up_proj._kernels, "attend_projected": layer.self_attn._backend}
    monkeypatch.setattr(owner.get(fused, joined), fused, refuse)
    assert len(prompt_logits(model, PROMPTS, is_fused=(False,))) == len(PROMPTS)
    if fused != "run":
        model.model.joined_layers = None
    with pytest.raises(NotImplementedError, match=fused):
        prompt_logits(model, PROMPTS)


@needs_products
@pytest.mark.parametrize("tokens_a_call", [1, 300])
def test_consecutive_calls_continue_the_sequence(monkeypatch: pytest.MonkeyPatch, tokens_a_call: int):
    monkeypatch.setattr(layers, "_MAX_CALL_TOKENS", tokens_a_call)
    assert are_equal(*joined_and_one_by_one(new_model(PLAIN, torch.bfloat16), PROMPTS))


@needs_products
@pytest.mark.parametrize("has_groups", [False, True])
@each_dtype
def test_middle_stage_gives_equal_residual_stream(dtype: torch.dtype, has_groups: bool):
    """Layers have one block table, or the first has another."""
    model = new_model(PLAIN, dtype, stage=Stage(1, 3, is_first=False, is_last=False))
    stack, backend = model.model, model.model.layers[0].self_attn._backend
    incoming = torch.randn(20, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    metadata = AttentionMetadata(
        query_starts=(0, 20),
        context_lengths=(20,),
        block_tables=torch.tensor([[1, 0]]),
        token_blocks=torch.tensor([1] * 16 + [0] * 4),
        token_offsets=torch.arange(20) % 16,
    )
    if has_groups:
        other = replace(metadata, block_tables=torch.tensor([[2, 0]]), token_blocks=torch.tensor([2] * 16 + [0] * 4))
        metadata = replace(metadata, others=(other,), group_of=(1, 0, 0))
    positions = torch.arange(20)
    results, caches = [], []
    for joined in (stack.joined_layers, None):
        stack.joined_layers = joined
        cache = torch.full((len(stack.layers), 3, *backend.block_shape(2, 16, 16)), torch.nan, dtype=dtype)
        parts = tuple(cache) if has_groups else cache
        results.append(stack(positions, positions, positions, parts, metadata, incoming.clone()))
        caches.append(cache)
    assert results[0].isfinite().all()
    assert torch.equal(*results)
    assert torch.equal(*(cache.nan_to_num() for cache in caches))
    written = [layer.flatten(1).isfinite().any(1).tolist() for layer in caches[0]]
    assert written == [[True, not has_groups, has_groups]] + [[True, True, False]] * (len(written) - 1)


def _other_order(stack: Any) -> None:
    stack.layers = torch.nn.ModuleList(reversed(list(stack.layers)))


def _other_window(stack: Any) -> None:
    stack.layers[1].self_attn.window = 5


def _other_bias(stack: Any) -> None:
    stack.layers[2].mlp.down_proj.bias.add_(0.5)


def _other_norm(stack: Any) -> None:
    stack.layers[2].self_attn.k_norm.weight.mul_(torch.linspace(1.0, 2.0, 16))


def _other_rotation(stack: Any) -> None:
    stack.layers[1].self_attn._rope = 0


@needs_products
@pytest.mark.parametrize("change", [_other_order, _other_window, _other_bias, _other_norm, _other_rotation])
def test_comparison_detects_wrongly_joined_layers(change: Any):
    """Joined layers keep the sizes and addresses that they were joined with."""
    is_normed = change in (_other_norm, _other_rotation)
    model = new_model(SHAPES["normed heads, some not rotated" if is_normed else "biased"], torch.float32)
    model.model.join_layers()
    joined, last = model.model.joined_layers, model.model.layers[2]
    owner, name = (last.self_attn.k_norm, "weight") if is_normed else (last.mlp.down_proj, "bias")
    setattr(owner, name, torch.nn.Parameter(getattr(owner, name).clone(), requires_grad=False))
    change(model.model)
    model.model.joined_layers = joined
    assert not are_equal(*joined_and_one_by_one(model, PROMPTS))


@needs_products
def test_joined_layers_follow_parameters_that_move():
    """A caller of `get_model` may give a parameter other memory."""
    model = new_model(SHAPES["biased"], torch.float32)
    before = prompt_logits(model, PROMPTS)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight * 2
    model.forget_addresses()
    together, apart = joined_and_one_by_one(model, PROMPTS)
    assert are_equal(together, apart)
    assert not are_equal(together, before)


class _Doubled(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **options: Any) -> torch.Tensor:
        doubled: torch.Tensor = self.module(*inputs, **options) * 2
        return doubled


@needs_products
def test_steps_follow_changes_of_held_modules():
    """A caller of `get_model` kept the modules, and changed them after a step: the next one did not see it. A replaced
    feed-forward ended it.
    """
    model = new_model(SHAPES["biased"], torch.float32)
    model.hold()
    layer, calls = model.model.layers[1], list[int]()
    before = prompt_logits(model, PROMPTS)
    layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight * 2
    together, apart = joined_and_one_by_one(model, PROMPTS)
    assert are_equal(together, apart)
    assert not are_equal(together, before)
    hook = layer.self_attn.o_proj.register_forward_hook(lambda *_: calls.append(1))
    assert are_equal(prompt_logits(model, PROMPTS), together)
    assert calls
    hook.remove()
    assert are_equal(prompt_logits(model, PROMPTS), together)
    assert model.model.joined_layers is not None
    down = layer.mlp.down_proj
    layer.mlp.down_proj = _Doubled(down)
    doubled = prompt_logits(model, PROMPTS)
    assert not are_equal(doubled, together)
    layer.mlp.down_proj, feed_forward = down, layer.mlp
    layer.mlp = _Doubled(feed_forward)
    assert are_equal(prompt_logits(model, PROMPTS), doubled)
    layer.mlp, forward = feed_forward, feed_forward.forward
    feed_forward.forward = lambda *inputs, **options: forward(*inputs, **options) * 2
    assert are_equal(prompt_logits(model, PROMPTS), doubled)


@needs_products
def test_hooks_of_joined_experts_are_called():
    """Experts are called between joined layers; hooks of what is joined take the layers apart."""
    model, calls = new_model(ALL_SHAPES["experts behind a dense layer"], torch.float32), list[str]()
    model.hold()
    before = prompt_logits(model, PROMPTS)
    layer = model.model.layers[1]
    layer.mlp.gate.register_forward_hook(lambda *_: calls.append("router"))
    layer.mlp.register_forward_hook(lambda _module, _given, output: output * 2)
    changed = prompt_logits(model, PROMPTS)
    assert calls
    assert model.model.joined_layers is not None
    assert not are_equal(changed, before)
    layer.self_attn.register_forward_hook(lambda *_: calls.append("attention"))
    assert are_equal(prompt_logits(model, PROMPTS), changed)
    assert "attention" in calls
    assert model.model.joined_layers is None


@pytest.mark.parametrize("has_bytes", [False, True])
def test_packed_tied_head_follows_a_replaced_embedding(has_bytes: bool):
    """Regression: logits stayed those of the earlier weight."""
    model = new_model(TIED, torch.bfloat16, instruction_set=WITHOUT_AMX, has_bytes=has_bytes)
    embedding, hidden = (
        model.model.embed_tokens,
        torch.randn(3, TIED.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16(),
    )
    assert embedding.packed is not None
    model.hold()
    before, owned = model.compute_logits(hidden), embedding.shard.num_owned

    def flipped(rows: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat((rows.narrow(dim, 0, owned).flip(dim), rows.narrow(dim, owned, rows.shape[dim] - owned)), dim)

    for change in ("replaced", "moved"):
        if change == "replaced":
            embedding.weight = torch.nn.Parameter(flipped(embedding.weight.detach(), 0), requires_grad=False)
        else:
            embedding.weight.data = flipped(embedding.weight.detach(), 0)
        prompt_logits(model, PROMPTS[:1])
        logits = model.compute_logits(hidden)
        assert torch.equal(logits, flipped(before, 1) if change == "replaced" else before), change
        assert torch.equal(model.argmax_logits(hidden)[1], logits.max(1).indices), change
    embedding.weight = torch.nn.Parameter(embedding.weight.detach()[1:], requires_grad=False)
    with pytest.raises(ValueError, match=r"^embed_tokens.weight was replaced by .*, and must be"):
        prompt_logits(model, PROMPTS[:1])


def test_hooks_of_norms_are_called():
    """Regression: only those of norms that nothing is added before."""
    model, calls = new_model(PLAIN, torch.float32, instruction_set=WITHOUT_AMX), []
    model.hold()
    before = prompt_logits(model, PROMPTS[:1])
    norms = [each for each in model.modules() if isinstance(each, RMSNorm)]
    for norm in norms:
        norm.register_forward_hook(lambda called, _, output: calls.append(called) or output)
    assert are_equal(prompt_logits(model, PROMPTS[:1]), before)
    assert {*map(id, calls)} == {*map(id, norms)}
    assert len(norms) > len(model.model.layers)


@pytest.mark.parametrize("has_bytes", [False, True])
def test_hooks_of_the_head_change_greedy_tokens(has_bytes: bool):
    """Regression: the argmax of plain heads did not call them."""
    model = new_model(PLAIN, torch.float32, instruction_set=WITHOUT_AMX, has_bytes=has_bytes)
    hidden = torch.randn(3, PLAIN.hidden_size, generator=torch.Generator().manual_seed(3))
    before = model.argmax_logits(hidden)
    model.lm_head.register_forward_hook(lambda *_: None)
    assert all(map(torch.equal, model.argmax_logits(hidden), before))
    model.lm_head.register_forward_pre_hook(lambda _, given: (-given[0],))
    assert torch.equal(model.argmax_logits(hidden)[1], model.compute_logits(hidden).max(1).indices)
    assert not torch.equal(model.argmax_logits(hidden)[1], before[1])


@needs_products
def test_layers_with_hooks_are_not_joined():
    model, calls = new_model(SHAPES["biased"], torch.float32), []
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    model.forget_addresses()
    prompt_logits(model, PROMPTS[:1])
    assert calls
    assert model.model.joined_layers is None
    hook.remove()
    model.forget_addresses()
    prompt_logits(model, PROMPTS[:1])
    assert model.model.joined_layers is not None


@pytest.mark.parametrize(
    ("why", "model_config", "arguments"),
    [
        ("a norm of all heads together", with_layers(PLAIN, qk_norm="flat"), {}),
        ("products of oneDNN", PLAIN, {"instruction_set": ONEDNN}),
        ("a product that does not fit the panels", with_layers(PLAIN, intermediate_size=104), {}),
        ("another attention", PLAIN, {"backend": SdpaBackend()}),
        ("layers of two shapes", OTHER_HEADS, {}),
        ("a group without shared memory", PLAIN, {"group": GroupHandle((0, 1), 0, None)}),
    ],
)
def test_unsupported_layers_are_not_joined(why: str, model_config: ModelConfig, arguments: dict[str, Any]):
    assert new_model(model_config, torch.bfloat16, **arguments).model.joined_layers is None, why


@needs_products
def test_layers_of_two_shapes_compute_by_themselves():
    model = new_model(OTHER_HEADS, torch.float32)
    whole = prompt_logits(model, PROMPTS)
    assert all(map(torch.equal, prompt_logits(model, PROMPTS, 7), whole))


def test_misshapen_cache_is_rejected():
    model = new_model(PLAIN, torch.float32)
    model.model_config = with_layers(PLAIN, num_kv_heads=1)  # the cache is made for this many
    with pytest.raises(AssertionError):
        prompt_logits(model, PROMPTS)


SOURCE = """
    import itertools, json, sys
    sys.path.insert(0, sys.argv[1])
    import torch, torch.distributed as dist
    from dataclasses import replace
    from joined_models import DTYPES, ONE_RANK_SHAPES, SHAPES, are_equal, joined_and_one_by_one, new_model
    from our_model import prompt_logits
    from spmd_worker.ranks import shared_memory
    from spmd_worker.ops.kernels.cpu import layers
    from spmd_worker.ranks.shared_memory import share_memory
    from spmd_worker.ranks.communicator import GroupHandle
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    prompts = json.loads(sys.argv[3])
    plant = sys.argv[2]
    ways = ((1 << 16, 1), (1 << 16, 1 << 30), (1 << 12, 1 << 8), (1 << 16, 3000))
    chunks = (None, 7)
    # The first way with every shape, type and chunk; each other way with both types and both chunks, shapes in turn.
    # Four ranks have enough heads of one shape.
    shapes = {name: SHAPES[name] for name in SHAPES if size == 2 or name == "many leaves"}
    all_cases = [(*names, chunk) for names in itertools.product(shapes, DTYPES) for chunk in chunks]
    some_cases = [(name, [*DTYPES][n % 2], chunks[n // 2 % 2]) for n, name in enumerate(shapes)]
    planted_cases = [(name, "float32", 7) for name in shapes]
    for way, (slot_bytes, few) in enumerate(ways if plant == "nothing" else ways[:1]):
        cases = planted_cases if plant != "nothing" else some_cases if way else all_cases
        shared_memory.SLOT_BYTES, shared_memory._FEW_ELEMENTS = slot_bytes, few
        gloo = GroupHandle(tuple(range(size)), rank, dist.group.WORLD, adds_by_tree=True)
        group = share_memory(gloo, 30.0)
        assert group.fast is not None
        for shape in ONE_RANK_SHAPES.values():
            assert new_model(shape, torch.float32, group).model.joined_layers is None
        for (name, type_name), of_model in itertools.groupby(cases, lambda case: case[:2]):
            dtype = DTYPES[type_name]
            model = new_model(SHAPES[name], dtype, group)
            if plant == "a bias on every rank":
                for layer in model.model.layers:
                    layer.self_attn.o_proj.__class__.rank_bias = property(lambda self: self.bias)
                model.model.join_layers()
                for layer in model.model.layers:
                    layer.self_attn.o_proj.__class__.rank_bias = property(
                        lambda self: self.bias if self._group.rank == 0 else None
                    )
            for *_, chunk in of_model:
                together, apart = joined_and_one_by_one(model, prompts, chunk)
                unfused = prompt_logits(model, prompts, chunk, is_fused=(False, True))
                if not (are_equal(together, apart) and are_equal(together, unfused)):
                    print(f"rank {rank}: {name} {dtype} {slot_bytes} {few} {chunk} differ", flush=True)
            # Streams of these ranks differ, so they are compared where each rank norms all rows.
            if plant == "nothing" and way == 1:
                assert new_model(SHAPES[name], dtype, gloo).model.joined_layers is None
                over_gloo = prompt_logits(new_model(SHAPES[name], dtype, gloo), prompts, chunk)
                if not are_equal(over_gloo, together):
                    print(f"rank {rank}: {name} {dtype} over gloo differ", flush=True)
        dist.barrier()
        group.fast.close()
    print(f"rank {rank} compared all", flush=True)
    dist.barrier()
    sys.stdout.flush()
    import os
    os._exit(0)
"""


def compare_on_ranks(plant: str, num_ranks: int = 2) -> ranks.CompletedRanks:
    arguments = [ranks.REPOSITORY / "tests" / "support", plant, json.dumps(PROMPTS)]
    return ranks.run_ranks(SOURCE, num_ranks, LIMIT_S, arguments=arguments)


@pytest.mark.gate("4")
@needs_products
@pytest.mark.matrix
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_with_shared_memory_have_equal_bits(num_ranks: int):
    """Sums split by rows or not; parts that fit a slot or take several rounds; and the sums over gloo."""
    done = compare_on_ranks("nothing", num_ranks).checked()
    assert "differ" not in done.stdout, done.stdout
    found = sorted(re.findall(r"rank \d compared all", done.stdout))
    assert found == [f"rank {rank} compared all" for rank in range(num_ranks)]


@needs_products
@pytest.mark.stress
def test_comparison_detects_bias_added_by_both_ranks():
    done = compare_on_ranks("a bias on every rank").checked()
    found = set(re.findall(r"rank \d: ([a-z ]+) torch", done.stdout))
    assert found == {"biased", "many leaves"}, done.stdout
