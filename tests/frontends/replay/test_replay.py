"""A step log replays in one process with equal digests, and differences are reported."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logged_run import (
    HEADER,
    PRESSURE,
    LoggedRun,
    fake_token_id,
    is_aborted,
    pressure_events,
    replay_all,
    request,
    rewrite,
    standard_events,
    write_log,
    write_pressure_log,
)
from property_examples import examples

from kv_cache.block import BlockId
from spmd_worker.base.errors import ReplayDivergedError, ReplayError
from spmd_worker.frontends.replay.replay import (
    Replay,
    find_request,
    first_log_difference,
    read_messages,
)
from spmd_worker.frontends.replay.step_log import read_step_log
from spmd_worker.replica.lockstep.wire.codec import Decoder, Encoder
from spmd_worker.replica.lockstep.wire.message import StepMessage
from spmd_worker.replica.scheduler import step_order
from spmd_worker.replica.sequence.events import (
    Abort,
    Admit,
    EndWorkerEvent,
    FinishTransfers,
    PauseGeneration,
    ResetPrefixCache,
    ResumeGeneration,
    SetWeightVersion,
    WorkerEvent,
)
from spmd_worker.replica.sequence.metadata import SequenceData, SequenceGroupMetadataDelta
from spmd_worker.replica.sequence.request import Request, RequestId, random_stream
from spmd_worker.replica.sequence.sampled import sampling_keys
from spmd_worker.replica.sequence.step import StepPlan


@pytest.mark.guarantee("The step log replays to the same digests")
def test_run_replays_with_equal_digests(tmp_path: Path):
    """The run has preemptions, forks and aborts."""
    run = write_log(tmp_path / "log")
    assert run.scheduler.counters.num_preemptions > 3
    assert [group.request.request_id for group in run.ended if is_aborted(group)] == [5, 9]
    assert any(len(group.sequences) == 3 for group in run.ended)
    replay = replay_all(tmp_path / "log")
    assert (replay.num_steps, replay.num_equal_digests) == (len(run.plans), len(run.plans))
    assert (replay.num_requests, replay.is_closed) == (10, True)
    assert replay.scheduler.counters == run.scheduler.counters
    assert not replay.scheduler.has_unfinished


@pytest.mark.parametrize("in_flight", [{}, {"pipeline_parallel_size": 3}, {"num_steps_ahead": 1}], ids=str)
def test_paused_run_replays_with_its_spans(in_flight: dict[str, int], tmp_path: Path):
    events = pressure_events()
    events |= {8: [PauseGeneration("keep", True)], 10: [SetWeightVersion(9)], 11: [ResumeGeneration()]}
    events |= {20: [PauseGeneration("wait", False)], 60: [PauseGeneration("keep", False), SetWeightVersion(-2)]}
    run = write_log(tmp_path / "log", {**events, 63: [ResumeGeneration()]}, **PRESSURE, **in_flight)
    log = read_step_log(tmp_path / "log")
    ended = [group for step in Replay(log.header, None).steps(log.messages()) for group in step.ended]
    spans = [[each.weight_spans for each in group.sequences] for group in ended]
    assert spans == [[each.weight_spans for each in group.sequences] for group in run.ended]
    assert max(len(each) for group in spans for each in group) > 1
    assert replay_all(tmp_path / "log").num_equal_digests == len(run.plans)


def test_caching_and_swapping_run_replays_with_equal_digests(tmp_path: Path):
    run = write_pressure_log(tmp_path / "log")
    replay = replay_all(tmp_path / "log")
    assert (replay.num_steps, replay.num_equal_digests) == (len(run.plans), len(run.plans))
    assert replay.scheduler.counters == run.scheduler.counters
    assert not replay.scheduler.has_unfinished
    # The run holds what this is about.
    counters, events = run.scheduler.counters, [event for step in pressure_events().values() for event in step]
    assert counters.num_preemptions > counters.num_swapped_out > 5
    assert min(counters.num_swapped_in, counters.num_recomputed_tokens, counters.num_cached_prompt_tokens) > 0
    for kind in ("swap_out", "swap_in", "copy", "store", "load"):
        assert any(getattr(plan.block_ops, kind) for plan in run.plans), f"no {kind}"
    assert [type(event) for event in events if not isinstance(event, Admit)] == [ResetPrefixCache, SetWeightVersion]
    assert [state.value for _, state in run.aborted] == ["swapped", "loading", "preempted", "running"]
    assert sorted(group.request.request_id for group in run.ended if is_aborted(group)) == sorted(
        request_id for request_id, _ in run.aborted
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"preemption_mode": "recompute"}, r"block_ops\.swap_out: \d+ entries in the log, 0 in the replay"),
        ({"preemption_mode": "swap"}, r"block_ops\.swap_out: 0 entries in the log, \d+ in the replay"),
        ({"block_copy_tokens": 9.0}, r"block_ops\.swap_out: \d+ entries in the log, 0 in the replay"),
        ({"num_host_blocks": 0}, r"block_ops\.swap_out: \d+ entries in the log, 0 in the replay"),
        ({"num_host_blocks": 7}, r"block_ops\.swap_out"),
        ({"num_tier_blocks": 0}, r"block_ops\.store: \d+ entries in the log, 0 in the replay"),
        ({"num_tier_blocks": 6}, r"block_ops\.store"),
        ({"enable_prefix_caching": False}, r"groups"),
        ({"watermark_blocks_per_sequence": 1}, r"groups"),
    ],
    ids=str,
)
def test_replay_with_another_policy_diverges_and_names_field(tmp_path: Path, changes, field):
    """Negative control of the test before: every key of the header that says how a full cache is dealt with counts."""
    write_pressure_log(tmp_path / "log")
    log = read_step_log(tmp_path / "log")
    replay = Replay(replace(log.header, **changes), tokenizer=None)
    with pytest.raises(ReplayDivergedError, match=rf"^step \d+: {field}"):
        list(replay.steps(log.messages()))
    assert replay.num_steps > 0


@pytest.mark.parametrize(
    "depth", [{"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 3}, {"num_steps_ahead": 1}], ids=str
)
@pytest.mark.parametrize("write", [write_log, write_pressure_log])
def test_run_replays_with_its_own_steps_in_flight(tmp_path: Path, write, depth: dict[str, int]):
    run = write(tmp_path / "log", **depth)
    log = read_step_log(tmp_path / "log")
    replay = Replay(log.header, None)
    steps = list(replay.steps(log.messages()))
    assert replay.is_closed
    assert replay.num_equal_digests == replay.num_steps == len(run.plans)
    assert [step.plan for step in steps] == run.plans
    assert replay.scheduler.counters == run.scheduler.counters
    assert run.scheduler.counters.num_preemptions > 0
    # Negative control: taking what was sampled in at once leads elsewhere.
    at_once = replace(log.header, pipeline_parallel_size=1, num_steps_ahead=0)
    with pytest.raises(ReplayError):
        list(Replay(at_once, None).steps(log.messages()))


@pytest.mark.parametrize("num_stages", [1, 3])
def test_worker_events_replay_with_no_step_in_flight(tmp_path: Path, num_stages: int, monkeypatch: pytest.MonkeyPatch):
    workers = {8: [WorkerEvent(1, "sleep", b"")], 10: [EndWorkerEvent(1, "")], 20: [WorkerEvent(2, "wake", b"")]}
    events = {step: [*standard_events().get(step, ()), *workers.get(step, ())] for step in range(1, 21)}
    run = write_log(tmp_path / "log", events, pipeline_parallel_size=num_stages)
    replay = replay_all(tmp_path / "log")
    assert replay.num_equal_digests == replay.num_steps == len(run.plans)
    # Negative control: a replay that keeps steps in flight there leads elsewhere.
    monkeypatch.setattr(step_order, "concern_workers", lambda events: False)
    with pytest.raises(ReplayError) if num_stages > 1 else nullcontext():
        replay_all(tmp_path / "log")


def test_pipeline_messages_are_coded_against_their_ids_step(tmp_path: Path):
    write_log(tmp_path / "log", pipeline_parallel_size=2)
    log = read_step_log(tmp_path / "log")
    payloads = list(log.messages())
    messages = list(read_messages(payloads, 2))
    # Negative control: against the step before, which sampled for others.
    encoder = Encoder()
    against_the_last = [encoder.encode(message) for message in messages]
    assert sum(map(len, payloads)) < sum(map(len, against_the_last))
    assert list(read_messages(against_the_last)) == messages


def test_replay_detects_dropped_cache_event(tmp_path: Path):
    write_pressure_log(tmp_path / "log")
    for number, kind in enumerate((ResetPrefixCache, SetWeightVersion, FinishTransfers)):

        def drop(message: StepMessage, kind: type = kind) -> StepMessage:
            return replace(message, events=tuple(event for event in message.events if not isinstance(event, kind)))

        path = rewrite(tmp_path / "log", tmp_path / f"{number}", drop)
        with pytest.raises(ReplayDivergedError, match=r"^step \d+: "):
            replay_all(path)


def test_replay_steps_equal_the_runs_own(tmp_path: Path):
    run = write_log(tmp_path / "log")
    log = read_step_log(tmp_path / "log")
    steps = list(Replay(log.header, None).steps(log.messages()))
    assert [step.plan for step in steps] == run.plans
    assert next(step.events for step in steps if step.events) == tuple(standard_events()[1])
    ended = [group for step in steps for group in step.ended]
    assert [group.request for group in ended] == [group.request for group in run.ended]
    outputs = [[sequence.output_token_ids for sequence in group.sequences] for group in ended]
    assert outputs == [[sequence.output_token_ids for sequence in group.sequences] for group in run.ended]


@examples(100)
@given(
    limits=st.fixed_dictionaries(
        {
            "num_blocks": st.integers(16, 30),
            "max_num_seqs": st.integers(3, 9),
            # Without chunks a recomputed sequence must fit into one step.
            "max_num_batched_tokens": st.just(64),
            "enable_chunked_prefill": st.booleans(),
            "watermark_blocks_per_sequence": st.integers(0, 2),
            "num_host_blocks": st.sampled_from([0, 1, 6, 30]),
            "num_tier_blocks": st.sampled_from([0, 1, 5, 40]),
            "enable_prefix_caching": st.booleans(),
            "preemption_mode": st.sampled_from(["recompute", "swap", "auto"]),
            "block_copy_tokens": st.sampled_from([0.0, 3.7]),
            "num_steps_ahead": st.sampled_from([0, 1]),
        }
    ),
    rows=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 25), st.integers(1, 3), st.integers(1, 12)), min_size=1, max_size=8
    ),
    aborts=st.dictionaries(st.integers(2, 30), st.integers(0, 7), max_size=3),
)
def test_any_run_replays(tmp_path_factory: pytest.TempPathFactory, limits, rows, aborts):
    path = tmp_path_factory.mktemp("any") / "log"
    events: dict[int, list] = {}
    number = 0
    for step in sorted({row[3] for row in rows}):
        for num_prompt_tokens, max_tokens, n, arrival in rows:
            if arrival == step:
                head = tuple(range(1, 13)) if number % 2 and num_prompt_tokens > 12 else ()
                admit = Admit(request(number, num_prompt_tokens, head=head, max_tokens=max_tokens, n=n))
                events.setdefault(step, []).append(admit)
                number += 1
    for step, request_id in aborts.items():
        events.setdefault(step, []).append(Abort(RequestId(request_id)))
    run = write_log(path, events, **limits)
    replay = replay_all(path)
    assert (replay.num_steps, replay.num_equal_digests) == (len(run.plans), len(run.plans))
    assert replay.scheduler.counters == run.scheduler.counters


def test_run_without_digests_replays_by_its_plans(tmp_path: Path):
    run = write_log(tmp_path / "log", has_digests=False)
    replay = replay_all(tmp_path / "log")
    assert (replay.num_steps, replay.num_equal_digests) == (len(run.plans), 0)


def test_log_cut_at_any_message_replays_so_far(tmp_path: Path):
    run = write_log(tmp_path / "log")
    log = read_step_log(tmp_path / "log")
    payloads = list(log.messages())
    for count in (0, 1, 2, 17, len(payloads) - 1):
        replay = Replay(log.header, None)
        steps = list(replay.steps(payloads[:count]))
        assert (replay.num_steps, replay.num_equal_digests, replay.is_closed) == (count, count, False)
        assert [step.plan for step in steps] == run.plans[:count]
        if count == 17:
            assert [step.sampled is None for step in steps] == [False] * 16 + [True]
            assert steps[-1].ended == ()


def plant_other_block(plan: StepPlan) -> StepPlan:
    """The first row that takes a block takes another one."""
    (place, block_id), *others = plan.continuing_blocks
    return replace(plan, continuing_blocks=((place, BlockId((block_id + 1) % HEADER.num_blocks)), *others))


def test_differing_plan_is_named_by_step_and_field(tmp_path: Path):
    """Both values are in the message."""
    clean = write_log(tmp_path / "clean")
    step = next(plan.step for plan in clean.plans[10:] if plan.continuing_blocks)
    write_log(tmp_path / "log", plants={step: plant_other_block})
    words = rf"^step {step}: continuing_blocks\[0\]\[1\]: \d+ in the log, \d+ in the replay$"
    with pytest.raises(ReplayDivergedError, match=words):
        replay_all(tmp_path / "log")


def test_replay_detects_another_order_of_groups(tmp_path: Path):
    def turn_round(plan: StepPlan) -> StepPlan:
        return replace(plan, groups=plan.groups[::-1])

    write_log(tmp_path / "log", plants={2: turn_round})
    with pytest.raises(ReplayDivergedError, match=r"step 2: groups\[0\]"):
        replay_all(tmp_path / "log")


@pytest.mark.control("The step log replays to the same digests")
def test_replay_detects_dropped_event_changed_id_wrong_digest(tmp_path: Path):
    write_log(tmp_path / "log")

    def drop_abort(message: StepMessage) -> StepMessage:
        return replace(message, events=tuple(event for event in message.events if not isinstance(event, Abort)))

    def change_id(message: StepMessage) -> StepMessage:
        if message.step != 7:
            return message
        return replace(message, sampled_token_ids=(message.sampled_token_ids[0] ^ 1, *message.sampled_token_ids[1:]))

    def change_digest(message: StepMessage) -> StepMessage:
        return replace(message, digest=bytes(16)) if message.step == 7 else message

    with pytest.raises(ReplayDivergedError, match="step 10: "):
        replay_all(rewrite(tmp_path / "log", tmp_path / "a", drop_abort))
    with pytest.raises(ReplayDivergedError, match=r"step 7: (continuing|appended)_token_ids"):
        replay_all(rewrite(tmp_path / "log", tmp_path / "b", change_id))
    with pytest.raises(ReplayDivergedError, match=r"step 7: .*plans .*digests .*0000"):
        replay_all(rewrite(tmp_path / "log", tmp_path / "c", change_digest))


def test_missing_ids_are_reported_before_scheduling(tmp_path: Path):
    write_log(tmp_path / "log")

    def lose_one(message: StepMessage) -> StepMessage:
        return replace(message, sampled_token_ids=message.sampled_token_ids[:-1]) if message.step == 9 else message

    with pytest.raises(ReplayDivergedError, match=r"step 8 samples \d .*log .*\d"):
        replay_all(rewrite(tmp_path / "log", tmp_path / "short", lose_one))


def test_missing_message_is_error_and_not_divergence(tmp_path: Path):
    write_log(tmp_path / "log")
    log = read_step_log(tmp_path / "log")
    payloads = list(log.messages())
    with pytest.raises(ReplayError, match=r"message 6 .*: .*where 6 comes"):
        list(Replay(log.header, None).steps(payloads[:5] + payloads[6:]))


def test_log_beginning_late_cannot_be_replayed(tmp_path: Path):
    write_log(tmp_path / "log")
    late = rewrite(tmp_path / "log", tmp_path / "late", lambda message: message if message.step >= 20 else None)
    with pytest.raises(ReplayError, match=r"log begins .*step 20\b"):
        replay_all(late)


def test_stop_strings_are_found_only_with_the_tokenizer(tmp_path: Path):
    class Letters:
        """A tokenizer's decoder: every id is a letter."""

        def append(self, token_ids: list[int]) -> str:
            return "".join(chr(ord("a") + token_id % 26) for token_id in token_ids)

        def held(self) -> str:
            return ""

        def flush(self) -> str:
            return ""

    stopping = Admit(request(0, 4, stop=("a", "b", "c", "d", "e"), max_tokens=40))
    run = LoggedRun(tmp_path / "log", new_decoder=lambda sequence: Letters())
    run.step(stopping)
    while run.scheduler.has_unfinished:
        run.step()
    run.close()
    assert isinstance(run.ended[0].sequences[0].stop_reason, str)
    log = read_step_log(tmp_path / "log")
    with pytest.raises(ReplayError, match=r"request 0 .*stop strings \['a', .*tokenizer\.json"):
        list(Replay(log.header, None).steps(log.messages()))


@pytest.mark.parametrize("changes", [{}, {"pipeline_parallel_size": 2}, PRESSURE], ids=("one", "pipeline", "pressure"))
def test_run_with_uneven_id_counts_is_replayed(tmp_path: Path, changes: dict[str, object]):
    run = write_log(tmp_path / "log", nums_of_ids=(0, 1, 1, 3), **changes)
    nums = [num_ids for plan in run.plans for num_ids in plan.continuing_num_ids]
    assert min(nums.count(num_ids) for num_ids in (0, 1, 3)) > 10
    log = read_step_log(tmp_path / "log")
    replay = Replay(log.header, None)
    ended = [group for step in replay.steps(log.messages()) for group in step.ended]
    assert replay.num_equal_digests == replay.num_steps == len(run.plans)
    assert [[each.output_token_ids for each in group.sequences] for group in ended] == [
        [each.output_token_ids for each in group.sequences] for group in run.ended
    ]
    # A sequence's ids are those of its positions, whatever the number that came in a step, so each is where it belongs.
    for group in ended:
        for each in group.sequences:
            first = len(group.request.prompt_token_ids)
            request_id, sample_index = each.key
            expected = [fake_token_id(request_id, sample_index, first + at) for at in range(len(each.output_token_ids))]
            assert each.output_token_ids == expected


def test_logs_with_other_id_counts_differ_by_sequence(tmp_path: Path):
    for name, nums_of_ids in (("A", (1,)), ("B", (1, 1, 1, 3))):
        write_log(tmp_path / name, nums_of_ids=nums_of_ids)
    found = first_log_difference(read_step_log(tmp_path / "A"), read_step_log(tmp_path / "B"), ("A", "B"))
    assert re.fullmatch(r"step \d+ sampled for request \d+, sample \d+: (\d+) in A, \1, \d+, \d+ in B", found)


def test_sampled_positions_follow_the_order_of_ids(tmp_path: Path):
    run = write_log(tmp_path / "log")
    log = read_step_log(tmp_path / "log")
    found: dict[tuple[int, int], dict[int, int]] = {}
    for step in Replay(log.header, None).steps(log.messages()):
        assert [position[:2] for position in step.positions] == list(sampling_keys(step.plan))
        for position, token_id in zip(step.positions, step.sampled.token_ids, strict=True):
            found.setdefault(position[:2], {})[position.position] = token_id
    for group in run.ended:
        for sequence in group.sequences:
            num_prompt_tokens = len(group.request.prompt_token_ids)
            expected = dict(enumerate(sequence.output_token_ids, start=num_prompt_tokens))
            own = found.get(sequence.key, {})
            assert {position: own[position] for position in expected} == expected


def test_request_is_found_by_number_name_or_index(tmp_path: Path):
    unnamed = Request(RequestId(2), (5,), request(0, 1).sampling, random_stream(HEADER.seed, None, None, 40))
    write_log(tmp_path / "log", {1: [Admit(request(0, 3)), Admit(request(1, 3, seed=5)), Admit(unnamed)]})
    log = read_step_log(tmp_path / "log")

    def found(key: str) -> int | None:
        result = find_request(read_messages(log.messages()), key, log.header.seed)
        return None if result is None else result.request_id

    assert [found(key) for key in ("0", "1", "row-0", "id:row-0", "index:40")] == [0, 1, 0, 0, 2]
    # Row 1 has a seed of its own: its stream says nothing of its name.
    assert [found(key) for key in ("row-1", "9", "index:0", "nobody")] == [None] * 4


def test_logged_messages_encode_to_the_same_bytes(tmp_path: Path):
    """The log has a step's message as sent: decoding and encoding it gives the same bytes."""
    write_log(tmp_path / "log")
    decoder, encoder = Decoder(), Encoder()
    for payload in read_step_log(tmp_path / "log").messages():
        assert encoder.encode(decoder.decode(payload)) == payload


def test_logged_runs_reach_the_tested_states(tmp_path: Path):
    run = write_log(tmp_path / "log")
    rows = [data for plan in run.plans for group in plan.groups for data in group.sequences]
    assert any(isinstance(data, SequenceData) and data.output_token_ids for data in rows), "nobody was recomputed"
    assert any(
        isinstance(group, SequenceGroupMetadataDelta) and len(group.sequences) > 1
        for g in run.plans
        for group in g.groups
    )
    assert any(plan.block_ops.copy for plan in run.plans), "nothing was copied on write"
