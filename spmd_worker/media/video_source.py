"""GivenVideo: frames of a video as they are read one by one, from what a caller gives."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_worker.media.errors import MediaError
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.prepared import NUM_CHANNELS, Pixels, PreparedImage
from spmd_worker.media.sizes import Size
from spmd_worker.media.video_preparing import prepare_video
from spmd_worker.media.video_processor import VideoProcessor
from spmd_worker.tokenizer.video_parts import DEFAULT_FPS, VideoPart

_FORMS = "a list of frames, each as an image is given, or an array [frames, height, width, 3]"


class GivenVideo(NamedTuple):
    """`frames` are those at `indices` of a video of `total` frames, `fps` of them a second."""

    frames: Sequence[Any]
    indices: Sequence[int]
    fps: float
    total: float

    def prepared(
        self, frames: Sequence[Pixels], size: Size, processor: VideoProcessor, source_digest: bytes
    ) -> list[PreparedImage]:
        """Its images, of `frames` resized from `size`. Raises MediaError."""
        return prepare_video(frames, size, self.indices, self.fps, self.total, processor, source_digest)


def given_video(part: VideoPart, limits: MediaLimits, given_image: Callable[[Any], Any]) -> GivenVideo:
    """The frames of a video; `given_image` takes each as images are taken. Raises MediaError."""
    video = part.video
    if isinstance(video, list | tuple):
        frames: Sequence[Any] = video
    elif not hasattr(video, "__array__"):
        raise MediaError("video_unreadable", f"{type(video).__name__} is not a video: give a file, {_FORMS}")
    else:
        frames = _frames_of(video)
    if not 1 <= len(frames) <= limits.max_video_frames:
        rule = f"limits.max_video_frames={limits.max_video_frames}"
        raise MediaError("video_too_long", f"it has {len(frames)} frames: give 1 to {rule}")
    if part.indices and len(part.indices) != len(frames):
        message = f"it has {len(frames)} frames, and frames_indices has {len(part.indices)}: give as many"
        raise MediaError("video_unreadable", message)
    given = []
    for index, frame in enumerate(frames):
        try:
            given.append(given_image(frame))
        except MediaError as error:
            raise MediaError(error.code, f"frame {index}: {error}") from None
    indices = part.indices or tuple(range(len(frames)))
    return GivenVideo(given, indices, part.fps or DEFAULT_FPS, part.total or float(len(frames)))


def _frames_of(video: Any) -> Sequence[Pixels]:
    """Frames of an array, with the colours before or behind the pixels, of bytes or of whole numbers as floats."""
    try:
        array: NDArray[Any] = np.asarray(video)
    # Tensors on a device, or with a history, raise errors of their own.
    except (TypeError, ValueError, RuntimeError) as error:
        raise MediaError("video_unreadable", f"{type(video).__name__} is not an array of frames: {error}") from None
    if array.ndim != 4 or NUM_CHANNELS not in (array.shape[1], array.shape[3]):
        raise MediaError("video_unreadable", f"an array of {array.dtype} {list(array.shape)}: give {_FORMS}")
    if array.shape[3] != NUM_CHANNELS:
        array = array.transpose(0, 2, 3, 1)
    if array.dtype.kind == "f":
        # NaN becomes any number, which differs from it.
        with np.errstate(invalid="ignore"):
            whole = array.clip(0, 255).astype(np.uint8)
        if not np.array_equal(whole, array):
            raise MediaError("video_unreadable", "floats must be whole numbers from 0 to 255: give them as uint8")
        array = whole
    return list(array)
