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
    from spmd_worker.kernels.cpu.native import cpu_kernels
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
    shared_memory.SLOT_BYTES, shared_memory._FEW_ELEMENTS = 1 << 12, 100
    fast = share_memory(gloo, 30.0)
    assert fast.fast is not None
    alike, own = random.Random(5), random.Random(rank)
    kernels, _ = cpu_kernels(torch.float32)
    for number in range(1500):
        count = alike.choice((0, 1, 2, 15, 16, 17, 31, 1000, 1024, 1025, 2048, 5000))
        dtype = alike.choice((torch.float32, torch.bfloat16))
        seeds = [torch.Generator().manual_seed(number * 8 + each) for each in range(size)]
        parts = [torch.randn(count, generator=seed).to(dtype) for seed in seeds]
        if own.random() < 0.02:
            time.sleep(own.random() * 0.01)
        kind = alike.randrange(5)
        if kind == 0:
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            room = fast.fast.room_for_part((1, count), dtype) if alike.random() < 0.5 else None
            part = parts[rank].clone() if room is None else room[0].copy_(parts[rank])
            found = fast.all_reduce(part)
            assert torch.equal(found, total.to(dtype)), (number, count, dtype)
        elif kind == 1:
            assert torch.equal(fast.all_gather(parts[rank]), torch.stack(parts)), number
            pairs = fast.all_gather(torch.tensor([[rank, number]])).tolist()
            assert pairs == [[[each, number]] for each in range(size)]
        elif kind == 2:
            source = alike.randrange(size)
            assert torch.equal(fast.broadcast(parts[rank].clone(), source), parts[source]), number
        elif kind == 3:
            # Also with rows shared out, and parts computed where they are read, unless they are larger than a slot.
            rows, row_size = alike.choice((0, 1, 3, 7, 80)), alike.choice((1, 16, 57, 512))
            shape, weight = (rows, row_size), torch.randn(row_size, generator=seeds[0]).to(dtype)
            parts = [torch.randn(shape, generator=seed).to(dtype) for seed in seeds]
            residual = torch.randn(shape, generator=seeds[0]).to(dtype)
            total, alone = residual.clone(), residual.clone()
            room = fast.fast.room_for_part(shape, dtype) if alike.random() < 0.5 else None
            assert room is None or rows * row_size * dtype.itemsize <= shared_memory.SLOT_BYTES
            part = parts[rank].clone() if room is None else room.copy_(parts[rank])
            normal = fast.fast.all_reduce_add_rms_norm(part, total, weight, 1e-5)
            summed = parts[0].float()
            for each in parts[1:]:
                summed = summed + each.float()
            expected = kernels.add_rms_norm(summed.to(dtype), alone, weight, 1e-5)
            assert torch.equal(normal, expected), (number, shape, dtype)
            assert torch.equal(fast.fast.gather_rows(total), alone), (number, shape, dtype)
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


MANY_MESSAGES = """
    shared_memory.SLOT_BYTES = 1 << 12
    fast = share_memory(gloo, 30.0)
    assert fast.fast is not None
    alike, own = random.Random(5), random.Random(rank)
    def message(number, sender, shape, dtype):
        generator = torch.Generator().manual_seed(number * 8 + sender)
        return torch.randn(shape, generator=generator).to(dtype)
    sending, receiving = None, []
    for number in range(600):
        # The last is larger than a slot: gloo carries it, between the others.
        shape = alike.choice(((0, 3), (1, 1), (7, 64), (16, 64), (40, 64)))
        dtype = alike.choice((torch.float32, torch.bfloat16))
        if rank > 0:
            receiving.append((number, fast.receive_previous(torch.empty(shape, dtype=dtype))))
        if own.random() < 0.02:
            time.sleep(own.random() * 0.01)
        if rank + 1 < size:
            if sending is not None:
                sending.wait()
            sending = fast.send_next(message(number, rank, shape, dtype))
        # As a stage that is behind takes them.
        while len(receiving) > own.randrange(3):
            which, transfer = receiving.pop(0)
            transfer.wait()
            expected = message(which, rank - 1, transfer.tensor.shape, transfer.tensor.dtype)
            assert torch.equal(transfer.tensor, expected), which
    if sending is not None:
        sending.wait()
    for which, transfer in receiving:
        transfer.wait()
        assert torch.equal(
            transfer.tensor, message(which, rank - 1, transfer.tensor.shape, transfer.tensor.dtype)
        ), which
    print(f"rank {rank} was right")
    fast.fast.close()
    leave()
"""


def run(source: str, num_ranks: int, folder: Path | None = None) -> ranks.CompletedRanks:
    return ranks.run_ranks(START + source, num_ranks, LIMIT_S, arguments=[] if folder is None else [folder])


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_many_rounds_of_all_kinds_and_sizes_give_what_they_should(num_ranks: int):
    """Also with more ranks than cores, slots that are far too small, and ranks that come late."""
    done = run(MANY_ROUNDS, num_ranks)
    assert done.returncode == 0, done.output
    assert sorted(re.findall(r"rank \d was right", done.stdout)) == [
        f"rank {each} was right" for each in range(num_ranks)
    ]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_messages_to_the_next_rank_come_whole_and_in_order(num_ranks: int):
    done = run(MANY_MESSAGES, num_ranks)
    assert done.returncode == 0, done.output
    assert done.stdout.count("was right") == num_ranks


def test_what_was_sent_arrives_though_the_sender_does_nothing_more():
    """The receiver is late for two messages; the sender then waits for an answer to the third."""
    done = run(
        """
    fast = share_memory(gloo, 10.0)
    if rank == 0:
        sent = [fast.send_next(torch.full((4,), float(number))) for number in range(3)]
    else:
        time.sleep(0.3)
        for number in range(3):
            transfer = fast.receive_previous(torch.empty(4))
            transfer.wait()
            assert transfer.tensor.tolist() == [number] * 4
    fast.all_reduce(torch.ones(1))
    print(f"rank {rank} was answered", flush=True)
    leave()
""",
        2,
    )
    assert done.returncode == 0, done.output
    assert done.stdout.count("was answered") == 2


PLANTS = {
    "one slot for odd and even rounds: some rank writes while another still reads": (
        MANY_ROUNDS,
        "int64_t(round % 2) * size",
        "int64_t(0) * size",
    ),
    "nobody waits for the rows that others norm": (
        MANY_ROUNDS,
        "return run_round(group, [](char*) {}, [](uint32_t) {});",
        "return 0;",
    ),
    "messages are sent before their slot was emptied": (
        MANY_MESSAGES,
        "rank + 1, number - 2);",
        "rank + 1, number - 9);",
    ),
}


@pytest.mark.parametrize(
    "why", [pytest.param(why, marks=[] if why.startswith("one slot") else pytest.mark.slow) for why in PLANTS]
)
def test_many_rounds_find_what_is_wrong(tmp_path: Path, why: str):
    """Negative controls."""
    script, right, wrong = PLANTS[why]
    sources = Path(shutil.copytree(Path(build.__file__).parent, tmp_path / "cpu"))
    text = (sources / "shared_memory.cpp").read_text()
    assert text.count(right) == 1
    (sources / "shared_memory.cpp").write_text(text.replace(right, wrong))
    planted = """
    from pathlib import Path
    from spmd_worker.kernels.cpu import build
    build._SOURCE_FOLDER = Path(sys.argv[1])
"""
    done = run(planted + script, 2, sources)
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


@pytest.mark.parametrize("waits_to_send", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_whoever_waits_for_a_message_or_for_room_is_told_that_the_other_has_gone(waits_to_send: bool):
    done = run(
        f"""
    fast = share_memory(gloo, 60.0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fast.all_reduce(torch.ones(4))
    gone = 1 if {waits_to_send} else 0
    if rank == gone:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in range(3):
            # Two messages find room, the third waits for one of them to be taken.
            (fast.send_next(torch.ones(4)) if gone else fast.receive_previous(torch.ones(4))).wait()
    except RuntimeError as error:
        print(f"rank {{rank}} after {{time.monotonic() - began:.2f}}: {{error}}", flush=True)
    time.sleep(1)
    os._exit(0)
""",
        2,
    )
    found = re.search(r"after ([\d.]+): shared memory: Connection closed by peer: rank (\d) has left", done.stdout)
    assert found, done.output
    assert 0.1 < float(found[1]) < 2.0
    assert int(found[2]) == int(waits_to_send)


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


@pytest.mark.slow
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
