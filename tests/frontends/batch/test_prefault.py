from pathlib import Path

import pytest
from cache_specs import uniform_spec

from kv_cache import host_reserve
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import CacheConfig, JobConfig, RunConfig, SchedulerConfig
from spmd_worker.frontends.batch.prefault import estimate_tokens, prefault
from spmd_worker.worker.memory import host

SPEC = uniform_spec(num_layers=2, num_kv_heads=2, head_size=64, dtype_bytes=4, block_size=16)
BLOCK_BYTES = 2 * 2 * 2 * 64 * 4 * 16


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    reserve = host_reserve.offered()
    if reserve is not None:
        reserve.take(0)
    host_reserve.offer(None)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_bytes(b"x" * 64_000)
    return tmp_path / "rows.jsonl"


def test_token_count_is_guessed_from_input_size(rows: Path):
    assert estimate_tokens([rows], shares_prefixes=True) == 16_000
    assert estimate_tokens([rows, rows], shares_prefixes=True) == 32_000
    assert estimate_tokens([rows.rename(rows.with_suffix(".gz"))], shares_prefixes=True) == 80_000


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\n\n", b"no end", b"{}\n"])
def test_input_without_comparable_lines_is_guessed_from_size(tmp_path: Path, content: bytes):
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert estimate_tokens([tmp_path / "rows.jsonl"], shares_prefixes=True) == len(content) // 4


def test_common_prefixes_count_once_when_blocks_are_shared(tmp_path: Path):
    """Ids before the prompts differ; among 100 rows are two beginnings, 4,000 and 1,000 bytes long."""
    rows = tmp_path / "rows.jsonl"
    prompts = ["a" * 4000 if index % 2 else "b" * 1000 for index in range(100)]
    lines = [f'{{"custom_id": "row-{index}", "prompt": "{text} {index}"}}' for index, text in enumerate(prompts)]
    rows.write_text("\n".join(lines) + "\n")
    whole = estimate_tokens([rows], shares_prefixes=False)
    assert whole == rows.stat().st_size // 4
    assert 0.01 * whole < estimate_tokens([rows], shares_prefixes=True) < 0.05 * whole


CONFIGS = {
    "all tokens": (RunConfig(), 1000),
    "replicas share them": (RunConfig(parallel=ParallelConfig(data_parallel_size=2)), 500),
    "shards share them": (RunConfig(job=JobConfig(shard="1/4")), 250),
    "so many sequences": (RunConfig(scheduler=SchedulerConfig(max_num_seqs=10)), 10 * 16),
    "so many blocks": (RunConfig(cache=CacheConfig(num_blocks=7)), 7),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_prefault_covers_what_the_job_can_use(rows: Path, name: str):
    config, num_blocks = CONFIGS[name]
    assert prefault(config, SPEC, [rows], 256, 1) == num_blocks * BLOCK_BYTES
    assert host_reserve.offered() is not None


def test_prefault_takes_only_part_of_free_memory(rows: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 8_000_000)
    assert prefault(RunConfig(), SPEC, [rows], 256, 1) == 1_000_000
    assert prefault(RunConfig(), SPEC, [rows], 256, 4) == 250_000


def test_prefault_takes_nothing_when_system_cannot_allocate(rows: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("spmd_worker.frontends.batch.prefault.HostReserve", refuse)
    assert prefault(RunConfig(), SPEC, [rows], 256, 1) == 0
    assert host_reserve.offered() is None
