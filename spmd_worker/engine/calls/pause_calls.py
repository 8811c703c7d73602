"""Calls that pause generation and end the pause."""

from typing import Any

from spmd_worker.base.config.plain_values import required_bool
from spmd_worker.engine.data_parallel.agreement import agree_on_call
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankCalls
from spmd_worker.engine.data_parallel.replicas import Replicas
from spmd_worker.engine.engine import Engine
from spmd_worker.replica.sequence.sequence import SequenceGroup
from spmd_worker.replica.sequence.sleep_tags import ABORT, WAIT, checked_mode


class PauseCalls:
    """Methods of `LLM` for pauses."""

    def __init__(self, engine: Engine, replicas: Replicas | None, turns: PerRankCalls) -> None:
        self._engine, self._replicas, self._turns = engine, replicas, turns

    def pause_generation(self, mode: str = ABORT, clear_cache: bool = True) -> None:
        """Pause generation on every rank, between the same two steps, so that weights can be changed; every rank calls
        this. Later requests are queued until `resume_generation`. `mode` says what becomes of unanswered ones:

        "abort": they end; the next `llm_engine.step` or `wait_for_completion` returns their tokens so far, with finish
        reason "abort". "wait": those that have begun are answered first, and with them those that were queued before
        one of them; the others stay queued. "keep": all stay, and continue after `resume_generation`, with the weights
        that are there then.

        `clear_cache` empties the cache, so that what is kept is computed again, with the new weights. Without it,
        requests that are kept continue with the keys and values of the old weights; they are found by no other request.

        A second pause changes the mode. Raises ValueError for another mode; a signal handler that raises in mode "wait"
        aborts all requests, as in `generate`, and generation is paused then.
        """
        with self._engine.calls.inside("pause_generation"):

            def prepare() -> dict[str, Any]:
                is_cleared = required_bool("clear_cache", clear_cache)
                if checked_mode(mode) == WAIT:
                    self._engine.changes.complete_weights()
                return {"mode": mode, "clear_cache": is_cleared}

            self._engine.life.check_open()
            self._turns.check_outside("pause_generation")
            agreed = agree_on_call(self._engine, "pause_generation", prepare)
            if self._replicas is None or mode != WAIT:
                self._engine.pause_generation(**agreed)
                return
            with self._replicas.taking_steps() as round_:

                def run_step() -> list[SequenceGroup]:
                    round_.send_heartbeat()
                    return self._engine.run_step()

                self._engine.pauses.pause(agreed["mode"], agreed["clear_cache"], run_step, self._engine.interruptible)
            self._replicas.end_steps(b"")

    def resume_generation(self) -> None:
        """End a pause: requests are scheduled again. Every rank calls this; nothing happens without a pause.

        Loaded weights are committed first: MissingWeightsError lists missing ones, and generation stays paused then.
        Raises RuntimeError while weights or cache are asleep.
        """
        with self._engine.calls.inside("resume_generation"):

            def prepare() -> None:
                self._engine.life.check_awake()
                self._engine.changes.complete_weights()

            self._engine.life.check_open()
            self._turns.check_outside("resume_generation")
            agree_on_call(self._engine, "resume_generation", prepare)
            self._engine.resume_generation()
