"""The rules of replicated code: what every rank computes for itself may depend on nothing that differs between ranks.

`replica_violations` finds clocks, sets, `hash()`, `id()`, randomness and the environment in the modules that house.py
calls replicated. It reads syntax, not types: a set handed in as an argument is not seen.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import house
from source_tree import Module, bound_names, dotted_name, read_modules

SET_METHODS = ("union", "intersection", "difference", "symmetric_difference")
SET_OPERATORS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)
NO_ORDER = house.REPLICA_FORBIDDEN_BUILTINS["set"]


def replica_violations(root: Path) -> list[str]:
    """Everything in replicated modules under `root` that could differ between ranks."""
    modules = [module for module in read_modules(root).values() if house.is_replicated(module.name)]
    return [violation for module in modules for violation in _module_violations(module)]


def _module_violations(module: Module) -> Iterator[str]:
    for found in module.imports:
        reason = _reason_against(found.dotted)
        if reason:
            yield module.at(found.node, f"{found.dotted}: {reason}")
    aliases, bound = module.aliases, bound_names(module)
    called = [node.func for node, _ in module.nodes if isinstance(node, ast.Call)]
    for node, _ in module.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            # Read as a value, a name that the module binds is its own; called, it is taken for the builtin.
            if node.id in house.REPLICA_FORBIDDEN_BUILTINS and (node.id not in bound or node in called):
                yield module.at(node, f"{node.id}: {house.REPLICA_FORBIDDEN_BUILTINS[node.id]}")
        elif isinstance(node, ast.Attribute):
            yield from _attribute_violations(module, node, dotted_name(node, aliases))
        elif isinstance(node, (ast.Set, ast.SetComp)) or _is_set_algebra_of_views(node):
            yield module.at(node, NO_ORDER)


def _attribute_violations(module: Module, node: ast.Attribute, name: str | None) -> Iterator[str]:
    reason = _reason_against(name) if name else None
    if reason:
        yield module.at(node, f"{name}: {reason}")
    elif node.attr == "popitem":
        yield module.at(node, "popitem: which item it takes is not said: name the key")
    elif node.attr in SET_METHODS:
        yield module.at(node, f"{node.attr}: {NO_ORDER}")


def _is_set_algebra_of_views(node: ast.AST) -> bool:
    """`a.keys() & b.keys()` is a set, in a set's order."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, SET_OPERATORS):
        return False
    return any(_is_view(side) for side in (node.left, node.right))


def _is_view(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("keys", "items")


def _reason_against(dotted: str) -> str | None:
    for name, what in house.REPLICA_FORBIDDEN_NAMES.items():
        if house.is_within(dotted, name):
            return f"{what}, which replicated code must not see"
    return None
