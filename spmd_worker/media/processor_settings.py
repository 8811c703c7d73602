"""Settings of images in a model folder, with a caller's overrides, and the tower's sizes in `config.json`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.base.files import JsonError, parse_json_object, read_regular_file
from spmd_worker.media.resize import RESAMPLINGS
from spmd_worker.model_config.config_reader import ConfigReader, checked_integer

MAX_SIDE: Final = 1 << 14
_FILES: Final = ("processor_config.json", "preprocessor_config.json")
_ALWAYS: Final = ("do_resize", "do_rescale", "do_normalize")

Values = dict[str, Any]


def image_values(folder: Path) -> tuple[Values, Path]:
    """Settings of images, and their file: `processor_config.json` has them in newer checkpoints."""
    found = _image_values(folder)
    if found is None:
        files = f"neither {_FILES[0]} with image_processor nor {_FILES[1]}"
        raise ModelConfigError(f"{folder} has {files}: add it, or set limits.max_images=0 to run the text alone")
    return found


def has_image_processor(folder: Path) -> bool:
    """Whether a folder says how images are prepared: what a trainer saves of a model for images may not."""
    found = _image_values(folder)
    return found is not None and bool(found[0])


def _image_values(folder: Path) -> tuple[Values, Path] | None:
    for path in (folder / name for name in _FILES):
        found = json_object(path)
        if found is not None and path.name == _FILES[0]:
            found = found.get("image_processor")
        if isinstance(found, dict):
            return found, path
    return None


def json_object(path: Path) -> Values | None:
    """The object in a file of a model folder; None without the file. Raises ModelConfigError."""
    try:
        return parse_json_object(read_regular_file(path), allows_nan=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ModelConfigError(f"cannot read {path}: {error}") from None
    except JsonError as error:
        raise ModelConfigError(f"{path} {error}") from None


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """Settings of images: a key's value is that of `given`, if it is there, else that of `file`."""

    file: ConfigReader
    given: ConfigReader

    @property
    def class_name(self) -> str:
        """The class of transformers that the file names; it has the defaults."""
        return str(self.file.get("image_processor_type", ""))

    @property
    def is_siglip(self) -> bool:
        """Whether it is SigLIP's class, which a LLaVA model may have in place of its own."""
        return self.class_name.startswith("Siglip")

    def of(self, key: str) -> ConfigReader:
        """The reader whose value counts."""
        return self.given if self.given.get(key) is not None else self.file

    def integer(self, key: str, default: int, least: int, most: int) -> int:
        reader = self.of(key)
        return checked_integer(reader.get(key, default), reader.where(key), least, most)

    def side(self, name: str, key: str, default: int, most: int = MAX_SIDE) -> int:
        """A number of the object `name`, which may also be one number."""
        reader = self.of(name)
        value = reader.get(name)
        if isinstance(value, int):
            return checked_integer(value, reader.where(name), 1, most)
        inner = reader.object(name)
        given = inner.get(key, default if value is None else None)
        return checked_integer(given, inner.where(key), 1, most)

    def square(self, name: str, default: int) -> int:
        """The side of `name`, whose height and width must be equal."""
        sides = [self.side(name, key, default) for key in ("height", "width")]
        if sides[0] != sides[1]:
            raise self.of(name).error(name, "must be a square")
        return sides[0]

    def levels(self, key: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        """A number for each channel, which may also be one for all."""
        value = self.file.get(key, list(default))
        values = value if isinstance(value, list) else [value] * 3
        is_number = [isinstance(each, int | float) and not isinstance(each, bool) for each in values]
        least = 1e-6 if key == "image_std" else -1e3
        if len(values) != 3 or not all(is_number) or not all(least <= each <= 1e3 for each in values):
            raise self.file.error(key, f"must list 3 numbers of at least {least:g}")
        red, green, blue = map(float, values)
        return red, green, blue

    def resampling(self, default: int) -> str:
        return RESAMPLINGS[self.file.choice("resample", tuple(RESAMPLINGS), default)]

    def check_steps(self, is_optional: str) -> None:
        """Steps that no checkpoint leaves out but one that `is_optional`, and one that is not offered."""
        for key in _ALWAYS:
            if key != is_optional and self.file.get(key, True) is not True:
                raise self.file.error(key, "is not supported, only true")
        if self.file.get("do_pan_and_scan"):
            raise self.file.error("do_pan_and_scan", "is not supported, only false")


# The tower's numbers in config.json.


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """`side` is that of the pictures for which it has positions; it does not count in Qwen's, GLM's, PaddleOCR-VL's and
    Gemma 4's, which take any.
    """

    model_type: str
    side: int
    patch: int


_CLASSES: Final = {
    "clip_vision_model": (224, 32),
    "siglip_vision_model": (224, 16),
    "pixtral": (1024, 16),
    "internvl_vision": (448, 14),
    "llama4_vision_model": (448, 14),
    "idefics3_vision": (224, 32),
    "smolvlm_vision": (224, 32),
    "granite_docling_vision": (512, 16),
    "siglip2_vision_model": (0, 16),
    "minicpmv4_6_vision": (0, 16),
    "gemma4_vision": (0, 16),
    "gemma4_unified_vision": (0, 16),
    "qwen3_vl_vision": (0, 16),
    "qwen2_vl_vision": (0, 14),
    "glm4v_vision": (0, 14),
    "glm4v_moe_vision": (0, 14),
    "glm_ocr_vision": (0, 14),
    "paddleocr_vl_vision": (0, 14),
    "kimi_k25_vision": (0, 14),
    "exaone4_5_vision": (0, 14),
    "qwen2_5_vl_vision": (0, 14),
    "qwen2_5_omni_vision_encoder": (0, 14),
    "qwen3_omni_moe_vision_encoder": (0, 16),
}
"""model_type of vision_config -> side and patch of its class."""
_DEFAULTS: Final = {
    "qwen3_vl": ("qwen3_vl_vision", 0, 16),
    "qwen2_vl": ("qwen2_vl_vision", 0, 14),
    "qwen2_5_vl": ("qwen2_5_vl_vision", 0, 14),
    "exaone4_5": ("exaone4_5_vision", 0, 14),
    "qwen2_5_omni": ("qwen2_5_omni_vision_encoder", 0, 14),
    "qwen3_omni": ("qwen3_omni_moe_vision_encoder", 0, 16),
    "glm4v": ("glm4v_vision", 0, 14),
    "paddleocr_vl": ("paddleocr_vl_vision", 0, 14),
    "kimi_k25": ("kimi_k25_vision", 0, 14),
    "gemma3": ("siglip_vision_model", 224, 16),
    "gemma4": ("gemma4_vision", 0, 16),
    "gemma4_unified": ("gemma4_unified_vision", 0, 16),
    "llava": ("clip_vision_model", 336, 14),
    "llava_next": ("clip_vision_model", 336, 14),
    "llava_onevision": ("siglip_vision_model", 384, 14),
    "deepseek_vl": ("siglip_vision_model", 224, 16),
    "llama4": ("llama4_vision_model", 448, 14),
    "internvl": ("internvl_vision", 448, 14),
    "aya_vision": ("siglip_vision_model", 384, 14),
    "cohere2_vision": ("siglip_vision_model", 512, 16),
    "mistral3": ("pixtral", 1540, 14),
    "lighton_ocr": ("pixtral", 1540, 14),
    "pixtral": ("pixtral", 1024, 16),
    "smolvlm": ("smolvlm_vision", 224, 32),
    "granite_docling": ("granite_docling_vision", 512, 16),
    "lfm2_vl": ("siglip2_vision_model", 0, 16),
    "minicpmv4_6": ("minicpmv4_6_vision", 0, 16),
}
"""Kind -> tower of a config.json without vision_config."""


def tower_sizes(model: ConfigReader, kind: str) -> TowerSizes:
    """Sizes in vision_config, with the defaults of its class."""
    model_type, side, patch = _DEFAULTS[kind]
    vision = model.object("vision_config")
    if model.get("vision_config") is not None:
        model_type = str(vision.get("model_type", model_type))
        side, patch = _CLASSES.get(model_type, _CLASSES[_DEFAULTS[kind][0]])
    return TowerSizes(model_type, _equal_sides(vision, "image_size", side), _equal_sides(vision, "patch_size", patch))


def _equal_sides(reader: ConfigReader, key: str, default: int) -> int:
    """A number, or two equal ones."""
    value = reader.get(key, default)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return checked_integer(value, reader.where(key), min(default, 1), MAX_SIDE)


def check_is_towers(settings: ProcessorSettings, name: str, side: int, tower: int) -> None:
    """Raise ModelConfigError if the number of the setting `name` is not the tower's."""
    if side != tower:
        rule = f"must be the size that the tower has, vision_config's {tower}, not {side}"
        raise settings.of(name).error(name, rule)
