"""The number of drafts: room of the step, and what the row accepted."""

import pytest

from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.replica.drafts.rule import NUM_REMEMBERED, PROBE_EVERY, num_drafts, record_drafts
from tests.support.draft_rows import row

CONFIG = SpeculativeConfig(method="suffix", num_speculative_tokens=16, max_step_tokens=24)


@pytest.mark.parametrize(
    ("num_decoding", "num_prompt_tokens", "expected"),
    [(1, 0, 12), (2, 0, 11), (8, 0, 2), (12, 0, 1), (13, 0, 0), (24, 0, 0), (64, 0, 0), (1, 20, 3), (4, 500, 0)],
)
def test_drafts_fill_the_step(num_decoding: int, num_prompt_tokens: int, expected: int):
    assert num_drafts(CONFIG, num_decoding, num_decoding + num_prompt_tokens, row([1])) == expected


@pytest.mark.parametrize(("num_decoding", "expected"), [(16, 7), (17, 6), (32, 3), (33, 0), (60, 0), (128, 0)])
def test_many_rows_need_room_for_several(num_decoding: int, expected: int):
    config = SpeculativeConfig(method="suffix", max_step_tokens=128)
    assert num_drafts(config, num_decoding, num_decoding, row([1])) == expected


def test_failing_row_drafts_only_with_probes():
    sequence = row([1], [7] * (PROBE_EVERY + 1))
    for _ in range(10):
        record_drafts(sequence, 16, 0)
    assert num_drafts(CONFIG, 1, 1, sequence) == 0
    sequence.output_token_ids.pop()
    probe = num_drafts(CONFIG, 1, 1, sequence)
    assert 0 < probe < 4
    for _ in range(4):
        record_drafts(sequence, probe, probe)
        sequence.output_token_ids += [7] * (probe + 1)
    assert num_drafts(CONFIG, 1, 1, sequence) >= probe


def test_accepting_row_drafts_as_many_as_allowed():
    sequence = row([1])
    assert num_drafts(CONFIG, 1, 1, sequence) == 12
    for _ in range(20):
        record_drafts(sequence, 16, 16)
        assert num_drafts(CONFIG, 1, 1, sequence) == 16
        assert sequence.num_drafted < NUM_REMEMBERED


def test_limit_falls_with_the_share_accepted():
    limits = []
    for num_accepted in (8, 4, 2, 1):
        sequence = row([1])
        for _ in range(20):
            record_drafts(sequence, 8, num_accepted)
        limits.append(num_drafts(CONFIG, 1, 1, sequence))
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > limits[-1] > 0
