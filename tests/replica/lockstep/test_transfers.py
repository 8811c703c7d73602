"""A transfer counts when every rank has finished it: the book, the answers, the lockstep, and an engine on three ranks.

The engine's ranks are threads; what they execute is made up, and each finishes its transfers in its own time.
"""

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import REPOSITORY
from star_channels import LONG_S, star
from thread_control import ThreadControl, thread_controls

from kv_cache.cache_manager import CacheManager
from kv_cache.host_tier import HostTier
from spmd_worker.base.config.schema import ExecutorConfig, ModelOptions, RunConfig
from spmd_worker.base.errors import ReplicaDivergedError
from spmd_worker.engine.engine import Engine
from spmd_worker.executor.adapters import ExecutorAdapters
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks.transport.step_channel import GlooStepChannel
from spmd_worker.replica.lockstep import lockstep as lockstep_module
from spmd_worker.replica.lockstep.channel import FollowerChannel, LeaderChannel
from spmd_worker.replica.lockstep.digest import NUM_DIGEST_BYTES
from spmd_worker.replica.lockstep.lockstep import Lockstep, StepReport
from spmd_worker.replica.lockstep.transfers import TransferBook, pack_answer, unpack_answer
from spmd_worker.replica.mirror.mirror import Mirror
from spmd_worker.replica.scheduler.planner import SchedulerLimits
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.scheduler.stop import StopChecker
from spmd_worker.replica.sequence.adapter_kind import LORA, PROMPT
from spmd_worker.replica.sequence.events import Event, FinishTransfers
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceGroup
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.resolved import resolve_run

NUM_RANKS = 3
DIGEST = bytes(range(NUM_DIGEST_BYTES))


# The book.


def test_transfer_counts_when_every_rank_reported_it():
    book = TransferBook(3)
    book.add(0, (1, 2))
    book.add(1, (2,))
    assert book.take_complete() == ()
    book.add(2, (1, 2))
    assert book.take_complete() == (2,)
    book.add(1, (1,))
    assert book.take_complete() == (1,)


def test_transfers_complete_once_and_in_order():
    book = TransferBook(2)
    book.add(0, (1, 2, 3))
    book.add(1, (3, 1))
    assert book.take_complete() == (3, 1)
    assert book.take_complete() == ()
    book.add(1, (2,))
    assert book.take_complete() == (2,)


def test_transfer_that_failed_on_one_rank_has_failed():
    book = TransferBook(3)
    book.add(0, (1, 2))
    book.add(1, (-1, 2))
    book.add(2, (1, 2))
    assert book.take_complete() == (-1, 2)
    for number in (3, -4):
        for rank in range(3):
            book.add(rank, (number,))
    assert book.take_complete() == (3, -4)
    assert unpack_answer(pack_answer(DIGEST, (-7, 8))).finished_transfers == (-7, 8)


def test_single_rank_transfer_counts_at_once():
    book = TransferBook(1)
    book.add(0, (4, 5))
    assert book.take_complete() == (4, 5)


def test_finishing_a_transfer_twice_is_an_assertion_error():
    book = TransferBook(3)
    book.add(1, (7,))
    with pytest.raises(AssertionError, match=r"rank 1 .*transfer 7 twice"):
        book.add(1, (7,))
    with pytest.raises(AssertionError, match=r"rank 2 .*transfer 8 twice"):
        book.add(2, (8, 8))


@given(st.integers(1, 4).flatmap(lambda size: st.permutations([(rank, n) for rank in range(size) for n in range(5)])))
def test_transfer_counts_with_last_rank_in_any_order(reports):
    num_ranks = 1 + max(rank for rank, _ in reports)
    book, said = TransferBook(num_ranks), dict.fromkeys(range(5), 0)
    for rank, number in reports:
        book.add(rank, (number,))
        said[number] += 1
        assert book.take_complete() == ((number,) if said[number] == num_ranks else ())


# Answers.


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20).map(tuple))
def test_answer_round_trips(numbers):
    assert unpack_answer(pack_answer(DIGEST, numbers)) == (DIGEST, numbers, "")


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple), st.text(max_size=20))
def test_answer_carries_handler_error(numbers, text):
    assert unpack_answer(pack_answer(DIGEST, numbers, text)) == (DIGEST, numbers, text)


def test_answer_without_transfers_is_digest_alone():
    assert pack_answer(DIGEST, ()) == DIGEST


@pytest.mark.parametrize("numbers", [(), (5,), (5, 2**40)])
def test_damaged_answer_equals_no_digest(numbers):
    answer = pack_answer(DIGEST, numbers)
    cut = [answer[:length] for length in range(len(answer)) if length != NUM_DIGEST_BYTES]
    longer = [answer + bytes(count) for count in range(1, 8)]
    flipped = [bytes([*answer[:place], answer[place] ^ 1, *answer[place + 1 :]]) for place in range(NUM_DIGEST_BYTES)]
    assert len(cut) >= NUM_DIGEST_BYTES
    for damaged in (*cut, *longer, *flipped):
        assert unpack_answer(damaged)[0] != DIGEST, damaged
    assert unpack_answer(answer)[0] == DIGEST


# The lockstep, over TCP and over a control group, whose ranks are threads here.

Channels = list[LeaderChannel | FollowerChannel]


def agree_by_script(
    channels: Channels, digest_every: int, script: list[dict[int, tuple[int, ...]]], num_steps: int
) -> list[dict[int, tuple[int, ...]]]:
    """By rank: what `take_finished_transfers` gave after which step. `script` says which rank finished what before."""

    def rank_loop(rank: int, channel: LeaderChannel | FollowerChannel) -> dict[int, tuple[int, ...]]:
        lockstep, taken = Lockstep(channel, digest_every), {}
        for step in range(1, num_steps + 1):
            lockstep.agree(StepPlan(step), StepReport(finished_transfers=script[rank].get(step, ())))
            finished = lockstep.take_finished_transfers()
            if finished:
                taken[step] = finished
        return taken

    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(rank_loop, rank, channel) for rank, channel in enumerate(channels)]
        return [future.result(LONG_S) for future in futures]


def agree_both_ways(digest_every: int, script: list[dict[int, tuple[int, ...]]], num_steps: int):
    """Over TCP and over gloo, which must say the same."""
    with star(len(script) - 1) as (leader, followers):
        over_tcp = agree_by_script([leader, *followers], digest_every, script, num_steps)
    controls = [GlooStepChannel(control) for control in thread_controls(len(script))]
    assert agree_by_script(controls, digest_every, script, num_steps) == over_tcp
    return over_tcp


def test_finished_transfers_reach_rank_0_with_answers():
    script = [{1: (1,), 2: (2,), 3: (3,)}, {2: (1, 2), 5: (3,)}, {3: (2,), 4: (1, 3)}]
    assert agree_both_ways(1, script, 6) == [{3: (2,), 4: (1,), 5: (3,)}, {}, {}]


def test_transfer_reports_wait_for_next_comparison():
    """Digests are compared every third step."""
    script = [{1: (1,), 2: (2,), 8: (3,)}, {1: (1,), 4: (2,), 6: (3,)}, {2: (1,), 3: (2,), 7: (3,)}]
    assert agree_both_ways(3, script, 9) == [{3: (1,), 6: (2,), 9: (3,)}, {}, {}]


def test_followers_are_not_heard_without_digests():
    """The configuration rejects transfers without digests for this reason."""
    assert agree_both_ways(0, [{1: (1,)}] * 3, 6) == [{}, {}, {}]


def test_replica_of_one_needs_no_peer():
    lockstep = Lockstep(None, digest_every=1)
    lockstep.agree(StepPlan(1), StepReport(finished_transfers=(4, 5)))
    assert lockstep.take_finished_transfers() == (4, 5)
    assert lockstep.take_finished_transfers() == ()


def test_transfers_are_not_part_of_digest():
    """Ranks finish in their own time: the digests, and so the steps, are equal all the same."""
    with star(1) as (leader, followers), ThreadPoolExecutor() as pool:
        replicas = [Lockstep(channel, digest_every=1) for channel in (leader, *followers)]
        futures = [
            pool.submit(each.agree, StepPlan(1), StepReport(finished_transfers=finished))
            for each, finished in zip(replicas, [(), (1, 2)], strict=True)
        ]
        assert [future.result(LONG_S).plan for future in futures] == [StepPlan(1)] * 2
    assert replicas[0].chain_head == replicas[1].chain_head


def test_answer_with_extra_byte_ends_every_rank(monkeypatch):
    monkeypatch.setattr(lockstep_module, "pack_answer", lambda *given: pack_answer(*given) + b"x")
    with star(1) as (leader, followers), ThreadPoolExecutor() as pool:

        def outcome(channel: LeaderChannel | FollowerChannel) -> BaseException:
            lockstep = Lockstep(channel, digest_every=1)
            try:
                lockstep.agree(StepPlan(1), StepReport())
            except Exception as error:
                return lockstep.diagnose(error)
            raise AssertionError("the step ran")

        outcomes = [future.result(LONG_S) for future in [pool.submit(outcome, each) for each in (leader, *followers)]]
    assert [type(each) for each in outcomes] == [ReplicaDivergedError] * 2
    assert len({str(each) for each in outcomes}) == 1


# The engine: transfers of a host tier on three ranks.

MODEL = REPOSITORY / "scripts" / "demo" / "model"
SHAPE = read_model_files(MODEL).model_config
NUM_BLOCKS, BLOCK_SIZE = 6, 4


@dataclass
class MadeUpExecutor:
    """Samples 9 everywhere, and finishes each transfer `delays` steps after it began, in turn."""

    delays: tuple[int, ...]
    said: dict[int, int] = field(default_factory=dict)
    num_loaded_blocks: int = 0
    max_concurrent_batches: int = 1
    is_sleeping: bool = False

    def __post_init__(self) -> None:
        self.adapters, self.prompt_adapters = ExecutorAdapters(self, 0, LORA), ExecutorAdapters(self, 0, PROMPT)
        self._mirror = Mirror(NUM_BLOCKS, BLOCK_SIZE)
        self._in_flight: deque[tuple[int, int]] = deque()

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Nothing fails."""

    def attach_engine(self, engine: object) -> None:
        pass

    def watch_layers(self, on_layer: Callable[[], None]) -> None:
        """There are no towers."""

    def watch_requests(self, num_in_flight: Callable[[], int]) -> None:
        """There are no weights."""

    def get_weight_updates(self) -> list[None]:
        return []

    def execute_model(self, plan: StepPlan, non_block: bool) -> StepResult:
        rows = self._mirror.apply(plan)
        operations = plan.block_ops
        self.num_loaded_blocks += len(operations.load)
        if operations.transfer:
            delay = self.delays[operations.transfer % len(self.delays)]
            self._in_flight.append((plan.step + delay, operations.transfer))
        finished = [number for end, number in self._in_flight if end <= plan.step]
        self._in_flight = deque(each for each in self._in_flight if each[0] > plan.step)
        self.said.update(dict.fromkeys(finished, plan.step))
        token_ids = (9,) * sum(row.num_samples for row in rows)
        return StepResult(plan.step, token_ids, finished_transfers=tuple(finished))

    def shutdown(self) -> None:
        """Nothing is held."""


class WatchedScheduler(Scheduler):
    """Notes in which step it is told that transfers have finished."""

    def __init__(self) -> None:
        limits = SchedulerLimits(4, 32, enable_prefix_caching=True)
        cache = CacheManager(NUM_BLOCKS, BLOCK_SIZE, connector=HostTier(12))
        super().__init__(limits, cache, StopChecker(SHAPE.eos_token_ids, 64, None))
        self.told: dict[int, int] = {}

    def handle(self, event: Event) -> SequenceGroup | None:
        if isinstance(event, FinishTransfers):
            self.told.update(dict.fromkeys(event.numbers, self._step))
        return super().handle(event)


def new_engine(
    control: ThreadControl, channel: LeaderChannel | FollowerChannel, delays: tuple[int, ...], digest_every: int
) -> Engine:
    config = RunConfig(
        model=ModelOptions(str(MODEL), max_model_len=64), executor=ExecutorConfig(digest_every=digest_every)
    )
    lockstep = Lockstep(channel, digest_every)
    resolved, executor = resolve_run(config, "cpu"), MadeUpExecutor(delays)
    return Engine(resolved, executor, control, control, lockstep, WatchedScheduler(), None)


def run_rank(engine: Engine) -> Engine:
    """Three prompts over and over, in a cache that holds one at a time: each evicts the others, and is brought back."""
    if not engine.is_leader:
        engine.follow()
        return engine
    for number in range(12):
        prompt = tuple(range(10 * (number % 3) + 1, 10 * (number % 3) + 14))
        engine.requests.add(PromptContent(prompt), SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    engine.close_followers()
    return engine


def run_engines(delays: tuple[tuple[int, ...], ...], digest_every: int) -> list[Engine]:
    """One engine a rank, after the run; `delays` by rank."""
    controls = thread_controls(len(delays))
    # Channels are closed first, or an error of one rank would leave the others waiting.
    with ThreadPoolExecutor() as pool, star(len(delays) - 1) as (leader, followers):
        channels = (leader, *followers)
        engines = [new_engine(*each, digest_every) for each in zip(controls, channels, delays, strict=True)]
        futures = [pool.submit(run_rank, engine) for engine in engines]
        return [future.result(LONG_S) for future in futures]


def check_transfers(engines: list[Engine], digest_every: int) -> None:
    """Every replica was told of every transfer in one step, the next possible one after its last rank had said so."""
    told = [engine.scheduler.told for engine in engines]
    assert told[0] == told[1] == told[2]
    assert len(told[0]) > 8
    for number, step in told[0].items():
        # An answer goes up with the first compared step after the one that executed; the event is the next step's.
        first, *others = [engine.executor.said[number] for engine in engines]
        heard = max(first + 1, *[digest_every * math.ceil((said + 1) / digest_every) for said in others])
        assert step == heard + 1, (number, step, first, others)
    assert engines[0].executor.num_loaded_blocks > 8


DELAYS = ((0, 2), (1, 0, 3), (0, 0, 0, 5))
"""So that each rank is the last one now and then."""


@pytest.mark.parametrize("digest_every", [1, 3])
def test_replicas_apply_transfer_together_after_last_rank(digest_every):
    engines = run_engines(DELAYS, digest_every)
    check_transfers(engines, digest_every)
    last_ranks = [max(range(3), key=lambda r: engines[r].executor.said[n]) for n in engines[0].scheduler.told]
    assert sorted(dict.fromkeys(last_ranks)) == [0, 1, 2]


def test_slow_rank_delays_loads_but_changes_no_token():
    slow, fast = run_engines(((0,), (0,), (7,)), 1), run_engines(((0,), (0,), (0,)), 1)
    counters = [engines[0].counters for engines in (slow, fast)]
    assert counters[0].num_steps > counters[1].num_steps
    assert counters[0].num_output_tokens == counters[1].num_output_tokens == 48
    assert counters[0].num_cached_prompt_tokens > 0


def believe_the_first(book: TransferBook, rank: int, numbers: tuple[int, ...]) -> None:
    for number in numbers:
        if not book._finished_by.setdefault(number, []):
            book._complete.append(number)
        book._finished_by[number].append(rank)


def believe_the_leader(book: TransferBook, rank: int, numbers: tuple[int, ...]) -> None:
    if rank == 0:
        book._complete += numbers


@pytest.mark.parametrize("believe", [believe_the_first, believe_the_leader])
def test_transfer_check_detects_book_believing_one_rank(monkeypatch, believe: Callable[..., None]):
    """Negative control: blocks would be used that a rank does not have yet, and nothing else would show it."""
    monkeypatch.setattr(TransferBook, "add", believe)
    engines = run_engines(DELAYS, 1)
    with pytest.raises((AssertionError, KeyError)):
        check_transfers(engines, 1)


def test_transfer_check_detects_ranks_following_own_device(monkeypatch):
    """Negative control: completion acted on where it is seen, not where every rank is told of it."""
    right = Engine._run_step

    def run_step(self: Engine) -> list[SequenceGroup]:
        self.scheduler.handle(FinishTransfers(self._finished_transfers))
        return right(self)

    monkeypatch.setattr(TransferBook, "add", lambda self, rank, numbers: None)
    monkeypatch.setattr(Engine, "_run_step", run_step)
    with pytest.raises(ReplicaDivergedError, match="rank"):
        run_engines(DELAYS, 1)
