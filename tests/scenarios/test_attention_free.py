"""Models without attention: their sequences have states and no blocks, and no length that memory bounds.

Each run checks queues, tables, pools and slots against each other after every step (SPMD_WORKER_CHECK).
"""

from typing import Any

import pytest
from mamba_checkpoints import mamba_folder
from state_models import alone, answers, state_folder
from state_rows import SETTINGS, answers_of, state_rows

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.schema import CacheConfig, ModelOptions, RunConfig
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.replica.scheduler.sequence_states import SequenceStates
from spmd_worker.resolved import ResolvedRun, resolve_run
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

pytestmark = pytest.mark.usefixtures("checks_after_every_step")

KIND = "mamba2"
OTHERS = (pytest.param("mamba1", marks=pytest.mark.stress), pytest.param("falcon_mamba", marks=pytest.mark.stress))
every_kind = pytest.mark.parametrize("kind", [KIND, *OTHERS])
WAYS: dict[str, dict[str, Any]] = {
    "chunks of 17 tokens": {"max_num_batched_tokens": 17},
    "three at a time": {"max_num_seqs": 3, "max_num_batched_tokens": 64},
    "blocks of 128": {"block_size": 128},
    "no prefix cache": {"enable_prefix_caching": False},
    "one snapshot": {"num_state_snapshots": 1},
    "ahead of ids": {"async_scheduling": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.mark.guarantee("A row's answer depends on the row alone")
@every_kind
@pytest.mark.parametrize("way", WAYS)
def test_any_schedule_has_the_bits_alone(kind: str, way: str) -> None:
    assert answers(kind, **WAYS[way])[0] == alone(kind)


@every_kind
def test_prefixes_are_found_by_snapshots_alone(kind: str) -> None:
    rows, params = state_rows(num_samples=2)
    with LLM(state_folder(kind), **SETTINGS) as llm:
        assert llm.llm_engine.scheduler.cache.num_blocks == 0
        first = answers_of(llm.generate(rows, params, use_tqdm=False))
        outputs = llm.generate(rows, params, use_tqdm=False)
        # Each row's last multiple of 64 below its length.
        assert [row.num_cached_tokens for row in outputs] == [0, 64, 128, 128, 64, 64]
        llm.sleep(level=1)
        llm.wake_up()
        woken = llm.generate(rows, params, use_tqdm=False)
        assert woken[2].num_cached_tokens < 128, "sleep empties the cache"
    assert first == answers_of(outputs) == answers_of(woken) == alone(kind, 2)


def cached_after_another(shared: int) -> int:
    """Tokens that a third prompt finds of those that two others had before it, one after the other."""
    head, sampling = [7 + index % 50 for index in range(shared)], SamplingParams(temperature=0, max_tokens=1)
    with LLM(mamba_folder(KIND), **{**SETTINGS, "max_model_len": 512}) as llm:
        for tail in range(3):
            row = {"prompt_token_ids": head + [60 + tail] * 90}
            (output,) = llm.generate([row], sampling, use_tqdm=False)
    return output.num_cached_tokens


def test_shared_beginnings_are_kept_where_rows_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row keeps the state where it leaves the first, though no block tells that they were alike."""
    assert cached_after_another(200) == 192
    monkeypatch.setattr(SequenceStates, "_see", lambda self, hashes: 0)
    assert cached_after_another(200) == 0, "control"


def resolved(**options: Any) -> ResolvedRun:
    model = ModelOptions(path=str(mamba_folder(KIND)), max_model_len=options.pop("max_model_len", None))
    return resolve_run(RunConfig(model=model, plan=True, device="cpu", **options), "cpu")


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"connector": "files", "connector_options": {"folder": "/tmp/none"}},
        "cache.connector=files is of blocks, and no",
    ),
    ({"host_tier_gib": 1.0}, "cache.host_tier_gib=1.0 is of blocks, and no layer of this model has attention"),
    ({"verify_hits": 3}, "cache.verify_hits=3 is of blocks"),
]


@pytest.mark.parametrize(("cache_options", "message"), REFUSED)
def test_settings_of_blocks_are_refused(cache_options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(cache=CacheConfig(**cache_options))


def test_drafts_by_a_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="method=mtp keeps keys of its drafts in blocks, and no layer of this model"):
        resolved(speculative_config=SpeculativeConfig("mtp"))


def test_numbers_of_blocks_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    found = resolved(cache=CacheConfig(num_blocks=7, swap_space_gib=2.0))
    assert found.config.cache == resolved(cache=CacheConfig(swap_space_gib=0.0)).config.cache
    assert "cache.num_blocks=7 has no effect: no layer of this model has attention" in caplog.text
    assert "cache.swap_space_gib=2 has no effect" in caplog.text


def test_plan_names_states_and_no_blocks() -> None:
    short, long = (make_plan(resolved(max_model_len=each)) for each in (100, 1_000_000))
    assert short.num_blocks == long.num_blocks == 0
    assert short.states == long.states, "memory does not depend on the length"
    assert long.error_result is None
    text = describe_plan(long)
    assert "blocks     no cache blocks, because no layer has attention" in text
    assert "sequences  256 of any length fit at once in each replica" in text
    assert "3 layers, hidden size 64, no attention" in text


def test_plan_names_channels_and_no_columns() -> None:
    model = ModelOptions(path=str(mamba_folder("mamba1")))
    text = describe_plan(make_plan(resolve_run(RunConfig(model=model, plan=True, device="cpu"), "cpu")))
    assert "3 layers of 128 channels of 12 float32" in " ".join(text.split())
    assert [line.split()[2:5] for line in text.splitlines() if line.startswith("0 ")] == [["-", "-", "-"]]


def test_model_config_of_engine_has_no_heads() -> None:
    with LLM(mamba_folder(KIND), **SETTINGS) as llm, LLM(mamba_folder("bamba"), **SETTINGS) as other:
        found = llm.llm_engine.model_config
        assert found.is_attention_free
        assert not other.llm_engine.model_config.is_attention_free
        assert found.get_num_kv_heads() == found.get_head_size() == found.get_num_attention_heads() == 0
        assert llm.llm_engine.executor.determine_num_available_blocks() == (0, 0)
