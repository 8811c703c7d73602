"""Threads beside the one that steps: requests may come from any of them, everything else is refused in one sentence.

As a script it is one of several ranks: rank 0 is asked by threads, the others follow.
"""

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import ranks
from context_fixtures import fixture_of
from forked_child import in_child
from test_weight_updates import open_llm

from spmd_worker import LLM, RequestOutput, SamplingParams
from spmd_worker.engine.call_guard import CallGuard
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.requests import Requests

PROMPTS = [f"add {number} {7 * number % 10} =" for number in range(24)]
LIMIT_S = 240.0


def params(index: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=index, max_tokens=6, ignore_eos=True, logprobs=0)


def in_words(output: RequestOutput) -> Any:
    return [output.outputs[0].token_ids, output.outputs[0].cumulative_logprob]


def answers(llm: LLM) -> dict[str, Any]:
    outputs = llm.generate(PROMPTS, [params(index) for index in range(len(PROMPTS))], use_tqdm=False)
    return {str(index): in_words(output) for index, output in enumerate(outputs)}


llm = fixture_of(open_llm, "function")


@pytest.mark.parametrize("call", ["step", None], ids=["in step", "holding the lock"])
def test_a_forked_child_closes_without_its_parents_threads(llm: LLM, call: str | None):
    """It was refused, or waited for ever for a lock whose thread it has not."""
    calls, is_in, may_go = llm.llm_engine.calls, threading.Event(), threading.Event()

    def hold() -> None:
        with calls.lock if call is None else calls.inside(call):
            is_in.set()
            may_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_in.wait()
    try:
        assert in_child(llm.close) == 0
    finally:
        may_go.set()
        thread.join()
    assert len(answers(llm)) == len(PROMPTS)


def asked_by_threads(llm: LLM, num_threads: int = 4) -> dict[str, Any]:
    """Every thread asks for its part of the prompts, one after the other as they are answered; this one steps."""
    engine, found = llm.llm_engine, dict[str, Any]()
    boxes: dict[str, queue.SimpleQueue[RequestOutput]] = {}
    left = list(range(num_threads))

    def ask(first: int) -> None:
        for index in range(first, len(PROMPTS), num_threads):
            boxes[str(index)] = queue.SimpleQueue()
            engine.add_request(f"{index} aborted", PROMPTS[0], params(index))
            engine.add_request(str(index), PROMPTS[index], params(index))
            engine.abort_request(f"{index} aborted")
            found[str(index)] = in_words(boxes[str(index)].get(timeout=LIMIT_S))
        left.pop()

    threads = [threading.Thread(target=ask, args=(first,), name=f"asks {first}") for first in range(num_threads)]
    for thread in threads:
        thread.start()
    while left:
        for output in engine.step():
            assert output.finished
            if output.request_id in boxes:
                boxes[output.request_id].put(output)
    for thread in threads:
        thread.join(LIMIT_S)
    while engine.has_unfinished_requests():
        engine.step()
    return found


def test_thread_requests_get_the_answers_of_one_call(llm: LLM):
    expected = answers(llm)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert asked_by_threads(llm) == expected
    finally:
        sys.setswitchinterval(interval)
    assert answers(llm) == expected


class Interrupted(list[Any]):
    """Events to which one more comes, and something happens before it is there."""

    def __init__(self, events: list[Any], happens: Callable[[], object]) -> None:
        super().__init__(events)
        self._happens = happens

    def append(self, event: Any) -> None:
        self._happens()
        super().append(event)


class WantedLock:
    """A lock that tells when a thread waits for it."""

    def __init__(self) -> None:
        self.wanted, self._lock = threading.Event(), threading.RLock()

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.wanted.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class NoLock:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def added_while_a_step_takes_events(llm: LLM, lock: Any, until: Callable[[threading.Thread], object]) -> int:
    """How many requests are answered, of two of which the second came in the worst moment."""
    engine, answered = llm.llm_engine, list[RequestOutput]()
    engine.calls.lock = lock
    thread = threading.Thread(target=lambda: answered.extend(engine.step()))
    engine.add_request([3, 4], params(0))
    engine.calls.events = Interrupted(engine.calls.events, lambda: (thread.start(), until(thread)))
    engine.add_request([7, 8], params(1))
    thread.join(LIMIT_S)
    for _ in range(20):
        answered += engine.step()
    return len(answered)


@pytest.mark.guarantee("Other threads may add and abort while one steps")
def test_request_during_take_is_not_lost(llm: LLM):
    lock = WantedLock()
    assert added_while_a_step_takes_events(llm, lock, lambda _: lock.wanted.wait(LIMIT_S)) == 2


@pytest.mark.control("Other threads may add and abort while one steps")
def test_without_the_lock_it_would_be(llm: LLM):
    """Negative control."""
    assert added_while_a_step_takes_events(llm, NoLock(), lambda thread: thread.join(LIMIT_S)) == 1


@contextmanager
def between_bytecodes(codes: list[CodeType], place: int, act: Callable[[], object]) -> Iterator[Callable[[], bool]]:
    """Before the bytecode of `codes` with the number `place`, of those that this thread runs in the block, comes `act`.
    What is given tells whether it came.
    """
    at = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal at
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            at += 1
            if at == place:
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: at >= place
    finally:
        sys.settrace(before)


def numbers_added_amid_an_admission(llm: LLM, lock: Any, until: Callable[[threading.Thread], object]) -> list[int]:
    """A request's admission, again and again, each time with a request that another thread adds between two of its
    bytecodes, and one right after; the numbers that all of them got.
    """
    engine, numbers = llm.llm_engine, list[int]()
    engine.calls.lock = lock
    for place in count(1):
        thread = threading.Thread(target=lambda: numbers.append(engine.add_request([7, 8], params(1))))

        def add(thread: threading.Thread = thread) -> None:
            thread.start()
            until(thread)

        numbers.append(engine.add_request([3, 4], params(0)))
        with between_bytecodes([Requests.count.__code__], place, add) as has_come:
            engine.step()
        if has_come():
            thread.join(LIMIT_S)
        numbers.append(engine.add_request([5, 6], params(2)))
        while engine.has_unfinished_requests():
            engine.step()
        if not has_come():
            break
    assert place > 10
    return numbers


def test_request_ids_are_unique_between_bytecodes(llm: LLM):
    lock = WantedLock()

    def until_it_waits_or_ended(thread: threading.Thread) -> None:
        for _ in range(int(1000 * LIMIT_S)):
            if not thread.is_alive() or lock.wanted.wait(0.001):
                break
        lock.wanted.clear()

    numbers = numbers_added_amid_an_admission(llm, lock, until_it_waits_or_ended)
    assert len(set(numbers)) == len(numbers) > 30


def test_without_the_lock_one_would_be(llm: LLM):
    """Negative control: the engine ends where a number comes again."""
    with pytest.raises(AssertionError):
        numbers_added_amid_an_admission(llm, NoLock(), lambda thread: thread.join(LIMIT_S))


def test_abort_between_bytecodes_is_not_lost(llm: LLM):
    """By a finalizer or a signal's handler, which no lock keeps out: they run in the thread that has it."""
    engine = llm.llm_engine
    for place in count(1):
        number = engine.add_request([3, 4], replace(params(0), max_tokens=12))
        abort = partial(engine.abort_request, str(number))
        with between_bytecodes([Engine._run_step.__code__, CallGuard.take.__code__], place, abort) as has_come:
            outputs = engine.step()
        if not has_come():
            break
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort"], place
    assert place > 100
    engine.abort_request(str(number))
    engine.step()


def test_abort_in_lock_holding_thread_does_not_deadlock(llm: LLM):
    """Another thread waits for the lock meanwhile."""
    engine, lock = llm.llm_engine, WantedLock()
    engine.calls.lock = lock
    engine.add_request("first", [3, 4], params(0))
    thread = threading.Thread(target=lambda: engine.add_request("second", [5, 6], params(1)))
    with lock:
        thread.start()
        assert lock.wanted.wait(LIMIT_S)
        engine.abort_request(["first", "nobody"])
    thread.join(LIMIT_S)
    reasons = {}
    while engine.has_unfinished_requests():
        reasons |= {output.request_id: output.outputs[0].finish_reason for output in engine.step()}
    assert reasons == {"first": "abort", "second": "length"}


def test_steps_of_threads_do_not_overlap(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    engine, said = llm.llm_engine, list[str]()
    give = engine._outputs_of

    def step() -> None:
        try:
            engine.step()
        except RuntimeError as error:
            said.append(str(error))

    def give_while_another_steps(ended: list[RequestOutput]) -> Any:
        thread = threading.Thread(target=step, name="other")
        thread.start()
        thread.join(LIMIT_S)
        return give(ended)

    monkeypatch.setattr(engine, "_outputs_of", give_while_another_steps)
    engine.step()
    assert len(said) == 1
    assert said[0].startswith("step was called in thread 'other' while thread")


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate([[3]], use_tqdm=False),
    "score_tokens": lambda llm: llm.score_tokens([[3]], [[4]]),
    "turns": lambda llm: llm.turns().__enter__(),
    "step": lambda llm: llm.llm_engine.step(),
    "follow": lambda llm: llm.llm_engine.follow(),
    "sleep": lambda llm: llm.sleep(),
    "wake_up": lambda llm: llm.wake_up(),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "set_weight_version": lambda llm: llm.set_weight_version(3),
    "update_weights": lambda llm: llm.update_weights([]),
    "start_weight_update": lambda llm: llm.start_weight_update(),
    "finish_weight_update": lambda llm: llm.finish_weight_update(),
    "collective_rpc": lambda llm: llm.collective_rpc("get_model_inspection"),
    "apply_model": lambda llm: llm.apply_model(lambda model: None),
    "worker_event": lambda llm: llm.worker_event("stop_profile"),
    "reinitialize_distributed": lambda llm: llm.reinitialize_distributed(),
    "close": lambda llm: llm.close(),
}
QUEUES: dict[str, Callable[[LLM], object]] = {
    "add_request": lambda llm: llm.llm_engine.add_request([3], params(0)),
    "abort_request": lambda llm: llm.llm_engine.abort_request("0"),
}


def tried_meanwhile(llm: LLM, calls: dict[str, Callable[[LLM], object]], drive: Callable[[], object]) -> dict[str, str]:
    """What each call says from another thread in the middle of `drive`; nothing where it is let through."""
    said: dict[str, str] = {}

    def try_them() -> None:
        for name, call in calls.items():
            try:
                call(llm)
            except RuntimeError as error:
                said[name] = str(error)

    def in_a_step(_: object) -> None:
        if not said and not is_done:
            is_done.append(True)
            thread = threading.Thread(target=try_them, name="other")
            thread.start()
            thread.join(LIMIT_S)

    is_done: list[bool] = []
    llm.llm_engine.watch_steps(in_a_step)
    drive()
    assert is_done
    return said


def test_second_driving_thread_is_rejected_by_name(llm: LLM):
    expected = answers(llm)
    said = tried_meanwhile(llm, CALLS | QUEUES, lambda: llm.generate(PROMPTS[:2], params(0), use_tqdm=False))
    main = threading.current_thread().name
    assert list(said) == list(CALLS | QUEUES)
    for name, words in said.items():
        assert words == (
            f"{name} was called in thread 'other' while thread {main!r} is in generate: one thread at a time drives an "
            f"LLM; others may call llm_engine.add_request and abort_request while one calls llm_engine.step"
        )
    llm.llm_engine.add_request([7], params(0))
    said = tried_meanwhile(llm, CALLS | QUEUES, llm.llm_engine.step)
    assert list(said) == list(CALLS)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert answers(llm) == expected


def test_one_after_the_other_threads_may_call_anything(llm: LLM):
    expected, found = answers(llm), list[Any]()
    thread = threading.Thread(target=lambda: found.append(answers(llm)))
    thread.start()
    thread.join(LIMIT_S)
    assert found == [expected] == [answers(llm)]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.matrix),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.stress),
    ],
    ids=str,
)
def test_rank_0_threads_add_requests_while_others_follow(layout: dict[str, int], tmp_path: Path):
    ranks.run_forked([__file__, json.dumps(layout), tmp_path], nproc=2, timeout_s=240).checked()
    seen = json.loads((tmp_path / "0.json").read_text())
    assert seen["by threads"] == seen["by one call"]


def main(layout: dict[str, int], folder: Path) -> None:
    with open_llm(**layout) as llm:
        seen = {"by one call": answers(llm)}
        if os.environ["RANK"] == "0":
            seen["by threads"] = asked_by_threads(llm)
            llm.llm_engine.close_followers()
        else:
            llm.llm_engine.follow()
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
