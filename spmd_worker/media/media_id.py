"""Media ids: names of images as a tower gets them.

A media id covers all that an image's rows depend on but the weights, and nothing else: the same picture in two file
formats has one id.
"""

import json
from dataclasses import asdict
from hashlib import blake2b
from typing import Final

from spmd_worker.media.image_processor import ImageProcessor
from spmd_worker.media.prepared import ImagePixels

NUM_BYTES: Final = 16


def media_id_of(image: ImagePixels, processor: ImageProcessor, *, is_alone: bool) -> bytes:
    """blake2b-128 of the processor's numbers, the shapes and all prepared pixels.

    In LLaVA-NeXT and LLaVA-OneVision rows also depend on the image's own size, in LLaVA-OneVision on whether it is the
    prompt's only one too.
    """
    own = [*([image.size] if processor.pinpoints else []), *([is_alone] if processor.kind == "llava_onevision" else [])]
    described = json.dumps([asdict(processor), image.shapes, image.grid, own], sort_keys=True).encode("ascii")
    digest = blake2b(b"%d\n" % len(described), digest_size=NUM_BYTES)
    digest.update(described)
    for crop in image.crops:
        digest.update(crop.data)
    return digest.digest()
