"""Calls to worker processes: by name, in rank order, with timeouts, as futures, in coroutines; errors name ranks."""

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from cache_specs import uniform_spec
from context_fixtures import fixture_of
from forked_child import in_child
from plain_executors import errors_of_all, new_plain, plain, timeouts_after
from waiting import LIMIT_S

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.errors import ConfigError, WorkerDiedError, WorkerError
from spmd_worker.executor import worker_pool
from spmd_worker.executor.executor import Executor
from spmd_worker.executor.multiproc import MultiprocExecutor, _StepFuture
from spmd_worker.executor.worker_pool import WorkerPool
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.replica.sequence.outputs import Logprob
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.resolved import resolve_again

pytestmark = pytest.mark.usefixtures("forked_workers_of_module")

executor = fixture_of(lambda: plain(worker_extension_cls="plain_worker.Extension"))


@pytest.fixture
def go_on(tmp_path: Path) -> Iterator[Path]:
    """What workers wait for that are asked to; it comes with the test's end at the latest."""
    path = tmp_path / "go on"
    yield path
    path.touch()


def test_the_backend_is_found_by_its_name():
    assert Executor.get_class("multiproc", RankEnvironment()) is MultiprocExecutor


def test_answers_come_in_rank_order(executor: MultiprocExecutor):
    assert executor.collective_rpc("nap", args=(0.2, 0)) == [0, 1]


def test_call_returns_the_types_sent(executor: MultiprocExecutor):
    values = (None, True, 3, -2.5, math.inf, "ä\ud800", b"\x00\xff", [1, (2,)], {"key": (1, 2), 3: b""}, 2**70)
    named = {"spec": uniform_spec(1, 2, 3, 4, 5), "logprob": Logprob(-1.0, 2)}
    answers = executor.collective_rpc("echo", args=values, kwargs=named)
    assert answers == [(values, named)] * 2
    assert type(answers[0][1]["logprob"]) is Logprob


def test_large_values_pass_through_the_queue(executor: MultiprocExecutor):
    tokens = list(range(300_000))
    assert executor.collective_rpc("echo", args=(tokens,))[1][0][0] == tokens


def test_removed_worker_fails_its_pending_calls(monkeypatch: pytest.MonkeyPatch):
    """Another thread's call, when ranks became fewer: its future was never resolved."""
    monkeypatch.setattr(worker_pool, "_STOP_S", 0.05)
    with plain() as executor:
        stays, leaves = executor.collective_rpc("nap", args=(600, 1), non_block=True)
        pid = executor.worker_pids[1]
        executor._pool.remove_workers(1)
        assert stays.result(LIMIT_S) == 0
        error = leaves.exception(LIMIT_S)
        assert isinstance(error, WorkerDiedError)
        assert str(error) == f"worker rank 1 (pid {pid}) was ended while it ran nap: there are fewer ranks now"
        assert not executor.is_failed
        assert executor.collective_rpc("echo", args=(1,)) == [((1,), {})]
        assert len(executor._pool._pending) == 0


def test_forked_process_cannot_call_workers(executor: MultiprocExecutor):
    """One that ended by sys.exit, which runs `shutdown`, ended the workers of its parent."""

    def use() -> None:
        with pytest.raises(RuntimeError, match=r"workers .*process \d+, .*forked"):
            executor.collective_rpc("echo")
        executor._pool.fail(ValueError("planted"))
        executor._pool.close()
        executor.shutdown()
        assert executor._store is not None

    pids = executor.worker_pids
    assert in_child(use) == 0
    assert executor.collective_rpc("echo") == [((), {})] * 2
    assert executor.worker_pids == pids


def test_missing_method_error_names_rank(executor: MultiprocExecutor):
    with errors_of_all(), pytest.raises(WorkerError) as raised:
        executor.collective_rpc("nonexistent")
    assert str(raised.value) == (
        "rank 0 raised AttributeError in nonexistent: rank 0: a worker has no method 'nonexistent'"
    )
    assert not executor.is_failed
    assert executor.collective_rpc("echo") == [((), {})] * 2


def test_error_on_one_rank_names_it(executor: MultiprocExecutor):
    with pytest.raises(WorkerError) as raised:
        executor.collective_rpc("fail_on", args=(1,))
    assert str(raised.value) == "rank 1 raised ValueError in fail_on: went wrong"
    assert (raised.value.rank, raised.value.method, raised.value.type_name) == (1, "fail_on", "ValueError")
    assert "rank 1's own traceback" in raised.value.__notes__[0]
    assert "raise ValueError(message)" in raised.value.__notes__[0]


def test_error_on_all_ranks_names_the_lowest(executor: MultiprocExecutor):
    for _ in range(5):
        with errors_of_all(), pytest.raises(WorkerError, match=r"^rank 0 .*ValueError .*fail_on: .*wrong"):
            executor.collective_rpc("fail_on", args=(-1,))


def test_error_does_not_wait_for_blocked_workers():
    expected = r"^rank 1 raised ValueError in fail_and_keep_the_other_waiting: went"
    with plain() as executor, pytest.raises(WorkerError, match=expected):
        executor.collective_rpc("fail_and_keep_the_other_waiting", args=(1,))


def test_timeout_names_the_unanswered_ranks(executor: MultiprocExecutor, go_on: Path):
    with timeouts_after(executor, lambda futures: futures[0].done()), pytest.raises(TimeoutError) as raised:
        executor.collective_rpc("wait_for", timeout=0.1, args=(str(go_on), 1))
    pid = executor.worker_pids[1]
    assert str(raised.value) == f"rank 1 (pid {pid}) has not answered wait_for within 0.1 s"
    with pytest.raises(TimeoutError, match=r"^rank 0 \(.* \d+\), rank 1 \(.* \d+\) .*answered wait_for "):
        executor.collective_rpc("wait_for", timeout=0.1, args=(str(go_on),))
    go_on.touch()
    # The late answers are nobody's: the next call gets its own.
    assert executor.collective_rpc("echo", args=("next",)) == [(("next",), {})] * 2


def test_unsendable_values_are_rejected_before_sending(executor: MultiprocExecutor):
    with pytest.raises(TypeError, match=r"nothing is unpickled: .* executor\.worker_extension_cls"):
        executor.collective_rpc(lambda worker: worker.rank)
    with pytest.raises(TypeError, match=r"^apply_model: .*type function .*executor\.worker_extension_cls"):
        executor.collective_rpc("apply_model", args=(lambda model: model,))
    with pytest.raises(TypeError, match=r"^echo: .*type object .*cross"):
        executor.collective_rpc("echo", args=(object(),))
    with pytest.raises(TypeError, match=r"^method is a list: give the name"):
        executor.collective_rpc([1])  # type: ignore[arg-type]  # the wrong type is the case


@pytest.mark.parametrize(("timeout", "error"), [(math.inf, ValueError), (-1, ValueError), (True, TypeError)])
def test_invalid_timeout_is_rejected(executor: MultiprocExecutor, timeout: Any, error: type):
    with pytest.raises(error, match="timeout"):
        executor.collective_rpc("no_such_method", timeout=timeout)


def test_unsendable_answer_error_names_rank(executor: MultiprocExecutor):
    with errors_of_all(), pytest.raises(WorkerError, match=r"^rank 0 .*TypeError .*give_object: .*type object"):
        executor.collective_rpc("give_object")


def test_non_blocking_call_returns_futures_per_rank(executor: MultiprocExecutor, go_on: Path):
    futures = executor.collective_rpc("wait_for", args=(str(go_on),), non_block=True)
    assert not any(future.done() for future in futures)
    go_on.touch()
    assert [future.result(timeout=LIMIT_S) for future in futures] == [0, 1]
    good, bad = executor.collective_rpc("fail_on", args=(1,), non_block=True)
    assert good.result(timeout=LIMIT_S) == "fine"
    assert isinstance(bad.exception(timeout=LIMIT_S), WorkerError)


def test_coroutines_wait_for_workers_while_others_run(executor: MultiprocExecutor, go_on: Path):
    async def main() -> tuple[list[int], int, str]:
        futures = executor.collective_rpc("wait_for", args=(str(go_on),), non_block=True)
        waiting = asyncio.gather(*map(asyncio.wrap_future, futures))
        num_turns = 0
        while not waiting.done():
            await asyncio.sleep(0.01)
            num_turns += 1
            if num_turns == 3:
                go_on.touch()
        bad = executor.collective_rpc("fail_on", args=(0,), non_block=True)[0]
        with pytest.raises(WorkerError) as raised:
            await asyncio.wrap_future(bad)
        return await waiting, num_turns, str(raised.value)

    answers, num_turns, text = asyncio.run(main())
    assert answers == [0, 1]
    assert num_turns >= 3
    assert text == "rank 0 raised ValueError in fail_on: went wrong"


def test_cancelled_coroutine_keeps_the_queue_ordered(executor: MultiprocExecutor, go_on: Path):
    async def main() -> None:
        future = executor.collective_rpc("wait_for", args=(str(go_on),), non_block=True)[0]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(future), 0.05)

    asyncio.run(main())
    go_on.touch()
    assert executor.collective_rpc("echo", args=(1,)) == [((1,), {})] * 2


def test_step_returns_the_output_ranks_ids(executor: MultiprocExecutor):
    logprobs = ({7: Logprob(-0.5, 1, "seven")},)
    assert executor.execute_model(StepPlan(step=1)) == StepResult(1, (0, 1), logprobs)
    assert executor.execute_model(StepPlan(step=2)) == StepResult(2, (0, 2), logprobs)


def test_steps_in_flight_do_not_block(executor: MultiprocExecutor, go_on: Path):
    executor.collective_rpc("wait_for", args=(str(go_on),), non_block=True)
    futures = [executor.execute_model(StepPlan(step=step), non_block=True) for step in (11, 12, 13)]
    assert not any(future.done() for future in futures)
    go_on.touch()
    assert [future.result(timeout=LIMIT_S).token_ids for future in futures] == [(0, 11), (0, 12), (0, 13)]


def test_transfer_finishes_on_all_ranks(executor: MultiprocExecutor):
    executor.init_kv_output_aggregator()
    executor.collective_rpc("finish_transfers", args=(0, (4, 5)))
    assert executor.execute_model(StepPlan(step=21)).finished_transfers == ()
    executor.collective_rpc("finish_transfers", args=(1, (5,)))
    assert executor.execute_model(StepPlan(step=22)).finished_transfers == (5,)
    executor.collective_rpc("finish_transfers", args=(1, (4,)))
    assert executor.execute_model(StepPlan(step=23)).finished_transfers == (4,)
    assert executor.execute_model(StepPlan(step=24)).finished_transfers == ()


def test_call_during_weight_query_is_remembered(executor: MultiprocExecutor, monkeypatch: pytest.MonkeyPatch):
    """Another thread's, which may have loaded some."""
    ask = executor._call

    def ask_while_another_calls(kind: Any, method: str, *arguments: Any) -> Any:
        if method != "get_weight_update":
            return ask(kind, method, *arguments)
        answers = ask(kind, method, *arguments)
        executor.collective_rpc("get_model_inspection")
        return answers

    executor.collective_rpc("get_model_inspection")
    assert executor.get_weight_updates() == [None] * executor.layout.world_size
    assert executor.get_weight_updates() == [], "nobody has called since"
    executor.collective_rpc("get_model_inspection")
    monkeypatch.setattr(executor, "_call", ask_while_another_calls)
    executor.get_weight_updates()
    assert executor._may_have_update


def test_no_call_is_sent_while_workers_leave(monkeypatch: pytest.MonkeyPatch):
    """Half of them would never get it, and nobody would answer for them."""
    pool, was_held = WorkerPool(1.0, lambda: None), list[bool]()
    monkeypatch.setattr(pool, "_ask_to_stop", lambda leaving: was_held.append(pool._send_lock.locked()))
    pool.remove_workers(0)
    assert was_held == [True]


def test_concurrent_last_answers_make_one_result():
    """They come in two threads, one between the other's count and its look at it."""
    answers: list[Future[Any]] = [Future(), Future()]
    taken: list[list[Any]] = []
    step = _StepFuture(answers, lambda results: taken.append(results), lambda error, waiter: None)

    class Lock:
        """Whoever lets go of it is overtaken."""

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            if not answers[1].done():
                answers[1].set_result(2)

    step._lock = Lock()
    answers[0].set_result(1)
    assert taken == [[1, 2]]
    assert step.done()


def test_what_the_engine_asks_at_the_start(executor: MultiprocExecutor):
    assert executor.determine_num_available_blocks() == (69, 5)
    assert [spec.num_layers for spec in executor.get_kv_cache_specs()] == [1, 2]
    executor.initialize_from_config(69, 5)
    assert executor.collective_rpc("initialized") == [(69, 5)] * 2
    assert executor.supported_tasks == ("generate",)
    assert executor.max_concurrent_batches == 1
    assert executor.num_workers == 2
    executor.check_health()


def test_workers_have_the_extensions_methods(executor: MultiprocExecutor):
    assert executor.collective_rpc("double_rank") == [0, 2]


def test_colliding_extension_fails_the_start(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "colliding.py").write_text("class Extension:\n    def nap(self): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    executor = new_plain(worker_extension_cls="colliding.Extension")
    with errors_of_all(), pytest.raises(WorkerError) as raised:
        executor.start()
    assert str(raised.value) == (
        "rank 0 raised ConfigError in init_worker: executor.worker_extension_cls: colliding.Extension and "
        "plain_worker.PlainWorker both have nap: rename the extension's"
    )


def test_missing_worker_class_fails_the_start():
    with pytest.raises(WorkerError, match=r"ConfigError in init_worker: executor\.worker_cls: 'no_such\.Worker'"):
        new_plain(worker_cls="no_such.Worker").start()


def test_a_process_that_a_launcher_started_is_refused():
    launched = RankEnvironment(rank=1, world_size=2, is_launched=True)
    with pytest.raises(ConfigError) as refused:
        new_plain(environment=launched).start()
    assert str(refused.value) == (
        "executor.backend=multiproc starts its own workers, and this process is rank 1 of 2 that a launcher started: "
        "start one process without torchrun, or set executor.backend=external_launcher"
    )


def test_resized_world_keeps_remaining_processes():
    with plain(2) as executor:
        executor.load_model()
        executor.initialize_from_config(9, 3)
        first = executor.worker_pids
        executor.execute_model(StepPlan(step=1))
        executor.reinitialize_distributed(resolve_again(executor.resolved, ParallelConfig(1)))
        assert executor.worker_pids == first[:1]
        assert executor.collective_rpc("place") == [(first[0], 1, RankEnvironment(0, 1, 0, 1, True, "127.0.0.1"))]
        assert executor.execute_model(StepPlan(step=2)).token_ids == (0, 2)
        executor.reinitialize_distributed(resolve_again(executor.resolved, ParallelConfig(4)))
        places = executor.collective_rpc("place")
        assert [(size, environment.rank) for _, size, environment in places] == [(4, 0), (4, 1), (4, 2), (4, 3)]
        assert places[0][0] == first[0]
        assert executor.collective_rpc("initialized") == [None] * 4
        assert executor.config.parallel.tensor_parallel_size == 4
        assert executor.execute_model(StepPlan(step=3)).token_ids == (0, 3)


def test_indivisible_world_size_changes_nothing(executor: MultiprocExecutor):
    before = executor.worker_pids
    with pytest.raises(ConfigError, match=r"^parallel\.tensor_parallel_size=3 .*not divide"):
        executor.reinitialize_distributed(resolve_again(executor.resolved, ParallelConfig(3)))
    assert executor.worker_pids == before
    assert executor.collective_rpc("nap", args=(0,)) == [0, 1]
