"""Rules of videos by layout: how each class of transformers sizes, samples and writes them, as data."""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from spmd_worker.media.image_processor import BICUBIC, CLIP_MEAN, CLIP_STD, HALVES
from spmd_worker.media.sizes import NUM_FRAMES
from spmd_worker.tokenizer.video_parts import DEFAULT_FPS

Levels: TypeAlias = tuple[float, float, float]
Sampling: TypeAlias = Literal["pairs", "ends", "middles", "beginnings", "glm4v", "glm46v", "smolvlm"]
"""Choice of frames of a file (`video_sampling.py`)."""
Text: TypeAlias = Literal["run", "qwen3", "glm4v", "glm46v", "internvl", "smolvlm"]
"""Text around the tokens of frames (`video_texts.py`)."""


@dataclass(frozen=True, slots=True)
class VideoRule:
    """Defaults of a class, of which a file may give others, and what it fixes.

    `step_frames` frames are encoded at once. `bounds_video`: bounds of pixels are those of all frames, not of one.
    `has_old_keys`: it takes `min_pixels` and `max_pixels` too. `time_key`: positions in time follow seconds by this
    number of config.json, by default `time_per_second`. `fixes_size`: the file's bounds of pixels do not count. Without
    `fps` or `num_frames` of a file or a caller, files have `fps` frames a second, at least `min_frames`, or up to
    `num_frames` in all. `is_square`: frames are squares of the tower's size, like images that are not cut. `pools`:
    a frame has a token for each four patches, and the last one has one more.
    """

    sampling: Sampling
    text: Text
    patch_size: int = 14
    min_pixels: int = 0
    max_pixels: int = 0
    cap_tokens: int = 0
    mean: Levels = CLIP_MEAN
    std: Levels = CLIP_STD
    resampling: int = BICUBIC
    step_frames: int = NUM_FRAMES
    bounds_video: bool = False
    has_old_keys: bool = False
    time_key: str = ""
    time_per_second: float = 0.0
    fixes_size: bool = False
    fps: float = DEFAULT_FPS
    min_frames: int = 1
    num_frames: int = 0
    is_square: bool = False
    pools: bool = False


OMNI_KEY: Final = "position_id_per_seconds"
_QWEN2: Final = ("pairs", "run", 14, 128 * 28 * 28, 768 * 28 * 28, 128_000)
_GLM: Final = (14, 112 * 112, 28 * 28 * 2 * 30_000)
RULES: Final = {
    "qwen2_vl": VideoRule(*_QWEN2, has_old_keys=True, min_frames=4),
    "qwen2_5_vl": VideoRule(
        *_QWEN2, has_old_keys=True, time_key="vision_config.tokens_per_second", time_per_second=4.0, min_frames=4
    ),
    "qwen2_5_omni": VideoRule(
        *_QWEN2, has_old_keys=True, time_key=OMNI_KEY, time_per_second=25.0, fixes_size=True, min_frames=4
    ),
    # transformers also has parts of positions, which are rounded down here.
    "qwen3_omni": VideoRule(
        *("pairs", "run", 14, 128 * 32 * 32, 768 * 32 * 32, 128_000),
        has_old_keys=True,
        time_key=OMNI_KEY,
        time_per_second=25.0,
        fixes_size=True,
        min_frames=4,
    ),
    "qwen3_vl": VideoRule(
        *("ends", "qwen3", 16, 128 * 32 * 32, 768 * 32 * 32, 768, HALVES, HALVES), bounds_video=True, min_frames=4
    ),
    "glm4v": VideoRule("glm4v", "glm4v", *_GLM, bounds_video=True),
    "glm46v": VideoRule("glm46v", "glm46v", *_GLM, bounds_video=True),
    # As many as its own tools take.
    "internvl": VideoRule("middles", "internvl", is_square=True, step_frames=1, num_frames=8),
    "llava_onevision": VideoRule("beginnings", "run", is_square=True, pools=True, step_frames=1, num_frames=32),
    "smolvlm": VideoRule(
        *("smolvlm", "smolvlm"), mean=HALVES, std=HALVES, resampling=1, is_square=True, step_frames=1, fps=1.0
    ),
}
"""Layout -> its rule. Layouts are kinds of `VisionConfig`, and releases of a kind that differ in videos alone."""
