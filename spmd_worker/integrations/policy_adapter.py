"""TRL's policy as a LoRA adapter of the engine: what PEFT trains is pushed as it is, not merged into the weights.

TRL merges the adapter into every weight at each sync, pushes all of them, and subtracts it again. Here the first sync
pushes the weights without the adapter, and each sync the adapter's tensors, under one name and id: the engine computes
with what the trainer's own forward pass has, and blocks of other contents are never found. After `sleep(level=2)`,
which drops the weights, a sync pushes them too.

Policies that the engine does not take as an adapter (DoRA, saved modules, several active adapters, ranks above 512) are
merged, as by TRL itself, and the log says why.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from typing import Any, Final

from spmd_worker.base.errors import AdapterError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.llm import LLM
from spmd_worker.replica.sequence.lora_request import LoRARequest, TensorSnapshot

logger = logging.getLogger(__name__)

POLICY_NAME: Final = "policy"
POLICY_ID: Final = 1
_MAX_RANK: Final = 512
_MERGED: Final = "the policy is merged into the weights at each sync"


class PolicyLLM(LLM):
    """`LLM` whose calls of `generate` use the pushed policy where they name no other adapter."""

    policy: LoRARequest | None = None

    def push_policy(self, tensors: Mapping[str, Any], peft_config: Mapping[str, Any]) -> None:
        """Replace the policy, on all ranks of the engine or none. Raises AdapterError; RuntimeError while requests are
        in flight.
        """
        request = LoRARequest(POLICY_NAME, POLICY_ID, lora_tensors=tensors, peft_config=peft_config, load_inplace=True)
        self.llm_engine.add_lora(request)
        self.policy = replace(request, load_inplace=False)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`LLM.generate` with the policy."""
        if self.policy is not None and kwargs.get("lora_request") is None:
            kwargs["lora_request"] = self.policy
        return super().generate(*args, **kwargs)


class PolicyPush:
    """The syncs of one `VLLMGeneration`."""

    def __init__(self, generation: Any) -> None:
        self._generation, self._has_base, self.has_pushed = generation, False, False

    def push(self, sync_weights: Callable[[Any], None]) -> None:
        """Push the policy, and before it the weights if the engine does not have the trainer's."""
        generation = self._generation
        model = generation.model
        if not self._has_base or getattr(generation, "_llm_weights_sleeping", False):
            with _without_merging(model):
                sync_weights(generation)
            self._has_base = True
        (name,) = model.active_adapters
        parameters = [each for key, each in model.named_parameters() if model.prefix in key]
        with generation._dist.gather_params(parameters):
            generation.llm.push_policy(_tensors(model, name), model.peft_config[name].to_dict())
        self.has_pushed = True


def pushed_at_start(init_vllm: Callable[[Any], None]) -> Callable[[Any], None]:
    """Replacement of `VLLMGeneration._init_vllm`: the engine takes adapters if the policy is one."""
    module = init_vllm.__globals__

    @wraps(init_vllm)
    def init(generation: Any) -> None:
        generation.policy_push = None
        rank, reason = _rank_and_reason(generation)
        if rank == 0:
            if reason:
                logger.warning("%s: %s", _MERGED, reason, extra=SAME_ON_EVERY_RANK)
            init_vllm(generation)
            return
        plain = module["LLM"]
        options = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}
        if _has_experts(generation.model):
            options["lora_experts"] = True
        module["LLM"] = partial(plain, **options)
        try:
            init_vllm(generation)
        finally:
            module["LLM"] = plain
        generation.policy_push = PolicyPush(generation)
        words = "the policy is pushed as an adapter of rank %d at each sync, not merged into the weights"
        logger.info(words, rank, extra=SAME_ON_EVERY_RANK)

    return init


def pushed_at_sync(sync_weights: Callable[[Any], None]) -> Callable[[Any], None]:
    """Replacement of `VLLMGeneration.sync_weights`: pushes the adapter. One that the model does not take is merged."""

    @wraps(sync_weights)
    def sync(generation: Any) -> None:
        push = getattr(generation, "policy_push", None)
        if push is None:
            sync_weights(generation)
            return
        try:
            push.push(sync_weights)
        except AdapterError as error:
            # The same on every rank. Later it can only be that training diverged.
            if push.has_pushed:
                raise
            logger.warning("%s: %s", _MERGED, error, extra=SAME_ON_EVERY_RANK)
            generation.policy_push = None
            sync_weights(generation)

    return sync


def _rank_and_reason(generation: Any) -> tuple[int, str]:
    """The rank of the policy's adapter; 0, and perhaps the reason, for a policy that is not pushed as one."""
    model = generation.model
    if generation.mode != "colocate" or not is_pushing or not hasattr(model, "peft_config"):
        return 0, ""
    if len(model.active_adapters) != 1:
        return 0, f"the adapters {', '.join(model.active_adapters)} are active, and rows have one"
    if generation._dist.is_fsdp:
        return 0, "with FSDP its tensors are sharded"
    config = model.peft_config[model.active_adapters[0]]
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        return 0, f"{config.peft_type} is not LoRA"
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    if rank > _MAX_RANK:
        return 0, f"its rank {rank} is above {_MAX_RANK}"
    return rank, ""


def _has_experts(model: Any) -> bool:
    """Whether adapters of the model have matrices for experts."""
    return any("lora_" in name and ".experts." in name for name, _ in model.named_parameters())


def _tensors(model: Any, name: str) -> TensorSnapshot:
    """The adapter's tensors, by the names of PEFT's files."""
    peft: Any = import_module("peft")
    found = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    # Copies: the trainer changes its own, and calls name what was pushed.
    return TensorSnapshot.of(found)


@contextmanager
def _without_merging(model: Any) -> Iterator[None]:
    """Have TRL's loop over weights, which merges the adapter before and unmerges it after, leave the weights alone."""
    model.merge_adapter = model.unmerge_adapter = lambda *_, **__: None
    try:
        yield
    finally:
        del model.merge_adapter, model.unmerge_adapter


is_pushing = True
"""False merges the policy at each sync, as TRL does. Set before a trainer is made (`--merge-lora`)."""
