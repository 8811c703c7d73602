"""A torchrun SPMD runtime for offline LLM inference. What people import is offered lazily (PEP 562)."""

from importlib import import_module
from typing import Any

_OFFERED = {
    "LLM": "spmd_worker.llm",
    "LLMEngine": "spmd_worker.llm_engine",
    "BeamSearchParams": "spmd_worker.compat.beam_search",
    "EngineArgs": "spmd_worker.compat.engine_args",
    "PromptsRefusedError": "spmd_worker.errors",
    "SamplingParams": "spmd_worker.sequence.sampling_params",
    "StructuredOutputsParams": "spmd_worker.sequence.structured_outputs",
    "GuidedDecodingParams": "spmd_worker.sequence.structured_outputs",
    "RequestOutputKind": "spmd_worker.sequence.sampling_params",
    "PoolingParams": "spmd_worker.sequence.pooling_params",
    "PoolingRequestOutput": "spmd_worker.sequence.outputs",
    "RequestOutput": "spmd_worker.sequence.outputs",
    "CompletionOutput": "spmd_worker.sequence.outputs",
    "WorkerEventError": "spmd_worker.engine.worker_events",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "GuidedDecodingParams",
    "LLMEngine",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptsRefusedError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "WorkerEventError",
]


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module 'spmd_worker' has no attribute {name!r}")
    return getattr(import_module(_OFFERED[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_OFFERED])
