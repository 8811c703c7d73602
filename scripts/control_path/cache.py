"""What the cache's bookkeeping costs a block, beside a dict, in caches of several sizes and states."""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from random import Random

from kv_cache.block import BlockHash
from kv_cache.block_hash import hash_blocks, root_hash
from kv_cache.block_table import BlockTable
from kv_cache.cache_manager import CacheManager

BLOCK_SIZE = 16
TABLE_BLOCKS = 64
NUM_APPENDS = 16
PROMPT_TOKENS = 100_000
OPERATIONS = ("allocate", "append", "free", "name", "lookup")
STATES = ("plain", "filling", "evicting", "worst")
BOUND_STATES = ("plain", "filling")
MAX_RATIO = 1.5
MAX_LOOKUP_MS = 20.0

OperationTimes = dict[str, list[float]]
"""Operation -> nanoseconds a block, one number for each round."""


class World:
    """A manager in one of the states, and the tables that run in it: table -> first token of its prompt."""

    def __init__(self, num_blocks: int, state: str) -> None:
        self.manager, self.state, self.random = CacheManager(num_blocks, BLOCK_SIZE), state, Random(num_blocks)
        self.times: OperationTimes = {operation: [] for operation in OPERATIONS}
        self.running: list[tuple[BlockTable, int]] = []
        self._num_prompts = 0

    @property
    def has_names(self) -> bool:
        return self.state != "plain"

    def fill(self) -> None:
        """All blocks in tables, in an order of the state; then half of the tables end, in a random order."""
        whole, num_tables = BlockTable(), self.manager.num_blocks // TABLE_BLOCKS
        self.manager.extend(whole, 0, self.manager.num_blocks * BLOCK_SIZE)
        if self.state == "worst":
            self.random.shuffle(whole.block_ids)
        tables = [BlockTable(whole.block_ids[i * TABLE_BLOCKS : (i + 1) * TABLE_BLOCKS]) for i in range(num_tables)]
        self.manager.release(BlockTable(whole.block_ids[num_tables * TABLE_BLOCKS :]))
        self.random.shuffle(tables)
        ending = tables[num_tables // 2 :]
        if self.state in ("evicting", "worst"):
            for table in ending:
                self.name(table, self.new_prompt())
        for table in ending:
            self.manager.release(table)
        for table in tables[: num_tables // 2]:
            self.add(table, self.new_prompt())

    def round(self) -> None:
        """Every operation once, each of them timed."""
        self._stay_in_state()
        prompt, table = self.new_prompt(), BlockTable()
        num_tokens = TABLE_BLOCKS * BLOCK_SIZE
        self._measure("allocate", lambda: self.manager.extend(table, 0, num_tokens), TABLE_BLOCKS)
        if self.has_names:
            token_ids = prompt_tokens(prompt)
            self._measure("name", lambda: self._name(table, token_ids), TABLE_BLOCKS)
        self.running.append((table, prompt))
        self.manager.take_block_ops()
        ended, _ = self.running.pop(self.random.randrange(len(self.running)))
        num_ended = ended.num_blocks
        self._measure("free", lambda: self.manager.release(ended), num_ended)
        growing = [self.random.choice(self.running)[0] for _ in range(NUM_APPENDS)]
        self._measure("append", lambda: self._append(growing), NUM_APPENDS)
        self.manager.take_block_ops()
        if self.has_names:
            token_ids = prompt_tokens(self.random.choice(self.running)[1])
            self._measure("lookup", lambda: self._look_up(token_ids), TABLE_BLOCKS)

    def add(self, table: BlockTable, prompt: int) -> None:
        """A table that has run for some time already."""
        if self.has_names:
            self.name(table, prompt)
        self.running.append((table, prompt))

    def name(self, table: BlockTable, prompt: int) -> None:
        self._name(table, prompt_tokens(prompt))
        self.manager.take_block_ops()

    def new_prompt(self) -> int:
        """The first token of a prompt that is unlike all others."""
        self._num_prompts += 1
        return self._num_prompts

    def _stay_in_state(self) -> None:
        """Tables that run grow, so now and then one more ends. A small cache is soon full: then names are dropped, and
        those that run get theirs again.
        """
        while self.manager.num_free_blocks < self.manager.num_blocks // 3:
            self.manager.release(self.running.pop(self.random.randrange(len(self.running)))[0])
        num_unnamed = self.manager.num_free_blocks - self.manager.num_cached_blocks
        if self.state == "filling" and num_unnamed < TABLE_BLOCKS + NUM_APPENDS:
            self.manager.reset_prefix_cache()
            for table, prompt in self.running:
                self.name(table, prompt)

    def _name(self, table: BlockTable, token_ids: list[int]) -> None:
        self.manager.set_hashes(table, names_of(token_ids), 0, len(token_ids))

    def _append(self, tables: list[BlockTable]) -> None:
        for table in tables:
            num_tokens = table.num_blocks * BLOCK_SIZE
            self.manager.extend(table, num_tokens, num_tokens + 1)

    def _look_up(self, token_ids: list[int]) -> None:
        found = self.manager.find_prefix(names_of(token_ids))
        assert len(found) == TABLE_BLOCKS, f"{len(found)} of {TABLE_BLOCKS} blocks of a prompt that runs are found"

    def _measure(self, operation: str, action: Callable[[], object], num_blocks: int) -> None:
        started_ns = time.perf_counter_ns()
        action()
        self.times[operation].append((time.perf_counter_ns() - started_ns) / num_blocks)


class BareDict:
    """What any index of names pays: names in a dict, deleted a table at a time, in the order in which they came."""

    def __init__(self, num_names: int) -> None:
        self.random = Random(num_names)
        self.times: OperationTimes = {"find": [], "replace": []}
        self._names: dict[bytes, int] = {}
        self._tables: list[list[bytes]] = []
        self._oldest = 0
        self._num_tables = num_names // TABLE_BLOCKS

    def fill(self) -> None:
        for _ in range(self._num_tables):
            self._tables.append(self._new_names())
            self._names.update(zip(self._tables[-1], range(TABLE_BLOCKS)))

    def round(self) -> None:
        new, wanted = self._new_names(), [bytes(bytearray(name)) for name in self.random.choice(self._tables)]
        old, self._tables[self._oldest] = self._tables[self._oldest], new
        self._oldest = (self._oldest + 1) % self._num_tables
        names, started_ns = self._names, time.perf_counter_ns()
        for name in old:
            del names[name]
        for number, name in enumerate(new):
            names[name] = number
        replaced_ns = time.perf_counter_ns()
        for name in wanted:
            names.get(name)
        self.times["replace"].append((replaced_ns - started_ns) / TABLE_BLOCKS)
        self.times["find"].append((time.perf_counter_ns() - replaced_ns) / TABLE_BLOCKS)

    def _new_names(self) -> list[bytes]:
        return [self.random.randbytes(16) for _ in range(TABLE_BLOCKS)]


TAIL_TOKENS = list(range(TABLE_BLOCKS * BLOCK_SIZE - 1))


def prompt_tokens(prompt: int) -> list[int]:
    return [prompt, *TAIL_TOKENS]


def names_of(token_ids: list[int]) -> list[BlockHash]:
    return hash_blocks(root_hash(), token_ids, BLOCK_SIZE)


def take_turns(worlds: list[World] | list[BareDict], num_rounds: int) -> None:
    """A B A B, the first tenth of the rounds only to warm up."""
    for world in worlds:
        world.fill()
    gc.collect()
    for number in range(num_rounds + num_rounds // 10):
        for world in worlds:
            world.round()
        if number == num_rounds // 10 - 1:
            for world in worlds:
                for times in world.times.values():
                    times.clear()


def medians(worlds: list[World] | list[BareDict]) -> dict[str, list[float]]:
    """Operation -> the median of each world, in nanoseconds; what a state has no use for is left out."""
    return {
        operation: [statistics.median(world.times[operation]) for world in worlds]
        for operation in worlds[0].times
        if worlds[0].times[operation]
    }


def measure_long_lookup(num_blocks: int) -> tuple[float, float]:
    """Medians in milliseconds: names of a prompt of 100,000 tokens worked out, and all of them found."""
    manager, table = CacheManager(num_blocks, BLOCK_SIZE), BlockTable()
    token_ids = [index * 7919 % 150_000 for index in range(min(PROMPT_TOKENS, num_blocks * BLOCK_SIZE))]
    manager.extend(table, 0, len(token_ids))
    manager.set_hashes(table, names_of(token_ids), 0, len(token_ids))
    samples = []
    for _ in range(21):
        started_ns = time.perf_counter_ns()
        names = names_of(token_ids)
        named_ns = time.perf_counter_ns()
        found = manager.find_prefix(names)
        samples.append((named_ns - started_ns, time.perf_counter_ns() - named_ns))
        assert len(found) == len(token_ids) // BLOCK_SIZE, (len(found), len(token_ids))
    naming_ns, finding_ns = (statistics.median(times) for times in zip(*samples))
    return naming_ns / 1e6, finding_ns / 1e6


def print_row(state: str, operation: str, nanoseconds: list[float]) -> None:
    ratio = nanoseconds[-1] / nanoseconds[0]
    is_bound = " *" if state in BOUND_STATES and operation in OPERATIONS else ""
    print(
        f"{state:>9} {operation:>9}" + "".join(f" {each:>10.0f}" for each in nanoseconds) + f" {ratio:>7.2f}{is_bound}"
    )


def measure_states(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """State -> operation -> nanoseconds a block for each number of blocks; prints a row as soon as it is known."""
    print("nanoseconds a block:" + "".join(f" {number:>10,}" for number in options.blocks) + "   ratio")
    results = {}
    for state in STATES:
        worlds = [World(num_blocks, state) for num_blocks in options.blocks]
        take_turns(worlds, options.rounds)
        results[state] = medians(worlds)
        for operation, nanoseconds in results[state].items():
            print_row(state, operation, nanoseconds)
    dicts = [BareDict(num_blocks) for num_blocks in options.blocks]
    take_turns(dicts, options.rounds)
    results["dict"] = medians(dicts)
    for operation, nanoseconds in results["dict"].items():
        print_row("dict", operation, nanoseconds)
    print(f"* must be under {MAX_RATIO}")
    return results


def cache_summary(results: dict[str, dict[str, list[float]]], long_lookup: tuple[float, float]) -> dict[str, object]:
    ratios = {
        f"{state} {operation}": round(nanoseconds[-1] / nanoseconds[0], 2)
        for state, rows in results.items()
        for operation, nanoseconds in rows.items()
    }
    bound = {key: ratio for key, ratio in ratios.items() if key.split()[0] in BOUND_STATES}
    lookup_ms = round(sum(long_lookup), 2)
    return {
        "benchmark": "cache",
        "ratios": bound,
        "lookup_100k_tokens_ms": lookup_ms,
        "other_ratios": {key: ratio for key, ratio in ratios.items() if key not in bound},
        "ns": {
            state: {key: [round(each) for each in row] for key, row in rows.items()} for state, rows in results.items()
        },
        "load_average": round(os.getloadavg()[0], 1),
        "is_within_target": max(bound.values()) < MAX_RATIO and lookup_ms < MAX_LOOKUP_MS,
    }


def bench_cache(options: argparse.Namespace) -> int:
    """What the cache's bookkeeping costs for a block, with few blocks and with many: more must not cost more each.

    Nanoseconds a block, medians, through the calls that the scheduler makes. The sizes take turns, round by round, so
    that whatever else this machine does meets all of them alike.

        allocate  a new table of 64 blocks            name    its names worked out from tokens and entered
        append    one block each to 16 that run       lookup  names of a prompt worked out, and all of them found
        free      a table that has run for long

    Half of the blocks belong to tables of 64 that run, and whenever one is made another ends, at random. So what is
    extended, freed or found was last touched long ago, as in an engine, and with many blocks it is in no near cache of
    the processor. The free half, always in the random order in which tables ended, is in one of these states:

        plain     nothing in the cache has a name (prefix caching off)
        filling   what runs has names, what is free has none yet: the cache has not been full so far
        evicting  what is free has names, too: each block that is taken loses one
        worst     as evicting, and the blocks of each table lie far apart in memory

    `plain` and `filling` show what the algorithms cost: their ratios must stay under 1.5. `evicting` and `worst` add
    what memory costs: a name leaves the index with each block that is taken, from a slot as random as the name is. Any
    index pays for that; the line `dict` is a bare dict of as many names, one deleted for one inserted, and one found.

    Last the names of a prompt of 100,000 tokens, worked out and found, which must take less than 20 ms. The exit code
    is 1 if one of the two is missed.
    """
    results = measure_states(options)
    long_lookup = measure_long_lookup(options.blocks[-1])
    print(f"prompt of 100,000 tokens: {long_lookup[0]:.1f} ms for its names, {long_lookup[1]:.1f} ms to find them")
    result = cache_summary(results, long_lookup)
    print(json.dumps(result))
    return 0 if result["is_within_target"] else 1
