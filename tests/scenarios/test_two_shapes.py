"""Layers whose blocks differ in shape: a row's tokens and log-probabilities are bit-identical alone, in a batch, in
chunks, after preemption or swapping, forked, from cached blocks and from the host tier, and on two pipeline stages.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from llm_calls import check_way_was_taken
from two_shapes import folder, two_shapes

from kv_cache.block_ops import BlockOps
from kv_cache.cache_engine import CacheEngine
from spmd_worker import LLM, SamplingParams
from spmd_worker.ops.attention.cpu import CpuBackend

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(temperature=1.0, n=4, seed=5, max_tokens=10, ignore_eos=True, logprobs=1)

# The longest row takes 19 blocks, all at once three times as many.
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "recomputed": {"num_blocks": 24, "preemption_mode": "recompute"},
    "swapped": {"num_blocks": 24, "preemption_mode": "swap", "swap_space": 0.01},
    "from the host tier": {"num_blocks": 24, "host_tier_gib": 0.01, "preemption_mode": "recompute"},
    "two stages": {"pipeline_parallel_size": 2, "distributed_executor_backend": "multiproc"},
}

Answer = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module", autouse=True)
def _two_shapes() -> Iterator[None]:
    with two_shapes():
        yield


def prompts() -> list[list[int]]:
    """Two of each length, which share a beginning."""
    generator = torch.Generator().manual_seed(8)
    head, other = (torch.randint(3, 150, (64,), generator=generator).tolist() for _ in range(2))
    return [head[:shared] + other[shared:length] for length in (9, 33, 64) for shared in (length, 8)]


def make(**settings: Any) -> LLM:
    given = {"num_blocks": 200, "block_size": BLOCK_SIZE, "dtype": "float32", "device": "cpu", "max_model_len": 80}
    return LLM(folder(), load_format="dummy", **{**given, **settings})


def answers(llm: LLM, rows: list[list[int]], params: SamplingParams = GREEDY) -> list[Answer]:
    found = []
    for output in llm.generate(rows, params, use_tqdm=False):
        found.append(
            [
                (each.token_ids, [entry.logprob for step in each.logprobs or [] for entry in step.values()])
                for each in output.outputs
            ]
        )
    return found


@pytest.fixture(scope="module")
def cold() -> dict[str, list[Answer]]:
    """Each row alone, nothing cached."""
    with make(enable_prefix_caching=False) as llm:
        return {
            "greedy": [answers(llm, [row])[0] for row in prompts()],
            "drawn": [answers(llm, [row], DRAWN)[0] for row in prompts()[:2]],
        }


@pytest.mark.gate("two stages", "together", "swapped", "in chunks")
@pytest.mark.guarantee("Layers may differ in heads and head sizes")
@pytest.mark.usefixtures("forked_workers_of_module")
@pytest.mark.parametrize("way", WAYS)
def test_row_is_independent_of_its_way(way: str, cold: dict[str, list[Answer]]):
    rows = prompts()
    with make(**WAYS[way]) as llm:
        assert answers(llm, rows) == cold["greedy"], "together"
        assert answers(llm, rows[:2], DRAWN) == cold["drawn"], "forked"
        assert [answers(llm, [row])[0] for row in rows] == cold["greedy"], "one after the other, from what is cached"
        check_way_was_taken(llm, way)


@pytest.mark.control("Layers may differ in heads and head sizes")
def test_comparison_detects_unmoved_second_shape(cold: dict[str, list[Answer]], monkeypatch: pytest.MonkeyPatch):
    """Negative control: only blocks of the first shape are copied and swapped."""
    execute = CacheEngine.execute

    def moves_first_shape(engine: CacheEngine, block_ops: BlockOps) -> None:
        tensors, host = engine._tensors, engine._host
        engine._tensors, engine._host = tensors[:1], host[:1]
        execute(engine, block_ops)
        engine._tensors, engine._host = tensors, host

    monkeypatch.setattr(CacheEngine, "execute", moves_first_shape)
    with make(**WAYS["swapped"]) as llm:
        assert answers(llm, prompts()) != cold["greedy"]
    with make() as llm:
        assert answers(llm, prompts()[:2], DRAWN) != cold["drawn"]


def test_engine_has_a_tensor_of_each_shape():
    with make() as llm:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        assert isinstance(worker.loaded.operations.attention, CpuBackend)
        assert worker.loaded.model.model.joined_layers is None
        assert [len(tensor) for tensor in worker.running.caches.engine.tensors] == [2, 2]
        (caches,) = worker.kv_cache
        # Two heads of 16 elements, and one of 48, of keys and of values.
        assert [cache[0].numel() for cache in caches] == [2 * 2 * 16 * BLOCK_SIZE, 2 * 1 * 48 * BLOCK_SIZE] * 2
