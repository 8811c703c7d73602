"""A device backend of one's own in one file: it wraps the CPU's and counts what its kernels are called for."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import REPOSITORY

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import ConfigError
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ranks.groups import ParallelGroups
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.backends.backend import DeviceBackend, Operations
from spmd_worker.worker.backends.cpu import CpuDevice

MODEL = REPOSITORY / "scripts" / "demo" / "model"
COUNTS: Counter[str] = Counter()


class CountingDevice(DeviceBackend):
    def __init__(self, resolved: ResolvedRun, device: torch.device) -> None:
        super().__init__(resolved, device)
        self._inner = CpuDevice(resolved, device)

    def wrap_groups(self, groups: ParallelGroups) -> ParallelGroups:
        return self._inner.wrap_groups(groups)

    def operations(self) -> Operations:
        operations = self._inner.operations()
        return replace(operations, kernels=Counted(operations.kernels))

    def arithmetic(self, attention: AttentionBackend) -> str:
        return self._inner.arithmetic(attention)


class Counted:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        COUNTS[name] += 1
        return getattr(self._inner, name)


def test_wrapping_backend_computes_the_same_bits():
    answers = []
    for backend in ("cpu", f"{__name__}.CountingDevice"):
        COUNTS.clear()
        with LLM(MODEL, device="cpu", num_blocks=32, device_backend=backend) as llm:
            answers += llm.generate(["1+2="], SamplingParams(temperature=0.0, logprobs=1), use_tqdm=False)
    assert answers[0].outputs[0].logprobs == answers[1].outputs[0].logprobs
    assert COUNTS["linear"] > 0
    with pytest.raises(ConfigError, match=r"^device_backend: 'no\.Such' cannot be imported"):
        LLM(MODEL, device="cpu", device_backend="no.Such")
