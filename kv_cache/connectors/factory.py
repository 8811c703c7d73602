"""Factory of a connector, by the name in `cache.connector`, and what can be checked before there is a model."""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Final

from kv_cache.connectors.interface import ConnectorContext, ConnectorError, KVConnector

_CHECK: Final = "check_options"


def check_connector(name: str, options: Mapping[str, str]) -> None:
    """Raise ConnectorError unless `name` is that of a function; ValueError for options that `check_options` of its
    module rejects, if there is one.
    """
    module, _ = _found(name)
    check = getattr(module, _CHECK, None)
    if callable(check):
        check(options)


def find_factory(name: str) -> Callable[[ConnectorContext], KVConnector]:
    """The function `package.module:factory`. Raises ConnectorError."""
    return _found(name)[1]


def _found(name: str) -> tuple[ModuleType, Callable[[ConnectorContext], KVConnector]]:
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise ConnectorError("is not the name of a function: write it as package.module:factory")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConnectorError(f"cannot be imported: {error}: install it, or add its folder to PYTHONPATH") from error
    except Exception as error:  # a user's module
        text = f"cannot be imported: {type(error).__name__}: {error}: python -c 'import {module_name}' shows where"
        raise ConnectorError(text) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConnectorError(f"{module_name} has no function {function_name}")
    return module, function
