"""The rule of read-backs: where a step is computed, the host does not wait for the device but where house.py lists it.

Reads syntax, not types: a read-back under another name is for the meta device to find
(tests/worker/runner/test_meta_step.py).
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import house
from source_tree import Module, dotted_name, read_modules


def read_back_violations(root: Path) -> list[str]:
    """Every read-back under `root` that is not listed, and every listed one that is gone."""
    modules = read_modules(root, house.COMPUTES_ON_DEVICE, entry_points=())
    return [violation for module in modules.values() for violation in _module_violations(module)]


def _module_violations(module: Module) -> Iterator[str]:
    allowed = {name: count for name, (count, _) in house.MAY_READ_BACK.get(module.name, {}).items()}
    seen: Counter[str] = Counter()
    for node, _ in module.nodes:
        name = _read_back(node, module.aliases)
        if name is None:
            continue
        seen[name] += 1
        if seen[name] > allowed.get(name, 0):
            yield module.at(node, f"{name}: the host waits for the device: keep it there, or list it in house.py")
    for name, count in allowed.items():
        if seen[name] < count:
            yield f"{module.path}:1: {name}: house.py lists {count} read-backs and there are {seen[name]}"


def _read_back(node: ast.AST, aliases: dict[str, str]) -> str | None:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if dotted_name(node.func, aliases) in house.COPIES_AND_WAITS:
        return node.func.attr if any(keyword.arg == "device" for keyword in node.keywords) else None
    return node.func.attr if node.func.attr in house.READS_BACK else None
