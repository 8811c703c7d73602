"""Mixers with recurrent states whose rows have drafts: outputs, states and tails have the bits of tokens one by one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from native_builds import native
from torch import Tensor

from kv_cache.cache_spec import CacheSpec
from kv_cache.layer_states import LayerStates
from kv_cache.state_engine import StateEngine
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.delta_net import DeltaNet
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.model.layers.mamba import Mamba
from spmd_worker.model.layers.mamba1 import Mamba1
from spmd_worker.model.layers.short_conv import ShortConv
from spmd_worker.model_config.layer_config import (
    ConvConfig,
    DeltaConfig,
    LayerConfig,
    LayerShare,
    Mamba1Config,
    MambaConfig,
    NormConfig,
)
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.cpu.recurrent import NativeRecurrentKernels
from spmd_worker.ops.kernels.recurrent import RecurrentKernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.replica.mirror.records import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.memory.estimate import state_layer
from spmd_worker.worker.runner import state_rows
from spmd_worker.worker.runner.state_rows import draft_replay, state_segments

HIDDEN, MOST_DRAFTS = 32, 4
CPU = torch.device("cpu")
DELTA = DeltaConfig(num_key_heads=4, num_value_heads=4, key_size=8, value_size=8, norm_eps=1e-3)
BARE = LayerConfig(1, 1, 16, 8, 1.0, NormConfig())
LAYERS: dict[str, LayerConfig] = {
    "conv": replace(BARE, mixer="conv", conv=ConvConfig(3, has_bias=True)),
    "delta of heads": replace(BARE, mixer="delta", delta=replace(DELTA, num_key_heads=2)),
    "delta of channels": replace(BARE, mixer="delta", delta=replace(DELTA, is_per_channel=True, gate_rank=8)),
    "mamba": replace(BARE, mixer="mamba", mamba=MambaConfig(4, 16, 2, 12, 1e-3, multipliers=(1.0, 0.9, 1.1, 0.8, 0.7))),
    "mamba1": replace(BARE, mixer="mamba1", mamba1=Mamba1Config(64, 12, 8, norm="bare", norm_eps=1e-3)),
}
MIXERS: dict[str, type[Any]] = {"conv": ShortConv, "delta": DeltaNet, "mamba": Mamba, "mamba1": Mamba1}

Part = tuple[int, int, int]
"""Tokens that a row is given in a step, and its drafts behind them: first right ones, then wrong ones."""
STEPS: list[list[Part | None]] = [
    [(3, 0, 0), (1, 0, 0), (2, 0, 0)],
    [(1, 4, 0), (1, 1, 2), (5, 0, 0)],
    [(1, 0, 2), (1, 0, 0), (1, 2, 2)],
    [(1, 1, 0), None, (1, 3, 0)],
    [(1, 0, 0), (3, 0, 0), (1, 0, 1)],
    [(1, 2, 0), (1, 3, 1), None],
    [(1, 0, 0), (1, 2, 1), (1, 4, 0)],
]
"""Every lag from 0 to the most drafts, beside prompts; rows that pause keep theirs."""


class RowByRow(ReferenceKernels):
    """Products of a row do not depend on the rows beside it."""

    def __init__(self, recurrent: RecurrentKernels) -> None:
        self._recurrent = recurrent

    def recurrent_kernels(self) -> RecurrentKernels:
        return self._recurrent

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        del out
        return torch.cat([F.linear(row, weight, bias) for row in x.split(1)])


KERNELS: dict[str, Callable[[], RecurrentKernels]] = {
    "reference": ReferenceRecurrentKernels,
    "native": lambda: NativeRecurrentKernels(native()),
}


def new_mixer(name: str, kernels: str, dtype: torch.dtype) -> Any:
    context = LayerContext(single_group(), RowByRow(KERNELS[kernels]()), SdpaBackend(), dtype, CPU)
    mixer = MIXERS[LAYERS[name].mixer](context, LAYERS[name], HIDDEN)
    generator = torch.Generator().manual_seed(5)
    for parameter in mixer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / max(parameter.shape[-1], 4) ** 0.5)
    return mixer


def new_states(name: str, num_slots: int, dtype: torch.dtype, most_drafts: int) -> LayerStates:
    """Full of NaN, as the run allocates them."""
    layer = state_layer(LAYERS[name], HIDDEN, LayerShare(1, 1, 1), most_drafts)
    engine = StateEngine(CacheSpec((None,), dtype.itemsize, 16, (layer,)), num_slots, 0, dtype, CPU)
    engine.allocate()
    for each in engine.tensors:
        each.fill_(torch.nan)
    (states,) = engine.layers
    assert states is not None
    return states


def step(mixer: Any, states: LayerStates, x: Tensor, scheduled: Sequence[ScheduledSequence]) -> list[Tensor]:
    """Outputs of each row."""
    most_drafts = 0 if states.saved is None else states.saved.shape[1]
    counts, sequences = [each.num_scheduled_tokens for each in scheduled], [each.sequence for each in scheduled]
    starts, firsts, nothing = (0, *accumulate(counts)), [each.num_computed_tokens for each in sequences], torch.empty(0)
    metadata = AttentionMetadata(
        *(starts, (), nothing, nothing, nothing),
        segments=state_segments(sequences, starts, firsts, CPU),
        replay=state_rows.draft_replay(scheduled, most_drafts, CPU),
    )
    return list(mixer(x, LayerStep((), None, metadata, states=states)).split(counts))


def kept(states: LayerStates, slot: int) -> list[Tensor]:
    return [each[slot].clone() for each in (states.state, states.tail) if each is not None]


def sequence(row: int) -> MirroredSequence:
    """The row is in slot row + 1; the slots around are nobody's."""
    request = Request(RequestId(row), (0,), SamplingParams(), row)
    return MirroredSequence(request, 0, [], [], 0, 0, state_slot=row + 1)


@dataclass
class Drafted:
    """Rows in steps with drafts, and what they are one by one."""

    mixer: Any
    states: LayerStates
    inputs: list[Tensor]
    sequences: list[MirroredSequence] = field(default_factory=lambda: [sequence(row) for row in range(3)])

    def run(self, parts: Sequence[Part | None]) -> list[tuple[int, Tensor, list[Tensor]]]:
        """Outputs of each row's given tokens and right drafts, and what its slot then holds."""
        scheduled, inputs = [], []
        for row, part in enumerate(parts):
            if part is not None:
                given, right, wrong = part
                own, first = self.sequences[row], self.sequences[row].num_computed_tokens
                own.draft_token_ids = (7,) * (right + wrong)
                scheduled.append(ScheduledSequence(own, given + right + wrong, 1))
                inputs += [self.inputs[row][first : first + given + right], self.inputs[row].flip(0)[:wrong]]
        found = step(self.mixer, self.states, torch.cat(inputs), scheduled)
        results = []
        for (own, _, _), part, outputs in zip(scheduled, filter(None, parts), found, strict=True):
            given, right, _ = part
            results.append((own.state_slot - 1, outputs[: given + right], kept(self.states, own.state_slot)))
            own.num_computed_tokens += given + right
            own.num_lagging_tokens = right
        return results


def one_by_one(mixer: Any, name: str, inputs: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    """Outputs of a row alone without drafts, and what its slot holds after each token."""
    states, own, outputs, after = new_states(name, 3, inputs.dtype, 0), sequence(0), [], []
    assert states.saved is None
    for x in inputs.split(1):
        outputs += step(mixer, states, x, [ScheduledSequence(own, 1, 1)])
        after.append(kept(states, 1))
        own.num_computed_tokens += 1
    return torch.cat(outputs), after


def differs(name: str, kernels: str, dtype: torch.dtype) -> str:
    """The first difference between the steps with drafts and tokens one by one."""
    mixer, generator = new_mixer(name, kernels, dtype), torch.Generator().manual_seed(6)
    inputs = [torch.randn(24, HIDDEN, generator=generator).to(dtype) for _ in range(3)]
    expected = [one_by_one(mixer, name, each) for each in inputs]
    states = new_states(name, 5, dtype, MOST_DRAFTS)
    drafted = Drafted(mixer, states, inputs)
    for number, parts in enumerate(STEPS):
        befores = [(each.num_computed_tokens, part) for each, part in zip(drafted.sequences, parts)]
        for row, outputs, slot in drafted.run(parts):
            first, part = befores[row]
            assert part is not None
            if not torch.equal(outputs, expected[row][0][first : first + len(outputs)]):
                return f"outputs of row {row} in step {number}"
            if not all(map(torch.equal, slot, expected[row][1][first + part[0] - 1])):
                return f"state of row {row} after step {number}"
    assert all(bool(each[[0, 4]].isnan().all()) for each in states if each is not None)
    return ""


@pytest.mark.gate("*-reference-float32", "*-native-bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", LAYERS)
@torch.inference_mode()
def test_drafted_rows_equal_tokens_one_by_one(name: str, kernels: str, dtype: torch.dtype) -> None:
    assert differs(name, kernels, dtype) == ""


def forget_lag(scheduled: Sequence[ScheduledSequence], *others: Any) -> Any:
    for each in scheduled:
        each.sequence.num_lagging_tokens = 0
    return draft_replay(scheduled, *others)


def keep_drafts(*arguments: Any) -> Any:
    found = draft_replay(*arguments)
    return None if found is None else replace(found, segments=replace(found.segments, kept=None))


def save_in_one_place(*arguments: Any) -> Any:
    found = draft_replay(*arguments)
    return None if found is None else replace(found, saved_rows=found.saved_rows // MOST_DRAFTS * MOST_DRAFTS)


@pytest.mark.parametrize("mistake", [forget_lag, keep_drafts, save_in_one_place])
@torch.inference_mode()
def test_mistakes_of_replays_are_seen(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_rows, "draft_replay", mistake)
    for name in LAYERS:
        assert differs(name, "native", torch.float32), name


@pytest.mark.parametrize("name", LAYERS)
def test_planned_inputs_of_drafts_are_the_mixers(name: str) -> None:
    """Shares of each rank, which may have a part of a key head, or of a group."""
    for size in (1, 2, 4):
        group = GroupHandle(ranks=tuple(range(size)), rank=size - 1, group=None)
        context = LayerContext(group, ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("meta"))
        mixer = MIXERS[LAYERS[name].mixer](context, LAYERS[name], HIDDEN)
        planned = state_layer(LAYERS[name], HIDDEN, LayerShare(1, 1, 1, num_ranks=size), MOST_DRAFTS)
        assert planned is not None
        assert planned.saved == (MOST_DRAFTS, num_inputs(mixer)), size
        assert replace(planned, saved=(0, 0)) == state_layer(LAYERS[name], HIDDEN, LayerShare(1, 1, 1, num_ranks=size))


def num_inputs(mixer: Any) -> int:
    """Channels of the convolution, and gates of steps."""
    if isinstance(mixer, ShortConv):
        return len(mixer.conv.weight)
    if isinstance(mixer, Mamba1):
        return len(mixer.conv1d.weight)
    if isinstance(mixer, Mamba):
        return len(mixer.conv1d.weight) + len(mixer.gates.dt_bias)
    return len(mixer.conv.weight) + len(mixer.gates.rates()) + len(mixer.gates.dt_bias)
