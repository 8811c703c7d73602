"""The rules of imports: a module imports its own wing and those above it, and nothing that executes bytes or names.

`import_violations` returns what breaks them, as `path:line: what, and the rule`. Knows the house only through house.py.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import house
from source_tree import Import, Module, dotted_name, import_module_argument, no_garbage, read_modules


def import_violations(root: Path) -> list[str]:
    """Everything under `root` that breaks a rule of imports, in the order of paths and lines."""
    with no_garbage():
        return _all_violations(root)


def _all_violations(root: Path) -> list[str]:
    modules = read_modules(root)
    tree = _Tree(modules, modules_that_need_torch(modules))
    found = [violation for module in modules.values() for violation in _module_violations(module, tree)]
    found += [*_folder_violations(root), *_cycle_violations(modules), *_folder_cycle_violations(modules)]
    return found + list(_yaml_violations(root))


@dataclass(frozen=True, slots=True)
class _Tree:
    modules: dict[str, Module]
    need_torch: dict[str, None]


def modules_that_need_torch(modules: dict[str, Module]) -> dict[str, None]:
    """The modules that cannot be imported without torch: they import it, or such a module, when they are imported."""
    importers: dict[str, list[str]] = {}
    for name, module in modules.items():
        for found in module.imports:
            if found.runs_on_import:
                is_torch = house.is_within_any(found.dotted, house.TORCH_NAMES)
                importers.setdefault("torch" if is_torch else first_party_target(found, modules), []).append(name)
    need: dict[str, None] = {}
    waiting = ["torch"]
    while waiting:
        new = [name for name in importers.get(waiting.pop(), []) if name not in need]
        need.update(dict.fromkeys(new))
        waiting += new
    return need


def is_torch_free(module: str) -> bool:
    """Whether the module is one that must be imported without torch."""
    return not house.may_import_torch(module) or house.is_torch_late(module)


def first_party_target(found: Import, modules: dict[str, Module]) -> str:
    """The module an import brings in: `from kv_cache import block` is kv_cache.block where that is a module."""
    return found.dotted if found.dotted in modules else found.module


def _module_violations(module: Module, tree: _Tree) -> Iterator[str]:
    yield from _place_violations(module)
    for found in module.imports:
        problem = _import_problem(module, found, tree)
        if problem:
            yield module.at(found.node, problem)
    yield from _hidden_import_violations(module)
    yield from _forbidden_use_violations(module)


def _place_violations(module: Module) -> Iterator[str]:
    if module.is_init and module.name != house.FACADE and module.text:
        yield module.at(module.tree, f"only {house.FACADE}/__init__.py holds code, every other __init__.py is empty")
    if not house.is_command(module.name) and house.wing_index(module.name) is None:
        yield module.at(module.tree, f"{module.name} stands nowhere in the house: give it a place in house.py's WINGS")


def _import_problem(module: Module, found: Import, tree: _Tree) -> str | None:
    if found.name == "*":
        return f"from {found.module} import *: a star hides what is imported"
    forbidden = [name for name in house.FORBIDDEN_NAMES if house.is_within(found.dotted, name)]
    if forbidden and forbidden[0] not in house.MAY_USE.get(module.name, ()):
        return f"{forbidden[0]} is forbidden everywhere"
    top = found.module.split(".")[0]
    if top in house.PACKAGES:
        return _first_party_problem(module, found, first_party_target(found, tree.modules), tree.need_torch)
    return None if top in sys.stdlib_module_names else _third_party_problem(module, found)


def _third_party_problem(module: Module, found: Import) -> str | None:
    top = found.module.split(".")[0]
    if top in house.OPTIONAL:
        return _optional_problem(module, found, top)
    if top not in house.THIRD_PARTY:
        return f"{top} is not among the dependencies: {', '.join(house.THIRD_PARTY)}"
    if top in house.COMPOSITION_NAMES and module.name not in house.COMPOSITION_MODULES:
        return f"{top} is for {' and '.join(house.COMPOSITION_MODULES)} only"
    if house.is_within_any(found.dotted, house.TORCH_NAMES):
        return _torch_problem(module, found, "torch")
    return None


def _optional_problem(module: Module, found: Import, top: str) -> str | None:
    if not house.is_within_any(module.name, house.OPTIONAL[top]):
        return f"{top} is optional and for {' and '.join(house.OPTIONAL[top])} only"
    is_nothing_without = module.name in house.NEED_OPTIONAL or house.is_within_any(
        module.name, house.IN_OPTIONAL_LANGUAGE
    )
    is_late = not found.runs_on_import or is_nothing_without
    return None if is_late else f"{top} is optional: import it where it is needed"


def _first_party_problem(module: Module, found: Import, target: str, need_torch: dict[str, None]) -> str | None:
    if target in need_torch:
        problem = _torch_problem(module, found, f"{target}, which imports torch")
        if problem:
            return problem
    if house.is_command(module.name):
        return None
    if house.is_command(target):
        return f"{target} is for users: import the module that defines what it offers"
    if target in house.NEED_OPTIONAL:
        return f"{target} is for users who have its optional package"
    is_own = house.is_within_any(module.name, house.IN_OPTIONAL_LANGUAGE)
    if house.is_within_any(target, house.IN_OPTIONAL_LANGUAGE) and found.runs_on_import and not is_own:
        return f"{target} is in the language of an optional package: import it where it is needed"
    own_index, target_index = house.wing_index(module.name), house.wing_index(target)
    if target_index is None:
        return f"{target} stands nowhere in the house"
    if own_index is not None and target_index > own_index:
        return f"{target} stands below {module.name}: a module imports its own wing and what stands above"
    for one, other in (house.APART, house.APART[::-1]):
        if house.is_within(module.name, one) and house.is_within(target, other):
            return f"{target} is apart from {module.name}: {one} and {other} do not import each other"
    return None


def _torch_problem(module: Module, found: Import, what: str) -> str | None:
    if not house.may_import_torch(module.name):
        return f"{module.name} is torch-free and imports {what}"
    if house.is_torch_late(module.name) and found.runs_on_import:
        return f"{module.name} imports {what}, at top level"
    return None


def _hidden_import_violations(module: Module) -> Iterator[str]:
    aliases = module.aliases
    for node, _ in module.importing:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield module.at(node, "relative import: write the absolute name")
        argument = import_module_argument(node, aliases)
        is_literal = isinstance(argument, ast.Constant) and not str(argument.value).startswith(".")
        if argument is not None and not is_literal and module.name not in house.MAY_COMPUTE_IMPORTS:
            yield module.at(node, "import_module with a computed or relative name hides an import")


def _forbidden_use_violations(module: Module) -> Iterator[str]:
    aliases = module.aliases
    for node, _ in module.nodes:
        if not isinstance(node, _WITH_WORDS):
            continue
        name = dotted_name(node, aliases) if isinstance(node, ast.Attribute) else None
        if name in house.FORBIDDEN_NAMES and name not in house.MAY_USE.get(module.name, ()):
            yield module.at(node, f"{name} is forbidden everywhere")
        if isinstance(node, ast.Name) and node.id in house.FORBIDDEN_BUILTINS:
            yield module.at(node, f"{node.id} is forbidden everywhere")
        if house.FORBIDDEN_WORD in _words_at(node):
            yield module.at(node, f"{house.FORBIDDEN_WORD} is forbidden everywhere: configuration names no code")


_WITH_WORDS = (ast.Constant, ast.Name, ast.Attribute, ast.arg, ast.keyword)


def _words_at(node: ast.AST) -> tuple[object, ...]:
    if isinstance(node, ast.Constant):
        return (node.value,)
    return getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "arg", None)


def _folder_violations(root: Path) -> Iterator[str]:
    for folder in sorted({path.parent for package in house.PACKAGES for path in (root / package).rglob("*.py")}):
        if not (folder / "__init__.py").is_file():
            yield f"{folder.relative_to(root)}: a folder of modules without __init__.py"


def _yaml_violations(root: Path) -> Iterator[str]:
    for path in sorted((root / "conf").rglob("*.yaml")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if house.FORBIDDEN_WORD in line:
                yield f"{path.relative_to(root)}:{number}: {house.FORBIDDEN_WORD} is forbidden: YAML holds values only"


def _cycle_violations(modules: dict[str, Module]) -> Iterator[str]:
    """One line a cycle, as far as they can be told apart: a named cycle is taken away before the next is sought."""
    for cycle in _cycles(_targets_of(modules)):
        yield f"import cycle: {' -> '.join([*cycle, cycle[0]])}"


def _folder_cycle_violations(modules: dict[str, Module]) -> Iterator[str]:
    """Within each folder, its modules and folders: files without a cycle may still make one of folders."""
    targets_of = _targets_of(modules)
    for folder in (name for name, module in modules.items() if module.is_init):
        targets: dict[str, list[str]] = {}
        for name, found in targets_of.items():
            inside = _child(folder, name)
            children = [child for target in found if (child := _child(folder, target)) and child != inside]
            if inside:
                targets.setdefault(inside, []).extend(children)
        for cycle in _cycles(targets):
            if any(modules[name].is_init for name in cycle):
                yield f"cycle of folders: {' -> '.join([*cycle, cycle[0]])}"


def _child(folder: str, name: str) -> str:
    """The module or folder in `folder` that `name` is or lies in; "" for another."""
    rest = name.removeprefix(f"{folder}.")
    return f"{folder}.{rest.split('.')[0]}" if rest != name else ""


def _targets_of(modules: dict[str, Module]) -> dict[str, list[str]]:
    return {
        name: [target for found in module.imports if (target := first_party_target(found, modules)) in modules]
        for name, module in modules.items()
        if not house.is_command(name)
    }


def _cycles(targets_of: dict[str, list[str]]) -> Iterator[list[str]]:
    left = _without_leaves(targets_of)
    while left:
        cycle = _first_cycle(left)
        yield cycle
        left = _without_leaves({name: targets for name, targets in left.items() if name not in cycle})


def _without_leaves(left: dict[str, list[str]]) -> dict[str, list[str]]:
    """Take away what imports nothing of what is left until everything imports something that is left."""
    while leaves := [name for name, targets in left.items() if not any(target in left for target in targets)]:
        left = {name: targets for name, targets in left.items() if name not in leaves}
    return left


def _first_cycle(left: dict[str, list[str]]) -> list[str]:
    path = [next(iter(left))]
    while (following := next(target for target in left[path[-1]] if target in left)) not in path:
        path.append(following)
    return path[path.index(following) :]
