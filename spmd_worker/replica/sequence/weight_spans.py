"""Spans of tokens by the version of the weights that made them: (first token, version), in order, none empty."""

from collections.abc import Iterable

WeightSpans = tuple[tuple[int, int], ...]
"""Each span ends where the next begins; the last one is open, and two neighbours differ in their version."""


def begin_span(spans: WeightSpans, first_token: int, version: int) -> WeightSpans:
    """`spans` if weights of `version` make token `first_token` and those after it."""
    return _joined((*[span for span in spans if span[0] < first_token], (first_token, version)))


def replace_span(spans: WeightSpans, first_token: int, stop_token: int, version: int, num_tokens: int) -> WeightSpans:
    """`spans` of `num_tokens` tokens if weights of `version` made [first_token, stop_token) again."""
    stops = [start for start, _ in spans[1:]] + [num_tokens]
    after = [(max(start, stop_token), each) for (start, each), stop in zip(spans, stops) if stop > stop_token]
    return _joined((*begin_span(spans, first_token, version), *after))


def spans_of(spans: WeightSpans, num_tokens: int, first_token: int = 0) -> list[tuple[int, int]]:
    """`spans` of tokens [first_token, num_tokens), counted from `first_token`."""
    stops = [start for start, _ in spans[1:]] + [num_tokens]
    return [
        (max(start - first_token, 0), version)
        for (start, version), stop in zip(spans, stops)
        if stop > first_token and start < num_tokens
    ]


def _joined(spans: Iterable[tuple[int, int]]) -> WeightSpans:
    """`spans` with neighbours of one version as one."""
    joined: list[tuple[int, int]] = []
    for span in spans:
        if not joined or joined[-1][1] != span[1]:
            joined.append(span)
    return tuple(joined)
