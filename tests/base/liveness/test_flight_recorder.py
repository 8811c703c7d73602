"""NCCL's flight recorder is on, writes into the run directory, and a user's own settings win."""

from pathlib import Path

from spmd_worker.base.liveness.flight_recorder import flight_recorder_variables


def test_flight_recorder_writes_into_the_run_directory(tmp_path: Path):
    assert flight_recorder_variables({}, tmp_path) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "nccl_trace.rank"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "nccl_trace.rank"),
    }


def test_flight_recorder_keeps_user_variables(tmp_path: Path):
    """A variable set under either of its two names is not overridden."""
    own = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_FR_DUMP_TEMP_FILE": "/tmp/x"}
    assert list(flight_recorder_variables(own, tmp_path)) == ["TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"]
