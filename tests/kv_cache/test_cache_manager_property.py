"""Random interleavings of extend, fork and release, steps in between: every sequence reads its own tokens back."""

from random import Random

import pytest
from cache_simulation import CacheSimulation, copy_nothing, copy_one_after_the_other
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_cache.cache_manager import CacheManager

MAX_SEQUENCES = 6
INDEX = st.integers(0, MAX_SEQUENCES - 1)


class CacheManagerMachine(RuleBasedStateMachine):
    """Few and small blocks, so that sharing, running out and reuse within a step all happen often."""

    @initialize(num_blocks=st.integers(4, 12), block_size=st.integers(1, 4), num_tokens=st.integers(1, 4))
    def make(self, num_blocks, block_size, num_tokens):
        self.simulation = CacheSimulation(CacheManager(num_blocks, block_size))
        self.num_started = 0
        self.start()
        self.simulation.extend("1", num_tokens)
        self.simulation.run_step()

    def new_name(self):
        self.num_started += 1
        return str(self.num_started)

    def pick(self, index):
        names = list(self.simulation.sequences)
        return names[index % len(names)]

    @precondition(lambda self: len(self.simulation.sequences) < MAX_SEQUENCES)
    @rule()
    def start(self):
        self.simulation.start(self.new_name())

    @precondition(lambda self: self.simulation.sequences)
    @rule(index=INDEX, num_new_tokens=st.integers(1, 7))
    def extend(self, index, num_new_tokens):
        name = self.pick(index)
        if self.simulation.sequences[name].num_planned == 0:
            self.simulation.extend(name, num_new_tokens)

    @precondition(lambda self: self.simulation.sequences)
    @rule(index=INDEX, num_new_tokens=st.integers(1, 3))
    def extend_or_preempt(self, index, num_new_tokens):
        extend_or_preempt(self.simulation, self.pick(index), num_new_tokens)

    @precondition(lambda self: 0 < len(self.simulation.sequences) < MAX_SEQUENCES)
    @rule(index=INDEX)
    def fork(self, index):
        self.simulation.fork(self.pick(index), self.new_name())

    @precondition(lambda self: 0 < len(self.simulation.sequences) < MAX_SEQUENCES)
    @rule(index=INDEX, num_new_tokens=st.integers(1, 3))
    def fork_and_extend(self, index, num_new_tokens):
        name = self.new_name()
        self.simulation.fork(self.pick(index), name)
        self.simulation.extend(name, num_new_tokens)

    @precondition(lambda self: self.simulation.sequences)
    @rule(index=INDEX)
    def release(self, index):
        self.simulation.release(self.pick(index))

    @rule()
    def run_step(self):
        self.simulation.run_step()

    @invariant()
    def every_owner_is_accounted_for(self):
        self.simulation.check_integrity()

    def teardown(self):
        self.simulation.run_step()
        for name in list(self.simulation.sequences):
            self.simulation.release(name)
        self.simulation.check_integrity()
        assert self.simulation.manager.num_free_blocks == self.simulation.manager.num_blocks


TestCacheManagerMachine = CacheManagerMachine.TestCase
TestCacheManagerMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


# --- negative controls: the same random life with one thing broken must be noticed --------------------------------


def live_randomly(simulation, num_operations=30_000):
    """A fixed random life with many forks in a step. Raises AssertionError as soon as contents or counts are wrong."""
    random, num_started = Random(5), 0
    for _ in range(num_operations):
        names = list(simulation.sequences)
        choice = random.choice(["start", "run_step", "release"] + ["fork"] * 4 + ["extend"] * 6)
        if choice == "run_step":
            simulation.run_step()
        elif choice == "release" and names:
            simulation.release(random.choice(names))
        elif choice == "extend" and names:
            extend_or_preempt(simulation, random.choice(names), random.choice([1, 1, 1, 4]))
        elif choice in ("start", "fork") and len(names) < MAX_SEQUENCES:
            num_started += 1
            if choice == "start" or not names:
                simulation.start(str(num_started))
            else:
                simulation.fork(random.choice(names), str(num_started))
        simulation.check_integrity()


def extend_or_preempt(simulation, name, num_new_tokens):
    """As a scheduler does: the sequence that started last makes room, even if it was extended in this very step."""
    if simulation.sequences[name].num_planned > 0:
        return
    while name in simulation.sequences and not simulation.extend(name, num_new_tokens):
        simulation.release(list(simulation.sequences)[-1])


def test_a_long_random_life_is_right():
    live_randomly(CacheSimulation(CacheManager(7, block_size=4)))


@pytest.mark.parametrize("execute_copies", [copy_nothing, copy_one_after_the_other])
def test_copies_left_out_or_run_in_sequence_are_noticed(execute_copies):
    with pytest.raises(AssertionError, match="reads another's tokens"):
        live_randomly(CacheSimulation(CacheManager(7, block_size=4), execute_copies))


class KeepsPairsOfFreedBlocks(CacheManager):
    def _drop_copies_to_free_blocks(self):
        pass


class CopiesFromPendingDestinations(CacheManager):
    def _replace_shared(self, source, destination, *, must_copy):
        if must_copy:
            self._copy_sources[destination] = source
        self._pool.release((source,))


class NeverCopiesOnWrite(CacheManager):
    def _shared_indices(self, table, first_token, num_tokens):
        return []


class ForgetsToReleaseTheReplacedBlock(CacheManager):
    def _replace_shared(self, source, destination, *, must_copy):
        super()._replace_shared(source, destination, must_copy=must_copy)
        self._pool.share((source,))


class ForgetsToShare(CacheManager):
    def fork(self, table):
        child = super().fork(table)
        self._pool.release(table.block_ids)
        return child


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (KeepsPairsOfFreedBlocks, "the destination is free"),
        (CopiesFromPendingDestinations, "reads another's tokens"),
        (NeverCopiesOnWrite, "reads another's tokens"),
        (ForgetsToReleaseTheReplacedBlock, r"counts \d owners, \d tables list it"),
        (ForgetsToShare, r"counts \d owners, \d tables list it"),
    ],
)
def test_a_broken_manager_is_noticed(broken, message):
    with pytest.raises(AssertionError, match=message):
        live_randomly(CacheSimulation(broken(7, block_size=4)))
