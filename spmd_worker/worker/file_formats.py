"""Fills a model from the files of a folder: checkpoints, streamed ones among them, and sharded states."""

from collections.abc import Collection
from pathlib import Path
from typing import Final

import torch

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.weights import sharded_state
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.safetensors_writer import CHUNK_BYTES
from spmd_worker.model.weights.saved_checkpoint import is_streamed
from spmd_worker.model.weights.sharded_state import StateLayout
from spmd_worker.model.weights.staging import HostStaging, ReusedStaging
from spmd_worker.model.weights.store import LoadReport
from spmd_worker.model.weights.weight_comparison import first_difference
from spmd_worker.model_config.hub import cached_folder
from spmd_worker.model_config.tensor_names import STATE_FILE
from spmd_worker.ranks.topology import stage_of
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.merged_adapter import with_merged_adapter

_STREAM_READERS: Final = 3
"""Threads that read and pack on the CPU: each has a block of `CHUNK_BYTES`."""
_MAX_QUANTISERS: Final = 8
"""Threads that read and quantise on the CPU: each has a block of 16 MB and several copies."""


def state_layout(resolved: ResolvedRun) -> StateLayout:
    """The division of a run's model among its ranks."""
    layout, size = resolved.layout, resolved.layout.tensor_parallel_size
    firsts = range(0, size * layout.pipeline_parallel_size, size)
    stages = [stage_of(layout, resolved.model_config, rank) for rank in firsts]
    bounds = tuple((each.start, each.stop) for each in stages)
    columns = sharded_state.column_ranges(layout, resolved.model_config)
    experts = sharded_state.placement_digest(layout.experts)
    return StateLayout(size, layout.pipeline_parallel_size, bounds, experts, columns)


def fill_from_files(
    model: DecoderForCausalLM, resolved: ResolvedRun, rank: int, staging: HostStaging, num_readers: int
) -> LoadReport:
    """Fill the parameters of a rank, not packed yet, by `model.load_format`. A streamed checkpoint is recognised by its
    metadata; on the CPU its weights are packed while they are read. Raises CheckpointError.
    """
    options, folder = resolved.config.model, resolved.model_folder
    if options.load_format == "sharded_state":
        state, layout = sharded_state.read_state(folder), state_layout(resolved)
        state.check(folder, resolved.model_config.architecture, resolved.dtype, layout)
        files = state.files[rank % len(state.files)]
        return sharded_state.fill_from_state(model, folder, files, allows_nonfinite=options.allow_nonfinite)
    with model.weights.open(folder, resolved.model_config.quantization, staging) as source:
        streamed = source if isinstance(source, Checkpoint) and is_streamed(source) else None
        if options.load_format == "streamed" and streamed is None:
            raise CheckpointError(
                f"{folder}: is not a checkpoint of save_streamed, and model.load_format=streamed reads no other: leave "
                f"model.load_format=auto"
            )
        merged = with_merged_adapter(source, model.weights, options)
        if streamed is not None and merged is source and staging.device.type == "cpu":
            streamed.staging = ReusedStaging()
            model.weights.pack_empty()
            return model.weights.fill(streamed, _STREAM_READERS, CHUNK_BYTES)
        if (merged is not source or options.quantization is not None) and staging.device.type == "cpu":
            # Merging and quantising take longer than reading: threads share them.
            num_readers = torch.get_num_threads()
            num_readers = num_readers if options.quantization is None else min(num_readers, _MAX_QUANTISERS)
        return model.weights.fill(merged, num_readers)


def reload_from_files(
    model: DecoderForCausalLM, resolved: ResolvedRun, rank: int, path: str | None, loaded: Collection[int]
) -> None:
    """Update all weights of a running model from a folder, by default its own, or from a name of the hub whose files
    are in the local cache: a checkpoint, or a sharded state of this layout and dtype, whatever `model.load_format` is.
    `loaded` are digests of adapters that rows may name. Raises CheckpointError or AdapterError, with the weights
    unchanged, if names or shapes are not the model's.
    """
    options = resolved.config.model
    folder = _folder_of(resolved, path)
    if not (folder / STATE_FILE).is_file():
        with model.weights.open(folder, resolved.model_config.quantization) as checkpoint:
            model.weights.reload(with_merged_adapter(checkpoint, model.weights, options, loaded))
        return
    for key, value in (("quantization", options.quantization), ("lora_merge", options.merged_adapter)):
        if value is not None:
            raise CheckpointError(
                f"{folder}: holds a sharded state, whose weights are loaded as they are, and this run has "
                f"model.{key}={value}: give a checkpoint of the hub's names (save_checkpoint)"
            )
    state = sharded_state.read_state(folder)
    state.check(folder, resolved.model_config.architecture, resolved.dtype, state_layout(resolved))
    finite = {"allows_nonfinite": options.allow_nonfinite}
    sharded_state.reload_from_state(model, model.weights, folder, state, rank, **finite)


def difference_from_files(model: DecoderForCausalLM, resolved: ResolvedRun, path: str | None) -> str:
    """The first of a rank's weights that a fresh load from a folder, by default the run's own, would hold otherwise, in
    words; "" if there is none. `path` is as in `reload_from_files`; the adapter of `model.lora_merge` is merged as it
    would be. Raises CheckpointError or AdapterError, for a sharded state too.
    """
    options, folder = resolved.config.model, _folder_of(resolved, path)
    if options.load_format == "dummy" and path is None:
        dummy = with_merged_adapter(model.weights.dummy(), model.weights, options)
        return first_difference(model.weights, dummy)
    if (folder / STATE_FILE).is_file():
        raise CheckpointError(
            f"{folder}: holds a sharded state, and weights are compared by the checkpoint's names: give a checkpoint "
            f"(save_checkpoint), such as the one that the state was made of"
        )
    with model.weights.open(folder, resolved.model_config.quantization) as checkpoint:
        return first_difference(model.weights, with_merged_adapter(checkpoint, model.weights, options))


def _folder_of(resolved: ResolvedRun, path: str | None) -> Path:
    return resolved.model_folder if path in (None, resolved.config.model.path) else cached_folder(path)
