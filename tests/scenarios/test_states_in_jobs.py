"""Jobs of models with recurrent states, latent caches or two shapes of layers: killed and resumed under any layout they
write the same bytes and transformers' greedy ids, and a step log replays with every token.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import delta_checkpoints
import latent_checkpoints
import mamba_checkpoints
import pytest
import qwen4_checkpoints
import recent_checkpoints
import torch
from delta_checkpoints import PERIOD
from job_attempts import Attempt, slow_after
from jobs_of_rows import job_config, read_rows, run_here, write_rows
from reference_models import open_reference
from state_models import state_folder
from stress_seed import SEED
from tools_main import tool
from transformers import PreTrainedModel

from spmd_worker.base.config.schema import CacheConfig, SchedulerConfig
from spmd_worker.frontends.replay.replay import read_messages
from spmd_worker.frontends.replay.step_log import read_step_log

NUM_ROWS = 120
DRAFTS = ["speculative_config.method=suffix", "speculative_config.num_speculative_tokens=4"]


def write_input(folder: Path, num_rows: int = NUM_ROWS, shorter: int = 1) -> None:
    """Rows with a common beginning of 70 tokens; every second one samples."""
    chance = random.Random(5)
    head = [chance.randrange(5, 90) for _ in range(70)]
    rows = [
        {
            "prompt_token_ids": head + [chance.randrange(5, 90) for _ in range(1 + index % (60 // shorter))],
            "max_tokens": (20 + index % 30) // shorter,
            "temperature": 4.0 * (index % 2),
            "ignore_eos": True,
        }
        for index in range(num_rows)
    ]
    write_rows(folder, rows)


@dataclass(frozen=True, slots=True)
class Shape:
    """A tiny model: its folder, transformers' model of it, and the layouts of its job, which is killed under the first
    two. Such models have too few columns for leaves, so two shards have bits of their own.
    """

    folder: Callable[[], Path]
    reference: Callable[[], PreTrainedModel]
    layouts: tuple[str, str, str]


def shape(module: Any, kind: str, case: str, *layouts: str) -> Shape:
    """Of a module of checkpoints."""
    folder, reference = (partial(getattr(module, f"{kind}_{what}"), case) for what in ("folder", "reference"))
    return Shape(folder, reference, (layouts[0], layouts[1], layouts[2]))


SHAPES = {
    "LFM2": Shape(
        lambda: state_folder("lfm2"),
        lambda: open_reference(state_folder("lfm2")),
        ("two stages", "two replicas", "one rank"),
    ),
    "Qwen3.5 4B": shape(delta_checkpoints, "delta", PERIOD, "two stages", "two replicas", "two stages"),
    "Qwen3-Next": shape(delta_checkpoints, "delta", "qwen3_next", "two shards", "two shards", "two shards"),
    "Qwen4": shape(qwen4_checkpoints, "qwen4", "qwen4", "two stages", "two replicas", "one rank"),
    "DeepSeek V3": shape(latent_checkpoints, "latent", "deepseek_v3", "two replicas", "two stages", "one rank"),
    "Nemotron 3 Nano": shape(mamba_checkpoints, "mamba", "nemotron", "two shards", "two shards", "two shards"),
    "Gemma 4 26B-A4B": shape(recent_checkpoints, "recent", "gemma4", "two stages", "two replicas", "one rank"),
}


@torch.no_grad()
def are_greedy(model: PreTrainedModel, prompt: list[int], ids: list[int]) -> bool:
    """Whether each id is the model's first choice after all before it."""
    logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist() == ids


@pytest.mark.stress
@pytest.mark.parametrize("name", SHAPES)
def test_killed_job_resumes_to_equal_bytes(name: str, tmp_path: Path) -> None:
    """Two kills by SIGKILL, of all processes and of one rank, at drawn steps; the job that is killed drafts."""
    tested, chance = SHAPES[name], random.Random(f"{SEED} {name}")

    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def attempt(folder: Path, layout: str, **more: tuple[str, ...]) -> Attempt:
        options = [f"model.path={tested.folder()}", "cache.num_blocks=160", "scheduler.max_num_seqs=16"]
        options += DRAFTS if folder == killed else []
        return Attempt(folder, layout, *options, **more)

    for folder in (whole, killed):
        folder.mkdir()
        write_input(folder, shorter=2)
    *struck, last = tested.layouts
    assert attempt(whole, struck[0]).close() == 0, (whole / "log").read_text()
    for layout, victim in zip(struck, (None, chance.randrange(2)), strict=True):
        num_steps = chance.randrange(20, 30)
        (killed / "out.jsonl.run" / "steps.csv").unlink(missing_ok=True)
        started = attempt(killed, layout, script=slow_after(num_steps, killed))
        started.wait_for_steps(num_steps)
        started.kill(victim)
    assert attempt(killed, last).close() == 0, (killed / "log").read_text()
    assert (killed / "out.jsonl").read_bytes() == (whole / "out.jsonl").read_bytes()
    metrics = json.loads((killed / "out.jsonl.run" / "metrics.json").read_text())
    assert 0 < metrics["resumed_rows"] < NUM_ROWS
    assert metrics["speculation"]["accepted_tokens"] > 0
    rows = read_rows(whole, "rows.jsonl")
    answers = [answer["outputs"][0]["token_ids"] for answer in read_rows(whole)]
    for index in range(0, NUM_ROWS, 2):
        assert are_greedy(tested.reference(), rows[index]["prompt_token_ids"], answers[index]), index
    # Negative control: rows that sample are none.
    assert not are_greedy(tested.reference(), rows[1]["prompt_token_ids"], answers[1])


@pytest.mark.stress
def test_log_of_states_replays_with_every_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Preempted by swap, forked, found again."""
    write_input(tmp_path, 24)
    config = job_config(
        tmp_path,
        state_folder("lfm2"),
        options={"dtype": "float32", "max_model_len": 256},
        scheduler=SchedulerConfig(max_num_seqs=8, preemption_mode="swap"),
        run_dir=str(tmp_path),
        step_log=True,
    )
    cache = CacheConfig(num_blocks=20, swap_space_gib=0.01, num_state_snapshots=4)
    run_here(replace(config, cache=cache))
    log = read_step_log(tmp_path / "steps.log")
    messages = list(read_messages(log.messages()))
    for kind in ("swap_out", "swap_in", "copy"):
        assert any(getattr(message.plan.state_ops, kind) for message in messages), f"no {kind}"
    assert (log.header.num_state_slots, log.header.num_host_state_slots) == (12, 8)
    code, output, _ = tool("replay", capsys)(tmp_path / "steps.log", "--with-model")
    assert code == 0, output
    assert re.search(r"\nreplayed \d+ steps, digests equal\n(\d+) of \1 tokens equal\n$", output)
