"""Rows of the table of towers: how config.json describes each kind, and the names of its tensors.

Keys that a file leaves out have the defaults of its class in transformers. Needs no torch.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.model_config.config_reader import ConfigReader, checked_integer
from spmd_worker.model_config.vision_config import TowerConfig, TowerNames, VisionConfig

logger = logging.getLogger(__name__)

_WAY_OUT: Final = "; limits.max_images=0 runs the text alone"
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
_SEPARATE: Final = ("q_proj", "k_proj", "v_proj")


class UnknownTowerError(ModelConfigError):
    """A tower of a kind that does not run: the text still does."""


@dataclass(frozen=True, slots=True)
class _Files:
    """What a row reads: config.json, its `vision_config` and the text's sizes."""

    whole: ConfigReader
    vision: ConfigReader
    hidden_size: int
    text_eps: float


def _side(reader: ConfigReader, key: str, default: int) -> int:
    """A length in pixels: a number, or the same one twice."""
    value = reader.get(key, default)
    if isinstance(value, list):
        if not value or any(each != value[0] for each in value):
            raise reader.error(key, f"must be one length for both sides{_WAY_OUT}")
        value = value[0]
    return checked_integer(value, reader.where(key), 1, 1 << 16)


def _activation(reader: ConfigReader, key: str, default: str, known: Mapping[str, str] = _ACTIVATIONS) -> str:
    return known[reader.choice(key, tuple(known), default)]


def _layers(reader: ConfigReader, key: str, default: list[int], num_layers: int) -> tuple[int, ...]:
    """Numbers of layers, from 0 on."""
    value = reader.get(key, default)
    if not isinstance(value, list):
        raise reader.error(key, "must be a list of layers, from 0 on")
    return tuple([checked_integer(each, reader.where(key), 0, num_layers - 1) for each in value])


def _heads(reader: ConfigReader, key: str, default: int, hidden_size: int, step: int) -> int:
    num_heads = reader.count(key, default)
    if hidden_size % num_heads or hidden_size // num_heads % step:
        raise reader.error(key, f"must divide hidden_size={hidden_size} into heads of multiples of {step}{_WAY_OUT}")
    return num_heads


def _rope_theta(reader: ConfigReader, default: float) -> float:
    return reader.object("rope_parameters").number("rope_theta", reader.number("rope_theta", default))


# ---- Qwen ----------------------------------------------------------------------------------------------------------


def _qwen_names(beginning: str, **names: Any) -> TowerNames:
    return TowerNames(
        beginnings=(beginning,),
        layers=f"{beginning}blocks",
        qkv=("attn.qkv",),
        output="attn.proj",
        norms=("norm1", "norm2"),
        patches=f"{beginning}patch_embed.proj",
        **names,
    )


def _qwen_sizes(files: _Files, defaults: Mapping[str, int], activation: str) -> dict[str, Any]:
    vision = files.vision
    out_size, hidden_size = vision.count("out_hidden_size", 3584), vision.count("hidden_size", defaults["hidden_size"])
    if out_size != files.hidden_size:
        raise vision.error("out_hidden_size", f"is not the hidden size of the text, {files.hidden_size}{_WAY_OUT}")
    vision.choice("in_channels", (3,), 3)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": vision.count("intermediate_size", defaults["intermediate_size"]),
        "num_layers": vision.count("num_hidden_layers", defaults["depth"]),
        "num_heads": _heads(vision, "num_heads", 16, hidden_size, 4),
        "patch_size": _side(vision, "patch_size", defaults["patch_size"]),
        "activation": _activation(vision, "hidden_act", activation),
        "eps": 1e-6,
        "num_frames": _side(vision, "temporal_patch_size", 2),
        "rope_theta": _rope_theta(vision, 10000.0),
    }


def _qwen_vision(files: _Files, kind: str, tower: TowerConfig, default_token: int) -> VisionConfig:
    return VisionConfig(
        kind,
        image_token_id=files.whole.count("image_token_id", default_token),
        num_added=len(tower.added_layers),
        merge_size=files.vision.count("spatial_merge_size", 2),
        has_three_positions=True,
        tower=tower,
    )


def _qwen3_vl(files: _Files, *, adds: bool = True, default_token: int = 151655) -> VisionConfig:
    defaults = {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "patch_size": 16}
    sizes = _qwen_sizes(files, defaults, "gelu_pytorch_tanh")
    num_positions = files.vision.count("num_position_embeddings", 2304)
    if round(num_positions**0.5) ** 2 != num_positions:
        raise files.vision.error("num_position_embeddings", f"must be a square number{_WAY_OUT}")
    deepstack = _layers(files.vision, "deepstack_visual_indexes", [8, 16, 24], sizes["num_layers"]) if adds else ()
    names = _qwen_names(
        "model.visual.", mlp=("mlp.linear_fc1", "mlp.linear_fc2"), positions="model.visual.pos_embed.weight"
    )
    tower = TowerConfig(names=names, num_positions=num_positions, added_layers=deepstack, **sizes)
    return _qwen_vision(files, "qwen3_vl", tower, default_token)


def _qwen3_5(files: _Files) -> VisionConfig:
    return _qwen3_vl(files, adds=False, default_token=248056)


def _qwen2_5_vl(files: _Files) -> VisionConfig:
    defaults = {"hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "patch_size": 14}
    sizes = _qwen_sizes(files, defaults, "silu")
    merge_size, window = files.vision.count("spatial_merge_size", 2), _side(files.vision, "window_size", 112)
    if window < merge_size * sizes["patch_size"]:
        raise files.vision.error("window_size", f"must hold a token of {merge_size} patches a side{_WAY_OUT}")
    tower = TowerConfig(
        names=_qwen_names("visual.", mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
        norm="rms",
        is_gated=True,
        has_patch_bias=False,
        window_size=window,
        full_layers=_layers(files.vision, "fullatt_block_indexes", [7, 15, 23, 31], sizes["num_layers"]),
        **sizes,
    )
    return _qwen_vision(files, "qwen2_5_vl", tower, 151655)


@dataclass(frozen=True, slots=True)
class VisionRow:
    """`read` gives the config of a kind; `mean` and `std` are its image processor's defaults."""

    read: Callable[[_Files], VisionConfig]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


_HALF: Final = (0.5, 0.5, 0.5)
_CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)

VISION_ROWS: Final[dict[str, VisionRow]] = {
    "qwen3_vl": VisionRow(_qwen3_vl, _HALF, _HALF),
    "qwen3_5": VisionRow(_qwen3_5, _HALF, _HALF),
    "qwen2_5_vl": VisionRow(_qwen2_5_vl, _CLIP_MEAN, _CLIP_STD),
}
"""By `Family.vision`."""

_FILE_KEYS: Final = {"num_hidden_layers": "depth"}


def read_vision(
    row: str, config: Mapping[str, Any], path: Path, hidden_size: int, text_eps: float
) -> VisionConfig | None:
    """How the model of `config`, the contents of `path`, takes images. None, which is logged, for a tower of a kind
    that does not run.
    """
    whole = ConfigReader(config, path, way_out=_WAY_OUT)
    file_keys = _FILE_KEYS if row.startswith("qwen") else {}
    files = _Files(whole, replace(whole.object("vision_config"), file_keys=file_keys), hidden_size, text_eps)
    try:
        return VISION_ROWS[row].read(files)
    except UnknownTowerError as error:
        logger.warning("%s: the model runs with text alone", error, extra=SAME_ON_EVERY_RANK)
        return None


def with_processor(vision: VisionConfig, row: str, processor: Mapping[str, Any], path: Path) -> VisionConfig:
    """The config with mean and deviation of the image processor's file, whose path is for errors."""
    reader = ConfigReader(processor, path)
    mean, std = (
        _channels(reader, key, default)
        for key, default in (("image_mean", VISION_ROWS[row].mean), ("image_std", VISION_ROWS[row].std))
    )
    if any(each <= 0 for each in std):
        raise reader.error("image_std", "must be above 0")
    factor = reader.number("rescale_factor", 1 / 255)
    return replace(vision, image_mean=mean, image_std=std, rescale_factor=factor)


def _channels(reader: ConfigReader, key: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    value = reader.get(key, list(default))
    is_list = isinstance(value, list) and len(value) == len(default)
    if not is_list or any(isinstance(each, bool) or not isinstance(each, int | float) for each in value):
        raise ModelConfigError(f"{reader.where(key)}={shown(value)} must list 3 numbers, one for each channel")
    first, second, third = map(float, value)
    return first, second, third
