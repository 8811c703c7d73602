"""Rows whose answers have a form, beside rows without one, and what their answers must be. Imports no transformers.

The model has no weights but dummy ones, and a byte-level tokenizer; ids from 320 on have no token.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizer_folders import CHATML, write_byte_level

from spmd_worker import LLM, RequestOutput, SamplingParams

VOCAB_SIZE, NUM_TOKENS, EOS = 333, 320, 1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b c", "é"]}, "minItems": 1, "maxItems": 3},
        "more": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
    "required": ["name", "age", "tags", "more"],
}
CLOSED = {"json": SCHEMA, "disable_additional_properties": True, "disable_any_whitespace": True}


def is_of_schema(text: str) -> bool:
    import jsonschema

    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))
    return True


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "choice": (
        {"choice": ["yes", "no", 'may "be"', "yes and no", "é"]},
        ["yes", "no", 'may "be"', "yes and no", "é"].count,
    ),
    "regex": ({"regex": "(ab|c){2,7}[0-9]{1,3}x"}, matches("(ab|c){2,7}[0-9]{1,3}x")),
    "unicode": ({"regex": "[à-ÿ世界]{3}-.{4}"}, matches("[à-ÿ世界]{3}-.{4}")),
    "json": (CLOSED, is_of_schema),
    "object": (
        {
            "json": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
            "whitespace_pattern": " ?",
            "disable_additional_properties": True,
        },
        lambda text: json.loads(text) == {"a": None},
    ),
    "lark": ({"grammar": 'start: "<" item{1,4} ">"\nitem: /[a-c]/ ","'}, matches("<([a-c],){1,4}>")),
    "ebnf": ({"grammar": 'root ::= "x" digit digit "!"\ndigit ::= [0-9]'}, matches("x[0-9]{2}!")),
}
"""Kind -> the constraint, and a check of a text."""

NUM_ROWS = 16


def write_model(folder: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": EOS,
    }
    write_byte_level(folder, chat_template=CHATML)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def open_model(folder: Path, **changed: Any) -> LLM:
    settings = {"num_blocks": 400, "max_model_len": 256, "load_format": "dummy", "device": "cpu", **changed}
    return LLM(folder, **settings)


def rows() -> tuple[list[dict[str, list[int]]], list[SamplingParams], list[str | None]]:
    """Greedy, sampled, filtered, penalised, forking rows of every form, and every third without one; the name of each
    row's form.
    """
    plain = SamplingParams(temperature=1.0, max_tokens=90)
    kinds = [
        plain,
        replace(plain, temperature=0.0),
        replace(plain, temperature=0.9, logprobs=2),
        replace(plain, top_p=0.9, top_k=50, frequency_penalty=0.3, repetition_penalty=1.1),
        replace(plain, n=3),
    ]
    names = list(FORMS)
    prompts, params, found = [], [], []
    for index in range(NUM_ROWS):
        name = None if index % 3 == 2 else names[(index - index // 3) % len(names)]
        sampling = replace(kinds[index % len(kinds)], seed=100 + index)
        if name is None:
            sampling = replace(sampling, max_tokens=20)
        else:
            sampling = replace(sampling, structured_outputs=FORMS[name][0])
        prompts.append({"prompt_token_ids": [4 + (7 * index + 5 * place) % 90 for place in range(1 + 5 * index)]})
        params.append(sampling)
        found.append(name)
    return prompts, params, found


def check(outputs: list[RequestOutput], names: list[str | None]) -> None:
    """Check that every answer matches its row's constraint, and ended by itself."""
    for output, name in zip(outputs, names, strict=True):
        assert output.error is None, (name, output.error)
        for each in output.outputs:
            assert name is None or (each.finish_reason, each.token_ids[-1]) == ("stop", EOS), (name, each)
            assert name is None or FORMS[name][1](each.text), (name, each.text)


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """The values of answers that scheduling must not change."""
    return [
        [
            (each.token_ids, each.text, each.finish_reason, [[*entry.items()] for entry in each.logprobs or []])
            for each in output.outputs
        ]
        for output in outputs
    ]


def run(llm: LLM) -> list[RequestOutput]:
    prompts, params, _ = rows()
    return llm.generate(prompts, params, use_tqdm=False)
