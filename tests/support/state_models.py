"""Small models with recurrent states, and what `LLM` answers to the rows of `state_rows.py`."""

from functools import cache
from pathlib import Path
from typing import Any

import transformers
from conv_checkpoints import CASES
from delta_checkpoints import DELTA_CASES, delta_folder
from family_checkpoints import stir
from kimi_checkpoints import KIMI_CASES, kimi_folder
from mamba_checkpoints import MAMBA_CASES, mamba_folder
from qwen4_checkpoints import QWEN4_CASES, qwen4_folder
from run_folder import made_once
from state_rows import SETTINGS, answers_of, state_rows

from spmd_worker import LLM


@cache
def state_folder(name: str) -> Path:
    """The checkpoint of a case, with heads wide enough for the compiled kernels; written once a run."""
    if name in DELTA_CASES:
        return delta_folder(name)
    if name in QWEN4_CASES:
        return qwen4_folder(name)
    if name in KIMI_CASES:
        return kimi_folder(name)
    if name in MAMBA_CASES:
        return mamba_folder(name)
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


@cache
def alone(kind: str, num_samples: int = 1) -> list[Any]:
    """Each row by itself, whole, with an empty cache."""
    rows, params = state_rows(num_samples=num_samples)
    found = []
    with LLM(state_folder(kind), **SETTINGS) as llm:
        for row, sampling in zip(rows, params, strict=True):
            found += answers_of(llm.generate([row], [sampling], use_tqdm=False))
            llm.reset_prefix_cache()
    return found
