"""Modules named vllm are this package's: seen on modules that stand in for ms-swift, with its colocate mode's calls.

ms-swift itself is not installed here; docs/guides/trainers.md says what was run with it.
"""

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
from adapter_folders import adapter_tensors, write_adapter

from spmd_worker import LLM, LoRARequest, SamplingParams  # with all they import, before the path is another

MODULE = "spmd_worker.integrations.swift"
MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
pytestmark = pytest.mark.matrix

ENGINE = '''
    import importlib.util
    import inspect
    from collections import OrderedDict
    from dataclasses import field

    assert importlib.util.find_spec("vllm") is not None
    import vllm
    import vllm.sampling_params
    from safetensors.torch import load_file
    from vllm import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.engine import async_llm_engine
    from vllm.lora.request import LoRARequest
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import GuidedDecodingParams, RequestOutputKind, StructuredOutputsParams

    for name in ("vllm.reasoning", "vllm.v1.worker", "vllm.model_executor.model_loader"):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        raise AssertionError(name)

    class TensorLoRARequest(LoRARequest):
        peft_config: dict = field(default=None)
        lora_tensors: dict = field(default=None)
        lora_embeddings = None

    assert "listen_socket" not in inspect.signature(StatelessProcessGroup.create).parameters
    inspect.signature(PoolingParams)


    def run(folder):
        """The calls of GRPOVllmEngine and of a rollout, in their order. Returns what was sampled."""
        known = inspect.signature(EngineArgs).parameters
        asked = dict(
            enable_expert_parallel=False, enable_sleep_mode=True, disable_cascade_attn=False, load_format="auto",
            logprobs_mode="processed_logprobs",
        )
        for name in [*asked, "mm_processor_cache_gb", "speculative_config", "quantization", "enable_lora", "seed"]:
            assert name in known, name
        engine = LLMEngine.from_engine_args(EngineArgs(
            model=folder, dtype="float32", gpu_memory_utilization=0.3, tensor_parallel_size=1, pipeline_parallel_size=1,
            max_model_len=64, max_num_seqs=8, disable_log_stats=True, disable_custom_all_reduce=True,
            enforce_eager=False, trust_remote_code=True, distributed_executor_backend="external_launcher", seed=0,
            **asked,
        ))
        engine.reset_mm_cache()
        assert engine.list_loras() == set()
        engine.sleep(2)
        assert "tags" in inspect.signature(engine.wake_up).parameters
        sampled = []
        for _ in range(2):
            assert engine.model_executor.is_sleeping
            engine.wake_up(tags=["weights"])
            model = engine.model_executor.driver_worker.worker.model_runner.model
            assert {name for name, _ in model.named_parameters()}
            model.load_weights(load_file(folder + "/model.safetensors").items())
            engine.reset_prefix_cache()
            engine.reset_encoder_cache()
            engine.wake_up(tags=["kv_cache"])
            for index in range(4):
                params = SamplingParams(max_tokens=5, temperature=1.0, top_k=4, logprobs=0, n=1, best_of=None, seed=7)
                params.stop, params.stop_token_ids = ["zzz"], []
                params.seed += index
                params.output_kind = RequestOutputKind.FINAL_ONLY
                engine.add_request(str(index), {"prompt_token_ids": [3, 4, 5 + index]}, params)
            outputs = {}
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        outputs[output.request_id] = output
            sampled.append([outputs[str(index)].outputs[0].token_ids for index in range(4)])
            assert all(len(each.outputs[0].logprobs) == 5 for each in outputs.values())
            engine.reset_prefix_cache()
            engine.sleep(2)
        assert engine.config.model.logprobs_mode == "tempered_logprobs"
        engine.shutdown()
        return sampled


    def patch_vllm_load_adapter():
        from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.utils import get_adapter_absolute_path
        LRUCacheWorkerLoRAManager._old_load_adapter = LRUCacheWorkerLoRAManager._load_adapter


    def run_policies(folder, policies):
        """The calls of `--vllm_enable_lora true`: the weights once, then each policy. Returns what was sampled."""
        patch_vllm_load_adapter()
        engine = LLMEngine.from_engine_args(EngineArgs(
            model=folder, dtype="float32", max_model_len=64, max_num_seqs=8, num_gpu_blocks_override=64,
            distributed_executor_backend="external_launcher", enable_lora=True, max_loras=1, max_lora_rank=4,
        ))
        sampled = []
        for number, (tensors, config) in enumerate(policies):
            if number == 0:
                inner = engine.model_executor.driver_worker.worker.model_runner.model
                inner.load_weights(load_file(folder + "/model.safetensors").items())
            trained = OrderedDict((name, tensor.clone()) for name, tensor in tensors.items())
            engine.add_lora(TensorLoRARequest(
                lora_name="swift_lora", lora_int_id=111, lora_path="swift_dummy_lora_path", peft_config=config,
                lora_tensors=trained, load_inplace=True,
            ))
            for tensor in trained.values():
                tensor.add_(1.0)  # the next step of the optimiser
            engine.reset_prefix_cache()
            assert 111 in engine.list_loras()
            for index in range(4):
                request = LoRARequest(lora_name="swift_lora", lora_int_id=111, lora_path="swift_dummy_lora_path")
                params = SamplingParams(max_tokens=5, temperature=0)
                engine.add_request(str(index), {"prompt_token_ids": [3, 4, 5 + index]}, params, lora_request=request)
            outputs = {}
            while engine.has_unfinished_requests():
                outputs.update({output.request_id: output for output in engine.step() if output.finished})
            sampled.append([list(outputs[str(index)].outputs[0].token_ids) for index in range(4)])
        engine.shutdown()
        return sampled
    '''
FILES = {
    "ms_swift-{version}.dist-info/METADATA": "Metadata-Version: 2.1\nName: ms-swift\nVersion: {version}\n",
    "trl/__init__.py": "",
    "trl/import_utils.py": "def is_vllm_available():\n    return True\n",
    "swift/__init__.py": "",
    "swift/infer_engine/__init__.py": "",
    "swift/infer_engine/vllm_engine.py": ENGINE,
    "swift/cli/__init__.py": "",
    "swift/cli/rlhf.py": (
        "if __name__ == '__main__':\n    import sys\n    from swift.infer_engine.vllm_engine import run\n"
        "    print('sampled', run(sys.argv[1]))\n"
    ),
}


def write_swift(folder: Path, version: str = "4.6.0") -> Path:
    for name, content in FILES.items():
        path = folder / name.format(version=version)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(content).replace("{version}", version))
    return folder


@pytest.fixture
def swift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A path on which the stand-in is, and nothing imported from it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    before = {name for name in sys.modules if is_of_it(name)}
    assert not before
    yield tmp_path
    for name in [name for name in sys.modules if is_of_it(name)]:
        del sys.modules[name]


def is_of_it(name: str) -> bool:
    return name == MODULE or name.split(".")[0] in ("vllm", "swift", "trl")


def test_colocate_mode_samples_with_this_engine(swift: Path, capsys: pytest.CaptureFixture[str]):
    write_swift(swift)
    module: Any = importlib.import_module(MODULE)
    assert "ms-swift 4.6.0" in module.replaced
    assert module.install() == module.replaced
    assert sys.modules["trl.import_utils"].is_vllm_available() is False
    engine: Any = importlib.import_module("swift.infer_engine.vllm_engine")
    first, second = engine.run(str(MODEL))
    assert first == second
    module.main(["rlhf", str(MODEL)])
    assert f"sampled {[first, second]}" in capsys.readouterr().out
    assert len({tuple(each) for each in first}) > 1
    with pytest.raises(RuntimeError, match=r"^AsyncLLMEngine .*colocate"):
        engine.AsyncLLMEngine()
    with pytest.raises(RuntimeError, match="give --vllm_mode colocate"):
        engine.StatelessProcessGroup.create("a", 1, 0, 2)


def test_policy_is_pushed_as_an_adapter(swift: Path, tmp_path_factory: pytest.TempPathFactory):
    write_swift(swift)
    importlib.import_module(MODULE)
    engine: Any = importlib.import_module("swift.infer_engine.vllm_engine")
    policies = [adapter_tensors(MODEL, seed) for seed in (1, 2)]
    sampled = engine.run_policies(str(MODEL), policies)
    with LLM(MODEL, dtype="float32", num_blocks=64, enable_lora=True) as llm:
        prompts = [{"prompt_token_ids": [3, 4, 5 + index]} for index in range(4)]
        sampling = SamplingParams(max_tokens=5, temperature=0)
        for seed, found in zip((1, 2), sampled, strict=True):
            folder = write_adapter(tmp_path_factory.mktemp("policy"), MODEL, seed)
            request = LoRARequest("a", seed, str(folder))
            outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=request)
            assert found == [list(output.outputs[0].token_ids) for output in outputs]
    assert sampled[0] != sampled[1]


def test_other_release_is_rejected_before_anything_is_replaced(swift: Path):
    write_swift(swift, "4.7.0")
    with pytest.raises(ImportError, match=r"ms-swift 4\.7\.0 .* 4\.6"):
        importlib.import_module(MODULE)
    assert "vllm" not in sys.modules


def test_missing_swift_is_reported_with_remedy(swift: Path):
    with pytest.raises(ImportError, match=r"not installed: .*'ms-swift==4\.6\.\*'"):
        importlib.import_module(MODULE)


def test_late_import_is_reported(swift: Path):
    write_swift(swift)
    importlib.import_module("swift")
    sys.modules["vllm"] = importlib.import_module("swift.infer_engine")
    with pytest.raises(ImportError, match=r"import spmd_worker.integrations.swift before"):
        importlib.import_module(MODULE)
