"""Forced tokens of a grammar: several per step, in the tokenizer's own tokenisation, with unchanged answers."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from constrained_rows import EOS, answers, check, open_model, rows, run, write_model
from context_fixtures import fixture_of
from jobs_of_rows import answers_of_job
from run_folder import made_once

from spmd_worker import LLM, SamplingParams, StructuredOutputsParams
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.frontends.tools import replay
from spmd_worker.replica.grammar import row_grammar, step_masks
from spmd_worker.replica.grammar.llguidance_input import GrammarError
from spmd_worker.replica.grammar.step_masks import StepMasks
from spmd_worker.replica.scheduler import budget
from spmd_worker.replica.scheduler.budget import StepBudget
from spmd_worker.replica.sequence import structured_outputs

LONG = {
    "type": "object",
    "properties": {"hello world, this is": {"const": "the cache and the scheduler"}, "naïve 你好": {"type": "boolean"}},
    "required": ["hello world, this is", "naïve 你好"],
    "additionalProperties": False,
}
FORM = {"json": LONG, "disable_any_whitespace": True}
ONE_A_STEP = 1

llm = fixture_of(lambda: open_model(made_once("constrained", write_model)))


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[Any]:
    """Answers of all kinds of rows, each token by a forward pass of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(step_masks, "MAX_FORCED_TOKENS", ONE_A_STEP)
        return answers(run(llm))


def generate(llm: LLM, form: Any = FORM, **sampling: Any) -> tuple[Any, int]:
    """The answer, and how many steps it took."""
    before = llm.llm_engine.counters.num_steps
    params = SamplingParams(structured_outputs=form, **{"temperature": 1.0, "max_tokens": 200, "seed": 3, **sampling})
    output = llm.generate("hello", params, use_tqdm=False)[0]
    assert output.error is None, output.error
    return output, llm.llm_engine.counters.num_steps - before


def both_ways(llm: LLM, form: Any = FORM, **sampling: Any) -> tuple[Any, int, int]:
    """The answer, the same with tokens forced and not, and the steps of each."""
    forced, num_forced_steps = generate(llm, form, **sampling)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(step_masks, "MAX_FORCED_TOKENS", ONE_A_STEP)
        single, num_single_steps = generate(llm, form, **sampling)
    assert answers([forced]) == answers([single])
    return forced, num_forced_steps, num_single_steps


@pytest.mark.guarantee("Answers have their form")
def test_rows_of_all_kinds_equal_with_forced_tokens(llm: LLM, plain: list[Any]):
    before = llm.llm_engine.counters.num_steps
    outputs = run(llm)
    check(outputs, rows()[2])
    assert answers(outputs) == plain
    assert llm.llm_engine.counters.num_steps > before


@pytest.mark.matrix
def test_answers_are_independent_of_forms_compiled_per_step(
    llm: LLM, plain: list[Any], monkeypatch: pytest.MonkeyPatch
):
    left: list[int] = []
    spend_grammar = StepBudget.spend_grammar

    def noted(self: StepBudget, sequence: Any) -> None:
        left.extend([self.num_compile_bytes] if sequence.must_compile else [])
        spend_grammar(self, sequence)

    monkeypatch.setattr(StepBudget, "spend_grammar", noted)
    assert answers(run(llm)) == plain
    num_forms = sum(params.num_sequences for params in rows()[1] if params.structured_outputs is not None)
    # Several in a step, of which each leaves less.
    assert len(left) == num_forms > left.count(budget.MAX_COMPILE_BYTES)
    monkeypatch.setattr(structured_outputs, "MIN_COMPILE_BYTES", budget.MAX_COMPILE_BYTES)
    assert answers(run(llm)) == plain
    assert left[num_forms:] == [budget.MAX_COMPILE_BYTES] * num_forms, "one in a step"


@pytest.mark.control("Answers have their form")
@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["doubled", "another"])
def test_row_test_detects_wrong_forced_tokens(llm: LLM, plain: list[Any], monkeypatch: pytest.MonkeyPatch, fault: str):
    """Negative control."""
    taken = StepMasks.appended

    def wrong(self: StepMasks, token_ids: Any) -> Any:
        found = taken(self, token_ids)
        return [(*each, each[-1] if fault == "doubled" else 9) if len(each) > 1 else each for each in found]

    monkeypatch.setattr(StepMasks, "appended", wrong)
    assert answers(run(llm)) != plain


def test_forced_text_takes_few_steps_of_tokenizer_tokens(llm: LLM):
    output, num_steps, num_single_steps = both_ways(llm)
    (completion,) = output.outputs
    assert json.loads(completion.text) in [
        {"hello world, this is": "the cache and the scheduler", "naïve 你好": each} for each in (True, False)
    ]
    assert num_single_steps >= len(completion.token_ids) > 3 * num_steps
    tokenizer = llm.get_tokenizer()
    expected = tokenizer.encode(completion.text.partition("true")[0].partition("false")[0], add_special_tokens=False)
    # All but the last, which what comes behind might change.
    assert [*completion.token_ids[: len(expected) - 1]] == expected[:-1]


@pytest.mark.matrix
def test_forced_row_has_logprobs_for_each_token(llm: LLM):
    alone, num_steps, num_single_steps = both_ways(llm, logprobs=2)
    assert num_steps == num_single_steps
    free, num_steps, _ = both_ways(llm)
    assert free.outputs[0].token_ids == alone.outputs[0].token_ids
    assert num_steps < num_single_steps
    # Beside one that forces: each entry is its own token's.
    params = [
        SamplingParams(structured_outputs=FORM, temperature=1.0, max_tokens=200, seed=3, logprobs=each)
        for each in (None, 2)
    ]
    first, second = llm.generate(["hello", "hello"], params, use_tqdm=False)
    assert answers([replace(first, outputs=second.outputs)]) == answers([alone])
    assert first.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.matrix
@pytest.mark.parametrize(
    "asked",
    [
        {"max_tokens": 7},
        {"max_tokens": 30, "min_tokens": 30},
        {"stop": ["cache"]},
        {"stop": ["orld"], "include_stop_str_in_output": True, "min_tokens": 9},
        {"n": 3},
        {"temperature": 0.0, "frequency_penalty": 1.0},
    ],
    ids=str,
)
def test_stop_conditions_apply_inside_forced_text(llm: LLM, asked: dict[str, Any]):
    output, num_steps, num_single_steps = both_ways(llm, **asked)
    assert num_steps < num_single_steps
    if len(asked) == 1 and "max_tokens" in asked:
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (7, "length")


def test_stop_token_inside_forced_text_stops(llm: LLM):
    token_ids = generate(llm)[0].outputs[0].token_ids
    output, _, _ = both_ways(llm, stop_token_ids=[token_ids[9]])
    end = token_ids.index(token_ids[9])
    assert (output.outputs[0].token_ids, output.outputs[0].stop_reason) == (token_ids[: end + 1], token_ids[9])


@pytest.mark.matrix
def test_row_with_forbidden_tokens_uses_others(llm: LLM):
    token_ids = generate(llm)[0].outputs[0].token_ids
    forbidden = next(each for each in token_ids if each > 260)
    output, num_steps, num_single_steps = both_ways(llm, bad_words_ids=[[forbidden]])
    assert forbidden not in output.outputs[0].token_ids
    assert num_steps == num_single_steps
    json.loads(output.outputs[0].text)


@pytest.mark.matrix
def test_forbidden_token_is_never_forced():
    assert not SamplingParams(min_tokens=3, logit_bias={7: 2.0}, stop="x").forbids_tokens
    for asked in (
        {"min_tokens": 3, "stop_token_ids": [7]},
        {"logit_bias": {7: -1.0}},
        {"allowed_token_ids": [7]},
    ):
        assert SamplingParams(**asked).forbids_tokens, asked


def test_end_is_not_forced_while_text_can_continue(llm: LLM):
    found = {generate(llm, {"regex": "ab(cd)?"}, seed=seed)[0].outputs[0].text for seed in range(12)}
    assert found == {"ab", "abcd"}
    assert both_ways(llm, {"choice": ["hello world"]})[0].outputs[0].token_ids[-1] == EOS


@pytest.mark.matrix
def test_text_beyond_the_search_limit_is_not_forced(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    for form, begin in (({"regex": "a{1000000}(b|c)"}, "aaaa"), ({"regex": "[bc]a{1000000}(b|c)"}, "aaaa")):
        output, num_steps, num_single_steps = both_ways(llm, form, max_tokens=20)
        assert begin in output.outputs[0].text
        assert (output.outputs[0].finish_reason, num_steps) == ("length", num_single_steps)
    monkeypatch.setattr(row_grammar, "MAX_FORCED_BYTES", 20)
    assert both_ways(llm, {"regex": "[bc]a{22}"})[1] > 20
    assert both_ways(llm, {"regex": "[bc]a{19}"})[1] < 20


@pytest.mark.matrix
def test_forced_tokens_equal_on_two_pipeline_workers(plain: list[Any], forked_workers_of_module: None):
    settings = {"pipeline_parallel_size": 2, "distributed_executor_backend": "multiproc"}
    with open_model(made_once("constrained", write_model), **settings) as made:
        assert answers(run(made)) == plain


def test_worker_reports_admitted_form_it_cannot_compile():
    """The worker's installation differs from the engine's, which is not an error of the row."""
    with open_model(made_once("constrained", write_model)) as made:
        compiler = made.llm_engine.model_executor.driver_worker.model_runner._grammars._compiler
        compiler._compiled[StructuredOutputsParams(regex="a")] = GrammarError("extra_missing", "pip install it")
        words = "structured_outputs: an admitted grammar cannot be compiled on this rank: pip install it"
        with pytest.raises(ConfigError, match=words):
            made.generate("hello", SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)


def test_step_counts_separate_forced_tokens_from_prompts(llm: LLM):
    """Negative control: counted a sequence a token, the rest would be tokens of prompts."""
    seen: list[StepStats] = []
    llm.reset_prefix_cache()
    llm.llm_engine.watch_steps(seen.append)
    try:
        output, num_steps = generate(llm)
    finally:
        llm.llm_engine.watch_steps(lambda _: None)
    num_prompt, num_answer = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    steps = [each for each in seen if each.num_rows]
    assert num_answer > 2 * num_steps > 2
    assert sum(each.num_prompt_tokens for each in steps) == num_prompt
    assert sum(each.num_sampled_tokens for each in steps) == num_answer
    # But those of the last step, which nothing follows.
    assert num_answer - num_steps < sum(each.num_decode_tokens for each in steps) < num_answer


def test_row_history_lists_all_blocks_of_forced_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Negative control: named one block a step, those after the first would be missing."""
    form = {"regex": "the cache and the scheduler, " * 10}
    row = {"prompt": "hello", "max_tokens": 200, "structured_outputs": form}
    folder, options = made_once("constrained", write_model), {"load_format": "dummy"}
    (answer,) = answers_of_job(tmp_path, folder, [row], step_log=True, options=options)
    assert answer["error"] is None
    capsys.readouterr()
    code = replay.main([str(tmp_path / "out.jsonl.run" / "steps.log"), "--row", "index:0"])
    shown, said = capsys.readouterr()
    assert code == 0, said
    num_blocks = [len(found.split(",")) for found in re.findall(r"gets blocks? (\d+(?:, \d+)*)", shown)]
    num_tokens = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    assert max(num_blocks) > 1
    # The first comes with the prompt; the last token is computed by nobody.
    assert sum(num_blocks) == (num_tokens - 2) // 16
