"""Hashes of the contents of full blocks: equal hashes mean equal tokens from the first on, in the same model.

A block's hash covers everything that its bytes depend on:

    its own tokens, and all before them     the hash of the previous block, and the tokens
    rows given in place of tokens           the digests of their contents, beside the tokens (`GivenRows`)
    the images among its tokens             their names, which cover pixels and preparing, as such rows
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
from typing import Final, NamedTuple

from kv_cache.block import BlockHash

NUM_HASH_BYTES: Final = 16
_PERSON: Final = b"spmd-kv-block-1"
_EMPTY: Final = blake2b(digest_size=NUM_HASH_BYTES, person=_PERSON)
"""Copied for each hash: setting up another takes longer than hashing a block."""


class GivenRows(NamedTuple):
    """`num_rows` positions from `start` on whose vectors are given, and whose token ids are placeholders. `content` is
    one digest of all these vectors, or the digest of each, one after another.
    """

    content: bytes
    start: int
    num_rows: int


def root_hash(
    weight_version: int = 0, adapter_id: int = 0, rope_regime: int = 0, cache_salt: str | None = None
) -> BlockHash:
    """Parent hash of the first block. `adapter_id` is a digest of the adapter's content, 0 for the model without one:
    an id of the user's may name other weights later. `rope_regime` is the request's.

    A new weight version gives a new root, so no block computed with old weights is ever found again.
    """
    salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8")
    return _digest(struct.pack("<qqq", weight_version, adapter_id, rope_regime) + salt)


def hash_blocks(
    parent: BlockHash, token_ids: Sequence[int], block_size: int, rows: Sequence[GivenRows] = ()
) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids`, in order; `parent` is the previous block's hash, or the root. Starts of
    `rows` count from the first of these tokens: below 0 for rows that begin in an earlier block.

    Tokens after the last full block have no hash. Takes about a microsecond a block.
    """
    num_blocks = len(token_ids) // block_size
    data = struct.pack(f"<{num_blocks * block_size}q", *token_ids[: num_blocks * block_size])
    num_bytes = 8 * block_size
    hashes: list[BlockHash] = []
    for start in range(0, num_blocks * num_bytes, num_bytes):
        hasher = _EMPTY.copy()
        hasher.update(parent + data[start : start + num_bytes])
        if rows:
            # Longer than the tokens alone: no list of ids has this hash.
            hasher.update(_rows_between(rows, start // 8, start // 8 + block_size))
        parent = BlockHash(hasher.digest())
        hashes.append(parent)
    return hashes


def _rows_between(rows: Sequence[GivenRows], first: int, end: int) -> bytes:
    """Position and count, then digests, of each of `rows` in a block: those of its rows there, or that of all its rows
    with the number of the first.
    """
    parts = []
    for content, start, num_rows in rows:
        begin, stop = max(start, first), min(start + num_rows, end)
        if begin >= stop:
            continue
        parts.append(struct.pack("<2q", begin - first, stop - begin))
        if len(content) == NUM_HASH_BYTES:
            parts.append(content + struct.pack("<q", begin - start))
        else:
            parts.append(content[NUM_HASH_BYTES * (begin - start) : NUM_HASH_BYTES * (stop - start)])
    return b"".join(parts)


def _digest(data: bytes) -> BlockHash:
    return BlockHash(blake2b(data, digest_size=NUM_HASH_BYTES, person=_PERSON).digest())
