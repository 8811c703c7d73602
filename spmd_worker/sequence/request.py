"""One admitted request: what a replica needs to know of a row, and nothing of where the row came from.

Knows token ids and sampling parameters. Knows nothing about text, files or ranks.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import NewType

from spmd_worker.sequence.record_checks import Integer65, check_fields
from spmd_worker.sequence.sampling_params import SamplingParams

RequestId = NewType("RequestId", int)
"""Number of a request in order of admission: the same on every rank, never reused within an engine."""


@dataclass(frozen=True, slots=True)
class Request:
    """A row at admission. `stream` is the key of its random numbers, 64 bits (see `random_stream`)."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stream: Integer65

    def __post_init__(self) -> None:
        check_fields(self)


def random_stream(job_seed: int, sampling_seed: int | None, custom_id: str | None, index: int) -> int:
    """Key of a row's random stream: its own seed when it has one, else the job's seed with its custom id or index.

    Returns an unsigned 64-bit integer. The three kinds of name never collide, because the kind is part of what is
    hashed.
    """
    if sampling_seed is not None:
        name = f"seed:{sampling_seed}"
    elif custom_id is not None:
        name = f"id:{job_seed}:{custom_id}"
    else:
        name = f"index:{job_seed}:{index}"
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, person=b"spmd-stream").digest()
    return int.from_bytes(digest, "little")
