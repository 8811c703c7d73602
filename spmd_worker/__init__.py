"""A torchrun SPMD runtime for offline LLM inference. What people import is offered lazily (PEP 562)."""

from importlib import import_module
from typing import Any

OFFERED = {
    "LLM": "spmd_worker.llm",
    "LLMEngine": "spmd_worker.llm_engine",
    "EngineArgs": "spmd_worker.compat.engine_args",
    "BeamSearchOutput": "spmd_worker.compat.beam_search",
    "BeamSearchParams": "spmd_worker.compat.beam_search",
    "BeamSearchSequence": "spmd_worker.compat.beam_search",
    "PromptType": "spmd_worker.compat.prompts",
    "TextPrompt": "spmd_worker.compat.prompts",
    "TokensPrompt": "spmd_worker.compat.prompts",
    "PromptsRefusedError": "spmd_worker.base.errors",
    "WorkerEventError": "spmd_worker.base.errors",
    "SamplingParams": "spmd_worker.replica.sequence.sampling_params",
    "RequestOutputKind": "spmd_worker.replica.sequence.sampling_params",
    "StructuredOutputsParams": "spmd_worker.replica.sequence.structured_outputs",
    "GuidedDecodingParams": "spmd_worker.replica.sequence.structured_outputs",
    "PoolingParams": "spmd_worker.replica.sequence.pooling_params",
    "ClassificationOutput": "spmd_worker.replica.sequence.outputs",
    "ClassificationRequestOutput": "spmd_worker.replica.sequence.outputs",
    "CompletionOutput": "spmd_worker.replica.sequence.outputs",
    "EmbeddingOutput": "spmd_worker.replica.sequence.outputs",
    "EmbeddingRequestOutput": "spmd_worker.replica.sequence.outputs",
    "Logprob": "spmd_worker.replica.sequence.outputs",
    "PoolingOutput": "spmd_worker.replica.sequence.outputs",
    "PoolingRequestOutput": "spmd_worker.replica.sequence.outputs",
    "RequestMetrics": "spmd_worker.replica.sequence.outputs",
    "RequestOutput": "spmd_worker.replica.sequence.outputs",
    "ScoringOutput": "spmd_worker.replica.sequence.outputs",
    "ScoringRequestOutput": "spmd_worker.replica.sequence.outputs",
}
ABSENT = {
    **dict.fromkeys(
        ("AsyncLLM", "AsyncLLMEngine", "AsyncEngineArgs"),
        "requests come one by one by LLMEngine.add_request and step, or over HTTP from spmd_worker.serve",
    ),
    **dict.fromkeys(
        ("EmbedsPrompt", "DataPrompt", "ExplicitEncoderDecoderPrompt"),
        "prompts are text or token ids: give TokensPrompt",
    ),
    "FlexibleArgumentParser": "EngineArgs.add_cli_args takes argparse's ArgumentParser",
    "LoRARequest": "there are no adapters: merge them into the checkpoint (PEFT's merge_and_unload)",
    "ModelRegistry": "model classes are those of this package: `spmd-worker families` lists them",
    "initialize_ray_cluster": "torchrun starts the ranks, or LLM itself on one node",
}
"""Names of vLLM's that are not here, and the way out."""

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "GuidedDecodingParams",
    "LLMEngine",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "PromptsRefusedError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "WorkerEventError",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("spmd_worker.base.version").version()
    if name not in OFFERED:
        end = import_module("spmd_worker.base.names").hint(name, OFFERED, ABSENT)
        raise AttributeError(f"module 'spmd_worker' has no attribute {name!r}{end}")
    return getattr(import_module(OFFERED[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *OFFERED])
