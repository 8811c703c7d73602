"""A name on the hub is a snapshot in the local cache, or is downloaded once a node; failures say what and where.

The cache is made by hand in huggingface_hub's layout; huggingface_hub itself agrees on where a snapshot is.
"""

import json
import shutil
import sys
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from threading import Barrier, Lock
from typing import Any

import pytest
import ranks
from hub_cache import COMMIT, files_of, write_snapshot
from pooling_models import pooling_folder
from waiting import LIMIT_S

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config import hub
from spmd_worker.model_config.hub import locate_model
from spmd_worker.model_config.hub_cache import ModelLocation, absence_note, cache_folder, is_hub_name
from spmd_worker.model_config.late_interaction import ARTIFACT_FILE
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.model_config.pooling import POOLING_FILES, PoolingConfig

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


def test_snapshot_is_found_by_branch_tag_and_commit(cache: Path):
    first = write_snapshot(cache, "org/tiny", MODEL, refs=("main", "v1", "refs/pr/2"))
    second = write_snapshot(cache, "org/tiny", MODEL, commit=OTHER, refs=("v2",))
    for revision in (None, "main", "v1", "refs/pr/2", COMMIT):
        assert locate_model("org/tiny", revision) == ModelLocation(str(first), "org/tiny", COMMIT)
    for revision in ("v2", OTHER):
        assert locate_model("org/tiny", revision) == ModelLocation(str(second), "org/tiny", OTHER)


def test_snapshot_equals_that_of_huggingface_hub(cache: Path):
    from huggingface_hub import _CACHED_NO_EXIST, snapshot_download, try_to_load_from_cache

    write_snapshot(cache, "org/tiny", MODEL)
    theirs = snapshot_download("org/tiny", cache_dir=str(cache), local_files_only=True)
    found = locate_model("org/tiny", None)
    assert Path(theirs) == found.folder
    note = absence_note(cache, found, "modules.json")
    assert try_to_load_from_cache("org/tiny", "modules.json", cache_dir=str(cache)) is None
    note.parent.mkdir(parents=True)
    note.touch()
    assert try_to_load_from_cache("org/tiny", "modules.json", cache_dir=str(cache)) is _CACHED_NO_EXIST


def test_cache_folder_follows_huggingface_hub(tmp_path: Path):
    home = Path("~").expanduser()
    assert cache_folder({}) == home / ".cache/huggingface/hub"
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert cache_folder({"XDG_CACHE_HOME": "/x", "HF_HOME": "/h"}) == Path("/h/hub")
    assert cache_folder({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/o"}) == Path("/o")
    assert cache_folder({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/o", "HF_HUB_CACHE": "~/c"}) == home / "c"


def test_missing_home_error_names_the_cache_variable(monkeypatch: pytest.MonkeyPatch):
    def nobody(_: object) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    for environment in ({}, {"HF_HOME": "~/models"}, {"HF_HUB_CACHE": "~/models"}):
        with pytest.raises(ModelConfigError, match=r"no home folder .* HF_HOME"):
            cache_folder(environment)
    assert cache_folder({"HF_HOME": "/h"}) == Path("/h/hub")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")


def test_local_folder_overrides_the_hub_name(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
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
def test_hub_names_are_recognised(name: str, is_one: bool):
    assert is_hub_name(name) == is_one


def test_offline_error_names_model_and_cache(cache: Path):
    way_out = "give a folder, or download it on a machine with a network (hf download org/tiny"
    message = error_of("org/tiny")
    assert message.startswith(
        "model.path=org/tiny is not a folder, and not in the local cache of the hub: there is no "
    )
    assert f"{cache}/models--org--tiny; HF_HUB_OFFLINE is set" in message
    assert f"{way_out}) and set HF_HOME" in message
    write_snapshot(cache, "org/tiny", MODEL)
    message = error_of("org/tiny", "v9")
    assert message.startswith("model.path=org/tiny at model.revision=v9 is not a folder")
    assert "models--org--tiny has no snapshot of v9" in message
    assert f"{way_out} --revision v9)" in message
    snapshot = write_snapshot(cache, "org/half", MODEL, leave_out="model.safetensors")
    assert f"{snapshot} lacks model.safetensors or model.safetensors.index.json" in error_of("org/half")
    assert locate_model("org/half", None, needs_weights=False).folder == snapshot
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x-1.safetensors"}}')
    assert f"{snapshot} lacks x-1.safetensors" in error_of("org/half")


@pytest.mark.parametrize("revision", ["../main", "a/../b", "/main", "", "a b", "a\n"])
def test_revision_cannot_leave_the_cache(revision: str):
    if revision == "":
        assert "model.path=org/tiny is not a folder" in error_of("org/tiny", revision)
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
        module.model_info = lambda *_, **__: types.SimpleNamespace(siblings=None)
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        return calls

    return put


@pytest.mark.guarantee("Names on the hub: one download a node, the cache first, offline")
def test_ranks_of_a_node_download_once(cache: Path, online: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(hub, "_POLL_S", 0.001)
    calls = online(lambda: write_snapshot(cache, "org/tiny", MODEL))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: locate_model("org/tiny", None), range(4)))
    assert found == [ModelLocation(f"{cache}/models--org--tiny/snapshots/{COMMIT}", "org/tiny", COMMIT)] * 4
    assert len(calls) == 1
    call = calls[0]
    assert (call["name"], call["revision"], call["cache_dir"]) == ("org/tiny", "main", str(cache))
    assert "config.json" in call["allow_patterns"]
    assert not any("bin" in pattern or "py" in pattern for pattern in call["allow_patterns"])


@pytest.mark.control("Names on the hub: one download a node, the cache first, offline")
def test_download_count_detects_concurrent_downloads(
    cache: Path,
    online: Any,
    monkeypatch: pytest.MonkeyPatch,
    control,
):
    """Negative control: no lock, and each rank looks into the cache before another has fetched anything."""
    fetch, met, lock = hub._fetch, Barrier(4), Lock()

    def fetch_beside_the_others(*arguments: Any, **options: Any) -> None:
        met.wait(LIMIT_S)
        with lock:
            fetch(*arguments, **options)
        # A snapshot that is written once more is not read meanwhile.
        met.wait(LIMIT_S)

    monkeypatch.setattr(hub, "_locked", lambda path, wanted: nullcontext())
    monkeypatch.setattr(hub, "_fetch", fetch_beside_the_others)
    with control("4 == 1"):
        test_ranks_of_a_node_download_once(cache, online, monkeypatch)


def test_failed_download_is_one_error_on_every_rank(cache: Path, online: Any, monkeypatch: pytest.MonkeyPatch):
    """No rank tries again."""

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


def test_waiting_rank_fails_when_nothing_is_fetched(cache: Path, online: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "_POLL_S", 0.001)
    monkeypatch.setattr(hub, "_PATIENCE_S", 0.01)
    outcome = []
    online(lambda: outcome.append(error_of("org/tiny")))
    error_of("org/tiny")
    assert "has fetched nothing for 0.01 s" in outcome[0]


def test_download_without_safetensors_is_named(online: Any, cache: Path):
    online(lambda: write_snapshot(cache, "org/tiny", MODEL, leave_out="model.safetensors"))
    assert "lacks model.safetensors or model.safetensors.index.json; the hub has no such file" in error_of("org/tiny")


def test_missing_huggingface_hub_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "huggingface_hub, which downloads, is not installed (pip install 'spmd-worker[hub]')" in error_of("org/tiny")


def test_broken_huggingface_hub_error_has_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An ImportError was raised as it is."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in [each for each in sys.modules if each.partition(".")[0] == "huggingface_hub"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "huggingface_hub.py").write_text("from json import absent")
    monkeypatch.syspath_prepend(tmp_path)
    words = "is installed but cannot be imported (ImportError: cannot import name 'absent' from 'json'"
    assert f"huggingface_hub, which downloads, {words}" in error_of("org/tiny")


def test_plan_fetches_no_weights(cache: Path, online: Any):
    calls = online(lambda: write_snapshot(cache, "org/tiny", MODEL, leave_out="model.safetensors"))
    locate_model("org/tiny", None, needs_weights=False)
    settings = ["config.json", "generation_config.json", "hf_quant_config.json", *POOLING_FILES, ARTIFACT_FILE]
    assert calls[0]["allow_patterns"] == settings


MODULES = ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")


class FakeHub(types.ModuleType):
    """huggingface_hub where the hub has one commit, the files of `source`. What was called is in `calls`; `fault` is
    raised in place of answers.
    """

    def __init__(self, cache: Path, source: Path) -> None:
        super().__init__("huggingface_hub")
        self._cache, self._source, self._lock = cache, source, Lock()
        self.calls: list[str] = []
        self.fetched: list[str] = []
        self.fault: Exception | None = None

    def snapshot_download(
        self,
        name: str,
        *,
        revision: str,
        cache_dir: str,
        allow_patterns: list[str],
        ignore_patterns: Sequence[str] = (),
    ) -> None:
        assert (cache_dir, revision in ("main", COMMIT)) == (str(self._cache), True)
        self._answer(f"download {revision}")

        def is_wanted(file: str) -> bool:
            is_allowed = any(fnmatch(file, pattern) for pattern in allow_patterns)
            return is_allowed and not any(fnmatch(file, pattern) for pattern in ignore_patterns)

        self.fetched += [each for each in files_of(self._source) if is_wanted(each)]
        write_snapshot(self._cache, name, self._source, is_wanted=is_wanted)

    def model_info(self, name: str, *, revision: str, timeout: float) -> Any:
        assert timeout > 0
        self._answer(f"ask {revision}")
        siblings = [types.SimpleNamespace(rfilename=each) for each in files_of(self._source)]
        return types.SimpleNamespace(siblings=siblings)

    def _answer(self, call: str) -> None:
        with self._lock:
            self.calls.append(call)
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def fake_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], FakeHub]:
    def put(source: Path) -> FakeHub:
        hub = FakeHub(cache, source)
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        return hub

    return put


@pytest.mark.finding(number="A2")
def test_additional_chat_templates_are_fetched(tmp_path: Path, fake_hub: Callable[[Path], FakeHub]):
    source = tmp_path / "source"
    shutil.copytree(MODEL, source)
    for name in ("additional_chat_templates/tool_use.jinja", "other/model.safetensors", "other/config.json"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    fetched = fake_hub(source)
    locate_model("org/tiny", None)
    assert [each for each in fetched.fetched if "/" in each] == ["additional_chat_templates/tool_use.jinja"]


def test_files_of_ranks_are_fetched_without_code(tmp_path: Path, fake_hub: Callable[[Path], FakeHub]):
    """Kimi's, Hunyuan's and Mistral's folders were downloaded without a tokenizer."""
    source = tmp_path / "source"
    shutil.copytree(MODEL, source)
    names = ["hy.tiktoken", "tekken.json", "tiktoken.model"]
    for name in (*names, "tokenization_kimi.py"):
        (source / name).write_text("{}")
    fetched = fake_hub(source)
    locate_model("org/tiny", None)
    assert [each for each in sorted(fetched.fetched) if "tok" in each or each in names] == [
        *names,
        *("tokenizer.json", "tokenizer_config.json"),
    ]


def pooling_of(folder: Path) -> PoolingConfig | None:
    return read_model_files(folder).model_config.pooling


@pytest.mark.parametrize("needs_weights", [True, False])
def test_pooling_model_is_downloaded_with_its_modules(cache: Path, fake_hub: Any, needs_weights: bool):
    """Its modules were left out, so the rows of it were pooled by other rules than those of the folder."""
    source = pooling_folder("dense")
    hub = fake_hub(source)
    found = locate_model("org/tiny", None, needs_weights=needs_weights)
    assert pooling_of(found.folder) == pooling_of(source) is not None
    wanted = MODULES if needs_weights else MODULES[:2]
    assert tuple(name for name in files_of(found.folder) if "/" in name) == wanted
    assert (found.folder / "model.safetensors").exists() == needs_weights
    # config_sentence_transformers.json is not there, and is asked for once.
    assert hub.calls == ["download main", f"ask {COMMIT}", f"download {COMMIT}"]
    assert locate_model("org/tiny", None, needs_weights=needs_weights) == found
    assert len(hub.calls) == 3


@pytest.mark.guarantee("Names on the hub: one download a node, the cache first, offline")
def test_plain_model_is_requested_once(cache: Path, fake_hub: Any):
    hub = fake_hub(MODEL)
    found = locate_model("org/tiny", None)
    assert hub.calls == ["download main", f"ask {COMMIT}"]
    assert locate_model("org/tiny", None) == found
    assert len(hub.calls) == 2


@pytest.mark.control("Names on the hub: one download a node, the cache first, offline")
def test_request_count_detects_repeated_requests(
    cache: Path,
    fake_hub: Any,
    monkeypatch: pytest.MonkeyPatch,
    control,
):
    """Negative control: what the hub has not is not noted."""
    monkeypatch.setattr(hub, "unknown_files", lambda cache, found: list(POOLING_FILES))
    with control("3 == 2"):
        test_plain_model_is_requested_once(cache, fake_hub)


def test_cached_snapshot_without_modules_is_completed(cache: Path, fake_hub: Any, monkeypatch: pytest.MonkeyPatch):
    """It was taken as complete. The weights are not fetched again, and the ranks of a node ask once."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(hub, "_POLL_S", 0.001)
    source = pooling_folder("dense")
    plain = [name for name in files_of(source) if "/" not in name and name not in POOLING_FILES]
    write_snapshot(cache, "org/tiny", source, is_wanted=plain.__contains__)
    there = fake_hub(source)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: locate_model("org/tiny", None), range(4)))
    assert [pooling_of(each.folder) for each in found] == [pooling_of(source)] * 4
    assert there.calls == [f"ask {COMMIT}", f"download {COMMIT}", f"download {COMMIT}"]
    assert there.fetched == ["modules.json", "sentence_bert_config.json", *MODULES]


def test_snapshot_without_module_files_is_incomplete(cache: Path):
    source = pooling_folder("dense")
    for name in MODULES:
        write_snapshot(cache, "org/half", source, commit=OTHER, leave_out=name)
        lacks = "2_Dense/model.safetensors or model.safetensors.index.json" if "model" in name else name
        assert f"{OTHER} lacks {lacks}; HF_HUB_OFFLINE is set" in error_of("org/half")
        shutil.rmtree(cache)
    write_snapshot(cache, "org/half", source, leave_out=MODULES[2])
    assert locate_model("org/half", None, needs_weights=False).commit == COMMIT


@pytest.mark.guarantee("Names on the hub: one download a node, the cache first, offline")
def test_cached_model_is_used_when_hub_is_unreachable(
    cache: Path, fake_hub: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The use is logged, unless HF_HUB_OFFLINE is set."""
    snapshot = write_snapshot(cache, "org/tiny", MODEL)
    there = fake_hub(MODEL)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert locate_model("org/tiny", None).folder == snapshot
    assert (there.calls, caplog.text) == ([], "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    there.fault = ConnectionError("no route to the hub")
    assert locate_model("org/tiny", None).folder == snapshot
    assert there.calls == [f"ask {COMMIT}"]
    assert f"{snapshot} has no modules.json and sentence_bert_config.json and" in caplog.text
    assert "the download failed: ConnectionError: no route to the hub; the cached model is used: set HF" in caplog.text
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert locate_model("org/tiny", None).folder == snapshot


@pytest.mark.control("Names on the hub: one download a node, the cache first, offline")
def test_request_check_detects_requests_while_offline(
    cache: Path, fake_hub: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Negative control: HF_HUB_OFFLINE is read past."""
    monkeypatch.setattr(hub, "_is_offline", lambda: False)
    with pytest.raises(AssertionError, match=f"ask {COMMIT}"):
        test_cached_model_is_used_when_hub_is_unreachable(cache, fake_hub, monkeypatch, caplog)


def test_download_error_is_one_line(cache: Path, fake_hub: Any):
    """The hub's own are several."""
    fake_hub(MODEL).fault = ConnectionError("404 Client Error.\n\nRepository Not Found for url: x.\nPlease try again.")
    reason = "404 Client Error. Repository Not Found for url: x. Please try again: give a folder, or download it"
    assert f"; the download failed: ConnectionError: {reason}" in error_of("org/tiny")


def test_unfetchable_modules_are_an_error(cache: Path, fake_hub: Any):
    source = pooling_folder("dense")
    write_snapshot(cache, "org/tiny", source, is_wanted=lambda name: "/" not in name)
    there = fake_hub(source)
    there.fault = ConnectionError("no route to the hub")
    assert "lacks 1_Pooling/config.json; the download failed: ConnectionError" in error_of("org/tiny")


@pytest.mark.parametrize("path", ["../other", "/etc", "..", "a/b", "a\\b", 3, None, "*"])
def test_module_paths_are_fetched_only_inside_the_folder(tmp_path: Path, cache: Path, fake_hub: Any, path: Any):
    source = tmp_path / "source"
    shutil.copytree(MODEL, source)
    for inside in ("other", "onnx"):
        (source / inside).mkdir()
        for name in ("config.json", "model.safetensors"):
            (source / inside / name).write_text("{}")
    modules = [{"path": "", "type": "x.Transformer"}, {"path": path, "type": "x.Dense"}]
    (source / "modules.json").write_text(json.dumps(modules))
    there = fake_hub(source)
    if path == "*":
        # A plain name, of a folder that is not there.
        assert "lacks */config.json; the hub has no such file" in error_of("org/tiny")
    else:
        found = locate_model("org/tiny", None)
        with pytest.raises(ModelConfigError):
            read_model_files(found.folder)
    assert not any("/" in name for name in there.fetched)
