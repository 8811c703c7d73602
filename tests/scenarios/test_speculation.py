"""Speculative decoding: whatever is drafted, by whom and on how many ranks, every row has the bytes it has without.

As a script it is one of several ranks.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
from cut_jobs import Ended, end_after
from exact_answers import complete_answers
from forked_workers import forked
from jobs_of_rows import job_config, run_here
from planted_drafts import PlantedProposer, planted

from spmd_worker import LLM, SamplingParams, resolved
from spmd_worker.base.config.schema import ModelOptions, RunConfig
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.run_dir.run_records import step_log_header
from spmd_worker.frontends.replay.replay import Replay
from spmd_worker.replica.scheduler import factory
from spmd_worker.replica.sequence.sampling_params import StructuredOutputsParams
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan
from spmd_worker.worker.runner import batch
from spmd_worker.worker.runner.model_runner import ModelRunner

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
PLAIN = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=1)
DRAWN = replace(PLAIN, temperature=0.9, seed=5)
KINDS = (
    replace(PLAIN, logprobs=None),
    PLAIN,
    replace(DRAWN, logprobs=None),
    replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
    replace(DRAWN, n=3, top_p=0.9, top_k=20, min_p=0.02, min_tokens=4, ignore_eos=False),
    replace(PLAIN, ignore_eos=False, stop=["1"], logprobs=None),
    replace(PLAIN, max_tokens=1, prompt_logprobs=1),
    replace(DRAWN, logprobs=3, bad_words=["1"], logit_bias={5: 1.0}, allowed_token_ids=list(range(60))),
    replace(DRAWN, structured_outputs=StructuredOutputsParams(regex="[a-h ]{6,9}"), logprobs=None, ignore_eos=False),
    replace(PLAIN, max_tokens=2),
)
WORDS = ("sort 21 87 57 15 33 12 84 61 =", "reverse h x a f w =", "copy a m v s j l =", "copy q =")
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "max_step_tokens": 100}
SMALL = {"num_blocks": 16, "max_model_len": 64, "block_size": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "two shards": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "two replicas": {"data_parallel_size": 2},
}
LIMIT_S = 240.0


def answers(llm: LLM, num_rows: int = 20) -> list[Any]:
    """Token ids and log-probabilities, bit for bit, why each ended, and its text."""
    prompts = [WORDS[row % len(WORDS)] for row in range(num_rows)]
    params = [KINDS[row % len(KINDS)] for row in range(num_rows)]
    return complete_answers(llm.generate(prompts, params, use_tqdm=False))


def open_llm(**options: Any) -> LLM:
    settings = {"dtype": "float32", "device": "cpu", "num_blocks": 200, "timeout_s": 120.0, "max_num_seqs": 16}
    return LLM(MODEL, **{**settings, **options})


def right(expected: list[Any], key: Any, num_outputs: int, most: int) -> list[int]:
    """Requests are numbered from row to row, and again from call to call."""
    samples = expected[key.request_id % len(expected)]
    return samples[key.sample_index][0][num_outputs : num_outputs + most] if key.sample_index < len(samples) else []


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with open_llm() as llm:
        return answers(llm)


@pytest.mark.guarantee("Speculative decoding changes no byte of an answer, whatever is drafted")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("right", {}),
        ("chance", {**SMALL, "async_scheduling": True}),
        pytest.param("wrong", {"max_num_batched_tokens": 16}, marks=pytest.mark.stress),
        *[
            pytest.param(kind, options, marks=pytest.mark.stress)
            for kind in ("right", "wrong", "chance")
            for options in (
                SMALL,
                {**SMALL, "preemption_mode": "swap", "swap_space": 0.1},
                {**SMALL, "max_num_batched_tokens": 16, "verify_hits": 1, "verify_steps": 1},
                {"async_scheduling": True, "enforce_eager": True},
                {"enable_prefix_caching": False, "enable_chunked_prefill": False},
            )
        ],
    ],
)
def test_planted_drafts_change_no_byte(
    expected: list[Any], kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SPMD_WORKER_CHECK", "1")
    with planted(partial(right, expected), kind), open_llm(speculative_config=DRAFTS, **options) as llm:
        found, counters = answers(llm), llm.llm_engine.counters
        assert found == expected
        assert counters.num_drafted_tokens > 50
        assert (counters.num_accepted_tokens == 0) == (kind == "wrong")
        # Blocks of the answers are found, with what was accepted in them.
        assert answers(llm) == expected


@pytest.mark.control("Speculative decoding changes no byte of an answer, whatever is drafted")
def test_acceptance_by_argmax_is_found(expected: list[Any], monkeypatch: pytest.MonkeyPatch):
    """Negative control: the tokens at drafted positions are the most probable, as if the drafts were a greedy row's."""
    rows = batch._sample_rows

    def greedy(scheduled: Any) -> Iterator[Any]:
        own = [each.sequence.output_token_ids for each in scheduled]
        for row in rows(scheduled):
            is_own = any(row.output_token_ids is each for each in own)
            yield row if is_own else row._replace(sampling=replace(row.sampling, temperature=0.0))

    monkeypatch.setattr(batch, "_sample_rows", greedy)
    with planted(partial(right, expected), "right"), open_llm(speculative_config=DRAFTS) as llm:
        found = answers(llm)
    assert found != expected
    greedy_rows = [row for row in range(20) if KINDS[row % len(KINDS)].temperature == 0.0]
    assert [found[row] for row in greedy_rows] == [expected[row] for row in greedy_rows]


class PlantedDrafter:
    """Implements `Drafter`: what the workers draft is right, one draft too long, or not there."""

    num_lookahead_tokens = 4
    needs_hidden, takes_media = True, False
    aux_layers: tuple[int, ...] = ()

    def __init__(self, expected: list[Any]) -> None:
        self._expected, self.num_tokens, self.num_forgotten = expected, 0, 0

    def begin(self, scheduled: Any, batch: Any, hidden: Any, aux: Any, media: Any = None) -> None:
        assert len(hidden) == len(batch.token_ids)
        self.num_tokens += len(hidden)

    def propose(self, scheduled: Any, sampled: Any, *, wants_drafts: bool = True) -> tuple[tuple[int, ...], ...]:
        if not wants_drafts:
            return ()
        samples = [(each.sequence, sample) for each in scheduled for sample in range(each.num_samples)]
        drafts = []
        for (sequence, sample), ids in zip(samples, sampled.rows(), strict=True):
            num_outputs = len(sequence.output_token_ids) + len(ids)
            key = sequence.key._replace(sample_index=sequence.sample_index + sample)
            own = right(self._expected, key, num_outputs, 4)
            drafts.append((*own, 9) if num_outputs % 5 else ())
        return tuple(drafts)

    def forget(self, keys: Any, request_ids: Any) -> None:
        self.num_forgotten += len(request_ids)


@pytest.mark.parametrize("by_workers", [False, True], ids=["replicas", "workers"])
def test_step_log_with_drafts_replays(expected: list[Any], by_workers: bool, monkeypatch: pytest.MonkeyPatch):
    drafter, create = PlantedDrafter(expected), ModelRunner.__init__
    if by_workers:
        monkeypatch.setattr(
            ModelRunner, "__init__", lambda *args, **named: create(*args, **{**named, "drafter": drafter})
        )
        # The model has no such layer.
        monkeypatch.setattr(resolved, "with_draft", lambda run, *given: run)
    method: dict[str, Any] = {"method": "mtp"} if by_workers else {}
    messages: list[bytes] = []
    # Undone before the planted proposer is, which would else be put back afterwards.
    with planted(partial(right, expected), "chance"), monkeypatch.context() as inner:
        if by_workers:
            inner.setattr(factory, "make_proposer", lambda config, vocab_size: None)
        with open_llm(speculative_config=DRAFTS | method) as llm:
            llm.llm_engine.lockstep.on_message = messages.append
            assert answers(llm) == expected
            # A message has the ids of the step before.
            llm.llm_engine.run_step()
            counters, header = llm.llm_engine.counters, step_log_header(llm.llm_engine)
            tokenizer = llm.llm_engine.tokenizer
        assert 20 < counters.num_accepted_tokens < counters.num_drafted_tokens
        assert (header.num_lookahead_tokens, bool(drafter.num_tokens)) == (4 * by_workers, by_workers)
        replay = Replay(header, tokenizer)
        steps = list(replay.steps(messages))
    assert len(steps) == replay.num_equal_digests > 5
    # The ids of the last step are in no message.
    assert counters.num_accepted_tokens - replay.scheduler.counters.num_accepted_tokens in range(5)


@pytest.mark.stress
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["right", "wrong", "chance"])
def test_ranks_agree_on_drafts(expected: list[Any], layout: str, kind: str, tmp_path: Path):
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    done = ranks.run_forked([__file__, tmp_path, layout, kind], 2, LIMIT_S)
    assert done.returncode == 0, done
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [each["answers"] for each in found] == [expected] * 2
    # A replica may be so late that the other one takes most rows.
    num_drafted, num_accepted = (sum(each[name] for each in found) for name in ("num_drafted", "num_accepted"))
    assert (num_accepted == 0) == (kind == "wrong")
    assert num_drafted > 40


def test_job_resumes_with_and_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Begun without drafts, ended with them: the bytes of an unbroken job."""
    rows = "".join(f'{{"prompt": "add {index} 7 =", "custom_id": "row {index}"}}\n' for index in range(12))
    (tmp_path / "rows.jsonl").write_text(rows)

    def run(name: str, speculation: SpeculativeConfig | None = None) -> None:
        sampling, output = {"max_tokens": 12, "temperature": 0.9}, str(tmp_path / name)
        run_here(job_config(tmp_path, MODEL, sampling=sampling, speculation=speculation, output=output, commit_rows=1))

    run("plain.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        end_after(patch, 4)
        with pytest.raises(Ended):
            run("drafted.jsonl")
    # Rows that follow the prompt's tokens: wrong mostly.
    proposer = PlantedProposer(lambda key, num_outputs, most: (220,) * most, "chance", 300)
    monkeypatch.setattr(factory, "make_proposer", lambda config, vocab_size: proposer)
    run("drafted.jsonl", SpeculativeConfig("ngram", 4))
    metrics = json.loads((tmp_path / "drafted.jsonl.run" / "metrics.json").read_text())
    assert metrics["resumed_rows"] == 4
    assert proposer.num_forgotten == 8
    assert (tmp_path / "drafted.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()


def test_plan_has_a_line_about_drafts():
    config = RunConfig(ModelOptions(path=str(MODEL)), speculative_config=SpeculativeConfig("suffix"), device="cpu")
    lines = describe_plan(make_plan(resolve_run(replace(config, plan=True), "cpu"))).splitlines()
    (line,) = [each for each in lines if each.startswith("drafts")]
    assert line.startswith("drafts     suffix, at most 16 of a row in a step")


@pytest.mark.stress
@pytest.mark.parametrize("layout", ["two shards", "two stages"])
def test_worker_processes_verify_drafts(expected: list[Any], layout: str):
    options = {"distributed_executor_backend": "multiproc", **LAYOUTS[layout], **SMALL}
    with forked(), planted(partial(right, expected), "chance"), open_llm(speculative_config=DRAFTS, **options) as llm:
        assert answers(llm) == expected
        assert llm.llm_engine.counters.num_accepted_tokens > 20


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"method": "ngram", "num_tokens": 3}, "unknown key 'num_tokens'"),
        ("ngram", "is not JSON"),
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, r"prompt_lookup_min.*=4 is above"),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, r"draft_tensor_parallel_size.*=2 must be"),
        ({"method": "ngram", "model": "folder"}, "has no effect with method ngram"),
    ],
)
def test_bad_options_are_refused(given: Any, text: str):
    with pytest.raises(ConfigError, match=text):
        open_llm(speculative_config=given)


# As one of several ranks.


def main(folder: Path, layout: str, kind: str) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    os.environ["SPMD_WORKER_CHECK"] = "1"
    with planted(partial(right, expected), kind), open_llm(speculative_config=DRAFTS, **LAYOUTS[layout]) as llm:
        found, counters = answers(llm), llm.llm_engine.counters
        counts = {"num_drafted": counters.num_drafted_tokens, "num_accepted": counters.num_accepted_tokens}
        rank = llm.llm_engine.engine_channel.rank
    (folder / f"rank{rank}.json").write_text(json.dumps({"answers": found, **counts}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
