"""DeepSeek V4 in jobs: prompts that are found, drafts, blocks of all sizes, int8, adapters, plans of memory."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from allocated import peak_bytes
from compressed_checkpoints import CASES, compressed_folder, compressed_reference, hub_folder
from family_checks import (
    adapter_logits,
    check_adapters,
    check_entries,
    ids_and_logprobs,
    readings_of,
    without_each,
)
from family_mutants import entries
from hybrid_runs import HybridRun, run_rows
from our_model import load_model
from plain_models import new_model
from planted_drafts import planted
from reference_models import Oracle, random_prompt
from torch import Tensor

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import AdapterError, CacheMismatchError
from spmd_worker.model.layers import compressed_entries
from spmd_worker.model_config.families.compressed_rows import COMPRESSED_ROWS
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.worker.memory.estimate import activation_bytes, cache_spec, weights_bytes

ARCHITECTURE = "DeepseekV4ForCausalLM"
ROWS = [random_prompt(length, seed=5, vocab_size=96) for length in (1, 9, 40, 75)]
ROWS.append(ROWS[-1][:48] + ROWS[1])
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)
oracle = Oracle(compressed_reference, ROWS)
each_case = pytest.mark.parametrize("name", CASES)


def answers(name: str, rows: list[list[int]] = ROWS, **settings: Any) -> tuple[list[Any], Any]:
    """Ids and logprobs of rows, and the engine's counters."""
    with LLM(compressed_folder(name), **{"num_blocks": 120, "max_model_len": 128, **settings}) as llm:
        return ids_and_logprobs(llm, rows, GREEDY), llm.llm_engine.counters


@pytest.mark.stress
@each_case
def test_found_prompts_equal_what_is_computed_again(name: str, monkeypatch: pytest.MonkeyPatch):
    """Few blocks, which other rows had before, with other places of entries."""
    rows = [*ROWS, *ROWS[::-1]]

    def run() -> int:
        given = {"num_blocks": 30, "verify_hits": 1, "max_num_seqs": 3}
        with LLM(compressed_folder(name), max_model_len=128, **given) as llm:
            for _ in range(3):
                llm.generate(rows, GREEDY, use_tqdm=False)
            found: int = llm.llm_engine.counters.num_verified_hits
            return found

    assert run() > 3
    # Negative control: places without entries are left as they are.
    monkeypatch.setattr(compressed_entries, "clear", lambda entries, metadata: None)
    if name == "deepseek_v4":
        with pytest.raises(CacheMismatchError):
            run()


@pytest.mark.stress
@each_case
def test_blocks_and_chunks_of_any_size_give_equal_bits(name: str):
    alone = [answers(name, [row], enable_prefix_caching=False)[0][0] for row in ROWS]
    for block_size, num_blocks in ((2, 700), (4, 400), (8, 200), (32, 60), (64, 40)):
        settings = {"block_size": block_size, "num_blocks": num_blocks}
        assert answers(name, **settings)[0] == alone, block_size
        assert answers(name, max_num_batched_tokens=block_size + 3, max_num_seqs=5, **settings)[0] == alone, block_size


@pytest.mark.stress
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@each_case
def test_rows_that_hardly_fit_give_equal_bits(name: str, mode: str):
    """Rows are preempted again and again: there are hardly more blocks than the longest row needs."""
    alone = [answers(name, [row], enable_prefix_caching=False)[0][0] for row in ROWS]
    for block_size, num_blocks in ((4, 23), (16, 7)):
        few = {"num_blocks": num_blocks, "block_size": block_size, "preemption_mode": mode, "swap_space": 0.02}
        few |= {"max_model_len": 88}
        found, counters = answers(name, **few)
        assert found == alone
        assert counters.num_preemptions


@pytest.mark.stress
@each_case
def test_drafts_by_lookup_do_not_change_ids(name: str):
    """Some drafts are accepted, and groups of the others are computed again."""
    alone = [answers(name, [row])[0][0] for row in ROWS]

    def right(key: SequenceKey, num_outputs: int, most: int) -> list[int]:
        return list(alone[int(key.request_id)][0][num_outputs : num_outputs + most])

    drafts = {"method": "ngram", "num_speculative_tokens": 5}
    for block_size, kind in ((4, "chance"), (16, "right"), (16, "wrong")):
        with planted(right, kind):
            given = {"block_size": block_size, "num_blocks": 400, "speculative_config": drafts}
            found, counters = answers(name, **given)
        assert found == alone
        assert counters.num_drafted_tokens > 10
        assert (counters.num_accepted_tokens == 0) == (kind == "wrong")


def test_long_rows_give_blocks_back():
    """A row far longer than a window, with drafts and a prefix that is found, holds all blocks of entries and few
    others; the same bits as in one group, which holds all.
    """
    name, row = "deepseek_v4_groups", random_prompt(70, seed=3, vocab_size=96)
    rows, given = [row, [*row[:45], 7]], {"block_size": 4, "max_num_batched_tokens": 16}
    alone = answers(name, rows, window_groups=False, enable_prefix_caching=False, num_blocks=60, **given)[0]

    def right(key: SequenceKey, num_outputs: int, most: int) -> list[int]:
        return list(alone[int(key.request_id) % 2][0][num_outputs : num_outputs + most])

    given |= {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "num_blocks": 16}
    held: list[int] = []
    with planted(right, "chance"), LLM(compressed_folder(name), max_model_len=128, **given) as llm:
        engine, step = llm.llm_engine, llm.llm_engine.step

        def counted() -> Any:
            found = step()
            held.append(engine.scheduler.cache.num_used_blocks)
            return found

        engine.step = counted  # type: ignore[method-assign]  # of this engine alone
        assert [ids_and_logprobs(llm, [each], GREEDY)[0] for each in rows] == alone
        assert engine.counters.num_cached_prompt_tokens >= 40
        assert 0 < engine.counters.num_accepted_tokens < engine.counters.num_drafted_tokens
        assert engine.scheduler.cache.groups.num_groups == 8
    # 79 tokens are 20 blocks; of a window and a step of 16 tokens there are 7.
    assert 20 < max(held) <= 20 + 7 * 7


@pytest.mark.stress
def test_int8_projections_stay_near_transformers():
    model = load_model(compressed_folder("deepseek_v4"), quantization="int8")
    layer = model.model.layers[1]
    assert layer.self_attn.query_proj.weight.dtype == layer.self_attn.compressor.row_proj.weight.dtype == torch.int8
    assert layer.attn_hyper_connection.fn.dtype == layer.self_attn.o_a_proj.weight.dtype == torch.float32
    planned = weights_bytes(model.model_config, RankLayout(1), 0, "float32", "cpu", "int8")
    assert planned == sum(each.nbytes for each in model.parameters())
    logits, _ = run_rows([model], ROWS)
    # Other entries are chosen, and other experts.
    assert 1e-3 < oracle.worst_error("deepseek_v4", logits) < 1.0
    assert all(map(torch.equal, run_rows([model], ROWS, 7)[0], logits))


@pytest.mark.stress
def test_adapters_are_those_of_peft(tmp_path: Path):
    reference = partial(deepcopy, compressed_reference("deepseek_v4"))
    targets = ("q_a_proj", "q_b_proj", "kv_proj", "gate_proj", "o_b_proj", "up_proj", "down_proj")
    oracle.expected("deepseek_v4")
    made = partial(adapter_logits, compressed_folder("deepseek_v4"), reference)
    check_adapters(oracle, "deepseek_v4", *made(targets, tmp_path / "all", ROWS))
    with pytest.raises(AdapterError, match=r"o_a_proj.*merge the adapter with model.lora_merge"):
        made(("o_a_proj",), tmp_path / "groups", ROWS)


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        ("deepseek_v4_wide", 700),
        *[pytest.param("deepseek_v4", each, marks=pytest.mark.stress) for each in (64, 700)],
    ],
)
def test_steps_stay_below_the_planned_bytes(name: str, num_tokens: int):
    """The last tokens of a long row."""
    folder, num_keys = compressed_folder(name), 8_192
    config = replace(read_model_files(folder).model_config, max_position_embeddings=num_keys)
    run = HybridRun([load_model(folder, config)], [[3] * num_keys])
    run.sequences[0].num_computed_tokens = num_keys - num_tokens
    most = peak_bytes(lambda: run.step(None))
    planned = activation_bytes(config, RankLayout(1), 0, "float32", num_tokens, num_tokens)
    print(f"PLANNED {name} {num_tokens}: {most / planned:.2f}")
    assert 0.3 < most / planned < 1


def test_cache_has_the_planned_bytes():
    with LLM(compressed_folder("deepseek_v4"), num_blocks=12, max_model_len=96, block_size=8) as llm:
        engine = llm.llm_engine.executor.driver_worker.worker.running.caches.engine
        config = read_model_files(compressed_folder("deepseek_v4")).model_config
        assert engine.spec.block_bytes == cache_spec(config, RankLayout(1), 0, "float32", 8).block_bytes
        assert sum(each.nbytes for each in engine._tensors) == 12 * engine.spec.block_bytes


# ---- each entry of the row -----------------------------------------------------------------------------------------

UNSEEN = (
    *("models", "layers", "layer", "ropes", "names.ignored_prefixes", "names.aliases", "names.layer_aliases"),
    "rope.may_be_partial",
)
"""Entries without an effect on these logits but on pages, or without which nothing is read."""


def mutants() -> list[tuple[str, Family]]:
    """The row with one entry as Llama's row has it, and without one of its defaults."""
    row = COMPRESSED_ROWS[ARCHITECTURE]
    found = entries(row, Family(), *UNSEEN, "defaults", "names.parts") + without_each(row, "defaults", "names.parts")
    return [(what, mutant) for what, mutant in found if mutant.experts is not None]


def readings() -> list[Any]:
    """Of files that leave out nearly all keys; None for one that is rejected."""
    names = {"architectures": [ARCHITECTURE]}
    others = [{"attention_bias": True}, {"mlp_bias": True}, {"scoring_func": "sigmoid"}, {"norm_topk_prob": False}]
    return readings_of([names, *({**names, **each} for each in (*others, {"n_shared_experts": 2}))])


def our_logits(folder: Path) -> list[Tensor]:
    return run_rows([new_model(folder)], ROWS)[0]


@pytest.mark.stress
@pytest.mark.control("Models compute what transformers computes")
def test_comparison_detects_each_row_entry_set_to_llama(monkeypatch: pytest.MonkeyPatch):
    folders = {name: (compressed_folder(name), hub_folder(name)) for name in CASES}
    check_entries(monkeypatch, ARCHITECTURE, mutants(), readings, folders, our_logits, oracle.is_right)
