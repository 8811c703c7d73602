"""Bytes of a file of video to resized frames, by PyAV: those that the model's rule of sampling asks for.

A format is opened by its first bytes, and nothing but them is read: lists of other files are not. Frames are decoded in
one thread and counted as they come. What a header says of their number is a first guess.
"""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from spmd_worker.base.config.extras import package_fault
from spmd_worker.media.decode import check_size
from spmd_worker.media.errors import MediaError
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.prepared import Pixels
from spmd_worker.media.sizes import Size
from spmd_worker.media.video_preparing import resized
from spmd_worker.media.video_processor import VideoProcessor
from spmd_worker.media.video_sampling import Sampling, sampled_indices

if TYPE_CHECKING:
    from av.container import InputContainer

FORMATS: Final = ("MP4", "MOV", "WebM", "Matroska", "AVI", "GIF")
_MAX_EXPLAINED: Final = 200
_MOST_FRAMES: Final = 1 << 22
_LEAST_FPS: Final = 1e-3
_LEAST_SHARE: Final = 0.9
"""Headers count frames that are not shown, too."""


class DecodedVideo(NamedTuple):
    """Frames of equal sizes, those at `indices` of a video of `total` frames, `fps` of them a second. `size` is that
    of the file's.
    """

    frames: list[Pixels]
    size: Size
    indices: list[int]
    fps: float
    total: int


def decode_video(data: bytes, sampling: Sampling, processor: VideoProcessor, limits: MediaLimits) -> DecodedVideo:
    """Raises MediaError; MemoryError passes."""
    name = _format_of(data)
    try:
        import av
    except ImportError as error:
        message = f"files of videos need PyAV, which {package_fault('av', 'video', error)}"
        raise MediaError("extra_missing", message) from None

    def opened() -> "InputContainer":
        return av.open(io.BytesIO(data), format=name, io_open=_refuse)

    try:
        return _decoded(opened, sampling, processor, limits)
    except (MediaError, MemoryError):
        raise
    # Decoders raise errors of any class.
    except Exception as error:
        # FFmpeg's numbers of errors, and its names of files in memory, tell nothing.
        words = str(getattr(error, "strerror", None) or error)
        raise _unreadable(" ".join(words.split())[:_MAX_EXPLAINED] or type(error).__name__) from None


def _refuse(*_: Any) -> Any:
    raise ValueError("the file names other files: give one that has all of its frames")


def _unreadable(why: str) -> MediaError:
    return MediaError("video_unreadable", f"the video cannot be decoded: {why}")


def _format_of(data: bytes) -> str:
    """FFmpeg's name of a format, by first bytes. Raises MediaError."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    message = f"{len(data):,} bytes are not a video that can be read: give one of {', '.join(FORMATS)}"
    raise MediaError("video_unreadable", message)


def _decoded(
    opened: Callable[[], "InputContainer"], sampling: Sampling, processor: VideoProcessor, limits: MediaLimits
) -> DecodedVideo:
    with opened() as container:
        stream = _stream_of(container)
        check_size(stream.height, stream.width, limits)
        declared, fps = stream.frames, float(stream.average_rate or stream.guessed_rate or 0)
        total = declared or _num_packets(container)
    if not _LEAST_FPS <= fps <= 1 / _LEAST_FPS:
        raise _unreadable(f"it has {fps:g} frames a second")
    # A header, or packets without a picture, may count frames that never come: then the number is known.
    for _ in range(2):
        if not 1 <= total <= _MOST_FRAMES:
            raise _unreadable(f"it has {total} frames")
        indices = sampled_indices(total, fps, sampling, processor)
        if len(indices) > limits.max_video_frames:
            rule = f"limits.max_video_frames={limits.max_video_frames}: give fps, num_frames or max_frames"
            raise MediaError("video_too_long", f"{len(indices)} frames would be taken, more than {rule}")
        with opened() as container:
            frames, size, num_decoded = _taken(container, indices, processor, limits)
        if len(frames) == len(indices):
            return DecodedVideo(frames, size, indices, fps, total)
        if num_decoded < _LEAST_SHARE * declared:
            raise _unreadable(f"it declares {declared} frames and has {num_decoded}: it is cut short")
        total = num_decoded
    raise _unreadable("its frames change from one reading to the next")


def _stream_of(container: "InputContainer") -> Any:
    if not container.streams.video:
        raise _unreadable("it has no pictures")
    stream = container.streams.video[0]
    # One thread has the same bits and less memory.
    stream.thread_type, stream.codec_context.thread_count = "NONE", 1
    return stream


def _num_packets(container: "InputContainer") -> int:
    """Packets of pictures, which are not decoded."""
    return sum([packet.size > 0 for packet in container.demux(container.streams.video[0])])


def _taken(
    container: "InputContainer", indices: list[int], processor: VideoProcessor, limits: MediaLimits
) -> tuple[list[Pixels], Size, int]:
    """Resized frames at `indices` as far as there are any, their size before, and the number of decoded frames."""
    frames: list[Pixels] = []
    size, number = (0, 0), 0
    for frame in container.decode(_stream_of(container)):
        if number == 0:
            size = frame.height, frame.width
            check_size(*size, limits)
        if (frame.height, frame.width) != size:
            raise _unreadable(f"its frames change to {frame.width} x {frame.height} pixels: all must have one size")
        if number == indices[len(frames)]:
            pixels = resized(frame.to_ndarray(format="rgb24"), len(indices), processor, limits)
            # An index may be there twice.
            while len(frames) < len(indices) and indices[len(frames)] == number:
                frames.append(pixels)
        number += 1
        if len(frames) == len(indices):
            break
    return frames, size, number
