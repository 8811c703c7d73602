"""TRL's trainers on this runtime: the engine that samples completions is this one, in the trainer's own ranks.

    import spmd_worker.integrations.trl  # before a trainer is made; nothing else in the script changes

    python -m spmd_worker.integrations.trl train.py ...
    torchrun --nproc-per-node 2 -m spmd_worker.integrations.trl train.py ...
    python -m spmd_worker.integrations.trl --merge-lora train.py ...

For `use_vllm=True, vllm_mode="colocate"`. Five names of `trl.generation.vllm_generation` become this package's; no
package named vllm is needed, and an installed one is not used by that mode. Importing this module does it; another
release of TRL than RELEASE is an error before anything is replaced. A policy that PEFT trains by LoRA is pushed as an
adapter at each sync (`policy_adapter.py`); with `--merge-lora` TRL merges it into the weights and pushes those.

The tool loops of its trainers run in turns (`LLM.turns`): each rank asks as often as its own tools require, and none
waits for ever for a rank that has left its loop. Log-probabilities are those of the logits divided by the temperature,
which is what TRL's trainers compute, also where sampling was truncated (`top_k`, `top_p`, `min_p`): the importance
ratio needs both of the same kind (https://github.com/huggingface/trl/issues/6789).
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from spmd_worker.integrations import policy_adapter
from spmd_worker.integrations.policy_adapter import PolicyLLM
from spmd_worker.integrations.vllm_modules import check_release, installed, run_program
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)

RELEASE: Final = "1.16"
"""Supported release of TRL."""


class TrainerLLM(PolicyLLM):
    """`LLM` with the trainer's kind of log-probabilities, and its policy.

    `logprobs_mode="processed_logprobs"`, which TRL asks for, becomes `tempered_logprobs`: they differ if tokens were
    filtered or penalised before sampling, which the trainer's own ignore.
    """

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        if arguments.get("logprobs_mode") == "processed_logprobs":
            arguments["logprobs_mode"] = "tempered_logprobs"
        super().__init__(model, **arguments)


def is_vllm_available(min_version: str | None = None) -> bool:
    """TRL's check before it makes an engine: True, for this package's."""
    del min_version
    return True


REPLACEMENTS: Final[dict[str, Any]] = {
    "is_vllm_available": is_vllm_available,
    "LLM": TrainerLLM,
    "SamplingParams": SamplingParams,
    "StructuredOutputsParams": StructuredOutputsParams,
    "RequestOutput": RequestOutput,
}


def in_turns(tool_loop: Callable[..., Any]) -> Callable[..., Any]:
    """Run a trainer's `_tool_call_loop`, which every rank calls with its own completions, in turns.

    TRL's own gathers the prompts of an engine's ranks in each round of a loop that each rank leaves by itself; ranks
    with different numbers of rounds then wait for each other for ever (https://github.com/huggingface/trl/issues/5382).
    """
    signature = inspect.signature(tool_loop)

    @wraps(tool_loop)
    def loop(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        generation = getattr(trainer, "vllm_generation", None)
        is_colocated = getattr(generation, "mode", None) == "colocate"
        completions = signature.bind(trainer, *args, **kwargs).arguments["completions"]
        if is_colocated and _any_rank_calls_tools(trainer.accelerator, completions):
            with _turns_of(generation):
                return tool_loop(trainer, *args, **kwargs)
        return tool_loop(trainer, *args, **kwargs)

    return loop


def _any_rank_calls_tools(accelerator: Any, completions: list[list[dict[str, Any]]]) -> bool:
    """Agreed on by all ranks of the trainer: the code before the turns, such as a sync, may be a collective of all."""
    torch: Any = import_module("torch")
    calls = any(completion[0].get("tool_calls") for completion in completions)
    return bool(accelerator.gather(torch.tensor([int(calls)], device=accelerator.device)).any())


@contextmanager
def _turns_of(generation: Any) -> Iterator[None]:
    """Make the calls of `VLLMGeneration.generate` in a block of `LLM.turns`: it gathers no prompts, and the engine
    is awake from before the first to after the last.
    """
    size, sleeps = generation.tensor_parallel_size, generation.enable_sleep_mode
    if sleeps:
        if generation._llm_weights_sleeping:
            generation.sync_weights()
        generation.llm.wake_up(tags=["kv_cache"])
    generation.tensor_parallel_size, generation.enable_sleep_mode = 1, False
    try:
        with generation.llm.turns():
            yield
    finally:
        generation.tensor_parallel_size, generation.enable_sleep_mode = size, sleeps
    if sleeps:
        generation.llm.sleep(level=2)
        generation._llm_weights_sleeping = True


def install() -> str:
    """Replace vLLM's names by this package's. Returns a description of what was replaced. Idempotent.

    Raises ImportError if TRL is missing or of another release, or does not have the names to replace.
    """
    try:
        trl: Any = import_module("trl")
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ImportError(f"TRL is not installed: pip install 'trl=={RELEASE}.*'") from None
    version = str(getattr(trl, "__version__", "of no version"))
    check_release("trl", version, RELEASE)
    module: Any = import_module("trl.generation.vllm_generation")
    generation: Any = getattr(module, "VLLMGeneration", None)
    methods = [getattr(generation, name, None) for name in ("_init_vllm", "sync_weights", "_iter_named_params")]
    if not callable(getattr(module, "is_vllm_available", None)) or not all(map(callable, methods)):
        raise ImportError(
            f"trl.generation.vllm_generation of trl {version} has no is_vllm_available or VLLMGeneration with "
            f"_init_vllm, sync_weights and _iter_named_params: nothing is replaced"
        )
    instead = "vLLM's" if hasattr(module, "LLM") else "none: vLLM is not installed"
    names = ", ".join(REPLACEMENTS)
    words = f"spmd_worker samples for trl {version}: {names} of trl.generation.vllm_generation are replaced ({instead})"
    if getattr(module, "LLM", None) is not TrainerLLM:
        for name, value in REPLACEMENTS.items():
            setattr(module, name, value)
        generation._init_vllm = policy_adapter.pushed_at_start(generation._init_vllm)
        generation.sync_weights = policy_adapter.pushed_at_sync(generation.sync_weights)
        grpo: Any = import_module("trl.trainer.grpo_trainer")
        distillation: Any = import_module("trl.trainer.distillation_trainer")
        # The other trainers of TRL inherit the loop, or have no tools.
        for trainer in (grpo.GRPOTrainer, distillation.DistillationTrainer):
            trainer._tool_call_loop = in_turns(trainer._tool_call_loop)
        # It checks before it makes a `VLLMGeneration`, by a name of its own.
        distillation.is_vllm_available = is_vllm_available
        logger.info("%s", words)
    return words


def main(arguments: list[str]) -> None:
    """Run a script as `python SCRIPT ...` does, with the names replaced. Raises SystemExit without one."""
    if arguments[:1] == ["--merge-lora"]:
        policy_adapter.is_pushing, arguments = False, arguments[1:]
    run_program(arguments, "spmd_worker.integrations.trl [--merge-lora] SCRIPT.py", replaced)


replaced: Final = installed(install, __name__)
"""Description of what importing this module has done."""

if __name__ == "__main__":
    # The script may import this module too, and gets this one.
    sys.modules["spmd_worker.integrations.trl"] = sys.modules["__main__"]
    main(sys.argv[1:])
