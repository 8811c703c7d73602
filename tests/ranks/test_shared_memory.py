"""Exchange through shared memory: what gloo gives, in a fixed order of sums, whatever the ranks are busy with.

Ranks are processes; each runs the source below and the checks are made in it.
"""

import re
import shutil
from pathlib import Path

import pytest
import ranks

from spmd_worker.native import build

LIMIT_S = 240.0

START = """
    import os, random, signal, sys, threading, time
    from dataclasses import replace
    from pathlib import Path
    import torch, torch.distributed as dist
    from spmd_worker.ranks import shared_memory
    # They spin too, where two share two cores: the fork server has ranks that never do.
    shared_memory._num_cores = lambda: 2
    from spmd_worker.ops.kernels.cpu.native import cpu_kernels
    from spmd_worker.ranks.shared_memory import share_memory
    from spmd_worker.ranks.communicator import GroupHandle
    from spmd_worker.ranks.leaves import tree_sum
    from waiting import at_least, wait_until
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    gloo = GroupHandle(tuple(range(size)), rank, dist.group.WORLD, adds_by_tree=True)
    late = float(os.environ.get("LATE", "0.02"))
    def say_how_a_sum_ends(fast):
        try:
            fast.all_reduce(torch.ones(4))
        except RuntimeError as error:
            os.write(1, f"rank {rank}: {error}\\n".encode())
    def leave():
        # gloo's own threads may still be ending when the interpreter does.
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)
"""

MANY_ROUNDS = """
    shared_memory.SLOT_BYTES, shared_memory._FEW_ELEMENTS = 1 << 12, 100
    fast = share_memory(gloo, 240.0)
    assert fast.fast is not None
    alike, own = random.Random(5), random.Random(rank)
    kernels, _ = cpu_kernels(torch.float32)
    for number in range(1500 if size < 4 else 500):
        count = alike.choice((0, 1, 2, 15, 16, 17, 31, 1000, 1024, 1025, 2048, 5000))
        dtype = alike.choice((torch.float32, torch.bfloat16))
        seeds = [torch.Generator().manual_seed(number * 8 + each) for each in range(size)]
        parts = [torch.randn(count, generator=seed).to(dtype) for seed in seeds]
        if own.random() < late:
            time.sleep(own.random() * 0.01)
        kind = alike.randrange(6)
        if kind == 0:
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            room = fast.fast.part_buffer((1, count), dtype) if alike.random() < 0.5 else None
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
            parts = [torch.randn(shape, generator=seed) for seed in seeds]
            residual = torch.randn(shape, generator=seeds[0]).to(dtype)
            total, alone = residual.clone(), residual.clone()
            room = fast.fast.part_buffer(shape, torch.float32) if alike.random() < 0.5 else None
            assert room is None or rows * row_size * 4 <= shared_memory.SLOT_BYTES
            part = parts[rank].clone() if room is None else room.copy_(parts[rank])
            normal = fast.fast.all_reduce_add_rms_norm(part, total, weight, 1e-5)
            expected = kernels.add_rms_norm(tree_sum(parts).to(dtype), alone, weight, 1e-5)
            assert torch.equal(normal, expected), (number, shape, dtype)
            assert torch.equal(fast.fast.gather_rows(total), alone), (number, shape, dtype)
        elif kind == 4:
            parts = [torch.randn(count, generator=seed) for seed in seeds]
            room = fast.fast.part_buffer((1, count), torch.float32) if alike.random() < 0.5 else None
            part = parts[rank].clone() if room is None else room[0].copy_(parts[rank])
            found = fast.sum_parts(part, dtype)
            assert torch.equal(found, tree_sum(parts).to(dtype)), (number, count, dtype)
            if count == 1000:
                assert torch.equal(gloo.sum_parts(parts[rank], dtype), found), "gloo adds by the same tree"
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
    fast = share_memory(gloo, 240.0)
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
        if own.random() < late:
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


def run(source: str, num_ranks: int, folder: Path | None = None, **variables: str) -> ranks.CompletedRanks:
    arguments = [] if folder is None else [folder]
    return ranks.run_ranks(START + source, num_ranks, LIMIT_S, arguments=arguments, env=variables)


@pytest.mark.gate("4")
@pytest.mark.matrix
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.stress), 4])
def test_shared_memory_collectives_are_right_over_many_rounds(num_ranks: int):
    """Also with more ranks than cores, slots that are far too small, and ranks that come late."""
    done = run(MANY_ROUNDS, num_ranks).checked()
    assert sorted(re.findall(r"rank \d was right", done.stdout)) == [
        f"rank {each} was right" for each in range(num_ranks)
    ]


@pytest.mark.gate("4")
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_messages_to_the_next_rank_arrive_in_order(num_ranks: int):
    done = run(MANY_MESSAGES, num_ranks).checked()
    assert done.stdout.count("was right") == num_ranks


def test_message_arrives_while_the_sender_is_idle():
    """The receiver is late for two messages; the sender then waits for an answer to the third."""
    done = run(
        """
    fast = share_memory(gloo, 240.0)
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
    ).checked()
    assert done.stdout.count("was answered") == 2


PLANTS = {
    "one slot for odd and even rounds: some rank writes while another still reads": (
        MANY_ROUNDS,
        {"int64_t(round % 2) * size": "int64_t(0) * size"},
    ),
    "nobody waits for the rows that others norm": (
        MANY_ROUNDS,
        {
            "return run_round(group, [](char*) {}, [](uint32_t) {});": "return 0;",
            # So that they are not there yet when the others look.
            "const int64_t end = num_rows * (group.rank + 1)": "if (group.rank == 1) usleep(200);\n"
            "        const int64_t end = num_rows * (group.rank + 1)",
        },
    ),
    "the place of norms is asked for with the bytes of a bfloat16": (
        MANY_ROUNDS,
        {"num_elements * int64_t(sizeof(float)) <= slot_bytes": "num_elements * 2 <= slot_bytes"},
    ),
    "messages are sent before their slot was emptied": (
        MANY_MESSAGES,
        {"rank + 1, number - 2);": "rank + 1, number - 9);"},
    ),
}


@pytest.mark.stress
@pytest.mark.parametrize("why", PLANTS)
def test_shared_memory_check_detects_injected_faults(tmp_path: Path, why: str):
    """Negative controls, each with a library of its own to compile."""
    script, changes = PLANTS[why]
    sources = Path(shutil.copytree(Path(build.__file__).parent, tmp_path / "cpu"))
    text = (sources / "shared_memory.cpp").read_text()
    for right, wrong in changes.items():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    (sources / "shared_memory.cpp").write_text(text)
    planted = """
    from pathlib import Path
    from spmd_worker.native import build
    build._SOURCE_FOLDER = Path(sys.argv[1])
"""
    # Ranks that often come late, so that what nobody waits for is not there yet.
    done = run(planted + script, 2, sources, LATE="0.3")
    assert done.returncode != 0
    # The check itself, or what it reads is so wrong that it cannot be compared.
    assert "AssertionError" in done.stderr or "is invalid for input of size" in done.stderr


def test_departed_rank_is_named_within_a_moment():
    done = run(
        """
    fast = share_memory(gloo, 600.0)
    # The launcher, which sees the end too, wants the others to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fast.all_reduce(torch.ones(4))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    say_how_a_sum_ends(fast)
    os._exit(0)
""",
        3,
    )
    # Lines of two processes may end up in one.
    said = re.findall(r"rank (\d): (.*?has left)", done.stdout)
    text = "shared memory: rank 1 has left"
    assert sorted(said) == [("0", text), ("2", text)], done.output


@pytest.mark.parametrize("waits_to_send", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_message_wait_ends_when_the_other_rank_leaves(waits_to_send: bool):
    """A wait for a message, or for capacity to send."""
    done = run(
        f"""
    fast = share_memory(gloo, 600.0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fast.all_reduce(torch.ones(4))
    gone = 1 if {waits_to_send} else 0
    if rank == gone:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            # Two messages find room, the third waits for one of them to be taken.
            (fast.send_next(torch.ones(4)) if gone else fast.receive_previous(torch.ones(4))).wait()
    except RuntimeError as error:
        print(f"rank {{rank}}: {{error}}", flush=True)
    os._exit(0)
""",
        2,
    )
    found = re.search(r": shared memory: rank (\d) has left", done.stdout)
    assert found, done.output
    assert int(found[1]) == int(waits_to_send)


def test_closed_rank_is_reported_as_departed():
    done = run(
        """
    fast = share_memory(gloo, 600.0)
    fast.all_reduce(torch.ones(4))
    if rank == 1:
        time.sleep(0.2)
        fast.fast.close()
        # It is there until the other one leaves too.
        leave()
    say_how_a_sum_ends(fast)
    leave()
""",
        2,
    )
    assert "rank 0: shared memory: rank 1 has left" in done.stdout, done.output


@pytest.mark.matrix
def test_wait_for_a_late_rank_ends_at_timeout():
    done = run(
        """
    fast = share_memory(gloo, 1.0)
    # The other one never makes this call.
    if rank == 0:
        with at_least(0.9):
            say_how_a_sum_ends(fast)
    leave()
""",
        2,
    ).checked()
    assert "rank 0: shared memory: timed out waiting for another rank" in done.stdout, done.output


def test_waiting_rank_yields_core_and_interpreter_lock(tmp_path: Path):
    """Waiting sleeps: the process takes little of its core, and Python's lock is not held."""
    done = run(
        """
    fast = share_memory(gloo, 600.0)
    fast.all_reduce(torch.ones(4))
    has_counted = Path(sys.argv[1], "counted")
    if rank == 1:
        # A second at least, and until the other rank's thread has had its turns: if it gets none, for ever.
        time.sleep(1)
        wait_until(has_counted.exists)
        fast.all_reduce(torch.ones(4))
    else:
        def count():
            for _ in range(50):
                time.sleep(0.01)
            has_counted.touch()
        threading.Thread(target=count).start()
        before, began = time.process_time(), time.monotonic()
        fast.all_reduce(torch.ones(4))
        share = (time.process_time() - before) / (time.monotonic() - began)
        print(f"{share:.3f} of the core", flush=True)
    dist.barrier()
    leave()
""",
        2,
        tmp_path,
    ).checked()
    (found,) = re.search(r"([\d.]+) of the core", done.stdout).groups()
    assert float(found) < 0.25


FALLBACKS = {
    "another node": "shared_memory.node_name = lambda: f'node {rank}'",
    "no way to tell the node": "shared_memory.node_name = lambda: ''",
    "no kernels on one rank": "if rank: shared_memory.native_library = lambda: 'no compiler'",
    "no memory on one rank": "if rank: shared_memory._map_memory = lambda *_: None",
    "no memory at all": "shared_memory._make_memory = lambda *_: -1",
}


@pytest.mark.parametrize(
    "why",
    [pytest.param(why, marks=[] if why.endswith("one rank") else pytest.mark.matrix) for why in FALLBACKS],
)
def test_fallback_to_gloo_is_agreed_by_all_ranks(why: str):
    done = run(
        f"""
    {FALLBACKS[why]}
    fast = share_memory(gloo, 240.0)
    assert fast.fast is None
    assert fast.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    print(f"rank {{rank}} keeps gloo")
    leave()
""",
        2,
    ).checked()
    assert done.stdout.count("keeps gloo") == 2


def test_killed_ranks_leave_no_shared_memory():
    """The memory has no name, in no folder: what is mapped ends with those that map it."""
    done = run(
        """
    fast = share_memory(gloo, 240.0)
    fast.all_reduce(torch.ones(4))
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    for name in {line[5] for line in lines if line[1] == "rw-s"}:
        os.write(1, f"mapped {name}\\n".encode())
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
""",
        2,
    )
    assert done.returncode != 0
    mapped = re.findall(r"^mapped (.*)$", done.stdout, re.MULTILINE)
    assert len([name for name in mapped if name.startswith("/memfd:")]) == 2, done.output
    assert all(name.endswith(" (deleted)") for name in mapped), done.output
