"""A config that ties the head to the embedding, beside files that have a head of their own."""

import json
import re
from pathlib import Path

import pytest
from reference_models import CheckpointSpec, write_checkpoint
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from spmd_worker.errors import CheckpointError, SpmdError
from spmd_worker.llm import LLM

SETTINGS = {"num_blocks": 20, "max_model_len": 32}


def write_with_head(folder: Path, by: float) -> None:
    """The embedding again, one element of it larger `by`."""
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[3, 2] += by
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", CheckpointSpec(LlamaConfig, {"tie_word_embeddings": True}))


def test_a_head_that_is_the_embedding_is_no_news_and_another_is_refused(folder: Path):
    with LLM(folder, **SETTINGS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate([[3, 4, 5]])]
    write_with_head(folder, 0.0)
    with LLM(folder, **SETTINGS) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate([[3, 4, 5]])] == expected
    write_with_head(folder, 1.0)
    with pytest.raises(SpmdError, match=re.escape("tensor 'lm_head.weight' differs from 'model.embed_tokens.weight'")):
        LLM(folder, **SETTINGS)
    # The way out that the message says.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    LLM(folder, **SETTINGS).close()


def test_a_reload_refuses_it_and_keeps_the_weights(folder: Path, tmp_path: Path):
    other = write_checkpoint(tmp_path / "other", CheckpointSpec(LlamaConfig, {"tie_word_embeddings": True}), seed=1)
    write_with_head(other, 1.0)
    with LLM(folder, **SETTINGS) as llm:
        before = llm.generate([[3, 4, 5]])[0].outputs[0].token_ids
        with pytest.raises(CheckpointError, match="differs from"):
            llm.collective_rpc("reload_weights", args=(str(other),))
        assert llm.generate([[3, 4, 5]])[0].outputs[0].token_ids == before
