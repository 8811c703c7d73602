"""Images prepared in helper processes: the results of this process, and an end for images that would not end."""

import base64
import contextlib
import itertools
import os
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hostile_images import CASES, bomb, noisy, scan_bomb
from media_models import media_processor, noise, saved
from PIL import Image
from waiting import wait_until

from spmd_worker.base.process import children_of, start_time_of
from spmd_worker.media import prepare_process
from spmd_worker.media.decode import decode
from spmd_worker.media.errors import MediaError
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.prepare_process import CPU_S, MEMORY_BYTES, IsolatedPreparer, cpu_seconds
from spmd_worker.media.prepared import PreparedImage
from spmd_worker.media.preparer import ImagePreparer
from spmd_worker.media.preparing import prepare
from spmd_worker.media.source import ImageSource

PIXELS, OTHER = noise(130, 257), noise(97, 61, 1)
FILE = saved(PIXELS)
LIMITS = MediaLimits(max_images=3, max_image_tokens=400)
ENDED = "decoding was ended"
"""Words of an image whose process a limit ended."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    (folder / "a.png").write_bytes(FILE)
    return folder


@pytest.fixture(scope="module")
def preparer(folder: Path) -> Iterator[ImagePreparer]:
    """Of LLaVA-OneVision, whose images depend on their number."""
    processor = media_processor(folder, "llava_onevision")
    with ImagePreparer(processor, LIMITS, folder, 1) as preparer:
        yield preparer


def is_equal(first: PreparedImage, second: PreparedImage) -> bool:
    crops = zip(first.pixels.crops, second.pixels.crops, strict=True)
    rest = [replace(each, pixels=replace(each.pixels, crops=())) for each in (first, second)]
    return all(np.array_equal(*pair) for pair in crops) and rest[0] == rest[1]


def code_of(preparer: ImagePreparer, sources: list[ImageSource]) -> tuple[str, str]:
    with pytest.raises(MediaError) as caught:
        preparer.prepare(sources)
    return caught.value.code, str(caught.value)


def test_helper_process_equals_preparing_here(preparer: ImagePreparer):
    (alone,) = preparer.prepare([FILE])
    digest = sha256(FILE).digest()
    assert is_equal(alone, prepare(PIXELS, preparer.processor, is_alone=True, source_digest=digest))
    assert len(alone.pixels.crops) > 1
    beside = preparer.prepare([FILE, saved(OTHER, "BMP")])
    for image, pixels in zip(beside, (PIXELS, OTHER), strict=True):
        expected = prepare(pixels, preparer.processor, is_alone=False, source_digest=image.source_digest)
        assert is_equal(image, expected)
    assert len(beside[0].pixels.crops) == 1


def test_all_sources_of_a_picture_have_one_name(preparer: ImagePreparer, folder: Path):
    url = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"
    sources: list[ImageSource] = [
        *(FILE, url, "a.png", folder / "a.png", f"file://{folder}/a.png"),
        *(PIXELS, PIXELS[::-1][::-1], Image.fromarray(PIXELS), Image.open(folder / "a.png")),
    ]
    images = [preparer.prepare([source])[0] for source in sources]
    assert len({image.media_id for image in images}) == 1
    assert {image.source_digest for image in images[:5]} == {sha256(FILE).digest()}
    assert len({image.source_digest for image in images[5:]}) == 1


def test_error_has_code_and_number_of_the_image(preparer: ImagePreparer):
    for source, code in (
        *((b"no image", "image_unreadable"), ("/etc/passwd", "image_outside_root"), ("b.png", "image_missing")),
        *((np.zeros((1, 400, 3), np.uint8), "image_too_narrow"), (Image.new("RGB", (1, 400)), "image_too_narrow")),
        *(("https://a/b.png", "images_unsupported"), (3, "image_unreadable"), (None, "image_unreadable")),
    ):
        found, message = code_of(preparer, [FILE, source])  # type: ignore[list-item]  # other types are a case
        assert found == code
        assert message.startswith("image 1: ")
    assert preparer.prepare([FILE])[0].num_rows > 0


def test_limits_of_a_prompt_are_named(preparer: ImagePreparer):
    code, message = code_of(preparer, [FILE] * 4)
    assert (code, "has 4 images, more than limits.max_images=3" in message) == ("too_many_images", True)
    assert preparer.prepare([]) == []
    processor = replace(preparer.processor, max_crops=99)
    with ImagePreparer(processor, replace(LIMITS, max_image_tokens=99), None, 1) as short:
        code, message = code_of(short, [FILE])
    assert code == "image_too_long"
    assert "257 x 130 pixels takes" in message
    assert "limits.max_image_tokens=99" in message


def process_of(preparer: ImagePreparer) -> int:
    helper = preparer._idle.get()
    preparer._idle.put(helper)
    assert helper.pid is not None
    return helper.pid


@pytest.mark.guarantee("A helper process that ends is started again")
def test_ended_process_is_started_again(preparer: ImagePreparer):
    preparer.prepare([FILE])
    first = process_of(preparer)
    preparer.prepare([FILE])
    assert process_of(preparer) == first
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: start_time_of(first) is None)
    assert preparer.prepare([FILE])[0].num_rows > 0
    assert process_of(preparer) != first


@pytest.mark.control("A helper process that ends is started again")
def test_process_that_ends_in_a_request_is_an_error(monkeypatch: pytest.MonkeyPatch, folder: Path):
    """Every process of this module ends at once."""
    monkeypatch.setattr(prepare_process, "__name__", "spmd_worker.base.errors")
    helper = IsolatedPreparer(media_processor(folder, "llava"), LIMITS)
    for _ in range(2):
        with pytest.raises(MediaError, match="decoding was ended: its process") as caught:
            helper.prepare(FILE, b"", is_alone=True)
        assert caught.value.code == "image_unreadable"
    assert helper.pid is None


def test_prompts_are_prepared_ahead_and_in_order(folder: Path):
    """A limit beyond any image was more seconds than a timer has, and more bytes than a process."""
    processor = media_processor(folder, "llava")
    order: list[int] = []
    preparer = ImagePreparer(processor, replace(LIMITS, max_image_pixels=1 << 60), folder, 1)
    with preparer:
        futures: list[Future[list[PreparedImage]]] = []
        for number in range(5):
            futures.append(preparer.submit([b"" if number == 3 else FILE]))
            futures[-1].add_done_callback(lambda _, number=number: order.append(number))
        assert [isinstance(future.exception(), MediaError) for future in futures] == [False] * 3 + [True, False]
        pid = process_of(preparer)
        assert pid in children_of(os.getpid())
    assert order == [0, 1, 2, 3, 4]
    assert start_time_of(pid) is None


def test_close_ends_a_prompt_behind_its_image(folder: Path, monkeypatch: pytest.MonkeyPatch):
    begun, may_go, num_prepared = threading.Event(), threading.Event(), itertools.count(1)

    def prepare_held(*_: object, **__: object) -> PreparedImage:
        next(num_prepared)
        begun.set()
        may_go.wait()
        return prepare(PIXELS, media_processor(folder, "llava"), is_alone=False)

    monkeypatch.setattr(IsolatedPreparer, "prepare", prepare_held)
    preparer = ImagePreparer(media_processor(folder, "llava"), LIMITS, folder, 1)
    running, waiting = preparer.submit([FILE] * 3), preparer.submit([FILE])
    begun.wait()
    closing = threading.Thread(target=preparer.close)
    closing.start()
    wait_until(waiting.cancelled)
    may_go.set()
    closing.join()
    with pytest.raises(MediaError, match="image 1: the run has ended"):
        running.result()
    assert next(num_prepared) == 2


def test_memory_of_a_process_is_bounded(monkeypatch: pytest.MonkeyPatch, folder: Path):
    """The same file is prepared with more memory."""
    data = saved(Image.new("RGB", (4000, 4000)), compress_level=1)
    processor = media_processor(folder, "llava")
    monkeypatch.setattr(prepare_process, "_MEMORY_PER_PIXEL", 0)
    monkeypatch.setattr(prepare_process, "MEMORY_BYTES", 160 << 20)
    helper = IsolatedPreparer(processor, MediaLimits())
    with pytest.raises(MediaError, match="decoding was ended: it takes more than 180 MiB of memory") as caught:
        helper.prepare(data, b"", is_alone=True)
    assert caught.value.code == "image_unreadable"
    assert helper.prepare(FILE, b"", is_alone=True).num_rows == 36
    helper.close()


# Long ones.


def computing_s(helper: IsolatedPreparer) -> float:
    """CPU time of the running process, in user and system mode."""
    times = Path(f"/proc/{helper.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def ended_children_s() -> float:
    """Computing of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peak_bytes(helper: IsolatedPreparer) -> int:
    """Most memory of the running process so far."""
    lines = Path(f"/proc/{helper.pid}/status").read_text().splitlines()
    (peak,) = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    return peak << 10


@pytest.mark.stress
def test_hostile_images_end_alike_in_the_process(folder: Path):
    """Limits end none: one process answers all, each within 5 s of computing, and 512 MiB above what it began with."""
    helper = IsolatedPreparer(media_processor(folder, "gemma3"), MediaLimits())
    helper.prepare(FILE, b"", is_alone=True)
    first, most_s = helper.pid, 0.0
    start_bytes = peak_bytes(helper)
    for name, (make, expected) in CASES.items():
        data, before_s, words = make(), computing_s(helper), ""
        try:
            found: object = helper.prepare(data, b"", is_alone=True).pixels.size
        except MediaError as error:
            found, words = error.code, str(error)
        assert (name, found) == (name, expected if isinstance(expected, str) else expected[:2])
        assert (name, ENDED in words, helper.pid) == (name, False, first)
        most_s = max(most_s, computing_s(helper) - before_s)
        assert most_s < CPU_S, name
        assert peak_bytes(helper) - start_bytes < MEMORY_BYTES, name
    told = f"at most {most_s:.2f} s of computing, {(peak_bytes(helper) - start_bytes) >> 20} MiB more"
    print(f"\nHOSTILE images, {len(CASES)}: {told}", end="")
    helper.close()


@pytest.mark.stress
def test_image_that_never_ends_is_ended(folder: Path):
    """Each scan of a progressive JPEG goes through all blocks; a small file has tens of thousands."""
    limits = MediaLimits(max_image_pixels=4_000_000)
    helper = IsolatedPreparer(media_processor(folder, "gemma3"), limits)
    data = scan_bomb(2000)
    assert len(data) < 20 << 20
    for _ in range(2):
        assert helper.prepare(FILE, b"", is_alone=True).num_rows == 16
        before_s, ended_s = computing_s(helper), ended_children_s()
        with pytest.raises(MediaError, match="decoding was ended: it took more than 6 s of computing") as caught:
            helper.prepare(data, b"", is_alone=True)
        assert caught.value.code == "image_unreadable"
        # The timer counts ticks of the clock.
        assert ended_children_s() - ended_s - before_s == pytest.approx(cpu_seconds(limits), abs=0.5)
    helper.close()


@pytest.mark.stress
def test_largest_images_fit_into_the_process(folder: Path):
    """At the limit of pixels, of every kind that takes the most memory."""
    helper = IsolatedPreparer(media_processor(folder, "gemma3"), MediaLimits())
    tags = Image.Exif()
    tags[0x0112] = 6
    colour = Image.new("RGB", (8000, 8000), (9, 8, 7))
    for data in (
        saved(colour, "JPEG", exif=tags, progressive=True, subsampling=0),
        saved(colour.convert("RGBA"), "PNG", exif=tags, compress_level=1),
        saved(colour.convert("CMYK"), "JPEG", exif=tags),
        saved(colour, "WEBP", lossless=True, method=0),
        saved(Image.fromarray(np.zeros((8000, 8000), np.uint16)), "PNG", compress_level=1),
    ):
        assert helper.prepare(data, b"", is_alone=True).pixels.size == (8000, 8000)
    with pytest.raises(MediaError, match="30000 x 30000 pixels") as caught:
        helper.prepare(bomb(), b"", is_alone=True)
    assert caught.value.code == "image_too_large"
    helper.close()


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore")
def test_changed_bytes_end_as_pixels_or_codes():
    """Random changes of files of all formats: an image, or a MediaError, and nothing else."""
    files = [saved(noise(40, 60), kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")]
    files.append(saved(noise(40, 60), "TIFF", compression="tiff_lzw"))
    files.append(saved(noise(40, 60), "JPEG", progressive=True))
    for data in files:
        for seed in range(300):
            with contextlib.suppress(MediaError):
                decode(noisy(data, seed), MediaLimits(max_image_pixels=1_000_000))
