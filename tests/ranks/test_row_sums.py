"""Names of row-parallel sums: equal exactly for layouts with equal bits, and words about sizes that have them."""

import re
from pathlib import Path

import pytest
from model_configs import with_layers
from ranks import REPOSITORY

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import ExecutorConfig, ModelOptions, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.model_config.layer_config import ExpertsConfig
from spmd_worker.model_config.model_config import ModelConfig, ModelFiles, read_model_files
from spmd_worker.ranks.row_sums import describe_row_sums
from spmd_worker.resolved import ResolvedRun, resolve

MODEL = REPOSITORY / "scripts" / "demo" / "model"
EXPERTS = ExpertsConfig(num_experts=8, num_chosen=2, intermediate_size=256)


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    """8 heads of 32."""
    found = read_model_files(Path(MODEL)).model_config
    return with_layers(found, head_size=32, num_kv_heads=8, num_heads=8)


def run(model: ModelConfig, size: int = 1, device: str = "cpu", **given: object) -> ResolvedRun:
    """`given` are keys of `parallel`, `model` or the run."""
    options = {name: given.pop(name) for name in ("quantization", "enable_lora") if name in given}
    executor = ExecutorConfig(device_backend=str(given.pop("device_backend", "auto")))
    config = RunConfig(ModelOptions(path="", **options), ParallelConfig(size, **given), executor=executor)
    return resolve(config, ModelFiles(model, {}, ""), device)


def name(*arguments: object, **given: object) -> str:
    return run(*arguments, **given).row_sums


def test_sizes_that_divide_the_leaves_share_a_name(model: ModelConfig):
    assert {name(model, size) for size in (1, 2, 4, 8)} == {"in 8 leaves (tensor_parallel_size 1, 2, 4 or 8)"}
    assert name(model, 2, pipeline_parallel_size=2, data_parallel_size=3) == name(model)
    assert name(model, 2, max_leaves=2) == "in 2 leaves (tensor_parallel_size 1 or 2)"
    assert name(model, 4, max_leaves=2) == "by 4 ranks (tensor_parallel_size 4)"
    assert name(model, invariant_tensor_parallel=False) == "in 1 leaf (tensor_parallel_size 1)"
    assert name(with_layers(model, num_heads=6, num_kv_heads=6), 3) == "by 3 ranks (tensor_parallel_size 3)"


def test_int8_sums_are_exact_but_for_adapters(model: ModelConfig):
    assert {name(model, size, quantization="int8") for size in (1, 2, 8)} == {"exactly (any tensor_parallel_size)"}
    adapted = {"quantization": "int8", "enable_lora": True, "max_leaves": 2}
    words = "exactly, and those of adapters"
    assert name(model, 2, **adapted) == f"{words} in 2 leaves (tensor_parallel_size 1 or 2)"
    assert name(model, 4, **adapted) == f"{words} by 4 ranks (tensor_parallel_size 4)"


def test_gpus_without_leaves_name_their_ranks(model: ModelConfig):
    assert name(model, 1, "cuda") == "in 1 leaf (tensor_parallel_size 1)"
    assert name(model, 2, "cuda") == "by 2 ranks (tensor_parallel_size 2)"
    assert name(model, 2, "cuda", invariant_tensor_parallel=True) == name(model, 1)


def test_shares_of_experts_count_only_without_leaves(model: ModelConfig, tmp_path: Path):
    sparse, complete = with_layers(model, experts=EXPERTS), {"enable_expert_parallel": True}
    assert len({name(sparse, 1), name(sparse, 4), name(sparse, 4, **complete)}) == 1
    # Two ranks' sums, without leaves. CPU ranks always add complete experts in their order.
    columns, exact = name(sparse, 2, max_leaves=1), name(sparse, 2, max_leaves=1, **complete)
    assert exact == name(sparse, 2, invariant_tensor_parallel=False, **complete)
    owners = tmp_path / "owners.json"
    owners.write_text('{"owners": [0, 1, 1, 0, 0, 1, 0, 1]}')
    placements = ("linear", "round_robin", str(owners))
    placed = [name(sparse, 2, "cuda", **complete, expert_placement=each) for each in placements]
    assert len({columns, exact, *placed}) == 5
    assert name(sparse, 2, "cuda", **complete, invariant_experts=True) == exact


def test_other_sizes_are_named_once_or_refused(model: ModelConfig, caplog: pytest.LogCaptureFixture):
    model = with_layers(model, num_heads=14, num_kv_heads=2, intermediate_size=512)
    caplog.set_level("INFO")
    run(model, 2)
    assert caplog.messages.pop() == "answers have the same bits with parallel.tensor_parallel_size 1 or 2 (2 leaves)"
    caplog.clear()
    run(model, 14)
    reason = "row-parallel sums have 2 leaves, since layers have 14 heads; sizes with the bits of one rank are 1 and 2"
    assert [each.message for each in caplog.records] == [
        f"parallel.tensor_parallel_size=14: answers have bits of their own, which may differ from those of one rank: "
        f"{reason}"
    ]
    with pytest.raises(
        ConfigError, match=r"^parallel\.invariant_tensor_parallel=true is not possible .* 1 and 2\. Choose .* 1 or 2, "
    ):
        run(model, 14, invariant_tensor_parallel=True)
    odd = with_layers(model, num_heads=7, num_kv_heads=1)
    with pytest.raises(ConfigError, match="have 1 leaf, since layers have 7 heads; no other size has"):
        run(odd, 7, invariant_tensor_parallel=True)
    # One rank has the bits of one rank; integer sums those of any number.
    run(odd, 1, invariant_tensor_parallel=True)
    run(odd, 7, invariant_tensor_parallel=True, quantization="int8")
    with pytest.raises(ConfigError, match="not supported by plain torch"):
        run(model, 2, invariant_tensor_parallel=True, device_backend="torch")
    with pytest.raises(ConfigError, match="quantization=fp8 a rank"):
        run(model, 2, "cuda", invariant_tensor_parallel=True, quantization="fp8")


@pytest.mark.parametrize(
    ("heads", "given", "words"),
    [
        (8, {}, "row-parallel sums have 8 leaves, as parallel.max_leaves allows: the same bits with .* 1, 2, 4 or 8"),
        (12, {}, "row-parallel sums have 4 leaves, since layers have 12 heads: the same bits with .* 1, 2 or 4"),
        (9, {}, "row-parallel sums have 1 leaf, since layers have 9 heads: the same bits with one rank alone"),
        (
            8,
            {"invariant_tensor_parallel": False},
            "row-parallel sums have 1 leaf, since .* is off: the same bits with .*",
        ),
        (
            9,
            {"tensor_parallel_size": 3},
            "row-parallel sums are added by 3 .*, with bits of their own: .* since .* 9 heads",
        ),
        (8, {"quantization": "int8"}, r"row-parallel sums are added exactly \(any tensor_parallel_size\)"),
    ],
)
def test_plan_has_leaves_and_their_reason(model: ModelConfig, heads: int, given: dict[str, object], words: str):
    size = given.pop("tensor_parallel_size", 1)
    found = run(with_layers(model, num_heads=heads, num_kv_heads=heads), size, **given)
    line = describe_row_sums(found.config.parallel, found.model_config, found.layout, found.row_sums)
    assert re.fullmatch(words, line), line
