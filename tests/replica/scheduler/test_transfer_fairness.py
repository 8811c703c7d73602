"""A request that waits for its beginning to come back is not overtaken without end.

Once it was: while it waited, later requests took the room it had been promised, so that what had been loaded was
evicted before it could join, and was loaded again, 150 times in 600 steps.
"""

from itertools import count

import pytest
from scheduler_runs import Run

from spmd_worker.replica.scheduler.planner import Planner
from spmd_worker.replica.sequence.sequence import Sequence

HEAD = tuple(range(1, 33))


def overtaken(num_tier_blocks: int) -> tuple[int, int]:
    """How often the request's beginning was loaded, and how many later requests ended before it, within 300 steps."""
    run = Run(num_blocks=15, block_size=4, max_num_batched_tokens=64, caching=True, num_tier_blocks=num_tier_blocks)
    number = count()

    def admit_small() -> None:
        run.admit(0, prompt=tuple(1000 + next(number) * 20 + index for index in range(6)), max_tokens=2)

    run.admit(0, prompt=(*HEAD, 50), max_tokens=2)
    run.finish()
    for _ in range(8):
        admit_small()
    run.steps(6)
    request, num_loads = run.admit(0, prompt=(*HEAD, 51), max_tokens=2), 0
    for _ in range(300):
        while run.scheduler.queues.num_waiting < 6:
            admit_small()
        run.step()
        num_loads += bool(run.last_plan.block_ops.load)
        if request in run.ended:
            break
    return num_loads, sum(each > request for each in run.ended)


def test_loading_request_keeps_its_reserved_blocks():
    num_loads, num_later = overtaken(num_tier_blocks=32)
    assert num_loads == 1
    assert num_later <= 3
    assert overtaken(num_tier_blocks=0) == (0, num_later), "as many as without a tier"


def test_loading_request_starves_without_reservation(monkeypatch: pytest.MonkeyPatch):
    """Negative control: room that is not kept, and waiting as often as something could be loaded."""
    monkeypatch.setattr(Planner, "_set_watermark", lambda *_: None)
    monkeypatch.setattr(Sequence, "has_loaded", property(lambda _: False, lambda *_: None))
    num_loads, num_later = overtaken(num_tier_blocks=32)
    assert num_loads > 10
    assert num_later > 100
