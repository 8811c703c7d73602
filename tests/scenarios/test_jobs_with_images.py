"""Jobs whose rows have images, killed at random and resumed: the bytes of one uninterrupted job, each image encoded
once a life, and memory that does not grow.

SPMD_WORKER_IMAGE_ROWS is the number of rows, SPMD_WORKER_IMAGE_KILLS that of kills, TESTS_SEED the seed.
"""

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from image_models import image_folder
from job_attempts import LIMIT_S, Attempt
from media_models import saved
from PIL import Image
from stress_seed import SEED
from waiting import wait_until

from spmd_worker.media.decode import decode
from spmd_worker.media.image_processor import read_image_processor
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.placeholders import PLACEHOLDERS
from spmd_worker.media.preparing import prepare
from spmd_worker.model_config.vision_config import VisionConfig

NUM_ROWS = int(os.environ.get("SPMD_WORKER_IMAGE_ROWS", "300"))
NUM_KILLS = int(os.environ.get("SPMD_WORKER_IMAGE_KILLS", "20"))
NUM_IMAGES = 500
KIND = "qwen3_vl"
SCRIPT = Path(__file__).parents[1] / "support" / "watched_job.py"
MOST_GROWTH_BYTES = 96 << 20
"""Growth of a rank, whose caches fill; 2,000 rows with a compiled product for each number of rows grow by 150 MiB."""
MOST_MORE_BYTES = 32 << 20
"""Of the rank that holds pixels, more than of the one that holds none."""
ROOMY_STORE = "cache.media_rows_gib=0.02"
SMALL_STORE_GIB = 100 * 32 * 4 * 4 / 2**30
"""Of the rows of two or three images."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PNG and JPEG files, no two the same, and one that is cut short."""
    folder, chance = tmp_path_factory.mktemp("root"), random.Random(7)
    for number in range(NUM_IMAGES):
        size = chance.randrange(40, 260), chance.randrange(40, 260)
        image = Image.frombytes("RGB", (8, 8), chance.randbytes(192)).resize(size)
        kind, ending = (("PNG", "png"), ("JPEG", "jpg"))[number % 2]
        (folder / f"{number}.{ending}").write_bytes(saved(image, kind))
    (folder / "cut.jpg").write_bytes((folder / "1.jpg").read_bytes()[:-200])
    return folder


def name_of(number: int) -> str:
    return f"{number % NUM_IMAGES}.{('png', 'jpg')[number % 2]}"


def images_of(index: int, chance: random.Random) -> list[str]:
    """Of a row: an image for each, some with one that came before, some none."""
    if index == 13:
        return ["cut.jpg"]
    if index == 14:
        return ["gone.png"]
    if index % 9 == 8:
        return []
    more = [name_of(chance.randrange(max(index, 1)))] if index % 4 == 1 else []
    return [name_of(index), *more]


def write_rows(folder: Path) -> list[list[str]]:
    """The images of each row."""
    folder.mkdir()
    chance, rows = random.Random(5), []
    images = [images_of(index, chance) for index in range(NUM_ROWS)]
    for index, names in enumerate(images):
        text = f"{PLACEHOLDERS[KIND].written * len(names)}what is {index}?"
        numbers = {"max_tokens": 6 + index % 12, "temperature": float(index % 2), "ignore_eos": True}
        rows.append({"prompt": text, **numbers, **({"images": names} if names else {})})
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return images


def start(folder: Path, root: Path, layout: str, *more: str) -> Attempt:
    options = [
        f"model.path={image_folder(KIND)}",
        f"job.media_root={root}",
        "model.max_model_len=512",
        ROOMY_STORE,
        *more,
    ]
    return Attempt(folder, layout, *options, script=(str(SCRIPT), str(folder)))


def finished(folder: Path, attempt: Attempt) -> bytes:
    assert attempt.ends_within(2 * LIMIT_S), (folder / "log").read_text()
    assert attempt.close() == 0, (folder / "log").read_text()
    return (folder / "out.jsonl").read_bytes()


def noted(folder: Path) -> list[tuple[int, int, int, list[str]]]:
    """Lines of all ranks, but one that a kill has cut."""
    lines = [line for path in sorted(folder.glob("watched.*")) for line in path.read_text().split("\n")]
    return [tuple(json.loads(line)) for line in lines if line.endswith("]")]


def encoded_by_life(folder: Path) -> dict[int, Counter[str]]:
    """How often each image was encoded, by process."""
    found: dict[int, Counter[str]] = {}
    for process, _, _, names in noted(folder):
        found.setdefault(process, Counter()).update(names)
    return found


def rows_of(root: Path, names: set[str]) -> dict[str, int]:
    """Rows of each image, by its name in the engine."""
    processor, found = read_image_processor(image_folder(KIND), VisionConfig(KIND, 1), None), {}
    for name in names:
        image = prepare(decode((root / name).read_bytes(), MediaLimits()), processor, is_alone=True)
        found[image.media_id.hex()] = image.num_rows
    return found


def metrics_of(folder: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((folder / "out.jsonl.run" / "metrics.json").read_text())
    return metrics


def wait_for_plans(folder: Path, attempt: Attempt, count: int) -> None:
    """Until the job has run so many more plans, or has ended."""
    wanted = len(noted(folder)) + count
    wait_until(lambda: attempt.ends_within(0.02) or len(noted(folder)) >= wanted, LIMIT_S)


def killed_job(folder: Path, root: Path, layouts: list[str], chance: random.Random, most: int, num_steps: int) -> int:
    """Kills a job at up to `most` moments and lets it end; returns how often."""
    write_rows(folder)
    num_kills = 0
    while num_kills < most:
        attempt = start(folder, root, chance.choice(layouts))
        if chance.random() < 0.2:
            is_over = attempt.ends_within(chance.uniform(0, 6))
        else:
            wait_for_plans(folder, attempt, chance.randrange(1, max(2, num_steps // 6)))
            is_over = attempt.ends_within(0.0)
        if is_over:
            finished(folder, attempt)
            return num_kills
        attempt.kill(chance.choice([None, 0, 1]))
        num_kills += 1
    finished(folder, start(folder, root, chance.choice(layouts)))
    return num_kills


@pytest.mark.guarantee("Killed jobs with images: the same bytes", is_control_inside=True)
@pytest.mark.stress
@pytest.mark.parametrize("layouts", [["two shards"], ["two replicas", "one rank"]], ids=["shards", "replicas"])
def test_killed_jobs_with_images_resume_to_equal_bytes(layouts: list[str], root: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    images = write_rows(whole)
    expected = finished(whole, start(whole, root, layouts[-1]))
    check_whole(whole, root, images)
    num_steps = len(noted(whole))
    chance, num_kills, number, num_lives = random.Random(f"{SEED} {layouts}"), 0, 0, 0
    while num_kills < NUM_KILLS:
        folder, number = tmp_path / str(number), number + 1
        num_kills += killed_job(folder, root, layouts, chance, NUM_KILLS - num_kills, num_steps)
        assert (folder / "out.jsonl").read_bytes() == expected
        for counts in encoded_by_life(folder).values():
            assert set(counts.values()) <= {1}
            num_lives += 1
    lines = [json.loads(line) for line in expected.splitlines()]
    assert [line["index"] for line in lines] == list(range(NUM_ROWS))
    assert [line["error"] and line["error"]["code"] for line in lines[13:16]] == [
        "image_unreadable",
        "image_missing",
        None,
    ]
    told = f"{num_kills} in {number} jobs, {num_lives} lives that ran rows"
    print(f"\nKILLS of jobs with images, of seed {SEED}, {layouts[0]}: {told}", end="")


def check_whole(folder: Path, root: Path, images: list[list[str]]) -> None:
    """An uninterrupted job: each image once, memory flat."""
    used = [name for names in images for name in names if name not in ("cut.jpg", "gone.png")]
    rows = rows_of(root, set(used))
    metrics = metrics_of(folder)
    assert metrics["images"] == len(used)
    assert metrics["rows_encoded"] == sum(rows.values())
    lives = encoded_by_life(folder)
    for counts in lives.values():
        assert counts == dict.fromkeys(rows, 1)
    growths = [check_memory(folder, process) for process in lives]
    assert growths[0] - growths[-1] < MOST_MORE_BYTES


def check_memory(folder: Path, process: int) -> int:
    """The growth of a rank's memory from a tenth of its plans to the last; its helpers' is small."""
    sizes = [(own, helpers) for each, own, helpers, _ in noted(folder) if each == process]
    tenth, last = sizes[len(sizes) // 10], sizes[-1]
    told = [f"{numbers[0] >> 20} {numbers[1] >> 20}" for numbers in (tenth, last)]
    print(
        f"\nMEMORY of a rank with images and of its helpers, MiB, at a tenth: {told[0]}, at the end: {told[1]}", end=""
    )
    assert last[1] - tenth[1] < MOST_MORE_BYTES
    assert last[0] - tenth[0] < MOST_GROWTH_BYTES
    return last[0] - tenth[0]


@pytest.mark.stress
def test_small_store_makes_rows_again(root: Path, tmp_path: Path) -> None:
    """With room for the rows of a few images: the same bytes, and more encoded."""
    folders = [tmp_path / "roomy", tmp_path / "small"]
    outputs = []
    for folder, more in zip(folders, ([], [f"cache.media_rows_gib={SMALL_STORE_GIB}", "cache.num_blocks=80"])):
        write_rows(folder)
        outputs.append(finished(folder, start(folder, root, "two shards", *more)))
    assert outputs[0] == outputs[1]
    roomy, small = (metrics_of(folder) for folder in folders)
    assert small["rows_encoded"] > roomy["rows_encoded"]
    assert small["images"] == roomy["images"]
