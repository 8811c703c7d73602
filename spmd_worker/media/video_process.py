"""Decodes files of videos in a process with limits (`tokenizer/bounded_process.py`): one whose decoder never ends, or
takes all memory or crashes, ends as the error of its row.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from spmd_worker.media.errors import MediaError
from spmd_worker.media.limits import MediaLimits, limits_of
from spmd_worker.media.prepared import NUM_CHANNELS
from spmd_worker.media.video_decode import DecodedVideo, decode_video
from spmd_worker.media.video_processor import VideoProcessor, video_processor_of
from spmd_worker.media.video_sampling import Sampling
from spmd_worker.tokenizer.bounded_process import PAYLOAD, BoundedProcess, BoundedProcessError, pack, serve

CPU_S: Final = 100
MEMORY_BYTES: Final = 1 << 30
_MEMORY_PER_PIXEL: Final = 64
"""Pictures that a decoder keeps for others, and one as an array."""


class IsolatedVideoDecoder:
    """Decodes files one after the other. Not shared with forked processes: each starts a process of its own."""

    def __init__(self, processor: VideoProcessor, limits: MediaLimits) -> None:
        start = {"video": asdict(processor), "limits": asdict(limits)}
        prepared = 3 * limits.max_video_tokens * processor.pixels_per_token * processor.rule.step_frames * NUM_CHANNELS
        memory_bytes = MEMORY_BYTES + 2 * limits.max_video_bytes + prepared
        memory_bytes += _MEMORY_PER_PIXEL * min(limits.max_image_pixels, 1 << 24)
        self._process = BoundedProcess(__name__, start, CPU_S, memory_bytes)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def decode(self, data: bytes, sampling: Sampling) -> DecodedVideo:
        """Raises MediaError."""
        try:
            answer = self._process.ask(pack({"sampling": asdict(sampling), PAYLOAD: data}))
        except BoundedProcessError as error:
            raise MediaError("video_unreadable", f"decoding was ended: {error}") from None
        if "code" in answer:
            raise MediaError(answer["code"], answer["message"])
        frames = np.frombuffer(answer[PAYLOAD], np.uint8).reshape(-1, *answer["shape"], NUM_CHANNELS)
        numbers = (tuple(answer["size"]), answer["indices"], answer["fps"], answer["total"])
        return DecodedVideo(list(frames), *numbers)


# In the process.


def _open(start: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    bounds, processor = limits_of(start["limits"]), video_processor_of(start["video"])

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            found = decode_video(request.get(PAYLOAD, b""), Sampling(**request["sampling"]), processor, bounds)
        except MediaError as error:
            return {"code": error.code, "message": str(error)}
        return {
            **{name: getattr(found, name) for name in ("size", "indices", "fps", "total")},
            "shape": found.frames[0].shape[:2],
            PAYLOAD: b"".join([each.tobytes() for each in found.frames]),
        }

    return answer


if __name__ == "__main__":
    sys.exit(serve(_open))
