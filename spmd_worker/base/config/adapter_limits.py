"""Limits of LoRA adapters, as the configuration gives them."""

from dataclasses import dataclass
from typing import Final

MERGED: Final = "merged into the weights for all rows: answers have other bits than those of rows that name the adapter"
"""Effect of `model.lora_merge`, as log, plan and manifest say it."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """`max_loras` different adapters in a step, `max_cpu_loras` loaded at once, of rank `max_lora_rank` at most.
    `of_experts`: adapters may have matrices for experts, which take most of the memory.
    """

    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    of_experts: bool = False
