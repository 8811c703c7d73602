"""Outputs as bytes, for the ranks of other replicas, and back: equal to the last bit.

JSON, whose objects keep the order of their keys: the order of a position's tokens has a meaning.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spmd_worker.replica.sequence.outputs import CompletionOutput, Logprob, RequestOutput
from spmd_worker.replica.sequence.prompt_scores import PromptScores
from spmd_worker.replica.sequence.sampling_mask import SamplingMask

_ARRAY: Final = "array"
_RECORDS: Final[Mapping[str, type]] = {"sampling_mask": SamplingMask, "prompt_scores": PromptScores}
"""Records of arrays, by the fields that have them."""
_OWN: Final = ("metrics",)
"""Fields that differ from rank to rank."""


def encode_outputs(outputs: Mapping[int, RequestOutput]) -> bytes:
    """Encode `outputs`, by index of their prompt."""
    # Not strict JSON: log-probabilities may be minus infinity. ASCII escapes: a lone surrogate has no UTF-8.
    return json.dumps(list(outputs.items()), default=_fields).encode("ascii")


def decode_outputs(payload: bytes) -> dict[int, RequestOutput]:
    """The inverse of `encode_outputs`."""
    outputs = {}
    for index, values in json.loads(payload):
        values = _with_arrays(values)
        for completion in values["outputs"]:
            completion["logprobs"] = _positions(completion["logprobs"])
            completion["weight_versions"] = [tuple(span) for span in completion["weight_versions"]]
        values["outputs"] = [CompletionOutput(**completion) for completion in values["outputs"]]
        values["prompt_logprobs"] = _positions(values["prompt_logprobs"])
        spans = values["prompt_weight_versions"]
        values["prompt_weight_versions"] = None if spans is None else [tuple(span) for span in spans]
        outputs[index] = RequestOutput(**values)
    return outputs


def _fields(record: Any) -> Any:
    """Fields by name, without those that differ from rank to rank; faster than `dataclasses.asdict`. An array's type,
    shape and bytes.
    """
    if isinstance(record, np.ndarray):
        return {_ARRAY: [record.dtype.str, list(record.shape), base64.b64encode(record.tobytes()).decode("ascii")]}
    return {spec.name: getattr(record, spec.name) for spec in fields(record) if spec.name not in _OWN}


def _with_arrays(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request, with arrays and their records, in completions too."""
    found = {name: _with_array(name, value) for name, value in values.items()}
    return found | {"outputs": [{name: _with_array(name, each[name]) for name in each} for each in values["outputs"]]}


def _with_array(name: str, value: Any) -> Any:
    if name in _RECORDS and value is not None:
        return _RECORDS[name](**{each: _with_array(each, value[each]) for each in value})
    if isinstance(value, dict) and list(value) == [_ARRAY]:
        kind, shape, data = value[_ARRAY]
        array: NDArray[Any] = np.frombuffer(base64.b64decode(data), dtype=kind).reshape(shape)
        return array
    return value


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
