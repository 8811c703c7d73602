"""Forms of answers that one step may have compiled: the others' sequences wait for the next, whatever else goes on."""

import pytest
from scheduler_runs import Row, Run

from spmd_worker.replica.scheduler import budget, planner
from spmd_worker.replica.sequence import structured_outputs
from spmd_worker.replica.sequence.structured_outputs import MAX_GRAMMAR_BYTES

FORM = {"structured_outputs": {"regex": "[a-z]{3}"}, "ignore_eos": False}


def a_step_takes(monkeypatch: pytest.MonkeyPatch, num_forms: int) -> None:
    monkeypatch.setattr(structured_outputs, "MIN_COMPILE_BYTES", budget.MAX_COMPILE_BYTES // num_forms)


def test_grammars_beyond_step_budget_wait_for_next_step(monkeypatch: pytest.MonkeyPatch):
    a_step_takes(monkeypatch, 2)
    run = Run()
    for _ in range(3):
        run.admit(3, **FORM)
    run.admit(2)
    assert run.steps(3) == [
        [Row(0, 0, 0, 3, 1), Row(1, 0, 0, 3, 1)],
        [Row(0, 0, 3, 1, 1), Row(1, 0, 3, 1, 1), Row(2, 0, 0, 3, 1), Row(3, 0, 0, 2, 1)],
        [Row(each, 0, 4 - (each > 1) - (each > 2), 1, 1) for each in range(4)],
    ]
    # Negative control: rows without a form wait for nothing.
    plain = Run()
    for _ in range(3):
        plain.admit(3)
    assert len(plain.step()) == 3


def test_forking_samples_start_grammars_in_successive_steps(monkeypatch: pytest.MonkeyPatch):
    a_step_takes(monkeypatch, 1)
    run = Run()
    run.admit(4, n=3, **FORM)
    run.admit(2)
    assert run.steps(4) == [
        [Row(0, 0, 0, 4, 3), Row(1, 0, 0, 2, 1)],
        [Row(0, 0, 4, 1, 1), Row(0, 1, 4, 1, 1), Row(1, 0, 2, 1, 1)],
        [Row(0, 0, 5, 1, 1), Row(0, 1, 5, 1, 1), Row(0, 2, 4, 1, 1), Row(1, 0, 3, 1, 1)],
        [Row(0, 0, 6, 1, 1), Row(0, 1, 6, 1, 1), Row(0, 2, 5, 1, 1), Row(1, 0, 4, 1, 1)],
    ]


def test_end_of_chunked_prompt_waits_for_grammar_too(monkeypatch: pytest.MonkeyPatch):
    a_step_takes(monkeypatch, 1)
    run = Run(max_num_batched_tokens=4)
    run.admit(2, n=2, **FORM)
    run.admit(3, **FORM)
    # What does not sample begins no form.
    assert run.steps(3) == [
        [Row(0, 0, 0, 2, 2), Row(1, 0, 0, 2, 0)],
        [Row(0, 0, 2, 1, 1), Row(0, 1, 2, 1, 1)],
        [Row(0, 0, 3, 1, 1), Row(0, 1, 3, 1, 1), Row(1, 0, 2, 1, 1)],
    ]


def test_step_holds_one_maximal_grammar_or_64_small():
    run = Run(max_num_seqs=200, num_blocks=400, max_num_batched_tokens=400)
    run.admit(1, ignore_eos=False, structured_outputs={"regex": "a" * MAX_GRAMMAR_BYTES})
    for _ in range(150):
        run.admit(1, **FORM)
    assert [sum(not row.first for row in rows) for rows in run.steps(4)] == [1, 64, 64, 22]


@pytest.mark.parametrize("virtual_engines", [1, 2])
@pytest.mark.parametrize("num_blocks", [12, 100])
def test_all_rows_end_for_any_grammar_budget(monkeypatch: pytest.MonkeyPatch, virtual_engines: int, num_blocks: int):
    a_step_takes(monkeypatch, 1)
    run = Run(num_blocks=num_blocks, virtual_engines=virtual_engines, max_num_batched_tokens=9)
    for number in range(9):
        run.admit(3 + number, n=1 + number % 4, max_tokens=6, **(FORM if number % 3 else {}))
    run.finish()
    assert {len(token_ids) for number in range(9) for token_ids in run.tokens(number)} == {6}


@pytest.mark.parametrize(("are_counted", "counts"), [(False, [8, 3, 8, 5, 8, 7]), (True, [2, 3, 4, 5, 6, 7])])
def test_rows_waiting_for_grammar_leave_share_to_decodes(
    monkeypatch: pytest.MonkeyPatch, are_counted: bool, counts: list[int]
):
    """With two steps in flight each has half of 16 sequences, of which 7 wait for their forms, one a step. Negative
    control: they were counted, and steps had as few rows as were left.
    """
    a_step_takes(monkeypatch, 1)
    if are_counted:
        monkeypatch.setattr(planner, "compile_bytes", lambda sequence: 0)
    run = Run(virtual_engines=2, max_num_seqs=20)
    run.admit(4, n=8, max_tokens=12, **FORM)
    for _ in range(8):
        run.admit(4, max_tokens=12)
    # The prompts, whose tokens are being sampled in the step after.
    assert [len(rows) for rows in run.steps(2)] == [9, 0]
    assert [len(rows) for rows in run.steps(6)] == counts
    run.finish()


@pytest.mark.parametrize(
    ("limits", "prompts", "num_samples", "max_tokens"),
    [
        ({"num_blocks": 9, "max_num_batched_tokens": 9, "max_model_len": 32}, (4, 8, 13), 3, {}),
        (
            {"num_blocks": 29, "max_num_batched_tokens": 12, "max_num_seqs": 12, "max_model_len": 60}
            | {"watermark_per_sequence": 1},
            *((3, 10, 54), 7, {"max_tokens": 30}),
        ),
    ],
)
def test_row_waiting_for_grammar_takes_no_uncounted_blocks(
    monkeypatch: pytest.MonkeyPatch, limits, prompts, num_samples, max_tokens
):
    """The step's blocks were counted with its part in it: a later prompt took one more than there were."""
    a_step_takes(monkeypatch, 1)
    run = Run(block_size=4, **limits)
    run.admit(prompts[0], n=num_samples, **max_tokens, **FORM)
    run.admit(prompts[1], **max_tokens, **FORM)
    run.admit(prompts[2])
    run.finish()
