"""Names for the contents of full blocks: equal names mean equal tokens from the first on, in the same model.

A block's name contains everything that its bytes depend on:

    its own tokens, and all before them     the hash of the block before, and the tokens
    the weights                             `weight_version`, in the root
    the adapter                             `adapter_id`, in the root
    how its row's positions are turned      `rope_regime`, in the root: fixed when the row is admitted

and the `cache_salt` of its row, in the root, on which no byte depends: rows of another salt do not find it, so that
nobody learns from how soon an answer begins what others have asked.

So a name is a hash of the name before it and the block's tokens, and the first is made from a root that stands for the
rest. No seed of the process enters: ranks, and a later run, come to the same names. The chaining is vLLM's
(`hash_block_tokens`); 128 bits make a collision unthinkable by accident, and the person string keeps these hashes apart
from others of the same bytes.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from kv_cache.block import BlockHash

NUM_HASH_BYTES: Final = 16
_PERSON: Final = b"spmd-kv-block-1"


def root_hash(
    weight_version: int = 0, adapter_id: int = 0, rope_regime: int = 0, cache_salt: str | None = None
) -> BlockHash:
    """What stands before the first block: `adapter_id` 0 is the model without an adapter, `rope_regime` is the
    request's.

    Another version of the weights is another root, so no block computed with old weights is ever found again.
    """
    salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8")
    return _digest(struct.pack("<qqq", weight_version, adapter_id, rope_regime) + salt)


def hash_blocks(parent: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """The names of the full blocks that `token_ids` make, in order; `parent` is the name before them, or the root.

    Tokens after the last full block have no name. Takes about a microsecond a block.
    """
    num_blocks = len(token_ids) // block_size
    data = memoryview(struct.pack(f"<{num_blocks * block_size}q", *token_ids[: num_blocks * block_size]))
    num_bytes = 8 * block_size
    hashes: list[BlockHash] = []
    for start in range(0, num_blocks * num_bytes, num_bytes):
        hasher = blake2b(parent, digest_size=NUM_HASH_BYTES, person=_PERSON)
        hasher.update(data[start : start + num_bytes])
        parent = BlockHash(hasher.digest())
        hashes.append(parent)
    return hashes


def _digest(data: bytes) -> BlockHash:
    return BlockHash(blake2b(data, digest_size=NUM_HASH_BYTES, person=_PERSON).digest())
