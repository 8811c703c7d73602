"""Numerical policy of a run: how each region of its model is computed, as far as bits depend on it, and one digest.

Each implementation states its own regions, next to its code (`numerics`). Runs with equal digests compute equal bits
from equal weights, whatever their layout; a change of sources that changes no bit gives another digest too.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final

Constant = bool | int | float | str

COLUMN_PARALLEL: Final = "column-parallel product"
ROW_PARALLEL: Final = "row-parallel product"
HEAD: Final = "head"
ATTENTION: Final = "attention"
NORM: Final = "norm"
ACTIVATION: Final = "activation"
SAMPLING: Final = "sampling"
CHOICE: Final = "choice of tokens"
RANK_SUM: Final = "sum over ranks"
EXPERTS: Final = "experts"
STATES: Final = "states"
ADAPTERS: Final = "adapters"
QUANTISATION: Final = "quantisation"
LAYERS: Final = "layers"
DEVICE: Final = "device"

_DIGEST_BYTES: Final = 16
_SOURCES: Final = (".py", ".cpp", ".h", ".json")


@dataclass(frozen=True, slots=True)
class Region:
    """`implementation` in words; `version`: a digest of its sources, or the versions of libraries; `constants` that
    decide bits.
    """

    implementation: str
    version: str
    constants: Mapping[str, Constant] = field(default_factory=dict)

    def with_constants(self, **constants: Constant) -> "Region":
        return Region(self.implementation, self.version, {**self.constants, **constants})


@dataclass(frozen=True, slots=True)
class NumericalPolicy:
    """`regions` by name: only those that the model has. Equal on every rank of a run."""

    regions: Mapping[str, Region]

    def __post_init__(self) -> None:
        object.__setattr__(self, "regions", MappingProxyType(dict(self.regions)))

    def __reduce__(self) -> tuple[type["NumericalPolicy"], tuple[dict[str, Region]]]:
        # A read-only mapping is not pickled.
        return type(self), (dict(self.regions),)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits, of all regions."""
        content = json.dumps(self._regions(), sort_keys=True, separators=(",", ":"))
        return blake2b(content.encode(), digest_size=_DIGEST_BYTES).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """A JSON object of `digest` and `regions`."""
        return {"digest": self.digest, "regions": self._regions()}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "NumericalPolicy":
        """The policy of an object of `as_dict`, such as one kept beside a run. Raises ValueError for another object, or
        if the digest is not that of its regions.
        """
        try:
            policy = cls({name: Region(**each) for name, each in value["regions"].items()})
            is_same = value["digest"] == policy.digest
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"this is not the object of a numerical policy, with digest and regions: {error}"
            ) from None
        if not is_same:
            raise ValueError(f"the policy has the digest {value['digest']}, but that of its regions is {policy.digest}")
        return policy

    def difference(self, other: "NumericalPolicy") -> str | None:
        """The first region that differs, with both values; None if there is none."""
        own, others = self._regions(), other._regions()
        for name in dict.fromkeys((*own, *others)):
            if own.get(name) != others.get(name):
                return f"{name}: {_words(own.get(name))}, and {_words(others.get(name))}"
        return None

    def _regions(self) -> dict[str, dict[str, Any]]:
        return {name: {**asdict_of(each)} for name, each in self.regions.items()}


def asdict_of(region: Region) -> dict[str, Any]:
    """The region as a JSON object."""
    return {**asdict(region), "constants": dict(region.constants)}


def _words(region: Mapping[str, Any] | None) -> str:
    if region is None:
        return "not there"
    constants = "".join([f", {name} {value}" for name, value in region["constants"].items()])
    version = f" of version {region['version']}" if region["version"] else ""
    return f"{region['implementation']}{version}{constants}"


@cache
def source_version(*paths: str) -> str:
    """Digest of source files, and of those in folders, by name and content."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for path in paths:
        files = [path]
        if os.path.isdir(path):
            walked = [os.path.join(parent, name) for parent, _, names in os.walk(path) for name in names]
            files = sorted(each for each in walked if each.endswith(_SOURCES))
        for each in files:
            with open(each, "rb") as stream:
                content = blake2b(stream.read(), digest_size=_DIGEST_BYTES).digest()
            digest.update(f"{os.path.relpath(each, os.path.dirname(path))}\0".encode() + content)
    return digest.hexdigest()
