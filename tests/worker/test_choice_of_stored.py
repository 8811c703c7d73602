"""Options and devices with which weights stay as they are stored, and what a plan says of them."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from stored_checkpoints import StackingKernels, write_stored

from spmd_worker import LLM
from spmd_worker.base.config.compose import compose_run
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import ExecutorConfig, ModelOptions, RunConfig
from spmd_worker.base.errors import ConfigError
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


def test_options_decide_whether_4_bits_stay(tmp_path: Path):
    gptq = write_stored(tmp_path / "gptq", "gptq")
    for options, device, backend, reason in (
        ({}, "cpu", "auto", None),
        ({}, "cpu", "cpu", None),
        ({}, "cpu", "torch", ""),
        # Its experts alone could.
        ({}, "cpu", "triton", ""),
        ({"dtype": "float32"}, "cpu", "auto", "computes in float32, and with model.dtype=bfloat16 they stay as stored"),
        ({"dequantize_weights": True}, "cpu", "auto", ""),
        ({"quantization": "int8"}, "cpu", "auto", ""),
        ({"load_format": "dummy"}, "cpu", "auto", ""),
        ({"lora_merge": "/adapter"}, "cpu", "auto", "model.lora_merge adds to them"),
        ({"allow_nonfinite": True}, "cpu", "auto", "model.allow_nonfinite=true"),
        ({}, "cuda", "auto", ""),
    ):
        found = planned_stored_weights(resolved(gptq, device, backend, **{"dtype": "bfloat16", **options}))
        assert bool(found.formats) == (reason is None), (options, device, backend)
        assert (reason or "") in found.reason, options
        assert bool(found.reason) == bool(reason), options
    kept, dequantised = (
        make_plan(resolved(gptq, "cpu", dtype="bfloat16", dequantize_weights=each)) for each in (False, True)
    )
    assert kept.shares[0].weights_bytes < dequantised.shares[0].weights_bytes


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
    settings = {"device_backend": f"{__name__}.{name}", **settings}
    with caplog.at_level(logging.INFO), LLM(folder, **settings) as llm:
        model = llm.llm_engine.executor.driver_worker.model_runner.model
        lines = [each for each in caplog.messages if "are dequantised: " in each]
        layer = model.sparse_layers[0].experts["0"] if model.sparse_layers else model.model.layers[0].mlp
        return lines, str(layer.down_proj.weight.dtype)


def test_experts_that_are_dequantised_are_said_once(folder: Path, caplog: pytest.LogCaptureFixture):
    assert said(folder, "Device", caplog) == ([], "torch.uint8")
    (line,), dtype = said(folder, "Device", caplog, allow_nonfinite=True)
    assert (dtype, "allow_nonfinite" in line) == ("torch.float32", True)
    # Who asks for it knows, and other devices never had another way.
    assert said(folder, "Device", caplog, dequantize_weights=True) == ([], "torch.float32")
    assert said(folder, "OtherDevice", caplog, allow_nonfinite=True) == ([], "torch.float32")


def test_old_name_of_the_option_names_the_new(folder: Path):
    with pytest.raises(TypeError, match="no keyword dequantize_experts: did you mean dequantize_weights"):
        LLM(folder, dequantize_experts=True)
    with pytest.raises(ConfigError, match=r"no key model.dequantize_experts; did you mean model.dequantize_weights"):
        compose_run(Path("conf"), ["model.dequantize_experts=true"])


def test_weights_that_are_dequantised_are_said_once(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """On kernels that take 4 bits as stored."""
    device, others = "row_panels.PanelDevice", write_stored(tmp_path / "others", "w4a16", intermediate_size=200)
    for each in (folder, write_stored(tmp_path / "fits", "gptq")):
        settings = {"device_backend": device, "dtype": "bfloat16"}
        assert said(each, "", caplog, **settings) == ([], "torch.uint8")
        assert said(each, "", caplog, **settings, dequantize_weights=True) == ([], "torch.bfloat16")
        (line,), dtype = said(each, "", caplog, **settings | {"dtype": "float32"})
        assert (dtype, "weights are dequantised: the run computes in float32" in line) == ("torch.float32", True)
    (line,), dtype = said(others, "", caplog, **settings)
    assert (dtype, line) == (
        "torch.bfloat16",
        "some weights are dequantised: layer 0, mlp.gate_up_proj: 400 outputs and 128 inputs, a rank's share, are not "
        "multiples of 32 and 32",
    )
