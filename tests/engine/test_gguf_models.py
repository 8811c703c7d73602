"""Runs of GGUF models: the answers of the checkpoint they came from, on every layout, saved, updated and drafting."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import checkpoint_tensors, tokenizer_metadata, write_gguf
from our_model import load_model, prompt_logits
from reference_models import checkpoint_folder, open_reference, random_prompt, reference_logits
from run_folder import made_once
from safetensors.torch import load_file
from test_weight_updates import MODEL, answers, open_llm
from transformers import AutoModelForCausalLM

from spmd_worker.base.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("own_hub_cache")


def gguf_of(kind: str = "F32") -> Path:
    """The GGUF of the demo's model, with its tokenizer."""

    def write(folder: Path) -> None:
        folder.mkdir()
        metadata = tokenizer_metadata(MODEL)
        metadata["tokenizer.chat_template"] = json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"]
        write_gguf(MODEL, folder / "m.gguf", kind, metadata=metadata)

    return made_once(f"gguf demo {kind}", write) / "m.gguf"


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with open_llm() as llm:
        return answers(llm)


@pytest.mark.gate("one")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one"),
        pytest.param({"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, id="tensor parallel"),
        pytest.param({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, id="pipeline parallel"),
    ],
)
def test_gguf_answers_as_its_checkpoint(options: dict, expected: list[Any], tmp_path: Path):
    with open_llm(gguf_of(), load_format="gguf", **options) as llm:
        assert answers(llm) == expected
        if options:
            return
        template = llm.get_tokenizer().apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        assert "x" in template
        llm.save_checkpoint(tmp_path / "saved")
        llm.save_sharded_state(tmp_path / "state")
        llm.collective_rpc("reload_weights", args=(str(gguf_of("Q8_0")),))
        assert answers(llm) != expected
        llm.collective_rpc("reload_weights")
        assert answers(llm) == expected
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    theirs = checkpoint_tensors(MODEL)
    assert saved.keys() == theirs.keys()
    assert all(torch.equal(saved[name], torch.from_numpy(values)) for name, values in theirs.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.model_type == "llama"
    with open_llm(tmp_path / "state", load_format="sharded_state") as llm:
        assert answers(llm) == expected


@pytest.mark.gate("llama2-Q4_0")
@pytest.mark.guarantee("A GGUF answers as in transformers", is_control_inside=True)
@pytest.mark.parametrize(("name", "kind"), [("llama2", "Q4_0"), ("qwen2", "Q8_0")])
def test_logits_are_transformers_of_the_same_file(name: str, kind: str, tmp_path: Path):
    source, prompt = checkpoint_folder(name), random_prompt(40, 1)
    vocabulary = [f"t{each}" for each in range(211)]
    metadata = {"tokenizer.ggml.tokens": vocabulary, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
    write_gguf(source, tmp_path / "m.gguf", kind, metadata=metadata | {"tokenizer.ggml.merges": ["t1 t2"]})
    # transformers wants texts for ids, which make no tokenizer here.
    ours = write_gguf(source, tmp_path / "ours.gguf", kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    (found,) = prompt_logits(load_model(ours), [prompt])
    torch.testing.assert_close(found, reference_logits(theirs, prompt), rtol=0, atol=5e-6)
    # Negative control: the file is not the checkpoint.
    assert not torch.allclose(found, reference_logits(open_reference(source), prompt), atol=1e-3)


def test_draft_and_int8_take_gguf(expected: list[Any]):
    path = str(gguf_of())
    speculation = {"method": "draft_model", "model": path, "num_speculative_tokens": 2}
    with open_llm(path, speculative_config=speculation) as llm:
        assert answers(llm) == expected
    with open_llm(path, quantization="int8") as ours, open_llm(quantization="int8") as theirs:
        assert answers(ours) == answers(theirs)


def test_truncated_data_are_an_error(tmp_path: Path):
    path = tmp_path / "m.gguf"
    shutil.copy(gguf_of("Q8_0"), path)
    with open_llm(path) as llm:
        content = path.read_bytes()
        path.write_bytes(content[:-40])
        with pytest.raises(CheckpointError, match=r"truncated: tensor .* ends at"):
            llm.collective_rpc("reload_weights")
