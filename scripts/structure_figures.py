"""Figures of the code's structure, for one revision or several side by side, as Markdown tables. Figures, no limits.

    python scripts/structure_figures.py 2abf52c HEAD
    python scripts/structure_figures.py 2abf52c --tree --json

Revisions are read through `git archive`; `--tree`, or no revision, is the working tree. `--json` adds one JSON line.
Nothing that is read is imported or run. The product is kv_cache/, spmd_worker/ and launch.py. Definitions:

Code lines: lines without blank lines, comments, docstrings and the strings below fields.
Lines of functions and classes: from the first decorator to the last line; nested functions and methods count too.
Rooms: kv_cache, launch.py, scripts/ and each entry of spmd_worker/: folder, loose module, `__init__.py`.
Arrows: pairs of rooms of which one imports the other, in functions and under TYPE_CHECKING too.
Floors: rooms on the longest path of arrows. The longest import chain is the same for the product's modules.
Files under a class: its own and all that it imports transitively.
Files a row passes: the files of STATIONS, and every file on a path of imports from one of them to another.
Words: per word of WORDS.md, its occurrences in the product's comments and strings, and the distinct names with it.
"""

import argparse
import ast
import gc
import io
import json
import math
import re
import statistics
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final, TypeAlias

REPOSITORY: Final = Path(__file__).resolve().parents[1]
READ: Final = ("kv_cache/", "spmd_worker/", "launch.py", "scripts/")
LARGE_CLASS_LINES: Final = 250

UNDER: Final = {
    "scheduler": "scheduler.Scheduler",
    "decoder": "DecoderForCausalLM",
    "runner": "ModelRunner",
    "worker": "worker.Worker",
    "engine": "engine.LLMEngine|engine.Engine",
}
"""Row of the table -> class, by the last parts of its dotted name: the folders above may change. After a renaming:
`Old|New`.
"""
STATIONS: Final = (
    *("RowReader", "parse_row", "ChatTemplate", "Tokenizer", "EncodedRow", "SamplingParams", "RowRunner"),
    *("engine.LLMEngine|engine.Engine", "Request", "SequenceGroup", "Sequence", "SequenceData"),
    *("Scheduler", "Planner", "Allocator", "StopChecker", "StepPlan"),
    *("BlockPool", "BlockTable", "CacheManager", "BlockOps", "CacheEngine"),
    *("Lockstep", "StepMessage", "StepChannel", "TcpLeader", "SequenceGroupMetadataDelta", "Mirror"),
    *("ExternalLauncherExecutor", "WorkerWrapper", "worker.Worker", "ModelRunner", "Batch"),
    *(
        "DecoderForCausalLM",
        "attention.Attention",
        "feed_forward.FeedForward",
        "RMSNorm",
        "RotaryEmbedding",
        "VocabularyParallelHead",
    ),
    *("ColumnParallelLinear", "CpuBackend", "CpuKernels", "Sampler", "StepResult"),
    *("IncrementalDecoder", "RequestOutput", "RowAnswer", "JobOutput", "OutputFile"),
)
"""Classes and functions that one row of a batch job passes from the input file to the output file, in that order."""

OPENINGS: Final = re.compile(
    r"\W*(?:What|Whatever|Whose|Which|Whichever|Who|Whoever|Whom|Where|Wherever|When|Whenever|Why|How|See|"
    r"About|Above|Across|After|Against|Along|Among|Around|As|At|Before|Behind|Below|Beneath|Besides?|Between|Beyond|"
    r"By|Despite|During|Except|For|From|In|Inside|Into|Like|Near|Of|Off|On|Onto|Out|Outside|Over|Past|Per|Through|"
    r"To|Towards?|Under|Until|Up|Upon|With|Within|Without)(?![\w-])"
)
"""Question words, prepositions and See, which no docstring should begin with."""
WORDS: Final = {
    "place": "place[sd]?",
    "whole": "whole|wholly",
    "largest": "largest",
    "form": "forms?|formed",
    "none, no X": "none|no",
    "taken": "taken",
    "refuse": "refus(?:e|es|ed|al|als|ing)",
    "turned": "turned",
    "mass": "mass(?:es)?",
    "unit": "units?",
    "beside": "beside",
    "room": "rooms?",
    "nobody, somebody": "nobody|somebody",
    "product": "products?",
    "draw": "draw(?:s|n|ing)?|drew",
    "stand": "stand(?:s|ing)?|stood",
    "spell": "spell(?:s|ed|ing)?|spelt",
    "screen": "screen(?:s|ed|ing)?",
    "tell, told, said": "tells?|told|said",
    "so many": "so many",
    "likeliest": "likeliest",
    "anew": "anew",
    "mended": "mend(?:s|ed)?",
}
Value: TypeAlias = int | str | list[float]
Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_KINDS: Final[dict[type[ast.AST], str]] = {
    ast.Module: "modules",
    ast.ClassDef: "classes",
    **dict.fromkeys(_FUNCTIONS, "functions"),
}
_NO_CODE: Final = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")


@dataclass(frozen=True)
class Module:
    """One file; `name` is dotted, without `.__init__`."""

    name: str
    text: str
    tree: ast.Module

    @property
    def is_product(self) -> bool:
        return not self.name.startswith("scripts.")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @cached_property
    def defined(self) -> list[str]:
        """Dotted names of the functions and classes at its top level, with a dot in front."""
        definitions = (node for node in self.tree.body if isinstance(node, (*_FUNCTIONS, ast.ClassDef)))
        return [f".{self.name}.{node.name}" for node in definitions]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print figures of the code's structure as Markdown tables.")
    parser.add_argument("revisions", nargs="*", help="git revisions, a column each")
    parser.add_argument("--tree", action="store_true", help="the working tree as the last column")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    given = parser.parse_args(arguments)
    # Trees of all modules stay: each search for garbage would walk them again, half of the time in all.
    gc.freeze()
    gc.disable()
    sources = {revision: read_revision(REPOSITORY, revision) for revision in given.revisions}
    if given.tree or not sources:
        sources["working tree"] = read_tree(REPOSITORY)
    parsed = {title: parse(files) for title, files in sources.items()}
    figures = {title: structure(modules) for title, modules in parsed.items()}
    words = {title: word_counts(modules.values()) for title, modules in parsed.items()}
    print(f"{markdown('figure', figures)}\n\n{markdown('word: in prose / names with it', words)}")
    if given.json:
        print(json.dumps({title: {"figures": figures[title], "words": words[title]} for title in figures}))


def read_revision(root: Path, revision: str) -> dict[str, str]:
    """Path -> text of the files that are measured, as they were committed."""
    command = ["git", "-C", str(root), "archive", "--format=tar", revision, "--", "*.py"]
    archive = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        found = {member.name: files.extractfile(member) for member in files if member.name.startswith(READ)}
        return {path: file.read().decode() for path, file in found.items() if file and path.endswith(".py")}


def read_tree(root: Path) -> dict[str, str]:
    """Path -> text of the files that are measured, as they are on disk."""
    paths = [path for name in READ for path in ([root / name] if name.endswith(".py") else (root / name).rglob("*.py"))]
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def parse(files: Mapping[str, str]) -> dict[str, Module]:
    """Dotted name -> module, in the order of the paths."""
    modules = {}
    for path, text in sorted(files.items()):
        name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        modules[name] = Module(name, text, ast.parse(text, filename=path))
    return modules


def structure(modules: Mapping[str, Module]) -> dict[str, Value]:
    """Rows of the first table."""
    product = [module for module in modules.values() if module.is_product]
    functions = [num_lines(node) for module in product for node in module.nodes if isinstance(node, _FUNCTIONS)]
    files = [len(module.text.splitlines()) for module in product]
    classes = [
        (num_lines(node), node.name) for each in product for node in each.nodes if isinstance(node, ast.ClassDef)
    ]
    large = sorted(((length, name) for length, name in classes if length > LARGE_CLASS_LINES), reverse=True)
    targets = import_graph(modules)
    rooms = room_graph(targets)
    openings = docstring_openings(product)
    return {
        "modules": len(product),
        "lines": sum(files),
        "code lines": sum(num_code_lines(module) for module in product),
        "lines per file: median / p95 / max": spread(files),
        "lines per function: median / p95 / max": spread(functions),
        f"classes over {LARGE_CLASS_LINES} lines": len(large),
        "their lines": ", ".join(f"{name} {length}" for length, name in large),
        "rooms": len(rooms),
        "floors": longest_path(rooms),
        "arrows": sum(len(others) for others in rooms.values()),
        "longest import chain": longest_path({module.name: targets[module.name] for module in product}),
        **{f"files under the {row}": files_under(modules, targets, name) for row, name in UNDER.items()},
        "files a row passes": files_passed(modules, targets),
        "docstrings that begin with a question word or a preposition": openings.total(),
        **{f"of these, of {kind}": openings[kind] for kind in ("modules", "classes", "functions")},
    }


def num_lines(node: Definition) -> int:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return (node.end_lineno or node.lineno) - first + 1


def num_code_lines(module: Module) -> int:
    lines: set[int] = set()
    for token in module.tokens:
        if tokenize.tok_name[token.type] not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in module.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def spread(lengths: list[int]) -> Value:
    """Median, 95th percentile and maximum."""
    ordered = sorted(lengths) or [0]
    return [statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1], ordered[-1]]


def import_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Module -> modules that it imports by an absolute name, `import_module("literal")` included."""
    return {name: {each for each in _imported(module, modules) if each != name} for name, module in modules.items()}


def _imported(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    for node in module.nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in dotted]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module" and node.args:
            argument = node.args[0]
            names = [str(argument.value)] if isinstance(argument, ast.Constant) else []
        yield from (name for name in names if name in modules)


def room_graph(targets: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Room -> other rooms that its modules import."""
    rooms: dict[str, set[str]] = {}
    for name, others in targets.items():
        room = _room(name)
        rooms.setdefault(room, set()).update(other for each in others if (other := _room(each)) != room)
    return rooms


def _room(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2] if parts[0] == "spmd_worker" else parts[:1])


def longest_path(targets: Mapping[str, set[str]]) -> Value:
    """Nodes on the longest path, or a cycle, which has none."""
    depths: dict[str, int] = {}
    try:
        for name in TopologicalSorter(targets).static_order():
            depths[name] = 1 + max((depths[each] for each in targets.get(name, ())), default=0)
    except CycleError as error:
        return f"cycle: {' -> '.join(reversed(error.args[1]))}"
    return max(depths.values(), default=0)


def reached(targets: Mapping[str, set[str]], starts: Iterable[str]) -> set[str]:
    """`starts` and all that they import transitively."""
    found, left = set(starts), list(starts)
    while left:
        new = targets.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def modules_of(modules: Mapping[str, Module], name: str) -> list[str]:
    """Modules of the product that define a class or function with this end of a dotted name, or one of `Old|New`."""
    ends = tuple(f".{each}" for each in name.split("|"))
    product = (module for module in modules.values() if module.is_product)
    return [module.name for module in product if any(dotted.endswith(ends) for dotted in module.defined)]


def files_under(modules: Mapping[str, Module], targets: Mapping[str, set[str]], name: str) -> Value:
    homes = modules_of(modules, name)
    return len(reached(targets, homes)) if len(homes) == 1 else f"{name} is defined in {len(homes)} modules"


def files_passed(modules: Mapping[str, Module], targets: Mapping[str, set[str]]) -> Value:
    homes = {name: modules_of(modules, name) for name in STATIONS}
    missing = [f"{name} is defined in {len(found)} modules" for name, found in homes.items() if len(found) != 1]
    starts = {module for found in homes.values() for module in found}
    sources: dict[str, set[str]] = {}
    for name, others in targets.items():
        for other in others:
            sources.setdefault(other, set()).add(name)
    count = len(reached(targets, starts) & reached(sources, starts))
    return "; ".join([str(count), *missing]) if missing else count


def docstring_openings(modules: Iterable[Module]) -> Counter[str]:
    """Docstrings that begin with one of OPENINGS, counted per kind of what they describe."""
    return Counter(
        _KINDS[type(node)]
        for module in modules
        for node in module.nodes
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and OPENINGS.match(ast.get_docstring(node) or "")
    )


def word_counts(modules: Iterable[Module]) -> dict[str, Value]:
    """Rows of the second table: per word, occurrences in comments and strings, and distinct names defined with it."""
    product = [module for module in modules if module.is_product]
    prose = "\n".join(text for module in product for text in _prose(module)).replace("None", " ").lower()
    names = {name for module in product for name in _names(module)}
    split = [" ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)).lower() for name in names]
    found = {word: re.compile(rf"\b(?:{pattern})\b") for word, pattern in WORDS.items()}
    return {word: [len(it.findall(prose)), sum(map(bool, map(it.search, split)))] for word, it in found.items()}


def _prose(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
    yield from (token.string for token in module.tokens if token.type == tokenize.COMMENT)


def _names(module: Module) -> Iterator[str]:
    yield module.name.split(".")[-1]
    for node in module.nodes:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def markdown(corner: str, columns: Mapping[str, Mapping[str, Value]]) -> str:
    """Table with a column per title of `columns`."""
    rows = [[corner, *columns], ["---"] * (len(columns) + 1)]
    rows += [[row, *(_cell(column[row]) for column in columns.values())] for row in next(iter(columns.values()))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: Value) -> str:
    if isinstance(value, list):
        return " / ".join(f"{number:,g}" for number in value)
    return value if isinstance(value, str) else f"{value:,}"


if __name__ == "__main__":
    main()
