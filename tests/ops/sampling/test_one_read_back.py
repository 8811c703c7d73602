"""A step's tokens are chosen with one read-back, whatever its rows ask for: counted on the meta device; and what is
computed so has the bits of the way that looks at values as it goes, which the CPU takes.
"""

import numpy as np
import pytest
import torch
from device_waits import DeviceWaits
from test_sampler import EOS, HOSTILE, KINDS, REPORTING, VOCAB_SIZE, row, sharded

import spmd_worker.ops.sampling.read_back as read_back_module
from spmd_worker.base.config.schema import LOGPROBS_MODES
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.kernels.top_k import top_k, top_k_of_rows
from spmd_worker.ops.sampling.sampler import Sampler
from spmd_worker.ops.sampling.token_masks import NO_MASKS, TokenMasks
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.replica.grammar.step_masks import StepMasks
from spmd_worker.replica.sequence.sampling_params import ALL_LOGPROBS

META = torch.device("meta")
RULES = {"timestamps": {"first_token_id": 150, "end_token_id": 9}, "first_tokens": [3, 4]}
RULED = [{"temperature": each, "token_rules": RULES} for each in (0.0, 1.0)]
ASKING = [
    *KINDS,
    *REPORTING,
    *HOSTILE,
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.3, "frequency_penalty": -0.2},
    {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": {3: 1.0, 4: -2.0}, "logprobs": 4, "seed": 7},
    {"temperature": 0.0, "allowed_token_ids": [1, 2], "bad_words_ids": [[1], [7, 2]], "min_tokens": 9, "logprobs": 1},
    {"temperature": 1.0, "logprobs": ALL_LOGPROBS},
    *RULED,
]
KINDS_OF_ROWS = {
    "greedy": [{"temperature": 0.0}],
    "drawn": [{"temperature": 1.0}],
    "filtered": [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}],
    "processed": [{"repetition_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": {1: 2.0}, "min_tokens": 9}],
    "masked": [{"allowed_token_ids": [1, 2]}, {"bad_words_ids": [[1], [7, 2]]}],
    "ruled": [*RULED, {"logprobs": 2, "token_rules": RULES}],
    "reported": [{"logprobs": 3}, {"logprobs": 0, "top_k": 4}, {"logprobs": ALL_LOGPROBS}],
    "all": ASKING,
}


class TwinGroup(GroupHandle):
    """Two ranks that have the same."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack((tensor, tensor))


GROUPS = [single_group(), TwinGroup(ranks=(0, 1), rank=1, group=None)]


def rows_of(kinds: list[dict[str, object]]) -> list[SampleRow]:
    return [row(stream=index, **kind) for index, kind in enumerate(kinds)]


def masks_of(num_rows: int) -> TokenMasks:
    """Of every third row; the fifth has no token."""
    indices = tuple(range(0, num_rows, 3))
    allowed = np.full((len(indices), 8), 0x0F0F0F0F, dtype=np.int32)
    return TokenMasks.of_step(StepMasks(indices, allowed, 0, (4,) if num_rows > 4 else ()), META)


def waits_of(
    rows: list[SampleRow], group: GroupHandle, mode: str = "raw_logprobs", masks: TokenMasks = NO_MASKS
) -> DeviceWaits:
    """Of one step, from its logits to its tokens."""
    size = VOCAB_SIZE if group.size == 1 else 128
    logits = torch.empty((len(rows), size), device=META)
    sampler = Sampler(group, 128 * group.rank, VOCAB_SIZE, EOS, mode, ReferenceKernels())
    with DeviceWaits() as waits:
        found = sampler.sample(logits, rows, masks)
    assert len(found.token_ids) == len(rows)
    return waits


@pytest.mark.gate("all-of two", "reported-alone", "filtered-*", "processed-*", "masked-*", "ruled-*")
@pytest.mark.parametrize("group", GROUPS, ids=["alone", "of two"])
@pytest.mark.parametrize("name", KINDS_OF_ROWS)
def test_sampling_has_one_read_back_and_no_waits(name: str, group: GroupHandle):
    rows = rows_of(KINDS_OF_ROWS[name])
    for mode in LOGPROBS_MODES if name in ("reported", "all") else LOGPROBS_MODES[:1]:
        for masks in (NO_MASKS, masks_of(len(rows))):
            waits = waits_of(rows, group, mode, masks)
            assert (waits.read_backs, waits.uploads) == (["_to_copy"], []), mode


class ReadingKernels(ReferenceKernels):
    """Looks at a value, or sends a number, as a careless kernel would."""

    def __init__(self, look: str) -> None:
        self.look = look

    def prob_sums(self, logits: torch.Tensor, largest: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        PLANTED[self.look](largest)
        return super().prob_sums(logits, largest, factors)


PLANTED = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: torch.unique(x),
    "upload": lambda x: torch.ones(3).to(x.device),
    "number": lambda x: torch.where(x > 0, x, torch.tensor(0.0)),
    "places": lambda x: x[torch.tensor([0])],
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_wait_is_counted(monkeypatch: pytest.MonkeyPatch, planted: str):
    monkeypatch.setattr(ReadingKernels, "__init__", lambda self: setattr(self, "look", planted))
    monkeypatch.setitem(globals(), "ReferenceKernels", ReadingKernels)
    waits = waits_of(rows_of([{"temperature": 1.0}]), single_group())
    is_upload = planted in ("upload", "number", "places")
    assert (len(waits.read_backs), len(waits.uploads)) == (1 + (not is_upload), int(is_upload))


def test_large_reports_take_one_more_read_back(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(read_back_module, "_MAX_BYTES", 4 * 8 * VOCAB_SIZE)
    rows = rows_of([{"logprobs": ALL_LOGPROBS}] * 3)
    assert waits_of(rows, single_group()).read_backs == ["_to_copy"] * 3


@pytest.fixture
def _reads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as if it were a device whose values the host cannot look at for nothing."""
    monkeypatch.setattr(read_back_module, "_FREE_ON", ())


def broken(logits: torch.Tensor) -> torch.Tensor:
    """With rows that are not finite, some of them everywhere."""
    logits = logits.clone()
    for start, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[start::12, 50:] = value
        logits[start + 3 :: 24, :] = value
    return logits


@pytest.mark.gate("2-tempered_logprobs", "1-*")
@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("size", [1, 2])
def test_deferred_reads_have_the_bits_of_immediate_reads(monkeypatch: pytest.MonkeyPatch, size: int, mode: str):
    rows = rows_of(ASKING * 2)
    logits = 2 * torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    logits[::2, [0, 26, 27, 105, 106, 210]] = 3.5
    logits[::5, :100] = -torch.inf
    for values in (logits, broken(logits)):
        expected = sharded(values, rows, size, mode)
        with monkeypatch.context() as patch:
            patch.setattr(read_back_module, "_FREE_ON", ())
            assert repr(sharded(values, rows, size, mode)) == repr(expected)
    # Negative control: others than the likeliest are seen.
    expected = sharded(logits, rows, size, mode)
    monkeypatch.setattr(read_back_module, "_FREE_ON", ())
    largest = torch.topk
    monkeypatch.setattr(torch, "topk", lambda values, count, dim: largest(values.roll(1, dim), count, dim=dim))
    assert sharded(logits, rows, size, mode)[0] != expected[0]


@pytest.mark.usefixtures("_reads_count")
@pytest.mark.parametrize("num_kept", [0, 3, 40, 300])
@pytest.mark.parametrize("count", [1, 5, 299, 301])
def test_top_k_of_rows_equals_top_k(num_kept: int, count: int):
    generator = torch.Generator().manual_seed(num_kept)
    logits = torch.full((4, 300), -torch.inf)
    for values in logits:
        values[torch.randperm(300, generator=generator)[:num_kept]] = torch.randint(
            -2, 3, (num_kept,), generator=generator
        ).float()
    logits[1, :7] = -0.0
    logits[2, ::9] = torch.nan
    for dtype in (torch.float32, torch.bfloat16):
        found = top_k_of_rows(logits.to(dtype), count)
        assert found.shape == (4, count, 2)
        for values, pairs in zip(logits, found.tolist(), strict=True):
            listed = [(int(token_id), value) for value, token_id in pairs if token_id >= 0]
            assert listed == top_k(values, count)[: len(listed)]
            assert len(listed) >= min(count, 300) - int(values.isnan().sum())


@pytest.mark.usefixtures("_reads_count")
def test_unread_value_is_not_available():
    read_back = read_back_module.ReadBack()
    numbers = torch.tensor([[1.5, -0.0], [torch.nan, 3.0]], dtype=torch.float64)
    awaited = read_back.later(lambda *tensors: tensors, numbers, torch.tensor([2**62, -1]), numbers[:0])
    with pytest.raises(AssertionError, match=r"^ReadBack\.read .*not called"):
        _ = awaited.value
    read_back.read()
    for found, given in zip(awaited.value, (numbers, torch.tensor([2**62, -1]), numbers[:0]), strict=True):
        assert found.shape == given.shape
        assert torch.equal(found.view(torch.int64), given.view(torch.int64))
