"""Settings of a generation_config.json in answers of a tiny BART, against transformers' `generate`."""

import json
import random
import shutil
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from cross_rows import cross_folder, cross_reference

from spmd_worker import LLM, BeamSearchParams, SamplingParams, TokenRules

ENDS = [2, *range(3, 60, 4)]
SETTINGS: dict[str, Any] = {
    "decoder_start_token_id": 2,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": ENDS,
    "min_length": 9,
    "max_length": 16,
    "no_repeat_ngram_size": 2,
}
TEXTS = [[random.Random(seed).randrange(4, 60) for _ in range(5 + 3 * seed)] for seed in range(4)]
PROMPTS = [{"prompt_token_ids": each} for each in TEXTS]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("settings") / "bart"
    shutil.copytree(cross_folder("bart"), folder)
    (folder / "generation_config.json").write_text(json.dumps(SETTINGS))
    with LLM(str(folder), dtype="float32", num_blocks=100, device="cpu") as made:
        yield made


def their_answers(**changes: Any) -> list[list[int]]:
    """From the decoder's first token on, up to an end."""
    model = cross_reference("bart")
    # Where the settings have none, transformers would take the model's.
    with patch.object(model, "generation_config", transformers.GenerationConfig(**{**SETTINGS, **changes})):
        return [transformers.GenerationMixin.generate(model, torch.tensor([each]))[0].tolist() for each in TEXTS]


def test_answers_follow_the_settings_of_the_folder(llm: LLM):
    params = llm.get_default_sampling_params()
    params.temperature = 0.0
    assert params.max_tokens == 14
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    found = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in outputs]
    assert found == their_answers()
    assert all(row[:2] == [2, 0] and row[-1] in ENDS for row in found)
    # Negative controls: each setting matters here.
    for key, value in (("min_length", 0), ("no_repeat_ngram_size", 0), ("forced_eos_token_id", None)):
        assert found != their_answers(**{key: value}), key


def test_rules_of_a_row_replace_those_of_the_folder(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=14, token_rules=TokenRules(min_new_tokens=7))
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    found = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in outputs]
    assert found == their_answers(no_repeat_ngram_size=0, forced_eos_token_id=None)
    outputs = llm.generate(PROMPTS, replace(params, token_rules={}), use_tqdm=False)
    found = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in outputs]
    assert found == their_answers(min_length=0, no_repeat_ngram_size=0, forced_eos_token_id=None)


def test_beams_have_the_rules_of_the_folder(llm: LLM):
    beams = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=14))
    for output in beams:
        for beam in output.sequences:
            pairs = list(zip(beam.tokens, beam.tokens[1:]))
            assert len({*pairs}) == len(pairs)
            assert not {*beam.tokens[2:8]} & {*ENDS}
    # One beam is the greedy answer, by the rules of the call: a record that names no token id is one, and so is {}.
    params = BeamSearchParams(beam_width=1, max_tokens=14)
    for own, changes in ((TokenRules(min_new_tokens=7), {}), ({}, {"min_length": 0})):
        (found,) = zip(*(each.sequences for each in llm.beam_search(PROMPTS, replace(params, token_rules=own))))
        expected = their_answers(**changes, no_repeat_ngram_size=0, forced_eos_token_id=None)
        assert [each.tokens for each in found] == expected
