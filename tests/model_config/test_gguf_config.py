"""Models of GGUF: the file that a path means, config.json of odd metadata, and what is refused."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from family_checkpoints import family_folder
from gguf_files import write_gguf
from ranks import REPOSITORY
from reference_models import checkpoint_folder

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.gguf import tokenizer_json
from spmd_worker.model_config.gguf.architectures import ARCHITECTURES
from spmd_worker.model_config.hub import cached_folder, locate_model
from spmd_worker.model_config.model_config import read_model_files


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "files").mkdir()
    return tmp_path / "hub"


def bare(folder: Path, architecture: str = "llama", name: str = "m.gguf", **changes: Any) -> Path:
    """A GGUF of metadata, where None leaves a key out, and an embedding."""
    values: dict[str, Any] = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64}
    values |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    writer = gguf.GGUFWriter(folder / name, architecture)
    for key, value in values.items():
        kind = gguf.GGUFValueType.get_type(value) if not isinstance(value, int | None) else gguf.GGUFValueType.INT64
        if value is not None:
            writer.add_key_value(key if key.startswith("general.") else f"{architecture}.{key}", value, kind)
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / name


def config(path: Path) -> dict[str, Any]:
    return json.loads((locate_model(str(path), None).folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        (
            "mamba",
            {},
            r"general.architecture='mamba' is not supported for GGUF, only gemma, .*qwen3moe.*: give the safe",
        ),
        ("llama", {"general__type": "mmproj"}, "general.type='mmproj' is not a model of its own"),
        ("llama", {"block_count": 0}, "llama.block_count=0 must be a whole number from 1 to 1024"),
        ("llama", {"block_count": 2**40}, "llama.block_count=1099511627776 must be a whole number"),
        ("llama", {"block_count": None}, "llama.block_count=None must be a whole number"),
        ("llama", {"embedding_length": "x"}, "llama.embedding_length='x' must be a whole number"),
        ("llama", {"attention__layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon=0.0 must be a number"),
        ("llama", {"attention__head_count_kv": [1, 2]}, r"head_count_kv=\[1, 2\] differs from layer to layer"),
        ("llama", {"attention__value_length": 16}, "value_length=16 must be the head size of keys, 8"),
        ("qwen2", {"rope__dimension_count": 4}, "rope.dimension_count=4 must be the head size, 8"),
        ("llama", {"attention__sliding_window": 8}, "sliding_window=8 is not supported for this architecture"),
        ("llama", {"rope__scaling__type": "ntk"}, "rope.scaling.type='ntk' is not supported, only linear or yarn"),
        ("llama", {"rope__scaling__type": "yarn"}, "rope.scaling.factor=None must be a number"),
        ("granite", {}, "granite.attention.scale is missing"),
        ("qwen3moe", {"expert_count": 4}, "qwen3moe.expert_used_count is missing"),
        ("gemma2", {"final_logit_softcapping": "x"}, "final_logit_softcapping of gemma2, 'x', must be a number"),
    ],
)
def test_unusable_metadata_is_named(architecture: str, changes: dict, words: str, tmp_path: Path):
    path = bare(tmp_path / "files", architecture, **changes)
    with pytest.raises(ModelConfigError, match=rf"{path}: .*{words}"):
        locate_model(str(path), None)


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("llama", {"attention__head_count_kv": [2, 2]}, {"num_key_value_heads": 2, "head_dim": 8}),
        ("llama", {"attention__head_count_kv": None}, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("llama", {"rope__scale_linear": 2.0}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("llama", {"rope__dimension_count": 16, "attention__key_length": 16}, {"head_dim": 16}),
        ("llama", {"attention__sliding_window": 64}, {"vocab_size": 10}),
        ("gemma2", {"block_count": 46}, {"query_pre_attn_scalar": 8}),
        ("gemma2", {"attention__key_length": 16}, {"query_pre_attn_scalar": 16}),
        ("gemma3", {"block_count": 62, "attention__key_length": 16}, {"query_pre_attn_scalar": 8}),
        ("gemma3", {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}, {"rope_local_base_freq": 10000.0}),
        ("gemma3", {"attention__sliding_window_pattern": [True, False]}, {"hidden_size": 32}),
        ("phi3", {"attention__sliding_window": 0}, {"sliding_window": None}),
        ("phi3", {"rope__dimension_count": 6}, {"partial_rotary_factor": 0.75}),
    ],
)
def test_metadata_become_keys_of_config(architecture: str, changes: dict, expected: dict, tmp_path: Path):
    found = config(bare(tmp_path / "files", architecture, **changes))
    assert found | expected == found


def test_dtype_is_of_most_elements(tmp_path: Path):
    """Regression: fewer weights of 16 bits may have most bytes beside those of 4. float16 is too small for Gemma."""
    for first, kind, wanted in (
        ("F16", "Q4_0", "bfloat16"),
        ("F32", "Q4_0", "bfloat16"),
        ("Q8_0", "F16", "float16"),
        ("Q8_0", "F32", "float32"),
    ):
        path = tmp_path / f"{first}-{kind}" / "m.gguf"
        path.parent.mkdir()
        write_gguf(family_folder("gemma"), path, kind, types={"ffn": first})
        assert config(path)["dtype"] == wanted, (first, kind)


def test_page_lists_architectures_and_splits():
    page = (REPOSITORY / "docs" / "guides" / "gguf.md").read_text()
    assert [each for each in (*ARCHITECTURES, *tokenizer_json._SPLITS) if f"`{each}`" not in page] == []


def test_other_factors_of_frequencies_are_kept(tmp_path: Path):
    source = checkpoint_folder("llama3")
    factors = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.float32)
    path = write_gguf(source, tmp_path / "files" / "m.gguf", rope_factors=factors)
    rope = read_model_files(locate_model(str(path), None).folder).model_config.ropes[0]
    assert (rope.rope_type, rope.long_factors, rope.attention_factor) == ("longrope", tuple(factors.tolist()), 1.0)
    assert rope.short_factors == rope.long_factors


def test_folder_means_its_only_model(tmp_path: Path, hub: Path):
    files = tmp_path / "files"
    path = bare(files, name="one-Q4_K_M.gguf")
    (files / "mmproj-F16.gguf").write_bytes(b"")
    found = locate_model(str(files), None)
    assert found == locate_model(str(files), "main")
    assert locate_model(found.path, None).folder == found.folder
    assert found.folder == locate_model(str(path), None).folder == cached_folder(files)
    assert (found.name, locate_model(str(path), None).name) == ("files", "one-Q4_K_M")
    assert found.folder.parent.parent == hub
    bare(files, name="one-Q8_0.gguf")
    with pytest.raises(ModelConfigError, match=r"has 2 GGUF models, one-Q4_K_M.gguf, one-Q8_0.gguf: give model.path"):
        locate_model(str(files), None)
    (files / "model.safetensors").write_bytes(b"")
    assert locate_model(str(files), None).folder == files


def test_parts_of_a_split_model_are_all_needed(tmp_path: Path):
    files = tmp_path / "files"
    write_gguf(family_folder("gemma"), files / "m.gguf", splits=True)
    first, second = sorted(files.iterdir())
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(
        ModelConfigError, match=r"m-00001-of-00002.gguf is a part of 2, and .*m-00002-of-00002.gguf does"
    ):
        locate_model(str(first), None)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelConfigError, match=r"m-00002-of-00002.gguf: is part 0 of 2 by split.no"):
        locate_model(str(first), None)
    second.write_bytes(content)
    assert len(list(locate_model(str(first), None).folder.glob("*.gguf"))) == 2
    capitals = [each.rename(each.with_suffix(".GGUF")) for each in (first, second)]
    for path in (files, *capitals):
        assert len(list(locate_model(str(path), None).folder.glob("*.gguf"))) == 2


def test_file_that_was_removed_is_named(tmp_path: Path):
    path = bare(tmp_path / "files")
    folder = locate_model(str(path), None).folder
    path.unlink()
    with pytest.raises(ModelConfigError, match=r"linked-00001-of-00001.gguf is a link to a file that does"):
        locate_model(str(folder), None)
    with pytest.raises(ModelConfigError, match=r"model.path=.*m.gguf cannot be read: .*No such file"):
        locate_model(str(path), None)


def test_cache_that_cannot_be_written_is_named(tmp_path: Path, hub: Path):
    path = bare(tmp_path / "files")
    hub.write_text("a file")
    with pytest.raises(
        ModelConfigError, match=r"its model folder cannot be made .*: set HF_HUB_CACHE to a folder that"
    ):
        locate_model(str(path), None)


def test_killed_writer_leaves_nothing_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = bare(tmp_path / "files")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            locate_model(str(path), None)
    assert (locate_model(str(path), None).folder / "config.json").is_file()


def test_folder_of_another_node_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Regression: locks of a shared home may not reach beyond a node."""
    path, rename = bare(tmp_path / "files"), os.rename

    def twice(source: Path, target: Path) -> None:
        shutil.copytree(source, target, symlinks=True)
        rename(source, target)

    monkeypatch.setattr(os, "rename", twice)
    folder = locate_model(str(path), None).folder
    assert (folder / "config.json").is_file()
    assert {each.name for each in folder.parent.iterdir()} == {"lock", folder.name}


def test_parent_of_a_linked_folder_is_the_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Regression: `link/..` was taken for the folder of the link."""
    (tmp_path / "files" / "deep").mkdir()
    (tmp_path / "my link").symlink_to(tmp_path / "files" / "deep")
    path = bare(tmp_path / "files", name="a b.gguf")
    monkeypatch.chdir(tmp_path)
    folder = locate_model("my link/../a b.gguf", None).folder
    assert next(folder.glob("*.gguf")).resolve() == path


@pytest.mark.parametrize("name", ["unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "unsloth/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf"])
def test_quantisation_on_the_hub_has_a_way_out(name: str):
    with pytest.raises(ModelConfigError, match=r"hf download unsloth/Qwen3-0.6B-GGUF FILE.gguf --local-dir models"):
        locate_model(name, None)
