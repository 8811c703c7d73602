"""Images of a job in its journal, manifest and provenance, and read again."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from door_rows import MODEL
from image_doors import WRITTEN
from media_models import media_folder, noise, saved

from launch import prefault_cache
from spmd_worker import LLM
from spmd_worker.base.config.schema import CacheConfig, JobConfig, ModelOptions, RowLimits, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.remote_files import delete_remote
from spmd_worker.base.remote_names import file_path
from spmd_worker.compat.image_prompts import media_digest
from spmd_worker.engine.startup import read_run
from spmd_worker.executor.uniproc import UniProcExecutor
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.frontends.batch.output_file import write_lines
from spmd_worker.frontends.batch.run_dir import media_answers as answers_module
from spmd_worker.frontends.batch.run_dir.job_files import PROVENANCE_NAME
from spmd_worker.frontends.batch.run_dir.journal import JournalRecord, RowJournal, RowKey
from spmd_worker.frontends.batch.run_dir.manifest import FORMAT_VERSION, _compare, write_manifest
from spmd_worker.frontends.batch.run_dir.media_answers import image_answers
from spmd_worker.frontends.batch.run_dir.provenance import chained_digest
from spmd_worker.frontends.openai.row_writer import RowAnswer
from spmd_worker.frontends.tools.verify import main as verify
from spmd_worker.media.image_processor import read_image_processor
from spmd_worker.media.media_root import resolved_media_root
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.ranks.environment import RankEnvironment

ONE, OTHER = "11" * 16, "ff" * 15 + "00"


def test_journal_keeps_digests_in_row_order(tmp_path: Path):
    record = JournalRecord(1, 2, 3, 4, 5, 6, 7, 8, "prompt_too_long", OTHER)
    assert JournalRecord.unpack(record.pack()) == record
    for indices in ([2, 0], [1]):
        # Rows of an earlier start come first.
        journal = RowJournal(tmp_path, 9, 1e9)
        for index in indices:
            digest = {0: ONE, 1: "", 2: OTHER}[index]
            journal.append(RowKey(7), RowAnswer(index, b"line\n", media_digest=digest))
        journal.commit()
        assert list(journal.media_digests()) == [(0, ONE), (2, OTHER)]
        journal.close()


def test_chained_digest_depends_on_rows_and_order():
    digests = [(0, ONE), (2, OTHER)]
    found = chained_digest(digests)
    assert found is not None
    assert found["rows"] == 2
    others = [[(0, ONE)], [(0, OTHER), (2, ONE)], [(0, ONE), (3, OTHER)], digests[::-1]]
    assert all(chained_digest(each) != found for each in others)
    assert chained_digest([]) is None


def resolved_run(folder: Path, vision: VisionConfig | None = None, **job: Any) -> Any:
    config = RunConfig(job=JobConfig(**job))
    processor = None if vision is None else read_image_processor(folder, vision, {})
    return SimpleNamespace(model_folder=folder, image_processor=processor, video_processor=None, config=config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return media_folder(tmp_path / "model", "qwen3_vl")


def test_job_is_not_resumed_with_other_decoders(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = resolved_run(folder, VisionConfig("qwen3_vl", 1), media_root=str(tmp_path))
    before = image_answers(run)
    assert before["job.media_root"] == str(tmp_path.resolve())
    assert "max_pixels=65536" in before["image processor"]
    assert before["version of Pillow"]
    settings = folder / "preprocessor_config.json"
    changes: dict[str, Callable[[], object]] = {
        "version of Pillow": lambda: monkeypatch.setattr(answers_module, "decoder_versions", lambda: {"Pillow": "1.0"}),
        "files of the image processor": lambda: settings.write_text(settings.read_text() + " "),
    }
    for name, change in changes.items():
        change()
        now = image_answers(run)
        assert now[name] != before[name]
        with pytest.raises(ConfigError, match=rf"{name} is .*, and .* in the run of job\.run_dir"):
            _compare(tmp_path, {name: before[name]}, {name: now[name]}, "auto", {})


def test_manifest_of_text_has_no_entries_of_images(folder: Path):
    assert image_answers(resolved_run(folder)) == {}
    with pytest.raises(ConfigError, match="none is not a folder"):
        resolved_media_root(str(folder / "none"))


def test_missing_root_is_found_before_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before, each prompt failed; then, jobs on CPUs whose model takes text alone, which are read another way, passed,
    and a program that reads the run on a machine without the folder did not.
    """
    monkeypatch.setattr(UniProcExecutor, "load_model", lambda _: pytest.fail("the model is loaded"))
    with pytest.raises(ConfigError, match="allowed_local_media_path=/none is not a folder: give the one below which"):
        LLM(MODEL, device="cpu", num_blocks=64, allowed_local_media_path="/none")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    paths = {"input": str(tmp_path / "rows.jsonl"), "output": str(tmp_path / "out.jsonl"), "media_root": "/none"}
    model, cache = ModelOptions(path=MODEL), CacheConfig(num_blocks=64)
    config = RunConfig(model=model, cache=cache, job=JobConfig(**paths), device="cpu")
    with pytest.raises(ConfigError, match=r"job\.media_root=/none is not a folder"):
        run_job(config, RankEnvironment(), resolved=prefault_cache(config, RankEnvironment()))
    assert read_run(config).config == config


def test_folder_of_images_needs_pillow(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before, every row of the job was an error row."""
    run = resolved_run(folder, VisionConfig("qwen3_vl", 1), media_root=str(tmp_path))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r"images need Pillow, .* pip install 'spmd-worker\[vision\]'"):
        image_answers(run)


def ended_run(folder: Path, root: str = "", output: str = "out.jsonl") -> Path:
    """Run directory of a job of three rows, of which one has no image and one failed; its files are in `root`."""
    root = root or str(folder)
    (folder / "img").mkdir()
    (folder / "img/a.png").write_bytes(saved(noise(8, 8)))
    row = {"prompt": WRITTEN, "images": ["a.png"]}
    for name, rows in (
        ("in.jsonl", [row, {"prompt": "a"}, {**row, "images": ["gone.png"]}]),
        (output, [{"error": None}, {"error": None}, {"error": {"code": "image_missing"}}]),
    ):
        lines = [json.dumps(each).encode() + b"\n" for each in rows]
        write_lines(lines, file_path(f"{root}/{name}"), part_rows=2)
    run_dir = folder / "run"
    run_dir.mkdir()
    digest = media_digest([sha256((folder / "img/a.png").read_bytes()).digest()])
    (run_dir / PROVENANCE_NAME).write_text(json.dumps({"images": chained_digest([(0, digest)])}))
    config = {"limits": asdict(RowLimits()), "job": {"output": f"{root}/{output}"}}
    answers = {"job.media_root": str(folder / "img")}
    manifest = {"format_version": FORMAT_VERSION, "has_ended": True, "answers": answers, "config": config}
    write_manifest(run_dir, {**manifest, "input": [f"{root}/in.jsonl"]})
    return run_dir


@pytest.mark.guarantee("The images of a job can be read again and compared")
def test_images_of_a_run_are_read_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run_dir = ended_run(tmp_path)
    assert verify(["--images", str(run_dir)]) == 0
    assert capfd.readouterr().out == "same\n"
    (tmp_path / "img/a.png").unlink()
    assert verify(["--images", str(run_dir)]) == 2
    assert "row 0: 'a.png' cannot be read" in capfd.readouterr().err
    assert verify(["--images", str(tmp_path)]) == 2
    assert "has no provenance.json: no job ran in this folder" in capfd.readouterr().err


def test_job_without_images_is_not_called_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run_dir = ended_run(tmp_path)
    write_lines([b'{"prompt": "a"}\n'] * 3, tmp_path / "in.jsonl")
    (run_dir / PROVENANCE_NAME).write_text('{"images": null}')
    assert verify(["--images", str(run_dir)]) == 0
    assert capfd.readouterr().out == f"{run_dir}: no row of the job has images or audio: nothing is compared\n"


@pytest.mark.parametrize("output", ["out.jsonl.gz", "part-*.jsonl"])
def test_images_of_a_remote_run_are_read_again(s3: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], output: str):
    """Regression: remote names were taken for paths, and parts for the name of a file."""
    run_dir = ended_run(tmp_path, s3.bucket, output)
    assert verify(["--images", str(run_dir)]) == 0
    (tmp_path / "img/a.png").write_bytes(saved(noise(8, 8, seed=1)))
    assert verify(["--images", str(run_dir)]) == 1
    delete_remote(f"{s3.bucket}/in.jsonl")
    capfd.readouterr()
    assert verify(["--images", str(run_dir)]) == 2
    assert f"{s3.bucket}/in.jsonl" in capfd.readouterr().err
    assert verify(["--images", f"{s3.bucket}/out.run"]) == 2
    assert "/out.run: a run directory is on the machine of the job: copy it to a folder" in capfd.readouterr().err


@pytest.mark.control("The images of a job can be read again and compared")
def test_changed_image_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run_dir = ended_run(tmp_path)
    (tmp_path / "img/a.png").write_bytes(saved(noise(8, 8, seed=1)))
    assert verify(["--images", str(run_dir)]) == 1
    assert "of 1 rows when the job ran" in capfd.readouterr().out
