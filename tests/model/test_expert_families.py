"""Every family with experts against transformers: logits, expert layouts, stages, chunks, selection of experts.

Float32, 1e-4 of the largest logit. A row is read from two files: with every key, and thinned as the hub's are.
"""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_checkpoints import CASES, expert_folder, expert_reference, open_experts, thinned_expert_folder
from expert_models import (
    LINEAR,
    NUM_EXPERTS,
    PLACED,
    PROMPTS,
    ROUND_ROBIN,
    SECOND,
    TOLERANCE,
    changed,
    each_and_all,
    expected,
    new_model,
    worst_error,
)
from family_checks import ids_and_logprobs, joined_logits
from our_model import load_model, prompt_logits
from reference_models import random_prompt, relative_error, their_logits
from thread_groups import on_ranks
from torch import Tensor
from two_stages import TwoStages

from spmd_worker import LLM, SamplingParams
from spmd_worker.model.layers.experts import SparseFeedForward, select_experts
from spmd_worker.model_config.layer_config import ExpertsConfig
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ops.kernels.cpu.native import cpu_kernels
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.expert_layout import ExpertLayout


@pytest.mark.gate(
    "*-all ways",
    "granite_moe_swa_plain",
    "granite_moe_shared",
    "qwen3_vl_moe",
    "hunyuan_moe",
    "mixtral",
    "phimoe",
    "flex_olmo",
    "exaone_moe",
    "minimax_m3",
    "minimax_m2",
    "dots1",
    "step3p7",
    "solar_open",
    "hy_v3",
    "ernie_moe",
    "qwen2_moe",
    "olmoe",
    "afmoe",
    "mellum",
    "dbrx",
    "laguna",
    "cohere2_moe",
    "mimo_v2_flash",
)
@each_and_all("qwen3_moe", "gpt_oss", "glm4_moe", later=("glm4v_moe",))
def test_logits_equal_transformers_with_full_and_thin_files(name: str, in_all_ways: bool):
    model = load_model(expert_folder(name))
    whole = prompt_logits(model, PROMPTS)
    assert worst_error(name, whole) < TOLERANCE
    for chunk in (1, 7, 16) if in_all_ways else (7,):
        assert all(map(torch.equal, prompt_logits(model, PROMPTS, chunk), whole)), chunk
    # In all ways, or the one that is the shortest step of decoding.
    for prompt, logits in list(zip(PROMPTS, whole, strict=True))[: None if in_all_ways else 1]:
        assert torch.equal(prompt_logits(model, [prompt])[0], logits), "alone"
    full, thin = (read_model_files(each(name)).model_config for each in (expert_folder, thinned_expert_folder))
    assert thin == full


@pytest.mark.stress
@pytest.mark.parametrize("name", CASES)
def test_oracle_reads_thin_expert_files_as_full_ones(name: str):
    """None of our code is asked: what it is compared with says the same of both files."""
    (thin,) = their_logits(expert_reference(name, is_thinned=True), [PROMPTS[-1]])
    assert relative_error(thin, expected(name)[-1]) < 1e-6


@pytest.mark.gate(
    "gpt_oss-all ways",
    "glm4_moe-all ways",
    "granite_moe_shared",
    "hy_v3",
    "qwen2_moe",
    "step3p7",
    "qwen3_vl_moe",
    "phimoe",
    "flex_olmo",
)
@each_and_all("qwen3_moe", "gpt_oss", "glm4_moe", later=SECOND)
def test_shards_equal_transformers_and_stages_equal_one_rank(name: str, in_all_ways: bool):
    folder = expert_folder(name)
    layouts = {
        "columns": None,
        "linear": ExpertLayout(LINEAR),
        "round robin": ExpertLayout(ROUND_ROBIN),
        "placed": ExpertLayout(PLACED),
        "exact": ExpertLayout(PLACED, is_exact=True),
    }
    if not in_all_ways:
        # One of both, in turns.
        what = ("columns", "placed")[list(CASES).index(name) % 2]
        layouts = {what: layouts[what]}
    for what, layout in layouts.items():
        new = partial(new_model, folder, layout=layout)
        whole = joined_logits(2, new, lambda model: prompt_logits(model, PROMPTS))
        assert worst_error(name, whole) < TOLERANCE, what
    one = prompt_logits(new_model(folder), PROMPTS, 7)
    staged = prompt_logits(TwoStages(folder, new_model), PROMPTS, 7)  # type: ignore[arg-type]  # as much of a model as is used
    assert all(map(torch.equal, staged, one))


def sparse_outputs(
    name: str, owners: tuple[tuple[int, ...], ...], size: int, *, is_exact: bool, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Outputs of the sparse layers for the same tokens, summed over ranks, and checked to be equal on all."""
    kernels, _ = cpu_kernels(dtype)
    x = torch.randn((23, 64), generator=torch.Generator().manual_seed(5)).to(dtype)

    def run(group: GroupHandle) -> list[Tensor]:
        layout = ExpertLayout(owners, is_exact)
        model = new_model(expert_folder(name), group, layout=layout, kernels=kernels, dtype=dtype)
        model.pack_weights()
        found = [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, SparseFeedForward)]
        return [group.all_reduce(each(x)) for each in found]

    results = on_ranks(size, run) if size > 1 else [run(single_group())]
    assert all(torch.equal(one, other) for result in results[1:] for one, other in zip(results[0], result))
    return results[0]


TWO_EXPERTS = ("phimoe", "phimoe_long")
"""A token always has two."""


def each_exact() -> list[Any]:
    layouts = {"qwen2_moe": [], "glm4_moe": pytest.mark.matrix, "gpt_oss": pytest.mark.matrix}
    marks = {(name, torch.float32): layouts.get(name, pytest.mark.stress) for name in CASES}
    marks |= {(name, torch.bfloat16): pytest.mark.stress for name in CASES}
    return [pytest.param(*each, marks=mark) for each, mark in marks.items()]


@pytest.mark.gate("qwen2_moe-*", "glm4_moe-*")
@pytest.mark.guarantee("invariant_experts: the same bits on any ranks", is_control_inside=True)
@pytest.mark.parametrize(("name", "dtype"), each_exact())
def test_exact_experts_have_equal_bits_on_any_ranks(name: str, dtype: torch.dtype):
    sparse = partial(sparse_outputs, name, dtype=dtype)
    one = sparse(((0,) * 8,), 1, is_exact=True)
    assert all(map(torch.equal, one, sparse(((0,) * 8,), 1, is_exact=False)))
    for owners, size in ((LINEAR, 2), (ROUND_ROBIN, 2), (PLACED, 2), (((0, 1, 2, 3) * 2,), 4), (((3, 0) * 4,), 4)):
        assert all(map(torch.equal, one, sparse(owners, size, is_exact=True))), (owners, size)
    # Negative control: sums of ranks' parts are others, but of two experts, which have one order.
    summed = sparse(ROUND_ROBIN, 2, is_exact=False)
    assert name in TWO_EXPERTS or not all(map(torch.equal, one, summed))
    most = 1e-5 if dtype == torch.float32 else 0.02
    assert all(relative_error(each.float(), other.float()) < most for each, other in zip(summed, one, strict=True))


def few(**changes: Any) -> ExpertsConfig:
    return ExpertsConfig(num_experts=6, num_chosen=2, intermediate_size=1, **changes)


def test_equal_scores_select_lower_expert_index():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0, -1.0], [3.0] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    for score in ("softmax", "softmax_chosen", "sigmoid"):
        ids, weights = select_experts(logits, None, few(score=score))
        assert ids.tolist() == [[1, 2], [0, 1], [4, 5]]
        assert torch.allclose(weights.sum(-1), torch.ones(3))
        assert torch.equal(weights[:2], torch.full((2, 2), 0.5))
        assert weights[2, 1] > weights[2, 0]
    ids, _ = select_experts(logits, torch.tensor([9.0, 0, 0, 9.0, 0, 0]), few(score="sigmoid", has_choice_bias=True))
    assert ids.tolist() == [[0, 3]] * 3
    in_groups = few(score="sigmoid", num_groups=3, num_chosen_groups=1)
    assert select_experts(logits, None, in_groups)[0].tolist() == [[2, 3], [0, 1], [4, 5]]


def test_mixed_experts_have_a_softmax_each():
    """Literal numbers: the second softmax has neither the best nor what is more than a fifth of 2 below."""
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.5, 2.0, 1.9], [-1.0, -4.0, -1.1, -9.0, -1.0, 0.0]])
    experts = few(score="sparsemixer", renormalises=False, jitter=0.1)
    ids, weights = select_experts(logits, None, experts)
    assert ids.tolist() == [[1, 3], [0, 5]]
    near = [1 / (1 + math.exp(-0.5)), 1.0]
    last = 1 / (2 + math.exp(-0.1))
    assert torch.allclose(weights, torch.tensor([near, [last, 1.0]]), rtol=1e-6)
    # Equal to the best: the lower index first, and both in the first softmax.
    ids, weights = select_experts(torch.tensor([[2.0, 1.0, 2.0, 0.0, 2.0, 0.5]]), None, experts)
    assert ids.tolist() == [[0, 2]]
    assert torch.allclose(weights, torch.tensor([[1 / 3, 1 / 2]]))


def test_sums_of_weights_have_a_minimum():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0], [0.0] * 6])
    plain = select_experts(logits, None, few(renormalises=False))[1]
    assert plain.sum(-1)[0] > 0.5 > plain.sum(-1)[1]
    found = select_experts(logits, None, few(min_sum=0.5))[1]
    assert torch.allclose(found[0].sum(), torch.tensor(1.0))
    assert torch.equal(found[1], plain[1] / 0.5)


def test_nan_score_makes_only_its_row_nan():
    logits = torch.randn((5, 6), generator=torch.Generator().manual_seed(3))
    for score in ("softmax", "softmax_chosen", "sigmoid", "sparsemixer"):
        for renormalises in (True, False):
            experts = few(score=score, renormalises=renormalises, num_groups=2, num_chosen_groups=2)
            clean = select_experts(logits, None, experts)
            broken = logits.clone()
            broken[2, 4] = torch.nan
            ids, weights = select_experts(broken, None, experts)
            assert weights[2].isnan().all()
            assert ((ids >= 0) & (ids < 6)).all()
            others = [0, 1, 3, 4]
            assert torch.equal(ids[others], clean[0][others])
            assert torch.equal(weights[others], clean[1][others])


def test_selected_experts_do_not_depend_on_other_rows():
    generator = torch.Generator().manual_seed(9)
    for num_experts in (6, 8, 61, 128):
        logits, bias = torch.randn((300, num_experts), generator=generator), torch.randn(num_experts)
        for score in ("softmax", "softmax_chosen", "sigmoid", "sparsemixer"):
            experts = replace(few(score=score), num_experts=num_experts, num_chosen=4)
            ids, weights = select_experts(logits, bias, experts)
            for size in (1, 2, 3, 7, 64):
                for start in (0, 5, 300 - size):
                    rows = slice(start, start + size)
                    some = select_experts(logits[rows].clone(), bias, experts)
                    assert torch.equal(some[0], ids[rows])
                    assert torch.equal(some[1], weights[rows]), (score, num_experts, size, start)


def test_experts_without_tokens_and_with_all_tokens(tmp_path: Path):
    def crowd(tensors: dict[str, Tensor]) -> None:
        for tensor_name, tensor in tensors.items():
            if tensor_name.endswith("router.bias"):
                tensor[0], tensor[5] = 100.0, -100.0

    folder = changed("gpt_oss", tmp_path / "crowded", crowd)
    theirs = their_logits(open_experts(folder), PROMPTS)
    assert max(map(relative_error, prompt_logits(load_model(folder), PROMPTS), theirs)) < TOLERANCE


def test_planted_tie_selects_lower_expert_index(tmp_path: Path):
    """Two rows of a router are the same, so the scores of their experts are; a token has one. Either gives NaN in turn:
    rows meet the first alone.
    """

    def plant(tensors: dict[str, Tensor], broken: int) -> None:
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp"
            tensors[f"{prefix}.gate.weight"][3] = tensors[f"{prefix}.gate.weight"][2]
            tensors[f"{prefix}.experts.{broken}.down_proj.weight"].fill_(torch.nan)

    for broken in (3, 2):
        folder = changed("qwen3_moe", tmp_path / str(broken), partial(plant, broken=broken))
        path = folder / "config.json"
        path.write_text(path.read_text().replace('"num_experts_per_tok": 3', '"num_experts_per_tok": 1'))
        with LLM(folder, num_blocks=60, max_model_len=64, allow_nonfinite=True) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        assert any(output.error_code == "non_finite_logits" for output in outputs) == (broken == 2)


@pytest.mark.stress
@pytest.mark.parametrize("name", [name for name in CASES if name not in (*TWO_EXPERTS, "dbrx")])
def test_tie_selects_lower_expert_in_every_family(name: str, tmp_path: Path):
    """Experts 2 and 3 are equal, also to the router, and a token has one: the logits are the same with either."""

    def plant(tensors: dict[str, Tensor]) -> None:
        for each, tensor in list(tensors.items()):
            of_router = each.endswith(
                (
                    "gate.weight",
                    "wg.weight",
                    "router.weight",
                    "layer.weight",
                    "router_bias",
                    "expert_bias",
                    "router.bias",
                    "correction_bias",
                )
            )
            is_stack = ".experts." in each or ".moe." in each or (tensor.ndim == 3 and "linear" in each)
            if tensor.shape[:1] == (NUM_EXPERTS,) and (of_router or is_stack):
                tensor[3] = tensor[2]
            elif tensor.shape == (1, NUM_EXPERTS):
                tensor[:, 3] = tensor[:, 2]
            elif ".experts.3." in each:
                tensors[each] = tensors[each.replace(".experts.3.", ".experts.2.")].clone()

    folder = changed(name, tmp_path / "twins", plant)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    text |= {key: 1 for key in ("num_experts_per_tok", "moe_k", "moe_topk") if key in text}
    path.write_text(json.dumps(config))
    model = load_model(folder)
    ours, theirs = prompt_logits(model, ROWS), their_logits(open_experts(folder), ROWS)
    assert max(map(relative_error, ours, theirs)) < TOLERANCE
    loads = list(model.expert_loads().values())
    assert all(sum(counts) == sum(map(len, ROWS)) for counts in loads)
    assert [counts[3] for counts in loads] == [0] * len(loads)
    assert sum(counts[2] for counts in loads) > 0


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
outputs_of = partial(ids_and_logprobs, params=GREEDY)
ROWS = [random_prompt(length, seed=3, vocab_size=90) for length in (3, 16, 22, 40, 52)]
ROWS += [ROWS[-1][:40] + ROWS[0]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "swapped": {"num_blocks": 17, "preemption_mode": "swap", "block_size": 4, "swap_space": 0.01},
}


@pytest.mark.stress
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_row_has_equal_bits_chunked_cached_and_recomputed(name: str, dtype: str):
    model = load_model(expert_folder(name), dtype=dtype)
    whole = prompt_logits(model, PROMPTS)
    for chunk in (1, 7, 16):
        assert all(map(torch.equal, prompt_logits(model, PROMPTS, chunk), whole)), chunk
    given = {"num_blocks": 300, "max_model_len": 64, "dtype": dtype}
    with LLM(expert_folder(name), enable_prefix_caching=False, **given) as llm:
        cold = outputs_of(llm, ROWS)
    with LLM(expert_folder(name), **given) as llm:
        assert outputs_of(llm, ROWS) == cold, "to be cached"
        assert [outputs_of(llm, [row])[0] for row in ROWS] == cold, "warm"
        assert llm.llm_engine.counters.num_cached_prompt_tokens >= sum((len(row) - 1) // 16 * 16 for row in ROWS)
    few = {"num_blocks": 17, "preemption_mode": "recompute", "block_size": 4}
    with LLM(expert_folder(name), **{**given, **few}) as llm:
        assert outputs_of(llm, ROWS) == cold
        assert llm.llm_engine.counters.num_preemptions > 0


def each_type() -> list[Any]:
    layouts = [("gpt_oss", "float32"), ("qwen3_moe", "bfloat16")]
    cases = [(name, dtype) for name in CASES for dtype in ("float32", "bfloat16")]
    return [pytest.param(*each, marks=pytest.mark.matrix if each in layouts else pytest.mark.stress) for each in cases]


@pytest.mark.gate("gpt_oss-*")
@pytest.mark.parametrize(("name", "dtype"), each_type())
def test_row_has_equal_bits_in_any_schedule(name: str, dtype: str):
    given = {"num_blocks": 300, "max_model_len": 64, "dtype": dtype}
    with LLM(expert_folder(name), enable_prefix_caching=False, **given) as llm:
        cold = [outputs_of(llm, [row])[0] for row in ROWS]
        assert outputs_of(llm, ROWS) == cold, "alone and together"
    for way, settings in LAYOUTS.items():
        with LLM(expert_folder(name), **{**given, **settings}) as llm:
            assert outputs_of(llm, ROWS) == cold, way
            assert (llm.llm_engine.counters.num_preemptions > 0) == (way != "chunks")


def test_tokens_are_counted_by_layer_and_expert():
    """Counts of transformers' routers, each prompt once: only the last token of an answer is not computed."""
    chosen: dict[int, Tensor] = {}

    def count(layer: int, given: tuple[Tensor, ...]) -> None:
        chosen[layer] = chosen.get(layer, 0) + given[2].flatten().bincount(minlength=NUM_EXPERTS)

    model = expert_reference("qwen2_moe")
    routers = [(index, layer.mlp.gate) for index, layer in enumerate(model.model.layers) if index != 2]
    hooks = [gate.register_forward_hook(lambda _, __, given, at=index: count(at, given)) for index, gate in routers]
    their_logits(model, ROWS)
    for hook in hooks:
        hook.remove()
    with LLM(expert_folder("qwen2_moe"), num_blocks=300, max_model_len=64, enable_prefix_caching=False) as llm:
        llm.generate(ROWS, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        loads = llm.llm_engine.executor.reports()[0].expert_loads
    assert loads == {layer: counts.tolist() for layer, counts in chosen.items()}


def test_nan_scores_make_an_error_row_only(tmp_path: Path):
    given = {"num_blocks": 300, "max_model_len": 64}
    with LLM(expert_folder("qwen2_moe"), **given) as llm:
        clean = outputs_of(llm, ROWS)
    met = {token for row in ROWS for token in row} | {token for ids, _ in clean for token in ids}
    token = next(token for token in range(3, 96) if token not in met)

    def break_token(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"][token] = torch.nan

    folder = changed("qwen2_moe", tmp_path / "broken", break_token)
    rows = [*ROWS[:2], [*ROWS[2][:9], token, *ROWS[2][9:]], *ROWS[2:]]
    with LLM(folder, allow_nonfinite=True, **given) as llm:
        outputs = llm.generate(rows, GREEDY, use_tqdm=False)
        assert [output.error_code for output in outputs] == [None, None, "non_finite_logits", None, None, None, None]
        assert outputs_of(llm, ROWS) == clean
