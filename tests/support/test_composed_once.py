"""Settings composed in a copy: the same values and errors as Hydra's from files."""

from collections.abc import Sequence

import composed_once
import pytest
from hydra import compose as compose_files
from ranks import REPOSITORY

from spmd_worker.base.config import compose
from spmd_worker.base.errors import ConfigError

COMMANDS = [
    ["seed=3", "++cache.num_blocks=7", "model.adapters={sql: /a}", "sampling.stop=[a,'b c']", "seed=4"],
    ["cache=tiny", "seed=3"],
    ["seed=3", "sampling.max_tokens=${seed}"],
]
WRONG = ["cache.num_blocks=many", "cache.connector_options=3", "model.adapters={sql: [1]}", "seed=${other}"]


def results() -> list[object]:
    found: list[object] = []
    for words in (*COMMANDS, *([wrong] for wrong in WRONG)):
        try:
            found.append(compose.compose_run(REPOSITORY / "conf", words))
        except ConfigError as error:
            found.append(str(error))
    return found


def test_copy_has_values_and_errors_of_files(monkeypatch: pytest.MonkeyPatch):
    whole, read = results(), list[Sequence[str]]()

    def counted(name: str, overrides: Sequence[str]) -> object:
        read.append(overrides)
        return compose_files(name, overrides)

    monkeypatch.setattr(compose, "_composed", composed_once.composed_in_copy)
    results()
    monkeypatch.setattr(compose, "compose", counted)
    assert results() == whole
    assert [type(each) for each in whole] == [compose.RunConfig] * len(COMMANDS) + [str] * len(WRONG)
    # Plain values need no file.
    assert read == [[each.removeprefix("++") for each in words] for words in (*COMMANDS[1:], WRONG[-1:])]
