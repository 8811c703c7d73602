"""What a run comes to before it starts: dtype, longest sequence, blocks; and the same in words."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from spmd_worker import LLM
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import CacheConfig, ExecutorConfig, ModelOptions, RunConfig, SchedulerConfig
from spmd_worker.base.errors import ConfigError, TokenizerError
from spmd_worker.model_config.model_config import ModelConfig, ModelFiles, model_config_of, read_model_files
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.resolved import ResolvedRun, resolve, resolve_run
from spmd_worker.worker import loaded_model
from spmd_worker.worker.memory import host
from spmd_worker.worker.memory.plan import cache_spec_of, check_cache_setting, check_memory
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

DEMO_MODEL = Path(__file__).resolve().parents[3] / "scripts" / "demo" / "model"


def llama_8b(**keys: object) -> ModelConfig:
    sizes = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "dtype": "bfloat16",
    }
    return model_config_of({"architectures": ["LlamaForCausalLM"], **sizes, **keys}, Path("config.json"))


def run(
    *, model: dict[str, object] | None = None, scheduler: dict[str, object] | None = None, **keys: object
) -> RunConfig:
    return RunConfig(model=ModelOptions(**(model or {})), scheduler=SchedulerConfig(**(scheduler or {})), **keys)


def resolved(config: RunConfig, model_config: ModelConfig, num_ranks: int = 1) -> ResolvedRun:
    """For the CPU where the configuration does not say."""
    parallel = ParallelConfig(num_ranks)
    device_type = "cuda" if config.device == "cuda" else "cpu"
    return resolve(replace(config, parallel=parallel), ModelFiles(model_config, {}, ""), device_type)


@pytest.fixture(autouse=True)
def _a_machine_of_64_gib(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "total_bytes", lambda: 64 * 2**30)


@pytest.mark.parametrize(
    ("wanted", "in_checkpoint", "device", "expected"),
    [
        ("auto", "bfloat16", "cpu", "bfloat16"),
        ("auto", "bfloat16", "cuda", "bfloat16"),
        ("auto", "float16", "cuda", "float16"),
        ("auto", "float16", "cpu", "float32"),
        ("auto", "float32", "cpu", "float32"),
        ("float32", "bfloat16", "cuda", "float32"),
        ("float16", "bfloat16", "cuda", "float16"),
    ],
)
def test_dtype_follows_checkpoint_unless_set(wanted: str, in_checkpoint: str, device: str, expected: str):
    config = run(model={"dtype": wanted}, device=device)
    assert resolved(config, llama_8b(dtype=in_checkpoint)).dtype == expected


def test_float16_on_cpu_is_rejected():
    with pytest.raises(ConfigError, match=r"^model\.dtype=float16 .*not .*CPU: .*bfloat16 .*float32"):
        resolved(run(model={"dtype": "float16"}), llama_8b())


def test_max_model_len_is_at_most_the_models():
    assert resolved(run(), llama_8b()).max_model_len == 8192
    assert resolved(run(model={"max_model_len": 100}), llama_8b()).max_model_len == 100
    with pytest.raises(ConfigError, match=r"^model\.max_model_len=8193 .*more than .*8192 "):
        resolved(run(model={"max_model_len": 8193}), llama_8b())


def test_longest_prompt_must_fit_step_without_chunks():
    scheduler = {"enable_chunked_prefill": False, "max_num_batched_tokens": 1000}
    with pytest.raises(ConfigError, match=r"^scheduler\.max_num_batched_tokens=1000 cannot .*=8192 .*raise .*8192 "):
        resolved(run(scheduler=scheduler), llama_8b())
    assert resolved(run(scheduler=scheduler, model={"max_model_len": 1000}), llama_8b()).max_model_len == 1000


def test_long_rows_of_compressed_attention_take_a_fifth():
    """DeepSeek V4's keys, and rows that entries are made of, go back to the pool behind a window; entries stay."""
    keys = {"architectures": ["DeepseekV4ForCausalLM"], "dtype": "bfloat16"}
    model, length = model_config_of(keys, Path("config.json")), 131_072
    scheduler, options = {"max_num_batched_tokens": 8_192, "max_num_seqs": 8}, {"max_model_len": length}

    def found(**cache: bool) -> ResolvedRun:
        return resolved(run(scheduler=scheduler, model=options, cache=CacheConfig(**cache)), model)

    spec, one = cache_spec_of(found(), 0), cache_spec_of(found(window_groups=False), 0)
    assert (spec.groups.windows, spec.groups.num_groups, one.groups.num_groups) == ((128,), 8, 1)
    assert (spec.num_layers, spec.part_of, one.num_layers) == (86, tuple(range(43)), 43)
    assert 0.19 < spec.groups.num_blocks(length, 16) * spec.block_bytes / (length // 16 * one.block_bytes) < 0.2
    # Entries are of full groups, all else of others; stages have the groups of their layers.
    assert {0} == set(spec.group_of[43:]) != set(spec.group_of[:43]) == set(range(1, 8))
    staged = replace(found(), layout=RankLayout(1, 2))
    first, second = (cache_spec_of(staged, rank) for rank in range(2))
    num_first, num_second = len(first.part_of), len(second.part_of)
    assert (*first.group_of[:num_first], *second.group_of[:num_second]) == spec.group_of[:43]
    assert (*first.group_of[num_first:], *second.group_of[num_second:]) == spec.group_of[43:]
    assert [second.layer_of(index) for index in (0, num_second, 2 * num_second - 1)] == [0, 0, num_second - 1]


@pytest.mark.parametrize(
    ("executor", "num_groups"),
    [
        ({}, 8),
        ({"device_backend": "torch"}, 8),
        ({"device_backend": "triton"}, 1),
        ({"device_backend": "some.Backend"}, 1),
        ({"worker_cls": "spmd_worker.worker.triton_worker.TritonWorker"}, 1),
    ],
)
def test_entries_have_own_groups_where_kernels_may(executor: dict[str, str], num_groups: int):
    """A worker class that brings a backend would read one group where the scheduler has filled eight."""
    model = model_config_of({"architectures": ["DeepseekV4ForCausalLM"]}, Path("config.json"))
    given = run(model={"max_model_len": 65_536}, executor=ExecutorConfig(**executor))
    assert cache_spec_of(resolved(given, model), 0).groups.num_groups == num_groups


def test_too_few_blocks_error_names_enough():
    with pytest.raises(ConfigError, match=r"^cache\.num_blocks=511 holds 8176 .* 8192: raise .* 512 "):
        check_cache_setting(resolved(run(cache=CacheConfig(num_blocks=511)), llama_8b()))
    check_cache_setting(resolved(run(cache=CacheConfig(num_blocks=512)), llama_8b()))
    check_cache_setting(resolved(run(), llama_8b()))


def test_plan_of_8b_model_on_two_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 64 * 2**30)
    text = describe_plan(make_plan(resolved(run(device="cpu"), llama_8b(), 2)))
    assert "LlamaForCausalLM, 8,030,261,248 parameters, 32 layers" in text
    assert "2 = 1 data x 1 pipeline x 2 tensor" in text
    row = next(line for line in text.splitlines() if line.startswith("0-1"))
    # Ranks, layers, heads, key-value heads, columns, vocabulary, weights: half of each, and of the head's screen.
    assert row.split()[:8] == ["0-1", "32", "16", "4", "7,168", "64,128", "7.7", "GiB"]
    # A block is 2 x 32 layers x 4 heads x 128 x 16 tokens x 2 bytes, and about 20 GiB of a rank's 32 are left for them.
    blocks = int(re.search(r"blocks +([\d,]+) of 16 tokens on every rank.* 1.0 MiB each", text)[1].replace(",", ""))
    assert 19_000 < blocks < 22_000
    assert re.search(r"\d+ of 8,192 tokens \(model.max_model_len\) fit at\s+once", text)


def test_uneven_ranks_have_a_line_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 64 * 2**30)
    model_config = llama_8b(intermediate_size=1001)
    text = describe_plan(make_plan(resolved(run(device="cpu"), model_config, 4)))
    rows = [line.split() for line in text.splitlines() if re.match(r"[\d,-]+ +32 ", line)]
    assert [(row[0], row[4]) for row in rows] == [("0", "251"), ("1-3", "250")]


def test_plan_reports_an_error_of_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 17 * 2**30)
    assert "rejected" in describe_plan(make_plan(resolved(run(device="cpu"), llama_8b())))
    monkeypatch.setattr(host, "available_bytes", lambda: 64 * 2**30)
    assert "rejected" not in describe_plan(make_plan(resolved(run(device="cpu"), llama_8b())))


@pytest.mark.guarantee("A plan needs config.json only")
def test_a_plan_reads_nothing_but_the_config_file(tmp_path: Path):
    check_plan(tmp_path, plan=True)


def check_plan(tmp_path: Path, *, plan: bool) -> None:
    """Of a folder with its config.json alone, and of one where all others are broken. `plan` is the key."""
    config = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 50, "hidden_size": 8, "intermediate_size": 16}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = run(model={"path": str(tmp_path)}, device="cuda", parallel=ParallelConfig(2), plan=plan)
    text = describe_plan(make_plan(resolve_run(asked, "cuda")))
    assert "Qwen2ForCausalLM" in text
    assert "measured when the run starts" in text
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "model.safetensors"):
        (tmp_path / name).write_text("{")
    assert describe_plan(make_plan(resolve_run(asked, "cuda"))) == text


@pytest.mark.control("A plan needs config.json only")
def test_check_detects_plan_that_opens_model_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Negative control: what a run reads; and a plan that opens the weights."""
    with pytest.raises(TokenizerError):
        check_plan(tmp_path / "tokenizer", plan=False)

    def read_weights(folder: Path, **options: bool) -> ModelFiles:
        (folder / "model.safetensors").open("rb").close()
        return read_model_files(folder, **options)

    monkeypatch.setattr("spmd_worker.resolved.read_model_files", read_weights)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        check_plan(tmp_path / "weights", plan=True)


def test_too_large_weights_error_has_both_sizes():
    large = resolved(run(), llama_8b(hidden_size=2 * 10**9))
    with pytest.raises(ConfigError, match=r"^model\.path=.*this rank .* 64\.0 GiB"):
        check_memory(large, 0, 1, host.total_bytes())
    assert "rejected   model.path" in describe_plan(make_plan(large))
    # 16 GB a rank: three fit, five do not.
    small = resolved(run(), llama_8b())
    check_memory(small, 0, 3, host.total_bytes())
    with pytest.raises(ConfigError, match=r"^model\.path=.*the 5 ranks .* 7\d\.\d GiB"):
        check_memory(small, 0, 5, host.total_bytes())


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "head_dim"])
def test_a_worker_refuses_them_before_anything_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str):
    monkeypatch.setattr(loaded_model, "build_model", lambda *_, **__: pytest.fail("the model was built"))
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | {key: 2 * 10**9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="is too large"):
        LLM(tmp_path, load_format="dummy", device="cpu")
    # Negative control: with the model's own sizes it gets there.
    (tmp_path / "config.json").write_text((DEMO_MODEL / "config.json").read_text())
    with pytest.raises(pytest.fail.Exception):
        LLM(tmp_path, load_format="dummy", device="cpu")
