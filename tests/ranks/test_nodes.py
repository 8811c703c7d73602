"""Ranks that a trainer started without saying how many are on each node find it out."""

import os
import sys

import pytest
import ranks
import torch.distributed as dist

from spmd_worker.base.errors import RankFailedError
from spmd_worker.ranks import groups
from spmd_worker.ranks.environment import RankEnvironment, read_rank_environment
from spmd_worker.ranks.groups import node_id, world_environment

NODES = "aabab"


def main(launcher: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if launcher == "trainer":
        del os.environ["LOCAL_WORLD_SIZE"]
        os.environ["LOCAL_RANK"] = str(rank % 2)
    elif launcher == "nobody":
        del os.environ["RANK"], os.environ["LOCAL_WORLD_SIZE"]
    environment = read_rank_environment()
    # Twice, as by two engines of one trainer.
    first, second = (world_environment(environment, 5, 60, NODES[rank]) for _ in range(2))
    assert first == second
    print(f"rank {rank}: {first.rank} of {first.world_size}, {first.local_rank} of {first.local_world_size} here")
    assert first.master_address == os.environ["MASTER_ADDR"]
    # Others may still be joining the world.
    dist.barrier()


@pytest.mark.parametrize(
    ("launcher", "places"),
    [
        # What is known is not asked for.
        ("torchrun", ["0 of 5", "1 of 5", "2 of 5", "3 of 5", "4 of 5"]),
        # A trainer's own LOCAL_RANK stays.
        ("trainer", ["0 of 3", "1 of 3", "0 of 2", "1 of 3", "0 of 2"]),
        ("nobody", ["0 of 3", "1 of 3", "0 of 2", "2 of 3", "1 of 2"]),
    ],
)
def test_ranks_find_their_local_rank(launcher: str, places: list[str]):
    done = ranks.run_forked([__file__, launcher], len(NODES), timeout_s=240).checked()
    for rank, place in enumerate(places):
        assert f"rank {rank}: {rank} of 5, {place} here" in done.stdout


def test_rank_without_an_engine_is_named(monkeypatch: pytest.MonkeyPatch):
    store = dist.HashStore()
    monkeypatch.setattr(groups, "shared_store", lambda: store)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(RankFailedError, match=r"^rank 1, 2 .*published .*within 0\.1 s"):
        world_environment(RankEnvironment(), 3, 0.1)
    # Engines of one rank may be made on some ranks alone.
    alone = world_environment(RankEnvironment(), 1, 0.1)
    assert (alone.world_size, alone.local_rank, alone.local_world_size) == (3, 0, 3)


def test_process_without_a_world_keeps_its_environment():
    alone = RankEnvironment()
    assert world_environment(alone, 1, 60) is alone
    assert node_id() == node_id() != ""


if __name__ == "__main__":
    main(sys.argv[1])
