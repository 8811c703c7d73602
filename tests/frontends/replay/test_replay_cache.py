"""The replay tool's output for a full cache: hits, swapped blocks and waiting sequences."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from logged_run import HEADER, LoggedRun, pressure_events, request, write_log, write_pressure_log
from tools_main import tool

from spmd_worker.frontends.replay.history import RowHistory
from spmd_worker.frontends.replay.replay import Replay
from spmd_worker.frontends.replay.step_log import read_step_log
from spmd_worker.replica.sequence.events import (
    Admit,
    CommitWeights,
    EndWorkerEvent,
    ResetPrefixCache,
    SetWeightVersion,
    WorkerEvent,
)
from spmd_worker.replica.sequence.sequence import Sequence, SequenceStatus

FEW_BLOCKS = {"num_blocks": 5, "watermark_blocks_per_sequence": 0}

Script = Callable[..., str]


@pytest.fixture
def run_script(capsys: pytest.CaptureFixture[str]) -> Script:
    """What spmd_worker.frontends.tools.replay prints with these arguments; it must end well."""
    replay = tool("replay", capsys)

    def run(*arguments: object) -> str:
        code, output, _ = replay(*arguments)
        assert code == 0
        return output

    return run


def two_rows(path: Path, preemption_mode: str) -> LoggedRun:
    """Both begin; then there is room for the first alone."""
    rows = [Admit(request(number, 7, max_tokens=6)) for number in range(2)]
    return write_log(path, {1: rows}, preemption_mode=preemption_mode, num_host_blocks=8, **FEW_BLOCKS)


def one_prefix(path: Path) -> LoggedRun:
    """Rows 0, 1 and 3 begin alike; row 2 takes the whole cache in between."""
    head = tuple(range(1, 9))
    rows = {step: [Admit(request(n, 10, head=head, max_tokens=2))] for step, n in ((1, 0), (4, 1), (12, 3))}
    rows[8] = [Admit(request(2, 17, max_tokens=2))]
    changes = {"enable_prefix_caching": True, "num_tier_blocks": 8, "max_num_batched_tokens": 20}
    return write_log(path, rows, **changes, **FEW_BLOCKS)


def history_lines(output: str) -> list[str]:
    return [re.sub(" +", " ", line.strip()) for line in output.splitlines() if line.startswith("  step ")]


def test_history_of_swapped_row_shows_its_moves(tmp_path: Path, run_script: Script):
    two_rows(tmp_path / "log", "swap")
    assert history_lines(run_script(tmp_path / "log", "--row", 1)) == [
        "step 1 admitted after this step, 2 wait",
        "step 2 sample 0 computes positions 0 to 6, sent completely with blocks [2, 3], samples 48",
        "step 3 sample 0 computes position 7, samples 20",
        "step 4 sample 0 preempted by swap, copied to the host: 2 blocks, 8 computed tokens",
        "step 8 sample 0 swapped in from the host with 8 computed tokens, "
        "computes position 8, in blocks [0, 1, 2], samples 50",
        "step 9-11 sample 0 computes positions 9 to 11, samples 18, 57, 4",
        "step 11 sample 0 ends: length, 6 tokens [48, 20, 50, 18, 57, 4]",
        "step 11 answered: 6 output tokens, 1 preemptions, 0 prompt tokens found in the cache",
    ]


def test_history_of_recomputed_row_shows_its_loss(tmp_path: Path, run_script: Script):
    two_rows(tmp_path / "log", "recompute")
    lines = history_lines(run_script(tmp_path / "log", "--row", 1))
    assert lines[3:5] == [
        "step 4 sample 0 preempted by recompute, dropped: 2 blocks, 8 computed tokens",
        "step 8 sample 0 computes positions 0 to 8, sent completely with blocks [0, 1, 2], samples 50",
    ]


def test_histories_show_cache_hits_and_transfer_waits(tmp_path: Path, run_script: Script):
    one_prefix(tmp_path / "log")
    found = history_lines(run_script(tmp_path / "log", "--row", "row-1"))
    awaited = history_lines(run_script(tmp_path / "log", "--row", "row-3"))
    assert found[1] == (
        "step 5 sample 0 finds 8 tokens in the cache, "
        "computes positions 8 to 9, sent completely with blocks [0, 1, 2], samples 18"
    )
    assert awaited[1:4] == [
        "step 13 sample 0 waits for transfer 2 of its prefix",
        "step 15 sample 0 transfer 2 has finished after this step",
        "step 16 sample 0 finds 8 tokens in the cache, "
        "computes positions 8 to 9, sent completely with blocks [0, 1, 4], samples 60",
    ]
    assert awaited[-1].endswith("2 output tokens, 0 preemptions, 8 prompt tokens found in the cache")


def test_state_after_step_shows_swapped_sequences_and_moves(tmp_path: Path, run_script: Script):
    two_rows(tmp_path / "log", "swap")
    out, between, back = (run_script(tmp_path / "log", "--until", step) for step in (4, 6, 8))
    assert "\n  swapped out, device>host: [2>0, 3>1]\n" in out
    assert "\n  blocks: 2 of 5 free, 0 of them cached\n  host blocks: 2 of 8 hold swapped sequences\n" in between
    assert re.search(r"\n  waiting: 1\n +request .*\n +1 +0 +9 +8  swapped out to \[0, 1\]\n  running: 1\n", between)
    assert ">" not in between.split("after step 6")[1]
    assert "\n  swapped in, host>device: [0>0, 1>1]\n" in back
    assert "preemptions (1 by swap) that lost 0 computed tokens" in back


def test_state_after_step_shows_waits_and_transfers(tmp_path: Path, run_script: Script):
    one_prefix(tmp_path / "log")
    stores, loads, end = (run_script(tmp_path / "log", "--until", step) for step in (9, 13, 15))
    assert "\n  transfer 1 stores, device>tier: [1>0, 0>1]\n" in stores
    assert re.search(r"\n  transfer 2 loads, tier>device: \[1>\d, 0>\d\]\n", loads)
    assert re.search(r"\n  waiting for transfer 2: 1\n +request .*\n +3 +0 +10 +0  new\n", loads)
    assert "\n  then transfers [2] have finished on every rank\n" in end
    assert "waiting for transfer" not in end


def test_state_after_step_shows_its_events(tmp_path: Path, run_script: Script):
    events = {1: [Admit(request(0, 5))], 2: [ResetPrefixCache(), SetWeightVersion(4), WorkerEvent(1, "sleep", b"")]}
    events[3] = [EndWorkerEvent(1, "rank 1: no"), CommitWeights(5, 38)]
    run = write_log(tmp_path / "log", events, enable_prefix_caching=True)
    first, second, third, last = (run_script(tmp_path / "log", "--until", step) for step in (1, 2, 3, len(run.plans)))
    assert "\n  then request 0 is admitted\n" in first
    assert "\n  then the prefix cache is reset\n  then the weights are of version 4\n" in second
    assert "\n  then worker event 1 (sleep) is prepared\n" in second
    assert "\n  then worker event 1 is undone: rank 1: no\n" in third
    assert "\n  then 38 new weights are committed as version 5\n" in third
    assert "\n  then the engine ends\n" in last


def test_preempted_sequence_is_distinguished_from_new_one(tmp_path: Path, run_script: Script):
    two_rows(tmp_path / "log", "recompute")
    assert re.search(r"\n +1 +0 +9 +0  preempted\n", run_script(tmp_path / "log", "--until", 4))
    # One that has waited for a transfer since is WAITING, as a new one is; what it lost is not forgotten.
    sequence = Sequence(request(3, 5), sample_index=0)
    waiting_line = import_module("spmd_worker.frontends.tools.replay").waiting_line
    assert waiting_line(sequence)[-1] == "new"
    sequence.num_lost_tokens = 4
    assert waiting_line(sequence)[-1] == "preempted"


# A run of everything: histories add up to what was counted.


def all_histories(path: Path) -> dict[int, str]:
    """By request: its history, told in one replay."""
    log = read_step_log(path)
    told: dict[int, list[str]] = {}
    requests = [event.request for events in pressure_events().values() for event in events if isinstance(event, Admit)]
    histories = []
    for each in requests:
        histories.append(RowHistory(each, told.setdefault(each.request_id, []).append))
    replay = Replay(log.header, None)
    for step in replay.steps(log.messages()):
        for history in histories:
            history.write_step(step, replay.scheduler)
    for history in histories:
        history.flush()
    return {request_id: "\n".join(lines) for request_id, lines in told.items()}


def test_histories_add_up_to_the_runs_counters(tmp_path: Path):
    run = write_pressure_log(tmp_path / "log")
    counters, told = run.scheduler.counters, all_histories(tmp_path / "log")
    whole = "\n".join(told.values())
    assert whole.count("preempted by swap, copied to the host:") == counters.num_swapped_out > 0
    assert whole.count("preempted by recompute, dropped:") == counters.num_preemptions - counters.num_swapped_out > 0
    assert whole.count("swapped in from the host with") == counters.num_swapped_in > 0
    for group in run.ended:
        text = told[group.request.request_id]
        assert text.count("preempted by") == group.num_preemptions
        found = re.search(r"(finds (\d+) tokens in the cache, )?computes", text)
        assert int(found[2] or 0 if found is not None else 0) == (group.num_cached_tokens or 0)


def test_histories_report_every_awaited_transfer(tmp_path: Path):
    run = write_pressure_log(tmp_path / "log")
    told = "\n".join(all_histories(tmp_path / "log").values())
    waited = {int(number) for number in re.findall(r"waits for transfer (\d+) of", told)}
    assert waited == {plan.block_ops.transfer for plan in run.plans if plan.block_ops.load}
    ended = {int(number) for number in re.findall(r"transfer (\d+) has finished", told)}
    aborted = [request_id for request_id, state in run.aborted if state is SequenceStatus.LOADING]
    assert ended <= waited
    assert len(waited - ended) <= len(aborted) == 1


def test_header_without_host_memory_says_so(tmp_path: Path, run_script: Script):
    write_log(tmp_path / "log", {1: [Admit(request(0, 5))]})
    output = run_script(tmp_path / "log", "--until", 1)
    assert "0 host blocks for swapping, 0 in the host tier\n" in output
    assert "host blocks:" not in output
    assert f"blocks: {HEADER.num_blocks} of {HEADER.num_blocks} free" in output
