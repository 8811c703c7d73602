"""Memory in which tokens choose their keys and attend to them (`chosen_keys.py`, `compressed_attention.py`), by
arithmetic. Needs no torch.

N: tokens of one call; S: keys of one sequence; K: keys that a token sees; D: numbers that are read of a key.
"""

from typing import Final

from spmd_worker.model_config.layer_config import IndexerConfig, LayerConfig
from spmd_worker.model_config.model_config import ModelConfig

TILE: Final = 512
"""Keys that are scored together, a multiple of a panel's outputs."""
BLOCK: Final = 64
"""Tokens of a block of chosen keys."""
GROUPS: Final = 64
"""Groups of tokens that are compressed together."""
_MAX_ROWS: Final = 64
_MAX_ELEMENTS: Final = 1 << 24
"""Rows whose scores, and elements of chosen keys, that are there at one time. No row's bits depend on either."""
_FLOAT, _INDEX = 4, 8
_SCORE: Final = 3 * _FLOAT + 1 + _INDEX
"""Bytes of a score: itself, masked, and sorted, whether it is hidden, and its position."""


def rows_at_once(indexer: IndexerConfig, token_size: int) -> int:
    """N at most; `token_size` is D."""
    return rows_of(indexer.num_chosen * token_size)


def rows_of(num_elements: int) -> int:
    """N at most, of tokens whose keys have so many elements."""
    return max(1, min(_MAX_ROWS, _MAX_ELEMENTS // num_elements))


def most_entries(layer: LayerConfig, num_tokens: int) -> int:
    """Entries that a token sees at most in a layer of compressed attention, of a row of so many tokens."""
    assert layer.compressed is not None, layer
    compressed = layer.compressed
    num_entries = num_tokens // compressed.rate if compressed.rate else 0
    return num_entries if compressed.indexer is None else min(num_entries, compressed.indexer.num_chosen)


def choice_bytes(model_config: ModelConfig, dtype_bytes: int, num_ranks: int = 1) -> int:
    """Bytes that a step takes, on one of so many ranks that share heads, for the choice of tokens that see as many keys
    as a row may have, and for attention to it, in the layer that takes most; 0 if all tokens see all keys. What each
    token of the step takes is not in it.
    """
    kinds = dict.fromkeys((layer.chooser, _sizes(layer, num_ranks)) for layer in model_config.layers)
    num_keys = model_config.max_model_len
    found = [_of_kind(indexer, *sizes, num_keys, dtype_bytes) for indexer, sizes in kinds if indexer is not None]
    others = dict.fromkeys(layer for layer in model_config.layers if layer.compressed is not None)
    return max([0, *found, *(_of_entries(layer, num_keys, dtype_bytes) for layer in others)])


def _of_entries(layer: LayerConfig, num_tokens: int, dtype_bytes: int) -> int:
    compressed, size = layer.compressed, layer.head_size
    assert compressed is not None, layer
    # Keys as they are read, joined and in blocks, with positions, blocks and offsets.
    num_keys = -(-(compressed.window + most_entries(layer, num_tokens)) // BLOCK) * BLOCK
    copies = rows_of(num_keys * size) * num_keys * (3 * size * dtype_bytes + 8 * _INDEX)
    # Rows of the groups that are compressed at once, gates and sums in float32.
    of_groups = GROUPS * compressed.rate * (compressed.row_size(size) * dtype_bytes + 4 * _FLOAT * size)
    scores, num_entries = 0, num_tokens // compressed.rate if compressed.rate else 0
    if compressed.indexer is not None and num_entries > compressed.indexer.num_chosen:
        scores = _score_bytes(_MAX_ROWS, num_entries, compressed.indexer, compressed.indexer.num_heads)
    return max(copies, of_groups, scores)


def _score_bytes(
    num_rows: int, num_keys: int, indexer: IndexerConfig, num_heads: int, num_choices: int = 1, num_tiles: int = 2
) -> int:
    num_scores = -(-num_keys // TILE) * TILE
    # Scores [N, S], beside a row that is being sorted; or those so far, with products [N * heads, TILE] of some tiles
    # and queries in float32.
    scores = _SCORE * num_scores * (num_rows * num_choices + 1)
    tiles = num_rows * _FLOAT * (num_scores * num_choices + num_heads * (num_tiles * TILE + indexer.head_size))
    return max(scores, tiles)


def _sizes(layer: LayerConfig, num_ranks: int) -> tuple[int, int]:
    """Numbers that are read of a key, and key-value heads."""
    if layer.latent is not None:
        return layer.latent.key_size, 1
    num_kv_heads = max(layer.num_kv_heads // num_ranks, 1)
    return 2 * num_kv_heads * layer.head_size, num_kv_heads


def _of_kind(indexer: IndexerConfig, token_size: int, num_kv_heads: int, num_keys: int, dtype_bytes: int) -> int:
    if indexer.most_seen >= num_keys:
        return 0
    num_rows, num_runs = rows_at_once(indexer, token_size), -(-num_keys // indexer.run_length)
    num_heads, num_choices, num_tiles = indexer.num_heads, 1, 2
    if indexer.is_by_head:
        # Products are masked, and runs of keys are numbered.
        num_heads, num_choices, num_tiles = num_kv_heads, num_kv_heads, 5
    # Keys [N, K, D] as they are read, bytes of FP8 perhaps, and in blocks; positions, heads, blocks and offsets.
    num_seen = -(-indexer.most_seen // BLOCK) * BLOCK
    copies = num_seen * (token_size * (2 * dtype_bytes + 1) + (5 + indexer.is_by_head) * num_choices * _INDEX)
    return max(_score_bytes(num_rows, num_runs, indexer, num_heads, num_choices, num_tiles), num_rows * copies)
