"""Writes docs/vllm.md, what differs from vLLM, from the tables that the code reads.

python scripts/vllm_table.py [OUT.md]
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from spmd_worker import ABSENT, OFFERED
from spmd_worker.compat.keywords import KEYWORDS, Effect, Keyword
from spmd_worker.compat.methods import ENGINE_ABSENT, ENGINE_METHODS, LLM_ABSENT, LLM_METHODS
from spmd_worker.replica.sequence.sampling_params import DIFFERENT_FIELDS, REFUSED, SAMPLING_KEYS, WITHOUT_EFFECT

TARGET = Path(__file__).resolve().parents[1] / "docs" / "vllm.md"

HEAD = """# Names of vLLM

Written by `python scripts/vllm_table.py` from the tables that the code reads; do not edit it. A script for vLLM
0.32 runs here with `from spmd_worker import LLM, SamplingParams` in the place of vLLM's line, or fails with one of
these sentences.

## `LLM(...)`, `EngineArgs(...)`

A keyword that neither knows is a TypeError that names the nearest one.
"""

TITLES = {
    Effect.SAME: "Keywords that mean the same",
    Effect.RENAMED: "Keywords that have another name here",
    Effect.OURS: "Keywords that exist only here",
    Effect.REFUSED: "Keywords that are refused, unless they ask for nothing",
    Effect.NONE: "Keywords without effect (said once, in the log, at debug level)",
}


def main(arguments: list[str]) -> None:
    target = Path(arguments[0]) if arguments else TARGET
    target.write_text(document(), encoding="utf-8")


def document() -> str:
    """The whole file."""
    return "\n".join(
        [HEAD, *[section(effect, KEYWORDS.values()) for effect in TITLES], sampling_section(), methods(), offered()]
    )


def section(effect: Effect, rows: Iterable[Keyword]) -> str:
    """One effect's rows; those with the same words share a line."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.effect is effect:
            names.setdefault(words_of(row), []).append(f"`{row.name}`")
    lines = [f"| {' '.join(found)} | {words} |" for words, found in names.items()]
    return "\n".join([f"### {TITLES[effect]}", "", "| keyword | here |", "| --- | --- |", *lines, ""])


def sampling_section() -> str:
    """The fields of `SamplingParams`."""
    lines = ["## `SamplingParams`", "", "Fields with vLLM's meaning: " + ", ".join(map(code, SAMPLING_KEYS)) + ".", ""]
    lines += ["| field | here |", "| --- | --- |"]
    lines += [f"| {code(name)} | {words} |" for name, words in DIFFERENT_FIELDS.items()]
    lines += [f"| {code(name)} | without effect: {words} |" for name, words in WITHOUT_EFFECT.items()]
    lines += [f"| {code(name)} | refused: {words} |" for name, words in REFUSED.items()]
    return "\n".join([*lines, ""])


def methods() -> str:
    """The methods of `LLM` and `LLMEngine`."""
    lines = ["## Methods", "", "| method of `LLM` | here |", "| --- | --- |"]
    lines += [f"| {code(name)} | {words or 'the same'} |" for name, words in LLM_METHODS.items()]
    lines += [f"| {code(name)} | not here: {words} |" for name, words in LLM_ABSENT.items()]
    lines += ["", "| method of `LLMEngine` | here |", "| --- | --- |"]
    lines += [f"| {code(name)} | {words or 'the same'} |" for name, words in ENGINE_METHODS.items()]
    lines += [f"| {code(name)} | not here: {words} |" for name, words in ENGINE_ABSENT.items()]
    return "\n".join([*lines, ""])


def offered() -> str:
    """What `spmd_worker` offers."""
    lines = ["## Imports", "", "`spmd_worker` offers " + ", ".join(map(code, sorted(OFFERED))) + ".", ""]
    lines += ["| name of `vllm` | here |", "| --- | --- |"]
    lines += [f"| {code(name)} | not here: {words} |" for name, words in ABSENT.items()]
    return "\n".join([*lines, ""])


def code(name: str) -> str:
    return f"`{name}`"


def words_of(row: Keyword) -> str:
    """The second column of a row."""
    values = ", ".join([f"{theirs} is {ours}" for theirs, ours in row.values.items() if theirs])
    renamed = f"`{row.ours}`" if row.effect is Effect.RENAMED else ""
    return "; ".join([part for part in (renamed, row.words, values) if part])


if __name__ == "__main__":
    main(sys.argv[1:])
