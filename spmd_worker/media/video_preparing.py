"""Preparing of a video: steps of resized frames as the images that its tower reads, and the text in the prompt."""

from collections.abc import Sequence

import numpy as np

from spmd_worker.media import placeholders
from spmd_worker.media.errors import MediaError
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.media_id import frames_id_of
from spmd_worker.media.prepared import FramePlace, ImagePixels, Pixels, PreparedImage
from spmd_worker.media.resize import resize
from spmd_worker.media.sizes import Size
from spmd_worker.media.video_processor import VideoProcessor
from spmd_worker.media.video_texts import TextOfVideo, text_of_video

_MOST_TIME = 1 << 20


def prepare_video(
    frames: Sequence[Pixels],
    size: Size,
    indices: Sequence[int],
    fps: float,
    total: float,
    processor: VideoProcessor,
    source_digest: bytes = b"",
) -> list[PreparedImage]:
    """The steps of `frames`, pairs in most layouts, all of the size that `processor` resizes them to, before which it
    was `size`. They are those at `indices` of a video of `total` frames, `fps` of them a second. The first has the text
    of the video, and the digest of its source. Raises MediaError.
    """
    assert len(frames) == len(indices), (len(frames), len(indices))
    size_of_step = processor.rule.step_frames
    # The last frame is repeated.
    padding = -len(frames) % size_of_step
    frames, indices = [*frames, *[frames[-1]] * padding], [*indices, *[indices[-1]] * padding]
    num_steps, sampled_fps = len(frames) // size_of_step, (len(indices) - padding) / total * fps
    grid = len(frames[0]) // processor.patch_size, frames[0].shape[1] // processor.patch_size
    token_grid = (0, 0) if processor.side else (grid[0] // processor.merge_size, grid[1] // processor.merge_size)
    num_rows = processor.step_tokens((len(frames[0]), frames[0].shape[1]))
    # The last frame may have one more.
    counts = [num_rows] * (num_steps - 1) + [num_rows + processor.rule.pools]
    tokens = [placeholders.video_text(processor.kind, each) for each in counts]
    described = TextOfVideo(tokens, [each / fps for each in indices], size_of_step, total / fps)
    text = text_of_video(processor.rule.text, described)
    times = [processor.time(step, sampled_fps) for step in range(num_steps)]
    if times[-1] > _MOST_TIME:
        rule = f"its steps are {times[1]} positions apart: give it with more frames a second"
        raise MediaError("video_too_long", f"a video of {sampled_fps:g} frames a second: {rule}")
    made = []
    for step, time in enumerate(times):
        pixels = ImagePixels(
            tuple([np.ascontiguousarray(each) for each in frames[size_of_step * step : size_of_step * (step + 1)]]),
            grid,
            size,
            frame=(1 + (step + 1 == num_steps)) * processor.rule.pools,
        )
        place = FramePlace(step, time, goes_on=processor.goes_on and step + 1 < num_steps)
        made.append(
            PreparedImage(
                media_id=frames_id_of(pixels, processor, place),
                pixels=pixels,
                text="" if step else text,
                num_rows=counts[step],
                num_patches=grid[0] * grid[1],
                token_grid=token_grid,
                source_digest=b"" if step else source_digest,
                frame=place,
            )
        )
    return made


def resized(pixels: Pixels, num_frames: int, processor: VideoProcessor, limits: MediaLimits) -> Pixels:
    """A frame of a video of so many. Raises MediaError for too many tokens of a step or in total."""
    size = len(pixels), pixels.shape[1]
    *_, last = targets = processor.frame_sizes(num_frames, *size)
    num_rows = processor.step_tokens(last) + processor.rule.pools
    num_tokens = processor.num_tokens(num_frames, last)
    at_once = "two frames" if processor.rule.step_frames > 1 else "a frame"
    for words, number, key, most in (
        (at_once, num_rows, "max_image_tokens", limits.max_image_tokens),
        ("the video", num_tokens, "max_video_tokens", limits.max_video_tokens),
    ):
        if number > most:
            given = f"{num_frames} frames of {size[1]} x {size[0]} pixels"
            rule = f"limits.{key}={most}: raise it, or give fewer or smaller frames, or lower sizes"
            message = f"{words} of {given} would be {number} tokens, more than {rule} (model.video_processor)"
            raise MediaError("video_too_long", message)
    for each in targets:
        pixels = resize(pixels, *each, processor.resampling)
    return np.ascontiguousarray(pixels)
