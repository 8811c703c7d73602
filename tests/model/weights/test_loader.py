import re

import pytest
import torch
from hand_made_store import fill
from torch import nn
from weight_files import save_indexed, save_single

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import PaddingSlice, WeightSlice, empty_slice, replicated, shard
from spmd_worker.model.weights import store, tensor_checks
from spmd_worker.model.weights.checkpoint import Checkpoint

VOCABULARY, WIDTH, PADDED = 10, 8, 12


def full_tensors(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (VOCABULARY, WIDTH),
        "q.weight": (8, WIDTH),
        "k.weight": (2, WIDTH),
        "down.weight": (WIDTH, 16),
        "norm.weight": (WIDTH,),
        "experts.0.weight": (4, WIDTH),
        "experts.1.weight": (4, WIDTH),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def part(rank, size, parts):
    return size * rank // parts, size * (rank + 1) // parts


def build(rank=0, parts=1, dtype=torch.float32):
    """A rank's model: a padded vocabulary shard, merged q and replicated k, columns of down, stacked experts."""
    model = nn.Module()
    first, last = part(rank, PADDED, parts)
    num_real = max(0, min(last, VOCABULARY) - first)
    q_first, q_last = part(rank, 8, parts)
    num_q = q_last - q_first
    columns = part(rank, 16, parts)
    shapes = {
        "embed": (last - first, WIDTH),
        "qk": (num_q + 2, WIDTH),
        "down": (WIDTH, columns[1] - columns[0]),
        "norm": (WIDTH,),
        "experts": (2, 4, WIDTH),
    }
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.full(shape, 99.0, dtype=dtype)))
    start = min(first, VOCABULARY)
    stacked = [
        WeightSlice(f"experts.{i}.weight", (4, WIDTH), ((0, 4), (0, 8)), "experts", ((i, i + 1), (0, 4), (0, 8)))
        for i in range(2)
    ]
    slices = [
        WeightSlice(
            "embed.weight", (VOCABULARY, WIDTH), ((start, start + num_real), (0, 8)), "embed", ((0, num_real), (0, 8))
        ),
        WeightSlice("q.weight", (8, WIDTH), ((q_first, q_last), (0, 8)), "qk", ((0, num_q), (0, 8))),
        WeightSlice("k.weight", (2, WIDTH), ((0, 2), (0, 8)), "qk", ((num_q, num_q + 2), (0, 8))),
        shard("down.weight", (WIDTH, 16), "down", 1, *columns),
        replicated("norm.weight", (WIDTH,), "norm"),
        *stacked,
    ]
    return model, slices, [PaddingSlice("embed", ((num_real, last - first), (0, 8)))]


def expected(rank=0, parts=1, seed=0, dtype=torch.float32):
    full = {name: value.to(dtype) for name, value in full_tensors(seed).items()}
    padded = torch.cat([full["embed.weight"], torch.zeros(PADDED - VOCABULARY, WIDTH, dtype=dtype)])
    return {
        "embed": padded[slice(*part(rank, PADDED, parts))],
        "qk": torch.cat([full["q.weight"][slice(*part(rank, 8, parts))], full["k.weight"]]),
        "down": full["down.weight"][:, slice(*part(rank, 16, parts))],
        "norm": full["norm.weight"],
        "experts": torch.stack([full["experts.0.weight"], full["experts.1.weight"]]),
    }


def assert_holds(model, values):
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name]), name


def assert_untouched(model):
    for name, parameter in model.named_parameters():
        assert (parameter == 99.0).all(), name


@pytest.mark.parametrize(("rank", "parts"), [(0, 1), (0, 2), (1, 2), (0, 4), (3, 4), (5, 6)])
def test_every_rank_loads_its_part_of_the_checkpoint(tmp_path, rank, parts):
    model, slices, paddings = build(rank, parts)
    with Checkpoint.open(save_single(tmp_path, full_tensors())) as checkpoint:
        fill(model, slices, paddings, checkpoint)
    assert_holds(model, expected(rank, parts))


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_to_parameter_dtype(tmp_path, stored, held):
    model, slices, paddings = build(dtype=held)
    tensors = full_tensors(dtype=stored)
    with Checkpoint.open(save_single(tmp_path, tensors)) as checkpoint:
        fill(model, slices, paddings, checkpoint)
    assert torch.equal(model.down, tensors["down.weight"].to(held))
    assert model.down.dtype == held


@pytest.mark.parametrize("block_bytes", [4, 20, 32, 100, 200])
def test_loading_in_small_blocks_gives_the_same(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(store, "_BLOCK_BYTES", block_bytes)
    model, slices, paddings = build(1, 2)
    with Checkpoint.open(save_single(tmp_path, full_tensors())) as checkpoint:
        fill(model, slices, paddings, checkpoint)
    assert_holds(model, expected(1, 2))


def test_loading_twice_gives_the_same(tmp_path):
    model, slices, paddings = build(1, 2)
    with Checkpoint.open(save_single(tmp_path, full_tensors())) as checkpoint:
        first = fill(model, slices, paddings, checkpoint)
        second = fill(model, slices, paddings, checkpoint)
    assert_holds(model, expected(1, 2))
    assert (first.num_tensors, first.num_bytes_read) == (second.num_tensors, second.num_bytes_read)


def test_parameters_keep_their_storage_and_their_gradient_flag(tmp_path):
    model, slices, paddings = build()
    pointers = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with Checkpoint.open(save_single(tmp_path, full_tensors())) as checkpoint:
        fill(model, slices, paddings, checkpoint)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == pointers
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dim", [0, 1])
def test_rank_reads_its_share_of_the_checkpoint(tmp_path, dim):
    # Hazard #3729, #42840: every rank read the whole checkpoint.
    shape = (512, 4096)
    tensors = {f"{i}.weight": torch.randn(shape) for i in range(2)}
    model, slices = nn.Module(), []
    for name in tensors:
        piece = shard(name, shape, name.replace(".", "_"), dim, shape[dim] // 2, shape[dim])
        size = tuple(stop for _, stop in piece.destination)
        model.register_parameter(piece.parameter_name, nn.Parameter(torch.empty(size)))
        slices.append(piece)
    folder = save_single(tmp_path, tensors)
    with Checkpoint.open(folder) as checkpoint:
        report = fill(model, slices, [], checkpoint)
    assert report.num_bytes_read <= 0.6 * (folder / "model.safetensors").stat().st_size
    assert report.num_tensors == 2
    assert report.seconds > 0
    complete_model = nn.Module()
    complete_model.register_parameter("w", nn.Parameter(torch.empty(2, *shape)))
    everything = [
        WeightSlice(name, shape, ((0, 512), (0, 4096)), "w", ((i, i + 1), (0, 512), (0, 4096)))
        for i, name in enumerate(tensors)
    ]
    with Checkpoint.open(folder) as checkpoint:
        assert fill(complete_model, everything, [], checkpoint).num_bytes_read == 2 * 512 * 4096 * 4


@pytest.mark.parametrize("fault", ["missing", "unexpected", "misshapen", "quantised", "uncovered"])
def test_mismatching_checkpoint_writes_nothing(tmp_path, fault):
    model, slices, paddings = build()
    tensors = full_tensors()
    if fault == "missing":
        del tensors["norm.weight"]
    elif fault == "unexpected":
        tensors["norm.bias"] = torch.ones(WIDTH)
    elif fault == "misshapen":
        tensors["norm.weight"] = torch.ones(WIDTH + 1)
    elif fault == "quantised":
        tensors["norm.weight"] = torch.ones(WIDTH, dtype=torch.int8)
    else:
        paddings = []
    with Checkpoint.open(save_single(tmp_path, tensors)) as checkpoint:
        with pytest.raises(CheckpointError):
            fill(model, slices, paddings, checkpoint)
        assert checkpoint.num_bytes_read == 0
    assert_untouched(model)


def test_quantised_tensor_of_another_stage_is_rejected(tmp_path):
    model, slices, paddings = build()
    tensors = {**full_tensors(), "far.weight": torch.ones(4, dtype=torch.int8)}
    with (
        Checkpoint.open(save_single(tmp_path, tensors)) as checkpoint,
        pytest.raises(CheckpointError, match=r"far\.weight.*quantised"),
    ):
        fill(model, [*slices, empty_slice("far.weight", (4,))], paddings, checkpoint)


def test_ignorable_tensors_are_not_read_whatever_their_dtype(tmp_path):
    model, slices, paddings = build()
    tensors = {**full_tensors(), "position_ids": torch.arange(9)}
    with Checkpoint.open(save_single(tmp_path, tensors)) as checkpoint:
        report = fill(model, slices, paddings, checkpoint, ignorable=lambda name: name == "position_ids")
    assert report.num_bytes_read == sum(tensor.nbytes for tensor in full_tensors().values())


def test_files_are_read_sequentially(tmp_path, monkeypatch):
    tensors, order = full_tensors(), []
    names = list(tensors)
    files = {f"{i}.safetensors": {name: tensors[name] for name in names[i::2]} for i in range(2)}
    model, slices, paddings = build()
    read = Checkpoint.read

    def recorded(self, name, region):
        order.append(self.position(name))
        return read(self, name, region)

    monkeypatch.setattr(Checkpoint, "read", recorded)
    with Checkpoint.open(save_indexed(tmp_path, files)) as checkpoint:
        fill(model, slices, paddings, checkpoint)
    assert order == sorted(order)
    assert_holds(model, expected())


def test_parameters_without_storage_are_rejected(tmp_path):
    model, slices, paddings = build()
    model = model.to("meta")
    with Checkpoint.open(save_single(tmp_path, full_tensors())) as checkpoint, pytest.raises(AssertionError):
        fill(model, slices, paddings, checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["embed.weight", "k.weight", "down.weight", "norm.weight", "experts.1.weight"])
def test_nonfinite_element_is_named_with_its_index(tmp_path, name, value):
    tensors = full_tensors()
    index = tuple(size - 1 for size in tensors[name].shape)
    tensors[name][index] = value
    save_single(tmp_path, tensors)
    with Checkpoint.open(tmp_path) as checkpoint:
        place = re.escape(f"tensor {name!r} has {value:g} at {list(index)}")
        with pytest.raises(CheckpointError, match=f"{place}.*not finite in torch.float32"):
            fill(*build(), checkpoint)
        fill(*build(), checkpoint, allows_nonfinite=True)


def test_nonfinite_element_is_found_by_its_rank(tmp_path):
    tensors = full_tensors()
    tensors["down.weight"][3, 9] = torch.nan
    save_single(tmp_path, tensors)
    with Checkpoint.open(tmp_path) as checkpoint:
        fill(*build(0, 2), checkpoint)
        with pytest.raises(CheckpointError, match=re.escape("'down.weight' has nan at [3, 9]")):
            fill(*build(1, 2), checkpoint)


def test_overflow_of_parameter_dtype_is_nonfinite(tmp_path):
    tensors = full_tensors()
    tensors["q.weight"][0, 0] = 1e6
    save_single(tmp_path, tensors)
    with Checkpoint.open(tmp_path) as checkpoint:
        fill(*build(), checkpoint)
        with pytest.raises(CheckpointError, match=re.escape("'q.weight' has 1e+06 at [0, 0]") + ".*model.dtype"):
            fill(*build(dtype=torch.float16), checkpoint)


@pytest.mark.control("Weights that are not finite are refused")
def test_comparison_detects_loader_without_finiteness_check(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_checks, "is_finite", lambda values, dtype: True)
    with pytest.raises(pytest.fail.Exception):
        test_nonfinite_element_is_named_with_its_index(tmp_path, "k.weight", float("nan"))


def load_tied(folder, tensors, rank=0, parts=1, tied=True):
    model, slices, paddings = build(rank, parts)
    with Checkpoint.open(save_single(folder, tensors)) as checkpoint:
        fill(
            model,
            slices,
            paddings,
            checkpoint,
            ignorable=lambda name: name == "head.weight",
            tied=("embed.weight", "head.weight") if tied else None,
        )
    assert_holds(model, expected(rank, parts))


def test_stored_tied_head_must_equal_its_embedding(tmp_path):
    tensors = full_tensors()
    load_tied(tmp_path / "without", tensors)
    tensors["head.weight"] = tensors["embed.weight"].clone()
    load_tied(tmp_path / "equal", tensors)
    tensors["head.weight"][7, 3] += 1.0
    with pytest.raises(CheckpointError) as refused:
        load_tied(tmp_path / "other", tensors)
    assert str(refused.value) == (
        f"{tmp_path / 'other'}: tensor 'head.weight' differs from 'embed.weight' between rows 0 and 9, but "
        "config.json sets tie_word_embeddings: set it to false to use both, or remove "
        "'head.weight' from the files if it is a leftover"
    )
    load_tied(tmp_path / "other", tensors, tied=False)
    # Of two ranks the one that holds the row.
    load_tied(tmp_path / "other", tensors, 0, 2)
    with pytest.raises(CheckpointError, match="between rows 6 and 9"):
        load_tied(tmp_path / "other", tensors, 1, 2)
    tensors["head.weight"] = tensors["embed.weight"].bfloat16()
    with pytest.raises(CheckpointError, match=r"'head\.weight' .*'embed\.weight' in dtype or"):
        load_tied(tmp_path / "half", tensors)
