"""Writes what is made of the records of the options and of vLLM's names, as the code reads them:

docs/reference/configuration.md, every key; docs/vllm.md, differences from vLLM; and spmd_worker/compat/llm_keywords.py,
the types of the keywords of `LLM(...)`.

python scripts/reference_pages.py [FOLDER]
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from spmd_worker import ABSENT, OFFERED
from spmd_worker.base.config.options import Key, command_text, groups_of, keys_of
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.compat.keywords import KEYWORDS, Effect, Keyword
from spmd_worker.compat.methods import ENGINE_ABSENT, ENGINE_METHODS, LLM_ABSENT, LLM_METHODS
from spmd_worker.replica.sequence.sampling_params import DIFFERENT_FIELDS, REJECTED, SAMPLING_KEYS, WITHOUT_EFFECT

ROOT = Path(__file__).resolve().parents[1]

CONFIGURATION_HEAD = """# Configuration

Written by `python scripts/reference_pages.py` from the schema (`spmd_worker/base/config/schema.py`); do not edit it.

Keys are `GROUP.KEY=VALUE` on the command line, and keywords of `LLM(...)` where the third column names one; vLLM's
other names for a keyword are in brackets. `--help` prints the keys in **bold**, `--help=all` every key.
"""

VLLM_HEAD = """# Names of vLLM

Written by `python scripts/reference_pages.py` from the tables that the code reads; do not edit it. A script for vLLM
0.32 runs here with `from spmd_worker import LLM, SamplingParams` in the place of vLLM's line, or fails with one of
these sentences.

## `LLM(...)`, `EngineArgs(...)`

A keyword that neither knows is a TypeError that names the nearest one. Defaults of keywords that set a key are the
key's: docs/reference/configuration.md.
"""

TITLES = {
    Effect.SAME: "Keywords that mean the same",
    Effect.RENAMED: "Keywords that have another name here",
    Effect.OURS: "Keywords that exist only here",
    Effect.REJECTED: "Keywords that are refused, unless they ask for nothing",
    Effect.NONE: "Keywords without effect (said once, in the log, at debug level)",
}

PYTHONIC = {"null": "None", "true": "True", "false": "False"}

TYPES_HEAD = '''"""Types of the keywords of `LLM(...)` and `EngineArgs(...)`, for type checkers and editors.

Written by `python scripts/reference_pages.py`; do not edit it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

# fmt: off
'''


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0]) if arguments else ROOT
    for path, text in documents().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def documents() -> dict[str, str]:
    """Path in the repository -> content, of every file that is written."""
    return {
        "docs/reference/configuration.md": configuration_page(),
        "docs/vllm.md": vllm_page(),
        "spmd_worker/compat/llm_keywords.py": keyword_types(KEYWORDS),
    }


def configuration_page() -> str:
    """Every key, group by group."""
    keys = keys_of(RunConfig).values()
    groups = {name: inspect.getdoc(kind) or "" for name, kind in groups_of(RunConfig).items()}
    parts = [key_table(name, words, [key for key in keys if key.group == name]) for name, words in groups.items()]
    top = key_table("", "", [key for key in keys if not key.group])
    return "\n".join([CONFIGURATION_HEAD, *parts, top])


def key_table(group: str, words: str, keys: list[Key]) -> str:
    """A group's keys."""
    with_keywords = any(keyword_cell(key) for key in keys)
    names = ["key", "default", *(["`LLM(...)`"] if with_keywords else []), "meaning"]
    head = [f"## `{group}`", "", words, ""] if group else ["## Keys without a group", ""]
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    for key in keys:
        name = f"**`{key.name}`**" if key.option.is_common else f"`{key.name}`"
        cells = [name, command_text(key.default), *([keyword_cell(key)] if with_keywords else []), key.option.meaning]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*head, *lines, ""])


def keyword_cell(key: Key) -> str:
    """The keyword of `LLM` and vLLM's other names for it."""
    if key.name == "model.path":
        return "`model`"
    names = " ".join(map(code, key.option.vllm_names))
    return code(key.keyword) + (f" ({names})" if names else "") if key.keyword else ""


def keyword_types(table: Mapping[str, Keyword]) -> str:
    """A module with the TypedDict of all keywords: those with an effect by their types, the others alone by name."""
    names = [f'"{row.name}":Any' for row in table.values() if row.effect in (Effect.NONE, Effect.REJECTED)]
    others = textwrap.fill(", ".join(names), 112, initial_indent="    ", subsequent_indent="    ").replace(":", ": ")
    typed = [row for row in table.values() if row.effect not in (Effect.NONE, Effect.REJECTED)]
    lines = [
        '_Others = TypedDict("_Others", {  # noqa: UP013  # one name a line otherwise',
        f"{others},",
        "}, total=False)",
    ]
    lines += ["# fmt: on", "", "", "class LLMKeywords(_Others, total=False):"]
    lines += ['    """Keywords of `LLM(...)`; docs/vllm.md says what each means."""', ""]
    lines += [f"    {row.name}: {annotation_text(row)}" for row in typed]
    return TYPES_HEAD + "\n".join([*lines, ""])


def annotation_text(row: Keyword) -> str:
    """A keyword's type in the names that the module imports."""
    return re.sub(r"(collections\.abc|pathlib|typing)\.", "", inspect.formatannotation(row.annotation))


def vllm_page() -> str:
    """Every name of vLLM's."""
    sections = [section(effect, KEYWORDS.values()) for effect in TITLES]
    return "\n".join([VLLM_HEAD, *sections, sampling_section(), methods(), offered()])


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
    lines += [f"| {code(name)} | refused: {words} |" for name, words in REJECTED.items()]
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
    """Table of the names that `spmd_worker` offers."""
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
    # The sentence of a key is in a command line's words.
    words = re.sub(r"\b(null|true|false)\b", lambda found: PYTHONIC[found[0]], row.words) if row.ours else row.words
    return "; ".join([part for part in (renamed, words, values) if part])


if __name__ == "__main__":
    main(sys.argv[1:])
