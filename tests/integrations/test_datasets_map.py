"""`datasets` itself: answers in order, equal to a job's, and read from its cache when nothing has changed."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, disable_progress_bars
from datasets.fingerprint import Hasher
from door_rows import MODEL, OPTIONS, lines_of_job, mixed_rows, plain_rows, prompts
from gguf_files import tokenizer_metadata, write_gguf
from ranks import run_script

from spmd_worker.base.errors import ConfigError
from spmd_worker.integrations import datasets_map
from spmd_worker.integrations.datasets_map import DatasetRows, answers_depend_on, choose_devices

NUM_ROWS = 12
GIVEN = {"prompt": "question", "sampling": {"temperature": 1.5, "max_tokens": 6}, **OPTIONS}
IN_PROCESSES = """
import sys
import torch
from datasets import Dataset
from spmd_worker.integrations.datasets_map import DatasetRows

class Rows(DatasetRows):
    def columns_of(self, rows):
        sys.stderr.write(f"{{torch.get_num_threads()}} threads\\n")
        return super().columns_of(rows)

if __name__ == "__main__":
    data = Dataset.from_dict({{"question": {questions!r}}})
    torch.set_num_threads(3)
    with Rows({model!r}, **{given!r}) as rows:
        for num_proc in (None, 1, 2):
            found = rows.answer_dataset(data, batch_size=3, num_proc=num_proc)
            sys.stdout.write("\\n".join(found["answer"]) + "\\n")
            rows.close()
"""
disable_progress_bars()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A dataset on a disk, whose maps have a cache."""
    Dataset.from_dict({"question": prompts(NUM_ROWS)}).save_to_disk(tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.guarantee("A map of datasets equals a job, and an equal map is read from the cache without an engine")
def test_map_equals_a_job_and_is_cached(tmp_path: Path, saved: Path):
    expected = lines_of_job(tmp_path, plain_rows(NUM_ROWS))
    for is_cached in (False, True):
        with DatasetRows(MODEL, **GIVEN) as rows:
            found = rows.answer_dataset(Dataset.load_from_disk(saved), batch_size=5)
            assert rows.is_open is not is_cached
            # A running engine is no part of the fingerprint.
            assert rows.answer_dataset(Dataset.load_from_disk(saved), batch_size=5)._fingerprint == found._fingerprint
        assert found["answer"] == expected
        assert found["question"] == prompts(NUM_ROWS)


@pytest.mark.control("A map of datasets equals a job, and an equal map is read from the cache without an engine")
def test_fingerprint_follows_all_that_answers_depend_on(tmp_path: Path):
    shutil.copytree(MODEL, tmp_path / "model")

    def fingerprint(**more: Any) -> str:
        rows = DatasetRows(str(tmp_path / "model"), **{**GIVEN, **more})
        rows.answer_dataset(Dataset.from_dict({}), batch_size=5)
        return Hasher.hash(rows)

    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint(seed=1) != first
    assert fingerprint(sampling={"temperature": 0.5, "max_tokens": 6}) != first
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    changed = fingerprint()
    assert changed != first
    # A change between samples is known by the file's time alone.
    os.utime(weights, ns=(1, 1))
    assert fingerprint() != changed


def test_fingerprint_follows_the_time_of_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    source = Path(MODEL)
    path = write_gguf(source, tmp_path / "m.gguf", metadata=tokenizer_metadata(source))
    first = answers_depend_on(str(path), OPTIONS)
    assert answers_depend_on(str(path), OPTIONS) == first
    os.utime(path, ns=(1, 1))
    assert answers_depend_on(str(path), OPTIONS) != first


def test_rows_of_a_jobs_format(tmp_path: Path):
    rows = [row for row in mixed_rows() if isinstance(row.get("prompt"), str)]
    names = dict.fromkeys(name for row in rows for name in row)
    data = Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})
    with DatasetRows(MODEL, **OPTIONS) as door:
        found = door.answer_dataset(data, batch_size=4, remove_columns=["temperature"])
        assert found["answer"] == [*door.answer_dataset(data.to_iterable_dataset())["answer"]]
    assert found["answer"] == lines_of_job(tmp_path, rows)
    assert found.column_names == [name for name in names if name != "temperature"] + list(door.names)


def test_processes_have_their_own_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    choose_devices(1, 2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    with pytest.raises(ConfigError, match=r"^CUDA_VISIBLE_DEVICES=4,6,7: process 1 of num_proc needs 2"):
        choose_devices(1, 2)
    choose_devices(2, 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_process_that_maps_computes_itself(monkeypatch: pytest.MonkeyPatch):
    """Regression: a map that had ended early went on in this process with a rank, and divided its cores by none."""
    rows = DatasetRows(MODEL, **GIVEN)
    monkeypatch.setattr(rows, "columns_of", len, raising=False)
    with datasets_map._told_processes(1):
        assert rows({"question": prompts(2)}, [0, 1], 1) == 2
        assert datasets_map._num_processes() == 0
        monkeypatch.setattr(datasets_map.os, "getpid", lambda: -1)
        assert datasets_map._num_processes() == 1


def test_running_engine_is_not_forked():
    """Regression: an engine with other arguments was not found."""
    data = Dataset.from_dict({"question": prompts(2)})
    with DatasetRows(MODEL, **GIVEN) as rows:
        rows.open()
        for given in (GIVEN, {**GIVEN, "seed": 1}):
            with pytest.raises(ConfigError, match=r"^num_proc=2 forks this process, which has a running engine"):
                DatasetRows(MODEL, **given).answer_dataset(data, num_proc=2)


@pytest.mark.stress
def test_processes_equal_a_job(tmp_path: Path):
    """Regression: processes of a process that had computed before waited forever, and each had all of its threads."""
    script = tmp_path / "script.py"
    script.write_text(IN_PROCESSES.format(questions=prompts(NUM_ROWS), model=MODEL, given=GIVEN))
    done = run_script([script], 240, {"OMP_NUM_THREADS": ""}).checked()
    assert done.stdout.splitlines() == 3 * lines_of_job(tmp_path, plain_rows(NUM_ROWS))
    num_own = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert done.stderr.count(f"{num_own} threads\n") == 4
