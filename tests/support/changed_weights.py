"""Pairs of small checkpoints, one and the same with every weight another, tied and untied; and what an LLM answers, in
every bit.
"""

import random
from pathlib import Path
from typing import Any, Final

from plain_outputs import without_times
from run_folder import made_once
from safetensors.torch import load_file, save_file

from spmd_worker import LLM, SamplingParams

_SPECS: Final[dict[str, dict[str, Any]]] = {
    "untied": {"intermediate_size": 128, "attention_bias": True},
    "tied": {"tie_word_embeddings": True},
}
KINDS: Final = (
    *("embed_tokens", "q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "layernorm", "lm_head"),
)
"""A part of the names of each kind of weights; a tied checkpoint has no `lm_head`."""
_PROMPTS = [{"prompt_token_ids": random.Random(length).choices(range(10, 211), k=length)} for length in (1, 9, 23, 40)]
_GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=0)


def change_of(name: str) -> float:
    """Factor of the weights of this name in the second model; exact in bfloat16."""
    return (-0.5, 2.0, -1.0)[len(name) % 3]


def changed_pair(model: str) -> Path:
    """The folder of `base` and `changed`, written once a run."""

    def write(folder: Path) -> None:
        from reference_models import CheckpointSpec, LlamaConfig, write_checkpoint  # slow to import, so not on ranks

        for name in ("base", "changed"):
            path = write_checkpoint(folder / name, CheckpointSpec(LlamaConfig, _SPECS[model])) / "model.safetensors"
            if name == "changed":
                save_file({key: each * change_of(key) for key, each in load_file(path).items()}, path, {"format": "pt"})

    return made_once(f"weights of {model}", write)


def answers(llm: LLM) -> str:
    """Tokens and log-probabilities of four prompts and of what follows them."""
    outputs = map(without_times, llm.generate(_PROMPTS, _GREEDY, use_tqdm=False))
    return repr([(each["outputs"], each["prompt_logprobs"]) for each in outputs])
