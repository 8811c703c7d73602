"""Rotary angles against transformers' own functions, and dynamic scaling as a function of the row alone."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spmd_worker.layers.rotary import RotaryEmbedding, attention_factor, inverse_frequencies
from spmd_worker.model_config.model_config import RopeParameters, model_config_of

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    LLAMA3,
    {**LLAMA3, "high_freq_factor": 32.0, "factor": 32.0},
    YARN,
    {**YARN, "truncate": False},
    {**YARN, "attention_factor": 0.5},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    {**YARN, "mscale": 0.707},
    {**YARN, "beta_fast": 4.0, "beta_slow": 3.9},
    {**YARN, "factor": 1.0},
]


def read(scaling: dict[str, Any], theta: float = 500000.0) -> tuple[RopeParameters, LlamaConfig]:
    keys = {**SIZES, "rope_parameters": {"rope_theta": theta, **scaling}}
    ours = model_config_of({"architectures": ["LlamaForCausalLM"], **keys}, "config.json")
    return ours.ropes[0], LlamaConfig(**keys)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_and_amplitude_are_transformers(scaling: dict[str, Any], theta: float):
    rope, config = read(scaling, theta)
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, CPU)
    torch.testing.assert_close(inverse_frequencies(rope, 64), frequencies, rtol=1e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(amplitude, rel=1e-12)


def test_the_comparison_sees_frequencies_of_another_scaling():
    rope, _ = read(LLAMA3)
    _, config = read({**LLAMA3, "low_freq_factor": 1.01})
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    assert not torch.allclose(inverse_frequencies(rope, 64), frequencies, rtol=1e-6, atol=0)


DYNAMIC = RopeParameters(rope_type="dynamic", factor=4.0)


def angles(positions: list[int], prompt_lengths: list[int], max_positions: int = 100) -> torch.Tensor:
    rotary = RotaryEmbedding(DYNAMIC, 16, max_positions, CPU)
    found = rotary.angles(torch.tensor(positions), torch.tensor(prompt_lengths), torch.float32)
    return torch.cat((found.cos, found.sin), dim=-1)


@pytest.mark.parametrize("length", [101, 150, 1000])
def test_a_long_prompt_takes_the_base_of_its_whole_length(length: int):
    config = LlamaConfig(
        **{**SIZES, "hidden_size": 64, "max_position_embeddings": 100, "rope_parameters": {**read_dynamic()}}
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, CPU, seq_len=length)
    turns = torch.arange(length).float().unsqueeze(1) * frequencies
    expected = torch.cat((turns.cos(), turns.sin()), dim=-1)
    torch.testing.assert_close(angles([*range(length)], [length] * length), expected, rtol=0, atol=2e-4)


def read_dynamic() -> dict[str, Any]:
    return {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


def test_dynamic_angles_depend_on_position_and_prompt_length_alone():
    """Chunks, batches and recomputation see the same angles: a token's base is that of its prompt or its own length."""
    together = angles([0, 149, 150, 500, 3], [150, 150, 150, 20, 20])
    for index, (position, length) in enumerate([(0, 150), (149, 150), (150, 150), (500, 20), (3, 20)]):
        assert torch.equal(angles([position], [length])[0], together[index])
    assert torch.equal(angles([3], [20]), angles([3], [100])), "below the length before scaling nothing changes"
    assert not torch.equal(angles([3], [20]), angles([3], [101]))
    assert torch.equal(angles([500], [20]), angles([500], [501])), "a later token takes the base of its own length"
    assert not torch.equal(angles([500], [20]), angles([500], [502]))
