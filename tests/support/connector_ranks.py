"""Engines with a connector, alone and on ranks: prompts with a common beginning, their answers and counts.

As a script it is one rank: `twice`, `damaged` or `pair`, with arguments as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import ranks
from waiting import wait_until

from kv_cache.connectors.block_files import BlockFiles
from spmd_worker import LLM, SamplingParams
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


def pair_on_rank(layout: dict[str, int], folder: Path, name: str) -> None:
    """Two engines over one world: the first ranks prefill, the others decode."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // 2
    is_producer = rank < size
    options = {"name": name, "role": "producer" if is_producer else "consumer", "gib": 0.01}
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
