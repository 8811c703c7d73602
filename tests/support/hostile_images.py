"""Bytes that come in files: each with what it becomes, a size and an average level, or the code of its error."""

import io
import random
import struct
import zlib
from collections.abc import Callable
from typing import Final

import numpy as np
from media_models import noise, saved
from PIL import Image, PngImagePlugin

Expected = str | tuple[int, int, float]
"""A code, or height, width, and mean of the pixels."""
RGB: Final = Image.fromarray(noise(40, 60, 3))
FRAMES: Final = [Image.new("RGB", (40, 30), colour) for colour in ("red", "green", "blue")]
WHOLE: Final = saved(RGB)
MEAN: Final = float(np.asarray(RGB).mean())


def chunk(kind: bytes, content: bytes, *, is_sound: bool = True) -> bytes:
    check = zlib.crc32(kind + content) ^ (0 if is_sound else 1)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def png(*chunks: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def header(width: int, height: int, depth: int = 8, colour: int = 2, interlace: int = 0) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace))


def lines(width: int, height: int) -> bytes:
    return chunk(b"IDAT", zlib.compress(b"".join([b"\0" + b"\x80" * (3 * width)] * height)))


END: Final = chunk(b"IEND", b"")


def with_exif(value: int | bytes, kind: str = "JPEG") -> bytes:
    if isinstance(value, bytes):
        return saved(RGB, kind, exif=value, quality=95)
    tags = Image.Exif()
    tags[0x0112] = value
    return saved(RGB, kind, exif=tags, quality=95)


def exif_loop() -> bytes:
    """A first directory whose next directory, and whose pointer to EXIF's own, are itself."""
    entry = struct.pack("<HHII", 0x8769, 4, 1, 8)
    return b"Exif\0\0II*\0" + struct.pack("<I", 8) + struct.pack("<H", 1) + entry + struct.pack("<I", 8)


def tiff(entries: list[tuple[int, int, int, int]], following: int = 0, behind: bytes = b"") -> bytes:
    body = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in sorted(entries))
    return b"II*\0" + struct.pack("<I", 8) + body + struct.pack("<I", following) + behind


def tiff_of(width: int, height: int, following: int = 0, **other: int) -> bytes:
    """8 bits of grey in one strip at the end."""
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 0, 277: 1, 278: height, 279: width * height}
    tags |= {int(name[1:]): value for name, value in other.items()}
    tags[273] = tags[273] or 8 + 2 + 12 * len(tags) + 4
    return tiff(
        [(tag, 4, 1, value) for tag, value in tags.items()], following, behind=b"\x40" * min(width * height, 4096)
    )


def gif(screen: tuple[int, int], frame: tuple[int, int, int, int], data: bytes, num_frames: int = 1) -> bytes:
    """One palette of black and white; `frame` is left, top, width, height."""
    start = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    image = b"," + struct.pack("<HHHHB", *frame, 0) + b"\x02" + data
    return start + image * num_frames + b";"


GIF_DOT: Final = b"\x02\x4c\x01\0"
"""One pixel of colour 1."""


def bmp(width: int, height: int, bits: int = 24, compression: int = 0, offset: int = 54) -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, offset) + info + b"\x20" * 48


def webp_header(width: int, height: int) -> bytes:
    """A VP8X canvas without frames."""
    content = struct.pack("<I", 0x10) + struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBPVP8X" + struct.pack("<I", len(content)) + content
    return b"RIFF" + struct.pack("<I", len(body)) + body


def jpeg_of(width: int, height: int) -> bytes:
    """A sound file that claims another size."""
    data = saved(RGB, "JPEG", quality=95)
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def with_text(kind: bytes, content: bytes) -> bytes:
    return png(header(4, 4), chunk(kind, content), lines(4, 4), END)


def deep_png() -> bytes:
    return saved(Image.fromarray(np.arange(40 * 60, dtype=np.uint16).reshape(40, 60) * 27))


def transparent_palette() -> bytes:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 200, 0, 0])
    return saved(image, "PNG", transparency=1)


def noisy(data: bytes, seed: int) -> bytes:
    """A hundredth of the bytes behind the first 32 changed."""
    changed, generator = bytearray(data), random.Random(seed)
    for _ in range(max(len(data) // 100, 1)):
        changed[generator.randrange(32, len(data))] = generator.randrange(256)
    return bytes(changed)


def bomb(side: int = 30_000) -> bytes:
    """A sound file of about 110 KB for `side` x `side` pixels of one bit."""
    return png(header(side, side, 1, 0), chunk(b"IDAT", zlib.compress(bytes((1 + side // 8 + 1) * side), 9)), END)


def scan_bomb(side: int = 6000, num_scans: int = 20_000) -> bytes:
    """A progressive JPEG, small as a file, whose last scan comes again and again: each goes through all blocks."""
    data = saved(Image.new("L", (side, side), 90), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * num_scans + b"\xff\xd9"


def mpo() -> bytes:
    return saved(FRAMES[0], "MPO", save_all=True, append_images=FRAMES[1:])


def animated(kind: str) -> bytes:
    # Copies: an image that was saved as JPEG keeps settings that the encoder of TIFF cannot read.
    first, *others = (each.copy() for each in FRAMES)
    return saved(first, kind, save_all=True, append_images=others)


def icc(content: bytes) -> bytes:
    return saved(RGB, "PNG", icc_profile=content)


def png_info(**texts: str) -> bytes:
    info = PngImagePlugin.PngInfo()
    for key, text in texts.items():
        info.add_text(key, text)
    out = io.BytesIO()
    RGB.save(out, "PNG", pnginfo=info)
    return out.getvalue()


BAD: Final = "image_unreadable"
LARGE: Final = "image_too_large"
RED: Final = (30, 40, 85.0)
CASES: Final[dict[str, tuple[Callable[[], bytes], Expected]]] = {
    # Sound files of unusual kinds.
    "PNG": (lambda: WHOLE, (40, 60, MEAN)),
    "PNG 1 x 1": (lambda: saved(Image.new("RGB", (1, 1), "red")), (1, 1, 85.0)),
    "PNG of one bit": (lambda: saved(Image.new("1", (9, 5), 1)), (5, 9, 255.0)),
    "PNG of two bits": (lambda: saved(Image.new("P", (9, 5), 0), bits=2), (5, 9, 0.0)),
    "PNG of 16 bits": (deep_png, (40, 60, 125.98375)),
    "PNG interlaced": (
        lambda: png(header(1, 1, interlace=1), chunk(b"IDAT", zlib.compress(b"\0\x80\x80\x80")), END),
        (1, 1, 128.0),
    ),
    "PNG with alpha": (lambda: saved(Image.new("RGBA", (6, 4), (10, 20, 30, 0))), (4, 6, 255.0)),
    "PNG grey with alpha": (lambda: saved(Image.new("LA", (6, 4), (40, 0))), (4, 6, 255.0)),
    "PNG half transparent": (lambda: saved(Image.new("RGBA", (6, 4), (0, 0, 0, 51))), (4, 6, 204.0)),
    "PNG palette with a transparent colour": (transparent_palette, (4, 4, 255.0)),
    "PNG with a transparent grey": (lambda: saved(Image.new("L", (4, 4), 7), "PNG", transparency=7), (4, 4, 255.0)),
    "PNG animated": (lambda: animated("PNG"), RED),
    "PNG with text": (lambda: png_info(Comment="x" * 1000), (40, 60, MEAN)),
    "PNG with a broken profile": (lambda: icc(b"no profile"), (40, 60, MEAN)),
    "PNG without an end": (lambda: png(header(4, 4), lines(4, 4)), (4, 4, 128.0)),
    "GIF animated": (lambda: animated("GIF"), RED),
    "GIF of 100,000 frames": (lambda: gif((1, 1), (0, 0, 1, 1), GIF_DOT, 100_000), (1, 1, 255.0)),
    "WebP animated": (lambda: saved(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:], lossless=True), RED),
    "TIFF of pages": (lambda: animated("TIFF"), RED),
    "TIFF of 16 bits": (
        lambda: saved(Image.fromarray(np.full((4, 6), 0x40FF, np.uint16)), "TIFF"),
        (4, 6, 64.0),
    ),
    "TIFF whose next page is itself": (lambda: tiff_of(4, 4, following=8), (4, 4, 64.0)),
    "BMP from below": (lambda: saved(FRAMES[0], "BMP"), RED),
    "BMP from above": (lambda: bmp(2, -2), (2, 2, 32.0)),
    "JPEG grey": (lambda: saved(Image.new("L", (8, 8), 90), "JPEG"), (8, 8, 90.0)),
    "JPEG CMYK": (lambda: saved(Image.new("CMYK", (8, 8)), "JPEG"), (8, 8, 255.0)),
    "JPEG progressive": (lambda: saved(Image.new("RGB", (8, 8), (90, 90, 90)), "JPEG", progressive=True), (8, 8, 90.0)),
    "JPEG of several pictures": (mpo, (30, 40, 84.66666666666667)),
    "JPEG turned by EXIF": (lambda: with_exif(6), (60, 40, 126.5)),
    "JPEG with an unknown orientation": (lambda: with_exif(99), (40, 60, 126.5)),
    "JPEG with an EXIF loop": (lambda: with_exif(exif_loop()), (40, 60, 126.5)),
    "JPEG with EXIF of zeros": (lambda: with_exif(b"Exif\0\0" + b"\0" * 64), (40, 60, 126.5)),
    "JPEG with EXIF cut short": (lambda: with_exif(b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12"), (40, 60, 126.5)),
    # Not images, or none that is offered.
    "nothing": (lambda: b"", BAD),
    "one byte": (lambda: b"\x89", BAD),
    "zeros": (lambda: bytes(10_000), BAD),
    "HTML": (lambda: b"<!doctype html><html><body>404</body></html>", BAD),
    "SVG": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"></svg>', BAD),
    "SVG with an entity bomb": (lambda: b'<!DOCTYPE s [<!ENTITY a "aaaa">]><svg>&a;</svg>', BAD),
    "PDF": (lambda: b"%PDF-1.4 1 0 obj<<>>endobj trailer<<>>", BAD),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", BAD),
    "PPM": (lambda: saved(RGB, "PPM"), BAD),
    "ICO": (lambda: saved(RGB, "ICO"), BAD),
    "TGA": (lambda: saved(RGB, "TGA"), BAD),
    "JPEG 2000": (lambda: saved(RGB, "JPEG2000"), BAD),
    "FITS": (lambda: b"SIMPLE  =                    T" + b" " * 2850, BAD),
    "PSD": (lambda: b"8BPS\0\1" + bytes(200), BAD),
    "XBM": (lambda: b"#define a_width 8\n#define a_height 8\nstatic char a_bits[] = {\n0x00};\n", BAD),
    "pickle": (lambda: b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00.", BAD),
    "PNG behind rubbish": (lambda: bytes(4_000_000) + WHOLE, BAD),
    "video": (lambda: b"\0\0\0\x18ftypmp42" + bytes(100), BAD),
    "AVIF, which must be asked for": (lambda: b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf" + bytes(100), BAD),
    # Cut short or changed.
    "PNG cut": (lambda: WHOLE[: len(WHOLE) // 2], BAD),
    "PNG of a header alone": (lambda: png(header(4, 4)), BAD),
    "PNG of a signature alone": (lambda: png(), BAD),
    "PNG with a wrong check": (lambda: png(header(4, 4), chunk(b"IDAT", b"x", is_sound=False), END), BAD),
    "PNG with a chunk beyond the file": (lambda: png(header(4, 4), b"\x7f\xff\xff\xffIDAT"), BAD),
    "PNG with too few lines, which are black": (lambda: png(header(4, 400), lines(4, 2), END), (400, 4, 0.64)),
    "PNG without pixels": (lambda: png(header(4, 4), END), BAD),
    "PNG of no height": (lambda: png(header(4, 0), lines(4, 1), END), BAD),
    "PNG of an unknown colour type": (lambda: png(header(4, 4, colour=5), lines(4, 4), END), BAD),
    "PNG of 7 bits": (lambda: png(header(4, 4, depth=7), lines(4, 4), END), BAD),
    "PNG palette without a palette": (
        lambda: png(header(1, 1, colour=3), chunk(b"IDAT", zlib.compress(b"\0\1")), END),
        BAD,
    ),
    "JPEG cut": (lambda: saved(RGB, "JPEG")[:700], BAD),
    "JPEG of a start alone": (lambda: b"\xff\xd8\xff", BAD),
    "JPEG with EXIF alone": (lambda: b"\xff\xd8\xff\xe1\xff\xffExif\0\0" + bytes(100), BAD),
    "JPEG without tables": (lambda: saved(RGB, "JPEG").replace(b"\xff\xdb", b"\xff\xee"), BAD),
    "GIF cut": (lambda: animated("GIF")[:40], BAD),
    "GIF of a screen alone": (lambda: b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0, 0, 0), BAD),
    "WebP cut": (lambda: saved(RGB, "WEBP", lossless=True)[:500], BAD),
    "WebP without frames": (lambda: webp_header(9, 9), BAD),
    "TIFF cut": (lambda: saved(RGB, "TIFF")[:200], BAD),
    "TIFF whose directory is beyond the file": (lambda: b"II*\0\xff\xff\xff\x7f", BAD),
    "TIFF whose strip is beyond the file": (lambda: tiff_of(4, 4, _273=1 << 30), BAD),
    "TIFF of an unknown compression": (lambda: tiff_of(4, 4, _259=99), BAD),
    "TIFF of floats": (lambda: saved(Image.fromarray(np.ones((4, 6), np.float32)), "TIFF"), BAD),
    "TIFF of 32 bits": (lambda: saved(Image.fromarray(np.full((4, 6), 1 << 20, np.int32)), "TIFF"), BAD),
    "BMP cut": (lambda: bmp(20, 20), BAD),
    "BMP of 3 bits": (lambda: bmp(2, 2, bits=3), BAD),
    "BMP of an unknown compression": (lambda: bmp(2, 2, compression=77), BAD),
    "BMP whose pixels are beyond the file": (lambda: bmp(2, 2, offset=1 << 30), BAD),
    # Too large, or too narrow.
    "PNG bomb of one bit": (lambda: png(header(30_000, 30_000, 1, 0), END), LARGE),
    "PNG bomb of colour": (lambda: png(header(12_000, 12_000), END), LARGE),
    "PNG of 2^31 pixels a side": (lambda: png(header(2**31 - 1, 2**31 - 1), END), LARGE),
    "PNG of a side of 20,000": (lambda: png(header(200, 20_000), END), LARGE),
    "PNG 1 x 300": (lambda: saved(Image.new("RGB", (1, 300))), "image_too_narrow"),
    "PNG 16,000 x 1": (lambda: saved(Image.new("L", (16_000, 1))), "image_too_narrow"),
    "JPEG that claims 65,000 x 65,000": (lambda: jpeg_of(65_000, 65_000), LARGE),
    "GIF of a screen of 65,535": (lambda: gif((65_535, 65_535), (0, 0, 1, 1), GIF_DOT), LARGE),
    "WebP of a canvas of 16,383": (lambda: webp_header(16_383, 16_383), LARGE),
    "TIFF that claims 60,000 x 60,000": (lambda: tiff_of(60_000, 60_000), LARGE),
    "BMP that claims 50,000 x 50,000": (lambda: bmp(50_000, 50_000), LARGE),
    "PNG text bomb": (lambda: with_text(b"zTXt", b"a\0\0" + zlib.compress(bytes(4_000_000))), BAD),
    "PNG profile bomb": (lambda: with_text(b"iCCP", b"a\0\0" + zlib.compress(bytes(4_000_000))), BAD),
    "PNG international text bomb": (lambda: with_text(b"iTXt", b"a\0\1\0\0\0" + zlib.compress(bytes(4_000_000))), BAD),
}
"""Name -> its bytes and what comes of them."""
