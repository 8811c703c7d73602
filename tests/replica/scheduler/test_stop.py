"""When a sequence ends: ids, lengths, and stop strings in text that arrives in pieces.

The decoder of these tests turns token i into `PIECES[i]`, and holds back what a real one would (half a character).
"""

import random
import re

import pytest
from scheduler_runs import EOS, Run
from tokenizer_folders import write_llama_style

from spmd_worker.replica.scheduler import stop
from spmd_worker.replica.scheduler.stop import StopChecker, first_match
from spmd_worker.replica.sequence.repetition import RepetitionDetectionParams
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import FinishReason, Sequence
from spmd_worker.tokenizer.incremental_decoder import IncrementalDecoder
from spmd_worker.tokenizer.tokenizer import Tokenizer

PIECES = ["", "a", "b", "ab", "X", "Y", "XY", "|", "\n", "stop", "☃"]
HELD_BACK = 99
"""Stands for half a character: it shows with the next token, or at the end."""


class FakeDecoder:
    """Text of tokens, piece by piece."""

    def __init__(self) -> None:
        self._held = ""

    def append(self, token_ids: list[int]) -> str:
        text = ""
        for token in token_ids:
            if token == HELD_BACK:
                self._held += "?"
            else:
                text, self._held = text + self._held + PIECES[token], ""
        return text

    def held(self) -> str:
        return ""

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def repeats(most: int, least: int, count: int) -> dict[str, object]:
    return {"repetition_detection": {"max_pattern_size": most, "min_pattern_size": least, "min_count": count}}


def ending(tokens: list[int], max_model_len: int = 1000, num_prompt_tokens: int = 3, **sampling: object) -> Sequence:
    """Feed tokens until the checker says that the sequence has ended, which must be at the last one or never."""
    checker = StopChecker((EOS,), max_model_len, lambda sequence: FakeDecoder())
    params = SamplingParams(**{"max_tokens": None, **sampling})
    sequence = Sequence(Request(RequestId(0), (1,) * num_prompt_tokens, params, 0), 0)
    for index, token in enumerate(tokens):
        sequence.output_token_ids.append(token)
        if checker.has_ended(sequence):
            assert index == len(tokens) - 1, f"ended early, at token {index}"
            return sequence
    assert sequence.finish_reason is None
    return sequence


@pytest.mark.parametrize(
    ("tokens", "sampling", "reason", "stop_reason"),
    [
        ([5, EOS], {}, FinishReason.STOP, None),
        ([5, EOS, 5], {"ignore_eos": True}, None, None),
        ([EOS, 5, EOS], {"min_tokens": 2}, FinishReason.STOP, None),
        ([5, 7], {"stop_token_ids": [7]}, FinishReason.STOP, 7),
        ([5, 7], {"stop_token_ids": [7], "ignore_eos": True}, FinishReason.STOP, 7),
        ([7, 7], {"stop_token_ids": [7], "min_tokens": 2}, FinishReason.STOP, 7),
        ([5, EOS], {"stop_token_ids": [EOS], "ignore_eos": True}, FinishReason.STOP, EOS),
        ([5, 5, 5], {"max_tokens": 3}, FinishReason.LENGTH, None),
        ([5, 5, EOS], {"max_tokens": 3}, FinishReason.STOP, None),
        ([5, 5], {"max_tokens": 3}, None, None),
        ([5, 5, 5], {"max_tokens": 3, "min_tokens": 3}, FinishReason.LENGTH, None),
        ([4, 5, 5, 5], {**repeats(1, 1, 3)}, FinishReason.REPETITION, "repetition_detected"),
        ([4, 5, 4, 5, 4, 5], {**repeats(2, 2, 3)}, FinishReason.REPETITION, "repetition_detected"),
        ([4, 5, 4, 5, 4], {**repeats(4, 1, 3)}, None, None),
        ([5, 5, 5, 5], {**repeats(1, 0, 2), "min_tokens": 4}, FinishReason.REPETITION, "repetition_detected"),
        ([5, 5, 5], {**repeats(1, 0, 3), "max_tokens": 3}, FinishReason.LENGTH, None),
        ([EOS, EOS], {**repeats(2, 0, 2), "ignore_eos": True}, FinishReason.REPETITION, "repetition_detected"),
        ([5] * 9, {"repetition_detection": {"max_pattern_size": 0, "min_count": 2}}, None, None),
    ],
)
def test_ids_and_lengths_end_a_sequence(tokens, sampling, reason, stop_reason):
    sequence = ending(tokens, **sampling)
    assert (sequence.finish_reason, sequence.stop_reason) == (reason, stop_reason)


def test_model_length_ends_sequence_despite_its_own_limits():
    assert ending([5, 5], max_model_len=5, num_prompt_tokens=3).finish_reason is FinishReason.LENGTH
    assert ending([5], max_model_len=5, num_prompt_tokens=3, min_tokens=40).finish_reason is None
    assert ending([5, 5], max_model_len=5, num_prompt_tokens=3, min_tokens=40).finish_reason is FinishReason.LENGTH


@pytest.mark.guarantee("Stop strings, also across tokens")
@pytest.mark.parametrize(
    ("tokens", "sampling", "text", "stop_reason"),
    [
        ([1, 6], {"stop": "XY"}, "a", "XY"),
        ([1, 4, 5], {"stop": "XY"}, "a", "XY"),
        ([1, 4, 5], {"stop": "XY", "include_stop_str_in_output": True}, "aXY", "XY"),
        ([4, 4, 5], {"stop": "XY"}, "X", "XY"),
        ([1, 4, 2, 5], {"stop": "XY"}, "aXbY", None),
        ([3, 3], {"stop": "bab"}, "a", "bab"),
        ([3, 3], {"stop": ["bab", "abab"]}, "", "abab"),
        ([6], {"stop": ["Y", "X"]}, "", "X"),
        ([6], {"stop": ["X", "XY"]}, "", "XY"),
        ([1, 8], {"stop": ["\n"]}, "a", "\n"),
        ([10], {"stop": ["☃"]}, "", "☃"),
        ([4, 5, 4, 5], {"stop": "XY", "min_tokens": 3}, "XYXY"[:2], "XY"),
        # The last of the first `min_tokens` completes none, and what it completes is not looked at later.
        ([4, 5, 4, 5], {"stop": "XY", "min_tokens": 4}, "XYXY", None),
        ([4, 5, 4, 5, 1], {"stop": "XY", "min_tokens": 4}, "XYXYa", None),
        ([4, 5, 4, 5, 6], {"stop": "XY", "min_tokens": 4}, "XYXY", "XY"),
        ([1, 4, 5], {"stop": "XY", "min_tokens": 2}, "a", "XY"),
        ([4, 5, 4, 1], {"stop": "XY", "min_tokens": 3}, "XYXa", None),
    ],
)
def test_stop_strings_end_sequence_across_token_boundaries(tokens, sampling, text, stop_reason):
    sequence = ending(tokens, ignore_eos=True, **sampling)
    assert (sequence.text, sequence.stop_reason) == (text, stop_reason)
    assert sequence.finish_reason is (FinishReason.STOP if stop_reason else None)


def test_token_longer_than_stop_string_is_cut():
    assert ending([9], stop="t", ignore_eos=True).text == "s"
    assert ending([9], stop="t", include_stop_str_in_output=True, ignore_eos=True).text == "st"


def test_partial_character_is_searched_once_complete():
    sequence = ending([1, HELD_BACK, 5], stop="?Y", ignore_eos=True)
    assert (sequence.text, sequence.stop_reason) == ("a", "?Y")


def test_held_back_text_joins_at_the_end():
    assert ending([1, HELD_BACK, EOS], stop="never").text == "a?"
    assert ending([1, HELD_BACK], stop="never", max_tokens=2).text == "a?"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_text_of_stop_token_follows_stop_string_rule(include: bool, text: str):
    """It was part of the text whatever was asked for; vLLM leaves it out."""
    sequence = ending([1, 2], stop="never", stop_token_ids=[2], include_stop_str_in_output=include)
    assert (sequence.text, sequence.stop_reason) == (text, 2)


def test_stop_token_precedes_stop_string_in_same_token():
    sequence = ending([1, 4], stop="X", stop_token_ids=[4])
    assert (sequence.text, sequence.stop_reason) == ("a", 4)


def test_sequences_without_stop_strings_are_not_decoded():
    checker = StopChecker((EOS,), 1000, None)
    sequence = Sequence(Request(RequestId(0), (1,), SamplingParams(max_tokens=2), 0), 0, [4])
    assert not checker.has_ended(sequence)
    assert sequence.text is None


def test_samples_of_one_request_are_decoded_separately():
    run = Run(new_decoder=lambda sequence: FakeDecoder())
    run.admit(4, n=2, stop="XY", max_tokens=10)
    run.step(lambda key, position: [4, 5][key.sample_index])
    run.step(lambda key, position: [5, 4][key.sample_index])
    run.step(5)
    run.step(1)
    first, second = run.ended[0].sequences
    assert (first.output_token_ids, first.text, first.stop_reason) == ([4, 5], "", "XY")
    assert (second.output_token_ids, second.text, second.stop_reason) == ([5, 4, 5], "Y", "XY")


def test_aborted_request_keeps_its_text():
    run = Run(new_decoder=lambda sequence: FakeDecoder())
    run.admit(4, stop="XY", max_tokens=10)
    run.step(1)
    run.step(HELD_BACK)
    assert run.abort(0).sequences[0].text == "a?"


@pytest.mark.parametrize(
    ("text", "stops", "searched", "expected"),
    [
        ("abcabc", ("c",), 0, (2, "c")),
        ("abcabc", ("c",), 3, (5, "c")),
        ("abcabc", ("ca",), 3, (2, "ca")),
        ("abcabc", ("ca",), 4, None),
        ("abcabc", ("bc", "abc"), 0, (0, "abc")),
        ("abcabc", ("x",), 0, None),
        ("", ("x",), 0, None),
    ],
)
def test_matches_are_found_only_in_new_text(text, stops, searched, expected):
    assert first_match(text, stops, searched) == expected


@pytest.mark.control("Stop strings, also across tokens")
def test_stop_test_detects_search_from_new_text(monkeypatch: pytest.MonkeyPatch, control):
    """Negative control: then a stop string across a token boundary is missed."""
    monkeypatch.setattr(stop, "first_match", lambda text, stops, old: first_match(text[old:], stops, 0))
    with control():
        test_stop_strings_end_sequence_across_token_boundaries([1, 4, 5], {"stop": "XY"}, "a", "XY")


NEWLINE = "<0x0A>"


@pytest.mark.parametrize(
    ("tokens", "sampling", "expected"),
    [
        # At once, not with the next word or at the end of a run.
        (["▁a", NEWLINE], {}, (" a", FinishReason.STOP, "\n")),
        (["▁a", NEWLINE], {"max_tokens": 2}, (" a", FinishReason.STOP, "\n")),
        (["▁a", NEWLINE], {"include_stop_str_in_output": True}, (" a\n", FinishReason.STOP, "\n")),
        (["▁a", NEWLINE, NEWLINE], {"stop": "\n\n"}, (" a", FinishReason.STOP, "\n\n")),
        (["▁a", *[f"<0x{byte:02X}>" for byte in "☃".encode()]], {"stop": "☃"}, (" a", FinishReason.STOP, "☃")),
        # Part of one is nothing yet, and what is no text is none.
        (["▁a", *[f"<0x{byte:02X}>" for byte in "☃".encode()[:2]]], {"stop": ["☃", "\ufffd"]}, None),
        (["▁a", NEWLINE, "</s>"], {"stop": "x"}, (" a\n", FinishReason.STOP, None)),
        # What came before `min_tokens` is not looked at later.
        (["▁a", NEWLINE, "▁b", "▁a"], {"min_tokens": 3}, None),
        (["▁a", NEWLINE, NEWLINE], {"min_tokens": 2}, (" a\n", FinishReason.STOP, "\n")),
        (["▁a", NEWLINE, NEWLINE], {"min_tokens": 3}, None),
        # Bytes that are no text are none of these.
        (["▁a", NEWLINE, "<0xE2>", "▁b"], {"min_tokens": 3}, None),
    ],
)
def test_stop_string_of_fallback_bytes_ends_sequence_immediately(tmp_path, tokens, sampling, expected):
    """SentencePiece spells a newline so, and the decoder holds it until it knows how the run ends."""
    tokenizer = Tokenizer.open(write_llama_style(tmp_path))
    ids = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>"])}
    ids |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    ids |= {word: tokenizer.encode(word.removeprefix("▁"), False)[0] for word in ("▁a", "▁b")}
    checker = StopChecker((2,), 1000, lambda _: IncrementalDecoder(tokenizer, tokenizer.encode("b", False)))
    params = SamplingParams(**{"stop": "\n", "max_tokens": 9, **sampling})
    sequence = Sequence(Request(RequestId(0), (1,), params, 0), 0)
    has_ended = False
    for token in tokens:
        assert not has_ended, "ended early"
        sequence.output_token_ids.append(ids[token])
        has_ended = checker.has_ended(sequence)
    assert has_ended == (expected is not None)
    if expected is not None:
        assert (sequence.text, sequence.finish_reason, sequence.stop_reason) == expected


def test_repetitions_are_those_of_a_plain_comparison():
    """Each tail of random answers of two tokens, cut into patterns; in three of four none is found."""
    generator, num_found, num_tried = random.Random(3), 0, 0
    for _ in range(300):
        tokens = generator.choices([3, 4], k=generator.randrange(1, 25))
        most, count = generator.randrange(1, 7), generator.randrange(2, 5)
        least = generator.randrange(most + 1)
        found = RepetitionDetectionParams(most, least, count).is_found(tokens)
        tails = [tokens[-size * count :] for size in range(max(least, 1), most + 1) if size * count <= len(tokens)]
        assert found == any(tail == tail[: len(tail) // count] * count for tail in tails)
        num_found, num_tried = num_found + found, num_tried + 1
    assert 0.1 < num_found / num_tried < 0.5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "repetition_detection=3 must be a mapping with max_pattern_size, min_pattern_size, min_count"),
        ({"max_size": 3}, "repetition_detection: unknown key 'max_size'"),
        ({"max_pattern_size": 3, "min_count": 1}, "repetition_detection.min_count=1 must be 2 or more"),
        ({"min_pattern_size": 3}, "min_pattern_size=3 must not exceed max_pattern_size=0"),
        ({"max_pattern_size": 1.5}, "max_pattern_size=1.5 must be a whole number from 0 to 4096"),
    ],
)
def test_patterns_that_cannot_be_are_named(given: object, words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        SamplingParams(repetition_detection=given)
