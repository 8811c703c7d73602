"""Opens the checkpoint of a folder: safetensors, or GGUF."""

from pathlib import Path

from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.gguf_checkpoint import GgufCheckpoint
from spmd_worker.model.weights.staging import HOST, HostStaging
from spmd_worker.model_config.gguf.files import linked_files


def open_checkpoint(folder: Path, staging: HostStaging = HOST) -> Checkpoint:
    """`Checkpoint.open`, or `GgufCheckpoint.open` of a folder that was made of GGUF. Raises CheckpointError."""
    return GgufCheckpoint.open(folder, staging) if linked_files(folder) else Checkpoint.open(folder, staging)
