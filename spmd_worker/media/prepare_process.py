"""Decodes and prepares images, and frames of videos, in a process with limits (`tokenizer/bounded_process.py`): an
image whose decoder never ends, takes all memory or crashes ends as the error of its row.

A request has the bytes of a file, or pixels with their `shape`, as its payload; so has the answer the prepared pixels.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from spmd_worker.media.decode import decode
from spmd_worker.media.errors import MediaError
from spmd_worker.media.image_processor import ImageProcessor, processor_of
from spmd_worker.media.limits import MediaLimits, limits_of
from spmd_worker.media.prepared import NUM_CHANNELS, Pixels, PreparedImage, pixels_from
from spmd_worker.media.preparing import prepare
from spmd_worker.media.sizes import Size
from spmd_worker.media.video_preparing import resized
from spmd_worker.media.video_processor import VideoProcessor, video_processor_of
from spmd_worker.tokenizer.bounded_process import PAYLOAD, BoundedProcess, BoundedProcessError, pack, serve

CPU_S: Final = 5
MEMORY_BYTES: Final = 512 << 20
_MEMORY_PER_PIXEL: Final = 20
"""Decoded, turned, composited and as an array, and the coefficients of a progressive JPEG."""


class IsolatedPreparer:
    """Prepares images one after the other. Not shared with forked processes: each starts a process of its own."""

    def __init__(self, processor: ImageProcessor, limits: MediaLimits, video: VideoProcessor | None = None) -> None:
        of_video = None if video is None else asdict(video)
        start = {"processor": asdict(processor), "limits": asdict(limits), "video": of_video}
        memory_bytes = MEMORY_BYTES + limits.max_image_bytes + _MEMORY_PER_PIXEL * limits.max_image_pixels
        self._process = BoundedProcess(__name__, start, CPU_S, memory_bytes)

    @property
    def pid(self) -> int | None:
        """Id of the running process; None without one."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def prepare(self, source: bytes | Pixels, source_digest: bytes, *, is_alone: bool) -> PreparedImage:
        """Raises MediaError."""
        return _prepared(self._answer(source, {"is_alone": is_alone}), source_digest)

    def prepare_frame(self, source: bytes | Pixels, num_frames: int) -> tuple[Pixels, Size]:
        """A frame of a video of so many, resized, and its own size. Raises MediaError."""
        answer = self._answer(source, {"num_frames": num_frames})
        (height, width), (own_height, own_width) = answer["shape"], answer["size"]
        pixels = np.frombuffer(answer[PAYLOAD], np.uint8).reshape(height, width, NUM_CHANNELS)
        return pixels, (own_height, own_width)

    def _answer(self, source: bytes | Pixels, request: Mapping[str, Any]) -> Mapping[str, Any]:
        data, shape = (source, None) if isinstance(source, bytes) else (source.tobytes(), source.shape)
        try:
            answer = self._process.ask(pack({"shape": shape, **request, PAYLOAD: data}))
        except BoundedProcessError as error:
            raise MediaError("image_unreadable", f"decoding was ended: {error}") from None
        if "code" in answer:
            raise MediaError(answer["code"], answer["message"])
        return answer


def _prepared(answer: Mapping[str, Any], source_digest: bytes) -> PreparedImage:
    shapes = tuple([(height, width) for height, width in answer["shapes"]])
    pixels = pixels_from(answer[PAYLOAD], shapes, tuple(answer["grid"]), tuple(answer["size"]))
    return PreparedImage(
        media_id=bytes.fromhex(answer["media_id"]),
        pixels=pixels,
        text=answer["text"],
        num_rows=answer["num_rows"],
        num_patches=answer["num_patches"],
        token_grid=tuple(answer["token_grid"]),
        source_digest=source_digest,
    )


# In the process.


def _open(start: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    from PIL import Image

    bounds, processor = limits_of(start["limits"]), processor_of(start["processor"])
    video = None if start["video"] is None else video_processor_of(start["video"])
    # Headers are checked against our own limit.
    Image.MAX_IMAGE_PIXELS = None

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            pixels = _pixels(request, bounds)
            if "num_frames" in request:
                assert video is not None, "the model takes videos"
                return _frame(pixels, request["num_frames"], video, bounds)
            return _image(pixels, request["is_alone"], processor, bounds)
        except MediaError as error:
            return {"code": error.code, "message": str(error)}

    return answer


def _pixels(request: Mapping[str, Any], limits: MediaLimits) -> Pixels:
    data, shape = request.get(PAYLOAD, b""), request["shape"]
    if shape is None:
        return decode(data, limits)
    return np.frombuffer(data, np.uint8).reshape(*shape[:2], NUM_CHANNELS)


def _frame(pixels: Pixels, num_frames: int, processor: VideoProcessor, limits: MediaLimits) -> Mapping[str, Any]:
    size = len(pixels), pixels.shape[1]
    frame = resized(pixels, num_frames, processor, limits)
    return {"shape": frame.shape[:2], "size": size, PAYLOAD: frame.tobytes()}


def _image(pixels: Pixels, is_alone: bool, processor: ImageProcessor, limits: MediaLimits) -> Mapping[str, Any]:
    image = prepare(pixels, processor, is_alone=is_alone)
    check_num_rows(image, limits)
    return {
        "media_id": image.media_id.hex(),
        "shapes": image.pixels.shapes,
        "grid": image.pixels.grid,
        "size": image.pixels.size,
        "text": image.text,
        "num_rows": image.num_rows,
        "num_patches": image.num_patches,
        "token_grid": image.token_grid,
        PAYLOAD: image.pixels.data,
    }


def check_num_rows(image: PreparedImage, limits: MediaLimits) -> None:
    """Raise MediaError for an image of more tokens than the limit."""
    if image.num_rows > limits.max_image_tokens:
        height, width = image.pixels.size
        rule = f"limits.max_image_tokens={limits.max_image_tokens}: raise it, or give a smaller image or a lower size"
        message = f"the image of {width} x {height} pixels takes {image.num_rows} tokens, more than {rule}"
        message += " (model.image_max_pixels, or the number of model.image_processor by which this model sizes images)"
        raise MediaError("image_too_long", message)


if __name__ == "__main__":
    sys.exit(serve(_open))
