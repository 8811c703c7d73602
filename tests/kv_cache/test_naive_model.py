"""Random operations on the manager and on a naive model of it: the same answers, and integrity after each."""

from random import Random

import pytest
from naive_cache import NaiveCache

from kv_cache.block_table import BlockTable, TableChange
from kv_cache.cache_manager import CacheManager
from kv_cache.free_queue import FreeQueue
from kv_cache.host_tier import HostTier

MAX_SEQUENCES = 7
MAX_TOKENS = 24


class Sequence:
    def __init__(self, tokens):
        self.tokens, self.num_written, self.num_planned, self.num_named = tokens, 0, 0, 0
        self.table, self.host_table, self.transfer = BlockTable(), None, None
        self.is_filled_now = False


class Pair:
    """A manager and its model. Every operation asks both and compares what they say."""

    def __init__(self, random, sizes, manager=CacheManager):
        num_blocks, block_size, watermark_blocks, num_host_blocks, num_slots = sizes
        self.random, self.block_size = random, block_size
        connector = HostTier(num_slots) if num_slots else None
        self.manager = manager(
            num_blocks, block_size, watermark_blocks, num_host_blocks=num_host_blocks, connector=connector
        )
        self.naive = NaiveCache(num_blocks, block_size, watermark_blocks, num_host_blocks, num_slots)
        self.sequences = {}
        self.num_started = 0

    # Operations. Each returns without a word where it is not possible.

    def start(self):
        """A prompt of zeros and ones: many begin alike. What is found is adopted, or more of it is loaded."""
        if len(self.sequences) == MAX_SEQUENCES:
            return
        random = self.random
        tokens = [int(random.random() < 0.2) for _ in range(random.randint(1, MAX_TOKENS))]
        self.num_started += 1
        key, sequence = self.num_started, Sequence(tokens)
        self.sequences[key] = sequence
        self.naive.tables[key] = []
        self.begin(key, sequence)

    def look_again(self):
        key = self.pick(lambda each: is_here(each) and not each.table.block_ids)
        if key is not None:
            self.begin(key, self.sequences[key])

    def begin(self, key, sequence):
        names = self.names(sequence, len(sequence.tokens) - 1)
        prefix = self.manager.find_prefix(names)
        agree("find_prefix", prefix, self.naive.device.find_chain(names))
        for keep_watermark in (True, False):
            can_start = self.manager.can_start(prefix, len(sequence.tokens), keep_watermark=keep_watermark)
            agree("can_start", can_start, self.naive.can_start(prefix, len(sequence.tokens), keep_watermark))
        sequence.transfer = self.manager.load_prefix(prefix, names, len(sequence.tokens))
        agree("load_prefix", sequence.transfer, self.naive.load_prefix(prefix, names, len(sequence.tokens)))
        if sequence.transfer is None and can_start:
            self.manager.adopt(sequence.table, prefix)
            self.naive.adopt(key, prefix)
            sequence.num_named = len(prefix)
            sequence.num_written = len(prefix) * self.block_size

    def extend(self):
        """A prompt's next chunk, or a token; named at once or later."""
        key = self.pick(lambda each: is_here(each) and not each.num_planned)
        if key is None:
            return
        sequence, random = self.sequences[key], self.random
        num_left = len(sequence.tokens) - sequence.num_written
        if num_left == 0:
            sequence.tokens.append(random.randint(0, 1))
        num_tokens = sequence.num_written + random.randint(1, max(1, num_left))
        if not self.can_extend(key, num_tokens):
            return
        change = self.manager.extend(sequence.table, sequence.num_written, num_tokens)
        agree("extend", change, TableChange(*self.naive.extend(key, sequence.num_written, num_tokens)))
        sequence.num_planned = num_tokens - sequence.num_written
        if random.random() < 0.6:
            self.name(key)

    def can_extend(self, key, num_tokens):
        sequence = self.sequences[key]
        arguments = sequence.table, sequence.num_written, num_tokens
        num_new = self.naive.num_new_blocks(key, sequence.num_written, num_tokens)
        agree("num_new_blocks", self.manager.num_new_blocks(*arguments), num_new)
        are_free = self.naive.are_free(num_new, False)
        agree("can_extend", self.manager.can_extend(*arguments), are_free)
        return are_free

    def name_something(self):
        key = self.pick(is_here)
        if key is not None:
            self.name(key)

    def name(self, key):
        sequence = self.sequences[key]
        names = self.names(sequence, sequence.num_written + sequence.num_planned)
        if len(names) > sequence.num_named:
            self.manager.set_hashes(sequence.table, names, sequence.num_named, sequence.num_written)
            self.naive.set_hashes(key, names, sequence.num_named, sequence.num_written)
            sequence.num_named = len(names)

    def fork(self):
        key = self.pick(is_here)
        if key is None or len(self.sequences) == MAX_SEQUENCES:
            return
        parent = self.sequences[key]
        self.num_started += 1
        child = Sequence(parent.tokens[: parent.num_written])
        child.num_written = parent.num_written
        child.num_named = min(parent.num_named, parent.num_written // self.block_size)
        child.table = self.manager.fork(parent.table)
        self.naive.fork(key, self.num_started)
        self.sequences[self.num_started] = child

    def release(self):
        key = self.pick(lambda each: each.transfer is None and self.can_leave(each))
        if key is None:
            return
        sequence = self.sequences.pop(key)
        if sequence.host_table is not None:
            self.manager.release_host(sequence.host_table)
            self.naive.release_host(key)
        self.manager.release(sequence.table)
        self.naive.release(key)
        del self.naive.tables[key]

    def swap_out(self):
        key = self.pick(is_here)
        if key is None:
            return
        sequence = self.sequences[key]
        names = self.names(sequence, sequence.num_written)
        host_table = self.manager.swap_out(sequence.table, names)
        missing = self.naive.swap_out(key, names)
        agree("swap_out", host_table and host_table.block_ids, None if missing is None else self.naive.host_tables[key])
        if host_table is not None:
            sequence.host_table, sequence.num_planned = host_table, 0

    def swap_in(self):
        key = self.pick(lambda each: each.host_table is not None)
        if key is None:
            return
        sequence = self.sequences[key]
        names, num_tokens = self.names(sequence, sequence.num_written), sequence.num_written + self.random.randint(0, 5)
        for keep_watermark in (True, False):
            can_swap_in = self.manager.can_swap_in(
                sequence.host_table, names, num_tokens, keep_watermark=keep_watermark
            )
            agree("can_swap_in", can_swap_in, self.naive.can_swap_in(key, names, num_tokens, keep_watermark))
        if can_swap_in:
            sequence.table = self.manager.swap_in(sequence.host_table, names)
            self.naive.swap_in(key, names)
            sequence.host_table, sequence.num_named = None, len(names)

    def finish_transfer(self):
        if self.naive.in_flight:
            number = self.random.choice(list(self.naive.in_flight))
            self.manager.finish_transfer(number)
            self.naive.finish_transfer(number)
            for sequence in self.sequences.values():
                sequence.transfer = None if sequence.transfer == number else sequence.transfer

    def reset_prefix_cache(self):
        self.manager.reset_prefix_cache()
        self.naive.reset_prefix_cache()

    def run_step(self):
        block_ops, (pairs, number) = self.manager.take_block_ops(), self.naive.end_step()
        for kind, expected in pairs.items():
            agree(kind, sorted(getattr(block_ops, kind)), sorted(expected))
        agree("transfer", block_ops.transfer, number)
        for sequence in self.sequences.values():
            sequence.num_written, sequence.num_planned = sequence.num_written + sequence.num_planned, 0

    # What holds after every one of them.

    def compare(self):
        manager, naive = self.manager, self.naive
        manager.check_integrity(
            [sequence.table for sequence in self.sequences.values()],
            [sequence.host_table for sequence in self.sequences.values() if sequence.host_table is not None],
        )
        free = naive.device.free
        agree("free blocks, in their order", list(manager._pool._free), free)
        agree("num_free_blocks", manager.num_free_blocks, len(free))
        agree("num_used_blocks", manager.num_used_blocks, manager.num_blocks - len(free))
        agree("num_cached_blocks", manager.num_cached_blocks, sum(map(free.__contains__, naive.device.names.values())))
        agree("num_used_host_blocks", manager.num_used_host_blocks, manager.num_host_blocks - len(naive.host.free))
        for key, sequence in self.sequences.items():
            agree(f"table {key}", sequence.table.block_ids, naive.tables[key])

    def compare_memories(self):
        """The order in which host blocks and places will go, too, once in a while."""
        agree("free host blocks", list(self.manager._swap._pool._free), self.naive.host.free)
        if self.naive.has_connector:
            tier = self.manager._transfers.connector
            agree("free places", list(tier._pool._free), self.naive.tier.free)
            agree("num_stored", len(tier._pool._index), len(self.naive.tier.names))

    def names(self, sequence, num_tokens):
        """A block's name is all that it depends on, spelt out: no two of them are equal by chance."""
        tokens, size = bytes(sequence.tokens[:num_tokens]), self.block_size
        return [tokens[: (index + 1) * size] for index in range(num_tokens // size)]

    def pick(self, is_possible):
        keys = [key for key, sequence in self.sequences.items() if is_possible(sequence)]
        return self.random.choice(keys) if keys else None

    def can_leave(self, sequence):
        return not any(block_id in self.naive.fresh for block_id in sequence.table.block_ids)


def is_here(sequence):
    return sequence.host_table is None and sequence.transfer is None


def agree(what, answer, expected):
    assert answer == expected, f"{what}: the manager says {answer}, the model {expected}"


OPERATIONS = {
    Pair.start: 8,
    Pair.look_again: 3,
    Pair.extend: 10,
    Pair.name_something: 2,
    Pair.fork: 4,
    Pair.release: 7,
    Pair.swap_out: 3,
    Pair.swap_in: 5,
    Pair.finish_transfer: 3,
    Pair.reset_prefix_cache: 0.1,
    Pair.run_step: 6,
}
SIZES = [(16, 4, 1, 8, 8), (24, 2, 2, 12, 16), (12, 4, 0, 5, 3), (40, 3, 3, 20, 20), (14, 4, 1, 0, 0)]
"""Blocks, tokens in one, watermark, host blocks, places of the connector."""


def operate(num_operations, manager=CacheManager):
    random = Random(4)
    pairs = [Pair(random, sizes, manager) for sizes in SIZES]
    for number, operation in enumerate(random.choices(list(OPERATIONS), list(OPERATIONS.values()), k=num_operations)):
        pair = pairs[number % len(pairs)]
        try:
            operation(pair)
            pair.compare()
            if number % 10 < len(pairs):
                pair.compare_memories()
        except AssertionError as error:
            raise AssertionError(f"operation {number}, {operation.__name__}: {error}") from error
    return pairs


@pytest.mark.parametrize("count", [10_000, pytest.param(200_000, marks=pytest.mark.stress)])
def test_manager_matches_a_naive_model(count: int):
    operate(count)


# --- negative controls ---------------------------------------------------------------------------------------------


class HeadGoesFirst(CacheManager):
    def release(self, table):
        self._pool.release(table.block_ids)
        table.block_ids.clear()


class ForgetsTheWatermark(CacheManager):
    def _are_free(self, num_blocks, keep_watermark):
        return super()._are_free(num_blocks, False)


class CountsBlocksTwice(CacheManager):
    """Found blocks that are free are counted as if they were still there to be taken."""

    def can_start(self, prefix, num_tokens, *, keep_watermark=False):
        return self._are_free(-(-num_tokens // self.block_size) - len(prefix), keep_watermark)


class CopiesWhatHoldsNothing(CacheManager):
    """Also blocks that begin where the step begins to write."""

    def extend(self, table, first_token, num_tokens):
        before = list(table.block_ids)
        change = super().extend(table, first_token, num_tokens)
        index = first_token // self.block_size
        if index < len(before) and before[index] != table.block_ids[index]:
            self._moves.copy(before[index], table.block_ids[index])
        return change


class MovesWhatIsThere(CacheManager):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._pool.find_all = lambda hashes: {}


class LoadsWhatIsOnTheDevice(CacheManager):
    def load_prefix(self, prefix, hashes, num_tokens):
        find, self._pool.find = self._pool.find, lambda block_hash: None
        try:
            return super().load_prefix(prefix, hashes, num_tokens)
        finally:
            self._pool.find = find


class DrivesOutThePrefixOfALoad(CacheManager):
    def load_prefix(self, prefix, hashes, num_tokens):
        share, self._pool.share = self._pool.share, lambda block_ids: None
        release, self._pool.release = self._pool.release, lambda block_ids: None
        try:
            return super().load_prefix(prefix, hashes, num_tokens)
        finally:
            self._pool.share, self._pool.release = share, release


class QueueWithoutAFront(FreeQueue):
    __slots__ = ()
    prepend = FreeQueue.append


class QueueWithoutABack(FreeQueue):
    __slots__ = ()
    append = FreeQueue.prepend


def with_queue(queue, *memories):
    """A manager one of whose memories hands out its blocks in another order."""

    class ManagerWithQueue(CacheManager):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            connector = self._transfers.connector if self._transfers is not None else None
            owners = {"device": self, "host": self._swap, "tier": connector}
            for owner in filter(None, map(owners.get, memories)):
                owner._pool._free = queue(owner._pool.num_blocks)

    return ManagerWithQueue


@pytest.mark.parametrize(
    ("manager", "message"),
    [
        (HeadGoesFirst, "free blocks, in their order"),
        (ForgetsTheWatermark, "can_start"),
        (CountsBlocksTwice, "can_start"),
        (CopiesWhatHoldsNothing, "copy"),
        (MovesWhatIsThere, "swap_in|free blocks"),
        (LoadsWhatIsOnTheDevice, "load|free blocks"),
        (DrivesOutThePrefixOfALoad, "free blocks|find_prefix"),
        *[(with_queue(QueueWithoutAFront, memory), "free") for memory in ("device", "host", "tier")],
        *[(with_queue(QueueWithoutABack, memory), "free") for memory in ("device", "host", "tier")],
    ],
)
def test_naive_model_detects_a_wrong_manager(manager, message):
    with pytest.raises(AssertionError, match=rf"^operation \d+, \w+: ({message})"):
        operate(20_000, manager)


def test_naive_model_accepts_a_replaced_queue():
    """The control of the controls."""
    operate(1_000, with_queue(FreeQueue, "device", "host", "tier"))
