"""What a row may ask of the sampler: how many samples run, how many come back, and when they are ranked."""

import copy
import dataclasses
import enum
import inspect
import pickle

import pytest

from spmd_worker.base.config.schema import SamplingConfig
from spmd_worker.replica.sequence.defaults import default_sampling
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.resolved_params import bad_word_ids, resolve_params, truncated_prompt
from spmd_worker.replica.sequence.sampling_params import (
    REJECTED,
    SAMPLING_KEYS,
    WITHOUT_EFFECT,
    RequestOutputKind,
    SamplingParams,
)


@pytest.mark.parametrize(
    ("given", "num_sequences", "is_ranked"),
    [
        ({}, 1, False),
        ({"n": 3}, 3, False),
        ({"best_of": 1}, 1, False),
        ({"n": 3, "best_of": 3}, 3, False),
        ({"n": 3, "best_of": 4}, 4, True),
        ({"best_of": 1024}, 1024, True),
        ({"best_of": 2, "temperature": 0.0}, 2, True),
    ],
)
def test_best_of_sets_number_of_running_samples(given: dict[str, object], num_sequences: int, is_ranked: bool):
    sampling = SamplingParams(**given)
    assert (sampling.num_sequences, sampling.is_ranked) == (num_sequences, is_ranked)


@pytest.mark.parametrize(
    ("given", "is_needed"),
    [
        ({}, False),
        ({"n": 3}, False),
        ({"n": 3, "best_of": 3}, False),
        ({"n": 3, "best_of": 4}, True),
        ({"logprobs": 0}, True),
        ({"n": 3, "best_of": 4, "logprobs": 2}, True),
        ({"prompt_logprobs": 0}, False),
    ],
)
def test_logprobs_are_needed_to_be_returned_or_ranked(given: dict[str, object], is_needed: bool):
    assert SamplingParams(**given).needs_logprobs == is_needed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"n": 3, "best_of": 2},
            "best_of=2 must be at least n=3: raise best_of, lower n, or leave best_of out, which runs n samples and "
            "returns them all",
        ),
        ({"best_of": 1025}, "best_of=1025 must be at most 1024"),
        ({"best_of": 2.0}, "best_of=2.0 must be a whole number"),
        ({"best_of": True}, "best_of=True must be a whole number"),
        ({"best_of": "2"}, "best_of='2' must be a whole number"),
        ({"n": 0, "best_of": 2}, "n=0 must be from 1 to 1024"),
    ],
)
def test_invalid_best_of_is_rejected_with_way_out(given: dict[str, object], message: str):
    with pytest.raises(ValueError) as error_result:
        SamplingParams(**given)
    assert str(error_result.value) == message


@pytest.mark.parametrize("value", [0, -1])
def test_best_of_below_one_is_below_every_n(value: int):
    with pytest.raises(ValueError, match=rf"best_of={value} must .*least n=1:"):
        SamplingParams(best_of=value)


def test_best_of_is_a_row_key():
    assert SAMPLING_KEYS[:2] == ("n", "best_of")


# Names of vLLM: fields that are assigned, listed and inspected.

# The fields of vLLM 0.34's SamplingParams, private ones and those it fills itself aside.
VLLM_FIELDS = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
    *("prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs", "detokenize"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind"),
    *("stream_interval", "skip_clone", "structured_outputs", "logit_bias", "allowed_token_ids", "extra_args"),
    *("bad_words", "skip_reading_prefix_cache", "thinking_token_budget", "repetition_detection"),
    *("routed_experts_prompt_start", "trace_decode_token_ids", "watermarking"),
)


@pytest.mark.parametrize("name", VLLM_FIELDS)
def test_every_field_of_vllm_is_a_parameter(name: str):
    assert name in inspect.signature(SamplingParams).parameters
    assert name in SamplingParams.__struct_fields__
    assert hasattr(SamplingParams, name)
    assert SamplingParams(**{name: getattr(SamplingParams(), name)}) == SamplingParams()


def test_fields_are_assigned_as_the_constructor_takes_them():
    params = SamplingParams()
    params.stop, params.stop_token_ids, params.seed = ["a"], [3], 7
    params.logit_bias, params.temperature, params.output_kind = {"5": 1}, 1, 1
    assert params == SamplingParams(
        stop="a", stop_token_ids=(3,), seed=7, logit_bias={5: 1.0}, temperature=1.0, output_kind=RequestOutputKind.DELTA
    )
    with pytest.raises(AttributeError):
        params.stopp = ["a"]  # type: ignore[attr-defined]  # no such field, which is the point


def test_request_freezes_a_copy_of_its_parameters():
    """The caller's own stay assignable."""
    params = SamplingParams(extra_args={"a": 1}, output_kind=RequestOutputKind.DELTA, max_tokens=3)
    request = Request(0, (1,), params, 0)
    params.max_tokens = 4
    assert request.sampling == SamplingParams(max_tokens=3)
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"max_tokens=5: .*belong .*request"):
        request.sampling.max_tokens = 5
    assert request.sampling.frozen() is request.sampling
    changeable = request.sampling.clone()
    changeable.max_tokens = 5
    assert changeable == SamplingParams(max_tokens=5)


def test_assigned_values_are_checked_when_parameters_are_used():
    params = SamplingParams(max_tokens=4)
    params.min_tokens = 9
    for take in (params.frozen, params.clone, lambda: Request(0, (1,), params, 0)):
        with pytest.raises(ValueError, match="min_tokens=9 must not exceed max_tokens=4"):
            take()
    params.max_tokens = 9
    assert params.frozen() == SamplingParams(min_tokens=9, max_tokens=9)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_are_equal_and_assignable(copied):
    params = SamplingParams(stop=["a"], extra_args={"a": [1]}, logit_bias={3: 1.0}, seed=2**63)
    for source in (params, params.frozen()):
        made = copied(source)
        assert made == source
        made.n = 2
        assert source.n == 1


@pytest.mark.parametrize("copied", [SamplingParams.clone, copy.deepcopy])
def test_deep_copies_share_no_mutable_value(copied):
    params = SamplingParams(extra_args={"a": [1]})
    copied(params).extra_args["a"].append(2)
    assert params.extra_args == {"a": [1]}


def test_assignment_rejects_wrong_types_at_once():
    params = SamplingParams(n=2)
    for name, value in (("n", True), ("top_k", None), ("max_tokens", 2.0), ("skip_special_tokens", 1)):
        with pytest.raises(ValueError, match=name):
            setattr(params, name, value)
    assert params == SamplingParams(n=2)


@pytest.mark.parametrize("name", REJECTED)
def test_unsupported_parameter_says_reason_unless_it_asks_nothing(name: str):
    asked = {"regex": "a+"}
    with pytest.raises(ValueError) as error_result:
        SamplingParams(**{name: asked})
    assert str(error_result.value) == f"{name}={asked} is not supported: {REJECTED[name]}"
    assigned = SamplingParams()
    setattr(assigned, name, asked)
    with pytest.raises(ValueError, match=f"{name}=.* is not supported"):
        assigned.frozen()
    for nothing in (None, False, 0, [], {}):
        assert SamplingParams(**{name: nothing}).frozen() == SamplingParams()


def test_local_fields_are_neither_row_keys_nor_encoded():
    local = {*WITHOUT_EFFECT, *REJECTED, "output_kind", "guided_decoding"}
    assert not local & {*SAMPLING_KEYS}
    assert {*local, *SAMPLING_KEYS} == {*SamplingParams.__struct_fields__}
    params = SamplingParams(extra_args={"a": 1}, flat_logprobs=True, stream_interval=3, output_kind=0)
    assert params.frozen() == SamplingParams()


def test_foreign_output_kind_is_matched_by_name():
    theirs = enum.Enum("RequestOutputKind", {"CUMULATIVE": "a", "DELTA": "b", "FINAL_ONLY": "c"})
    assert SamplingParams(output_kind=theirs.DELTA).output_kind is RequestOutputKind.DELTA
    for wrong in (3, True, "DELTA", None):
        with pytest.raises(ValueError, match=rf"^output_kind={wrong!r} must .*CUMULATIVE, DELTA"):
            SamplingParams(output_kind=wrong)


def test_none_means_default_for_optional_parameters():
    made = SamplingParams.from_optional(n=None, temperature=0.5, max_tokens=None, stop=None)
    assert made == SamplingParams(temperature=0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids is empty: no token could be sampled; leave it out to allow all"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids: -1 must be a token id"),
        ({"bad_words": [""]}, "bad_words=[''] must be"),
        ({"bad_words": [" "]}, "bad_words=[' '] must be words"),
        ({"bad_words": ["a", "b\ud83d"]}, "bad_words: 'b\\ud83d' contains a lone surrogate"),
        ({"bad_words_ids": [[]]}, "bad_words_ids=[[]] must be a list of non-empty lists"),
        ({"bad_words_ids": [3]}, "bad_words_ids=[3] must be a list of non-empty lists"),
        ({"logprobs": -2}, "logprobs=-2 must be from 0 to 64, or -1 for the complete vocabulary"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 must be a number of tokens, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens=-2 must be a number of tokens, or -1"),
        ({"skip_reading_prefix_cache": 1}, "skip_reading_prefix_cache=1 must be true, false or null"),
        ({"flat_logprobs": None}, "flat_logprobs=None must be true or false"),
    ],
)
def test_value_that_breaks_a_rule_is_named(given: dict[str, object], message: str):
    with pytest.raises(ValueError) as error_result:
        SamplingParams(**given)
    assert str(error_result.value).startswith(message)


class Letters:
    """A tokenizer with a token a letter, but for "c" after a space, which is the same token as without."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [99] if text == " c" else [ord(each) for each in text if each != "~"]


def test_bad_word_is_forbidden_at_start_and_inside():
    assert bad_word_ids("c", Letters()) == [(ord("c"),)]
    assert bad_word_ids(" dog", Letters()) == [tuple(map(ord, "dog"))]
    assert bad_word_ids("c", type("Other", (Letters,), {"encode": lambda *_, **__: [1]})()) == [(1,)]
    with pytest.raises(ValueError, match=r"bad_words: .*'~'"):
        bad_word_ids("~", Letters())
    with pytest.raises(ValueError, match=r"bad_words need a tokenizer.json .*: use bad_words_ids"):
        bad_word_ids("c", None)


def test_resolved_parameters_are_in_token_ids_alone():
    params = SamplingParams(bad_words=["ab", "z"], bad_words_ids=[[4]], truncate_prompt_tokens=3)
    taken = resolve_params(params, Letters(), 122)
    # z is token 122, which a model of 122 tokens has not.
    assert taken == SamplingParams(bad_words_ids=[[4], [97, 98]])
    assert resolve_params(taken, None, 122) is taken


@pytest.mark.parametrize(("length", "expected"), [(None, 9), (3, 3), (9, 9), (90, 9), (-1, 4)])
def test_prompt_keeps_its_last_tokens(length: int | None, expected: int):
    prompt = tuple(range(9))
    sampling = SamplingParams(truncate_prompt_tokens=length, max_tokens=6)
    assert truncated_prompt(prompt, sampling, 10) == prompt[9 - expected :]


@pytest.mark.parametrize(
    ("own", "advised", "limit", "expected"),
    [(None, None, None, 16), (None, None, 8, 8), (None, 2048, 100, 100), (None, 5, 8, 5), (7, 2048, 8, 7)],
)
def test_default_of_max_tokens_is_within_the_limit(
    own: int | None, advised: int | None, limit: int | None, expected: int
):
    """A row without `max_tokens` was an error row if `limits.max_tokens` was below the default."""
    generation_config = {} if advised is None else {"max_new_tokens": advised}
    assert default_sampling(SamplingConfig(max_tokens=own), generation_config, limit).max_tokens == expected
