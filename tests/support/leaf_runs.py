"""Answers of engines on ranks, in all digits, to compare layouts with each other.

As a script on each rank: `leaf_runs.py JOB OUT`; each engine's answers are written by the first rank. A number is
reported by its eight bytes.
"""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import ranks
from numpy.typing import NDArray

from spmd_worker import LLM, RequestOutput, SamplingParams
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.worker.backends import backend

SETTINGS: Final[dict[str, Any]] = {
    "load_format": "dummy",
    "device": "cpu",
    "max_model_len": 128,
    "block_size": 8,
    "num_blocks": 22,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
}
"""Rows are cut, and preempted."""
LENGTHS: Final = (3, 7, 12, 20, 31, 40, 45, 50, 70, 80)
TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Ids of all tokens and of all alternatives, and all log-probabilities, in the order of rows."""

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answers)
        same_ids = np.array_equal(self.ids, other.ids)
        return same_ids and np.array_equal(self.logprobs.view(np.int64), other.logprobs.view(np.int64))

    def difference(self, other: "Answers") -> str:
        """Share of log-probabilities that differ, for a test's message."""
        if self.ids.shape != other.ids.shape or not np.array_equal(self.ids, other.ids):
            return "other ids"
        differ = self.logprobs.view(np.int64) != other.logprobs.view(np.int64)
        most = float(np.abs(self.logprobs - other.logprobs)[differ].max(initial=0.0))
        return f"{int(differ.sum())} of {differ.size} log-probabilities differ, by up to {most:.2g}"


def prompts(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, list[int]]]:
    """Each begins as the first do."""
    generator = np.random.Generator(np.random.PCG64(5))
    longest = generator.integers(3, vocab_size, max(lengths)).tolist()
    tails = [generator.integers(3, vocab_size, length).tolist() for length in lengths]
    return [{"prompt_token_ids": longest[: length // 2] + tail[length // 2 :]} for length, tail in zip(lengths, tails)]


def answers_of(llm: LLM, vocab_size: int, *, has_all: bool = False) -> Answers:
    """Greedy rows with log-probabilities of prompts, drawn and penalised rows in two samples, greedy rows again (from
    the prefix cache); with `has_all` log-probabilities of prompts are of the complete vocabulary.
    """
    rows, plain = prompts(vocab_size), {"max_tokens": 12, "ignore_eos": True, "logprobs": 2}
    greedy = SamplingParams(temperature=0, **plain)
    drawn = SamplingParams(temperature=1.3, n=2, top_k=40, top_p=0.9, seed=5, repetition_penalty=1.1, **plain)
    calls = [
        SamplingParams(temperature=0, **{**plain, "max_tokens": 24}, prompt_logprobs=-1 if has_all else 1),
        [drawn, greedy] * (len(rows) // 2),
        greedy,
    ]
    return numbers_of([row for call in calls for row in llm.generate(rows, call, use_tqdm=False)])


def numbers_of(outputs: list[RequestOutput]) -> Answers:
    ids, values = list[int](), list[float]()
    for row in outputs:
        assert row.error is None, row.error
        steps = [each for each in row.prompt_logprobs or [] if each is not None]
        for sample in row.outputs:
            ids += sample.token_ids
            steps += sample.logprobs or []
        for step in steps:
            ids += step
            values += [entry.logprob for entry in step.values()]
    return Answers(np.array(ids, np.int64), np.array(values, np.float64))


def on_ranks(
    folder: Path, out: Path, num_ranks: int, runs: dict[str, dict[str, Any]], *, has_all: bool = False
) -> dict[str, Answers]:
    """Answers of an engine with each of these settings, one after the other, on forked ranks."""
    out.mkdir(parents=True, exist_ok=True)
    job = out / "job.json"
    job.write_text(json.dumps({"folder": str(folder), "runs": runs, "has_all": has_all}))
    ranks.run_forked([__file__, job, out], num_ranks, TIMEOUT_S).checked()
    return {name: read(out / f"{name}.npz") for name in runs}


def read(path: Path) -> Answers:
    with np.load(path) as stored:
        return Answers(stored["ids"], stored["logprobs"])


def main(job: dict[str, Any], out: Path) -> None:
    config = read_model_files(Path(job["folder"])).model_config
    # A state is kept of 64 tokens, which few of the rows share.
    has_states = any(layer.conv or layer.delta or layer.mamba for layer in config.layers)
    # Blocks behind a window go back to the pool, which then suffices.
    has_windows = any(layer.window or layer.chunk for layer in config.layers)
    for name, settings in job["runs"].items():
        over_gloo = settings.pop("over_gloo", False)
        with (
            mock.patch.object(backend, "share_memory", lambda group, _: group) if over_gloo else nullcontext(),
            LLM(job["folder"], **{**SETTINGS, **settings}) as llm,
        ):
            found = answers_of(llm, config.vocab_size, has_all=job["has_all"])
            counters = llm.llm_engine.counters
        has_room = has_windows or settings.get("num_blocks", 0) > SETTINGS["num_blocks"]
        assert counters.num_preemptions > 0 or has_room
        has_hits = settings.get("enable_prefix_caching", not has_states)
        assert counters.num_cached_prompt_tokens > 0 or not has_hits
        if os.environ.get("RANK", "0") == "0":
            np.savez(out / f"{name}.npz", ids=found.ids, logprobs=found.logprobs)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
