"""Exceptions of the package and of launch.py that a user can see, and their consequences.

All are `SpmdError`s, whose messages have URLs without users and queries; each is also the built-in error that callers
catch (ValueError, RuntimeError). Class attributes give the exit code and the facts that the failure diagnosis needs.
Faults of this package itself are no `SpmdError`s: their traceback is wanted.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from spmd_worker.base.picklable_error import PicklableError
from spmd_worker.base.urls import without_credentials

DIVERGED_EXIT_CODE: Final = 70
"""Exit code of every rank of a replica whose ranks diverged."""

_MAX_REASONS: Final = 20
"""A message lists up to this many."""


class SpmdError(PicklableError):
    """Base of all errors here. Attributes are set by a class, and inherited."""

    exit_code: ClassVar[int] = 1
    """Exit code of a program that ends with this error."""
    is_secondary: ClassVar[bool] = False
    """Whether it is only the effect of another rank's failure."""
    is_known_to_all: ClassVar[bool] = False
    """Whether every rank ends with it, or with rank 0's message of it: no rank needs a diagnosis, and rank 0 prints it
    once.
    """
    names_rank: ClassVar[bool] = False
    """Whether the message names the rank that failed."""

    def __init__(self, *args: object) -> None:
        # Messages have values of keys, which may be names in stores.
        super().__init__(*(without_credentials(each) if isinstance(each, str) else each for each in args))


# Settings and files, checked before anything runs.


class ConfigError(SpmdError, ValueError):
    """A configuration that cannot run: the message names the key, the value, the rule and the way out."""

    is_known_to_all = True


class PluginError(ConfigError):
    """An installed plug-in could not be imported, or raised; the message names it."""

    # Nodes may have different plug-ins installed.
    is_known_to_all = False


class ModelConfigError(SpmdError, ValueError):
    """A model folder that this runtime cannot run: the message names the file, the key and the way out."""

    is_known_to_all = True


class TokenizerError(SpmdError, ValueError):
    """A tokenizer file is missing or its contents are invalid."""


class ChatTemplateError(SpmdError, ValueError):
    """The template cannot be compiled, rejected the conversation, or exceeded its limits."""


class CheckpointError(SpmdError, ValueError):
    """A checkpoint that cannot be used. The message names the file, the tensor and the rule it breaks."""


class AdapterError(SpmdError, ValueError):
    """An adapter that cannot be used. The message names the file, or the adapter, the key or tensor, and the rule."""


class PromptsRefusedError(SpmdError, ValueError):
    """Some prompts of a call can never be answered, so none of the call was; every rank raises it. `reasons` maps a
    prompt's index in the call to its reason. `has_on_error`: the call has that argument.
    """

    is_known_to_all = True

    def __init__(self, call: str, num_prompts: int, reasons: Mapping[int, str], *, has_on_error: bool = True) -> None:
        self.reasons = dict(reasons)
        indices = list(self.reasons)
        lines = [f"  prompt {index}: {self.reasons[index]}" for index in indices[:_MAX_REASONS]]
        if len(indices) > _MAX_REASONS:
            lines.append(f"  and those of index {', '.join(map(str, indices[_MAX_REASONS:]))}: see reasons")
        rows = f", or call {call}(..., on_error='row'), which answers the others and gives these an output with error"
        super().__init__(
            f"{len(indices)} of {num_prompts} prompts cannot be answered, and none was:\n"
            + "\n".join(lines)
            + f"\nleave them out{rows if has_on_error else ''}"
        )


class DeviceError(SpmdError, RuntimeError):
    """This rank's device is missing, though other ranks may have theirs."""


# Among ranks.


class RanksDisagreeError(SpmdError, RuntimeError):
    """Ranks were started with different configurations, models, code or prompts; found before the first step."""

    exit_code = DIVERGED_EXIT_CODE
    is_known_to_all = True


class ReplicaDivergedError(SpmdError, RuntimeError):
    """Ranks planned different steps, or sampled different ids. The step did not run on any of them."""

    exit_code = DIVERGED_EXIT_CODE
    is_known_to_all = True


class LostMessageError(ReplicaDivergedError):
    """A step message was lost, repeated or out of order."""


class RankFailedError(SpmdError, RuntimeError):
    """A rank of this replica could not start, or left; the message names the rank and the reason.

    `names_cause`: the ranks exchanged the reason, so every rank raises the same, and no better can be found.
    """

    is_secondary = True
    names_rank = True
    names_cause = False


class LauncherGoneError(SpmdError, RuntimeError):
    """The launcher had ended before this rank could join the others."""

    names_rank = True


class AbortedError(SpmdError, RuntimeError):
    """Another rank sent its reason for leaving. `is_divergence`: the replicas differ; otherwise the rank broke."""

    is_secondary = True
    names_rank = True

    def __init__(self, text: str, is_divergence: bool) -> None:
        super().__init__(text)
        self.is_divergence = is_divergence


class PeerLostError(SpmdError, RuntimeError):
    """Another rank left a collective, or did not arrive in time."""

    is_secondary = True


class WorkerError(RankFailedError):
    """A worker in another process raised. `order` counts failures as they arrived, so that the first is known."""

    is_secondary = False

    def __init__(self, rank: int, method: str, type_name: str, message: str, trace: str = "", order: int = 0) -> None:
        super().__init__(f"rank {rank} raised {type_name} in {method}: {message}")
        self.rank, self.method, self.type_name, self.message, self.order = rank, method, type_name, message, order
        if trace:
            self.add_note(f"rank {rank}'s own traceback:\n{trace.rstrip()}")

    @property
    def cause(self) -> tuple[str, str]:
        """Type and message without the rank's own number: equal where ranks failed for one reason."""
        return self.type_name, self.message.replace(f"rank {self.rank}", "rank")


class WorkerDiedError(RankFailedError):
    """A worker process ended unasked; the message has its rank, pid and exit code or signal."""

    is_secondary = False


class CacheMismatchError(SpmdError, RuntimeError):
    """A prefix-cache hit that was computed again has other bytes (`cache.verify_hits`). The message names the rank, the
    step, the block or snapshot with its tokens and its writer, the layer and the first element that differs.
    """

    names_rank = True


class StepMismatchError(SpmdError, RuntimeError):
    """A row of a decode step that was computed again by itself has other bits (`executor.verify_steps`). The message
    names the rank, the step, the row and its token, and the first number that differs.
    """

    names_rank = True


class MissingWeightsError(SpmdError, RuntimeError):
    """Some weights were loaded and others, `names`, were not: a mix of old and new weights is never used."""

    def __init__(self, names: Sequence[str], num_weights: int, *, were_dropped: bool = False) -> None:
        """`were_dropped`: a sleep of level 2 or a load that failed left no weights that can stay as they are."""
        self.names = list(names)
        num_more = len(self.names) - _MAX_REASONS
        subject = f"{len(self.names)} of {num_weights} weights were not"
        if len(self.names) == num_weights:
            subject = f"none of the {num_weights} weights was"
        since = "sleep(level=2) dropped them, or a load failed before its end" if were_dropped else "the last commit"
        way_out = (
            "load them too"
            if were_dropped
            else "load them too, or keep them as they are: llm.start_weight_update(partial=True), then "
            "llm.finish_weight_update()"
        )
        super().__init__(
            f"{subject} loaded since {since}:\n"
            + "\n".join(f"  {name}" for name in self.names[:_MAX_REASONS])
            + (f"\n  and {num_more} more: see names" if num_more > 0 else "")
            + f"\n{way_out}"
        )


class WeightMismatchError(SpmdError, RuntimeError):
    """Weights differ from those that a fresh load would hold (`LLM.check_weights`): the message names the rank, the
    tensor, the rank's slice of it and the first element that differs. Or from those that a trainer gave
    (`LLM.load_weights(verify=True)`): the message names the tensor.
    """

    is_known_to_all = True
    names_rank = True


class WorkerEventError(SpmdError, RuntimeError):
    """A rank rejected a worker event, which was undone on every rank; the message is that of the lowest such rank.
    `problem` is its part that the rank has written, "rank 1: ValueError: ...".
    """

    names_rank = True

    def __init__(self, text: str, problem: str = "") -> None:
        super().__init__(text)
        self.problem = problem


class SaveError(SpmdError, RuntimeError):
    """A model could not be saved: nothing of it is left, and what was there before is unchanged. Every rank raises it,
    or the rank's own error.
    """

    names_rank = True


# Jobs and their files.


class JobError(SpmdError, RuntimeError):
    """The job ran to its end but counts as a failure."""

    is_known_to_all = True


class JournalError(SpmdError, ValueError):
    """An invalid journal, or one that contradicts itself before its end. The message names the file and the record."""


class PoolError(SpmdError, ValueError):
    """A pool whose objects are damaged, or contradict each other. The message names the object."""


class StepStatsError(SpmdError, ValueError):
    """Invalid step statistics, or a file damaged before its last line. The message names file and line."""


class StepLogError(SpmdError, ValueError):
    """An invalid step log, or one damaged in the middle. The message names file and offset."""


class ReplayError(SpmdError, ValueError):
    """A log that cannot be replayed, or compared, any further; the message gives the reason."""


class ReplayDivergedError(ReplayError):
    """The replay's decision differs from the run's. The message names step, field and both values."""
