"""Layouts of two ranks as parameters of a test. Brings no transformers, which takes ranks seconds."""

import pytest

on_two_ranks = pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.stress),
        pytest.param({"data_parallel_size": 2}, marks=pytest.mark.stress),
    ],
    ids=str,
)
