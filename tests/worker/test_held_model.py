"""A caller who has the model of an engine changes it between calls: the next step computes with the changes."""

from collections.abc import Callable
from typing import Any

import pytest
from adapter_folders import DEMO
from torch import nn

from spmd_worker import LLM, SamplingParams

# The argmax alone, and log-probabilities too.
GREEDY = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=each) for each in (None, 0)]
WAYS: dict[str, Callable[[Any], nn.Module]] = {
    "get_model": lambda driver: driver.worker.get_model(),
    "the runner": lambda driver: driver.model_runner.model,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_next_step_sees_changes_of_a_callers_model(way: str, dtype: str):
    """Regression: layers that were joined, and the int8 copy of the token head, kept what they had read."""
    with LLM(DEMO, dtype=dtype, num_blocks=64, enable_prefix_caching=False, device="cpu") as llm:

        def answer() -> str:
            outputs = llm.generate(["add 123 + 456 ="] * 2, GREEDY, use_tqdm=False)
            return repr([(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs])

        before = answer()
        model = WAYS[way](llm.llm_engine.model_executor.driver_worker)
        assert answer() == before
        for name in ("model.layers.0.self_attn.o_proj.weight", "lm_head.weight"):
            parameter = model.get_parameter(name)
            earlier, parameter.data = parameter.data, parameter * -1
            changed = answer()
            assert changed != before
            # What the step read has other values now, and is not read any more.
            earlier.fill_(float("nan"))
            assert answer() == changed
            parameter.data = parameter * -1
            assert answer() == before
