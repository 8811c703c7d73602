"""Seconds of a start by part, by a clock that the test sets."""

import logging
from pathlib import Path

import pytest
from ranks import REPOSITORY

from spmd_worker import LLM
from spmd_worker.base.metrics.start_times import StartTimes


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_parts_and_other_add_up_to_the_total():
    clock = Clock()
    times = StartTimes(clock)
    for name, seconds in (("device", 0.5), ("weights", 2.0), ("device", 0.25)):
        with times.part(name):
            clock.now_s += seconds
    clock.now_s += 0.25
    times.note("weights", "3 tensors")
    assert str(times) == "3.00 s: device 0.75, weights 2.00 (3 tensors), other 0.25"


def test_moved_seconds_count_as_another_part():
    clock = Clock()
    times = StartTimes(clock)
    with times.part("warm-up"):
        clock.now_s += 3
    times.move(1.25, "warm-up", "graphs")
    assert str(times) == "3.00 s: warm-up 1.75, graphs 1.25, other 0.00"


def test_part_that_fails_is_counted():
    clock = Clock()
    times = StartTimes(clock)

    def fail() -> None:
        with times.part("weights"):
            clock.now_s += 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert times.seconds == {"weights": 1.0}


def test_start_logs_its_parts_once(caplog: pytest.LogCaptureFixture):
    model: Path = REPOSITORY / "scripts" / "demo" / "model"
    with caplog.at_level(logging.INFO, "spmd_worker"), LLM(model, device="cpu", num_blocks=64):
        pass
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("worker ready")]
    parts = ("device and groups", "weights", "kernels", "profile", "cache", "warm-up", "other")
    assert all(f"{part} " in line for part in parts), line
    assert " GB at " in line
