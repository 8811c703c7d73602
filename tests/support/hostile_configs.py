"""config.json files as real ones are, of every family of the table, with something in them broken.

What is real is transformers': each class's own sizes, in newer and in older words, some quantised. Knows nothing of
what is tested but the names of the families.
"""

import json
import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Final

from model_types import CLASSIFIER_TYPES, ENCODER_TYPES, MODEL_TYPES
from newer_checkpoints import NEWER, record
from transformers import AutoConfig

Path = tuple[str | int, ...]

_STRETCHED: Final[list[dict[str, Any]]] = [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 32, "beta_slow": 1},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"type": "linear", "factor": 8.0},
    {"type": "dynamic", "factor": 2.0},
    {
        "type": "longrope",
        "short_factor": [1.0] * 64,
        "long_factor": [4.0] * 64,
        "short_mscale": 1.2,
        "long_mscale": 1.4,
    },
]
_QUANTISED: Final[list[dict[str, Any]]] = [
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": True,
        "sym": True,
        "dynamic": {"-:.*lm_head": {}},
    },
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head"],
    },
    {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "ignore": ["lm_head", "model.layers.0*", "*.mlp.gate"],
        "quantized_layers": {
            "model.layers.1.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
            "model.layers.1.self_attn": {"quant_algo": "FP8"},
        },
    },
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
            }
        },
    },
]
_QWEN4: Final = {
    **dict.fromkeys(("indexer_n_heads", "indexer_compress_ratio"), 16),
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "ple_layer_ids": [2],
    "eos_token_id": 2,
}
_MISSING: Final = {
    **{f"Qwen4ExpFor{kind}": _QWEN4 for kind in ("CausalLM", "ConditionalGeneration")},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Glm4vMoeForConditionalGeneration": {"head_dim": 128},
    "Dots1ForCausalLM": {"n_routed_experts": 128, "num_experts_per_tok": 6},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    **{f"Qwen3OmniMoe{kind}ForConditionalGeneration": {"head_dim": 128} for kind in ("", "Thinker")},
}
"""Keys whose values in the models differ from the class's defaults."""
_LONG: Final = "x" * 1_000_000
WRONG: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, 2, 3, 7, -1, -(10**9), 10**6, 2**31 - 1, 2**31 - 2, 2**63, 10**400, 0.0, 0.5, -0.5),
    *(
        1e-320,
        1e308,
        math.inf,
        -math.inf,
        math.nan,
        "",
        "4",
        "128",
        "1e-5",
        "true",
        "none",
        "abc",
        "a\nb",
        "\ud800",
        _LONG,
    ),
    *(
        [],
        [1],
        [None],
        ["x"],
        [[1]],
        [1.0] * 3,
        [0] * 100_000,
        {},
        {"a": 1},
        {"rope_type": "yarn"},
        {"\n": {"\ud800": 1}},
    ),
    *("quick_gelu", "chunked_attention", "linear_attention", "proportional", "bitsandbytes", "nvfp4", [2, 10**400]),
)
"""Values of every wrong type, size and nesting."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The text of a config.json, and the keys of what was changed in it."""

    text: str
    changed: tuple[Path, ...]

    def __str__(self) -> str:
        return " and ".join(".".join(map(str, path)) for path in self.changed) + f" of {self.text[:60]}"


@cache
def _real(architecture: str) -> dict[str, Any]:
    """config.json as transformers writes it for the class's defaults."""
    model_type = {**MODEL_TYPES, **ENCODER_TYPES, **CLASSIFIER_TYPES}[architecture]
    config = (
        dict(record(model_type)["defaults"]) if architecture in NEWER else AutoConfig.for_model(model_type).to_dict()
    )
    # What no model reads, and towers, but those of thinkers.
    others = ("perceiver_config", "vq_config", "id2label", "label2id", "transformers_version")
    for key in (*others, *(f"{part}_config" for part in ("talker", "token2wav", "code2wav"))):
        config.pop(key, None)
    if "Thinker" not in architecture:
        config.pop("vision_config", None)
    found: dict[str, Any] = json.loads(json.dumps({**config, "architectures": [architecture]}))
    text = _text(found)
    text.update(_MISSING.get(architecture, {}))
    if "Omni" in architecture:
        thinker = found.get("thinker_config", found)
        thinker["vision_config"]["out_hidden_size"] = thinker["audio_config"]["output_dim"] = text["hidden_size"]
    return found


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The part of the text."""
    part: dict[str, Any] = config.get("thinker_config", config)
    found: dict[str, Any] = part.get("text_config", part)
    return found


def real(architecture: str, random: Random) -> dict[str, Any]:
    """A variant of the value."""
    config = deepcopy(_real(architecture))
    text = _text(config)
    rope = text.get("rope_parameters") or {}
    if "rope_theta" in rope and random.random() < 0.5:
        text |= {"rope_theta": rope["rope_theta"], "rope_scaling": random.choice([None, *deepcopy(_STRETCHED)])}
        text.pop("rope_parameters")
    if random.random() < 0.4:
        config["quantization_config"] = deepcopy(random.choice(_QUANTISED))
    return config


def broken(architectures: list[str], random: Random) -> Broken:
    """An architecture's config with one to three changes."""
    config = real(random.choice(architectures), random)
    paths = [path for path in _paths(config) if path[0] not in ("architectures", "model_type")]
    # What nests is drawn as often as what does not.
    nested = [path for path in paths if len(path) > 1] or paths
    changed = [random.choice(random.choice((paths, nested))) for _ in range(random.choice((1, 1, 1, 2, 3)))]
    for path in changed:
        _change(config, path, random)
    return Broken(json.dumps(config), tuple(changed))


def _paths(value: Any, before: Path = ()) -> Iterator[Path]:
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*before, key)
        yield from _paths(inner, (*before, key))


def _change(config: dict[str, Any], path: Path, random: Random) -> None:
    """Take it away, put what is wrong there, or what is nearly right."""
    place: Any = config
    for key in path[:-1]:
        try:
            place = place[key]
        except (KeyError, IndexError, TypeError):
            return
    last = path[-1]
    if not (isinstance(place, dict) and last in place) and not (isinstance(place, list) and last in range(len(place))):
        return
    value = place[last]
    way = random.randrange(8)
    if way == 0:
        del place[last]
    elif way == 1:
        place[last] = _nearly(value, random)
    else:
        place[last] = deepcopy(random.choice(WRONG))


def _nearly(value: Any, random: Random) -> Any:
    """A value of the right type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        half = value / 2 if abs(value) < 2**53 else value // 2
        return random.choice((value + 1, value - 1, -value, value * 1000, half, str(value), [value]))
    if isinstance(value, str):
        return random.choice((value.upper(), value + " ", [value], value[:-1]))
    if isinstance(value, list):
        return random.choice((value[:-1], [*value, *value], [value], value[::-1], {"0": value}))
    return random.choice(([value], {"": value}, list(value or ())))
