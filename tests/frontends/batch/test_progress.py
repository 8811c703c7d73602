import io
import threading

from spmd_worker.frontends.batch.progress import Progress, format_seconds, format_summary


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def test_plain_lines_come_first_last_and_by_interval():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(4, stream, is_terminal=False, interval_s=10, clock=clock)
    for seconds in (1, 1, 9):
        clock.now_s += seconds
        progress.update(1, 50)
    clock.now_s += 5
    progress.update(1, 50)
    progress.close()
    progress.close()
    assert stream.getvalue().splitlines() == [
        "1 of 4 rows, 50 output tokens, 50.0 tokens/s, 3.0 s left",
        "3 of 4 rows, 150 output tokens, 13.6 tokens/s, 3.7 s left",
        "4 of 4 rows, 200 output tokens, 12.5 tokens/s",
    ]


def test_unknown_total_has_no_time_left():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(None, stream, is_terminal=False, clock=clock)
    clock.now_s += 2
    progress.update(1000, 5000)
    assert stream.getvalue() == "1,000 rows, 5,000 output tokens, 2,500.0 tokens/s\n"


def test_progress_counts_no_more_rows_than_there_are():
    """Regression: a run resumed by force with fewer rows had answered 8 of 5."""
    stream = io.StringIO()
    progress = Progress(5, stream, is_terminal=False, clock=Clock(), rows_before=8)
    progress.close()
    assert stream.getvalue() == "5 of 5 rows, 0 output tokens, 0.0 tokens/s\n"


def test_job_without_rows_has_a_last_line():
    stream = io.StringIO()
    Progress(0, stream, is_terminal=False, clock=Clock()).close()
    assert stream.getvalue() == "0 of 0 rows, 0 output tokens, 0.0 tokens/s\n"


def test_terminal_gets_a_bar_and_no_thread():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(4, stream, is_terminal=True, clock=clock)
    threads = threading.enumerate()
    clock.now_s += 2
    progress.update(4, 100)
    assert [thread for thread in threading.enumerate() if thread not in threads] == []
    progress.close()
    assert "4/4" in stream.getvalue()
    assert "50 tokens/s" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_stream_decides_whether_it_is_a_terminal():
    stream = io.StringIO()
    progress = Progress(1, stream, clock=Clock())
    progress.update(1, 1)
    assert "\r" not in stream.getvalue()


def test_seconds_are_written_for_people():
    texts = [format_seconds(seconds) for seconds in (0, 0.84, 12.34, 59.9, 65, 245, 7380)]
    assert texts == ["0.00 s", "0.84 s", "12.3 s", "59.9 s", "1 min 05 s", "4 min 05 s", "2 h 03 min"]


def test_summary_is_aligned_and_complete():
    metrics = {
        "load_s": 1.5,
        "generate_s": 20.0,
        "wall_s": 22.25,
        "rows": 1000,
        "error_rows": 100,
        "error_codes": {"unknown_key": 10, "invalid_json": 90},
        "prompt_tokens": 33000,
        "cached_prompt_tokens": 3000,
        "computed_prompt_tokens": 30000,
        "output_tokens": 16000,
        "preemptions": 2,
        "steps": 500,
        "experts": {"busiest": {"layer": 17, "expert": 42, "over_mean": 3.14}, "never_used": 3},
        "peak_memory_bytes": 3 * 2**30 // 2,
    }
    assert format_summary(metrics).splitlines() == [
        "rows                      1,000",
        "error rows                100 (90 invalid_json, 10 unknown_key)",
        "prompt tokens             33,000 (30,000 computed, 3,000 from the cache)",
        "output tokens             16,000",
        "output tokens per second  800.0",
        "time to load              1.5 s",
        "time to generate          20.0 s",
        "total time                22.2 s",
        "peak memory               1.50 GiB",
        "steps                     500",
        "experts                   busiest/mean 3.1 (layer 17 expert 42), never used 3",
        "preemptions               2",
    ]


def test_verified_hits_are_shown_if_there_are_any():
    counts = {"prefix_hits_verified": 1200, "prefix_hits_unverified": 3}
    assert format_summary(counts) == "prefix hits verified  1,200, all equal; 3 not completed"
    assert format_summary(dict.fromkeys(counts, 0)) == ""


def test_unknown_facts_are_left_out():
    assert format_summary({"rows": 3, "peak_memory_bytes": 1048576, "output_tokens": 5}).splitlines() == [
        "rows           3",
        "output tokens  5",
        "peak memory    1.0 MiB",
    ]
    assert format_summary({}) == ""


def test_late_total_is_shown_once_known():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(None, stream, is_terminal=False, interval_s=1, clock=clock)
    for total in (None, 4):
        progress.expect(total)
        clock.now_s += 2
        progress.update(1, 50)
    assert stream.getvalue().splitlines() == [
        "1 row, 50 output tokens, 25.0 tokens/s",
        "2 of 4 rows, 100 output tokens, 25.0 tokens/s, 4.0 s left",
    ]


def test_waiting_for_cores_is_reported_when_considerable():
    waits = {"waited_s": 9.0, "lost_cores": 700, "largest_share": 0.456}
    line = "waiting for cores  46% of the time computed: other processes run on the same cores"
    assert format_summary({"thread_waits": waits}) == line
    assert format_summary({"thread_waits": waits | {"largest_share": 0.1}}) == ""
    assert format_summary({"thread_waits": waits | {"lost_cores": 0}}) == ""


def test_rows_done_before_do_not_count_as_speed():
    """900 of 1,000 were: ten in ten seconds leave ninety seconds, and not one."""
    stream, clock = io.StringIO(), Clock()
    progress = Progress(1000, stream, is_terminal=False, clock=clock, rows_before=900)
    clock.now_s += 1
    progress.update(0, 0)
    clock.now_s += 9
    progress.update(10, 100)
    assert stream.getvalue().splitlines() == ["910 of 1,000 rows, 100 output tokens, 10.0 tokens/s, 1 min 30 s left"]


def test_rejected_rows_do_not_count_as_speed():
    """Regression: a job whose first 60 rows were 56 error rows had 1.6 s left, and took two minutes."""
    stream, clock = io.StringIO(), Clock()
    progress = Progress(300, stream, is_terminal=False, interval_s=5, clock=clock)
    progress.update(56, 0, rejected=56)
    clock.now_s += 10
    progress.update(4, 100)
    assert stream.getvalue().splitlines() == ["60 of 300 rows, 100 output tokens, 10.0 tokens/s, 10 min 00 s left"]


def test_pooled_rows_have_tokens_of_prompts():
    """Regression: `0 output tokens, 0.0 tokens/s`."""
    stream, clock = io.StringIO(), Clock()
    progress = Progress(4, stream, is_terminal=False, clock=clock)
    clock.now_s += 2
    progress.update(4, 0, 50)
    assert stream.getvalue() == "4 of 4 rows, 50 prompt tokens, 25.0 tokens/s\n"
    metrics = {"output_tokens": 0, "computed_tokens": 50, "generate_s": 2.0}
    assert format_summary(metrics).splitlines()[0] == "prompt tokens per second  25.0"


def test_bar_begins_where_the_last_start_ended():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(4, stream, is_terminal=True, clock=clock, rows_before=3)
    progress.update(0, 0)
    assert "3/4" in stream.getvalue()
    progress.update(1, 5)
    progress.close()
    assert "4/4" in stream.getvalue()


def test_summary_rate_is_of_this_starts_tokens():
    metrics = {"output_tokens": 1000, "resumed_output_tokens": 900, "generate_s": 10.0}
    assert "output tokens per second  10.0" in format_summary(metrics)
