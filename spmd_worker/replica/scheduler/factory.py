"""Makes a scheduler replica with its cache manager and stop checker, for an engine or a replay."""

from typing import NamedTuple

from kv_cache.cache_manager import CacheManager
from kv_cache.host_tier import HostTier
from kv_cache.layer_groups import ONE_GROUP, LayerGroups
from kv_cache.outside_transfers import OutsideTransfers
from kv_cache.state_slots import StateSlots
from spmd_worker.replica.drafts.making import make_proposer
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry
from spmd_worker.replica.scheduler.planner import SchedulerLimits
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.scheduler.stop import StopChecker
from spmd_worker.replica.sequence.sequence import Sequence
from spmd_worker.tokenizer.incremental_decoder import IncrementalDecoder
from spmd_worker.tokenizer.tokenizer import Tokenizer


class CacheSizes(NamedTuple):
    """Blocks that fit on every rank: on the device, in swap space, and in the offload tier for evicted prefixes. Then
    slots of recurrent states, on the device and in swap space: 0 in a model without any. Blocks are of any of the
    `groups` of layers.
    """

    num_blocks: int
    num_host_blocks: int = 0
    num_tier_blocks: int = 0
    num_state_slots: int = 0
    num_host_state_slots: int = 0
    groups: LayerGroups = ONE_GROUP


def new_scheduler(
    limits: SchedulerLimits,
    sizes: CacheSizes,
    block_size: int,
    eos_token_ids: tuple[int, ...],
    max_model_len: int,
    tokenizer: Tokenizer | None,
    adapters: AdapterRegistry,
    prompt_adapters: AdapterRegistry,
    outside: OutsideTransfers | None = None,
) -> Scheduler:
    """An empty replica; the adapters are loaded. Without `tokenizer` requests must not have stop strings. `outside` is
    `CacheManager`'s.
    """
    cache = CacheManager(
        sizes.num_blocks,
        block_size,
        num_host_blocks=sizes.num_host_blocks,
        connector=HostTier(sizes.num_tier_blocks) if sizes.num_tier_blocks else None,
        outside=outside,
        groups=sizes.groups,
    )

    def new_decoder(sequence: Sequence) -> IncrementalDecoder:
        request = sequence.request
        assert tokenizer is not None, request.request_id
        return IncrementalDecoder(tokenizer, request.known_token_ids, request.sampling.skip_special_tokens)

    checker = StopChecker(eos_token_ids, max_model_len, None if tokenizer is None else new_decoder)
    slots = StateSlots(sizes.num_state_slots, sizes.num_host_state_slots) if sizes.num_state_slots else None
    speculation = limits.speculation
    proposer = None if speculation is None else make_proposer(speculation, limits.vocab_size)
    return Scheduler(limits, cache, checker, adapters, prompt_adapters, slots, proposer)
