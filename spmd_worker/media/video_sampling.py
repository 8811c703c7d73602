"""Frames that are taken of a file of video: the rules of transformers' processors."""

import math
from dataclasses import dataclass

import numpy as np

from spmd_worker.media.errors import MediaError
from spmd_worker.media.sizes import NUM_FRAMES
from spmd_worker.media.video_processor import VideoProcessor


@dataclass(frozen=True, slots=True)
class Sampling:
    """Numbers that a caller gives in place of the processor's; None: the processor's."""

    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None


def sampled_indices(total: int, fps: float, sampling: Sampling, processor: VideoProcessor) -> list[int]:
    """Indices of the frames that are taken of `total`, `fps` of which are a second. Raises MediaError."""
    wanted = sampling.num_frames
    if wanted is None and sampling.fps is None and processor.num_frames:
        wanted = processor.num_frames
    rate = sampling.fps or processor.fps
    least, most = sampling.min_frames or processor.min_frames, sampling.max_frames or processor.max_frames
    if wanted is not None and wanted > total:
        raise MediaError("video_too_short", f"the video has {total} frames, and num_frames={wanted} asks for more")
    if processor.timestamps:
        number = wanted or min(max(int(total / fps * rate), least), most, total)
        return [int(each) for each in np.linspace(0, total - 1, max(number, 1)).round()]
    if wanted is not None:
        number = round(wanted / NUM_FRAMES) * NUM_FRAMES
    else:
        most = math.floor(min(most, total) / NUM_FRAMES) * NUM_FRAMES
        number = math.floor(min(max(total / fps * rate, least), most, total) / NUM_FRAMES) * NUM_FRAMES
    number = max(number, 1)
    # transformers has the frame before or behind where its float32 is rounded, and more or fewer with another number of
    # vector lanes.
    return [each * total // number for each in range(number)]
