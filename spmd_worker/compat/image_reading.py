"""Opens the images, videos and audio of a run's prompts: processor, limits, root and helper processes."""

from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from spmd_worker.base.config.schema import RunConfig
from spmd_worker.compat.audio_reading import LazyPreparer, PromptAudio, new_audio_preparer, run_audio_settings
from spmd_worker.compat.image_prompts import ImagePrompts, MediumTokens, Preparer
from spmd_worker.compat.mixed_preparer import MixedPreparer
from spmd_worker.media.limits import DEFAULT_FORMATS, MediaLimits
from spmd_worker.media.placeholders import PLACEHOLDERS, Placeholders
from spmd_worker.media.prepared import PreparedImage
from spmd_worker.media.preparer import ImagePreparer
from spmd_worker.media.preparing import prepare
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.resolved import ResolvedRun

_EXAMPLES: Final = ((480, 640), (1080, 1920))
"""Height and width."""
_EXAMPLE_FRAMES: Final = 32


def open_image_prompts(resolved: ResolvedRun) -> ImagePrompts | None:
    """The images and audio of a run; None for a model without them. Raises ModelConfigError."""
    vision = resolved.model_config.vision
    if vision is None:
        return None
    preparers: list[Preparer] = []
    kinds: list[MediumTokens] = []
    for part in vision.parts:
        preparer = _image_preparer(resolved, part) if part.sees else _audio_preparer(resolved)
        if preparer is not None:
            preparers.append(preparer)
            kinds.append(MediumTokens(placeholders_of(part), part.image_token_id, part.video_token_id))
    if not kinds:
        return None
    return ImagePrompts(MixedPreparer(*preparers) if len(preparers) > 1 else preparers[0], tuple(kinds))


def placeholders_of(vision: VisionConfig) -> Placeholders:
    """Texts of a model, of which others of its kind may take videos."""
    found = PLACEHOLDERS[vision.kind]
    return found.without_videos() if vision.video_token_id is None else found


def _image_preparer(resolved: ResolvedRun, vision: VisionConfig) -> LazyPreparer[PreparedImage] | None:
    processor, config = resolved.image_processor, resolved.config
    if processor is None:
        return None
    root = None if config.job.media_root is None else Path(config.job.media_root)
    placeholders, videos = placeholders_of(vision), resolved.video_processor
    given = (processor, placeholders, media_limits(config), root, config.job.media_threads, videos)
    return LazyPreparer[PreparedImage](partial(ImagePreparer, *given))


def _audio_preparer(resolved: ResolvedRun) -> PromptAudio:
    settings = run_audio_settings(resolved)
    assert settings is not None, "the model hears"
    return PromptAudio(new_audio_preparer(resolved, settings), resolved.config.limits.max_audios)


def image_costs(resolved: ResolvedRun) -> list[tuple[int, int, PreparedImage]]:
    """Height, width and what a prompt gets, of an image of each of two common sizes; empty without images, Pillow or
    the file of the processor, which plans do without.
    """
    processor = resolved.image_processor
    if processor is None:
        return []
    try:
        blank = [np.zeros((height, width, 3), np.uint8) for height, width in _EXAMPLES]
        return [(*_EXAMPLES[i], prepare(each, processor, is_alone=True)) for i, each in enumerate(blank)]
    except ImportError:
        return []


def video_cost(resolved: ResolvedRun) -> tuple[int, int, int, int] | None:
    """Frames, height, width and tokens of a common video; None in a run without videos."""
    processor, (height, width) = resolved.video_processor, _EXAMPLES[0]
    if processor is None:
        return None
    size = processor.frame_size(_EXAMPLE_FRAMES, height, width)
    return _EXAMPLE_FRAMES, height, width, processor.num_tokens(_EXAMPLE_FRAMES, size)


def media_limits(config: RunConfig) -> MediaLimits:
    """Bounds on the images and videos of a prompt."""
    limits, background = config.limits, bytes.fromhex(config.model.image_background[1:])
    formats = tuple([each.upper() for each in limits.image_formats]) if limits.image_formats else DEFAULT_FORMATS
    of_images = ("max_image_bytes", "max_image_pixels", "max_images", "max_image_tokens")
    names = (*of_images, "max_videos", "max_video_bytes", "max_video_frames", "max_video_tokens")
    sizes = {name: getattr(limits, name) for name in names}
    colour = (background[0], background[1], background[2])
    return MediaLimits(**sizes, image_formats=formats, background=colour)
