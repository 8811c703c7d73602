"""The provenance of an output: digests of the output and of everything that it depends on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.files import write_json
from spmd_worker.frontends.batch.run_dir.job_files import PROVENANCE_NAME

FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class OutputDigest:
    """Digest of an output's lines, uncompressed: the output of `sha256sum` for plain JSONL."""

    num_lines: int
    num_bytes: int
    sha256: str


def write_provenance(
    run_dir: Path, manifest: Mapping[str, Any], output: str, digest: OutputDigest, replicas: Sequence[Mapping[str, Any]]
) -> None:
    """Write the provenance. `replicas` has, for each in this start of the job, `steps` and `digest_chain_head`: the
    chained digest of all agreed plans, which a replay of the step log must reproduce. Raises OSError.
    """
    provenance = {
        "format_version": FORMAT_VERSION,
        "output": {"path": output, "lines": digest.num_lines, "bytes": digest.num_bytes, "sha256": digest.sha256},
        "version": manifest["version"],
        "config_hash": manifest["config_hash"],
        "seed": manifest["config"]["seed"],
        "layout": manifest["starts"][-1]["layout"],
        "replicas": list(replicas),
        # Everything that answers depend on: the model's files, the input, the packages.
        "answers": manifest["answers"],
        "overridden": manifest["overridden"],
        "starts": manifest["starts"],
    }
    write_json(run_dir / PROVENANCE_NAME, provenance)
