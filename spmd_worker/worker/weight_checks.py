"""Checks of the weights of all ranks, which agree on the answer: digests of tensors, and comparison with files."""

import json
from collections.abc import Callable

from spmd_worker.base.errors import AdapterError, CheckpointError
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.weights.trainer_digest import sums_from_json
from spmd_worker.model.weights.weight_comparison import combined_digests, tensor_sums
from spmd_worker.ranks.groups import ParallelGroups
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.file_formats import difference_from_files

Answer = tuple[str, str]
"""A difference, and the error of a rank that could not compare: one of them, or none."""


def compare_with_files(
    model: DecoderForCausalLM, resolved: ResolvedRun, groups: ParallelGroups, path: str | None
) -> Answer:
    """The answer of the lowest rank that has one, the same on every rank; every rank of the engine calls this."""
    own = _answer(groups.engine.rank, lambda: difference_from_files(model, resolved, path))
    answers = [json.loads(each) for each in ControlChannel(groups.engine).gather(json.dumps(own).encode())]
    errors = [("", error) for _, error in answers if error]
    differences = [(difference, "") for difference, _ in answers if difference]
    return next(iter([*errors, *differences]), ("", ""))


def _answer(rank: int, compare: Callable[[], str]) -> Answer:
    try:
        difference = compare()
    except (CheckpointError, AdapterError, OSError) as error:
        return "", f"rank {rank}: {error}"
    return (f"rank {rank}: {difference}", "") if difference else ("", "")


def digests_of_all_ranks(model: DecoderForCausalLM, groups: ParallelGroups) -> tuple[dict[str, str], str]:
    """Digest of each tensor of the model, and an error, the same on every rank, if ranks that should hold the same do
    not. Every rank of the engine calls this.
    """
    own = json.dumps(tensor_sums(model.weights)).encode()
    by_rank = [sums_from_json(json.loads(each)) for each in ControlChannel(groups.engine).gather(own)]
    try:
        return combined_digests(model.weights.shapes, by_rank), ""
    except CheckpointError as error:
        return {}, str(error)
