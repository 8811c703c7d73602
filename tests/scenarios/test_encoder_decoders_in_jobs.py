"""Jobs of models with encoders, rows of text and rows of audio, killed at random and resumed under any layout.

They write the bytes of one uninterrupted job, whose greedy answers are transformers'.

SPMD_WORKER_ENCODER_KILLS is the number of kills of each job, TESTS_SEED the seed.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import soundfile
import torch
from cross_rows import cross_folder
from full_size_models import word_tokenizer
from job_attempts import LAYOUTS, Attempt, slow_after
from json_files import edit
from rows_of_encoders import VOCAB_SIZE
from run_folder import made_once
from speech_models import RATE, WINDOW_S, sound, speech_folder
from stress_seed import SEED
from transformers import T5ForConditionalGeneration, WhisperFeatureExtractor, WhisperForConditionalGeneration
from waiting import wait_until

from spmd_worker.frontends.tools.verify import main as verify
from spmd_worker.media.audio_windows import windows

NUM_KILLS = int(os.environ.get("SPMD_WORKER_ENCODER_KILLS", "5"))
NUM_TEXT_ROWS, NUM_AUDIO_ROWS, NUM_FILES = 120, 80, 40
SMALL = (
    "cache.block_size=8",
    "cache.num_blocks=50",
    "scheduler.max_num_seqs=12",
    "scheduler.max_num_batched_tokens=96",
    "model.max_model_len=64",
    "job.commit_rows=1",
)
LIMIT_S = 600.0
"""Of a life until it is struck: a machine may do much else."""
HOSTILE = {"cut.flac": "audio_unreadable", "junk.mp3": "audio_unreadable", "empty.wav": "audio_empty"}
HOSTILE_ROWS = (13, 14, 57)
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def openai_row(index: int, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": str(index), "method": "POST", "url": url, "body": body}


@cache
def text_folder() -> Path:
    """A tiny T5 with a tokenizer of words."""

    def make(folder: Path) -> None:
        shutil.copytree(cross_folder("t5"), folder)
        for name in ("config.json", "generation_config.json"):
            edit(folder / name, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
        word_tokenizer(VOCAB_SIZE, "T5").save_pretrained(folder)

    return made_once("t5 of words", make)


def text_rows() -> list[dict[str, Any]]:
    """Texts of 1 to 100 words, every fifth one given before, every second row greedy, two rows in error."""
    chance, texts, rows = random.Random(5), list[str](), list[dict[str, Any]]()
    for index in range(NUM_TEXT_ROWS):
        words = [f"w{chance.randrange(2, VOCAB_SIZE - 1)}" for _ in range(chance.randrange(1, 101))]
        texts.append(chance.choice(texts) if index % 5 == 4 else " ".join(words))
        numbers = {"max_tokens": 8 + index % 40, "temperature": 1.0 * (index % 2), "ignore_eos": index % 3 > 0}
        forms = [
            {"prompt": texts[-1], **numbers},
            {"prompt": texts[-1], "n": 1 + index % 2, **numbers},
            {"encoder_prompt": texts[-1], "decoder_prompt": "w7 w9", **numbers},
            openai_row(index, "/v1/completions", {"prompt": texts[-1], **numbers}),
        ]
        rows.append(forms[index // 2 % 4])
    rows[13] = {"prompt": "w5 " * 200}
    rows[14] = {"prompt": "w5", "target_language": "klingon"}
    return rows


@cache
def audio_root() -> Path:
    """WAV and FLAC files of 0.3 to 6.5 s, where a window is 2 s, and hostile ones."""

    def make(folder: Path) -> None:
        folder.mkdir()
        for number in range(NUM_FILES):
            samples = sound(0.3 + number * 0.16, number)
            soundfile.write(folder / name_of(number), samples, RATE, subtype="PCM_16")
        data = (folder / name_of(39)).read_bytes()
        (folder / "cut.flac").write_bytes(data[: len(data) // 2])
        (folder / "junk.mp3").write_bytes(random.Random(1).randbytes(5_000))
        soundfile.write(folder / "empty.wav", np.zeros(0, np.float32), RATE)

    return made_once("audio of jobs", make)


def name_of(number: int) -> str:
    return f"{number}.{('wav', 'flac')[number % 2]}"


def audio_rows() -> list[dict[str, Any]]:
    """Each file several times, and each hostile one once."""
    rows = list[dict[str, Any]]()
    for index in range(NUM_AUDIO_ROWS):
        name, temperature = name_of(index * 7 % NUM_FILES), 1.0 * (index % 2)
        most = {"max_completion_tokens": 6 + index % 30, "temperature": temperature}
        forms = [
            {"audio": name, "language": "de", "temperature": temperature, "max_tokens": 6 + index % 30},
            {"audio": name, "timestamps": True, "n": 2, "temperature": temperature, "max_tokens": 36},
            openai_row(index, TRANSCRIPTIONS, {"file": name, "response_format": "verbose_json", **most}),
            openai_row(index, TRANSLATIONS, {"file_url": f"file://{audio_root() / name}", **most}),
            openai_row(index, TRANSCRIPTIONS, {"file": name, "language": "en", "response_format": "srt", **most}),
        ]
        rows.append(forms[index // 2 % 5])
    for index, name in zip(HOSTILE_ROWS, HOSTILE, strict=True):
        rows[index] = {"audio": name}
    return rows


@torch.no_grad()
def check_texts(rows: list[dict[str, Any]], answers: list[dict[str, Any]]) -> int:
    """Greedy rows have the model's first choice after all before; returns how many there are."""
    model = T5ForConditionalGeneration.from_pretrained(text_folder(), attn_implementation="eager").eval()
    tokenizer, num_checked = word_tokenizer(VOCAB_SIZE, "T5"), 0

    def are_first_choices(text: str, start: list[int], ids: list[int]) -> bool:
        given = torch.tensor([tokenizer(text).input_ids])
        logits = model(input_ids=given, decoder_input_ids=torch.tensor([[*start, *ids]])).logits[0]
        return logits[len(start) - 1 : -1].argmax(-1).tolist() == ids

    for row, answer in zip(rows, answers, strict=True):
        if answer["error"] or "body" in row:
            continue
        start = [0, 7, 9] if "decoder_prompt" in row else [0]
        text = row.get("prompt") or row["encoder_prompt"]
        for output in answer["outputs"]:
            is_greedy = row["temperature"] == 0
            # Negative control: what was sampled is not.
            if is_greedy or row["max_tokens"] > 12:
                assert are_first_choices(text, start, output["token_ids"]) == is_greedy
            num_checked += is_greedy
    assert [answers[index]["error"]["code"] for index in (13, 14)] == ["prompt_too_long", "invalid_value"]
    return num_checked


@torch.no_grad()
def check_audio(rows: list[dict[str, Any]], answers: list[dict[str, Any]]) -> int:
    """Greedy rows have the ids of `generate` for each window; returns how many there are."""
    model = WhisperForConditionalGeneration.from_pretrained(speech_folder(), attn_implementation="eager").eval()
    extractor, num_checked = WhisperFeatureExtractor.from_pretrained(speech_folder()), 0

    def theirs(samples: np.ndarray, most: int) -> list[int]:
        features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        ids: list[int] = model.generate(
            features, language="de", task="transcribe", do_sample=False, max_new_tokens=most
        )[0].tolist()
        return ids

    for row, answer in zip(rows, answers, strict=True):
        if row.get("temperature") == 0 and row.get("language") == "de":
            samples = soundfile.read(audio_root() / row["audio"], dtype="float32")[0]
            found = [theirs(each.samples, row["max_tokens"]) for each in windows(samples, WINDOW_S * RATE)]
            assert answer["outputs"][0]["token_ids"] == [token_id for each in found for token_id in each]
            num_checked += 1
    codes = [answers[index]["error"]["code"] for index in HOSTILE_ROWS]
    assert codes == [*HOSTILE.values()]
    assert sum(answer["error"] is not None for answer in answers) == 3
    return num_checked


@dataclass(frozen=True, slots=True)
class Job:
    """Rows of a kind, the options of their job, and the comparison of their answers with transformers'."""

    rows: Callable[[], list[dict[str, Any]]]
    options: Callable[[], tuple[str, ...]]
    check: Callable[[list[dict[str, Any]], list[dict[str, Any]]], int]
    layouts: tuple[str, ...] = tuple(LAYOUTS)


JOBS = {
    "text": Job(text_rows, lambda: (f"model.path={text_folder()}", "scheduler.max_encoder_len=112"), check_texts),
    "audio": Job(
        audio_rows,
        lambda: (f"model.path={speech_folder()}", f"job.media_root={audio_root()}", "cache.media_rows_gib=0.00004"),
        check_audio,
        # Its feed-forward of 48 columns is one leaf: shards have bits of their own, and go on with no others.
        tuple(each for each in LAYOUTS if each != "two shards"),
    ),
}


def start(folder: Path, kind: str, layout: str, num_steps: int | None = None) -> Attempt:
    """By launch.py under torchrun; it is slow after so many steps."""
    script = (str(ranks.REPOSITORY / "launch.py"),) if num_steps is None else slow_after(num_steps, folder)
    return Attempt(folder, layout, *JOBS[kind].options(), *SMALL, script=script, torchrun=())


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def struck(folder: Path, kind: str, layout: str, chance: random.Random) -> None:
    """One life of a job, which ends by SIGKILL of a rank, or of all."""
    steps = folder / "out.jsonl.run" / "steps.csv"
    num_before = num_lines(steps)
    num_steps = chance.randrange(8, 25)
    attempt = start(folder, kind, layout, num_steps)
    if chance.random() < 0.25:
        assert not attempt.ends_within(chance.uniform(0, 5)), (folder / "log").read_text()
    else:
        wait_until(lambda: attempt.ends_within(0.0) or num_lines(steps) >= num_before + num_steps, LIMIT_S)
        assert not attempt.ends_within(0.0), (folder / "log").read_text()
    attempt.kill(chance.choice([None, *range(LAYOUTS[layout][0])]))


def finished(folder: Path, kind: str, layout: str) -> bytes:
    assert start(folder, kind, layout).close() == 0, (folder / "log").read_text()
    return (folder / "out.jsonl").read_bytes()


def report_of(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out.jsonl.run" / name).read_text())
    return found


@pytest.mark.guarantee("killed jobs of encoder-decoder models: the same bytes", is_control_inside=True)
@pytest.mark.stress
@pytest.mark.parametrize("kind", JOBS)
def test_killed_jobs_of_encoders_resume_to_equal_bytes(kind: str, tmp_path: Path) -> None:
    chance, rows, folders = (
        random.Random(f"{SEED} {kind}"),
        JOBS[kind].rows(),
        [tmp_path / "whole", tmp_path / "killed"],
    )
    for folder in folders:
        folder.mkdir()
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    whole, killed = folders
    expected = finished(whole, kind, "one rank")
    answers = [json.loads(line) for line in expected.splitlines()]
    num_checked = JOBS[kind].check(rows, answers)
    assert num_checked > 5
    assert report_of(whole, "metrics.json")["preemptions"] > 0
    # Each layout is in it.
    every = JOBS[kind].layouts
    layouts = [*every, *chance.choices(every, k=NUM_KILLS)][: max(NUM_KILLS, len(every))]
    chance.shuffle(layouts)
    for layout in layouts:
        struck(killed, kind, layout, chance)
    last = chance.choice(every)
    assert finished(killed, kind, last) == expected
    assert 0 < report_of(killed, "metrics.json")["resumed_rows"] < len(rows)
    if kind == "audio":
        provenance = [report_of(each, "provenance.json")["images"] for each in folders]
        assert provenance[0] == provenance[1]
        assert verify(["--images", str(killed / "out.jsonl.run")]) == 0
    told = f"{layouts}, ended as {last}; {num_checked} greedy answers are transformers'"
    print(f"\nKILLS of jobs with encoders, {kind}, of seed {SEED}: {len(layouts)} of {told}", end="")
