"""A head with a screen answers as one without, whatever happens to its weight; and it rests where it saves nothing."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from native_libraries import HAS_AMX
from reference_models import CheckpointSpec, LlamaConfig, made_once, write_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from spmd_worker import LLM, SamplingParams
from spmd_worker.model.layers.head_screen import HeadScreen
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ops.kernels.cpu.native import CpuKernels, cpu_kernels
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.worker.memory.estimate import screen_bytes_of

KERNELS, _ = cpu_kernels(torch.bfloat16)
HAS_SCREENS = isinstance(KERNELS, CpuKernels) and KERNELS._has_screens
needs_screens = pytest.mark.skipif(
    not HAS_SCREENS, reason="an AMX unit multiplies" if HAS_AMX else "no AVX-512 that multiplies bytes and bfloat16"
)
SPECS: dict[str, dict[str, Any]] = {"untied": {}, "tied": {"tie_word_embeddings": True}}
VOCAB_SIZE = 32_800
"""Just so large that its head is screened, with rows of padding."""

PROMPTS = [[3 + (row * 31 + at * 17) % 32_000 for at in range(length)] for row, length in enumerate((7, 1, 20))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def folder_of(model: str, seed: int = 0) -> Path:
    spec = CheckpointSpec(LlamaConfig, {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1, **SPECS[model]})
    return made_once(f"screened {model} {seed}", lambda folder: write_checkpoint(folder, spec, seed))


def opened(model: str, seed: int = 0, **settings: Any) -> LLM:
    return LLM(folder_of(model, seed), dtype="bfloat16", num_blocks=32, max_model_len=64, **settings)


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture
def screened_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many logits each call computed the products."""
    calls: list[int] = []
    find = CpuKernels.screened_argmax

    def counted(*arguments: Any) -> tuple[Tensor, Tensor, int]:
        found = find(*arguments)
        calls.append(found[2])
        return found

    monkeypatch.setattr(CpuKernels, "screened_argmax", counted)
    return calls


@needs_screens
@pytest.mark.parametrize("model", SPECS)
def test_answers_are_those_of_a_head_without_a_screen(model: str, screened_calls: list[int]):
    with opened(model, argmax_screen=False) as llm:
        expected = answers(llm)
    assert screened_calls == []
    with opened(model) as llm:
        assert answers(llm) == expected
    assert len(screened_calls) == GREEDY.max_tokens
    assert max(screened_calls) < VOCAB_SIZE / 8


@needs_screens
@pytest.mark.parametrize("model", SPECS)
@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "slept"])
def test_after_an_update_answers_are_those_of_the_new_weights(model: str, sleeps: bool, screened_calls: list[int]):
    with opened(model, seed=1, argmax_screen=False) as llm:
        expected = answers(llm)
    with opened(model) as llm:
        assert answers(llm) != expected
        if sleeps:
            llm.sleep(level=2)
            llm.wake_up()
        llm.update_weights(load_file(folder_of(model, 1) / "model.safetensors").items())
        assert answers(llm) == expected
    assert len(screened_calls) == 2 * GREEDY.max_tokens


@needs_screens
def test_a_screen_that_does_not_follow_its_weight_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Negative control: it is made once."""
    find = HeadScreen.largest
    monkeypatch.setattr(HeadScreen, "largest", lambda screen, *given: find(screen, *given[:-1], 0))
    with opened("tied", seed=1) as llm:
        expected = answers(llm)
    with opened("tied") as llm:
        answers(llm)
        llm.update_weights(load_file(folder_of("tied", 1) / "model.safetensors").items())
        assert answers(llm) != expected


@needs_screens
def test_what_a_screen_takes_is_counted():
    model_config = read_model_files(folder_of("tied")).model_config
    with opened("tied") as llm, opened("tied", argmax_screen=False) as without:
        models = [each.llm_engine.executor.driver_worker.worker.get_model() for each in (llm, without)]
        held = [sum(each.nbytes for each in (*model.parameters(), *model.buffers())) for model in models]
    assert held[0] - held[1] == screen_bytes_of(model_config, RankLayout(1), 0, "bfloat16", "cpu") > VOCAB_SIZE * 64


def test_no_screen_is_counted_where_there_is_none():
    model_config = read_model_files(folder_of("tied")).model_config
    assert screen_bytes_of(model_config, RankLayout(1), 0, "float32", "cpu") == 0
    assert screen_bytes_of(model_config, RankLayout(1), 0, "bfloat16", "cuda") == 0
    # Half of it is too small.
    assert screen_bytes_of(model_config, RankLayout(2), 0, "bfloat16", "cpu") == 0


class CountingKernels:
    """As far as a screen needs them: products of which a given number of logits is computed."""

    def __init__(self) -> None:
        self.num_computed, self.calls = 0, []

    def linear_argmax(self, *arguments: Any) -> tuple[str, str]:
        self.calls.append("whole")
        return "values", "columns"

    def screened_argmax(self, *arguments: Any) -> tuple[str, str, int]:
        self.calls.append("screened")
        return "values", "columns", self.num_computed

    def make_screen_(self, *arguments: Any) -> None:
        self.calls.append("made")

    def took(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def test_a_screen_is_made_when_the_weight_has_changed_and_rests_longer_each_time_it_saves_nothing():
    kernels = CountingKernels()
    screen, hidden, weight = HeadScreen(kernels, 16), torch.zeros(2, 4), torch.zeros(100, 4)

    def call(changes: int = 0) -> list[str]:
        assert screen.largest(hidden, weight, 100, None, changes) == ("values", "columns")
        return kernels.took()

    assert [call(), call(), call(3), call(3)] == [["made", "screened"], ["screened"]] * 2
    kernels.num_computed = 25
    assert call(3) == ["screened"], "an eighth is no more than an eighth"
    kernels.num_computed = 26
    for rest in (64, 128, 256):
        assert call(3) == ["screened"]
        assert all(call(3) == ["whole"] for _ in range(rest))
    kernels.num_computed = 0
    assert [call(3), call(4)] == [["screened"], ["made", "screened"]]
    kernels.num_computed = 26
    call(4)
    assert [call(4) for _ in range(65)] == [["whole"]] * 64 + [["screened"]]


@needs_screens
@pytest.mark.matrix
def test_two_ranks_with_half_of_a_head_each():
    """Whose halves are just large enough."""
    spec = CheckpointSpec(LlamaConfig, {"vocab_size": 32_768, "hidden_size": 128, "num_hidden_layers": 1})
    folder = made_once("screened on two ranks", lambda folder: write_checkpoint(folder, spec))
    done = ranks.run_ranks(
        """
        import sys
        from spmd_worker import LLM, SamplingParams
        from spmd_worker.ops.kernels.cpu.native import CpuKernels
        find, calls = CpuKernels.screened_argmax, []
        CpuKernels.screened_argmax = lambda *given: calls.append(1) or find(*given)
        found = []
        for argmax_screen in (False, True):
            with LLM(sys.argv[1], dtype="bfloat16", num_blocks=32, max_model_len=64, tensor_parallel_size=2,
                     argmax_screen=argmax_screen) as llm:
                outputs = llm.generate([[5, 6, 7], [900]], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
                found.append(([each.outputs[0].token_ids for each in outputs], len(calls)))
        assert found[0][0] == found[1][0], found
        assert (found[0][1], found[1][1] > 0) == (0, True), found
        """,
        2,
        240.0,
        [folder],
    )
    assert done.returncode == 0, done.output
