"""Weights from a trainer's shards are those of its whole tensors, whatever the trainer's and the engine's layouts.

Ranks are threads of this process; `test_shards_on_ranks.py` has processes with FSDP2.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from expert_checkpoints import expert_folder
from family_checkpoints import family_folder
from reference_models import checkpoint_folder
from thread_groups import ThreadGroup, on_ranks
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard
from trainer_shards import ThreadExchange, sharded
from transformers import AutoModelForCausalLM
from waiting import LIMIT_S

from spmd_worker.base.errors import CheckpointError, RankFailedError, RanksDisagreeError
from spmd_worker.base.liveness.heartbeat import Heartbeat
from spmd_worker.engine.data_parallel import shards as product
from spmd_worker.engine.data_parallel.shards import KnownPlans, ShardLoader
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model.weights.weight_comparison import tensor_sums
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.int8 import Int8Kernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group

BUCKET_BYTES = 2048
TWO, GRID = (2,), (2, 2)
CASES = [
    pytest.param(checkpoint_folder, "llama3", 1, (Shard(0),), TWO, id="one rank an engine"),
    pytest.param(checkpoint_folder, "llama3", 2, (Shard(0),), TWO, id="padded vocabulary"),
    pytest.param(checkpoint_folder, "llama_nine_heads", 3, (Shard(0),), (3,), id="three uneven"),
    pytest.param(checkpoint_folder, "qwen2", 4, (Replicate(), Shard(0)), GRID, id="replicated keys, HSDP"),
    pytest.param(checkpoint_folder, "qwen2_tied", 2, (Shard(1),), TWO, id="tied, columns"),
    pytest.param(checkpoint_folder, "qwen2", 4, (_StridedShard(0, split_factor=2), Shard(0)), GRID, id="FSDP2 over TP"),
    pytest.param(checkpoint_folder, "qwen2", 1, (Shard(1), Shard(0)), GRID, id="blocks", marks=pytest.mark.matrix),
    pytest.param(family_folder, "gpt2", 2, (Shard(0),), TWO, id="transposed, fused"),
    pytest.param(family_folder, "phi3", 2, (Shard(0),), TWO, id="fused"),
    pytest.param(expert_folder, "qwen3_moe", 2, (Shard(0),), TWO, id="stacked experts"),
]


def open_model(folder: Path, group: Any, kernels: Kernels | None = None) -> DecoderForCausalLM:
    config = read_model_files(folder).model_config
    kernels = kernels or ReferenceKernels()
    quantised = kernels if isinstance(kernels, Int8Kernels) else None
    parts = group, kernels, SdpaBackend(), torch.float32, torch.device("cpu")
    context = LayerContext(*parts, quantised=quantised)
    model = build_model(context, config)
    with model.weights.open(folder) as checkpoint:
        model.weights.fill(checkpoint)
    model.weights.pack()
    return model


def trainers(folder: Path) -> dict[str, Tensor]:
    """Tensors by transformers' names: a tied head too, experts stacked."""
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    return {name: tensor * 0.75 for name, tensor in state.items()}


def placed(tensor: Tensor, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """A vector has no columns."""
    if tensor.ndim > 1:
        return placements
    return tuple(Shard(0) if isinstance(each, Shard) else each for each in placements)


def shards_of(whole: dict[str, Tensor], placements: Any, mesh: tuple[int, ...], rank: int) -> list[tuple[str, Tensor]]:
    return [(name, sharded(each, placed(each, placements), mesh, rank)) for name, each in whole.items()]


class Ranks:
    """Threads with an exchange each, and an engine of `size` of them or of one."""

    def __init__(self, folder: Path, num_ranks: int, size: int, kernels: Callable[[], Kernels] = ReferenceKernels):
        self._folder, self._num_ranks, self._size, self._kernels = folder, num_ranks, size, kernels
        self._barrier, self._shared = Barrier(num_ranks, timeout=LIMIT_S), [None] * num_ranks

    def run(self, call: Callable[[DecoderForCausalLM, ThreadExchange], Any]) -> list[Any]:
        def on_rank(group: ThreadGroup) -> Any:
            try:
                model = open_model(self._folder, group if self._size > 1 else single_group(0), self._kernels())
                return call(model, ThreadExchange(group.rank, self._barrier, self._shared))
            except BaseException:
                self._barrier.abort()
                raise

        return on_ranks(self._num_ranks, on_rank)


def load(
    model: DecoderForCausalLM,
    exchange: ThreadExchange,
    pairs: Iterable[Any],
    known: KnownPlans | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    known = known or KnownPlans()
    ShardLoader(model.weights, exchange, Heartbeat(), bucket_bytes, known, takes_part=False, check=lambda: None).load(
        pairs
    )


def whole_sums(folder: Path, whole: dict[str, Tensor], num_ranks: int, size: int, kernels: Any = ReferenceKernels):
    def on_rank(model: DecoderForCausalLM, _: Any) -> Any:
        model.load_weights(whole.items())
        return tensor_sums(model.weights)

    return Ranks(folder, num_ranks, size, kernels).run(on_rank)


@pytest.mark.guarantee("Weights from shards are those of whole tensors")
@pytest.mark.parametrize(("folder_of", "name", "size", "placements", "mesh"), CASES)
def test_shards_give_the_bits_of_whole_tensors(folder_of, name, size, placements, mesh):
    folder, num_ranks = folder_of(name), torch.Size(mesh).numel()
    whole = trainers(folder)

    def on_rank(model: DecoderForCausalLM, exchange: ThreadExchange) -> Any:
        load(model, exchange, shards_of(whole, placements, mesh, exchange.rank))
        update = model.weights.update
        assert not update.missing([key for key in model.weights.shapes if key not in model.weights.buffer_names])
        assert update.report(model.weights.shapes)[-1] == "", "the tied head is the embedding"
        rows = max(tensor.shape[-1] for tensor in whole.values()) * 4
        assert exchange.largest <= max(BUCKET_BYTES, rows)
        return tensor_sums(model.weights)

    assert Ranks(folder, num_ranks, size).run(on_rank) == whole_sums(folder, whole, num_ranks, size)


@pytest.mark.control("Weights from shards are those of whole tensors")
def test_parts_in_other_places_are_found(monkeypatch: pytest.MonkeyPatch):
    folder = checkpoint_folder("llama3")
    whole = trainers(folder)
    shown = product.write_block
    monkeypatch.setattr(product, "write_block", lambda target, parts: shown(target, [(m, p.flip(0)) for m, p in parts]))

    def on_rank(model: DecoderForCausalLM, exchange: ThreadExchange) -> Any:
        load(model, exchange, shards_of(whole, (Shard(0),), TWO, exchange.rank))
        return tensor_sums(model.weights)

    assert Ranks(folder, 2, 2).run(on_rank) != whole_sums(folder, whole, 2, 2)


def test_quantised_weights_get_scales_of_full_rows():
    folder = checkpoint_folder("qwen2")
    whole = trainers(folder)

    def kernels() -> Kernels:
        return Int8Kernels(torch.float32)

    def on_rank(model: DecoderForCausalLM, exchange: ThreadExchange) -> Any:
        load(model, exchange, shards_of(whole, (Shard(0),), TWO, exchange.rank))
        return tensor_sums(model.weights)

    assert Ranks(folder, 2, 2, kernels).run(on_rank) == whole_sums(folder, whole, 2, 2, kernels)


def test_plan_is_made_once_and_rounds_are_bounded():
    folder = checkpoint_folder("qwen2")
    whole = trainers(folder)

    def on_rank(model: DecoderForCausalLM, exchange: ThreadExchange) -> Any:
        known, counts = KnownPlans(), []
        for factor in (1.0, 2.0, 3.0):
            pairs = shards_of({name: each * factor for name, each in whole.items()}, (Shard(0),), TWO, exchange.rank)
            before = exchange.num_gathers
            load(model, exchange, iter(pairs), known, 1 << 14)
            counts.append(exchange.num_gathers - before)
        return counts, tensor_sums(model.weights)

    found = Ranks(folder, 2, 1).run(on_rank)
    (first, second, third), _ = found[0]
    assert first == 2 * second == 2 * third > 4
    tripled = {name: each * 3 for name, each in whole.items()}
    assert [sums for _, sums in found] == whole_sums(folder, tripled, 2, 1)


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


def faulty(case: str, pairs: list[tuple[str, Tensor]], whole: dict[str, Tensor], rank: int) -> Any:
    """Pairs that a rank gives in place of its own."""
    norm = whole[NORM].clone()
    if case == "left out" and rank:
        return [pair for pair in pairs if pair[0] != NORM]
    if case == "ends early" and rank:
        return iter(pairs[:3])
    if case == "ends early":
        return iter(pairs)
    if case == "not finite":
        norm[-1] = torch.nan
        return [*(pair for pair in pairs if pair[0] != NORM), (NORM, sharded(norm, (Shard(0),), TWO, rank))]
    if case == "misshapen":
        return [*pairs[1:], (EMBEDDING, sharded(norm, (Shard(0),), TWO, rank))]
    if case == "replicas differ":
        return [*pairs[:-1], (pairs[-1][0], sharded(whole[pairs[-1][0]] + rank, (Replicate(),), TWO, rank))]
    if case == "nobody's half":
        return [(name, sharded(whole[name], (Shard(0),), TWO, -1 if rank else 0)) for name, _ in pairs]
    return pairs


MISTAKES = {
    "left out": r"is model.norm.weight \(float32 \[64\], S\(0\) on a mesh of 2\) on rank 0 and",
    "ends early": r"ranks \[1\] have given all|no more tensors on rank 1",
    "not finite": r"model.norm.weight: has nan at \[63\]",
    "misshapen": r"weight: has the shape \[64\], but the model's has \[211, 64\] \(given in shards: S\(0\)",
    "replicas differ": r"is not the same on ranks 0 and 1, which both have it",
    "nobody's half": r"no rank gives rows 106 to 128 of 211 \(rank 0: S\(0\) on a mesh of 2; rank 1: outside of ",
}


@pytest.mark.guarantee("Weights from shards are written on all ranks or on none")
@pytest.mark.parametrize("case", MISTAKES)
def test_mistake_is_found_before_a_byte_is_written(case: str):
    folder = checkpoint_folder("llama3")
    whole = {name: each for name, each in trainers(folder).items() if not name.endswith("inv_freq")}

    def on_rank(model: DecoderForCausalLM, exchange: ThreadExchange) -> Any:
        before = tensor_sums(model.weights)
        pairs = shards_of(whole, (Shard(0),), TWO, exchange.rank)
        known, size = KnownPlans(), 1 << 12 if case == "ends early" else 1 << 20
        with pytest.raises((CheckpointError, RankFailedError, RanksDisagreeError), match=MISTAKES[case]):
            load(model, exchange, faulty(case, pairs, whole, exchange.rank), known, size)
        if case != "ends early":
            assert tensor_sums(model.weights) == before
            assert not model.weights.update.is_open
        load(model, exchange, pairs, known)
        return tensor_sums(model.weights)

    assert Ranks(folder, 2, 2).run(on_rank) == whole_sums(folder, whole, 2, 2)


@pytest.mark.control("Weights from shards are written on all ranks or on none")
def test_unchecked_shards_are_written_everywhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(product, "check_values", lambda store, shards, own: None)
    folder = checkpoint_folder("llama3")
    whole = trainers(folder)

    def on_rank(model: DecoderForCausalLM, exchange: ThreadExchange) -> Any:
        before = tensor_sums(model.weights)
        pairs = shards_of(whole, (Shard(0),), TWO, exchange.rank)
        load(model, exchange, faulty("not finite", pairs, whole, exchange.rank))
        return tensor_sums(model.weights) == before

    assert Ranks(folder, 2, 2).run(on_rank) == [False, False]
