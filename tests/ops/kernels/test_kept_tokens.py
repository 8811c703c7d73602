"""Recurrent kernels that keep the leading tokens of a segment: bits of whole segments, and of segments cut there."""

from dataclasses import replace

import pytest
import torch
from kept_tokens import NUM_TAPS, cases_of, check_control, check_kept
from native_builds import library_for
from native_libraries import each_vector_library
from state_segments import segments_of

from spmd_worker.ops.kernels.cpu.recurrent import NativeRecurrentKernels
from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels

REFERENCE = ReferenceRecurrentKernels()
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.mark.guarantee("Drafts leave no trace in a recurrent state, accepted or not")
@each_dtype
def test_reference_keeps_leading_tokens(dtype: torch.dtype):
    assert check_kept(REFERENCE, dtype) == []


@pytest.mark.guarantee("Drafts leave no trace in a recurrent state, accepted or not")
@each_vector_library
@each_dtype
def test_compiled_kernels_keep_leading_tokens(instruction_set: str, dtype: torch.dtype):
    assert check_kept(NativeRecurrentKernels(library_for(instruction_set)), dtype) == []


@pytest.mark.control("Drafts leave no trace in a recurrent state, accepted or not")
def test_comparison_detects_kept_drafts():
    for kernels in (REFERENCE, NativeRecurrentKernels(library_for("native"))):
        check_control(kernels, torch.float32)


def test_kernels_reject_impossible_kept_tokens():
    native, whole = NativeRecurrentKernels(library_for("native")), segments_of((2, NUM_TAPS, 0), (-1, 3, 0))
    for kept in ([0, 1], [NUM_TAPS + 1, 1], [1]):
        segments = replace(whole, kept=torch.tensor(kept, dtype=torch.int32))
        for kernels in (REFERENCE, native):
            for name, call, given, states in cases_of(kernels, torch.float32):
                before = states.clone()
                with pytest.raises(AssertionError):
                    call(given, states, segments)
                assert torch.equal(states, before), name
    for _, call, given, states in cases_of(native, torch.float32):
        with pytest.raises(AssertionError):
            call(given, states, replace(whole, kept=torch.tensor([1, 1])))
