"""ms-swift's GRPO in colocate mode on this runtime: the engine that samples completions is this one, in each rank.

    python -m spmd_worker.integrations.swift rlhf --rlhf_type grpo --use_vllm true --vllm_mode colocate ...
    torchrun --nproc-per-node 2 -m spmd_worker.integrations.swift rlhf ... --vllm_tensor_parallel_size 2

    import spmd_worker.integrations.swift  # before anything of swift; nothing else in a script changes

ms-swift takes whatever imports as `vllm` for vLLM, so modules of that name are put in front of it, with the names that
its colocate mode reads and nothing else. A vLLM that is installed is not used then. It is an error, before anything is
replaced, for another release of ms-swift than the one whose calls were read, and where vLLM was imported already.
"""

import importlib
import logging
import os
import runpy
import sys
from dataclasses import fields
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Final

from spmd_worker.compat.engine_args import EngineArgs
from spmd_worker.integrations.vllm_modules import put_modules
from spmd_worker.llm import LLM
from spmd_worker.llm_engine import LLMEngine
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.sampling_params import RequestOutputKind, SamplingParams
from spmd_worker.replica.sequence.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

logger = logging.getLogger(__name__)

RELEASE: Final = "4.6"
"""Of ms-swift."""
VERSION: Final = "0.31.0"
"""Of the vLLM that ms-swift is told it has: the last one whose calls it knows."""


class SwiftEngine(LLMEngine):
    """What ms-swift calls beside vLLM's names."""

    @classmethod
    def from_engine_args(cls, engine_args: Any, *_: Any, **__: Any) -> "SwiftEngine":
        """As `LLMEngine.from_engine_args`, of arguments as ms-swift makes them: it wants log-probabilities as its
        trainers compute them.
        """
        arguments = {spec.name: getattr(engine_args, spec.name) for spec in fields(engine_args)}
        if arguments.get("logprobs_mode") == "processed_logprobs":
            # Those of the logits divided by the temperature, also where sampling was truncated: the trainer's own.
            arguments["logprobs_mode"] = "tempered_logprobs"
        return super().from_engine_args(EngineArgs(**arguments))

    def list_loras(self) -> set[int]:
        """None: adapters are merged by ms-swift, and come as whole weights."""
        return set()


class _Absent:
    """What ms-swift's colocate mode imports and does not use. `create` is patched by it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"{type(self).__name__} was called: only ms-swift's colocate mode runs on spmd_worker "
            f"(--vllm_mode colocate, without --vllm_enable_lora)"
        )

    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int) -> None:
        """Of vLLM's StatelessProcessGroup."""
        raise RuntimeError("vLLM's process groups are those of its server mode: give --vllm_mode colocate")


def _absent(name: str) -> type:
    return type(name, (_Absent,), {})


MODULES: Final[dict[str, dict[str, Any]]] = {
    "vllm": {
        "__version__": VERSION,
        "LLM": LLM,
        "LLMEngine": SwiftEngine,
        "EngineArgs": EngineArgs,
        "AsyncEngineArgs": EngineArgs,
        "AsyncLLMEngine": _absent("AsyncLLMEngine"),
        "SamplingParams": SamplingParams,
        "RequestOutput": RequestOutput,
    },
    "vllm.sampling_params": {
        "SamplingParams": SamplingParams,
        "RequestOutputKind": RequestOutputKind,
        "StructuredOutputsParams": StructuredOutputsParams,
        "GuidedDecodingParams": GuidedDecodingParams,
    },
    "vllm.pooling_params": {"PoolingParams": _absent("PoolingParams")},
    "vllm.lora": {},
    "vllm.lora.request": {"LoRARequest": _absent("LoRARequest")},
    "vllm.engine": {},
    "vllm.engine.async_llm_engine": {},
    "vllm.distributed": {},
    "vllm.distributed.utils": {"StatelessProcessGroup": _absent("StatelessProcessGroup")},
    "vllm.distributed.device_communicators": {},
    "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": _absent("PyNcclCommunicator")},
}


def install() -> str:
    """Put modules with this package's names in the place of vLLM's. Returns what was done, in words. Idempotent.

    Raises ImportError where ms-swift is not there, or is another release, and where vLLM or ms-swift's own users of it
    were imported before.
    """
    try:
        found = version_of("ms-swift")
    except PackageNotFoundError:
        raise ImportError(f"ms-swift is not installed: pip install 'ms-swift=={RELEASE}.*'") from None
    if not (found == RELEASE or found.startswith(f"{RELEASE}.")):
        raise ImportError(
            f"ms-swift {found} is installed and this package knows the calls of {RELEASE}: "
            f"pip install 'ms-swift=={RELEASE}.*'"
        )
    words = f"spmd_worker samples for ms-swift {found}: the module vllm is this package's, for colocate mode"
    early = [name for name in ("swift.infer_engine.vllm_engine", "swift.rlhf_trainers") if name in sys.modules]
    if early and "vllm" not in sys.modules:
        raise ImportError(f"{early[0]} was imported already: import spmd_worker.integrations.swift before it")
    put_modules(MODULES, "spmd_worker.integrations.swift")
    _keep_from_trl()
    logger.info("%s", words)
    return words


def _keep_from_trl() -> None:
    """TRL's own colocate mode, which ms-swift's trainers do not use, must not find these modules."""
    trl_imports: Any = importlib.import_module("trl.import_utils")
    trl_imports.is_vllm_available = lambda: False


def main(arguments: list[str]) -> None:
    """Run a command of ms-swift (`rlhf`, ...) or a script in this process, with the names replaced. Raises SystemExit
    where none is given.
    """
    if not arguments:
        raise SystemExit("usage: python -m spmd_worker.integrations.swift {rlhf | SCRIPT.py} [ARGUMENT ...]")
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{replaced}\n")
    sys.argv = arguments
    if arguments[0].endswith(".py"):
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        runpy.run_module(f"swift.cli.{arguments[0]}", run_name="__main__", alter_sys=True)


replaced: Final = install()
"""What importing this module has done, in words."""

if __name__ == "__main__":
    # The script may import this module too, and gets this one.
    sys.modules["spmd_worker.integrations.swift"] = sys.modules["__main__"]
    main(sys.argv[1:])
