"""Drafts of rows with a grammar: answers, and where the engine's limits end a row, are those without drafts.

The engine counts the work for masks; the masks at drafts that turn out wrong are made by a state of their own.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from constrained_rows import FORMS, answers, open_model, rows, run, write_model
from run_folder import made_once
from test_speculation import DRAFTS, planted

from spmd_worker import LLM, SamplingParams
from spmd_worker.replica.grammar import compiler
from spmd_worker.replica.grammar.row_grammar import RowGrammar
from spmd_worker.replica.grammar.step_masks import GrammarMasks
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams

SCARCE = {"num_blocks": 48, "block_size": 4, "max_model_len": 180, "max_num_seqs": 24}
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
    with planted(plain, kind), open_model(folder(), speculative_config=DRAFTS, **options) as llm:
        assert answers(run(llm)) == plain
        groups = llm.llm_engine.counters
        assert groups.num_drafted_tokens > 50


def limited(llm: LLM) -> list[Any]:
    """Rows of which some reach the limit of lexer states."""
    form = StructuredOutputsParams(regex="([a-z]+ [0-9]{1,9}[A-Z]*[.,;] ?){1,9}")
    params = [SamplingParams(structured_outputs=form, seed=seed, **LONG) for seed in range(8)]
    return [
        [(each.token_ids, each.finish_reason) for each in output.outputs] or [((), str(output.error))]
        for output in llm.generate([f"row {index}" for index in range(8)], params, use_tqdm=False)
    ]


def ids_of(llm: LLM) -> Any:
    """Answers and ends of all sequences, of error rows too."""
    found: list[Any] = []
    end = llm.llm_engine.scheduler._end

    def noted(group: Any) -> Any:
        found.append([(tuple(each.output_token_ids), each.finish_reason) for each in group.sequences])
        return end(group)

    llm.llm_engine.scheduler._end = noted
    limited(llm)
    return found


@pytest.mark.parametrize("kind", ["wrong", "chance"])
def test_limits_end_rows_where_they_do_without_drafts(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(compiler.LIMITS, "max_lexer_states", 150)
    with open_model(folder()) as llm:
        expected = sorted(ids_of(llm))
    ends = [sequence[1].value for row in expected for sequence in row]
    assert "grammar_error" in ends, ends
    by_row = [[[list(sequence[0])] for sequence in row] for row in expected]
    with planted(by_row, kind), open_model(folder(), speculative_config=DRAFTS) as llm:
        assert sorted(ids_of(llm)) == expected
        assert llm.llm_engine.counters.num_drafted_tokens > 20


def test_masks_ahead_count_against_no_answer(monkeypatch: pytest.MonkeyPatch):
    """Negative control: the row's own state makes the masks at drafts, and reaches its limit earlier."""
    monkeypatch.setitem(compiler.LIMITS, "max_lexer_states", 150)
    with open_model(folder()) as llm:
        expected = sorted(ids_of(llm))
    fill_ahead = GrammarMasks._fill_ahead

    def shared(self: GrammarMasks, key: Any, row: Any, bits: Any) -> int:
        self._ahead[key] = self._states[key].copied()
        return fill_ahead(self, key, row, bits)

    monkeypatch.setattr(GrammarMasks, "_fill_ahead", shared)
    by_row = [[[list(sequence[0])] for sequence in row] for row in expected]
    with planted(by_row, "chance"), open_model(folder(), speculative_config=DRAFTS) as llm:
        assert sorted(ids_of(llm)) != expected
