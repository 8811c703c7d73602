"""Windows of long audio: nothing is lost or heard twice, and cuts are where vLLM makes them."""

import math

import numpy as np
import pytest

from spmd_worker.media.audio_windows import AudioWindow, Samples, windows

RATE = 16_000


def noise(num_samples: int, seed: int = 0) -> Samples:
    levels = np.random.default_rng(seed).standard_normal(num_samples)
    return (levels * (1.1 + np.sin(np.arange(num_samples) / 777 + seed)) / 9).astype(np.float32)


def cuts_of_vllm(samples: Samples, window_s: int) -> list[int]:
    """vllm/multimodal/audio.py and entrypoints/openai/speech_to_text.py, as they split audio."""
    cuts, start = [], 0
    while start + window_s * RATE < len(samples):
        end = start + window_s * RATE
        segment, least = samples[end - RATE : end], math.inf
        for i in range(0, len(segment) - 1600, 1600):
            energy = float((segment[i : i + 1600].astype(np.float64) ** 2).mean() ** 0.5)
            if energy < least:
                start, least = end - RATE + i, energy
        cuts.append(start)
    return cuts


def starts_of(found: list[AudioWindow]) -> list[int]:
    return [round(each.start_s * RATE) for each in found[1:]]


def check(found: list[AudioWindow], samples: Samples, num_samples: int) -> None:
    """All samples, once and in order, in windows that an encoder takes whole."""
    assert np.array_equal(np.concatenate([each.samples for each in found]), samples)
    ends = [0.0]
    for each in found:
        assert each.start_s == ends[-1]
        assert 0 < len(each.samples) <= num_samples
        ends.append(each.end_s)
    assert ends[-1] == len(samples) / RATE


@pytest.mark.guarantee("Long audio is cut without a sample lost or heard twice")
@pytest.mark.parametrize("seconds", [0.01, 29.9, 30, 30.0001, 61, 95.5])
def test_windows_are_those_of_vllm(seconds: float):
    samples = noise(round(seconds * RATE), round(seconds))
    found = windows(samples, 30 * RATE)
    check(found, samples, 30 * RATE)
    assert starts_of(found) == cuts_of_vllm(samples, 30)
    assert len(found) == max(math.ceil(seconds / 30), 1)


@pytest.mark.control("Long audio is cut without a sample lost or heard twice")
def test_overlap_and_loss_are_noticed():
    samples = noise(40 * RATE)
    first, second = windows(samples, 30 * RATE)
    for start in (-1, 1):
        bad = second._replace(samples=samples[round(second.start_s * RATE) + start :])
        with pytest.raises(AssertionError):
            check([first, bad], samples, 30 * RATE)


def test_cut_is_at_the_silence():
    samples = np.full(35 * RATE, 0.5, np.float32)
    samples[round(29.4 * RATE) : round(29.6 * RATE)] = 0
    assert [each.end_s for each in windows(samples, 30 * RATE)] == [29.4, 35.0]


def test_silence_is_cut_at_the_first_place():
    assert [each.start_s for each in windows(np.zeros(70 * RATE, np.float32), 30 * RATE)] == [0, 29, 58]


def test_short_windows_are_cut_in_their_second_half():
    """Of tiny models, whose windows are no longer than what is searched."""
    samples = noise(5 * RATE)
    found = windows(samples, RATE)
    check(found, samples, RATE)
    assert all(len(each.samples) >= RATE // 2 for each in found[:-1])


def test_cuts_do_not_depend_on_what_follows():
    samples = noise(100 * RATE)
    whole, part = windows(samples, 30 * RATE), windows(samples[: 65 * RATE], 30 * RATE)
    assert starts_of(part) == starts_of(whole)[: len(part) - 1]
