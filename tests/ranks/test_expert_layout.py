"""Whose experts are whose: placements by word and by file, what of them is refused, and ranks that run them."""

import json
import logging
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import ranks
from expert_checkpoints import expert_folder
from model_configs import spelled

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.engine_args import run_config
from spmd_worker.model_config.model_config import ModelConfig, model_config_of
from spmd_worker.ranks.expert_layout import ExpertLayout, expert_layout_of
from spmd_worker.ranks.topology import RankLayout, balanced_layers, check_divides
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.memory.estimate import expert_bytes, weights_bytes
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

SIZES = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "num_hidden_layers": 3}


def config_of(architecture: str = "Qwen3MoeForCausalLM", **keys: Any) -> ModelConfig:
    return model_config_of(spelled(architecture, {**SIZES, **keys}), Path("config.json"))


def layout_of(config: ModelConfig, size: int, placement: str = "linear", **more: Any) -> ExpertLayout | None:
    parallel = ParallelConfig(size, enable_expert_parallel=True, expert_placement=placement, **more)
    return expert_layout_of(parallel, config)


def test_expert_placement_accepts_named_strategies():
    config = config_of(num_experts=5)
    assert layout_of(config, 2) == ExpertLayout(((0, 0, 0, 1, 1),))
    assert layout_of(config, 2, "round_robin", invariant_experts=True) == ExpertLayout(
        ((0, 1, 0, 1, 0),), is_exact=True
    )
    assert layout_of(config, 1) == ExpertLayout(((0,) * 5,))
    assert expert_layout_of(ParallelConfig(2), config) is None


def test_placement_file_covers_all_layers_or_each(tmp_path: Path):
    config, path = config_of(num_experts=4), tmp_path / "placement.json"
    path.write_text('{"owners": [1, 1, 0, 1]}')
    layout = layout_of(config, 2, str(path))
    assert layout is not None
    assert [layout.owners_of(layer) for layer in range(3)] == [(1, 1, 0, 1)] * 3
    path.write_text('{"owners": [[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0]]}')
    layout = layout_of(config, 2, str(path))
    assert layout is not None
    assert [layout.owners_of(layer) for layer in range(3)] == [(1, 1, 0, 1), (0, 0, 0, 0), (1, 0, 1, 0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is neither linear nor round_robin, and cannot be read as a JSON file"),
        ("[0, 1]", "cannot be read as a JSON file: must be a JSON object"),
        ("{}", 'must be {"owners": [...]} with one rank from 0 to 1 for each of the 4 experts, or 3 such lists, one a'),
        ('{"owners": [0, 1, 0]}', "for each of the 4 experts"),
        ('{"owners": [0, 1, 0, 2]}', "one rank from 0 to 1"),
        ('{"owners": [0, 1, 0, true]}', "one rank from 0 to 1"),
        ('{"owners": [[0, 1, 0, 1], [0, 1, 0, 1]]}', "or 3 such lists, one a layer"),
    ],
)
def test_invalid_placement_error_is_one_sentence(text: str | None, message: str, tmp_path: Path):
    path = tmp_path / "placement.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        layout_of(config_of(num_experts=4), 2, str(path))
    assert str(caught.value).startswith(f"parallel.expert_placement={path}")
    assert message in str(caught.value)


def test_expert_keys_require_expert_parallelism(
    caplog: pytest.LogCaptureFixture,
):
    """Expert parallelism has no effect on a dense model."""
    with pytest.raises(ConfigError, match=r"^parallel\.invariant_experts=true needs .*complete"):
        ParallelConfig(invariant_experts=True)
    with pytest.raises(ConfigError, match=r"parallel.expert_placement=round_robin needs ranks"):
        ParallelConfig(expert_placement="round_robin")
    with caplog.at_level(logging.WARNING):
        assert layout_of(config_of("LlamaForCausalLM"), 2) is None
    assert "parallel.enable_expert_parallel=true has no effect: LlamaForCausalLM has no experts" in caplog.text


REPLICAS = r"\(parallel.data_parallel_size=2\)"


@pytest.mark.finding(number="D16")
@pytest.mark.parametrize(
    ("size", "num_replicas", "words"),
    [
        (1, 1, "no effect with parallel.tensor_parallel_size=1: .* each rank has all 5 of them: raise"),
        (1, 2, f"no effect with parallel.tensor_parallel_size=1: .* {REPLICAS}: raise"),
        (2, 2, f"among the 2 ranks of a tensor-parallel group only: all 5 of them are in every replica {REPLICAS}"),
        (2, 1, ""),
    ],
)
def test_unshared_experts_of_replicas_are_logged(
    size: int, num_replicas: int, words: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        layout_of(config_of(num_experts=5), size, data_parallel_size=num_replicas)
    assert [bool(re.search(words, each)) for each in caplog.messages] == [True] * bool(words)


@pytest.mark.finding(number="D16")
def test_expert_warning_is_logged_at_the_start(caplog: pytest.LogCaptureFixture):
    """A plan is a beginning too, before any weight is read."""
    keys = {"enable_expert_parallel": True, "data_parallel_size": 2, "device": "cpu"}
    with caplog.at_level(logging.WARNING):
        resolve_run(run_config({"model": expert_folder("qwen3_moe"), **keys}), "cpu")
    assert sum("parallel.enable_expert_parallel=true has no effect" in each for each in caplog.messages) == 1


def test_expert_keywords_of_vllm_set_our_keys():
    given = {"enable_expert_parallel": True, "expert_placement_strategy": "round_robin", "tensor_parallel_size": 2}
    parallel = run_config({"model": "m", **given, "invariant_experts": True}).parallel
    assert (parallel.enable_expert_parallel, parallel.expert_placement) == (True, "round_robin")
    assert parallel.invariant_experts
    assert run_config({"model": "m"}).parallel == ParallelConfig()


def test_expert_columns_must_suffice_when_sharded():
    config = config_of(moe_intermediate_size=3)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4 .*feed-forward .*3 columns; .* 1 and 2$"):
        check_divides(RankLayout(4), config)
    check_divides(RankLayout(4, experts=layout_of(config, 4)), config)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_of_uneven_layers_minimise_the_heaviest(num_stages: int):
    config = config_of("Glm4MoeForCausalLM", num_hidden_layers=7, first_k_dense_replace=3, n_routed_experts=4)
    weights = config.layer_parameters
    assert len(set(weights)) == 2
    table = config.vocab_size * config.hidden_size

    def largest(counts: tuple[int, ...]) -> int:
        shares, start = [], 0
        for count in counts:
            shares.append(sum(weights[start : start + count]))
            start += count
        shares[0] += table
        shares[-1] += table
        return max(shares)

    cuts = combinations(range(1, 7), num_stages - 1)
    ways = [tuple(b - a for a, b in zip((0, *cut), (*cut, 7))) for cut in cuts]
    counts = balanced_layers(config, num_stages)
    assert counts in ways
    assert largest(counts) == min(map(largest, ways))


def test_plan_reports_expert_memory():
    folder = expert_folder("qwen3_moe")
    given = {"model": str(folder), "device": "cpu", "max_num_seqs": 8, "tensor_parallel_size": 2}
    text = describe_plan(make_plan(resolve_run(run_config(given), "cpu")))
    (line,) = [each for each in text.splitlines() if each.startswith("experts")]
    assert "8 in each of 4 layers, 3 per token; a rank has columns of each" in line
    text = describe_plan(make_plan(resolve_run(run_config({**given, "enable_expert_parallel": True}), "cpu")))
    (line,) = [each for each in text.splitlines() if each.startswith("experts")]
    assert "a rank has complete ones, at most 384.0 KiB" in line
    # 8 experts of 3 x 64 x 32 in each of 4 layers, float32.
    config = resolve_run(run_config(given), "cpu").model_config
    assert config.num_expert_parameters * 4 == 8 * 3 * 64 * 32 * 4 * 4 == 2 * 384 * 1024
    uneven = RankLayout(2, experts=ExpertLayout(((0, 0, 0, 0, 0, 0, 1, 1),)))
    both = [expert_bytes(config, uneven, rank, "float32") for rank in range(2)]
    assert both == [6 * 98304, 2 * 98304]
    assert weights_bytes(config, uneven, 0, "float32", "cpu") - weights_bytes(config, uneven, 1, "float32", "cpu") == (
        both[0] - both[1]
    )


SCRIPT = """
import json, os, sys
from pathlib import Path
from spmd_worker import LLM, SamplingParams

job = json.loads(Path(sys.argv[1]).read_text())
found = {}
for name, settings in job["runs"].items():
    with LLM(job["folder"], num_blocks=60, max_model_len=64, timeout_s=240, **settings) as llm:
        outputs = llm.generate(job["prompts"], SamplingParams(**job["params"]), use_tqdm=False)
        found[name] = [list(output.outputs[0].token_ids) for output in outputs]
Path(sys.argv[2], os.environ["RANK"] + ".json").write_text(json.dumps(found))
"""


@pytest.mark.matrix
def test_two_expert_parallel_ranks_match_one_rank(tmp_path: Path):
    placement = tmp_path / "placement.json"
    placement.write_text('{"owners": [1, 1, 1, 0, 1, 0, 1, 1]}')
    expert_parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    runs = {
        "columns": {"tensor_parallel_size": 2},
        "placed": {**expert_parallel, "expert_placement": str(placement)},
        "exact": {**expert_parallel, "expert_placement": str(placement), "invariant_experts": True},
        "stages": {"pipeline_parallel_size": 2},
    }
    prompts = [[3 + (7 * row + 5 * place) % 90 for place in range(9 * row + 2)] for row in range(5)]
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    job = {"folder": str(expert_folder("qwen2_moe")), "prompts": prompts, "params": params, "runs": runs}
    (tmp_path / "job.json").write_text(json.dumps(job))
    ranks.run_ranks(SCRIPT, 2, timeout_s=240, arguments=[tmp_path / "job.json", tmp_path]).checked()
    with LLM(job["folder"], num_blocks=60, max_model_len=64) as llm:
        outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    one = [list(output.outputs[0].token_ids) for output in outputs]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {name: ids == one for name, ids in found.items()} == dict.fromkeys(runs, True)
