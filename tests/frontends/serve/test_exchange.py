"""Between the engine's thread and those who read: every reader is woken in the loop in which it waits."""

import asyncio
import threading
from typing import Any

import pytest
from waiting import LIMIT_S, wait_until

from spmd_worker.frontends.serve.app import Reservation
from spmd_worker.frontends.serve.exchange import NoCapacityError, OpenRequest, RequestExchange
from spmd_worker.replica.sequence.outputs import RequestOutput


def test_readers_in_several_loops_are_all_woken():
    """A program may serve in one loop and ask in another."""
    exchange, loops = RequestExchange(2), [asyncio.new_event_loop() for _ in range(2)]
    row: Any = None
    requests = [OpenRequest(row, is_streamed=False, loop=loop) for loop in loops]
    threads = [threading.Thread(target=loop.run_forever) for loop in loops]
    for request, thread in zip(requests, threads, strict=True):
        exchange.submit(request)
        thread.start()
    asked = [asyncio.run_coroutine_threadsafe(exchange.newest(each), each.loop) for each in requests]
    wait_until(lambda: all(request.has_output._waiters for request in requests))
    outputs = [RequestOutput(str(number), None, [], finished=True) for number in range(2)]
    exchange.give(list(zip(requests, outputs, strict=True)))
    assert [answer.result(LIMIT_S) for answer in asked] == outputs
    for loop, thread in zip(loops, threads, strict=True):
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT_S)
        loop.close()


def test_images_of_open_requests_are_bounded_in_bytes():
    exchange = RequestExchange(8, max_media_bytes=100)
    first, second = Reservation(exchange), Reservation(exchange)
    first.add(1, 120)
    with pytest.raises(NoCapacityError, match=r"120 bytes of images .* \(job\.media_window_gib\)"):
        second.add(1, 1)
    # Text is not kept out, and what was refused holds nothing.
    second.add(1)
    first.free()
    second.add(1, 60)
    second.add(1, 40)
    assert (exchange.num_sequences, exchange.num_media_bytes) == (3, 100)
    second.free()
    second.free()
    assert (exchange.num_sequences, exchange.num_media_bytes) == (0, 0)
