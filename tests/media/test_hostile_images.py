"""Images as they come: each is decoded to what is expected, or fails with its code; none with another error."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from hostile_images import CASES, WHOLE
from media_models import media_processor, noise, saved
from PIL import Image, features

from spmd_worker.base.errors import ConfigError
from spmd_worker.media.decode import check_pillow, checked_array, decode, pixels_of
from spmd_worker.media.errors import MediaError
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.prepared import Pixels
from spmd_worker.media.preparing import prepare

LIMITS = MediaLimits()


def code_of(data: bytes, limits: MediaLimits = LIMITS) -> str:
    with pytest.raises(MediaError) as caught:
        decode(data, limits)
    assert 0 < len(str(caught.value)) < 400
    return caught.value.code


@pytest.mark.guarantee("Hostile images end as error rows (SECURITY.md)")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_hostile_image_has_expected_pixels_or_code(name: str):
    make, expected = CASES[name]
    if isinstance(expected, str):
        assert code_of(make()) == expected
    else:
        pixels = decode(make(), LIMITS)
        assert pixels.shape == (*expected[:2], 3)
        assert pixels.dtype == np.uint8
        assert float(pixels.mean()) == pytest.approx(expected[2], abs=1.0)


@pytest.mark.control("Hostile images end as error rows (SECURITY.md)")
def test_pillow_alone_raises_other_errors():
    """Errors of many classes, and none for formats that are not offered."""
    names = ("PNG cut", "PNG with a wrong check", "PNG text bomb", "TIFF of an unknown compression")
    raised = []
    for name in names:
        with pytest.raises(Exception) as caught:
            Image.open(io.BytesIO(CASES[name][0]())).load()
        raised.append(type(caught.value).__name__)
    assert len(dict.fromkeys(raised)) > 1
    assert "MediaError" not in raised
    assert Image.open(io.BytesIO(CASES["PPM"][0]())).size == (60, 40)


# Pixels.


def test_transparency_is_composited_in_whole_numbers():
    levels = noise(13, 17)
    alpha = noise(13, 17, 1)[:, :, :1]
    image = Image.fromarray(np.dstack([levels, alpha]))
    for background in ((255, 255, 255), (3, 200, 77)):
        wide, opacity = levels.astype(int), alpha.astype(int)
        expected = (wide * opacity + np.array(background) * (255 - opacity) + 127) // 255
        limits = MediaLimits(background=background)
        assert np.array_equal(decode(saved(image), limits), expected)
        assert np.array_equal(pixels_of(image, limits), expected)


def test_compositing_in_strips_equals_one_strip(monkeypatch: pytest.MonkeyPatch):
    image = Image.fromarray(np.dstack([noise(9, 8), noise(9, 8, 1)[:, :, :1]]))
    right = pixels_of(image, LIMITS)
    monkeypatch.setattr("spmd_worker.media.decode._STRIP_PIXELS", 20)
    assert np.array_equal(pixels_of(image, LIMITS), right)


def test_sixteen_bits_are_shifted():
    """Pillow's own conversion makes all levels above 255 white."""
    levels = np.arange(0, 65536, 65536 // 64, dtype=np.uint16).reshape(8, 8)
    expected = np.repeat((levels >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    for kind in ("PNG", "TIFF"):
        assert np.array_equal(decode(saved(Image.fromarray(levels), kind), LIMITS), expected)
    assert np.asarray(Image.open(io.BytesIO(saved(Image.fromarray(levels)))).convert("RGB")).mean() > expected.mean()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_image_is_turned_as_exif_says(orientation: int):
    turns = [
        *(lambda x: x, lambda x: x[:, ::-1], lambda x: x[::-1, ::-1], lambda x: x[::-1]),
        *(lambda x: x.transpose(1, 0, 2), lambda x: np.rot90(x, -1)),
        *(lambda x: x[::-1, ::-1].transpose(1, 0, 2), lambda x: np.rot90(x)),
    ]
    pixels, tags = noise(5, 9), Image.Exif()
    tags[0x0112] = orientation
    turned = decode(saved(pixels, "PNG", exif=tags), LIMITS)
    assert np.array_equal(turned, turns[orientation - 1](pixels))


def test_formats_are_those_of_the_limits():
    tiff, png = saved(noise(4, 4), "TIFF"), saved(noise(4, 4))
    only_png = MediaLimits(image_formats=("PNG",))
    assert code_of(tiff, only_png) == "image_unreadable"
    assert decode(png, only_png).shape == (4, 4, 3)
    if features.check("avif"):
        avif = saved(noise(64, 64), "AVIF")
        assert code_of(avif) == "image_unreadable"
        assert decode(avif, MediaLimits(image_formats=("AVIF",))).shape == (64, 64, 3)


def test_limits_of_bytes_and_pixels_are_exact():
    assert decode(WHOLE, MediaLimits(max_image_bytes=len(WHOLE))).shape == (40, 60, 3)
    assert code_of(WHOLE, MediaLimits(max_image_bytes=len(WHOLE) - 1)) == "image_too_large"
    assert decode(WHOLE, MediaLimits(max_image_pixels=2400)).shape == (40, 60, 3)
    assert code_of(WHOLE, MediaLimits(max_image_pixels=2399)) == "image_too_large"
    assert decode(saved(noise(200, 1)), LIMITS).shape == (200, 1, 3)
    assert code_of(saved(noise(201, 1))) == "image_too_narrow"


def test_images_of_no_token_are_rejected(tmp_path: Path):
    processor = media_processor(tmp_path, "lighton_ocr")
    with pytest.raises(MediaError, match="14 x 20 pixels are resized to 14 x 28: a token is of 28 x 28") as raised:
        prepare(noise(20, 14), processor, is_alone=True)
    assert raised.value.code == "image_too_narrow"


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": b"Exif\0\0"}, {"save_all": True}])
def test_canvas_of_webp_is_checked_before_it_is_opened(options: dict[str, object], monkeypatch: pytest.MonkeyPatch):
    """Opening allocates it."""
    pixels = noise(30, 41)
    data = saved(pixels, "WEBP", append_images=[Image.fromarray(noise(30, 41, 1))], **options)
    assert decode(data, MediaLimits(max_image_pixels=30 * 41)).shape == pixels.shape
    monkeypatch.setattr("PIL.Image.open", lambda *_, **__: pytest.fail("opened"))
    assert code_of(data, MediaLimits(max_image_pixels=30 * 41 - 1)) == "image_too_large"


@pytest.mark.parametrize(
    ("pixels", "code"),
    [
        (np.zeros((4, 4), np.uint8), "image_unreadable"),
        (np.zeros((4, 4, 4), np.uint8), "image_unreadable"),
        (np.zeros((4, 4, 3), np.float32), "image_unreadable"),
        (np.zeros((0, 4, 3), np.uint8), "image_unreadable"),
        (np.zeros((1, 201, 3), np.uint8), "image_too_narrow"),
        (np.broadcast_to(np.uint8(0), (20_000, 20_000, 3)), "image_too_large"),
    ],
)
def test_arrays_of_other_shapes_are_refused(pixels: Pixels, code: str):
    with pytest.raises(MediaError) as caught:
        checked_array(pixels, LIMITS)
    assert caught.value.code == code


def test_image_given_by_pillow_is_checked_before_it_is_read():
    with pytest.raises(MediaError) as caught:
        pixels_of(Image.open(io.BytesIO(WHOLE[:60])), MediaLimits(max_image_pixels=99))
    assert caught.value.code == "image_too_large"


def test_lack_of_memory_is_no_fault_of_the_image(monkeypatch: pytest.MonkeyPatch):
    """The process that decodes reports it, and is started again."""

    def full(*_: object, **__: object) -> None:
        raise MemoryError

    for name in ("PIL.Image.open", "PIL.PngImagePlugin.PngImageFile.load", "PIL.Image.Image.getexif"):
        with monkeypatch.context() as patched:
            patched.setattr(name, full)
            with pytest.raises(MemoryError):
                decode(WHOLE, LIMITS)


def test_missing_pillow_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r"pip install 'spmd-worker\[vision\]'"):
        check_pillow()


def test_bad_limits_are_named():
    with pytest.raises(ConfigError, match=r"limits.image_formats=\['FITS'\] must list some of PNG"):
        MediaLimits(image_formats=("FITS",))
    with pytest.raises(ConfigError, match=r"limits\.image_formats"):
        MediaLimits(image_formats=())
    with pytest.raises(ConfigError, match=r"model\.image_background"):
        MediaLimits(background=(0, 0, 256))
