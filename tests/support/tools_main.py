"""The tools of `spmd_worker.frontends.tools`, run in this process as their commands run them."""

from collections.abc import Callable
from importlib import import_module

import pytest

RunTool = Callable[..., tuple[int, str, str]]


def tool(name: str, capsys: pytest.CaptureFixture[str]) -> RunTool:
    """The program frontends/tools/<name>.py as a function of its arguments: (exit code, output, errors)."""
    main = import_module(f"spmd_worker.frontends.tools.{name}").main

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
