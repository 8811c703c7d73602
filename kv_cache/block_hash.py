"""Hashes of the contents of full blocks: equal hashes mean equal tokens from the first on, in the same model.

A block's hash covers everything that its bytes depend on:

    its own tokens, and all before them     the hash of the previous block, and the tokens
    the weights                             `weight_version`, in the root
    the adapter                             `adapter_id`, in the root
    how its row's positions are rotated     `rope_regime`, in the root: fixed when the row is admitted

and the row's `cache_salt`, in the root, although no byte depends on it: rows with another salt do not find the block,
so the time to the first token does not reveal what others have asked.

Each hash is computed from the previous hash and the block's tokens, the first one from a root that covers the rest. No
seed of the process enters: all ranks, and later runs, compute the same hashes. The chaining is vLLM's
(`hash_block_tokens`); 128 bits rule out accidental collisions, and the person string keeps these hashes apart from
others of the same bytes.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from kv_cache.block import BlockHash

NUM_HASH_BYTES: Final = 16
_PERSON: Final = b"spmd-kv-block-1"
_EMPTY: Final = blake2b(digest_size=NUM_HASH_BYTES, person=_PERSON)
"""Copied for each hash: setting up another takes longer than hashing a block."""


def root_hash(
    weight_version: int = 0, adapter_id: int = 0, rope_regime: int = 0, cache_salt: str | None = None
) -> BlockHash:
    """Parent hash of the first block. `adapter_id` is a digest of the adapter's content, 0 for the model without one:
    an id of the user's may name other weights later. `rope_regime` is the request's.

    A new weight version gives a new root, so no block computed with old weights is ever found again.
    """
    salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8")
    return _digest(struct.pack("<qqq", weight_version, adapter_id, rope_regime) + salt)


def hash_blocks(parent: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids`, in order; `parent` is the previous block's hash, or the root.

    Tokens after the last full block have no hash. Takes about a microsecond a block.
    """
    num_blocks = len(token_ids) // block_size
    data = struct.pack(f"<{num_blocks * block_size}q", *token_ids[: num_blocks * block_size])
    num_bytes = 8 * block_size
    hashes: list[BlockHash] = []
    for start in range(0, num_blocks * num_bytes, num_bytes):
        hasher = _EMPTY.copy()
        hasher.update(parent + data[start : start + num_bytes])
        parent = BlockHash(hasher.digest())
        hashes.append(parent)
    return hashes


def _digest(data: bytes) -> BlockHash:
    return BlockHash(blake2b(data, digest_size=NUM_HASH_BYTES, person=_PERSON).digest())
