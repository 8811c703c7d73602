"""TRL's names are replaced by ours: seen on a tree of modules that stands in for TRL, of its shape and with its calls.

TRL itself is not installed here; docs/guides/trainers.md says what was run with it.
"""

import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks

import spmd_worker.llm  # noqa: F401  # with all it imports, before the path is another

MODULE = "spmd_worker.integrations.trl"
MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"

TRAINERS = {"grpo_trainer": "GRPOTrainer", "distillation_trainer": "DistillationTrainer"}
GENERATION = '''
    from safetensors.torch import load_file

    def is_vllm_available(min_version=None):
        return False

    class VLLMGeneration:
        """The calls of TRL's colocate mode, in its order."""

        mode, model = "colocate", None

        def __init__(self, folder):
            self.folder = folder
            self._init_vllm()

        def _init_vllm(self):
            assert is_vllm_available()
            self.llm = LLM(
                model=self.folder, tensor_parallel_size=1, gpu_memory_utilization=0.9, max_model_len=64, max_num_seqs=8,
                enable_sleep_mode=True, model_impl="vllm", distributed_executor_backend="external_launcher", seed=0,
                max_num_batched_tokens=4096, logprobs_mode="processed_logprobs", quantization=None,
                trust_remote_code=False,
            )
            self.llm.sleep(level=2)

        def _iter_named_params(self):
            yield from load_file(self.folder + "/model.safetensors").items()

        def sync_weights(self):
            self.llm.wake_up(tags=["weights"])
            model = self.llm.llm_engine.model_executor.driver_worker.model_runner.model
            for name, tensor in self._iter_named_params():
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

TRAINER = '''
    import torch
    from trl.generation import vllm_generation

    def exchange(what, value, size):
        """Every rank must be at the same call: where another is at another one, TRL waits for ever."""
        gathered = [None] * size
        torch.distributed.all_gather_object(gathered, (what, value))
        assert all(each[0] == what for each in gathered), f"ranks are at {[each[0] for each in gathered]}"
        return [each[1] for each in gathered]

    class Generation:
        """`VLLMGeneration`, as its tool loop meets it: prompts are gathered, and each rank keeps its slice."""

        mode = "colocate"

        def __init__(self, folder, tensor_parallel_size, enable_sleep_mode):
            self.tensor_parallel_size, self.enable_sleep_mode = tensor_parallel_size, enable_sleep_mode
            self._llm_weights_sleeping, self.num_syncs = enable_sleep_mode, 0
            self.llm = vllm_generation.LLM(
                folder, tensor_parallel_size=tensor_parallel_size, num_blocks=32, max_model_len=64,
                enable_sleep_mode=enable_sleep_mode, logprobs_mode="processed_logprobs",
            )
            self.weights = vllm_generation.load_file(folder + "/model.safetensors")
            if enable_sleep_mode:
                self.llm.sleep(level=2)

        def sync_weights(self):
            exchange("sync", None, torch.distributed.get_world_size())
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping, self.num_syncs = False, self.num_syncs + 1
            self.llm.update_weights(self.weights.items())
            self.llm.reset_prefix_cache()

        def generate(self, prompts):
            if self.enable_sleep_mode and self._llm_weights_sleeping:
                self.sync_weights()
            own, size = len(prompts), self.tensor_parallel_size
            if size > 1:
                prompts = sum(exchange("prompts", prompts, size), [])
            if self.enable_sleep_mode:
                self.llm.wake_up(tags=["kv_cache"])
            sampling = vllm_generation.SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
            outputs = self.llm.generate(prompts, sampling_params=sampling, use_tqdm=False)
            if size > 1:
                first = torch.distributed.get_rank() * own
                outputs = outputs[first : first + own]
            if self.enable_sleep_mode:
                self.llm.sleep(level=2)
                self._llm_weights_sleeping = True
            return [list(output.outputs[0].token_ids) for output in outputs]

    class Accelerator:
        device = "cpu"

        def gather(self, tensor):
            return torch.cat(exchange("gather", tensor, torch.distributed.get_world_size()))

    class GRPOTrainer:
        def __init__(self, generation):
            self.vllm_generation, self.accelerator = generation, Accelerator()

        def _tool_call_loop(self, prompts, completions):
            """Row i calls tools as often as its completion says, and each call asks again with a longer prompt."""
            answers = {}
            while rows := [i for i, each in enumerate(completions) if each[0]["tool_calls"]]:
                prompts = {i: [*prompts[i], 9, i] for i in rows}
                for i, answer in zip(rows, self.vllm_generation.generate([prompts[i] for i in rows])):
                    answers.setdefault(i, []).append(answer)
                    completions[i][0]["tool_calls"] -= 1
            return answers
    '''

TOOLS = """
    import os
    import sys

    import torch
    from spmd_worker.integrations import trl
    from trl.trainer import grpo_trainer

    folder, rounds = sys.argv[1], eval(sys.argv[2])
    is_wrapped, sleeps = sys.argv[3] == "wrapped", sys.argv[4] == "sleeps"
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not is_wrapped:
        grpo_trainer.GRPOTrainer._tool_call_loop = grpo_trainer.GRPOTrainer._tool_call_loop.__wrapped__
    generation = grpo_trainer.Generation(folder, size, sleeps)
    assert generation.llm.llm_engine.config.model.logprobs_mode == "tempered_logprobs"
    trainer = grpo_trainer.GRPOTrainer(generation)
    for _ in range(2):
        prompts = [[3 + rank, 4, 5, i] for i in range(len(rounds[rank]))]
        answers = trainer._tool_call_loop(prompts, [[{"tool_calls": each}] for each in rounds[rank]])
        assert [len(answers.get(i, ())) for i in range(len(prompts))] == rounds[rank]
        assert (generation.tensor_parallel_size, generation.enable_sleep_mode) == (size, sleeps)
        grpo_trainer.exchange("lengths", len(answers), size)
    # One write: lines of two ranks must not run into each other.
    os.write(1, f"answers {rank} {sorted(answers.items())} after {generation.num_syncs} syncs\\n".encode())
    generation.llm.close()
    """

SCRIPT = """
    import sys

    from trl.generation import vllm_generation

    generation = vllm_generation.VLLMGeneration(sys.argv[1])
    for _ in range(2):
        generation.sync_weights()
        print([len(tokens) for tokens in generation.generate([[3, 4, 5], [3, 4, 6]])])
    form = vllm_generation.StructuredOutputsParams(regex="[ab]{3}")
    params = vllm_generation.SamplingParams(structured_outputs=form, temperature=1.0)
    generation.sync_weights()
    generation.llm.wake_up(tags=["kv_cache"])
    print(generation.llm.generate([[3, 4, 5]], params, use_tqdm=False)[0].outputs[0].text)
    generation.llm.close()
    """


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    write(tmp_path / "trl" / "__init__.py", '__version__ = "1.16.0"\n')
    write(tmp_path / "trl" / "generation" / "__init__.py", "")
    write(tmp_path / "trl" / "generation" / "vllm_generation.py", GENERATION)
    for name in ("grpo_trainer", "distillation_trainer"):
        write(tmp_path / "trl" / "trainer" / f"{name}.py", TRAINER.replace("GRPOTrainer", TRAINERS[name]))
    write(tmp_path / "trl" / "trainer" / "__init__.py", "")
    write(tmp_path / "train.py", SCRIPT)
    write(tmp_path / "tools.py", TOOLS)
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
    return {name: each for name, each in sys.modules.items() if name.partition(".")[0] == "trl" or name == MODULE}


@pytest.fixture
def ours(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ours]:
    before = concerned()
    yield Ours(packages, monkeypatch)
    for name in concerned():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.guarantee("TRL's trainers sample with this engine")
def test_trl_script_runs_with_this_engine(ours: Ours, capfd: pytest.CaptureFixture[str]):
    ours.imported().main([str(ours.packages / "train.py"), str(MODEL)])
    output = capfd.readouterr()
    first, second, constrained = output.out.splitlines()
    assert first == second == "[4, 4]"
    assert re.fullmatch("[ab]{3}", constrained)
    said = "spmd_worker samples for trl 1.16.0: is_vllm_available, LLM, SamplingParams, StructuredOutputsParams, "
    said += "RequestOutput of trl.generation.vllm_generation are replaced (none: vLLM is not installed)\n"
    assert output.err.startswith(said)
    with pytest.raises(SystemExit, match=r"^usage: .*integrations.trl \[--merge-lora\] SCRIPT.py"):
        sys.modules[MODULE].main([])
    with pytest.raises(SystemExit, match=r"^none\.py is not a file: give the script to run\nusage: "):
        sys.modules[MODULE].main(["none.py"])
    sys.modules[MODULE].main(["--help"])
    assert capfd.readouterr().out.startswith("usage: python -m spmd_worker.integrations.trl")


@pytest.mark.control("TRL's trainers sample with this engine")
def test_engine_check_detects_missing_integration(ours: Ours, monkeypatch: pytest.MonkeyPatch, control):
    """Negative control."""
    module = ours.imported()
    importlib.reload(sys.modules["trl.generation.vllm_generation"])
    with control():
        module.main([str(ours.packages / "train.py"), str(MODEL)])


def test_trainers_own_availability_check_finds_the_engine(ours: Ours):
    """TRL's trainer for distillation has a name of its own for that question."""
    path = ours.packages / "trl" / "trainer" / "distillation_trainer.py"
    path.write_text(f"{path.read_text()}\n\ndef is_vllm_available():\n    return False\n")
    ours.imported()
    assert sys.modules["trl.trainer.distillation_trainer"].is_vllm_available() is True


def test_other_trl_release_is_rejected_and_replaces_nothing(ours: Ours):
    init, generation = ours.packages / "trl" / "__init__.py", "trl/generation/vllm_generation.py"
    write(init, '__version__ = "1.17.10"\n')
    with pytest.raises(ImportError, match=r"^trl 1\.17\.10 .*calls .*1\.16: pip"):
        ours.imported()
    assert "trl.generation" not in sys.modules
    write(init, '__version__ = "1.16.1"\n')
    write(ours.packages / generation, "LLM = None\n")
    with pytest.raises(ImportError, match="is_vllm_available or VLLMGeneration"):
        ours.imported()
    assert sys.modules["trl.generation.vllm_generation"].LLM is None


def with_tools(packages: Path, rounds: list[list[int]], *how: str) -> ranks.CompletedRanks:
    """`rounds`: how often each row of each rank calls tools."""
    arguments = [packages / "tools.py", MODEL, repr(rounds), *how]
    return ranks.run_forked(arguments, len(rounds), timeout_s=120)


def answers_of(done: ranks.CompletedRanks) -> list[tuple[str, str]]:
    """Of each rank: its answers, and after how many syncs."""
    assert done.returncode == 0, done.output
    return [each[1:] for each in sorted(re.findall(r"answers (\d) (.*?) after (\d) syncs", done.output))]


def test_ranks_with_uneven_tool_calls_all_finish(packages: Path):
    rounds = [[2, 0, 1], [0, 0]]
    awake, asleep = (answers_of(with_tools(packages, rounds, "wrapped", how)) for how in ("awake", "sleeps"))
    assert [answers for answers, _ in awake] == [answers for answers, _ in asleep]
    assert awake[1] == ("[]", "0")
    # Each loop is one block of turns, before which the weights come once, however often tools are called.
    assert [num_syncs for _, num_syncs in asleep] == ["2", "2"]
    # A rank that is alone has the same answers.
    assert answers_of(with_tools(packages, rounds[:1], "wrapped", "awake"))[0] == awake[0]


def test_weights_are_not_synced_when_tools_are_uncalled(packages: Path):
    done = with_tools(packages, [[0, 0], [0]], "wrapped", "sleeps")
    assert answers_of(done) == [("[]", "0")] * 2


@pytest.mark.stress
def test_ranks_reach_different_calls_without_turns(packages: Path):
    """Negative control: where TRL would wait for ever."""
    done = with_tools(packages, [[2, 0, 1], [0, 0]], "as it is", "awake")
    assert done.returncode != 0
    assert re.search(r"ranks are at \['prompts', '(lengths|gather)'\]", done.output)
