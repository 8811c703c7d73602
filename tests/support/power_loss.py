"""Possible contents of files after a power loss, derived from a recording of the operations on them.

    disk = Disk(snapshot(folder))
    for operation in read_recording(log.read_bytes(), folder):
        disk.apply(operation)
        for name, tree in crashes(disk, chance, num_drawn=2): ...

What was written is certain once its file was synced, a name (made, changed or removed) once its folder was. Before that
each change may have come to the disk or not, whatever came before or after it, and a write in parts: POSIX promises no
more. With `is_ordered` names change in the order of the calls and every sync makes all of them certain, which is what a
file system with one journal does (ext4): those states are some of the others. Knows nothing of jobs.
"""

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

SECTORS = (512, 4096)
"""A disk writes one of these whole or not at all."""
MOST_CUTS = 4
MOST_WRITES = 3
"""Last writes of one file that are lost or kept one by one; earlier ones are kept together."""

Tree = dict[str, bytes | None]
"""Path below the folder -> contents of a file; None for a folder."""


class Operation(NamedTuple):
    """One call that was made. `kind` is create, mkdir, write, truncate, rename, link, unlink, rmdir or sync; paths are
    below the folder, and empty where the inode says which file it is. `offset` is a truncation's size too.
    """

    kind: str
    inode: int
    offset: int = 0
    path: str = ""
    other: str = ""
    data: bytes = b""


class Part(NamedTuple):
    """What came to the disk of a write: bytes `begin` to `end` of its data, and with `grows` the size of all of it."""

    begin: int
    end: int
    grows: bool


@dataclass(slots=True)
class Node:
    """A file or a folder: what is certain, and what was done since. `names` are a folder's as programs see them."""

    content: bytes = b""
    writes: dict[int, Operation] = field(default_factory=dict)
    is_folder: bool = False
    names: dict[str, int] = field(default_factory=dict)
    certain_names: dict[str, int] = field(default_factory=dict)
    changes: dict[int, dict[str, int | None]] = field(default_factory=dict)

    def sync(self) -> None:
        self.content, self.writes = written(self.content, self.writes.values()), {}
        self.sync_names()

    def sync_names(self) -> None:
        self.certain_names, self.changes = dict(self.names), {}


class Disk:
    """Files as a program sees them, and what of them is certain. Without `has_syncs` no sync does anything."""

    def __init__(
        self, found: Mapping[str, tuple[int, bytes | None]], *, is_ordered: bool = False, has_syncs: bool = True
    ) -> None:
        """`found` is of `snapshot`, and certain."""
        self.is_ordered, self.has_syncs = is_ordered, has_syncs
        self.nodes: list[Node] = []
        self._inodes: dict[int, int] = {}
        self._num_changes = 0
        for path, (inode, content) in sorted(found.items()):
            number = self._add(inode, content or b"", is_folder=content is None)
            if path:
                folder, name = self._place(path)
                folder.names[name] = folder.certain_names[name] = number

    def apply(self, operation: Operation) -> None:
        """Apply one call."""
        kind = operation.kind
        if kind == "sync":
            self._sync(self.nodes[self._inodes[operation.inode]])
        elif kind in ("write", "truncate"):
            self._num_changes += 1
            self.nodes[self._inodes[operation.inode]].writes[self._num_changes] = operation
        elif kind in ("create", "mkdir"):
            number = self._add(operation.inode, b"", is_folder=kind == "mkdir")
            self._change(operation.path, number)
        elif kind in ("rename", "link"):
            self._move(operation)
        else:
            assert kind in ("unlink", "rmdir"), kind
            self._change(operation.path, None)

    def node_at(self, path: str) -> Node | None:
        """The folder as programs see it now."""
        node = self.nodes[0]
        for name in Path(path).parts:
            if name not in node.names:
                return None
            node = self.nodes[node.names[name]]
        return node

    def node_of(self, inode: int) -> Node:
        """The one that has that number now."""
        return self.nodes[self._inodes[inode]]

    def content(self, path: str) -> bytes | None:
        """A file as programs see it now; None if it is missing."""
        node = self.node_at(path)
        return None if node is None or node.is_folder else written(node.content, node.writes.values())

    def pending(self) -> list[tuple[int, ...]]:
        """Changes that are not certain, by number, in the order in which they were made; together what is lost and
        kept together.
        """
        found: list[tuple[int, ...]] = []
        for node in self.nodes:
            writes = list(node.writes)
            cut = max(len(writes) - MOST_WRITES, 0)
            found += [tuple(writes[:cut])] if cut else []
            found += [(number,) for number in (*writes[cut:], *node.changes)]
        return sorted(found)

    def pending_writes(self) -> dict[int, Operation]:
        """The last ones of each file, by number."""
        return {
            number: node.writes[number]
            for node in self.nodes
            for number in list(node.writes)[-MOST_WRITES:]
            if node.writes[number].kind == "write"
        }

    def tree(self, lost: Collection[int] = (), parts: Mapping[int, Part] | None = None) -> Tree:
        """The files with those changes lost, and of some writes a part."""
        lost, parts = set(lost), parts or {}
        if self.is_ordered:
            names = [number for node in self.nodes for number in node.changes]
            first = min((number for number in names if number in lost), default=None)
            lost |= {number for number in names if first is not None and number > first}
        tree: Tree = {}
        self._collect(self.nodes[0], "", lost, parts, tree)
        return tree

    def _collect(self, node: Node, path: str, lost: set[int], parts: Mapping[int, Part], tree: Tree) -> None:
        names: dict[str, int | None] = dict(node.certain_names)
        for number, change in node.changes.items():
            if number not in lost:
                names |= change
        for name, child_number in names.items():
            if child_number is None:
                continue
            child, child_path = self.nodes[child_number], f"{path}/{name}".lstrip("/")
            if child.is_folder:
                tree[child_path] = None
                self._collect(child, child_path, lost, parts, tree)
            else:
                kept = {number: each for number, each in child.writes.items() if number not in lost}
                tree[child_path] = written(child.content, kept.values(), [parts.get(number) for number in kept])

    def _add(self, inode: int, content: bytes, *, is_folder: bool) -> int:
        # The system gives an inode's number out again.
        self._inodes[inode] = len(self.nodes)
        self.nodes.append(Node(content, is_folder=is_folder))
        return len(self.nodes) - 1

    def _place(self, path: str) -> tuple[Node, str]:
        folder = self.node_at(str(Path(path).parent))
        assert folder is not None, path
        return folder, Path(path).name

    def _change(self, path: str, number: int | None) -> None:
        folder, name = self._place(path)
        self._num_changes += 1
        folder.changes[self._num_changes] = {name: number}
        if number is None:
            del folder.names[name]
        else:
            folder.names[name] = number

    def _move(self, operation: Operation) -> None:
        (folder, name), (other_folder, other) = self._place(operation.path), self._place(operation.other)
        number = folder.names[name]
        if operation.kind == "link":
            self._change(operation.other, number)
            return
        assert folder is other_folder, f"{operation.path} is renamed to {operation.other}, in another folder"
        self._num_changes += 1
        folder.changes[self._num_changes] = {name: None, other: number}
        del folder.names[name]
        folder.names[other] = number

    def _sync(self, node: Node) -> None:
        if not self.has_syncs:
            return
        node.sync()
        for each in self.nodes if self.is_ordered else ():
            each.sync_names()


def written(content: bytes, writes: Collection[Operation], parts: Collection[Part | None] = ()) -> bytes:
    """A file after writes and truncations; where one is missing, what lies between is zeros."""
    changed = bytearray(content)
    for operation, part in zip(writes, parts or [None] * len(writes), strict=True):
        if operation.kind == "truncate":
            del changed[operation.offset :]
            changed += bytes(operation.offset - len(changed))
            continue
        begin, end, grows = part or Part(0, len(operation.data), True)
        size = operation.offset + (len(operation.data) if grows else end)
        changed += bytes(max(size - len(changed), 0))
        changed[operation.offset + begin : operation.offset + end] = operation.data[begin:end]
    return bytes(changed)


def parts_of(operation: Operation) -> list[Part]:
    """A write that the power's end cut: up to a sector or from one on, or its size and none of its data."""
    size = len(operation.data)
    parts = [Part(0, 0, True)]
    for sector in SECTORS:
        first = sector - operation.offset % sector
        cuts = list(range(first, size, sector))
        for cut in cuts[:: max(len(cuts) // MOST_CUTS, 1)]:
            parts += [Part(0, cut, False), Part(0, cut, True), Part(cut, size, True)]
    return parts


def crashes(disk: Disk, chance: random.Random, num_drawn: int) -> Iterator[tuple[str, Tree]]:
    """What may be there if the power ends now, and how it came: nothing lost, everything, each change alone, all but
    each, all after one, names without data and data without names, the last writes in part; then `num_drawn` drawn.
    """
    pending = disk.pending()
    every = {number for group in pending for number in group}
    data = {number for node in disk.nodes for number in node.writes}
    yield "nothing is lost", disk.tree()
    yield "all is lost", disk.tree(every)
    yield "all data is lost", disk.tree(data)
    yield "all names are lost", disk.tree(every - data)
    for place, group in enumerate(pending):
        later = {number for other in pending[place + 1 :] for number in other}
        yield f"change {group[-1]} alone is lost", disk.tree(group)
        yield f"change {group[-1]} alone is kept", disk.tree(every - set(group))
        yield f"all after change {group[-1]} is lost", disk.tree(later)
        yield f"the names after change {group[-1]} are lost, and all data", disk.tree(data | later)
    writes = disk.pending_writes()
    for number, operation in writes.items():
        own = next(node for node in disk.nodes if number in node.writes)
        after = {each for each in own.writes if each > number}
        for part in parts_of(operation):
            yield f"write {number} is there as {part}", disk.tree(after, {number: part})
            others = (data - set(own.writes)) | after
            yield f"write {number} is there as {part}, and no other file", disk.tree(others, {number: part})
    for draw in range(num_drawn if every else 0):
        lost = {number for group in pending if chance.random() < 0.5 for number in group}
        torn = {number: chance.choice(parts_of(each)) for number, each in writes.items() if chance.random() < 0.3}
        yield f"draw {draw}", disk.tree(lost, torn)


def read_recording(log: bytes, folder: Path) -> list[Operation]:
    """Operations on a folder recorded by tests/support/recorded_io.c."""
    operations, place = [], 0
    while place < len(log):
        end = log.index(b"\n", place)
        kind, *numbers = log[place:end].split()
        inode, offset, *sizes = map(int, numbers)
        place = end + 1
        pieces = []
        for size in sizes:
            pieces.append(log[place : place + size])
            place += size
        path, other = (str(Path(piece.decode()).relative_to(folder)) if piece else "" for piece in pieces[:2])
        operations.append(Operation(kind.decode(), inode, offset, path, other, pieces[2]))
    return operations


def snapshot(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Path below the folder -> inode, and contents of a file."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return {
        "" if path == folder else str(path.relative_to(folder)): (
            path.lstat().st_ino,
            None if path.is_dir() else path.read_bytes(),
        )
        for path in paths
    }


def write_tree(folder: Path, tree: Tree) -> None:
    """Into an empty folder."""
    for path, content in sorted(tree.items()):
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def digest_of(tree: Tree) -> bytes:
    digest = blake2b(digest_size=16)
    for path, content in sorted(tree.items()):
        digest.update(f"{path}\0{-1 if content is None else len(content)}\0".encode() + (content or b""))
    return digest.digest()
