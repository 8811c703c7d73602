"""The rollout for verl, on modules that stand in for verl, of its names and calls.

verl itself is not installed here; docs/guides/trainers_verl.md says what was run with it.
"""

import asyncio
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from safetensors.torch import load_file

from spmd_worker import LLM, SamplingParams

MODULE = "spmd_worker.integrations.verl"
MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
LENGTH = 6


class Config(SimpleNamespace):
    """verl's `RolloutConfig`, which has `get`."""

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)


class DataProto(SimpleNamespace):
    @classmethod
    def from_dict(cls, tensors: Any, non_tensors: Any, meta_info: Any) -> "DataProto":
        return cls(batch=tensors, non_tensor_batch=non_tensors, meta_info=meta_info)


class BaseRollout:
    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """verl's modules, of the supported release."""
    made = {name: ModuleType(name) for name in ("verl", "verl.workers", "verl.workers.rollout")}
    base: Any = ModuleType("verl.workers.rollout.base")
    base.BaseRollout, base._ROLLOUT_REGISTRY = BaseRollout, {("vllm", "async"): "another"}
    root: Any = made["verl"]
    root.DataProto, root.__version__, root.__path__ = DataProto, "0.9.1", []
    for name, module in {**made, base.__name__: base}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield base
    sys.modules.pop(MODULE, None)


def config(**changes: Any) -> Config:
    given: dict[str, Any] = {
        "dtype": "float32",
        "gpu_memory_utilization": 0.5,
        "enforce_eager": False,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "seed": 1,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "scheduling_policy": "fcfs",
        "logprobs_mode": "processed_logprobs",
        "max_model_len": 64,
        "load_format": "dummy",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "ignore_eos": False,
        "response_length": LENGTH,
        "calculate_log_probs": True,
        "free_cache_engine": True,
        "engine_kwargs": {"spmd_worker": {"device": "cpu", "num_blocks": 40}},
        "val_kwargs": SimpleNamespace(do_sample=False, temperature=0.0, top_p=1.0, top_k=-1),
    }
    return Config(**{**given, **changes})


def prompts(rows: list[list[int]], **meta: Any) -> DataProto:
    """Padded left with 0."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return DataProto.from_dict(tensors, {"uid": ["a"] * len(rows)}, {"pad_token_id": 0, **meta})


@pytest.fixture
def rollout(verl: ModuleType) -> Iterator[Any]:
    made = importlib.import_module(MODULE).SpmdRollout(config(), SimpleNamespace(local_path=str(MODEL)), None)
    yield made
    made.llm.close()


def weights() -> list[tuple[str, torch.Tensor]]:
    return list(load_file(MODEL / "model.safetensors").items())


def sync(rollout: Any) -> None:
    """verl's order of a sync."""
    asyncio.run(rollout.resume(["weights"]))
    asyncio.run(rollout.update_weights(iter(weights()), peft_config=None, base_sync_done=True, global_steps=3))
    asyncio.run(rollout.resume(["kv_cache"]))


def test_class_is_registered_under_its_name(verl: Any):
    importlib.import_module(MODULE)
    assert verl._ROLLOUT_REGISTRY[("spmd_worker", "async")] == f"{MODULE}.SpmdRollout"


def test_another_release_registers_nothing(verl: Any):
    sys.modules["verl"].__version__ = "0.10.0"  # type: ignore[attr-defined]  # a module
    with pytest.raises(ImportError, match=r"verl 0.10.0 is installed .*verl==0\.9\.\*"):
        importlib.import_module(MODULE)
    assert len(verl._ROLLOUT_REGISTRY) == 1


@pytest.mark.parametrize(
    ("absent", "said"),
    [
        ("verl", r"^verl is not installed: pip install --no-deps 'verl==0\.9\.\*'$"),
        ("orjson", r"^verl cannot be imported \(No module named 'orjson'\): install that package too"),
    ],
)
def test_missing_package_is_named_with_its_remedy(verl: Any, monkeypatch: pytest.MonkeyPatch, absent: str, said: str):
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "verl":
            raise ModuleNotFoundError(f"No module named {absent!r}", name=absent)

    for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    with pytest.raises(ImportError, match=said):
        importlib.import_module(MODULE)
    assert len(verl._ROLLOUT_REGISTRY) == 1


def test_batch_has_responses_of_synced_weights(rollout: Any):
    rows = [[5, 6, 7, 8, 9], [40, 41], [5, 6, 7, 8, 9]]
    before = rollout.generate_sequences(prompts(rows, do_sample=False)).batch["responses"]
    for _ in range(2):
        sync(rollout)
        made = rollout.generate_sequences(prompts(rows, validate=True))
        asyncio.run(rollout.release())
        assert rollout.llm.sleeping_tags == ("weights", "kv_cache")
    batch = made.batch
    assert not torch.equal(batch["responses"], before), "the first weights are random ones"
    with LLM(MODEL, device="cpu", num_blocks=40, max_model_len=64) as llm:
        expected = llm.generate(rows, SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=0), use_tqdm=False)
    for row, output in enumerate(expected):
        (sampled,) = output.outputs
        count = len(sampled.token_ids)
        assert batch["responses"][row].tolist() == sampled.token_ids + [0] * (LENGTH - count)
        assert batch["response_mask"][row].tolist() == [1] * count + [0] * (LENGTH - count)
    assert batch["prompts"].tolist() == prompts(rows).batch["input_ids"].tolist()
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], dim=1))
    assert batch["attention_mask"].shape == batch["position_ids"].shape == (3, 5 + LENGTH)
    assert batch["position_ids"][1].tolist() == [0, 0, 0, *range(2 + LENGTH)]
    assert made.non_tensor_batch == {"uid": ["a"] * 3}


def test_log_probabilities_are_those_of_trainer(rollout: Any):
    """Divided by the temperature and not filtered, though verl asks for processed ones."""
    sync(rollout)
    assert rollout.llm.llm_engine.config.model.logprobs_mode == "tempered_logprobs"
    rows = [[5, 6, 7, 8, 9]] * 4
    batch = rollout.generate_sequences(prompts(rows)).batch
    params = SamplingParams(temperature=0.8, top_p=1.0, max_tokens=1)
    for ids, mask, logprobs in zip(batch["responses"], batch["response_mask"].bool(), batch["rollout_log_probs"]):
        assert (logprobs[~mask] == 0).all()
        raw = rollout.llm.score_tokens([rows[0]], [ids[mask].tolist()], params)[0]
        assert len(raw) == mask.sum()
        assert (logprobs[mask] != torch.tensor(raw)).any()
    assert len({tuple(row) for row in batch["responses"].tolist()}) > 1, "each row has its own random numbers"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda made: made.update_weights(iter([]), wire_format="delta_flush"), "wire_format='delta_flush'"),
        (lambda made: made.update_weights(iter([]), peft_config={"r": 4}), r"model\.lora\.merge"),
    ],
)
def test_other_weights_are_refused(rollout: Any, call: Any, words: str):
    with pytest.raises(ValueError, match=words):
        asyncio.run(call(rollout))


def test_images_are_refused(rollout: Any):
    given = prompts([[1]])
    given.non_tensor_batch["multi_modal_data"] = [{}]
    with pytest.raises(ValueError, match="multi_modal_data"):
        rollout.generate_sequences(given)
