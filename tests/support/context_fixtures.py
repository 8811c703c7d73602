"""Fixtures that are what a context manager gives."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest


def fixture_of(make: Callable[[], AbstractContextManager[Any]], scope: Any = "module") -> Any:
    """A fixture for the tests of its module, or for one test with the scope "function": what `make` opens."""

    @pytest.fixture(scope=scope)
    def opened() -> Iterator[Any]:
        with make() as found:
            yield found

    return opened
