"""Rotary angles against transformers' own functions, and dynamic scaling as a function of the row alone."""

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from device_waits import DeviceWaits
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.rotary import RopeFactors, RotaryEmbedding, attention_factor, inverse_frequencies
from spmd_worker.model_config.model_config import RopeParameters, model_config_of
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.cpu.native import cpu_kernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group

CPU = torch.device("cpu")
CPU_KERNELS = cpu_kernels(torch.bfloat16)[0]
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
    {**LLAMA3, "high_freq_factor": 1.0, "factor": 16.0},
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


ROUNDED: Final[dict[str, tuple[str, str]]] = {
    "OlmoForCausalLM": ("olmo", "Olmo"),
    "Olmo2ForCausalLM": ("olmo2", "Olmo2"),
    "Olmo3ForCausalLM": ("olmo3", "Olmo3"),
    "CohereForCausalLM": ("cohere", "Cohere"),
    "Cohere2ForCausalLM": ("cohere2", "Cohere2"),
    "Ernie4_5ForCausalLM": ("ernie4_5", "Ernie4_5"),
    "Glm4ForCausalLM": ("glm4", "Glm4"),
    "LlamaForCausalLM": ("llama", "Llama"),
}
"""One architecture for each rounding: transformers' module, and the prefix of its classes."""


@pytest.mark.parametrize("kernels", [ReferenceKernels(), CPU_KERNELS], ids=["reference", "cpu"])
@pytest.mark.parametrize("architecture", ROUNDED)
def test_rotation_rounds_where_transformers_rounds(architecture: str, kernels: Kernels):
    name, prefix = ROUNDED[architecture]
    theirs = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    keys = {**SIZES, "head_dim": 64, "num_hidden_layers": 4}
    their_config = getattr(theirs, f"{prefix}Config")(**keys)
    config = model_config_of({**their_config.to_dict(), "architectures": [architecture]}, Path("config.json"))
    rope = RotaryEmbedding(config.ropes[0], config.max_position_embeddings, CPU)
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(1, heads, 40, 64, generator=generator).bfloat16() for heads in (4, 2))
    positions = torch.arange(900, 940)
    rotary = getattr(theirs, f"{prefix}RotaryEmbedding")(their_config)
    given = {"layer_type": "full_attention"} if name == "olmo3" else {}
    expected = theirs.apply_rotary_pos_emb(query, key, *rotary(query, positions.unsqueeze(0), **given))
    angles = rope.angles(positions, torch.zeros_like(positions), torch.bfloat16)
    for x, turned in zip((query, key), expected, strict=True):
        assert torch.equal(angles.rotate(kernels, x[0].transpose(0, 1)), turned[0].transpose(0, 1))
    # Negative control: every other way of rounding gives other bits.
    ways = {"each step", "angles", "result"} - {config.ropes[0].rounding}
    for way in ways:
        other = RotaryEmbedding(replace(config.ropes[0], rounding=way), config.max_position_embeddings, CPU)
        angles = other.angles(positions, torch.zeros_like(positions), torch.bfloat16)
        assert not torch.equal(angles.rotate(kernels, query[0].transpose(0, 1)), expected[0][0].transpose(0, 1))


def test_fused_rotation_of_other_ropes_needs_float32():
    for way in ("each step", "angles", "result"):
        rope = RotaryEmbedding(RopeParameters(64, rounding=way), 100, CPU)
        assert rope.is_plain(torch.float32), "nothing is rounded there"
        assert rope.is_plain(torch.bfloat16) == (way == "each step")
    assert not RotaryEmbedding(RopeParameters(64, is_interleaved=True), 100, CPU).is_plain(torch.float32)


def test_comparison_detects_frequencies_of_another_scaling():
    rope, _ = read(LLAMA3)
    _, config = read({**LLAMA3, "low_freq_factor": 1.01})
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    assert not torch.allclose(inverse_frequencies(rope, 64), frequencies, rtol=1e-6, atol=0)


DYNAMIC = RopeParameters(16, rope_type="dynamic", factor=4.0)


def angles(positions: list[int], prompt_lengths: list[int], max_positions: int = 100) -> torch.Tensor:
    rotary = RotaryEmbedding(DYNAMIC, max_positions, CPU)
    found = rotary.angles(torch.tensor(positions), torch.tensor(prompt_lengths), torch.float32)
    return torch.cat((found.cos, found.sin), dim=-1)


@pytest.mark.parametrize("length", [101, 150, 1000])
def test_long_prompt_uses_base_of_its_full_length(length: int):
    config = LlamaConfig(
        **{**SIZES, "hidden_size": 64, "max_position_embeddings": 100, "rope_parameters": {**read_dynamic()}}
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, CPU, seq_len=length)
    turns = torch.arange(length).float().unsqueeze(1) * frequencies
    expected = torch.cat((turns.cos(), turns.sin()), dim=-1)
    torch.testing.assert_close(angles([*range(length)], [length] * length), expected, rtol=0, atol=2e-4)


def read_dynamic() -> dict[str, Any]:
    return {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


def test_dynamic_angles_depend_on_position_and_prompt_length():
    """Chunks, batches and recomputation have equal angles: a token's base follows from its prompt or its position."""
    together = angles([0, 149, 150, 500, 3], [150, 150, 150, 20, 20])
    for index, (position, length) in enumerate([(0, 150), (149, 150), (150, 150), (500, 20), (3, 20)]):
        assert torch.equal(angles([position], [length])[0], together[index])
    assert torch.equal(angles([3], [20]), angles([3], [100])), "below the length before scaling nothing changes"
    assert not torch.equal(angles([3], [20]), angles([3], [101]))
    assert torch.equal(angles([500], [20]), angles([500], [501])), "a later token takes the base of its own length"
    assert not torch.equal(angles([500], [20]), angles([500], [502]))


@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
def test_angles_need_no_synchronous_copies(rope_type: str):
    meta = torch.device("meta")
    rotary = RotaryEmbedding(RopeParameters(16, rope_type=rope_type, factor=4.0), 100, meta)
    positions = torch.empty(7, dtype=torch.int64, device=meta)
    with DeviceWaits() as waits:
        angles = rotary.angles(positions, positions, torch.float32)
    assert (waits.read_backs, waits.uploads, angles.cos.shape) == ([], [], (7, 8))


PHIMOE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 31 + [2.0],
    "long_factor": [4.0] * 32,
    "short_mscale": 1.25,
    "long_mscale": 1.5,
}


def test_long_rows_of_phimoe_have_long_factors():
    """transformers multiplies by the long factor and keeps the short frequencies, by the longest row of a batch."""
    experts = {"num_local_experts": 4, "num_key_value_heads": 4, "architectures": ["PhimoeForCausalLM"]}
    config = model_config_of({**SIZES, **experts, "rope_parameters": PHIMOE}, Path("config.json"))
    (rope,) = config.ropes
    assert (rope.short_mscale, rope.long_mscale) == (1.25, 1.5)
    assert (config.rope_regime(60, 64), config.rope_regime(60, 65)) == (0, 1)
    rotary = RotaryEmbedding(rope, config.max_position_embeddings, CPU)
    positions, regimes = torch.tensor([7, 7]), torch.tensor([0, 1])
    angles = rotary.angles(positions, regimes, torch.float32)
    frequencies = inverse_frequencies(rope, 64)
    assert not torch.equal(frequencies[0], frequencies[1])
    assert torch.equal(angles.cos, torch.stack([(7 * frequencies[0]).cos() * 1.25, (7 * frequencies[1]).cos() * 1.5]))
    assert torch.equal(angles.sin, torch.stack([(7 * frequencies[0]).sin() * 1.25, (7 * frequencies[1]).sin() * 1.5]))


@pytest.mark.parametrize("rope_type", ["default", "dynamic", "longrope"])
def test_learned_factors_multiply_frequencies_of_any_rope(rope_type: str):
    scales = {"short_factors": (1.0,) * 8, "long_factors": (4.0,) * 8} if rope_type == "longrope" else {}
    rope = RopeParameters(16, rope_type=rope_type, factor=4.0, attention_factor=1.0, has_learned_factors=True, **scales)
    factors = RopeFactors(LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, CPU), rope)
    factors.alpha.fill_(math.log(2.0))
    positions, regimes = torch.tensor([3, 500]), torch.tensor([0, 1])
    plain, learned = (
        RotaryEmbedding(rope, 100, CPU, each).angles(positions, regimes, torch.float32) for each in (None, factors)
    )
    torch.testing.assert_close(learned.cos, 2 * plain.cos**2 - 1, rtol=0, atol=1e-4)


def test_backward_angles_undo_forward_ones():
    rope, _ = read({"rope_type": "default"})
    positions, regimes = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    forward, backward = (
        RotaryEmbedding(replace(rope, is_backward=is_backward), 64, CPU).angles(positions, regimes, torch.float32)
        for is_backward in (False, True)
    )
    x = torch.randn((5, 2, 64), generator=torch.Generator().manual_seed(1))
    kernels = ReferenceKernels()
    torch.testing.assert_close(backward.rotate(kernels, forward.rotate(kernels, x)), x)
    assert not torch.allclose(forward.rotate(kernels, forward.rotate(kernels, x)), x)


QWEN_VL = {
    **SIZES,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
}
OTHER_VL = {**QWEN_VL, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}


def sections_of(keys: dict[str, Any], scaling: dict[str, Any] | None) -> RopeParameters:
    given = {} if scaling is None else {"rope_scaling": scaling}
    return model_config_of({**keys, **given}, "config.json").ropes[0]


def test_sections_turn_pairs_by_their_positions():
    interleaved = sections_of(
        QWEN_VL, {"rope_type": "default", "mrope_section": [14, 10, 8], "mrope_interleaved": True}
    )
    assert (interleaved.sections, interleaved.interleaves_sections) == ((14, 10, 8), True)
    assert interleaved.pair_axes == (0, 1, 2) * 8 + (0, 1, 0, 0, 1, 0, 0, 0)
    one_by_one = sections_of(OTHER_VL, {"type": "mrope", "mrope_section": [8, 12, 12]})
    assert one_by_one.pair_axes == (0,) * 8 + (1,) * 12 + (2,) * 12
    # Those of the classes, where they fit.
    assert sections_of(QWEN_VL, None).sections == (24, 20, 20)
    assert sections_of(OTHER_VL, None).sections == ()
    assert sections_of({**OTHER_VL, "head_dim": 128}, None).sections == (16, 24, 24)
    positions = torch.arange(7) + torch.tensor([[0], [100], [2000]])
    for rope in (interleaved, one_by_one):
        rotary = RotaryEmbedding(rope, 100, CPU)
        regimes = torch.zeros(7, dtype=torch.int64)
        for dtype in (torch.float32, torch.bfloat16):
            found = rotary.angles(positions[0], regimes, dtype, positions)
            of_axes = [rotary.angles(each, regimes, dtype) for each in positions]
            for pair, axis in enumerate(rope.pair_axes):
                assert torch.equal(found.cos[:, pair], of_axes[axis].cos[:, pair])
                assert torch.equal(found.sin[:, pair], of_axes[axis].sin[:, pair])
            equal = rotary.angles(positions[0], regimes, dtype, positions[:1].expand(3, -1))
            assert torch.equal(equal.cos, of_axes[0].cos), "three equal numbers are one"


@pytest.mark.parametrize(
    ("keys", "scaling", "words"),
    [
        (OTHER_VL, {"type": "mrope", "mrope_section": [8, 12, 11]}, r"\[8, 12, 11\] must add up to 32"),
        (OTHER_VL, {"type": "mrope", "mrope_section": [16, 16]}, "three numbers"),
        (OTHER_VL, {"type": "mrope", "mrope_section": "8, 12"}, "three numbers"),
        (QWEN_VL, {"rope_type": "default", "mrope_section": [8, -1, 8]}, "mrope_section=-1"),
        (QWEN_VL, {"rope_type": "default", "mrope_interleaved": False}, "mrope_interleaved=False must be true"),
        (OTHER_VL, {"type": "mrope", "mrope_section": [8, 12, 12], "mrope_interleaved": True}, "must be false"),
    ],
)
def test_sections_that_do_not_fit_are_refused(keys: dict[str, Any], scaling: dict[str, Any], words: str):
    with pytest.raises(ModelConfigError, match=words):
        sections_of(keys, scaling)
