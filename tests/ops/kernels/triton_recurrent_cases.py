"""Kernels of recurrent states, interpreted on CPU tensors: see triton_cases.py, whose process and words these share.

TRITON_INTERPRET=1 python tests/ops/kernels/triton_recurrent_cases.py       prints {case: what went wrong, or ""}
python tests/ops/kernels/triton_recurrent_cases.py cuda                     the same on a GPU
"""

import json
import sys
from collections.abc import Callable

import torch
from state_segments import segments_of
from triton_cases import run

from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels
from spmd_worker.ops.kernels.triton.launching import is_interpreted
from spmd_worker.ops.kernels.triton.recurrent import TritonRecurrentKernels

KERNELS, REFERENCE = TritonRecurrentKernels(), ReferenceRecurrentKernels()
NAN = float("nan")


def convolutions_are_the_references() -> None:
    """Long and short sequences, one that begins in a slot full of NaN, and padding that changes nothing."""
    for num_taps, num_channels, dtype in ((3, 70, torch.float32), (7, 64, torch.float16), (4, 5, torch.float32)):
        segments = segments_of((4, 1, 9), (3, 40, 0), (-1, 2, 5), (0, 2, 3), (2, 37, 64))
        x = torch.randn(82, num_channels + 3).to(dtype)[:, 1 : num_channels + 1]
        weight, bias = torch.randn(num_channels, num_taps).to(dtype), torch.randn(num_channels).to(dtype)
        tails = torch.randn(6, num_taps - 1, num_channels).to(dtype)
        tails[3], kept = NAN, torch.ones(82, dtype=torch.bool)
        kept[41:43] = False
        for added, has_silu in ((None, False), (bias, True)):
            found, expected = tails.clone(), tails.clone()
            y = KERNELS.short_conv(x, weight, added, found, segments, has_silu=has_silu)
            z = REFERENCE.short_conv(x, weight, added, expected, segments, has_silu=has_silu)
            assert torch.equal(found, expected)
            if has_silu:
                torch.testing.assert_close(y[kept], z[kept])
            else:
                assert torch.equal(y[kept], z[kept])


def a_convolution_cut_anywhere_has_the_same_bits() -> None:
    x, weight, bias = torch.randn(70, 6), torch.randn(6, 4), torch.randn(6)
    whole, tail = (torch.zeros(1, 3, 6) for _ in range(2))
    expected = KERNELS.short_conv(x, weight, bias, whole, segments_of((0, 70, 0)), has_silu=True)
    for chunk in (2, 33, 64):
        parts = [
            KERNELS.short_conv(part, weight, bias, tail, segments_of((0, len(part), first * chunk)), has_silu=True)
            for first, part in enumerate(x.split(chunk))
        ]
        assert torch.equal(torch.cat(parts), expected), chunk
        assert torch.equal(tail, whole), chunk


CASES: tuple[Callable[[], None], ...] = (convolutions_are_the_references, a_convolution_cut_anywhere_has_the_same_bits)


def main() -> None:
    torch.set_default_device("cuda" if "cuda" in sys.argv else "cpu")
    assert is_interpreted() == ("cuda" not in sys.argv), "set TRITON_INTERPRET=1, or say cuda"
    torch.set_num_threads(1)
    print(json.dumps({case.__name__: run(case) for case in CASES}))


if __name__ == "__main__":
    main()
