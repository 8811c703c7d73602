"""Blocks outside the engine: the same answers bit for bit, on all ranks, whatever a rank finds."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import connector_ranks
import memory_connector
import pytest
import ranks
from connector_ranks import (
    DP,
    FILES,
    MEMORY,
    MODEL,
    NUM_BLOCKS,
    PP,
    PROMPTS,
    SHARED_MEMORY,
    TP,
    answers,
    counts,
    files_of,
    flip_last,
    open_llm,
    run,
)
from cut_jobs import Ended, end_after
from encoder_models import encoder_folder
from safetensors.torch import load_file, save_file
from tools_main import tool

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.schema import (
    CacheConfig,
    ExecutorConfig,
    JobConfig,
    ModelOptions,
    PlanConfig,
    RunConfig,
    SamplingConfig,
)
from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.resolved import resolve_run


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of weights are not kept in the user's folder; kernels are, as ranks would compile them in each test."""
    user, own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), tmp_path / "user's cache"
    (own / "spmd-worker").mkdir(parents=True)
    (own / "spmd-worker" / "kernels").symlink_to(user / "spmd-worker" / "kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return run()[0]


@pytest.fixture
def user_memory() -> Iterator[None]:
    memory_connector.BLOCKS.clear()
    yield
    memory_connector.BLOCKS.clear()


# Files, in one process.


def test_second_engine_loads_what_the_first_computed(tmp_path: Path, expected: list[Any]):
    assert run(**files_of(tmp_path)) == (expected, [NUM_BLOCKS, 0])
    assert run(**files_of(tmp_path)) == (expected, [0, NUM_BLOCKS])


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_rows_answer_the_same(tmp_path: Path, expected: list[Any], mode: str):
    sizes = {
        "num_blocks": 17,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 4,
        "max_model_len": 256,
        "swap_space": 0.01,
    }
    others, long = (
        [f"copy {letter} =" for letter in "abcdef"],
        SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=1),
    )
    with open_llm(**sizes, preemption_mode=mode, **files_of(tmp_path)) as llm:
        assert answers(llm) == expected
        first = answers(llm, others, long)
        assert answers(llm) == expected
        assert llm.llm_engine.counters.num_preemptions > 0
        assert counts(llm)[1] == NUM_BLOCKS
    with open_llm(**files_of(tmp_path)) as llm:
        assert answers(llm, others, long) == first


def test_connector_of_a_user_is_found_by_name(user_memory: None, expected: list[Any]):
    assert run(connector=MEMORY) == (expected, [NUM_BLOCKS, 0])
    assert run(connector=MEMORY) == (expected, [0, NUM_BLOCKS])
    assert run(connector=MEMORY, dtype="bfloat16")[1] == [NUM_BLOCKS, 0], "other bytes have other names"


def test_other_weights_in_one_folder_find_nothing(tmp_path: Path):
    """Same sizes, same time of change, same config: only the contents differ."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    run(model=model, **files_of(tmp_path / "kv"))
    weights = model / "model.safetensors"
    status, tensors = weights.stat(), load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
    save_file(tensors, weights, metadata={"format": "pt"})
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    answered = run(model=model)[0]
    assert run(model=model, **files_of(tmp_path / "kv")) == (answered, [NUM_BLOCKS, 0])
    assert run(model=model, **files_of(tmp_path / "kv")) == (answered, [0, NUM_BLOCKS])


def test_updated_weights_have_names_of_their_own(user_memory: None, expected: list[Any]):
    tensors = {name: 0.5 * tensor for name, tensor in load_file(MODEL / "model.safetensors").items()}
    with open_llm(connector=MEMORY) as llm:
        assert answers(llm) == expected
        llm.update_weights(tensors.items())
        changed = answers(llm)
        assert counts(llm) == [2 * NUM_BLOCKS, 0]
    with open_llm(connector=MEMORY) as llm:
        assert (answers(llm), counts(llm)) == (expected, [0, NUM_BLOCKS])
        llm.update_weights(tensors.items())
        assert (answers(llm), counts(llm)) == (changed, [0, 2 * NUM_BLOCKS])


def test_sleep_keeps_the_connector(user_memory: None, expected: list[Any]):
    with open_llm(connector=MEMORY) as llm:
        answers(llm)
        llm.sleep()
        llm.wake_up()
        assert (answers(llm), counts(llm)) == (expected, [NUM_BLOCKS, NUM_BLOCKS])
        llm.sleep()
        llm.wake_up()
        # A block that has gone outside is known to be gone before a load is planned.
        memory_connector.BLOCKS.pop(list(memory_connector.BLOCKS)[3])
        assert (answers(llm), counts(llm)) == (expected, [2 * NUM_BLOCKS - 3, NUM_BLOCKS + 3])


@pytest.mark.parametrize(
    "change",
    [
        lambda llm: llm.apply_model(lambda model: model.get_parameter("model.norm.weight").mul_(2)),
        lambda llm: llm.set_weight_version(5),
        lambda llm: llm.reset_prefix_cache(),
    ],
)
def test_uncertain_weights_turn_the_connector_off(
    user_memory: None, change: Callable[[LLM], object], caplog: pytest.LogCaptureFixture
):
    """The name of a block says nothing of weights that code of the user's has changed."""
    with open_llm(connector=MEMORY) as llm:
        answers(llm)
        change(llm)
        answers(llm)
        answers(llm)
        assert counts(llm) == [NUM_BLOCKS, 0]
    assert caplog.text.count("is off until this engine ends") == 1


# Refusals.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"connector": "files"},
            r"connector=files: is not the name of a function: write it as package\.module:factory",
        ),
        ({"connector": "no.such:thing"}, "cannot be imported: No module named 'no'"),
        ({"connector": "memory_connector:nothing"}, "memory_connector has no function nothing"),
        ({"connector": MEMORY, "connector_options": {"a": 1}}, r"it takes no options: \{'a': '1'\}"),
        ({"connector": FILES}, "the option folder is missing"),
        ({"connector": MEMORY, "enable_prefix_caching": False}, "enable_prefix_caching=False makes none"),
        ({"connector": MEMORY, "host_tier_gib": 1}, "both take evicted prefix blocks"),
        ({"connector_options": {"a": 1}}, "given without connector"),
        ({"connector": MEMORY, "connector_options": {"a": [1]}}, "must be texts by name, such as"),
        (
            {"connector": SHARED_MEMORY, "connector_options": {"name": "none", "role": "consumer"}},
            "there is no segment",
        ),
    ],
)
def test_unusable_connector_is_named(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        open_llm(**options)


@pytest.mark.parametrize(
    ("connector", "options", "words"),
    [
        ("no.such:thing", {}, "cannot be imported: No module named 'no': install it, or add its folder to PYTHONPATH"),
        ("broken_connector:connect", {}, "cannot be imported: ZeroDivisionError: .* python -c 'import broken_conn"),
        ("memory_connector:nothing", {}, "memory_connector has no function nothing"),
        (FILES, {"folde": "kv"}, "it has no option 'folde': cache.connector_options takes folder"),
        (FILES, {"folder": f"{__file__}/kv"}, r"folder=.*/kv cannot be written \(.*test_kv_connector.py is no folder"),
        (FILES, {"folder": f"/{'a' * 300}"}, ".*File name too long: .*: give cache.connector_options that can"),
        (FILES, {"folder": "kv", "gib": "much"}, "gib='much' must be a number of GiB above 0, such as 20"),
        (SHARED_MEMORY, {"name": "a", "role": "both"}, "role='both' is not one of producer, consumer"),
    ],
)
def test_connector_is_checked_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connector: str, options: dict[str, str], words: str
):
    """Names and options are known before weights, which were loaded first."""
    (tmp_path / "broken_connector.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    cache = CacheConfig(connector=connector, connector_options=options or None)
    config = RunConfig(model=ModelOptions(path=str(MODEL)), cache=cache)
    with pytest.raises(ConfigError, match=rf"cache\.connector={connector}: {words}"):
        resolve_run(config, "cpu")
    # The ranks of a plan may run elsewhere.
    resolve_run(replace(config, plan=PlanConfig(enabled=True)), "cpu")


def test_connector_needs_digests():
    with pytest.raises(ConfigError, match=r"cache\.connector=a:b cannot run with executor\.digest_every=0"):
        RunConfig(cache=CacheConfig(connector="a:b"), executor=ExecutorConfig(digest_every=0))


def test_encoder_needs_no_connector():
    """It keeps no cache, so keys of the cache have no effect."""
    with open_llm(encoder_folder("bert_labels"), connector=MEMORY, num_blocks=None) as llm:
        assert len(llm.classify(["copy q ="])) == 1
        assert llm.llm_engine.outside is None


# A job, and its log.


def job(folder: Path, name: str) -> dict[str, Any]:
    config = RunConfig(
        model=ModelOptions(path=str(MODEL)),
        cache=CacheConfig(num_blocks=64, connector=FILES, connector_options={"folder": str(folder / "kv")}),
        sampling=SamplingConfig(max_tokens=4, temperature=0.0),
        job=JobConfig(
            input=str(folder / "rows.jsonl"),
            output=str(folder / f"{name}.jsonl"),
            run_dir=str(folder / name),
            step_log=True,
        ),
        device="cpu",
    )
    run_job(config, RankEnvironment())
    return json.loads((folder / name / "metrics.json").read_text())


def test_second_job_finds_prefix_blocks_in_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    first, second = job(tmp_path, "first"), job(tmp_path, "second")
    assert [first[key] for key in ("tier_stored_blocks", "tier_loaded_blocks")] == [NUM_BLOCKS, 0]
    assert [second[key] for key in ("tier_stored_blocks", "tier_loaded_blocks")] == [0, NUM_BLOCKS]
    assert second["cached_prompt_tokens"] == 4 * NUM_BLOCKS * 16 == first["cached_prompt_tokens"] + NUM_BLOCKS * 16
    assert (tmp_path / "first.jsonl").read_bytes() == (tmp_path / "second.jsonl").read_bytes()
    for name, words in (("first", "digests equal"), ("second", "digests equal")):
        code, out, err = tool("replay", capsys)(tmp_path / name)
        assert (code, words in out) == (0, True), out + err
    code, out, err = tool("replay", capsys)(tmp_path / "second", "--with-model")
    assert (code, "loads blocks by cache.connector" in err) == (2, True), out + err


def test_resumed_job_has_the_bytes_of_an_unbroken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    job(tmp_path, "unbroken")
    with monkeypatch.context() as killed:
        end_after(killed, 2)
        with pytest.raises(Ended):
            job(tmp_path, "broken")
    metrics = job(tmp_path, "broken")
    assert (metrics["resumed_rows"], metrics["tier_loaded_blocks"]) == (2, NUM_BLOCKS)
    assert (tmp_path / "broken.jsonl").read_bytes() == (tmp_path / "unbroken.jsonl").read_bytes()


# Several ranks and engines.


def on_ranks(num_ranks: int, script: list[Any]) -> list[Any]:
    """Each rank's line, in no order."""
    words = [json.dumps(each, default=str) for each in script]
    done = ranks.run_forked([connector_ranks.__file__, *words], num_ranks, timeout_s=240).checked()
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [TP, pytest.param(PP, marks=pytest.mark.stress)])
def test_ranks_find_and_load_alike(tmp_path: Path, layout: dict[str, int], expected: list[Any]):
    lines = on_ranks(2, ["twice", {**layout, **files_of(tmp_path)}])
    answered = lines[0][0][0]
    assert layout == TP or answered == expected
    assert lines == [[[answered, [NUM_BLOCKS, 0]], [answered, [0, NUM_BLOCKS]]]] * 2


@pytest.mark.stress
@pytest.mark.matrix
def test_replicas_share_the_blocks(tmp_path: Path, expected: list[Any]):
    lines = on_ranks(2, ["twice", {**DP, **files_of(tmp_path)}])
    assert [answered for line in lines for answered, _ in line] == [expected] * 4
    # Either replica may have found what the other one had saved by then, and either may have answered no prompt.
    counts = [again for _, (_, again) in lines]
    assert [0, NUM_BLOCKS] in counts
    assert all(each in ([0, NUM_BLOCKS], [0, 0]) for each in counts)


@pytest.mark.guarantee("Ranks agree on every block from outside")
@pytest.mark.matrix
@pytest.mark.parametrize("damage", [pytest.param("delete", marks=pytest.mark.stress), "flip"])
def test_part_that_one_rank_cannot_load_is_computed(tmp_path: Path, damage: str):
    (answered, _), (again, found) = damaged_part(tmp_path, damage)
    assert (again, found) == (answered, [NUM_BLOCKS, 0])


@pytest.mark.stress
@pytest.mark.control("Ranks agree on every block from outside")
@pytest.mark.matrix
def test_ranks_that_believe_their_own_parts_give_other_answers(tmp_path: Path):
    """Negative control: a load counts as finished although it has failed on one rank."""
    (answered, _), (again, found) = damaged_part(tmp_path, "flip", "believe")
    assert again != answered
    assert found == [0, NUM_BLOCKS]


def damaged_part(folder: Path, damage: str, control: str = "") -> list[Any]:
    """Answers and counts, before and after rank 1's parts are damaged: the same on both ranks."""
    lines = on_ranks(2, ["damaged", {**TP, **files_of(folder)}, damage, control])
    assert lines[1] == lines[0]
    return lines[0]


@pytest.mark.gate("layout0")
@pytest.mark.matrix
@pytest.mark.parametrize("layout", [{}, TP, pytest.param(PP, marks=pytest.mark.stress)])
def test_one_engine_prefills_and_another_decodes(tmp_path: Path, layout: dict[str, int], expected: list[Any]):
    size = 2 if layout else 1
    lines = on_ranks(2 * size, ["pair", layout, str(tmp_path), f"test-{os.getpid()}"])
    (alone, _), (answered, found) = lines[0]
    assert (answered, found) == (alone, [0, NUM_BLOCKS])
    assert layout == TP or answered == expected
    assert lines == [lines[0]] * size
    assert not list(Path("/dev/shm").glob(f"spmd-kv-test-{os.getpid()}-*"))


@pytest.mark.stress
@pytest.mark.matrix
def test_worker_processes_count_transfers_together(tmp_path: Path):
    options = {"distributed_executor_backend": "multiproc", **TP, **files_of(tmp_path)}
    answered, found = run(**options)
    assert found == [NUM_BLOCKS, 0]
    assert run(**options) == (answered, [0, NUM_BLOCKS])
    flip_last(sorted(tmp_path.glob("*/*/*.1.kv"))[0])
    assert run(**options) == (answered, [NUM_BLOCKS, 0])
    assert run(**options) == (answered, [0, NUM_BLOCKS])
