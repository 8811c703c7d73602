"""Quality of int8, FP8 and a cache in FP8: perplexity beside bfloat16's on the tasks of the demo model, on English text
that ships with Python, and on random ids of a model with random weights; and the 480 answers of the demo.

Prints the figures (`pytest -s`).
"""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from fp8_device import FP8
from tokenizers import Tokenizer

from spmd_worker import LLM, SamplingParams

DEMO = Path(__file__).parents[2] / "scripts" / "demo"
KINDS = {"int8": {"quantization": "int8"}, "fp8": FP8, "fp8 cache": {"kv_cache_dtype": "fp8"}}
MOST_LOSS = {"int8": dict.fromkeys(("tasks", "english", "random"), 0.01)}
MOST_LOSS["fp8"] = MOST_LOSS["fp8 cache"] = {"tasks": 0.005, "random": 0.005, "english": 0.12}
"""The demo model knows no English: its perplexity is 94,000 for 288 tokens, so that small errors count there."""
SCORING = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
RANDOM_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def perplexity(folder: Path, sequences: Sequence[tuple[list[int], int]], **settings: object) -> float:
    """Perplexity of each sequence's ids from a position on, given all before them."""
    prompts = [ids for ids, _ in sequences]
    with LLM(folder, dtype="bfloat16", num_blocks=2000, enable_prefix_caching=False, **settings) as llm:
        outputs = llm.generate(prompts, SCORING, use_tqdm=False)
    total, count = 0.0, 0
    for (ids, start), output in zip(sequences, outputs, strict=True):
        entries = output.prompt_logprobs or []
        values = [entry[token].logprob for token, entry in zip(ids[start:], entries[start:], strict=True) if entry]
        total, count = total - sum(values), count + len(values)
    return math.exp(total / count)


def demo_tasks() -> list[tuple[list[int], int]]:
    """The 480 prompts with their right answers, which alone count."""
    tokenizer = Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json"))
    rows = [json.loads(line) for line in (DEMO / "prompts.jsonl").read_text().splitlines()]
    answers = {row["custom_id"]: row for row in map(json.loads, (DEMO / "answers.jsonl").read_text().splitlines())}
    sequences = []
    for row in rows:
        if "prompt" in row:
            prompt = tokenizer.encode(row["prompt"]).ids
            sequences.append((prompt + tokenizer.encode(f" {answers[row['custom_id']]['answer']}").ids, len(prompt)))
    return sequences


def english_text() -> list[tuple[list[int], int]]:
    tokenizer = Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(topics[name] for name in sorted(topics))[:60_000]).ids
    return [(ids[start : start + 200], 1) for start in range(0, len(ids) - 200, 200)]


def random_ids() -> list[tuple[list[int], int]]:
    source = random.Random(5)
    return [([source.randrange(4096) for _ in range(200)], 1) for _ in range(40)]


@pytest.mark.stress
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["tasks", "english", "random"])
def test_perplexity_is_near_that_of_bfloat16(tmp_path: Path, text: str, kind: str):
    """FP8 by its definition in plain torch."""
    folder, settings = DEMO / "model", {}
    if text == "random":
        folder, settings = tmp_path, {"load_format": "dummy"}
        (folder / "config.json").write_text(json.dumps(RANDOM_MODEL))
    sequences = {"tasks": demo_tasks, "english": english_text, "random": random_ids}[text]()
    plain, quantised = (perplexity(folder, sequences, **settings, **more) for more in ({}, KINDS[kind]))
    print(f"\nperplexity, {text}: bfloat16 {plain:.6g}, {kind} {quantised:.6g}, {100 * (quantised / plain - 1):+.3f} %")
    assert len(sequences) > 30
    assert quantised != plain, "eight bits are in use"
    assert abs(quantised / plain - 1) < MOST_LOSS[kind][text]


@pytest.mark.stress
@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_of_the_demo_is_right(kind: str):
    rows = [json.loads(line) for line in (DEMO / "prompts.jsonl").read_text().splitlines()]
    answers = {row["custom_id"]: row for row in map(json.loads, (DEMO / "answers.jsonl").read_text().splitlines())}
    params = SamplingParams(temperature=0, max_tokens=64)
    wrong = []
    with LLM(DEMO / "model", dtype="bfloat16", num_blocks=2000, **KINDS[kind]) as llm:
        plain = [row for row in rows if "prompt" in row]
        chats = [row for row in rows if "prompt" not in row]
        outputs = llm.generate([row["prompt"] for row in plain], params, use_tqdm=False)
        outputs += llm.chat([row["messages"] for row in chats], params, use_tqdm=False)
    for row, output in zip([*plain, *chats], outputs, strict=True):
        if output.outputs[0].text.strip() != answers[row["custom_id"]]["answer"]:
            wrong.append(row["custom_id"])
    assert len(outputs) == 480
    assert not wrong
