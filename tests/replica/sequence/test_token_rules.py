"""TokenRules as a record: normalised, checked, sent, and part of what a row needs."""

import pytest

from spmd_worker import SamplingParams, TimestampRules, TokenRules
from spmd_worker.replica.lockstep.wire.packing import ByteReader, ByteWriter
from spmd_worker.replica.lockstep.wire.record_codec import codec_of
from spmd_worker.replica.sequence.token_rules import as_token_rules

STAMPS = {"first_token_id": 9, "end_token_id": 4}
FULL = {
    "first_tokens": [3],
    "forced_tokens": [5, 6],
    "suppress_tokens": [1],
    "begin_suppress_tokens": [2],
    "forced_eos_token_id": 4,
    "min_new_tokens": 3,
    "no_repeat_ngram_size": 2,
    "timestamps": STAMPS,
}


def test_mapping_becomes_the_record_and_back_from_bytes():
    params = SamplingParams(token_rules=FULL).frozen()
    rules = params.token_rules
    assert rules == TokenRules((3,), (5, 6), (1,), (2,), 4, 3, 2, TimestampRules(9, 4))
    assert (rules.begin_index, rules.needs_output_ids, len(rules)) == (3, True, 8)
    writer, codec = ByteWriter(), codec_of(SamplingParams)
    codec.write(writer, [params, SamplingParams().frozen()])
    assert codec.read(ByteReader(bytes(writer.data), len(writer.data)), 2) == [params, SamplingParams()]


def test_empty_rules_are_kept_until_a_folder_has_some():
    assert SamplingParams(token_rules=None).token_rules is None
    for empty in ({}, {"suppress_tokens": []}, {"no_repeat_ngram_size": None}, TokenRules()):
        assert SamplingParams(token_rules=empty).token_rules == TokenRules()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, r"token_rules=5 must be a mapping"),
        ({"suppress": [1]}, r"token_rules: unknown key 'suppress'\. Known keys: first_tokens"),
        ({"suppress_tokens": 3}, r"token_rules\.suppress_tokens=3 must be a list"),
        ({"forced_tokens": [-1]}, r"token_rules\.forced_tokens=-1 must be a whole number"),
        ({"no_repeat_ngram_size": True}, r"token_rules\.no_repeat_ngram_size=True must be"),
        ({"forced_eos_token_id": 1.5}, r"token_rules\.forced_eos_token_id=1\.5 must be"),
        ({"timestamps": {"first_token_id": 4}}, r"token_rules\.timestamps\."),
        ({"timestamps": {**STAMPS, "end_token_id": 9}}, r"first_token_id=9 must be above end_token_id=9"),
    ],
)
def test_bad_rules_are_named(value: object, message: str):
    with pytest.raises(ValueError, match=message):
        as_token_rules(value)
    with pytest.raises(ValueError, match=message):
        SamplingParams(token_rules=value)


def test_rules_decide_what_a_row_needs():
    plain, fixed, full = (
        SamplingParams(temperature=0, token_rules=each) for each in (None, {"suppress_tokens": [1]}, FULL)
    )
    assert [each.needs_argmax_only for each in (plain, fixed, full)] == [True, False, False]
    assert [each.needs_output_ids for each in (plain, fixed, full)] == [False, False, True]
    assert [each.forbids_tokens for each in (plain, fixed, full)] == [False, True, True]
    full.check_vocabulary(10)
    with pytest.raises(ValueError, match="token_rules: token id 9 is outside the vocabulary of 9 tokens"):
        full.check_vocabulary(9)
