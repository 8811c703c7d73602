"""A config that ties the head to the embedding, with files that have a head too."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from json_files import edit
from reference_models import CheckpointSpec, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from spmd_worker.base.errors import CheckpointError, MissingWeightsError, SpmdError
from spmd_worker.llm import LLM

SETTINGS = {"num_blocks": 20, "max_model_len": 32}


def write_with_head(folder: Path, by: float) -> None:
    """The embedding with one element increased `by`."""
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[3, 2] += by
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", CheckpointSpec(LlamaConfig, {"tie_word_embeddings": True}))


def test_equal_tied_head_is_ignored_and_another_rejected(folder: Path):
    with LLM(folder, **SETTINGS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate([[3, 4, 5]])]
    write_with_head(folder, 0.0)
    with LLM(folder, **SETTINGS) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate([[3, 4, 5]])] == expected
    write_with_head(folder, 1.0)
    with pytest.raises(SpmdError, match=re.escape("tensor 'lm_head.weight' differs from 'model.embed_tokens.weight'")):
        LLM(folder, **SETTINGS)
    # The way out that the message says.
    edit(folder / "config.json", tie_word_embeddings=False)
    LLM(folder, **SETTINGS).close()


def test_reload_rejects_differing_head_and_keeps_weights(folder: Path, tmp_path: Path):
    other = write_checkpoint(tmp_path / "other", CheckpointSpec(LlamaConfig, {"tie_word_embeddings": True}), seed=1)
    write_with_head(other, 1.0)
    with LLM(folder, **SETTINGS) as llm:
        before = llm.generate([[3, 4, 5]])[0].outputs[0].token_ids
        with pytest.raises(CheckpointError, match="differs from"):
            llm.collective_rpc("reload_weights", args=(str(other),))
        assert llm.generate([[3, 4, 5]])[0].outputs[0].token_ids == before


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def generated(llm: LLM) -> list[int]:
    return list(llm.generate([[3, 4, 5]])[0].outputs[0].token_ids)


@pytest.mark.gate("False-True", "True-True")
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("head_first", [True, False])
def test_update_is_rejected_until_its_head_matches(folder: Path, head_first: bool, at_once: bool):
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors.pop(EMBEDDING)
    other = embedding.clone()
    other[3, 2] += 1.0

    def load(llm: LLM, head: Tensor) -> None:
        both = [(EMBEDDING, embedding), (HEAD, head)]
        pairs = [*tensors.items(), *(reversed(both) if head_first else both)]
        for call in [pairs] if at_once else [[pair] for pair in pairs]:
            llm.update_weights(call)

    with LLM(folder, **SETTINGS) as llm:
        before = generated(llm)
        load(llm, embedding.clone())
        assert generated(llm) == before, "negative control: equal ones are taken"
        load(llm, other)
        words = f"{HEAD} differs from {EMBEDDING}.*tie_word_embeddings.*"
        for call in (llm.reset_prefix_cache, lambda: generated(llm)):
            with pytest.raises(CheckpointError, match=words):
                call()
        # Another try with the same, and one that is right.
        load(llm, other)
        with pytest.raises(CheckpointError, match=words):
            llm.reset_prefix_cache()
        load(llm, embedding)
        assert generated(llm) == before
        # An embedding that comes without a head is both.
        load(llm, other)
        llm.update_weights([(EMBEDDING, embedding)])
        assert generated(llm) == before
        for wrong in (embedding[1:], embedding.double()):
            load(llm, wrong)
            with pytest.raises(CheckpointError, match=words):
                llm.reset_prefix_cache()
        load(llm, embedding)
        with pytest.raises(ValueError, match=rf"^{HEAD}: .*meta device"):
            llm.update_weights([(HEAD, embedding.to("meta"))])


def test_head_alone_is_rejected_unless_embedding_is_known(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    head = tensors[EMBEDDING].clone()

    def load_partly(llm: LLM, name: str, tensor: Tensor) -> None:
        llm.start_weight_update(partial=True)
        llm.update_weights([(name, tensor)])
        llm.finish_weight_update()

    def refused(llm: LLM, tensor: Tensor, words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            load_partly(llm, HEAD, tensor)
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()

    with LLM(folder, **SETTINGS) as llm:
        before = generated(llm)
        refused(llm, head, f"{HEAD} was loaded without {EMBEDDING}")
        # Now it is known what the embedding is.
        load_partly(llm, HEAD, head)
        refused(llm, head + 1.0, f"{HEAD} differs from {EMBEDDING}")
        load_partly(llm, HEAD, head)
        # And no longer.
        llm.apply_model(lambda model: model.get_parameter(EMBEDDING).add_(0.0).sum().item())
        refused(llm, head, f"{HEAD} was loaded without {EMBEDDING}")
        llm.sleep(level=2)
        llm.wake_up()
        llm.start_weight_update()
        llm.update_weights([(name, tensor) for name, tensor in tensors.items() if name != EMBEDDING])
        llm.update_weights([(HEAD, head)])
        with pytest.raises(MissingWeightsError, match=EMBEDDING):
            llm.finish_weight_update()
        llm.update_weights([(EMBEDDING, head)])
        assert generated(llm) == before


def test_embedding_after_rejected_head_is_accepted(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    with LLM(folder, **SETTINGS) as llm:
        before = generated(llm)
        for tensor, name in ((tensors[EMBEDDING] + 1.0, HEAD), (tensors[EMBEDDING], EMBEDDING)):
            llm.start_weight_update(partial=True)
            llm.update_weights([(name, tensor)])
            with pytest.raises(CheckpointError) if name == HEAD else nullcontext():
                llm.finish_weight_update()
        assert generated(llm) == before


def test_reload_forgets_head_of_interrupted_update(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    with LLM(folder, **SETTINGS) as llm:
        before = generated(llm)

        def break_off() -> None:
            with llm.weight_update() as load:
                load(HEAD, tensors[EMBEDDING] + 1.0)
                raise KeyError("of the trainer")

        with pytest.raises(KeyError):
            break_off()
        llm.collective_rpc("reload_weights")
        assert generated(llm) == before


@pytest.mark.parametrize("asks", [False, True])
def test_head_is_compared_after_update_was_queried(folder: Path, asks: bool):
    """`wake_up(tags=["kv_cache"])` queries the update; the head then counted as one of an earlier try."""
    tensors = load_file(folder / "model.safetensors")
    with LLM(folder, **SETTINGS) as llm:
        before = generated(llm)
        load = llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        load([(HEAD, tensors[EMBEDDING] + 1.0)])
        if asks:
            llm.wake_up(tags=["kv_cache"])
        load(tensors.items())
        with pytest.raises(CheckpointError, match=f"{HEAD} differs from {EMBEDDING}"):
            generated(llm) if asks else llm.wake_up(tags=["kv_cache"])
        load(tensors.items())
        if not asks:
            llm.wake_up(tags=["kv_cache"])
        assert generated(llm) == before
