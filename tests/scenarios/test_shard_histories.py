"""Shards that are launched, killed at random and resumed under any layout merge to the bytes of the job in one piece.

SPMD_WORKER_SHARD_HISTORIES sets the number of histories; TESTS_SEED sets the seed.
"""

import json
import os
import random
from pathlib import Path

import pytest
from image_models import image_folder
from job_attempts import LAYOUTS, LIMIT_S, Attempt
from job_attempts import write_rows as write_many_rows
from jobs_of_rows import job_config, read_rows, run_here, write_rows
from PIL import Image
from stress_seed import SEED

from spmd_worker.frontends.batch.merge.merge_shards import merge_shards
from spmd_worker.frontends.batch.output_file import read_lines, write_lines
from spmd_worker.frontends.batch.run_dir.shard import run_dir_of
from spmd_worker.frontends.tools.index import main as index
from spmd_worker.frontends.tools.verify import main as verify
from spmd_worker.media.placeholders import PLACEHOLDERS

NUM_HISTORIES = int(os.environ.get("SPMD_WORKER_SHARD_HISTORIES", "6"))
NUM_ROWS = 120
MOST_KILLS = 3
LIFE_S = 4.0
FORMATS = ("jsonl", "jsonl.zst", "parquet")
KIND = "qwen3_vl"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a job in one piece, whose later rows repeat custom_ids."""
    folder = tmp_path_factory.mktemp("whole")
    write_many_rows(folder, NUM_ROWS)
    rows = read_rows(folder, "rows.jsonl")
    for number, row in enumerate(rows):
        row |= {"custom_id": f"row {number * 7 % 100}"} if number % 3 else {}
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n\n" for row in rows))
    attempt = Attempt(folder, "one rank")
    assert attempt.ends_within(LIMIT_S), (folder / "log").read_text()
    assert attempt.close() == 0, (folder / "log").read_text()
    assert index([str(folder / "rows.jsonl"), "--output", str(folder / "index")]) == 0
    return folder


def run_shard(folder: Path, whole: Path, words: list[str], chance: random.Random) -> int:
    """Kill a shard up to MOST_KILLS times, and let it end. Returns how often it was killed."""
    num_kills = 0
    words = [*words, f"job.input={whole / 'rows.jsonl'}"]
    words += [f"job.input_index={whole / 'index'}"] if chance.random() < 0.5 else []
    while True:
        layout = chance.choice(list(LAYOUTS))
        attempt = Attempt(folder, layout, *words)
        may_kill = num_kills < MOST_KILLS and chance.random() < 0.6
        if may_kill and not attempt.ends_within(chance.uniform(0, LIFE_S)):
            attempt.kill(chance.choice([None, *range(LAYOUTS[layout][0])]))
            num_kills += 1
            continue
        assert attempt.ends_within(LIMIT_S), (folder / "log").read_text()
        assert attempt.close() == 0, (folder / "log").read_text()
        return num_kills


@pytest.mark.stress
@pytest.mark.guarantee("Merged shards are the bytes of the job in one piece")
@pytest.mark.parametrize("number", range(NUM_HISTORIES))
def test_killed_shards_merge_to_equal_bytes(whole: Path, tmp_path: Path, number: int):
    chance = random.Random(SEED * 1000 + number)
    count, suffix = (1, 3, 7)[number % 3], FORMATS[chance.randrange(3)]
    kills = [
        run_shard(tmp_path, whole, [f"job.output={tmp_path / 'out'}.{suffix}", f"job.shard={shard}/{count}"], chance)
        for shard in chance.sample(range(count), count)
    ]
    output, expected = tmp_path / f"merged.{suffix}", tmp_path / f"expected.{suffix}"
    merge_shards(list(tmp_path.glob(f"out-*.{suffix}.run")), output)
    write_lines(read_lines(whole / "out.jsonl"), expected)
    assert output.read_bytes() == expected.read_bytes()
    print(f"SHARDS of seed {SEED}: {count} as {suffix}, {sum(kills)} kills")


@pytest.mark.stress
def test_images_of_merged_shards_can_be_verified(tmp_path: Path):
    """A row that has the custom_id of one in another shard has no image in the merged output."""
    for number in range(4):
        Image.new("RGB", (40 + 8 * number, 40), (number * 60, 9, 9)).save(tmp_path / f"{number}.png")
    written = PLACEHOLDERS[KIND].written
    rows = [
        {"custom_id": f"{n % 3}", "prompt": f"{written}x", "images": [f"{n}.png"], "max_tokens": 2} for n in range(4)
    ]
    write_rows(tmp_path, rows)
    options, folders = {"dtype": "float32", "max_model_len": 512}, []
    for shard in (None, "0/2", "1/2"):
        config = job_config(tmp_path, image_folder(KIND), options=options, media_root=str(tmp_path), shard=shard)
        run_here(config)
        folders.append(run_dir_of(config.job))
        assert verify(["--images", str(folders[-1])]) == 0
    provenance = merge_shards(folders[1:], tmp_path / "merged.jsonl")
    whole = json.loads((folders[0] / "provenance.json").read_text())
    assert (tmp_path / "merged.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    assert provenance["images"] == whole["images"]
    assert whole["images"]["rows"] == 3
    assert verify(["--images", str(tmp_path / "merged.jsonl.run")]) == 0
