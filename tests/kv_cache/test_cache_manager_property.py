"""Random interleavings of everything the manager can do, steps in between: all that is read is what was written there.

Counts and links are checked after every single operation. Then the same random life with one thing broken: each such
manager, pool or engine must be noticed.
"""

import pytest
from cache_life import OPERATIONS, end_everything, live_randomly
from cache_simulation import Memories, make_simulation, move
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from property_examples import num_examples

from kv_cache.block_pool import BlockPool
from kv_cache.cache_manager import CacheManager
from kv_cache.connector import Transfers
from kv_cache.host_tier import HostTier
from kv_cache.pending_moves import PendingMoves
from kv_cache.swap_space import SwapSpace


class CacheManagerMachine(RuleBasedStateMachine):
    """Few and small blocks, so that sharing, running out and reuse within a step all happen often."""

    @initialize(
        num_blocks=st.integers(4, 12),
        block_size=st.integers(1, 4),
        num_host_blocks=st.integers(0, 9),
        num_slots=st.integers(0, 6),
        watermark_blocks=st.integers(0, 2),
    )
    def make(self, **sizes):
        self.simulation = make_simulation(**sizes)

    @rule(operation=st.sampled_from(list(OPERATIONS)), number=st.integers(0, 999))
    def operate(self, operation, number):
        operation(self.simulation, number)

    @invariant()
    def every_owner_is_accounted_for(self):
        self.simulation.check_integrity()

    def teardown(self):
        end_everything(self.simulation)


TestCacheManagerMachine = CacheManagerMachine.TestCase
TestCacheManagerMachine.settings = settings(max_examples=num_examples(150), stateful_step_count=50, deadline=None)


# --- negative controls: the same random life with one thing broken must be noticed --------------------------------


def test_random_operations_keep_contents_right():
    live_randomly()


@pytest.mark.stress
def test_many_random_operations_keep_contents_right():
    live_randomly(times=10)


class CopiesNothing(Memories):
    def copy(self, block_ops):
        pass


class CopiesOneAfterTheOther(Memories):
    def copy(self, block_ops):
        for pair in block_ops.copy:
            move(self.device, self.device, [pair])


class SwapsOutNothing(Memories):
    def swap_out(self, block_ops):
        pass


class SwapsInNothing(Memories):
    def swap_in(self, block_ops):
        pass


class CopiesBeforeItSwapsOut(Memories):
    order = ("copy", "swap_out", "store", "swap_in", "load")


class StoresAfterTheCopies(Memories):
    order = ("swap_out", "copy", "store", "swap_in", "load")


class StoresLast(Memories):
    order = ("swap_out", "copy", "swap_in", "load", "store")


class SwapsInBeforeItCopies(Memories):
    order = ("swap_out", "store", "swap_in", "copy", "load")


class SwapsInBeforeItSwapsOut(Memories):
    order = ("swap_in", "swap_out", "store", "copy", "load")


class LoadsFirst(Memories):
    order = ("load", "swap_out", "store", "copy", "swap_in")


class LoadsBeforeItCopies(Memories):
    order = ("swap_out", "store", "load", "copy", "swap_in")


class StoresWhenTheTransferEnds(Memories):
    """Reads the device's block later than in its step."""

    def finish(self, number):
        stored, loaded = self.in_flight[number]
        self.in_flight[number] = ([(self.device[self.sources[number, place]], place) for _, place in stored], loaded)
        super().finish(number)

    def store(self, block_ops):
        self.sources = getattr(self, "sources", {})
        self.sources |= {(block_ops.transfer, place): block_id for block_id, place in block_ops.store}
        super().store(block_ops)


@pytest.mark.gate(
    "StoresAfterTheCopies",
    "CopiesBeforeItSwapsOut",
    "LoadsFirst",
    "StoresLast",
    "CopiesNothing",
    "SwapsInBeforeItSwapsOut",
)
@pytest.mark.matrix
@pytest.mark.parametrize(
    "memories",
    [
        CopiesNothing,
        CopiesOneAfterTheOther,
        SwapsOutNothing,
        SwapsInNothing,
        CopiesBeforeItSwapsOut,
        StoresAfterTheCopies,
        StoresLast,
        SwapsInBeforeItCopies,
        SwapsInBeforeItSwapsOut,
        LoadsFirst,
        LoadsBeforeItCopies,
        StoresWhenTheTransferEnds,
    ],
)
def test_random_operations_detect_missing_or_reordered_moves(memories):
    with pytest.raises(AssertionError, match="reads another's"):
        live_randomly(memories=memories, times=2)  # three of them are found late


def with_parts(moves=PendingMoves, pool=BlockPool, swap=SwapSpace, host_pool=BlockPool, transfers=Transfers):
    """A manager some of whose parts are broken."""

    class ManagerWithParts(CacheManager):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            self._moves = moves()
            self._pool = pool(self.num_blocks, records_evictions=True)
            self._swap = swap(self.num_host_blocks)
            self._swap._pool = host_pool(self.num_host_blocks)
            self._transfers = transfers(self._transfers.connector)

    return ManagerWithParts


class NeverOverwrites(PendingMoves):
    def overwrite(self, block_ids):
        pass


class OverwritesCopiesOnly(PendingMoves):
    def overwrite(self, block_ids):
        for block_id in block_ids:
            self._copies.pop(block_id, None)


class CopiesFromPendingDestinations(PendingMoves):
    def copy(self, source, destination):
        self._copies[destination] = source


class CopiesFromBlocksThatAreSwappedIn(PendingMoves):
    def copy(self, source, destination):
        origin = self._copies.get(source, source)
        if origin != destination:
            self._copies[destination] = origin


class SwapsOutWhatArrives(PendingMoves):
    def receives(self, block_id):
        return False


class FindsBlocksThatWereEvicted(BlockPool):
    def _evict(self, block_id):
        block_hash = self._hashes[block_id]
        super()._evict(block_id)
        self._index.setdefault(block_hash, block_id)

    def check_integrity(self):
        pass


class ForgetsNoName(BlockPool):
    def clear_hashes(self):
        pass


class SharesWithoutCounting(BlockPool):
    def share(self, block_ids):
        for block_id in block_ids:
            if self.ref_count(block_id) == 0:
                super().share([block_id])


class ReleasesWhatIsReadAtOnce(SwapSpace):
    def release(self, table, *, is_read):
        super().release(table, is_read=False)


class NeverEndsTheStep(SwapSpace):
    def end_step(self):
        pass


class NamesWhatIsStillOnTheWay(Transfers):
    """What is loaded counts as soon as it is decided."""

    def load(self, hashes, places, block_ids):
        for block_hash, block_id in zip(hashes, block_ids):
            self.manager._pool.set_hash(block_id, block_hash)
        return super().load(hashes, places, block_ids)


class ManagerThatNamesWhatIsOnTheWay(CacheManager):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self._transfers = NamesWhatIsStillOnTheWay(self._transfers.connector)
        self._transfers.manager = self


class ForgetsNothingOnTheWay(Transfers):
    def forget(self):
        self.connector.forget()


class ForgetsNoPlace(Transfers):
    def forget(self):
        self._loading.clear()


@pytest.mark.gate("parts0-*", "parts1-*", "parts2-*", "parts3-*", "parts4-*", "parts9-*")
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"moves": NeverOverwrites}, "reads another's|receive"),
        ({"moves": OverwritesCopiesOnly}, "reads another's|receive"),
        ({"moves": CopiesFromPendingDestinations}, "reads another's|to itself"),
        ({"moves": CopiesFromBlocksThatAreSwappedIn}, "reads another's"),
        ({"moves": SwapsOutWhatArrives}, "reads another's"),
        ({"pool": FindsBlocksThatWereEvicted}, "reads another's"),
        ({"pool": ForgetsNoName}, "reads another's"),
        ({"pool": SharesWithoutCounting}, r"counts \d owners, \d tables list it"),
        ({"host_pool": ForgetsNoName}, "reads another's"),
        ({"swap": ReleasesWhatIsReadAtOnce}, "reads another's"),
        ({"swap": NeverEndsTheStep}, "the end leaves"),
        ({"transfers": ForgetsNothingOnTheWay}, "reads another's"),
        ({"transfers": ForgetsNoPlace}, "reads another's"),
    ],
)
def test_random_operations_detect_a_broken_part(parts, message):
    with pytest.raises(AssertionError, match=message):
        live_randomly(manager=with_parts(**parts))


class NeverCopiesOnWrite(CacheManager):
    def _shared_indices(self, table, first_token, num_tokens):
        return []


class WritesOverBlocksThatCanBeFound(CacheManager):
    """A fork that is shorter than its parent, and outlives it, wrote over what its parent had given a name."""

    def _shared_indices(self, table, first_token, num_tokens):
        shared = super()._shared_indices(table, first_token, num_tokens)
        return [index for index in shared if self._pool.ref_count(table.block_ids[index]) > 1]


class ForgetsToReleaseTheReplacedBlock(CacheManager):
    def extend(self, table, first_token, num_tokens):
        self._pool.share([table.block_ids[index] for index in self._shared_indices(table, first_token, num_tokens)])
        return super().extend(table, first_token, num_tokens)


class ForgetsToShare(CacheManager):
    def fork(self, table):
        child = super().fork(table)
        self._pool.release(table.block_ids)
        return child


class SwapsOutWhatIsNotWritten(CacheManager):
    def swap_out(self, table, hashes):
        fresh, self._fresh = self._fresh, {}
        host_table = super().swap_out(table, hashes)
        self._fresh = fresh
        return host_table


class ForgetsWhatCountsAsFree(CacheManager):
    def can_start(self, prefix, num_tokens, *, keep_watermark=False):
        return self._are_free(-(-num_tokens // self.block_size) - len(prefix), keep_watermark)


class StoresWhatHasNotArrived(CacheManager):
    def _take(self, count):
        taken = self._pool.take(count)
        for block_hash, block_id in self._pool.take_evicted():
            self._transfers.store(block_hash, block_id)
        self._moves.overwrite(taken)
        return taken


class LoadsWhatItDroveOut(CacheManager):
    """Device blocks for a load were taken before its places were reserved: what they evicted took those places."""

    def load_prefix(self, prefix, hashes, num_tokens):
        connector, load = self._transfers.connector, self._transfers.load
        reserve, connector.load = connector.load, lambda hashes: None
        self._transfers.load = lambda hashes, _, blocks: load(hashes, reserve(hashes), blocks)
        try:
            return super().load_prefix(prefix, hashes, num_tokens)
        finally:
            del connector.load, self._transfers.load


@pytest.mark.gate(
    "WritesOver*", "SwapsOutWhat*", "LoadsWhat*", "ForgetsWhat*", "ManagerThat*", "NeverCopies*", "ForgetsTo*"
)
@pytest.mark.parametrize(
    ("manager", "message"),
    [
        (NeverCopiesOnWrite, "reads another's|has another hash"),
        (WritesOverBlocksThatCanBeFound, "reads another's|has another hash"),
        (ForgetsToReleaseTheReplacedBlock, r"counts \d owners, \d tables list it"),
        (ForgetsToShare, r"counts \d owners, \d tables list it"),
        (SwapsOutWhatIsNotWritten, "reads another's"),
        (ForgetsWhatCountsAsFree, "can_start"),
        (StoresWhatHasNotArrived, "reads another's"),
        (ManagerThatNamesWhatIsOnTheWay, "reads another's"),
        (LoadsWhatItDroveOut, "blocks wanted"),
    ],
)
def test_random_operations_detect_a_broken_manager(manager, message):
    with pytest.raises(AssertionError, match=message):
        live_randomly(times=2, manager=manager)


class NamesPlacesThatAreNotWritten(HostTier):
    def store(self, block_hash):
        place = super().store(block_hash)
        if place is not None:
            self._pool.set_hash(place, block_hash)
        return place


class ReservesNoPlaceThatIsRead(HostTier):
    def load(self, hashes):
        places = super().load(hashes)
        self._pool.release(places)
        return places

    def finish(self, stored, loaded):
        super().finish(stored, [])


class ReservesNoPlaceThatIsStoredTo(HostTier):
    def store(self, block_hash):
        place = super().store(block_hash)
        if place is not None:
            self._pool.release([place])
        return place

    def finish(self, stored, loaded):
        for block_hash, place in stored:
            if self._storing.pop(block_hash, None) == place:
                self._pool.share([place])
                self._pool.set_hash(place, block_hash)
                self._pool.release([place])
        super().finish([], loaded)

    def check_integrity(self):
        pass


class NamesAfterItForgot(HostTier):
    """What was being stored when everything was to be forgotten is found afterwards."""

    def forget(self):
        self._pool.clear_hashes()


@pytest.mark.parametrize(
    "tier",
    [NamesPlacesThatAreNotWritten, ReservesNoPlaceThatIsRead, ReservesNoPlaceThatIsStoredTo, NamesAfterItForgot],
)
def test_random_operations_detect_a_broken_connector(tier):
    with pytest.raises(AssertionError, match=r"another's|stored .*twice"):
        live_randomly(tier=tier)
