"""Weights changed in place, and new ones loaded, answer to the last bit as a checkpoint that has them."""

import importlib
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import ranks
from run_folder import made_once
from safetensors.torch import load_file, save_file

from spmd_worker import LLM, SamplingParams
from spmd_worker.layers.checkpoint_layer import PackedLayer

PROMPTS = [{"prompt_token_ids": random.Random(length).choices(range(10, 211), k=length)} for length in (1, 9, 23, 40)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=0)
MODELS = {"untied": {"intermediate_size": 128, "attention_bias": True}, "tied": {"tie_word_embeddings": True}}
CASES = [("untied", []), ("tied", []), ("untied", ["tensor"]), ("tied", ["pipeline"])]
BFLOAT16 = ("bfloat16", "bfloat16 by emulated AMX")
KINDS = ("embed_tokens", "q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "layernorm", "lm_head")


def scaled(name: str) -> float:
    return (-0.5, 2.0, -1.0)[len(name) % 3]  # bfloat16 does not round with them


def other_than(kind: str, name: str) -> float:
    return kind not in name


def folder_of(model: str) -> Path:
    def write(folder: Path) -> None:
        from reference_models import CheckpointSpec, LlamaConfig, write_checkpoint  # slow to import, so not on ranks

        for name, factor in (("base", lambda _: 1), ("changed", scaled)):
            path = write_checkpoint(folder / name, CheckpointSpec(LlamaConfig, MODELS[model])) / "model.safetensors"
            save_file({n: each * factor(n) for n, each in load_file(path).items()}, path, {"format": "pt"})

    return made_once(f"weights of {model}", write)


def answers(llm: LLM) -> str:
    return repr([(each.outputs, each.prompt_logprobs) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])


def change(llm: LLM, factor: Callable[[str], float]) -> str:
    llm.apply_model(lambda model: [each.mul_(factor(name)) for name, each in model.named_parameters()] and None)
    return answers(llm)


def compare(folder: Path, dtype: str, **layout: int) -> None:
    base, changed = (load_file(folder / name / "model.safetensors") for name in ("base", "changed"))
    with LLM(folder / "changed", dtype=dtype, num_blocks=64, **layout) as llm:
        expected = answers(llm)
    with LLM(folder / "base", dtype=dtype, num_blocks=64, **layout) as llm:
        before = answers(llm)
        assert change(llm, scaled) == expected != before
        for weights, expected_answers in ((base, before), (changed, expected)):
            llm.update_weights(weights.items())
            assert answers(llm) == expected_answers
        for kind in KINDS:
            zero = partial(other_than, kind)
            llm.update_weights((name, each * zero(name)) for name, each in base.items())
            expected = answers(llm)
            llm.update_weights(base.items())
            assert change(llm, zero) == expected
            assert (expected == before) == (kind == "lm_head" and "lm_head.weight" not in base)


@pytest.mark.parametrize("kernels", ["float32", *(pytest.param(each, marks=pytest.mark.matrix) for each in BFLOAT16)])
@pytest.mark.parametrize(("model", "cut"), CASES)
def test_new_weights_answer_as_a_checkpoint_with_them(model: str, cut: list[str], kernels: str):
    done = ranks.run_forked([__file__, folder_of(model), kernels, *cut], 1 + len(cut), timeout_s=240)
    assert done.returncode == 0, done.output


def test_the_comparison_sees_weights_that_are_not_packed_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PackedLayer, "write_region", lambda *_: None)
    with pytest.raises(AssertionError):
        compare(folder_of("tied"), "float32")


if __name__ == "__main__":
    if "emulated" in sys.argv[2]:
        import native_libraries

        for module in ("attention.cpu", "kernels.cpu.native"):
            importlib.import_module(f"spmd_worker.{module}").native_library = native_libraries.emulated
    compare(Path(sys.argv[1]), sys.argv[2].split()[0], **{f"{cut}_parallel_size": 2 for cut in sys.argv[3:]})
