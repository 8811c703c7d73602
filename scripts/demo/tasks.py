"""The demo model's four tasks: prompts, their right answers, and which of them training may never see.

Everything here is a function of a seed and of the text of a prompt, on any machine and under any Python: the generator
is written out below, and whether a prompt is held out is decided by a digest of its text.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

TASK_NAMES = ("add", "sort", "reverse", "copy")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
NUMBERS = tuple(str(number) for number in range(10, 100))
SMALLEST_ADDEND, LARGEST_ADDEND = 100, 999
MIN_ITEMS = 3
MAX_LETTERS = 20
MAX_NUMBERS = 16
HELD_OUT_ONE_IN = 8
MASK_64 = 0xFFFFFFFFFFFFFFFF
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Instance:
    """One prompt and the text a right answer has after stripping whitespace."""

    task: str
    prompt: str
    answer: str


class SplitMix64:
    """A 64-bit counter-based generator (Steele, Lea and Flood, 2014): a seed gives the same numbers everywhere."""

    def __init__(self, seed: int) -> None:
        self._state = seed & MASK_64

    def below(self, bound: int) -> int:
        """An integer in [0, bound); the bias of the remainder is under bound / 2**64."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & MASK_64
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK_64
        return (mixed ^ (mixed >> 31)) % bound

    def between(self, lowest: int, highest: int) -> int:
        """An integer in [lowest, highest]."""
        return lowest + self.below(highest - lowest + 1)

    def distinct(self, pool: Sequence[Item], count: int) -> list[Item]:
        """`count` different members of `pool` in random order (the first steps of a Fisher-Yates shuffle of a copy)."""
        remaining = list(pool)
        for position in range(count):
            chosen = self.between(position, len(remaining) - 1)
            remaining[position], remaining[chosen] = remaining[chosen], remaining[position]
        return remaining[:count]


def answer_prompt(prompt: str) -> str:
    """The right answer to `prompt`, computed from its text alone."""
    task, *words, equals_sign = prompt.split(" ")
    assert equals_sign == "=", prompt
    if task == "add":
        return str(int(words[0]) + int(words[2]))
    if task == "sort":
        return " ".join(sorted(words, key=int))
    if task == "reverse":
        return " ".join(reversed(words))
    assert task == "copy", prompt
    return " ".join(words)


def is_held_out(prompt: str) -> bool:
    """Whether training never sees `prompt`, in plain or in chat form: decided by its digest, not by chance."""
    return hashlib.blake2b(prompt.encode(), digest_size=8).digest()[0] % HELD_OUT_ONE_IN == 0


def draw_addend(generator: SplitMix64) -> int:
    return generator.between(SMALLEST_ADDEND, LARGEST_ADDEND)


def draw_items(generator: SplitMix64, task: str, longest: float) -> list[str]:
    """The distinct numbers or letters of a list task; `longest` in (0, 1] scales the greatest number of items."""
    pool, max_items = (NUMBERS, MAX_NUMBERS) if task == "sort" else (LETTERS, MAX_LETTERS)
    return generator.distinct(pool, generator.between(MIN_ITEMS, max(MIN_ITEMS, round(max_items * longest))))


def draw_prompt(generator: SplitMix64, task: str, longest: float = 1.0) -> str:
    if task == "add":
        return f"add {draw_addend(generator)} + {draw_addend(generator)} ="
    return f"{task} {' '.join(draw_items(generator, task, longest))} ="


def draw_instance(generator: SplitMix64, task: str, *, held_out: bool, longest: float = 1.0) -> Instance:
    """A random instance of `task` from the asked side of the held-out split."""
    prompt = draw_prompt(generator, task, longest)
    while is_held_out(prompt) != held_out:
        prompt = draw_prompt(generator, task, longest)
    return Instance(task, prompt, answer_prompt(prompt))


def held_out_instances(seed: int, count: int) -> list[Instance]:
    """`count` held-out instances with different prompts, the tasks taking turns."""
    generator = SplitMix64(seed)
    instances: dict[str, Instance] = {}
    while len(instances) < count:
        instance = draw_instance(generator, TASK_NAMES[len(instances) % len(TASK_NAMES)], held_out=True)
        instances.setdefault(instance.prompt, instance)
    return list(instances.values())
