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
from speech_models import wave_file

from spmd_worker.base.config.schema import CacheConfig, JobConfig, ModelOptions, RunConfig, SchedulerConfig
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.ranks.environment import RankEnvironment

KIND = "qwen2_audio"
FILES = [wave_file(recording(6_000 + 1_000 * number, number)) for number in range(4)]
PROMPT = f"hear {WRITTEN[KIND]}?"
SAMPLING: dict[str, Any] = {"max_tokens": 6, "temperature": 0}


def config_of(folder: Path, rows: Path, output: str, **job: Any) -> RunConfig:
    return RunConfig(
        model=ModelOptions(path=str(hearing_folder(KIND)), dtype="float32"),
        cache=CacheConfig(num_blocks=128),
        job=JobConfig(input=str(rows), output=str(folder / output), media_root=str(folder), **job),
        device="cpu",
    )


def answers_of(folder: Path, output: str) -> list[Any]:
    return [json.loads(line)["outputs"] for line in (folder / output).read_text().splitlines()]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of one recording each, and one of all."""
    names = [f"{number}.wav" for number in range(len(FILES))]
    for name, data in zip(names, FILES, strict=True):
        (tmp_path / name).write_bytes(data)
    given = [{"prompt": PROMPT, "audios": [name], **SAMPLING} for name in names]
    given.append({"prompt": PROMPT * len(names), "audios": names, **SAMPLING})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in given))
    return tmp_path / "rows.jsonl"


def test_parquet_recordings_are_read_without_base64(rows: Path, tmp_path: Path):
    run_job(config_of(tmp_path, rows, "out.jsonl"), RankEnvironment())
    listed = [*([each] for each in FILES), FILES]
    table = {
        "prompt": [PROMPT] * len(FILES) + [PROMPT * len(FILES)],
        "audios": listed,
        **{key: [value] * len(listed) for key, value in SAMPLING.items()},
    }
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    run_job(config_of(tmp_path, tmp_path / "rows.parquet", "other.jsonl"), RankEnvironment())
    answers = answers_of(tmp_path, "out.jsonl")
    assert answers == answers_of(tmp_path, "other.jsonl")
    assert all(answers)


def test_cut_job_of_recordings_resumes_to_equal_bytes(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_job(config_of(tmp_path, rows, "whole.jsonl"), RankEnvironment())
    cut = config_of(tmp_path, rows, "cut.jsonl")
    slow = replace(cut, scheduler=SchedulerConfig(max_num_seqs=1))
    with monkeypatch.context() as patch:
        end_after(patch, 2)
        with pytest.raises(Ended):
            run_job(slow, RankEnvironment())
    run_job(cut, RankEnvironment())
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    proofs = [json.loads((tmp_path / f"{name}.jsonl.run" / "provenance.json").read_text()) for name in ("cut", "whole")]
    assert proofs[0]["images"] == proofs[1]["images"]
