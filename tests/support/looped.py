"""Parametrisation within one test, for cases that cost less than a test does: a test takes milliseconds by itself."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def looped(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, all values in one test; what is raised names its case. Several may be stacked, and
    stand next to the function.
    """
    cases = list(values)
    given = [names] if isinstance(names, str) else list(names)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            for case in cases:
                own = dict(zip(given, [case] if isinstance(names, str) else case, strict=True))
                try:
                    test(**arguments, **own)
                except BaseException as error:
                    error.add_note(f"case: {', '.join(f'{name}={value!r}' for name, value in own.items())}")
                    raise

        signature = inspect.signature(test)
        left = [each for each in signature.parameters.values() if each.name not in given]
        assert len(left) == len(signature.parameters) - len(given), f"{test} has no {given}"
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]  # pytest reads it
        return run

    return decorate
