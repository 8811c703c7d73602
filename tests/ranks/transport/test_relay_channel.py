"""Relays between rank 0 and many ranks: what passes, and who is named when somebody is silent, gone or different."""

import re
import select
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import pytest
from context_fixtures import fixture_of
from star_channels import LONG_S, star, tree

from spmd_worker.base.errors import AbortedError, LostMessageError, RankFailedError, ReplicaDivergedError
from spmd_worker.ranks.transport import abort_messages, relay_channel, step_channel
from spmd_worker.ranks.transport.frames import FrameKind, send_frame
from spmd_worker.replica.lockstep.lockstep import Lockstep, StepReport
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.step import StepPlan

# Ranks 0 to 8 in groups of three: 3 is the relay of 4 and 5, and 6 of 7 and 8.
SIZE, GROUP = 9, 3

pool = fixture_of(lambda: ThreadPoolExecutor(SIZE), "function")


def follow(channel, messages: list[bytes]) -> list[bytes] | BaseException:
    """Answer and receive step after step, as lockstep does; the reason, where that ends early."""
    received = []
    try:
        for step in range(len(messages)):
            channel.answer(step, bytes([channel.rank]))
            received.append(channel.receive())
    except (AbortedError, RankFailedError, LostMessageError) as error:
        return error
    return received


def errors_of(pool, channels, answering: tuple[int, ...] = (), after: Event | None = None) -> dict[int, str]:
    """What the followers raise in a step; rank 0's error is passed on as lockstep does. Rank 0 collects once answers of
    `answering`, its children, lie there, and `after` an event: its time limit is theirs too.
    """
    futures = {channel.rank: pool.submit(follow, channel, [b""]) for channel in channels[1:]}
    leader = channels[0]
    for rank in answering:
        assert select.select([leader._connections[rank - 1]], [], [], LONG_S)[0]
    assert after is None or after.wait(LONG_S)
    try:
        leader.collect(0)
        leader.send(b"message")
    except (AbortedError, RankFailedError) as error:
        leader.abort(str(error), is_divergence=False)
        own = str(error)
    return {0: own} | {rank: str(future.result(LONG_S)) for rank, future in futures.items()}


def test_relayed_bytes_are_those_of_the_star(pool):
    messages = [b"", b"step", bytes(range(256)) * 4000]

    def run(channels) -> tuple[list[list[bytes]], list[list[bytes]]]:
        futures = [pool.submit(follow, channel, messages) for channel in channels[1:]]
        answers = []
        for step, message in enumerate(messages):
            answers.append(channels[0].collect(step))
            channels[0].send(message)
        return answers, [future.result(LONG_S) for future in futures]

    with tree(SIZE, GROUP) as channels:
        relayed = run(channels)
    with star(SIZE - 1) as (leader, followers):
        assert run([leader, *followers]) == relayed
    assert relayed == ([[bytes([rank]) for rank in range(1, SIZE)]] * 3, [messages] * 8)


def test_rank_0_sends_to_its_children_alone(monkeypatch):
    sent, send_one = [], step_channel.send_frame

    def sending(connection, kind, *frame: object) -> None:
        sent.append(kind)
        send_one(connection, kind, *frame)

    monkeypatch.setattr(step_channel, "send_frame", sending)
    with tree(SIZE, GROUP) as channels:
        channels[0].send(b"step")
        assert sent.count(FrameKind.MESSAGE) == 4


# Divergence.


def agreed(channel, token_id: int) -> BaseException | int:
    lockstep = Lockstep(channel, digest_every=1)
    try:
        return lockstep.agree(StepPlan(1), StepReport(SampledIds((token_id,)))).plan.step
    except Exception as error:
        return lockstep.diagnose(error)


def test_divergence_at_leaf_names_rank_and_field(pool):
    with tree(SIZE, GROUP) as channels:
        outcomes = list(pool.map(agreed, channels, [5, 5, 5, 5, 5, 6, 5, 5, 5]))
    assert [type(each) for each in outcomes] == [ReplicaDivergedError] * SIZE
    (said,) = {str(each) for each in outcomes}
    assert said == (
        "step 1 did not run (last agreed step 0): rank 5 diverged from rank 0: "
        "sampled_token_ids[0]: 5 on rank 0, 6 on rank 5"
    )


def test_equal_replicas_agree_through_relays(pool):
    """Negative control."""
    with tree(SIZE, GROUP) as channels:
        assert list(pool.map(agreed, channels, [5] * SIZE)) == [1] * SIZE


def test_divergence_at_relay_and_leaves_names_all(pool):
    with tree(SIZE, GROUP) as channels:
        outcomes = list(pool.map(agreed, channels, [5, 5, 5, 7, 5, 5, 5, 7, 7]))
    (said,) = {str(each) for each in outcomes}
    assert "ranks 3, 7, 8 diverged from rank 0: sampled_token_ids[0]: 5 on rank 0, 7 on rank 3" in said


# Gone and silent.


@pytest.fixture
def patient(monkeypatch):
    """Rank 0 hears the two ranks that are there, however late a busy machine runs them, and waits no longer."""
    silent = relay_channel.TreeLeader._silent

    def silent_but_two(leader, ranks: list[int]) -> list[int]:
        epoll, num_replies = leader._poll, 0

        def poll(timeout_s: float) -> list[tuple[int, int]]:
            nonlocal num_replies
            ready = epoll.poll(timeout_s) if num_replies < 2 else []
            num_replies += len(ready)
            return ready

        leader._poll = SimpleNamespace(poll=poll, close=epoll.close)
        return silent(leader, ranks)

    monkeypatch.setattr(relay_channel.TreeLeader, "_silent", silent_but_two)
    monkeypatch.setattr(relay_channel, "_REPLY_S", 60.0)
    monkeypatch.setattr(abort_messages, "ABORT_WAIT_S", LONG_S)


@pytest.mark.parametrize("gone", [3, 5, 2])
def test_dead_rank_is_named_everywhere(pool, gone: int):
    """A relay, a leaf, and a child of rank 0 that has no children."""
    with tree(SIZE, GROUP) as channels:
        channels[gone].close()
        said = errors_of(pool, [channel for channel in channels if channel.rank != gone])
    # The reason is another one where a heartbeat lies unread in the closed connection.
    reason = r"\((the connection was closed|.*Connection reset by peer)\)"
    assert re.fullmatch(rf"rank {gone} is gone: no answer to step 0 {reason}", said[0])
    assert {text for rank, text in said.items() if rank} == {said[0]}


def test_relay_dying_before_it_passes_a_message_on(pool):
    with tree(SIZE, GROUP) as channels:
        others = [channel for channel in channels if channel.rank not in (0, 3)]
        futures = [pool.submit(follow, channel, [b"message"] * 2) for channel in others]
        relay = pool.submit(channels[3].answer, 0, b"")
        channels[0].collect(0)
        relay.result(LONG_S)
        channels[3].close()
        with pytest.raises(RankFailedError, match=r"^rank 3 is gone"):
            channels[0].collect(1)
        channels[0].abort("rank 3 is gone", is_divergence=False)
        assert {str(future.result(LONG_S)) for future in futures} == {"rank 3 is gone"}


@pytest.mark.gate("silent1")
@pytest.mark.parametrize("silent", [[4], [3], [1, 8]])
def test_silent_ranks_are_named_behind_relays(pool, patient, silent: list[int]):
    with tree(SIZE, GROUP) as channels:
        channels[0]._timeout_s = 0.4
        answering = {(4,): (1, 2, 6), (3,): (1, 2, 6), (1, 8): (2, 3)}[tuple(silent)]
        said = errors_of(pool, [channel for channel in channels if channel.rank not in silent], answering)
    names = f"rank {silent[0]} is" if len(silent) == 1 else "ranks 1, 8 are"
    assert set(said.values()) == {f"{names} silent: no answer to step 0 in 0.4 s"}


def test_relay_that_gave_up_first_is_not_silent(pool, patient, monkeypatch):
    """It waits for what rank 0 says, which asks it."""
    gave_up, explained = Event(), relay_channel.TcpRelay._explained

    def give_up(relay, error: RankFailedError) -> Exception:
        gave_up.set()
        return explained(relay, error)

    monkeypatch.setattr(relay_channel.TcpRelay, "_explained", give_up)
    with tree(SIZE, GROUP) as channels:
        channels[0]._timeout_s, channels[3]._group._timeout_s = 0.4, 0.2
        said = errors_of(pool, [channel for channel in channels if channel.rank != 4], (1, 2, 6), gave_up)
    assert set(said.values()) == {"rank 4 is silent: no answer to step 0 in 0.4 s"}


def test_relay_is_named_without_the_question(pool, monkeypatch):
    """Negative control: it is not silent."""
    monkeypatch.setattr(relay_channel.TreeLeader, "_silent", step_channel.TcpLeader._silent)
    with tree(SIZE, GROUP) as channels:
        channels[0]._timeout_s = 0.4
        said = errors_of(pool, [channel for channel in channels if channel.rank != 4], (1, 2, 6))
    assert said[0] == "rank 3 is silent: no answer to step 0 in 0.4 s"


def test_leafs_abort_reaches_all_through_rank_0(pool):
    with tree(SIZE, GROUP) as channels:
        channels[7].abort("rank 7 raised ValueError at step 0: boom", is_divergence=False)
        channels[7].close()
        said = errors_of(pool, [channel for channel in channels if channel.rank != 7])
    assert set(said.values()) == {"rank 7 raised ValueError at step 0: boom"}


def test_dead_rank_0_is_named_by_all(pool):
    with tree(SIZE, GROUP) as channels:

        def follow_and_leave(channel) -> str:
            error = follow(channel, [b"", b""])
            channel.close()
            return str(error)

        futures = [pool.submit(follow_and_leave, channel) for channel in channels[1:]]
        channels[0].collect(0)
        channels[0].close()
        said = [future.result(LONG_S) for future in futures]
    assert all(text.startswith("rank 0 is gone") for text in said), said


def test_last_message_arrives_although_rank_0_left(pool):
    with tree(SIZE, GROUP) as channels:
        leaves = [pool.submit(follow, channels[rank], [b"last"]) for rank in (4, 5)]
        relay = pool.submit(channels[3].answer, 0, b"")
        relay.result(LONG_S)
        send_frame(channels[0]._connections[2], FrameKind.MESSAGE, 0, b"last")
        channels[0].close()
        # The leaves see that first.
        time.sleep(0.1)
        assert channels[3].receive() == b"last"
        assert [leaf.result(LONG_S) for leaf in leaves] == [[b"last"]] * 2


def test_dead_rank_0_is_not_awaited_behind_living_relay(monkeypatch):
    """Its heart goes on while it computes, or waits for rank 0 in a collective."""
    monkeypatch.setattr(abort_messages, "ABORT_WAIT_S", 0.7)
    with tree(SIZE, GROUP) as channels:
        channels[0].close()
        with pytest.raises(RankFailedError, match=r"^rank 0 is gone"):
            channels[4].receive()


def test_relay_names_rank_0_where_its_leaf_left(monkeypatch):
    with tree(SIZE, GROUP) as channels:
        channels[0].close()
        assert str(channels[3]._explained(RankFailedError("rank 4 is gone"))) == "rank 0 is gone"
    with tree(SIZE, GROUP) as channels:
        monkeypatch.setattr(abort_messages, "ABORT_WAIT_S", 0.0)
        assert str(channels[3]._explained(RankFailedError("rank 4 is gone"))) == "rank 4 is gone"


# Lost.


def test_message_lost_by_relay_is_found_by_its_heartbeat(pool):
    with tree(SIZE, GROUP) as channels:
        channels[3]._group._num_sent += 1
        with pytest.raises(LostMessageError) as caught:
            channels[4].receive()
    assert str(caught.value) == "message 0 from rank 0 never reached rank 4"


def test_leaf_at_another_step_is_named(pool):
    with tree(SIZE, GROUP) as channels:
        channels[4].answer(7, b"")
        channels[5].answer(8, b"")
        with pytest.raises(LostMessageError, match="rank 5 and rank 3 are not at the same step: ANSWER 8"):
            channels[3].answer(7, b"")


def test_invalid_answers_of_relay_are_reported():
    with tree(SIZE, GROUP) as channels:
        for rank in (1, 2, 3, 6):
            send_frame(channels[rank]._connection, FrameKind.ANSWER, 0, b"\1x" if rank != 6 else b"\0x")
        with pytest.raises(LostMessageError, match="rank 0 cannot read what rank 6 sent"):
            channels[0].collect(0)


@pytest.mark.parametrize(("beats", "named"), [(True, "rank 0 is silent: "), (False, "rank 3 is silent: ")])
def test_silence_is_the_relays_without_its_heartbeats(monkeypatch, beats: bool, named: str):
    monkeypatch.setattr(relay_channel, "_BEATS_S", LONG_S if beats else -1.0)
    with tree(SIZE, GROUP, timeout_s=0.3) as channels, pytest.raises(RankFailedError) as caught:
        channels[4].receive()
    assert str(caught.value).startswith(named)
