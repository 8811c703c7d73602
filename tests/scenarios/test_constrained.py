"""Constrained answers keep their format in any batch, also when their row is preempted, truncated or aborted."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import constrained_rows
import pytest
import ranks
from constrained_rows import EOS, FORMS, NUM_TOKENS, answers, check, open_model, rows, run, write_model
from context_fixtures import fixture_of
from cut_jobs import Ended, end_after
from jobs_of_rows import job_config, read_rows, run_here, write_rows
from json_files import edit
from run_folder import made_once

import spmd_worker.replica.scheduler.stop as stop_module
from spmd_worker import LLM, PromptsRefusedError, SamplingParams
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.ops.sampling.token_masks import TokenMasks
from spmd_worker.replica.grammar import llguidance_input as forms
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.grammar.row_grammar import RowGrammar
from spmd_worker.replica.grammar.step_masks import GrammarMasks
from spmd_worker.tokenizer.tokenizer import Tokenizer

SCARCE = {"num_blocks": 48, "block_size": 4, "max_model_len": 180, "max_num_seqs": 24}
CASES = {
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "recomputed": {**SCARCE, "preemption_mode": "recompute"},
    "swapped": {**SCARCE, "preemption_mode": "swap"},
}


def folder() -> Path:
    return made_once("constrained", write_model)


llm = fixture_of(lambda: open_model(folder()))


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[Any]:
    return answers(run(llm))


def generate(llm: LLM, form: Any, **sampling: Any) -> Any:
    given = {"temperature": 1.0, "max_tokens": 60, "seed": 3, **sampling}
    return llm.generate("hello", SamplingParams(structured_outputs=form, **given), use_tqdm=False)[0]


@pytest.mark.guarantee("Answers have their form")
def test_every_answer_has_its_form(llm: LLM):
    outputs = run(llm)
    names = rows()[2]
    check(outputs, names)
    assert {*names} == {None, *FORMS}
    assert len(dict.fromkeys(each.text for each in outputs[0].outputs)) == 1


@pytest.mark.control("Answers have their form")
def test_schema_test_detects_unmasked_answers(llm: LLM, monkeypatch: pytest.MonkeyPatch, control):
    monkeypatch.setattr(TokenMasks, "apply", lambda self, kernels, logits, first_id: None)
    outputs = run(llm)
    with control():
        check(outputs, rows()[2])
    # The next step's mask finds that the last token did not follow.
    assert {output.error_code for output in outputs} == {None, "grammar_failed"}


def test_row_without_form_has_no_grammar(llm: LLM):
    prompts, params, names = rows()
    outputs = llm.generate(prompts, [replace(each, structured_outputs=None) for each in params], use_tqdm=False)
    with pytest.raises(AssertionError):
        check(outputs, names)


def test_rows_are_the_same_alone_and_beside_others(llm: LLM, plain: list[Any]):
    prompts, params, names = rows()
    for index in (0, 1, 3, 4, 9):
        assert names[index] is not None
        assert answers(llm.generate(prompts[index], params[index], use_tqdm=False)) == [plain[index]]
    # And those without a form as if there were no forms.
    free = [index for index, name in enumerate(names) if name is None]
    outputs = llm.generate([prompts[i] for i in free], [params[i] for i in free], use_tqdm=False)
    assert answers(outputs) == [plain[index] for index in free]


@pytest.mark.gate("chunks of 7", "swapped")
@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[] if each == "recomputed" else pytest.mark.matrix) for each in CASES]
)
def test_row_is_independent_of_scheduling(plain: list[Any], case: str):
    with open_model(folder(), **CASES[case]) as made:
        assert answers(run(made)) == plain
        assert (made.llm_engine.counters.num_preemptions > 0) == (case != "chunks of 7")


def test_fresh_grammar_state_per_step_gives_equal_rows(llm: LLM, plain: list[Any], monkeypatch: pytest.MonkeyPatch):
    end = GrammarMasks.end

    def end_and_forget(self: GrammarMasks) -> Any:
        masks = end(self)
        self._states.clear()
        return masks

    monkeypatch.setattr(GrammarMasks, "end", end_and_forget)
    assert answers(run(llm)) == plain


def test_row_test_detects_another_rows_grammar_state(llm: LLM, plain: list[Any], monkeypatch: pytest.MonkeyPatch):
    start = GrammarCompiler.start
    shared: dict[Any, RowGrammar] = {}

    def shared_start(self: GrammarCompiler, form: Any, may_force: bool) -> RowGrammar:
        return shared.get(form) or shared.setdefault(form, start(self, form, may_force))

    monkeypatch.setattr(GrammarCompiler, "start", shared_start)
    assert answers(run(llm)) != plain


def test_nothing_is_kept_of_rows_that_ended(llm: LLM):
    run(llm)
    # What ended in the last step goes with the next.
    llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
    worker = llm.llm_engine.model_executor.driver_worker
    assert len(worker.model_runner._grammars) == 0


@pytest.mark.gate("tensor_parallel_size")
@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_every_layout_gives_forms(plain: list[Any], layout: str, tmp_path: Path):
    source = f"""
        import json, sys
        from pathlib import Path
        from constrained_rows import answers, check, open_model, rows, run
        with open_model(Path(sys.argv[1]), {layout}=2) as llm:
            outputs = run(llm)
            check(outputs, rows()[2])
            Path(sys.argv[2], llm_rank := __import__("os").environ["RANK"]).write_text(json.dumps(answers(outputs)))
        """
    ranks.run_ranks(source, 2, 120, [folder(), tmp_path]).checked()
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert first == second == json.loads(json.dumps(plain))


def test_log_probabilities_are_of_all_tokens(llm: LLM):
    output = generate(llm, {"choice": ["yes", "no"]}, logprobs=64).outputs[0]
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert len(entry) >= 64
        assert entry[token_id].logprob > -20.0
    prompt = llm.generate("hello", SamplingParams(logprobs=64, max_tokens=1, temperature=0), use_tqdm=False)[0]
    others = prompt.outputs[0].logprobs[0]
    assert {key: value for key, value in others.items() if key in output.logprobs[0]}.items() <= output.logprobs[
        0
    ].items()
    with open_model(folder(), logprobs_mode="processed_logprobs") as processed:
        output = generate(processed, {"regex": "a"}, logprobs=0).outputs[0]
    assert [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)] == [0.0, 0.0]


# What other parameters ask for.


def test_no_other_parameter_revives_what_the_form_forbids(llm: LLM):
    form = {"regex": "[ab]{3}"}
    token = llm.get_tokenizer().encode("z", add_special_tokens=False)[0]
    for asked in (
        {"logit_bias": {token: 100.0}},
        {"allowed_token_ids": [token]},
        {"bad_words_ids": [[each] for each in range(NUM_TOKENS)]},
        {"min_tokens": 30},
        {"presence_penalty": 2.0, "repetition_penalty": 0.01},
        {"min_tokens": 30, "stop_token_ids": [token], "temperature": 0.0},
    ):
        output = generate(llm, form, **asked).outputs[0]
        assert re.fullmatch("[ab]{3}", output.text), asked
        assert (output.finish_reason, output.stop_reason, output.token_ids.count(EOS)) == ("stop", None, 1)


def test_min_tokens_holds_while_grammar_can_continue(llm: LLM):
    output = generate(llm, {"regex": "a+"}, min_tokens=12, max_tokens=40, logit_bias={EOS: 100.0}).outputs[0]
    assert (len(output.token_ids), output.text, output.finish_reason) == (13, "a" * 12, "stop")


def test_min_tokens_test_detects_stop_checker_without_forms(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """The stop checker takes a form's end before `min_tokens`: without that the row goes on behind it."""
    has_ended = stop_module.StopChecker.has_ended

    def as_without_forms(self: Any, sequence: Any) -> bool:
        outputs, sampling = sequence.output_token_ids, sequence.request.sampling
        return len(outputs) >= sampling.min_tokens and has_ended(self, sequence)

    monkeypatch.setattr(stop_module.StopChecker, "has_ended", as_without_forms)
    assert generate(llm, {"regex": "a"}, min_tokens=9).outputs[0].token_ids.count(EOS) == 8


def test_truncated_form_ends_with_length_or_stop_string(llm: LLM):
    cut = generate(llm, {"regex": "[ab]{50}"}, max_tokens=7).outputs[0]
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 7)
    stopped = generate(llm, {"regex": "[ab]{5}c[ab]{5}"}, stop=["c"]).outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "c")
    assert re.fullmatch("[ab]{5}", stopped.text)


def name_no_eos_token(folder: Path) -> None:
    """The tokenizer's own would end rows too."""
    edit(folder / "tokenizer_config.json", eos_token=None)


def test_eos_token_with_text_only_ends_the_row(tmp_path: Path):
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    letter = 66
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [letter]}))
    name_no_eos_token(tmp_path)
    with open_model(tmp_path) as llm:
        spelled = llm.get_tokenizer().decode([letter])
        output = generate(llm, {"regex": "[!-~]{20}"}).outputs[0]
        assert len(output.text) == 20
        assert spelled not in output.text
        assert output.token_ids[-1] == letter
        assert generate(llm, {"choice": [f"0{spelled}"]}).error_code == "grammar_failed"


def test_tokenizer_may_have_more_tokens_than_model(tmp_path: Path):
    write_model(tmp_path)
    edit(tmp_path / "config.json", vocab_size=300)
    with open_model(tmp_path) as llm:
        for seed in range(3):
            assert re.fullmatch("[a-z ]{30}", generate(llm, {"regex": "[a-z ]{30}"}, seed=seed).outputs[0].text)


ADDED = "<tool_call>"


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory):
    """A model to whose vocabulary a text was added, as no special token."""
    path = tmp_path_factory.mktemp("added")
    write_model(path)
    content = json.loads((path / "tokenizer.json").read_text())
    token_id = 1 + max(Tokenizer.open(path).vocabulary().values())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": token_id, "content": ADDED, **flags})
    (path / "tokenizer.json").write_text(json.dumps(content))
    with open_model(path) as made:
        yield made


FORCED = {
    "choice": ({"choice": [f"x{ADDED}1", f"x{ADDED}2"]}, rf"x{ADDED}[12]"),
    "regex": ({"regex": f"x{ADDED}[12]"}, rf"x{ADDED}[12]"),
    "json": ({"json": {"const": f"x{ADDED}"}}, rf'"x{ADDED}"'),
    "lark": ({"grammar": f'start: %json {{"const": "x{ADDED}"}}'}, rf'"x{ADDED}"'),
    "ebnf": ({"grammar": f'root ::= "x{ADDED}1"'}, rf"x{ADDED}1"),
    "engine's": ({"grammar": json.dumps({"grammars": [{"lark_grammar": f'start: "x{ADDED}1"'}]})}, rf"x{ADDED}1"),
    "forcing": ({"grammar": f'%llguidance {{"no_forcing": false}}\nstart: "x{ADDED}1"'}, rf"x{ADDED}1"),
}


@pytest.mark.parametrize("name", FORCED)
def test_forced_text_may_also_be_a_special_token(added: LLM, name: str):
    form, expected = FORCED[name]
    output = generate(added, form)
    assert output.error is None
    assert re.fullmatch(expected, output.outputs[0].text)


def test_forcing_grammar_fails_on_its_own_tokens(added: LLM, monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    monkeypatch.setattr(forms, "_NO_FORCING", {"lark_grammar": 'start: ""'})
    assert generate(added, {"choice": [f"y{ADDED}1", f"y{ADDED}2"]}).error_code == "grammar_failed"


# Forms that cannot be had.

REFUSED = {
    "bad_type": ({"json": {"type": "objec"}}, "json: Invalid type: objec"),
    "unknown": ({"json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
    "look-around": ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
    "class": ({"regex": "["}, "unclosed character class"),
    "rule": ({"grammar": "start: missing"}, "missing"),
    "ebnf": ({"grammar": 'root ::= "'}, "grammar is not valid EBNF"),
    "empty": ({"grammar": "start: A\nA: /a/ & /b/"}, "grammar: no text matches"),
    "size": (
        {"json": {"allOf": [{"anyOf": [{"properties": {f"{i} {j}": {}}} for j in range(9)]} for i in range(9)]}},
        "schema too large",
    ),
    "deep": ({"json": "{}"}, "recursion limit exceeded"),
    "rules": ({"grammar": "\n".join(f'r{number} ::= "x"' for number in range(501))}, "more than 500 rules in EBNF"),
    "copies": (
        {"json": {"properties": {str(number): {} for number in range(1000)}, "enum": [*range(8000)]}},
        "8000 alternatives have sibling keywords of",
    ),
}
_COPIES, _WORDS = REFUSED["copies"]
_LARK = f"start: %json{json.dumps(_COPIES['json'])}"
REFUSED |= {
    "copies in a grammar": ({"grammar": _LARK}, _WORDS),
    "copies in the engine's JSON": ({"grammar": json.dumps({"grammars": [{"json_schema": _COPIES["json"]}]})}, _WORDS),
    "copies in a grammar in it": ({"grammar": json.dumps({"grammars": [{"lark_grammar": _LARK}]})}, _WORDS),
    "copies around it": ({"regex": "a", "around": f"{_LARK} @form"}, _WORDS),
}
# In the engine's JSON, which is taken as the row has it.
REFUSED |= {
    "no grammar": ({"grammar": '{"grammars": []}'}, "grammar: empty grammars array"),
    "no list": ({"grammar": '{"grammars": "a"}'}, "grammar: invalid type: string"),
    "a number": ({"grammar": '{"grammars": [3]}'}, "grammar: "),
    "null": ({"grammar": '{"grammars": [null]}'}, "grammar: "),
}
deep: Any = {}
for _ in range(150):
    deep = {"items": deep}
REFUSED["deep"] = ({"json": deep}, "recursion limit exceeded")


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_form_is_rejected_with_engines_message(llm: LLM, name: str):
    form, words = REFUSED[name]
    with pytest.raises(PromptsRefusedError) as error_result:
        generate(llm, form)
    assert "structured_outputs: " in str(error_result.value)
    assert words in str(error_result.value)


def test_added_grammar_is_not_mistaken_for_the_form(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Negative control of "no grammar": where it is added all the same, the row is answered with nothing."""
    added = json.dumps({"grammars": [forms._NO_FORCING]})
    monkeypatch.setattr("spmd_worker.replica.grammar.compiler.engine_grammar", lambda _: added)
    assert generate(llm, {"grammar": '{"grammars": [ ]}'}).outputs[0].text == ""


def new_job(tmp_path: Path, asked: list[dict[str, Any]]) -> RunConfig:
    write_rows(
        tmp_path, [{"prompt": "hello", "max_tokens": 60, "seed": 5, "temperature": 1.0, **each} for each in asked]
    )
    return job_config(tmp_path, folder(), options={"load_format": "dummy"}, commit_rows=1)


def test_job_with_forms_and_error_rows_resumes(tmp_path: Path):
    # An empty structural_tag asks for nothing: such a row once ended the job.
    good = [{"structured_outputs": {**form, "structural_tag": {}}} for form, _ in FORMS.values()]
    bad = [{"structured_outputs": form} for form, _ in REFUSED.values()]
    bad += [{"structured_outputs": {"regex": "a", "json": "{}"}}, {"structured_outputs": {"regex": "a" * 70_000}}]
    config = new_job(tmp_path, [*bad, *good])
    run_here(config)
    found = read_rows(tmp_path)
    codes = [answer["error"]["code"] for answer in found[: len(bad)]]
    expected = ["nested_too_deeply" if name == "deep" else "grammar_refused" for name in REFUSED]
    assert codes == [*expected, "invalid_value", "invalid_value"]
    for (_, is_of_form), answer in zip(FORMS.values(), found[len(bad) :], strict=True):
        (completion,) = answer["outputs"]
        assert is_of_form(completion["text"])
        assert completion["finish_reason"] == "stop"
    whole = (tmp_path / "out.jsonl").read_bytes()
    manifest = json.loads((tmp_path / "out.jsonl.run" / "manifest.json").read_text())
    assert manifest["answers"]["version of llguidance"]
    again = tmp_path / "again"
    again.mkdir()
    config = new_job(again, [*bad, *good])
    with pytest.MonkeyPatch.context() as monkeypatch:
        end_after(monkeypatch, len(bad) + 3)
        with pytest.raises(Ended):
            run_here(config)
    run_here(config)
    assert (again / "out.jsonl").read_bytes() == whole


def test_grammar_limit_ends_only_its_row(llm: LLM):
    """The second row's parser exceeds its item limit after the first token."""
    growing = {"grammar": "start: " + " | ".join(f'"a{index}" start' for index in range(2100))}
    bounded = {"regex": "[ab]{6}"}
    params = [
        SamplingParams(temperature=1.0, max_tokens=80, seed=1, structured_outputs=each)
        for each in (bounded, growing, None)
    ]
    first, second, third = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert (second.error_code, second.outputs) == ("grammar_failed", [])
    assert re.search("the grammar allows no token as output token [0-9]+, or deciding so exceeds", second.error)
    assert re.fullmatch("[ab]{6}", first.outputs[0].text)
    assert third.outputs[0].finish_reason is not None


def test_row_without_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    words = "structured_outputs needs llguidance, which is not installed: pip install 'spmd-worker[structured]'"
    with open_model(folder()) as llm:
        with pytest.raises(PromptsRefusedError, match=re.escape(words)):
            generate(llm, {"regex": "a"})
        assert generate(llm, None).error is None
    run_here(new_job(tmp_path, [{"structured_outputs": {"regex": "a"}}, {}]))
    first, second = read_rows(tmp_path)
    assert (first["error"]["code"], second["error"]) == ("extra_missing", None)


def test_further_needs_of_forms_are_reported(tmp_path: Path):
    write_model(tmp_path)
    edit(tmp_path / "config.json", eos_token_id=[])
    name_no_eos_token(tmp_path)
    with open_model(tmp_path) as llm, pytest.raises(PromptsRefusedError, match="no end-of-sequence token"):
        generate(llm, {"regex": "a"})
    (tmp_path / "tokenizer.json").unlink()
    with open_model(tmp_path) as llm, pytest.raises(PromptsRefusedError, match="structured_outputs need a tokenizer"):
        llm.generate([{"prompt_token_ids": [3]}], SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)


def test_guided_decoding_is_structured_outputs(llm: LLM):
    sampling = SamplingParams(guided_decoding=constrained_rows.FORMS["regex"][0], max_tokens=60, temperature=1.0)
    assert FORMS["regex"][1](llm.generate("hello", sampling, use_tqdm=False)[0].outputs[0].text)
