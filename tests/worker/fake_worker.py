"""A worker without a model, for tests of what stands around workers: it notes what it was asked for."""

from typing import Any

from torch import nn

from kv_cache.cache_spec import CacheSpec
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.worker.worker_base import WorkerBase


class FakeWorker(WorkerBase):
    """`fails` names the method that raises."""

    def __init__(self, name: str = "fake", fails: str = "", **_: Any) -> None:
        self.name, self.fails = name, fails
        self.calls: list[tuple[Any, ...]] = []

    def _note(self, method: str, *args: Any) -> None:
        self.calls.append((method, *args))
        if method == self.fails:
            raise ValueError(f"{method} went wrong")

    def init_device(self) -> None:
        self._note("init_device")

    def load_model(self) -> None:
        self._note("load_model")

    def get_kv_cache_spec(self) -> CacheSpec:
        return CacheSpec(num_layers=1, num_kv_heads=1, head_size=2, dtype_bytes=4, block_size=16)

    def determine_num_available_blocks(self) -> tuple[int, int]:
        return 7, 0

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        self._note("initialize_cache", num_device_blocks, num_host_blocks)

    def initialize_host_tier(self, num_slots: int) -> None:
        self._note("initialize_host_tier", num_slots)

    def compile_or_warm_up_model(self) -> None:
        self._note("compile_or_warm_up_model")

    def execute_model(self, plan: StepPlan) -> StepResult | None:
        self._note("execute_model", plan)
        return None

    def sample_tokens(self, grammar_output: object | None = None) -> StepResult:
        self._note("sample_tokens", grammar_output)
        return StepResult(self.calls[-2][1].step)

    def check_health(self) -> None:
        self._note("check_health")

    def get_model(self) -> nn.Module:
        return nn.Linear(2, 3)

    def get_model_inspection(self) -> str:
        return "nothing"

    def get_cache_block_size_bytes(self) -> int:
        return self.get_kv_cache_spec().block_bytes

    @property
    def vocab_size(self) -> int:
        return 10

    @property
    def max_model_len(self) -> int:
        return 16

    def shutdown(self) -> None:
        self._note("shutdown")

    def add(self, one: int, other: int = 0) -> int:
        """Not part of the contract: what an RPC by name may reach too."""
        return one + other
