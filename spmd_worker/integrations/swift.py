"""ms-swift's GRPO in colocate mode on this runtime: the engine that samples completions is this one, in each rank.

    python -m spmd_worker.integrations.swift rlhf --rlhf_type grpo --use_vllm true --vllm_mode colocate ...
    torchrun --nproc-per-node 2 -m spmd_worker.integrations.swift rlhf ... --vllm_tensor_parallel_size 2

    import spmd_worker.integrations.swift  # before anything of swift; nothing else in a script changes

ms-swift uses any module `vllm` as vLLM, so modules of that name are installed in `sys.modules`, with only the names
that its colocate mode reads. An installed vLLM is not used then. Another release of ms-swift than RELEASE, or a vLLM
that was imported already, is an error before anything is replaced. With `--vllm_enable_lora true` ms-swift pushes the
policy as an adapter at each sync; otherwise it merges the adapter and pushes all weights.
"""

import importlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Any, Final

from spmd_worker.compat.engine_args import EngineArgs
from spmd_worker.integrations.vllm_modules import check_release, install_modules, installed, run_program
from spmd_worker.llm import LLM
from spmd_worker.llm_engine import LLMEngine
from spmd_worker.replica.sequence.lora_request import LoRARequest, TensorSnapshot
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.sampling_params import RequestOutputKind, SamplingParams
from spmd_worker.replica.sequence.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

logger = logging.getLogger(__name__)

RELEASE: Final = "4.6"
"""Supported release of ms-swift."""
VERSION: Final = "0.31.0"
"""Version of vLLM reported to ms-swift: the last one whose calls it knows."""


class SwiftLoRARequest(LoRARequest):
    """vLLM's `LoRARequest`, which ms-swift derives its own with tensors from: those have a path that is no folder."""

    def __init__(
        self,
        lora_name: str,
        lora_int_id: int,
        lora_path: str = "",
        *,
        lora_tensors: Mapping[str, Any] | None = None,
        peft_config: Mapping[str, Any] | None = None,
        load_inplace: bool = False,
        base_model_name: str | None = None,
    ) -> None:
        path = lora_path if lora_tensors is None else ""
        super().__init__(
            lora_name,
            lora_int_id,
            path,
            lora_tensors=lora_tensors,
            peft_config=peft_config,
            load_inplace=load_inplace,
            base_model_name=base_model_name,
        )


class SwiftEngine(LLMEngine):
    """Engine with ms-swift's way to push a policy: requests name it by its id, with a path that is no folder."""

    @property
    def _pushed(self) -> dict[int, LoRARequest]:
        """The adapters that were pushed as tensors, by id."""
        pushed: dict[int, LoRARequest] = self.__dict__.setdefault("_pushed_adapters", {})
        return pushed

    @classmethod
    def from_engine_args(cls, engine_args: Any, *_: Any, **__: Any) -> "SwiftEngine":
        """`LLMEngine.from_engine_args` for ms-swift's arguments, with its trainers' log-probabilities."""
        arguments = {spec.name: getattr(engine_args, spec.name) for spec in fields(engine_args)}
        if arguments.get("logprobs_mode") == "processed_logprobs":
            # From the logits divided by the temperature, also where sampling was truncated: the trainer's own.
            arguments["logprobs_mode"] = "tempered_logprobs"
        return super().from_engine_args(EngineArgs(**arguments))

    def add_lora(self, lora_request: Any) -> bool:
        """`LLMEngine.add_lora`; tensors are copied, because the trainer changes its own."""
        if lora_request.lora_tensors is None:
            added = super().add_lora(lora_request)
            self._pushed.pop(lora_request.lora_int_id, None)
            return added
        pushed = LoRARequest(
            lora_request.lora_name,
            lora_request.lora_int_id,
            lora_tensors=TensorSnapshot.of(lora_request.lora_tensors),
            peft_config=lora_request.peft_config,
            load_inplace=lora_request.load_inplace,
        )
        added = super().add_lora(pushed)
        self._pushed[pushed.lora_int_id] = replace(pushed, load_inplace=False)
        for int_id in self._pushed.keys() - self.list_loras():
            del self._pushed[int_id]
        return added

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """`LLMEngine.add_request`, in which an id that was pushed names what was pushed."""
        given = kwargs.get("lora_request")
        if given is not None:
            kwargs["lora_request"] = self._pushed.get(given.lora_int_id, given)
        return super().add_request(*args, **kwargs)


class _LoRAManager:
    """Placeholder of vLLM's loader of adapters: ms-swift replaces its method, and this engine calls neither."""

    def _load_adapter(self, lora_request: Any) -> Any:
        raise NotImplementedError(lora_request)


class _Absent:
    """Placeholder for names that ms-swift's colocate mode imports and does not use. It patches `create`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"{type(self).__name__} was called: only ms-swift's colocate mode runs on spmd_worker "
            f"(--vllm_mode colocate)"
        )

    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int) -> None:
        """Placeholder of vLLM's `StatelessProcessGroup.create`."""
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
    "vllm.lora.request": {"LoRARequest": SwiftLoRARequest},
    "vllm.lora.worker_manager": {"LRUCacheWorkerLoRAManager": _LoRAManager},
    "vllm.lora.lora_model": {"LoRAModel": _absent("LoRAModel")},
    "vllm.lora.utils": {"get_adapter_absolute_path": str},
    "vllm.engine": {},
    "vllm.engine.async_llm_engine": {},
    "vllm.distributed": {},
    "vllm.distributed.utils": {"StatelessProcessGroup": _absent("StatelessProcessGroup")},
    "vllm.distributed.device_communicators": {},
    "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": _absent("PyNcclCommunicator")},
}


def install() -> str:
    """Install modules with this package's names as vLLM's. Returns a description of what was done. Idempotent.

    Raises ImportError if ms-swift is missing or of another release, or if vLLM or ms-swift's own users of it were
    imported before.
    """
    try:
        found = version_of("ms-swift")
    except PackageNotFoundError:
        raise ImportError(f"ms-swift is not installed: pip install 'ms-swift=={RELEASE}.*'") from None
    check_release("ms-swift", found, RELEASE)
    words = f"spmd_worker samples for ms-swift {found}: the module vllm is this package's, for colocate mode"
    early = [name for name in ("swift.infer_engine.vllm_engine", "swift.rlhf_trainers") if name in sys.modules]
    if early and "vllm" not in sys.modules:
        raise ImportError(f"{early[0]} was imported already: import spmd_worker.integrations.swift before it")
    install_modules(MODULES, "spmd_worker.integrations.swift")
    # Hide the modules from TRL's own colocate mode, which ms-swift's trainers do not use.
    trl_imports: Any = importlib.import_module("trl.import_utils")
    trl_imports.is_vllm_available = lambda: False
    logger.info("%s", words)
    return words


def main(arguments: list[str]) -> None:
    """Run a command of ms-swift (`rlhf`, ...) or a script in this process. Raises SystemExit without one."""
    run_program(arguments, "spmd_worker.integrations.swift {rlhf | SCRIPT.py}", replaced, "swift.cli")


replaced: Final = installed(install, __name__)
"""Description of what importing this module has done."""

if __name__ == "__main__":
    # The script may import this module too, and gets this one.
    sys.modules["spmd_worker.integrations.swift"] = sys.modules["__main__"]
    main(sys.argv[1:])
