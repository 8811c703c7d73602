"""Two towers in one model against transformers: features, rows, positions, names of weights, memory."""

import json
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hearing_models import RATE, recording
from media_models import noise
from omni_models import (
    KINDS,
    Given,
    omni_folder,
    omni_reference,
    text_of,
    their_features,
    their_inputs,
    their_positions,
    their_rows,
    thinker_folder,
)
from our_model import load_model
from safetensors.torch import load_file
from torch import Tensor

from spmd_worker.base.config.schema import ModelOptions, RowLimits, RunConfig
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.compat.image_prompts import ImagePrompts, MediaPrompt
from spmd_worker.compat.image_reading import open_image_prompts
from spmd_worker.media.errors import MediaError
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.towers import audio
from spmd_worker.model.towers.tower import TwoTowers
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.resolved import ResolvedRun, resolve_run
from spmd_worker.tokenizer.tokenizer import Tokenizer
from spmd_worker.worker.memory.estimate import tower_bytes
from spmd_worker.worker.runner.image_layout import position_delta, rope_positions

TOLERANCE = 2e-5
PICTURES = [noise(97, 61, 3), noise(130, 257, 4)]
LENGTHS = (20_000, 9_001, 961, 16_000, 16_001, 48_160, 64_000)
"""Windows of Qwen2.5-Omni's small model have 16,000 samples, chunks of Qwen3-Omni's too."""
SHORTEST = {"qwen2_5_omni": 321, "qwen3_omni": 400}
A, B, P, Q = (recording(20_000, 1), recording(9_001, 2), *PICTURES)
MIXED: list[list[Given]] = [
    [("image", P), ("audio", A), ("image", Q), ("audio", B)],
    [("audio", B), ("audio", A), ("image", Q)],
    [("image", Q), ("image", P), ("audio", A)],
    [("audio", A), ("image", P), ("audio", B), ("audio", B), ("image", P)],
]


@cache
def resolved_of(kind: str) -> ResolvedRun:
    return resolve_run(RunConfig(model=ModelOptions(path=str(omni_folder(kind)), dtype="float32")), "cpu")


@cache
def prompts_of(kind: str) -> ImagePrompts:
    found = open_image_prompts(resolved_of(kind))
    assert found is not None
    return found


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Any:
    yield
    for kind in KINDS:
        prompts_of(kind).preparer.close()


@cache
def model_of(kind: str) -> DecoderForCausalLM:
    return load_model(omni_folder(kind), resolved_of(kind).model_config)


def prepared(kind: str, medium: Any, given: Any) -> PreparedMedia:
    (found,) = prompts_of(kind).prepare([given], [medium])
    return found


@torch.inference_mode()
def rows_of(model: DecoderForCausalLM, content: Any) -> list[Tensor]:
    assert model.tower is not None
    made = model.tower(content)
    return [made.rows.clone(), *[each.clone() for each in made.added]]


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest, relative to the largest number of each."""
    pairs = list(zip(ours, theirs, strict=True))
    assert all(own.shape == other.shape for own, other in pairs), pairs
    return max(float((own - other).abs().max() / other.abs().max()) for own, other in pairs)


@pytest.mark.gate("qwen2_5_omni")
@pytest.mark.parametrize("kind", KINDS)
def test_features_and_tokens_equal_those_of_transformers(kind: str):
    for length in (*LENGTHS, SHORTEST[kind]):
        found, theirs = prepared(kind, "audio", recording(length)), their_features(kind, recording(length))
        features = found.content.features
        assert features.shape == theirs.shape
        assert np.abs(features - theirs).max() < 2e-6
        assert len(their_rows(kind, "audio", recording(length))[0]) == found.num_rows


@pytest.mark.guarantee("Rows of a model's two towers are those of transformers")
@pytest.mark.parametrize("kind", KINDS)
def test_rows_equal_those_of_transformers(kind: str):
    model = model_of(kind)
    for medium, given in [("image", each) for each in PICTURES] + [("audio", recording(each)) for each in LENGTHS]:
        found = rows_of(model, prepared(kind, medium, given).content)
        assert difference(found, their_rows(kind, medium, given)) < TOLERANCE
        assert all(torch.equal(*each) for each in zip(found, rows_of(model, prepared(kind, medium, given).content)))


CONTROLS: dict[str, list[dict[str, Any]]] = {
    "qwen2_5_omni": [{"eps": 0.1}, {"activation": "relu"}, {"num_heads": 1}],
    "qwen3_omni": [{"eps": 0.1}, {"activation": "relu"}, {"num_heads": 1}],
}


@pytest.mark.gate("qwen2_5_omni")
@pytest.mark.control("Rows of a model's two towers are those of transformers")
@pytest.mark.parametrize("kind", KINDS)
def test_comparison_detects_changed_numbers_of_either_tower(kind: str):
    config = resolved_of(kind).model_config
    for changes in CONTROLS[kind]:
        changed = load_model(omni_folder(kind), with_towers(config, **changes))
        for medium, given in (("image", P), ("audio", A)):
            found = rows_of(changed, prepared(kind, medium, given).content)
            assert difference(found, their_rows(kind, medium, given)) > 10 * TOLERANCE, (changes, medium)


@pytest.mark.control("Rows of a model's two towers are those of transformers")
def test_comparison_detects_a_missing_last_frame(monkeypatch: pytest.MonkeyPatch):
    """A row is made of the last frame and of zeros behind it."""
    content, model = prepared("qwen2_5_omni", "audio", A).content, model_of("qwen2_5_omni")
    monkeypatch.setattr(audio.WhisperTower, "_embedded", lambda tower, window: tower.frames(window)[:-1])
    assert model.tower is not None
    with torch.inference_mode():
        rows = model.tower(content).rows
    expected = their_rows("qwen2_5_omni", "audio", A)[0]
    assert rows.shape != expected.shape or (rows - expected).abs().max() > 1e-3


def with_towers(config: ModelConfig, **changes: Any) -> ModelConfig:
    assert config.vision is not None
    parts = [replace(each, tower=replace(each.tower, **changes)) for each in config.vision.parts if each.tower]
    return replace(config, vision=replace(parts[0], beside=replace(parts[1], beside=None)))


def prompt_of(kind: str, media: list[Given]) -> MediaPrompt:
    prompts, (media_names, sources) = prompts_of(kind), zip(*media, strict=True)
    tokenizer = Tokenizer.open(omni_folder(kind))
    made = prompts.prepare(sources, media_names)  # type: ignore[arg-type]  # names of media
    return prompts.of_text(text_of(kind, media), made, partial(tokenizer.encode, add_special_tokens=False))


@pytest.mark.guarantee("Positions of images and recordings in one prompt are those of transformers")
@pytest.mark.parametrize("media", MIXED)
@pytest.mark.parametrize("kind", KINDS)
def test_positions_equal_those_of_transformers(kind: str, media: list[Given]):
    made, expected = prompt_of(kind, media), their_positions(kind, media)
    assert list(made.token_ids) == their_inputs(kind, media)["input_ids"][0].tolist()
    found = torch.from_numpy(rope_positions(made.items, 0, len(made.token_ids)))
    assert torch.equal(found, expected)
    assert position_delta(made.items) == int(expected.max()) + 1 - len(made.token_ids)
    # Media come in the order of the prompt.
    assert [each.media_id for each in made.media] == [item.media_id for item in made.items]


@pytest.mark.control("Positions of images and recordings in one prompt are those of transformers")
@pytest.mark.parametrize("kind", KINDS)
def test_comparison_detects_other_orders_and_grids(kind: str):
    made, expected = prompt_of(kind, MIXED[0]), their_positions(kind, MIXED[0])
    count = len(made.token_ids)
    # A recording with the positions of a picture; pictures in one another's place; no pictures at all.
    first, second, third, last = made.items
    heard = replace(second, grid=(1, second.num_rows))
    for items in ((first, heard, third, last), (replace(first, grid=first.grid[::-1]), second, third, last), ()):
        assert not np.array_equal(rope_positions(items, 0, count), expected.numpy())


@pytest.mark.gate("qwen3_omni")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_go_by_the_names_of_files_and_memory(kind: str):
    model, files = load_model(omni_folder(kind), resolved_of(kind).model_config), weights_of(omni_folder(kind))
    names = {ours: each for each, tensor in files.items() for ours in model.weights.names.parts(each, tensor.shape)}
    with model.as_checkpoint() as view:
        assert all(torch.equal(tensor, files[names[each]]) for each, tensor in view.named_parameters())
    contents = [prepared(kind, medium, given).content for medium, given in (("image", P), ("audio", A))]
    before = [rows_of(model, each) for each in contents]
    memory = omni_reference(kind).state_dict()
    for prefix in ("", "thinker."):
        model.load_weights([(each, -tensor) for each, tensor in memory.items()])
        changed = [rows_of(model, each) for each in contents]
        assert not any(torch.equal(own[0], old[0]) for own, old in zip(changed, before))
        model.load_weights([(prefix + each, tensor) for each, tensor in memory.items()])
        after = [rows_of(model, each) for each in contents]
        assert all(torch.equal(*each) for own, old in zip(after, before) for each in zip(own, old))


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Tensors of the thinker that text, images and audio need."""
    left_out = r"(talker|token2wav|code2wav)\..*|thinker\.audio_tower\.audio_bos_eos_token\.weight"
    found = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in found.items() if not re.fullmatch(left_out, name)}


@pytest.mark.gate("qwen3_omni")
@pytest.mark.parametrize("kind", KINDS)
def test_thinker_alone_is_the_same_model(kind: str):
    config = read_model_files(thinker_folder(kind), with_images=True, with_audio=True).model_config
    whole = read_model_files(omni_folder(kind), with_images=True, with_audio=True).model_config
    assert replace(config, architecture=whole.architecture) == whole
    found = load_model(thinker_folder(kind), config)
    with found.as_checkpoint() as ours, model_of(kind).as_checkpoint() as theirs:
        weights = dict(theirs.named_parameters())
        assert {name for name, weight in ours.named_parameters() if torch.equal(weight, weights[name])} == {*weights}


@pytest.mark.gate("qwen2_5_omni")
@pytest.mark.parametrize("kind", KINDS)
def test_each_medium_has_its_own_limit(kind: str):
    both = resolved_of(kind)
    assert both.model_config.media == ("image", "audio")
    for limits, media in (
        (RowLimits(max_images=0), ["audio"]),
        (RowLimits(max_audios=0), ["image"]),
        (RowLimits(max_images=0, max_audios=0), []),
    ):
        resolved = resolve_run(replace(both.config, limits=limits), "cpu")
        vision, prompts = resolved.model_config.vision, open_image_prompts(resolved)
        assert ([] if vision is None else [each.medium for each in vision.parts]) == media
        assert ([] if prompts is None else [each.name for each in prompts.media]) == media
        tower = load_model(omni_folder(kind), resolved.model_config).tower
        assert (tower is None, isinstance(tower, TwoTowers)) == (not media, False)


@pytest.mark.parametrize(
    ("kind", "length", "code"), [("qwen2_5_omni", 320, "audio_empty"), ("qwen2_5_omni", 64_001, "audio_too_long")]
)
def test_unusable_lengths_are_errors(kind: str, length: int, code: str):
    with pytest.raises(MediaError, match="recording 0") as caught:
        prepared(kind, "audio", (recording(length), RATE))
    assert caught.value.code == code


@pytest.mark.parametrize("kind", KINDS)
def test_towers_have_the_planned_parameters(kind: str):
    config = resolved_of(kind).model_config
    model = model_of(kind)
    assert model.tower is not None
    assert isinstance(model.tower, TwoTowers)
    assert config.vision is not None
    assert config.num_tower_parameters == sum(each.numel() for each in model.tower.parameters())
    most = [
        tower_bytes(replace(config, vision=replace(each, beside=None)), "float32", 64) for each in config.vision.parts
    ]
    assert tower_bytes(config, "float32", 64, 64) == max(most)
    assert resolved_of(kind).most_tower_rows == (resolved_of(kind).largest_image, resolved_of(kind).max_audio_tokens)


@pytest.mark.parametrize(
    ("kind", "thinker", "words"),
    [
        ("qwen2_5_omni", 4, "thinker_config=4 must be an object"),
        ("qwen2_5_omni", {"audio_config": {"n_window": 33}}, "audio_config.n_window=33 must be whole seconds"),
        ("qwen2_5_omni", {"audio_config": {"n_window": 1600}}, "audio_config.n_window=1600 must be at most"),
        ("qwen2_5_omni", {"audio_config": {"output_dim": 7}}, "audio_config.output_dim=7 is not the hidden size"),
        ("qwen2_5_omni", {"audio_token_index": "x"}, "audio_token_index='x' must be a whole number"),
        ("qwen3_omni", {"audio_config": {"n_window": 33}}, "audio_config.n_window=33"),
        ("qwen3_omni", {"audio_config": []}, "audio_config=[] must be an object"),
        ("qwen3_omni", {"vision_config": {"out_hidden_size": 7}}, "vision_config.out_hidden_size=7 is not the hidden"),
        ("qwen3_omni", {"image_token_id": None, "audio_token_id": []}, "audio_token_id=[] must be a whole number"),
    ],
)
def test_broken_configs_name_the_key(kind: str, thinker: Any, words: str):
    given = json.loads((omni_folder(kind) / "config.json").read_text())
    if isinstance(thinker, dict):
        own = given["thinker_config"]
        merged = {key: {**own[key], **each} if isinstance(each, dict) else each for key, each in thinker.items()}
        thinker = {**own, **merged}
    with pytest.raises(ModelConfigError, match=re.escape(words)):
        model_config_of({**given, "thinker_config": thinker}, Path("config.json"), with_images=True, with_audio=True)
