"""The models that rows may name: the base model, and the run's adapters by their names (`model.adapters`)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.openai.row import Row
from spmd_worker.tokenizer.messages import InvalidRequestError

_MAX_LISTED: Final = 20


@dataclass(frozen=True, slots=True)
class ServedModels:
    """`base` is the model's name in answers to rows that name none, and `aliases` are other names for it. `adapters`
    maps a name to the number by which requests name the adapter. Without adapters every model name is the base model's.

    Raises ConfigError for an adapter with a name of the base model.
    """

    base: str = ""
    adapters: Mapping[str, int] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (self.base, *self.aliases):
            if name in self.adapters:
                raise ConfigError(f"model.adapters has {name!r}, which is the model's own name: give another")

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may give, the base model's first."""
        return (self.base, *self.adapters)

    def adapter_of(self, row: Row) -> int:
        """Number of the row's adapter; 0 for the base model. A plain row has the adapter's name in `adapter`, an OpenAI
        row in its body's `model`. Raises InvalidRequestError for an unknown name.
        """
        if row.adapter is not None:
            if row.adapter not in self.adapters:
                known = f"the run has {_listed(self.adapters)}" if self.adapters else "the run has none"
                raise InvalidRequestError(
                    f"adapter={shown(row.adapter)} is not loaded: {known} (model.adapters={{NAME: FOLDER}})",
                    "model_not_found",
                )
            return self.adapters[row.adapter]
        if not self.adapters or row.model is None or row.model in (self.base, *self.aliases):
            return 0
        if row.model not in self.adapters:
            message = f"model {shown(row.model)} is not served; served are {_listed(self.names)}"
            raise InvalidRequestError(message, "model_not_found")
        return self.adapters[row.model]


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return ", ".join(listed[:_MAX_LISTED]) + more


ANY_MODEL = ServedModels()
"""A run without adapters."""
