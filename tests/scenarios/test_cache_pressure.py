"""Small caches: preempted, swapped and evicted rows have the tokens of a run with enough blocks, bit for bit.

Each run checks queues, tables, pools and index against each other after every step (SPMD_WORKER_CHECK).
"""

import random
import shutil
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from reference_models import checkpoint_folder
from safetensors.torch import load_file, save_file

from kv_cache.cache_engine import CacheEngine
from kv_cache.device_tables import DeviceTables
from spmd_worker import LLM, SamplingParams
from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.resolved import CHECK_VARIABLE

pytestmark = pytest.mark.usefixtures("checks_after_every_step")

NAME = "llama3"
ROOMY = 2000
CROWDED = 57
"""Blocks: about 30 % of what the batch wants, see `test_crowded_cache_has_30_percent_of_needed_blocks`."""
SETTINGS = {"max_model_len": 256, "max_num_seqs": 64, "max_num_batched_tokens": 512}


@dataclass(frozen=True)
class Ran:
    """A run's outputs and its scheduler's counters."""

    token_ids: list[list[list[int]]]
    cached: list[int]
    counters: SchedulerCounters


def rows(num_rows: int = 12) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    chance = random.Random(3)
    head = [chance.randrange(5, 90) for _ in range(64)]
    prompts, params = [], []
    for index in range(num_rows):
        tail = [chance.randrange(5, 90) for _ in range(chance.randint(5, 90))]
        prompts.append({"prompt_token_ids": head[: chance.choice([0, 32, 64])] + tail})
        params.append(
            SamplingParams(
                n=4, temperature=0.8, top_p=0.95, max_tokens=chance.randint(20, 50), ignore_eos=True, seed=index
            )
        )
    return prompts, params


def run(num_blocks: int, dtype: str = "float32", **settings: object) -> Ran:
    prompts, params = rows()
    with LLM(checkpoint_folder(NAME), num_blocks=num_blocks, dtype=dtype, **{**SETTINGS, **settings}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        token_ids = [[completion.token_ids for completion in output.outputs] for output in outputs]
        return Ran(token_ids, [output.num_cached_tokens for output in outputs], llm.llm_engine.counters)


CACHING = {"enable_prefix_caching": True}

ran = cache(run)
"""With nothing broken: tests that ask for the same run share it."""


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Ran]:
    return {dtype: ran(ROOMY, dtype, enable_prefix_caching=False) for dtype in ("float32", "bfloat16")}


@cache
def host_blocks(count: int) -> float:
    """GiB of `count` blocks of the test model's cache."""
    with LLM(checkpoint_folder(NAME), num_blocks=20, dtype="float32", max_model_len=256) as llm:
        (block_bytes,) = llm.collective_rpc("get_cache_block_size_bytes")
    return (count + 0.5) * block_bytes / 2**30


def test_crowded_cache_has_30_percent_of_needed_blocks():
    prompts, params = rows()
    wanted = 0
    for prompt, sampling in zip(prompts, params, strict=True):
        num_prompt = len(prompt["prompt_token_ids"])
        shared = num_prompt // 16
        wanted += shared + 4 * (-(-(num_prompt + sampling.max_tokens - 1) // 16) - shared)
    assert 0.25 < CROWDED / wanted <= 0.30


def test_run_with_enough_blocks_never_preempts(uninterrupted: dict[str, Ran]):
    assert uninterrupted["float32"].counters.num_preemptions == 0
    assert uninterrupted["float32"].cached == [0] * 12


PAIRS = {("recompute", True, "float32"), ("recompute", False, "bfloat16"), ("swap", True, "bfloat16")}
PAIRS |= {("swap", False, "float32"), ("auto", True, "float32"), ("auto", False, "bfloat16")}
"""Each value of mode, caching and type with each of the two others; the other six are in the stress tier."""


@pytest.mark.gate("recompute-False-bfloat16", "auto-True-float32", "swap-True-bfloat16", "swap-False-float32")
@pytest.mark.guarantee("A small cache, swap, host tier change no bit")
@pytest.mark.guarantee("SPMD_WORKER_CHECK=1 checks the cache after each step")
@pytest.mark.parametrize(
    ("mode", "enable_prefix_caching", "dtype"),
    [
        pytest.param(*case, marks=[] if case in PAIRS else pytest.mark.stress)
        for case in product(("recompute", "swap", "auto"), (True, False), ("float32", "bfloat16"))
    ],
)
def test_tokens_equal_the_uninterrupted_runs_bit_for_bit(
    uninterrupted: dict[str, Ran], mode: str, enable_prefix_caching: bool, dtype: str
):
    result = ran(CROWDED, dtype, preemption_mode=mode, swap_space=0.5, enable_prefix_caching=enable_prefix_caching)
    assert result.token_ids == uninterrupted[dtype].token_ids
    counters = result.counters
    assert counters.num_preemptions > 3
    if mode == "recompute":
        assert counters.num_swapped_out == 0
        assert counters.num_recomputed_tokens > 0
    elif mode == "swap":
        assert counters.num_swapped_out == counters.num_preemptions
        assert counters.num_recomputed_tokens == 0
    assert (sum(result.cached) > 0) == enable_prefix_caching


@pytest.mark.gate("auto-1", "swap-0")
@pytest.mark.parametrize("count", [0, 1, 12])
@pytest.mark.parametrize("mode", ["swap", pytest.param("auto", marks=pytest.mark.matrix)])
def test_job_ends_with_small_or_missing_host_pool(uninterrupted: dict[str, Ran], mode: str, count: int):
    result = ran(CROWDED, preemption_mode=mode, swap_space=host_blocks(count) if count else 0.0)
    assert result.token_ids == uninterrupted["float32"].token_ids
    assert result.counters.num_swapped_out < result.counters.num_preemptions, "some had to be recomputed"
    if mode == "swap":
        assert result.counters.num_swapped_out >= count // 6, "exhausted midway, not from the start"


@pytest.mark.parametrize("swap_space", [None, 0.5])
def test_auto_wastes_less_than_15_percent(uninterrupted: dict[str, Ran], swap_space: float | None):
    counters = ran(CROWDED, "float32", preemption_mode="auto", swap_space=swap_space, **CACHING).counters
    assert counters.num_preemptions > 3
    assert counters.num_recomputed_tokens < 0.15 * counters.num_computed_tokens


@pytest.mark.guarantee("A small cache, swap, host tier change no bit")
def test_evicted_prefixes_come_back_from_the_host_tier(uninterrupted: dict[str, Ran]):
    without = ran(CROWDED, "float32", preemption_mode="auto", swap_space=None, **CACHING)
    result = ran(CROWDED, host_tier_gib=0.5)
    assert result.token_ids == uninterrupted["float32"].token_ids
    assert result.counters.num_recomputed_tokens < without.counters.num_recomputed_tokens
    assert sum(result.cached) >= sum(without.cached)


def test_everything_at_once_in_hardly_any_memory(uninterrupted: dict[str, Ran]):
    few = host_blocks(6)
    result = ran(CROWDED // 2, preemption_mode="swap", swap_space=few, host_tier_gib=few, max_num_batched_tokens=64)
    assert result.token_ids == uninterrupted["float32"].token_ids


@pytest.mark.control("A small cache, swap, host tier change no bit")
def test_comparison_detects_missing_swap_in(uninterrupted: dict[str, Ran], monkeypatch: pytest.MonkeyPatch):
    """Negative control: blocks that return hold what was there before."""
    execute = CacheEngine.execute

    def loses_what_comes_back(self, block_ops):
        execute(self, block_ops)
        for _, block in block_ops.swap_in:
            self.tensors[0][:, block] = 0

    monkeypatch.setattr(CacheEngine, "execute", loses_what_comes_back)
    result = run(CROWDED, preemption_mode="swap", swap_space=0.5)
    assert result.token_ids != uninterrupted["float32"].token_ids


def test_comparison_detects_missing_block_copy(uninterrupted: dict[str, Ran], monkeypatch: pytest.MonkeyPatch):
    """Negative control: forks that write to the block they share."""
    monkeypatch.setattr(DeviceTables, "_shared_indices", lambda *args: [])
    monkeypatch.delenv(CHECK_VARIABLE)
    assert run(ROOMY, enable_prefix_caching=False).token_ids != uninterrupted["float32"].token_ids


@pytest.mark.control("SPMD_WORKER_CHECK=1 checks the cache after each step")
def test_check_after_every_step_detects_a_leak(monkeypatch: pytest.MonkeyPatch):
    """Negative control of SPMD_WORKER_CHECK: a table that is emptied and gives nothing back."""
    monkeypatch.setattr(DeviceTables, "release", lambda self, table: table.block_ids.clear())
    with pytest.raises(AssertionError, match=r"block \d+ counts \d+ owners, \d+ tables list it"):
        run(ROOMY)
    monkeypatch.delenv(CHECK_VARIABLE)
    run(ROOMY)


@pytest.mark.guarantee("Prefix hits change no answer")
def test_second_round_hits_cache_until_it_is_reset():
    prompts = [{"prompt_token_ids": list(range(10, 60))}]
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(checkpoint_folder(NAME), num_blocks=100, dtype="float32", max_model_len=256) as llm:
        (cold,) = llm.generate(prompts, greedy, use_tqdm=False)
        (warm,) = llm.generate(prompts, greedy, use_tqdm=False)
        answered = [{"prompt_token_ids": [*prompts[0]["prompt_token_ids"], *cold.outputs[0].token_ids]}]
        (continued,) = llm.generate(answered, greedy, use_tqdm=False)
        assert llm.reset_prefix_cache()
        (reset,) = llm.generate(prompts, greedy, use_tqdm=False)
        llm.set_weight_version(1)
        (other_weights,) = llm.generate(prompts, greedy, use_tqdm=False)
        (same_weights,) = llm.generate(prompts, greedy, use_tqdm=False)
    found = [each.num_cached_tokens for each in (cold, warm, continued, reset, other_weights, same_weights)]
    assert found == [0, 48, 80, 0, 0, 48]
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids == other_weights.outputs[0].token_ids


@pytest.mark.guarantee("Nothing computed with old weights is found", is_control_inside=True)
def test_weights_changed_in_place_answer_for_themselves(tmp_path: Path):
    """Hazard: a cache served from weights that were updated since (NeMo-RL 4018)."""
    prompts = [{"prompt_token_ids": list(range(10, 90))}]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)

    def change(name: str, tensor: torch.Tensor) -> None:
        if "norm" in name:
            tensor *= 0.5
        elif "embed_tokens" in name:
            tensor[10:40] *= -1

    def change_in_place(model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            change(name, parameter.data)

    def run_with(llm: LLM) -> list[float]:
        (output,) = llm.generate(prompts, sampling, use_tqdm=False)
        return [next(iter(entry.values())).logprob for entry in output.outputs[0].logprobs]

    # What is expected comes from files with the same change, not from another change in place.
    changed = Path(shutil.copytree(checkpoint_folder(NAME), tmp_path / "changed"))
    tensors = load_file(changed / "model.safetensors")
    for name, tensor in tensors.items():
        change(name, tensor)
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    with LLM(changed, num_blocks=100, dtype="float32", max_model_len=256) as llm:
        expected = run_with(llm)
    with LLM(checkpoint_folder(NAME), num_blocks=100, dtype="float32", max_model_len=256) as llm:
        before = run_with(llm)
        llm.apply_model(change_in_place)
        applied = run_with(llm)
    with LLM(checkpoint_folder(NAME), num_blocks=100, dtype="float32", max_model_len=256) as llm:
        run_with(llm)
        # Past the engine.
        llm.collective_rpc(lambda worker: worker.apply_model(change_in_place))
        stale = run_with(llm)
        llm.set_weight_version(1)
        told = run_with(llm)
    assert applied == told == expected != before
    assert stale != expected, "negative control: without the version the old cache answers"
