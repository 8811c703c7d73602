"""vLLM's `speculative_config` and its older keywords, as our keys."""

import json
from pathlib import Path
from typing import Any

import pytest

from spmd_worker.base.config.speculation import REJECTED_METHODS, SpeculativeConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.engine_args import EngineArgs, run_config
from spmd_worker.compat.speculative_words import REJECTED_KEYS


def speculation(**arguments: Any) -> SpeculativeConfig:
    return run_config({"model": "/m", **arguments}).speculative_config


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"speculative_config": None}, {}),
        ({"speculative_config": {}}, {}),
        ({"speculative_config": {"method": "suffix"}}, {"method": "suffix"}),
        ({"speculative_config": json.dumps({"method": "[ngram]"})}, {"method": "ngram"}),
        (
            {"speculative_config": {"model": "[ngram]", "num_speculative_tokens": 3, "prompt_lookup_max": 4}},
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
        ),
        ({"speculative_config": {"model": "/d"}}, {"method": "draft_model", "model": "/d"}),
        ({"speculative_config": {"model": Path("/d")}}, {"method": "draft_model", "model": "/d"}),
        ({"speculative_config": {"method": "deepseek_mtp"}}, {"method": "mtp"}),
        ({"speculative_config": {"method": "suffix", "model": "suffix", "quantization": None}}, {"method": "suffix"}),
        ({"speculative_config": {"method": "suffix", "enforce_eager": True}}, {"method": "suffix"}),
        (
            {"speculative_config": {"method": "ngram", "rejection_sample_method": "standard"}},
            {"method": "ngram"},
        ),
        (
            {"speculative_model": "[ngram]", "num_speculative_tokens": 5, "ngram_prompt_lookup_max": 3},
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3},
        ),
        ({"spec_method": "suffix", "spec_tokens": 7}, {"method": "suffix", "num_speculative_tokens": 7}),
    ],
)
def test_vllm_words_become_speculation_keys(given: dict[str, Any], expected: dict[str, Any]):
    assert speculation(**given) == SpeculativeConfig(**expected)
    assert speculation(**{**vars(EngineArgs("/m", **given)), "model": "/m"}) == SpeculativeConfig(**expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "sufix"}, "speculative_config.method=sufix is not one of ngram, suffix"),
        ({"method": "suffix", "lookup_max": 3}, "unknown key 'lookup_max': did you mean prompt_lookup_max?"),
        ({"num_speculative_tokens": 3}, "has no method: give one of"),
        ({"method": "suffix", "num_speculative_tokens": 0}, "num_speculative_tokens=0 must be from 1 to"),
        ({"method": "suffix", "num_speculative_tokens": 10**6}, "num_speculative_tokens=1000000 must be from 1 to"),
        ({"method": "suffix", "num_speculative_tokens": True}, "num_speculative_tokens=True must be"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min=4 is above"),
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "min_token_prob=1.5 must be"),
        ({"method": "suffix", "draft_sample_method": "probabilistic"}, "is rejected: a draft is accepted where"),
        ("suffix", "is not JSON"),
        ('"suffix"', "must be a dict"),
        (3, "must be a dict"),
    ],
)
def test_invalid_speculation_is_named_with_rule(given: Any, message: str):
    with pytest.raises(ConfigError, match="speculative_config") as error:
        speculation(speculative_config=given)
    assert message in str(error.value)


@pytest.mark.parametrize("method", REJECTED_METHODS)
def test_other_methods_are_rejected_with_alternative(method: str):
    message = f"speculative_config.method={method} is rejected: "
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(method=method)
    with pytest.raises(ConfigError, match=message):
        speculation(speculative_config={"method": method, "num_speculative_tokens": 3})


@pytest.mark.parametrize("key", REJECTED_KEYS)
def test_other_keys_are_rejected_unless_neutral(key: str):
    assert speculation(speculative_config={"method": "suffix", key: None}).is_on
    with pytest.raises(ConfigError, match=f"{key}=7, which is rejected: "):
        speculation(speculative_config={"method": "suffix", key: 7})


def test_two_values_of_one_setting_are_rejected():
    with pytest.raises(ConfigError, match="spec_tokens=3 and speculative_config's num_speculative_tokens=4"):
        speculation(speculative_config={"method": "suffix", "num_speculative_tokens": 4}, spec_tokens=3)


def test_options_without_a_method_are_refused():
    with pytest.raises(ConfigError, match="num_speculative_tokens=5 has no effect without"):
        SpeculativeConfig(num_speculative_tokens=5)
