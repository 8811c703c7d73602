"""Files of videos: which frames are taken of them, and what becomes of those that cannot be decoded. PyAV is replaced
by a double, whose files are a line of numbers behind the first bytes of a format.
"""

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from absent_package import remove_package
from media_models import noise
from transformers.video_utils import VideoMetadata
from video_oracle import video_processor_oracle

from spmd_worker.media import video_process
from spmd_worker.media.errors import MediaError
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.resize import resize
from spmd_worker.media.video_decode import DecodedVideo, decode_video
from spmd_worker.media.video_process import IsolatedVideoDecoder
from spmd_worker.media.video_processor import VideoProcessor
from spmd_worker.media.video_sampling import Sampling, sampled_indices

HALVES = (0.5, 0.5, 0.5)
QWEN3 = VideoProcessor("qwen3_vl", "qwen3_vl", 16, 2, 4096, 1 << 20, HALVES, HALVES)
QWEN2 = VideoProcessor("qwen2_5_vl", "qwen2_5_vl", 14, 2, 3136, 100_352, HALVES, HALVES)
LIMITS = MediaLimits(max_video_frames=40)
HEADER = b"GIF89a"


def file_of(**numbers: Any) -> bytes:
    return (
        HEADER
        + json.dumps({"frames": 30, "declared": 0, "packets": 30, "rate": 10, "size": [40, 60], **numbers}).encode()
    )


class Container:
    """A container of the double."""

    def __init__(self, stream: Any, **options: Any) -> None:
        self.file = json.loads(stream.read()[len(HEADER) :])
        assert options["format"] == "gif"
        height, width = self.file["size"]
        rate = Fraction(self.file["rate"]).limit_denominator(1001) if self.file["rate"] else None
        context = SimpleNamespace(thread_count=0)
        names = {"height": height, "width": width, "average_rate": rate, "guessed_rate": None}
        self.stream = SimpleNamespace(frames=self.file["declared"], codec_context=context, thread_type="", **names)
        self.streams = SimpleNamespace(video=[self.stream] if not self.file.get("is_audio") else [])

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def demux(self, stream: Any) -> Iterator[Any]:
        del stream
        yield from [SimpleNamespace(size=1)] * self.file["packets"]
        yield SimpleNamespace(size=0)

    def decode(self, stream: Any) -> Iterator[Any]:
        assert (stream.thread_type, stream.codec_context.thread_count) == ("NONE", 1)
        for number in range(self.file["frames"]):
            if number == self.file.get("bad"):
                raise OSError(1094995529, "Invalid data", "<none>")
            height, width = self.file["size"] if number != self.file.get("changes") else (20, 30)
            picture = noise(height, width, number)
            yield SimpleNamespace(height=height, width=width, to_ndarray=lambda format, picture=picture: picture)


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", SimpleNamespace(open=Container))


def decoded(data: bytes, processor: VideoProcessor = QWEN3, **sampling: Any) -> DecodedVideo:
    return decode_video(data, Sampling(**sampling), processor, LIMITS)


@pytest.mark.parametrize("processor", [QWEN3, QWEN2], ids=["qwen3_vl", "qwen2_5_vl"])
def test_taken_frames_are_resized_and_counted(processor: VideoProcessor):
    found = decoded(file_of(), processor)
    assert found.indices == ([0, 6, 12, 17, 23, 29] if processor is QWEN3 else [0, 5, 10, 15, 20, 25])
    assert (found.size, found.fps, found.total) == ((40, 60), 10.0, 30)
    target = processor.frame_size(6, 40, 60)
    expected = [resize(noise(40, 60, each), *target, "bicubic") for each in found.indices]
    assert all(map(np.array_equal, found.frames, expected))


def test_callers_numbers_replace_those_of_the_model():
    assert decoded(file_of(), num_frames=3).indices == [0, 14, 29]
    assert decoded(file_of(), fps=1.0, min_frames=2).indices == [0, 14, 29]
    assert len(decoded(file_of(), fps=10.0, max_frames=7).indices) == 7
    numbered = replace(QWEN2, num_frames=4)
    assert decoded(file_of(), numbered).indices == [0, 7, 15, 22]
    assert decoded(file_of(), numbered, max_frames=2).indices == [0, 15]
    # A bound beyond the model's other one.
    assert len(decoded(file_of(), replace(QWEN2, max_frames=8), fps=10.0, min_frames=12).indices) == 12
    squares = replace(SQUARES, kind="smolvlm", layout="smolvlm", min_frames=4)
    assert decoded(file_of(), squares, max_frames=2).indices == [0, 29]
    assert decoded(file_of(frames=1, packets=1)).indices == [0]


def test_number_of_frames_is_what_is_decoded():
    """A header has none, or packets have no pictures."""
    assert decoded(file_of(packets=33)).indices == decoded(file_of()).indices
    assert decoded(file_of(declared=31, packets=0)).total == 30


BAD: dict[str, tuple[bytes, dict[str, Any], str, str]] = {
    "another format": (b"#EXTM3U\n/etc/passwd", {}, "video_unreadable", "give one of MP4, MOV, WebM"),
    "a cut file": (file_of(declared=60), {}, "video_unreadable", "declares 60 frames and has 30: it is cut short"),
    "damage": (file_of(bad=7), {}, "video_unreadable", "decoded: Invalid data"),
    "another size": (file_of(changes=6), {}, "video_unreadable", "change to 30 x 20 pixels"),
    "sound alone": (file_of(is_audio=True), {}, "video_unreadable", "it has no pictures"),
    "no frames": (file_of(frames=0, packets=0), {}, "video_unreadable", "it has 0 frames"),
    "no rate": (file_of(rate=0), {}, "video_unreadable", "it has 0 frames a second"),
    "few frames": (file_of(), {"num_frames": 31}, "video_too_short", "num_frames=31 asks for more"),
    "many frames": (file_of(packets=90, frames=90), {"num_frames": 41}, "video_too_long", "max_video_frames=40"),
    "large frames": (file_of(size=[9000, 9000]), {}, "image_too_large", "limits.max_image_pixels"),
    "not JSON": (HEADER, {}, "video_unreadable", "the video cannot be decoded"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_unusable_file_is_an_error_with_code(case: str):
    data, sampling, code, words = BAD[case]
    with pytest.raises(MediaError) as found:
        decoded(data, **sampling)
    assert (found.value.code, words in str(found.value)) == (code, True), found.value


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    remove_package(monkeypatch, "av")
    with pytest.raises(MediaError, match=r"pip install 'spmd-worker\[video\]'") as found:
        decoded(file_of())
    assert found.value.code == "extra_missing"


def test_process_answers_with_frames(monkeypatch: pytest.MonkeyPatch):
    """Its answers, as JSON has them."""
    decoder = IsolatedVideoDecoder(QWEN3, LIMITS)
    answer = video_process._open(json.loads(json.dumps({"video": asdict(QWEN3), "limits": asdict(LIMITS)})))

    def ask(request: dict[str, Any]) -> dict[str, Any]:
        given = dict(answer(request))
        payload = {key: given.pop(key) for key in ("payload",) if key in given}
        return json.loads(json.dumps(given)) | payload

    monkeypatch.setattr(video_process, "pack", lambda request: request)
    monkeypatch.setattr(decoder, "_process", SimpleNamespace(ask=ask))
    found, expected = decoder.decode(file_of(), Sampling()), decoded(file_of())
    assert found[1:] == expected[1:]
    assert all(map(np.array_equal, found.frames, expected.frames))
    with pytest.raises(MediaError, match="no pictures"):
        decoder.decode(file_of(is_audio=True), Sampling())


@pytest.mark.parametrize("layout", ["glm4v", "glm46v", "smolvlm"])
def test_indices_by_seconds_are_those_of_transformers(layout: str):
    chance, processor = random.Random(1), replace(QWEN3, kind="glm4v", layout=layout, min_frames=1)
    theirs = video_processor_oracle(layout, {"num_frames": 1000, "fps": 2})
    for _ in range(100):
        total, fps = chance.randrange(1, 9000), chance.choice([24.0, 25.0, 29.97, 60.0, 12.5, 1.0])
        metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
        for rate in (None, 1.0, 3.3) if layout != "glm46v" else (None,):
            expected = theirs.sample_frames(metadata, fps=rate)
            bounded = replace(processor, max_frames=1000)
            assert sampled_indices(total, fps, Sampling(fps=rate), bounded) == expected.tolist(), (total, fps, rate)
    assert len(sampled_indices(9000, 25.0, Sampling(fps=2.0, max_frames=10), processor)) == 10
    assert sampled_indices(9000, 25.0, Sampling(num_frames=3), processor) == [0, 4500, 8999]


SQUARES = replace(QWEN2, side=56, tokens_per_frame=4, min_frames=1, max_frames=5000)


def test_number_of_a_model_of_squares_is_a_most():
    processor = replace(SQUARES, kind="internvl", layout="internvl", num_frames=8)
    assert sampled_indices(80, 25.0, Sampling(), processor) == [5, 15, 25, 35, 45, 55, 65, 75]
    assert sampled_indices(3, 25.0, Sampling(), processor) == [0, 1, 2]
    assert sampled_indices(80, 25.0, Sampling(max_frames=2), processor) == [20, 60]
    assert len(sampled_indices(80, 25.0, Sampling(min_frames=20), processor)) == 20


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "internvl", "llava_onevision"])
def test_indices_are_those_of_transformers(kind: str):
    """But for the rounding of float32, which others than Qwen3-VL's have."""
    chance = random.Random(1)
    processor = {"qwen2_vl": QWEN2, "qwen3_vl": QWEN3}.get(kind, replace(SQUARES, kind=kind, layout=kind))
    theirs = video_processor_oracle(kind, {"num_frames": None, "fps": 2 if kind == "qwen3_vl" else None})
    for _ in range(100):
        total, fps = chance.randrange(4, 4000), chance.choice([24.0, 25.0, 29.97, 60.0, 12.5, 1.0])
        number = 2 * chance.randrange(1, total // 2)
        for given in ({"fps": chance.choice([0.5, 1.0, 2.0, 4.5])}, {"num_frames": number}):
            if int(total / fps * given.get("fps", fps)) > total:
                continue
            expected = theirs.sample_frames(VideoMetadata(total_num_frames=total, fps=fps), **given)
            found = sampled_indices(total, fps, Sampling(**given), processor)
            pairs = zip(found, map(int, expected))
            bound = 0 if kind == "qwen3_vl" else 1
            assert abs(len(found) - len(expected)) <= bound, (total, fps, given)
            assert max([abs(first - second) for first, second in pairs]) <= bound, (total, fps, given)
