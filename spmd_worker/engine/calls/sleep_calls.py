"""Calls that give memory back and take it again: `LLM.sleep` and `wake_up`."""

from collections.abc import Sequence

from spmd_worker.engine.data_parallel.agreement import agree_on_call
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankCalls
from spmd_worker.engine.engine import Engine
from spmd_worker.replica.sequence.sleep_tags import check_mode, checked_level, checked_tags


class SleepCalls:
    """Methods of `LLM` that give back its memory and take it again."""

    def __init__(self, engine: Engine, turns: PerRankCalls) -> None:
        self._engine, self._turns = engine, turns

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`, on every rank or on none; every rank calls this, with no request
        unanswered. `level` 1 keeps the weights, in host memory, and drops the cache; 2 drops both. The CPU's weights
        are in host memory and stay where they are at level 1. What was cached is not found afterwards. Bytes and
        seconds of each rank are logged.

        Asleep, `reset_prefix_cache` and `set_weight_version` can be called, and `load_weights` once the weights are
        awake; to sleep again is no error, and 2 after 1 drops the weights. Whatever computes raises RuntimeError. Needs
        nothing to be switched on.

        `mode` says in vLLM what becomes of unanswered requests: abort, wait and keep are the same here.

        Raises ValueError for another level or mode, RuntimeError while requests are unanswered, saying how many, and
        MissingWeightsError where some weights were loaded and others not, which level 2 drops; nothing sleeps then.
        """
        with self._engine.calls.inside("sleep", is_alone=True):
            self._engine.life.check_open()

            def prepare() -> int:
                self._engine.requests.check_idle_or_asleep()
                self._engine.changes.weights.check_not_held()
                check_mode(mode)
                return checked_level(level)

            self._turns.check_outside("sleep")
            agreed = agree_on_call(self._engine, "sleep", prepare)
            self._engine.changes.sleep(agreed, mode, self._engine.run_step)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again for what sleeps: all of it, or `tags`, "weights" and "kv_cache", in any order and in one
        call or two; what is awake is passed over. Sizes are those from before. Every rank calls this.

        After `sleep(level=2)` the weights are none, but for those that may be left out of an update (see
        `start_weight_update`), which are what they were: until all others were loaded (`load_weights`,
        `update_weights`, `collective_rpc("reload_weights")`) whatever computes raises MissingWeightsError that lists
        those that were not. Weights that were loaded completely are committed.

        Raises ValueError for other tags, and WorkerEventError where a rank has too little memory, naming the rank and
        the bytes; all ranks are as they were before and can try again.
        """
        with self._engine.calls.inside("wake_up", is_alone=True):
            self._engine.life.check_open()

            def prepare() -> list[str]:
                self._engine.requests.check_idle_or_asleep()
                self._engine.changes.weights.check_not_held()
                return checked_tags(tags)

            self._turns.check_outside("wake_up")
            agreed = agree_on_call(self._engine, "wake_up", prepare)
            self._engine.changes.wake_up(agreed, self._engine.run_step)
