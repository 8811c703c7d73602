"""Histories of a pool: the real protocol of several workers over a store in memory, one operation at a time.

    history = random_history(seed)
    num_states, num_histories = explore(make_history, depth)

Between any two operations a worker may crash or be interrupted (before or after its operation took effect), lose the
answer and ask again, be paused for longer than a lease, or have its local clock moved; another may join. An operation
may also be delayed: the worker crashes, or asks again, and its first try takes effect any time later. The server's time
passes in ticks of a quarter of a lease, and only when every worker that is not paused has sent a heartbeat in the last
one. A worker's local state depends only on the answers that it received: `state` uses that.

`Flaws` break a rule on purpose. Knows nothing of models or files.
"""

import random
from collections.abc import Callable
from unittest import mock

from simulated_history import TICKS_A_LEASE, Action, History
from simulated_worker import Flaws, Plan

from spmd_worker.frontends.batch.pool import protocol
from spmd_worker.frontends.batch.pool.records import PoolJob


def random_history(seed: int, flaws: Flaws | None = None, has_jumps: bool = False) -> History:
    """Run one history to its end. Raises what broke it."""
    draw = random.Random(seed)
    lease_rows = draw.randint(2, 6)
    job = PoolJob({"seed": 1}, draw.randint(0, 8), "out", float(TICKS_A_LEASE), lease_rows)
    plans = [Plan(draw.choice((1, 2, 100)), draw.random() < 0.3) for _ in range(draw.choice((2, 2, 2, 3, 3, 4, 5, 6)))]
    history = History(job, plans, flaws, draw.randint(0, 5), has_jumps)
    fault_rate = draw.choice((0.02, 0.05, 0.15))
    favourite = draw.randrange(len(plans))
    with mock.patch.object(protocol, "_RANGES_A_WORKER", draw.choice((1, 1, 2, 4))):
        while True:
            if history.faults_left and draw.random() < fault_rate:
                history.do(draw.choice([*history.faults(), Action("join")]))
                continue
            if history.delayed and draw.random() < 0.03:
                history.do(draw.choice(history.arrivals()))
            # One worker is often faster: long runs of one, not only fair mixtures.
            if draw.random() < 0.02:
                favourite = draw.randrange(len(history.workers))
            chance = draw.random()
            index = favourite if chance < 0.3 else int(draw.random() * len(history.workers))
            if chance < 0.9 and history.may_step(index):
                history.do(Action("step", index))
            elif actions := history.actions():
                history.do(draw.choice(actions))
            else:
                break
        history.faults_left = 0
        history.finish()
    return history


def explore(make: Callable[[], History], depth: int) -> tuple[int, int]:
    """Every interleaving up to `depth` events, with every fault at every moment; equal states once. The rest of each
    history is fair and without faults. Returns (states, histories).
    """
    seen: set[int] = set()
    num_histories = 0

    def go(history: History, path: tuple[Action, ...]) -> None:
        nonlocal num_histories
        state = hash(history.state())
        if state in seen:
            return
        seen.add(state)
        actions = [*history.steps(), *history.arrivals(), *history.mishaps()] if len(path) < depth else []
        if not actions:
            num_histories += 1
            history.faults_left = 0
            history.finish()
            return
        for index, action in enumerate(actions):
            if index:
                history = make()
                for each in path:
                    history.do(each)
            history.do(action)
            go(history, (*path, action))

    go(make(), ())
    return len(seen), num_histories
