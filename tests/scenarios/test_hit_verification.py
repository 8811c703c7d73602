"""`cache.verify_hits`: hits that are computed again equal what was found, whatever happens to it meanwhile, and a byte
that has changed since is an error that names it.

Each run checks queues, tables, pools and slots against each other after every step (SPMD_WORKER_CHECK).
"""

import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from latent_checkpoints import latent_folder
from reference_models import checkpoint_folder
from state_models import state_folder
from torch import Tensor

from spmd_worker import LLM, RequestOutput, SamplingParams
from spmd_worker.base.errors import CacheMismatchError, ConfigError
from spmd_worker.worker.hit_comparison import HitComparer

pytestmark = pytest.mark.usefixtures("checks_after_every_step")

FOLDERS: dict[str, Callable[[], Path]] = {
    "blocks": lambda: checkpoint_folder("llama3"),
    "latents": lambda: latent_folder("deepseek_v3"),
    "convolutions": lambda: state_folder("lfm2"),
    "delta nets": lambda: state_folder("qwen3_5"),
    "mamba": lambda: state_folder("nemotron"),
}
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "max_num_seqs": 8}
PROMPT = [{"prompt_token_ids": [5 + index * 7 % 80 for index in range(70)]}]
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def new_llm(kind: str, **settings: Any) -> LLM:
    return LLM(FOLDERS[kind](), **{**SETTINGS, "num_blocks": 60, **settings})


class Cached(NamedTuple):
    """Something of the answered prompt that the cache holds: its number, name, layer and memory."""

    number: int
    name: bytes
    layer: int
    memory: Tensor


def cached_block(llm: LLM, index: int) -> Cached:
    """The last layer's block `index` of the only prompt that was answered."""
    name, number = list(llm.llm_engine.scheduler.cache._pool._index.items())[index]
    caches = engine_of(llm).layer_caches
    layer = max(layer for layer in range(len(caches)) if caches[layer] is not None)
    return Cached(number, name, layer, caches[layer][number])


def cached_state(llm: LLM, part: str) -> Cached:
    """The last layer's snapshot of the prompt."""
    ((name, number),) = llm.llm_engine.scheduler.state_slots._pool._index.items()
    layer, states = [each for each in enumerate(engine_of(llm).states.layers) if each[1] is not None][-1]
    return Cached(number, name, layer, getattr(states, part)[number])


def change_all(llm: LLM, part: str) -> None:
    """A number of everything in the cache: of each block, or of this part of each snapshot, in the last layer."""
    found = llm.llm_engine.scheduler.state_slots._pool if part else llm.llm_engine.scheduler.cache._pool
    layers = engine_of(llm).states.layers if part else engine_of(llm).layer_caches
    last = [layer for layer in layers if layer is not None][-1]
    memory = getattr(last, part) if part else last
    for number in found._index.values():
        memory[number].view(-1)[7] += 0.5


def engine_of(llm: LLM) -> Any:
    return llm.llm_engine.executor.driver_worker.worker.running.caches.engine


STATES = [
    ("convolutions", "tail"),
    ("delta nets", "state"),
    ("delta nets", "tail"),
    pytest.param("mamba", "state", marks=pytest.mark.stress),
    pytest.param("mamba", "tail", marks=pytest.mark.stress),
]


@pytest.mark.guarantee("cache.verify_hits finds a byte that changed in the cache")
@pytest.mark.parametrize("kind", ["blocks", "latents", "convolutions", "delta nets"])
def test_changed_byte_of_a_block_is_named(kind: str) -> None:
    with new_llm(kind, verify_hits=1) as llm:
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
        block = cached_block(llm, 1)
        block.memory.view(-1)[7] += 0.5
        with pytest.raises(CacheMismatchError) as caught:
            llm.generate(PROMPT, GREEDY, use_tqdm=False)
    shown = ", ".join(map(str, PROMPT[0]["prompt_token_ids"][16:24]))
    expected = (
        rf"rank 0, step \d+: block {block.number} of the prefix cache, with the name {block.name.hex()} and the token "
        rf"ids {shown} and 8 more at positions 16 to 31, written by request 0, differs from what request 1 has "
        rf"computed again: element \[.*\] of the block of layer {block.layer} is \S+ in the cache and \S+ computed"
    )
    assert re.match(expected, str(caught.value)), caught.value


@pytest.mark.guarantee("cache.verify_hits finds a byte that changed in the cache")
@pytest.mark.parametrize(("kind", "part"), STATES)
def test_changed_byte_of_a_snapshot_is_named(kind: str, part: str) -> None:
    with new_llm(kind, verify_hits=1) as llm:
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
        state = cached_state(llm, part)
        state.memory.view(-1)[3] += 0.5
        with pytest.raises(CacheMismatchError) as caught:
            llm.generate(PROMPT, GREEDY, use_tqdm=False)
    expected = (
        rf"rank 0, step \d+: the snapshot in state slot {state.number} of the prefix cache, with the name "
        rf"{state.name.hex()} and the token ids .* at positions 48 to 63, written by request 0, differs .* "
        rf"of the {part} of layer {state.layer} is "
    )
    assert re.match(expected, str(caught.value)), caught.value


@pytest.mark.control("cache.verify_hits finds a byte that changed in the cache")
def test_skipped_comparison_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the plan carries it, and the worker leaves it out."""
    monkeypatch.setattr(HitComparer, "compare", lambda self, plan: None)
    with new_llm("blocks", verify_hits=1) as llm:
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
        cached_block(llm, 1).memory.view(-1)[7] += 0.5
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert llm.llm_engine.counters.num_verified_hits == 1


def test_every_second_hit_is_verified() -> None:
    with new_llm("blocks", verify_hits=2) as llm:
        outputs = [llm.generate(PROMPT, GREEDY, use_tqdm=False)[0] for _ in range(6)]
        assert llm.llm_engine.counters.num_verified_hits == 2
    assert [output.num_cached_tokens for output in outputs] == [0, 64, 0, 64, 0, 64]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_block_that_came_from_the_host_is_verified() -> None:
    """Prompts in between evict it to the host tier."""
    others = [{"prompt_token_ids": [first + index * 11 % 70 for index in range(120)]} for first in (6, 7)]
    with new_llm("blocks", num_blocks=15, host_tier_gib=0.01, verify_hits=1) as llm:
        for prompt in (PROMPT, others[:1], others[1:], PROMPT):
            llm.generate(prompt, GREEDY, use_tqdm=False)
        counters = llm.llm_engine.counters
        assert counters.num_loaded_blocks == 4
        assert (counters.num_verified_hits, counters.num_unverified_hits) == (1, 0)


@pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        ("blocks", {"enable_prefix_caching": False}, "verify_hits=1 verifies prefix-cache hits, and .*"),
        ("blocks", {"verify_hits": -1}, "verify_hits=-1"),
        ("convolutions", {"enable_chunked_prefill": False}, "verify_hits=1 compares a recurrent state where a chunk"),
    ],
)
def test_verification_without_effect_is_rejected(kind: str, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        new_llm(kind, **{"verify_hits": 1, **settings})


def crowd(num_rows: int, nums_tokens: tuple[int, ...]) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Rows that begin with parts of a few heads, and fork."""
    chance = random.Random(7)
    heads = [[chance.randrange(5, 90) for _ in range(80)] for _ in range(2)]
    rows, params = [], []
    for index in range(num_rows):
        head = chance.choice(heads)[: chance.choice([66, 80])]
        rows.append({"prompt_token_ids": head + [chance.randrange(5, 90) for _ in range(chance.randint(1, 20))]})
        drawn = {"temperature": 0.8, "seed": index, "max_tokens": chance.choice(nums_tokens), "ignore_eos": True}
        params.append(SamplingParams(n=chance.choice([1, 3]), **drawn))
    return rows, params


def answered(
    llm: LLM, num_rows: int, aborted: tuple[int, ...], nums_tokens: tuple[int, ...] = (1, 28, 28)
) -> dict[str, list[list[int]]]:
    """Ids of the rows, in steps between which some rows are aborted."""
    engine, outputs, chance = llm.llm_engine, {}, random.Random(11)
    for index, (row, sampling) in enumerate(zip(*crowd(num_rows, nums_tokens), strict=True)):
        engine.add_request(str(index), row, sampling)
    left = list(aborted)
    while engine.has_unfinished_requests():
        outputs |= {each.request_id: each for each in engine.step() if each.finished}
        if left and chance.random() < 0.2:
            engine.abort_request([str(left.pop(0))])
    return {key: ids_of(each) for key, each in outputs.items() if int(key) not in aborted}


def ids_of(output: RequestOutput) -> list[list[int]]:
    return [list(each.token_ids) for each in output.outputs]


ABORTED = (2, 9)


@cache
def without_cache(kind: str) -> dict[str, list[list[int]]]:
    with new_llm(kind, enable_prefix_caching=False, num_blocks=200) as llm:
        return answered(llm, 16, ABORTED)


SWAP = {"preemption_mode": "swap", "swap_space": 0.01}


@pytest.mark.gate("blocks-settings1", "convolutions-*")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("blocks", {"preemption_mode": "recompute"}),
        ("blocks", {**SWAP, "host_tier_gib": 0.005}),
        ("convolutions", {"preemption_mode": "recompute"}),
        ("delta nets", SWAP),
        pytest.param("latents", SWAP, marks=pytest.mark.stress),
        pytest.param("mamba", SWAP, marks=pytest.mark.stress),
    ],
)
def test_verified_hits_change_no_answer(kind: str, settings: dict[str, Any]) -> None:
    with new_llm(kind, **{"num_blocks": 24, "max_num_batched_tokens": 64, "verify_hits": 1, **settings}) as llm:
        assert answered(llm, 16, ABORTED) == without_cache(kind)
        counters = llm.llm_engine.counters
        assert llm.llm_engine.scheduler.cache.num_used_blocks == 0
    assert counters.num_preemptions > 0
    assert counters.num_verified_hits >= 3


NUM_HITS = 10_000


@pytest.mark.stress
@pytest.mark.guarantee("Prefix hits change no answer")
@pytest.mark.parametrize(
    ("kind", "part"),
    [("blocks", ""), ("convolutions", "tail"), ("delta nets", "state"), ("mamba", "state")],
)
def test_ten_thousand_hits_are_equal(kind: str, part: str) -> None:
    """Minutes of processor time. Changes of the cache, at the end, are found in the same crowd."""
    num_rows, num_rounds = 300, 0
    crowd_of = (num_rows, tuple(range(2, num_rows, 9)), (1, 1, 1, 1, 1, 2, 28, 28))
    # Rows with states are preempted with fewer blocks: no more run than have slots.
    with new_llm(kind, num_blocks=24 if part else 32, verify_hits=1) as llm:
        counters = llm.llm_engine.counters
        while counters.num_verified_hits < NUM_HITS:
            answered(llm, *crowd_of)
            num_rounds += 1
            assert counters.num_verified_hits > 100 * num_rounds, counters
        assert counters.num_preemptions > 0
        assert counters.num_verified_hits > 20 * counters.num_unverified_hits
        change_all(llm, part)
        with pytest.raises(CacheMismatchError, match=f"of the {part or 'block'} of layer"):
            answered(llm, *crowd_of)
