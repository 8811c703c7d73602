"""Tower weights in a running engine: sleep, update, reload, saved models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from vision_checkpoints import image_of, vision_folder

from spmd_worker import LLM
from spmd_worker import resolved as resolved_module

WEIGHTS = {
    "qwen3_vl_heads_of_24": "model.visual.blocks.0.attn.qkv.weight",
    "gemma4_clipped": "model.vision_tower.encoder.layers.0.self_attn.q_proj.input_max",
    "kimi_k25": "vision_tower.encoder.blocks.0.wqkv.bias",
}
IN_GATE = ("qwen3_vl_heads_of_24", "gemma4_clipped")


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved_module, "takes_images", lambda config: True)


@pytest.fixture(params=[pytest.param(each, marks=() if each in IN_GATE else pytest.mark.stress) for each in WEIGHTS])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def llm(images: None, name: str) -> Iterator[LLM]:
    with LLM(model=str(vision_folder(name)), dtype="float32") as made:
        yield made


def rows(llm: LLM, name: str) -> Tensor:
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    with torch.inference_mode():
        found: Tensor = model.tower(image_of(name, 0)).rows.clone()
    return found


def test_tower_weights_sleep_change_and_are_saved(llm: LLM, name: str, tmp_path: Path):
    before, weight = rows(llm, name), WEIGHTS[name]
    llm.sleep(level=1)
    llm.wake_up()
    assert torch.equal(rows(llm, name), before)

    files = load_file(vision_folder(name) / "model.safetensors")
    llm.save_checkpoint(tmp_path / "checkpoint")
    assert {*load_file(tmp_path / "checkpoint" / "model.safetensors")} == {*files}
    llm.llm_engine.model_executor.save_sharded_state(path=tmp_path / "state")
    with LLM(model=str(tmp_path / "state"), dtype="float32", load_format="sharded_state") as saved:
        assert torch.equal(rows(saved, name), before)

    llm.start_weight_update(partial=True)
    llm.update_weights([(weight, files[weight] / 4)])
    llm.finish_weight_update()
    assert not torch.equal(rows(llm, name), before)
    llm.sleep(level=2)
    llm.wake_up()
    llm.collective_rpc("reload_weights")
    assert torch.equal(rows(llm, name), before)


def test_text_tokens_do_not_depend_on_the_tower(llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch):
    prompt = {"prompt_token_ids": [1, 5, 7, 9]}
    with_tower = llm.generate([prompt])[0].outputs[0].token_ids
    monkeypatch.setattr(resolved_module, "takes_images", lambda config: False)
    with LLM(model=str(vision_folder(name)), dtype="float32") as alone:
        assert alone.generate([prompt])[0].outputs[0].token_ids == with_tower
