"""Workers without a model or torch: one that notes its calls, and one for tests of worker processes."""

import ctypes
import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from cache_specs import uniform_spec

from kv_cache.cache_spec import CacheSpec
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.replica.sequence.outputs import Logprob
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.worker_base import WorkerBase


class FakeWorker(WorkerBase):
    """Notes its calls; `fails` names the method that raises."""

    vocab_size, max_model_len = 96, 64

    def __init__(self, name: str = "fake", fails: str = "", **_: Any) -> None:
        self.name, self.fails = name, fails
        self.calls: list[tuple[Any, ...]] = []

    def _note(self, method: str, *args: Any) -> None:
        self.calls.append((method, *args))
        if method == self.fails:
            raise ValueError(f"{method} went wrong")

    def add(self, one: int, other: int = 0) -> int:
        """Not part of the interface: an RPC by name may reach it too."""
        return one + other

    def init_device(self) -> None:
        self._note("init_device")

    def load_model(self) -> None:
        self._note("load_model")

    def get_kv_cache_spec(self) -> CacheSpec:
        return uniform_spec(num_layers=1, num_kv_heads=1, head_size=2, dtype_bytes=4, block_size=16)

    def determine_num_available_blocks(self) -> tuple[int, int]:
        return 7, 0

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        self._note("initialize_cache", num_device_blocks, num_host_blocks)

    def initialize_host_tier(self, num_slots: int) -> None:
        self._note("initialize_host_tier", num_slots)

    def execute_model(self, plan: StepPlan) -> StepResult | None:
        self._note("execute_model", plan)
        return None

    def sample_tokens(self, grammar_output: object | None = None) -> StepResult:
        self._note("sample_tokens", grammar_output)
        return StepResult(self.calls[-2][1].step)

    def check_health(self) -> None:
        self._note("check_health")

    def get_model(self) -> Any:
        return object()

    def get_model_inspection(self) -> str:
        return "nothing"

    def shutdown(self) -> None:
        self._note("shutdown")


class PlainWorker(FakeWorker):
    """A worker of a process: its step's token ids are its rank and the step's number. `arrange` says what the next step
    does on one rank: raise, die, exit, hang or stop.
    """

    def __init__(self, resolved: ResolvedRun, environment: RankEnvironment) -> None:
        super().__init__()
        self.resolved, self.environment = resolved, environment
        self.arranged = ""
        self.transfers: tuple[int, ...] = ()
        self.mask_checksums: tuple[int, ...] = ()
        self.num_initialized: tuple[int, int] | None = None
        self.last_step = 0

    @property
    def rank(self) -> int:
        return self.environment.rank

    # Calls of the tests.

    def echo(self, *values: Any, **named: Any) -> Any:
        return values, named

    def nap(self, seconds: float, rank: int = -1) -> int:
        if rank in (-1, self.rank):
            time.sleep(seconds)
        return self.rank

    def wait_for(self, path: str, rank: int = -1) -> int:
        """Until there is such a file."""
        while rank in (-1, self.rank) and not os.path.exists(path):
            time.sleep(0.005)
        return self.rank

    def fail_on(self, rank: int, message: str = "went wrong") -> str:
        if rank in (-1, self.rank):
            raise ValueError(message)
        return "fine"

    def fail_and_keep_the_other_waiting(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("went wrong")
        time.sleep(600)

    def act_on(self, rank: int, what: str) -> None:
        if self.rank == rank:
            self._act(what)

    def arrange(self, rank: int, what: str) -> None:
        self.arranged = what if self.rank == rank else ""

    def finish_transfers(self, rank: int, numbers: tuple[int, ...]) -> None:
        self.transfers = numbers if self.rank == rank else ()

    def make_masks(self, checksums: tuple[tuple[int, ...], ...]) -> None:
        """Of the next step: each rank's."""
        self.mask_checksums = checksums[self.rank]

    def write(self, *pieces: str, stream: str = "stdout") -> None:
        for piece in pieces:
            getattr(sys, stream).write(piece)
            getattr(sys, stream).flush()

    def variables(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def place(self) -> tuple[int, int, RankEnvironment]:
        return os.getpid(), self.resolved.layout.tensor_parallel_size, self.environment

    def has_torch(self) -> bool:
        return "torch" in sys.modules

    def initialized(self) -> tuple[int, int] | None:
        return self.num_initialized

    def give_object(self) -> object:
        return object()

    # The interface.

    def get_kv_cache_spec(self) -> CacheSpec:
        return uniform_spec(num_layers=1 + self.rank, num_kv_heads=1, head_size=2, dtype_bytes=4, block_size=16)

    def determine_num_available_blocks(self) -> tuple[int, int]:
        return 70 - self.rank, 5 + self.rank

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        self.num_initialized = (num_device_blocks, num_host_blocks)

    def execute_model(self, plan: StepPlan) -> StepResult | None:
        arranged, self.arranged = self.arranged, ""
        self._act(arranged)
        self.last_step = plan.step
        return None

    def sample_tokens(self, grammar_output: object | None = None) -> StepResult:
        transfers, self.transfers = self.transfers, ()
        masks, self.mask_checksums = self.mask_checksums, ()
        logprobs = ({7: Logprob(-0.5, 1, "seven")},)
        sampled = StepResult(self.last_step, (self.rank, self.last_step), logprobs, mask_checksums=masks)
        return replace(sampled, finished_transfers=transfers)

    def _act(self, what: str) -> None:
        if what == "raise":
            raise ValueError("went wrong")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exit":
            os._exit(3)
        if what == "fault":
            ctypes.string_at(0)
        if what == "hang":
            time.sleep(600)
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


class Extension:
    """Methods that a plain worker does not have."""

    def double_rank(self) -> int:
        return 2 * self.rank  # type: ignore[attr-defined]  # the worker's
