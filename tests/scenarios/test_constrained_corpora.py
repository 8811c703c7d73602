"""Answers to random grammars, and to the JSON Schema test suite, checked by `jsonschema` and `re`.

The weights are random and rows are sampled at temperature 1: only the masks give an answer its format. Answers that end
with `length` are incomplete and not checked; their number is printed, and bounded.

JSON_SCHEMA_TEST_SUITE names a folder with the suite's `draft2020-12` files; by default they are read from the source
distribution of `jsonschema`, which pip fetches from the package index.
"""

import json
import os
import random
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from constrained_rows import EOS, open_model, write_model
from context_fixtures import fixture_of
from random_constraints import drawn_regex, drawn_schema, drawn_value
from run_folder import made_once
from stress_seed import SEED

from spmd_worker import LLM, SamplingParams, StructuredOutputsParams
from spmd_worker.ops.sampling.token_masks import TokenMasks
from spmd_worker.replica.grammar import step_masks
from spmd_worker.replica.grammar.llguidance_input import GrammarError
from spmd_worker.replica.grammar.step_masks import StepMasks

pytestmark = pytest.mark.stress

NUM_SCHEMAS, NUM_REGEXES, NUM_CHOICES = 500, 200, 100
SUITE = "json/tests/draft2020-12/"
_WORDS = "no, not any of these: yes"

llm = fixture_of(lambda: open_model(made_once("constrained", write_model), num_blocks=2400, max_model_len=512))


@dataclass(slots=True)
class Seen:
    """Answers to many grammars: numbers of complete and truncated ones, the wrong ones, and all tokens."""

    whole: int = 0
    cut: int = 0
    wrong: tuple[Any, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()


def accepted(llm: LLM, forms: list[StructuredOutputsParams]) -> tuple[list[StructuredOutputsParams], list[str]]:
    """Those that rows are admitted with, and why others are not."""
    grammars = llm.llm_engine.limits.grammars
    taken, refused = [], []
    for form in forms:
        try:
            grammars.check(form)
            taken.append(form)
        except GrammarError as error:
            refused.append(str(error))
    return taken, refused


def answered(llm: LLM, forms: list[Any], is_right: Any, *, masked: bool = True) -> Seen:
    """One answer to each. Quotes, brackets and the end are likelier than a random model has them, or most answers would
    be cut in a string."""
    tokenizer = llm.get_tokenizer()
    bias = dict.fromkeys([tokenizer.encode(each, add_special_tokens=False)[0] for each in '"]}'] + [EOS], 3.0)
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=400,
            seed=SEED * 10_000 + index,
            logit_bias=bias,
            structured_outputs=form if masked else None,
        )
        for index, form in enumerate(forms)
    ]
    outputs = llm.generate([f"row {index}" for index in range(len(forms))], params, use_tqdm=False)
    seen = Seen()
    seen.token_ids = tuple([tuple(each.token_ids) for output in outputs for each in output.outputs])
    for form, output in zip(forms, outputs, strict=True):
        if output.error is not None:
            seen.wrong += ((form, output.error),)
        elif output.outputs[0].finish_reason == "length":
            seen.cut += 1
        else:
            seen.whole += 1
            if not is_right(form, output.outputs[0].text):
                seen.wrong += ((form, output.outputs[0].text),)
    return seen


def has_schema(form: StructuredOutputsParams, text: str) -> bool:
    """Whether the text is JSON, and valid."""
    schema = json.loads(form.json or "{}")
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    try:
        return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(json.loads(text))
    except ValueError:
        return False


def has_regex(form: StructuredOutputsParams, text: str) -> bool:
    return re.fullmatch(form.regex or "", text) is not None


def drawn_schemas() -> list[StructuredOutputsParams]:
    schemas = [drawn_schema(random.Random(f"{SEED} schema {index}")) for index in range(NUM_SCHEMAS)]
    # Every fourth may have spaces.
    return [
        StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=index % 4 > 0)
        for index, schema in enumerate(schemas)
    ]


def drawn_regexes() -> list[StructuredOutputsParams]:
    regexes = [drawn_regex(random.Random(f"{SEED} regex {index}")) for index in range(NUM_REGEXES)]
    return [StructuredOutputsParams(regex=regex) for regex in regexes]


def test_answers_to_drawn_schemas_are_valid(llm: LLM):
    forms, refused = accepted(llm, drawn_schemas())
    seen = answered(llm, forms, has_schema)
    print(f"\nSCHEMAS seed {SEED}: {len(refused)} refused, {seen.whole} whole, {seen.cut} cut, {len(seen.wrong)} wrong")
    print("\n".join(dict.fromkeys(refused)))
    assert seen.wrong == ()
    assert len(refused) < NUM_SCHEMAS // 10
    assert seen.whole > NUM_SCHEMAS * 3 // 4


def test_random_schema_answers_equal_one_token_per_step(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Negative control: forced tokens that are not the row's give others."""
    forms = accepted(llm, drawn_schemas())[0]
    counters = llm.llm_engine.counters
    found, num_steps = [], [counters.num_steps]
    for most in (step_masks.MAX_FORCED_TOKENS, 1):
        monkeypatch.setattr(step_masks, "MAX_FORCED_TOKENS", most)
        found.append(answered(llm, forms[:100], has_schema).token_ids)
        num_steps.append(counters.num_steps)
    forced, single = num_steps[1] - num_steps[0], num_steps[2] - num_steps[1]
    tokens = sum(map(len, found[0]))
    print(f"\nFORCED seed {SEED}: 100 schemas, {tokens} tokens in {forced} steps, one a step in {single}")
    assert found[0] == found[1]
    monkeypatch.undo()
    appended = StepMasks.appended
    monkeypatch.setattr(
        StepMasks,
        "appended",
        lambda self, ids: [each if len(each) == 1 else (*each, 9) for each in appended(self, ids)],
    )
    assert answered(llm, forms[:100], has_schema).token_ids != found[0]


def test_answers_to_drawn_regexes_match(llm: LLM):
    forms, refused = accepted(llm, drawn_regexes())
    seen = answered(llm, forms, has_regex)
    print(f"\nREGEXES seed {SEED}: {len(refused)} refused, {seen.whole} whole, {seen.cut} cut, {len(seen.wrong)} wrong")
    print("\n".join(dict.fromkeys(refused)))
    assert seen.wrong == ()
    assert len(refused) < NUM_REGEXES // 20
    assert seen.whole > NUM_REGEXES * 3 // 4


def test_answers_to_drawn_choices_are_choices(llm: LLM):
    forms = []
    for index in range(NUM_CHOICES):
        drawn = random.Random(f"{SEED} choice {index}")
        texts = [str(drawn_value(drawn)) + "x" * drawn.randrange(2) for _ in range(drawn.randint(1, 6))]
        forms.append(StructuredOutputsParams(choice=[*filter(None, texts), _WORDS[: drawn.randint(1, 20)]]))
    seen = answered(llm, forms, lambda form, text: text in (form.choice or ()))
    print(f"\nCHOICES seed {SEED}: {seen.whole} whole, {len(seen.wrong)} wrong")
    assert (seen.wrong, seen.cut, seen.whole) == ((), 0, NUM_CHOICES)


def test_these_tests_see_answers_without_masks(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Negative control: rows without forms have none, nearly all; most of those whose masks are not applied fail."""
    for forms, is_right in ((drawn_schemas()[:60], has_schema), (drawn_regexes()[:60], has_regex)):
        seen = answered(llm, forms, is_right, masked=False)
        assert len(seen.wrong) > seen.whole * 3 // 4
        assert seen.whole > 10
    monkeypatch.setattr(TokenMasks, "apply", lambda self, kernels, logits, first_id: None)
    assert len(answered(llm, accepted(llm, drawn_schemas()[:60])[0], has_schema).wrong) > 40


# The JSON Schema test suite.


@dataclass(frozen=True, slots=True)
class Case:
    """One schema of the suite that rows are admitted with; `data` are instances, and whether each is valid."""

    name: str
    form: StructuredOutputsParams
    data: tuple[tuple[Any, bool], ...]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Any]]:
    """The files of draft 2020-12 and their groups."""
    folder = os.environ.get("JSON_SCHEMA_TEST_SUITE")
    if folder:
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.json"))}
        assert files, f"JSON_SCHEMA_TEST_SUITE={folder} has no files that end in .json"
    else:
        files = _files_of_sdist(tmp_path_factory.mktemp("sdist"))
    return [(name, json.loads(content)) for name, content in sorted(files.items())]


def _files_of_sdist(folder: Path) -> dict[str, bytes]:
    wanted = f"jsonschema=={version('jsonschema')}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "jsonschema", "-d", folder]
    # What keeps tests from name servers, in tests/conftest.py, would keep pip from the package index.
    environment = {key: value for key, value in os.environ.items() if key != "RES_OPTIONS"}
    done = subprocess.run([*command, wanted], capture_output=True, text=True, timeout=600, env=environment)
    if done.returncode:
        pytest.skip(
            f"pip found no source distribution of {wanted}, which has the JSON Schema test suite: set "
            f"JSON_SCHEMA_TEST_SUITE to the folder that has its draft2020-12 files. {done.stderr[-300:]}"
        )
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        names = [name for name in archive.getnames() if re.search(rf"/{SUITE}[^/]+\.json$", name)]
        return {Path(name).name: archive.extractfile(name).read() for name in names}


def cases_of(llm: LLM, suite: list[tuple[str, Any]]) -> tuple[list[Case], int]:
    """Those whose schema the engine enforces, and how many it refuses; true and false are no schemas here."""
    grammars, found, num_refused = llm.llm_engine.limits.grammars, [], 0
    for file, groups in suite:
        for group in groups:
            if not isinstance(group["schema"], dict):
                continue
            form = StructuredOutputsParams(json=json.dumps(group["schema"]), disable_any_whitespace=True)
            try:
                grammars.check(form)
            except GrammarError:
                num_refused += 1
                continue
            data = tuple([(test["data"], test["valid"]) for test in group["tests"]])
            found.append(Case(f"{file}: {group['description']}", form, data))
    return found, num_refused


def allows(llm: LLM, form: StructuredOutputsParams, text: str) -> bool:
    """Whether the text may be a complete answer."""
    grammars = llm.llm_engine.limits.grammars
    state, bits = grammars.start(form), grammars.new_bits(1)[0]
    state.advance(llm.get_tokenizer().encode(text, add_special_tokens=False))
    state.fill(bits)
    return not state.problem and bool(bits[0] & (1 << EOS))


def test_invalid_schema_instances_cannot_be_answers(llm: LLM, suite: list[tuple[str, Any]]):
    cases, num_refused = cases_of(llm, suite)
    wrong, num_invalid, num_valid, num_allowed = [], 0, 0, 0
    for case in cases:
        for data, is_valid in case.data:
            text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
            is_allowed = allows(llm, case.form, text)
            num_valid, num_invalid = num_valid + is_valid, num_invalid + (not is_valid)
            num_allowed += is_valid and is_allowed
            if is_allowed and not is_valid:
                wrong.append((case.name, text))
    print(
        f"\nSUITE: {len(cases)} schemas enforced, {num_refused} refused; of {num_invalid} invalid instances "
        f"{len(wrong)} allowed, of {num_valid} valid ones {num_allowed}"
    )
    assert wrong == []
    assert len(cases) > 150
    # Others have their properties in another order, or write a number as no answer does (1.0 for an integer).
    assert num_allowed > num_valid * 3 // 4


def test_answers_to_the_suites_schemas_are_valid(llm: LLM, suite: list[tuple[str, Any]]):
    forms = [case.form for case in cases_of(llm, suite)[0]]
    seen = answered(llm, forms, is_valid_without_formats)
    print(f"\nSUITE seed {SEED}: {len(forms)} schemas, {seen.whole} whole, {seen.cut} cut, {len(seen.wrong)} wrong")
    assert seen.wrong == ()
    assert seen.whole > len(forms) // 2


def is_valid_without_formats(form: StructuredOutputsParams, text: str) -> bool:
    """Draft 2020-12's validity, which ignores formats."""
    schema = json.loads(form.json or "{}")
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
