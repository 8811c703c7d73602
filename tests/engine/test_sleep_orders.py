"""Every order of sleep, wake-up, new weights, requests and close: a model of what must happen beside an engine to which
it does.

The model knows which weights the engine must answer by, and the sentence with which it must refuse; the answers are
those of plain engines that never slept and never saw other weights. After level 2 whatever was dropped is poisoned, so
that memory that happens to be what it was shows too. Then the same life with one guard taken away: each is noticed.
"""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from run_folder import made_once
from safetensors.torch import load_file, save_file
from stress_seed import SEED
from test_weight_updates import GREEDY, MODEL, NORM, PROMPTS, answers, in_words, new_tensors, open_llm, trainers_model
from torch import Tensor

from spmd_worker import LLM
from spmd_worker.engine.life import Life
from spmd_worker.engine.weight_updates import WeightUpdates
from spmd_worker.model.weights.weight_update import WeightUpdate

TAGS = ("weights", "kv_cache")
PARTS = ("norm", "rest")
"""What is loaded at a time: one tensor, or all others."""
COMPLETION = [3, 9, 4]

CLOSED = r"^this LLM was closed: make a new one$"
HELD = r"^a weight update was begun: call finish_weight_update before anything is computed$"
NOT_HELD = r"^no weight update was begun: call start_weight_update first$"
UNANSWERED = (
    r"^\d+ requests of llm_engine.add_request or enqueue are not answered yet: call llm_engine.step until they are, or "
    r"wait_for_completion$"
)
ANSWERING = r"^\d+ requests are being answered with the weights that are there: "
ASLEEP = (
    r"^this LLM is asleep \((weights|kv_cache|weights and kv_cache)\): call wake_up\(\) before anything is computed$"
)
NO_WEIGHTS = r"^the weights are asleep: call wake_up\(tags=\['weights'\]\) before new ones are loaded$"
MISSING = r"^(\d+ of \d+ weights were not|none of the \d+ weights was) loaded"


@cache
def tensors_of(version: int) -> dict[str, Tensor]:
    return new_tensors() if version else load_file(MODEL / "model.safetensors")


def pairs(part: str, version: int) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in tensors_of(version).items() if (name == NORM) == (part == "norm")]


@cache
def expected(norm: int, rest: int) -> tuple[list[Any], list[float]]:
    """Answers and scores of an engine whose files have these weights."""

    def write(folder: Path) -> None:
        shutil.copytree(MODEL, folder)
        mixed = dict([*pairs("rest", rest), *pairs("norm", norm)])
        content = {name: tensor.contiguous() for name, tensor in mixed.items()}
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})

    with open_llm(made_once(f"demo model with norm {norm} and rest {rest}", write)) as llm:
        return answers(llm), scores(llm)


def scores(llm: LLM) -> list[float]:
    return llm.score_tokens([PROMPTS[0]], [COMPLETION])[0]


class SleepMachine(RuleBasedStateMachine):
    """`written` is the version of each part that is in memory, None for what was dropped; `loaded` are the parts that
    came since the last commit, None where no update is open; `held` whether an update that was begun is partial.
    """

    @initialize()
    def make(self) -> None:
        self.llm = open_llm()
        self.engine = self.llm.llm_engine
        self.is_closed = False
        self.asleep: set[str] = set()
        self.written: dict[str, int | None] = dict.fromkeys(PARTS, 0)
        self.loaded: set[str] | None = None
        self.held: bool | None = None
        self.num_added = self.num_admitted = 0
        self.outputs: dict[str, Any] = {}

    # The model.

    @property
    def is_missing(self) -> bool:
        return self.loaded is not None and len(self.loaded) < len(PARTS)

    def first_reason(self, *reasons: tuple[bool, str]) -> str | None:
        return next((words for holds, words in ((self.is_closed, CLOSED), *reasons) if holds), None)

    def why_not_compute(self) -> str | None:
        return self.first_reason((bool(self.num_added), UNANSWERED), *self.why_not_step())

    def why_not_step(self) -> tuple[tuple[bool, str], ...]:
        return (bool(self.asleep), ASLEEP), (self.held is not None, HELD), (self.is_missing, MISSING)

    def attempt(self, call: Callable[[], Any], reason: str | None) -> Any:
        """What `call` returns; None where it must raise for this reason, and did."""
        if reason is None:
            return call()
        with pytest.raises(RuntimeError, match=reason):
            call()
        return None

    def commit(self) -> None:
        if not self.is_missing:
            self.loaded = None

    def must_answer(self) -> tuple[list[Any], list[float]]:
        norm, rest = self.written["norm"], self.written["rest"]
        assert norm is not None, self.written
        assert rest is not None, self.written
        return expected(norm, rest)

    # What is done.

    @rule(level=st.sampled_from([1, 2, 2, 3]))
    def sleep(self, level: int) -> None:
        if level == 3 and not self.is_closed:
            with pytest.raises(ValueError, match=r"^level=3 must be 0 "):
                self.llm.sleep(level)
            return
        reason = self.first_reason(
            (bool(self.num_added), UNANSWERED),
            (self.held is not None, HELD),
            (level == 1 and self.is_missing, MISSING),
        )
        self.attempt(lambda: self.llm.sleep(level), reason)
        if reason is None:
            self.asleep = set(TAGS)
            if level == 2:
                self.written = dict.fromkeys(PARTS)
            self.loaded = None

    @rule(tags=st.sampled_from([None, ["weights"], ["kv_cache"], ["kv_cache", "weights"], []]))
    def wake_up(self, tags: list[str] | None) -> None:
        reason = self.first_reason((bool(self.num_added), UNANSWERED), (self.held is not None, HELD))
        self.attempt(lambda: self.llm.wake_up(tags), reason)
        if reason is not None:
            return
        self.commit()
        waking = self.asleep & set(TAGS if tags is None else tags)
        self.asleep -= waking
        if "weights" in waking and None in self.written.values():
            self.loaded = set()
        self.poison(waking)

    def poison(self, waking: set[str]) -> None:
        if "weights" in waking and self.loaded is not None:
            for held in trainers_model(self.llm).weights.held.values():
                held.write(torch.full(held.shape, torch.nan))
        if "kv_cache" in waking:
            self.engine.model_executor.driver_worker.worker.running.caches.engine.tensors[0].fill_(torch.nan)

    @rule(
        parts=st.sampled_from([PARTS, PARTS, ("norm",), ("rest",)]),
        version=st.integers(0, 1),
        is_trainers=st.booleans(),
    )
    def load(self, parts: tuple[str, ...], version: int, is_trainers: bool) -> None:
        given = [pair for part in parts for pair in pairs(part, version)]
        may_open = self.loaded is None
        reason = self.first_reason(
            ("weights" in self.asleep, NO_WEIGHTS), (may_open and bool(self.num_admitted), ANSWERING)
        )
        if is_trainers and not self.is_closed:
            self.attempt(lambda: trainers_model(self.llm).load_weights(given), reason)
        else:
            self.attempt(lambda: self.llm.update_weights(given), reason)
        if reason is None:
            self.loaded = (self.loaded or set()) | set(parts)
            self.written |= dict.fromkeys(parts, version)

    @rule()
    def load_what_is_no_weight(self) -> None:
        call = lambda: self.llm.update_weights([("norm", tensors_of(0)[NORM])])  # noqa: E731
        if self.is_closed or "weights" in self.asleep or (self.loaded is None and self.num_admitted):
            with pytest.raises((RuntimeError, ValueError)):
                call()
            return
        with pytest.raises(ValueError, match=r"^norm: .*no such weight"):
            call()

    @rule(is_partial=st.booleans())
    def start_update(self, is_partial: bool) -> None:
        reason = self.first_reason((self.held is not None, HELD))
        self.attempt(lambda: self.llm.start_weight_update(partial=is_partial), reason)
        if reason is None:
            self.held = is_partial

    @rule()
    def finish_update(self) -> None:
        # With weights that were dropped "the others stay" is no way to end an update.
        must_be_whole = self.held is False or None in self.written.values()
        reason = self.first_reason((self.held is None, NOT_HELD), (self.is_missing and must_be_whole, MISSING))
        self.attempt(self.llm.finish_weight_update, reason)
        if not self.is_closed:
            self.held = None
        if reason is None:
            self.loaded = None

    @rule()
    def reset_prefix_cache(self) -> None:
        is_held = self.held is not None
        reason = self.first_reason((self.is_missing and not is_held, MISSING))
        self.attempt(self.llm.reset_prefix_cache, reason)
        if reason is None and not is_held:
            self.commit()

    @rule(version=st.integers(-3, 3))
    def set_weight_version(self, version: int) -> None:
        self.attempt(lambda: self.llm.set_weight_version(version), self.first_reason())

    @rule()
    def generate(self) -> None:
        reason = self.why_not_compute()
        found = self.attempt(lambda: answers(self.llm), reason)
        if reason is None:
            self.commit()
            assert found == self.must_answer()[0]

    @rule()
    def score(self) -> None:
        reason = self.why_not_compute()
        found = self.attempt(lambda: scores(self.llm), reason)
        if reason is None:
            self.commit()
            assert found == self.must_answer()[1]

    @rule()
    def add_requests(self) -> None:
        reason = self.first_reason((bool(self.asleep), ASLEEP))
        for prompt in PROMPTS if not self.num_added else ():
            token_ids = self.llm.get_tokenizer().encode(prompt)
            number = self.attempt(lambda ids=token_ids: self.engine.add_request(ids, GREEDY), reason)
            if reason is None:
                self.outputs[str(number)] = None
                self.num_added += 1

    @rule(count=st.integers(1, 9))
    def step(self, count: int) -> None:
        reason = self.first_reason(*self.why_not_step())
        for _ in range(count):
            ended = self.attempt(self.engine.step, reason)
            if reason is not None:
                return
            self.commit()
            self.num_admitted = self.num_added
            for output in ended:
                assert self.outputs[output.request_id] is None
                self.outputs[output.request_id] = output
                self.num_added = self.num_admitted = self.num_added - 1
        if self.outputs and None not in self.outputs.values():
            assert in_words(list(self.outputs.values())) == self.must_answer()[0]
            self.outputs = {}

    @rule(may_close=st.integers(0, 19))
    def close(self, may_close: int) -> None:
        # Now and then, or nearly nothing would happen to an engine that is open.
        if not may_close:
            self.llm.close()
            self.is_closed = True

    @invariant()
    def it_says_what_sleeps(self) -> None:
        if not self.is_closed:
            assert set(self.llm.sleeping_tags) == self.asleep
            assert self.llm.is_sleeping is bool(self.asleep)

    def teardown(self) -> None:
        if hasattr(self, "llm"):
            self.llm.close()


SHORT = settings(max_examples=4, stateful_step_count=40)
LONG = settings(
    max_examples=100, stateful_step_count=80, derandomize=False, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.matrix
def test_call_orders_answer_with_right_weights_or_reject():
    run_state_machine_as_test(SleepMachine, settings=SHORT)


@pytest.mark.stress
@pytest.mark.parametrize("part", range(2))
def test_many_long_orders_are(part: int):
    run_state_machine_as_test(seed(2 * SEED + part)(SleepMachine), settings=LONG)


# --- negative controls: one guard is gone, and the same life is noticed to be wrong -----------------------------------

LEGAL: list[Callable[[SleepMachine], None]] = [
    SleepMachine.generate,
    lambda life: life.load(("norm",), 1, True),
    SleepMachine.generate,
    lambda life: life.load(("rest",), 1, False),
    SleepMachine.generate,
    SleepMachine.score,
    lambda life: life.sleep(1),
    lambda life: life.wake_up(["weights"]),
    SleepMachine.add_requests,
    lambda life: life.wake_up(None),
    SleepMachine.generate,
    lambda life: life.sleep(2),
    lambda life: life.wake_up(None),
    lambda life: life.start_update(True),
    SleepMachine.generate,
    lambda life: life.load(("rest",), 0, True),
    SleepMachine.finish_update,
    SleepMachine.generate,
    lambda life: life.load(PARTS, 0, True),
    SleepMachine.add_requests,
    lambda life: life.step(2),
    lambda life: life.load(PARTS, 1, True),
    lambda life: life.step(9),
    SleepMachine.generate,
    lambda life: life.close(0),
    SleepMachine.reset_prefix_cache,
    lambda life: life.step(1),
    lambda life: life.load(PARTS, 1, False),
]


def live() -> None:
    life = SleepMachine()
    life.make()
    try:
        for act in LEGAL:
            act(life)
            life.it_says_what_sleeps()
    finally:
        life.teardown()


def test_one_life_with_most_of_it_is_right():
    live()


whole_commit = WeightUpdates.commit


def commit_untold(self: WeightUpdates, *, is_partial: bool) -> None:
    whole_commit(self, is_partial=is_partial)
    self._expected = None


NOTHING: dict[str, tuple[type, str, Any]] = {
    "coverage": (WeightUpdate, "missing", lambda self, names: []),
    "closed": (Life, "check_not_closed", lambda self: None),
    "asleep": (Life, "check_awake", lambda self: None),
    "held": (WeightUpdates, "check_not_held", lambda self: None),
    "dropped": (WeightUpdate, "wake", lambda self, were_dropped: setattr(self, "_are_weights_asleep", False)),
    "the commit is told": (WeightUpdates, "commit", commit_untold),
    "answering": (WeightUpdate, "begin", lambda self: setattr(self, "is_open", True)),
}


@pytest.mark.control("Weight updates are whole or refused")
@pytest.mark.matrix
@pytest.mark.parametrize("guard", NOTHING)
def test_a_guard_that_is_gone_is_missed(guard: str, monkeypatch: pytest.MonkeyPatch):
    owner, name, instead = NOTHING[guard]
    assert hasattr(owner, name)
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError)):
        live()
