"""Signals that come at a named point of a call, or at a moment that a seed draws; and the calls that meet them.

Ranks of a test run this too, as scripts import it.
"""

import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.liveness import deferred_signals
from spmd_worker.compat.prompts import PromptReader
from spmd_worker.engine.data_parallel.round import ReplicaRound
from spmd_worker.engine.requests import Requests
from spmd_worker.replica.lockstep.lockstep import Lockstep
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.worker.runner.model_runner import ModelRunner

POINTS: dict[str, tuple[Any, str]] = {
    "encode": (PromptReader, "encode"),
    "admit": (Requests, "admit"),
    "schedule": (Scheduler, "schedule"),
    "agree": (Lockstep, "agree"),
    "sample": (ModelRunner, "sample"),
    "apply": (Scheduler, "apply"),
    "output": (Requests, "finish"),
}
ON_REPLICAS: dict[str, tuple[Any, str]] = {"take": (ReplicaRound, "take")}
PROMPTS = [[7, 8, 9, 10, 11], [20, 21, 22], [30] * 40, [40, 41], [50, 51, 52, 53], [60, 61, 62], [70]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def heed() -> None:
    """Ctrl-C as a program in the foreground has it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def at(point: str, nth: int = 1, act: Callable[[], object] = interrupt) -> Iterator[None]:
    """A block in which `act` happens within the nth call of a point, before and after what it does.

    However long that takes: a signal that comes again after 5 s would be handled at once, and may leave half a step.
    """
    owner, name = (POINTS | ON_REPLICAS)[point]
    original, longest_s = getattr(owner, name), deferred_signals.MAX_DEFERRED_S
    num_calls = 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == nth:
            act()
        result = original(*args, **kwargs)
        if num_calls == nth:
            act()
        return result

    setattr(owner, name, called)
    deferred_signals.MAX_DEFERRED_S = math.inf
    try:
        yield
    finally:
        setattr(owner, name, original)
        deferred_signals.MAX_DEFERRED_S = longest_s


class AtLine:
    """A block in which a signal comes at the nth line of the product that the main thread runs; 0 counts them."""

    def __init__(self, nth: int) -> None:
        self.nth, self.num_lines = nth, 0

    def __enter__(self) -> "AtLine":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if "/spmd_worker/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.nth:
                signal.raise_signal(signal.SIGINT)
        return self._trace


def tokens(llm: LLM, prompts: Any = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def is_interrupted(call: Callable[[], object]) -> bool:
    try:
        call()
    except KeyboardInterrupt:
        return True
    return False


def at_random_moments(
    call: Callable[[], object], check: Callable[[], object], longest_s: float, draw: random.Random, times: int
) -> int:
    """How many of so many calls were interrupted, each by one signal at a moment of `longest_s`; `check` comes after
    each.
    """
    num_interrupted = 0
    for _ in range(times):
        wait_s, is_over = draw.random() * longest_s, threading.Event()

        def later(wait_s: float = wait_s, is_over: threading.Event = is_over) -> None:
            # From within the call: a rank that is interrupted before makes another call next than the others.
            while not deferred_signals._deferral.depth and not is_over.wait(0.0002):
                pass
            time.sleep(wait_s)
            interrupt()

        thread = threading.Thread(target=later)
        thread.start()
        num_interrupted += is_interrupted(call)
        # One that came too late for the call comes here.
        is_over.set()
        is_interrupted(thread.join)
        thread.join()
        check()
    return num_interrupted
