"""Media ids: names of images as a tower gets them.

A media id covers all that an image's rows depend on but the weights, and nothing else: the same picture in two file
formats has one id.
"""

import json
from dataclasses import asdict
from hashlib import blake2b
from typing import Any, Final

from spmd_worker.media.image_processor import ImageProcessor
from spmd_worker.media.prepared import FramePlace, ImagePixels
from spmd_worker.media.video_processor import VideoProcessor

NUM_BYTES: Final = 16


def media_id_of(image: ImagePixels, processor: ImageProcessor, *, is_alone: bool) -> bytes:
    """blake2b-128 of the processor's numbers, the shapes and all prepared pixels.

    In LLaVA-NeXT and LLaVA-OneVision rows also depend on the image's own size, in LLaVA-OneVision on whether it is the
    prompt's only one too.
    """
    own = [*([image.size] if processor.pinpoints else []), *([is_alone] if processor.kind == "llava_onevision" else [])]
    return _digest([asdict(processor), image.shapes, image.grid, own], image)


def frames_id_of(frames: ImagePixels, processor: VideoProcessor, place: FramePlace) -> bytes:
    """`media_id_of` of two frames of a video: their positions follow from what tokens are before them, and from their
    time and end, which are in the name.
    """
    numbers = (processor.kind, processor.mean, processor.std, processor.scale, processor.patch_size)
    own = [*numbers, processor.merge_size, place.time, place.goes_on, *([frames.frame] if frames.frame else [])]
    return _digest(["video", own, frames.shapes, frames.grid], frames)


def _digest(described: Any, image: ImagePixels) -> bytes:
    text = json.dumps(described, sort_keys=True).encode("ascii")
    digest = blake2b(b"%d\n" % len(text), digest_size=NUM_BYTES)
    digest.update(text)
    for crop in image.crops:
        digest.update(crop.data)
    return digest.digest()
