"""Rows and answers through a store: each chunk goes to one replica, each answer arrives once, no key is left."""

from concurrent.futures import ThreadPoolExecutor

from plain_store import PlainStore
from waiting import LIMIT_S

from spmd_worker.engine.data_parallel.round import ReplicaRound
from spmd_worker.frontends.batch.row_exchange import (
    RowClaimer,
    RowSender,
    pack_answers,
    pack_rows,
    unpack_answers,
    unpack_rows,
)
from spmd_worker.frontends.batch.row_window import NumberedLine
from spmd_worker.frontends.openai.row_writer import RowAnswer

ANSWERS = [
    RowAnswer(3, b'{"a": "\xc3\xa9"}\n', None, 5, 2, 7),
    RowAnswer(0, b"{}\n", "prompt_too_long"),
]


def ends_of(num_replicas: int) -> tuple[PlainStore, RowSender, list[RowClaimer]]:
    store = PlainStore()
    rounds = [ReplicaRound(store, "round 1", replica, num_replicas, LIMIT_S) for replica in range(num_replicas)]
    return store, RowSender(rounds[0]), [RowClaimer(each) for each in rounds]


def lines(*indices: int) -> list[NumberedLine]:
    return [NumberedLine(index, b"line %d" % index) for index in indices]


def test_rows_and_answers_round_trip():
    rows = [NumberedLine(2, b'{"prompt": "\xe2\x80\xa8"}'), NumberedLine(1, b""), NumberedLine(9, b"\xff")]
    assert unpack_rows(pack_rows(rows)) == rows
    assert unpack_answers(pack_answers(ANSWERS)) == ANSWERS
    assert unpack_rows(pack_rows([])) == []


def test_first_fetching_replica_has_the_first_chunk():
    _, sender, (first, second) = ends_of(2)
    sender.publish(lines(0, 1))
    sender.publish(lines(2))
    assert sender.num_ahead == 2
    assert second.claim() == lines(0, 1)
    assert first.claim() == lines(2)
    assert sender.num_ahead == 0


def test_early_replica_gets_its_chunk_once_published():
    _, sender, (first, second) = ends_of(2)
    assert first.claim() == second.claim() == first.claim() == []
    assert sender.num_ahead == -2
    for index in range(3):
        sender.publish(lines(index))
    assert second.claim() == lines(1)
    assert second.claim() == lines(2)
    assert first.claim() == lines(0)


def test_end_is_for_replicas_that_find_nothing():
    _, sender, (first, second) = ends_of(2)
    assert first.claim() == []
    sender.publish(lines(0))
    sender.end()
    assert second.claim() == []
    assert second.has_ended
    assert not first.has_ended
    assert first.claim() == lines(0)
    assert first.claim() == []
    assert first.has_ended


def test_end_without_rows_is_an_end():
    _, sender, claimers = ends_of(3)
    sender.end()
    for claimer in claimers:
        assert claimer.claim() == []
        assert claimer.has_ended


def test_answers_arrive_once_and_in_replica_order():
    _, sender, (_, second, third) = ends_of(3)
    assert sender.receive() == []
    third.send(ANSWERS[:1])
    second.send(ANSWERS)
    third.send(ANSWERS[1:])
    assert sender.receive() == [*ANSWERS, *ANSWERS]
    assert sender.receive() == []
    second.send(ANSWERS[1:])
    assert sender.receive() == ANSWERS[1:]


def test_three_replicas_fetch_every_row_once():
    """The replicas' own keys are gone afterwards."""
    store, sender, claimers = ends_of(3)

    def claim_all(claimer: RowClaimer) -> list[int]:
        claimed: list[int] = []
        while not claimer.has_ended:
            rows = claimer.claim()
            claimed += [row.index for row in rows]
            if rows:
                claimer.send([RowAnswer(row.index, b"\n") for row in rows])
        return claimed

    with ThreadPoolExecutor(3) as pool:
        claiming = [pool.submit(claim_all, claimer) for claimer in claimers]
        for index in range(0, 600, 2):
            sender.publish(lines(index, index + 1))
        sender.end()
        claimed = [each.result(timeout=LIMIT_S) for each in claiming]
    assert sorted(index for each in claimed for index in each) == list(range(600))
    # Rank 0's own answers do not travel.
    assert sorted(each.index for each in sender.receive()) == sorted(claimed[1] + claimed[2])
    sender.forget()
    assert {key.split("/")[1] for key in store.values} <= {"answers"}
    assert {key.split("/")[2] for key in store.values} <= {"0"}
