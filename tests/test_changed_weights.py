"""Weights changed in place, and new ones loaded, answer to the last bit as a checkpoint that has them."""

import random
import sys
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
FACTORS = (-0.5, 2.0, -1.0)  # by a name's length; bfloat16 does not round with them


def folder_of(model: str) -> Path:
    def write(folder: Path) -> None:
        from reference_models import CheckpointSpec, LlamaConfig, write_checkpoint  # slow to import, so not on ranks

        for name, factors in (("base", (1, 1, 1)), ("changed", FACTORS)):
            path = write_checkpoint(folder / name, CheckpointSpec(LlamaConfig, MODELS[model])) / "model.safetensors"
            save_file({n: each * factors[len(n) % 3] for n, each in load_file(path).items()}, path, {"format": "pt"})

    return made_once(f"weights of {model}", write)


def answers(llm: LLM) -> str:
    return repr([(each.outputs, each.prompt_logprobs) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])


def compare(folder: Path, dtype: str, **layout: int) -> None:
    with LLM(folder / "changed", dtype=dtype, num_blocks=64, **layout) as llm:
        expected = answers(llm)
    with LLM(folder / "base", dtype=dtype, num_blocks=64, **layout) as llm:
        before = answers(llm)
        llm.apply_model(lambda m: [each.mul_(FACTORS[len(n) % 3]) for n, each in m.named_parameters()] and None)
        llm.set_weight_version(1)
        assert answers(llm) == expected != before
        for name, expected_answers in (("base", before), ("changed", expected)):
            llm.update_weights(load_file(folder / name / "model.safetensors").items())
            assert answers(llm) == expected_answers


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(("model", "cut"), CASES)
def test_new_weights_answer_as_a_checkpoint_with_them(model: str, cut: list[str], dtype: str):
    done = ranks.run_forked([__file__, folder_of(model), dtype, *cut], 1 + len(cut), timeout_s=240)
    assert done.returncode == 0, done.output


def test_the_comparison_sees_weights_that_are_not_packed_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PackedLayer, "write_region", lambda *_: None)
    with pytest.raises(AssertionError):
        compare(folder_of("tied"), "float32")


if __name__ == "__main__":
    compare(Path(sys.argv[1]), sys.argv[2], **{f"{cut}_parallel_size": 2 for cut in sys.argv[3:]})
