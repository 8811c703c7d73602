"""The star of connections around rank 0: what crosses it, who is named when somebody is silent, gone or out of turn."""

import select
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from star_channels import LONG_S, star
from thread_control import thread_controls
from waiting import at_least, wait_until

from kv_cache.cache_manager import CacheManager
from spmd_worker.base.errors import AbortedError, LostMessageError, RankFailedError, ReplicaDivergedError
from spmd_worker.ranks.transport import abort_messages, step_channel
from spmd_worker.ranks.transport.abort_messages import Abort
from spmd_worker.ranks.transport.frames import (
    MAX_FRAME_BYTES,
    FrameError,
    FrameKind,
    PeerGoneError,
    receive_frame,
    send_frame,
)
from spmd_worker.ranks.transport.step_channel import GlooStepChannel, TcpFollower, TcpLeader
from spmd_worker.replica.lockstep.lockstep import Lockstep, StepReport
from spmd_worker.replica.scheduler.scheduler import Scheduler, SchedulerLimits
from spmd_worker.replica.scheduler.stop import StopChecker
from spmd_worker.replica.sequence.events import Close
from spmd_worker.replica.sequence.sampled import SampledIds


def error_of(raising: type[BaseException], call, *arguments) -> str:
    """What `call` says when it raises."""
    with pytest.raises(raising) as caught:
        call(*arguments)
    return str(caught.value)


def test_follower_hears_abort_reason_when_message_never_came():
    """Rank 1 is gone before rank 2's turn comes, and rank 0's heart beats before it says so."""
    with star(2) as (leader, (gone, left)):
        gone.close()
        assert "rank 1 is gone" in error_of(RankFailedError, leader.send, b"step")
        leader._send_heartbeat()
        leader.abort("rank 1 is gone", is_divergence=False)
        assert error_of(AbortedError, left.receive) == "rank 1 is gone"


def test_abort_check_detects_heartbeats_on_torn_channel():
    with star(2) as (leader, (gone, left)):
        gone.close()
        error_of(RankFailedError, leader.send, b"step")
        leader._is_torn = False
        leader._send_heartbeat()
        leader.abort("rank 1 is gone", is_divergence=False)
        error_of(LostMessageError, left.receive)


def test_channel_can_be_closed_in_its_heartbeat_thread(monkeypatch: pytest.MonkeyPatch):
    """Where garbage is collected in it."""
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(step_channel, "_HEARTBEAT_S", 0.001)
    monkeypatch.setattr(TcpLeader, "_send_heartbeat", TcpLeader.close)
    with star(1) as (leader, _):
        leader._heart.join(LONG_S)
    assert failed == []


# What crosses.


def test_answers_come_in_rank_order_for_any_arrival():
    with star(3) as (leader, followers):
        for follower in reversed(followers):
            follower.answer(5, f"from {follower.rank}".encode())
        assert leader.collect(5) == [b"from 1", b"from 2", b"from 3"]


def test_every_follower_receives_every_message_in_order():
    with star(2) as (leader, followers):
        for payload in (b"one", b"", b"three" * 1000):
            leader.send(payload)
        for follower in followers:
            assert [follower.receive() for _ in range(3)] == [b"one", b"", b"three" * 1000]


def test_message_larger_than_socket_buffers_arrives_complete():
    payload = bytes(range(256)) * 20_000
    with star(1) as (leader, [follower]), ThreadPoolExecutor() as pool:
        received = pool.submit(follower.receive)
        leader.send(payload)
        assert received.result(LONG_S) == payload


def test_records_and_diagnosis_are_exchanged_on_request():
    with star(2) as (leader, followers), ThreadPoolExecutor() as pool:
        for follower in followers:
            follower.offer_record(f"record of {follower.rank}".encode)
        received = [pool.submit(follower.receive) for follower in followers]
        assert leader.exchange_records(b"record of 0") == [b"record of 0", b"record of 1", b"record of 2"]
        leader.send_diagnosis("block_ids differ")
        for future in received:
            with pytest.raises(AbortedError) as caught:
                future.result(LONG_S)
            assert (str(caught.value), caught.value.is_divergence) == ("block_ids differ", True)


# Silent and gone.


def test_silent_ranks_are_named_at_the_timeout():
    with star(3, timeout_s=0.3) as (leader, followers):
        followers[1].answer(4, b"")
        with at_least(0.25):
            said = error_of(RankFailedError, leader.collect, 4)
    assert said == "ranks 1, 3 are silent: no answer to step 4 in 0.3 s"


def test_silent_rank_is_named_alone():
    with star(2, timeout_s=0.2) as (leader, followers):
        followers[0].answer(4, b"")
        said = error_of(RankFailedError, leader.collect, 4)
    assert said == "rank 2 is silent: no answer to step 4 in 0.2 s"


def test_rank_stopping_inside_frame_counts_as_silent():
    with star(1, timeout_s=0.2) as (leader, [follower]):
        follower._connection.sendall(b"\3\4")
        said = error_of(RankFailedError, leader.collect, 4)
    assert said == "rank 1 is silent: no answer to step 4 in 0.2 s"


def test_dead_rank_is_noticed_despite_silent_one():
    with star(3) as (leader, followers):
        followers[2].close()
        said = error_of(RankFailedError, leader.collect, 9)
    assert said == "rank 3 is gone: no answer to step 9 (the connection was closed)"


def test_send_to_dead_rank_raises():
    with star(2) as (leader, followers):
        followers[1].close()
        said = error_of(RankFailedError, leader.send, b"message")
    assert said.startswith("rank 2 is gone")


def test_follower_notices_dead_rank_0_at_once():
    with star(1) as (leader, [follower]):
        leader.close()
        said = error_of(RankFailedError, follower.receive)
    assert said == "rank 0 is gone (the connection was closed)"


def test_silent_rank_0_is_named_despite_its_heartbeats():
    with star(1, timeout_s=1.2) as (_, [follower]), at_least(1.1):
        said = error_of(RankFailedError, follower.receive)
    assert said == "rank 0 is silent: no message in 1.2 s"


# Lost, repeated, out of turn.


@pytest.mark.guarantee("A lost message is found before the timeout")
def test_heartbeat_finds_lost_message_before_timeout():
    with star(1) as (leader, [follower]):
        leader.send(b"first")
        assert follower.receive() == b"first"
        leader._num_sent += 1
        said = error_of(LostMessageError, follower.receive)
    assert said == "message 1 from rank 0 never reached rank 1"


@pytest.fixture
def small_star() -> Iterator[tuple[TcpLeader, TcpFollower, socket.socket]]:
    """Rank 0's end and one follower's, over TCP with buffers that a few hundred frames fill; and rank 0's socket."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ours = socket.create_connection(listener.getsockname())
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs, _ = listener.accept()
    # Its thread does not beat: the test does.
    leader, follower = TcpLeader([ours], LONG_S), TcpFollower(theirs, 1, 2, LONG_S)
    yield leader, follower, ours
    leader.close()
    follower.close()


def has_something_to_read(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def beat_until_there_is_no_room(leader: TcpLeader, connection: socket.socket) -> None:
    for _ in range(100_000):
        if not step_channel._is_writable(connection):
            return
        leader._send_heartbeat()
    raise AssertionError("the buffers are not full")


def test_unread_heartbeats_between_steps_leave_connection_intact(small_star):
    """An engine that sleeps for hours: part of one was sent, and then a step, which was read as something else."""
    leader, follower, connection = small_star
    beat_until_there_is_no_room(leader, connection)
    for _ in range(3):
        leader._send_heartbeat()
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(follower.receive)
        leader.send(b"step")
        assert received.result(LONG_S) == b"step"


@pytest.mark.stress
def test_heartbeat_check_detects_blocking_sends(small_star, monkeypatch):
    """Negative control."""
    leader, _, connection = small_star
    beat_until_there_is_no_room(leader, connection)
    monkeypatch.setattr(step_channel, "_is_writable", lambda connection: True)
    late, send_one = [], step_channel.send_frame

    def sending(connection: socket.socket, *frame: object) -> None:
        try:
            send_one(connection, *frame)
        except TimeoutError:
            late.append(frame)
            raise

    monkeypatch.setattr(step_channel, "send_frame", sending)
    connection.settimeout(0.05)
    for _ in range(100_000):
        leader._send_heartbeat()
        if late:
            return
    raise AssertionError("all have gone")


def test_send_has_full_timeout_after_a_long_wait(small_star, monkeypatch):
    """A peer that came at the last moment was called gone, where the next message was larger than the buffers."""
    leader, follower, ours = small_star
    # Without its heart, whose frames would be counted.
    leader._poll.register(ours)
    ends = {"leader": ours, "follower": follower._connection}
    waits, send_one = [], step_channel.send_frame

    def sending(connection: socket.socket, *frame: object) -> None:
        waits.append(connection.gettimeout())
        send_one(connection, *frame)

    monkeypatch.setattr(step_channel, "send_frame", sending)
    follower.answer(1, b"answer")
    wait_until(lambda: has_something_to_read(ours))
    # The first reading sets the end of a wait, and what is waited for is there at the last moment.
    clock = SimpleNamespace(monotonic=iter([0.0, *[LONG_S] * 2, 0.0, LONG_S]).__next__)
    monkeypatch.setattr(step_channel, "time", clock)
    assert leader.collect(1) == [b"answer"]
    # Negative control: this is what is left on the connection.
    assert ends["leader"].gettimeout() == 0.001
    leader.send(b"step")
    wait_until(lambda: has_something_to_read(ends["follower"]))
    assert follower.receive() == b"step"
    assert ends["follower"].gettimeout() == 0.001
    follower.answer(2, b"answer")
    assert waits == [LONG_S] * 3


@pytest.mark.stress
@pytest.mark.control("A lost message is found before the timeout")
def test_lost_message_costs_full_timeout_without_heartbeats(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(step_channel, "_HEARTBEAT_S", LONG_S)
    with star(1, timeout_s=1.6) as (leader, [follower]):
        leader._num_sent += 1
        with at_least(1.5):
            said = error_of(RankFailedError, follower.receive)
    assert said == "rank 0 is silent: no message in 1.6 s"


def test_message_after_lost_one_is_rejected():
    with star(1) as (leader, [follower]):
        send_frame(leader._connections[0], FrameKind.MESSAGE, 1, b"second")
        said = error_of(LostMessageError, follower.receive)
    assert said == "message 0 from rank 0 never reached rank 1"


def test_repeated_message_is_rejected():
    with star(1) as (leader, [follower]):
        for _ in range(2):
            send_frame(leader._connections[0], FrameKind.MESSAGE, 0, b"first")
        assert follower.receive() == b"first"
        said = error_of(LostMessageError, follower.receive)
    assert said == "message 0 from rank 0 reached rank 1 twice"


@pytest.mark.parametrize("step", [6, 8])
def test_answer_to_another_step_is_rejected(step: int):
    with star(2) as (leader, followers):
        followers[1].answer(step, b"")
        said = error_of(LostMessageError, leader.collect, 7)
    assert said == f"rank 2 and rank 0 are not at the same step: ANSWER {step} where ANSWER 7 comes next"


def test_second_answer_to_same_step_is_rejected():
    with star(2) as (leader, followers):
        followers[0].answer(7, b"")
        followers[0].answer(7, b"")
        said = error_of(LostMessageError, leader.collect, 7)
    assert said.startswith("rank 1 and rank 0 are not at the same step")


def test_invalid_frame_is_reported_on_either_end():
    with star(1) as (leader, [follower]):
        leader._connections[0].sendall(b"\xff" * 13)
        assert error_of(LostMessageError, follower.receive).startswith("rank 1 cannot read what rank 0 sent")
        follower._connection.sendall(b"\xff" * 13)
        assert error_of(LostMessageError, leader.collect, 1).startswith("rank 0 cannot read what rank 1 sent")


# A rank that leaves says why.


def test_abort_reason_arrives_after_rank_left():
    with star(2) as (leader, followers):
        followers[0].answer(3, b"")
        followers[1].abort("rank 2 raised MemoryError at step 3", is_divergence=False)
        followers[1].close()
        with pytest.raises(AbortedError) as caught:
            leader.collect(3)
    assert (str(caught.value), caught.value.is_divergence) == ("rank 2 raised MemoryError at step 3", False)


def test_abort_reason_is_found_behind_unread_answers():
    """Rank 0 waits in a collective: the answer to the next step lies unread before what the rank says."""
    with star(2) as (leader, followers):
        followers[1].answer(4, b"digest")
        followers[1].abort("the reason", is_divergence=True)
        assert leader.received_abort() == Abort("the reason", is_divergence=True)
        # Passed on before it is returned.
        assert followers[0].received_abort() == Abort("the reason", is_divergence=True)


def test_abort_reason_is_read_after_a_pause(monkeypatch):
    """A process that was stopped for longer than it would have waited never looked."""
    clock = SimpleNamespace(monotonic=iter([0.0, *[LONG_S] * 3]).__next__)
    with star(1) as (leader, [follower]):
        follower.abort("the reason", is_divergence=False)
        monkeypatch.setattr(abort_messages, "time", clock)
        assert leader.received_abort() == Abort("the reason", is_divergence=False)


def test_rank_leaving_without_abort_is_awaited_only_briefly(monkeypatch):
    monkeypatch.setattr(abort_messages, "ABORT_WAIT_S", 0.3)
    with star(2) as (leader, followers):
        followers[0].close()
        assert leader.received_abort() is None
        assert followers[1].received_abort() is None


def test_abort_of_last_rank_is_found_among_many(monkeypatch):
    """Those that say nothing are not waited for one by one: here for three seconds."""
    monkeypatch.setattr(abort_messages, "ABORT_WAIT_S", 0.2)
    with star(60) as (leader, followers):
        followers[-1].abort("the reason", is_divergence=False)
        read = []
        monkeypatch.setattr(abort_messages, "receive_frame", lambda each: read.append(each) or receive_frame(each))
        assert leader.received_abort() == Abort("the reason", is_divergence=False)
        assert read == [leader._connections[-1]]


def test_abort_never_raises_when_peers_are_gone():
    with star(2) as (leader, followers):
        followers[0].close()
        leader.abort("a reason", is_divergence=False)
        assert error_of(AbortedError, followers[1].receive) == "a reason"
        leader.close()
        followers[1].abort("another", is_divergence=False)
        followers[0].abort("another", is_divergence=False)


# Through the lockstep.


def new_scheduler() -> Scheduler:
    return Scheduler(SchedulerLimits(4, 64), CacheManager(8, 4), StopChecker((0,), 32, None))


def outcome(lockstep: Lockstep, sampled: tuple[int, ...] = (), num_steps: int = 1) -> BaseException | int:
    """What an engine would raise after some steps; else their number."""
    scheduler = new_scheduler()
    for _ in range(num_steps):
        try:
            lockstep.agree(scheduler.schedule(), StepReport(SampledIds(sampled)))
        except Exception as error:
            return lockstep.diagnose(error)
    return num_steps


def test_three_ranks_agree_step_after_step():
    """Events come from rank 0."""
    with star(2) as (leader, followers), ThreadPoolExecutor() as pool:
        replicas = [Lockstep(channel, digest_every=1) for channel in (leader, *followers)]
        plans = [new_scheduler().schedule() for _ in replicas]
        events = [(Close(),), (), ()]
        futures = [
            pool.submit(replica.agree, plans[rank], StepReport(events=events[rank]))
            for rank, replica in enumerate(replicas)
        ]
        assert [future.result(LONG_S).events for future in futures] == [(Close(),)] * 3
        assert len({replica.chain_head for replica in replicas}) == 1


def test_abort_passes_through_rank_0_to_other_followers():
    with star(3) as (leader, followers), ThreadPoolExecutor() as pool:
        replicas = [Lockstep(channel, digest_every=1) for channel in (leader, *followers)]
        futures = [pool.submit(outcome, replicas[rank], (), 2) for rank in (0, 1, 3)]
        assert outcome(replicas[2]) == 1
        replicas[2].diagnose(ValueError("boom"))
        outcomes = [future.result(LONG_S) for future in futures]
    assert [type(each) for each in outcomes] == [RankFailedError] * 3
    assert [str(each) for each in outcomes] == ["rank 2 raised ValueError at step 1: boom"] * 3


def test_broken_collective_is_explained_by_peers_abort():
    with star(2) as (leader, followers):
        replicas = [Lockstep(channel, digest_every=1) for channel in (leader, *followers)]
        followers[0].abort("rank 1 raised KeyError at step 3: 'x'", is_divergence=False)
        followers[0].close()
        # Rank 0 first: what followers say reaches the others through it.
        for replica in (replicas[0], replicas[2]):
            explained = replica.diagnose(RuntimeError("gloo: connection closed by peer"))
            assert str(explained) == "rank 1 raised KeyError at step 3: 'x'"


def test_differing_digests_raise_same_error_on_all_ranks():
    with star(2) as (leader, followers), ThreadPoolExecutor() as pool:
        replicas = [Lockstep(channel, digest_every=1) for channel in (leader, *followers)]
        sampled = [(5,), (5,), (6,)]
        outcomes = [
            future.result(LONG_S) for future in [pool.submit(outcome, *each) for each in zip(replicas, sampled)]
        ]
    assert [type(each) for each in outcomes] == [ReplicaDivergedError] * 3
    (said,) = {str(each) for each in outcomes}
    assert said == (
        "step 1 did not run (last agreed step 0): rank 2 diverged from rank 0: "
        "sampled_token_ids[0]: 5 on rank 0, 6 on rank 2"
    )


def test_digests_are_not_sent_when_switched_off():
    """Negative control."""
    with star(1) as (leader, [follower]), ThreadPoolExecutor() as pool:
        replicas = [Lockstep(leader, digest_every=0), Lockstep(follower, digest_every=0)]
        futures = [pool.submit(outcome, replica, (rank,)) for rank, replica in enumerate(replicas)]
        assert [future.result(LONG_S) for future in futures] == [1, 1]


# Over gloo, here over threads.


def test_gloo_channel_agrees_and_diverges_like_tcp():
    controls = thread_controls(3)
    with ThreadPoolExecutor() as pool:
        replicas = [Lockstep(GlooStepChannel(control), digest_every=1) for control in controls]
        futures = [pool.submit(outcome, replica, (), 3) for replica in replicas]
        assert [future.result(LONG_S) for future in futures] == [3, 3, 3]
        replicas = [Lockstep(GlooStepChannel(control), digest_every=1) for control in controls]
        futures = [pool.submit(outcome, replica, (rank // 2,)) for rank, replica in enumerate(replicas)]
        said = {str(future.result(LONG_S)) for future in futures}
    assert said == {
        "step 1 did not run (last agreed step 0): rank 2 diverged from rank 0: "
        "sampled_token_ids[0]: 0 on rank 0, 1 on rank 2"
    }


# Leaving.


def test_close_leaves_no_thread_and_no_socket():
    before = threading.enumerate()
    with star(2) as (leader, followers):
        assert sum(thread not in before for thread in threading.enumerate()) == 1
        leader.close()
        # Its thread is not waited for without end.
        wait_until(lambda: all(thread in before for thread in threading.enumerate()))
        assert all(connection.fileno() < 0 for connection in leader._connections)
        followers[0].close()
        assert followers[0]._connection.fileno() < 0
        # Again, by the context manager: closing is idempotent.


def test_leader_that_never_started_can_be_closed():
    ours, theirs = socket.socketpair()
    TcpLeader([ours], LONG_S).close()
    theirs.close()


# Frames.

HEAD = struct.Struct("<BQI")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(0.2)
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("kind", [0, 11, 255])
def test_unknown_frame_kind_is_rejected(pair, kind: int):
    pair[0].sendall(HEAD.pack(kind, 0, 0))
    with pytest.raises(FrameError, match=f"kind {kind}"):
        receive_frame(pair[1])


@pytest.mark.parametrize(
    ("length", "most"), [(MAX_FRAME_BYTES + 1, MAX_FRAME_BYTES), (2**32 - 1, MAX_FRAME_BYTES), (17, 16)]
)
def test_too_long_frame_is_rejected_before_reading_it(pair, length: int, most: int):
    pair[0].sendall(HEAD.pack(FrameKind.MESSAGE, 0, length))
    with pytest.raises(FrameError, match=f"length {length}"):
        receive_frame(pair[1], most)


@pytest.mark.parametrize("num_bytes", [0, 1, 12, 13, 15])
def test_truncated_frame_means_peer_is_gone(pair, num_bytes: int):
    pair[0].sendall((HEAD.pack(FrameKind.ANSWER, 3, 3) + b"abc")[:num_bytes])
    pair[0].close()
    with pytest.raises(PeerGoneError):
        receive_frame(pair[1])


@pytest.mark.parametrize("num_bytes", [0, 12, 15])
def test_unfinished_frame_is_a_timeout(pair, num_bytes: int):
    pair[0].sendall((HEAD.pack(FrameKind.ANSWER, 3, 3) + b"abc")[:num_bytes])
    with pytest.raises(TimeoutError):
        receive_frame(pair[1])


@given(st.sampled_from(FrameKind), st.integers(0, 2**64 - 1), st.binary(max_size=200))
def test_frames_round_trip(kind, number, payload):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(ours, kind, number, payload)
        assert receive_frame(theirs) == (kind, number, payload)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_frame_or_channel_error(data):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.close()
        try:
            while True:
                receive_frame(theirs)
        except (FrameError, PeerGoneError):
            pass
