"""Errors of `LLM(...)` speak its keywords, whatever made them; a command line's speak its keys."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from context_fixtures import fixture_of
from property_examples import part_of
from ranks import REPOSITORY

import launch
from spmd_worker import LLM, SamplingParams
from spmd_worker import llm as llm_module
from spmd_worker.base.errors import ConfigError, PromptsRefusedError
from spmd_worker.compat.engine_args import EngineArgs
from spmd_worker.compat.key_names import KEY_NAMES, with_keyword_names
from spmd_worker.compat.keywords import KEYWORDS
from spmd_worker.llm_engine import LLMEngine

MODEL = str(REPOSITORY / "scripts" / "demo" / "model")
KEY = re.compile(r"\b(model|parallel|executor|cache|scheduler|sampling|limits|job)\.[a-z][a-z_]+\b(?!\.)")
ODD = ("x", -1, 0, 1.5, float("nan"), [], ["x"], {}, True, object(), 10**30, "", None)


class ReadError(Exception):
    """The arguments were taken."""


def words_of(**arguments: Any) -> str | None:
    """What is wrong with the arguments; None where they were taken."""
    try:
        LLM(MODEL, **{"device": "cpu", **arguments})
    except ReadError:
        return None
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    raise AssertionError("an engine was started")


def refuse(*_: Any) -> None:
    raise ReadError


@pytest.mark.finding(number="D8")
def test_error_of_a_value_names_no_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm_module, "read_run", refuse)
    for turn, name in enumerate(KEYWORDS):
        for value in part_of(ODD, turn):
            words = words_of(**{name: value})
            assert words is None or not KEY.search(words.replace(MODEL, "")), (name, value, words)


@pytest.mark.finding(number="D8")
def test_errors_of_several_values_name_no_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm_module, "read_run", refuse)
    extremes: tuple[dict[str, Any], ...] = (
        {"max_num_seqs": 9, "max_num_batched_tokens": 3},
        {"host_tier_gib": 1, "enable_prefix_caching": False},
        {"expert_placement": "round_robin"},
        {"override_generation_config": {"n": 5000}},
        {"override_generation_config": {"temperature": "x"}},
    )
    for arguments in extremes:
        words = words_of(**arguments)
        assert words is not None
        assert not KEY.search(words), words


REFUSED = {
    "a small cache": ({"num_blocks": 3}, "num_blocks=3 holds 48 tokens but max_model_len is 256: raise num_blocks to"),
    "a small cache, by vLLM's name": (
        {"num_gpu_blocks_override": 3},
        "num_gpu_blocks_override=3 holds 48 tokens but max_model_len is 256: raise num_gpu_blocks_override to",
    ),
    "a length": ({"max_model_len": 10**6}, "max_model_len=1000000 is more than the model's 256 tokens: lower it or"),
    "a type": ({"dtype": "float16"}, "dtype=float16 is not supported on the CPU"),
    "heads": ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide this model"),
    "stages": ({"pipeline_parallel_size": 99}, "pipeline_parallel_size=99 is more than the model's"),
    "layers": ({"pipeline_parallel_size": 2, "pipeline_layers": [1]}, "pipeline_layers=[1] has 1 stages but pipeline_"),
    "replicas": (
        {"data_parallel_size": 2, "distributed_executor_backend": "mp"},
        "data_parallel_size=2 cannot run with",
    ),
    "ranks": ({"data_parallel_size": 2, "distributed_executor_backend": "uni"}, "distributed_executor_backend=uniproc"),
    "an executor": ({"distributed_executor_backend": "ray"}, "distributed_executor_backend=ray is not one of"),
    "a module": ({"distributed_executor_backend": "no.such.Class"}, "distributed_executor_backend: "),
    "a worker": ({"worker_cls": "no.such.Class"}, "worker_cls"),
    "an extension": ({"worker_extension_cls": "no.such.Class"}, "worker_extension_cls"),
    "pooling": ({"pooling_type": "mean", "runner": "generate"}, "pooling_type"),
    "experts without ranks": ({"expert_placement": "round_robin"}, "set enable_expert_parallel=True, or leave it out"),
    "a device": ({"device": "tpu"}, "device=tpu is not one of"),
}


@pytest.mark.finding(number="D8")
@pytest.mark.parametrize("name", REFUSED)
def test_llm_error_names_its_keywords(name: str, monkeypatch: pytest.MonkeyPatch):
    arguments, expected = REFUSED[name]
    started = LLM.__dict__["_open"]
    monkeypatch.setattr(LLM, "_open", lambda llm: pytest.fail("an engine was started") or started(llm))
    words = words_of(**arguments)
    assert words is not None
    assert expected in words
    assert not KEY.search(words), words


@pytest.mark.finding(number="D8")
def test_path_error_names_the_model(tmp_path: Path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ValueError, match=re.escape(str(path))) as refused:
            LLM(path)
        assert not KEY.search(str(refused.value).replace(str(path), ""))


@pytest.mark.finding(number="D8")
@pytest.mark.parametrize("made", [LLM.from_engine_args, LLMEngine.from_engine_args], ids=["LLM", "LLMEngine"])
def test_engine_args_error_names_keywords(made: Any):
    with pytest.raises(ValueError, match=r"^num_gpu_blocks_override=3 .*max_model_len"):
        made(EngineArgs(MODEL, num_gpu_blocks_override=3, device="cpu"))


llm = fixture_of(lambda: LLM(MODEL, num_blocks=64, max_num_seqs=2, device="cpu"))


@pytest.mark.finding(number="D8")
def test_call_error_names_keywords(llm: LLM):
    long = {"prompt_token_ids": [65] * 300}
    with pytest.raises(PromptsRefusedError) as refused:
        llm.generate([long], use_tqdm=False)
    assert "but max_model_len is 256" in str(refused.value)
    assert "raise max_model_len" in refused.value.reasons[0]
    assert not KEY.search(str(refused.value) + refused.value.reasons[0])
    (output,) = llm.generate([long], SamplingParams(max_tokens=1), on_error="row", use_tqdm=False)
    assert "raise max_model_len" in str(output.error)
    assert not KEY.search(str(output.error))
    for call in (llm.embed, llm.classify, llm.reward):
        with pytest.raises((ValueError, RuntimeError)) as wrong:
            call(["a"], use_tqdm=False)
        assert "runner=" in str(wrong.value)
        assert not KEY.search(str(wrong.value)), wrong.value
    with pytest.raises(ValueError, match="tensor_parallel_size=") as divided:
        llm.reinitialize_distributed(tensor_parallel_size=3)
    assert not KEY.search(str(divided.value)), divided.value


@pytest.mark.finding(number="D8")
def test_weight_update_error_names_keywords():
    """The function that the block yields is called without `LLM`."""
    with LLM(MODEL, num_blocks=64, max_num_seqs=2, device="cpu") as own:
        with (
            pytest.raises(ValueError, match="allow_nonfinite=True") as wrong,
            own.weight_update() as load,
        ):
            load("model.norm.weight", torch.full((own.model_config.get_hidden_size(),), float("nan")))
        assert "model.allow_nonfinite" not in str(wrong.value)


@pytest.mark.finding(number="D8")
def test_command_line_error_keeps_its_keys(capsys: pytest.CaptureFixture[str]):
    """Negative control."""
    job = [f"model.path={MODEL}", "device=cpu", "cache.num_blocks=3", "plan=true"]
    launch.main(job)
    assert "cache.num_blocks=3 holds 48 tokens but model.max_model_len is 256" in "".join(capsys.readouterr())


@pytest.mark.finding(number="D8")
def test_text_without_a_key_is_unchanged():
    for text in ("/x/model.path/y", "model.safetensors", "model.embed_tokens.weight", "cache.num_blocks.rank0", "null"):
        assert with_keyword_names(text) == text
    assert (
        with_keyword_names("set cache.enable_prefix_caching=false or null") == "set enable_prefix_caching=False or None"
    )
    assert with_keyword_names("raise cache.num_blocks.") == "raise num_gpu_blocks_override."
    # Not "the configured method=x".
    assert with_keyword_names("speculative_config.method=x is") == "speculative_config['method']=x is"
    of_calls = ("tool_call_format", "reasoning_format")
    assert {*KEYWORDS, "model", *of_calls} >= {name for name in KEY_NAMES.values() if name.isidentifier()}


@pytest.mark.finding(number="D9")
def test_cache_beyond_host_memory_is_rejected():
    """It was a MemoryError of numpy."""
    folder = REPOSITORY / "scripts" / "demo" / "model"
    with pytest.raises(ConfigError, match=r"^num_blocks=1000000000000"):
        LLM(str(folder), device="cpu", num_blocks=10**12)
