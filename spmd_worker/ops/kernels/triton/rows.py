"""Launches of row_kernels.py."""

from torch import Tensor

from spmd_worker.ops.kernels.triton import row_kernels
from spmd_worker.ops.kernels.triton.launching import power_of_two

_WIDE_ROW = 2048
_ROTATED = 1024
"""Pairs of numbers that a program rotates."""
_GATED = 1024
"""Outputs of a program with gates."""


def row_options(width: int) -> dict[str, int]:
    """Launch options for rows of `width`. Warps share a row's sum, so their number depends on the width alone."""
    return row_kernels.LAUNCH | {"num_warps": 8 if power_of_two(width) > _WIDE_ROW else 4}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H] -> [..., H]: see `row_kernels.add_rms_norm`."""
    x, width = x.contiguous(), x.shape[-1]
    out = x.new_empty(x.shape)
    if out.numel():
        row_kernels.add_rms_norm[(x.numel() // width,)](
            x, x, weight, out, width, eps, BH=power_of_two(width), ADDS=False, **row_options(width)
        )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[T, H] + [T, H] -> the norm of the sum, which `residual` becomes; both contiguous."""
    assert residual.is_contiguous(), residual.stride()
    x, width = x.contiguous(), x.shape[-1]
    out = x.new_empty(x.shape)
    if out.numel():
        row_kernels.add_rms_norm[(x.numel() // width,)](
            x, residual, weight, out, width, eps, BH=power_of_two(width), ADDS=True, **row_options(width)
        )
    return out


def full_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, offset: float, is_centred: bool) -> Tensor:
    """[..., H] -> [..., H]: see `row_kernels.full_norm`."""
    x, width = x.contiguous(), x.shape[-1]
    out = x.new_empty(x.shape)
    if out.numel():
        row_kernels.full_norm[(x.numel() // width,)](
            *(x, weight, bias, out, width, eps, float(offset)),
            BH=power_of_two(width),
            CENTRED=is_centred,
            BIAS=bias is not None,
            **row_options(width),
        )
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[..., 2 N] -> [..., N]: see `row_kernels.silu_and_mul`."""
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = rows.new_empty((len(rows), width))
    if out.numel():
        columns = min(_GATED, power_of_two(width))
        row_kernels.silu_and_mul[(len(rows), -(-width // columns))](
            *(rows, out, width, rows.stride(0)), BN=columns, **row_kernels.LAUNCH
        )
    return out.view(*gate_up.shape[:-1], width)


def rotate_and_write(
    projected: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, slots: Tensor, num_heads: int
) -> None:
    """projected [T, (Hq + 2 * Hkv) * D], cos and sin [T, D / 2], `layer_cache` [blocks, 2, Hkv, block, D], slots int32
    [T]: see `row_kernels.rotate_and_write`.
    """
    _, _, num_kv_heads, block_size, head_size = layer_cache.shape
    assert projected.is_contiguous(), projected.stride()
    if not len(projected):
        return
    constants = rotate_constants(num_heads, num_kv_heads, head_size, block_size)
    num_programs = -(-(num_heads + 2 * num_kv_heads) // constants["EACH"])
    row_kernels.rotate_and_write[(len(projected), num_programs)](
        *(projected, cos.contiguous(), sin.contiguous(), layer_cache, slots, layer_cache.stride(0)),
        **constants,
        **row_kernels.LAUNCH,
    )


def rotate_constants(num_heads: int, num_kv_heads: int, head_size: int, block_size: int) -> dict[str, int]:
    """Constexprs of `row_kernels.rotate_and_write`."""
    half = power_of_two(head_size // 2)
    each = max(1, min(power_of_two(num_heads + 2 * num_kv_heads), _ROTATED // half))
    return {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "D": head_size,
        "HALF": half,
        "BLOCK": block_size,
        "EACH": each,
    }


def write_rows(key: Tensor, value: Tensor | None, layer_cache: Tensor, slots: Tensor) -> None:
    """Keys and values [T, Hkv, D], the rest as of `rotate_and_write`: see `row_kernels.write_rows`. None: keys alone,
    in a cache [blocks, 1, Hkv, block, D].
    """
    _, num_parts, num_kv_heads, block_size, head_size = layer_cache.shape
    assert num_parts == 1 + (value is not None), layer_cache.shape
    if not len(key):
        return
    has_values, value = value is not None, key if value is None else value
    # A token's heads must be contiguous; tokens may be strided.
    key, value = (each if each.stride()[1:] == (head_size, 1) else each.contiguous() for each in (key, value))
    row_kernels.write_rows[(len(key), num_kv_heads)](
        *(key, value, layer_cache, slots, key.stride(0), value.stride(0), layer_cache.stride(0)),
        KV_HEADS=num_kv_heads,
        D=head_size,
        DP=power_of_two(head_size),
        BLOCK=block_size,
        VALUES=has_values,
        num_warps=1,
        **row_kernels.LAUNCH,
    )
