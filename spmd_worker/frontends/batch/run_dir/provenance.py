"""The provenance of an output: digests of the output and of everything that it depends on."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.files import write_json
from spmd_worker.frontends.batch.run_dir.job_files import PROVENANCE_NAME

FORMAT_VERSION: Final = 1


class DigestChain:
    """Digest of the images of all rows, made row by row, in order (`chained_digest`)."""

    def __init__(self) -> None:
        self._chain, self._num_rows = b"", 0

    def add(self, row: int, digest: str) -> None:
        """Add a row with images."""
        self._chain = blake2b(self._chain + row.to_bytes(8, "little") + bytes.fromhex(digest), digest_size=16).digest()
        self._num_rows += 1

    def value(self) -> dict[str, Any] | None:
        return {"rows": self._num_rows, "digest": self._chain.hex()} if self._num_rows else None


def chained_digest(digests: Iterable[tuple[int, str]]) -> dict[str, Any] | None:
    """Digest of the images of all rows, from (row, digest of its images) in order of the rows, and the number of those
    rows; None without any.
    """
    chain = DigestChain()
    for row, digest in digests:
        chain.add(row, digest)
    return chain.value()


def write_provenance(
    run_dir: Path,
    manifest: Mapping[str, Any],
    output: Mapping[str, Any],
    replicas: Sequence[Mapping[str, Any]],
    images: Mapping[str, Any] | None = None,
) -> None:
    """Write the provenance. `output` has the output's path and digest. `replicas` has, for each in this start of the
    job, `steps` and `digest_chain_head`: the chained digest of all agreed plans, which a replay of the step log must
    reproduce. `images` are those of all rows (`chained_digest`). Raises OSError.
    """
    provenance = {
        "format_version": FORMAT_VERSION,
        "output": dict(output),
        "images": None if images is None else dict(images),
        "version": manifest["version"],
        "config_hash": manifest["config_hash"],
        "seed": manifest["config"]["seed"],
        "layout": manifest["starts"][-1]["layout"],
        "replicas": list(replicas),
        # Everything that answers depend on: the model's files, the input, the packages.
        "answers": manifest["answers"],
        "shard": manifest["shard"],
        "overridden": manifest["overridden"],
        "run": manifest["run"],
        "starts": manifest["starts"],
    }
    write_json(run_dir / PROVENANCE_NAME, provenance)


def merged_provenance(
    manifest: Mapping[str, Any],
    output: Mapping[str, Any],
    shards: Sequence[Mapping[str, Any]],
    num_duplicates: int,
    images: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The provenance of a merged output; `shards` are those of its parts. `num_duplicates` rows were answered by a
    shard, or rejected, and are error rows because an earlier row has their custom_id.
    """
    own = ("shard", "output", "config_hash", "layout", "replicas", "overridden", "starts")
    return {
        "format_version": FORMAT_VERSION,
        "output": dict(output),
        "images": None if images is None else dict(images),
        "version": manifest["version"],
        "config_hash": manifest["config_hash"],
        "seed": manifest["config"]["seed"],
        "answers": manifest["answers"],
        "overridden": manifest["overridden"],
        "duplicate_custom_ids": num_duplicates,
        "shards": [{key: each[key] for key in own} for each in shards],
    }
