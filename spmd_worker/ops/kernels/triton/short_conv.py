"""Launch of short_conv_kernels.py."""

from torch import Tensor

from spmd_worker.ops.kernels.recurrent import StateSegments
from spmd_worker.ops.kernels.triton import short_conv_kernels
from spmd_worker.ops.kernels.triton.launching import power_of_two, segment_arguments


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor, segments: StateSegments, *, has_silu: bool
) -> Tensor:
    """`RecurrentKernels.short_conv`, with the bits of the reference without silu. Rows of padding are arbitrary."""
    (num_tokens, num_channels), num_taps = x.shape, weight.shape[1]
    assert num_taps > 1, weight.shape
    assert tails.is_contiguous(), tails.stride()
    assert tails.shape[1:] == (num_taps - 1, num_channels), (tails.shape, weight.shape)
    assert tails.dtype == x.dtype, (tails.dtype, x.dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty((num_tokens, num_channels))
    if out.numel() and len(segments.slots):
        grid = (len(segments.slots), -(-num_channels // short_conv_kernels.BC))
        short_conv_kernels.short_conv[grid](
            *(x, weight.contiguous(), bias, tails, *segment_arguments(segments), out),
            *(num_channels, x.stride(0)),
            **conv_constants(
                num_taps, has_bias=bias is not None, has_silu=has_silu, has_kept=segments.kept is not None
            ),
            **short_conv_kernels.LAUNCH,
        )
    return out


def conv_constants(num_taps: int, *, has_bias: bool, has_silu: bool, has_kept: bool = False) -> dict[str, int | bool]:
    """Constexprs of `short_conv_kernels.short_conv`."""
    return {
        "TAPS": num_taps,
        "PAST": power_of_two(num_taps - 1),
        "HAS_BIAS": has_bias,
        "HAS_SILU": has_silu,
        "HAS_KEPT": has_kept,
        "BT": short_conv_kernels.BT,
        "BC": short_conv_kernels.BC,
    }
