"""Decodes and prepares images in a process with limits (`tokenizer/bounded_process.py`): an image whose decoder never
ends, takes all memory or crashes ends as the error of its row.

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
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.prepared import NUM_CHANNELS, Pixels, PreparedImage, pixels_from
from spmd_worker.media.preparing import prepare
from spmd_worker.tokenizer.bounded_process import PAYLOAD, BoundedProcess, BoundedProcessError, pack, serve

CPU_S: Final = 5
MEMORY_BYTES: Final = 512 << 20
_MEMORY_PER_PIXEL: Final = 20
"""Decoded, turned, composited and as an array, and the coefficients of a progressive JPEG."""


class IsolatedPreparer:
    """Prepares images one after the other. Not shared with forked processes: each starts a process of its own."""

    def __init__(self, processor: ImageProcessor, limits: MediaLimits) -> None:
        start = {"processor": asdict(processor), "limits": asdict(limits)}
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
        data, shape = (source, None) if isinstance(source, bytes) else (source.tobytes(), source.shape)
        try:
            answer = self._process.ask(pack({"shape": shape, "is_alone": is_alone, PAYLOAD: data}))
        except BoundedProcessError as error:
            raise MediaError("image_unreadable", f"decoding was ended: {error}") from None
        if "code" in answer:
            raise MediaError(answer["code"], answer["message"])
        return _prepared(answer, source_digest)


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

    limits = start["limits"]
    formats, background = tuple(limits["image_formats"]), tuple(limits["background"])
    bounds = MediaLimits(**{**limits, "image_formats": formats, "background": background})
    processor = processor_of(start["processor"])
    # Headers are checked against our own limit.
    Image.MAX_IMAGE_PIXELS = None

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return _answer(request, processor, bounds)
        except MediaError as error:
            return {"code": error.code, "message": str(error)}

    return answer


def _answer(request: Mapping[str, Any], processor: ImageProcessor, limits: MediaLimits) -> Mapping[str, Any]:
    data, shape = request.get(PAYLOAD, b""), request["shape"]
    if shape is None:
        pixels = decode(data, limits)
    else:
        pixels = np.frombuffer(data, np.uint8).reshape(*shape[:2], NUM_CHANNELS)
    image = prepare(pixels, processor, is_alone=request["is_alone"])
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
