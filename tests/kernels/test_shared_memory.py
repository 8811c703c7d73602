"""Exchange through shared memory: what gloo gives, in a fixed order of sums, whatever the ranks are busy with.

Ranks are processes under torchrun; each runs the source below and the checks are made in it.
"""

import re
import shutil
from pathlib import Path

import pytest
import ranks

from spmd_worker.kernels.cpu import build

LIMIT_S = 90.0

START = """
    import os, random, signal, sys, threading, time
    import torch, torch.distributed as dist
    from spmd_worker.kernels.cpu import shared_memory
    from spmd_worker.kernels.cpu.shared_memory import share_memory
    from spmd_worker.parallel.process_group import GroupHandle
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    gloo = GroupHandle(tuple(range(size)), rank, dist.group.WORLD)
    def say_how_a_sum_ends(fast):
        began = time.monotonic()
        try:
            fast.all_reduce(torch.ones(4))
        except RuntimeError as error:
            print(f"rank {rank} after {time.monotonic() - began:.2f}: {error}", flush=True)
    def leave():
        # gloo's own threads may still be ending when the interpreter does.
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)
"""

MANY_ROUNDS = """
    shared_memory.SLOT_BYTES = 1 << 12
    fast = share_memory(gloo, 30.0)
    assert fast.fast is not None
    alike, own = random.Random(5), random.Random(rank)
    for number in range(1500):
        count = alike.choice((0, 1, 2, 15, 16, 17, 31, 1000, 1024, 1025, 2048, 5000))
        dtype = alike.choice((torch.float32, torch.bfloat16))
        seeds = [torch.Generator().manual_seed(number * 8 + each) for each in range(size)]
        parts = [torch.randn(count, generator=seed).to(dtype) for seed in seeds]
        if own.random() < 0.02:
            time.sleep(own.random() * 0.01)
        kind = alike.randrange(4)
        if kind == 0:
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            found = fast.all_reduce(parts[rank].clone())
            assert torch.equal(found, total.to(dtype)), (number, count, dtype)
        elif kind == 1:
            assert torch.equal(fast.all_gather(parts[rank]), torch.stack(parts)), number
            pairs = fast.all_gather(torch.tensor([[rank, number]])).tolist()
            assert pairs == [[[each, number]] for each in range(size)]
        elif kind == 2:
            source = alike.randrange(size)
            assert torch.equal(fast.broadcast(parts[rank].clone(), source), parts[source]), number
        else:
            # Not in one piece: as a column of a matrix is.
            wide = parts[rank].unsqueeze(1).repeat(1, 3)
            total = torch.stack([part.float() for part in parts]).sum(0) if size == 2 else None
            column = wide[:, 1]
            fast.all_reduce(column)
            assert torch.equal(wide[:, 0], parts[rank])
            assert total is None or torch.equal(wide[:, 1], total.to(dtype))
    print(f"rank {rank} was right")
    fast.fast.close()
    fast.fast.close()
    leave()
"""


def run(source: str, num_ranks: int, folder: Path | None = None) -> ranks.CompletedRanks:
    return ranks.run_ranks(START + source, num_ranks, LIMIT_S, arguments=[] if folder is None else [folder])


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_many_rounds_of_all_kinds_and_sizes_give_what_they_should(num_ranks: int):
    """Also with more ranks than cores, slots that are far too small, and ranks that come late."""
    done = run(MANY_ROUNDS, num_ranks)
    assert done.returncode == 0, done.output
    assert sorted(re.findall(r"rank \d was right", done.stdout)) == [
        f"rank {each} was right" for each in range(num_ranks)
    ]


def test_one_slot_for_odd_and_even_rounds_would_not_do(tmp_path: Path):
    """The control: with both kinds of rounds in one slot some rank writes while another still reads."""
    sources = Path(shutil.copytree(Path(build.__file__).parent, tmp_path / "cpu"))
    text = (sources / "shared_memory.cpp").read_text()
    assert text.count("int64_t(round % 2) * size") == 1
    (sources / "shared_memory.cpp").write_text(text.replace("int64_t(round % 2) * size", "int64_t(0) * size"))
    planted = """
    from pathlib import Path
    from spmd_worker.kernels.cpu import build
    build._SOURCE_FOLDER = Path(sys.argv[1])
"""
    done = run(planted + MANY_ROUNDS, 2, sources)
    assert done.returncode != 0
    assert "AssertionError" in done.stderr


def test_a_rank_that_has_gone_is_told_within_a_moment_and_named():
    done = run(
        """
    fast = share_memory(gloo, 60.0)
    # The launcher, which sees the end too, wants the others to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fast.all_reduce(torch.ones(4))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    say_how_a_sum_ends(fast)
    # Whoever leaves first has the launcher end the others.
    time.sleep(1)
    os._exit(0)
""",
        3,
    )
    # Lines of two processes may end up in one.
    said = re.findall(r"rank (\d) after ([\d.]+): (.*?has left)", done.stdout)
    assert sorted(each[0] for each in said) == ["0", "2"], done.output
    for _, seconds, text in said:
        assert float(seconds) < 2.0
        assert text == "shared memory: Connection closed by peer: rank 1 has left"


def test_a_rank_that_closes_is_as_good_as_gone_and_the_others_are_told_at_once():
    done = run(
        """
    fast = share_memory(gloo, 60.0)
    fast.all_reduce(torch.ones(4))
    if rank == 1:
        time.sleep(0.5)
        fast.fast.close()
        time.sleep(2)
        leave()
    say_how_a_sum_ends(fast)
    leave()
""",
        2,
    )
    found = re.search(r"after ([\d.]+): shared memory: Connection closed by peer: rank 1 has left", done.stdout)
    assert found, done.output
    assert 0.3 < float(found[1]) < 1.5


def test_a_rank_that_does_not_come_is_waited_for_so_long_and_no_longer():
    done = run(
        """
    fast = share_memory(gloo, 1.0)
    fast.all_reduce(torch.ones(4))
    if rank == 1:
        time.sleep(3)
        os._exit(0)
    say_how_a_sum_ends(fast)
    time.sleep(3)
    os._exit(0)
""",
        2,
    )
    found = re.search(r"after ([\d.]+): shared memory: timed out waiting for another rank", done.stdout)
    assert found, done.output
    assert 0.9 <= float(found[1]) < 2.0


def test_other_threads_go_on_while_a_rank_waits_and_the_core_is_free():
    """Waiting sleeps: the process takes little of its core, and Python's lock is not held."""
    done = run(
        """
    fast = share_memory(gloo, 60.0)
    fast.all_reduce(torch.ones(4))
    if rank == 1:
        time.sleep(2)
        fast.all_reduce(torch.ones(4))
    else:
        turns, is_over = [0], threading.Event()
        def count():
            while not is_over.wait(0.01):
                turns[0] += 1
        threading.Thread(target=count).start()
        before = time.process_time()
        fast.all_reduce(torch.ones(4))
        print(f"{time.process_time() - before:.2f} s of the core, {turns[0]} turns", flush=True)
        is_over.set()
    dist.barrier()
    leave()
""",
        2,
    )
    seconds, turns = re.search(r"([\d.]+) s of the core, (\d+) turns", done.stdout).groups()
    assert float(seconds) < 0.5
    assert int(turns) > 50


FALLBACKS = {
    "another node": "shared_memory.node_name = lambda: f'node {rank}'",
    "no way to tell the node": "shared_memory.node_name = lambda: ''",
    "no kernels on one rank": "if rank: shared_memory.native_library = lambda: 'no compiler'",
    "no memory on one rank": "if rank: shared_memory._map_memory = lambda *_: None",
    "no memory at all": "shared_memory._make_memory = lambda *_: -1",
}


@pytest.mark.parametrize(
    "why",
    [pytest.param(why, marks=[] if why.endswith("one rank") else pytest.mark.slow) for why in FALLBACKS],
)
def test_where_one_rank_cannot_all_keep_gloo_and_agree_on_it(why: str):
    done = run(
        f"""
    {FALLBACKS[why]}
    fast = share_memory(gloo, 10.0)
    assert fast.fast is None
    assert fast.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    print(f"rank {{rank}} keeps gloo")
    leave()
""",
        2,
    )
    assert done.returncode == 0, done.output
    assert done.stdout.count("keeps gloo") == 2


def test_nothing_is_left_after_a_kill(tmp_path: Path):
    """The memory has no name, in no folder."""
    before = sorted(path.name for path in Path("/dev/shm").iterdir())
    done = run(
        """
    fast = share_memory(gloo, 10.0)
    fast.all_reduce(torch.ones(4))
    assert not [each for each in os.listdir("/dev/shm") if "spmd" in each]
    os.kill(os.getpid(), signal.SIGKILL)
""",
        2,
    )
    assert done.returncode != 0
    assert sorted(path.name for path in Path("/dev/shm").iterdir()) == before
