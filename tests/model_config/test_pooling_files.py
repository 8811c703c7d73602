"""What a model folder says of pooling: old keys and new ones, and what is not run, by file and key."""

import json
from pathlib import Path
from typing import Any

import pytest

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.model_config import ModelFiles, read_model_files
from spmd_worker.model_config.pooling import PoolingConfig, TextTransform, pooling_files

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def folder_of(folder: Path, architecture: str, modules: list[tuple[str, str, dict[str, Any]]], **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**SIZES, "architectures": [architecture], **config}))
    if modules:
        listed = [{"idx": i, "path": path, "type": kind} for i, (path, kind, _) in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(listed))
    for path, _, settings in modules:
        if path:
            (folder / path).mkdir()
            (folder / path / "config.json").write_text(json.dumps(settings))
    return folder


TRANSFORMER = ("", "sentence_transformers.models.Transformer", {})


def pooling(settings: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [TRANSFORMER, ("1_Pooling", "sentence_transformers.models.Pooling", settings)]


def read(folder: Path, architecture: str = "LlamaForCausalLM", modules: Any = (), **config: Any) -> ModelFiles:
    return read_model_files(folder_of(folder, architecture, list(modules), **config))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["mean"], "include_prompt": True}, "mean"),
    ],
)
def test_old_and_new_pooling_keys_are_read(tmp_path: Path, settings: dict[str, Any], kind: str) -> None:
    files = read(tmp_path, modules=pooling(settings))
    text = TextTransform((("query", ""), ("document", "")))
    assert files.model_config.pooling == PoolingConfig("embed", kind, 32, is_sentence_model=True, text=text)
    assert files.generates


def test_folder_without_pooling_generates_and_backbone_is_pooled(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    assert read(tmp_path / "a").model_config.pooling is None
    files = read(tmp_path / "b", "LlamaModel")
    assert files.model_config.architecture == "LlamaForCausalLM"
    assert files.model_config.pooling == PoolingConfig("embed", "last", 32, is_normalized=True)
    assert not files.generates
    assert read(tmp_path / "c", "GPT2LMHeadModel", n_embd=32, n_layer=1, n_head=2).model_config.pooling is None


IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("config", "num_labels", "activation"),
    [
        ({}, 2, "softmax"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3, "softmax"),
        ({"id2label": {"0": "a"}}, 1, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, 1, "none"),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, 4, "sigmoid"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": IDENTITY}}, 1, "none"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": IDENTITY}, 1, "none"),
        (
            # The new key is there, and says something else.
            {
                "num_labels": 1,
                "sbert_ce_default_activation_function": IDENTITY,
                "sentence_transformers": {"version": "4.1.0"},
            },
            1,
            "none",
        ),
        (
            {
                "num_labels": 1,
                "sbert_ce_default_activation_function": IDENTITY,
                "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
            },
            1,
            "sigmoid",
        ),
    ],
)
def test_classifier_has_its_labels_and_activation(
    tmp_path: Path, config: dict[str, Any], num_labels: int, activation: str
) -> None:
    found = read(tmp_path, "LlamaForSequenceClassification", **config).model_config.pooling
    labels = tuple(config.get("id2label", {}).values())
    assert found == PoolingConfig("classify", "last", 32, num_labels=num_labels, activation=activation, labels=labels)


@pytest.mark.parametrize(
    ("id2label", "labels"), [({"0": 0, "2": "c"}, ("0", None)), ({}, ()), (["a", "b"], ()), (None, ())]
)
def test_labels_without_name_are_none(tmp_path: Path, id2label: Any, labels: tuple[str | None, ...]) -> None:
    found = read(tmp_path, "LlamaForSequenceClassification", id2label=id2label).model_config.pooling
    assert found is not None
    assert (found.labels, found.num_labels) == (labels, 2)


def test_digest_covers_the_pooling_files(tmp_path: Path) -> None:
    before = read(tmp_path, modules=pooling({"pooling_mode": "cls"})).digest
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    assert read_model_files(tmp_path).digest != before


DENSE = ("2_Dense", "sentence_transformers.models.Dense", {"in_features": 31, "out_features": 8})
NORMALIZE = ("2_Normalize", "sentence_transformers.models.Normalize", {})


@pytest.mark.parametrize("path", ["1_Pool\0ing", "\ud800", "x" * 300, "../other", "/etc", "..", ".", "a\\b", 3, None])
def test_module_path_outside_the_folder_is_not_read(tmp_path: Path, path: Any):
    """Some of them were tracebacks; a file outside was read before its path was refused."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    folder = tmp_path / "model"
    folder.mkdir()
    folder_of(folder, "LlamaForCausalLM", [])
    modules = [{"path": each, "type": f"x.{kind}"} for each, kind in (("", "Transformer"), (path, "Pooling"))]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert pooling_files(folder) == [folder / "modules.json"]
    with pytest.raises(ModelConfigError, match=r"modules\.json: path .* must .*folder"):
        read_model_files(folder)


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (pooling({"pooling_mode": "max"}), "1_Pooling/config.json: pooling mode .*max"),
        (pooling({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}), "pooling mode"),
        (pooling({"pooling_mode": "mean", "include_prompt": False}), "include_prompt=False"),
        ([*pooling({"pooling_mode": "mean"}), DENSE], "in_features=31 must be 32"),
        ([*pooling({"pooling_mode": "mean"}), NORMALIZE, DENSE], "modules Transformer, Pooling, Normalize, Dense"),
        ([TRANSFORMER, ("1_LSTM", "sentence_transformers.models.LSTM", {})], "modules Transformer, LSTM"),
        ([("0_Transformer", TRANSFORMER[1], {}), *pooling({"pooling_mode": "cls"})[1:]], "must be in .* itself"),
        ([TRANSFORMER, ("", "sentence_transformers.models.Pooling", {})], r"path '' must .*folder"),
    ],
)
def test_unsupported_modules_are_rejected_by_name(tmp_path: Path, modules: Any, words: str) -> None:
    with pytest.raises(ModelConfigError, match=words):
        read(tmp_path, modules=modules)


@pytest.mark.parametrize("given", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_attention_to_later_tokens_is_rejected_with_pooling(tmp_path: Path, given: dict[str, Any]) -> None:
    (key,) = given
    with pytest.raises(ModelConfigError, match=rf"config.json: {key}={given[key]}"):
        read(tmp_path, modules=pooling({"pooling_mode": "mean"}), **given)


def test_invalid_pooling_mode_is_rejected_in_any_folder(tmp_path: Path) -> None:
    """The digest covers the folder, whatever its name."""
    modules = [TRANSFORMER, ("pool", "sentence_transformers.models.Pooling", {"pooling_mode": [["mean"]]})]
    with pytest.raises(ModelConfigError, match=r"pool/config\.json: .*mode \[\['mean'\]\] .*not"):
        read(tmp_path, modules=modules)
    assert tmp_path / "pool" / "config.json" in pooling_files(tmp_path)
