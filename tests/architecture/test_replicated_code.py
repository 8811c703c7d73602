"""Replicated code sees nothing that differs between ranks, and each way of seeing it is found."""

from pathlib import Path

import house
import pytest
from planting import CLEAN_HOUSE, REPOSITORY, plant
from replica_rules import replica_violations

SCHEDULER = "spmd_worker/replica/scheduler/scheduler.py"

PLANTED = [
    # Clocks.
    ("import time", "a clock"),
    ("import time as t\nNOW = t.perf_counter()", "time.perf_counter: a clock"),
    ("from time import perf_counter", "a clock"),
    ("from time import monotonic as now\ndef late():\n    return now()", "a clock"),
    ("import datetime\ndatetime.datetime.now()", "datetime.datetime.now: a clock"),
    ("from datetime import datetime", "a clock"),
    # Sets.
    ("READY = {1, 2}", "a set has no order"),
    ("def f(xs):\n    return {x for x in xs}", "a set has no order"),
    ("READY = set()", "set: a set has no order"),
    ("READY = frozenset((1, 2))", "frozenset: a set has no order"),
    ("KNOWN: tuple[set[int], ...] = ()", "set: a set has no order"),
    ("from collections import defaultdict\nREADY = defaultdict(set)", "set: a set has no order"),
    ("def f(a, b):\n    return a.keys() & b.keys()", "a set has no order"),
    ("def f(a, b):\n    return a - b.items()", "a set has no order"),
    ("def f(a, b):\n    return a.union(b)", "union: a set has no order"),
    ("def f(xs):\n    return [x for x in {1, 2}]", "a set has no order"),
    # Values of one process.
    ("KEY = hash('x')", "hash: differs between processes"),
    ("KEYS = sorted([], key=id)", "id: differs between processes"),
    ("def f(x):\n    return id(x)", "id: differs between processes"),
    ("def f(id):\n    return id(1)", "id: differs between processes"),
    ("import os\nHOME = os.environ['HOME']", "os.environ: the environment"),
    ("from os import environ", "os.environ: the environment"),
    ("import os\nos.getenv('RANK')", "os.getenv: the environment"),
    ("import os\nos.getpid()", "os.getpid: the environment"),
    # Randomness.
    ("import random", "randomness"),
    ("from random import choice", "randomness"),
    ("import secrets", "randomness"),
    ("def late():\n    import uuid", "randomness"),
    ("import numpy as np\nnp.random.rand()", "numpy.random.rand: randomness"),
    ("from numpy import random as host", "numpy.random: randomness"),
    ("import numpy.random", "randomness"),
    ("import os\nos.urandom(8)", "randomness"),
    # Which item it takes is the dict's affair.
    ("def f(x):\n    return x.popitem()", "popitem"),
]

ALLOWED = """
import os.path
import heapq
from collections import OrderedDict

KNOWN = {"a": 1}
NAMES = ("a", "b")


def f(self, request, xs, block_hash):
    id = request.id
    flags = request.flags | 1
    left = {x: None for x in xs}
    return id, self.id, self.hash, block_hash(xs), self.time, request.random, left.keys(), flags - 1, self.set(1)
"""


def test_replicated_code_sees_nothing_that_differs_between_ranks():
    assert replica_violations(REPOSITORY) == []


def test_clean_tree_and_similar_names_have_no_violation(tmp_path: Path):
    assert replica_violations(plant(tmp_path, {SCHEDULER: "+" + ALLOWED})) == []


@pytest.mark.parametrize(("code", "words"), PLANTED, ids=lambda value: str(value)[:50])
def test_replica_check_detects_difference_at_its_line(tmp_path: Path, code: str, words: str):
    found = replica_violations(plant(tmp_path, {SCHEDULER: f"+\n{code}\n"}))
    first_line = CLEAN_HOUSE[SCHEDULER].count("\n") + 2
    lines = range(first_line, first_line + code.count("\n") + 1)
    assert [v for v in found if words in v and int(v.split(":")[1]) in lines], found


@pytest.mark.parametrize(
    ("module", "is_replicated"),
    [
        ("kv_cache.block_pool", True),
        ("kv_cache.cache_manager", True),
        ("kv_cache.cache_sizing", False),
        ("kv_cache.cache_engine", False),
        ("spmd_worker.replica.sequence.request", True),
        ("spmd_worker.replica.scheduler.scheduler", True),
        ("spmd_worker.replica.lockstep.wire.codec", True),
        ("spmd_worker.ranks.transport.channel", False),
        ("spmd_worker.base.metrics.log", False),
    ],
)
def test_modules_are_replicated_as_listed(module: str, is_replicated: bool, tmp_path: Path):
    path = module.replace(".", "/") + ".py"
    assert house.is_replicated(module) is is_replicated
    assert bool(replica_violations(plant(tmp_path, {path: '"""Planted."""\n\nimport time\n'}))) is is_replicated
