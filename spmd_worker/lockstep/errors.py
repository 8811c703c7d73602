"""What ranks raise when they find that they are not replicas of one another.

Knows words only.
"""

from typing import Final

DIVERGED_EXIT_CODE: Final = 70
"""Exit code of every rank of a replica whose ranks diverged."""


class ReplicaDivergedError(RuntimeError):
    """Ranks planned different steps, or sampled different ids. The step did not run on any of them."""


class RanksDisagreeError(RuntimeError):
    """Ranks were started with different configurations, models, code or prompts; found before the first step."""


class RankFailedError(RuntimeError):
    """A rank of this replica could not start, or left; the message says which and why.

    `names_cause`: the ranks told each other the reason, so every rank raises the same, and no better can be found.
    """

    names_cause = False


class LostMessageError(ReplicaDivergedError):
    """A step message was lost, repeated or came out of turn."""
