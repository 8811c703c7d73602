"""Small checkpoints of a kind of model, each written once a run: with every key in its config.json, and thinned as
files of the hub are.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from run_folder import made_once

Config = dict[str, Any]
BASE: Config = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Sizes of small models of text."""


@dataclass(frozen=True, eq=False)
class Checkpoints:
    """Folders by the name of a case. `write` makes a complete one; `thin` takes a config.json's text and the case, and
    gives the text of the thinned one.
    """

    kind: str
    write: Callable[[Path, str], object]
    thin: Callable[[Config, str], Config]

    @cache  # noqa: B019  # one a kind, for the whole run
    def folder(self, name: str) -> Path:
        return made_once(f"{self.kind} {name}", lambda folder: self.write(folder, name))

    @cache  # noqa: B019  # one a kind, for the whole run
    def thinned(self, name: str) -> Path:
        return made_once(f"thinned {self.kind} {name}", lambda folder: self.write_thinned(folder, name))

    def write_thinned(self, folder: Path, name: str) -> None:
        shutil.copytree(self.folder(name), folder)
        path = folder / "config.json"
        complete = json.loads(path.read_text())
        text = self.thin(complete.get("text_config", complete), name)
        path.write_text(json.dumps({**complete, "text_config": text} if "text_config" in complete else text))
