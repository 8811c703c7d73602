"""PEFT folders as they are read: what is refused, by its key, and the digest of what is computed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spmd_worker.base.errors import AdapterError
from spmd_worker.model.adapters.peft_config import parse_config
from spmd_worker.model.adapters.source import adapter_from_tensors, read_adapter

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
Q, V = ("base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.layers.0.self_attn.v_proj")


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"lora_A.weight": (2, 8), "lora_B.weight": (6, 2)}
    return {f"{each}.{name}": torch.randn(*shapes[name], generator=generator) for each in (Q, V) for name in shapes}


def write(folder: Path, config: dict[str, Any] | None = None, weights: dict[str, Tensor] | None = None) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | (config or {})))
    save_file(tensors() if weights is None else weights, folder / "adapter_model.safetensors")
    return folder


REFUSED: dict[str, Any] = {
    "use_dora": True,
    "bias": "all",
    "lora_bias": True,
    "target_parameters": "mlp.experts.gate_up_proj",
    "layer_replication": [[0, 2]],
    "trainable_token_indices": [3],
    "alora_invocation_tokens": [3, 4],
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "init_lora_weights": "pissa_niter_16",
    "peft_type": "LOHA",
    "r": 0,
    "lora_alpha": "two",
    "rank_pattern": {"(a*)*b": 2},
    "alpha_pattern": {"q_proj": None},
    "target_modules": "(",
    "modules_to_save": "score",
    "use_new_method": True,
}


@pytest.mark.parametrize("key", REFUSED)
def test_refusal_names_key_and_file(tmp_path: Path, key: str):
    with pytest.raises(AdapterError, match=rf"adapter_config.json: {key}="):
        read_adapter(write(tmp_path, {key: REFUSED[key]}))


@pytest.mark.parametrize("start", ["olora", "corda", "loftq", "eva", "lora_ga", "mica"])
def test_starts_that_change_bases_are_refused(start: str):
    with pytest.raises(AdapterError, match=r"init_lora_weights.*path_initial_model_for_weight_conversion"):
        parse_config(CONFIG | {"init_lora_weights": start}, "config")
    parse_config(CONFIG | {"init_lora_weights": "gaussian"}, "config")


def misnamed(weights: dict[str, Tensor]) -> None:
    weights["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.ones(2, 8)


def wrong_rank(weights: dict[str, Tensor]) -> None:
    weights[f"{Q}.lora_A.weight"], weights[f"{Q}.lora_B.weight"] = torch.ones(3, 8), torch.ones(6, 3)


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "nan": (lambda weights: weights[f"{V}.lora_B.weight"].fill_(torch.nan), "v_proj.lora_B.weight: .*not finite"),
    "half": (lambda weights: weights.pop(f"{Q}.lora_B.weight"), "q_proj: has lora_A alone"),
    "rank": (wrong_rank, "q_proj: lora_A has the rank 3, .*says 2"),
    "embedding": (misnamed, "embed_tokens.lora_embedding_A: adapters of embeddings and token heads"),
    "empty": (lambda weights: weights.clear(), "no tensor is named lora_A"),
    "shape": (lambda weights: weights.update({f"{Q}.lora_A.weight": torch.ones(2)}), "q_proj: lora_A .2. and lora_B"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_wrong_tensors_are_named(tmp_path: Path, change: str):
    weights = tensors()
    CHANGES[change][0](weights)
    with pytest.raises(AdapterError, match=CHANGES[change][1]):
        read_adapter(write(tmp_path, weights=weights))


def test_module_beside_target_modules_is_refused(tmp_path: Path):
    for targets in (["q_proj"], r".*\.q_proj"):
        with pytest.raises(AdapterError, match=r"v_proj: is not among target_modules"):
            read_adapter(write(tmp_path, {"target_modules": targets}))
    slow = r"(?:.*?(?:text).*?(?:attn|mlp).*?(?:q_proj).*?)|(?:layers\.[\d]{1,}\.(?:attn)+)"
    for targets in ("all-linear", r".*self_attn\.[qv]_proj", None, slow):
        assert len(read_adapter(write(tmp_path, {"target_modules": targets})).modules) == 2


def test_files_that_are_missing_or_cut_are_named(tmp_path: Path):
    with pytest.raises(AdapterError, match=r"nowhere: is not a folder"):
        read_adapter(tmp_path / "nowhere")
    with pytest.raises(AdapterError, match=r"adapter_config.json: cannot be read"):
        read_adapter(tmp_path)
    write(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors: truncated"):
        read_adapter(tmp_path)
    file.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"has only adapter_model.bin.*pickles are rejected"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match=r"adapter_config.json: is not JSON"):
        read_adapter(tmp_path)


def test_digest_is_of_content_in_any_order(tmp_path: Path):
    expected = read_adapter(write(tmp_path)).digest
    assert 0 < expected < 2**63
    backwards = dict(reversed(tensors().items()))
    unprefixed = {name.removeprefix("base_model.model."): each for name, each in tensors().items()}
    named = {name.replace(".weight", ".default.weight"): each for name, each in tensors().items()}
    for same in (tensors(), backwards, unprefixed, named):
        assert adapter_from_tensors(CONFIG | {"lora_dropout": 0.1}, same).digest == expected
    changed = tensors()
    changed[f"{V}.lora_A.weight"][1, 7] += 2**-20
    digests = [
        adapter_from_tensors(config, weights).digest
        for config, weights in (
            (CONFIG, changed),
            (CONFIG | {"lora_alpha": 5}, tensors()),
            (CONFIG | {"use_rslora": True}, tensors()),
            (CONFIG | {"fan_in_fan_out": True}, tensors()),
            (CONFIG | {"alpha_pattern": {"v_proj": 5}}, tensors()),
            (CONFIG, {name: each.bfloat16() for name, each in tensors().items()}),
            (CONFIG, {name.replace("layers.0", "layers.1"): each for name, each in tensors().items()}),
        )
    ]
    assert len({expected, *digests}) == len(digests) + 1


def test_saved_modules_must_be_in_the_file(tmp_path: Path):
    with pytest.raises(AdapterError, match=r"adapter_config.json: modules_to_save=\['score'\]: no such weights are in"):
        read_adapter(write(tmp_path, {"modules_to_save": ["score"]}))


def test_patterns_match_ends_of_paths():
    config = parse_config(
        CONFIG | {"rank_pattern": {"proj": 5, "q_proj": 3, r"layers\.1\.self_attn\.v_proj": 7}, "use_rslora": True},
        "config",
    )
    ranks = [
        config.rank_of(f"model.layers.{layer}.self_attn.{name}") for layer in (0, 1) for name in ("q_proj", "v_proj")
    ]
    assert ranks == [3, 2, 3, 7]
    assert config.scaling_of("model.layers.0.self_attn.q_proj") == 4 / 3**0.5


def test_alpha_that_is_not_given_is_pefts():
    config = {key: value for key, value in CONFIG.items() if key != "lora_alpha"}
    # The default of peft.LoraConfig, whatever the rank.
    assert parse_config(config, "config").scaling_of("q_proj") == 8 / 2


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("x", 3, "'x' is a int"),
        (3, torch.ones(2), "3 is a torch.strided"),
        ("x", torch.ones(2, 2).to_sparse(), "'x' is a torch.sparse_coo"),
    ],
)
def test_what_is_no_dense_tensor_is_named(name: Any, value: Any, words: str):
    with pytest.raises(AdapterError, match=rf"lora_tensors: {words}: give dense tensors"):
        adapter_from_tensors(CONFIG, tensors() | {name: value})


def test_number_without_dimensions_is_in_the_digest():
    digests = [adapter_from_tensors(CONFIG, tensors() | {"x": torch.tensor(each)}).digest for each in (1.0, 2.0)]
    assert digests[0] != digests[1]


def test_tensors_of_a_trainer_are_copied():
    weights = tensors()
    source = adapter_from_tensors(CONFIG, weights)
    expected = source.digest
    weights[f"{Q}.lora_A.weight"].zero_()
    assert source.modules["model.layers.0.self_attn.q_proj"].a.any()
    assert adapter_from_tensors(CONFIG, weights).digest != expected
    with pytest.raises(AdapterError, match=r"q_proj.lora_A.weight: is on the meta device"):
        adapter_from_tensors(CONFIG, weights | {f"{Q}.lora_A.weight": torch.ones(2, 8, device="meta")})
