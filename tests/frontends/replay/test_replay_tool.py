"""The replay tool prints the run, the state after a step, a row's history, and the difference of two logs."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from logged_run import (
    LoggedRun,
    rewrite,
    standard_events,
    write_log,
)
from tools_main import tool


@pytest.fixture
def run_script(capsys: pytest.CaptureFixture[str]):
    """spmd_worker.frontends.tools.replay with these arguments: (exit code, standard output, standard error)."""
    return tool("replay", capsys)


def test_replay_tool_replays_a_log(tmp_path: Path, run_script):
    run = write_log(tmp_path / "log")
    code, output, _ = run_script(tmp_path / "log")
    assert code == 0
    assert output.splitlines()[-1] == f"replayed {len(run.plans)} steps, digests equal"
    assert "13 blocks of 4 tokens; at most 8 sequences and 16 tokens a step" in output
    assert "prefix caching off, preemption by recompute, 0 host blocks for swapping, 0 in the host tier" in output
    assert "the code has changed since the run" in output


def test_replay_tool_reports_where_replay_diverges(tmp_path: Path, run_script):
    write_log(tmp_path / "log", plants={2: lambda plan: replace(plan, groups=plan.groups[::-1])})
    code, output, _ = run_script(tmp_path / "log")
    assert code == 1
    assert output.splitlines()[-1].startswith("replay and run differ: step 2: groups[0]")


def test_replay_tool_uses_log_before_torn_tail(tmp_path: Path, run_script):
    write_log(tmp_path / "log")
    path = tmp_path / "torn"
    path.write_bytes((tmp_path / "log").read_bytes()[:-1])
    code, output, _ = run_script(path)
    assert code == 0
    assert output.startswith(f"warning: {path}: the last ")
    assert "the log was truncated" in output
    assert re.search(r"\nreplayed \d+ steps, digests equal\n$", output)


def test_replay_tool_says_plans_equal_without_digests(tmp_path: Path, run_script):
    write_log(tmp_path / "log", has_digests=False)
    assert run_script(tmp_path / "log")[1].endswith("steps, plans equal (the run wrote 0 digests)\n")


def test_state_after_step_equals_the_runs(tmp_path: Path, run_script):
    path = tmp_path / "log"
    run = LoggedRun(path)
    events = standard_events()
    for step in range(1, 13):
        run.step(*events.get(step, ()))
    cache, running, waiting = run.scheduler.cache, list(run.scheduler.running), list(run.scheduler.waiting)
    free, tables = cache.num_free_blocks, [list(sequence.table.block_ids) for sequence in running]
    run.step()
    code, output, _ = run_script(path, "--until", 12)
    assert code == 0
    assert f"blocks: {free} of 13 free" in output
    assert f"waiting: {len(waiting)}\n" in output
    assert f"running: {len(running)}\n" in output
    for sequence, table in zip(running, tables):
        assert re.search(
            rf"\n +{sequence.key.request_id} +{sequence.sample_index} .* {re.escape(str(table))}\n", output
        )
    assert output.endswith("replayed 12 steps, digests equal\n")


def test_step_outside_the_log_is_rejected(tmp_path: Path, run_script):
    run = write_log(tmp_path / "log")
    code, _, errors = run_script(tmp_path / "log", "--until", 1000)
    assert code == 2
    assert f"--until 1000: the log has steps 1 to {len(run.plans)}" in errors


def test_last_step_of_cut_log_lacks_its_ids(tmp_path: Path, run_script):
    write_log(tmp_path / "log")
    cut = rewrite(tmp_path / "log", tmp_path / "cut", lambda message: message if message.step <= 12 else None)
    assert "its sampled ids are not in the log" in run_script(cut, "--until", 12)[1]
    assert "its sampled ids are not in the log" not in run_script(cut, "--until", 11)[1]


def test_row_history_lists_ids_preemptions_and_end(tmp_path: Path, run_script):
    run = write_log(tmp_path / "log")
    group = next(group for group in run.ended if group.request.request_id == 7)
    code, output, _ = run_script(tmp_path / "log", "--row", "row-7")
    assert code == 0
    assert output.count("preempted by recompute, dropped: ") == group.num_preemptions > 0
    assert output.count("admitted after this step") == 1
    for sequence in group.sequences:
        lines = [line for line in output.splitlines() if f"  sample {sequence.sample_index}  " in line]
        told = [line.split("samples ")[1] for line in lines if "samples " in line]
        ids = [int(token_id) for line in told for token_id in line.split(", ")]
        first = [] if sequence.sample_index else [fork.output_token_ids[0] for fork in group.sequences[1:]]
        expected = sequence.output_token_ids
        assert ids == (expected[1:] if sequence.sample_index else [expected[0], *first, *expected[1:]])
        assert lines[-1].endswith(f"ends: length, 9 tokens {expected}")
    words = f"answered: 27 output tokens, {group.num_preemptions} preemptions, 0 prompt tokens found in the cache\n"
    assert words in output


def test_history_of_aborted_row_says_so(tmp_path: Path, run_script):
    write_log(tmp_path / "log")
    output = run_script(tmp_path / "log", "--row", 5)[1]
    assert "step         9            abort requested after this step" in output
    assert re.search(r"step +9  sample 0  ends: abort, \d+ tokens", output)


def test_unknown_row_is_rejected_with_naming_options(tmp_path: Path, run_script):
    write_log(tmp_path / "log")
    code, _, errors = run_script(tmp_path / "log", "--row", "row-77")
    assert code == 2
    assert "--row row-77: no such request. Give its custom_id, or index:N" in errors


def test_replay_tool_compares_two_logs(tmp_path: Path, run_script):
    first, same, other = (tmp_path / name for name in ("first", "same", "other"))
    write_log(first)
    write_log(same, tensor_parallel_size=1)
    write_log(other, num_blocks=20)
    code, output, _ = run_script("--diff", first, same)
    assert code == 0
    assert f"header: tensor_parallel_size is 2 in {first}, 1 in {same} (which should change no step)" in output
    assert output.endswith("steps, all equal\n")
    code, output, _ = run_script("--diff", first, other)
    assert code == 1
    assert f"header: num_blocks is 13 in {first}, 20 in {other}\nstep " in output


def test_unreadable_files_exit_with_2_and_one_line(tmp_path: Path, run_script):
    (tmp_path / "other").write_text("{}\n")
    for path, words in ((tmp_path / "absent", "No such file"), (tmp_path / "other", "not a step log")):
        code, output, errors = run_script(path)
        assert (code, output) == (2, "")
        assert errors.startswith("python -m spmd_worker.tools.replay: ")
        assert words in errors
        assert len(errors.splitlines()) == 1


def test_moved_model_is_named_with_its_option(tmp_path: Path, run_script):
    write_log(tmp_path / "log")
    for more, key in ((("--model", tmp_path / "none"), "--model"), (("--with-model",), "model.path")):
        code, _, errors = run_script(tmp_path / "log", *more)
        assert code == 2
        assert re.search(f"{key}=/.* is not a folder here: give --model the one that has the run's model now", errors)


@pytest.mark.parametrize("arguments", [(), ("a", "--diff", "b", "c"), ("a", "--with-model", "--until", "3")])
def test_conflicting_arguments_are_rejected(run_script, arguments):
    with pytest.raises(SystemExit):
        run_script(*arguments)
