"""Drafts of rows with a grammar: answers, and where the engine's limits end a row, are those without drafts.

The engine counts the work for masks; the masks at drafts that turn out wrong are made by a state of their own.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from constrained_rows import answers, open_model, run, write_model
from planted_drafts import planted
from run_folder import made_once
from test_speculation import DRAFTS, right

from spmd_worker import LLM, PromptsRefusedError, SamplingParams
from spmd_worker.replica.grammar import compiler
from spmd_worker.replica.grammar.step_masks import GrammarMasks
from spmd_worker.replica.sequence.sequence import FinishReason
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams

SCARCE = {"num_blocks": 48, "block_size": 4, "max_model_len": 180, "max_num_seqs": 24}
NUM_STATES = 500
LONG = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": False}


def folder() -> Any:
    return made_once("constrained", write_model)


@pytest.fixture(scope="module")
def plain() -> Iterator[list[Any]]:
    with open_model(folder()) as llm:
        yield answers(run(llm))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("chance", SCARCE),
        *[
            pytest.param(kind, options, marks=pytest.mark.stress)
            for kind in ("right", "wrong", "chance")
            for options in ({}, SCARCE, {"async_scheduling": True})
        ],
    ],
)
def test_forms_have_their_answers_with_drafts(plain: list[Any], kind: str, options: dict[str, Any]):
    with planted(partial(right, plain), kind), open_model(folder(), speculative_config=DRAFTS, **options) as llm:
        assert answers(run(llm)) == plain
        groups = llm.llm_engine.counters
        assert groups.num_drafted_tokens > 50


def ends_of_limited_rows(llm: LLM) -> list[Any]:
    """Tokens and ends of rows of which some reach the limit of lexer states, in the order of requests."""
    form = StructuredOutputsParams(regex="[a-z ]*[aeiou][a-z ]{12}[0-9]")
    params = [SamplingParams(structured_outputs=form, seed=seed, **LONG) for seed in range(8)]
    found: dict[int, Any] = {}
    end = llm.llm_engine.scheduler._end

    def noted(group: Any) -> Any:
        found[group.request.request_id] = [
            [list(each.output_token_ids), each.finish_reason] for each in group.sequences
        ]
        return end(group)

    llm.llm_engine.scheduler._end = noted
    with suppress(PromptsRefusedError):
        llm.generate([f"row {index}" for index in range(8)], params, use_tqdm=False)
    return [found[number] for number in sorted(found)]


@pytest.fixture(scope="module")
def limited() -> list[Any]:
    with pytest.MonkeyPatch.context() as patch, open_model(folder()) as llm:
        patch.setitem(compiler.LIMITS, "max_lexer_states", NUM_STATES)
        found = ends_of_limited_rows(llm)
    reasons = [sequence[1] for row in found for sequence in row]
    assert 0 < reasons.count(FinishReason.GRAMMAR_ERROR) < 8, reasons
    return found


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiler.LIMITS, "max_lexer_states", NUM_STATES)


@pytest.mark.usefixtures("few_states")
@pytest.mark.parametrize("kind", ["wrong", pytest.param("chance", marks=pytest.mark.stress)])
def test_limits_end_rows_where_they_do_without_drafts(limited: list[Any], kind: str):
    with planted(partial(right, limited), kind), open_model(folder(), speculative_config=DRAFTS) as llm:
        assert ends_of_limited_rows(llm) == limited
        assert llm.llm_engine.counters.num_drafted_tokens > 20


@pytest.mark.usefixtures("few_states")
def test_work_for_drafts_counts_against_no_answer(limited: list[Any], monkeypatch: pytest.MonkeyPatch):
    """Negative control: a copy of the row's own state makes the masks at drafts, and rows reach limits earlier."""
    fill_ahead = GrammarMasks._fill_ahead

    def shared(self: GrammarMasks, key: Any, row: Any, bits: Any) -> int:
        self._ahead[key] = self._states[key].copied()
        return fill_ahead(self, key, row, bits)

    monkeypatch.setattr(GrammarMasks, "_fill_ahead", shared)
    with planted(partial(right, limited), "chance"), open_model(folder(), speculative_config=DRAFTS) as llm:
        assert ends_of_limited_rows(llm) != limited
