"""A torchrun SPMD runtime for offline LLM inference. Its public names are imported lazily (PEP 562)."""

from importlib import import_module
from typing import Any

_MODULES = {
    "llm": ("LLM",),
    "llm_engine": ("LLMEngine",),
    "compat.engine_args": ("EngineArgs",),
    "compat.beam_search": ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
    "compat.prompts": ("EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"),
    "model.weights.weight_deltas": ("SparseWeightPatch",),
    "engine.ipc_handles": ("ipc_handle",),
    "base.errors": ("PromptsRefusedError", "WorkerEventError"),
    "replica.sequence.lora_request": ("LoRARequest",),
    "replica.sequence.prompt_adapter_request": ("PromptAdapterRequest",),
    "replica.sequence.sampling_params": ("SamplingParams", "RequestOutputKind"),
    "replica.sequence.structured_outputs": ("StructuredOutputsParams", "GuidedDecodingParams"),
    "replica.sequence.repetition": ("RepetitionDetectionParams",),
    "replica.sequence.token_rules": ("TokenRules", "TimestampRules"),
    "replica.sequence.pooling_params": ("PoolingParams",),
    "replica.sequence.late_chunking": ("LateChunkingParams",),
    "replica.sequence.outputs": (
        *("ClassificationOutput", "ClassificationRequestOutput", "CompletionOutput", "EmbeddingOutput"),
        *("EmbeddingRequestOutput", "Logprob", "PoolingOutput", "PoolingRequestOutput", "RequestMetrics"),
        *("RequestOutput", "ScoringOutput", "ScoringRequestOutput"),
    ),
}
OFFERED = {name: f"spmd_worker.{module}" for module, names in _MODULES.items() for name in names}
"""Public name -> the module that has it."""
ABSENT = {
    **dict.fromkeys(
        ("AsyncLLM", "AsyncLLMEngine", "AsyncEngineArgs"),
        "requests come one by one by LLMEngine.add_request and step, or over HTTP from spmd_worker.serve",
    ),
    **dict.fromkeys(
        ("DataPrompt", "ExplicitEncoderDecoderPrompt"),
        "prompts are text, token ids or embeddings: give TokensPrompt",
    ),
    "FlexibleArgumentParser": "EngineArgs.add_cli_args accepts argparse's ArgumentParser",
    "ModelRegistry": "model classes are those of this package: `spmd-worker families` lists them",
    "initialize_ray_cluster": "torchrun starts the ranks, or LLM itself on one node",
}
"""vLLM's names that are missing here -> the way out."""

__all__ = [*OFFERED]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("spmd_worker.base.version").version()
    if name not in OFFERED:
        end = import_module("spmd_worker.base.names").hint(name, OFFERED, ABSENT)
        raise AttributeError(f"module 'spmd_worker' has no attribute {name!r}{end}")
    return getattr(import_module(OFFERED[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *OFFERED])
