"""Sizing of recurrent states: numbers of sequences, snapshots and blocks follow the memory."""

from dataclasses import replace
from typing import Any

import pytest
from state_models import state_folder
from state_rows import SETTINGS

from kv_cache.cache_sizing import MemoryMeasurement
from kv_cache.state_sizing import StateNeed, size_states
from spmd_worker import LLM
from spmd_worker.base.config.schema import CacheConfig, ModelOptions, PlanConfig, RunConfig, SchedulerConfig
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.resolved import ResolvedRun, resolve_run
from spmd_worker.worker import start
from spmd_worker.worker.memory import plan_text
from spmd_worker.worker.memory.device import PreparedStep
from spmd_worker.worker.memory.plan import cache_spec_of, size_rank
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

MIB = 2**20
SLOT_BYTES, TOKEN_BYTES = 2 * 2 * 64 * 4, 2 * 2 * 2 * 16 * 4
"""Two layers of two inputs of 64 channels; two layers of two heads of 16. All in float32."""


def run(**cache: Any) -> ResolvedRun:
    model = ModelOptions(path=str(state_folder("lfm2")), dtype="float32", max_model_len=256)
    keys = ("max_num_seqs", "enable_chunked_prefill")
    scheduler = SchedulerConfig(**{key: cache.pop(key) for key in keys if key in cache})
    return resolve_run(RunConfig(model=model, scheduler=scheduler, cache=CacheConfig(**cache), device="cpu"), "cpu")


def opened(monkeypatch: pytest.MonkeyPatch, num_bytes: int, **settings: Any) -> LLM:
    """An engine on a machine that leaves so many bytes for states and blocks."""

    def measure_host(weights: int, activations: int, local_world_size: int) -> MemoryMeasurement:
        return MemoryMeasurement(int((num_bytes + weights) / 0.9) + 2, weights, 0, 0, "estimated")

    def profile_host(measurement: MemoryMeasurement, max_step: PreparedStep) -> MemoryMeasurement:
        """The largest step runs, in its own slot, and counts for nothing."""
        with max_step as compute:
            compute()
        return measurement

    monkeypatch.setattr(start, "measure_host", measure_host)
    monkeypatch.setattr(start, "profile_host", profile_host)
    given = {"num_blocks": None, "max_num_seqs": None, "num_state_snapshots": None}
    return LLM(state_folder("lfm2"), **{**SETTINGS, "max_num_batched_tokens": 2048, **given, **settings})


def test_spec_has_blocks_and_states_by_layer() -> None:
    spec = cache_spec_of(run(), 0)
    assert [layer is None for layer in spec.layers] == [layer is not None for layer in spec.states]
    assert (spec.slot_bytes, spec.block_bytes) == (SLOT_BYTES, 16 * TOKEN_BYTES)


def test_engine_takes_as_many_sequences_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 40 * (SLOT_BYTES + 2048 * TOKEN_BYTES) + 100
    with opened(monkeypatch, num_bytes) as llm:
        engine = llm.llm_engine
        assert engine.max_num_seqs == engine.scheduler.limits.max_num_seqs == 40
        assert engine.scheduler.state_slots.num_slots == 40 + 80
        # All that 40 sequences of 256 tokens can use.
        assert engine.scheduler.cache.num_blocks == 40 * 16


def test_blocks_get_what_the_states_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 100 * 16 * TOKEN_BYTES
    with opened(monkeypatch, num_bytes, max_num_seqs=30, num_state_snapshots=2) as llm:
        assert llm.llm_engine.scheduler.cache.num_blocks == (num_bytes - 32 * SLOT_BYTES) // (16 * TOKEN_BYTES)


def test_sequences_set_by_hand_are_refused_if_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 16 * 16 * TOKEN_BYTES + 12 * SLOT_BYTES
    words = "max_num_seqs=13 needs recurrent states of 13.0 KiB, 1.0 KiB a sequence, but .* lower it to at most 12, or"
    with pytest.raises(ConfigError, match=words):
        opened(monkeypatch, num_bytes, max_num_seqs=13)
    with opened(monkeypatch, num_bytes, max_num_seqs=12) as llm:
        assert (llm.llm_engine.max_num_seqs, llm.llm_engine.scheduler.state_slots.num_slots) == (12, 12)
        assert llm.llm_engine.scheduler.cache.num_blocks == 16


def test_plan_names_states_and_their_traffic() -> None:
    text = describe_plan(make_plan(run(num_blocks=64, max_num_seqs=8, num_state_snapshots=4)))
    assert (
        "states     8.0 KiB: 8 of 1.0 KiB (2 layers of 2 x 64 inputs), 4 snapshots 4.0 KiB; a state costs as much as 2 "
        "tokens"
    ) in text
    assert "traffic    a decode step of 8 sequences reads and writes 16.0 KiB of states beside " in text
    # 64 blocks of 8 KiB and 12 slots of 1 KiB.
    assert " 524.0 KiB" in text


def drafting(resolved: ResolvedRun, num_drafts: int) -> ResolvedRun:
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts)
    return replace(resolved, config=replace(resolved.config, speculative_config=speculation))


def test_plan_counts_inputs_of_drafts() -> None:
    """Three inputs of 64 channels in each of two layers, and copies of a step's in one."""
    plain = run(num_blocks=64, max_num_seqs=8, num_state_snapshots=4)
    text = describe_plan(make_plan(drafting(plain, 3)))
    assert (
        "states     20.0 KiB: 8 of 2.5 KiB (2 layers of 2 x 64 inputs, 3 x 64 inputs of drafts), 4 snapshots 10.0 KiB"
    ) in text
    specs = [cache_spec_of(each, 0) for each in (plain, drafting(plain, 3))]
    assert specs[1].slot_bytes - specs[0].slot_bytes == 2 * 3 * 64 * 4
    activations = [make_plan(each).shares[0].activation_bytes for each in (plain, drafting(plain, 3))]
    num_tokens = plain.config.scheduler.max_num_batched_tokens + 8 * 3
    assert activations[1] - activations[0] == 3 * 64 * num_tokens * 4


def test_plan_of_gpus_has_numbers_of_states() -> None:
    resolved = run()
    plan = make_plan(resolve_run(resolved.config, "cuda"))
    assert "states of 256, 512 snapshots" in describe_plan(plan)


def test_plan_says_what_does_not_fit() -> None:
    resolved = run(max_num_seqs=2048)
    plan = PlanConfig(enabled=True, memory_gib=0.25)
    text = describe_plan(make_plan(replace(resolved, config=replace(resolved.config, plan=plan))))
    assert "\nrejected   scheduler.max_num_seqs=2048 needs recurrent states of 2.0 MiB, 1.0 KiB a sequence" in text
    assert "\nblocks     none fit: " in text


def test_plan_of_gpus_says_where_states_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_text, "_GPU_GIB", (1, 24))
    text = describe_plan(make_plan(resolve_run(run(num_blocks=64).config, "cuda")))
    assert "  1 GiB          0 blocks: the recurrent states do not fit" not in text
    text = describe_plan(make_plan(resolve_run(run(max_num_seqs=2048).config, "cuda")))
    assert "  1 GiB          0 blocks: the recurrent states do not fit" in text
    assert " 24 GiB     32,768 blocks: 2,048 sequences, states of 2,048, 4,096 snapshots" in text


def test_unused_swap_space_leaves_room_for_states() -> None:
    """4 GiB are set aside by default, and no more is used than the sequences' blocks and states."""
    resolved = run(num_blocks=100)
    sizing = size_rank(resolved, 0, MemoryMeasurement(2**30, 0, 0, 0, "estimated"))
    assert (sizing.states.num_seqs, sizing.states.num_host_slots) == (256, 256)


def test_stage_without_states_keeps_others_swap_space() -> None:
    need = StateNeed(6, 6, None, has_snapshots=True, max_model_len=256)
    spec = cache_spec_of(run(), 0)
    stateless = replace(spec, states=(None,) * spec.num_layers)
    counts = [size_states(each, need, 2**30, swap_space_bytes=2**20).num_host_slots for each in (spec, stateless)]
    assert counts == [6, 6]
    assert not size_states(stateless, need, 2**30).num_host_slots


def test_blocks_must_end_where_states_are_kept() -> None:
    """96 is no power of two, so only sizes above the grid could miss it, and they are multiples."""
    assert run(block_size=256).config.cache.block_size == 256


def test_snapshots_without_states_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    run(enable_prefix_caching=False, num_state_snapshots=3)
    assert "cache.num_state_snapshots=3 has no effect: prefix caching is off" in caplog.text


def test_prompts_in_one_piece_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    said = "scheduler.enable_chunked_prefill=false computes a prompt in one piece, so it keeps no state inside"
    run()
    run(enable_chunked_prefill=False, enable_prefix_caching=False)
    assert said not in caplog.text
    run(enable_chunked_prefill=False)
    assert caplog.text.count(said) == 1
