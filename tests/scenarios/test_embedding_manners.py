"""An LLM inside another program: the caller's groups, files, threads and settings remain usable and unchanged.

This file runs once on two ranks for all its tests; the ranks run the checks in turn and record the failures, and each
test reads its own.
"""

import contextlib
import faulthandler
import gc
import itertools
import json
import locale
import logging
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from waiting import NotInTime, wait_until

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import ConfigError, ModelConfigError, RankFailedError, RanksDisagreeError

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
PROMPTS = ["copy a b c =", "reverse d e f g =", "sort 21 87 57 ="]
LIMIT_S = 240.0
SETTLE_S = 60.0

Check = Callable[[], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


# In pytest.


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_checks("gloo", tmp_path_factory.mktemp("manners"))


def run_checks(backend: str, folder: Path) -> dict[str, list[str]]:
    """Each rank's failures, by check."""
    ranks.run_forked([__file__, backend, folder], 2, LIMIT_S).checked()
    return read_failures(folder)


def read_failures(folder: Path) -> dict[str, list[str]]:
    """Failures written by `write_failures` on the ranks."""
    reports = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return {name: [report[name] for report in reports if report[name]] for name in reports[0]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", CHECKS)


@pytest.mark.guarantee("Caller's groups, handlers, settings stay")
def test_manners_in_the_callers_world(failures: dict[str, list[str]], name: str):
    assert not failures[name], "\n".join(failures[name])


WITH_A_PLANT = """
    import sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    import test_embedding_manners as manners
    from spmd_worker.ranks.groups import ParallelGroups

    def use_the_callers() -> None:
        # One rank alone sums over them: the caller's next sum meets this one.
        if dist.get_rank() == 1:
            kept.append((mine := torch.tensor([7.0, 0.0]), dist.all_reduce(mine, async_op=True)))

    plants = {
        "its world is destroyed": dist.destroy_process_group,
        "its group is destroyed": lambda: dist.destroy_process_group(manners.CALLERS_GROUPS[1]),
        "its world is used": use_the_callers,
    }
    kept, right = [], ParallelGroups.destroy
    ParallelGroups.destroy = lambda self: (plants[sys.argv[3]](), right(self))
    manners.write_failures(Path(sys.argv[2]), [sys.argv[4]])
    if dist.is_initialized():
        dist.destroy_process_group()
"""


@pytest.mark.gate("its world is used")
@pytest.mark.control("Caller's groups, handlers, settings stay")
@pytest.mark.parametrize("plant", ["its world is destroyed", "its group is destroyed", "its world is used"])
def test_engine_that_changes_callers_groups_is_detected(tmp_path: Path, plant: str, control):
    """Negative control: close() does that."""
    name = the_callers_groups_work_beside_the_engine_and_after_it.__name__
    ranks.run_ranks(WITH_A_PLANT, 2, LIMIT_S, ["gloo", tmp_path, plant, name]).checked()
    failures = read_failures(tmp_path)
    with control("in check_the_callers_groups\n"):
        test_manners_in_the_callers_world(failures, name)


SEEN = threading.Event()
LEAKS: dict[str, Callable[[], object]] = {
    "a socket": socket.socket,
    "a thread": lambda: threading.Thread(target=SEEN.wait, daemon=True).start(),
}


@pytest.mark.control("Caller's groups, handlers, settings stay")
@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS.keys())
def test_leftovers_are_detected(monkeypatch: pytest.MonkeyPatch, leak: Callable[[], object], control):
    """Negative control."""
    monkeypatch.setattr(sys.modules[__name__], "SETTLE_S", 0.1)
    kept: list[object] = []
    SEEN.clear()
    try:
        with control(), nothing_is_left():
            kept.append(leak())
    finally:
        SEEN.set()


CHANGES: dict[str, Callable[[], object]] = {
    "environment": lambda: os.environ.update(LEFT_BY_A_TEST="1"),
    "signals": lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
    "logging": lambda: logging.getLogger("spmd_worker").setLevel(logging.DEBUG),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "warnings": lambda: warnings.simplefilter("ignore"),
}


@pytest.mark.gate("dtype", "warnings")
@pytest.mark.control("Caller's groups, handlers, settings stay")
@pytest.mark.parametrize("setting", CHANGES)
def test_changed_setting_is_detected(setting: str):
    """Negative control."""
    before, dtype, level = process_settings(), torch.get_default_dtype(), logging.getLogger("spmd_worker").level
    handler = signal.getsignal(signal.SIGUSR2)
    try:
        with warnings.catch_warnings():
            CHANGES[setting]()
            assert [text.split(":")[0] for text in differences(before)] == [setting]
    finally:
        torch.set_default_dtype(dtype)
        signal.signal(signal.SIGUSR2, handler)
        logging.getLogger("spmd_worker").setLevel(level)
        os.environ.pop("LEFT_BY_A_TEST", None)


@pytest.mark.gpu
def test_embedding_in_callers_world_of_gloo_and_nccl(tmp_path: Path):
    """A build of torch without NCCL refuses the string."""
    failures = run_checks("cpu:gloo,cuda:nccl", tmp_path)
    assert not any(failures.values()), "\n".join(itertools.chain.from_iterable(failures.values()))


NEVER_CLOSED = """
    import gc, os, sys, threading, weakref
    import torch.distributed as dist
    class Owner: pass
    owner = Owner()
    # Called after what is made later; in one piece, because the ranks share a file.
    weakref.finalize(owner, lambda: os.write(1, f"groups at the end: {dist.is_initialized()}\\n".encode()))
    from spmd_worker import LLM, SamplingParams
    llm = LLM(sys.argv[1], tensor_parallel_size=2, num_blocks=64, device="cpu", timeout_s=240.0)
    llm.generate(["copy a b ="], SamplingParams(max_tokens=2), use_tqdm=False)
    if sys.argv[2] == "left alone":
        llm._release.detach()
    if sys.argv[2] == "forgotten":
        del llm
        gc.collect()
        assert not dist.is_initialized()
        assert [each.name for each in threading.enumerate()] == ["MainThread"]
"""


@pytest.mark.parametrize(("how", "is_left"), [("open", False), ("forgotten", False), ("left alone", True)])
def test_unclosed_engine_closes_at_garbage_collection_or_exit(how: str, is_left: bool):
    """Regression: its groups' threads sometimes aborted the process at its end. The last case is the control."""
    done = ranks.run_ranks(NEVER_CLOSED, 2, LIMIT_S, arguments=[MODEL, how])
    assert done.stdout.count(f"groups at the end: {is_left}\n") == 2, done.output
    assert is_left or done.returncode == 0, done.output


# On the ranks: the checks, in this order.


@check
def without_a_world_of_the_callers_the_engine_makes_one_and_takes_it_away() -> None:
    assert not dist.is_initialized()
    with nothing_is_left(is_exact=False), new_llm() as llm:
        assert dist.is_initialized()
        assert generate(llm) == EXPECTED
    assert not dist.is_initialized()


@check
def a_second_engine_without_a_world_of_the_callers_works_after_the_first() -> None:
    for _ in range(3):
        with nothing_is_left(), new_llm() as llm:
            assert generate(llm) == EXPECTED
        assert not dist.is_initialized()


@check
def the_callers_groups_work_beside_the_engine_and_after_it() -> None:
    make_the_callers_world()
    with new_llm() as llm:
        check_the_callers_groups()
        assert generate(llm) == EXPECTED
        check_the_callers_groups()
    check_the_callers_groups()


@check
def everything_the_engine_made_is_gone_after_close() -> None:
    with nothing_is_left(), new_llm() as llm:
        assert len(distributed_c10d._world.pg_map) > NUM_CALLERS_GROUPS
        generate(llm)


@check
def a_second_engine_after_close_gives_the_same_tokens() -> None:
    for _ in range(2):
        with nothing_is_left(), new_llm() as llm:
            assert generate(llm) == EXPECTED
            assert generate(llm) == EXPECTED


@check
def two_engines_at_once_do_not_disturb_each_other() -> None:
    with nothing_is_left(), new_llm() as one, new_llm() as other:
        assert generate(one) == generate(other) == generate(one) == EXPECTED


@check
def closing_in_the_middle_of_the_work_and_closing_twice_are_fine() -> None:
    with nothing_is_left():
        llm = new_llm()
        llm.llm_engine.add_request((5, 6, 7), SamplingParams(max_tokens=50, ignore_eos=True))
        llm.llm_engine.step()
        llm.close()
        llm.close()


@check
def random_states_of_torch_numpy_and_python_are_as_they_were() -> None:
    torch.manual_seed(11)
    numpy.random.seed(12)
    random.seed(13)
    before = random_states()
    with new_llm() as llm:
        generate(llm)
        assert random_states() == before
    assert random_states() == before


@check
def the_callers_random_states_do_not_change_what_is_sampled() -> None:
    torch.manual_seed(int(os.environ["RANK"]))
    random.seed(int(os.environ["RANK"]))
    with new_llm() as llm:
        assert generate(llm) == EXPECTED


@check
def settings_of_the_process_are_as_they_were() -> None:
    before = process_settings()
    with new_llm() as llm:
        assert differences(before) == []
        generate(llm)
        assert differences(before) == []
    assert differences(before) == []


@check
def signals_that_the_caller_handles_stay_the_callers() -> None:
    heard: list[int] = []
    right = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    with new_llm() as llm:
        generate(llm)
        os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, right)
    assert heard == [signal.SIGUSR1] * 2


@check
def a_default_dtype_and_gradients_of_the_callers_stay_and_change_no_token() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.enable_grad(), new_llm() as llm:
            assert generate(llm) == EXPECTED
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@check
def the_callers_tensors_train_on_while_the_engine_lives() -> None:
    weight = torch.ones(3, requires_grad=True)
    with new_llm() as llm:
        loss = (weight * 2).sum()
        generate(llm)
        loss.backward()
        dist.all_reduce(weight.grad)
    assert weight.grad.tolist() == [4.0] * 3


@check
def prompts_that_differ_are_an_error_after_which_the_engine_goes_on() -> None:
    with nothing_is_left(), new_llm() as llm:
        with pytest.raises(RanksDisagreeError, match=r"prompts\[0\]\.prompt_token_ids"):
            llm.generate([f"copy {os.environ['RANK']} ="], SamplingParams(max_tokens=2), use_tqdm=False)
        assert generate(llm) == EXPECTED


@check
def a_folder_without_a_model_leaves_the_callers_groups_working() -> None:
    with nothing_is_left(), tempfile.TemporaryDirectory() as folder, pytest.raises((ConfigError, ModelConfigError)):
        new_llm(model=folder)
    check_the_callers_groups()


@check
def a_folder_of_media_that_is_missing_fails_on_both() -> None:
    """Before, on rank 0 alone, and rank 1 waited for it."""
    with nothing_is_left(), pytest.raises(RankFailedError, match=r"^rank 0 failed while .*=/none is not a folder"):
        new_llm(allowed_local_media_path="/none")
    check_the_callers_groups()


@check
def a_damaged_checkpoint_on_one_rank_fails_on_both_and_leaves_the_callers_groups_working() -> None:
    with nothing_is_left(), tempfile.TemporaryDirectory() as folder:
        model = Path(shutil.copytree(MODEL, Path(folder) / "model"))
        if os.environ["RANK"] == "1":
            weights = model / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1000])
        with pytest.raises(RankFailedError, match=r"^rank 1 failed while "):
            new_llm(model=model)
    check_the_callers_groups()


@check
def ranks_that_were_given_different_seeds_fail_and_leave_the_callers_groups_working() -> None:
    with nothing_is_left(), pytest.raises(RanksDisagreeError, match=r"config\.seed is 0 .* 0, 1 on rank 1"):
        new_llm(seed=int(os.environ["RANK"]))
    check_the_callers_groups()


@check
def a_layout_of_more_ranks_than_the_world_has_is_a_clear_error_and_leaves_the_callers_groups_working() -> None:
    with nothing_is_left(), pytest.raises(ConfigError, match=r" 4 ranks per .*, but 2 "):
        new_llm(tensor_parallel_size=4)
    check_the_callers_groups()


@check
def an_engine_of_fewer_ranks_than_the_world_has_knows_nothing_of_the_others() -> None:
    """Only rank 0 asks for anything: nobody waits for rank 1."""
    with nothing_is_left(), new_llm(tensor_parallel_size=1) as llm:
        if dist.get_rank() == 0:
            assert generate(llm) == EXPECTED
    check_the_callers_groups()


@check
def an_engine_starts_after_all_these_failures() -> None:
    with nothing_is_left(), new_llm() as llm:
        assert generate(llm) == EXPECTED


@check
def a_world_that_no_launcher_described_is_asked_of_torch() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    taken = {name: os.environ.pop(name) for name in names}
    try:
        with nothing_is_left(), new_llm() as llm:
            assert generate(llm) == EXPECTED
    finally:
        os.environ.update(taken)


# What the checks use.

EXPECTED: list[list[int]] = []
"""The tokens of the first engine that ran."""

CALLERS_GROUPS: list[dist.ProcessGroup] = []
NUM_CALLERS_GROUPS = 2


def new_llm(**options: object) -> LLM:
    given = {"model": MODEL, "tensor_parallel_size": 2, "num_blocks": 64, "device": "cpu", "timeout_s": LIMIT_S}
    return LLM(**{**given, **options})


def generate(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True, logprobs=1)
    tokens = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    assert all(len(each) == 6 for each in tokens)
    if not EXPECTED:
        EXPECTED.extend(tokens)
    return tokens


def make_the_callers_world() -> None:
    dist.init_process_group(sys.argv[1])
    CALLERS_GROUPS[:] = [dist.group.WORLD, dist.new_group([0, 1], backend="gloo")]
    check_the_callers_groups()


def check_the_callers_groups() -> None:
    assert dist.is_initialized()
    for group in CALLERS_GROUPS:
        # A group that was destroyed still adds, while somebody holds it.
        assert group in distributed_c10d._world.pg_map
        values = torch.tensor([1.0, float(dist.get_rank())])
        dist.all_reduce(values, group=group)
        assert values.tolist() == [2.0, 1.0]
    dist.barrier(group=CALLERS_GROUPS[1])


@contextmanager
def nothing_is_left(is_exact: bool = True) -> Iterator[None]:
    """Groups, threads and open files are no more afterwards than before. What a library keeps from its first use on
    (`is_exact` false) is allowed once. Fewer they may be: threads of native code end a moment after they were told to,
    and those of the check before may be among what was there before.
    """
    # Nothing of an earlier test is closed meanwhile, which would hide one that stays.
    gc.collect()
    before = held()
    yield
    with contextlib.suppress(NotInTime):
        wait_until(lambda: gc.collect() >= 0 and not more_than(before), SETTLE_S)
    assert not is_exact or not more_than(before), (before, held())
    assert held()["groups"] == before["groups"]


def more_than(before: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    """Resources held now and not before."""
    return {name: more for name, now in held().items() if (more := now - before[name])}


def held() -> dict[str, Counter[str]]:
    files = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    targets = [target.split("[")[0] for each in files if (target := target_of(each))]
    tasks = [name for task in os.listdir("/proc/self/task") if (name := thread_name(task)) is not None]
    return {
        "groups": Counter(groups=len(distributed_c10d._world.pg_map)),
        "python threads": Counter(thread.name for thread in threading.enumerate()),
        "threads": Counter(tasks),
        "files": Counter(targets),
    }


def target_of(descriptor: str) -> str:
    """Empty for a descriptor that is closed by now, as that of the search itself is."""
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return ""


def thread_name(task: str) -> str | None:
    """None for a thread that has ended meanwhile: the system lists it a moment longer than Python does."""
    try:
        return Path(f"/proc/self/task/{task}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None


def random_states() -> list[object]:
    kind, keys, *rest = numpy.random.get_state()
    return [torch.get_rng_state().tolist(), kind, keys.tolist(), rest, random.getstate()]


def process_settings() -> dict[str, object]:
    root, ours = logging.getLogger(), logging.getLogger("spmd_worker")
    return {
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "logging": (root.level, list(root.handlers), ours.level, list(ours.handlers), ours.propagate),
        "logging of others": (logging.getLogger("torch").level, logging.root.manager.disable),
        "warnings": list(warnings.filters),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, faulthandler.is_enabled()),
        "path": list(sys.path),
        "locale": locale.setlocale(locale.LC_ALL),
        "processors": os.sched_getaffinity(0),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "determinism": (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
        "backends": (torch.backends.mkldnn.enabled, torch.backends.cudnn.benchmark),
        "cuda": (torch.cuda.is_initialized(), torch.cuda.current_device() if torch.cuda.is_initialized() else None),
    }


def differences(before: dict[str, object]) -> list[str]:
    return [f"{name}: {before[name]} became {now}" for name, now in process_settings().items() if before[name] != now]


def main(folder: Path) -> None:
    write_failures(folder, CHECKS)
    dist.destroy_process_group()


def write_failures(folder: Path, names: Iterable[str]) -> None:
    """Writes this rank's failures of the checks, in order."""
    report = {}
    for name in names:
        try:
            CHECKS[name]()
            report[name] = ""
        except Exception:
            report[name] = f"rank {os.environ['RANK']}: {traceback.format_exc()}"
            print(name, report[name], file=sys.stderr, flush=True)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[2]))
