"""Jobs whose rows have recordings: Parquet without base64, and the bytes of one job after a cut."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from cut_jobs import Ended, end_after
from hearing_models import WRITTEN, hearing_folder, recording
from jobs_of_rows import job_config, read_rows, run_here, write_rows
from speech_models import wave_file

from spmd_worker.base.config.schema import RunConfig, SchedulerConfig

KIND = "qwen2_audio"
FILES = [wave_file(recording(6_000 + 1_000 * number, number)) for number in range(4)]
PROMPT = f"hear {WRITTEN[KIND]}?"
SAMPLING: dict[str, Any] = {"max_tokens": 6, "temperature": 0}


def config_of(folder: Path, rows: Path, output: str, **job: Any) -> RunConfig:
    files = {"input": str(rows), "output": str(folder / output), "media_root": str(folder)}
    return job_config(folder, hearing_folder(KIND), num_blocks=128, options={"dtype": "float32"}, **files, **job)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of one recording each, and one of all."""
    names = [f"{number}.wav" for number in range(len(FILES))]
    for name, data in zip(names, FILES, strict=True):
        (tmp_path / name).write_bytes(data)
    given = [{"prompt": PROMPT, "audios": [name], **SAMPLING} for name in names]
    given.append({"prompt": PROMPT * len(names), "audios": names, **SAMPLING})
    write_rows(tmp_path, given)
    return tmp_path / "rows.jsonl"


def test_parquet_recordings_are_read_without_base64(rows: Path, tmp_path: Path):
    run_here(config_of(tmp_path, rows, "out.jsonl"))
    listed = [*([each] for each in FILES), FILES]
    table = {
        "prompt": [PROMPT] * len(FILES) + [PROMPT * len(FILES)],
        "audios": listed,
        **{key: [value] * len(listed) for key, value in SAMPLING.items()},
    }
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    run_here(config_of(tmp_path, tmp_path / "rows.parquet", "other.jsonl"))
    answers, others = ([row["outputs"] for row in read_rows(tmp_path, each)] for each in ("out.jsonl", "other.jsonl"))
    assert answers == others
    assert all(answers)


def test_cut_job_of_recordings_resumes_to_equal_bytes(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_here(config_of(tmp_path, rows, "whole.jsonl"))
    cut = config_of(tmp_path, rows, "cut.jsonl")
    slow = replace(cut, scheduler=SchedulerConfig(max_num_seqs=1))
    with monkeypatch.context() as patch:
        end_after(patch, 2)
        with pytest.raises(Ended):
            run_here(slow)
    run_here(cut)
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    proofs = [json.loads((tmp_path / f"{name}.jsonl.run" / "provenance.json").read_text()) for name in ("cut", "whole")]
    assert proofs[0]["images"] == proofs[1]["images"]
