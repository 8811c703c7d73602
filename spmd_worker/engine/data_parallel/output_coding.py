"""Outputs as bytes, for the ranks of other replicas, and back: equal to the last bit.

JSON, whose objects keep the order of their keys: the order of a position's tokens has a meaning.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from spmd_worker.replica.sequence.outputs import CompletionOutput, Logprob, RequestOutput


def encode_outputs(outputs: Mapping[int, RequestOutput]) -> bytes:
    """Encode `outputs`, by index of their prompt."""
    # Not strict JSON: log-probabilities may be minus infinity. ASCII escapes: a lone surrogate has no UTF-8.
    return json.dumps(list(outputs.items()), default=_fields).encode("ascii")


def decode_outputs(payload: bytes) -> dict[int, RequestOutput]:
    """The inverse of `encode_outputs`."""
    outputs = {}
    for index, values in json.loads(payload):
        for completion in values["outputs"]:
            completion["logprobs"] = _positions(completion["logprobs"])
            completion["weight_versions"] = [tuple(span) for span in completion["weight_versions"]]
        values["outputs"] = [CompletionOutput(**completion) for completion in values["outputs"]]
        values["prompt_logprobs"] = _positions(values["prompt_logprobs"])
        spans = values["prompt_weight_versions"]
        values["prompt_weight_versions"] = None if spans is None else [tuple(span) for span in spans]
        outputs[index] = RequestOutput(**values)
    return outputs


def _fields(record: RequestOutput | CompletionOutput) -> dict[str, Any]:
    """Fields by name, without `metrics`, which differ from rank to rank; faster than `dataclasses.asdict`."""
    return {spec.name: getattr(record, spec.name) for spec in fields(record) if spec.name != "metrics"}


def _positions(positions: list[dict[str, list[Any]] | None] | None) -> list[Any] | None:
    """The inverse of JSON's text keys and lists; positions keep the order of their tokens."""
    if positions is None:
        return None
    return [
        None
        if entries is None
        else {
            int(token_id): Logprob(logprob, rank, token, None if token_bytes is None else tuple(token_bytes))
            for token_id, (logprob, rank, token, token_bytes) in entries.items()
        }
        for entries in positions
    ]
