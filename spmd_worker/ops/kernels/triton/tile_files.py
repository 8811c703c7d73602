"""Tables of tiles that `scripts/tune_kernels.py` measured on the user's GPU: JSON files in the user's cache folder.

    $XDG_CACHE_HOME/spmd-worker/tiles/<device>-triton-<version>.json
    {"device": ..., "triton": ..., "tiles": [{"is_gated": false, "outputs": 6144, "inputs": 4096, "tiles": [...]}, ...]}

A file is for one kind of device and one version of Triton. Bits do not depend on tiles, so ranks need not have the same
file, and a file that cannot be used costs a warning and no answer.
"""

import json
import logging
import os
import re
from dataclasses import asdict, fields
from pathlib import Path

import triton

from spmd_worker.ops.kernels.triton.tile_table import Entry, Key
from spmd_worker.ops.kernels.triton.tiles import ROWS, Chip, Tile, fits

logger = logging.getLogger(__name__)


def table_path(chip: Chip) -> Path | None:
    """The file for `chip`; None for a user without a home directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification a relative path is ignored.
    root = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    name = re.sub(r"[^a-z0-9]+", "-", chip.name.lower()).strip("-")
    return (
        Path(root, "spmd-worker", "tiles", f"{name}-triton-{triton.__version__}.json") if os.path.isabs(root) else None
    )


def read_table(chip: Chip) -> dict[Key, Entry]:
    """Entries of the user's table for `chip`: none if there is no file, or, with a warning, if it cannot be used."""
    path = table_path(chip)
    if path is None or not path.exists():
        return {}
    try:
        entries = _parse(path.read_text(encoding="utf-8"), chip)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        logger.warning("%s is not used (%s): make it again with tune_kernels.py, or delete it", path, reason)
        return {}
    logger.info("%s: tiles of %d matmul shapes", path, len(entries))
    return entries


def write_table(path: Path, chip: Chip, entries: dict[Key, Entry]) -> None:
    """Write the table as one file, which replaces an earlier one at once."""
    shapes = [
        {"is_gated": is_gated, "outputs": outputs, "inputs": inputs, "tiles": [asdict(tile) for tile in entry]}
        for (is_gated, outputs, inputs), entry in sorted(entries.items())
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    table = {"device": chip.name, "triton": triton.__version__, "tiles": shapes}
    draft.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def _parse(text: str, chip: Chip) -> dict[Key, Entry]:
    """Entries of a file's text; raises ValueError, TypeError or KeyError."""
    table = json.loads(text)
    if (table["device"], table["triton"]) != (chip.name, triton.__version__):
        raise ValueError(f"it is for {table['device']} and triton {table['triton']}")
    entries: dict[Key, Entry] = {}
    for shape in table["tiles"]:
        key = (bool(shape["is_gated"]), int(shape["outputs"]), int(shape["inputs"]))
        tiles = tuple(_tile(each) for each in shape["tiles"])
        if len(tiles) != len(ROWS):
            raise ValueError(f"{key} has {len(tiles)} tiles, and rows have {len(ROWS)} buckets")
        for tile in tiles:
            if not fits(tile, chip, is_gated=key[0]):
                raise ValueError(f"{tile} is not for {chip.name}")
        entries[key] = tiles
    return entries


def _tile(values: dict[str, object]) -> Tile:
    for field in fields(Tile):
        value = values[field.name]
        if type(value) is not field.type:
            raise TypeError(f"{field.name}={value!r} of a tile")
    tile = Tile(**values)  # type: ignore[arg-type]  # checked above
    sizes = (tile.rows, tile.columns, tile.inputs, tile.num_warps, tile.rest_columns or _LEAST)
    are_powers = all(size > 0 and size & (size - 1) == 0 for size in sizes)
    are_sides = min(*sizes[:3], sizes[4]) >= _LEAST and max(*sizes[:2], sizes[4]) <= _MOST
    are_counts = tile.num_stages in range(1, _MOST_STAGES) and tile.per_multiprocessor > 0
    if not (are_powers and are_sides and are_counts):
        raise ValueError(f"{tile} is no tile")
    return tile


_LEAST, _MOST, _MOST_STAGES = 16, 256, 12
"""Sides of a matrix instruction and of a box of TMA."""
