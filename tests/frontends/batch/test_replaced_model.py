"""A job whose model folder is replaced in place by another fine-tune: resume, merge and pool refuse, and name the file.

Regression: of weights only headers and sizes were compared, so two models' answers were mixed without a word.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cut_jobs import Ended, end_after
from gguf_files import tokenizer_metadata, write_gguf
from jobs_of_rows import job_config, run_here, write_rows
from ranks import REPOSITORY
from retrained import retrain
from safetensors.torch import load_file

from spmd_worker.base.config.schema import ModelOptions, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.engine.engine import Engine
from spmd_worker.frontends.batch import job as job_module
from spmd_worker.frontends.batch.merge.merge_shards import merge_shards
from spmd_worker.frontends.batch.pool_world.pool_worker import PoolWorker
from spmd_worker.frontends.batch.run_dir import manifest as manifest_module
from spmd_worker.frontends.batch.run_dir.job_files import MANIFEST_NAME
from spmd_worker.frontends.batch.run_dir.manifest import read_manifest, write_manifest
from spmd_worker.frontends.batch.run_dir.shard import run_dir_of

NUM_ROWS, NUM_DONE = 8, 3
KEY = "weights of model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(REPOSITORY / "scripts" / "demo" / "model", tmp_path / "model")
    rows = [{"prompt": f"add {index} 7 =", "custom_id": f"row {index}"} for index in range(NUM_ROWS)]
    write_rows(tmp_path, rows)
    return tmp_path


def config_of(folder: Path, **job: Any) -> RunConfig:
    sampling = {"max_tokens": 6, "temperature": 0.9}
    return job_config(folder, folder / "model", sampling=sampling, commit_rows=1, **job)


def run(config: RunConfig) -> Path:
    run_here(config)
    return run_dir_of(config.job)


def answers(folder: Path, **job: Any) -> bytes:
    """Answers of the model that the folder has now, in one piece."""
    config = config_of(folder, **job, output=str(folder / "whole" / "out.jsonl"))
    run(config)
    return (folder / "whole" / "out.jsonl").read_bytes()


def cut(config: RunConfig) -> None:
    """The job ends as one that is killed does."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        end_after(monkeypatch, NUM_DONE)
        with pytest.raises(Ended):
            run(config)


def resume_with_other_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folder)
    cut(config)
    retrain(folder / "model")
    refuse_to_load(monkeypatch)
    with pytest.raises(
        ConfigError,
        match=rf"^model\.safetensors of model\.path has other weights than in the run of job\.run_dir={folder}.*: "
        r"answers would differ\. Restore that model, give another job\.run_dir, or set job\.resume=force to resume",
    ):
        run(config)


def merge_with_other_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(config_of(folder, shard="0/2"))
    retrain(folder / "model")
    second = run(config_of(folder, shard="1/2"))
    message = "merged"
    try:
        merge_shards([first, second], folder / "merged.jsonl")
    except ConfigError as error:
        message = str(error)
    assert re.search(rf'^--merge: {KEY} is "\w+" in .*, so they are shards of different jobs', message), message


def join_with_other_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folder, pool=str(folder / "pool"))
    end_in_pool(config)
    retrain(folder / "model")
    refuse_to_load(monkeypatch)
    with pytest.raises(ConfigError, match=rf"^{KEY} is \w+, and \w+ in the pool: every world .* start with what the"):
        run(config)


def end_in_pool(config: RunConfig) -> None:
    num_left, append = [NUM_DONE], PoolWorker.append

    def end(worker: PoolWorker, *given: Any) -> None:
        append(worker, *given)
        num_left[0] -= 1
        if not num_left[0]:
            raise Ended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PoolWorker, "append", end)
        with pytest.raises(Ended):
            run(config)


def refuse_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> Engine:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(job_module, "start_engine", start)


DOORS = {"resume": resume_with_other_weights, "merge": merge_with_other_weights, "pool": join_with_other_weights}


@pytest.mark.guarantee("A job never goes on with other weights under the same name")
@pytest.mark.parametrize("door", DOORS)
def test_retrained_model_is_refused_before_it_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, door: str):
    DOORS[door](folder, monkeypatch)


@pytest.mark.control("A job never goes on with other weights under the same name")
@pytest.mark.parametrize(("door", "words"), [("resume", "loaded"), ("merge", "merged"), ("pool", "loaded")])
def test_headers_alone_do_not_refuse_another_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, control: Callable[..., Any], door: str, words: str
):
    monkeypatch.setattr(manifest_module, "sampled_digests", lambda resolved: {})
    # A run without these keys would be one of a version before.
    monkeypatch.setattr(manifest_module, "_is_of_weights", lambda key: key == "model.path")
    with control(words):
        DOORS[door](folder, monkeypatch)


def test_model_copied_elsewhere_goes_on_with_the_same_bytes(folder: Path):
    config, expected = config_of(folder), answers(folder)
    cut(config)
    shutil.copytree(folder / "model", folder / "copy", copy_function=shutil.copyfile)
    shutil.rmtree(folder / "model")
    moved = replace(config, model=replace(config.model, path=str(folder / "copy")))
    metrics = json.loads((run(moved) / "metrics.json").read_text())
    assert metrics["resumed_rows"] == NUM_DONE
    assert (folder / "out.jsonl").read_bytes() == expected


def test_files_that_are_not_loaded_do_not_count(folder: Path):
    """Regression: a consolidated copy, an optimizer's state or a broken link refused an honest resume."""
    model, config = folder / "model", config_of(folder)
    (model / "model.safetensors").rename(model / "a.safetensors")
    index, names = model / "model.safetensors.index.json", load_file(model / "a.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    (model / "optimizer.safetensors").write_bytes(b"of step 1")
    cut(config)
    (model / "optimizer.safetensors").write_bytes(b"")
    (model / "other.safetensors").symlink_to("nowhere")
    index.write_text(json.dumps(json.loads(index.read_text()), indent=2))
    assert json.loads((run(config) / "metrics.json").read_text())["resumed_rows"] == NUM_DONE
    cut(config)
    (model / "a.safetensors").rename(model / "b.safetensors")
    index.write_text(index.read_text().replace("a.safetensors", "b.safetensors"))
    with pytest.raises(ConfigError, match=r"^a\.safetensors of model\.path has other weights"):
        run(config)


def test_forced_resume_records_both_digests(folder: Path):
    config = config_of(folder)
    cut(config)
    retrain(folder / "model")
    run_dir = run(config_of(folder, resume="force"))
    found = read_manifest(run_dir / MANIFEST_NAME)
    assert found is not None
    (entry,) = found["overridden"]
    assert list(entry) == [KEY]
    assert entry[KEY][0] != entry[KEY][1] == found["answers"][KEY]


def test_run_of_a_version_before_says_what_to_do(folder: Path):
    """It may be resumed with that version, or by force; one that has ended is replaced, and shards are merged."""
    config = config_of(folder)
    cut(config)
    path = run_dir_of(config.job)
    make_older(path)
    with pytest.raises(
        ConfigError,
        match=r"was begun by a version that does not compare the contents of weights, .* Resume with that version, "
        r"give another job\.run_dir, or set job\.resume=force to resume anyway",
    ):
        run(config)
    run(config_of(folder, resume="force"))
    make_older(path)
    run(config)
    shards = [run(config_of(folder, shard=f"{index}/2")) for index in range(2)]
    for each in shards:
        make_older(each)
    merge_shards(shards, folder / "merged.jsonl")
    assert (folder / "merged.jsonl").read_bytes() == (folder / "out.jsonl").read_bytes()


def test_gguf_job_of_a_version_before_names_the_version(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Regression: files that a version makes of a GGUF differ, and the model, which has not changed, was named. With
    other weights it is named. What was made may be removed meanwhile.
    """
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    path = folder / "m.gguf"
    write_gguf(folder / "model", path, metadata=tokenizer_metadata(folder / "model"))
    config = replace(config_of(folder), model=ModelOptions(path=str(path)))
    cut(config)
    shutil.rmtree(folder / "hub")
    manifest = run_dir_of(config.job) / MANIFEST_NAME
    kept, found = manifest.read_bytes(), read_manifest(manifest)
    assert found is not None
    weights = "weights of linked-00001-of-00001.gguf"
    assert weights in found["answers"]
    found["answers"] |= {"model.path": "made otherwise", "tokenizer": "made otherwise"}
    for key, words in (
        ("version of the code", r"^version of the code is \S+, and \"of before\" in the run of "),
        (weights, r"^linked-00001-of-00001\.gguf of model\.path has other weights"),
    ):
        found["answers"][key] = "of before"
        write_manifest(manifest.parent, found)
        with pytest.raises(ConfigError, match=words):
            run(config)
    manifest.write_bytes(kept)
    run(config)
    assert json.loads((manifest.parent / "metrics.json").read_text())["resumed_rows"] == NUM_DONE


def make_older(run_dir: Path) -> None:
    """The manifest as a version before wrote it: its model's digest had the headers."""
    found = read_manifest(run_dir / MANIFEST_NAME)
    assert found is not None
    del found["answers"][KEY]
    found["answers"] |= {"model.path": "of headers too", "version of the code": "of before"}
    write_manifest(run_dir, found)


def test_model_replaced_while_the_job_starts_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Regression: the manifest had the model before, and the answers were of the one after."""
    start = job_module.start_engine

    def start_late(*given: Any, **more: Any) -> Engine:
        retrain(folder / "model")
        return start(*given, **more)

    monkeypatch.setattr(job_module, "start_engine", start_late)
    with pytest.raises(ConfigError, match=r"^model\.path=.* changed while the job started: start it again"):
        run(config_of(folder))


def test_dummy_weights_do_not_depend_on_files(folder: Path):
    config = config_of(folder)
    config = replace(config, model=replace(config.model, load_format="dummy"))
    cut(config)
    retrain(folder / "model")
    assert json.loads((run(config) / "metrics.json").read_text())["resumed_rows"] == NUM_DONE
