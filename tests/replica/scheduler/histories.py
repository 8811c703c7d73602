"""Random histories of a scheduler: what hypothesis may choose, and how a choice is played.

Prompts come from a few families that share beginnings, and what is sampled repeats itself, so blocks are found again.
"""

import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from scheduler_runs import EOS, Row, Run

from kv_cache.block_ops import BlockOps
from kv_cache.layer_groups import ONE_GROUP, LayerGroups
from spmd_worker.replica.scheduler.pause import has_begun

MAX_MODEL_LEN = 24

Operation = tuple[str, Any]

PAUSES = [("keep", True), ("keep", False), ("wait", True)]

requests = st.fixed_dictionaries(
    {
        "num_prompt_tokens": st.integers(1, MAX_MODEL_LEN - 1),
        "family": st.sampled_from([(1,), (2,), (3, 4)]),
        "odd_at": st.none() | st.integers(0, MAX_MODEL_LEN),
        # n and best_of.
        "samples": st.sampled_from([(1, None), (1, None), (1, None), (2, None), (4, None), (1, 4), (2, 3)]),
        "max_tokens": st.integers(1, 12),
        "ignore_eos": st.booleans(),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
        # The id of an adapter, 0 for none.
        "adapter": st.sampled_from([0, 1, 2, 3, 4]),
        "priority": st.sampled_from([0, 0, 0, -1, 1]),
    }
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), requests),
        st.tuples(st.just("admit"), requests),
        st.tuples(st.just("admit again"), st.integers(0, 20)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("load"), st.integers(1, 4)),
        st.tuples(st.just("step"), st.integers(0, 4)),
        st.tuples(st.just("step"), st.integers(0, 4)),
        st.tuples(st.sampled_from(["step", "reset", "weights"]), st.integers(1, 3)),
        st.tuples(st.sampled_from(["pause", "resume"]), st.sampled_from(PAUSES)),
    ),
    # Few make a history in which nothing happens.
    min_size=10,
    max_size=60,
)
limits = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 8]),
        "spare_blocks": st.integers(0, 12),
        "watermark": st.integers(0, 3),
        "watermark_per_sequence": st.sampled_from([0, 0, 1, 2]),
        "max_num_seqs": st.integers(4, 8),
        "max_num_batched_tokens": st.sampled_from([8, 13, 24, 60]),
        "chunked": st.booleans(),
        "caching": st.booleans(),
        "preemption": st.sampled_from(["auto", "swap", "recompute"]),
        "block_copy_tokens": st.sampled_from([0.0, 1.0, 3.5]),
        "num_host_blocks": st.sampled_from([0, 1, 5, 40]),
        "num_tier_blocks": st.sampled_from([0, 1, 4, 30]),
        "transfer_steps": st.integers(0, 4),
        "virtual_engines": st.sampled_from([1, 1, 2, 3, 4]),
        "ahead": st.sampled_from([0, 1]),
        "max_loras": st.sampled_from([1, 0, 1, 2]),
        "verify_hits": st.sampled_from([0, 0, 1, 2]),
    }
).map(lambda drawn: {**drawn, "ahead": drawn["ahead"] if drawn["virtual_engines"] == 1 else 0})


window_limits = st.sampled_from([(1, 1, (3,)), (1, 2, (5,)), (0, 1, (2,)), (2, 1, (7, 4)), (1, 1, (-6,))])
"""Groups of layers: with full attention, with windows, and the windows; below 0 the size of chunks."""


state_limits = st.fixed_dictionaries(
    {
        "snapshot_slots": st.sampled_from([0, 1, 2, 20]),
        "host_slots": st.sampled_from([0, 1, 5]),
        "slot_copy_tokens": st.sampled_from([0.0, 3.0]),
        "grid": st.sampled_from([1, 2, 4, 8]),
        "interval": st.sampled_from([0, 0, 8]),
    }
)
"""Of a model with recurrent states. With few slots snapshots are evicted, with 0 they have none but idle rows'."""


def new_run(limits: dict[str, Any], kind: Callable[..., Run] = Run) -> Run:
    """A cache that holds the longest sequence, as the engine demands, and a few blocks more."""
    given = dict(limits)
    if not given["chunked"]:
        given["max_num_batched_tokens"] = max(given["max_num_batched_tokens"], MAX_MODEL_LEN)
    num_full, *windows = given.pop("groups", (1,))
    groups = LayerGroups(num_full, *windows, given["max_num_batched_tokens"]) if windows else ONE_GROUP
    num_blocks = groups.num_blocks(MAX_MODEL_LEN, given["block_size"]) + given.pop("spare_blocks")
    if given.pop("is_attention_free", False):
        num_blocks, given["num_host_blocks"], given["num_tier_blocks"], given["verify_hits"] = 0, 0, 0, 0
    given["groups"] = groups
    return kind(num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, **given)


def tokens_of(chance: random.Random):
    """A token for each sample: one in eight ends the sequence, the others repeat from request to request."""
    return lambda key, position: EOS if chance.random() < 0.125 else 1 + position % 3


def prompt_of(request: dict[str, Any]) -> tuple[int, ...]:
    length, family, odd_at = request["num_prompt_tokens"], request["family"], request["odd_at"]
    prompt = (family * length)[:length]
    return prompt if odd_at is None or odd_at >= length else (*prompt[:odd_at], 5, *prompt[odd_at + 1 :])


def admit(run: Run, request: dict[str, Any]) -> int:
    n, best_of = request["samples"]
    kept = {name: request[name] for name in ("max_tokens", "ignore_eos", "prompt_logprobs", "priority")}
    entries, int_id = run.adapters.entries, request["adapter"]
    if run.limits.max_loras and int_id and int_id not in entries:
        load(run, int_id)
    adapter = entries[int_id].digest if int_id in entries else 0
    return run.admit(request["num_prompt_tokens"], prompt_of(request), adapter, n=n, best_of=best_of, **kept)


def load(run: Run, int_id: int) -> None:
    """Load an adapter, or replace it by other weights, unless requests need what would give way."""
    if run.limits.max_loras:
        # Contents differ from load to load.
        run.load(int_id, 1 + run.scheduler.counters.num_steps * 8 + int_id)


def play(run: Run, operations: list[Operation], values: Any = None) -> dict[int, dict[str, Any]]:
    """All of them, then on until nothing is left; what was asked, by request."""
    asked: dict[int, dict[str, Any]] = {}
    values = values or tokens_of(random.Random(0))
    for kind, value in operations:
        if kind == "admit":
            asked[admit(run, value)] = value
        elif kind == "admit again" and asked:
            request = list(asked.values())[value % len(asked)]
            asked[admit(run, request)] = request
        elif kind == "abort":
            run.abort(value)
        elif kind == "load":
            load(run, value)
        elif kind == "reset":
            run.reset_prefix_cache()
        elif kind == "weights":
            run.set_weight_version(value)
        elif kind == "pause":
            pause(run, *value, values)
        elif kind == "resume":
            run.resume()
        elif kind == "step":
            for _ in range(value):
                run.step(values)
    run.resume()
    run.finish(values, limit=3000)
    return asked


def pause(run: Run, mode: str, clear_cache: bool, values: Any) -> None:
    """In mode "wait" what has begun ends first, and nothing else begins that was queued behind it."""
    run.pause(mode, clear_cache and mode == "keep")
    queued = [number for number, group in run.scheduler.queues.groups.items() if not has_begun(group)]
    run.finish(values, limit=3000)
    groups = run.scheduler.queues.groups
    if mode == "wait":
        assert not any(map(has_begun, groups.values()))
        assert list(groups) == [number for number in queued if number in groups]
        run.pause(mode, clear_cache)
    assert run.scheduler.num_computing() == 0


def random_history(
    seed: int, run: Run, values=lambda key, position: 1, rename=lambda token: token, num_requests: int = 25
) -> list[tuple[list[Row], BlockOps]]:
    """Admissions at random, of tokens that `rename` may change; what every step computed and moved."""
    chance = random.Random(seed)
    history = []

    def step() -> None:
        rows = run.step(lambda key, position: rename(values(key, position)))
        history.append((rows, run.last_plan.block_ops))

    for _ in range(num_requests):
        length, family = chance.randint(1, 15), chance.choice([1, 1, 2])
        prompt = tuple(rename(1 + index * family % 4) for index in range(length))
        adapter = random_adapter(run, chance) if run.limits.max_loras else 0
        run.admit(length, prompt, adapter, n=chance.choice([1, 1, 3]), max_tokens=chance.randint(1, 9))
        for _ in range(chance.randint(0, 3)):
            step()
    while run.scheduler.has_unfinished:
        step()
    return history


def random_adapter(run: Run, chance: random.Random) -> int:
    """A loaded content, after an attempt to load one of five."""
    int_id = chance.randint(1, 5)
    if int_id not in run.adapters.entries:
        load(run, int_id)
    return chance.choice([0, *run.adapters.digests])
