"""VideoProcessor: the numbers by which a checkpoint's videos are prepared, and how they are read.

A missing key has the value that its class of transformers has. Frames become pixels as images do: numbers that a tower
has once for both are compared with those of images.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.media import sizes
from spmd_worker.media.image_processor import ImageProcessor
from spmd_worker.media.processor_settings import MAX_SIDE, ProcessorSettings, Values, json_object
from spmd_worker.media.sizes import NUM_FRAMES
from spmd_worker.media.video_rules import OMNI_KEY, RULES, VideoRule
from spmd_worker.model_config.config_reader import ConfigReader, checked_integer
from spmd_worker.model_config.families.omni_rows import opened_omni
from spmd_worker.tokenizer.video_parts import DEFAULT_FPS

WAY_OUT: Final = "; limits.max_videos=0 runs without videos"
OVERRIDES: Final = "model.video_processor"
_FILES: Final = ("video_preprocessor_config.json", "preprocessor_config.json")
_BOUNDS: Final = ("size", "min_pixels", "max_pixels")
_CAPS: Final = ("cap_pixels_per_frame", "max_video_tokens")
_MAX_PIXELS: Final = 1 << 32
_MAX_TOKENS: Final = 1 << 24
_CAPPED_SHARE: Final = 0.9
_LEAST_CAPPED: Final = 1.05
_MOST_FPS: Final = 1000.0
_MOST_FRAMES: Final = 768
_MOST_SMOLVLM: Final = 64
_MAX_SMOLVLM_SIDE: Final = 4096


@dataclass(frozen=True, slots=True)
class VideoProcessor:
    """`kind` is that of `VisionConfig`, `layout` a row of `RULES`. `min_pixels` and `max_pixels` are of a frame, or of
    all frames of a video in layouts whose rule `bounds_video`. In some positions in time grow by `time_per_second`, or
    by 1 a pair if it is 0; in others text between frames has their times. With `cap_tokens` above 0 long videos have
    smaller frames: they are tokens of a video, or of a frame in layouts that bound videos.

    With `side` above 0 frames are squares of so many pixels a side, of `tokens_per_frame` tokens, whose long side
    becomes `longest_edge` before, if that is above 0. Of files `fps` frames a second are taken, `min_frames` to
    `max_frames`, or `num_frames` if that is above 0.
    """

    kind: str
    layout: str
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: float = 1 / 255
    resampling: str = "bicubic"
    cap_tokens: int = 0
    time_per_second: float = 0.0
    side: int = 0
    tokens_per_frame: int = 0
    longest_edge: int = 0
    fps: float = DEFAULT_FPS
    num_frames: int = 0
    min_frames: int = 4
    max_frames: int = 768

    @property
    def pixels_per_token(self) -> int:
        """Pixels of a frame that a token stands for, rounded up."""
        return -(-(self.side**2) // self.tokens_per_frame) if self.side else self.unit**2

    @property
    def rule(self) -> VideoRule:
        return RULES[self.layout]

    @property
    def goes_on(self) -> bool:
        """Whether frames follow each other without text between, and positions follow their times."""
        return self.rule.text == "run" and not self.side

    @property
    def unit(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.merge_size

    def step_tokens(self, size: sizes.Size) -> int:
        """Tokens of the frames that are encoded at once, of a resized `size`."""
        return self.tokens_per_frame or (size[0] // self.unit) * (size[1] // self.unit)

    def num_tokens(self, num_frames: int, size: sizes.Size) -> int:
        """Tokens of a video of frames of a resized `size`."""
        return -(-num_frames // self.rule.step_frames) * self.step_tokens(size) + self.rule.pools

    def frame_sizes(self, num_frames: int, height: int, width: int) -> tuple[sizes.Size, ...]:
        """The sizes that frames get, one after the other. Raises MediaError."""
        first = (sizes.smolvlm_size(height, width, self.longest_edge),) if self.longest_edge else ()
        return (*first, self.frame_size(num_frames, height, width))

    def frame_size(self, num_frames: int, height: int, width: int) -> sizes.Size:
        """Height and width of the frames of a video, as they are resized. Raises MediaError."""
        if self.side:
            return self.side, self.side
        if self.rule.bounds_video:
            # A frame alone is its own second.
            num_frames = max(num_frames, NUM_FRAMES)
            most = self.max_pixels
            if self.cap_tokens:
                share = min(self.cap_tokens * self.unit**2, most // num_frames)
                most = max(share, int(self.min_pixels * _LEAST_CAPPED)) * num_frames
            return sizes.qwen_video_size(num_frames, height, width, self.unit, self.min_pixels, most)
        most = self.max_pixels
        if self.cap_tokens:
            total = int(self.cap_tokens * self.unit**2 * _CAPPED_SHARE)
            most = max(min(most, total * NUM_FRAMES // num_frames), int(self.min_pixels * _LEAST_CAPPED))
        return sizes.qwen_size(height, width, self.unit, self.min_pixels, most)

    def time(self, pair: int, fps: float) -> int:
        """Position in time of a pair of frames, from the first one's on; `fps` are frames a second."""
        if not self.goes_on:
            return 0
        # Rounded to float32 as in transformers.
        each, step = np.float32(self.time_per_second or 1), np.float32(NUM_FRAMES / fps if self.time_per_second else 1)
        if self.rule.time_key == OMNI_KEY:
            return int(np.float32(pair) * step * each)
        return int(np.float32(pair) * (each * step))


def video_processor_of(values: Mapping[str, Any]) -> VideoProcessor:
    """The processor whose `asdict` travelled as JSON."""
    return VideoProcessor(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})


def read_video_processor(
    folder: Path, images: ImageProcessor, overrides: Mapping[str, Any] | None = None
) -> VideoProcessor | None:
    """The processor of a model whose images `images` prepares; None for a kind that takes no videos, and without a file
    that says how they are prepared. `overrides` replace the file's values. Raises ModelConfigError.
    """
    found = _video_values(folder)
    if images.kind not in RULES or found is None:
        return None
    values, path = found
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    if "size" in given:
        values = {key: value for key, value in values.items() if key not in _BOUNDS[1:]}
    path_of_config = folder / "config.json"
    config = ConfigReader(opened_omni(json_object(path_of_config) or {}, path_of_config), path_of_config)
    config = replace(config, way_out=WAY_OUT)
    layout = _layout(images.kind, values, config)
    rule = RULES[layout]
    _check_overrides(given, layout)
    if rule.fixes_size:
        values = {key: value for key, value in values.items() if key not in _BOUNDS}
    settings = ProcessorSettings(
        ConfigReader(values, path, way_out=WAY_OUT), ConfigReader(given, Path(OVERRIDES), way_out=WAY_OUT)
    )
    settings.check_steps(is_optional="")
    processor = VideoProcessor(
        images.kind,
        layout,
        **_sizes(settings, rule, images),
        mean=settings.levels("image_mean", rule.mean),
        std=settings.levels("image_std", rule.std),
        scale=settings.file.number("rescale_factor", 1 / 255),
        resampling=settings.resampling(rule.resampling),
        cap_tokens=_cap_tokens(settings, rule.cap_tokens),
        time_per_second=_time_per_second(config, rule) if rule.time_key else 0.0,
        **_sampling(settings, rule),
    )
    for key, own, other in (
        ("image_mean", processor.mean, images.mean),
        ("image_std", processor.std, images.std),
        ("rescale_factor", processor.scale, images.scale),
    ):
        if own != other:
            raise settings.file.error(key, f"must be that of images, {other}: the tower has one for both{WAY_OUT}")
    return processor


def _video_values(folder: Path) -> tuple[Values, Path] | None:
    """Settings of videos, and their file: newer checkpoints have them in `processor_config.json`, older ones have those
    of images alone.
    """
    path = folder / "processor_config.json"
    found = (json_object(path) or {}).get("video_processor")
    if isinstance(found, dict):
        return found, path
    for path in (folder / name for name in _FILES):
        found = json_object(path)
        if found is not None:
            return found, path
    return None


def _check_overrides(given: Mapping[str, Any], layout: str) -> None:
    """Raise ModelConfigError for a caller's key that changes nothing of the layout."""
    rule = RULES[layout]
    unused = [*(_BOUNDS[1:] if rule.is_square else ()), *(() if rule.cap_tokens else _CAPS)]
    for key in [key for key in unused if key in given]:
        raise ModelConfigError(f"{OVERRIDES}: {key} is not supported for {layout}: leave it out{WAY_OUT}")


def _layout(kind: str, values: Values, config: ConfigReader) -> str:
    """The row of `RULES`, of a kind whose releases differ: GLM-4.6V may have the architecture of GLM-4.5V, and says in
    its files by which class they are read.
    """
    if kind != "glm4v":
        return kind
    classes = [str(values.get(key, "")) for key in ("video_processor_type", "processor_class")]
    named = next((each for each in classes if each.startswith(("Glm4v", "Glm46V"))), str(config.get("model_type")))
    return "glm46v" if named.lower().startswith("glm46v") else kind


def _sizes(settings: ProcessorSettings, rule: VideoRule, images: ImageProcessor) -> dict[str, int]:
    if rule.is_square:
        return _squares(settings, rule, images)
    patch = settings.integer("patch_size", rule.patch_size, 1, 512)
    merge = settings.integer("merge_size", 2, 1, 16)
    for key, own, other in (("patch_size", patch, images.patch_size), ("merge_size", merge, images.merge_size)):
        if own != other:
            raise settings.of(key).error(key, f"must be that of images, {other}: the tower has one for both{WAY_OUT}")
    settings.file.choice("temporal_patch_size", (NUM_FRAMES,), NUM_FRAMES)
    least = _pixels(settings, rule, "min_pixels", "shortest_edge", rule.min_pixels)
    most = _pixels(settings, rule, "max_pixels", "longest_edge", rule.max_pixels)
    if least > most:
        raise settings.of("size").error("size", f"asks for at least {least} pixels of a video and at most {most}")
    return {"patch_size": patch, "merge_size": merge, "min_pixels": least, "max_pixels": most}


def _squares(settings: ProcessorSettings, rule: VideoRule, images: ImageProcessor) -> dict[str, int]:
    """Frames as images that are not cut into several squares."""
    longest = _longest_edge(settings) if rule.sampling == "smolvlm" else 0
    key = "max_image_size" if longest else "size"
    side = settings.side(key, "longest_edge", 364) if longest else settings.square(key, 384)
    if side != images.side:
        words = f"must be the size that the tower has, {images.side}, not {side}{WAY_OUT}"
        raise settings.of(key).error(key, words)
    if settings.file.get("do_center_crop"):
        raise settings.file.error("do_center_crop", f"is not supported for videos, only false{WAY_OUT}")
    settings.file.choice("initial_shift", (True,), True)
    sizes = {"patch_size": images.patch_size, "merge_size": images.merge_size, "min_pixels": 0, "max_pixels": 0}
    tokens = ((side // images.patch_size + 1) // 2) ** 2 if rule.pools else images.tokens_per_crop
    return {**sizes, "side": side, "tokens_per_frame": tokens, "longest_edge": longest}


def _longest_edge(settings: ProcessorSettings) -> int:
    """SmolVLM's; SmolVLM2 may have it under `video_sampling`."""
    sampling = settings.file.object("video_sampling")
    if settings.of("size").get("size") is None and sampling.get("video_size") is not None:
        size = sampling.object("video_size")
        longest = checked_integer(size.get("longest_edge"), size.where("longest_edge"), 1, MAX_SIDE)
    else:
        longest = settings.side("size", "longest_edge", 4 * 364)
    return min(longest, _MAX_SMOLVLM_SIDE)


def _pixels(settings: ProcessorSettings, rule: VideoRule, key: str, edge: str, default: int) -> int:
    reader = settings.of(key)
    if reader.get(key) is not None and (rule.has_old_keys or reader is settings.given):
        return settings.integer(key, default, 1, _MAX_PIXELS)
    return settings.side("size", edge, default, _MAX_PIXELS)


def _sampling(settings: ProcessorSettings, rule: VideoRule) -> dict[str, Any]:
    """A file that does not say how to sample, or says not to, has the rate of Qwen's own tools."""
    defaults = {"min_frames": rule.min_frames, "max_frames": _MOST_FRAMES}
    if rule.sampling == "smolvlm":
        settings = _of_smolvlm(settings)
        defaults["max_frames"] = _MOST_SMOLVLM
    found = {key: settings.integer(key, default, 1, _MAX_TOKENS) for key, default in defaults.items()}
    if found["min_frames"] > found["max_frames"]:
        # One of them may be the default.
        names = ("max_frames", "min_frames")
        key, other = names if settings.of(names[0]).get(names[0]) is not None else names[::-1]
        words = f"does not go with {other}={found[other]}: min_frames must be at most max_frames{WAY_OUT}"
        raise settings.of(key).error(key, words)
    is_rated = settings.given.get("fps") is not None
    if is_rated and settings.given.get("num_frames") is not None:
        raise settings.given.error("num_frames", f"does not go with fps: give one of them{WAY_OUT}")
    if not is_rated and settings.of("num_frames").get("num_frames") is not None:
        found["num_frames"] = settings.integer("num_frames", 1, 1, _MAX_TOKENS)
    elif rule.num_frames and settings.of("fps").get("fps") is None:
        found["num_frames"] = min(max(rule.num_frames, found["min_frames"]), found["max_frames"])
    rate = settings.of("fps").number("fps", rule.fps)
    if rate > _MOST_FPS:
        raise settings.of("fps").error("fps", f"must be at most {_MOST_FPS:g}{WAY_OUT}")
    return {**found, "fps": rate}


def _of_smolvlm(settings: ProcessorSettings) -> ProcessorSettings:
    """Settings by SmolVLM's names: `num_frames` is a most, and older files have `video_sampling` in its stead."""
    sampling = settings.file.object("video_sampling")
    older = {key: sampling.get(key) for key in ("fps", "max_frames") if sampling.get(key) is not None}
    file, given = map(_with_most, (replace(settings.file, config={**settings.file.config, **older}), settings.given))
    return ProcessorSettings(replace(file, file_keys={"num_frames": ""}) if "max_frames" in older else file, given)


def _with_most(reader: ConfigReader) -> ConfigReader:
    has_most = reader.get("num_frames") is not None
    return replace(reader, file_keys={"num_frames": "", **({"max_frames": "num_frames"} if has_most else {})})


def _cap_tokens(settings: ProcessorSettings, default: int) -> int:
    key = _CAPS[0]
    # Classes without a default ignore the key.
    if not default or not settings.of(key).flag(key, False):
        return 0
    return settings.integer("max_video_tokens", default, 1, _MAX_TOKENS)


def _time_per_second(config: ConfigReader, rule: VideoRule) -> float:
    section, _, key = rule.time_key.rpartition(".")
    reader = config.object(section) if section else config
    number = float(reader.number(key, rule.time_per_second))
    if not 0 < number <= 1000:
        raise ModelConfigError(f"{reader.where(key)}={number:g} must be from 0 to 1000{WAY_OUT}")
    return number
