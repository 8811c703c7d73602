"""Images and audio without their content, and with it again: what ranks know of other ranks' prompts."""

import numpy as np
import pytest

from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.media_sizes import MediaSizes, with_content
from spmd_worker.media.prepared import AudioFeatures, ImagePixels, PreparedImage
from spmd_worker.media.sent_audio import PreparedMedia, sent

CROPS = tuple([np.arange(rows * 12, dtype=np.uint8).reshape(rows, 4, 3) for rows in (2, 5)])
IMAGE = PreparedImage(b"i" * 16, ImagePixels(CROPS, (1, 2), (40, 30), 2), "", 3, 3, (0, 0), b"source")
FEATURES = AudioFeatures(np.arange(24, dtype=np.float32).reshape(4, 6))
AUDIO = PreparedAudio(b"a" * 16, FEATURES, 3, 3, 0.0, 1.0, 1.0, b"source")


@pytest.mark.parametrize(("media", "num_bytes"), [(IMAGE, 7 * 4 * 3), (AUDIO, 4 * 6 * 4)], ids=["image", "audio"])
def test_content_that_travels_alone_is_whole(media: PreparedMedia, num_bytes: int):
    absent = MediaSizes.of(media).prepared
    assert (absent.media_id, absent.content.sizes) == (media.media_id, media.content.sizes)
    assert media.content.num_bytes == absent.content.num_bytes == len(media.content.data) == num_bytes
    assert (media.content.has_data, absent.content.has_data) == (True, False)
    with pytest.raises(RuntimeError, match="not here: only"):
        _ = absent.content.data
    whole = with_content(absent, memoryview(media.content.data))
    assert whole.content.has_data
    assert sent(whole) == sent(media)
