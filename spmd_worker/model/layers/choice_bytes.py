"""Memory in which tokens choose their keys and attend to them (`key_choice.py`), by arithmetic. Needs no torch.

N: tokens of one call; S: keys of one sequence; K: keys that are chosen; D: numbers of a key.
"""

from typing import Final

from spmd_worker.model_config.layer_config import IndexerConfig, LayerConfig
from spmd_worker.model_config.model_config import ModelConfig

TILE: Final = 512
"""Keys that are scored together, a multiple of a panel's outputs."""
BLOCK: Final = 64
"""Tokens of a block of chosen keys."""
_MAX_ROWS: Final = 64
_MAX_ELEMENTS: Final = 1 << 24
"""Rows whose scores, and elements of chosen keys, that are there at one time. No row's bits depend on either."""
_FLOAT, _INDEX = 4, 8
_SCORE: Final = 3 * _FLOAT + 1 + _INDEX
"""Bytes of a score: itself, masked, and sorted, whether it is hidden, and its position."""


def rows_at_once(indexer: IndexerConfig, num_elements: int) -> int:
    """N at most, of a layer in which a key, or the keys and values of all heads, have so many elements."""
    return max(1, min(_MAX_ROWS, _MAX_ELEMENTS // (indexer.num_seen * num_elements)))


def key_elements(layer: LayerConfig) -> int:
    """Elements that are cached of a token in all heads, without an indexer's."""
    return 2 * layer.num_kv_heads * layer.head_size if layer.latent is None else layer.latent.key_size


def choice_bytes(model_config: ModelConfig, dtype_bytes: int) -> int:
    """Bytes that a step takes for the choice of tokens that see as many keys as a row may have, and for attention to
    it, in the layer that takes most; 0 if all tokens see all keys. What each token of the step takes is not in it.
    """
    kinds = dict.fromkeys((each.choice, key_elements(each), each.indexer is not None) for each in model_config.layers)
    num_keys = model_config.max_model_len
    return max(
        [
            0,
            *(
                _of_kind(indexer, *kind, num_keys, dtype_bytes)
                for indexer, *kind in kinds
                if indexer is not None and indexer.num_seen < num_keys
            ),
        ]
    )


def _of_kind(indexer: IndexerConfig, num_elements: int, has_blocks: bool, num_keys: int, dtype_bytes: int) -> int:
    num_rows, num_scores = rows_at_once(indexer, num_elements), -(-num_keys // TILE) * TILE
    # Choices of a token; scores of a choice; products of tiles, which are masked.
    num_choices = indexer.num_heads if has_blocks else 1
    num_candidates = num_choices * (-(-num_keys // indexer.block_size) if has_blocks else num_scores)
    num_tiles = 4 if has_blocks else 2
    # Scores [N, S], beside a row that is being sorted; or those so far, with products [N * heads, TILE] of some tiles
    # and queries in float32.
    scores = _SCORE * num_candidates * (num_rows + 1)
    tiles = num_rows * _FLOAT * (num_candidates + indexer.num_heads * (num_tiles * TILE + indexer.head_size))
    # Keys [N, K, D] as they are read, bytes of FP8 perhaps, and in blocks; positions, heads, blocks and offsets.
    num_chosen = -(-indexer.num_seen // BLOCK) * BLOCK
    copies = num_chosen * (num_elements * (2 * dtype_bytes + 1) + (8 if has_blocks else 5) * num_choices * _INDEX)
    return max(scores, tiles, num_rows * copies)
