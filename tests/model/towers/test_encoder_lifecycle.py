"""Weights of encoders in a running engine: sleep, update, reload, saved models."""

from pathlib import Path

import pytest
import torch
from cross_rows import cross_folder
from safetensors.torch import load_file
from torch import Tensor

from spmd_worker import LLM
from spmd_worker.media.prepared import EncoderIds

CHANGED = {
    "bart": "model.encoder.layers.0.fc1.weight",
    "t5 with gates": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
}


def opened(folder: Path, **options: str) -> LLM:
    return LLM(model=str(folder), dtype="float32", num_blocks=64, **options)


def rows(llm: LLM) -> Tensor:
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    with torch.inference_mode():
        found: Tensor = model.tower(EncoderIds((4, 9, 17, 30, 5))).rows.clone()
    return found


@pytest.mark.parametrize("name", [pytest.param("bart", marks=pytest.mark.matrix), "t5 with gates"])
def test_encoder_weights_sleep_change_and_are_saved(name: str, tmp_path: Path):
    """A sharded state does not say whether the head is tied or has a bias: its files do."""
    files = load_file(cross_folder(name) / "model.safetensors")
    with opened(cross_folder(name)) as llm:
        before = rows(llm)
        llm.sleep(level=1)
        llm.wake_up()
        assert torch.equal(rows(llm), before)

        llm.save_checkpoint(tmp_path / "checkpoint")
        saved = load_file(tmp_path / "checkpoint" / "model.safetensors")
        assert {*saved} == {*files}
        assert all(torch.equal(saved[each], tensor) for each, tensor in files.items())
        llm.llm_engine.model_executor.save_sharded_state(path=tmp_path / "state")

        llm.start_weight_update(partial=True)
        llm.update_weights([(CHANGED[name], files[CHANGED[name]] * 2)])
        llm.finish_weight_update()
        assert not torch.equal(rows(llm), before)
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")
        assert torch.equal(rows(llm), before)
    with opened(tmp_path / "state", load_format="sharded_state") as llm:
        assert torch.equal(rows(llm), before)
