"""Models with recurrent states: whatever happens to a row beside others, its bits are those of the row alone.

Each run checks queues, tables, pools and slots against each other after every step (SPMD_WORKER_CHECK).
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from state_models import alone, answers, state_folder
from state_rows import SETTINGS, answers_of, state_rows

from kv_cache.layer_states import LayerStates
from kv_cache.state_engine import StateEngine
from kv_cache.state_ops import StateOps
from spmd_worker import LLM
from spmd_worker.base.errors import AdapterError, ConfigError
from spmd_worker.model.adapters.prompt_adapter import keys_values_for
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks.topology import complete_model

pytestmark = pytest.mark.usefixtures("checks_after_every_step")

KIND = "lfm2"
OTHERS = ("lfm2_moe", "lfm3", "qwen3_5", "olmo_hybrid", "nemotron", "granite", "falcon", "kimi_linear", "jamba")
every_kind = pytest.mark.parametrize("kind", [KIND, *(pytest.param(kind, marks=pytest.mark.stress) for kind in OTHERS)])

WAYS: dict[str, dict[str, Any]] = {
    "chunks of 17 tokens": {"max_num_batched_tokens": 17},
    "three at a time": {"max_num_seqs": 3, "max_num_batched_tokens": 64},
    "blocks of 128": {"block_size": 128, "num_blocks": 20},
    "no prefix cache": {"enable_prefix_caching": False},
    "no snapshots": {"num_state_snapshots": 0},
    "one snapshot": {"num_state_snapshots": 1},
    "ahead of ids": {"async_scheduling": True},
}
TINY = {"num_blocks": 17, "max_num_seqs": 6}
PREEMPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {**TINY, "preemption_mode": "recompute"},
    "swap": {**TINY, "preemption_mode": "swap", "swap_space": 1.0},
    "swap, no prefix cache": {**TINY, "preemption_mode": "swap", "swap_space": 1.0, "enable_prefix_caching": False},
}


@every_kind
def test_rows_together_have_the_bits_alone(kind: str) -> None:
    """The second time they begin from snapshots."""
    rows, params = state_rows()
    with LLM(state_folder(kind), **SETTINGS) as llm:
        first = answers_of(llm.generate(rows, params, use_tqdm=False))
        assert llm.llm_engine.counters.num_snapshots >= 3
        hits = llm.llm_engine.counters.num_snapshot_hits
        outputs = llm.generate(rows, params, use_tqdm=False)
        assert llm.llm_engine.counters.num_snapshot_hits >= hits + 4
        # Each row's last multiple of 64 below its length.
        assert [row.num_cached_tokens for row in outputs] == [0, 64, 128, 128, 64, 64]
    assert first == answers_of(outputs) == alone(kind)


@every_kind
@pytest.mark.parametrize("way", WAYS)
def test_any_schedule_has_the_same_bits(kind: str, way: str) -> None:
    assert answers(kind, **WAYS[way])[0] == alone(kind)


@pytest.mark.gate("swap-lfm2")
@every_kind
@pytest.mark.parametrize("way", PREEMPTIONS)
def test_preempted_rows_have_the_same_bits(kind: str, way: str) -> None:
    found, counters = answers(kind, 4, **PREEMPTIONS[way])
    assert counters.num_preemptions > 0
    assert (counters.num_swapped_in > 0) == ("swap" in way)
    assert found == alone(kind, 4)


class ForgetsCopies(StateEngine):
    def execute(self, state_ops: StateOps) -> None:
        super().execute(StateOps(state_ops.swap_in, state_ops.swap_out))


class ForgetsSwaps(StateEngine):
    def execute(self, state_ops: StateOps) -> None:
        super().execute(StateOps(copy=state_ops.copy))


class ForgetsTails(StateEngine):
    """Moves the states of all layers and the tails of none."""

    def execute(self, state_ops: StateOps) -> None:
        tails = [layer.tail.clone() for layer in self.layers if isinstance(layer, LayerStates)]
        super().execute(state_ops)
        for layer, tail in zip([each for each in self.layers if each is not None], tails, strict=True):
            layer.tail.copy_(tail)


@pytest.mark.gate("ForgetsSwaps")
@pytest.mark.parametrize("broken", [ForgetsCopies, ForgetsSwaps, ForgetsTails])
def test_lost_move_of_a_state_shows(broken: type[StateEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: forks are copies, and swapped rows come back."""
    # Kept for later tests: computed before a move is lost.
    expected = alone(KIND, 4)
    monkeypatch.setattr("spmd_worker.worker.loaded_model.StateEngine", broken)
    assert answers(KIND, 4, **PREEMPTIONS["swap"])[0] != expected


def test_aborted_row_changes_no_other() -> None:
    rows, params = state_rows()
    with LLM(state_folder(KIND), **{**SETTINGS, "max_num_batched_tokens": 40, "max_num_seqs": 4}) as llm:
        engine = llm.llm_engine
        for index, (row, sampling) in enumerate(zip(rows, params, strict=True)):
            engine.add_request(str(index), row, sampling)
        outputs, num_steps = {}, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
            num_steps += 1
            if num_steps == 5:
                engine.abort_request(["1", "4"])
        assert engine.scheduler.state_slots.num_used_slots == 0
    left = [index for index in range(len(rows)) if index not in (1, 4)]
    assert answers_of([outputs[str(index)] for index in left]) == [alone(KIND)[index] for index in left]


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.stress)])
def test_states_sleep_and_wake_up(level: int) -> None:
    rows, params = state_rows()
    with LLM(state_folder(KIND), **SETTINGS) as llm:
        worker = llm.llm_engine.executor.driver_worker.worker
        assert answers_of(llm.generate(rows, params, use_tqdm=False)) == alone(KIND)
        llm.sleep(level)
        with pytest.raises(AssertionError, match="not allocated"):
            _ = worker.running.caches.engine.states.layers
        llm.wake_up()
        if level == 2:
            llm.collective_rpc("reload_weights")
        assert not any(each.any() for each in worker.running.caches.engine.states.tensors)
        assert answers_of(llm.generate(rows, params, use_tqdm=False)) == alone(KIND)


def test_rows_of_embeddings_have_the_bits_of_ids() -> None:
    rows, params = state_rows()
    folder = state_folder(KIND)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    given = [{"prompt_embeds": table[row["prompt_token_ids"]]} if index % 2 else row for index, row in enumerate(rows)]
    with LLM(folder, **{**SETTINGS, "max_num_batched_tokens": 50}) as llm:
        for _ in range(2):
            assert answers_of(llm.generate(given, params, use_tqdm=False)) == alone(KIND)
        assert llm.llm_engine.counters.num_snapshot_hits > 4


@pytest.mark.stress
def test_states_in_a_process_of_their_own() -> None:
    settings = {"distributed_executor_backend": "mp", **PREEMPTIONS["swap"]}
    assert answers(KIND, 4, **settings)[0] == alone(KIND, 4)


@every_kind
def test_pooled_rows_ignore_the_batch(kind: str) -> None:
    """Their prompts are cut, and begin from snapshots the second time."""
    rows, _ = state_rows()
    with LLM(state_folder(kind), runner="pooling", **{**SETTINGS, "max_num_batched_tokens": 50}) as llm:
        together = [[output.outputs.data for output in llm.encode(rows, use_tqdm=False)] for _ in range(2)]
        assert llm.llm_engine.counters.num_snapshot_hits > 0
    with LLM(state_folder(kind), runner="pooling", **{**SETTINGS, "enable_prefix_caching": False}) as llm:
        apart = [llm.encode([row], use_tqdm=False)[0].outputs.data for row in rows]
    assert together == [apart, apart]


def test_new_weights_find_no_old_states() -> None:
    rows, params = state_rows()
    with LLM(state_folder(KIND), **SETTINGS) as llm:
        llm.generate(rows, params, use_tqdm=False)
        hits = llm.llm_engine.counters.num_snapshot_hits
        llm.reset_prefix_cache()
        assert answers_of(llm.generate(rows[1:2], params[1:2], use_tqdm=False)) == alone(KIND)[1:2]
        assert llm.llm_engine.counters.num_snapshot_hits == hits


def test_bytes_of_the_plan_are_allocated() -> None:
    with LLM(state_folder(KIND), **{**SETTINGS, "num_state_snapshots": 3, "swap_space": 0.001}) as llm:
        worker = llm.llm_engine.executor.driver_worker.worker
        spec, engine = worker.get_kv_cache_spec(), worker.running.caches.engine
        sizing = worker.sizing.states
        assert (sizing.num_seqs, sizing.num_snapshots) == (8, 3)
        blocks = sum(each.nbytes for each in engine.tensors)
        states = sum(each.nbytes for each in engine.states.tensors)
        assert blocks == 160 * spec.block_bytes
        assert states == 11 * spec.slot_bytes == sizing.device_bytes
        assert worker.running.caches.num_device_bytes == blocks + states
        assert engine.states.num_host_bytes == sizing.host_bytes > 0
        assert llm.llm_engine.scheduler.state_slots.num_slots == 11


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_size": 256, "num_blocks": 10}, None),
        ({"max_num_seqs": 10**8, "max_num_batched_tokens": 10**8}, r"max_num_seqs=100000000 is too large"),
        ({"num_state_snapshots": 10**9}, r"num_state_snapshots=1000000000 is too large.* lower it"),
    ],
)
def test_settings_that_states_do_not_fit_are_refused(settings: dict[str, Any], words: str | None) -> None:
    if words is None:
        answers(KIND, **settings)
        return
    with pytest.raises(ConfigError, match=words):
        LLM(state_folder(KIND), **{**SETTINGS, **settings})


def test_prefix_tuning_is_refused_with_states() -> None:
    model_config, adapter = read_model_files(state_folder(KIND)).model_config, SimpleNamespace(subject="adapter a")
    with pytest.raises(AdapterError, match="adapter a: keys and values of virtual tokens have no recurrent state"):
        keys_values_for(adapter, model_config, torch.float32, complete_model(model_config), (0, 1))
