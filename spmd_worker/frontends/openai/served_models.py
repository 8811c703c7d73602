"""The models that rows may name: the base model, and the run's adapters by their names (`model.adapters`,
`model.prompt_adapters`).
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.openai.row import Row
from spmd_worker.replica.sequence.prompt_adapter_request import VirtualTokens
from spmd_worker.tokenizer.messages import InvalidRequestError

_MAX_LISTED: Final = 20

_Adapter = TypeVar("_Adapter")


class RowAdapters(NamedTuple):
    """Adapters of a row: the number by which requests name its LoRA adapter, 0 for none, and the virtual tokens of its
    prompt adapter.
    """

    adapter_id: int = 0
    virtual: VirtualTokens | None = None


@dataclass(frozen=True, slots=True)
class ServedModels:
    """`base` is the model's name in answers to rows that name none, and `aliases` are other names for it. `adapters`
    maps a name to the number by which requests name the LoRA adapter, `prompt_adapters` to virtual tokens. Without any
    every model name is the base model's.

    Raises ConfigError for an adapter with a name of the base model.
    """

    base: str = ""
    adapters: Mapping[str, int] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    prompt_adapters: Mapping[str, VirtualTokens] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_names((self.base, *self.aliases), self.adapters, self.prompt_adapters)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may give, the base model's first."""
        return (self.base, *self.adapters, *self.prompt_adapters)

    def adapters_of(self, row: Row) -> RowAdapters:
        """Adapters of a row. A plain row has their names in `adapter` and `prompt_adapter`, an OpenAI row has one name,
        in its body's `model`. Raises InvalidRequestError for an unknown name.
        """
        if row.adapter is not None or row.prompt_adapter is not None:
            return RowAdapters(
                _named("adapter", row.adapter, self.adapters) or 0,
                _named("prompt_adapter", row.prompt_adapter, self.prompt_adapters),
            )
        if len(self.names) == 1 or row.model is None or row.model in (self.base, *self.aliases):
            return RowAdapters()
        if row.model not in self.names:
            message = f"model {shown(row.model)} is not served; served are {_listed(self.names)}"
            raise InvalidRequestError(message, "model_not_found")
        return RowAdapters(self.adapters.get(row.model, 0), self.prompt_adapters.get(row.model))


def check_names(own: Iterable[str], adapters: Container[str], prompt_adapters: Container[str]) -> None:
    """Raise ConfigError for an adapter with one of the base model's `own` names."""
    for name in own:
        for key, named in (("adapters", adapters), ("prompt_adapters", prompt_adapters)):
            if name in named:
                raise ConfigError(f"model.{key} has {name!r}, which is the model's own name: give another")


def _named(key: str, name: str | None, loaded: Mapping[str, _Adapter]) -> _Adapter | None:
    """The adapter that a plain row names under `key`, a name of `model.{key}s`."""
    if name is None or name in loaded:
        return None if name is None else loaded[name]
    known = f"the run has {_listed(loaded)}" if loaded else "the run has none"
    message = f"{key}={shown(name)} is not loaded: {known} (model.{key}s={{NAME: FOLDER}})"
    raise InvalidRequestError(message, "model_not_found")


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return ", ".join(listed[:_MAX_LISTED]) + more


ANY_MODEL = ServedModels()
"""A run without adapters."""
