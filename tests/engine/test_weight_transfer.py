"""Deltas, handles of another process's memory, digests of given tensors and vLLM's requests, in one process."""

import ast
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from context_fixtures import fixture_of
from forked_child import in_child
from ranks import REPOSITORY
from safetensors.torch import load_file
from torch import Tensor

from spmd_worker import LLM, SparseWeightPatch, ipc_handle
from spmd_worker.base.errors import CheckpointError, MissingWeightsError, WeightMismatchError

MODEL = REPOSITORY / "scripts" / "demo" / "model"
NORM, MATRIX = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def given() -> dict[str, Tensor]:
    return load_file(MODEL / "model.safetensors")


opened = fixture_of(lambda: LLM(MODEL, dtype="bfloat16", device="cpu", num_blocks=16))


@pytest.fixture
def llm(opened: LLM) -> LLM:
    opened.load_weights(given().items())
    return opened


def patch_of(name: str, before: Tensor, after: Tensor) -> SparseWeightPatch:
    indices = (before != after).view(-1).nonzero()[:, 0].int()
    return SparseWeightPatch(name, indices, after.reshape(-1)[indices.long()], tuple(after.shape))


def trained() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights in bfloat16 before and after a step that changes some elements."""
    before = {name: tensor.bfloat16() for name, tensor in given().items()}
    noise = torch.Generator().manual_seed(0)
    after = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in after.values():
        moves = torch.rand(tensor.shape, generator=noise) < 0.03
        tensor[moves] *= 1.0625
    return before, after


@pytest.mark.guarantee("Deltas give the weights of a whole load or are refused")
@pytest.mark.parametrize("kind", ["difference", "patch"])
def test_delta_gives_the_bits_of_whole_weights(llm: LLM, kind: str):
    before, after = trained()
    deltas: list[Any] = []
    for name, tensor in after.items():
        whole = tensor.float() - before[name].float()
        deltas.append((name, whole) if kind == "difference" else patch_of(name, before[name], tensor))
    old = llm.tensor_digests()
    llm.apply_weight_deltas(deltas, base_digest=llm.weights_digest())
    assert llm.tensor_digests() == llm.digests_of(after.items()) != old


@pytest.mark.control("Deltas give the weights of a whole load or are refused")
def test_delta_of_other_weights_is_refused(llm: LLM):
    base = llm.weights_digest()
    llm.apply_weight_deltas([(NORM, torch.ones(128))], base_digest=base)
    moved = llm.weights_digest()
    with pytest.raises(CheckpointError, match=r"base_digest=.* but the weights here have"):
        llm.apply_weight_deltas([(NORM, torch.ones(128))], base_digest=base)
    assert llm.weights_digest() == moved != base


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (("model.nurm.weight", torch.ones(128)), r"the model has no such weight: .* did you mean model\.norm\.weight"),
        ((NORM, torch.ones(3)), r"has the shape \[3\], but the model's has \[128\]"),
        ((NORM, torch.full((128,), torch.nan)), "the delta has nan at"),
        (SparseWeightPatch(NORM, torch.tensor([128]), torch.ones(1), (128,)), "indices must be from 0 to 127"),
        (SparseWeightPatch(NORM, torch.tensor([5, 5]), torch.ones(2), (128,)), "an index is given twice"),
        (SparseWeightPatch(NORM, torch.tensor([5]), torch.ones(2), (128,)), r"has \[1\] indices, but values of \[2\]"),
        (SparseWeightPatch(NORM, torch.tensor([5.0]), torch.ones(1), (128,)), "indices must be a tensor"),
        (SparseWeightPatch(NORM, torch.tensor([5]), torch.ones(1), None), "full_shape=None must be a list of sizes"),
        (3, "a delta is a int"),
    ],
)
def test_wrong_delta_is_refused_before_a_write(llm: LLM, delta: Any, words: str):
    base = llm.weights_digest()
    with pytest.raises((CheckpointError, TypeError), match=words):
        llm.apply_weight_deltas([(EMBEDDING, torch.ones(288, 128)), delta], base_digest=base)
    assert llm.weights_digest() == base


def test_dict_of_weights_names_its_items(llm: LLM):
    """Regression: `too many values to unpack`."""
    weights, words, base = given(), "dict: give its items", llm.weights_digest()
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    for call in (
        llm.load_weights,
        partial(llm.load_weights, verify=True),
        llm.update_weights,
        partial(llm.update_weights, source=0),
        llm.digests_of,
        runner.model.load_weights,
        partial(llm.apply_weight_deltas, base_digest=base),
    ):
        with pytest.raises(TypeError, match=words):
            call(weights)
    with pytest.raises(TypeError, match="a weight is a str: give pairs of a name and a tensor"):
        llm.load_weights([*weights])
    assert llm.weights_digest() == base


def test_loaded_weights_are_verified(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Control: one element that is written otherwise."""
    llm.load_weights(given().items(), verify=True)
    store = llm.llm_engine.model_executor.driver_worker.model_runner.model.weights
    held = type(store.held[MATRIX])
    load = held.load
    monkeypatch.setattr(held, "load", lambda self, tensor: load(self, tensor.index_fill(0, torch.tensor(0), 2.0)))
    with pytest.raises(WeightMismatchError, match="what is held after the update differs"):
        llm.load_weights(given().items(), verify=True)


def test_handles_of_another_process_are_read(llm: LLM):
    """Shared memory of the CPU; handles of GPUs have not been run."""
    sent, given_back = os.pipe(), os.pipe()

    def send() -> None:
        tensor = torch.full((128,), 3.0)
        os.write(sent[1], repr(ipc_handle(tensor)).encode())
        os.read(given_back[0], 1)

    with ThreadPoolExecutor(1) as thread:
        child = thread.submit(in_child, send)
        handle = ast.literal_eval(os.read(sent[0], 1 << 16).decode())
        info = {"names": [NORM], "dtype_names": ["float32"], "shapes": [[128]], "ipc_handles": [handle]}
        llm.init_weight_transfer_engine({"init_info": {}})
        llm.start_weight_update(partial=True)
        llm.update_weights(SimpleNamespace(update_info=info))
        llm.finish_weight_update()
        os.write(given_back[1], b".")
        assert child.result() == 0
    for end in (*sent, *given_back):
        os.close(end)
    expected = {**given(), NORM: torch.full((128,), 3.0)}
    assert llm.tensor_digests() == llm.digests_of(expected.items())


def test_packed_buffer_is_read(llm: LLM):
    norm, matrix = torch.full((128,), 2.0), given()[MATRIX].bfloat16() * 2
    parts = [norm.view(torch.uint8), matrix.reshape(-1).view(torch.uint8)]
    packed = torch.cat(parts)
    info = {
        "names": [NORM, MATRIX], "dtype_names": ["float32", "bfloat16"], "shapes": [[128], list(matrix.shape)],
        "ipc_handles": ipc_handle(packed), "tensor_sizes": list(map(len, parts)), "packed": True,
    }  # fmt: skip
    llm.start_weight_update(partial=True)
    llm.update_weights({"update_info": info})
    llm.finish_weight_update()
    assert llm.tensor_digests() == llm.digests_of({**given(), NORM: norm, MATRIX: matrix}.items())


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"names": [NORM], "dtype_names": ["float32"], "shapes": [[128]]}, "no process sends to this one"),
        ({"ipc_handles_pickled": "gASV"}, "is never unpickled"),
        ({"names": [NORM], "ipc_handles": [{}]}, r"missing \['dtype_names', 'shapes'\]"),
        ({"names": [NORM], "dtype_names": [], "shapes": [[128]], "ipc_handles": [{}]}, "dtype_names has 0 entries"),
        (
            {"names": [NORM], "dtype_names": ["float32"], "shapes": [[128]], "ipc_handles": [{"GPU-7": ()}]},
            "is of GPU-7",
        ),
        ({"names": [NORM], "dtype_names": ["int8"], "shapes": [[128]], "ipc_handles": [{}]}, "has the dtype 'int8'"),
        ({"names": [NORM], "dtype_names": ["float32"], "shapes": [128], "ipc_handles": [{}]}, "its shape=128 must be"),
        ({"names": [NORM], "dtype_names": ["float32"], "shapes": [[1]], "ipc_handles": [3]}, "its handle is a int"),
        (
            {"names": [NORM], "dtype_names": ["float32"], "shapes": [[1]], "ipc_handles": [{"cpu": (1, 2)}]},
            "its handle has 2 parts, not 5",
        ),
        ([NORM], "update_info is a list: give a dict of names"),
    ],
)
def test_other_requests_are_refused(llm: LLM, info: Any, words: str):
    with pytest.raises(ValueError, match=words):
        llm.update_weights({"update_info": info})
    with pytest.raises(ValueError, match="names a group with processes of a trainer"):
        llm.init_weight_transfer_engine({"init_info": {"master_address": "10.0.0.1"}})
    with pytest.raises(TypeError, match="init_info is a int: give a dict"):
        llm.init_weight_transfer_engine(3)


def test_handle_that_is_too_short_is_refused(llm: LLM):
    short = torch.ones(64)
    info = {"names": [NORM], "dtype_names": ["float32"], "shapes": [[128]], "ipc_handles": [ipc_handle(short)]}
    with pytest.raises(CheckpointError, match=r"its handle has 256 bytes, too few for torch.float32 \[128\]"):
        llm.update_weights({"update_info": info})
    del short
    with pytest.raises(CheckpointError, match="the memory of its handle is gone"):
        llm.update_weights({"update_info": info})
    with pytest.raises(MissingWeightsError):
        llm.load_weights([(NORM, torch.ones(128))])
