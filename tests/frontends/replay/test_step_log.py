"""The step log returns its messages; a torn tail loses only the tail, other damage is reported with its byte."""

import json
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_worker.base.errors import StepLogError
from spmd_worker.frontends.replay.step_log import (
    FORMAT_VERSION,
    StepLogHeader,
    StepLogWriter,
    header_from_json,
    header_to_json,
    read_step_log,
)
from spmd_worker.replica.scheduler.planner import SchedulerLimits

HEADER = StepLogHeader(
    code="c0de",
    model_path="/models/\u00e4 model",
    load_format="auto",
    device="cpu",
    dtype="bfloat16",
    quantization=None,
    tokenizer=None,
    vocab_size=512,
    eos_token_ids=(0, 7),
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    enable_chunked_prefill=True,
    num_blocks=40,
    block_size=16,
    watermark_blocks_per_sequence=1,
    num_host_blocks=6,
    num_tier_blocks=5,
    enable_prefix_caching=True,
    preemption_mode="auto",
    block_copy_tokens=2.5,
    seed=3,
    tensor_parallel_size=2,
    pipeline_parallel_size=1,
    data_parallel_size=1,
)
PAYLOADS = [b"first", b"", b"\x00" * 40, bytes(range(256)), b"last one"]


def write(path: Path, payloads: list[bytes], header: StepLogHeader = HEADER) -> Path:
    with StepLogWriter(path, header) as writer:
        for payload in payloads:
            writer.write(payload)
    return path


def starts_of_frames(tmp_path: Path) -> list[int]:
    """Where each message's frame begins, and the end of the file."""
    return [write(tmp_path / f"{count}", PAYLOADS[:count]).stat().st_size for count in range(len(PAYLOADS) + 1)]


def test_step_log_reads_back_repeatedly(tmp_path: Path):
    log = read_step_log(write(tmp_path / "log", PAYLOADS))
    assert log.header == HEADER
    assert log.torn_tail is None
    assert log.num_messages == 5
    assert list(log.messages()) == PAYLOADS
    assert list(log.messages()) == PAYLOADS


@given(st.lists(st.binary(max_size=40)))
def test_any_payloads_round_trip(tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes]):
    log = read_step_log(write(tmp_path_factory.mktemp("any") / "log", payloads))
    assert (list(log.messages()), log.torn_tail) == (payloads, None)


def test_log_without_messages_is_complete(tmp_path: Path):
    log = read_step_log(write(tmp_path / "log", []))
    assert (log.num_messages, log.torn_tail) == (0, None)


def test_logs_of_same_messages_have_same_bytes(tmp_path: Path):
    first, other = (write(tmp_path / name, PAYLOADS).read_bytes() for name in ("a", "b"))
    assert first == other


def test_truncated_log_gives_complete_messages_before_cut(tmp_path: Path):
    starts = starts_of_frames(tmp_path)
    whole = write(tmp_path / "whole", PAYLOADS).read_bytes()
    for end in range(starts[0], len(whole) + 1):
        path = tmp_path / "cut"
        path.unlink(missing_ok=True)
        path.write_bytes(whole[:end])
        log = read_step_log(path)
        num_whole = max(count for count, start in enumerate(starts) if start <= end)
        assert list(log.messages()) == PAYLOADS[:num_whole], end
        if end in starts:
            assert log.torn_tail is None, end
        else:
            assert log.torn_tail is not None, end
            assert f"from byte {starts[num_whole]} on" in log.torn_tail


def test_damaged_header_is_rejected_at_its_byte(tmp_path: Path):
    whole = write(tmp_path / "whole", PAYLOADS).read_bytes()
    first_message = starts_of_frames(tmp_path)[0]
    path = tmp_path / "log"
    for end in range(1, first_message):
        path.unlink(missing_ok=True)
        path.write_bytes(whole[:end])
        with pytest.raises(StepLogError, match="not a step log" if end < 8 else r"header .*byte 8 .*damaged"):
            read_step_log(path)
    path.write_bytes(whole[:30] + bytes([whole[30] ^ 1]) + whole[31:])
    with pytest.raises(StepLogError, match="header at byte 8"):
        read_step_log(path)


def test_empty_or_other_file_is_rejected(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(b"")
    with pytest.raises(StepLogError, match=r"is empty: .*header"):
        read_step_log(path)
    path.write_bytes(b'{"custom_id": "row"}\n')
    with pytest.raises(StepLogError, match=r"not .*step log"):
        read_step_log(path)
    with pytest.raises(FileNotFoundError):
        read_step_log(tmp_path / "absent")


def test_damaged_byte_of_last_frame_is_torn_tail(tmp_path: Path):
    starts = starts_of_frames(tmp_path)
    whole = write(tmp_path / "whole", PAYLOADS).read_bytes()
    for place in range(starts[-2], len(whole)):
        path = tmp_path / "damaged"
        path.unlink(missing_ok=True)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        log = read_step_log(path)
        assert list(log.messages()) == PAYLOADS[:-1], place
        assert log.torn_tail is not None, place


def test_damaged_byte_before_good_frame_names_both_offsets(tmp_path: Path):
    starts = starts_of_frames(tmp_path)
    whole = write(tmp_path / "whole", PAYLOADS).read_bytes()
    for place in range(starts[0], starts[-2]):
        path = tmp_path / "damaged"
        path.unlink(missing_ok=True)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        number = max(count for count, start in enumerate(starts) if start <= place)
        words = rf"damaged at byte {starts[number]}, after {number} messages: .* at byte {starts[number + 1]},"
        with pytest.raises(StepLogError, match=words):
            read_step_log(path)


def test_tail_of_zeros_is_a_torn_tail(tmp_path: Path):
    path = write(tmp_path / "log", PAYLOADS)
    path.write_bytes(path.read_bytes() + bytes(5000))
    log = read_step_log(path)
    assert list(log.messages()) == PAYLOADS
    assert log.torn_tail is not None


def test_excessive_length_does_not_hide_good_frames(tmp_path: Path):
    start = starts_of_frames(tmp_path)[2]
    whole = bytearray(write(tmp_path / "whole", PAYLOADS).read_bytes())
    whole[start + 4 : start + 8] = b"\xff\xff\xff\x7f"
    path = tmp_path / "damaged"
    path.write_bytes(whole)
    with pytest.raises(StepLogError, match=rf"damaged .*byte {start}, .*2 messages"):
        read_step_log(path)


def test_payload_holding_a_complete_log_is_a_payload(tmp_path: Path):
    inner = write(tmp_path / "inner", PAYLOADS).read_bytes()
    log = read_step_log(write(tmp_path / "outer", [inner, inner]))
    assert list(log.messages()) == [inner, inner]


def test_messages_of_killed_writer_are_in_the_log(tmp_path: Path):
    """Each frame is with the operating system when `write` returns: SIGKILL runs no handler and flushes no buffer."""
    script = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from test_step_log import HEADER, PAYLOADS
from spmd_worker.frontends.replay.step_log import StepLogWriter
writer = StepLogWriter(sys.argv[1], HEADER)
for payload in PAYLOADS:
    writer.write(payload)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", script, str(path), str(Path(__file__).parent)], timeout=240)
    assert done.returncode == -signal.SIGKILL
    log = read_step_log(path)
    assert (list(log.messages()), log.torn_tail) == (PAYLOADS, None)


def test_growing_log_can_be_read(tmp_path: Path):
    writer = StepLogWriter(tmp_path / "log", HEADER)
    for count, payload in enumerate(PAYLOADS):
        writer.write(payload)
        assert list(read_step_log(writer.path).messages()) == PAYLOADS[: count + 1]
    writer.close()
    writer.close()


def test_full_disk_is_oserror_not_shorter_log(tmp_path: Path):
    # Here, because a script imports this module too.
    from file_limit import file_limit

    with file_limit(40), pytest.raises(OSError, match="File too large"):
        StepLogWriter(tmp_path / "steps.log", HEADER)


def test_header_round_trips_through_json():
    value = json.loads(json.dumps(header_to_json(HEADER)))
    assert header_from_json(value) == HEADER
    assert header_from_json({**value, "tokenizer": "ab"}) == replace(HEADER, tokenizer="ab")
    assert sorted(value) == sorted(spec.name for spec in fields(StepLogHeader))


RENAMED = {
    "preemption": "preemption_mode",
    "num_virtual_engines": "pipeline_parallel_size",
    "media": "num_media_rows",
}


@pytest.mark.parametrize("name", [spec.name for spec in fields(SchedulerLimits)])
def test_header_has_every_limit_of_the_scheduler(name: str):
    """A replay without one of them plans other steps than the run."""
    assert RENAMED.get(name, name) in {spec.name for spec in fields(StepLogHeader)}


@pytest.mark.parametrize("name", [spec.name for spec in fields(StepLogHeader)])
def test_header_with_missing_or_mistyped_key_is_rejected(name: str):
    value = header_to_json(HEADER)
    with pytest.raises(StepLogError, match="format version" if name == "format_version" else name):
        header_from_json({**value, name: [1.5]})
    del value[name]
    with pytest.raises(StepLogError, match="format version" if name == "format_version" else name):
        header_from_json(value)


def test_unknown_keys_and_other_versions_are_rejected():
    value = header_to_json(HEADER)
    with pytest.raises(StepLogError, match=r"shoe_size .*missing, unknown"):
        header_from_json({**value, "shoe_size": 43})
    words = f"format version 2; this code reads version {FORMAT_VERSION}: replay the log with the version"
    with pytest.raises(StepLogError, match=words):
        header_from_json({**value, "format_version": 2})
    with pytest.raises(StepLogError, match="num_blocks"):
        header_from_json({**value, "num_blocks": True})
