"""Outputs as bytes, for the ranks of other replicas, and back: equal to the last bit.

JSON, with token ids that are keys as first entries of lists, because the order of a position's tokens has a meaning.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from spmd_worker.replica.sequence.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs


def encode_outputs(outputs: Mapping[int, RequestOutput]) -> bytes:
    """Encode `outputs`, by index of their prompt."""
    # Not strict JSON: log-probabilities may be minus infinity. ASCII escapes: a lone surrogate has no UTF-8.
    return json.dumps([[index, _plain(output)] for index, output in outputs.items()]).encode("ascii")


def decode_outputs(payload: bytes) -> dict[int, RequestOutput]:
    """The inverse of `encode_outputs`."""
    return {index: _output(fields) for index, fields in json.loads(payload)}


def _plain(output: RequestOutput) -> dict[str, Any]:
    values = _values(output)
    values["outputs"] = [_plain_completion(completion) for completion in output.outputs]
    if output.prompt_logprobs is not None:
        values["prompt_logprobs"] = [None if each is None else _entries(each) for each in output.prompt_logprobs]
    return values


def _plain_completion(completion: CompletionOutput) -> dict[str, Any]:
    values = _values(completion)
    if completion.logprobs is not None:
        values["logprobs"] = [_entries(each) for each in completion.logprobs]
    return values


def _values(record: RequestOutput | CompletionOutput) -> dict[str, Any]:
    """Fields by name, without those that differ from rank to rank; `dataclasses.asdict` would copy every token and
    log-probability.
    """
    return {spec.name: getattr(record, spec.name) for spec in fields(record) if spec.compare}


def _entries(logprobs: TokenLogprobs) -> list[list[Any]]:
    return [[token_id, *entry] for token_id, entry in logprobs.items()]


def _output(values: dict[str, Any]) -> RequestOutput:
    completions = [_completion(each) for each in values.pop("outputs")]
    positions = values.pop("prompt_logprobs")
    return RequestOutput(
        **values,
        outputs=completions,
        prompt_logprobs=None
        if positions is None
        else [None if each is None else _position(each) for each in positions],
    )


def _completion(values: dict[str, Any]) -> CompletionOutput:
    positions = values.pop("logprobs")
    return CompletionOutput(**values, logprobs=None if positions is None else [_position(each) for each in positions])


def _position(entries: list[list[Any]]) -> TokenLogprobs:
    return {
        token_id: Logprob(logprob, rank, token, None if own_bytes is None else tuple(own_bytes))
        for token_id, logprob, rank, token, own_bytes in entries
    }
