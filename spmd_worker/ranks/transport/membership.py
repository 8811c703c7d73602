"""Authenticates the ranks of a run, before anything is compared, computed or read from a message.

Ranks find each other through the launcher's store, which does not authenticate: any process that reaches its port may
write there, such as ranks of another run with the same address and port. But these do not know the run's secret. Each
rank sends a nonce, then a digest of all nonces and its rank, keyed with the secret, so that no message reveals the
secret or can be replayed. Ranks with a different secret are named in the error.
"""

import hmac
import os
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from spmd_worker.base.errors import RanksDisagreeError
from spmd_worker.ranks.transport.channel import ControlChannel

SECRET_VARIABLE: Final = "SPMD_WORKER_SECRET"
"""The user's secret, the same on every rank, if the launcher's run id is missing or known to others."""

_RUN_VARIABLE: Final = "TORCHELASTIC_RUN_ID"
"""torchrun's --rdzv-id. Not its count of restarts, which each node's agent keeps for itself."""
_NONCE_BYTES: Final = 16
_DIGEST_BYTES: Final = 32
_NAME_BYTES: Final = 16


def run_secret(variables: Mapping[str, str] = os.environ) -> bytes:
    """A 32-byte digest of the launcher's run id and the user's secret."""
    digest = blake2b(digest_size=_DIGEST_BYTES, person=b"spmd-run-secret")
    for name in (SECRET_VARIABLE, _RUN_VARIABLE):
        value = variables.get(name, "").encode("utf-8", "surrogateescape")
        digest.update(len(value).to_bytes(8, "little") + value)
    return digest.digest()


def check_members(channel: ControlChannel, secret: bytes) -> str:
    """Authenticate the ranks; every rank calls this. Returns a new name for the run of these ranks, the same on all.
    Raises RanksDisagreeError naming the ranks that have another secret than this one.
    """
    nonces = b"".join(channel.gather(os.urandom(_NONCE_BYTES)))
    shown = channel.gather(_proof(secret, nonces, channel.rank))
    strangers = [
        rank for rank, proof in enumerate(shown) if not hmac.compare_digest(proof, _proof(secret, nonces, rank))
    ]
    if not strangers:
        return blake2b(nonces, digest_size=_NAME_BYTES, person=b"spmd-name").hexdigest()
    ranks = f"rank {strangers[0]} does" if len(strangers) == 1 else f"ranks {', '.join(map(str, strangers))} do"
    raise RanksDisagreeError(
        f"{ranks} not belong to the run of rank {channel.rank}: {_RUN_VARIABLE} or {SECRET_VARIABLE} is another there, "
        f"so another run, or somebody else, has come to the same MASTER_ADDR and MASTER_PORT; give each run a port and "
        f"an id (torchrun --rdzv-id) of its own, and every rank the same"
    )


def _proof(secret: bytes, nonces: bytes, rank: int) -> bytes:
    return blake2b(
        rank.to_bytes(8, "little") + nonces, key=secret, digest_size=_DIGEST_BYTES, person=b"spmd-member"
    ).digest()
