"""Experts of a run that stay in memory as its checkpoint has them, if the device's kernels decode them."""

from spmd_worker.ranks.stored_experts import NO_STORED_EXPERTS, StoredExperts, find_stored_experts
from spmd_worker.resolved import ResolvedRun


def stored_experts_of(resolved: ResolvedRun) -> StoredExperts:
    """The layers whose experts stay as they are stored, on a device whose kernels can."""
    options, model_config = resolved.config.model, resolved.model_config
    is_asked_for = options.quantization is None and not options.dequantize_experts
    if not is_asked_for or model_config.quantization is None or options.load_format == "dummy":
        return NO_STORED_EXPERTS
    found = find_stored_experts(model_config, resolved.layout)
    if found.formats and options.allow_nonfinite:
        return StoredExperts({}, "model.allow_nonfinite=true, and kernels decode finite weights")
    return found


def planned_stored_experts(resolved: ResolvedRun) -> StoredExperts:
    """`stored_experts_of` for the device backend that the run is likely to get."""
    backend = resolved.config.executor.device_backend
    is_triton = backend == "triton" or (backend == "auto" and resolved.device_type == "cuda")
    return stored_experts_of(resolved) if is_triton else NO_STORED_EXPERTS
