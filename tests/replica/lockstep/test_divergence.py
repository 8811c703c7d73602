"""Divergence: whatever is planted on one rank, the job ends at once on all, with exit code 70 and the difference named.

Each plant has its negative control: with digests off, or with the one check off that finds it, it goes unnoticed or
hangs into the timeout.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ranks
from stress_seed import SEED

from spmd_worker.frontends.replay.step_log import read_step_log
from spmd_worker.replica.lockstep.difference import first_difference, record_of
from spmd_worker.replica.lockstep.wire.codec import Decoder
from spmd_worker.replica.lockstep.wire.message import StepMessage

INJECTIONS = Path(__file__).with_name("injected_divergences.py")
LIMIT_S = 240.0
STRESSED = ("seed", "prompt_seed", "dropped_message")
NUM_ROWS = 4

AT_START = {
    "seed": r"different settings: config\.seed is 0 on rank 0, 1 on rank {victim};",
    "config_key": r"config\.scheduler\.max_num_batched_tokens is 2048 on rank 0, 1024 on rank {victim};",
    "weight_byte": r'different weights: model\.norm\.weight is "\w+" on rank 0, "\w+" on rank {victim};',
    "draft_weight_byte": r"different weights of speculative_config\.model: model\.norm\.weight is .* on rank {victim};",
    "tokenizer_file": r'tokenizer is "\w+" on rank 0, "\w+" on rank {victim};',
    "model_shape": r"model\.ropes\[0\]\.rope_theta is 10000\.0 on rank 0, 10001\.0 on rank {victim};",
    "code": r'code is "\w+" on rank 0, "f+" on rank {victim};',
    "package_version": r'packages\.torch is "[^"]+" on rank 0, "2\.0\.1" on rank {victim};',
    "configured_blocks": r"config\.cache\.num_blocks is 64 on rank 0, 63 on rank {victim};",
    "block_count": r"different caches: num_blocks is 64 on rank 0, 63 on rank {victim};",
    "prompt": r"different prompts: prompts\[1\]\.prompt_token_ids\[\d\] is \d+ on rank 0, \d+ on rank {victim};",
    "number_of_prompts": r"number of prompts is 2 on rank 0, 1 on rank {victim};",
    "sampling_parameter": r"prompts\[0\]\.sampling\.top_p is 0\.95 on rank 0, 0\.9 on rank {victim};",
    "prompt_seed": r"prompts\[0\]\.sampling\.seed is 1 on rank 0, 2 on rank {victim};",
}
"""By plant: what rank 0 says. Nothing was computed yet."""

IN_A_STEP = {
    "request_taken_in": r"step 2 .*groups\[2\]\.request\.sampling\.temperature: 0\.8 on rank 0, 0\.5 on rank {victim}$",
    "order_of_a_set": r"step 6 .*\.request_id: \d on rank 0, \d on rank \d$",
    "clock": r"step \d+ .*: \d+ on rank 0, \d+ on rank \d$",
    "block_choice": r"step 6 .*blocks\[0\]\.?\S*: \d+ on rank 0, \d+ on rank 1$",
    "forgotten_prefix": r"step 2 .*rank {victim} diverged .*groups\[1\]\.\S+: \d+ on rank 0, \d+ on rank {victim}",
    "way_out": r"step \d+ .*: block_ops\.swap_out: \d+ entries on rank 0, 0 on rank {victim}$",
    "host_block_choice": r"step \d+ .*: block_ops\.swap_out\[0\]\[1\]: \d+ on rank 0, \d+ on rank {victim}$",
    "sampled_id": r"step 7 .*rank {victim} diverged .*sampled_token_ids\[3\]: \d+ on rank 0, \d+ on rank {victim}$",
}
"""By plant: what rank 0 says of the step that did not run."""

IN_A_MESSAGE = {
    "dropped_message": r"step 7 .*message 6 from rank 0 never reached rank {victim}$",
    "repeated_message": r"step 8 .*message 6 from rank 0 reached rank {victim} twice$",
    "flipped_bit": r"step 7 .*rank {victim} cannot read rank 0's message: checksum does not match",
    "flipped_bit_of_the_frame": r"step 7 .*message 6 from rank 0 never reached rank {victim}$",
}

MASK = r"step 7 .*rank {victim} diverged .*: mask_checksums\[0\]: \d+ on rank 0, \d+ on rank {victim}$"
FORM = {"structured_outputs": {"regex": "[a-e ]{200}"}, "ignore_eos": False}

FOUND_BY_EACH_CHECK = ("config_key", "weight_byte", "block_count", "prompt", "number_of_prompts")
OF_EACH_KIND = ("request_taken_in", "block_choice", "way_out", "sampled_id", "dropped_message", "flipped_bit")
"""Of each check one that it finds, on two ranks. All are in the stress tier, on two ranks and on four."""
ON_FOUR_RANKS = ("prompt", "sampled_id", "dropped_message")
"""Where a check is made of all ranks' answers: at the start, in a step, in a message."""
TOLD_OF_THEIR_KIND = ("seed", "model_shape", "configured_blocks", "sampling_parameter", "prompt_seed")
"""Found as others are that test_tensor_parallel.py has: a setting, a shape, a number of blocks, a row's parameter."""

IN_ANY_STEP = {**IN_A_STEP, **IN_A_MESSAGE}
NUM_MANY = 100
MANY = [(name, num_ranks, 0) for name in (*AT_START, "row_mask") for num_ranks in (2, 4)]
MANY += [(name, num_ranks, 3 * SEED + at) for at in range(3) for num_ranks in (2, 4) for name in IN_ANY_STEP]
"""Plants, on how many ranks, and the job's seed: a hundred."""

HARMLESS_WITHOUT_DIGESTS = sorted({**AT_START, **IN_A_STEP}.keys() - {"number_of_prompts"})
"""A rank with another number of prompts fails by itself, on an answer that it did not ask for."""


@dataclass(frozen=True)
class PlantedJob:
    """How a job ended on each rank, what each rank said, and whether the plant struck."""

    exit_codes: tuple[int, ...]
    stderr: tuple[str, ...]
    rest: str
    has_struck: bool

    @property
    def output(self) -> str:
        """Everything, for a test's failure message."""
        return "\n".join([f"exit codes {self.exit_codes}", *self.stderr, self.rest])


EACH_AT_START = [
    pytest.param(name, marks=[] if name in FOUND_BY_EACH_CHECK else pytest.mark.matrix)
    for name in AT_START
    if name not in TOLD_OF_THEIR_KIND
]
EACH_IN_A_STEP = [pytest.param(name, marks=[] if name in OF_EACH_KIND else pytest.mark.stress) for name in IN_A_STEP]


def _tier_of_control(name: str) -> list[pytest.MarkDecorator]:
    """One found at the start and one in a step are controls enough for everyday, two of each for layouts."""
    if name in (min(AT_START), min(IN_A_STEP)):
        return []
    return [pytest.mark.matrix if name in ("prompt", "sampled_id") else pytest.mark.stress]


EACH_HARMLESS = [pytest.param(name, marks=_tier_of_control(name)) for name in HARMLESS_WITHOUT_DIGESTS]


@pytest.mark.gate("config_key", "block_count", "weight_byte", "code", "prompt")
@pytest.mark.parametrize("name", EACH_AT_START)
def test_divergence_at_start_is_named_before_any_computation(tmp_path, name):
    check_start(run(name, tmp_path), tmp_path, AT_START[name])


@pytest.mark.gate("sampled_id", "block_choice")
@pytest.mark.guarantee("Ranks agree before each step; a difference is named, exit 70")
@pytest.mark.parametrize("name", EACH_IN_A_STEP)
def test_divergence_in_step_ends_all_ranks_with_70(tmp_path, name):
    """The first field that differs is named."""
    check_step(run(name, tmp_path), tmp_path, IN_A_STEP[name])
    check_records_show_what_was_named(tmp_path, 2)


@pytest.mark.gate("dropped_message", "flipped_bit")
@pytest.mark.parametrize("name", IN_A_MESSAGE)
def test_divergence_by_lost_message_ends_ranks_with_70(tmp_path, name):
    """A damaged message ends them too."""
    check_step(run(name, tmp_path), tmp_path, IN_A_MESSAGE[name])


@pytest.mark.stress
@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "dropped_message" else pytest.mark.stress) for name in ON_FOUR_RANKS],
)
def test_divergence_is_named_on_four_ranks(tmp_path, name):
    job = run(name, tmp_path, num_ranks=4)
    if name in AT_START:
        check_start(job, tmp_path, AT_START[name])
    else:
        check_step(job, tmp_path, IN_ANY_STEP[name])


@pytest.mark.stress
@pytest.mark.parametrize("number", range(NUM_MANY))
def test_hundred_injected_divergences_are_named(tmp_path, number):
    """Each plant on two and on four ranks; those of a step three times, with other seeds, and so other answers."""
    name, num_ranks, seed = MANY[number]
    if name in AT_START:
        check_start(run(name, tmp_path, num_ranks=num_ranks), tmp_path, AT_START[name])
    elif name == "row_mask":
        check_step(run(name, tmp_path, num_ranks=num_ranks, asked=FORM), tmp_path, MASK)
    else:
        check_step(run(name, tmp_path, f"seed={seed}", num_ranks=num_ranks), tmp_path, IN_ANY_STEP[name])


@pytest.mark.matrix
def test_differing_mask_is_named_when_samples_agree(tmp_path):
    check_step(run("row_mask", tmp_path, asked=FORM), tmp_path, MASK)
    check_records_show_what_was_named(tmp_path, 2)


# Negative controls.


@pytest.mark.stress
def test_differing_mask_goes_unnoticed_without_mask_checksums(tmp_path):
    job = run("row_mask_without_checksums", tmp_path, asked=FORM)
    assert job.has_struck
    assert job.exit_codes == (0, 0), job.output
    assert not list(tmp_path.rglob("records.*"))


def test_different_hash_seeds_show_no_divergence(tmp_path):
    job = run("nothing", tmp_path)
    assert job.exit_codes == (0, 0), job.output
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == NUM_ROWS


@pytest.mark.gate("sampled_id")
@pytest.mark.control("Ranks agree before each step; a difference is named, exit 70")
@pytest.mark.control("Ranks that began with other settings, weights, prompts are told")
@pytest.mark.parametrize("name", EACH_HARMLESS)
def test_divergence_goes_unnoticed_without_digests(tmp_path, name):
    job = run(name, tmp_path, "executor.digest_every=0")
    assert job.exit_codes == (0, 0), job.output
    assert not list(tmp_path.rglob("records.*"))


@pytest.mark.stress
def test_dropped_message_hangs_until_timeout_when_unnumbered(tmp_path):
    job = run("dropped_message_unnumbered", tmp_path, "executor.timeout_s=10")
    assert job.exit_codes == (1, 1), job.output
    # What rank 1 waits for, or what both do, who reach the limit at the same time.
    found = r"error: (rank 0 is silent: no message in 10 s|ranks? [01, ]+ (is|are) waiting for another rank)"
    assert re.search(found, job.stderr[0]), job.output


@pytest.mark.stress
def test_repeated_message_is_detected_by_codec_when_unnumbered(tmp_path):
    job = run("repeated_message_unnumbered", tmp_path)
    check_step(job, tmp_path, r"rank 1 cannot read rank 0's message: message of step 7 where 8 comes next")


@pytest.mark.stress
def test_flipped_bit_goes_unnoticed_without_checksum(tmp_path):
    job = run("flipped_bit_unchecked", tmp_path)
    assert job.has_struck
    assert job.exit_codes == (0, 0), job.output


# Other shapes of the same.


def test_divergence_between_comparisons_is_found_by_next_one(tmp_path):
    job = run("sampled_id", tmp_path, "executor.digest_every=4")
    expected = r"step 8 did not run \(last agreed step 4\): rank 1 diverged from rank 0: this step is equal; an earlier"
    check_step(job, tmp_path, expected)


def test_job_runs_over_gloo_when_rank_cannot_connect(tmp_path):
    job = run("refused_connection", tmp_path)
    assert job.exit_codes == (0, 0), job.output
    assert "step messages go over gloo, which is slower: rank 1 cannot reach 127.0.0.1:" in job.stderr[0]
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == NUM_ROWS


@pytest.mark.stress
def test_divergence_is_named_over_gloo(tmp_path):
    check_step(run("refused_connection_and_sampled_id", tmp_path), tmp_path, IN_A_STEP["sampled_id"])
    check_records_show_what_was_named(tmp_path, 2)


@pytest.mark.stress
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_job_with_relays_has_the_same_output(tmp_path, num_ranks):
    outputs = []
    for name in ("nothing", "relays"):
        folder = tmp_path / name
        folder.mkdir()
        job = run(name, folder, num_ranks=num_ranks)
        assert job.exit_codes == (0,) * num_ranks, job.output
        assert job.has_struck == (name == "relays")
        outputs.append((folder / "out.jsonl").read_bytes())
    assert outputs[0] == outputs[1]


@pytest.mark.stress
def test_divergence_is_named_through_relays(tmp_path):
    job = run("relayed_sampled_id", tmp_path, num_ranks=4)
    check_step(job, tmp_path, IN_A_STEP["sampled_id"])


@pytest.mark.stress
def test_killed_relay_is_named_by_rank_0(tmp_path):
    job = run("killed_relay", tmp_path, num_ranks=4)
    assert job.has_struck
    assert job.exit_codes[2] == -9
    assert all(code not in (0, None) for code in job.exit_codes), job.output
    assert "rank 2 is gone" in job.stderr[0], job.output


def test_divergence_under_torchrun_lets_ranks_exit_70(tmp_path):
    """A rank that waits in a collective learns why only when its peer leaves, and is sent SIGTERM at that moment."""
    check_torchrun("dropped_message", tmp_path, 2)


@pytest.mark.stress
@pytest.mark.parametrize("name", ["sampled_id", "seed", "prompt_seed", "dropped_message"])
def test_divergence_under_torchrun_lets_four_ranks_exit_70(tmp_path, name):
    check_torchrun(name, tmp_path, 4)


@pytest.mark.stress
@pytest.mark.matrix
def test_rank_hanging_in_collective_ends_after_launchers_signal():
    """No handler of Python's runs while native code waits; without a reason to report it leaves with the signal's."""
    source = """
        import os, sys, time
        import torch, torch.distributed as dist
        from spmd_worker.base.liveness.signals import EndingSignals
        rank, pids = int(os.environ["RANK"]), [0, 0, 0]
        dist.init_process_group("gloo")
        hanging = dist.new_group([0, 2])
        dist.all_gather_object(pids, os.getpid())

        def stay(number):
            # Rank 2's end would close rank 0's connection, which then raises.
            while rank == 2 and is_running(pids[0]):
                time.sleep(0.02)

        def is_running(pid):
            try:
                return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
            except OSError:
                return False

        EndingSignals(lambda: None, stay, 0.5).install()
        dist.barrier()
        if rank == 1:
            time.sleep(1)
            os._exit(3)
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=hanging)
        time.sleep(600)
    """
    done = ranks.run_ranks(source, 3, 240.0, under_torchrun=True)
    assert sorted(re.findall(r"exitcode +: (\S+) ", done.stderr)) == ["143", "143", "3"], done.output


# Helpers.


def run(
    name: str, folder: Path, *arguments: str, num_ranks: int = 2, asked: Mapping[str, Any] | None = None
) -> PlantedJob:
    """The ranks' hash seeds differ, as those of a launcher's ranks do. `asked`: what the rows ask for besides."""
    write_rows(folder, asked or {})
    done = ranks.run_forked([INJECTIONS, name, folder, *arguments], num_ranks, LIMIT_S, hash_seeds=True)
    stderr = tuple((folder / f"stderr.rank{rank}").read_text(errors="replace") for rank in range(num_ranks))
    return PlantedJob(done.exit_codes, stderr, done.output, bool(list(folder.glob("struck.rank*"))))


def write_rows(folder: Path, asked: Mapping[str, Any]) -> None:
    """One greedy row and three sampled ones, which all decode together."""
    plain = {"max_tokens": 12, "ignore_eos": True}
    rows = [
        {"prompt": f"copy {'a b c d e'[: 2 * index + 3]} =", **plain, "temperature": 0.8 if index else 0, **asked}
        for index in range(NUM_ROWS)
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def check_start(job: PlantedJob, folder: Path, expected: str) -> None:
    check_end(job, expected)
    assert not (folder / "out.jsonl").exists() or not (folder / "out.jsonl").read_text()


def check_step(job: PlantedJob, folder: Path, expected: str) -> None:
    check_end(job, expected)
    assert job.has_struck
    step, last_agreed = map(
        int, re.search(r"step (\d+) did not run \(last agreed step (\d+)\)", job.stderr[0]).groups()
    )
    assert last_agreed < step
    for rank in range(len(job.exit_codes)):
        assert records_of(folder, rank)[-1].step == step, rank


def check_end(job: PlantedJob, expected: str) -> None:
    """Everybody left with 70, and nobody because of a timeout; rank 0 said why, and rank 0 alone."""
    num_ranks = len(job.exit_codes)
    assert job.exit_codes == (70,) * num_ranks, job.output
    assert re.search(expected.replace("{victim}", str(num_ranks - 1)), job.stderr[0], re.MULTILINE), job.output
    assert not any("error" in text for text in job.stderr[1:]), job.output
    assert "Traceback" not in job.output


def check_records_show_what_was_named(folder: Path, num_ranks: int) -> None:
    """The files tell the same story as the terminal, to whoever comes later."""
    mine, theirs = (record_of(records_of(folder, rank)[-1]) for rank in (0, num_ranks - 1))
    difference = first_difference(mine, theirs, 0, num_ranks - 1)
    assert difference is not None
    assert difference in (folder / "stderr.rank0").read_text()


def records_of(folder: Path, rank: int) -> list[StepMessage]:
    """A rank's last records, up to 64 of them, in order."""
    log = read_step_log(folder / "run" / f"records.rank{rank}.log")
    assert log.torn_tail is None
    decoder = Decoder()
    messages = [decoder.decode(payload) for payload in log.messages()]
    steps = [message.step for message in messages]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert len(steps) == min(steps[-1], 64)
    return messages


def check_torchrun(name: str, folder: Path, num_ranks: int) -> None:
    write_rows(folder, {})
    source = """
        import os, sys
        from pathlib import Path
        import injected_divergences
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        exit_code = injected_divergences.run(sys.argv[1], rank, num_ranks, Path(sys.argv[2]), [])
        # At once, as launch.py leaves: a SIGTERM while the interpreter is taken down would be the end of it.
        sys.stderr.flush()
        os._exit(exit_code)
    """
    path = os.pathsep.join(map(str, (INJECTIONS.parent, *ranks.IMPORT_PATH)))
    done = ranks.run_ranks(source, num_ranks, 240.0, [name, folder], env={"PYTHONPATH": path}, under_torchrun=True)
    assert done.returncode == 1, done.output
    assert len(re.findall(r"exitcode +: 70 ", done.stderr)) == num_ranks, done.output
    assert "exitcode  : -15" not in done.stderr, done.output
    assert len(re.findall(r"^(error: )?(ranks were given|step \d+ did)", done.stderr, re.MULTILINE)) == 1, done.output
