"""Weights of a run that stay in memory as its checkpoint has them, if the device's kernels decode them."""

from dataclasses import replace

from spmd_worker.ranks.stored_weights import NOTHING_STORED, StoredWeights, find_stored_experts, find_stored_panels
from spmd_worker.resolved import ResolvedRun


def planned_stored_weights(resolved: ResolvedRun) -> StoredWeights:
    """Those of the device backend that the run is likely to get, with compiled kernels on a CPU."""
    backend = resolved.config.executor.device_backend
    kind = {"cuda": "triton", "cpu": "cpu"}.get(resolved.device_type, "") if backend == "auto" else backend
    find = {"triton": stored_experts_of, "cpu": stored_panels_of}.get(kind)
    return NOTHING_STORED if find is None else find(resolved)


def stored_experts_of(resolved: ResolvedRun) -> StoredWeights:
    """The experts that stay on GPUs whose kernels decode them."""
    if not _is_asked_for(resolved):
        return NOTHING_STORED
    return _unless_nonfinite(find_stored_experts(resolved.model_config, resolved.layout), resolved)


def stored_panels_of(resolved: ResolvedRun) -> StoredWeights:
    """The weights that stay on CPUs whose kernels expand them."""
    if not _is_asked_for(resolved):
        return NOTHING_STORED
    found, options = find_stored_panels(resolved.model_config, resolved.layout), resolved.config.model
    if found.formats and options.merged_adapter is not None:
        return replace(found, formats={}, reason="model.lora_merge adds to them")
    if found.formats and resolved.dtype != "bfloat16":
        reason = f"the run computes in {resolved.dtype}, and with model.dtype=bfloat16 they stay as stored"
        return replace(found, formats={}, reason=reason)
    return _unless_nonfinite(found, resolved)


def _is_asked_for(resolved: ResolvedRun) -> bool:
    options = resolved.config.model
    is_asked_for = options.quantization is None and not options.dequantize_weights
    return is_asked_for and resolved.model_config.quantization is not None and options.load_format != "dummy"


def _unless_nonfinite(found: StoredWeights, resolved: ResolvedRun) -> StoredWeights:
    if found.formats and resolved.config.model.allow_nonfinite:
        return replace(found, formats={}, reason="model.allow_nonfinite=true, and kernels decode finite weights")
    return found
