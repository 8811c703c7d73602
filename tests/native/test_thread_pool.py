"""The threads of the compiled kernels: who computes an item, and when, changes no bit.

In the library with delays, threads lose their cores at random in the midst of their items.
"""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ranks
import torch
from forked_child import in_child
from native_builds import DELAY, HAS_AMX, NATIVE, WITHOUT_AMX, built_with, compiled_with, library_for, native
from paged_steps import Sizes, run, sequence, together
from torch import Tensor
from waiting import wait_until

from spmd_worker.native import build
from spmd_worker.native.library import NativeLibrary, thread_pool_counters
from spmd_worker.ops.attention.cpu import CpuBackend
from spmd_worker.ops.kernels.cpu.native import CpuKernels

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def numbers(*shape: int, dtype: torch.dtype = FLOAT32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def results_of(library: NativeLibrary, dtype: torch.dtype) -> list[Tensor]:
    """Of every kind of kernel: products, gated and with the largest alone, norms, attention."""
    kernels, x = CpuKernels(library), numbers(70, 576, dtype=dtype)
    weight = numbers(1536, 576, dtype=dtype)
    results = [
        kernels.linear(x, kernels.pack(weight), None),
        kernels.gated_linear(x, kernels.pack_gated(weight), None),
        *kernels.linear_argmax(x, kernels.pack(weight), 1500),
        kernels.rms_norm(x, weight[0], 1e-5),
    ]
    sizes = Sizes(dtype=dtype, group_size=3)
    backend = CpuBackend(library, dtype, (sizes.head_size,), sizes.block_size)
    results.append(run(backend, sequence(203, sizes), 100))
    results += together(backend, [sequence(length, sizes, length) for length in (1, 64, 130, 17)], [1, 1, 66, 3])
    return results


def are_equal(results: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(results, others, strict=True))


@pytest.mark.guarantee("Threads that lose their cores change no bit")
@pytest.mark.stress
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_threads_that_lose_their_cores_change_no_bit(threads, dtype):
    threads(1)
    alone = results_of(native(), dtype)
    delayed = compiled_with(DELAY)
    before = thread_pool_counters(delayed)
    for num_threads in (2, 3, 5) * 4:
        threads(num_threads)
        assert are_equal(results_of(delayed, dtype), alone), num_threads
    after = thread_pool_counters(delayed)
    assert after.num_jobs > before.num_jobs
    assert after.num_slept > before.num_slept
    assert after.waited_s > before.waited_s


COMPARED = """
import sys
from pathlib import Path
import torch
from native_builds import native
from spmd_worker.native.build import Built
from spmd_worker.native.library import load
from test_thread_pool import are_equal, results_of

planted = load(Built(Path(sys.argv[1]), is_private=False))
torch.set_num_threads(1)
alone = results_of(native(), torch.bfloat16)
torch.set_num_threads(3)
print("begun", flush=True)
print(all(are_equal(results_of(planted, torch.bfloat16), alone) for _ in range(10)))
"""
"""In a process of its own: threads that nobody waits for write where the calling thread has other things by then."""


@pytest.mark.control("Threads that lose their cores change no bit")
@pytest.mark.stress
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("_acquire) == count;", "_acquire) == count;", id="nothing"),
        pytest.param("_acquire) == count;", "_acquire) + 1 >= count;", id="the end"),
        pytest.param("seen, seen + 1, std", "seen, seen + 2, std", id="an item"),
    ],
)
def test_item_without_wait_is_detected(right, wrong, tmp_path, monkeypatch):
    """Negative control: a job that ends one item early, or leaves items out, has other results, or no end."""
    sources = Path(shutil.copytree(Path(build.__file__).parent, tmp_path / "native"))
    text = (sources / "thread_pool.cpp").read_text()
    waiting = "seen != count; seen = num_done_.load()) sleep"
    assert (text.count(right), text.count(waiting)) == (1, 1)
    text = text.replace(right, wrong)
    if right != wrong:
        # Where items are left out the caller would wait for ever.
        text = text.replace(waiting, "false;) sleep")
    (sources / "thread_pool.cpp").write_text(text)
    monkeypatch.setattr(build, "_SOURCE_FOLDER", sources)
    path = built_with(DELAY).path
    monkeypatch.undo()
    folders = os.pathsep.join((*ranks.IMPORT_PATH, str(Path(__file__).parent)))
    done = ranks.run_command([sys.executable, "-c", COMPARED, str(path)], 300.0, {"PYTHONPATH": folders})
    # A program that ends before it compares has seen nothing.
    assert done.stdout.startswith("begun\n"), done.output
    is_equal = done.returncode == 0 and done.stdout == "begun\nTrue\n"
    assert is_equal == (right == wrong), done.output


def test_two_callers_at_once_each_get_their_own(threads):
    """One has the team; the other computes by itself meanwhile."""
    kernels = CpuKernels(native())
    packed = kernels.pack(numbers(1536, 576))
    inputs = [numbers(70, 576) + number for number in range(4)]
    threads(2)
    expected = [kernels.linear(x, packed, None) for x in inputs]
    results: list[list[Tensor]] = [[] for _ in inputs]

    def ask(number: int) -> None:
        results[number] = [kernels.linear(inputs[number], packed, None) for _ in range(30)]

    callers = [threading.Thread(target=ask, args=(number,)) for number in range(len(inputs))]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    for result, right in zip(results, expected, strict=True):
        assert len(result) == 30
        assert all(torch.equal(each, right) for each in result)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="there is no list of threads")
def test_the_teams_threads_take_no_signals(threads):
    """Python's handlers run in the thread that a signal wakes."""
    threads(2)
    kernels = CpuKernels(native())
    packed = kernels.pack(numbers(1536, 576))
    kernels.linear(numbers(70, 576), packed, None)

    def blocked() -> list[int]:
        # A thread of something else may end meanwhile, and has no bytes.
        tasks = Path("/proc/self/task").iterdir()
        statuses = [ranks.proc_bytes(task / "status").decode() for task in tasks]
        ours = [status for status in statuses if status.startswith("Name:\tspmd-team\n")]
        return [int(status.partition("SigBlk:\t")[2].split()[0], 16) for status in ours]

    wait_until(blocked)
    terminate, interrupt, violation = (1 << number - 1 for number in (signal.SIGTERM, signal.SIGINT, signal.SIGSEGV))
    assert all(mask & terminate and mask & interrupt for mask in blocked())
    # What a thread itself did wrong is told by a handler that shows stacks.
    assert not any(mask & violation for mask in blocked())


def test_subnormal_mode_of_caller_changes_no_bit(threads):
    """A setting of a thread, which the team's threads have not. AMX has no subnormal numbers."""
    kernels, x = CpuKernels(library_for(WITHOUT_AMX if HAS_AMX else NATIVE)), torch.full((70, 576), 1e-22)
    packed = kernels.pack(torch.full((1536, 576), 1e-21))
    threads(2)
    expected = kernels.linear(x, packed, None)
    assert ((expected > 0) & (expected < torch.finfo(FLOAT32).tiny)).all()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        results = [kernels.linear(x, packed, None) for _ in range(5)]
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.matrix
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are not bound here")
def test_thread_pool_uses_cores_of_all_openmp_places(tmp_path: Path):
    """OpenMP binds the thread that loads it to the first place, and with it all that it starts."""
    program = """
import os, time, torch
from pathlib import Path
torch.set_num_threads(2)
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.native.library import native_library
kernels = CpuKernels(native_library())
kernels.linear(torch.randn(70, 576), kernels.pack(torch.randn(1536, 576)), None)
def team():
    return [path for path in Path("/proc/self/task").iterdir() if (path / "comm").read_text().strip() == "spmd-team"]
# A caller may have done all the work before a thread begins.
while not (tasks := team()):
    time.sleep(0.01)
print(len(os.sched_getaffinity(0)), [len(os.sched_getaffinity(int(path.name))) for path in tasks])
"""
    num_cores = len(os.sched_getaffinity(0))
    done = ranks.run_command([sys.executable, "-c", program], 120.0, {"OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2"})
    assert done.stdout == f"1 [{num_cores}]\n", done.output


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_makes_threads_of_its_own(threads):
    threads(2)
    kernels = CpuKernels(native())
    packed, x = kernels.pack(numbers(1536, 576)), numbers(70, 576)
    expected = kernels.linear(x, packed, None).numpy().tobytes()
    assert thread_pool_counters(native()).num_jobs > 0

    def compute() -> None:
        # No operation of torch's: the threads of its own did not survive the fork.
        assert kernels.linear(x, packed, None).numpy().tobytes() == expected
        assert thread_pool_counters(native()).num_jobs == 1

    assert in_child(compute) == 0
