"""Identity of files: rejects names that mean the same file, before anything is written.

Names are compared by their targets: the folder's device and inode and the last component, and the file's own device and
inode if it exists. So `..`, links of both kinds, bind mounts, relative and absolute names compare equal.
"""

import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.files import name_pattern

Identity = tuple[int | str, ...]
"""Device and inode of an existing file or folder, followed by the names below it that do not exist."""


class Name(NamedTuple):
    """A file or folder with the key that names it, such as `job.output=out.jsonl`; `way_out` ends an error about it."""

    key: str
    path: Path
    way_out: str = "give another file"


@dataclass(frozen=True, slots=True)
class Claim:
    """A file that a job writes: `name`, and the `paths` created for it (a partial file too)."""

    name: Name
    paths: tuple[Path, ...]
    is_folder: bool = False


def reject_read_and_written(claims: Sequence[Claim], read: Iterable[Name]) -> None:
    """Raise ConfigError if a file that is read would be written."""
    written = {_own(path): claim.name for claim in reversed(claims) for path in claim.paths}
    for name in read:
        own = _own(name.path)
        if own is not None and own in written:
            claimed = written[own]
            raise ConfigError(f"{claimed.key} is also read ({name.key}) and would be replaced: {claimed.way_out}")


def reject_same_file(claims: Sequence[Claim]) -> None:
    """Raise ConfigError if two claims are one file, also on a case-insensitive file system, or one is in the other."""
    for (first, claim), (second, other) in permutations(enumerate(claims), 2):
        claimed = {each for path in claim.paths for each in _identities(path)}
        named = {each for path in other.paths for each in _identities(path)}
        if not claim.is_folder:
            named |= {each for path in other.paths for each in identities_above(path)}
        if claimed & named:
            one, two = claims[min(first, second)].name, claims[max(first, second)].name
            raise ConfigError(f"{one.key} and {two.key} are the same file, which both would write: {two.way_out}")


def reject_in_folder(claims: Sequence[Claim], folder: Name) -> None:
    """Raise ConfigError for a file that would be written into a folder that is read, or below it."""
    own = _own(folder.path)
    for claim in claims:
        for path in claim.paths:
            if own is not None and (own in identities_above(path) or own in _identities(path)):
                raise ConfigError(
                    f"{claim.name.key} is in the folder of {folder.key}, which is only read: {claim.name.way_out} in "
                    f"another folder"
                )


def reject_reserved_names(claims: Sequence[Claim], folder: Name, patterns: Sequence[str]) -> None:
    """Raise ConfigError for a name that `folder` uses for something else, or a path below such a name."""
    own = set(_identities(folder.path))
    for claim in claims:
        for path in _variants(claim.name.path):
            for name, parent in zip(path.parts[:0:-1], path.parents):
                is_reserved = any(fnmatchcase(_folded(name), pattern) for pattern in patterns)
                if is_reserved and own & set(_identities(parent)):
                    raise ConfigError(
                        f"{claim.name.key}: {name} is a file of the run directory itself ({folder.key}): "
                        f"{claim.name.way_out}, or another name"
                    )


def is_named_by(pattern: Path, path: Path) -> bool:
    """True if the file, or its target, is in the pattern's folder and has a name that its `*` stands for."""
    folder, names = _own(pattern.parent), name_pattern(pattern.name)
    variants = [each for each in _variants(path) if fnmatchcase(each.name, names)]
    return folder is not None and any(_own(each.parent) == folder for each in variants)


def matches(pattern: str, path: Path) -> bool:
    """Whether `glob.glob(pattern, recursive=True)` finds `path` once it exists."""
    return _matches(Path(os.path.abspath(pattern)).parts, Path(os.path.abspath(path)).parts)


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        is_hidden = bool(parts) and parts[0].startswith(".")
        return _matches(pattern[1:], parts) or (bool(parts) and not is_hidden and _matches(pattern, parts[1:]))
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], pattern[0]) and _matches(pattern[1:], parts[1:])


def identities_above(path: Path) -> set[Identity]:
    """Identities of all folders that contain `path`."""
    return {each for variant in _variants(path) for parent in variant.parents for each in _identities(parent)}


def _own(path: Path) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _identities(path: Path) -> Iterator[Identity]:
    """Identities of the name, and of its target."""
    for variant in _variants(path):
        if (own := _own(variant)) is not None:
            yield own
        for level, parent in enumerate(variant.parents, start=1):
            if (anchor := _own(parent)) is not None:
                yield (*anchor, *map(_folded, variant.parts[-level:]))
                break


def _variants(path: Path) -> tuple[Path, ...]:
    """Absolute paths of the name itself, and of its target."""
    target = Path(os.path.realpath(path))
    location = target if path.name in ("", "..") else Path(os.path.realpath(path.parent)) / path.name
    return tuple(dict.fromkeys((location, target)))


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
