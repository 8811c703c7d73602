"""Public calls of an engine with arguments of any type, size and order, drawn from a number.

    python tests/support/fuzzed_calls.py FIRST COUNT [TROUBLES]     as a script, on the ranks that a launcher started

A sequence is a few calls, some of which are as they should be. Each may answer or raise an error in words: one that a
user can meet (`IN_WORDS`), with a text. After each sequence the engine answers a fixed prompt as it did before, once it
is brought back by the calls that are there for that (`bring_back`).
"""

import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spmd_worker import LLM, BeamSearchParams, SamplingParams
from spmd_worker.base.errors import MissingWeightsError, SpmdError
from spmd_worker.engine.engine import Engine

MODEL = Path(__file__).resolve().parents[2] / "scripts" / "demo" / "model"
IN_WORDS = (SpmdError, ValueError, TypeError, RuntimeError, OSError)
NOT_IN_WORDS = (RecursionError, UnicodeError)
"""Those of the above that only report an internal error."""
PROMPT = [70, 71, 72, 73]
GREEDY = SamplingParams(temperature=0, max_tokens=5)
LONG_S = 240.0
"""A timeout that only a hang reaches."""


class Odd:
    """Neither equal to anything nor of any use."""

    def __repr__(self) -> str:
        return "Odd()"


class Chance(random.Random):
    """Arguments of one rank: its own values. `shape`, equal on all ranks, draws their number."""

    shape = random.Random()


def odd_values(chance: random.Random) -> list[Any]:
    """Values that a caller may pass by mistake."""
    return [
        *(None, True, False, 0, 1, -1, 2, 7, 10**6, 2**31, 2**63, -(2**63) - 1, 10**30),
        *(0.0, 0.5, -1.0, 1e308, float("nan"), float("inf"), 1 + 2j),
        *("", "add 1 2 =", "\ud800", "\0", "x" * 20_000, "weights", "kv_cache", "ü", b"", b"add"),
        *([], [[]], [None], [0], [1, 2, 3], [-1], [2**40], [1.5], ["a", "b"], ["a", 1], [[1, 2], [3]], [[[1]]]),
        *((), (1, 2), {}, {"prompt": "add 1 2 ="}, {"prompt_token_ids": [1, 2]}, {"prompt": None}, {1: 2}),
        *(set(), {1, 2}, frozenset({"weights"}), range(3), range(0), iter([1, 2]), (each for each in "ab")),
        *([{"role": "user", "content": "add 1 2 ="}], [{"role": "user"}], [{"content": 1}], [[{"role": 1}]]),
        *(SamplingParams(max_tokens=3), [SamplingParams(max_tokens=2)] * 2, SamplingParams(max_tokens=1, n=3)),
        *(torch.tensor(3), torch.zeros(2, 2), torch.tensor([1, 2, 3]), torch.float32, int, LLM, Odd(), Odd, len, ...),
        *(lambda: 1, lambda model: 1 / 0, lambda model: None, lambda *_: Odd(), Path("/no/x"), Path("/dev/null")),
        *([("lm_head.weight", torch.zeros(1))], [("nothing", torch.zeros(1))], [("model.norm.weight", None)], [("a",)]),
        *("get_kv_cache_specs", "check_health", "no_such_method", "__init__", "_model", "sleep", "start_profile"),
        chance.random(),
        chance.randrange(-10, 400),
        [chance.randrange(400) for _ in range(chance.randrange(80))],
    ]


def sampling(chance: random.Random) -> Any:
    """Keywords with one or two values of any kind."""
    names = (
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
        *("logprobs", "prompt_logprobs", "logit_bias", "bad_words", "allowed_token_ids", "presence_penalty", "best_of"),
        *("ignore_eos", "detokenize", "skip_special_tokens", "truncate_prompt_tokens", "output_kind", "nothing"),
    )
    chosen = {name: chance.choice(odd_values(chance)) for name in chance.sample(names, chance.randrange(1, 3))}
    try:
        return SamplingParams(**{"max_tokens": 3, **chosen})
    except (TypeError, ValueError):
        # Every rank has to make the call.
        return GREEDY


Call = Callable[[LLM, Chance], Any]


def method(name: str, good: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None) -> Call:
    """A call of the LLM or of its engine (`llm_engine.NAME`), with `good`, odd or missing arguments."""

    def call(llm: LLM, chance: Chance) -> Any:
        target: Any = llm
        for part in name.split("."):
            target = getattr(target, part)
        count = max(0, len(good) + chance.shape.choice([0, 0, 0, 0, 0, 0, -1, 1]))
        named = [key for key in keywords or {} if chance.shape.random() < 0.3]
        values = [value(chance, each) for each in (*good, None)[:count]]
        return target(*values, **{key: value(chance, (keywords or {})[key]) for key in named})

    return call


def value(chance: Chance, good: Any) -> Any:
    return good if chance.random() < 0.5 else chance.choice(odd_values(chance))


def _scope(name: str) -> Call:
    """A block with a call in it, which is left by an error or without."""

    def call(llm: LLM, chance: Chance) -> Any:
        with getattr(llm, name)():
            if chance.random() < 0.3:
                raise ValueError("of the block")
            if name == "turns":
                CALLS["generate"](llm, chance)
            else:
                CALLS["update_weights"](llm, chance)

    return call


PROMPTS = ["add 1 2 =", PROMPT, {"prompt": "copy a b ="}]
CHAT = [[{"role": "user", "content": "add 1 2 ="}]]
OPTIONS = {"use_tqdm": False, "priority": [0, 1, 2], "gather": True, "lora_request": None, "on_error": "row"}
WEIGHTS = [("model.norm.weight", torch.ones(128))]

CALLS: dict[str, Call] = {
    "generate": method("generate", [PROMPTS, GREEDY], OPTIONS),
    "chat": method("chat", [CHAT, GREEDY], {"chat_template": None, "add_generation_prompt": True, "tools": None}),
    "score_tokens": method("score_tokens", [PROMPTS[:2], [[3, 4], [5]]], {"gather": True}),
    "beam_search": method("beam_search", [PROMPTS[:1], BeamSearchParams(beam_width=2, max_tokens=3)]),
    "sampling": lambda llm, chance: llm.generate(["add 1 2 =", PROMPT], sampling(chance), use_tqdm=False),
    "collective_rpc": method("collective_rpc", ["check_health"], {"args": (), "kwargs": {}, "timeout": None}),
    "apply_model": method("apply_model", [len]),
    "worker_event": method("worker_event", ["start_profile", "profile"], {"reset_prefix_cache": True}),
    "start_profile": method("start_profile", ["profile"]),
    "stop_profile": method("stop_profile"),
    "reset_prefix_cache": method("reset_prefix_cache"),
    "set_weight_version": method("set_weight_version", [3]),
    "start_weight_update": method("start_weight_update", [], {"partial": True}),
    "update_weights": method("update_weights", [WEIGHTS], {"source": 0}),
    "finish_weight_update": method("finish_weight_update"),
    "weight_update": _scope("weight_update"),
    "turns": _scope("turns"),
    "sleep": method("sleep", [1]),
    "sleep deeply": method("sleep", [2]),
    "wake_up": method("wake_up", [["weights"]]),
    "wake_up all": method("wake_up"),
    "reinitialize_distributed": method("reinitialize_distributed", [], {"tensor_parallel_size": 2}),
    "get_metrics": method("get_metrics"),
    "get_world_size": method("get_world_size", [True]),
    "engine.add_request": method("llm_engine.add_request", [PROMPT, GREEDY]),
    "engine.abort_request": method("llm_engine.abort_request", [0]),
    "engine.step": method("llm_engine.step"),
    "engine.sleep": method("llm_engine.sleep", [1]),
    "engine.wake_up": method("llm_engine.wake_up", [["weights"]]),
    "engine.worker_event": method("llm_engine.worker_event", ["start_profile", "profile"]),
    "engine.set_weight_version": method("llm_engine.set_weight_version", [3]),
    "good": lambda llm, chance: llm.generate([PROMPT] * chance.randrange(1, 4), GREEDY, use_tqdm=False),
}


def bring_back(llm: LLM) -> None:
    """Undo the state that other calls have left."""
    engine = llm.llm_engine
    for name in ("stop_profile", "finish_weight_update", "wake_up"):
        try:
            getattr(llm, name)()
        except IN_WORDS as error:
            note(f"back, {name}: {type(error).__name__}: {str(error)[:200]}")
    try:
        step_to_the_end(engine)
    except MissingWeightsError:
        # The way out that it names: with requests unanswered no weights can be loaded anew.
        llm.start_weight_update(partial=True)
        llm.finish_weight_update()
        step_to_the_end(engine)
    if llm.sleeping_tags:
        llm.wake_up()
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()


def step_to_the_end(engine: Engine) -> None:
    """Step until every request is answered."""
    while engine.has_unfinished_requests():
        engine.step()


def run_sequence(llm: LLM, number: int, seen: Counter[str], most_s: list[float]) -> list[str]:
    """Description of the failure. `number` draws the calls; `most_s` has the longest rejection.

    With FUZZ_APART set every rank makes the same calls with arguments of its own.
    """
    is_apart = bool(os.environ.get("FUZZ_APART"))
    order = random.Random(number)
    chance = Chance(f"{number} {os.environ.get('RANK') if is_apart else ''}")
    # An engine that is driven by hand asks for the same calls on every rank and does not compare them.
    names = [name for name in CALLS if not (is_apart and name.startswith("engine."))]
    troubles = []
    done: list[str] = []
    for place in range(order.randrange(1, 5)):
        name = order.choice(names)
        chance.shape = random.Random(f"{number} {place}")
        done.append(name)
        start_s = time.monotonic()
        try:
            CALLS[name](llm, chance)
            seen["answered"] += 1
            note(f"{number} {name}: answered")
        except IN_WORDS as error:
            seen["refused"] += 1
            note(f"{number} {name}: {type(error).__name__}: {str(error)[:200]}")
            most_s[0] = max(most_s[0], time.monotonic() - start_s)
            if isinstance(error, NOT_IN_WORDS) or not str(error).strip():
                troubles.append(f"{number}: {' > '.join(done)}: {type(error).__name__}: {error}")
        except Exception as error:
            if not is_callers_own(error):
                troubles.append(f"{number}: {' > '.join(done)}: {type(error).__name__}: {error}")
    return troubles


def note(text: str) -> None:
    """Log the calls of one sequence, with FUZZ_LOG."""
    if os.environ.get("FUZZ_LOG"):
        os.write(2, f"rank {os.environ.get('RANK', 0)}: {text}\n".encode("utf-8", "replace"))


def is_callers_own(error: Exception) -> bool:
    """Raised by a function that was handed in, or as Python says that a method does not exist."""
    return isinstance(error, ZeroDivisionError) or (
        isinstance(error, AttributeError) and "a worker has no method" in str(error)
    )


def answer(llm: LLM) -> list[int]:
    """Answer to the fixed prompt."""
    return list(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def new_llm() -> LLM:
    """Over the ranks that there are."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return LLM(
        MODEL, num_blocks=40, max_model_len=128, max_num_seqs=8, tensor_parallel_size=num_ranks, timeout_s=LONG_S
    )


def fuzz(first: int, count: int) -> dict[str, Any]:
    """Sequences `first` and on. Stops at the first after which the engine is not usable."""
    llm = new_llm()
    expected, seen, most_s = answer(llm), Counter[str](), [0.0]
    troubles: list[str] = []
    for number in range(first, first + count):
        troubles += run_sequence(llm, number, seen, most_s)
        try:
            bring_back(llm)
            found = answer(llm)
        except Exception as error:
            troubles.append(f"{number}: not usable afterwards: {type(error).__name__}: {error}")
            break
        if found != expected:
            troubles.append(f"{number}: answers {found}, and {expected} before")
            break
    return {"sequences": count, **seen, "longest refusal, s": round(most_s[0], 3), "troubles": troubles}


def main() -> int:
    """Prints one line of JSON for each rank."""
    first, count = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = fuzz(first, count)
    os.write(1, f"{json.dumps({'rank': os.environ.get('RANK', '0'), **found})}\n".encode())
    return int(bool(found["troubles"]))


if __name__ == "__main__":
    sys.exit(main())
