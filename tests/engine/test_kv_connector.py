"""Blocks outside the engine: the same answers bit for bit, on all ranks, whatever a rank finds. As a script: a rank."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import memory_connector
import pytest
import ranks
from encoder_models import encoder_folder
from safetensors.torch import load_file, save_file
from tools_main import tool
from waiting import wait_until

from kv_cache.connectors.block_files import BlockFiles
from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.schema import (
    CacheConfig,
    ExecutorConfig,
    JobConfig,
    ModelOptions,
    RunConfig,
    SamplingConfig,
)
from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.replica.lockstep.transfers import TransferBook

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
BEGINNING = "the quick brown fox jumps over the lazy dog and sleeps under the tree for a very long while " * 2
PROMPTS = [f"{BEGINNING}{index}" for index in range(4)]
NUM_BLOCKS = 11
"""Of 16 tokens, which all prompts have in common."""

FILES = "kv_cache.connectors.files:connect"
SHARED_MEMORY = "kv_cache.connectors.shared_memory:connect"
MEMORY = "memory_connector:MemoryConnector"

TP, PP, DP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}


def files_of(folder: Path) -> dict[str, Any]:
    return {"connector": FILES, "connector_options": {"folder": folder, "gib": 0.5}}


def open_llm(model: Path = MODEL, **options: Any) -> LLM:
    return LLM(model, **{"device": "cpu", "num_blocks": 64, "timeout_s": 120.0, **options})


def answers(llm: LLM, prompts: list[str] = PROMPTS, params: SamplingParams = GREEDY) -> list[Any]:
    return [
        [list(each.token_ids), [next(iter(entry.values())).logprob.hex() for entry in each.logprobs]]
        for output in llm.generate(prompts, params, use_tqdm=False)
        for each in output.outputs
    ]


def counts(llm: LLM) -> list[int]:
    counters = llm.llm_engine.counters
    return [counters.num_stored_blocks, counters.num_loaded_blocks]


def run(**options: Any) -> tuple[list[Any], list[int]]:
    with open_llm(**options) as llm:
        return answers(llm), counts(llm)


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


# Several ranks and engines.


def on_ranks(num_ranks: int, script: list[Any]) -> list[Any]:
    """Each rank's line, in no order."""
    words = [json.dumps(each, default=str) for each in script]
    done = ranks.run_forked([Path(__file__), *words], num_ranks, timeout_s=240)
    assert done.returncode == 0, done.output
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
    for first, second in on_ranks(2, ["twice", {**DP, **files_of(tmp_path)}]):
        # Either replica may have found what the other one had saved by then.
        assert (first[0], second) == (expected, [expected, [0, NUM_BLOCKS]])


@pytest.mark.guarantee("Ranks agree on every block from outside")
@pytest.mark.matrix
@pytest.mark.parametrize("damage", [pytest.param("delete", marks=pytest.mark.stress), "flip"])
def test_part_that_one_rank_cannot_load_is_computed(tmp_path: Path, damage: str):
    check_damaged_part(tmp_path, damage, "")


@pytest.mark.control("Ranks agree on every block from outside")
@pytest.mark.matrix
def test_ranks_that_believe_their_own_parts_give_other_answers(tmp_path: Path):
    """Negative control: a load counts as finished although it has failed on one rank."""
    with pytest.raises(AssertionError, match="assert"):
        check_damaged_part(tmp_path, "flip", "believe")


def check_damaged_part(folder: Path, damage: str, control: str) -> None:
    lines = on_ranks(2, ["damaged", {**TP, **files_of(folder)}, damage, control])
    (answered, _), (again, found) = lines[0]
    assert (again, found) == (answered, [NUM_BLOCKS, NUM_BLOCKS])
    assert lines[1] == lines[0]


def damage_on_rank(options: dict[str, Any], damage: str, control: str) -> None:
    """Rank 1's files are damaged after rank 0 has found them, which is when rank 1 opens them."""
    before, read, add = run(**options), BlockFiles.read, TransferBook.add

    def damaged(files: BlockFiles, name: bytes, num_bytes: int) -> bytearray | None:
        path = files.path(name)
        if path.exists() and damage == "delete":
            path.unlink()
        elif path.exists():
            flip_last(path)
        return read(files, name, num_bytes)

    if os.environ["RANK"] == "1":
        BlockFiles.read = damaged
    if control:
        TransferBook.add = lambda book, rank, numbers: add(book, rank, list(map(abs, numbers)))
    report(before, run(**options))


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [TP, *(pytest.param(each, marks=pytest.mark.stress) for each in ({}, PP))])
def test_one_engine_prefills_and_another_decodes(tmp_path: Path, layout: dict[str, int], expected: list[Any]):
    size = 2 if layout else 1
    lines = on_ranks(2 * size, ["pair", layout, str(tmp_path), f"test-{os.getpid()}"])
    (alone, _), (answered, found) = lines[0]
    assert (answered, found) == (alone, [0, NUM_BLOCKS])
    assert layout == TP or answered == expected
    assert lines == [lines[0]] * size
    assert not list(Path("/dev/shm").glob(f"spmd-kv-test-{os.getpid()}-*"))


def pair_on_rank(layout: dict[str, int], folder: Path, name: str) -> None:
    """Two engines over one world: the first ranks prefill, the others decode."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // 2
    is_producer = rank < size
    options = {"name": name, "role": "producer" if is_producer else "consumer", "gib": 0.05}
    llm_options = {**layout, "connector": SHARED_MEMORY, "connector_options": options}
    # Each engine is a program of its own.
    variables = {"RANK": rank % size, "LOCAL_RANK": rank % size, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    if is_producer:
        os.environ.update({key: str(value) for key, value in variables.items()})
        with open_llm(**llm_options) as llm:
            llm.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=False)
            assert counts(llm) == [NUM_BLOCKS, 0]
            (folder / f"prefilled.{rank}").touch()
            wait_until(lambda: all((folder / f"decoded.{other}").exists() for other in range(size)))
        return
    os.environ.update({key: str(value) for key, value in variables.items()})
    os.environ["MASTER_PORT"] = str(ranks.free_port()) if size == 1 else _shared_port(folder, rank % size)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    wait_until(lambda: all((folder / f"prefilled.{other}").exists() for other in range(size)))
    report(run(**layout), run(**llm_options))
    (folder / f"decoded.{rank % size}").touch()


def _shared_port(folder: Path, rank: int) -> str:
    path = folder / "port"
    if rank == 0:
        (folder / "port.new").write_text(str(ranks.free_port()))
        (folder / "port.new").rename(path)
    wait_until(path.exists)
    return path.read_text()


@pytest.mark.stress
@pytest.mark.matrix
def test_worker_processes_count_transfers_together(tmp_path: Path):
    options = {"distributed_executor_backend": "multiproc", **TP, **files_of(tmp_path)}
    answered, found = run(**options)
    assert found == [NUM_BLOCKS, 0]
    assert run(**options) == (answered, [0, NUM_BLOCKS])
    flip_last(sorted(tmp_path.glob("*/*/*.1.kv"))[0])
    assert run(**options) == (answered, [NUM_BLOCKS, NUM_BLOCKS])
    assert run(**options) == (answered, [0, NUM_BLOCKS])


def report(*results: tuple[list[Any], list[int]]) -> None:
    os.write(1, (json.dumps(results) + "\n").encode())


def on_a_rank(kind: str, options: dict[str, Any], *rest: str) -> None:
    if kind == "pair":
        pair_on_rank(options, Path(rest[0]), rest[1])
    elif kind == "damaged":
        damage_on_rank(options, *rest)
    else:
        report(run(**options), run(**options))


if __name__ == "__main__":
    on_a_rank(*map(json.loads, sys.argv[1:]))
