"""What a worker process finds in its environment, and when: before torch is there to read it."""

import logging
import os
import subprocess
import sys

import pytest
from plain_executors import errors_of_all, is_running, new_plain, plain
from ranks import REPOSITORY

from spmd_worker.base.errors import WorkerError
from spmd_worker.executor.worker_environment import process_environment, rank_environment
from spmd_worker.ranks.environment import RankEnvironment, read_rank_environment

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def test_rank_has_its_environment_before_torch_import():
    with plain(2) as executor:
        expected = [dict(zip(RANK_VARIABLES, (rank, rank, "2", "2", "127.0.0.1"), strict=True)) for rank in "01"]
        assert executor.collective_rpc("variables", args=RANK_VARIABLES) == expected
        assert executor.collective_rpc("has_torch") == [False, False]
        ports = executor.collective_rpc("variables", args=("MASTER_PORT",))
        assert ports == [{"MASTER_PORT": str(executor._store.port)}] * 2


def test_a_worker_process_imports_no_torch_by_itself():
    command = "import spmd_worker.executor.worker_process, sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=240, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


def test_the_variables_are_a_launchers():
    variables = rank_environment(rank=1, world_size=4, port=1234)
    assert read_rank_environment(variables) == RankEnvironment(1, 4, 1, 4, True, "127.0.0.1")
    assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_an_interface_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in rank_environment(0, 1, 1)


def test_what_a_launcher_left_is_not_handed_on(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    assert [name for name in process_environment(2) if name.startswith(("RANK", "MASTER_", "TORCHELASTIC_"))] == []


def test_worker_has_one_thread_by_default_with_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv("OMP_NUM_THREADS")
    with caplog.at_level(logging.WARNING, "spmd_worker"):
        assert process_environment(3)["OMP_NUM_THREADS"] == "1"
    assert caplog.messages == [
        f"OMP_NUM_THREADS is not set: each of 3 worker processes uses 1 thread, and this machine has {os.cpu_count()} "
        f"cores; set it to the number of threads per worker"
    ]
    caplog.clear()
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with caplog.at_level(logging.WARNING, "spmd_worker"):
        assert process_environment(3)["OMP_NUM_THREADS"] == "5"
    assert caplog.messages == []


def test_workers_do_not_import_from_current_folder(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "numpy.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    with plain(1) as executor:
        assert is_running(executor.worker_pids[0])
        assert executor.collective_rpc("echo") == [((), {})]


def test_worker_processes_call_plug_ins_once(tmp_path, monkeypatch: pytest.MonkeyPatch):
    information = tmp_path / "plug-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[spmd_worker.plugins]\nplug = plug:register\n")
    source = (
        "from os import environ\n\n"
        "def register():\n    environ['PLUGGED'] = environ.get('PLUGGED', '') + environ['RANK']\n"
    )
    (tmp_path / "plug.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with plain(2) as executor:
        assert executor.collective_rpc("variables", args=("PLUGGED",)) == [{"PLUGGED": "0"}, {"PLUGGED": "1"}]
    (tmp_path / "plug.py").write_text("def register():\n    raise OSError('no licence')\n")
    with errors_of_all(), pytest.raises(WorkerError) as raised:
        new_plain(2).start()
    assert str(raised.value) == (
        "rank 0 raised PluginError in init_worker: plug-in 'plug' (plug:register) failed: OSError: no licence"
    )
