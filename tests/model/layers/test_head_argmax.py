"""A head with an int8 pre-filter of its argmax generates the tokens of a head without one, also after updates."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from native_builds import HAS_AMX
from reference_models import CheckpointSpec, LlamaConfig, made_once, write_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from spmd_worker import LLM, SamplingParams
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ops.kernels.cpu.argmax_prefilter import ArgmaxPrefilter
from spmd_worker.ops.kernels.cpu.native import CpuKernels, cpu_kernels
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.worker.memory.estimate import head_argmax_bytes

KERNELS, _ = cpu_kernels(torch.bfloat16, has_argmax_prefilter=True)
HAS_PREFILTER = isinstance(KERNELS, CpuKernels) and KERNELS._prefilter is not None
needs_prefilter = pytest.mark.skipif(
    not HAS_PREFILTER, reason="AMX multiplies" if HAS_AMX else "no AVX-512 that multiplies bytes and bfloat16"
)
SPECS: dict[str, dict[str, Any]] = {"untied": {}, "tied": {"tie_word_embeddings": True}}
VOCAB_SIZE = 32_800
"""The smallest head that is pre-filtered, with rows of padding."""

PROMPTS = [[3 + (row * 31 + at * 17) % 32_000 for at in range(length)] for row, length in enumerate((7, 1, 20))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def folder_of(model: str, seed: int = 0) -> Path:
    spec = CheckpointSpec(LlamaConfig, {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1, **SPECS[model]})
    return made_once(f"filtered {model} {seed}", lambda folder: write_checkpoint(folder, spec, seed))


def opened(model: str, seed: int = 0, **settings: Any) -> LLM:
    return LLM(folder_of(model, seed), dtype="bfloat16", num_blocks=32, max_model_len=64, **settings)


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture
def filtered_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of logits that each call computed."""
    calls: list[int] = []
    find = ArgmaxPrefilter.find

    def counted(*arguments: Any) -> tuple[Tensor, Tensor, int]:
        found = find(*arguments)
        calls.append(found[2])
        return found

    monkeypatch.setattr(ArgmaxPrefilter, "find", counted)
    return calls


@needs_prefilter
@pytest.mark.parametrize("model", SPECS)
def test_tokens_are_those_of_a_head_without_prefilter(model: str, filtered_calls: list[int]):
    with opened(model, argmax_screen=False) as llm:
        expected = answers(llm)
    assert filtered_calls == []
    with opened(model) as llm:
        assert answers(llm) == expected
    assert len(filtered_calls) == GREEDY.max_tokens
    assert max(filtered_calls) < VOCAB_SIZE / 8


@needs_prefilter
@pytest.mark.parametrize("model", SPECS)
@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "slept"])
def test_tokens_are_those_of_new_weights_after_update(model: str, sleeps: bool, filtered_calls: list[int]):
    with opened(model, seed=1, argmax_screen=False) as llm:
        expected = answers(llm)
    with opened(model) as llm:
        assert answers(llm) != expected
        if sleeps:
            llm.sleep(level=2)
            llm.wake_up()
        llm.update_weights(load_file(folder_of(model, 1) / "model.safetensors").items())
        assert answers(llm) == expected
    assert len(filtered_calls) == 2 * GREEDY.max_tokens


@needs_prefilter
def test_prefilter_that_ignores_updates_is_detected(monkeypatch: pytest.MonkeyPatch):
    """Negative control: it is filled once."""
    forward = ArgmaxPrefilter.forward
    monkeypatch.setattr(ArgmaxPrefilter, "forward", lambda prefilter, *given: forward(prefilter, *given[:-1], 0))
    with opened("tied", seed=1) as llm:
        expected = answers(llm)
    with opened("tied") as llm:
        answers(llm)
        llm.update_weights(load_file(folder_of("tied", 1) / "model.safetensors").items())
        assert answers(llm) != expected


@needs_prefilter
def test_plan_counts_bytes_of_prefilter():
    model_config = read_model_files(folder_of("tied")).model_config
    with opened("tied") as llm, opened("tied", argmax_screen=False) as without:
        models = [each.llm_engine.executor.driver_worker.worker.get_model() for each in (llm, without)]
        held = [sum(each.nbytes for each in (*model.parameters(), *model.buffers())) for model in models]
    assert held[0] - held[1] == head_argmax_bytes(model_config, RankLayout(1), 0, "bfloat16", "cpu") > VOCAB_SIZE * 64


def test_plan_counts_nothing_without_prefilter():
    model_config = read_model_files(folder_of("tied")).model_config
    assert head_argmax_bytes(model_config, RankLayout(1), 0, "float32", "cpu") == 0
    assert head_argmax_bytes(model_config, RankLayout(1), 0, "bfloat16", "cuda") == 0
    # Half of it is too small.
    assert head_argmax_bytes(model_config, RankLayout(2), 0, "bfloat16", "cpu") == 0


@needs_prefilter
@pytest.mark.matrix
def test_two_ranks_with_half_of_a_head_each():
    """The halves are just large enough."""
    spec = CheckpointSpec(LlamaConfig, {"vocab_size": 32_768, "hidden_size": 128, "num_hidden_layers": 1})
    folder = made_once("filtered on two ranks", lambda folder: write_checkpoint(folder, spec))
    ranks.run_ranks(
        """
        import sys
        from spmd_worker import LLM, SamplingParams
        from spmd_worker.ops.kernels.cpu.argmax_prefilter import ArgmaxPrefilter
        find, calls = ArgmaxPrefilter.find, []
        ArgmaxPrefilter.find = lambda *given: calls.append(1) or find(*given)
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
    ).checked()
