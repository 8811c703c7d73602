"""Options and devices with which experts stay as they are stored, and what a plan says of them."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from stored_checkpoints import StackingKernels, write_stored

from spmd_worker import LLM
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import ExecutorConfig, ModelOptions, RunConfig
from spmd_worker.model_config.stored_format import EXPERTS, MXFP4
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.resolved import ResolvedRun, resolve_run
from spmd_worker.worker.backends.backend import DeviceBackend, Operations
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan
from spmd_worker.worker.stored_weights import planned_stored_weights, stored_experts_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stored(tmp_path_factory.mktemp("stored") / "mxfp4", "mxfp4")


def resolved(folder: Path, device: str = "cuda", backend: str = "auto", **options: object) -> ResolvedRun:
    model = ModelOptions(path=str(folder), **options)  # type: ignore[arg-type]  # a table has no types
    run = RunConfig(model, ParallelConfig(), executor=ExecutorConfig(device_backend=backend), device=device)
    return resolve_run(run, device)


def test_options_decide_whether_experts_stay_as_stored(folder: Path):
    assert stored_experts_of(resolved(folder)).formats == {each: {EXPERTS: MXFP4} for each in (0, 1)}
    for options in ({"dequantize_weights": True}, {"load_format": "dummy"}):
        found = stored_experts_of(resolved(folder, **options))
        assert (found.formats, found.reason) == ({}, "")
    found = stored_experts_of(resolved(folder, allow_nonfinite=True))
    assert found.formats == {}
    assert "allow_nonfinite" in found.reason
    plain = resolved(folder)
    plain = replace(plain, model_config=replace(plain.model_config, quantization=None))
    assert stored_experts_of(plain).formats == {}


def test_plan_counts_stored_experts_on_gpus_alone(folder: Path):
    for device, backend, stays in (
        ("cuda", "auto", True),
        ("cuda", "triton", True),
        ("cuda", "torch", False),
        ("cpu", "auto", False),
    ):
        run = resolved(folder, device, backend)
        assert bool(planned_stored_weights(run).formats) == stays, (device, backend)
    text = describe_plan(make_plan(resolved(folder)))
    assert "experts stay in MXFP4 in 2 layers, other weights are dequantised" in text
    plan, dequantised = (make_plan(resolved(folder, dequantize_weights=each)) for each in (False, True))
    assert plan.shares[0].weights_bytes < dequantised.shares[0].weights_bytes
    assert "dequantised to" in describe_plan(dequantised)


class Device(DeviceBackend):
    """Decodes experts, or says so: nothing is computed here."""

    decodes = True

    def operations(self) -> Operations:
        return Operations(StackingKernels(), SdpaBackend(), decodes_experts=self.decodes)


class OtherDevice(Device):
    decodes = False


def said(folder: Path, name: str, caplog: pytest.LogCaptureFixture, **options: object) -> tuple[list[str], str]:
    """Lines about experts, and the dtype in which they are held."""
    caplog.clear()
    settings = {"device": "cpu", "dtype": "float32", "num_blocks": 16, "max_model_len": 64, **options}
    with caplog.at_level(logging.INFO), LLM(folder, device_backend=f"{__name__}.{name}", **settings) as llm:
        model = llm.llm_engine.executor.driver_worker.model_runner.model
        lines = [each for each in caplog.messages if "experts are dequantised" in each]
        return lines, str(model.sparse_layers[0].experts["0"].down_proj.weight.dtype)


def test_experts_that_are_dequantised_are_said_once(folder: Path, caplog: pytest.LogCaptureFixture):
    assert said(folder, "Device", caplog) == ([], "torch.uint8")
    (line,), dtype = said(folder, "Device", caplog, allow_nonfinite=True)
    assert (dtype, "allow_nonfinite" in line) == ("torch.float32", True)
    # Who asks for it knows, and other devices never had another way.
    assert said(folder, "Device", caplog, dequantize_weights=True) == ([], "torch.float32")
    assert said(folder, "OtherDevice", caplog, allow_nonfinite=True) == ([], "torch.float32")
