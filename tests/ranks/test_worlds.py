"""The world an engine is in: who made it, who ends it, and what is left where its groups could not all be made."""

from pathlib import Path

import pytest
import ranks

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
LIMIT_S = 240.0
START = """
    import os, sys, threading, time
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from spmd_worker import LLM, SamplingParams
    from spmd_worker.ranks import groups
    from spmd_worker.worker.backends import backend
    rank = int(os.environ["RANK"])

    def new_llm(**layout):
        layout = layout or {"tensor_parallel_size": 2}
        return LLM(sys.argv[1], num_blocks=64, device="cpu", dtype="float32", timeout_s=240.0, **layout)

    def answers(llm):
        params = SamplingParams(temperature=0, max_tokens=4)
        return [output.outputs[0].token_ids for output in llm.generate(["copy a b ="], params, use_tqdm=False)]

    def threads():
        return [thread.name for thread in threading.enumerate()]
"""


def check(source: str, *arguments: str, has_agent_store: bool = True) -> None:
    done = ranks.run_ranks(START + source, 2, LIMIT_S, [MODEL, *arguments], has_agent_store=has_agent_store).checked()
    assert "Traceback" not in done.stderr, done.output


@pytest.mark.parametrize("ending", ["closed", "left to the interpreter"])
def test_caller_can_end_its_world_before_the_engine(ending: str):
    """As trainers do in their last line. The engine's groups had gone with it, which was a ValueError."""
    check(
        """
    dist.init_process_group("gloo")
    before = threads()
    llm = new_llm()
    answers(llm)
    dist.barrier()
    dist.destroy_process_group()
    if sys.argv[2] == "closed":
        llm.close()
        assert threads() == before, threads()
""",
        ending,
    )


@pytest.mark.gate("tensor_parallel_size")
@pytest.mark.parametrize(
    "layout", ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.matrix)]
)
def test_engine_outlives_the_creator_of_the_world(layout: str):
    check(
        """
    layout = {sys.argv[2]: 2}
    first, second = new_llm(**layout), new_llm(**layout)
    expected = answers(first)
    first.close()
    assert dist.is_initialized()
    assert answers(second) == expected
    third = new_llm(**layout)
    second.close()
    assert answers(third) == expected
    third.close()
    assert not dist.is_initialized()
    with new_llm(**layout) as fourth:
        assert answers(fourth) == expected
    assert not dist.is_initialized()
""",
        layout,
    )


def test_engine_of_ended_world_leaves_the_next_alone():
    """The caller has ended our first world, and closes its engine when there is another."""
    check(
        """
    first = new_llm()
    expected = answers(first)
    dist.barrier()
    dist.destroy_process_group()
    second = new_llm()
    first.close()
    assert dist.is_initialized()
    assert answers(second) == expected
    second.close()
    assert not dist.is_initialized()
"""
    )


@pytest.mark.gate("ours-groups.in_every_engine", "the caller's-backend.share_memory")
@pytest.mark.parametrize("place", ["groups.in_every_engine", "backend.share_memory"])
@pytest.mark.parametrize("whose", ["ours", "the caller's"])
def test_failed_start_leaves_no_group(whose: str, place: str):
    """The start fails between two groups."""
    check(
        """
    if sys.argv[2] != "ours":
        dist.init_process_group("gloo")
    before = len(distributed_c10d._world.pg_map)
    module, name = {"groups": groups, "backend": backend}[sys.argv[3].split(".")[0]], sys.argv[3].split(".")[1]
    # The third group of a start, and the second that shares memory.
    right, calls, last = getattr(module, name), [], 3 if module is groups else 2

    def failing(*given):
        calls.append(given)
        if len(calls) == last:
            raise RuntimeError("planted")
        return right(*given)

    setattr(module, name, failing)
    for _ in range(2):
        calls.clear()
        try:
            new_llm()
        except RuntimeError as error:
            assert "planted" in str(error), error
        else:
            raise AssertionError("it has started")
        assert len(distributed_c10d._world.pg_map) == before
        assert dist.is_initialized() == (sys.argv[2] != "ours")
        assert threads() == ["MainThread"], threads()
    setattr(module, name, right)
    with new_llm() as llm:
        answers(llm)
    assert len(distributed_c10d._world.pg_map) == before
    if before:
        dist.barrier()
        dist.destroy_process_group()
""",
        whose,
        place,
    )


def test_early_ranks_find_next_world_without_agent_store():
    """Rank 0's store ended with the first engine; a rank that had come before had counted itself in the old one."""
    check(
        """
    llm = new_llm()
    expected = answers(llm)
    # What rank 0 does with the answers.
    time.sleep(rank == 0)
    llm.close()
    with new_llm() as llm:
        assert answers(llm) == expected
    assert not dist.is_initialized()
""",
        has_agent_store=False,
    )


@pytest.mark.gate("a launcher's store")
@pytest.mark.parametrize(
    "has_agent_store",
    [True, pytest.param(False, marks=pytest.mark.matrix)],
    ids=["a launcher's store", "rank 0's store"],
)
def test_failed_rank_joins_at_the_next_attempt(tmp_path: Path, has_agent_store: bool):
    """Each rank counted its worlds: one that had not come to the first waited in another than the others ever after."""
    check(
        """
    from pathlib import Path
    from spmd_worker.base.errors import RankFailedError
    has_failed = Path(sys.argv[2]) / "failed"
    if rank == 0:
        try:
            LLM(sys.argv[1], num_blocks=64, device="cpu", dtype="float32", timeout_s=1.0, tensor_parallel_size=2)
        except RankFailedError as error:
            assert str(error).startswith("rank 1 "), error
        except dist.DistStoreError:
            # Torch's own, where this process is put aside in its second: who is missing is not looked at here.
            pass
        has_failed.touch()
    while not has_failed.exists():
        time.sleep(0.01)
    with new_llm() as llm:
        answers(llm)
    assert not dist.is_initialized()
""",
        str(tmp_path),
        has_agent_store=has_agent_store,
    )
