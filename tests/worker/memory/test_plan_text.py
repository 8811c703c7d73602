"""The plan as people read it: literal text, equal ranks folded, and the refusal of a cache that is too small."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from model_configs import LLAMA_8B, with_layers

import launch
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import CacheConfig, ExecutorConfig, ModelOptions, PlanConfig, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.model_config.layer_config import ExpertsConfig
from spmd_worker.model_config.model_config import ModelConfig, ModelFiles, read_model_files
from spmd_worker.resolved import ResolvedRun, resolve
from spmd_worker.worker.memory import host
from spmd_worker.worker.memory.plan import check_cache_setting
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

GIB = 2**30


@pytest.fixture
def model_config(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return read_model_files(tmp_path).model_config


@pytest.fixture(autouse=True)
def _a_machine_of_64_gib(monkeypatch: pytest.MonkeyPatch):
    for name in ("available_bytes", "total_bytes"):
        monkeypatch.setattr(host, name, lambda: 64 * GIB)


WITHOUT_SCREEN = ExecutorConfig(argmax_screen=False)
GRAMMARS = (
    "grammars   not counted: host memory of running rows with structured_outputs, usually 0.3 MiB each, at most "
    "3.8 MiB (10,000 lexer states)"
)


def text_of(model_config: ModelConfig, tensor_parallel_size: int, **config: object) -> list[str]:
    return describe_plan(make_plan(resolved(model_config, tensor_parallel_size, **config))).splitlines()


def resolved(model_config: ModelConfig, tensor_parallel_size: int = 1, **config: object) -> ResolvedRun:
    run = RunConfig(parallel=ParallelConfig(tensor_parallel_size), **config)  # type: ignore[arg-type]  # a table has no types
    return resolve(run, ModelFiles(model_config, {}, ""), "cuda" if run.device == "cuda" else "cpu")


def test_plan_shows_quantised_and_loading_bytes(model_config: ModelConfig):
    options = ModelOptions(path="", quantization="int8")
    quantised, plain = text_of(model_config, 2, model=options), text_of(model_config, 2)
    line = next(line for line in quantised if line.startswith("quantised"))
    assert line == (
        "quantised  to int8, a scale an output, all but the embedding and norms: 4.0 GiB on a rank, scales included; "
        "while they are loaded up to 5.1 GiB, in bfloat16"
    )
    (line,) = [line for line in text_of(model_config, 1, model=options) if line.startswith("quantised")]
    assert line.endswith(": 8.0 GiB on a rank, scales included, while they are loaded too")
    assert any("7.5 GiB" in line for line in text_of(model_config, 2, executor=WITHOUT_SCREEN))
    assert not any("quantised" in line for line in plain)
    assert [line.startswith("argmax") for line in (*quantised, *plain)].count(True) == 1


@pytest.mark.parametrize(
    ("quantization", "changes", "device", "words"),
    [
        ("fp8", {}, "cpu", "computes on GPUs, .* use model.quantization=int8"),
        ("int8", {"intermediate_size": 200_000}, "cpu", "most 131,072 inputs"),
        ("int8", {"intermediate_size": 4104}, "cuda", "multiples of 16 inputs, .* a rank has 2052"),
        ("int8", {"experts": ExpertsConfig(4, 2, 64)}, "cpu", "set parallel.enable_expert_parallel=true"),
        ("int8", {"experts": ExpertsConfig(4, 2, 200_000)}, "cpu", "most 131,072 inputs"),
        ("int8", {"experts": ExpertsConfig(4, 2, 64)}, "cuda", "set parallel.enable_expert_parallel=true"),
        ("fp8", {"experts": ExpertsConfig(4, 2, 64)}, "cuda", "which has experts: use model.quantization=int8"),
    ],
)
def test_what_cannot_be_quantised_is_refused_by_name(
    model_config: ModelConfig, quantization: str, changes: dict[str, object], device: str, words: str
):
    layers = tuple(replace(layer, **changes) for layer in model_config.layers)
    files = ModelFiles(replace(model_config, layers=layers), {}, "")
    parallel = ParallelConfig(2, enable_expert_parallel=words.startswith("most") and "experts" in changes)
    run = RunConfig(ModelOptions(path="", quantization=quantization), parallel)
    with pytest.raises(ConfigError, match=words):
        resolve(run, files, device)


def test_plan_counts_quantised_experts(model_config: ModelConfig):
    layers = tuple(replace(layer, experts=ExpertsConfig(8, 2, 14336)) for layer in model_config.layers)
    sparse = replace(model_config, layers=layers)
    plain, quantised = (
        next(line for line in text_of(sparse, 1, model=options) if line.startswith("experts"))
        for options in (ModelOptions(path=""), ModelOptions(path="", quantization="int8"))
    )
    assert "84.0 GiB of 88.5 GiB" in plain
    assert "42.1 GiB of 44.8 GiB" in quantised


def test_plan_text_of_8b_model(model_config: ModelConfig):
    assert text_of(model_config, 2) == [
        "model      LlamaForCausalLM, 8,030,261,248 parameters, 32 layers, hidden size 4,096, 32 heads, 8 KV heads",
        "argmax     an int8 copy of the head, 251.0 MiB of a rank's weights, if that is faster "
        "(executor.argmax_screen)",
        "computes   in bfloat16 on the CPU (device=auto takes a GPU if there is one: device=cuda plans for it)",
        "ranks      2 = 1 data x 1 pipeline x 2 tensor",
        "sums       row-parallel sums have 8 leaves, as parallel.max_leaves allows: the same bits with "
        "parallel.tensor_parallel_size 1, 2, 4 or 8",
        "",
        "ranks  layers  heads  KV heads  columns  vocabulary  weights  activations     cache",
        "0-1        32     16         4    7,168      64,128  7.7 GiB      1.1 GiB  19.7 GiB",
        "",
        "blocks     20,131 of 16 tokens on every rank, 322,096 tokens in all, 1.0 MiB each",
        "sequences  39 of 8,192 tokens (model.max_model_len) fit at once; scheduler.max_num_seqs is 256",
        "swap       none (cache.swap_space_gib): preempted sequences are recomputed",
        "why        device memory 32.0 GiB, of which cache.gpu_memory_utilization=0.9 allows 28.8 GiB",
        "           weights 7.7 GiB",
        "           activations of the largest step 1.1 GiB (estimated)",
        "           outside the tensors 300.0 MiB",
        "           left for the cache 19.7 GiB: 20131 blocks",
        "           limited by memory: 256 sequences (scheduler.max_num_seqs) of 8192 tokens (model.max_model_len) "
        "could use 131072 blocks",
        GRAMMARS,
    ]


def test_plan_text_of_quantised_files(model_config: ModelConfig, tmp_path: Path):
    """Where they are dequantised nothing else differs from unquantised ones."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "quantization_config": awq}))
    quantised, files = read_model_files(tmp_path).model_config, "files      quantised, 4-bit integers in groups of 128"
    nonfinite = " (model.allow_nonfinite=true, and kernels decode finite weights)"
    for options, reason in (({"dequantize_weights": True}, ""), ({"allow_nonfinite": True}, nonfinite)):
        model = ModelOptions(path="", **options)
        lines = text_of(quantised, 2, model=model)
        assert lines.pop(1) == (
            f"{files} (awq): dequantised to bfloat16 when they are loaded, the weights take 15.0 GiB, like unquantised "
            f"ones{reason}"
        )
        assert lines == text_of(model_config, 2, model=model)
    found = text_of(quantised, 2), text_of(model_config, 2)
    assert found[0][1] == (
        f"{files} (awq): weights stay in 4-bit integers in groups of 128 in 32 layers, other weights are dequantised "
        f"to bfloat16 when they are loaded"
    )
    rows = [next(line for line in lines if line.startswith("0-1 ")) for lines in found]
    assert [" 3.0 GiB " in rows[0], " 7.7 GiB " in rows[1]] == [True, True], rows


def test_plan_text_of_fp8_files_computed_as_stored(model_config: ModelConfig, tmp_path: Path):
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "quantization_config": blocks}))
    options = ModelOptions(path="", quantization="fp8")
    lines = text_of(read_model_files(tmp_path).model_config, 2, device="cuda", model=options)
    assert lines[1] == (
        "files      quantised, FP8 in blocks of 128 x 128 (fp8): FP8 numbers that have a scale a tensor, a row or 128 "
        "inputs are computed with as they are, others are dequantised when they are loaded"
    )
    assert lines[2] == (
        "quantised  to fp8, a scale an output, all but the embedding, the head and norms: 4.3 GiB on a rank, scales "
        "included; while they are loaded up to 7.5 GiB, in bfloat16"
    )


def test_weights_of_all_ranks_are_the_models_parameters(model_config: ModelConfig):
    plan = make_plan(resolved(model_config, 8, executor=WITHOUT_SCREEN))
    norms = (2 * model_config.num_layers + 1) * model_config.hidden_size
    padded_rows = 8 * plan.shares[0].num_vocabulary_rows - model_config.vocab_size
    expected = model_config.num_parameters + 7 * norms + 2 * padded_rows * model_config.hidden_size
    assert sum(share.weights_bytes for share in plan.shares) == 2 * expected


def test_tied_head_copy_counts_on_cpu(model_config: ModelConfig):
    """On the CPU as much as an untied head; on a GPU head and embedding are the same rows."""
    tied = replace(model_config, has_tied_embeddings=True)
    weights = {
        (each is tied, device): make_plan(resolved(each, device=device, executor=WITHOUT_SCREEN))
        .shares[0]
        .weights_bytes
        for each in (tied, model_config)
        for device in ("cpu", "cuda")
    }
    assert weights[True, "cpu"] == weights[False, "cpu"] == weights[False, "cuda"]
    assert weights[False, "cuda"] - weights[True, "cuda"] == 2 * 128256 * 4096


def test_only_equal_ranks_share_a_line(model_config: ModelConfig):
    table = text_of(model_config, 32, cache=CacheConfig(num_blocks=512))[6:8]
    assert table[1].startswith("0-31 ")
    lines = text_of(with_layers(model_config, intermediate_size=14338), 4, cache=CacheConfig(num_blocks=512))
    assert [line.split()[:5] for line in lines[7:9]] == [
        ["0-1", "32", "8", "2", "3,585"],
        ["2-3", "32", "8", "2", "3,584"],
    ]


def test_plan_and_run_report_same_cache_error(model_config: ModelConfig):
    config = {"cache": CacheConfig(num_blocks=3), "model": ModelOptions(max_model_len=4096)}
    message = (
        "cache.num_blocks=3 holds 48 tokens but model.max_model_len is 4096: "
        "raise cache.num_blocks to at least 256 or lower max_model_len"
    )
    lines = text_of(model_config, 2, **config)
    assert lines[-1] == f"rejected   {message}"
    assert "sequences  0 of 4,096 tokens" in lines[-5]
    with pytest.raises(ConfigError) as refused:
        check_cache_setting(resolved(model_config, **config))
    assert str(refused.value) == message
    # One block more than too few: nothing is refused.
    enough = {**config, "cache": CacheConfig(num_blocks=256)}
    assert not any(line.startswith("rejected") for line in text_of(model_config, 2, **enough))
    check_cache_setting(resolved(model_config, **enough))


@pytest.mark.finding(number="D9")
@pytest.mark.parametrize(
    ("device", "gib", "size", "fits"),
    [
        *[("cpu", 16, 1, False), ("cpu", 40, 1, True), ("cpu", 40, 2, True), ("cpu", 18, 2, False)],
        *[("cuda", 16, 1, False), ("cuda", 24, 1, True), ("cuda", 12, 2, True), ("cuda", 7, 2, False)],
    ],
)
def test_plan_is_for_the_machine_that_is_named(
    model_config: ModelConfig, device: str, gib: float, size: int, fits: bool, monkeypatch: pytest.MonkeyPatch
):
    """Of the machine that all ranks share, and with GPUs of each; that of this machine counts for nothing."""
    config = {"plan": PlanConfig(enabled=True, memory_gib=gib), "device": device}
    texts = []
    for here in (2 * GIB, 1024 * GIB):
        for name in ("available_bytes", "total_bytes"):
            monkeypatch.setattr(host, name, lambda here=here: here)
        texts.append(text_of(model_config, size, **config))
    assert texts[0] == texts[1]
    assert texts[0][-1].startswith("rejected") is not fits
    share = gib if device == "cuda" else gib / size
    assert any(line.startswith(f"why        device memory {share:.1f} GiB") for line in texts[0])


@pytest.mark.finding(number="D9")
@pytest.mark.parametrize(
    ("keys", "code"),
    [
        (("plan.memory_gib=16",), 1),
        (("plan.memory_gib=64",), 0),
        (("plan.memory_gib=64", "cache.num_blocks=1000"), 0),
        (("plan.memory_gib=64", "cache.num_blocks=100000000"), 1),
        ((), 0),
    ],
)
def test_plan_that_refuses_exits_with_one(
    tmp_path: Path, model_config: ModelConfig, keys: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]
):
    assert launch.main(["plan=true", "device=cpu", f"model.path={tmp_path}", *keys]) == code
    text = capsys.readouterr().out
    assert ("\nrejected   " in text) is (code == 1)
    assert [line for line in text.splitlines() if len(line) > 100 and str(tmp_path) not in line] == []


def test_plan_rejects_too_little_memory(model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 8 * GIB)
    assert text_of(model_config, 2)[-1] == (
        "rejected   memory holds 0 cache blocks, 0 tokens, but model.max_model_len is 8192: "
        "raise cache.gpu_memory_utilization or lower model.max_model_len"
    )


def test_cpu_swap_space_reduces_the_cache(model_config: ModelConfig):
    lines = text_of(model_config, 2, cache=CacheConfig(swap_space_gib=4.0))
    assert lines[9].startswith("blocks     16,035 of 16 tokens on every rank")
    assert lines[11] == "swap       4,096 blocks, 4.0 GiB of host memory, on every rank (cache.swap_space_gib)"
    assert lines[16:18] == [
        "           swap space 4.0 GiB",
        "           left for the cache 15.7 GiB: 16035 blocks",
    ]
    too_much = text_of(model_config, 2, cache=CacheConfig(swap_space_gib=30.0))
    assert too_much[-1].startswith("rejected   memory holds 0 cache blocks")
    assert too_much[-1].endswith("or lower model.max_model_len or cache.swap_space_gib")


def test_plan_lists_gpu_sizes_instead_of_guessing(model_config: ModelConfig):
    lines = text_of(model_config, 8, device="cuda")
    assert lines[1] == "computes   in bfloat16 on one GPU a rank"
    assert lines[3] == (
        "sums       row-parallel sums are added by 8 ranks (tensor_parallel_size 8), with bits of their own: those of "
        "one rank have 1 leaf, since parallel.invariant_tensor_parallel is off"
    )
    assert lines[6].endswith("measured")
    assert lines[8:] == [
        "blocks     measured when the run starts, or set by cache.num_blocks: 256.0 KiB each, 512 for a sequence of "
        "8,192 tokens (model.max_model_len)",
        "swap       16,384 blocks, 4.0 GiB of host memory, on every rank (cache.swap_space_gib)",
        "about      with cache.gpu_memory_utilization=0.9 a rank has, on a GPU of",
        "            24 GiB     73,278 blocks: 143 sequences",
        "            48 GiB    131,072 blocks: 256 sequences",
        "            80 GiB    131,072 blocks: 256 sequences",
        "           141 GiB    131,072 blocks: 256 sequences",
        GRAMMARS,
    ]
    with_blocks = text_of(model_config, 8, device="cuda", cache=CacheConfig(num_blocks=2048))
    assert with_blocks[6].endswith("512.0 MiB")
    assert with_blocks[8].startswith("blocks     2,048 of 16 tokens on every rank, 32,768 tokens in all")
