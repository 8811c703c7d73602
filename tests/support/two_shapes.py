"""A toy whose layers alternate between two head sizes and numbers of key-value heads, each with its own rope.

No family has such layers: config.json is Llama's, and every second layer is changed after it was read. Workers in other
processes get the model config from the driver.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

from run_folder import made_once

from spmd_worker.model_config import model_config as module
from spmd_worker.model_config.model_config import ModelConfig

_HEAD_SIZE, _NUM_KV_HEADS = 48, 1
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 1000.0,
}


def folder() -> Path:
    """A model without weights: the dummy ones are the same everywhere."""

    def write(path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(_CONFIG))

    return made_once("two shapes", write)


def with_two_shapes(model_config: ModelConfig) -> ModelConfig:
    """Every second layer has other heads: 4 of 48 elements and one key-value head in place of 4 of 16 and two."""
    (rope,) = model_config.ropes
    other = replace(
        model_config.layers[0], head_size=_HEAD_SIZE, num_kv_heads=_NUM_KV_HEADS, scale=_HEAD_SIZE**-0.5, rope=1
    )
    layers = tuple(other if index % 2 else layer for index, layer in enumerate(model_config.layers))
    return replace(model_config, layers=layers, ropes=(rope, replace(rope, size=_HEAD_SIZE)))


@contextmanager
def two_shapes() -> Iterator[None]:
    """Context in which a model that is read has layers of two shapes."""
    read = module.model_config_of
    with mock.patch.object(module, "model_config_of", lambda *given, **named: with_two_shapes(read(*given, **named))):
        yield
