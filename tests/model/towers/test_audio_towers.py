"""Towers of audio against transformers: features, rows, kernels, weights by name, memory, and what makes rows wrong."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hearing_models import (
    KINDS,
    RATE,
    hearing_folder,
    hearing_reference,
    original_folder,
    recording,
    their_features,
    their_rows,
)
from safetensors.torch import load_file
from torch import Tensor
from tower_memory import peak_of

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.media.audio_limits import AudioLimits
from spmd_worker.media.audio_process import _Conversation
from spmd_worker.media.audio_settings import AudioSettings, read_audio_settings
from spmd_worker.media.errors import MediaError
from spmd_worker.media.prepared import AudioFeatures
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model.towers import audio
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.native.library import native_library
from spmd_worker.ops.attention.cpu import CpuBackend
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.cpu.native import cpu_kernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group
from spmd_worker.tokenizer.bounded_process import PAYLOAD
from spmd_worker.worker.memory.estimate import tower_bytes

TOLERANCE = 2e-5
LENGTHS = (20_000, 9_001, 961, 31_999, 32_000)
IN_WINDOWS = ("voxtral", "glmasr", "audioflamingo3")
"""Kinds that hear more than their windows, which here are of 2 s."""


def lengths_of(kind: str) -> tuple[int, ...]:
    """The shortest, and such whose last windows are complete, have no token, or one, or several."""
    shortest = (1,) if kind == "voxtral" else () if kind == "glmasr" else (321,)
    return (*LENGTHS, *shortest, *((32_001, 32_321, 32_961, 64_000, 70_003) if kind in IN_WINDOWS else ()))


def config_of(kind: str, **changes: Any) -> ModelConfig:
    """The folder's config, with some numbers of its tower changed."""
    config = read_model_files(hearing_folder(kind), with_audio=True).model_config
    vision = config.vision
    assert vision is not None
    assert vision.tower is not None
    return replace(config, vision=replace(vision, tower=replace(vision.tower, **changes)))


def settings_of(kind: str) -> AudioSettings:
    vision = config_of(kind).vision
    assert vision is not None
    assert vision.audio is not None
    return read_audio_settings(hearing_folder(kind), vision.audio, kind, vision.merge_size)


def prepared(kind: str, num_samples: int, seed: int = 0) -> tuple[AudioFeatures, dict[str, Any]]:
    """A recording as the helper process prepares it."""
    settings = settings_of(kind)
    helper = _Conversation(settings, AudioLimits())
    answer = helper.answer({"shape": (1, num_samples), "rate": RATE, PAYLOAD: recording(num_samples, seed).tobytes()})
    if "code" in answer:
        raise MediaError(answer["code"], answer["message"])
    found = dict(helper.answer({"window": 0}))
    features = np.frombuffer(found[PAYLOAD], np.float32).reshape(settings.num_mel_bins, -1)
    return AudioFeatures(features), found


def new_model(
    kind: str, config: ModelConfig | None = None, *, is_native: bool = True, folder: Path | None = None
) -> DecoderForCausalLM:
    library = native_library()
    assert not isinstance(library, str), library
    attention = CpuBackend(library, torch.float32, (16,), 16) if is_native else SdpaBackend()
    kernels: Any = cpu_kernels(torch.float32)[0] if is_native else ReferenceKernels()
    context = LayerContext(single_group(), kernels, attention, torch.float32, torch.device("cpu"))
    model = build_model(context, config or config_of(kind))
    with model.weights.open(folder or hearing_folder(kind)) as source:
        model.weights.fill(source)
    model.pack_weights()
    return model


@torch.inference_mode()
def our_rows(model: DecoderForCausalLM, features: AudioFeatures) -> Tensor:
    assert model.tower is not None
    rows: Tensor = model.tower(features).rows
    return rows


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Relative to the largest number; infinite for another shape."""
    return math.inf if ours.shape != theirs.shape else float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_features_equal_those_of_transformers(kind: str):
    for length in lengths_of(kind):
        features, found = prepared(kind, length)
        theirs = their_features(kind, recording(length))[:, : features.sizes[1]]
        assert np.abs(features.features - theirs).max() < 2e-6
        assert len(their_rows(kind, recording(length))) == found["num_rows"]


@pytest.mark.guarantee("Rows of recordings are those of transformers")
@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_equal_those_of_transformers(kind: str, is_native: bool):
    model = new_model(kind, is_native=is_native)
    given = [prepared(kind, length)[0] for length in lengths_of(kind)]
    found = [our_rows(model, each) for each in given]
    for length, rows in zip(lengths_of(kind), found, strict=True):
        expected = their_rows(kind, recording(length))
        assert difference(rows[: len(expected)], expected) < TOLERANCE
        assert len(rows) == len(expected) or kind == "glmasr"
    # Nothing is left of the recordings before.
    assert torch.equal(our_rows(model, given[0]), found[0])


CONTROLS: dict[str, list[dict[str, Any]]] = {
    "qwen2_audio": [{"eps": 0.1}, {"activation": "silu"}, {"num_heads": 1}],
    "qwen3_asr": [{"eps": 0.1}, {"activation": "silu"}, {"num_heads": 1}, {"projector_activation": "silu"}],
    "voxtral": [{"eps": 0.1}, {"activation": "silu"}, {"num_heads": 1}, {"projector_activation": "silu"}],
    "glmasr": [{"eps": 0.1}, {"rotary_size": 16}, {"rope_theta": 9.0}, {"projector_activation": "silu"}],
    "audioflamingo3": [{"eps": 0.1}, {"activation": "silu"}, {"num_heads": 1}, {"projector_activation": "silu"}],
}


@pytest.mark.control("Rows of recordings are those of transformers")
@pytest.mark.parametrize("kind", KINDS)
def test_comparison_detects_changed_numbers(kind: str):
    features, expected = prepared(kind, 20_000)[0], their_rows(kind, recording(20_000))
    for changes in CONTROLS[kind]:
        rows = our_rows(new_model(kind, config_of(kind, **changes)), features)
        assert difference(rows[: len(expected)], expected) > 10 * TOLERANCE, changes


@pytest.mark.control("Rows of recordings are those of transformers")
def test_comparison_detects_heard_padding(monkeypatch: pytest.MonkeyPatch):
    """A row behind the last takes part in attention, or in the means."""
    features, expected = prepared("qwen2_audio", 20_000)[0], their_rows("qwen2_audio", recording(20_000))
    model = new_model("qwen2_audio")
    monkeypatch.setattr(audio, "_num_rows", lambda num_frames: num_frames // 2 + 1)
    rows = our_rows(model, features)
    assert difference(rows[: len(expected)], expected) > 10 * TOLERANCE


@pytest.mark.parametrize(("length", "code"), [(0, "audio_empty"), (320, "audio_empty"), (32_001, "audio_too_long")])
def test_unusable_lengths_are_errors(length: int, code: str):
    with pytest.raises(MediaError) as caught:
        prepared("qwen2_audio", length)
    assert caught.value.code == code


@pytest.mark.parametrize(("given", "window_s"), [(7, 6), (2, 2), (10**6, 654), ("x", 0), (1, 0)])
def test_processor_bounds_recordings_in_complete_windows(given: Any, window_s: int, tmp_path: Path):
    vision, extractor = config_of("glmasr").vision, (hearing_folder("glmasr") / "preprocessor_config.json").read_text()
    assert vision is not None
    assert vision.audio is not None
    processor = {"feature_extractor": json.loads(extractor), "max_audio_len": given}
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    if window_s:
        assert read_audio_settings(tmp_path, vision.audio, "glmasr", 4).window_s == window_s
    else:
        with pytest.raises(ModelConfigError, match="max_audio_len"):
            read_audio_settings(tmp_path, vision.audio, "glmasr", 4)


@pytest.mark.parametrize("kind", KINDS)
def test_media_ids_name_what_is_heard(kind: str):
    ids = [prepared(kind, *given)[1]["media_id"] for given in ((9_001, 1), (9_001, 1), (9_001, 2), (20_000, 1))]
    assert ids[0] == ids[1]
    assert len({*ids}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_weights_go_by_the_names_of_files_and_memory(kind: str):
    model, files = new_model(kind), load_file(hearing_folder(kind) / "model.safetensors")
    names = {ours: each for each, tensor in files.items() for ours in model.weights.names.parts(each, tensor.shape)}
    with model.as_checkpoint() as view:
        assert all(torch.equal(tensor, files[names[each]]) for each, tensor in view.named_parameters())
    features, memory = prepared(kind, 9_001)[0], hearing_reference(kind).state_dict()
    before = our_rows(model, features)
    model.load_weights([(each, -tensor) for each, tensor in memory.items()])
    assert not torch.equal(our_rows(model, features), before)
    model.load_weights(list(memory.items()))
    assert torch.equal(our_rows(model, features), before)


def test_original_files_have_the_same_model():
    """Qwen's own form of Qwen3-ASR: another naming of configuration and weights."""
    folder = original_folder()
    config = read_model_files(folder, with_audio=True).model_config
    assert config == config_of("qwen3_asr")
    assert config.vision is not None
    assert config.vision.audio is not None
    assert read_audio_settings(folder, config.vision.audio, "qwen3_asr") == settings_of("qwen3_asr")
    found, expected = new_model("qwen3_asr", config, folder=folder), new_model("qwen3_asr")
    with found.as_checkpoint() as ours, expected.as_checkpoint() as theirs:
        weights = dict(theirs.named_parameters())
        assert {name for name, weight in ours.named_parameters() if torch.equal(weight, weights[name])} == {*weights}


@pytest.mark.parametrize(
    ("thinker", "words"),
    [
        (4, "thinker_config=4 must be an object"),
        ({"classify_num": 5000}, "thinker_config.classify_num=5000 is of a model that finds the times"),
        ({"text_config": []}, "thinker_config.text_config=[] must be an object"),
        ({"audio_config": {"n_window": 70, "output_dim": 64}}, "audio_config.n_window=70"),
        ({"audio_config": {"model_type": ["x"]}}, "audio_config.model_type"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type='llama' is not supported"),
    ],
)
def test_broken_original_configs_name_the_key(thinker: Any, words: str):
    given = json.loads((original_folder() / "config.json").read_text())
    if isinstance(thinker, dict):
        thinker = {**given["thinker_config"], **thinker}
    with pytest.raises(ModelConfigError, match=re.escape(words)):
        model_config_of({**given, "thinker_config": thinker}, Path("config.json"), with_audio=True)


@pytest.mark.parametrize("kind", KINDS)
def test_text_alone_has_no_tower(kind: str):
    config = read_model_files(hearing_folder(kind), with_images=True).model_config
    assert (config.vision, config.hears) == (None, True)
    assert new_model(kind, config).tower is None


@pytest.mark.parametrize("kind", KINDS)
def test_towers_stay_below_the_plan(kind: str):
    inner = {"projector_size": 512} if kind == "qwen3_asr" else {}
    config = config_of(kind, hidden_size=512, intermediate_size=1024, num_heads=8, **inner)
    most, num_rows, num_parameters = peak_of(config, prepared(kind, 32_000)[0], torch.bfloat16)
    assert config.num_tower_parameters == num_parameters
    assert 0.3 < most / tower_bytes(config, "bfloat16", num_rows) < 1
