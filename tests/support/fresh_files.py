"""Files that tests write again and again."""

from pathlib import Path


def write_new(path: Path, content: bytes) -> None:
    """Write a new file in place of an old one: ext4 has a file that is written over wait for the disk, 5 ms each."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
