"""Drafts for models with recurrent states: answers, and the states that are kept, have the bits they have without.

Each run checks queues, tables, pools and slots against each other after every step (SPMD_WORKER_CHECK).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from planted_drafts import planted
from safetensors.torch import load_file
from state_models import state_folder
from state_rows import SETTINGS, answers_of, state_rows
from torch import Tensor

from kv_cache.state_engine import StateEngine
from spmd_worker import LLM, SamplingParams
from spmd_worker.ops.attention.draft_replay import DraftReplay
from spmd_worker.replica.scheduler import scheduler as scheduler_module
from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.replica.scheduler.updates import Decisions
from spmd_worker.replica.sequence.sequence import SequenceKey

pytestmark = pytest.mark.usefixtures("checks_after_every_step")

IN_GATE = ("lfm2", "qwen3_5", "nemotron")
OTHERS = ("lfm2_moe", "lfm3", "olmo_hybrid", "granite", "falcon", "kimi_linear", "qwen4")
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "max_step_tokens": 256}
MANY = {**SETTINGS, "num_blocks": 300, "num_state_snapshots": 60}
FEW = {**SETTINGS, "num_blocks": 23, "max_num_seqs": 6}
WAYS: dict[str, dict[str, Any]] = {
    "plenty": MANY,
    "chunks of 17 tokens, each row repeated": {**MANY, "max_num_batched_tokens": 17, "verify_steps": 1},
    "recompute": {**FEW, "preemption_mode": "recompute"},
    "swap": {**FEW, "preemption_mode": "swap", "swap_space": 1.0},
    "ahead of ids": {**MANY, "async_scheduling": True},
    "no prefix cache": {**MANY, "enable_prefix_caching": False},
    "blocks of 128": {**MANY, "block_size": 128, "num_blocks": 20},
}
GATE = {("lfm2", "chance", way) for way in WAYS if way not in ("no prefix cache", "blocks of 128")}
GATE |= {("qwen3_5", "right", "plenty"), ("nemotron", "right", "plenty"), ("qwen3_5", "wrong", "plenty")}
CASES = [
    pytest.param(*case, marks=[] if case in GATE else pytest.mark.stress)
    for case in product(IN_GATE + OTHERS, ("right", "wrong", "chance"), WAYS)
]

Answers = list[Any]
Prompts = list[dict[str, list[int]]]


def first_turn(num_samples: int = 1) -> tuple[Prompts, list[SamplingParams]]:
    """Rows of which two answers pass a multiple of 64."""
    rows, params = state_rows(num_samples=num_samples)
    return rows, [replace(each, max_tokens=70 if index % 3 == 1 else 14) for index, each in enumerate(params)]


def next_turn(rows: Prompts, answers: Answers) -> Prompts:
    """Each row, the answer of its first sample, and a few tokens more."""
    tokens = [(*row["prompt_token_ids"], *answer[0][0], 7, 8, 9) for row, answer in zip(rows, answers, strict=True)]
    return [{"prompt_token_ids": list(each)} for each in tokens]


def kept_states(llm: LLM) -> dict[bytes, list[Tensor]]:
    """States and tails of all snapshots, by name; not what drafts left beside them."""
    engine = llm.llm_engine
    layers = engine.executor.driver_worker.worker.running.caches.engine.states.layers
    names = engine.scheduler.state_slots._pool._index
    parts = [(layer.state, layer.tail, layer.second_tail) for layer in layers if layer is not None]
    tensors = [each for layer in parts for each in layer if each is not None]
    return {name: [each[slot].clone() for each in tensors] for name, slot in names.items()}


@dataclass(frozen=True)
class Turns:
    """Answers of two turns, the states kept after the first, and the prompt tokens of the second that were found."""

    answers: tuple[Answers, Answers]
    states: dict[bytes, list[Tensor]]
    found: list[int]
    counters: SchedulerCounters


def two_turns(kind: str, settings: dict[str, Any], num_samples: int = 1, turn: Prompts | None = None) -> Turns:
    rows, params = first_turn(num_samples)
    with LLM(state_folder(kind), **settings) as llm:
        first = answers_of(llm.generate(rows, params, use_tqdm=False))
        states = kept_states(llm)
        later = llm.generate(turn or next_turn(rows, first), params, use_tqdm=False)
        found = [each.num_cached_tokens or 0 for each in later]
        return Turns((first, answers_of(later)), states, found, llm.llm_engine.counters)


@cache
def plain(kind: str, num_samples: int = 1) -> Turns:
    return two_turns(kind, MANY, num_samples)


def right(kind: str, num_samples: int, key: SequenceKey, num_outputs: int, most: int) -> Sequence[int]:
    """The row's next tokens; requests of the second turn are numbered after those of the first."""
    turn, row = divmod(key.request_id, 6)
    token_ids: list[int] = plain(kind, num_samples).answers[turn % 2][row][key.sample_index][0]
    return token_ids[num_outputs : num_outputs + most]


def drafted(kind: str, drafts: str, way: str, num_samples: int = 1) -> Turns:
    settings = {**WAYS[way], "speculative_config": DRAFTS}
    turn = next_turn(first_turn(num_samples)[0], plain(kind, num_samples).answers[0])
    with planted(partial(right, kind, num_samples), drafts):
        return two_turns(kind, settings, num_samples, turn)


@pytest.mark.gate("lfm2-chance-swap", "qwen3_5-wrong-plenty", "nemotron-right-plenty")
@pytest.mark.guarantee("Drafts leave no trace in a recurrent state, accepted or not")
@pytest.mark.parametrize(("kind", "drafts", "way"), CASES)
def test_drafts_change_no_state(kind: str, drafts: str, way: str) -> None:
    num_samples = 1 + 2 * (way in ("recompute", "swap"))
    drafting, expected = drafted(kind, drafts, way, num_samples), plain(kind, num_samples)
    counters = drafting.counters
    assert drafting.answers == expected.answers
    assert counters.num_drafted_tokens > 100
    assert (counters.num_accepted_tokens == 0) == (drafts == "wrong")
    assert bool(counters.num_preemptions) == (num_samples > 1)
    assert bool(counters.num_swapped_in) == (way == "swap")
    if WAYS[way] is MANY:
        # Answers have snapshots where they have them without drafts.
        assert drafting.states.keys() == expected.states.keys()
        assert drafting.found == expected.found
    for name in drafting.states.keys() & expected.states.keys():
        assert all(map(torch.equal, drafting.states[name], expected.states[name]))


class ForgetsSavedInputs(StateEngine):
    """Moves a row's states to the host and back, and its drafts' inputs not."""

    def execute(self, state_ops: Any) -> None:
        saved = [layer.saved.clone() for layer in self.layers if layer is not None and layer.saved is not None]
        super().execute(state_ops)
        for layer, before in zip([each for each in self.layers if each is not None], saved, strict=True):
            assert layer.saved is not None
            layer.saved.copy_(before)


def forget_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd_worker.worker.loaded_model.StateEngine", ForgetsSavedInputs)


def keep_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    make = DraftReplay.__init__

    def keeps_all(self: DraftReplay, segments: Any, *others: Any, **named: Any) -> None:
        make(self, replace(segments, kept=None), *others, **named)

    monkeypatch.setattr(DraftReplay, "__init__", keeps_all)


def forget_lagging(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = DraftReplay.extend

    def extends(self: DraftReplay, inputs: Tensor, saved: Tensor) -> Tensor:
        extended = extend(self, inputs, saved)
        extended[self.lagging_rows] = 0
        return extended

    monkeypatch.setattr(DraftReplay, "extend", extends)


@pytest.mark.gate("keep_drafts-plenty")
@pytest.mark.control("Drafts leave no trace in a recurrent state, accepted or not")
@pytest.mark.parametrize(
    ("broken", "way"), [(forget_swaps, "swap"), (keep_drafts, "plenty"), (forget_lagging, "plenty")]
)
def test_trace_of_drafts_is_seen(broken: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_samples = 1 + 2 * (way == "swap")
    expected = plain("lfm2", num_samples).answers
    broken(monkeypatch)
    assert drafted("lfm2", "chance", way, num_samples).answers != expected


ON_RANKS = """
import json, os, sys
from pathlib import Path
from planted_drafts import planted
from state_rows import SETTINGS, answers_of, state_rows
from spmd_worker import LLM

given = json.loads(sys.argv[1])
rows, params = state_rows(4)
found = {}
for layout, folder in given:
    def answers(**options):
        with LLM(folder, **{**SETTINGS, **layout, **options}) as llm:
            answered = answers_of(llm.generate(rows, params, use_tqdm=False))
            return answered, llm.llm_engine.counters.num_accepted_tokens

    plain, _ = answers()
    right = lambda key, num_outputs, most: plain[key.request_id][0][0][num_outputs : num_outputs + most]
    with planted(right, "chance"):
        drafted, num_accepted = answers(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    found[f"{layout} {folder}"] = [drafted == plain, num_accepted > 20]
Path(sys.argv[2], os.environ["RANK"]).write_text(json.dumps(found))
"""


ON_SHARDS = ("qwen3_5",)
ON_STAGES = ("nemotron",)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("on_shards", "on_stages"),
    [
        pytest.param(ON_SHARDS, ON_STAGES, id="some"),
        pytest.param(
            ("lfm2", "nemotron", *OTHERS), ("lfm2", *ON_SHARDS, *OTHERS), id="others", marks=pytest.mark.stress
        ),
    ],
)
def test_drafts_change_no_state_on_ranks(
    on_shards: tuple[str, ...], on_stages: tuple[str, ...], tmp_path: Path
) -> None:
    """Shares of heads and channels, and stages of which one may have no state."""
    layouts = (("tensor_parallel_size", on_shards), ("pipeline_parallel_size", on_stages))
    given = [({name: 2}, str(state_folder(kind))) for name, kinds in layouts for kind in kinds]
    completed = ranks.run_ranks(ON_RANKS, 2, 600, [json.dumps(given), tmp_path])
    assert completed.returncode == 0, completed
    for rank in range(2):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert found == {f"{layout} {folder}": [True, True] for layout, folder in given}, rank


def answer_over_new_weights(settings: dict[str, Any], num_outputs: int) -> tuple[Answers, int]:
    """Answer to a row that is kept while the gates of its states change, once it has so many tokens, and lags if it may
    have drafts; and the number of its tokens then.
    """
    folder, (rows, params) = state_folder("qwen3_5"), first_turn()
    weights = load_file(folder / "model.safetensors")
    with LLM(folder, **MANY, **settings) as llm:
        engine, outputs = llm.llm_engine, []
        engine.add_request("0", rows[1], params[1])
        while not engine.scheduler.running:
            engine.step()
        (sequence,) = engine.scheduler.running
        while len(sequence.output_token_ids) < num_outputs or (settings and not sequence.num_lagging_tokens):
            engine.step()
        llm.pause_generation("keep", clear_cache=False)
        num_kept = len(sequence.output_token_ids)
        llm.update_weights((name, each * (1.3 if "A_log" in name else 1.0)) for name, each in weights.items())
        llm.resume_generation()
        while engine.has_unfinished_requests():
            outputs += engine.step()
        return answers_of(outputs), num_kept


@pytest.mark.gate("True")
@pytest.mark.parametrize("catches_up", [True, False])
def test_kept_states_are_of_old_weights(catches_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: accepted drafts go through the states of the new ones where a pause lets rows lag."""
    token_ids = plain("qwen3_5").answers[0][1][0][0]
    with monkeypatch.context() as patch, planted(lambda key, num, most: token_ids[num : num + most], "right"):
        if not catches_up:
            patch.setattr(scheduler_module, "catch_up", lambda *given: Decisions())
            patch.setattr(scheduler_module, "lagging", lambda queues: [])
        found, num_kept = answer_over_new_weights({"speculative_config": DRAFTS}, 5)
    # A pause takes a step.
    expected = answer_over_new_weights({}, num_kept - 1)
    assert expected[1] == num_kept
    assert (found == expected[0]) == catches_up
