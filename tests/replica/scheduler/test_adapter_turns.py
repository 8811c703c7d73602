"""Steps with few adapters: who joins, who passes whom, and what rows with adapters find in the cache."""

import pytest
from scheduler_runs import Run, cached_run, tokens, without_block_check

from spmd_worker.replica.mirror.mirror import MirrorError
from spmd_worker.replica.mirror.plan_check import AdapterRules
from spmd_worker.replica.scheduler import allocator
from spmd_worker.replica.scheduler.adapter_turns import AdapterTurns
from spmd_worker.replica.sequence.request import RequestId

A, B, C = 11, 12, 13
"""Contents of three adapters, loaded under the ids 1 to 3."""


def run_with_adapters(max_loras: int = 1, **limits: object) -> Run:
    run = Run(max_loras=max_loras, **limits)
    assert [run.load(int_id, digest) for int_id, digest in enumerate((A, B, C), 1)] == [True] * 3
    return run


def adapters_running(run: Run) -> list[int]:
    return [sequence.request.adapter for sequence in run.scheduler.running]


def test_rows_of_one_adapter_pass_others():
    """Interleaved adapters run adapter by adapter, in the order of their first rows."""
    run = run_with_adapters()
    for adapter in (A, B, C, A, B, C, A):
        run.admit(2, adapter=adapter, max_tokens=2)
    turns = []
    while run.scheduler.has_unfinished:
        run.step()
        turns.append(adapters_running(run))
    assert [each for each in turns if each] == [[A] * 3, [B] * 2, [C] * 2]


def test_two_adapters_run_while_the_third_waits():
    run = run_with_adapters(2)
    for adapter, max_tokens in ((A, 2), (B, 4), (C, 2), (B, 2)):
        run.admit(2, adapter=adapter, max_tokens=max_tokens)
    run.step()
    assert (adapters_running(run), run.waiting()) == ([A, B, B], [(2, 0)])
    run.steps(2)
    assert run.running() == [(1, 0), (2, 0)]


def test_rows_without_adapter_pass_a_waiting_row():
    run = run_with_adapters()
    for adapter in (A, B, 0):
        run.admit(2, adapter=adapter, max_tokens=3)
    run.step()
    assert (run.running(), run.waiting()) == ([(0, 0), (2, 0)], [(1, 0)])


def starts_despite_newer_rows(run: Run, num_steps: int) -> bool:
    """Whether a row of another adapter runs at last, though new rows of the running one come in every step."""
    run.admit(2, adapter=A, max_tokens=3)
    run.step()
    late = run.admit(2, adapter=B, max_tokens=1)
    for _ in range(num_steps):
        run.admit(2, adapter=A, max_tokens=3)
        run.step()
        if late in run.ended:
            return True
    return False


def test_newer_rows_never_starve_a_waiting_adapter():
    assert starts_despite_newer_rows(run_with_adapters(), 8)


def test_check_detects_adapter_that_starves(monkeypatch: pytest.MonkeyPatch):
    """Negative control: everybody passes."""
    monkeypatch.setattr(AdapterTurns, "_may_pass", lambda *_: True)
    assert not starts_despite_newer_rows(run_with_adapters(), 50)


def test_aborted_row_leaves_its_turn_to_others():
    run = run_with_adapters()
    for adapter in (A, B, C):
        run.admit(2, adapter=adapter, max_tokens=2)
    run.step()
    run.abort(1)
    run.abort(0)
    run.step()
    assert (adapters_running(run), run.waiting()) == ([C], [])
    run.finish()


def test_preempted_row_keeps_its_turn_with_adapter():
    """The cache holds two of three rows: the one that gives way comes back before rows of another adapter."""
    run = run_with_adapters(num_blocks=6, block_size=2, max_model_len=10)
    for adapter in (A, A, B):
        run.admit(3, adapter=adapter, max_tokens=6)
    order = []
    while run.scheduler.has_unfinished:
        run.step()
        order += [key for key in run.running() if key not in order]
    assert run.scheduler.counters.num_preemptions > 0
    assert order == [(0, 0), (1, 0), (2, 0)]


def test_integrity_check_detects_too_many_adapters(monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    monkeypatch.setattr(AdapterTurns, "next", lambda self, _: next(iter(self._queues.waiting), None))
    run = run_with_adapters()
    run.admit(2, adapter=A)
    run.admit(2, adapter=B)
    with pytest.raises(MirrorError, match="groups is of 2 adapters, the mirror expects at most 1 in a step"):
        run.step()
    with pytest.raises(AssertionError):
        run.scheduler.check_integrity()


def test_mirror_rejects_row_of_unloaded_adapter():
    run = run_with_adapters()
    run.mirror._adapters = AdapterRules(lambda digest: digest != B, 1)
    run.admit(2, adapter=B)
    with pytest.raises(MirrorError, match=f"field adapter is {B}, the mirror expects an adapter that is loaded"):
        run.step()


def test_scheduler_refuses_request_of_unloaded_adapter():
    with pytest.raises(AssertionError, match="which is not among"):
        run_with_adapters().admit(2, adapter=99)


PROMPT = tokens(20, 13)


def found_after_reload(run: Run) -> dict[str, int]:
    """Prompt tokens that rows find after adapter 1 was used: with it, without one, with another, and so on."""
    found = {}

    def ask(what: str, adapter: int) -> None:
        number = run.admit(0, PROMPT, adapter, max_tokens=1)
        run.finish()
        found[what] = run.ended[number].num_cached_tokens

    ask("first", A)
    ask("again", A)
    ask("without", 0)
    ask("other", B)
    # An id, and its name, with other weights.
    assert run.load(1, 21)
    ask("reloaded", 21)
    # The first weights again, under another id.
    assert run.load(2, A)
    ask("same content", A)
    return found


@pytest.mark.guarantee("An adapter's blocks are found by its content alone")
def test_blocks_are_found_by_an_adapters_content():
    run = cached_run(max_loras=1)
    assert run.load(1, A)
    assert run.load(2, B)
    found = found_after_reload(run)
    assert found == {"first": 0, "again": 12, "without": 0, "other": 0, "reloaded": 0, "same content": 12}


@pytest.mark.control("An adapter's blocks are found by its content alone")
def test_contents_check_detects_blocks_of_other_adapters(monkeypatch: pytest.MonkeyPatch, control):
    """Negative control: names of blocks without the adapter."""
    without_block_check(monkeypatch)
    root_hash = allocator._root_hash
    monkeypatch.setattr(allocator, "_root_hash", lambda version, request: root_hash(version, _without_adapter(request)))
    run = cached_run(max_loras=1)
    assert run.load(1, A)
    assert run.load(2, B)
    with control("follows"):
        found_after_reload(run)


def _without_adapter(request):
    return type(request)(RequestId(0), (1,), request.sampling, 0)
