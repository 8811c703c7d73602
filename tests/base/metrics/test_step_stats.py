"""steps.csv: a line a step, readable while it is written, after a kill, and refused where it is damaged."""

import time
from pathlib import Path

import pytest
from fresh_files import write_new
from step_runs import QUIET, pressed_steps, quiet_steps

from spmd_worker.base.errors import StepStatsError
from spmd_worker.base.metrics.step_stats import StepStats, StepStatsWriter, read_step_stats

HEADER = (
    "step,start_us,schedule_us,lockstep_us,execute_us,apply_us,num_rows,num_waiting,num_swapped,num_tokens,"
    "num_decode_tokens,num_sampled_tokens,num_blocks_used,num_blocks_cached,num_blocks_free,num_host_blocks_used,"
    "num_swapped_out,num_recomputed,num_swapped_in,num_cached_tokens,num_finished,num_verified_hits,"
    "num_drafted_tokens,num_accepted_tokens"
)
LINE = "1,0,100,200,600,50,2,1,0,12,2,2,4,3,3,0,0,0,0,0,0,0,0,0"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.csv"


def write(path: Path, steps: list[StepStats]) -> Path:
    with StepStatsWriter(path) as writer:
        for stats in steps:
            writer.write(stats)
    return path


def fault_of(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(StepStatsError) as raised:
        read_step_stats(path)
    assert str(raised.value).startswith(f"{path}: line "), raised.value
    return str(raised.value).removeprefix(f"{path}: ")


def test_step_stats_file_has_header_and_lines(path: Path):
    assert write(path, [QUIET]).read_text() == f"{HEADER}\n{LINE}\n"


def test_step_stats_survive_writing_and_reading(path: Path):
    assert read_step_stats(write(path, pressed_steps())) == pressed_steps()


def test_step_stats_writer_replaces_the_former_run(path: Path):
    write(path, quiet_steps(3))
    assert read_step_stats(write(path, quiet_steps(1))) == quiet_steps(1)


def test_step_stats_derive_duration_tokens_and_blocks():
    assert (QUIET.duration_us, QUIET.num_prompt_tokens, QUIET.num_blocks) == (950, 10, 10)


def test_step_stats_line_is_on_disk_after_write(path: Path):
    """A killed run leaves it."""
    with StepStatsWriter(path) as writer:
        assert read_step_stats(path) == []
        writer.write(QUIET)
        assert read_step_stats(path) == [QUIET]


def test_step_stats_writer_can_close_twice(path: Path):
    writer = StepStatsWriter(path)
    writer.close()
    writer.close()
    assert read_step_stats(path) == []


def test_truncated_step_stats_keep_complete_lines(path: Path):
    whole = write(path, quiet_steps(2)).read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        write_new(path, whole[:length])
        num_whole = sum(1 for end in ends if end <= length)
        assert read_step_stats(path) == quiet_steps(2)[: max(0, num_whole - 1)], length


def test_step_stats_ignore_a_tail_of_zeros(path: Path):
    """A machine that lost power leaves them."""
    path.write_bytes(f"{HEADER}\n{LINE}\n".encode() + b"\0" * 500)
    assert read_step_stats(path) == [QUIET]


def test_step_stats_reject_a_damaged_line_in_between(path: Path):
    damaged = LINE.replace("600", "6x0")
    said = fault_of(path, f"{HEADER}\n{LINE}\n{damaged}\n{LINE}\n")
    assert said == "line 3 has execute_us='6x0', which is not a count: the file is damaged"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1,2,3", "line 2 has 3 values, not 24: the file is damaged"),
        (LINE + ",7", "line 2 has 25 values, not 24: the file is damaged"),
        ("", "line 2 has 1 values, not 24: the file is damaged"),
        (LINE.replace("600", "-600"), "line 2 has execute_us='-600', which is not a count: the file is damaged"),
    ],
)
def test_step_stats_error_names_the_damage(path: Path, line: str, said: str):
    assert fault_of(path, f"{HEADER}\n{line}\n") == said


def test_step_stats_reject_steps_of_two_runs(path: Path):
    again = LINE.replace("1,0,", "2,0,", 1)
    said = fault_of(path, f"{HEADER}\n{again}\n{LINE}\n")
    assert said == "line 3 is of step 1, after step 2: these are not the steps of one run"
    earlier = [f"1,50{LINE[3:]}", f"2,49{LINE[3:]}"]
    said = fault_of(path, "\n".join([HEADER, *earlier, ""]))
    assert said == "line 3 has start_us=49, before the 50 of the step before: these are not the steps of one run"


def test_step_stats_error_tells_foreign_file_from_version(path: Path):
    names = "line 1 does not name the columns of step statistics: "
    assert fault_of(path, "custom_id,text\n") == f"{names}it begins with 'custom_id,text'"
    assert fault_of(path, "{") == f"{names}it begins with '{{'"
    assert fault_of(path, HEADER.replace(",num_swapped,", ",num_parked,") + "\n") == (
        f"{names}num_swapped missing; num_parked unknown (another version wrote it)"
    )
    names_in_other_order = ",".join(reversed(HEADER.split(",")))
    assert fault_of(path, names_in_other_order + "\n").endswith("in another order (another version wrote it)")


def test_step_stats_leave_missing_files_to_the_caller(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_step_stats(tmp_path / "nothing")
    with pytest.raises(OSError):
        StepStatsWriter(tmp_path / "no folder" / "steps.csv")


def test_step_stats_writer_completes_partial_writes(path: Path):
    class Slow:
        """Takes seven bytes at a time."""

        taken = b""

        def write(self, data: bytes) -> int:
            self.taken += data[:7]
            return len(data[:7])

    writer = StepStatsWriter(path)
    writer.close()
    slow = Slow()
    writer._stream = slow  # type: ignore[assignment]  # as little of a stream as is used
    writer.write(QUIET)
    assert slow.taken == f"{LINE}\n".encode()


@pytest.mark.stress
@pytest.mark.timed
def test_step_stats_write_takes_under_20_microseconds(path: Path):
    # About 1.5 microseconds; the bound leaves room for a machine that does something else as well.
    best_s = float("inf")
    with StepStatsWriter(path) as writer:
        for _ in range(5):
            started_s = time.perf_counter()
            for _ in range(2_000):
                writer.write(QUIET)
            best_s = min(best_s, (time.perf_counter() - started_s) / 2_000)
    assert best_s < 20e-6
