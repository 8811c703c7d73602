"""Saves the model of all ranks: sharded states, checkpoints in the hub's names, streamed checkpoints.

The ranks agree on every phase, so that all of them have saved or none: each checks that it can save, the first stages
the folder, all write in rounds, and the first renames the folder. Every rank of the engine makes the call; those of
replicas after the first write nothing, as they hold the same weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from spmd_worker.base.errors import SaveError
from spmd_worker.base.staged_folder import StagedFolder, stage_folder, write_durably
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.checkpoint_layer import PackedLayer
from spmd_worker.model.weights import sharded_state
from spmd_worker.model.weights.full_tensors import (
    FullTensor,
    assembled,
    content_from,
    held_ranges,
    in_rounds,
    num_bytes_from,
    plan_gather,
    ranges_of,
)
from spmd_worker.model.weights.safetensors_writer import (
    PAGE_BYTES,
    WORD_BYTES,
    SafetensorsWriter,
    divided,
    in_file_order,
)
from spmd_worker.model.weights.saved_checkpoint import (
    SourceTensors,
    check_replaceable,
    files_of,
    metadata_of,
    model_tensors,
    write_index,
)
from spmd_worker.model.weights.sharded_state import ShardedState, StateFile, held_parameters
from spmd_worker.model_config.saved_files import copy_model_files
from spmd_worker.model_config.tensor_names import STATE_FILE
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.groups import ParallelGroups
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.file_formats import state_layout
from spmd_worker.worker.save_agreement import SaveAgreement

_ROUND_BYTES: Final = 64 * 2**20
"""Bytes that a rank writes of a sharded state before the ranks agree again."""


class ModelSaver:
    """One rank's part of saves. Raises SaveError on every rank if any rank failed, or the rank's own error: what was in
    the folder before is unchanged then.
    """

    def __init__(
        self, model: DecoderForCausalLM, resolved: ResolvedRun, environment: RankEnvironment, groups: ParallelGroups
    ) -> None:
        self._model, self._resolved, self._rank = model, resolved, environment.rank
        self._engine, self._replica = ControlChannel(groups.engine), ControlChannel(groups.control)
        num_ranks = resolved.layout.tensor_parallel_size * resolved.layout.pipeline_parallel_size
        self._is_first, self._writes = self._engine.rank == 0, self._engine.rank < num_ranks

    def save_sharded_state(
        self, path: Path, pattern: str | None, max_bytes: int | None, weight_version: int | None
    ) -> None:
        """Every rank of the first replica writes its parameters."""
        layout, model_config = state_layout(self._resolved), self._resolved.model_config
        agreement = SaveAgreement(self._engine, path)
        # The outer one: a folder is removed once all ranks know of the error, and none writes any more.
        with ExitStack() as removals, agreement.shared():
            self._check_saveable()
            sharded_state.file_names(pattern, layout, 0, 0, 1)
            with self._staged(agreement, path, removals) as folder:
                files = self._write_parameters(agreement, folder, pattern, max_bytes) if self._writes else []
                agreement.wait_until_all()
                of_ranks = [
                    tuple(StateFile(**each) for each in found)
                    for found in agreement([asdict(each) for each in files])
                    if found
                ]
                if self._is_first:
                    self._check_arrived(folder, [each for found in of_ranks for each in found])
                    digest = sharded_state.config_digest(folder)
                    dtype, family = self._resolved.dtype, model_config.architecture
                    state = ShardedState(family, digest, dtype, layout, weight_version, tuple(of_ranks))
                    write_durably(folder / STATE_FILE, state.encoded())

    def save_checkpoint(self, path: Path, max_bytes: int | None, *, is_streamed: bool = False) -> None:
        """The first rank writes the tensors of all ranks; `is_streamed`: into one file."""
        alignment = PAGE_BYTES if is_streamed else WORD_BYTES
        agreement = SaveAgreement(self._engine, path)
        # The outer one: a folder is removed once all ranks know of the error, and none writes any more.
        with ExitStack() as removals, agreement.shared():
            self._check_saveable()
            own = list(held_ranges(self._model.weights.held).items()) if self._writes else []
            ranges = [{name: ranges_of(found) for name, found in of_rank} for of_rank in agreement(own)]
            plan = plan_gather(in_file_order(model_tensors(self._model.weights), alignment), ranges)
            with self._staged(agreement, path, removals) as folder:
                if self._is_first:
                    self._write_tensors(agreement, folder, plan, None if is_streamed else max_bytes, is_streamed)
                elif self._writes:
                    for tensors in in_rounds(plan):
                        agreement(False)
                        self._send(tensors)
                agreement.wait_until_all()

    def _check_saveable(self) -> None:
        """Raise RuntimeError while weights sleep or are being changed, SaveError for weights that are held quantised
        and for experts that GPUs hold as their files store them; those that CPUs do are saved dequantised.
        """
        update, options = self._model.weights.update, self._resolved.config.model
        update.check_awake("before they are saved")
        if update.is_open:
            raise RuntimeError(
                "weights were loaded and are not committed: call llm.finish_weight_update() or "
                "llm.reset_prefix_cache() before they are saved"
            )
        if options.quantization is not None:
            raise SaveError(
                f"model.quantization={options.quantization} holds rounded weights, and those of the checkpoint are "
                f"gone: save from a run without it"
            )
        layers = [each for each in self._model.modules() if isinstance(each, PackedLayer)]
        stored = next((each.stored for each in layers if not each.is_multiplied_as_held), None)
        if stored is not None:
            raise SaveError(
                f"experts are held in {stored.words}, as their files have them, and cannot be saved: copy those "
                f"files, or set model.dequantize_weights=true"
            )

    @contextmanager
    def _staged(self, agreement: SaveAgreement, path: Path, removals: ExitStack) -> Iterator[Path]:
        """Block in which the ranks write into a folder, beside configuration and tokenizer; at its end the first rank
        renames it. `removals` removes it otherwise.
        """
        staged: StagedFolder | None = None
        if self._is_first:
            staged = stage_folder(path, check_replaceable)
            removals.callback(staged.abandon)
        folder = Path(agreement("" if staged is None else str(staged.path))[0])
        if self._writes and not folder.is_dir():
            raise SaveError(f"{folder}, which rank 0 has made, is not seen here: give a folder that all ranks share")
        if staged is not None:
            source, is_tied = self._resolved.model_folder, self._resolved.model_config.has_tied_embeddings
            copy_model_files(source, folder, self._resolved.dtype, is_tied=is_tied)
        agreement()
        yield folder
        if staged is not None:
            staged.commit()
        agreement()

    def _write_parameters(
        self, agreement: SaveAgreement, folder: Path, pattern: str | None, max_bytes: int | None
    ) -> list[StateFile]:
        """This rank's files."""
        parameters = {each.name: each for each in held_parameters(self._model)}
        parts = divided(in_file_order([each.to_write for each in parameters.values()]), max_bytes)
        layout, files, num_bytes = self._resolved.layout, [], 0
        ranks = (layout.tensor_rank(self._rank), layout.pipeline_rank(self._rank))
        names = sharded_state.file_names(pattern, state_layout(self._resolved), *ranks, len(parts))
        for name, part in zip(names, parts, strict=True):
            with SafetensorsWriter(folder / name, part, metadata_of()) as writer:
                for each in part:
                    writer.write(parameters[each.name].read())
                    num_bytes += each.num_bytes
                    if num_bytes > _ROUND_BYTES:
                        agreement(False)
                        num_bytes = 0
            files.append(StateFile(name, (folder / name).stat().st_size, writer.digest))
        return files

    def _check_arrived(self, folder: Path, files: Sequence[StateFile]) -> None:
        """Raise SaveError for a file of another rank that is not in the folder on the first rank's machine."""
        for each in files:
            path = folder / each.name
            if not path.is_file() or path.stat().st_size != each.num_bytes:
                raise SaveError(f"{path}, of another rank, is not seen by rank 0: give a folder that all ranks share")

    def _write_tensors(
        self, agreement: SaveAgreement, folder: Path, plan: list[FullTensor], max_bytes: int | None, is_streamed: bool
    ) -> None:
        """Write the files, and the tensors of the source that the model does not use."""
        has_files = self._resolved.config.model.load_format in ("auto", "streamed")
        is_plain = has_files and self._resolved.model_config.quantization is None
        source = SourceTensors(self._resolved.model_folder, self._model.weights, is_read=is_plain)
        try:
            alignment = PAGE_BYTES if is_streamed else WORD_BYTES
            own = [source.renamed(each.to_write) for each in plan]
            files, others = files_of(in_file_order([*own, *source.unused], alignment), max_bytes), set(source.unused)
            tensors = self._full_tensors(agreement, plan)
            for name, part in files.items():
                with SafetensorsWriter(folder / name, part, metadata_of(is_streamed=is_streamed), alignment) as writer:
                    for each in part:
                        writer.write(source.read(each.name) if each in others else next(tensors))
            write_index(folder, files)
        finally:
            source.close()

    def _full_tensors(self, agreement: SaveAgreement, plan: Sequence[FullTensor]) -> Iterator[Tensor]:
        """The tensors of all ranks, on the first, in rounds. A round is received before anything of it is written, so
        that the others are in the agreement of the next one if that fails.
        """
        for tensors in in_rounds(plan):
            agreement(False)
            received = {}
            for rank in range(1, self._replica.size):
                num_bytes = num_bytes_from(rank, tensors)
                if num_bytes:
                    received[rank] = self._replica.receive_bytes(num_bytes, rank)
            yield from assembled(tensors, self._model.weights.held, received)

    def _send(self, tensors: Sequence[FullTensor]) -> None:
        """Send this rank's slices of a round; zeros before an error is raised: the first rank waits for them."""
        num_bytes = num_bytes_from(self._replica.rank, tensors)
        if not num_bytes:
            return
        try:
            content = content_from(self._replica.rank, tensors, self._model.weights.held)
        except BaseException:
            self._replica.send_bytes(torch.zeros(num_bytes, dtype=torch.uint8), 0)
            raise
        self._replica.send_bytes(content, 0)
