"""Weights by checkpoint name: a packed model shows the values that it was filled with, and writes are effective.

Models of one rank of a group that exchanges nothing: to hold weights takes no other rank.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from joined_models import DTYPES, PLAIN, SHAPES, are_equal, joined_and_one_by_one
from model_configs import with_layers
from native_builds import ONEDNN, WITH_AMX, library_for
from native_libraries import needs_products
from our_model import BLOCK_SIZE, prompt_logits
from reference_models import random_prompt
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import VocabularyParallelEmbedding
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ops.attention.cpu import CpuBackend
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.cpu.linear import PackedKernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.topology import Stage

LIBRARY = library_for(WITH_AMX)
KERNELS: dict[str, Kernels] = {
    "reference": ReferenceKernels(),
    "onednn": PackedKernels(),
    "native": CpuKernels(library_for(ONEDNN)),
    "panels": CpuKernels(LIBRARY),
}
# 4 query heads over 2 key-value heads; on 4 ranks each of these is held twice. 96 token ids are padded to 128.
CONFIGS = {
    **SHAPES,
    "no panels": dataclasses.replace(
        with_layers(PLAIN, intermediate_size=90, qk_norm="head"), has_tied_embeddings=True
    ),
}
PROMPTS = [random_prompt(length, seed=5, vocab_size=96) for length in (1, 5, 30)]

each_kernels = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
each_config = pytest.mark.parametrize(
    "model_config",
    [
        pytest.param(model_config, id=name, marks=[] if name in ("biased", "no panels") else pytest.mark.matrix)
        for name, model_config in CONFIGS.items()
    ],
)


def new_model(
    model_config: ModelConfig,
    kernels: Kernels = KERNELS["panels"],
    dtype: torch.dtype = torch.float32,
    group: GroupHandle | None = None,
    stage: Stage | None = None,
    seed: int = 0,
) -> tuple[DecoderForCausalLM, dict[str, Tensor]]:
    """A packed model, and the values that it was filled with, by checkpoint name."""
    backend = CpuBackend(LIBRARY, dtype, (model_config.head_size,), BLOCK_SIZE)
    context = LayerContext(group or single_group(), kernels, backend, dtype, torch.device("cpu"))
    model = build_model(context, model_config, stage)
    model.weights.fill(model.weights.dummy(seed))
    parameters, filled = dict(model.named_parameters()), {}
    for piece in model.weights.slices:
        part = parameters[piece.parameter_name][tuple(slice(*bounds) for bounds in piece.destination)]
        filled[piece.checkpoint_name] = part.detach().clone()
    model.pack_weights()
    return model, filled


def whole_tensors(model_config: ModelConfig, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    return new_model(model_config, ReferenceKernels(), dtype, seed=seed)[1]


def held(model: DecoderForCausalLM) -> Iterator[tuple[str, Tensor, int]]:
    """All tensors of the model as they are in memory, and their addresses."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_mkldnn:
            yield name, tensor.to_dense(), torch.ops.mkldnn.data_ptr(tensor)
        else:
            yield name, tensor, tensor.data_ptr()


def are_same(one: DecoderForCausalLM, other: DecoderForCausalLM) -> bool:
    return all(
        mine[0] == its[0] and torch.equal(mine[1], its[1]) for mine, its in zip(held(one), held(other), strict=True)
    )


of_each_kind = pytest.mark.gate(
    "plain-*",
    "wide heads-bfloat16-panels",
    "no panels-float32-reference",
    "windows-bfloat16-reference",
    "many leaves-bfloat16-onednn",
    "biased-float32-reference",
    "biased-bfloat16-native",
)


def group_of(size: int, rank: int) -> GroupHandle:
    return GroupHandle(tuple(range(size)), rank, None)


@pytest.mark.gate(
    "plain-bfloat16-native",
    "wide heads-bfloat16-panels",
    "no panels-float32-reference",
    "biased-bfloat16-native",
)
@pytest.mark.matrix
@each_kernels
@each_dtype
@each_config
def test_view_shows_filled_values_on_every_rank(kernels: Kernels, dtype: torch.dtype, model_config: ModelConfig):
    for size in (1, 2, 4):
        if model_config.num_heads % size == 0:
            for rank in range(size):
                model, filled = new_model(model_config, kernels, dtype, group_of(size, rank))
                with model.as_checkpoint() as view:
                    shown = dict(view.named_parameters())
                assert list(shown) == list(filled)
                assert all(torch.equal(shown[name], filled[name]) for name in filled)
                assert are_same(model, new_model(model_config, kernels, dtype, group_of(size, rank))[0]), "unchanged"


@of_each_kind
@pytest.mark.matrix
@each_kernels
@each_dtype
@each_config
def test_new_weights_equal_a_freshly_loaded_model(kernels: Kernels, dtype: torch.dtype, model_config: ModelConfig):
    tensors = whole_tensors(model_config, torch.float32, seed=1)
    for size, rank in ((1, 0), (2, 1), (4, 3)):
        if model_config.num_heads % size == 0:
            model, expected = (new_model(model_config, kernels, dtype, group_of(size, rank), seed=s)[0] for s in (0, 1))
            before = [address for *_, address in held(model)]
            assert not are_same(model, expected)
            assert model.load_weights(reversed(tensors.items())) == set(tensors)
            assert are_same(model, expected)
            assert [address for *_, address in held(model)] == before, "in place"


@each_config
def test_changes_through_view_equal_loaded_weights(model_config: ModelConfig):
    """On the second of two ranks: rows of the embedding, columns of the output projection, key-value heads."""
    model, expected = (new_model(model_config, group=group_of(2, 1))[0] for _ in range(2))
    with model.as_checkpoint() as view:
        for name, parameter in view.named_parameters():
            parameter.data *= 0.5 if "norm" in name else -0.25
    expected.load_weights(
        (name, tensor * (0.5 if "norm" in name else -0.25))
        for name, tensor in whole_tensors(model_config, torch.float32, 0).items()
    )
    assert are_same(model, expected)


@pytest.mark.gate("plain-*", "biased-bfloat16", "windows-float32")
@needs_products
@each_dtype
@pytest.mark.parametrize("name", SHAPES)
def test_joined_layers_use_new_weights(dtype: torch.dtype, name: str):
    model, fresh = new_model(SHAPES[name], dtype=dtype)[0], new_model(SHAPES[name], dtype=dtype, seed=1)[0]
    assert not are_equal(prompt_logits(model, PROMPTS), prompt_logits(fresh, PROMPTS))
    model.load_weights(whole_tensors(SHAPES[name], torch.float32, 1).items())
    together, apart = joined_and_one_by_one(model, PROMPTS)
    expected = prompt_logits(fresh, PROMPTS)
    assert are_equal(together, expected)
    assert are_equal(apart, expected)


@each_kernels
def test_tied_head_follows_its_embedding(kernels: Kernels, monkeypatch: pytest.MonkeyPatch):
    def change(model: DecoderForCausalLM) -> Tensor:
        before = model.compute_logits(torch.ones(1, 64))
        with model.as_checkpoint() as view:
            assert view.lm_head.weight is view.model.embed_tokens.weight
            view.lm_head.weight[3] = 7.0
        return model.compute_logits(torch.ones(1, 64))[0, 3] - before[0, 3]

    model = new_model(CONFIGS["no panels"], kernels)[0]
    assert change(model) > 400
    assert (model.model.embed_tokens.packed is None) == (kernels is KERNELS["reference"])
    monkeypatch.setattr(VocabularyParallelEmbedding, "write_region", CheckpointLayer.write_region)
    if kernels is not KERNELS["reference"]:
        assert change(new_model(CONFIGS["no panels"], kernels)[0]) == 0, "negative control"


def test_pipeline_stage_views_and_loads_its_weights():
    """The head of a tied model is a copy of the embedding in another stage, under the embedding's name."""
    tied = SHAPES["wide heads"]
    first = new_model(tied, stage=Stage(0, 1, is_first=True, is_last=False))[0]
    last = new_model(tied, stage=Stage(1, 3, is_first=False, is_last=True))[0]
    tensors = whole_tensors(tied, torch.float32, seed=1)
    for model, layers in ((first, {0}), (last, {1, 2})):
        taken = model.load_weights(tensors.items())
        in_layers = {name for name in tensors if name.startswith("model.layers.")}
        assert {int(name.split(".")[2]) for name in taken & in_layers} == layers
        assert "model.embed_tokens.weight" in taken
        assert ("model.norm.weight" in taken) == (model is last)
        with model.as_checkpoint() as view:
            assert torch.equal(view.get_parameter("model.embed_tokens.weight"), tensors["model.embed_tokens.weight"])
            assert len(view.model.layers) == len(layers)
            name = f"model.layers.{max(layers)}.self_attn.k_proj.weight"
            assert view.model.layers[max(layers)].self_attn.k_proj.weight is view.get_parameter(name)
            assert view.model.layers[-1] is view.model.layers[max(layers)] is list(view.model.layers)[-1]
    assert first.load_weights([("lm_head.weight", torch.ones(1))]) == set(), "a tied head has no weight of its own"


class NewBytes(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes: an upper bound of the memory at any time."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        made = {each.untyped_storage().data_ptr(): each for each in tree_leaves(result) if isinstance(each, Tensor)}
        self.num_bytes += sum(made[key].untyped_storage().nbytes() for key in made.keys() - given)
        return result


# Without products of its own for bfloat16 oneDNN packs it, and packs complete weights only.
@pytest.mark.parametrize(
    "kernels",
    [KERNELS["reference"], pytest.param(KERNELS["panels"], marks=needs_products)],
    ids=["reference", "panels"],
)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_loading_allocates_at_most_one_slice(kernels: Kernels, given: torch.dtype):
    """One slice if it is converted, and a few numbers for each packed row."""
    model = new_model(SHAPES["wide heads"], kernels, torch.bfloat16, group_of(2, 0))[0]
    for name, tensor in whole_tensors(SHAPES["wide heads"], given, seed=1).items():
        model.load_weights([])  # slices are indexed once
        with NewBytes() as new:
            model.load_weights([(name, tensor)])
        part = model.weights.held[name].read()
        num_rows = 0 if tensor.ndim == 1 else len(part)
        copied = part.nbytes if given != torch.bfloat16 else 0
        assert new.num_bytes <= copied + 64 * num_rows + 64, (name, new.num_bytes)
    with NewBytes() as new:
        tensor.clone()
    assert new.num_bytes == tensor.nbytes, "negative control"


class Sharded(Tensor):
    """A tensor like a DTensor."""

    def full_tensor(self) -> Tensor:
        raise AssertionError("gathering is a collective: not ours to start")


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.layers.0.mlp.upproj.weight", torch.ones(128, 64), "the model has no such weight"),
        ("model.layers.3.mlp.up_proj.weight", torch.ones(128, 64), "the model has no such weight"),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(64, 128), r"has the shape \[64, 128\].* has \[128, 64\]"),
        ("model.norm.weight", torch.ones(64).as_subclass(Sharded), r"pass its full_tensor\(\)"),
        ("model.norm.weight", torch.ones(64, device="meta"), "is on the meta device"),
        ("model.norm.weight", torch.ones(64, dtype=torch.int8), "has the dtype torch.int8"),
        ("model.norm.weight", torch.full((64,), torch.nan), "not finite"),
        ("lm_head.weight", torch.ones(96, 64).index_fill(0, torch.tensor([0]), -torch.inf), "not finite"),
        ("lm_head.weight", torch.full((96, 64), 1e39, dtype=torch.float64), "not finite in torch.float32"),
    ],
)
def test_misfit_tensor_is_rejected_before_any_write(name: str, tensor: Tensor, words: str):
    """Both ranks reject a tensor that is not finite in the rows of one of them."""
    for rank in range(2):
        model, unchanged = (new_model(PLAIN, group=group_of(2, rank))[0] for _ in range(2))
        with pytest.raises(ValueError, match=rf"{name}: .*{words}"):
            model.load_weights([(name, tensor)])
        assert are_same(model, unchanged)
        good = ("model.layers.0.mlp.up_proj.weight", torch.ones(128, 64, dtype=torch.float16, requires_grad=True))
        with pytest.raises(ValueError, match=name):
            model.load_weights([good, (name, tensor)])
        assert are_same(model, unchanged) == ("not finite" not in words), "names and shapes of a list are checked first"
        assert model.weights.update.is_open == ("not finite" in words)
        with pytest.raises(ValueError, match=name):
            model.load_weights(iter([good, (name, tensor)]))
        assert not are_same(model, unchanged), "what came before it was written"
        assert list(model.weights.update.digests) == [good[0]]


def test_only_accessed_parameters_are_unpacked(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[int, ...]] = []
    kernels = CpuKernels(LIBRARY)
    unpack = kernels.unpack
    monkeypatch.setattr(kernels, "unpack", lambda *arguments: calls.append(arguments[1:]) or unpack(*arguments))
    model = new_model(PLAIN, kernels)[0]
    with model.as_checkpoint() as view:
        assert view.model_config is PLAIN
        assert "q_proj" in repr(view)
        assert not calls
        for _ in range(2):
            assert view.model.layers[1].self_attn.v_proj.weight.shape == (32, 64)
    assert calls == [(96, 128)]


def _set_parameter(view: Any) -> None:
    view.model.layers[2].mlp.down_proj.weight = nn.Parameter(torch.full((64, 128), 0.5))


def _set_data(view: Any) -> None:
    view.model.layers[2].mlp.down_proj.weight.data = torch.full((64, 128), 0.5, dtype=torch.float64)


def _load_state_dict(view: Any) -> None:
    state = {name: tensor.clone() for name, tensor in view.state_dict().items()}
    state["model.layers.2.mlp.down_proj.weight"].fill_(0.5)
    view.load_state_dict(state)


def _load_weights(view: Any) -> None:
    kept = view.model.layers[2].mlp.down_proj.weight
    view.load_weights([("model.layers.2.mlp.down_proj.weight", torch.full((64, 128), 0.5))])
    assert (kept == 0.5).all()


def _fill_and_fail(view: Any) -> None:
    view.model.layers[2].mlp.down_proj.weight.data.fill_(0.5)
    raise KeyError("after the change")


@pytest.mark.parametrize("change", [_set_parameter, _set_data, _load_state_dict, _load_weights, _fill_and_fail])
def test_every_way_to_change_a_parameter_is_written(change: Callable[[Any], None]):
    model, expected = new_model(PLAIN)[0], new_model(PLAIN)[0]
    expected.load_weights([("model.layers.2.mlp.down_proj.weight", torch.full((64, 128), 0.5))])
    try:
        with model.as_checkpoint() as view:
            change(view)
    except KeyError:
        assert change is _fill_and_fail
    assert are_same(model, expected)


def _other_shape(view: Any) -> None:
    view.model.layers[0].self_attn.q_proj.weight.data.zero_()
    view.model.norm.weight.data = torch.ones(65)


def _no_weight(view: Any) -> None:
    view.model.norm.weight = None


def _one_more(view: Any) -> None:
    view.model.norm.bias = nn.Parameter(torch.ones(64))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_shape, r"^model\.norm\.weight: has the shape \[64\].* not \[65\]"),
        (_no_weight, "^weight: .*not added or removed"),
        (_one_more, "^bias: .*not added or removed"),
    ],
)
def test_view_keeps_shapes_and_names(change: Callable[[Any], None], words: str):
    model, unchanged = new_model(PLAIN)[0], new_model(PLAIN)[0]

    def run() -> None:
        with model.as_checkpoint() as view:
            change(view)

    with pytest.raises(ValueError, match=words):
        run()
    assert are_same(model, unchanged), "nothing was written"
