"""Look-ups that rows of towers share: lengths, activations, layers, heads, with errors that name a way out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.config_reader import ConfigReader, checked_integer

WAY_OUT: Final = "; limits.max_images=0 runs the text alone"
_ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
SEPARATE: Final = ("q_proj", "k_proj", "v_proj")
OUTSIDE: Final = ("vision_tower.", "multi_modal_projector.", "image_newline")
MAX_SIDE: Final = 1 << 16
"""Pixels."""


class UnknownTowerError(ModelConfigError):
    """A tower of a kind that does not run: the text still does."""


@dataclass(frozen=True, slots=True)
class VisionFiles:
    """Contents that a row reads: config.json, its `vision_config` and the text's sizes."""

    whole: ConfigReader
    vision: ConfigReader
    hidden_size: int
    text_eps: float


def side_of(reader: ConfigReader, key: str, default: int) -> int:
    """A length in pixels: a number, or the same one twice."""
    value = reader.get(key, default)
    if isinstance(value, list):
        if not value or any(each != value[0] for each in value):
            raise reader.error(key, f"must be one length for both sides{WAY_OUT}")
        value = value[0]
    return checked_integer(value, reader.where(key), 1, MAX_SIDE)


def activation_of(reader: ConfigReader, key: str, default: str, known: Mapping[str, str] = _ACTIVATIONS) -> str:
    """The kernels' name of an activation."""
    return known[reader.choice(key, tuple(known), default)]


def layers_of(reader: ConfigReader, key: str, default: list[int], num_layers: int) -> tuple[int, ...]:
    """Numbers of layers, from 0 on."""
    value = reader.get(key, default)
    if not isinstance(value, list):
        raise reader.error(key, "must be a list of layers, from 0 on")
    return tuple([checked_integer(each, reader.where(key), 0, num_layers - 1) for each in value])


def heads_of(reader: ConfigReader, key: str, default: int, hidden_size: int, step: int) -> int:
    """Number of heads, each of a multiple of `step` numbers."""
    num_heads = reader.count(key, default)
    if hidden_size % num_heads or hidden_size // num_heads % step:
        raise reader.error(
            key, f"must divide {reader.key('hidden_size')}={hidden_size} into heads of multiples of {step}{WAY_OUT}"
        )
    return num_heads


def rope_theta_of(reader: ConfigReader, default: float) -> float:
    """Base of the angles, which older files have outside of `rope_parameters`."""
    return reader.object("rope_parameters").number("rope_theta", reader.number("rope_theta", default))


def image_token_of(files: VisionFiles, default: int) -> int:
    """Id of the tokens that take rows, which newer files call otherwise."""
    whole = files.whole
    return whole.count("image_token_index" if whole.get("image_token_id") is None else "image_token_id", default)


def two_linears(files: VisionFiles) -> dict[str, Any]:
    """Numbers of a projector of two linear layers."""
    return {
        "projector_size": files.hidden_size,
        "projector_activation": activation_of(files.whole, "projector_hidden_act", "gelu"),
    }
