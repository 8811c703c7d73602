"""The determinism contract: a row's tokens and log-probabilities depend on the row alone, bit for bit.

Each case changes something a row must not depend on (batch, order, chunking, budget, preemption, block size, threads, a
second run) and compares with a plain run of the same rows. Needs the native kernels: torch's own attention is the
negative control, which must fail.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

from spmd_worker import LLM, SamplingParams
from spmd_worker.replica.scheduler.scheduler import Scheduler

Answer = list[tuple[list[int], list[float]]]

DTYPES = ("float32", "bfloat16")
NUM_ROWS = 14
CASES = {
    "twice": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "chunks of 50": {"max_num_batched_tokens": 50, "max_num_seqs": 50},
    "chunks of 64": {"max_num_batched_tokens": 64, "max_num_seqs": 64},
    "three at a time": {"max_num_seqs": 3},
    "whole prompts only": {"enable_chunked_prefill": False},
    "small blocks": {"block_size": 4, "num_blocks": 4000},
    "large blocks": {"block_size": 64, "num_blocks": 300},
    "without a prefix cache": {"enable_prefix_caching": False},
    "recomputed": {"num_blocks": 25, "max_num_batched_tokens": 96, "max_num_seqs": 14, "preemption_mode": "recompute"},
    "a step ahead": {"async_scheduling": True},
    "a step ahead, swapped": {
        "num_blocks": 25,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 14,
        "preemption_mode": "swap",
        "async_scheduling": True,
    },
    "swapped": {"num_blocks": 25, "max_num_batched_tokens": 96, "max_num_seqs": 14, "preemption_mode": "swap"},
}


def rows() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Prompts of 1 to 300 tokens; greedy, sampled, filtered, penalised and forking rows."""
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 2, 3, 15, 16, 17, 40, 63, 64, 65, 100, 129, 200, 300][:NUM_ROWS]
    prompts = [{"prompt_token_ids": torch.randint(3, 150, (n,), generator=generator).tolist()} for n in lengths]
    plain = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, logprobs=2)
    kinds = [
        plain,
        replace(plain, temperature=0.9),
        replace(plain, temperature=0.8, top_p=0.9, top_k=40),
        replace(plain, temperature=1.0, frequency_penalty=0.4, repetition_penalty=1.2),
        replace(plain, temperature=1.1, n=3, seed=11),
    ]
    return prompts, [
        replace(kinds[index % len(kinds)], seed=kinds[index % len(kinds)].seed) for index in range(NUM_ROWS)
    ]


def answers(llm: LLM, order: list[int] | None = None, alone: bool = False) -> list[Answer]:
    """Every row's tokens and log-probabilities, by row. Rows keep their own seeds whatever their place."""
    prompts, params = rows()
    # Without a seed of its own a row's randomness is named by its place in the call, so each gets one.
    params = [replace(each, seed=1000 + index) for index, each in enumerate(params)]
    order = order or list(range(NUM_ROWS))
    groups = [[index] for index in order] if alone else [order]
    found: dict[int, Answer] = {}
    for group in groups:
        outputs = llm.generate([prompts[i] for i in group], [params[i] for i in group], use_tqdm=False)
        for index, output in zip(group, outputs, strict=True):
            assert output.error is None, output.error
            found[index] = [
                (list(each.token_ids), [entry.logprob for step in each.logprobs or [] for entry in step.values()])
                for each in output.outputs
            ]
    return [found[index] for index in range(NUM_ROWS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights: the dummy ones are the same everywhere. Sizes at which plain products are not row-
    invariant.
    """
    folder = tmp_path_factory.mktemp("determinism")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 500,
        "hidden_size": 192,
        "intermediate_size": 2080,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


QUICK_BFLOAT16 = ("chunks of 7", "small blocks", "recomputed", "without a prefix cache")
LAYOUT_BFLOAT16 = ("three at a time", "a step ahead, swapped")
"""Cases in bfloat16, those in the tier of layouts, and others in the stress tier."""
ONLY_BFLOAT16 = ("small blocks", "recomputed", "without a prefix cache")
"""Cases whose float32 is in the stress tier."""


def each_case() -> list[Any]:
    marks = {("float32", case): [pytest.mark.stress] if case in ONLY_BFLOAT16 else [] for case in CASES}
    for case in CASES:
        later = pytest.mark.matrix if case in LAYOUT_BFLOAT16 else pytest.mark.stress
        marks["bfloat16", case] = [] if case in QUICK_BFLOAT16 else [later]
    return [pytest.param(*each, marks=mark) for each, mark in marks.items()]


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@cache
def plain_answers(checkpoint: Path, dtype: str) -> list[Answer]:
    with make(checkpoint, dtype) as llm:
        return answers(llm)


@pytest.fixture
def plain(checkpoint: Path, dtype: str) -> list[Answer]:
    return plain_answers(checkpoint, dtype)


def make(checkpoint: Path, dtype: str, **changed: object) -> LLM:
    settings = {"num_blocks": 1200, "max_model_len": 400, "dtype": dtype, "device": "cpu", **changed}
    return LLM(checkpoint, load_format="dummy", **settings)  # type: ignore[arg-type]  # a table of cases has no types


@pytest.mark.gate(
    "bfloat16-chunks of 7",
    "bfloat16-a step ahead, swapped",
    "float32-whole prompts only",
    "bfloat16-recomputed",
    "bfloat16-without a prefix cache",
    "bfloat16-small blocks",
    "float32-large blocks",
)
@pytest.mark.guarantee("A row depends on no batch, chunks, preemption")
@pytest.mark.parametrize(("dtype", "case"), each_case(), indirect=["dtype"])
def test_row_is_independent_of_scheduling(checkpoint, dtype, plain, case):
    with make(checkpoint, dtype, **CASES[case]) as llm:
        assert answers(llm) == plain
        assert (llm.llm_engine.counters.num_preemptions > 0) == (case in ("recomputed", "swapped"))


@pytest.mark.gate("bfloat16")
@pytest.mark.guarantee("Nor on company, order, what ran before")
def test_row_is_independent_of_batch_and_arrival_order(checkpoint, dtype, plain):
    with make(checkpoint, dtype) as llm:
        assert answers(llm, order=list(reversed(range(NUM_ROWS)))) == plain
        assert answers(llm, alone=True) == plain


@pytest.mark.gate("bfloat16-recompute", "float32-swap")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_row_is_independent_of_preemption_at_any_step(checkpoint, dtype, plain, mode, monkeypatch):
    schedule = Scheduler.schedule

    def preempting(self):
        if self._step % 3 == 0 and self.running:
            victim = self.running[self._step * 7 % len(self.running)]
            self.running.remove(victim)
            self._allocator.preempt(victim, self.queues.group_of(victim))
            self.waiting.reinsert(victim)
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", preempting)
    with make(checkpoint, dtype, preemption_mode=mode) as llm:
        assert answers(llm) == plain
        counters = llm.llm_engine.counters
        assert counters.num_preemptions >= 5
        assert counters.num_swapped_out == (counters.num_preemptions if mode == "swap" else 0)


@pytest.mark.gate("bfloat16")
@pytest.mark.guarantee("Nor on company, order, what ran before")
def test_row_is_independent_of_earlier_rows(checkpoint, dtype, plain):
    with make(checkpoint, dtype) as llm:
        assert answers(llm) == plain
        assert answers(llm) == plain
        found = llm.llm_engine.counters.num_cached_prompt_tokens
    assert found > 500, "the second time most of the prompts were in the cache"


@pytest.mark.gate("float32")
def test_row_is_independent_of_thread_count(checkpoint, dtype, plain):
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        with make(checkpoint, dtype) as llm:
            assert answers(llm) == plain
    finally:
        torch.set_num_threads(threads)


@pytest.mark.stress
def test_row_is_independent_of_python_hash_seed(checkpoint):
    script = (
        "import json, sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; import test_determinism as this\n"
        "with this.make(Path(sys.argv[1]), 'float32') as llm: print(json.dumps(this.answers(llm)))"
    )
    here = Path(__file__).parent
    printed = [
        subprocess.run(
            [sys.executable, "-c", script, str(checkpoint), str(here), *ranks.IMPORT_PATH],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert len(json.loads(printed[0].splitlines()[-1])) == NUM_ROWS


@pytest.mark.stress
@pytest.mark.control("A row depends on no batch, chunks, preemption")
@pytest.mark.control("Nor on company, order, what ran before")
def test_torch_attention_breaks_the_determinism_matrix(checkpoint):
    with make(checkpoint, "float32", device_backend="torch") as llm:
        whole = answers(llm)
    with make(checkpoint, "float32", device_backend="torch", **CASES["chunks of 7"]) as llm:
        assert answers(llm) != whole
