import hashlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hand_made_store import fill_dummy
from torch import nn

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import PaddingSlice, WeightSlice, replicated, shard
from spmd_worker.model.weights import store
from spmd_worker.model.weights.dummy import NormalStream
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.native import threads as threads_of_torch

SHAPES = {
    "embed_tokens.weight": (1003, 96),
    "gate.weight": (512, 300),
    "down.weight": (300, 512),
    "wide.weight": (3, 40_000),
    "input_layernorm.weight": (96,),
    "gate.bias": (512,),
    "experts.weight": (4, 20, 60),
    "act_fn.beta": (),
}
# Which dimension of each tensor the ranks divide; None is replicated.
DIMS = {
    "embed_tokens.weight": 0,
    "gate.weight": 0,
    "down.weight": 1,
    "wide.weight": 1,
    "input_layernorm.weight": None,
    "gate.bias": 0,
    "experts.weight": 2,
    "act_fn.beta": None,
}


def build(rank, parts, dtype=torch.float32):
    model, slices = nn.Module(), []
    for name, shape in SHAPES.items():
        dim, parameter_name = DIMS[name], name.replace(".", "_")
        if dim is None:
            piece = replicated(name, shape, parameter_name)
        else:
            piece = shard(
                name, shape, parameter_name, dim, shape[dim] * rank // parts, shape[dim] * (rank + 1) // parts
            )
        size = tuple(stop for _, stop in piece.destination)
        model.register_parameter(parameter_name, nn.Parameter(torch.full(size, 99.0, dtype=dtype)))
        slices.append(piece)
    return model, slices


def reassemble(parts, seed=0):
    shards = []
    for rank in range(parts):
        model, slices = build(rank, parts)
        fill_dummy(model, slices, [], seed)
        shards.append({name: model.get_parameter(name.replace(".", "_")).data for name in SHAPES})
    full = {}
    for name, dim in DIMS.items():
        values = [part[name] for part in shards]
        assert dim is not None or all(torch.equal(value, values[0]) for value in values)
        full[name] = values[0] if dim is None else torch.cat(values, dim)
    return full


def test_shards_of_any_ranks_reassemble_to_equal_tensors():
    whole_tensors = reassemble(1)
    for parts in (2, 4):
        for name, value in reassemble(parts).items():
            assert torch.equal(value, whole_tensors[name]), (name, parts)


def test_comparison_detects_generator_without_position(monkeypatch):
    """Negative control: values in the order of generation, as in a naive dummy loader."""

    def forgetful(self, target, runs):
        np.random.Generator(np.random.Philox(key=self._num_elements)).standard_normal(out=target, dtype=np.float32)

    monkeypatch.setattr(NormalStream, "fill", forgetful)
    assert not torch.equal(reassemble(2)["gate.weight"], reassemble(1)["gate.weight"])


def test_values_depend_on_name_and_seed():
    first, again, other = reassemble(1), reassemble(1), reassemble(1, seed=1)
    for name in SHAPES:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
    assert not torch.equal(first["gate.weight"].flatten()[:512], first["down.weight"].flatten()[:512])


def test_values_are_independent_of_global_generators():
    torch.manual_seed(3)
    np.random.seed(3)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = reassemble(1)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()
    torch.manual_seed(4)
    np.random.seed(4)
    assert all(torch.equal(value, first[name]) for name, value in reassemble(1).items())


def digest(parts: int) -> str:
    values = reassemble(parts).values()
    return hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in values)).hexdigest()


@pytest.mark.stress
@pytest.mark.matrix
def test_values_do_not_depend_on_process_or_threads():
    """Those of this process and of another with other hashes and a thread more."""
    code = "import sys; sys.path.insert(0, 'tests/model/weights'); from test_dummy import digest; print(digest(2))"
    root = Path(__file__).parents[3]
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={"PYTHONPATH": str(root), "PYTHONHASHSEED": "2", "OMP_NUM_THREADS": str(torch.get_num_threads() + 1)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert other.stdout == f"{digest(2)}\n"


def test_scales_follow_the_kind_of_weight():
    full = reassemble(1)
    assert full["embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert full["gate.weight"].std() == pytest.approx(300**-0.5, rel=0.05)
    assert full["down.weight"].std() == pytest.approx(512**-0.5, rel=0.05)
    assert full["experts.weight"].std() == pytest.approx(60**-0.5, rel=0.05)
    assert full["input_layernorm.weight"].mean() == pytest.approx(1.0, abs=0.05)
    assert full["gate.bias"].mean() == pytest.approx(0.0, abs=0.05)
    assert full["gate.bias"].std() == pytest.approx(0.1, rel=0.2)
    assert abs(full["gate.weight"].mean()) < 1e-3


def test_neighbouring_blocks_of_positions_are_independent():
    values = np.empty((4, 65536), dtype=np.float32)
    NormalStream("w", 0, (4 * 65536,)).fill(values.reshape(-1), [(0, 4 * 65536)])
    correlation = np.corrcoef(values)
    assert np.abs(correlation - np.eye(4)).max() < 0.02
    # Streams that overlap with a shift do not correlate, but share nearly all of their values.
    num_shared = len(np.intersect1d(values[0], values[1]))
    assert num_shared < 65536 // 20


def test_lower_precision_is_float32_rounded():
    model, slices = build(0, 1, torch.bfloat16)
    fill_dummy(model, slices, [])
    assert torch.equal(model.gate_weight.data, reassemble(1)["gate.weight"].bfloat16())


def test_small_blocks_give_the_same_values(monkeypatch):
    expected = reassemble(2)
    monkeypatch.setattr(store, "_BLOCK_BYTES", 4000)
    for name, value in reassemble(2).items():
        assert torch.equal(value, expected[name]), name


def test_padding_is_zero():
    model = nn.Module()
    model.register_parameter("embed", nn.Parameter(torch.full((6, 4), 99.0)))
    slices = [WeightSlice("embed.weight", (5, 4), ((0, 5), (0, 4)), "embed", ((0, 5), (0, 4)))]
    fill_dummy(model, slices, [PaddingSlice("embed", ((5, 6), (0, 4)))])
    assert not model.embed[5].any()
    assert model.embed[:5].all()


def test_slices_that_leave_a_gap_are_rejected():
    model = nn.Module()
    model.register_parameter("embed", nn.Parameter(torch.full((6, 4), 99.0)))
    with pytest.raises(CheckpointError, match=r"embed \[6, 4\]: 24 .*not covered"):
        fill_dummy(model, [], [])


@pytest.mark.stress
@pytest.mark.timed
def test_twenty_million_weights_are_filled_within_seconds():
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.empty(20_000, 1000, dtype=torch.bfloat16)))
    start_s = time.perf_counter()
    fill_dummy(model, [replicated("w.weight", (20_000, 1000), "w")], [])
    assert time.perf_counter() - start_s < 10


@pytest.mark.gate("3")
@pytest.mark.parametrize("num_threads", [2, 3, 16])
def test_threads_share_a_tensor_without_changing_values(monkeypatch, num_threads):
    monkeypatch.setattr(store, "_BLOCK_BYTES", 4 << 12)
    names, widths = [], set()
    write_block = WeightStore._write_block

    def fill(*args):
        names.append(threading.current_thread().name)
        write_block(*args)
        if names[-1].startswith("fill-weights"):
            widths.add(torch.get_num_threads())

    monkeypatch.setattr(WeightStore, "_write_block", fill)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    filled = []
    for threads in (1, num_threads):
        model, slices = build(0, 1)
        fill_dummy(model, slices, [], num_threads=threads)
        filled.append([each.data for each in model.parameters()])
    torch.set_num_threads(before)
    assert len(names) > 2 * len(SHAPES)
    assert len({*names}) > 1
    assert widths == {1} or threads_of_torch._set_openmp_threads() is None
    for alone, shared in zip(*filled, strict=True):
        assert torch.equal(alone, shared)
