"""Drafts of rows with a grammar: answers, and where the engine's limits end a row, are those without drafts.

The engine counts the work for masks; the masks at drafts that turn out wrong are made by a state of their own.
"""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from constrained_rows import EOS, VOCAB_SIZE, answers, check, open_model, rows, run, write_model
from draft_checkpoints import eagle_folder, small_draft_folder
from planted_drafts import planted
from reference_models import edit_config
from run_folder import made_once
from safetensors.torch import load_file, save_file
from test_model_drafts import METHODS, speculation, target_of
from test_speculation import DRAFTS, right
from tokenizer_folders import write_byte_level

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


def write_with_text(folder: Path, source: Path) -> None:
    """A copy of a checkpoint with the tokenizer and the length of the other tests: new ids have what others have,
    backwards.
    """
    shutil.copytree(source, folder)
    own_size = 0

    def enlarge(config: dict[str, Any]) -> None:
        nonlocal own_size
        text = config.get("text_config", config)
        own_size = text["vocab_size"]
        for each in (text, config):
            each |= {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": EOS, "max_position_embeddings": 512}

    edit_config(folder, enlarge)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for name, each in tensors.items():
        if name.endswith(("embed_tokens.weight", "head.weight")) and len(each) == own_size:
            tensors[name] = torch.cat((each, *[each.flip(1)] * 3))[:VOCAB_SIZE].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_byte_level(folder)


@pytest.mark.gate("draft_model")
@pytest.mark.parametrize("method", METHODS)
def test_forms_have_their_answers_with_drafts_of_models(method: str, tmp_path: Path):
    write_with_text(tmp_path / "target", target_of(method))
    config = speculation(method) | {"max_step_tokens": 100}
    if method in ("draft_model", "eagle3"):
        config["model"] = str(tmp_path / "draft")
        write_with_text(tmp_path / "draft", small_draft_folder() if method == "draft_model" else eagle_folder())
    found = []
    for given in ({}, {"speculative_config": config}):
        with open_model(tmp_path / "target", load_format="auto", dtype="float32", **given) as llm:
            outputs = run(llm)
            check(outputs, rows()[2])
            found.append(answers(outputs))
            counters = llm.llm_engine.counters
    assert found[0] == found[1]
    assert counters.num_drafted_tokens > 50, counters


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
