"""TRL's names are replaced by ours: seen on a tree of modules that stands in for TRL, of its shape and with its calls.

TRL itself is not installed here; docs/trainers.md says what was run with it.
"""

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks

import spmd_worker.llm  # noqa: F401  # with all it imports, before the path is another
from spmd_worker.errors import ConfigError, ModelConfigError

MODULE = "spmd_worker.integrations.trl"
MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"

GENERATION = '''
    def is_vllm_available(min_version=None):
        return False

    class VLLMGeneration:
        """The calls of TRL's colocate mode, in its order."""

        def __init__(self, folder):
            assert is_vllm_available()
            self.llm = LLM(
                model=folder, tensor_parallel_size=1, gpu_memory_utilization=0.9, max_model_len=64, max_num_seqs=8,
                enable_sleep_mode=True, model_impl="vllm", distributed_executor_backend="external_launcher", seed=0,
                max_num_batched_tokens=4096, logprobs_mode="processed_logprobs", quantization=None,
                trust_remote_code=False,
            )
            self.llm.sleep(level=2)

        def sync_weights(self, pairs):
            self.llm.wake_up(tags=["weights"])
            model = self.llm.llm_engine.model_executor.driver_worker.model_runner.model
            for name, tensor in pairs:
                model.load_weights([(name, tensor)])
            self.llm.reset_prefix_cache()

        def generate(self, prompts):
            sampling = SamplingParams(
                n=1, repetition_penalty=1.0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=4, logprobs=0
            )
            self.llm.wake_up(tags=["kv_cache"])
            outputs = self.llm.generate(
                [{"prompt_token_ids": ids} for ids in prompts], sampling_params=sampling, use_tqdm=False
            )
            self.llm.sleep(level=2)
            assert all(isinstance(output, RequestOutput) for output in outputs)
            return [output.outputs[0].token_ids for output in outputs]
'''

SCRIPT = """
    import sys

    from safetensors.torch import load_file
    from trl.generation import vllm_generation

    generation = vllm_generation.VLLMGeneration(sys.argv[1])
    for _ in range(2):
        generation.sync_weights(load_file(sys.argv[1] + "/model.safetensors").items())
        print([len(tokens) for tokens in generation.generate([[3, 4, 5], [3, 4, 6]])])
    try:
        vllm_generation.StructuredOutputsParams(regex="a+")
    except ValueError as error:
        print(error)
    generation.llm.close()
    """

HUB = """
    from pathlib import Path

    class LocalEntryNotFoundError(FileNotFoundError, ValueError):
        pass

    def snapshot_download(name, *, local_files_only):
        assert local_files_only
        if name != "somebody/tiny":
            raise LocalEntryNotFoundError(name)
        return "FOLDER"
    """


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    write(tmp_path / "trl" / "__init__.py", '__version__ = "1.16.0"\n')
    write(tmp_path / "trl" / "generation" / "__init__.py", "")
    write(tmp_path / "trl" / "generation" / "vllm_generation.py", GENERATION)
    write(tmp_path / "train.py", SCRIPT)
    return tmp_path


class Ours:
    """The integration as it is when it is imported anew, with the stand-in in the place of TRL."""

    def __init__(self, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packages = packages
        monkeypatch.syspath_prepend(str(packages))
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "argv", ["python"])
        monkeypatch.setattr(sys, "path", [str(packages), *sys.path])

    def imported(self) -> Any:
        importlib.invalidate_caches()
        for name in concerned():
            del sys.modules[name]
        return importlib.import_module(MODULE)


def concerned() -> dict[str, Any]:
    tops = ("trl", "huggingface_hub")
    return {name: each for name, each in sys.modules.items() if name.partition(".")[0] in tops or name == MODULE}


@pytest.fixture
def ours(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ours]:
    before = concerned()
    yield Ours(packages, monkeypatch)
    for name in concerned():
        del sys.modules[name]
    sys.modules.update(before)


def test_a_script_for_trl_runs_with_this_engine_in_its_place(ours: Ours, capfd: pytest.CaptureFixture[str]):
    ours.imported().main([str(ours.packages / "train.py"), str(MODEL)])
    output = capfd.readouterr()
    first, second, refusal = output.out.splitlines()
    assert first == second == "[4, 4]"
    assert refusal.startswith("structured_outputs={'regex': 'a+'} is refused: constrained decoding does not exist")
    said = "spmd_worker samples for trl 1.16.0: is_vllm_available, LLM, SamplingParams, StructuredOutputsParams, "
    said += "RequestOutput of trl.generation.vllm_generation are replaced (none: vLLM is not installed)\n"
    assert output.err.startswith(said)
    with pytest.raises(SystemExit, match=r"^usage: python -m spmd_worker.integrations.trl SCRIPT.py"):
        sys.modules[MODULE].main([])


def test_without_the_integration_the_stand_in_has_no_engine(ours: Ours, monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    module = ours.imported()
    importlib.reload(sys.modules["trl.generation.vllm_generation"])
    with pytest.raises(AssertionError):
        module.main([str(ours.packages / "train.py"), str(MODEL)])


def test_another_release_of_trl_is_refused_and_nothing_is_replaced(ours: Ours):
    init, generation = ours.packages / "trl" / "__init__.py", "trl/generation/vllm_generation.py"
    write(init, '__version__ = "1.17.10"\n')
    with pytest.raises(
        ImportError, match=r"^trl 1\.17\.10 is installed and this package knows the calls of 1\.16: pip"
    ):
        ours.imported()
    assert "trl.generation" not in sys.modules
    write(init, '__version__ = "1.16.1"\n')
    write(ours.packages / generation, "LLM = None\n")
    with pytest.raises(ImportError, match="has no is_vllm_available or VLLMGeneration: nothing is replaced"):
        ours.imported()
    assert sys.modules["trl.generation.vllm_generation"].LLM is None


def test_a_name_of_the_hub_is_the_folder_of_its_local_copy(ours: Ours, monkeypatch: pytest.MonkeyPatch):
    write(ours.packages / "huggingface_hub" / "__init__.py", HUB)
    module = ours.imported()
    assert [module.local_folder(each) for each in ("somebody/tiny", ".", "/no/such")] == ["FOLDER", ".", "/no/such"]
    with pytest.raises(ConfigError, match=r"^model=somebody/else is neither a folder nor in huggingface_hub's cache"):
        module.TrainerLLM(model="somebody/else")
    with pytest.raises(ModelConfigError, match=r"^model\.path=FOLDER is not a folder"):
        module.TrainerLLM(model="somebody/tiny")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"^model=somebody/tiny is no folder, and huggingface_hub, which knows where"):
        module.local_folder("somebody/tiny")
