"""The provenance of an output: digests of the output and of everything that it depends on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.files import write_json
from spmd_worker.frontends.batch.run_dir.job_files import PROVENANCE_NAME

FORMAT_VERSION: Final = 1


def write_provenance(
    run_dir: Path, manifest: Mapping[str, Any], output: Mapping[str, Any], replicas: Sequence[Mapping[str, Any]]
) -> None:
    """Write the provenance. `output` has the output's path and digest. `replicas` has, for each in this start of the
    job, `steps` and `digest_chain_head`: the chained digest of all agreed plans, which a replay of the step log must
    reproduce. Raises OSError.
    """
    provenance = {
        "format_version": FORMAT_VERSION,
        "output": dict(output),
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
