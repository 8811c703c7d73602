"""A model whose weights are changed in place, beside a checkpoint with the same change, on any ranks.

Imports no transformers, so that ranks start quickly. As a script it is one of two ranks.
"""

import random
import sys
from functools import partial
from pathlib import Path

from native_libraries import library_for
from safetensors.torch import load_file
from torch import Tensor, nn

from spmd_worker import LLM, SamplingParams
from spmd_worker.attention import cpu
from spmd_worker.kernels.cpu import native

ALL = "."
"""Every weight's name has one."""
PROMPTS = [{"prompt_token_ids": random.Random(length).choices(range(10, 211), k=length)} for length in (1, 9, 23, 40)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=0)


def change(name: str, weight: Tensor, kind: str) -> None:
    """One kind becomes zero in the first layer. The rest of it is scaled, by factors that bfloat16 does not round."""
    if kind in name:
        weight *= 0 if name.startswith("model.layers.0.") and kind != ALL else (-0.5, 2.0, -1.0)[len(name) % 3]


def change_in_place(model: nn.Module, kind: str) -> None:
    for name, parameter in model.named_parameters():
        change(name, parameter.data, kind)


def compare(base: Path, changed: Path, kind: str, dtype: str, **layout: int) -> None:
    """Raises AssertionError unless `base` with its weights changed answers as `changed`, and loaded again as before."""
    options = {"dtype": dtype, "num_blocks": 64, "max_model_len": 128, **layout}
    with LLM(changed, **options) as llm:
        expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    with LLM(base, **options) as llm:
        before = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.apply_model(partial(change_in_place, kind=kind))
        llm.set_weight_version(1)
        after = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.apply_model(lambda model: len(model.load_weights(load_file(base / "model.safetensors").items())))
        llm.set_weight_version(2)
        restored = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        (arithmetic,) = llm.collective_rpc("get_arithmetic")
    assert repr(after) == repr(expected) != repr(before) == repr(restored)
    assert ("in use" in arithmetic) == native.native_library().has_amx


if __name__ == "__main__":
    native.native_library = cpu.native_library = lambda: library_for(sys.argv[5])
    compare(Path(sys.argv[1]), Path(sys.argv[2]), ALL, sys.argv[3], **{sys.argv[4]: 2})
