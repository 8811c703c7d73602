"""Memory of a draft on one rank: its layers in the cache, its weights, and the activations of its largest pass."""

from kv_cache.cache_spec import BlockLayer
from spmd_worker.model_config.layer_elements import layer_elements
from spmd_worker.model_config.model_config import DTYPE_BYTES
from spmd_worker.ranks.topology import stage_of, vocabulary_rows
from spmd_worker.resolved import ResolvedRun
from spmd_worker.resolved_draft import EAGLE3, DraftRun
from spmd_worker.worker.memory.estimate import activation_bytes, block_layer, rank_layers, weights_bytes
from spmd_worker.worker.stored_weights import planned_stored_weights


def draft_layers(resolved: ResolvedRun, rank: int) -> tuple[BlockLayer, ...]:
    """Keys and values that a draft keeps of each token on a rank; none on other stages than the last."""
    draft = _draft_of(resolved, rank)
    if draft is None:
        return ()
    block_size = resolved.config.cache.block_size
    found = [block_layer(*each, block_size) for each in rank_layers(draft.model_config, draft.layout, rank)]
    return tuple([each for each in found if each is not None])


def draft_weights_bytes(resolved: ResolvedRun, rank: int) -> int:
    """Bytes of a draft's weights on a rank, without what a head shares with the target."""
    draft = _draft_of(resolved, rank)
    if draft is None:
        return 0
    if not draft.is_head:
        kind = (resolved.device_type, resolved.config.model.quantization)
        stored = planned_stored_weights(resolved.of_draft)
        return weights_bytes(draft.model_config, draft.layout, rank, resolved.dtype, *kind, stored)
    config, hidden = draft.model_config, draft.model_config.hidden_size
    ((layer, share),) = rank_layers(config, draft.layout, rank)
    size = draft.layout.tensor_parallel_size
    # Norms and projection of the two inputs; an embedding where the target's is on another stage.
    num_elements = layer_elements(layer, hidden, share)
    num_tables = 0 if stage_of(resolved.layout, resolved.model_config, rank).is_first else 1
    if draft.method == EAGLE3:
        # Attention reads two states a token.
        heads = share.num_heads + 2 * share.num_kv_heads
        num_elements += heads * layer.head_size * hidden + 2 * hidden
        num_elements += len(draft.aux_layers) * resolved.model_config.hidden_size * hidden
        num_elements += vocabulary_rows(draft.vocab_size, size) * hidden
        num_tables = max(num_tables, int(draft.has_embedding))
    else:
        num_elements += 2 * hidden * hidden + 3 * hidden
    num_elements += num_tables * vocabulary_rows(config.num_embeddings, size) * config.embedding_size
    return num_elements * DTYPE_BYTES[resolved.dtype]


def draft_activation_bytes(resolved: ResolvedRun, rank: int) -> int:
    """Peak bytes of a draft's pass over a step's tokens; a head keeps the target's states meanwhile."""
    draft = _draft_of(resolved, rank)
    if draft is None:
        return 0
    num_tokens, config = resolved.config.scheduler.max_num_batched_tokens, draft.model_config
    peak = activation_bytes(
        *(config, draft.layout, rank, resolved.dtype, num_tokens, resolved.max_num_seqs),
        resolved.config.model.quantization,
        adds_by_tree=True,
    )
    num_states = (len(draft.aux_layers) + 4) * draft.is_head
    return peak + num_states * num_tokens * resolved.model_config.hidden_size * DTYPE_BYTES[resolved.dtype]


def stream_bytes(resolved: ResolvedRun) -> int:
    """Bytes of what a stage of a pipeline reads, receives and sends for a head beside its hidden states."""
    draft = resolved.draft
    if draft is None or not draft.aux_layers or resolved.layout.pipeline_parallel_size == 1:
        return 0
    num_tokens = resolved.config.scheduler.max_num_batched_tokens
    num_elements = num_tokens * resolved.model_config.hidden_size * (1 + len(draft.aux_layers))
    # Those of the last step may still be on their way.
    return 2 * num_elements * DTYPE_BYTES[resolved.dtype]


def _draft_of(resolved: ResolvedRun, rank: int) -> DraftRun | None:
    is_last = stage_of(resolved.layout, resolved.model_config, rank).is_last
    return resolved.draft if is_last else None
