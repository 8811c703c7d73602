"""A float32 head: sums of exact products, not rounded, the same for a row alone, on more ranks, and for the argmax."""

import pytest
import torch
from native_builds import native
from torch import Tensor

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import VocabularyParallelEmbedding, VocabularyParallelHead
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.cpu.linear import PackedKernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ranks.communicator import GroupHandle, single_group

VOCAB_SIZE, HIDDEN_SIZE = 100, 64
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def numbers(count: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def head_of(
    kernels: Kernels, dtype: torch.dtype, *, is_tied: bool, is_wide: bool = True, rank: int = 0, size: int = 1
) -> VocabularyParallelHead:
    group = GroupHandle(ranks=tuple(range(size)), rank=rank, group=None) if size > 1 else single_group()
    context = LayerContext(group, kernels, SdpaBackend(), dtype, torch.device("cpu"), has_float32_head=is_wide)
    tied_to = VocabularyParallelEmbedding(context, VOCAB_SIZE, HIDDEN_SIZE) if is_tied else None
    head = VocabularyParallelHead(context, VOCAB_SIZE, HIDDEN_SIZE, tied_to)
    shard = head.shard
    head.weight.data.zero_()
    head.weight.data[: shard.num_owned] = numbers(VOCAB_SIZE, 1, dtype)[shard.start : shard.stop]
    head.pack_weights()
    return head


KERNELS = {"native": lambda: CpuKernels(native()), "torch": PackedKernels}


@pytest.mark.guarantee("a float32 head's logits are float32 sums")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_are_float32_sums(name: str, dtype: str, is_tied: bool):
    head, hidden = head_of(KERNELS[name](), DTYPES[dtype], is_tied=is_tied), numbers(9, 2, DTYPES[dtype])
    logits = head(hidden)[:, :VOCAB_SIZE]
    exact = hidden.double() @ numbers(VOCAB_SIZE, 1, DTYPES[dtype]).double().T
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-5
    assert torch.equal(torch.cat([head(each) for each in hidden.split(1)])[:, :VOCAB_SIZE], logits)
    values, columns = head.argmax(hidden)
    assert torch.equal(values, logits.max(dim=-1).values)
    assert torch.equal(columns, logits.argmax(dim=-1))
    shards = [head_of(KERNELS[name](), DTYPES[dtype], is_tied=is_tied, rank=each, size=2) for each in (0, 1)]
    parts = [each(hidden)[:, : each.shard.num_owned] for each in shards]
    assert torch.equal(torch.cat(parts, dim=1), logits)


@pytest.mark.control("a float32 head's logits are float32 sums")
def test_plain_head_rounds_its_logits():
    hidden = numbers(9, 2, torch.bfloat16)
    head = head_of(KERNELS["native"](), torch.bfloat16, is_tied=False, is_wide=False)
    exact = hidden.double() @ numbers(VOCAB_SIZE, 1, torch.bfloat16).double().T
    assert head(hidden).dtype == torch.bfloat16
    assert (head(hidden)[:, :VOCAB_SIZE] - exact).abs().max() > 1e-2


@pytest.mark.parametrize("is_tied", [False, True])
def test_new_weights_reach_the_head(is_tied: bool):
    head, hidden = head_of(KERNELS["native"](), torch.bfloat16, is_tied=is_tied), numbers(2, 2, torch.bfloat16)
    before, rows = head(hidden), numbers(3, 7, torch.bfloat16)
    layer = head._tied_to[0] if is_tied else head
    layer.write_region("weight", ((5, 8), (0, HIDDEN_SIZE)), rows)
    changed = before.clone()
    changed[:, 5:8] = head(hidden)[:, 5:8]
    assert torch.equal(head(hidden), changed)
    assert (changed[:, 5:8] - hidden.float() @ rows.float().T).abs().max() < 1e-5
