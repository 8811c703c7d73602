"""Small models with recurrent states, and what `LLM` answers to the rows of `state_rows.py`."""

from functools import cache
from pathlib import Path
from typing import Any

import transformers
from conv_checkpoints import CASES
from family_checkpoints import stir
from run_folder import made_once
from state_rows import SETTINGS, answers_of, state_rows

from spmd_worker import LLM


@cache
def state_folder(name: str) -> Path:
    """The checkpoint of one of `CASES`, with heads wide enough for the compiled kernels; written once a run."""
    return made_once(f"states {name}", lambda folder: _write(folder, *CASES[name]))


def _write(folder: Path, family: str, keys: dict[str, Any]) -> None:
    config = getattr(transformers, f"{family}Config")(**{**keys, "hidden_size": 64})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    stir(model)
    model.save_pretrained(folder)


def answers(kind: str, num_samples: int = 1, **settings: Any) -> tuple[list[Any], Any]:
    """Answers to the rows, and the counters of the run."""
    rows, params = state_rows(num_samples=num_samples)
    with LLM(state_folder(kind), **{**SETTINGS, **settings}) as llm:
        found = answers_of(llm.generate(rows, params, use_tqdm=False))
        return found, llm.llm_engine.counters
