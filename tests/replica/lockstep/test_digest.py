"""Equal histories have equal digests; any difference, now or earlier, changes them."""

import dataclasses
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from step_records import messages
from test_codec import CHANGES, FULL_MESSAGE, message_with

from kv_cache.block_ops import BlockOps
from spmd_worker.replica.lockstep.difference import record_of
from spmd_worker.replica.lockstep.digest import NUM_DIGEST_BYTES, ChainedDigest
from spmd_worker.replica.lockstep.wire.codec import decode_message, encode_message
from spmd_worker.replica.sequence.events import (
    Abort,
    Close,
    CommitWeights,
    EndRound,
    EndWorkerEvent,
    FinishTransfers,
    ResetPrefixCache,
    SetWeightVersion,
    WorkerEvent,
)
from spmd_worker.replica.sequence.sampling_params import SAMPLING_KEYS, SamplingParams


def digest_of(*found) -> bytes:
    chain = ChainedDigest()
    for message in found:
        chain.update(record_of(message))
    return chain.value


@given(messages)
@examples(60)
def test_decoded_message_has_digest_of_original(message):
    assert digest_of(decode_message(encode_message(message))) == digest_of(message)


@given(st.lists(messages, min_size=2, max_size=2))
@examples(60)
def test_different_steps_have_different_digests(pair):
    first, second = (dataclasses.replace(message, digest=b"") for message in pair)
    assert (digest_of(first) == digest_of(second)) == (first == second)


def test_every_record_change_has_its_own_digest():
    digests = [digest_of(changed) for _, changed in [("", FULL_MESSAGE), *CHANGES]]
    for number, (path, changed) in enumerate(CHANGES, start=1):
        for other in range(number):
            if digests[other] == digests[number]:
                assert other > 0, path
                assert changed == CHANGES[other - 1][1], (path, CHANGES[other - 1][0])


@pytest.mark.parametrize(
    "changed",
    [
        {"n": 2},
        {"best_of": 1},
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.5},
        {"seed": 0},
        {"max_tokens": None},
        {"min_tokens": 1},
        {"stop": ("a", "b")},
        {"stop_token_ids": (1,)},
        {"include_stop_str_in_output": True},
        {"ignore_eos": True},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"presence_penalty": -0.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.5},
        {"logit_bias": {1: 2.0}},
        {"detokenize": False},
        {"skip_special_tokens": False},
        {"structured_outputs": {"regex": "a+"}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_sampling_parameter_counts(changed):
    assert digest_of(message_with(SamplingParams(**changed))) != digest_of(message_with(SamplingParams()))
    assert set(changed) <= set(SAMPLING_KEYS)


def test_list_entries_do_not_run_together():
    one = digest_of(message_with(SamplingParams(stop=("ab", "c"))))
    assert one != digest_of(message_with(SamplingParams(stop=("a", "bc"))))
    plan = dataclasses.replace(FULL_MESSAGE.plan, block_ops=BlockOps(swap_in=((1, 2),)))
    moved = dataclasses.replace(FULL_MESSAGE.plan, block_ops=BlockOps(swap_out=((1, 2),)))
    assert digest_of(dataclasses.replace(FULL_MESSAGE, plan=plan)) != digest_of(
        dataclasses.replace(FULL_MESSAGE, plan=moved)
    )


def test_moves_and_events_have_separate_digests():
    """The same numbers under every name, and every event of the cache: no two digests are equal."""
    pair = ((1, 2),)
    moves = [
        *(BlockOps(swap_in=pair), BlockOps(swap_out=pair), BlockOps(copy=pair), BlockOps(store=pair)),
        *(BlockOps(load=pair), BlockOps(transfer=1), BlockOps(load=pair, transfer=1), BlockOps()),
    ]
    events = [(), (ResetPrefixCache(),), (SetWeightVersion(0),), (SetWeightVersion(1),), (FinishTransfers(()),)]
    events += [(FinishTransfers((1,)),), (FinishTransfers((1, 2)),), (FinishTransfers((1,)), FinishTransfers((2,)))]
    events += [(Abort(0),), (Close(),), (EndRound(),), (WorkerEvent(1, "a", b"b"),), (WorkerEvent(1, "ab", b""),)]
    events += [(EndWorkerEvent(1, ""),), (EndWorkerEvent(1, "a"),), (CommitWeights(0, 1),), (CommitWeights(1, 0),)]
    plans = [dataclasses.replace(FULL_MESSAGE.plan, block_ops=each) for each in moves]
    found = [dataclasses.replace(FULL_MESSAGE, plan=plan, events=each) for plan in plans for each in events]
    assert len(dict.fromkeys(map(digest_of, found))) == len(moves) * len(events) == 136


def test_digest_keeps_an_early_difference_for_ever():
    changed = dataclasses.replace(FULL_MESSAGE, sampled_token_ids=(11, 21, 31, 33))
    rest = [FULL_MESSAGE] * 5
    assert digest_of(changed, *rest) != digest_of(FULL_MESSAGE, *rest)
    assert digest_of(FULL_MESSAGE, *rest) == digest_of(FULL_MESSAGE, *rest)


def test_chained_digest_begins_at_its_start_value():
    chain = ChainedDigest(start=bytes([1]) * NUM_DIGEST_BYTES)
    other = ChainedDigest()
    assert chain.update(record_of(FULL_MESSAGE)) != other.update(record_of(FULL_MESSAGE))
    assert len(chain.value) == NUM_DIGEST_BYTES == 16


@pytest.mark.stress
def test_digest_is_equal_in_every_process():
    """A literal, and another process with another hash seed."""
    code = "import test_digest as t; print(t.digest_of(t.FULL_MESSAGE).hex())"
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert found == [digest_of(FULL_MESSAGE).hex()] * 2
