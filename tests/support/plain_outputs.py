"""Outputs as plain values, for files and comparisons. Imports no torch."""

from dataclasses import asdict, replace
from typing import Any

from spmd_worker import RequestOutput


def without_times(output: RequestOutput) -> dict[str, Any]:
    """The fields that are equal in every run."""
    outputs = [replace(each, weight_versions=[]) for each in output.outputs]
    return asdict(replace(output, metrics=None, outputs=outputs, prompt_weight_versions=None))
