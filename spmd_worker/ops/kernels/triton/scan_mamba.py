"""Launch of scan_mamba_kernels.py."""

from torch import Tensor

from spmd_worker.model_config.layer_config import MambaConfig
from spmd_worker.ops.kernels.recurrent import MambaRates, StateSegments
from spmd_worker.ops.kernels.triton import scan_mamba_kernels
from spmd_worker.ops.kernels.triton.launching import power_of_two, segment_arguments


def scan_mamba(
    mixed: Tensor, rates: MambaRates, states: Tensor, segments: StateSegments, config: MambaConfig
) -> Tensor:
    """`RecurrentKernels.scan_mamba`. Rows of padding are arbitrary."""
    dt, a_log, dt_bias, skip = rates
    num_heads, size, num_tokens = config.num_heads, config.head_size, len(mixed)
    assert mixed.shape[1] == config.num_channels, (mixed.shape, config)
    assert dt.shape == (num_tokens, num_heads), (dt.shape, config)
    assert states.is_contiguous(), states.stride()
    assert states.shape[1:] == (num_heads, size, config.state_size), (states.shape, config)
    mixed, dt = (each if each.stride(1) == 1 else each.contiguous() for each in (mixed, dt))
    out = mixed.new_empty((num_tokens, config.num_columns))
    if out.numel() and len(segments.slots):
        # Neighbouring rows at once, and padding last.
        grid = (-(-size // scan_mamba_kernels.BP), num_heads, len(segments.slots))
        scan_mamba_kernels.scan_mamba[grid](
            *(mixed, dt, a_log, dt_bias, skip, states, *segment_arguments(segments), out),
            *(num_heads, config.num_groups, mixed.stride(0), dt.stride(0), *config.dt_limits),
            **mamba_constants(config, has_kept=segments.kept is not None),
            **scan_mamba_kernels.LAUNCH,
        )
    return out


def scan_mamba1(x: Tensor, shared: Tensor, rates: MambaRates, states: Tensor, segments: StateSegments) -> Tensor:
    """`RecurrentKernels.scan_mamba1`. Rows of padding are arbitrary."""
    dt, a_log, dt_bias, skip = rates
    (num_tokens, num_channels), size = x.shape, shared.shape[1] // 2
    assert dt.shape == x.shape, (dt.shape, x.shape)
    assert states.is_contiguous(), states.stride()
    assert states.shape[1:] == a_log.shape == (num_channels, size), (states.shape, a_log.shape, x.shape)
    x, dt, shared = (each if each.stride(1) == 1 else each.contiguous() for each in (x, dt, shared))
    out = x.new_empty((num_tokens, num_channels))
    if out.numel() and len(segments.slots):
        # Neighbouring channels at once, and padding last.
        constants = mamba1_constants(size, has_kept=segments.kept is not None)
        grid = (-(-num_channels // constants["BC"]), len(segments.slots))
        scan_mamba_kernels.scan_mamba1[grid](
            *(x, dt, shared, a_log, dt_bias, skip, states, *segment_arguments(segments), out),
            *(num_channels, x.stride(0), dt.stride(0), shared.stride(0)),
            **constants,
            **scan_mamba_kernels.LAUNCH,
        )
    return out


def mamba1_constants(state_size: int, *, has_kept: bool = False) -> dict[str, int | bool]:
    """Constexprs of `scan_mamba_kernels.scan_mamba1`."""
    width = power_of_two(state_size)
    return {
        "N": state_size,
        "BC": max(scan_mamba_kernels.TILE // width, 1),
        "BN": width,
        "HAS_KEPT": has_kept,
    }


def mamba_constants(config: MambaConfig, *, has_kept: bool = False) -> dict[str, int | bool]:
    """Constexprs of `scan_mamba_kernels.scan_mamba`."""
    return {
        "P": config.head_size,
        "N": config.state_size,
        "BP": scan_mamba_kernels.BP,
        "BN": power_of_two(config.state_size),
        "HAS_KEPT": has_kept,
    }
