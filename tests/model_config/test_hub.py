"""A name on the hub is a snapshot in the local cache, or is downloaded once a node; failures say what and where.

The cache is made by hand in huggingface_hub's layout; huggingface_hub itself agrees on where a snapshot is.
"""

import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ranks
from hub_cache import COMMIT, write_snapshot

from spmd_worker.errors import ModelConfigError
from spmd_worker.model_config import hub
from spmd_worker.model_config.hub import locate_model
from spmd_worker.model_config.hub_cache import ModelLocation, cache_folder, is_hub_name

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
OTHER = "f" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of these tests, offline."""
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def error_of(path: str, revision: str | None = None) -> str:
    with pytest.raises(ModelConfigError) as caught:
        locate_model(path, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_snapshot_is_found_by_branch_tag_and_commit(cache: Path):
    first = write_snapshot(cache, "org/tiny", MODEL, refs=("main", "v1", "refs/pr/2"))
    second = write_snapshot(cache, "org/tiny", MODEL, commit=OTHER, refs=("v2",))
    for revision in (None, "main", "v1", "refs/pr/2", COMMIT):
        assert locate_model("org/tiny", revision) == ModelLocation(str(first), "org/tiny", COMMIT)
    for revision in ("v2", OTHER):
        assert locate_model("org/tiny", revision) == ModelLocation(str(second), "org/tiny", OTHER)


def test_huggingface_hub_finds_the_same_snapshot(cache: Path):
    from huggingface_hub import snapshot_download

    write_snapshot(cache, "org/tiny", MODEL)
    theirs = snapshot_download("org/tiny", cache_dir=str(cache), local_files_only=True)
    assert Path(theirs) == locate_model("org/tiny", None).folder


def test_the_cache_is_where_huggingface_hub_has_it(tmp_path: Path):
    home = Path("~").expanduser()
    assert cache_folder({}) == home / ".cache/huggingface/hub"
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert cache_folder({"XDG_CACHE_HOME": "/x", "HF_HOME": "/h"}) == Path("/h/hub")
    assert cache_folder({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/o"}) == Path("/o")
    assert cache_folder({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/o", "HF_HUB_CACHE": "~/c"}) == home / "c"


def test_a_folder_of_that_name_comes_first(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write_snapshot(cache, "org/tiny", MODEL)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    with caplog.at_level("INFO"):
        assert locate_model("org/tiny", "v1") == ModelLocation("org/tiny", "tiny")
    assert "model.revision=v1 is of no effect: model.path=org/tiny is a folder" in caplog.text


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *((name, True) for name in ("org/tiny", "Qwen/Qwen2.5-0.5B-Instruct", "a_b/c.d")),
        *((name, False) for name in ("tiny", "/org/tiny", "./tiny", "../tiny", "a/b/c", "a/..", "a--b/c", "", "a/b ")),
        ("org/" + "x" * 100, False),
    ],
)
def test_what_may_be_a_name_on_the_hub(name: str, is_one: bool):
    assert is_hub_name(name) == is_one


def test_offline_the_error_says_what_was_looked_for_and_where(cache: Path):
    way_out = "give a folder, or download it where there is a network (hf download org/tiny"
    message = error_of("org/tiny")
    assert message.startswith("model.path=org/tiny is no folder, and not in the local cache of the hub: there is no ")
    assert f"{cache}/models--org--tiny; HF_HUB_OFFLINE is set" in message
    assert f"{way_out}) and set HF_HOME" in message
    write_snapshot(cache, "org/tiny", MODEL)
    message = error_of("org/tiny", "v9")
    assert message.startswith("model.path=org/tiny at model.revision=v9 is no folder")
    assert "models--org--tiny has no snapshot of v9" in message
    assert f"{way_out} --revision v9)" in message
    snapshot = write_snapshot(cache, "org/half", MODEL, leave_out="model.safetensors")
    assert f"{snapshot} lacks model.safetensors or model.safetensors.index.json" in error_of("org/half")
    assert locate_model("org/half", None, needs_weights=False).folder == snapshot
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x-1.safetensors"}}')
    assert f"{snapshot} lacks x-1.safetensors" in error_of("org/half")


@pytest.mark.parametrize("revision", ["../main", "a/../b", "/main", "", "a b", "a\n"])
def test_a_revision_is_no_path_out_of_the_cache(revision: str):
    if revision == "":
        assert "model.path=org/tiny is no folder" in error_of("org/tiny", revision)
    else:
        assert f"model.revision={revision!r} must be a branch" in error_of("org/tiny", revision)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Puts a huggingface_hub in place whose download is `action`; returns the arguments of its calls."""

    def put(action: Callable[[], object]) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def snapshot_download(name: str, **arguments: Any) -> None:
            calls.append({"name": name, **arguments})
            action()

        module = types.ModuleType("huggingface_hub")
        module.snapshot_download = snapshot_download  # type: ignore[attr-defined]  # a module of a test
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        return calls

    return put


def test_ranks_of_a_node_download_once_and_all_find_it(cache: Path, online: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(hub, "_POLL_S", 0.001)
    calls = online(lambda: write_snapshot(cache, "org/tiny", MODEL))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: locate_model("org/tiny", None), range(4)))
    assert found == [ModelLocation(f"{cache}/models--org--tiny/snapshots/{COMMIT}", "org/tiny", COMMIT)] * 4
    (call,) = calls
    assert (call["name"], call["revision"], call["cache_dir"]) == ("org/tiny", "main", str(cache))
    assert "config.json" in call["allow_patterns"]
    assert not any("bin" in pattern or "py" in pattern for pattern in call["allow_patterns"])


def test_one_ranks_failed_download_is_every_ranks_error_and_nobody_tries_again(
    cache: Path, online: Any, monkeypatch: pytest.MonkeyPatch
):
    def fail() -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setattr(hub, "_POLL_S", 0.001)
    calls = online(fail)
    with ThreadPoolExecutor(4) as pool:
        messages = list(pool.map(lambda _: error_of("org/tiny"), range(4)))
    assert len(calls) == 1
    assert len(dict.fromkeys(messages)) == 1
    assert f"there is no {cache}/models--org--tiny; the download failed: ConnectionError: no route" in messages[0]
    # The next launch tries again, and so does a process alone.
    monkeypatch.setenv("MASTER_PORT", "1235")
    error_of("org/tiny")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    error_of("org/tiny")
    error_of("org/tiny")
    assert len(calls) == 4


def test_a_rank_that_waits_for_one_that_fetches_nothing_gives_up_in_words(
    cache: Path, online: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub, "_POLL_S", 0.001)
    monkeypatch.setattr(hub, "_PATIENCE_S", 0.01)
    outcome = []
    online(lambda: outcome.append(error_of("org/tiny")))
    error_of("org/tiny")
    assert "has fetched nothing for 0.01 s" in outcome[0]


def test_a_download_without_safetensors_says_so(online: Any, cache: Path):
    online(lambda: write_snapshot(cache, "org/tiny", MODEL, leave_out="model.safetensors"))
    assert "lacks model.safetensors or model.safetensors.index.json; the hub has no such file" in error_of("org/tiny")


def test_without_huggingface_hub_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "is not installed (pip install 'spmd-worker[hub]')" in error_of("org/tiny")


def test_a_plan_fetches_no_weights(cache: Path, online: Any):
    calls = online(lambda: write_snapshot(cache, "org/tiny", MODEL, leave_out="model.safetensors"))
    locate_model("org/tiny", None, needs_weights=False)
    assert calls[0]["allow_patterns"] == ["config.json", "generation_config.json"]
