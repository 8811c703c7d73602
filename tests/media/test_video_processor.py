"""Files that say how videos are prepared: which of them counts, what is missing, and what cannot be."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from media_models import media_processor

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.media.video_processor import VideoProcessor, read_video_processor

SIZE = {"shortest_edge": 4096, "longest_edge": 50176}


def read(folder: Path, kind: str = "qwen2_5_vl", given: Any = None, **files: Any) -> VideoProcessor | None:
    """The processor of a folder of `kind`, whose images' file says nothing of videos, with further `files`."""
    images = media_processor(folder, kind)
    for name, values in files.items():
        (folder / kind / f"{name}.json").write_text(json.dumps(values))
    return read_video_processor(folder / kind, images, given)


def test_own_file_counts_before_that_of_images(tmp_path: Path):
    of_images = read(tmp_path / "a")
    assert of_images is not None
    assert (of_images.min_pixels, of_images.max_pixels) == (3136, 100352)
    own = read(tmp_path / "b", video_preprocessor_config={"size": SIZE})
    assert own is not None
    assert (own.min_pixels, own.max_pixels, own.fps, own.min_frames, own.max_frames) == (4096, 50176, 2.0, 4, 768)
    values = {"size": SIZE, "fps": 1, "max_frames": 16, "cap_pixels_per_frame": True, "max_video_tokens": 99}
    joined = read(tmp_path / "c", processor_config={"video_processor": values}, video_preprocessor_config={})
    assert joined is not None
    assert (joined.max_pixels, joined.fps, joined.max_frames, joined.cap_tokens) == (50176, 1.0, 16, 99)
    # Of a class without the older keys.
    newer = read(tmp_path / "d", "qwen3_vl", video_preprocessor_config={"max_pixels": 1, "image_mean": [0.5] * 3})
    assert newer is not None
    assert (newer.min_pixels, newer.max_pixels) == (128 * 32 * 32, 768 * 32 * 32)


def test_given_values_replace_those_of_the_file(tmp_path: Path):
    given = {"size": SIZE, "num_frames": 8, "min_frames": 2}
    found = read(tmp_path, given=given, video_preprocessor_config={"min_pixels": 1, "max_pixels": 9})
    assert found is not None
    assert (found.min_pixels, found.max_pixels, found.num_frames, found.min_frames) == (4096, 50176, 8, 2)


@pytest.mark.parametrize(
    ("file", "given", "numbers"),
    [
        ({}, {"max_frames": 5}, (5, 1, 5)),
        ({}, {"min_frames": 9}, (9, 9, 768)),
        ({"num_frames": 6}, {"fps": 1}, (0, 1, 768)),
        ({"fps": 3}, {"num_frames": 6}, (6, 1, 768)),
    ],
)
def test_given_numbers_of_frames_have_an_effect(
    tmp_path: Path, file: dict[str, Any], given: dict[str, Any], numbers: tuple[int, int, int]
):
    """Bounds in a model with a number of its own."""
    found = read(tmp_path, "internvl", given, video_preprocessor_config={"size": 56, **file})
    assert found is not None
    assert (found.num_frames, found.min_frames, found.max_frames) == numbers
    with pytest.raises(ModelConfigError, match="num_frames=2 does not go with fps"):
        read(tmp_path / "both", "internvl", {"num_frames": 2, "fps": 1}, video_preprocessor_config={"size": 56})


def test_smolvlm_has_its_numbers_under_other_names(tmp_path: Path):
    side = {"max_image_size": {"longest_edge": 64}}
    sampling = {"fps": 3, "max_frames": 9, "video_size": {"longest_edge": 512}}
    old = read(tmp_path, "smolvlm", video_preprocessor_config={**side, "video_sampling": sampling})
    new = read(tmp_path, "smolvlm", {"num_frames": 7}, video_preprocessor_config={**side, "size": 9999, "fps": 2})
    none = read(tmp_path, "smolvlm", video_preprocessor_config=side)
    found = [(each.longest_edge, each.fps, each.max_frames, each.num_frames) for each in (old, new, none) if each]
    assert found == [(512, 3.0, 9, 0), (4096, 2.0, 7, 0), (1456, 1.0, 64, 0)]


@pytest.mark.parametrize(
    ("values", "layout"),
    [
        ({}, "glm4v"),
        ({"processor_class": "Glm46VProcessor"}, "glm46v"),
        ({"video_processor_type": "Glm4vVideoProcessor", "processor_class": 3}, "glm4v"),
        ({"video_processor_type": {}}, "glm4v"),
    ],
)
def test_class_of_a_file_decides_between_releases(tmp_path: Path, values: dict[str, Any], layout: str):
    """GLM-4.6V has the architecture of 4.5V."""
    found = read(tmp_path, "glm4v", video_preprocessor_config=values)
    assert found is not None
    assert (found.layout, found.max_pixels, found.min_frames) == (layout, 28 * 28 * 2 * 30_000, 1)


def test_number_of_frames_in_files_of_glm_is_not_read(tmp_path: Path):
    """Files that transformers saves have 16, its default, of which its own rule of seconds takes no notice."""
    file = {"num_frames": 16, "fps": 2}
    found, given = (
        read(tmp_path / str(each), "glm4v", each, video_preprocessor_config=file) for each in ({}, {"num_frames": 6})
    )
    assert found is not None
    assert given is not None
    assert (found.num_frames, found.fps, given.num_frames) == (0, 2.0, 6)


@pytest.mark.parametrize(
    ("kind", "key"), [("internvl", "min_pixels"), ("smolvlm", "max_video_tokens"), ("glm4v", "cap_pixels_per_frame")]
)
def test_given_key_without_effect_is_an_error(tmp_path: Path, kind: str, key: str):
    with pytest.raises(ModelConfigError, match=f"model.video_processor: {key} is not supported for {kind}"):
        read(tmp_path, kind, {key: 1}, video_preprocessor_config={})


def test_other_kinds_take_no_videos(tmp_path: Path):
    assert read(tmp_path, "gemma3", video_preprocessor_config={}) is None
    folder = tmp_path / "none"
    images = media_processor(folder, "qwen2_vl")
    (folder / "qwen2_vl" / "preprocessor_config.json").unlink()
    assert read_video_processor(folder / "qwen2_vl", images) is None


OF_SQUARES = {"do_center_crop": "internvl", "initial_shift": "internvl", "max_image_size": "smolvlm"}
OTHER_SQUARE = {"height": 56, "width": 70}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"size": OTHER_SQUARE}, "must be a square"),
        ({"size": {"height": 56, "width": 56}, "do_center_crop": True}, "only false; limits.max_videos=0"),
        ({"size": {"height": 56, "width": 56}, "initial_shift": 3}, "initial_shift"),
        ({"max_image_size": 64, "video_sampling": 3}, "video_sampling"),
        ({"max_image_size": 64, "video_sampling": {"max_frames": -1}}, "max_frames"),
        ({"max_image_size": 64, "video_sampling": {"video_size": {"longest_edge": 10**12}}}, "video_size.longest_edge"),
        ({"size": {"shortest_edge": 9, "longest_edge": 4}}, "asks for at least 9 pixels of a video and at most 4"),
        ({"size": {"shortest_edge": 10**12}}, "size.shortest_edge"),
        ({"size": [1]}, "size"),
        ({"patch_size": 16}, "must be that of images, 14"),
        ({"merge_size": 1}, "must be that of images, 2"),
        ({"temporal_patch_size": 3}, "is not supported, only 2"),
        ({"image_mean": [0.5] * 2}, "image_mean=[0.5, 0.5] must list 3 numbers"),
        ({"rescale_factor": "x"}, "rescale_factor"),
        ({"do_resize": False}, "is not supported, only true"),
        ({"fps": 1e9}, "must be at most 1000"),
        ({"fps": -1}, "fps"),
        ({"num_frames": 0}, "num_frames"),
        ({"max_image_size": 64, "num_frames": "x"}, "num_frames='x'"),
        ({"min_frames": 9, "max_frames": 3}, "max_frames=3 does not go with min_frames=9"),
        ({"max_frames": 3}, "max_frames=3 does not go with min_frames=4"),
        ({"min_frames": 999}, "min_frames=999 does not go with max_frames=768"),
        ({"max_frames": True}, "max_frames"),
        ({"cap_pixels_per_frame": 1}, "must be true or false"),
        ({"resample": 77}, "resample"),
    ],
)
def test_unusable_file_is_an_error_with_a_way_out(tmp_path: Path, values: dict[str, Any], words: str):
    kind = next((kind for key, kind in OF_SQUARES.items() if key in values), "qwen2_5_vl")
    kind = "internvl" if values.get("size") == OTHER_SQUARE else kind
    with pytest.raises(ModelConfigError) as found:
        read(tmp_path, kind, video_preprocessor_config=values)
    assert words in str(found.value)
    assert "video_preprocessor_config.json" in str(found.value)


@pytest.mark.parametrize(
    ("kind", "values", "side"),
    [
        ("internvl", {"size": {"height": 384, "width": 384}}, 56),
        ("smolvlm", {"max_image_size": {"longest_edge": 63}}, 64),
    ],
)
def test_frames_have_the_size_of_the_tower(
    tmp_path: Path, kind: str, values: dict[str, Any], side: int, caplog: pytest.LogCaptureFixture
):
    """InternVL 3.5's file says 384, of which no tower of 448 makes tokens: transformers fails at the first video."""
    found = read(tmp_path, kind, video_preprocessor_config=values)
    assert found is not None
    assert found.side == side
    (record,) = caplog.records
    assert record.getMessage().endswith(f"is not the size that the tower has: frames have that of images, {side}")
    if kind == "internvl":
        with pytest.raises(ModelConfigError, match="must be the size that the tower has, 56, not 57"):
            read(tmp_path / "given", kind, {"size": 57}, video_preprocessor_config=values)


def test_videos_have_their_own_levels(tmp_path: Path):
    same = read(tmp_path / "a", "internvl", video_preprocessor_config={"size": 56, **_levels(tmp_path / "b")})
    assert same is not None
    assert same.own_levels is None
    other = read(tmp_path / "c", "internvl", video_preprocessor_config={"size": 56, "image_mean": 0.3})
    assert other is not None
    assert other.own_levels is not None
    assert other.own_levels.mean == (0.3, 0.3, 0.3)


def _levels(folder: Path) -> dict[str, Any]:
    images = media_processor(folder, "internvl")
    return {"image_mean": images.mean, "image_std": images.std}


def test_omni_models_have_bounds_of_their_class(tmp_path: Path):
    """transformers gives its video processor these in place of the file's."""
    images = replace(media_processor(tmp_path, "qwen2_5_vl"), kind="qwen2_5_omni")
    folder = tmp_path / "qwen2_5_vl"
    found = read_video_processor(folder, images)
    assert found is not None
    assert (found.min_pixels, found.max_pixels, found.time_per_second) == (128 * 28 * 28, 768 * 28 * 28, 25.0)
    given = read_video_processor(folder, images, {"size": SIZE})
    assert given is not None
    assert (given.min_pixels, given.max_pixels) == (4096, 50176)
    (folder / "config.json").write_text('{"thinker_config": {"position_id_per_seconds": -1}}')
    with pytest.raises(ModelConfigError, match="position_id_per_seconds"):
        read_video_processor(folder, images)


@pytest.mark.parametrize("rate", [0, -1, "x", 1e9, True])
def test_unusable_rate_of_positions_is_named(tmp_path: Path, rate: Any):
    images = media_processor(tmp_path, "qwen2_5_vl", vision_config={"tokens_per_second": rate})
    with pytest.raises(ModelConfigError, match="tokens_per_second"):
        read_video_processor(tmp_path / "qwen2_5_vl", images)
