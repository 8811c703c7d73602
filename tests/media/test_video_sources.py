"""Videos as callers give them: parts of conversations, calls and rows, and what is no video."""

import base64
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from media_answers import with_files
from media_models import media_processor, noise, saved
from PIL import Image
from transformers.video_utils import VideoMetadata

from spmd_worker.compat.video_prompts import videos_of
from spmd_worker.media.errors import MediaError
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.preparer import ImagePreparer
from spmd_worker.media.video_processor import read_video_processor
from spmd_worker.tokenizer.messages import InvalidRequestError, checked_content, media_of_parts
from spmd_worker.tokenizer.video_parts import VideoPart

KIND = "qwen2_5_vl"
FRAMES = [noise(60, 90, each) for each in range(3)]
FILES = [saved(each) for each in FRAMES]
BASE64 = [base64.b64encode(each).decode() for each in FILES]
LIMITS = MediaLimits(max_images=2, max_videos=2, max_video_frames=5, max_video_tokens=100, max_video_bytes=2000)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_files(tmp_path_factory.mktemp("root"), {f"{number}.png": data for number, data in enumerate(FILES)})


@pytest.fixture(scope="module")
def preparer(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImagePreparer]:
    folder = tmp_path_factory.mktemp("model")
    images = media_processor(folder, KIND)
    videos = read_video_processor(folder / KIND, images)
    with ImagePreparer(images, LIMITS, root, 1, videos) as made:
        yield made


def parts(*given: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    checked_content("content", list(given), found)
    return found


def names(made: list[Any]) -> list[bytes]:
    return [each.media_id for each in made]


FORMS: dict[str, Any] = {
    "paths": parts({"type": "video", "video": ["0.png", "1.png", "2.png"]}),
    "base64": parts({"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(BASE64)}"}}),
    "files": parts({"type": "video", "video": FILES}),
    "pictures": videos_of([Image.fromarray(each) for each in FRAMES]),
    "array": videos_of(np.stack(FRAMES)),
    "list of an array": videos_of([np.stack(FRAMES)]),
    "tensor": videos_of(torch.from_numpy(np.stack(FRAMES)).permute(0, 3, 1, 2).float()),
    "pair": videos_of((np.stack(FRAMES), {"fps": 24.0, "frames_indices": [0, 12, 24], "total_num_frames": 36})),
    "pair without metadata": videos_of((np.stack(FRAMES), None)),
    "metadata of transformers": videos_of((np.stack(FRAMES), VideoMetadata(total_num_frames=3, fps=2.0))),
    "dict": videos_of({"video": ["0.png", "1.png", "2.png"], "sample_fps": 2}),
}


@pytest.mark.parametrize("form", [each for each in FORMS if each != "array"])
def test_forms_of_one_video_have_one_name(form: str, preparer: ImagePreparer):
    assert len(FORMS[form]) == 1
    made, expected = preparer.prepare(FORMS[form]), preparer.prepare(FORMS["array"])
    assert names(made) == names(expected)
    assert [each.frame for each in made] == [each.frame for each in expected]
    if form == "paths":
        digest = sha256(b"".join([sha256(each).digest() for each in FILES])).digest()
        assert [each.source_digest for each in made] == [digest, b""]


def test_images_and_videos_are_prepared_together(preparer: ImagePreparer):
    made = preparer.prepare([FRAMES[0], *FORMS["array"], "1.png", *FORMS["array"]])
    assert [each.frame is not None for each in made] == [False, True, True, False, True, True]


BAD: dict[str, tuple[Any, str]] = {
    "frames of two sizes": (videos_of([FRAMES[0], noise(61, 90)]), "video_unreadable"),
    "no frame of a file": (videos_of([FRAMES[0], b"no picture"]), "image_unreadable"),
    "a missing file": (parts({"type": "video", "video": ["0.png", "gone.png"]}), "image_missing"),
    "a path outside": (parts({"type": "video", "video": ["/etc/hostname"]}), "image_outside_root"),
    "a missing video": (parts({"type": "video", "video": "clip.mp4"}), "video_missing"),
    "a video outside": (parts({"type": "video_url", "video_url": "file:///etc/hostname"}), "video_outside_root"),
    "an address of a video": (parts({"type": "video", "url": "https://a/b.mp4"}), "videos_unsupported"),
    "a text as a video": (videos_of(b"no video"), "video_unreadable"),
    "a large file": (videos_of(bytes(3000)), "video_too_large"),
    "an address": (parts({"type": "video", "video": ["http://a/b.png"]}), "images_unsupported"),
    "many frames": (videos_of(np.zeros((6, 30, 30, 3), np.uint8)), "video_too_long"),
    "many tokens": (videos_of(np.zeros((4, 400, 400, 3), np.uint8)), "video_too_long"),
    "three videos": (FORMS["array"] * 3, "too_many_videos"),
    "three images": ([*FORMS["array"], *FRAMES], "too_many_images"),
    "an array of grey": (videos_of(np.zeros((4, 30, 30, 1), np.uint8)), "video_unreadable"),
    "shares of light": (videos_of(np.full((4, 30, 30, 3), 0.5)), "video_unreadable"),
    "no numbers": (videos_of(np.full((2, 30, 30, 3), np.nan)), "video_unreadable"),
    "wide integers": (videos_of(np.zeros((4, 30, 30, 3), np.int64)), "image_unreadable"),
    "other indices": (videos_of((np.stack(FRAMES), {"frames_indices": [0, 1]})), "video_unreadable"),
    "no video": (videos_of(7), "video_unreadable"),
    "narrow frames": (videos_of(np.zeros((2, 9, 2000, 3), np.uint8)), "image_too_narrow"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_unusable_video_is_an_error_with_code(case: str, preparer: ImagePreparer):
    sources, code = BAD[case]
    with pytest.raises(MediaError) as found:
        preparer.prepare(sources)
    assert found.value.code == code, found.value
    assert code.startswith("too_many") or "video 0: " in str(found.value), found.value


def test_model_without_videos_rejects_them(tmp_path: Path):
    preparer = ImagePreparer(media_processor(tmp_path, "gemma3"), LIMITS, None, 1)
    with preparer, pytest.raises(MediaError, match="takes no videos") as found:
        preparer.prepare(FORMS["array"])
    assert found.value.code == "videos_unsupported"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "video", "video": []}, "has no frames"),
        ({"type": "video", "video": ["0.png"], "fps": 0}, "has fps=0, which must be frames a second"),
        ({"type": "video", "video": ["0.png"], "fps": 1, "sample_fps": 2}, "has fps and sample_fps, which differ"),
        ({"type": "video", "video": ["0.png"], "max_pixels": 3}, "has 'max_pixels': a video part takes"),
        ({"type": "video", "video": ["0.png"], "path": "0.png"}, "needs video or url or path, and nothing else"),
        ({"type": "video", "video": [1]}, "must be a data URL, a path, or a list of frames"),
        ({"type": "video_url", "video_url": {"url": None}}, "must be a data URL, a path, or a list of frames"),
        ({"type": "video_url"}, "needs video_url, and nothing else"),
        ({"type": "video_url", "video_url": {"url": "a.mp4", "fps": 1}}, "video_url has 'fps': it takes url alone"),
        ({"type": "video", "fps": 1}, "has fps and no video: give both in one object"),
        ({"type": "video", "video": ["0.png"], "nframes": 2}, "has nframes, which is for files"),
        ({"type": "video", "video": "a.mp4", "sample_fps": 2}, "has sample_fps, which is for given frames"),
        ({"type": "video", "video": "a.mp4", "num_frames": 2, "fps": 1}, "give num_frames, or fps and bounds"),
        ({"type": "video", "video": "a.mp4", "num_frames": 0}, "has num_frames=0, which must be a number of frames"),
        ({"type": "video", "video": "a.mp4", "min_frames": 3, "max_frames": 2}, "has min_frames above max_frames"),
    ],
)
def test_unusable_part_is_named(part: dict[str, Any], words: str):
    with pytest.raises(InvalidRequestError, match=r"content\[0\]") as found:
        parts(part)
    assert words in str(found.value)


def test_parts_of_videos_go_with_images():
    content = [{"type": "video"}, {"type": "image"}, "text"]
    found: list[Any] = []
    shown = checked_content("content", content, found)
    assert media_of_parts([{"role": "user", "content": shown}]) == ("image", "image")
    assert [isinstance(each, VideoPart) for each in found] == [True, False]
    with_audio = [{"role": "user", "content": [{"type": "video"}, {"type": "audio", "audio": ""}]}]
    assert media_of_parts(with_audio) == ("image", "audio")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"video_embeds": 1}, "a video with 'video_embeds'"),
        ((FRAMES, {"do_sample_frames": True}), "given frames are all taken"),
        ((FRAMES, {"frames_indices": [0.5]}), "frames_indices"),
        ((FRAMES, {"frames_indices": [1], "total_num_frames": 0}), "total_num_frames=0"),
        ((FRAMES, {"frames_indices": 1}), "frames_indices=1"),
        (("a.mp4", {"fps": 30.0}), "is a file with metadata"),
        ([[]], "has no frames"),
    ],
)
def test_unusable_call_is_an_error(given: Any, words: str):
    with pytest.raises(MediaError, match="video") as found:
        videos_of(given)
    assert words in str(found.value)
