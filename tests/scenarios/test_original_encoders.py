"""Encoders whose files have their authors' keys and names: the numbers of transformers' own class, which reads other
keys, for files, weight updates and saved models.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_models import backbone, encoder_folder, error, expected
from reference_models import random_prompt
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from spmd_worker import LLM, PoolingParams
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group

PROMPTS = [random_prompt(40, 1), [17, 1, 0, 40, 5], [12]]
RAW = PoolingParams(use_activation=False)
CODE = {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"}

NOMIC: dict[str, Any] = {
    "model_type": "nomic_bert",
    "activation_function": "swiglu",
    "auto_map": CODE,
    "causal": False,
    "layer_norm_epsilon": 0.02,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 64,
    "n_head": 4,
    "n_inner": 96,
    "n_layer": 4,
    "n_positions": 128,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 60,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_weights": True,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 320,
}
"""Keys of nomic-embed-text-v1.5, with the sizes of our model."""

GTE: dict[str, Any] = {
    "model_type": "new",
    "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    "hidden_act": "gelu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_norm_eps": 0.02,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 4.0, "type": "ntk"},
    "rope_theta": 30,
    "type_vocab_size": 1,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "vocab_size": 320,
}
"""Keys of gte-multilingual-base, with the sizes of our model."""

EURO: dict[str, Any] = {
    "model_type": "eurobert",
    "clf_pooling": "bos",
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_labels": 1,
    "rms_norm_eps": 0.05,
    "rope_scaling": None,
    "rope_theta": 60,
    "vocab_size": 320,
}


def _of_bert(name: str) -> str:
    return name.replace("nomic_bert.", "bert.")


def _of_new(name: str) -> str:
    return name.replace("gte.", "new.")


ORIGINALS: dict[str, tuple[str, dict[str, Any], Callable[[str], str]]] = {
    "nomic": ("NomicBertModel", NOMIC, str),
    "nomic_labels": ("NomicBertForSequenceClassification", {**NOMIC, "num_labels": 3}, _of_bert),
    "euro_pairs": ("EuroBertForSequenceClassification", EURO, str),
    "gte": ("NewModel", GTE, "new.{}".format),
    "gte_labels": ("NewForSequenceClassification", {**GTE, "num_labels": 3, "type_vocab_size": 0}, _of_new),
}
"""Architecture, keys, and the name of each tensor in the original file, by the name of transformers' folder."""


def original(name: str, folder: Path, **changes: Any) -> Path:
    """A folder as the authors wrote it, with the weights of transformers' folder."""
    architecture, keys, renamed = ORIGINALS[name]
    shutil.copytree(encoder_folder(name), folder)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **keys, **changes}))
    files = {renamed(key): each for key, each in load_file(folder / "model.safetensors").items()}
    if architecture == "NewModel":
        files["classifier.weight"] = torch.ones(1, 64)
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    return folder


def pooled(folder: Path, **settings: Any) -> list[list[float]]:
    with LLM(folder, device="cpu", dtype="float32", max_model_len=100, **settings) as llm:
        params = RAW if llm.supported_tasks[0] == "classify" else None
        outputs = llm.encode([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False)
    return [output.outputs.data for output in outputs]


def worst_error(name: str, found: list[list[float]]) -> float:
    return max(error(ours, expected(name, prompt)) for ours, prompt in zip(found, PROMPTS, strict=True))


@pytest.mark.parametrize("name", ORIGINALS)
def test_original_files_give_numbers_of_transformers(name: str, tmp_path: Path) -> None:
    assert worst_error(name, pooled(original(name, tmp_path / "model"))) < 1e-5


def test_scaling_does_not_lengthen_rows_of_gte(tmp_path: Path) -> None:
    model_config = read_model_files(original("gte", tmp_path / "model")).model_config
    assert model_config.ropes[0].factor > 1
    assert model_config.max_model_len == GTE["max_position_embeddings"]


CHANGES: dict[str, dict[str, Any]] = {
    "nomic": {"rotary_emb_base": 1000, "layer_norm_epsilon": 1e-5, "n_head": 8},
    "euro_pairs": {"clf_pooling": "mean"},
    "gte": {"rope_theta": 1000, "rope_scaling": None},
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in CHANGES.items() for key in keys])
def test_comparison_detects_another_value_of_original_keys(name: str, key: str, tmp_path: Path) -> None:
    folder = original(name, tmp_path / "model", **{key: CHANGES[name][key]})
    assert worst_error(name, pooled(folder)) > 1e-4


REFUSED: dict[str, dict[str, Any]] = {
    "nomic": {
        "num_experts": 8,
        "activation_function": "gelu",
        "rotary_scaling_factor": 2.0,
        "n_head": 0,
        "prenorm": True,
    },
    "euro_pairs": {"clf_pooling": "last"},
    "gte": {
        "logn_attention_scale": True,
        "layer_norm_type": "rms_norm",
        "position_embedding_type": "absolute",
        "rope_scaling": {"type": "ntk", "factor": 4.0, "mixed_b": 0.5},
    },
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in REFUSED.items() for key in keys])
def test_refused_original_key_is_named(name: str, key: str, tmp_path: Path) -> None:
    value = REFUSED[name][key]
    with pytest.raises(ModelConfigError, match=rf"config\.json: {key}[= ].*(not supported|must)"):
        read_model_files(original(name, tmp_path / "model", **{key: value}))


@pytest.mark.parametrize("name", ["nomic_labels", "gte_labels", "jina_labels"])
def test_weight_update_accepts_names_of_memory(name: str) -> None:
    model_config = read_model_files(encoder_folder(name)).model_config
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("cpu"))
    model = build_model(context, model_config)
    given: dict[str, Tensor] = {key: each.float() for key, each in backbone(name).state_dict().items()}
    assert model.load_weights(given.items()) == set(model.weights.shapes)
    with model.as_checkpoint() as view:
        assert all(torch.equal(each, given[key]) for key, each in view.named_parameters())


@pytest.mark.parametrize("name", ["nomic", "gte", "jina"])
def test_saved_model_opens_in_transformers(name: str, tmp_path: Path) -> None:
    with LLM(encoder_folder(name), device="cpu", dtype="float32") as llm:
        llm.save_checkpoint(tmp_path / "saved")
    theirs, loading = AutoModel.from_pretrained(tmp_path / "saved", dtype=torch.float64, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    own = backbone(name).state_dict()
    assert all(torch.equal(each, own[key]) for key, each in theirs.state_dict().items())
