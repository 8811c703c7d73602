"""Ctrl-C in a call, and what else a signal's handler raises: the step ends, then the call, and the next one works."""

import ast
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import interrupts
import pytest
import ranks
from context_fixtures import fixture_of
from interrupts import GREEDY, POINTS, PROMPTS, AtLine, at, is_interrupted, tokens
from pooling_models import pooling_folder
from reference_models import checkpoint_folder, write_text_checkpoint
from stress_seed import SEED

from spmd_worker import LLM, BeamSearchParams, SamplingParams
from spmd_worker.base.liveness import deferred_signals as deferred
from spmd_worker.base.liveness.deferred_signals import deferred_signals, deliver_signals, host_signals
from spmd_worker.executor import worker_handle
from spmd_worker.llm_engine import LLMEngine as NamedEngine

pytestmark = pytest.mark.finding(number="B5")

SETTINGS: dict[str, Any] = {"device": "cpu", "num_blocks": 120}


@pytest.fixture(autouse=True)
def _heeding() -> Iterator[None]:
    """And nothing of ours is left in the way of signals."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, former)


llm = fixture_of(lambda: LLM(checkpoint_folder("llama3"), **SETTINGS))


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return tokens(llm)


def check(llm: LLM, expected: list[list[int]]) -> None:
    assert not llm.llm_engine.has_unfinished_requests()
    llm.llm_engine.scheduler.check_integrity()
    assert llm.llm_engine.scheduler.cache.num_used_blocks == 0
    assert tokens(llm) == expected


@pytest.mark.gate("*-3", "encode-1", "output-1")
@pytest.mark.guarantee("Ctrl-C in a call: the next one works")
@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_interrupted_generate_leaves_a_working_engine(llm: LLM, expected: list[list[int]], point: str, nth: int):
    with at(point, nth), pytest.raises(KeyboardInterrupt):
        tokens(llm)
    check(llm, expected)


def test_interrupt_at_any_line_leaves_a_working_engine(llm: LLM, expected: list[list[int]]):
    prompts, short = PROMPTS[:2], SamplingParams(temperature=0, max_tokens=3)
    with AtLine(0) as counted:
        answers = tokens(llm, prompts, short)
    draw = random.Random(1)
    for nth in [draw.randrange(1, counted.num_lines) for _ in range(12)]:
        with AtLine(nth):
            is_interrupted(lambda: tokens(llm, prompts, short))
        assert tokens(llm, prompts, short) == answers
    check(llm, expected)


@pytest.mark.parametrize(
    ("call", "point"), [("wait", "schedule"), ("wait", "sample"), ("wait", "output"), ("pause", "schedule")]
)
def test_interrupted_wait_aborts_queued_prompts(llm: LLM, expected: list[list[int]], call: str, point: str):
    """None is lost, and a pause that did not end its requests can be ended."""
    ids = llm.enqueue(PROMPTS, GREEDY)
    if call == "pause":
        llm.llm_engine.step()
    interrupted = (
        partial(llm.wait_for_completion, use_tqdm=False) if call == "wait" else partial(llm.pause_generation, "wait")
    )
    with at(point, 2), pytest.raises(KeyboardInterrupt):
        interrupted()
    assert llm.is_paused == (call == "pause")
    llm.resume_generation()
    outputs = llm.wait_for_completion(ids, use_tqdm=False)
    reasons = [each.outputs[0].finish_reason for each in outputs]
    # All end in one step, whose outputs are made when the signal comes.
    assert ("abort" in reasons) == (point != "output")
    check(llm, expected)


@pytest.mark.stress
def test_interrupt_at_many_lines_leaves_a_working_engine(llm: LLM, expected: list[list[int]]):
    prompts, short = PROMPTS[:2], SamplingParams(temperature=0, max_tokens=3)
    with AtLine(0) as counted:
        answers = tokens(llm, prompts, short)
    draw, num_interrupted = random.Random(SEED), 0
    for nth in [draw.randrange(1, counted.num_lines) for _ in range(400)]:
        with AtLine(nth):
            num_interrupted += is_interrupted(lambda: tokens(llm, prompts, short))
        assert tokens(llm, prompts, short) == answers
    check(llm, expected)
    print(f"INTERRUPTS {num_interrupted} of 400 at lines of a call of {counted.num_lines}")


def test_second_interrupt_while_the_first_is_acted_on(llm: LLM, expected: list[list[int]]):
    with at("schedule", 2), at("sample", 3), at("apply", 3), pytest.raises(KeyboardInterrupt):
        tokens(llm)
    check(llm, expected)


def test_handler_that_returns_interrupts_nothing(llm: LLM, expected: list[list[int]]):
    heard: list[int] = []
    former = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with at("sample", 2, lambda: os.kill(os.getpid(), signal.SIGUSR1)):
            assert tokens(llm) == expected
        assert heard == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, former)


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGUSR2, signal.SIGTERM])
def test_any_exception_of_a_handler_is_raised(llm: LLM, expected: list[list[int]], number: int):
    """A time limit that a host sets with an alarm ended the engine as Ctrl-C did."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"signal {number}")

    former = signal.signal(number, late)
    try:
        with at("sample", 2, lambda: os.kill(os.getpid(), number)), pytest.raises(TimeoutError, match=str(int(number))):
            tokens(llm)
        assert signal.getsignal(number) is late
    finally:
        signal.signal(number, former)
    check(llm, expected)


def test_handler_may_abort_requests_and_change_handlers(llm: LLM, expected: list[list[int]]):
    def of_own(number: int, frame: object) -> None:
        llm.llm_engine.abort_request(range(10**6, 10**6 + 3))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    former = signal.signal(signal.SIGUSR1, of_own)
    try:
        with at("sample", 2, lambda: os.kill(os.getpid(), signal.SIGUSR1)):
            assert tokens(llm) == expected
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, former)


CALLS: dict[str, Callable[[LLM], object]] = {
    "score_tokens": lambda llm: llm.score_tokens(PROMPTS[:2], [[1, 2], [3]]),
    "beam_search": lambda llm: llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=2, max_tokens=4)),
    "gather": lambda llm: llm.generate(PROMPTS, GREEDY, gather=True, use_tqdm=False),
    "sleep": lambda llm: llm.sleep(),
    "wake_up": lambda llm: llm.wake_up(),
}


BEFORE = {"wake_up": "sleep"}


@pytest.mark.parametrize("name", CALLS)
def test_interrupted_call_is_followed_by_right_answers(llm: LLM, expected: list[list[int]], name: str):
    if name in BEFORE:
        CALLS[BEFORE[name]](llm)
    with at("schedule", 1 if name != "beam_search" else 3), pytest.raises(KeyboardInterrupt):
        CALLS[name](llm)
    if llm.is_sleeping:
        llm.wake_up()
    check(llm, expected)


def test_interrupted_chat_is_followed_by_right_answers(tmp_path_factory: pytest.TempPathFactory):
    with LLM(write_text_checkpoint(tmp_path_factory.mktemp("text")), **SETTINGS) as llm:
        messages = [[{"role": "user", "content": "hello"}], [{"role": "user", "content": "good day to you"}]]

        def answers() -> list[list[int]]:
            return [each.outputs[0].token_ids for each in llm.chat(messages, GREEDY, use_tqdm=False)]

        before = answers()
        for point in ("schedule", "sample", "apply"):
            with at(point, 2), pytest.raises(KeyboardInterrupt):
                answers()
            assert answers() == before


@pytest.mark.parametrize(("name", "call"), [("embedding", "embed"), ("classifier", "classify")])
def test_interrupted_pooling_is_followed_by_right_answers(name: str, call: str):
    with LLM(pooling_folder({"embedding": "mean", "classifier": "labels"}[name]), **SETTINGS) as llm:

        def answers() -> list[Any]:
            return [each.outputs for each in getattr(llm, call)(PROMPTS, use_tqdm=False)]

        before = answers()
        for point in ("schedule", "agree", "apply"):
            with at(point), pytest.raises(KeyboardInterrupt):
                answers()
            assert answers() == before


@pytest.mark.usefixtures("forked_workers")
def test_interrupted_worker_processes_go_on(expected: list[list[int]]):
    """A terminal's Ctrl-C reaches them too."""
    layout = {"tensor_parallel_size": 2, "distributed_executor_backend": "multiproc"}
    with LLM(checkpoint_folder("llama3"), **SETTINGS, **layout) as llm:

        def interrupt() -> None:
            for pid in (os.getpid(), *llm.llm_engine.executor.worker_pids):
                os.kill(pid, signal.SIGINT)

        with at("schedule", 2, interrupt), pytest.raises(KeyboardInterrupt):
            tokens(llm)
        check(llm, expected)
        with at("encode", 1, interrupt), pytest.raises(KeyboardInterrupt):
            tokens(llm)
        llm.collective_rpc("get_report")
        check(llm, expected)


def test_worker_process_begins_without_ctrl_c(monkeypatch: pytest.MonkeyPatch):
    """Before it says that it ignores it: an interpreter starts for seconds."""
    masks: list[bool] = []

    def started(command: list[str], **options: Any) -> Any:
        masks.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
        raise OSError("seen")

    monkeypatch.setattr(worker_handle.subprocess, "Popen", started)
    handle = worker_handle.WorkerHandle(0, dict(os.environ), 5.0, 20)
    handle.start(lambda: None)
    with pytest.raises(OSError, match="seen"):
        handle.wait_until_started()
    assert masks == [True]
    handle.close()


def test_interrupted_update_loads_all_weights(llm: LLM, expected: list[list[int]]):
    """Finished first: with some weights of an update and not others nothing could be computed."""
    weights = llm.apply_model(lambda model: {name: each.clone() for name, each in model.state_dict().items()})[0]

    def pairs() -> Iterator[tuple[str, Any]]:
        for number, pair in enumerate(weights.items()):
            if number == 3:
                interrupts.interrupt()
            yield pair

    for given in (pairs(), iter(pairs())):
        with pytest.raises(KeyboardInterrupt):
            llm.update_weights(given)
        check(llm, expected)
    with pytest.raises(KeyboardInterrupt), llm.weight_update() as load:  # noqa: PT012  # it comes somewhere in there
        for pair in pairs():
            load(*pair)
    llm.update_weights(weights.items())
    check(llm, expected)


def test_host_callbacks_are_interrupted_immediately(llm: LLM, expected: list[list[int]]):
    ran: list[str] = []

    def of_host(_: object) -> None:
        interrupts.interrupt()
        ran.append("on")

    for call in (llm.apply_model, llm.collective_rpc):
        with pytest.raises(KeyboardInterrupt):
            call(of_host)
    with pytest.raises(KeyboardInterrupt), llm.turns():
        of_host(None)
    assert ran == []
    check(llm, expected)


@pytest.mark.parametrize("make", [lambda llm: llm.llm_engine, lambda llm: NamedEngine(llm.llm_engine)])
@pytest.mark.parametrize("point", ["sample", "output"])
def test_interrupted_step_loses_no_output(llm: LLM, expected: list[list[int]], make: Callable[[LLM], Any], point: str):
    engine, found = make(llm), []
    for number, prompt in enumerate(PROMPTS):
        given: list[Any] = [{"prompt_token_ids": prompt}] if isinstance(engine, NamedEngine) else [prompt]
        given = [str(number), *given] if isinstance(engine, NamedEngine) else given
        engine.add_request(*given, SamplingParams(temperature=0, max_tokens=1 + number, ignore_eos=True))
    num_interrupted = 0
    while len(found) < len(PROMPTS):
        with at(point):
            num_interrupted += is_interrupted(lambda: found.extend(engine.step()))
    assert num_interrupted == len(PROMPTS)
    check(llm, expected)


def test_interrupted_step_without_requests_is_over(llm: LLM, expected: list[list[int]]):
    """The next `generate` did not end."""
    with at("schedule"), pytest.raises(KeyboardInterrupt):
        llm.llm_engine.step()
    check(llm, expected)


def test_engine_in_thread_ignores_main_thread_signals(llm: LLM, expected: list[list[int]]):
    """A call in another thread is no business of signals, which the main thread handles."""
    found: list[Any] = []
    started = threading.Event()

    def run() -> None:
        with at("sample", 1, started.set):
            found.append(tokens(llm))

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # it may come a little later
        interrupts.interrupt()
        time.sleep(60)
    thread.join()
    assert found == [expected]


# Deferral itself.


def test_deferred_signal_is_delivered_on_request():
    order: list[str] = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117  # what came before it counts
        with deferred_signals():
            interrupts.interrupt()
            order.append("noted")
            with deferred_signals():
                order.append("inner")
            deliver_signals()
            order.append("never")
    assert order == ["noted", "inner"]


def test_repeated_late_signal_is_handled_immediately(monkeypatch: pytest.MonkeyPatch):
    """A step that does not end can still be left."""
    monkeypatch.setattr(deferred, "MAX_DEFERRED_S", -1.0)
    order: list[str] = []
    with pytest.raises(KeyboardInterrupt), deferred_signals():  # noqa: PT012  # where in it is what is looked at
        interrupts.interrupt()
        order.append("first")
        interrupts.interrupt()
        order.append("second")
    assert order == []


def test_host_block_has_the_hosts_handlers():
    with deferred_signals():
        ours = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), host_signals():  # noqa: PT012  # the same
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            interrupts.interrupt()
        assert signal.getsignal(signal.SIGINT) == ours


def test_forked_process_has_the_hosts_handlers():
    with deferred_signals():
        child = os.fork()
        if not child:
            os._exit(0 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.control("Ctrl-C in a call: the next one works")
def test_the_tests_see_an_engine_that_defers_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    with LLM(checkpoint_folder("llama3"), **SETTINGS) as other:
        monkeypatch.setattr(deferred._Deferral, "install", lambda self: None)
        with at("sample", 2), pytest.raises(KeyboardInterrupt):
            tokens(other)
        with pytest.raises(RuntimeError, match="step failed halfway"):
            tokens(other)
        monkeypatch.undo()


# Ranks.

ON_RANKS = """
    import os, sys
    import interrupts
    from interrupts import GREEDY, PROMPTS, at, is_interrupted, tokens
    from spmd_worker import LLM

    interrupts.heed()
    rank, sizes, found = os.environ["RANK"], eval(sys.argv[2]), []
    with LLM(sys.argv[1], device="cpu", num_blocks=120, timeout_s=60, **sizes) as llm:
        expected = tokens(llm)
        for who in ("01", "0", "1"):
            for point, nth in eval(sys.argv[3]):
                act = interrupts.interrupt if rank in who else lambda: None
                with at(point, nth, act):
                    found.append((who, point, is_interrupted(lambda: tokens(llm))))
                assert not llm.llm_engine.has_unfinished_requests()
                assert tokens(llm) == expected, (who, point)
        with at(sys.argv[4], 3, interrupts.interrupt if rank == "1" else lambda: None):
            try:
                with llm.turns():
                    for prompts in (PROMPTS[:2], PROMPTS[2:4], PROMPTS[4:]):
                        tokens(llm, prompts)
            except KeyboardInterrupt:
                found.append(("1", "turns", True))
        try:
            with llm.turns():
                if rank == "0":
                    interrupts.interrupt()
                tokens(llm)
        except KeyboardInterrupt:
            found.append(("0", "body of turns", True))
        assert tokens(llm) == expected, "turns"
    os.write(1, f"{found}\\n".encode())
    """


@pytest.mark.gate("tp", "dp")
@pytest.mark.guarantee("Ctrl-C in a call: the next one works")
@pytest.mark.parametrize(
    ("sizes", "points", "point_in_turns"),
    [
        (
            {"tensor_parallel_size": 2},
            [("encode", 2), ("agree", 3), ("sample", 2)],
            "schedule",
        ),
        pytest.param(
            {"tensor_parallel_size": 2}, [("schedule", 2), ("apply", 3)], "schedule", marks=pytest.mark.stress
        ),
        pytest.param(
            {"pipeline_parallel_size": 2},
            [("encode", 2), ("agree", 3), ("apply", 3)],
            "schedule",
            marks=pytest.mark.stress,
        ),
        # Replicas share the prompts as they come: one of them may schedule nothing, but it asks for work in each call.
        ({"data_parallel_size": 2}, [("encode", 2), ("take", 1)], "take"),
    ],
    ids=["tp", "tp, other points", "pp", "dp"],
)
def test_interrupt_ends_the_call_on_all_ranks(
    sizes: dict[str, int], points: list[tuple[str, int]], point_in_turns: str
):
    arguments = [checkpoint_folder("llama3"), repr(sizes), repr(points), point_in_turns]
    done = ranks.run_ranks(ON_RANKS, nproc=2, timeout_s=240, arguments=arguments).checked()
    first, second = map(ast.literal_eval, done.stdout.splitlines())
    assert first == second
    assert all(was_interrupted for _, _, was_interrupted in first), first
    assert len(first) == 3 * len(points) + 2


ALARM_ON_ONE = """
    import os, signal, sys
    import interrupts
    from interrupts import at, tokens
    from spmd_worker import LLM

    def late(number, frame):
        raise TimeoutError("too late")

    rank = os.environ["RANK"]
    signal.signal(signal.SIGALRM, late)
    with LLM(sys.argv[1], device="cpu", num_blocks=120, timeout_s=60, tensor_parallel_size=2) as llm:
        expected = tokens(llm)
        act = (lambda: os.kill(os.getpid(), signal.SIGALRM)) if rank == "1" else lambda: None
        try:
            with at("sample", 2, act):
                tokens(llm)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        assert tokens(llm) == expected
    os.write(1, f"{rank} {said}\\n".encode())
    """


def test_handler_exception_is_named_on_other_ranks():
    done = ranks.run_ranks(ALARM_ON_ONE, nproc=2, timeout_s=240, arguments=[checkpoint_folder("llama3")]).checked()
    assert sorted(done.stdout.splitlines()) == [
        "0 RankFailedError: rank 1 was interrupted: TimeoutError: too late",
        "1 TimeoutError: too late",
    ]


AT_RANDOM = """
    import os, random, sys, time
    import interrupts
    from interrupts import PROMPTS, at_random_moments, tokens
    from safetensors.torch import load_file
    from spmd_worker import LLM, BeamSearchParams

    interrupts.heed()
    folder, pooling_folder, text_folder, sizes, seed, times = sys.argv[1:]
    draw, options = random.Random(f"{seed} {os.environ['RANK']}"), {"device": "cpu", "num_blocks": 120, "timeout_s": 60}
    figures = {}

    def run(name, call, check):
        call()
        begun = time.monotonic()
        call()
        figures[name] = at_random_moments(call, check, time.monotonic() - begun, draw, int(times))

    def same(made):
        expected = made()
        def check():
            assert made() == expected
        return check

    with LLM(folder, **options, **eval(sizes)) as llm:
        answers = lambda: tokens(llm)
        run("generate", answers, same(answers))
        weights = load_file(folder + "/model.safetensors")
        run("weights", lambda: llm.update_weights(weights.items()), same(answers))
        if llm.get_world_size() > 1:
            run("sleep", llm.sleep, lambda: (llm.wake_up(), same(answers)()))
            beams = lambda: llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=2, max_tokens=6))
            run("beam_search", beams, same(lambda: [each.sequences[0].tokens for each in beams()]))
    with LLM(pooling_folder, **options, **eval(sizes)) as llm:
        vectors = lambda: [each.outputs for each in llm.embed(PROMPTS, use_tqdm=False)]
        run("embed", vectors, same(vectors))
    with LLM(text_folder, **options, **eval(sizes)) as llm:
        messages = [[{"role": "user", "content": text}] for text in ("hello", "good day to you all", "x" * 90)]
        said = lambda: [each.outputs[0].token_ids for each in llm.chat(messages, interrupts.GREEDY, use_tqdm=False)]
        run("chat", said, same(said))
    os.write(1, f"{figures}\\n".encode())
    """


@pytest.mark.stress
@pytest.mark.parametrize("size", [1, 2])
def test_fifty_interrupts_of_each_call_at_random(size: int, tmp_path_factory: pytest.TempPathFactory):
    text = write_text_checkpoint(tmp_path_factory.mktemp("text"))
    arguments = [checkpoint_folder("llama3"), pooling_folder("mean"), text, repr({"tensor_parallel_size": size})]
    done = ranks.run_ranks(AT_RANDOM, nproc=size, timeout_s=900, arguments=[*arguments, str(SEED), "50"]).checked()
    print(f"INTERRUPTS of 50 at random moments, {size} ranks: {done.stdout.splitlines()}")


FOLLOWED = """
    import os, sys
    import interrupts
    from interrupts import GREEDY, PROMPTS, at, is_interrupted, tokens
    from spmd_worker import LLM

    interrupts.heed()
    rank, num_interrupted = os.environ["RANK"], 0
    with LLM(sys.argv[1], device="cpu", num_blocks=120, timeout_s=120, **eval(sys.argv[2])) as llm:
        engine, expected = llm.llm_engine, tokens(llm)
        for _ in range(2):
            if rank == "0":
                for number, prompt in enumerate(PROMPTS):
                    engine.add_request(str(number), prompt, GREEDY)
                found = {}
                while engine.has_unfinished_requests():
                    with at("output"):
                        num_interrupted += is_interrupted(
                            lambda: found.update((each.request_id, each.outputs[0].token_ids) for each in engine.step())
                        )
                assert [found[str(number)] for number in range(len(PROMPTS))] == expected
                engine.close_followers()
            else:
                is_over = False
                while not is_over:
                    with at("schedule"):
                        is_over = not is_interrupted(engine.follow)
                    num_interrupted += not is_over
            assert tokens(llm) == expected
    os.write(1, f"{rank} {num_interrupted}\\n".encode())
    """


@pytest.mark.finding(number="D6")
@pytest.mark.parametrize(
    "key", ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.stress)]
)
def test_interrupted_follow_goes_on_when_called_again(key: str):
    """Also in its last step: called again, it waited for one that nobody makes."""
    done = ranks.run_ranks(
        FOLLOWED, nproc=2, timeout_s=240, arguments=[checkpoint_folder("llama3"), repr({key: 2})]
    ).checked()
    numbers = dict(map(str.split, done.stdout.splitlines()))
    assert int(numbers["0"]) >= 2
    assert int(numbers["1"]) > 20
