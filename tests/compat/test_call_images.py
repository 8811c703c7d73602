"""Images of one call: prepared once, held within a bound, and made again when they are needed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from image_doors import HerePreparer, image_prompts, image_tokenizer
from media_models import noise

from spmd_worker.compat.call_images import (
    CallPreparer,
    DroppedPixels,
    images_of_call,
    prepare_ahead,
    with_content_again,
)
from spmd_worker.compat.image_prompts import ImagePrompts, num_media_bytes
from spmd_worker.compat.video_prompts import videos_of
from spmd_worker.media.errors import MediaError

WIDE, HIGH = noise(64, 96), noise(128, 64, seed=1)
NUM_BYTES = 64 * 96 * 3


@pytest.fixture
def images(tmp_path: Path) -> ImagePrompts:
    return image_prompts(tmp_path, image_tokenizer(tmp_path))


def num_asked(images: ImagePrompts) -> int:
    assert isinstance(images.preparer, HerePreparer)
    return len(images.preparer.asked)


def test_pixels_beyond_the_bound_are_made_again(images: ImagePrompts):
    of_call = images_of_call(images, NUM_BYTES)
    held, dropped, same = (of_call.prepare(each) for each in ([WIDE], [HIGH], [HIGH]))
    assert num_asked(images) == 2
    assert (held[0].pixels.crops[0] == WIDE).all()
    assert dropped is same
    assert isinstance(dropped[0].pixels, DroppedPixels)
    whole = images.prepare([HIGH])
    assert (dropped[0].pixels.shapes, num_media_bytes(dropped)) == (whole[0].pixels.shapes, num_media_bytes(whole))
    with pytest.raises(RuntimeError, match="are not here"):
        _ = dropped[0].pixels.data
    assert with_content_again(held) == held
    of_call.prepare([WIDE[:32]])
    num_before = num_asked(images)
    prepare_ahead(dropped)
    # Prompts that follow each other share them.
    for _ in range(2):
        assert with_content_again(dropped)[0].pixels.data == whole[0].pixels.data
    assert num_asked(images) == num_before + 1


def test_dropped_pixels_come_in_the_order_of_the_prompt(images: ImagePrompts):
    of_call = images_of_call(images, 0)
    dropped = of_call.prepare([WIDE, HIGH])
    of_call.prepare([WIDE])
    made = with_content_again(dropped[::-1])
    assert [each.media_id for each in made] == [each.media_id for each in dropped[::-1]]
    assert all(each.pixels.has_data for each in made)


def test_video_that_is_read_again_is_prepared_once(images: ImagePrompts):
    """Parts of a prompt are made each time that it is read; what they are of is the same."""
    of_call = images_of_call(images, 0).preparer
    assert isinstance(of_call, CallPreparer)
    frames, more = np.stack([WIDE, WIDE]), ["a.png", "b.png"]
    several = (np.stack([frames, frames]), torch.zeros(2, 2, 3, 8, 8))
    for given in (frames, (frames, {"fps": 3}), more, {"video": more, "fps": 1}, [WIDE, WIDE], *several):
        assert of_call._prompt_of(videos_of(given)) is of_call._prompt_of(videos_of(given))
    others = [of_call._prompt_of(videos_of(each)) for each in (more, {"video": more, "fps": 1}, [more, more])]
    assert len({id(each) for each in others}) == 3
    # Videos of one array differ.
    first, second = videos_of(several[1])
    assert of_call._prompt_of([first]) is not of_call._prompt_of([second])
    # A GIF is a video, and may be a frame of one.
    assert of_call._prompt_of(videos_of("a.gif")) is not of_call._prompt_of(videos_of(["a.gif"]))


def test_image_that_changed_since_is_an_error(images: ImagePrompts):
    pixels = np.copy(HIGH)
    of_call = images_of_call(images, 0)
    dropped = of_call.prepare([pixels])
    of_call.prepare([WIDE])
    pixels[0, 0] ^= 255
    with pytest.raises(MediaError, match="image 0 changed while the call ran") as caught:
        with_content_again(dropped)
    assert caught.value.code == "image_changed"
