"""The same rules for all sources of weights: a start, a reload, a trainer's tensors, `apply_model`."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expert_models import changed, new_model
from family_checkpoints import family_folder
from joined_models import PLAIN
from native_builds import WITH_AMX, library_for
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model.weights import store
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.topology import Stage

DOWN = "model.layers.1.mlp.down_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"

Bring = Callable[[DecoderForCausalLM, Path], object]


def plain_model(*, is_packed: bool = True, allows_nonfinite: bool = False) -> DecoderForCausalLM:
    kernels = CpuKernels(library_for(WITH_AMX))
    context = LayerContext(single_group(), kernels, SdpaBackend(), torch.float32, torch.device("cpu"))
    model = build_model(context, PLAIN, allows_nonfinite=allows_nonfinite)
    model.weights.fill(model.weights.dummy())
    if is_packed:
        model.weights.pack()
    return model


def tensors_of(model: DecoderForCausalLM) -> dict[str, Tensor]:
    with model.as_checkpoint() as view:
        return {name: each.detach().clone() for name, each in view.named_parameters()}


def start(model: DecoderForCausalLM, folder: Path) -> None:
    del model
    fresh = plain_model(is_packed=False)
    with fresh.weights.open(folder) as source:
        fresh.weights.fill(source)


def reload(model: DecoderForCausalLM, folder: Path) -> None:
    with model.weights.open(folder) as source:
        model.weights.reload(source)


def load(model: DecoderForCausalLM, folder: Path) -> None:
    model.load_weights(load_file(folder / "model.safetensors").items())


def apply(model: DecoderForCausalLM, folder: Path) -> None:
    with model.as_checkpoint() as view:
        view.load_state_dict(load_file(folder / "model.safetensors"))


each_way = pytest.mark.parametrize("bring", [start, reload, load, apply])


def written(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


@each_way
def test_nonfinite_element_is_named_for_every_source(bring: Bring, tmp_path: Path):
    model = plain_model()
    tensors = tensors_of(model)
    tensors[DOWN][3, 5] = -torch.inf
    folder = written(tmp_path / "bad", tensors)
    with pytest.raises(CheckpointError, match=r" -inf at \[3, 5\], .*finite .*torch\.float32"):
        bring(model, folder)
    assert torch.isfinite(tensors_of(model)[DOWN]).all(), "the weight is as it was"
    if bring in (start, reload):
        with pytest.raises(CheckpointError, match=re.escape(f"{folder / 'model.safetensors'}: tensor '{DOWN}' has")):
            bring(model, folder)
    allowing = plain_model(allows_nonfinite=True)
    if bring is not start:
        bring(allowing, folder)
        assert not torch.isfinite(tensors_of(allowing)[DOWN]).all()


@each_way
def test_comparison_detects_store_without_finiteness_check(
    bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Negative control."""
    monkeypatch.setattr(store, "check_finite", lambda *_: None)
    with pytest.raises(pytest.fail.Exception):
        test_nonfinite_element_is_named_for_every_source(bring, tmp_path)


def test_float32_weights_are_checked_in_float32(tmp_path: Path):
    """A start accepted a number too large for float16, and a reload rejected it."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[ROUTER][0, 0] = 1e6

    folder = changed("qwen3_moe", tmp_path / "large", change)
    model = new_model(folder, dtype=torch.float16)
    with model.weights.open(folder) as source:
        model.weights.reload(source)
    assert ROUTER in model.load_weights([(ROUTER, load_file(folder / "model.safetensors")[ROUTER])])
    assert {name for name, each in model.weights.tensors.items() if each.is_float32} >= {ROUTER}
    other = ROUTER.replace("gate.weight", "experts.0.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"not finite in torch\.float16"):
        model.load_weights([(other, torch.full(model.weights.shapes[other], 1e6))])


def test_every_stage_checks_tensors_of_all_stages(tmp_path: Path):
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.input_layernorm.weight"]
        tensors["model.layers.1.more"] = torch.zeros(1)

    folder = changed("qwen3_moe", tmp_path / "other", change)
    for stage in (Stage(0, 1, is_first=True, is_last=False), Stage(1, 2, is_first=False, is_last=True)):
        with pytest.raises(CheckpointError) as caught:
            new_model(folder, stage=stage)
        assert "1 missing from the checkpoint:\n  model.layers.1.input_layernorm.weight" in str(caught.value)
        assert "1 in the checkpoint but not in the model:\n  model.layers.1.more" in str(caught.value)


def test_optional_prefix_may_be_omitted_per_name(tmp_path: Path):
    folder = family_folder("gpt2")
    model_config, tensors = read_model_files(folder).model_config, load_file(folder / "model.safetensors")
    some = {name.removeprefix("transformer.") if ".h.1." in name else name: each for name, each in tensors.items()}
    assert len({name.partition(".")[0] for name in some}) > 1
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("cpu"))
    filled, loaded = build_model(context, model_config), build_model(context, model_config)
    with filled.weights.open(written(tmp_path / "some", some)) as source:
        filled.weights.fill(source)
    loaded.weights.fill(loaded.weights.dummy())
    assert loaded.load_weights(some.items()) == set(loaded.weights.shapes)
    assert all(map(torch.equal, filled.parameters(), loaded.parameters()))
    both = written(tmp_path / "both", {**tensors, "wpe.weight": tensors["transformer.wpe.weight"].clone()})
    with pytest.raises(CheckpointError, match=r"'transformer\.wpe\.weight' and 'wpe\.weight' .*same weight"):
        filled.weights.open(both).__enter__()


@pytest.mark.parametrize("name", ["", "model.layers", "model.layers.0.input_layernorm"])
def test_hooks_of_a_view_are_rejected(name: str):
    """Regression: they were taken, and never called."""
    with plain_model(is_packed=False).as_checkpoint() as view:
        for method in ("register_forward_hook", "register_forward_pre_hook"):
            with pytest.raises(RuntimeError, match=r"no hook would be called: .*get_model"):
                getattr(view.get_submodule(name), method)(print)
