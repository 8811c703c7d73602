"""The first difference of two step logs is reported: an event, an id, or a field of a plan."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

from logged_run import (
    rewrite,
    standard_events,
    write_log,
)

from spmd_worker.frontends.replay.replay import (
    first_log_difference,
    header_differences,
)
from spmd_worker.frontends.replay.step_log import read_step_log
from spmd_worker.replica.lockstep.wire.message import StepMessage
from spmd_worker.replica.sequence.events import (
    Abort,
)
from spmd_worker.replica.sequence.request import RequestId


def difference_of(first: Path, other: Path) -> str | None:
    return first_log_difference(read_step_log(first), read_step_log(other), ("A", "B"))


def test_two_logs_of_one_job_are_equal(tmp_path: Path):
    write_log(tmp_path / "a")
    write_log(tmp_path / "b", tensor_parallel_size=4)
    assert difference_of(tmp_path / "a", tmp_path / "b") is None
    headers = [read_step_log(tmp_path / name).header for name in ("a", "b")]
    assert header_differences(*headers) == [("tensor_parallel_size", 2, 4)]


def test_first_log_difference_is_event_id_or_plan(tmp_path: Path):
    write_log(tmp_path / "a")

    def change_id(message: StepMessage) -> StepMessage:
        return (
            replace(message, sampled_token_ids=(98, *message.sampled_token_ids[1:])) if message.step == 7 else message
        )

    other_id = rewrite(tmp_path / "a", tmp_path / "id", change_id)
    found = difference_of(tmp_path / "a", other_id)
    assert found is not None
    assert re.fullmatch(r"step 6 sampled for request \d, sample 0: \d+ in A, 98 in B", found)

    write_log(tmp_path / "event", standard_events() | {9: [Abort(RequestId(4))]})
    assert difference_of(tmp_path / "a", tmp_path / "event") == "step 9: events[0].request_id: 5 in A, 4 in B"

    write_log(tmp_path / "plan", num_blocks=20)
    found = difference_of(tmp_path / "a", tmp_path / "plan")
    assert found is not None
    assert found.startswith("step ")


def test_differing_masks_are_named_before_their_sampled_ids(tmp_path: Path):
    write_log(tmp_path / "log")

    def changed(checksum: int, first_id: int, message: StepMessage) -> StepMessage:
        ids = (first_id, *message.sampled_token_ids[1:])
        return replace(message, sampled_token_ids=ids, mask_checksums=(checksum,)) if message.step == 7 else message

    one, same, other, ids_alone = [
        rewrite(tmp_path / "log", tmp_path / f"{index}", partial(changed, *values))
        for index, values in enumerate([(5, 97), (5, 97), (6, 98), (5, 98)])
    ]
    assert difference_of(one, same) is None
    assert difference_of(one, other) == "step 6 sampled with different masks: mask_checksums[0]: 5 in A, 6 in B"
    # Negative control: under the same masks it is the ids.
    found = difference_of(one, ids_alone)
    assert found is not None
    assert re.fullmatch(r"step 6 sampled for request \d, sample 0: 97 in A, 98 in B", found)


def test_log_ending_earlier_is_the_shorter_one(tmp_path: Path):
    write_log(tmp_path / "a")
    short = rewrite(tmp_path / "a", tmp_path / "b", lambda message: message if message.step <= 12 else None)
    assert difference_of(tmp_path / "a", short) == "B ends after step 12, A continues"
    assert difference_of(short, tmp_path / "a") == "A ends after step 12, B continues"


def test_last_records_are_compared_from_common_first_step(tmp_path: Path):
    write_log(tmp_path / "log")

    def from_step(first: int, changed: int, message: StepMessage) -> StepMessage | None:
        if message.step < first:
            return None
        return replace(message, sampled_token_ids=()) if message.step == changed else message

    one = rewrite(tmp_path / "log", tmp_path / "a", partial(from_step, 10, 0))
    same = rewrite(tmp_path / "log", tmp_path / "b", partial(from_step, 12, 0))
    other = rewrite(tmp_path / "log", tmp_path / "c", partial(from_step, 12, 15))
    assert difference_of(one, same) is None
    found = difference_of(one, other)
    assert found is not None
    assert re.fullmatch(r"step 15: sampled_token_ids: \d entries in A, 0 in B", found)
