"""Encoders of encoder-decoder models against transformers: rows, threads, ranks, weights by name, and what makes rows
wrong.
"""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cross_rows import CASES, VOCAB_SIZE, cross_folder, cross_reference
from family_mutants import entries
from reference_models import random_prompt, relative_error
from safetensors.torch import load_file, save_file
from thread_groups import on_ranks
from torch import Tensor
from torch_threads import threads
from transformers import PreTrainedModel

from spmd_worker.base.errors import CheckpointError, ModelConfigError
from spmd_worker.media.prepared import AudioFeatures, EncoderIds
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import SinusoidalPositions
from spmd_worker.model.registry import build_model
from spmd_worker.model.weights.saved_checkpoint import SourceTensors
from spmd_worker.model_config.families.encoder_decoder_rows import ENCODER_PARTS
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.model_config import ModelConfig, read_model_files
from spmd_worker.native.library import native_library
from spmd_worker.ops.attention.cpu import CpuBackend
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.cpu.native import cpu_kernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.topology import RankLayout, Stage
from spmd_worker.worker.memory.estimate import activation_bytes, weights_bytes

TOLERANCE = 2e-5
FEW = ("bart", "t5 with gates", "whisper")
"""Shared embeddings and norms of sums; relative positions and gates; audio."""
EVERY = [pytest.param(each, marks=() if each in FEW else pytest.mark.matrix) for each in CASES]
WITH_CONTROLS = ["bart", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("m2m100", "t5", "whisper"))]
EMBEDDING = "model.shared.weight"
Given = EncoderIds | AudioFeatures


def context(dtype: torch.dtype = torch.float32, *, is_native: bool = True) -> LayerContext:
    library = native_library()
    assert not isinstance(library, str), library
    attention = CpuBackend(library, dtype, (16, 32), 16) if is_native else SdpaBackend()
    kernels: Any = cpu_kernels(dtype)[0] if is_native else ReferenceKernels()
    return LayerContext(single_group(), kernels, attention, dtype, torch.device("cpu"))


def config_of(name: str) -> ModelConfig:
    return read_model_files(cross_folder(name)).model_config


def new_model(name: str, folder: Path | None = None, group: GroupHandle | None = None, **kinds: Any) -> Any:
    folder, layers = folder or cross_folder(name), context(**kinds)
    layers = layers if group is None else replace(layers, tensor_group=group)
    model = build_model(layers, read_model_files(folder).model_config)
    with model.weights.open(folder) as source:
        model.weights.fill(source)
    model.pack_weights()
    return model


@cache
def givens(name: str) -> tuple[Given, ...]:
    """Inputs of several lengths; all of an encoder of audio have one."""
    part = config_of(name).encoder_part
    assert part is not None
    if part.audio is None:
        return tuple(EncoderIds(tuple(random_prompt(each, seed=3, vocab_size=VOCAB_SIZE))) for each in (1, 67, 17))
    shape, random = (part.audio.num_mel_bins, part.audio.num_frames), np.random.default_rng(5)
    return tuple(AudioFeatures(random.standard_normal(shape).astype(np.float32)) for _ in range(2))


@torch.no_grad()
def their_rows(name: str, given: Given, reference: PreTrainedModel | None = None) -> Tensor:
    inputs = (
        torch.tensor([given.token_ids]) if isinstance(given, EncoderIds) else torch.from_numpy(given.features)[None]
    )
    rows: Tensor = (reference or cross_reference(name)).get_encoder()(inputs).last_hidden_state[0]
    return rows


@torch.inference_mode()
def our_rows(model: DecoderForCausalLM, given: Given) -> Tensor:
    assert model.tower is not None
    rows: Tensor = model.tower(given).rows
    return rows.clone()


@pytest.mark.guarantee("Models compute what transformers computes")
@pytest.mark.parametrize("name", EVERY)
def test_encoders_are_transformers(name: str):
    expected = [their_rows(name, given) for given in givens(name)]
    for is_native in (True, False):
        model = new_model(name, is_native=is_native)
        found = [our_rows(model, given) for given in givens(name)]
        assert max(map(relative_error, found, expected)) < TOLERANCE
        # Nothing is left of the inputs before.
        assert torch.equal(our_rows(model, givens(name)[0]), found[0])


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_give_encoders_the_same_bits(name: str, dtype: torch.dtype):
    model, given = new_model(name, dtype=dtype), givens(name)[1]
    found = []
    for number in (1, 2):
        with threads(number):
            found.append(our_rows(model, given))
    assert found[0].dtype == dtype
    assert torch.equal(*found)


UNSEEN = (
    *("models", "defaults", "required", "newer", "encoder", "file_keys", "head", "norms.eps", "norms.eps_key"),
    *("names.head", "names.embedding_copies", "names.ignored", "names.optional_prefix", "names.parts"),
    # Of classifiers: tests/scenarios/test_decoder_classifiers.py.
    *("names.aliases", "names.classifier", "names.head_dense"),
)
"""Entries that have tests of their own, or are of all files alike."""
UNSEEN_IN = {
    "t5": ("attention.qkv_bias", "attention.output_bias", "feed_forward.bias", "feed_forward.activation_words"),
    "whisper": ("embedding.root_key", "names.embedding"),
}
"""Those that files of this kind have not, or that differ from the plain row's in words alone."""


@pytest.mark.gate("t5", "bart")
@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize("name", WITH_CONTROLS)
def test_comparison_detects_changed_encoder_rows(name: str, monkeypatch: pytest.MonkeyPatch):
    """With one entry as the plain row has it."""
    part, given = config_of(name).encoder_part, givens(name)[-1]
    assert part is not None
    row = replace(ENCODER_PARTS[part.stack.architecture], variants=())
    expected, unnoticed = their_rows(name, given), []
    for entry, changed in entries(row, Family(), *UNSEEN, *UNSEEN_IN.get(name, ())):
        with monkeypatch.context() as patch:
            patch.setitem(ENCODER_PARTS, part.stack.architecture, changed)
            try:
                error = relative_error(our_rows(new_model(name, is_native=False), given), expected)
            except (CheckpointError, ModelConfigError, AssertionError, KeyError, RuntimeError):
                continue
        if not error > 10 * TOLERANCE:
            unnoticed.append(entry)
    assert unnoticed == []


@pytest.mark.matrix
@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_comparison_detects_changed_encoder_epsilon(name: str, monkeypatch: pytest.MonkeyPatch):
    """With rows so small that it counts."""
    reference, given = deepcopy(cross_reference(name)), givens(name)[-1]
    state = {
        each: tensor * 0.004 if "embed" in each or "shared" in each or "conv2" in each else tensor
        for each, tensor in reference.state_dict().items()
    }
    reference.load_state_dict(state)
    errors, row = [], ENCODER_PARTS[f"{CASES[name][0]}Encoder"]
    for eps in (row.norms.eps, 1e-6):
        changed = replace(row, norms=replace(row.norms, eps=eps))
        monkeypatch.setitem(ENCODER_PARTS, f"{CASES[name][0]}Encoder", changed)
        model = new_model(name)
        model.load_weights(state.items())
        errors.append(relative_error(our_rows(model, given), their_rows(name, given, reference)))
    assert errors[0] < TOLERANCE
    assert errors[1] > 10 * TOLERANCE


@pytest.mark.parametrize("name", FEW)
def test_every_rank_has_the_encoder(name: str):
    given, expected = givens(name)[1], our_rows(new_model(name), givens(name)[1])
    for rows in on_ranks(2, lambda group: our_rows(new_model(name, group=group), given)):
        assert torch.equal(rows, expected)
    first = build_model(context(), config_of(name), Stage(0, 1, is_first=True, is_last=False))
    later = build_model(context(), config_of(name), Stage(1, 3, is_first=False, is_last=True))
    assert first.tower is not None
    assert later.tower is None
    assert first.weights.tensors == later.weights.tensors


@pytest.mark.parametrize("name", FEW)
def test_all_tensors_are_viewed_and_replaced(name: str):
    """By the names of the file, as trainers pass them, and with copies that transformers ties."""
    model, tensors = new_model(name), load_file(cross_folder(name) / "model.safetensors")
    with model.as_checkpoint() as view:
        shown = dict(view.named_parameters())
        assert {*tensors} <= {*shown}
        assert all(torch.equal(shown[each], tensor) for each, tensor in tensors.items())
    before = our_rows(model, givens(name)[1])
    is_encoder = {each: "encoder" in each or "shared" in each for each in tensors}
    assert model.load_weights([(each, tensor * (1 + is_encoder[each])) for each, tensor in tensors.items()])
    assert not torch.equal(our_rows(model, givens(name)[1]), before)
    reference = cross_reference(name)
    state = {**reference.state_dict(), **dict(reference.named_parameters(remove_duplicate=False))}
    assert model.load_weights(state.items()) == {*tensors}
    assert torch.equal(our_rows(model, givens(name)[1]), before)


def written(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text((cross_folder("bart") / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_files_may_have_copies_of_the_embedding(tmp_path: Path):
    tensors, given = load_file(cross_folder("bart") / "model.safetensors"), givens("bart")[1]
    expected, table = our_rows(new_model("bart"), given), tensors.pop(EMBEDDING)
    copies = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    for each in copies:
        alone = written(tmp_path / each, {**tensors, each: table})
        assert torch.equal(our_rows(new_model("bart", alone), given), expected)
    every = {**tensors, EMBEDDING: table} | {each: table.clone() for each in copies}
    assert torch.equal(our_rows(new_model("bart", written(tmp_path / "every", every)), given), expected)
    # A saved model has the embedding alone: copies would keep what it was before an update.
    assert SourceTensors(tmp_path / "every", new_model("bart").weights, is_read=True).unused == []
    short = {each.removeprefix("model."): tensor for each, tensor in {**tensors, EMBEDDING: table}.items()}
    assert torch.equal(our_rows(new_model("bart", written(tmp_path / "short", short)), given), expected)


@pytest.mark.matrix
def test_tables_of_computed_positions_may_be_missing(tmp_path: Path):
    """Files of some releases have them, as Marian's of others."""
    folder, given = cross_folder("pegasus"), givens("pegasus")[1]
    tensors = load_file(folder / "model.safetensors")
    computed = SinusoidalPositions(context(), replace(config_of("pegasus"), sinusoid="exact"))(torch.arange(96), None)
    names = [f"model.{part}.embed_positions.weight" for part in ("encoder", "decoder")]
    found = []
    for label, changes in (("with", dict.fromkeys(names, computed)), ("without", {})):
        kept = {each: tensor for each, tensor in tensors.items() if each not in names} | changes
        (tmp_path / label).mkdir()
        (tmp_path / label / "config.json").write_text((folder / "config.json").read_text())
        save_file({each: tensor.clone() for each, tensor in kept.items()}, tmp_path / label / "model.safetensors")
        model = new_model("pegasus", tmp_path / label)
        assert (model.model_config.sinusoid == "exact") == (label == "without")
        found.append(our_rows(model, given))
    assert torch.equal(*found)


def test_files_without_bias_of_logits_are_read(tmp_path: Path):
    tensors = load_file(cross_folder("bart") / "model.safetensors")
    assert config_of("bart").has_head_bias
    tensors.pop("final_logits_bias")
    folder = written(tmp_path / "plain", tensors)
    assert not read_model_files(folder).model_config.has_head_bias
    assert torch.equal(
        our_rows(new_model("bart", folder), givens("bart")[1]), our_rows(new_model("bart"), givens("bart")[1])
    )


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("model.encoder.layers.1.fc1.weight", "missing from the checkpoint"),
        (EMBEDDING, "missing from the checkpoint"),
        ("model.encoder.layers.9.fc1.weight", "not in the model"),
        ("model.encoder.other.weight", "not in the model"),
    ],
)
def test_files_of_other_encoders_are_rejected(name: str, rule: str, tmp_path: Path):
    tensors = load_file(cross_folder("bart") / "model.safetensors")
    if tensors.pop(name, None) is None:
        tensors[name] = torch.zeros(2)
    with pytest.raises(CheckpointError, match=rule) as raised:
        new_model("bart", written(tmp_path / "other", tensors))
    assert name in str(raised.value)
    if "missing" not in rule:
        with pytest.raises(CheckpointError, match="no such weight"):
            new_model("bart").load_weights([(name, torch.zeros(2))])


def test_head_of_t5_is_that_of_the_files(tmp_path: Path):
    """transformers' newer releases write that it is tied where it is not."""
    folder = cross_folder("t5 with gates")
    tensors = load_file(folder / "model.safetensors")
    assert config_of("t5 with gates").has_tied_embeddings
    tensors["lm_head.weight"] = tensors["shared.weight"] + 1
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = new_model("t5 with gates", tmp_path)
    assert not model.model_config.has_tied_embeddings
    with model.as_checkpoint() as view:
        assert torch.equal(dict(view.named_parameters())["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.parametrize("name", EVERY)
def test_planned_parameters_are_those_of_encoders(name: str):
    config, meta = config_of(name), replace(context(), device=torch.device("meta"))
    model = build_model(meta, config)
    assert model.tower is not None
    decoder = {id(each) for each in model.model.parameters()}
    own = sum(each.numel() for each in model.tower.parameters() if id(each) not in decoder)
    assert config.num_tower_parameters == own
    group = GroupHandle(ranks=(0, 1), rank=0, group=None)
    shard = build_model(replace(meta, tensor_group=group), config)
    planned = weights_bytes(config, RankLayout(2), 0, "float32", "cuda")
    assert planned == 4 * sum(each.numel() for each in shard.parameters())
    assert activation_bytes(config, RankLayout(1), 0, "float32", 8, 1, num_tower_rows=(4096,)) > 4 * 4096 * 64


@pytest.mark.parametrize("name", EVERY)
def test_dummy_weights_fill_encoders(name: str):
    def run(group: GroupHandle | None = None) -> Tensor:
        model = build_model(replace(context(), tensor_group=group or single_group()), config_of(name))
        model.weights.fill(model.weights.dummy())
        model.pack_weights()
        return our_rows(model, givens(name)[0])

    alone = run()
    assert alone.isfinite().all()
    if name in FEW:
        assert all(torch.equal(each, alone) for each in on_ranks(2, run))
