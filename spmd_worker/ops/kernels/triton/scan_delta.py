"""Launches of scan_delta_kernels.py."""

from torch import Tensor

from spmd_worker.model_config.layer_config import DeltaConfig
from spmd_worker.ops.kernels.recurrent import DeltaRates, NormRule, StateSegments
from spmd_worker.ops.kernels.triton import scan_delta_kernels
from spmd_worker.ops.kernels.triton.launching import power_of_two, segment_arguments


def scan_delta(
    mixed: Tensor, rates: DeltaRates, states: Tensor, segments: StateSegments, config: DeltaConfig
) -> Tensor:
    """`RecurrentKernels.scan_delta`. Rows of padding are arbitrary."""
    a, b, a_log, dt_bias = rates
    num_heads, key_size, value_size = config.num_value_heads, config.key_size, config.value_size
    assert mixed.shape[1] == config.num_channels, (mixed.shape, config)
    assert states.is_contiguous(), states.stride()
    assert states.shape[1:] == (num_heads, key_size, value_size), (states.shape, config)
    mixed, a, b = (each if each.stride(1) == 1 else each.contiguous() for each in (mixed, a, b))
    out = mixed.new_empty((len(mixed), num_heads, value_size))
    if out.numel() and len(segments.slots):
        # Neighbouring columns at once, and padding last.
        grid = (-(-value_size // scan_delta_kernels.BV), num_heads, len(segments.slots))
        scan_delta_kernels.scan_delta[grid](
            *(mixed, a, b, a_log, dt_bias, states, *segment_arguments(segments), out),
            *(config.num_key_heads, num_heads, mixed.stride(0), a.stride(0), b.stride(0)),
            *(config.beta_scale, key_size**-0.5, config.decay_bound),
            **scan_constants(config, has_kept=segments.kept is not None),
            **scan_delta_kernels.SCAN,
        )
    return out


def scan_constants(config: DeltaConfig, *, has_kept: bool = False) -> dict[str, int | bool]:
    """Constexprs of `scan_delta_kernels.scan_delta`."""
    return {
        "DK": config.key_size,
        "DV": config.value_size,
        "BK": power_of_two(config.key_size),
        "BV": scan_delta_kernels.BV,
        "IS_PER_CHANNEL": config.is_per_channel,
        "IS_BOUNDED": config.decay_bound != 0.0,
        "HAS_KEPT": has_kept,
    }


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, rule: NormRule) -> Tensor:
    """`RecurrentKernels.gated_norm`."""
    num_rows, num_groups, size = len(x), rule.num_groups, x.shape[1] // rule.num_groups
    assert x.shape == gate.shape == (num_rows, num_groups * size), (x.shape, gate.shape, num_groups)
    assert len(weight) in (size, num_groups * size), (weight.shape, x.shape, num_groups)
    x, gate = (each if each.stride(1) == 1 else each.contiguous() for each in (x, gate))
    out = x.new_empty(x.shape)
    if out.numel():
        scan_delta_kernels.gated_norm[(num_rows, num_groups)](
            *(x, gate, weight.contiguous(), out, size, x.stride(0), gate.stride(0)),
            *(0 if len(weight) == size else size, rule.eps),
            **norm_constants(size, rule),
            **scan_delta_kernels.LAUNCH,
        )
    return out


def norm_constants(size: int, rule: NormRule) -> dict[str, int | bool]:
    """Constexprs of `scan_delta_kernels.gated_norm`."""
    flags = {"GATES_FIRST": rule.gates_first, "ROUNDS_ONCE": rule.rounds_once}
    return {"BN": power_of_two(size), "IS_SIGMOID": rule.activation == "sigmoid", **flags}
