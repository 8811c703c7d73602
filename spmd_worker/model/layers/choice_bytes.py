"""Memory in which tokens choose their keys and attend to them (`chosen_keys.py`), by arithmetic. Needs no torch.

N: tokens of one call; S: keys of one sequence; K: keys that are chosen; D: numbers of a key.
"""

from typing import Final

from spmd_worker.model_config.layer_config import LatentConfig
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


def rows_at_once(latent: LatentConfig) -> int:
    """N at most."""
    assert latent.indexer is not None, latent
    return max(1, min(_MAX_ROWS, _MAX_ELEMENTS // (latent.indexer.num_chosen * latent.key_size)))


def choice_bytes(model_config: ModelConfig, dtype_bytes: int) -> int:
    """Bytes that a step takes for the choice of tokens that see as many keys as a row may have, and for attention to
    it, in the layer that takes most; 0 if all tokens see all keys. What each token of the step takes is not in it.
    """
    kinds = dict.fromkeys(layer.latent for layer in model_config.layers)
    num_keys = model_config.max_model_len
    return max([0, *(_of_kind(latent, num_keys, dtype_bytes) for latent in kinds if latent is not None)])


def _of_kind(latent: LatentConfig, num_keys: int, dtype_bytes: int) -> int:
    indexer = latent.indexer
    if indexer is None or indexer.num_chosen >= num_keys:
        return 0
    num_rows, num_scores = rows_at_once(latent), -(-num_keys // TILE) * TILE
    # Scores [N, S], beside a row that is being sorted; or those so far, with products [N * heads, TILE] of two tiles
    # and queries in float32.
    scores = _SCORE * num_scores * (num_rows + 1)
    tiles = num_rows * _FLOAT * (num_scores + indexer.num_heads * (2 * TILE + indexer.head_size))
    # Keys [N, K, D] as they are read, bytes of FP8 perhaps, and in blocks; positions, blocks and offsets.
    num_chosen = -(-indexer.num_chosen // BLOCK) * BLOCK
    copies = num_chosen * (latent.key_size * (2 * dtype_bytes + 1) + 5 * _INDEX)
    return max(scores, tiles, num_rows * copies)
