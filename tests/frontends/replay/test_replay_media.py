"""A run with images replays without their pixels: what is made and dropped follows from the log's names and header."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from logged_run import LoggedRun, request, write_log

from spmd_worker.base.errors import ReplayDivergedError, ReplayError
from spmd_worker.frontends.replay import model
from spmd_worker.frontends.replay.replay import Replay
from spmd_worker.frontends.replay.step_log import read_step_log
from spmd_worker.replica.sequence.encoder_input import encoder_audio, encoder_text
from spmd_worker.replica.sequence.events import Admit, ResetMediaRows, ResetPrefixCache
from spmd_worker.replica.sequence.media_items import EncodeMedia, MediaItem
from spmd_worker.replica.sequence.step import StepPlan, StepResult

IMAGES: dict[str, Any] = {
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 16,
    "num_media_rows": 20,
    "max_encode_patches": 50,
    "tensor_parallel_size": 2,
}


def write_media_log(path: Path, plants: dict[int, Any] | None = None, **changes: object) -> LoggedRun:
    """Prompts of 20 tokens with two of five images; rows are dropped once."""
    events: dict[int, list[Any]] = {9: [ResetMediaRows()], 30: [ResetPrefixCache()]}
    for number in range(10):
        media = [
            MediaItem(bytes([each % 5]) * 16, ((start, 6),), 24)
            for each, start in ((number, 1), (number * 3 + 1, 9 + number % 3))
        ]
        row = Admit(request(number, 20, media=tuple(media), max_tokens=4 + number))
        events.setdefault(1 + 4 * (number // 3), []).append(row)
    return write_log(path, events, plants, **{**IMAGES, **changes})


@pytest.mark.parametrize("depth", [{}, {"pipeline_parallel_size": 2}, {"num_steps_ahead": 1}], ids=str)
def test_run_with_images_replays(tmp_path: Path, depth: dict[str, int]):
    run = write_media_log(tmp_path / "log", **depth)
    log = read_step_log(tmp_path / "log")
    replay = Replay(log.header, None)
    assert [step.plan for step in replay.steps(log.messages())] == run.plans
    assert replay.num_equal_digests == len(run.plans)
    assert replay.scheduler.counters == run.scheduler.counters
    assert run.scheduler.counters.num_images == 20
    assert sorted({each.owner for plan in run.plans for each in plan.encode}) == [0, 1]
    assert any(plan.drop_rows for plan in run.plans)


@pytest.mark.parametrize(
    "changes", [{"num_media_rows": 60}, {"max_encode_patches": 1}, {"sees_whole_image": True}], ids=str
)
def test_replay_with_other_rows_diverges(tmp_path: Path, changes: dict[str, Any]):
    """Negative control: every key of the header that says how rows are kept counts."""
    write_media_log(tmp_path / "log")
    log = read_step_log(tmp_path / "log")
    with pytest.raises(ReplayDivergedError, match=r"^step \d+: (encode|drop_rows|groups|num_tokens)"):
        list(Replay(replace(log.header, **changes), None).steps(log.messages()))


def test_wrong_owner_is_found_and_named(tmp_path: Path):
    def by_another_rank(plan: StepPlan) -> StepPlan:
        first, *others = plan.encode
        return replace(plan, encode=(EncodeMedia(first.request_id, first.index, 1 - first.owner), *others))

    write_media_log(tmp_path / "log", {2: by_another_rank})
    log = read_step_log(tmp_path / "log")
    with pytest.raises(ReplayDivergedError, match=r"^step 2: encode\[0\].owner"):
        list(Replay(log.header, None).steps(log.messages()))


def test_recomputing_says_that_it_lacks_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_media_log(tmp_path / "log")
    log = read_step_log(tmp_path / "log")
    executor = SimpleNamespace(
        execute_model=lambda plan: StepResult(plan.step),
        shutdown=lambda: None,
        resolved=SimpleNamespace(model_config=SimpleNamespace(pooling=None)),
    )
    monkeypatch.setattr(model, "_start", lambda header, folder: executor)
    steps = Replay(log.header, None).steps(log.messages())
    with pytest.raises(
        ReplayError, match=r"step 2 computes with the images or audio of request 2, which the log does not have"
    ):
        list(model.recompute(log.header, tmp_path, steps))


def test_run_with_encoder_inputs_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Texts are in the log: their rows could be made again. Audio is not."""
    events: dict[int, list[Any]] = {}
    for number in range(6):
        given = encoder_text([number % 3 + 1] * 9) if number else encoder_audio(bytes(16), 9)
        ids, item = given.before(range(5), 4)
        row = request(number, len(ids), media=(item,), max_tokens=4 + number)
        events.setdefault(1 + 3 * (number // 2), []).append(
            Admit(replace(row, prompt_token_ids=ids, num_virtual_tokens=12))
        )
    run = write_log(tmp_path / "log", events, None, **{**IMAGES, "max_model_len": 12, "block_size": 4})
    log = read_step_log(tmp_path / "log")
    replay = Replay(log.header, None)
    assert [step.plan for step in replay.steps(log.messages())] == run.plans
    assert replay.num_equal_digests == len(run.plans)
    # Lengths are the decoder's: 5 tokens of 12 are the prompt's.
    assert run.scheduler.counters.num_output_tokens == 4 + 5 + 6 + 7 + 7 + 7
    executor = SimpleNamespace(
        execute_model=lambda plan: StepResult(plan.step),
        shutdown=lambda: None,
        resolved=SimpleNamespace(model_config=SimpleNamespace(pooling=None)),
    )
    monkeypatch.setattr(model, "_start", lambda header, folder: executor)
    with pytest.raises(ReplayError, match=r"computes with the audio of request 0, which the log does not have"):
        list(model.recompute(log.header, tmp_path, Replay(log.header, None).steps(log.messages())))
